//! Clients that open connections, send no request or read no reply, and come back as soon as they are closed. Others are
//! served all the same.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tidegate_server::descriptors;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::common::{Echo, HELLO, PATIENCE, Peer, Running, get, nobody, policy, start, status, try_start};

/// Connections that are all open at once, from a thread of their own. It ends with this value.
struct Flood(#[expect(dead_code, reason = "stops the thread when it is dropped")] tokio::sync::oneshot::Sender<()>);

/// The bytes that one connection of a flood sends at its beginning, by its number.
type Beginning = fn(usize) -> String;

impl Flood {
    /// Opens this number of connections. Each sends its first bytes, then one a second, and comes back when it is closed.
    /// Returns when as many have been closed.
    async fn start(address: SocketAddr, count: usize, beginning: Beginning) -> Self {
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let closed = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&closed);
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                for number in 0..count {
                    let closed = Arc::clone(&counted);
                    tokio::spawn(async move {
                        loop {
                            let _ = come_once(address, beginning(number).as_bytes()).await;
                            closed.fetch_add(1, Relaxed);
                        }
                    });
                }
                let _ = stopped.await;
            });
        });
        let all_closed = async {
            while closed.load(Relaxed) < count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(PATIENCE, all_closed).await.expect("the flood is at its height");
        Self(stop)
    }
}

/// Opens a connection, and trickles until it is closed. After whole requests it sends more of them, and reads nothing.
async fn come_once(address: SocketAddr, beginning: &[u8]) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    let mut buffer = [0; 1024];
    loop {
        stream.write_all(beginning).await?;
        if !beginning.ends_with(b"\r\n\r\n") {
            break;
        }
    }
    loop {
        match tokio::time::timeout(Duration::from_secs(1), stream.read(&mut buffer)).await {
            Ok(Ok(1..)) => {}
            Ok(ended) => return ended.map(drop),
            Err(_) if beginning.is_empty() => {}
            Err(_) => stream.write_all(b"x").await?,
        }
    }
}

/// Makes requests over new connections, one after the other, and returns the number that weren't answered in this time.
async fn late_answers(address: SocketAddr, count: usize, request: &str, time: Duration) -> usize {
    let mut late = 0;
    for _ in 0..count {
        let ask = async { Peer::connect(address).await.ask(request).await };
        match tokio::time::timeout(time, ask).await {
            Ok(answer) => assert_eq!(status(&answer), 200),
            Err(_) => late += 1,
        }
    }
    late
}

fn silent(_: usize) -> String {
    String::new()
}

fn begun(_: usize) -> String {
    "GET /healthz HTTP/1.1\r\nhost: a\r\nx: ".to_owned()
}

/// A connection of one of a thousand clients, by the header of the PROXY protocol.
fn proxied(number: usize) -> String {
    format!("PROXY TCP4 203.0.{}.{} 192.0.2.1 1 2\r\n", 1 + number / 200, 1 + number % 200)
}

fn of_one_client(_: usize) -> String {
    proxied(0)
}

fn unread(_: usize) -> String {
    get("/metrics").repeat(100)
}

fn many_descriptors() {
    descriptors::raise_limit();
}

/// A gate whose admin listener is told the addresses of clients.
fn behind_balancer() -> Running {
    let file = "[admin]\nproxy_protocol = [\"127.0.0.0/8\"]\ntoken = \"env:TOKEN\"\n";
    try_start(&policy(nobody(), file), |_| Some("a-token-of-an-operator-1234567890".to_owned())).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_told_while_silent_connections_and_slow_readers_come_back() {
    many_descriptors();
    let health = get("/healthz");
    for (beginning, count) in [(silent as Beginning, 800), (begun, 800), (unread, 300)] {
        let gate = start(nobody(), "").await;
        let _flood = Flood::start(gate.admin, count, beginning).await;
        assert_eq!(late_answers(gate.admin, 5, &health, Duration::from_secs(2)).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_told_while_one_address_or_many_come_back() {
    many_descriptors();
    let health = format!("PROXY TCP4 198.51.100.7 192.0.2.1 1 2\r\n{}", get("/healthz"));
    for beginning in [of_one_client as Beginning, proxied] {
        let gate = behind_balancer();
        let _flood = Flood::start(gate.admin, 800, beginning).await;
        assert_eq!(late_answers(gate.admin, 5, &health, Duration::from_secs(2)).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_clients_of_the_proxy_are_served_while_silent_connections_come_back() {
    many_descriptors();
    let upstream = Echo::start(HELLO).await;
    for beginning in [silent as Beginning, begun] {
        let gate = start(upstream.address, "[inbound.caps]\nconnections = 300\n").await;
        let _flood = Flood::start(gate.inbound, 1500, beginning).await;
        let late = late_answers(gate.inbound, 100, &get("/"), Duration::from_secs(1)).await;
        assert!(late <= 5, "{late} of 100");
    }
}

#[tokio::test]
async fn one_client_of_the_admin_listener_leaves_places_to_others() {
    let gate = behind_balancer();
    let mut held = Vec::new();
    for _ in 0..32 {
        let mut client = Peer::connect(gate.admin).await;
        assert_eq!(status(&client.ask(format!("{}{}", of_one_client(0), get("/healthz"))).await), 200);
        held.push(client);
    }
    let mut next = Peer::connect(gate.admin).await;
    assert_eq!(status(&next.ask(of_one_client(0)).await), 503);
    for client in &mut held {
        assert_eq!(status(&client.ask(get("/healthz")).await), 200, "the others stay");
    }
    assert_eq!(late_answers(gate.admin, 1, &format!("{}{}", proxied(1), get("/healthz")), PATIENCE).await, 0);
    // The balancer itself, which the address of no client stands for, is on loopback and isn't counted.
    let local = format!("PROXY UNKNOWN\r\n{}", get("/healthz"));
    for _ in 0..40 {
        let mut client = Peer::connect(gate.admin).await;
        assert_eq!(status(&client.ask(&local).await), 200);
        held.push(client);
    }
}
