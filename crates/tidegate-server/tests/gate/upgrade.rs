//! Upgraded connections.

use futures_util::{SinkExt as _, StreamExt as _};
use tokio::net::TcpListener;
use tokio_tungstenite::tungstenite::Message;

use crate::common::{Echo, HELLO, Peer, start, status};

#[tokio::test]
async fn websocket_messages_pass_in_both_directions() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut socket = tokio_tungstenite::accept_async(stream).await.unwrap();
                while let Some(Ok(message)) = socket.next().await {
                    if message.is_close() {
                        return;
                    }
                    socket.send(message).await.unwrap();
                }
            });
        }
    });
    let file = "[inbound.action.chat]\nmatch = { path = \"/chat\" }\nlimit = \"2 per 60s\"\n";
    let gate = start(upstream, file).await;
    let url = format!("ws://{}/chat", gate.inbound);
    let (mut socket, answer) = tokio_tungstenite::connect_async(&url).await.unwrap();
    assert_eq!(answer.status(), 101);
    assert_eq!(answer.headers()["ratelimit"], "\"chat\";r=1;t=60");
    for message in [Message::text("hello"), Message::binary(vec![7; 200_000])] {
        socket.send(message.clone()).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), message);
    }
    socket.close(None).await.unwrap();
    while let Some(Ok(_)) = socket.next().await {}

    tokio_tungstenite::connect_async(&url).await.unwrap();
    let refused = tokio_tungstenite::connect_async(&url).await.unwrap_err();
    assert!(refused.to_string().contains("429"), "{refused}");
}

#[tokio::test]
async fn any_upgrade_protocol_passes_with_early_bytes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = listener.local_addr().unwrap();
    let gate = start(upstream, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: tea/1.0\r\n\r\nearly").await;
    let (stream, _) = listener.accept().await.unwrap();
    let mut served = Peer::over(stream);
    let seen = served.message().await;
    assert!(seen.contains("connection: upgrade\r\n") && seen.contains("upgrade: tea/1.0\r\n"), "{seen}");
    served.send("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: tea/1.0\r\n\r\nbrew").await;
    let answer = client.message().await;
    assert!(answer.contains("connection: upgrade\r\n") && answer.contains("upgrade: tea/1.0\r\n"), "{answer}");
    assert_eq!(client.exactly(4).await, "brew");
    assert_eq!(served.exactly(5).await, "early");
    drop(client);
    assert!(served.ends().await);
}

#[tokio::test]
async fn a_declined_upgrade_is_a_normal_response() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    let ask = "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
    for _ in 0..2 {
        assert_eq!(status(&client.ask(ask).await), 200);
    }
}

#[tokio::test]
async fn an_unrequested_protocol_switch_gives_502() {
    let upstream = Echo::start("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n").await;
    let gate = start(upstream.address, "").await;
    let mut client = Peer::connect(gate.inbound).await;
    assert_eq!(status(&client.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await), 502);
}
