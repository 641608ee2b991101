//! The turns of connections: however much a client sends at once, other tasks run between its decisions.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use futures_util::future::{Either, join_all, select};
use tidegate::Gate;
use tidegate::clock::ManualClock;
use tidegate::store::{Memory, Store, StoreResponse};
use tidegate_core::{Batch, Limits, Time};
use tidegate_policy::KeySeed;
use tidegate_testkit::servers::free_port;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::common::{Running, nobody, policy, post, serve};
use crate::rls;

/// The most decisions that one task may take in its turn.
const MAX_TURN: usize = 64;
/// The decisions of a load.
const DECISIONS: usize = 3000;

/// A store that counts the decisions.
struct Counted(Memory, Arc<AtomicUsize>);

impl Store for Counted {
    type Future = <Memory as Store>::Future;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        self.1.fetch_add(1, Relaxed);
        self.0.apply(batch, now)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.0.submit(batch, now);
    }
}

struct Load {
    gate: Running,
    rls: SocketAddr,
    resp: SocketAddr,
    decided: Arc<AtomicUsize>,
}

impl Load {
    /// Starts a gate in the runtime of the test, which has one thread.
    fn start() -> Self {
        let [rls, resp] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], free_port())));
        let file = format!(
            "[inbound.action.all]\nmatch = {{ path = \"/x\" }}\nlimit = \"0 per 1h\"\n\
             [inbound.action.tenant]\nkey = \"key\"\nlimit = \"1000000 per 1h\"\n\
             [rls]\nlisten = \"{rls}\"\n[resp]\nlisten = \"{resp}\"\n"
        );
        let (policy, decided) = (policy(nobody(), &file), Arc::<AtomicUsize>::default());
        let store = Counted(Memory::new(Arc::clone(policy.plan().limits()), 1 << 20), Arc::clone(&decided));
        let gate = Gate::from_parts(Arc::clone(policy.plan()), store, ManualClock::default(), KeySeed::new([7; 16]));
        Self { gate: serve(gate, &policy, |_| None).unwrap(), rls, resp, decided }
    }

    /// Returns the most decisions between two turns of another task, while this client asks.
    async fn longest_turn(&self, client: impl Future) -> usize {
        let (decided, mut longest) = (|| self.decided.load(Relaxed), 0);
        let mut client = pin!(client);
        loop {
            let before = decided();
            let next = pin!(tokio::task::yield_now());
            let ended = matches!(select(&mut client, next).await, Either::Left(_));
            longest = longest.max(decided() - before);
            if ended {
                return longest;
            }
        }
    }
}

/// Sends requests at once, and reads until each has its reply.
async fn pipeline(address: SocketAddr, request: &[u8], reply: &str) {
    let (mut reader, mut writer) = TcpStream::connect(address).await.unwrap().into_split();
    let requests = request.repeat(DECISIONS);
    let sending = tokio::spawn(async move {
        writer.write_all(&requests).await.unwrap();
        writer
    });
    let (mut received, mut buffer, mut count) = (Vec::new(), [0; 16 << 10], 0);
    while count < DECISIONS {
        let read = reader.read(&mut buffer).await.unwrap();
        assert!(read > 0, "{count} replies, then the end");
        received.extend_from_slice(&buffer[..read]);
        let text = String::from_utf8_lossy(&received).into_owned();
        count += text.matches(reply).count();
        // A reply in two pieces isn't lost.
        received.drain(..text.rfind(reply).map_or(0, |at| at + reply.len()));
    }
    sending.await.unwrap();
}

#[tokio::test]
async fn pipelines_of_the_redis_protocol_leave_turns_to_others() {
    let load = Load::start();
    let request = b"*5\r\n$11\r\nCL.THROTTLE\r\n$1\r\na\r\n$2\r\n10\r\n$2\r\n10\r\n$2\r\n60\r\n";
    let longest = load.longest_turn(pipeline(load.resp, request, "*5\r\n:")).await;
    assert!((1..=MAX_TURN).contains(&longest), "{longest} decisions in one turn");
}

#[tokio::test]
async fn pipelines_over_http_leave_turns_to_others() {
    let load = Load::start();
    let check = post("/v1/check", r#"{"action":"tenant","key":"a"}"#);
    for (address, request, reply) in [
        (load.gate.inbound, "GET /x HTTP/1.1\r\nhost: a\r\n\r\n", "HTTP/1.1 429"),
        (load.gate.api, &check, "HTTP/1.1 200"),
    ] {
        let longest = load.longest_turn(pipeline(address, request.as_bytes(), reply)).await;
        assert!((1..=MAX_TURN).contains(&longest), "{longest} decisions in one turn: {request}");
    }
}

/// A turn ends after bytes, too, because the time of a decision grows with them.
#[tokio::test]
async fn pipelines_of_long_requests_have_shorter_turns() {
    let load = Load::start();
    let request = format!("GET /x HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "x".repeat(8 << 10));
    let longest = load.longest_turn(pipeline(load.gate.inbound, request.as_bytes(), "HTTP/1.1 429")).await;
    assert!((1..=4).contains(&longest), "{longest} decisions in one turn");
}

#[tokio::test]
async fn descriptors_of_one_request_leave_turns_to_others() {
    let load = Load::start();
    let client = rls::connect(load.rls).await;
    for (entries, most) in [
        (&[("action", "tenant"), ("key", "a")][..], MAX_TURN),
        (&[("remote_address", "192.0.2.1"), ("path", &format!("/x?{}", "x".repeat(400)))], MAX_TURN * 2 / 3),
    ] {
        let request = rls::request(vec![rls::descriptor(entries); 2000]);
        let longest = load.longest_turn(async { rls::ask(&client, &request).await.unwrap() }).await;
        assert!((1..=most).contains(&longest), "{longest} decisions in one turn");
    }
}

#[tokio::test]
async fn streams_leave_turns_to_others() {
    let load = Load::start();
    let address = load.rls;
    let client = async move || {
        let client = rls::connect(address).await;
        let request = rls::request([rls::descriptor(&[("action", "tenant"), ("key", "a")])]);
        for _ in 0..DECISIONS / 300 {
            let answers = join_all((0..100).map(|_| rls::ask(&client, &request))).await;
            assert!(answers.iter().all(Result::is_ok));
        }
    };
    // Another thread, so that the questions of all connections wait while the server answers.
    let clients = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(join_all((0..8).map(|_| client())));
    });
    let longest = load.longest_turn(async { clients.await.unwrap() }).await;
    assert!((1..=MAX_TURN).contains(&longest), "{longest} decisions in one turn");
}
