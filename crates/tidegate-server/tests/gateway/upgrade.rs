//! Calls that switch protocols.

use std::time::Duration;

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::net::TcpListener;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};

use crate::common::{BEARER, FREE, Gateway, PLANTED, closing, get, provider, request, running};
use crate::wire::{Peer, body, header, json, status};

const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: tea/1.0\r\n\r\n";
const HELLO: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";

fn upgrading(lines: &str) -> String {
    request("GET", "/api/tea", &format!("connection: upgrade\r\nupgrade: tea/1.0\r\n{lines}"), "")
}

/// Opens a tunnel; returns the caller's end and the provider's.
async fn tunnel<C>(gateway: &Gateway<C>, listener: &TcpListener) -> (Peer, Peer) {
    let mut caller = Peer::connect(gateway.address).await;
    caller.send(upgrading("")).await;
    let mut provider = Peer::over(listener.accept().await.unwrap().0);
    provider.message().await;
    provider.send(SWITCH).await;
    assert_eq!(status(&caller.message().await), 101);
    (caller, provider)
}

#[tokio::test]
async fn websockets_pass_with_the_credential() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings = format!("{FREE}{BEARER}cache = {{ ttl = \"1h\" }}\n");
    let gateway = running(&provider(listener.local_addr().unwrap(), &settings));
    let serving = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut arrived = None;
        #[expect(clippy::result_large_err, reason = "the callback's type is the library's")]
        let record = |request: &Request, response: Response| -> Result<Response, ErrorResponse> {
            let authorization = request.headers()["authorization"].to_str().unwrap().to_owned();
            arrived = Some((request.uri().to_string(), authorization));
            Ok(response)
        };
        let mut socket = tokio_tungstenite::accept_hdr_async(stream, record).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if message.is_close() {
                break;
            }
            socket.send(message).await.unwrap();
        }
        arrived.unwrap()
    });
    let url = format!("ws://{}/api/realtime?model=m", gateway.address);
    let (mut socket, answer) = tokio_tungstenite::connect_async(&url).await.unwrap();
    assert_eq!((answer.status().as_u16(), &answer.headers()["tidegate-attempts"].to_str().unwrap()), (101, &"1"));
    for message in [Message::text("hello"), Message::binary(vec![7; 200_000])] {
        socket.send(message.clone()).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), message);
    }
    socket.close(None).await.unwrap();
    let expected = ("/v1/realtime?model=m".to_owned(), format!("Bearer {PLANTED}"));
    assert_eq!(serving.await.unwrap(), expected);
}

#[tokio::test]
async fn early_bytes_pass_and_ends_are_passed_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway = running(&provider(listener.local_addr().unwrap(), FREE));
    let mut caller = Peer::connect(gateway.address).await;
    caller.send(upgrading("") + "early").await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    let arrived = served.message().await;
    assert_eq!((header(&arrived, "connection"), header(&arrived, "upgrade")), (Some("upgrade"), Some("tea/1.0")));
    served.send(format!("{SWITCH}brew")).await;
    let answer = caller.message().await;
    assert_eq!((header(&answer, "connection"), header(&answer, "upgrade")), (Some("upgrade"), Some("tea/1.0")));
    assert_eq!(caller.exactly(4).await, "brew");
    assert_eq!(served.exactly(5).await, "early");
    drop(served);
    assert!(caller.ends().await);
}

#[tokio::test]
async fn a_tunnel_outlasts_deadlines_and_stays_in_flight() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let settings =
        "limit = [\"1000/s burst 1000\", \"1 in flight\"]\ntimeout = \"300ms\"\nattempt_timeout = \"200ms\"\n";
    let gateway = running(&provider(listener.local_addr().unwrap(), settings));
    let (mut caller, mut served) = tunnel(&gateway, &listener).await;
    let refusal = json(&gateway.ask(get("/api/x")).await);
    assert_eq!((refusal["error"].as_str(), refusal["attempts"].as_u64()), (Some("DeadlineExceededError"), Some(0)));
    tokio::time::sleep(Duration::from_millis(300)).await;
    caller.send("ping").await;
    assert_eq!(served.exactly(4).await, "ping");
    served.send("pong").await;
    assert_eq!(caller.exactly(4).await, "pong");
    drop(caller);
    assert!(served.ends().await);
    drop(served);
    let mut next = Peer::connect(gateway.address).await;
    next.send(get("/api/x")).await;
    let accepted = tokio::time::timeout(Duration::from_secs(5), listener.accept()).await;
    let mut served = Peer::over(accepted.expect("the next call").unwrap().0);
    served.message().await;
    served.send(HELLO).await;
    assert_eq!(body(&next.message().await), "hello");
}

#[tokio::test]
async fn a_switch_is_one_call_under_limits() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway =
        running(&provider(listener.local_addr().unwrap(), "limit = \"2 per 1h\"\nbreaker = { failures = 1 }\n"));
    for _ in 0..2 {
        let (mut caller, served) = tunnel(&gateway, &listener).await;
        // A tunnel that breaks off is neither a failure nor sent again.
        drop(served);
        assert!(caller.ends().await);
    }
    assert_eq!(json(&gateway.ask(upgrading("")).await)["error"], "RateLimitedError");
}

#[tokio::test]
async fn a_refused_switch_is_retried_and_passed_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway = running(&provider(listener.local_addr().unwrap(), FREE));
    let serving = tokio::spawn(async move {
        let mut served = Peer::over(listener.accept().await.unwrap().0);
        for answer in ["HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", HELLO, HELLO] {
            served.message().await;
            served.send(answer).await;
        }
    });
    let mut caller = Peer::connect(gateway.address).await;
    for attempts in ["2", "1"] {
        let answer = caller.ask(upgrading("")).await;
        assert_eq!((status(&answer), header(&answer, "tidegate-attempts")), (200, Some(attempts)));
        assert_eq!(body(&answer), "hello");
    }
    serving.await.unwrap();
}

#[tokio::test]
async fn an_unrequested_switch_is_a_failure() {
    let gateway = running(&provider(closing(SWITCH).await, FREE));
    for request in [get("/api/x"), request("POST", "/api/x", "connection: upgrade\r\nupgrade: tea/1.0\r\n", "order")] {
        let answer = gateway.ask(request).await;
        assert_eq!(status(&answer), 502, "{answer}");
        assert!(body(&answer).contains("the request asks for no upgrade"), "{answer}");
    }
}

#[tokio::test]
async fn shutdown_ends_tunnels_after_the_drain() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let policy = provider(listener.local_addr().unwrap(), FREE);
    let gateway = running(&format!("[inbound.timeouts]\nshutdown = \"300ms\"\n{policy}"));
    let (mut caller, _served) = tunnel(&gateway, &listener).await;
    assert_eq!(gateway.stop().await.cut_off, 1);
    assert!(caller.ends().await);
}

#[tokio::test]
async fn tunnels_leave_the_adaptive_cap_to_calls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let capped = format!("{FREE}adaptive = {{ min = 1, initial = 1, max = 1 }}\ntimeout = \"2s\"\n");
    let gateway = running(&provider(listener.local_addr().unwrap(), &capped));
    let tunnels = [tunnel(&gateway, &listener).await, tunnel(&gateway, &listener).await];
    let mut caller = Peer::connect(gateway.address).await;
    caller.send(get("/api/x")).await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    served.message().await;
    let waits = gateway.ask(request("GET", "/api/y", "tidegate-timeout: 300ms\r\n", "")).await;
    assert_eq!((status(&waits), &json(&waits)["attempts"]), (504, &0.into()), "a second call waits: {waits}");
    served.send(HELLO).await;
    assert_eq!(body(&caller.message().await), "hello");
    drop(tunnels);
}

#[tokio::test]
async fn a_switch_by_http_1_0_is_a_plain_call() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway = running(&provider(listener.local_addr().unwrap(), FREE));
    let mut caller = Peer::connect(gateway.address).await;
    caller.send(upgrading("").replace("HTTP/1.1", "HTTP/1.0")).await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    assert_eq!(header(&served.message().await, "upgrade"), None);
    served.send(HELLO).await;
    let answer = caller.message().await;
    assert_eq!((status(&answer), body(&answer)), (200, "hello"));
}
