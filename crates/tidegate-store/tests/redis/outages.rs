//! Blocks that a node keeps while its server is away, is another one, or forgets.
#![expect(clippy::disallowed_methods, reason = "the server's clock runs too")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate_core::{
    Admission, Batch, Clock, Key, Limit, LimitId, LimitKind, Limits, OnOutage, Op, Outcome, Penalty, Sharing, Span,
    Time, Verb, Window,
};
use tidegate_store::{Fleet, FleetOptions, Store as _, StoreResponse, TimeSource, fleet_limits};
use tidegate_testkit::servers::RedisServer;
use tokio::time::sleep;

use crate::common::Stores;

const KEY: Key = Key::new(11, 0x0123_4567_89ab_cdef);
/// A key that the server has to be asked about.
const OTHER: Key = Key::new(1, 1);
const TEN_MINUTES: Span = Span::from_secs(600);
/// As long as anything here may take on a busy machine.
const LONG: Duration = Duration::from_secs(20);

#[derive(Clone, Copy)]
struct Monotonic(Instant);

impl Clock for Monotonic {
    fn now(&self) -> Time {
        Time::from_secs(1_700_000_000) + Span::from_duration(self.0.elapsed())
    }
}

/// A node that lets everything pass while its server is away, but for clients that are known to be blocked.
struct Node {
    fleet: Fleet,
    clock: Monotonic,
}

impl Node {
    fn start(stores: &Stores, number: u64) -> Self {
        let minute = Span::from_secs(60);
        let window = Limit::new(LimitKind::Window(Window::new(1, minute, 64).unwrap()));
        let banned = window.with_penalty(Penalty::ban(TEN_MINUTES, minute).unwrap());
        let limits =
            Limits::new(vec![banned.with_sharing(Sharing { on_outage: OnOutage::Allow, lease: None })]).unwrap();
        let redis = stores.under("outages:", &Arc::new(fleet_limits(&limits).unwrap()));
        let clock = Monotonic(Instant::now());
        Self { fleet: Fleet::start(Box::new(redis), clock, FleetOptions::new(number)), clock }
    }

    async fn ask(&self, verb: Verb, key: Key) -> Outcome {
        let batch = Batch::with_op(9, Op::new(LimitId::FIRST, verb, key, 1));
        match self.fleet.apply(&batch, self.clock.now()) {
            StoreResponse::Ready(outcomes) => outcomes.list()[0],
            StoreResponse::Pending(later) => later.await.unwrap().list()[0],
        }
    }

    async fn is_blocked(&self) -> bool {
        self.ask(Verb::Take, KEY).await.admission == Admission::Blocked
    }

    /// Has the key blocked, which only this node and the server know.
    async fn block(&self) {
        self.until(true).await;
        self.ask(Verb::Take, KEY).await;
        self.ask(Verb::Take, KEY).await;
        assert!(self.is_blocked().await);
    }

    /// Until the server is there, or isn't; the key stays blocked.
    async fn until(&self, is_up: bool) {
        let began = Instant::now();
        while self.fleet.is_up() != is_up {
            assert!(began.elapsed() < LONG);
            sleep(Duration::from_millis(5)).await;
            // Without a question the server isn't missed.
            self.ask(Verb::Peek, OTHER).await;
        }
    }

    /// The key stays blocked for so long.
    async fn stays_blocked(&self, time: Duration, when: &str) {
        let began = Instant::now();
        while began.elapsed() < time {
            assert!(self.is_blocked().await, "{when}");
            sleep(Duration::from_millis(5)).await;
            self.ask(Verb::Peek, OTHER).await;
        }
    }
}

#[test]
fn a_known_block_survives_a_temporary_replica_role() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    stores.runtime.block_on(async {
        let node = Node::start(&stores, 1);
        node.block().await;
        server.command(&["REPLICAOF", "127.0.0.1", "1"]);
        node.stays_blocked(Duration::from_millis(2_500), "it takes no writes").await;
        assert!(!node.fleet.is_up());
        server.command(&["REPLICAOF", "NO", "ONE"]);
        node.until(true).await;
        node.stays_blocked(Duration::from_millis(500), "it is a master again").await;
    });
}

#[test]
fn a_known_block_survives_freeze_and_kill() {
    let Some(mut server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    stores.runtime.block_on(async {
        let node = Node::start(&stores, 1);
        node.block().await;
        server.freeze();
        node.stays_blocked(Duration::from_secs(2), "it is frozen").await;
        server.thaw();
        // The key isn't asked about in between.
        node.until(true).await;
        server.kill();
        node.stays_blocked(Duration::from_secs(2), "it was killed").await;
    });
}

#[test]
fn a_known_block_is_restored_to_the_server() {
    let Some(mut server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    stores.runtime.block_on(async {
        let node = Node::start(&stores, 1);
        node.block().await;
        for round in 0..3 {
            server.kill();
            node.stays_blocked(Duration::from_secs(1), "it was killed").await;
            server.restart();
            node.until(true).await;
            node.stays_blocked(Duration::from_millis(200), "it knows nothing").await;
            if round == 1 {
                let other = Node::start(&stores, 2);
                other.until(true).await;
                let found = other.ask(Verb::Take, KEY).await;
                assert_eq!((found.admission, found.strikes), (Admission::Blocked, 1), "it knows of it again");
                assert!(found.block == TEN_MINUTES);
            }
        }
        server.kill();
        node.stays_blocked(Duration::from_secs(1), "it was killed again").await;
    });
}

#[test]
fn a_reset_block_does_not_return() {
    let Some(mut server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    stores.runtime.block_on(async {
        let (node, other) = (Node::start(&stores, 1), Node::start(&stores, 2));
        node.block().await;
        other.until(true).await;
        other.ask(Verb::Reset, KEY).await;
        let began = Instant::now();
        while node.is_blocked().await {
            assert!(began.elapsed() < LONG, "it heard of it");
            sleep(Duration::from_millis(5)).await;
        }
        server.restart();
        node.until(true).await;
        assert!(!node.is_blocked().await);
    });
}
