//! A shutdown loses no request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::common::{Echo, HELLO, Peer, get, header, json, once, start, status};

#[tokio::test]
async fn shutdown_waits_for_a_request_in_flight() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut gate = start(listener.local_addr().unwrap(), "").await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/")).await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    served.message().await;
    assert_eq!(status(&once(gate.admin, get("/readyz")).await), 200);
    let ended = gate.stop();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(json(&once(gate.admin, get("/readyz")).await)["status"], "draining");
    assert_eq!(status(&once(gate.admin, get("/healthz")).await), 200);
    assert!(TcpStream::connect(gate.inbound).await.is_err(), "no more connections");
    served.send(HELLO).await;
    let answer = client.message().await;
    assert_eq!((status(&answer), header(&answer, "connection")), (200, Some("close")));
    assert!(client.ends().await);
    assert_eq!(ended.await.unwrap().cut_off, 0);
    assert!(TcpStream::connect(gate.admin).await.is_err());
}

#[tokio::test]
async fn shutdown_closes_idle_connections_after_last_requests() {
    let upstream = Echo::start(HELLO).await;
    let mut gate = start(upstream.address, "").await;
    let mut idle = Peer::connect(gate.inbound).await;
    let mut late = Peer::connect(gate.inbound).await;
    for client in [&mut idle, &mut late] {
        assert_eq!(status(&client.ask(get("/")).await), 200);
    }
    let ended = gate.stop();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let answer = late.ask(get("/")).await;
    assert_eq!((status(&answer), header(&answer, "connection")), (200, Some("close")));
    assert!(idle.ends().await);
    assert_eq!(ended.await.unwrap().cut_off, 0);
}

#[tokio::test]
async fn connections_exceeding_the_shutdown_timeout_are_aborted() {
    let upstream = Echo::start("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n").await;
    let mut gate = start(upstream.address, "[inbound.timeouts]\nshutdown = \"300ms\"\n").await;
    let mut tunnel = Peer::connect(gate.inbound).await;
    let upgrade = "GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n";
    assert_eq!(status(&tunnel.ask(upgrade).await), 101);
    let ended = gate.stop();
    assert!(tunnel.ends().await);
    assert_eq!(ended.await.unwrap().cut_off, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_under_load_answers_every_sent_request() {
    let upstream = Echo::start(HELLO).await;
    for _ in 0..5 {
        let mut gate = start(upstream.address, "").await;
        let (answered, going) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
        let clients: Vec<_> = (0..20)
            .map(|_| {
                let (answered, going) = (Arc::clone(&answered), Arc::clone(&going));
                let address = gate.inbound;
                tokio::spawn(async move {
                    while going.load(Ordering::Relaxed) {
                        let Ok(mut stream) = TcpStream::connect(address).await else { return };
                        // Each request follows the previous response at once, so some are always in flight.
                        for number in 0.. {
                            let mut buffer = [0; 1024];
                            let asked = async {
                                stream.write_all(get("/").as_bytes()).await?;
                                stream.read(&mut buffer).await
                            };
                            let count = match asked.await {
                                Ok(count) => count,
                                // The system accepted the connection, but the gate never received it.
                                Err(_) if number == 0 => return,
                                Err(error) => panic!("a connection ended between requests without a word: {error}"),
                            };
                            let answer = String::from_utf8_lossy(&buffer[..count]).into_owned();
                            assert_eq!(status(&answer), 200);
                            answered.fetch_add(1, Ordering::Relaxed);
                            if answer.contains("connection: close") {
                                break;
                            }
                        }
                    }
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(100)).await;
        let ended = gate.stop().await.unwrap();
        going.store(false, Ordering::Relaxed);
        for client in clients {
            client.await.unwrap();
        }
        assert_eq!(ended.cut_off, 0);
        assert!(answered.load(Ordering::Relaxed) > 20);
    }
}
