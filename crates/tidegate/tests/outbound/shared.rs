//! Providers with state that several nodes share.

use std::sync::Arc;
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::outbound::{CallErrorKind, CallOptions, Outbound, Provider};
use tidegate::policy::KeySeed;
use tidegate::store::{AnyStore, Fleet, FleetOptions, Memory, fleet_limits};
use tidegate_core::breaker::BreakerState;
use tidegate_testkit::remote::{FlakyRemote, RemoteBehaviour};
use tokio::time::sleep;

use crate::common::{Answers, FAILED, GOOD, Log, policy, throttled_for};

struct Nodes {
    store: FlakyRemote,
    nodes: Vec<Outbound<AnyStore, TokioClock>>,
    log: Log,
}

impl Nodes {
    async fn new(count: u64, settings: &str) -> Self {
        let plan = policy(settings).outbound().unwrap().clone();
        let clock = TokioClock::default();
        let store = FlakyRemote::new(Arc::new(fleet_limits(plan.limits()).unwrap()), clock, true);
        let node = |number| {
            let fleet = Fleet::start(Box::new(store.clone()), clock, FleetOptions::new(number));
            let own = AnyStore::Memory(Memory::new(Arc::clone(plan.limits()), 1 << 20));
            let seed = KeySeed::new([7; 16]);
            Outbound::with_stores(plan.clone(), own, Some(AnyStore::Fleet(fleet)), clock, &seed)
        };
        let nodes = (1..=count).map(node).collect();
        // Until all nodes know their number.
        sleep(Duration::from_secs(3)).await;
        Self { store, nodes, log: Log::default() }
    }

    fn api(&self, node: usize) -> &Provider<AnyStore, TokioClock> {
        self.nodes[node].provider("api").unwrap()
    }

    async fn call(&self, node: usize, reply: tidegate_core::call::AttemptReport) -> Result<(), CallErrorKind> {
        let mut upstream = Answers::of(self.api(node), &[reply], &self.log, node as u32);
        let options = CallOptions { timeout: Some(Duration::from_secs(5)), ..CallOptions::default() };
        self.api(node).call(options, &mut upstream).await.map(drop).map_err(|error| error.kind)
    }

    async fn confer(&self) {
        // Twice, because the first nodes vote before they know the others' votes.
        for _ in 0..2 {
            for node in &self.nodes {
                node.run_vote_exchange().await;
            }
        }
    }

    fn state(&self, node: usize) -> BreakerState {
        self.api(node).inspect(|state, now| state.breaker.state(now))
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_share_a_providers_limit() {
    let nodes = Nodes::new(3, "limit = \"6 per 1h\"\nshared = true").await;
    for call in 0..6 {
        nodes.call(call % 3, GOOD).await.unwrap();
    }
    for node in 0..3 {
        assert!(matches!(nodes.call(node, GOOD).await, Err(CallErrorKind::RateLimited { .. })), "node {node}");
    }
    assert_eq!(nodes.log.lock().unwrap().len(), 6);
}

/// The store doesn't count calls in flight: each node limits its own.
#[tokio::test(start_paused = true)]
async fn in_flight_credential_limits_apply_per_node() {
    let settings =
        "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\ncredential_limit = \"1 in flight\"\nshared = true";
    let nodes = Nodes::new(2, settings).await;
    let streaming = tidegate_core::call::AttemptReport { is_streaming: true, ..GOOD };
    let mut tails = Vec::new();
    for node in [0, 0, 1, 1] {
        let mut upstream = Answers::of(nodes.api(node), &[streaming], &nodes.log, 0);
        tails.push(nodes.api(node).call(CallOptions::default(), &mut upstream).await.unwrap());
    }
    for node in 0..2 {
        assert!(matches!(nodes.call(node, GOOD).await, Err(CallErrorKind::DeadlineExceeded)), "node {node}");
    }
    tails.remove(0);
    nodes.call(0, GOOD).await.unwrap();
    let used: Vec<_> = nodes.log.lock().unwrap().iter().map(|(_, _, credential)| *credential).collect();
    assert_eq!(used, [0, 1, 0, 1, 0]);
}

#[tokio::test(start_paused = true)]
async fn nodes_count_separately_by_default() {
    let nodes = Nodes::new(2, "limit = \"1 per 1h\"").await;
    let asked = nodes.store.request_count();
    for node in 0..2 {
        nodes.call(node, GOOD).await.unwrap();
        assert!(nodes.call(node, GOOD).await.is_err());
    }
    assert_eq!(nodes.store.request_count(), asked);
}

#[tokio::test(start_paused = true)]
async fn one_nodes_throttled_reply_pauses_all_nodes() {
    let nodes = Nodes::new(2, "limit = \"100 per 1s\"\nshared = true\nretry = { max_attempts = 1 }").await;
    assert!(nodes.call(0, throttled_for(600)).await.is_err());
    sleep(Duration::from_millis(10)).await;
    let refused = nodes.call(1, GOOD).await;
    assert!(matches!(refused, Err(CallErrorKind::CoolingDown { .. })), "{refused:?}");
    assert_eq!(nodes.log.lock().unwrap().len(), 1, "nothing was sent");
}

#[tokio::test(start_paused = true)]
async fn a_majority_of_open_breakers_opens_all() {
    let settings = "limit = \"100 per 1s\"\nshared = true\nretry = { max_attempts = 1 }\nbreaker = { failures = 2, open = \"60s\" }";
    let nodes = Nodes::new(3, settings).await;
    let fail = async |node| {
        for _ in 0..2 {
            assert!(nodes.call(node, FAILED).await.is_err());
        }
    };
    fail(0).await;
    nodes.confer().await;
    assert_eq!(
        [0, 1, 2].map(|node| nodes.state(node)),
        [BreakerState::Open, BreakerState::Closed, BreakerState::Closed],
        "one bad node"
    );
    fail(1).await;
    nodes.confer().await;
    assert_eq!(nodes.state(2), BreakerState::Open, "two of three");
    assert!(matches!(nodes.call(2, GOOD).await, Err(CallErrorKind::Unavailable { .. })));
    // Each node detects the recovery by itself. The votes of nodes that haven't called since don't stop it.
    sleep(Duration::from_secs(61)).await;
    for _ in 0..2 {
        nodes.call(2, GOOD).await.unwrap();
    }
    nodes.confer().await;
    assert_eq!(nodes.state(2), BreakerState::Closed);
    nodes.call(2, GOOD).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn calls_continue_during_a_store_outage() {
    let nodes = Nodes::new(2, "limit = \"10 per 1h\"\nshared = true").await;
    nodes.store.set_behaviour(RemoteBehaviour::Unresponsive);
    for node in 0..2 {
        for _ in 0..5 {
            nodes.call(node, GOOD).await.unwrap();
        }
        assert!(
            matches!(nodes.call(node, GOOD).await, Err(CallErrorKind::RateLimited { .. })),
            "a share of one in two"
        );
    }
    nodes.store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert!(matches!(nodes.call(0, GOOD).await, Err(CallErrorKind::RateLimited { .. })), "what was used was told");
}
