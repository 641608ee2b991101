//! Each phase of a request has a timeout.

use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;

use crate::common::{Echo, HELLO, PATIENCE, Peer, body, get, header, json, once, start, status};

/// An upstream that accepts and never answers.
async fn silent() -> (TcpListener, std::net::SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn timeouts(line: &str) -> String {
    format!("[inbound.timeouts]\n{line}\n")
}

#[tokio::test]
async fn a_slow_head_times_out() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &timeouts("header = \"300ms\"")).await;
    let mut client = Peer::connect(gate.inbound).await;
    // Each byte arrives in time, but the whole head doesn't.
    for byte in "GET / HTTP/1.1\r\nhost: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".as_bytes().chunks(1) {
        if tokio::io::AsyncWriteExt::write_all(&mut client.stream, byte).await.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(15)).await;
    }
    let answer = client.message().await;
    assert_eq!((status(&answer), header(&answer, "connection")), (408, Some("close")));
    assert!(body(&answer).starts_with("{\"error\":\"Request Timeout\"") && body(&answer).ends_with('}'), "{answer}");
    assert!(client.ends().await);

    let state = json(&once(gate.admin, get("/v1/state")).await);
    assert_eq!(state["rejections"]["head_timeout"], 1, "{state}");

    // A silent connection is closed without a response.
    assert!(Peer::connect(gate.inbound).await.ends().await);
}

#[tokio::test]
async fn an_idle_connection_is_closed() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &timeouts("idle = \"200ms\"\nheader = \"10s\"")).await;
    let mut client = Peer::connect(gate.inbound).await;
    assert_eq!(status(&client.ask(get("/")).await), 200);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(status(&client.ask(get("/")).await), 200);
    assert!(client.ends().await);
}

#[tokio::test]
async fn a_stalled_request_body_times_out() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &timeouts("body = \"200ms\"")).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nhello").await;
    let answer = client.message().await;
    assert_eq!((status(&answer), header(&answer, "connection")), (408, Some("close")));
    assert!(client.ends().await);
}

#[tokio::test]
async fn a_slow_progressing_body_is_accepted() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, &timeouts("body = \"300ms\"\nresponse = \"300ms\"")).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n").await;
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        client.send("x").await;
    }
    assert_eq!(status(&client.message().await), 200);
}

#[tokio::test]
async fn an_upstream_without_response_times_out() {
    let (_listener, address) = silent().await;
    let gate = start(address, &timeouts("response = \"200ms\"")).await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..2 {
        let answer = client.ask(get("/")).await;
        assert_eq!(status(&answer), 504);
        assert_eq!(
            body(&answer),
            "{\"error\":\"Gateway Timeout\",\"message\":\"the upstream did not answer in time\"}"
        );
    }
}

/// Without a bound, the gate would read them until the timeout of the response.
#[tokio::test]
async fn endless_informational_replies_are_a_502() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let mut peer = Peer::over(listener.accept().await.unwrap().0);
            tokio::spawn(async move {
                peer.message().await;
                let replies = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(100);
                while tokio::io::AsyncWriteExt::write_all(&mut peer.stream, replies.as_bytes()).await.is_ok() {}
            });
        }
    });
    let gate = start(upstream, "[inbound.timeouts]\nresponse = \"5m\"\n").await;
    assert_eq!(status(&once(gate.inbound, get("/")).await), 502);
    // The usual number of them, and more, is read past, for each request of a connection.
    let early = "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(16);
    let upstream = Echo::start(format!("{early}{HELLO}").leak()).await;
    let gate = start(upstream.address, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..3 {
        assert_eq!(status(&client.ask(get("/")).await), 200);
    }
}

#[tokio::test]
async fn an_upstream_not_reading_the_body_times_out() {
    let (_listener, address) = silent().await;
    let gate = start(address, &timeouts("body = \"300ms\"")).await;
    let client = Peer::connect(gate.inbound).await;
    let (mut read, mut write) = client.stream.into_split();
    let sending = tokio::spawn(async move {
        use tokio::io::AsyncWriteExt as _;
        let _ = write.write_all(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000\r\n\r\n").await;
        let chunk = vec![0; 64 << 10];
        while write.write_all(&chunk).await.is_ok() {}
    });
    let mut text = [0; 32];
    tokio::time::timeout(PATIENCE, read.read_exact(&mut text)).await.unwrap().unwrap();
    assert!(text.starts_with(b"HTTP/1.1 504 "), "{}", String::from_utf8_lossy(&text));
    sending.abort();
}

#[tokio::test]
async fn a_stalled_response_closes_the_connection() {
    let upstream = Echo::start("HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello").await;
    let gate = start(upstream.address, &timeouts("body = \"200ms\"")).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/")).await;
    let got = client.all().await;
    assert!(got.ends_with("\r\n\r\nhello"), "what came is passed on, and then the connection breaks: {got}");
}

#[tokio::test]
async fn an_unreachable_upstream_gives_502_or_504() {
    // No host answers in this network (RFC 5737). If a router reports that at once, the status is 502.
    let address = std::net::SocketAddr::from(([192, 0, 2, 1], 80));
    let gate = start(address, &timeouts("connect = \"200ms\"")).await;
    let answer = Peer::connect(gate.inbound).await.ask(get("/")).await;
    assert!(matches!(status(&answer), 502 | 504), "{answer}");
}

#[tokio::test]
async fn an_idle_tunnel_is_closed() {
    let upstream = Echo::start("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n").await;
    let gate = start(upstream.address, &timeouts("idle = \"300ms\"")).await;
    let mut client = Peer::connect(gate.inbound).await;
    let answer = client.ask("GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n").await;
    assert_eq!(status(&answer), 101);
    for _ in 0..5 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        client.send("x").await;
    }
    assert!(client.ends().await);
}
