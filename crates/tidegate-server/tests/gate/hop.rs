//! Hop-by-hop headers on the wire.

use crate::common::{Echo, HELLO, Peer, get, once, start};

fn sorted(message: &str) -> Vec<String> {
    let (head, _) = message.split_once("\r\n\r\n").unwrap();
    let mut lines: Vec<String> =
        head.lines().skip(1).filter(|line| !line.starts_with("date: ")).map(str::to_owned).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn hop_headers_are_removed_from_requests() {
    let told = ["x-forwarded-for: 127.0.0.1", "x-forwarded-host: a", "x-forwarded-proto: http"];
    let table: &[(&[&str], &[&str])] = &[
        (&["accept: */*"], &["accept: */*"]),
        (&["connection: close"], &[]),
        (&["connection: x-a, x-b", "x-a: 1", "x-b: 2", "x-c: 3"], &["x-c: 3"]),
        (&["connection: x-a", "connection: x-b", "x-a: 1", "x-b: 2"], &[]),
        (&["connection: host, x-forwarded-for"], &[]),
        (&["keep-alive: 5", "proxy-connection: keep-alive", "proxy-authorization: Basic x"], &[]),
        (&["te: trailers", "connection: te"], &["connection: te", "te: trailers"]),
        (&["te: gzip;q=1"], &[]),
        (&["upgrade: h2c", "http2-settings: AAAA", "connection: upgrade, http2-settings"], &[]),
        (&["x-forwarded-for: 1.1.1.1", "x-forwarded-host: b", "x-forwarded-proto: https", "forwarded: for=x"], &[]),
        (
            &[
                "X_Forwarded_For: 1.1.1.1",
                "x-forwarded_for: 1.1.1.1",
                "x_forwarded-host: b",
                "X_FORWARDED_PROTO: https",
            ],
            &[],
        ),
        (&["x_forwarded: 1", "x_y: 2"], &["x_forwarded: 1", "x_y: 2"]),
        (&["authorization: Bearer t", "cookie: a=b"], &["authorization: Bearer t", "cookie: a=b"]),
    ];
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "").await;
    for (sent, expected) in table {
        let lines: String = sent.iter().map(|line| format!("{line}\r\n")).collect();
        once(gate.inbound, format!("GET / HTTP/1.1\r\nhost: a\r\n{lines}\r\n")).await;
        let seen = upstream.seen();
        let mut all: Vec<&str> = expected.iter().chain(&told).chain(&["host: a"]).copied().collect();
        all.sort_unstable();
        assert_eq!(sorted(seen.last().unwrap()), all, "{sent:?}");
    }
}

#[tokio::test]
async fn a_trusted_peers_forwarding_headers_are_extended() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound]\ntrusted_proxies = [\"127.0.0.0/8\"]\n").await;
    let lines = "x-forwarded-for: 203.0.113.9\r\nx-forwarded-proto: https\r\nx-forwarded-host: b\r\nforwarded: for=203.0.113.9\r\n";
    once(gate.inbound, format!("GET / HTTP/1.1\r\nhost: a\r\n{lines}\r\n")).await;
    assert_eq!(
        sorted(&upstream.seen()[0]),
        [
            "forwarded: for=203.0.113.9, for=127.0.0.1",
            "host: a",
            "x-forwarded-for: 203.0.113.9, 127.0.0.1",
            "x-forwarded-host: b",
            "x-forwarded-proto: https",
        ]
    );
}

#[tokio::test]
async fn hop_headers_are_removed_from_responses() {
    let upstream = Echo::start(
        "HTTP/1.1 200 OK\r\nconnection: keep-alive, x-a\r\nx-a: 1\r\nkeep-alive: timeout=5\r\nproxy-authenticate: x\r\n\
         upgrade: h2\r\nserver: other\r\nset-cookie: a=b\r\nset-cookie: c=d\r\ncontent-length: 0\r\n\r\n",
    )
    .await;
    let gate = start(upstream.address, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    let expected = ["content-length: 0", "server: other", "set-cookie: a=b", "set-cookie: c=d"];
    assert_eq!(sorted(&client.ask(get("/")).await), expected);
    assert_eq!(sorted(&client.ask(get("/")).await), expected, "the client's connection is its own matter");
}

#[tokio::test]
async fn upstream_close_keeps_the_client_connection() {
    let upstream = Echo::start("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok").await;
    let gate = start(upstream.address, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..3 {
        let answer = client.ask(get("/")).await;
        assert!(answer.ends_with("\r\n\r\nok") && !answer.contains("connection:"), "{answer}");
    }
}
