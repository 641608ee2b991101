//! Requests and replies that arrive in pieces.

use std::time::Duration;

use tokio::net::TcpListener;

use crate::common::{Answer, Api, FREE, ONCE, get, provider, running};
use crate::wire::{Peer, header, status};

/// A provider that sends the pieces of its reply this many milliseconds apart. After that it neither sends nor closes.
async fn trickling(millis: u64) -> std::net::SocketAddr {
    trickling_with("200 OK\r\ncontent-type: text/event-stream", millis).await
}

/// The same with another beginning of its head.
async fn trickling_with(head: &'static str, millis: u64) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let mut peer = Peer::over(listener.accept().await.unwrap().0);
            tokio::spawn(async move {
                peer.message().await;
                peer.send(format!("HTTP/1.1 {head}\r\ncontent-length: 100\r\n\r\n")).await;
                for _ in 0..4 {
                    peer.send("piece").await;
                    tokio::time::sleep(Duration::from_millis(millis)).await;
                }
                std::future::pending::<()>().await;
            });
        }
    });
    address
}

#[tokio::test]
async fn shutdown_waits_for_a_pausing_reply() {
    let gateway = running(&provider(trickling(1_500).await, &format!("{FREE}attempt_timeout = \"5s\"\n")));
    let mut client = Peer::connect(gateway.address).await;
    client.send(get("/api/x")).await;
    let mut begun = String::new();
    while !begun.ends_with("\r\n\r\np") {
        begun += &client.exactly(1).await;
    }
    let stopping = tokio::spawn(gateway.stop());
    assert_eq!(client.exactly(19).await, "iecepiecepiecepiece");
    drop(client);
    assert_eq!(stopping.await.unwrap().cut_off, 0);
}

#[tokio::test]
async fn replies_may_pause_for_the_attempt_timeout() {
    for (granted, millis, pieces) in [("3s", 600, 4), ("200ms", 1_000, 1)] {
        let text = provider(trickling(millis).await, &format!("{FREE}attempt_timeout = \"{granted}\"\n"));
        // The timeout of the proxy's clients doesn't apply to the gateway.
        let body = if granted == "3s" { "200ms" } else { "20s" };
        let gateway = running(&format!("[inbound.timeouts]\nbody = \"{body}\"\n{text}"));
        let mut client = Peer::connect(gateway.address).await;
        client.send(get("/api/x")).await;
        let whole = client.all().await;
        assert!(whole.ends_with(&format!("\r\n\r\n{}", "piece".repeat(pieces))), "{granted}: {whole}");
    }
}

#[tokio::test]
async fn only_grpc_bodies_may_arrive_slowly() {
    let api = Api::start(|_, _| Answer::new(200, "hello")).await;
    let gateway = running(&api.policy(&format!("{FREE}timeout = \"60s\"\n")));
    let address = gateway.address;
    // 13 s with one byte every tenth of a second.
    let trickled = |kind: &'static str| async move {
        let mut client = Peer::connect(address).await;
        let lines = format!("content-type: {kind}\r\ncontent-length: 130\r\n");
        client.send(format!("POST /api/x HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}\r\n")).await;
        for _ in 0..130 {
            client.send("x").await;
            if tokio::time::timeout(Duration::from_millis(100), client.stream.readable()).await.is_ok() {
                break;
            }
        }
        let answer = client.message().await;
        (status(&answer), header(&answer, "connection").map(str::to_owned))
    };
    assert_eq!(
        tokio::join!(trickled("text/plain"), trickled("application/grpc")),
        ((408, Some("close".to_owned())), (200, None))
    );
}

/// The rules that read its body can't wait for it.
#[tokio::test]
async fn a_refusal_whose_body_hangs_is_understood_by_its_head() {
    let api = trickling_with("429 Too Many Requests\r\ncontent-type: application/json", 10).await;
    let gateway = running(&provider(api, &format!("{ONCE}timeout = \"30s\"\nattempt_timeout = \"30s\"\n")));
    let mut client = Peer::connect(gateway.address).await;
    client.send(get("/api/x")).await;
    let begun = tokio::time::timeout(Duration::from_secs(10), client.exactly(12)).await;
    assert_eq!(begun.as_deref(), Ok("HTTP/1.1 429"));
}
