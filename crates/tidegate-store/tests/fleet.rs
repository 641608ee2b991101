//! A node over a store that many share: what it answers by itself, and what it does when the store is gone.
#![cfg(feature = "remote")]
#![expect(clippy::unwrap_used, reason = "a test's errors are its failures")]
#![expect(clippy::disallowed_methods, reason = "the clock here is tokio's, which stands still and jumps")]

#[path = "fleet/blocks.rs"]
mod blocks;
#[path = "fleet/leases.rs"]
mod leases;
#[path = "fleet/reload.rs"]
mod reload;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use tidegate_core::batch::Outcome;
use tidegate_core::pacer::PacerGrowth;
use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Admission, Batch, Clock, Concurrency, Cooldown, CountMode, Key, LeaseSpec, Limit, LimitId, LimitKind, Limits,
    OnOutage, Op, Outcomes, PacerSpec, Penalty, PenaltySpec, Quota, Rate, SharedPacerRules, Sharing, Span, Time, Verb,
    Window,
};
use tidegate_store::{Fleet, FleetOptions, RemoteStore as _, Store, StoreError, StoreResponse, fleet_limits};
use tidegate_testkit::remote::{FlakyRemote, RemoteBehaviour};
use tokio::time::{Instant, sleep};

const KEY: Key = Key::new(7, 0xdead_beef_0bad_cafe);

/// A clock that may be set ahead or back.
#[derive(Clone)]
struct Settable {
    clock: Virtual,
    secs: Arc<AtomicI64>,
}

impl Settable {
    fn set(&self, secs: i64) {
        self.secs.fetch_add(secs, Ordering::SeqCst);
    }
}

impl Clock for Settable {
    fn now(&self) -> Time {
        let micros = self.secs.load(Ordering::SeqCst) * 1_000_000;
        Time::from_micros(self.clock.now().as_micros().wrapping_add_signed(micros))
    }
}

/// Tokio's time, seen by a clock that is so many microseconds ahead.
#[derive(Clone, Copy)]
struct Virtual {
    start: Instant,
    ahead: u64,
}

impl Virtual {
    fn new() -> Self {
        Self { start: Instant::now(), ahead: 0 }
    }

    fn ahead(self, span: Span) -> Self {
        Self { ahead: span.as_micros(), ..self }
    }
}

impl Clock for Virtual {
    fn now(&self) -> Time {
        let passed = Instant::now() - self.start;
        Time::from_secs(1_700_000_000) + Span::from_duration(passed) + Span::from_micros(self.ahead)
    }
}

fn window(limit: u64, secs: u64) -> Limit {
    Limit::new(LimitKind::Window(Window::new(limit, Span::from_secs(secs), 64).unwrap()))
}

fn on_outage(on_outage: OnOutage) -> Sharing {
    Sharing { on_outage, lease: None }
}

fn id(index: usize) -> LimitId {
    LimitId::from_index(index).unwrap()
}

/// A node of a fleet, to be asked plainly.
struct Caller {
    fleet: Fleet,
    clock: Virtual,
}

impl Caller {
    fn new(remote: &FlakyRemote, clock: Virtual, node: u64) -> Self {
        Self { fleet: Fleet::start(Box::new(remote.clone()), clock, FleetOptions::new(node)), clock }
    }

    async fn ask(&self, batch: &Batch) -> Result<Outcomes, StoreError> {
        match self.fleet.apply(batch, self.clock.now()) {
            StoreResponse::Ready(outcomes) => Ok(outcomes),
            StoreResponse::Pending(later) => later.await,
        }
    }

    async fn one(&self, verb: Verb, limits: &[usize], key: Key) -> Outcome {
        self.ask(&batch(verb, limits, key)).await.unwrap().list()[0]
    }

    /// Takes so much of the first limit; what was told, and when.
    async fn cost(&self, cost: u64) -> (Outcome, Time) {
        let mut batch = batch(Verb::Take, &[0], KEY);
        batch.ops_mut()[0].cost = cost;
        let outcomes = self.ask(&batch).await.unwrap();
        (outcomes.list()[0], outcomes.now())
    }

    async fn take(&self) -> bool {
        !self.one(Verb::Take, &[0], KEY).await.admission.refuses()
    }
}

fn batch(verb: Verb, limits: &[usize], key: Key) -> Batch {
    let mut batch = Batch::new(9);
    for limit in limits {
        batch.push(Op::new(id(*limit), verb, key, 1)).unwrap();
    }
    batch
}

fn remote(limits: impl IntoIterator<Item = Limit>, clock: impl Clock, tells_resets: bool) -> FlakyRemote {
    let limits = Limits::new(limits.into_iter().collect()).unwrap();
    FlakyRemote::new(Arc::new(fleet_limits(&limits).unwrap()), clock, tells_resets)
}

/// Until the first heartbeat has been answered.
async fn settled() {
    sleep(Duration::from_millis(1)).await;
}

fn blocking() -> Limit {
    let penalty =
        Penalty::new(PenaltySpec { base: Span::from_secs(30), ..PenaltySpec::default() }, Span::from_secs(60));
    window(1, 60).with_penalty(penalty.unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_known_block_needs_no_store_request() {
    let clock = Virtual::new();
    // The node's clock is far from the store's: only lengths of time are believed.
    let store = remote([blocking(), window(100, 60)], clock.ahead(Span::from_secs(3_000)), true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert!(node.take().await);
    let refused = node.one(Verb::Take, &[0, 1], KEY).await;
    assert_eq!((refused.admission, refused.block), (Admission::Refused, Span::from_secs(30)));
    let asked = store.request_count();
    for second in 0..29 {
        let outcomes = node.ask(&batch(Verb::Take, &[0, 1], KEY)).await.unwrap();
        let told = outcomes.list()[0];
        assert_eq!(told.admission, Admission::Blocked);
        assert_eq!(told.retry_at.since(outcomes.now()), Span::from_secs(30 - second));
        assert_eq!(outcomes.list()[1].admission, Admission::Admitted);
        sleep(Duration::from_secs(1)).await;
    }
    let rolls = 29 / 2 + 1;
    assert!(store.request_count() - asked <= rolls, "{} asks", store.request_count() - asked);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(node.one(Verb::Take, &[0, 1], KEY).await.admission, Admission::Parole);
}

#[tokio::test(start_paused = true)]
async fn a_reset_reaches_all_nodes() {
    let clock = Virtual::new();
    for tells_resets in [true, false] {
        let store = remote([blocking()], clock, tells_resets);
        let (one, two) = (Caller::new(&store, clock, 1), Caller::new(&store, clock, 2));
        settled().await;
        assert!(one.take().await && !one.take().await && !two.take().await);
        two.one(Verb::Reset, &[0], KEY).await;
        // Told at once, or found within a second.
        sleep(Duration::from_millis(if tells_resets { 1 } else { 1_000 })).await;
        assert!(one.take().await, "told: {tells_resets}");
    }
}

#[tokio::test(start_paused = true)]
async fn locally_refused_calls_reach_limits_counting_all() {
    let clock = Virtual::new();
    let store = remote([blocking(), window(100, 60).with_count_mode(CountMode::All)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    for _ in 0..10 {
        node.one(Verb::Take, &[0, 1], KEY).await;
    }
    assert_eq!(node.one(Verb::Peek, &[1], KEY).await.used, 10);
}

#[tokio::test(start_paused = true)]
async fn outage_shares_are_spent_and_reported_afterwards() {
    let clock = Virtual::new();
    for mood in [RemoteBehaviour::Unresponsive, RemoteBehaviour::Failing, RemoteBehaviour::LostReply] {
        let day = Arc::new(FixedPeriods(Span::from_secs(86_400)));
        let limits = [
            window(100, 3600),
            Limit::new(LimitKind::Quota(Quota::new(40, day).unwrap())),
            Limit::new(LimitKind::Rate(Rate::new(1, Span::from_secs(60), 10).unwrap())),
        ];
        let store = remote(limits, clock, true);
        let nodes = [1, 2, 3, 4].map(|node| Caller::new(&store, clock, node));
        sleep(Duration::from_secs(5)).await;
        assert_eq!(nodes.each_ref().map(|node| node.fleet.node_count()), [4; 4], "{mood:?}");
        for _ in 0..20 {
            assert!(nodes[0].take().await);
        }
        store.set_behaviour(mood);
        let fell = Instant::now();
        for node in &nodes {
            assert!(node.take().await);
        }
        let waited = Instant::now() - fell;
        assert!(waited <= Duration::from_millis(4 * 51), "{mood:?}: {waited:?} for four nodes' first timeouts");
        let mut admitted = [0; 3];
        for _ in 0..60 {
            for node in &nodes {
                let before = Instant::now();
                for (limit, admitted) in admitted.iter_mut().enumerate() {
                    let key = Key::new(8, limit as u64);
                    *admitted += u64::from(!node.one(Verb::Take, &[limit], key).await.admission.refuses());
                }
                assert_eq!(Instant::now(), before, "no waiting while the store is known to be gone");
            }
        }
        assert_eq!(admitted, [100, 40, 8], "{mood:?}: the shares of four nodes");
        assert!(nodes.iter().all(|node| !node.fleet.is_up()));
        store.set_behaviour(RemoteBehaviour::Normal);
        sleep(Duration::from_millis(500)).await;
        assert!(nodes.iter().all(|node| node.fleet.is_up()), "{mood:?}: found without a caller");
        for (limit, used) in [(0, 100), (1, 40), (2, 8)] {
            let found = nodes[1].one(Verb::Peek, &[limit], Key::new(8, limit as u64)).await;
            assert_eq!(found.used, used, "{mood:?}: what was used meanwhile");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn each_limit_has_its_own_outage_rule() {
    let clock = Virtual::new();
    let limits = [
        window(1, 60).with_sharing(on_outage(OnOutage::Allow)),
        window(1, 60).with_sharing(on_outage(OnOutage::Deny)),
        window(1, 60),
    ];
    let store = remote(limits, clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    store.set_behaviour(RemoteBehaviour::Failing);
    for call in 0..3 {
        let allowed = node.one(Verb::Take, &[0, 1], KEY).await;
        assert_eq!(
            (allowed.admission, allowed.limit),
            (Admission::Admitted, 1),
            "the first limit speaks for its action"
        );
        let denied = node.ask(&batch(Verb::Take, &[1], KEY)).await;
        assert!(matches!(denied, Err(StoreError::Unavailable)), "{denied:?}");
        assert_eq!(node.one(Verb::Take, &[2], KEY).await.admission.refuses(), call > 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_single_slow_reply_is_no_outage() {
    let clock = Virtual::new();
    let store = remote([window(100, 60)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    store.set_behaviour(RemoteBehaviour::SlowExecution(Duration::from_millis(70)));
    let slow = batch(Verb::Take, &[0], KEY);
    let slow = node.ask(&slow);
    store.set_behaviour(RemoteBehaviour::Normal);
    assert!(!slow.await.unwrap().list()[0].admission.refuses());
    sleep(Duration::from_millis(1)).await;
    assert!(node.fleet.is_up());
    // A late answer was carried out all the same, or it wasn't: its charge stands, and so does the node's own.
    sleep(Duration::from_millis(200)).await;
    let used = node.one(Verb::Peek, &[0], KEY).await.used;
    assert!((1..=2).contains(&used), "{used}");
}

#[tokio::test(start_paused = true)]
async fn resets_during_an_outage_are_delivered_later() {
    let clock = Virtual::new();
    let store = remote([blocking()], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert!(node.take().await && !node.take().await);
    store.set_behaviour(RemoteBehaviour::Failing);
    sleep(Duration::from_secs(3)).await;
    node.one(Verb::Reset, &[0], KEY).await;
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert!(node.take().await);
}
/// A store slower than a decision's timeout counts as down, and isn't up again after each probe.
#[tokio::test(start_paused = true)]
async fn a_permanently_slow_store_grants_one_share() {
    let clock = Virtual::new();
    let store = remote([window(5, 60)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    store.set_behaviour(RemoteBehaviour::SlowExecution(Duration::from_millis(60)));
    let mut admitted = 0;
    for _ in 0..500 {
        admitted += u32::from(node.take().await);
        sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(admitted, 5);
    assert!(!node.fleet.is_up());
    assert_eq!(node.fleet.outage(), Some("shared"));
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_millis(500)).await;
    assert!(node.fleet.is_up());
    assert_eq!(node.fleet.outage(), None);
    assert_eq!(node.one(Verb::Peek, &[0], KEY).await.used, 5);
}

/// A store that stalls again and again within a window: a node's share is granted once, and told once.
#[tokio::test(start_paused = true)]
async fn repeated_stalls_grant_no_share_twice() {
    let clock = Virtual::new();
    let store = remote([window(50, 60)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    let mut admitted = 0;
    for stall in 0..20 {
        store.set_behaviour(RemoteBehaviour::Failing);
        for _ in 0..3 {
            admitted += u32::from(node.take().await);
        }
        store.set_behaviour(RemoteBehaviour::Normal);
        sleep(Duration::from_secs(1)).await;
        assert!(node.fleet.is_up());
        if stall < 10 {
            assert_eq!(node.one(Verb::Peek, &[0], KEY).await.used, u64::from(admitted), "after stall {stall}");
        }
    }
    assert_eq!(admitted, 50);
}

/// A gate that was closed and a credential that was disabled during an outage stay so for all afterwards.
#[tokio::test(start_paused = true)]
async fn outage_cool_downs_are_reported_afterwards() {
    let clock = Virtual::new();
    let cooldown = || Limit::new(LimitKind::Cooldown(Cooldown::default()));
    let store = remote([cooldown(), cooldown()], clock, true);
    let nodes = [1, 2].map(|node| Caller::new(&store, clock, node));
    settled().await;
    store.set_behaviour(RemoteBehaviour::Failing);
    assert!(nodes[0].take().await);
    let tell = |limit, verb, cost| {
        let told = Batch::with_op(9, Op::new(id(limit), verb, KEY, cost));
        nodes[0].fleet.submit(&told, clock.now());
    };
    tell(0, Verb::Throttle { generation: 0 }, 600_000_000);
    tell(1, Verb::Disable, 0);
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    let met = nodes[1].one(Verb::Take, &[0], KEY).await;
    let wait = met.retry_at.since(clock.now());
    assert!(met.admission.refuses() && (598..=600).contains(&(wait.as_micros() / 1_000_000)), "{met:?}");
    assert!(nodes[1].one(Verb::Take, &[1], KEY).await.retry_at.is_never());
}

/// After an outage, a pace keeps the effect of calls that failed in it, for all nodes. The effect of successes isn't
/// kept.
#[tokio::test(start_paused = true)]
async fn outage_paces_are_reported_afterwards() {
    let clock = Virtual::new();
    let spec = PacerSpec { growth: PacerGrowth::Linear, randomization: 0, successes: 1, ..PacerSpec::default() };
    let store = remote([Limit::new(LimitKind::Pace(SharedPacerRules::new(spec).unwrap()))], clock, true);
    let nodes = [1, 2].map(|node| Caller::new(&store, clock, node));
    settled().await;
    let ask = async |node: usize, failed| nodes[node].one(Verb::Pace { failed, draw: 0 }, &[0], KEY).await.used;
    let outage = async |calls: &[bool]| {
        store.set_behaviour(RemoteBehaviour::Failing);
        for failed in calls {
            ask(0, *failed).await;
        }
        store.set_behaviour(RemoteBehaviour::Normal);
        sleep(Duration::from_secs(1)).await;
        nodes[1].one(Verb::Peek, &[0], KEY).await.used
    };
    assert_eq!((ask(0, true).await, ask(1, true).await), (500_000_000, 1_000_000_000));
    assert_eq!(outage(&[true, true, true, true, false]).await, 1_500_000_000);
    assert_eq!(outage(&[true, false, false]).await, 1_500_000_000, "never shorter");
    for _ in 0..3 {
        ask(1, false).await;
    }
    assert_eq!(outage(&[false]).await, 0);
}

/// Permits that were taken or given back during an outage are known afterwards, and those that the store has lost are
/// held again when they are renewed.
#[tokio::test(start_paused = true)]
async fn permits_persist_through_an_outage() {
    let clock = Virtual::new();
    let in_flight = Concurrency::new(4, Concurrency::DEFAULT_LEASE).unwrap();
    let store = remote([Limit::new(LimitKind::Concurrency(in_flight))], clock, true);
    let nodes = [1, 2].map(|node| Caller::new(&store, clock, node));
    sleep(Duration::from_secs(3)).await;
    let call = |holder, verb| Batch::with_op(holder, Op::new(id(0), verb, KEY, 1));
    let used = async || nodes[1].one(Verb::Peek, &[0], KEY).await.used;
    nodes[0].ask(&call(1, Verb::Take)).await.unwrap();
    store.set_behaviour(RemoteBehaviour::Failing);
    nodes[0].ask(&call(2, Verb::Take)).await.unwrap();
    nodes[0].fleet.submit(&call(1, Verb::Release), clock.now());
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(used().await, 1);

    nodes[1].fleet.submit(&call(2, Verb::Release), clock.now());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(used().await, 0, "as if the store had lost it");
    nodes[0].fleet.submit(&call(2, Verb::Renew), clock.now());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(used().await, 1);
    nodes[0].fleet.submit(&call(2, Verb::Release), clock.now());
    sleep(Duration::from_secs(1)).await;
    assert_eq!(used().await, 0);
}

/// Right after an outage, nodes that haven't reported yet aren't counted.
#[tokio::test(start_paused = true)]
async fn the_node_count_persists_after_an_outage() {
    let clock = Virtual::new();
    let store = remote([window(30, 60)], clock, true);
    let nodes = [1, 2, 3].map(|node| Caller::new(&store, clock, node));
    sleep(Duration::from_secs(12)).await;
    assert_eq!(nodes[0].fleet.node_count(), 3);
    store.set_behaviour(RemoteBehaviour::Failing);
    // The partition of a batch with an affinity.
    let mut together = batch(Verb::Take, &[0], KEY);
    together.set_affinity(0xfeed);
    nodes[0].ask(&together).await.unwrap();
    sleep(Duration::from_secs(20)).await;
    store.set_behaviour(RemoteBehaviour::Normal);
    for _ in 0..40 {
        sleep(Duration::from_millis(50)).await;
        assert_eq!(nodes[0].fleet.node_count(), 3);
    }
    sleep(Duration::from_secs(20)).await;
    assert_eq!(nodes[0].fleet.node_count(), 3);
}

/// A store that has lost its data unnoticed gets the seed again before a new node finds none.
#[tokio::test(start_paused = true)]
async fn a_lost_hash_seed_is_restored() {
    let clock = Virtual::new();
    let store = remote([window(5, 60)], clock, true);
    let mut options = FleetOptions::new(1);
    options.seed = Some([7; 16]);
    let _node = Fleet::start(Box::new(store.clone()), clock, options);
    sleep(Duration::from_secs(5)).await;
    store.forget_seed();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(store.get_or_insert_seed([9; 16]).await.unwrap(), [7; 16]);
}

/// Charges of an earlier period end with it, also in the report to the store after an outage.
#[tokio::test(start_paused = true)]
async fn earlier_periods_refunds_keep_outage_charges() {
    let clock = Virtual::new();
    let quota = Quota::new(10, Arc::new(FixedPeriods(Span::from_secs(60)))).unwrap();
    let store = remote([Limit::new(LimitKind::Quota(quota.clone()))], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    let call = batch(Verb::Take, &[0], KEY);
    let charged_at = node.ask(&call).await.unwrap().now();
    sleep(quota.period(clock.now()).end.since(clock.now()).as_duration()).await;
    store.set_behaviour(RemoteBehaviour::Failing);
    assert!(node.take().await && node.take().await);
    node.fleet.submit(&batch(Verb::Refund, &[0], KEY).with_charged_at(charged_at), clock.now());
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(node.one(Verb::Peek, &[0], KEY).await.used, 2);
}
