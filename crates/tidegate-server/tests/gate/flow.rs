//! The address that a request counts for, the action that it matches, and the body of a refused request.

use crate::common::{Echo, HELLO, Peer, body, get, header, nobody, once, post, start, status};

const ONE: &str = "[inbound.action.one]\nmatch = { path = \"/one\" }\nlimit = \"1 per 60s\"\n";

#[tokio::test]
async fn clients_behind_trusted_proxies_count_separately() {
    let upstream = Echo::start(HELLO).await;
    let from = |address: &str| format!("GET /one HTTP/1.1\r\nhost: a\r\nx-forwarded-for: {address}\r\n\r\n");
    let gate = start(upstream.address, ONE).await;
    assert_eq!(status(&once(gate.inbound, from("203.0.113.1")).await), 200);
    assert_eq!(status(&once(gate.inbound, from("203.0.113.2")).await), 429, "an untrusted peer is not believed");

    let gate = start(upstream.address, &format!("[inbound]\ntrusted_proxies = [\"127.0.0.0/8\"]\n{ONE}")).await;
    for (address, expected) in [
        ("203.0.113.1", 200),
        ("203.0.113.2", 200),
        ("198.51.100.1, 203.0.113.2", 429),
        ("203.0.113.2:4711, 127.0.0.9", 429),
        ("2001:db8::1", 200),
        ("2001:db8::ffff", 429),
        ("2001:db8:0:1::1", 200),
    ] {
        assert_eq!(status(&once(gate.inbound, from(address)).await), expected, "{address}");
    }
}

#[tokio::test]
async fn unmatched_requests_meet_only_the_global_limit() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &format!("[inbound.global]\nlimit = \"3 per 1h\"\n{ONE}")).await;
    let mut client = Peer::connect(gate.inbound).await;
    assert_eq!(status(&client.ask(get("/one")).await), 200);
    let answer = client.ask(get("/one?x")).await;
    assert_eq!((status(&answer), header(&answer, "ratelimit")), (429, Some("\"one\";r=0;t=60")));
    for expected in [200, 200, 429] {
        let answer = client.ask(get("/two")).await;
        assert_eq!(status(&answer), expected);
        assert_eq!(header(&answer, "ratelimit-policy"), Some("\"global\";q=3;w=3600"));
    }
}

/// gRPC clients read no status of HTTP and no body.
#[tokio::test]
async fn grpc_calls_end_with_statuses_of_grpc() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &format!("{ONE}[inbound.caps]\nbody = \"10B\"\n")).await;
    let call = |path: &str, more: &str, body: &str| {
        let kind = "content-type: application/grpc-web+proto";
        format!("POST {path} HTTP/1.1\r\nhost: a\r\n{kind}\r\n{more}content-length: {}\r\n\r\n{body}", body.len())
    };
    assert_eq!(status(&once(gate.inbound, call("/one", "", "abc")).await), 200);
    let away = start(nobody(), "").await;
    for (address, request, grpc_status, message, wait) in [
        (gate.inbound, call("/one", "", "abc"), "8", "Too many requests; retry after 60 s", Some("60")),
        (gate.inbound, call("/two", "host: b\r\n", ""), "3", "", None),
        (gate.inbound, call("/two", "", "more than ten"), "8", "", None),
        (away.inbound, call("/two", "", ""), "14", "", None),
    ] {
        let answer = once(address, &request).await;
        let told = [header(&answer, "grpc-status"), header(&answer, "content-type"), header(&answer, "retry-after")];
        assert_eq!(told, [Some(grpc_status), Some("application/grpc-web+proto"), wait], "{answer}");
        assert_eq!((status(&answer), body(&answer)), (200, ""), "{answer}");
        assert!(header(&answer, "grpc-message").unwrap().contains(message), "{answer}");
    }
}

#[tokio::test]
async fn small_refused_bodies_are_read_and_discarded() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.action.no]\nmatch = { path = \"/no\" }\nlimit = \"0 per 1s\"\n").await;

    // The connection stays open if the body comes with its head, and if it comes after the response.
    let mut client = Peer::connect(gate.inbound).await;
    assert_eq!(status(&client.ask(post("/no", "abc")).await), 429);
    client.send("POST /no HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\n").await;
    assert_eq!(status(&client.message().await), 429, "at once");
    client.send("hello").await;
    client.send("POST /no HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n").await;
    assert_eq!(status(&client.message().await), 429);
    client.send("3\r\nabc\r\n0\r\n\r\n").await;
    assert_eq!(status(&client.ask(get("/yes")).await), 200);
    assert_eq!(upstream.seen().len(), 1);

    // A large body isn't waited for.
    let mut client = Peer::connect(gate.inbound).await;
    client.send("POST /no HTTP/1.1\r\nhost: a\r\ncontent-length: 10000000\r\n\r\n").await;
    client.send(vec![b'x'; 200_000]).await;
    let answer = client.message().await;
    assert_eq!((status(&answer), header(&answer, "connection")), (429, Some("close")));

    // Nor is an endless body.
    let mut client = Peer::connect(gate.inbound).await;
    client.send("POST /no HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n").await;
    assert_eq!(status(&client.message().await), 429);
    client.send(format!("20000\r\n{}\r\n", "x".repeat(0x20000))).await;
    client.send(get("/yes")).await;
    assert!(client.ends().await);
}

#[tokio::test]
async fn refused_requests_receive_no_100_continue() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.action.no]\nmatch = { path = \"/no\" }\nlimit = \"0 per 1s\"\n").await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send("POST /no HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n").await;
    let answer = client.message().await;
    assert_eq!((status(&answer), header(&answer, "connection")), (429, Some("close")));
    assert!(client.ends().await);
}
