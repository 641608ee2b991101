//! Clients that go away under a limit on calls in flight, in front of servers that don't notice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tidegate_core::Span;
use tidegate_testkit::random::RandomSource;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};

use crate::common::{HELLO, PATIENCE, Peer, get, once, post, start, status};

/// A request of a client that a trusted proxy tells.
fn get_from(ip: &str) -> String {
    get("/x").replace("\r\n\r\n", &format!("\r\nx-forwarded-for: {ip}\r\n\r\n"))
}

const ATTACKER: &str = "203.0.113.1";
const NEIGHBOUR: &str = "203.0.113.2";

/// A policy of two calls at a time for all clients together, or for each one.
fn two(key: &str, inbound: &str) -> String {
    format!(
        "[inbound]\nhttp2 = \"always\"\ntrusted_proxies = [\"127.0.0.1\"]\n{inbound}\n[inbound.action.two]\nmatch = {{ path = \"/*\" }}\nlimit = \"2 in \
         flight\"\nkey = [\"{key}\"]\n"
    )
}

/// A server that doesn't watch its connections: it reads a request, works until the test lets it end, and answers.
#[derive(Clone)]
struct Worker {
    address: SocketAddr,
    working: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    begun: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
    has_begun: Arc<Notify>,
    /// The works that may end.
    ends: Arc<Semaphore>,
}

impl Worker {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let worker = Self {
            address: listener.local_addr().unwrap(),
            working: Arc::default(),
            most: Arc::default(),
            begun: Arc::default(),
            connections: Arc::default(),
            has_begun: Arc::default(),
            ends: Arc::new(Semaphore::new(0)),
        };
        let started = worker.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let worker = started.clone();
                worker.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let mut peer = Peer::over(stream);
                    while peer.try_message().await.is_some() {
                        worker.work().await;
                        if peer.try_send(HELLO).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        worker
    }

    async fn work(&self) {
        let working = self.working.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(working, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.has_begun.notify_one();
        self.ends.acquire().await.unwrap().forget();
        self.working.fetch_sub(1, Ordering::SeqCst);
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    /// Waits until this many works have begun since the start.
    async fn until_begun(&self, count: usize) {
        let begun = async {
            while self.begun.load(Ordering::SeqCst) < count {
                self.has_begun.notified().await;
            }
        };
        tokio::time::timeout(PATIENCE, begun).await.expect("the work begins");
    }

    /// Lets this many works end, and waits until they have.
    async fn end(&self, count: usize) {
        let left = self.working.load(Ordering::SeqCst) - count;
        self.ends.add_permits(count);
        until(|| self.working.load(Ordering::SeqCst) <= left).await;
    }
}

async fn until(mut is_true: impl FnMut() -> bool) {
    let waiting = async {
        while !is_true() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("it happens in time");
}

/// Sends this request until the server works on it or its answer is there; then goes away. Returns true if the server
/// works on it.
async fn abort(gate: SocketAddr, worker: &Worker, request: &str) -> bool {
    let begun = worker.begun.load(Ordering::SeqCst);
    let mut client = Peer::connect(gate).await;
    client.send(request).await;
    tokio::select! {
        answer = client.message() => {
            assert_eq!(status(&answer), 429);
            false
        }
        () = worker.until_begun(begun + 1) => true,
    }
}

/// Sends requests until one gets a reply that isn't a refusal, while the server ends each work at once.
async fn eventually_served(gate: SocketAddr) {
    let served = async {
        while status(&once(gate, get("/x")).await) != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, served).await.expect("the permit comes back");
}

#[tokio::test]
async fn aborted_http1_calls_are_no_more_work_than_the_limit() {
    for (key, share) in [("action", 1), ("client_ip", 2)] {
        let worker = Worker::start().await;
        let gate = start(worker.address, &two(key, "")).await;
        let mut admitted = 0;
        for _ in 0..200 {
            admitted += usize::from(abort(gate.inbound, &worker, &get_from(ATTACKER)).await);
        }
        assert_eq!((admitted, worker.most()), (share, share), "{key}");
        let page = once(gate.admin, get("/metrics")).await;
        assert!(page.contains(&format!("\ntidegate_kept_permits {admitted}")), "{page}");
        let is_observed = |line: &str| line.starts_with("tidegate_observed_calls ") && !line.ends_with(" 0");
        assert!(page.lines().any(is_observed), "{page}");
        assert_eq!(page.contains("reason=\"share\""), key == "action", "{page}");
        // Another client still has its part.
        let mut neighbour = Peer::connect(gate.inbound).await;
        neighbour.send(get_from(NEIGHBOUR)).await;
        worker.until_begun(admitted + 1).await;
        worker.end(admitted + 1).await;
        assert_eq!(status(&neighbour.message().await), 200);
        worker.ends.add_permits(1000);
        eventually_served(gate.inbound).await;
    }
}

#[tokio::test]
async fn reset_http2_streams_are_no_more_work_than_the_limit() {
    let worker = Worker::start().await;
    let gate = start(worker.address, &two("action", "")).await;
    let stream = TcpStream::connect(gate.inbound).await.unwrap();
    let (client, connection) = h2::client::Builder::new().handshake::<_, bytes::Bytes>(stream).await.unwrap();
    tokio::spawn(connection);
    let attack = || {
        let request = http::Request::get("http://gate.test/x").header("x-forwarded-for", ATTACKER);
        request.body(()).unwrap()
    };
    for wave in 0..20 {
        let mut answers = Vec::new();
        for _ in 0..10 {
            answers.push(client.clone().ready().await.unwrap().send_request(attack(), true).unwrap().0);
        }
        if wave == 0 {
            worker.until_begun(2).await;
        } else {
            for answer in answers.drain(..9) {
                let _ = tokio::time::timeout(Duration::from_millis(50), answer).await;
            }
        }
        // Drops the streams, which resets them.
        drop(answers);
    }
    assert_eq!(worker.most(), 2);
    worker.end(2).await;
    // The share of a client that has aborted calls is one of two.
    let mut neighbour = Peer::connect(gate.inbound).await;
    let mut answers = Vec::new();
    for _ in 0..10 {
        answers.push(client.clone().ready().await.unwrap().send_request(attack(), true).unwrap().0);
    }
    worker.until_begun(3).await;
    neighbour.send(get_from(NEIGHBOUR)).await;
    worker.until_begun(4).await;
    worker.end(2).await;
    assert_eq!((status(&neighbour.message().await), worker.most()), (200, 2));
}

/// A reset tells an HTTP/2 server to stop, and nothing tells if it does.
#[tokio::test]
async fn an_http2_server_is_given_the_time_of_a_long_call() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let worker = Worker::start().await;
    let started = worker.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let mut connection = h2::server::handshake(stream).await.unwrap();
            while let Some(Ok(exchange)) = connection.accept().await {
                let worker = started.clone();
                tokio::spawn(async move {
                    worker.work().await;
                    drop(exchange);
                });
            }
        }
    });
    let gate = start(address, &two("client_ip", "upstream_http2 = true")).await;
    for call in 0..20 {
        assert_eq!(abort(gate.inbound, &worker, &get("/x")).await, call < 2);
    }
    gate.clock.advance(Span::from_secs(30));
    assert!(abort(gate.inbound, &worker, &get("/x")).await, "its work is likely over");
}

#[tokio::test]
async fn a_request_without_the_rest_of_its_body_keeps_its_permit() {
    for inbound in ["", FINISH] {
        abandon_uploads(inbound).await;
    }
}

async fn abandon_uploads(inbound: &str) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), &two("client_ip", inbound)).await;
    let mut working = Vec::new();
    for _ in 0..2 {
        let mut client = Peer::connect(gate.inbound).await;
        client.send(post("/x", "begun").replace("content-length: 5", "content-length: 100")).await;
        let mut served = Peer::over(listener.accept().await.unwrap().0);
        served.exactly(20).await;
        working.push(served);
    }
    // The gate sees the ends of its clients by the ends of its connections.
    for served in &mut working {
        served.all().await;
    }
    let refused = once(gate.inbound, get("/x")).await;
    assert_eq!(status(&refused), 429);
    working[0].send(HELLO).await;
    let mut client = Peer::connect(gate.inbound).await;
    let admitted = async {
        loop {
            client.send(get("/x")).await;
            tokio::select! {
                answer = client.message() => assert_eq!(status(&answer), 429),
                served = listener.accept() => break served.unwrap().0,
            }
        }
    };
    tokio::time::timeout(PATIENCE, admitted).await.expect("the answer ends the work");
}

#[tokio::test]
async fn a_server_that_has_answered_notices_by_itself() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), &two("action", "")).await;
    for _ in 0..20 {
        let mut client = Peer::connect(gate.inbound).await;
        client.send(get("/x")).await;
        let mut served = Peer::over(listener.accept().await.unwrap().0);
        served.message().await;
        served.send("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbegun").await;
        client.exactly(20).await;
        drop(client);
        assert_eq!(served.all().await, "", "the connection is closed");
    }
}

#[tokio::test]
async fn a_request_that_was_not_sent_keeps_nothing() {
    // A server whose queue of connections is full, so that connecting takes long.
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    socket.listen(0).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    let mut queued = Vec::new();
    while let Ok(Ok(stream)) = tokio::time::timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        queued.push(stream);
    }
    let gate = start(address, &two("action", "")).await;
    for admitted in 1..=10 {
        let counted = format!("outcome=\"allowed\",reason=\"ok\"}} {admitted}\n");
        let is_admitted = async || once(gate.admin, get("/metrics")).await.contains(&counted);
        // Until the gate sees the end of an earlier client, its permit is in use.
        let admission = async {
            loop {
                let mut client = Peer::connect(gate.inbound).await;
                client.send(get("/x")).await;
                tokio::select! {
                    answer = client.message() => assert_eq!(status(&answer), 429),
                    () = async { while !is_admitted().await {} } => break,
                }
            }
        };
        tokio::time::timeout(PATIENCE, admission).await.expect("the permits of earlier clients come back");
    }
}

#[tokio::test]
async fn kept_permits_do_not_delay_a_shutdown() {
    let worker = Worker::start().await;
    let mut gate = start(worker.address, &two("client_ip", "")).await;
    for _ in 0..4 {
        abort(gate.inbound, &worker, &get("/x")).await;
    }
    let ended = tokio::time::timeout(Duration::from_secs(5), gate.stop()).await.expect("it stops at once");
    assert_eq!((ended.unwrap().cut_off, worker.working.load(Ordering::SeqCst)), (0, 2));
}

const FINISH: &str = "on_disconnect = \"finish\"";

#[tokio::test]
async fn finished_calls_end_with_their_replies() {
    let worker = Worker::start().await;
    let gate = start(worker.address, &two("client_ip", FINISH)).await;
    for round in 1..=3 {
        for call in 0..10 {
            assert_eq!(abort(gate.inbound, &worker, &post("/x", "whole")).await, call < 2);
        }
        let page = once(gate.admin, get("/metrics")).await;
        assert!(page.contains("\ntidegate_finishing_calls 2"), "{page}");
        worker.end(2).await;
        worker.ends.add_permits(1);
        eventually_served(gate.inbound).await;
        assert_eq!(worker.begun.load(Ordering::SeqCst), 3 * round);
    }
    assert_eq!((worker.most(), worker.connections.load(Ordering::SeqCst)), (2, 2), "connections are used again");
}

#[tokio::test]
async fn a_reply_that_has_begun_is_finished() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), &two("client_ip", FINISH)).await;
    let mut begun = Vec::new();
    for _ in 0..2 {
        let mut client = Peer::connect(gate.inbound).await;
        client.send(get("/x")).await;
        let mut served = Peer::over(listener.accept().await.unwrap().0);
        served.message().await;
        served.send("HTTP/1.1 200 OK\r\ncontent-length: 60000000\r\n\r\nbegun").await;
        client.exactly(20).await;
        drop(client);
        // More than fits in the buffers of a connection that nobody reads.
        served.send(vec![b'x'; 30_000_000]).await;
        begun.push(served);
    }
    assert_eq!(status(&once(gate.inbound, get("/x")).await), 429);
    begun[0].send(vec![b'x'; 60_000_000 - 30_000_000 - 5]).await;
    let mut served = begun.swap_remove(0);
    tokio::select! {
        () = eventually_served(gate.inbound) => {}
        () = async { loop { served.message().await; served.send(HELLO).await; } } => {}
    }
}

#[tokio::test]
async fn an_endless_reply_is_not_finished() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gate = start(listener.local_addr().unwrap(), &two("client_ip", FINISH)).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/x")).await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    served.message().await;
    served.send("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nbegun").await;
    client.exactly(20).await;
    drop(client);
    let mut sent_megabytes = 0;
    while served.try_send(vec![b'x'; 1_000_000]).await.is_ok() {
        sent_megabytes += 1;
        assert!(sent_megabytes < 100, "64 MiB, and the buffers of two connections");
    }
    assert!(sent_megabytes > 60, "{sent_megabytes}");
}

#[tokio::test]
async fn a_call_is_finished_within_the_time_for_a_reply() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let policy = two("client_ip", &format!("{FINISH}\ntimeouts.response = \"400ms\""));
    let gate = start(listener.local_addr().unwrap(), &policy).await;
    let mut client = Peer::connect(gate.inbound).await;
    client.send(get("/x")).await;
    let mut served = Peer::over(listener.accept().await.unwrap().0);
    served.message().await;
    drop(client);
    assert!(tokio::time::timeout(Duration::from_millis(200), served.ends()).await.is_err(), "it is finished");
    assert!(served.ends().await, "and given up");
}

/// Calls that are broken off at any time: before they are sent, while the server works, and while it answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_broken_off_at_any_time_are_no_more_work_than_the_limit() {
    for inbound in ["", FINISH] {
        let worker = Worker::start().await;
        let gate = start(worker.address, &two("action", inbound)).await;
        let ending = tokio::spawn({
            let ends = Arc::clone(&worker.ends);
            async move {
                loop {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    ends.add_permits(1);
                    tokio::time::sleep(Duration::from_millis(3)).await;
                    ends.forget_permits(100);
                }
            }
        });
        let clients = (0..8).map(|client| {
            let (inbound, mut random) = (gate.inbound, RandomSource::from_seed(client));
            tokio::spawn(async move {
                for _ in 0..100 {
                    let mut peer = Peer::connect(inbound).await;
                    peer.send(get_from(&format!("203.0.113.{}", random.below(250)))).await;
                    let patience = Duration::from_micros(random.below(8_000));
                    let _ = tokio::time::timeout(patience, peer.message()).await;
                }
            })
        });
        for client in clients.collect::<Vec<_>>() {
            client.await.unwrap();
        }
        assert_eq!(worker.most(), 2);
        // An answer that arrives with the end of its client isn't seen as one.
        gate.clock.advance(Span::from_secs(30));
        eventually_served(gate.inbound).await;
        ending.abort();
    }
}
