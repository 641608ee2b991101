//! Everything has a bound, and at the bound what is written happens.

use std::time::Duration;

use crate::common::{Echo, HELLO, Peer, body, get, header, post, start, status};

#[tokio::test]
async fn heads() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.caps]\nheader_bytes = \"8KiB\"\nheaders = 10\n").await;
    let fits = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(8000));
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(fits).await), 200);
    let large = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(8200));
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(large).await), 431);
    let endless = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}", "y".repeat(100_000));
    let mut client = Peer::connect(gate.inbound).await;
    let _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, endless.as_bytes()).await;
    assert_eq!(status(&client.message().await), 431);
    let lines = |count: usize| {
        let lines: String = (1..count).map(|number| format!("x-{number}: y\r\n")).collect();
        format!("GET / HTTP/1.1\r\nhost: a\r\n{lines}\r\n")
    };
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(lines(10)).await), 200);
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(lines(11)).await), 431);
}

#[tokio::test]
async fn bodies() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.caps]\nbody = \"1KiB\"\n").await;
    assert_eq!(status(&Peer::connect(gate.inbound).await.ask(post("/", &"x".repeat(1024))).await), 200);
    let mut client = Peer::connect(gate.inbound).await;
    let answer = client.ask(post("/", &"x".repeat(1025))).await;
    assert_eq!((status(&answer), header(&answer, "connection")), (413, Some("close")));
    assert_eq!(body(&answer), "{\"error\":\"Payload Too Large\",\"message\":\"the request's body is too large\"}");
    assert!(client.ends().await);
    assert_eq!(upstream.seen().len(), 1);

    let mut client = Peer::connect(gate.inbound).await;
    let chunk = format!("200\r\n{}\r\n", "x".repeat(0x200));
    client
        .send(format!(
            "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n{chunk}{chunk}1\r\nx\r\n0\r\n\r\n"
        ))
        .await;
    assert_eq!(status(&client.message().await), 413);
    assert!(client.ends().await);
    assert_eq!(upstream.seen().len(), 1, "the upstream never gets a whole request");
}

#[tokio::test]
async fn connections_wait_their_turn() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.caps]\nconnections = 2\n").await;
    let mut first = Peer::connect(gate.inbound).await;
    let mut second = Peer::connect(gate.inbound).await;
    assert_eq!(status(&first.ask(get("/")).await), 200);
    assert_eq!(status(&second.ask(get("/")).await), 200);
    let mut third = Peer::connect(gate.inbound).await;
    third.send(get("/")).await;
    assert!(tokio::time::timeout(Duration::from_millis(150), third.stream.readable()).await.is_err());
    drop(first);
    assert_eq!(status(&third.message().await), 200);
}

#[tokio::test]
async fn idle_upstream_connections() {
    // With none kept, each request gets a connection of its own.
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.caps]\npool_idle = 0\n").await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..3 {
        assert_eq!(status(&client.ask(get("/")).await), 200);
    }
    assert_eq!(upstream.seen().len(), 3);
}
