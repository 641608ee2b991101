//! Connections to a provider without TLS: pooled, returned and reopened.

use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use crate::common::{Answer, Api, FREE, Gateway, closing, get, provider, request, running};
use crate::wire::{Peer, header, once, status};

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
        let gateway = running(&provider(listener.local_addr().unwrap(), limit));
        let mut working = Vec::new();
        for call in 0..20 {
            let mut client = Peer::connect(gateway.address).await;
            client.send(get("/api/x")).await;
            match call {
                0 | 1 => working.push(listener.accept().await.unwrap().0),
                _ => until_waiting(&gateway, 1).await,
            }
            drop(client);
            until_waiting(&gateway, 0).await;
        }
        assert_no_connection(&listener).await;
    }
}

/// It also works on for those whose time is over.
#[tokio::test]
async fn requests_that_time_out_are_no_more_work_than_the_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings = "retry = { base = \"1ms\", cap = \"1ms\" }\nbreaker = \"off\"\n";
    for (limit, attempt_timeout) in [
        ("limit = \"1000/s burst 1000\"\nsequential = true\n", "50ms"),
        ("limit = \"1 in flight\"\n", "50ms"),
        ("credential_limit = \"1 in flight\"\n", "10s"),
    ] {
        let settings = format!("{settings}{limit}attempt_timeout = \"{attempt_timeout}\"\n");
        let gateway = running(&provider(listener.local_addr().unwrap(), &settings));
        for _ in 0..5 {
            let answer = gateway.ask(request("GET", "/api/x", "tidegate-timeout: 100ms\r\n", "")).await;
            assert_eq!(status(&answer), 504, "{answer}");
        }
        let _working = listener.accept().await.unwrap();
        assert_no_connection(&listener).await;
    }
}

/// Waits until this number of calls wait for their turn.
async fn until_waiting<C>(gateway: &Gateway<C>, count: u32) {
    let line = format!("tidegate_provider_waiting_calls{{provider=\"api\",lane=\"user\"}} {count}.0\n");
    while !once(gateway.admin, get("/metrics")).await.contains(&line) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Panics if a connection waits to be accepted.
async fn assert_no_connection(listener: &TcpListener) {
    let last = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    assert_eq!(listener.accept().await.unwrap().1, last.local_addr().unwrap());
}
