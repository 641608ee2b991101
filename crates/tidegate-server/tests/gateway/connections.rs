//! Connections to a provider without TLS: pooled, returned and reopened.

use std::time::Duration;

use tokio::net::TcpListener;

use crate::common::{Answer, Api, FREE, closing, provider, request, running};
use crate::wire::{Peer, header, status};

#[tokio::test]
async fn connections_are_reused_by_calls_and_attempts() {
    let api = Api::start(|number, _| match number % 2 {
        0 => Answer::new(503, "a body that nobody reads"),
        _ => Answer::new(200, "done"),
    })
    .await;
    let retry = "limit = \"1000/s burst 1000\"\nretry = { base = \"30ms\", cap = \"30ms\", jitter = \"none\" }\n";
    let gateway = running(&api.policy(retry));
    for _ in 0..3 {
        assert_eq!(status(&gateway.ask(request("PUT", "/api/x", "", "body")).await), 200);
    }
    assert_eq!((api.count(), api.connections()), (6, 1));
}

#[tokio::test]
async fn a_connection_closed_by_the_provider_is_replaced() {
    let gateway = running(&provider(closing("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await, FREE));
    for _ in 0..3 {
        let answer = gateway.ask(request("POST", "/api/x", "", "order")).await;
        assert_eq!((status(&answer), header(&answer, "tidegate-attempts")), (200, Some("1")), "{answer}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn dropping_an_endless_reply_closes_its_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway = running(&provider(listener.local_addr().unwrap(), FREE));
    let mut client = Peer::connect(gateway.address).await;
    client.send("GET /api/x HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    let mut peer = Peer::over(listener.accept().await.unwrap().0);
    peer.message().await;
    peer.send("HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\nbegun").await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(client);
    let ended = tokio::time::timeout(Duration::from_secs(5), peer.ends()).await;
    assert_eq!(ended, Ok(true), "nobody reads on, and the provider isn't told");
}

/// A provider that doesn't watch its connections works on for callers that have gone away.
#[tokio::test]
async fn abandoned_requests_are_no_more_work_than_the_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for limit in ["limit = \"2 in flight\"\n", "credential_limit = \"2 in flight\"\n"] {
        let policy = provider(listener.local_addr().unwrap(), limit);
        let gateway = running(&policy);
        let mut working = Vec::new();
        for call in 0..20 {
            let mut client = Peer::connect(gateway.address).await;
            client.send("GET /api/x HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
            match tokio::time::timeout(Duration::from_millis(if call < 2 { 5_000 } else { 30 }), listener.accept())
                .await
            {
                Ok(accepted) => working.push(accepted.unwrap().0),
                Err(_) => assert!(call >= 2),
            }
        }
        assert_eq!(working.len(), 2);
    }
}
