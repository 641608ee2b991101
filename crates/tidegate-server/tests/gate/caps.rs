//! Every limit of the server, and its documented behaviour at the limit.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tidegate::Gate;
use tidegate::clock::ManualClock;
use tidegate::store::{Memory, Store, StoreError, StoreResponse};
use tidegate_core::{Batch, Limits, Outcomes, Time};
use tidegate_policy::KeySeed;

use tokio::net::TcpListener;

use crate::common::{Echo, HELLO, Peer, Running, body, get, header, nobody, once, policy, post, serve, start, status};

#[tokio::test]
async fn header_size_and_count_are_capped() {
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
async fn body_size_is_capped() {
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

/// A gate with a cap of two connections, and an upstream that never answers.
async fn narrow() -> (TcpListener, Running) {
    let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(upstream.local_addr().unwrap(), "[inbound.caps]\nconnections = 2\n").await;
    (upstream, gate)
}

#[tokio::test]
async fn new_connections_wait_while_all_are_busy() {
    let (upstream, gate) = narrow().await;
    let mut first = Peer::connect(gate.inbound).await;
    let mut second = Peer::connect(gate.inbound).await;
    first.send(get("/")).await;
    second.send(get("/")).await;
    let _busy = (upstream.accept().await.unwrap(), upstream.accept().await.unwrap());
    let mut third = Peer::connect(gate.inbound).await;
    third.send(get("/")).await;
    assert!(tokio::time::timeout(Duration::from_millis(300), upstream.accept()).await.is_err());
    // The health check answers even after many silent connections.
    let mut silent = Vec::new();
    for _ in 0..70 {
        silent.push(Peer::connect(gate.admin).await);
    }
    let mut health = Peer::connect(gate.admin).await;
    let answer = tokio::time::timeout(Duration::from_secs(5), health.ask(get("/healthz"))).await.expect("no wait");
    assert_eq!(status(&answer), 200);
    drop(first);
    let (stream, _) = upstream.accept().await.unwrap();
    let mut served = Peer::over(stream);
    served.message().await;
    served.send(HELLO).await;
    assert_eq!(status(&third.message().await), 200);
}

#[tokio::test]
async fn idle_connections_are_displaced_by_new_ones() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.caps]\nconnections = 100\n").await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(Peer::connect(gate.inbound).await);
    }
    // Long enough to distinguish these connections from new ones.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut others = Vec::new();
    for _ in 0..150 {
        let mut other = Peer::connect(gate.inbound).await;
        let answer = tokio::time::timeout(Duration::from_secs(5), other.ask(get("/"))).await.expect("no wait");
        assert_eq!(status(&answer), 200);
        others.push(other);
    }
    assert!(silent[0].ends().await, "the first to come and say nothing is the first to go");
    assert_eq!(status(&others[149].ask(get("/")).await), 200, "the last to be served stays");
    let page = once(gate.admin, get("/metrics")).await;
    let displaced = "tidegate_rejections_total{reason=\"head_displaced\"} ";
    let count = page.lines().find_map(|line| line.strip_prefix(displaced)).unwrap();
    assert!((50..=100).contains(&count.parse::<u32>().unwrap()), "{count}");
}

#[tokio::test]
async fn a_connection_becoming_idle_is_displaced() {
    let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(upstream.local_addr().unwrap(), "[inbound.caps]\nconnections = 2\n").await;
    let (answer, told) = tokio::sync::watch::channel(false);
    tokio::spawn(async move {
        while let Ok((stream, _)) = upstream.accept().await {
            let mut told = told.clone();
            tokio::spawn(async move {
                let mut peer = Peer::over(stream);
                while peer.try_message().await.is_some() {
                    told.wait_for(|told| *told).await.unwrap();
                    peer.send(HELLO).await;
                }
            });
        }
    });
    let mut clients = [Peer::connect(gate.inbound).await, Peer::connect(gate.inbound).await];
    for client in &mut clients {
        client.send(get("/")).await;
    }
    let mut third = Peer::connect(gate.inbound).await;
    third.send(get("/")).await;
    assert!(tokio::time::timeout(Duration::from_millis(300), third.stream.readable()).await.is_err());
    answer.send(true).unwrap();
    assert_eq!(status(&third.message().await), 200);
}

/// Returns true if a request on a new connection gets a 200 while other connections fill the listener.
async fn is_served(address: SocketAddr, path: &str) -> bool {
    let mut client = Peer::connect(address).await;
    match tokio::time::timeout(Duration::from_secs(5), client.ask(get(path))).await {
        Ok(answer) => status(&answer) == 200,
        Err(_) => false,
    }
}

/// Connections that have sent these bytes.
async fn begun(address: SocketAddr, count: usize, bytes: &str) -> Vec<Peer> {
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut client = Peer::connect(address).await;
        client.send(bytes).await;
        clients.push(client);
    }
    clients
}

#[tokio::test]
async fn unfinished_heads_are_displaced_running_requests_kept() {
    let (upstream, gate) = narrow().await;
    let mut busy = Peer::connect(gate.inbound).await;
    busy.send(get("/")).await;
    let mut served = Peer::over(upstream.accept().await.unwrap().0);
    served.message().await;
    // One of two slots is left, and new connections take it again and again.
    let mut begun = begun(gate.inbound, 4, "G").await;
    let mut other = Peer::connect(gate.inbound).await;
    other.send(get("/")).await;
    let accepted = tokio::time::timeout(Duration::from_secs(5), upstream.accept()).await.expect("a place");
    let mut others = Peer::over(accepted.unwrap().0);
    others.message().await;
    others.send(HELLO).await;
    assert_eq!(status(&other.message().await), 200);
    let answer = begun[0].message().await;
    assert_eq!((status(&answer), header(&answer, "retry-after")), (503, Some("1")));
    served.send(HELLO).await;
    assert_eq!(status(&busy.message().await), 200);
}

/// A store that answers after 1.5 s.
struct Slow(Arc<Memory>);

impl Store for Slow {
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Outcomes, StoreError>> + Send>>;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        let answer = self.0.apply(batch, now);
        StoreResponse::Pending(Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            match answer {
                StoreResponse::Ready(outcomes) => Ok(outcomes),
                StoreResponse::Pending(later) => later.await,
            }
        }))
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.0.submit(batch, now);
    }
}

#[tokio::test]
async fn requests_waiting_for_the_store_are_kept() {
    let upstream = Echo::start(HELLO).await;
    let file = "[inbound.global]\nlimit = \"100 per 1h\"\n[inbound.caps]\nconnections = 1\n\
        [inbound.timeouts]\nheader = \"1s\"\n";
    let policy = policy(upstream.address, file);
    let memory = Memory::new(Arc::clone(policy.plan().limits()), 1 << 20);
    let gate = Gate::from_parts(
        Arc::clone(policy.plan()),
        Slow(Arc::new(memory)),
        ManualClock::default(),
        KeySeed::new([7; 16]),
    );
    let gate = serve(gate, &policy, |_| None).unwrap();
    let mut first = Peer::connect(gate.inbound).await;
    first.send(get("/")).await;
    let mut second = Peer::connect(gate.inbound).await;
    second.send(get("/")).await;
    assert_eq!(status(&first.message().await), 200);
    assert_eq!(status(&second.message().await), 200);
}

#[tokio::test]
async fn connections_with_one_byte_sent_are_displaced() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.caps]\nconnections = 100\n").await;
    for (address, count, path) in [(gate.inbound, 400, "/"), (gate.admin, 70, "/healthz")] {
        let _begun = begun(address, count, "G").await;
        for _ in 0..3 {
            assert!(is_served(address, path).await, "{path}");
        }
    }
}

#[tokio::test]
async fn slow_bodies_of_the_admin_listener_are_displaced() {
    // The first is refused before its body, which is read and discarded. The second is read before its answer.
    for path in ["/healthz", "/v1/reset"] {
        let gate = start(nobody(), "").await;
        let head = format!("POST {path} HTTP/1.1\r\nhost: gate.test\r\ncontent-type: application/json\r\n");
        for mut client in begun(gate.admin, 70, &format!("{head}content-length: 5000\r\n\r\n")).await {
            tokio::spawn(async move {
                while tokio::io::AsyncWriteExt::write_all(&mut client.stream, b" ").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            });
        }
        assert!(is_served(gate.admin, "/healthz").await, "{path}");
    }
}

/// Sends a body of 130 bytes, one every tenth of a second, and returns the response's status.
async fn trickled(address: SocketAddr, path: &str, kind: &str) -> u16 {
    let mut client = Peer::connect(address).await;
    let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: {kind}\r\ncontent-length: 130\r\n\r\n");
    client.send(head).await;
    for _ in 0..130 {
        if tokio::io::AsyncWriteExt::write_all(&mut client.stream, b" ").await.is_err() {
            break;
        }
        if tokio::time::timeout(Duration::from_millis(100), client.stream.readable()).await.is_ok() {
            break;
        }
    }
    status(&client.message().await)
}

#[tokio::test]
async fn bodies_must_arrive_at_a_minimum_rate() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "").await;
    let plain = "text/plain";
    assert_eq!(
        tokio::join!(
            trickled(gate.inbound, "/", plain),
            trickled(gate.inbound, "/", "application/grpc-web"),
            trickled(gate.api, "/v1/check", plain),
            trickled(gate.api, "/v1/reset", plain),
        ),
        (408, 200, 408, 408)
    );
}

#[tokio::test]
async fn refused_requests_bodies_need_a_minimum_rate() {
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.action.no]\nmatch = { path = \"/no\" }\nlimit = \"0 per 1s\"\n").await;
    let mut client = Peer::connect(gate.inbound).await;
    let answer = client.ask("POST /no HTTP/1.1\r\nhost: a\r\ncontent-length: 60000\r\n\r\n").await;
    assert_eq!((status(&answer), header(&answer, "connection")), (429, None));
    let trickles = async {
        while tokio::io::AsyncWriteExt::write_all(&mut client.stream, b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(17), trickles).await.expect("the connection ends");
}

#[tokio::test]
async fn unfinished_heads_total_size_is_bounded() {
    let upstream = Echo::start(HELLO).await;
    let gate =
        start(upstream.address, "[inbound.caps]\nheader_bytes = \"1MiB\"\n[inbound.timeouts]\nheader = \"60s\"\n")
            .await;
    let begun = format!("GET / HTTP/1.1\r\nhost: a\r\nx: {}", "y".repeat(900 << 10));
    let mut clients = Vec::new();
    // 36 heads of 900 KiB fit into 32 MiB; 37 don't.
    for _ in 0..37 {
        let mut client = Peer::connect(gate.inbound).await;
        client.send(&begun).await;
        clients.push(client);
    }
    let answer = clients[0].message().await;
    assert_eq!((status(&answer), header(&answer, "retry-after")), (503, Some("1")));
    let last = clients.last_mut().unwrap();
    assert_eq!(status(&last.ask("\r\n\r\n").await), 200, "the oldest goes, not the latest");
}

#[tokio::test]
async fn idle_upstream_connections_are_capped() {
    // With an empty pool, each request gets a new connection.
    let upstream = Echo::start(HELLO).await;
    let gate = start(upstream.address, "[inbound.caps]\npool_idle = 0\n").await;
    let mut client = Peer::connect(gate.inbound).await;
    for _ in 0..3 {
        assert_eq!(status(&client.ask(get("/")).await), 200);
    }
    assert_eq!(upstream.seen().len(), 3);
}
