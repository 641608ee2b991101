//! Bodies are streamed: never collected, and never read faster than they are taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::common::{Echo, HELLO, PATIENCE, Peer, get, header, start, status};

const LARGE: u64 = 256 << 20;

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or_default() << 10
}

/// An upstream that reads `LARGE` bytes and sends the same number back, for each connection.
async fn large() -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut read, mut write) = stream.into_split();
                let mut buffer = vec![0; 64 << 10];
                let mut head = Vec::new();
                while !head.windows(4).any(|window| window == b"\r\n\r\n") {
                    let count = read.read(&mut buffer).await.unwrap();
                    head.extend_from_slice(&buffer[..count]);
                }
                if head.starts_with(b"POST") {
                    let at = head.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
                    let mut left = LARGE - (head.len() - at) as u64;
                    while left > 0 {
                        let count = read.read(&mut buffer).await.unwrap();
                        assert!(count > 0);
                        left -= count as u64;
                    }
                    write.write_all(HELLO.as_bytes()).await.unwrap();
                } else {
                    write
                        .write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n").as_bytes())
                        .await
                        .unwrap();
                    let mut left = LARGE;
                    while left > 0 {
                        let count = left.min(buffer.len() as u64) as usize;
                        if write.write_all(&buffer[..count]).await.is_err() {
                            return;
                        }
                        left -= count as u64;
                    }
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_use_little_memory() {
    let gate = start(large().await, "").await;
    let before = resident();
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/")).await;
    let mut buffer = vec![0; 64 << 10];
    let mut received = 0;
    while received < LARGE {
        let count = tokio::time::timeout(PATIENCE, client.stream.read(&mut buffer)).await.unwrap().unwrap();
        assert!(count > 0, "the body ends after {received} bytes");
        received += count as u64;
    }
    let mut client = Peer::connect(gate.inbound).await;
    client.send(format!("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {LARGE}\r\n\r\n")).await;
    let mut left = LARGE;
    while left > 0 {
        client.send(&buffer).await;
        left -= buffer.len() as u64;
    }
    assert_eq!(status(&client.message().await), 200);
    let grown = resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes more than before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_slows_the_upstream() {
    let written = Arc::new(AtomicU64::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let count = Arc::clone(&written);
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut peer = Peer::over(stream);
        peer.message().await;
        peer.send(format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n")).await;
        let chunk = vec![0; 64 << 10];
        while peer.stream.write_all(&chunk).await.is_ok() {
            count.fetch_add(chunk.len() as u64, Ordering::SeqCst);
        }
    });
    let gate = start(upstream, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/")).await;
    let mut last = u64::MAX;
    // Socket buffers fill up, and then no byte moves.
    let stalled = tokio::time::timeout(PATIENCE, async {
        loop {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let now = written.load(Ordering::SeqCst);
            if now == last && now > 0 {
                return now;
            }
            last = now;
        }
    });
    let stalled = stalled.await.expect("the upstream stalls");
    assert!(stalled < LARGE / 4, "{stalled} bytes went ahead of the reader");
    drop(client);
}

#[tokio::test]
async fn a_disconnected_client_cancels_its_upstream_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let gate = start(upstream, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/")).await;
    let (stream, _) = listener.accept().await.unwrap();
    let mut served = Peer::over(stream);
    served.message().await;
    drop(client);
    assert!(served.ends().await, "the upstream learns that the client is gone");
}

#[tokio::test]
async fn chunks_are_forwarded_immediately() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let gate = start(upstream, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send("POST / HTTP/1.1\r\nhost: a\r\nte: trailers\r\nconnection: te\r\ntrailer: x-up\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n").await;
    let (stream, _) = listener.accept().await.unwrap();
    let mut served = Peer::over(stream);
    let mut seen = String::new();
    let mut buffer = [0; 4096];
    while !seen.ends_with("2\r\nhi\r\n") {
        let count = served.stream.read(&mut buffer).await.unwrap();
        seen.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
    // The response begins before the request has ended.
    served.send("HTTP/1.1 200 OK\r\ntrailer: x-down\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n").await;
    let mut got = String::new();
    while !got.ends_with("3\r\none\r\n") {
        let count = client.stream.read(&mut buffer).await.unwrap();
        got.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
    client.send("3\r\nyou\r\n0\r\nX-Up: 1\r\n\r\n").await;
    let mut rest = String::new();
    while !rest.ends_with("\r\n\r\n") {
        let count = served.stream.read(&mut buffer).await.unwrap();
        assert!(count > 0);
        rest.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
    assert_eq!(rest, "3\r\nyou\r\n0\r\nx-up: 1\r\n\r\n");
    served.send("0\r\nX-Down: 2\r\n\r\n").await;
    let mut rest = String::new();
    while !rest.ends_with("\r\n\r\n") {
        let count = client.stream.read(&mut buffer).await.unwrap();
        assert!(count > 0);
        rest.push_str(std::str::from_utf8(&buffer[..count]).unwrap());
    }
    assert_eq!(rest, "0\r\nx-down: 2\r\n\r\n");
}

#[tokio::test]
async fn expect_continue_is_forwarded_to_the_upstream() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let gate = start(upstream, "").await;
    let ask = "POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n";

    // The upstream wants the body: only now the client gets its 100.
    let mut client = Peer::connect(gate.inbound).await;
    client.send(ask).await;
    let (stream, _) = listener.accept().await.unwrap();
    let mut served = Peer::over(stream);
    let mut buffer = [0; 4096];
    let count = served.stream.read(&mut buffer).await.unwrap();
    assert!(buffer[..count].ends_with(b"\r\n\r\n") && buffer[..count].windows(7).any(|window| window == b"expect:"));
    assert!(tokio::time::timeout(Duration::from_millis(100), client.stream.readable()).await.is_err(), "not yet");
    served.send("HTTP/1.1 100 Continue\r\n\r\n").await;
    assert_eq!(client.message().await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.send("abc").await;
    let count = served.stream.read(&mut buffer).await.unwrap();
    assert_eq!(&buffer[..count], b"abc");
    served.send(HELLO).await;
    assert_eq!(status(&client.message().await), 200);

    // The upstream refuses: the client never sends its body, and the connections end.
    let mut client = Peer::connect(gate.inbound).await;
    client.send(ask).await;
    let mut served = match tokio::time::timeout(Duration::from_millis(200), listener.accept()).await {
        Ok(accepted) => Peer::over(accepted.unwrap().0),
        Err(_) => served,
    };
    let count = served.stream.read(&mut buffer).await.unwrap();
    assert!(buffer[..count].starts_with(b"POST"));
    served.send("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n").await;
    let answer = client.message().await;
    assert_eq!((status(&answer), header(&answer, "connection")), (401, Some("close")));
    assert!(client.ends().await);
    assert!(served.ends().await);
}

#[tokio::test]
async fn responses_without_bodies_are_forwarded() {
    for (answer, expected) in [
        ("HTTP/1.1 204 No Content\r\nx: y\r\n\r\n", "HTTP/1.1 204 No Content\r\nx: y\r\n\r\n"),
        ("HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n", "HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n"),
    ] {
        let upstream = Echo::start(answer).await;
        let gate = start(upstream.address, "").await;
        let mut client = Peer::connect(gate.inbound).await;
        for _ in 0..2 {
            assert_eq!(crate::common::undated(&client.ask(get("/")).await), expected);
        }
    }
    // The length in a response to HEAD is that of the missing body.
    let upstream = Echo::start("HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n").await;
    let gate = start(upstream.address, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..2 {
        client.send("HEAD / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let mut buffer = [0; 4096];
        let count = client.stream.read(&mut buffer).await.unwrap();
        let answer = std::str::from_utf8(&buffer[..count]).unwrap();
        assert!(answer.contains("content-length: 1234\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
    }
}

#[tokio::test]
async fn dead_pooled_connections_are_replaced_transparently() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let gate = start(upstream, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..3 {
        client.send(post_abc()).await;
        let (stream, _) = listener.accept().await.unwrap();
        let mut served = Peer::over(stream);
        served.message().await;
        served.send(HELLO).await;
        assert_eq!(status(&client.message().await), 200);
        drop(served);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn post_abc() -> String {
    crate::common::post("/", "abc")
}
