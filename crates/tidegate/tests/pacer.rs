//! Paces in shared stores: several nodes over one store that fails on demand, in virtual time, and two nodes over a
//! real server.
#![cfg(all(feature = "file", feature = "outbound", feature = "remote"))]
#![expect(clippy::unwrap_used, reason = "a test's errors are its failures")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::policy::{KeySeed, Policy, PolicySources};
use tidegate::store::{AnyStore, Fleet, FleetOptions, fleet_limits};
use tidegate::{OpenError, Pacer, Stores};
use tidegate_core::pacer::{PacerGrowth, PacerMetrics};
use tidegate_core::{Clock as _, PacerSpec, Time};
use tidegate_testkit::remote::{FlakyRemote, RemoteBehaviour};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

const MS: fn(u64) -> Duration = Duration::from_millis;
const SECS: fn(u64) -> Duration = Duration::from_secs;

/// A pace that doubles its waits, beginning with `initial`.
fn doubling(initial: Duration, successes: u32) -> PacerSpec {
    let growth = PacerGrowth::Exponential { up: 2_000, down: 500 };
    PacerSpec { initial, max: SECS(900), growth, randomization: 0, successes, ..PacerSpec::default() }
}

/// A pace with this interval between calls, constant after the first failure.
fn constant(interval: Duration) -> PacerSpec {
    PacerSpec { max: interval, ..doubling(interval, u32::MAX) }
}

/// A store and the nodes that share it.
struct World {
    clock: TokioClock,
    spec: PacerSpec,
    store: Mutex<Option<FlakyRemote>>,
    nodes: AtomicU64,
}

impl World {
    fn new(spec: PacerSpec) -> Self {
        Self { clock: TokioClock::default(), spec, store: Mutex::default(), nodes: AtomicU64::new(1) }
    }

    /// A worker in a node of its own.
    fn node(&self) -> Pacer<TokioClock> {
        let open = |limits| {
            let limits = Arc::new(fleet_limits(&limits)?);
            let mut store = self.store.lock().unwrap();
            let store = store.get_or_insert_with(|| FlakyRemote::new(limits, self.clock, false));
            let options = FleetOptions::new(self.nodes.fetch_add(1, Ordering::Relaxed));
            Ok(AnyStore::Fleet(Fleet::start(Box::new(store.clone()), self.clock, options)))
        };
        Pacer::with_store(self.spec, "api", self.clock, &KeySeed::new([7; 16]), open).unwrap()
    }

    fn store(&self) -> FlakyRemote {
        self.store.lock().unwrap().clone().unwrap()
    }

    async fn took(&self, told: impl Future<Output = ()>) -> Duration {
        let began = self.clock.now();
        told.await;
        self.since(began)
    }

    fn since(&self, began: Time) -> Duration {
        self.clock.now().since(began).as_duration()
    }
}

/// Asserts a wait, with a tolerance for the polling step of a node's clock and a first timeout of the store.
fn near(found: Duration, expected: Duration) {
    assert!((expected..=expected + MS(60)).contains(&found), "{found:?}, expected {expected:?}");
}

/// Makes successful calls without end, and counts them.
fn work(pacer: Pacer<TokioClock>, calls: &Arc<AtomicU64>) -> AbortHandle {
    let calls = Arc::clone(calls);
    tokio::spawn(async move {
        loop {
            calls.fetch_add(1, Ordering::Relaxed);
            pacer.on_success().await;
        }
    })
    .abort_handle()
}

#[tokio::test(start_paused = true)]
async fn one_nodes_failure_slows_the_other() {
    let world = World::new(doubling(MS(500), 2));
    let (one, two) = (world.node(), world.node());
    near(world.took(one.on_success()).await, MS(0));
    near(world.took(one.on_failure()).await, MS(500));
    assert_eq!((one.interval(), one.workers()), (MS(500), 1), "the initial wait, to the nanosecond");
    near(world.took(two.on_success()).await, MS(1_000));
    assert_eq!((two.interval(), two.workers()), (MS(500), 2));
    near(world.took(two.on_failure()).await, MS(2_000));
    // One success of each worker is a step down.
    near(world.took(one.on_success()).await, MS(2_000));
    near(world.took(two.on_success()).await, MS(1_000));
    assert_eq!(two.interval(), MS(500));
    let told = |calls, steps_up, steps_down, waits, total| PacerMetrics {
        calls,
        steps_up,
        steps_down,
        waits,
        total_wait: MS(total),
    };
    assert_eq!((one.metrics(), two.metrics()), (told(3, 1, 0, 2, 2_500), told(3, 1, 1, 3, 4_000)));
}

#[tokio::test(start_paused = true)]
async fn the_total_rate_is_independent_of_workers() {
    const EXPECTED: std::ops::RangeInclusive<u64> = 95..=103;
    let world = World::new(constant(MS(100)));
    let calls = Arc::new(AtomicU64::new(0));
    let in_ten_seconds = async |after: Duration| {
        sleep(after).await;
        let before = calls.load(Ordering::Relaxed);
        sleep(SECS(10)).await;
        calls.load(Ordering::Relaxed) - before
    };
    let first = world.node();
    first.on_failure().await;
    // Clones in one process count as workers.
    let (_one, two) = (work(first.clone(), &calls), work(first, &calls));
    let found = in_ten_seconds(SECS(1)).await;
    assert!(EXPECTED.contains(&found), "{found} by two of one process");
    let third = world.node();
    let three = work(third.clone(), &calls);
    let found = in_ten_seconds(SECS(1)).await;
    assert!(EXPECTED.contains(&found), "{found} by three");
    assert_eq!(third.workers(), 3);
    two.abort();
    let found = in_ten_seconds(SECS(1)).await;
    assert!(EXPECTED.contains(&found), "{found} by the two that are left");
    // A worker that dies doesn't release its share.
    let dead = third.clone();
    dead.on_success().await;
    std::mem::forget(dead);
    let found = in_ten_seconds(SECS(1)).await;
    assert!((60..=75).contains(&found), "{found} while the dead is counted");
    let found = in_ten_seconds(SECS(25)).await;
    assert!(EXPECTED.contains(&found), "{found} once its lease has ended");
    three.abort();
    drop(third);
    let found = in_ten_seconds(SECS(1)).await;
    assert!(EXPECTED.contains(&found), "{found} by the last");
}

#[tokio::test(start_paused = true)]
async fn a_worker_waiting_beyond_its_lease_still_counts() {
    let world = World::new(constant(SECS(45)));
    let (one, two) = (world.node(), world.node());
    near(world.took(one.on_failure()).await, SECS(45));
    let (waiting, asked) = (world.clock.now(), two.clone());
    let two = tokio::spawn(async move { two.on_success().await });
    sleep(SECS(1)).await;
    near(world.took(one.on_success()).await, SECS(90));
    sleep(SECS(80)).await;
    assert!(two.is_finished() && world.since(waiting) > SECS(170));
    drop(asked);
    near(world.took(one.on_success()).await, SECS(45));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_task_has_reported_and_holds_nothing() {
    let world = World::new(doubling(MS(500), 1));
    let (one, two) = (world.node(), world.node());
    one.on_success().await;
    for delay in [MS(0), MS(30)] {
        world.store().set_behaviour(if delay.is_zero() {
            RemoteBehaviour::Normal
        } else {
            RemoteBehaviour::SlowExecution(delay)
        });
        let before = one.metrics().steps_up;
        assert!(timeout(MS(10), one.on_failure()).await.is_err());
        sleep(MS(50)).await;
        assert_eq!(one.metrics().steps_up, before + 1, "a store that takes {delay:?}");
    }
    assert_eq!((one.metrics().waits, one.metrics().total_wait), (2, MS(1_500)));
    world.store().set_behaviour(RemoteBehaviour::Normal);
    drop(one);
    sleep(MS(50)).await;
    near(world.took(two.on_success()).await, MS(500));
    assert_eq!(two.workers(), 1, "the other has gone");
}

#[tokio::test(start_paused = true)]
async fn without_its_store_the_last_pace_continues() {
    for mood in [RemoteBehaviour::Unresponsive, RemoteBehaviour::Failing, RemoteBehaviour::LostReply] {
        let world = World::new(doubling(MS(500), 9));
        let (one, two) = (world.node(), world.node());
        two.on_success().await;
        one.on_failure().await;
        near(world.took(one.on_failure()).await, MS(2_000));
        world.store().set_behaviour(mood);
        near(world.took(one.on_success()).await, MS(2_000));
        assert_eq!((one.interval(), one.workers()), (SECS(1), 2), "{mood:?}");
        near(world.took(one.on_failure()).await, MS(4_000));
        near(world.took(one.on_failure()).await, MS(8_000));
        // The other worker isn't notified. It finds the store unavailable, too.
        near(world.took(two.on_success()).await, MS(0));
        world.store().set_behaviour(RemoteBehaviour::Normal);
        sleep(SECS(2)).await;
        near(world.took(one.on_success()).await, MS(8_000));
        near(world.took(two.on_success()).await, MS(8_000));
        assert_eq!((two.interval(), two.workers()), (SECS(4), 2), "{mood:?}: what was come to alone holds for all");
        assert_eq!(one.metrics().calls, 6);
    }
}

#[tokio::test(start_paused = true)]
async fn an_outdated_local_pace_affects_no_other_node() {
    let world = World::new(doubling(MS(500), 1));
    let (one, two) = (world.node(), world.node());
    one.on_failure().await;
    one.on_failure().await;
    two.on_success().await;
    two.on_success().await;
    assert_eq!((one.interval(), two.interval()), (SECS(1), MS(0)));
    world.store().set_behaviour(RemoteBehaviour::Failing);
    one.on_success().await;
    world.store().set_behaviour(RemoteBehaviour::Normal);
    sleep(SECS(2)).await;
    near(world.took(one.on_success()).await, MS(0));
    near(world.took(two.on_success()).await, MS(0));
}

/// A blocking call on the thread of the store's runtime gets no answer, and continues without.
#[tokio::test]
async fn blocking_calls_wait_boundedly_for_the_store() {
    let world = World::new(doubling(MS(20), 1));
    let pacer = world.node();
    pacer.on_failure_blocking();
    assert_eq!((pacer.interval(), pacer.metrics().steps_up), (MS(20), 1));
    let elsewhere = pacer.clone();
    tokio::task::spawn_blocking(move || elsewhere.on_failure_blocking()).await.unwrap();
    assert!(pacer.interval() >= MS(40) && pacer.workers() == 2, "{:?}", pacer.interval());
}

fn policy(store: &str) -> Policy {
    Policy::load(PolicySources::new().file("test.toml", format!("[store]\nurl = \"{store}\"\n"))).unwrap()
}

async fn stores(store: &str) -> Stores {
    Stores::open(&policy(store), |_| None).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn pacers_of_one_name_are_shared() {
    let scratch = tempfile::tempdir().unwrap();
    let file = format!("file:{}", scratch.path().join("state").display());
    let (spec, clock) = (doubling(MS(500), 3), TokioClock::default());
    for store in ["memory", &file] {
        let stores = stores(store).await;
        let one = stores.pacer(spec, "api", clock).unwrap();
        let (two, other) = (stores.pacer(spec, "api", clock).unwrap(), stores.pacer(spec, "other", clock).unwrap());
        one.on_failure().await;
        two.on_success().await;
        other.on_success().await;
        assert_eq!((two.interval(), two.workers(), other.interval()), (MS(500), 2, MS(0)), "{store}");
        drop(one);
        two.on_success().await;
        assert_eq!(two.workers(), 1, "{store}");
        let different = stores.pacer(PacerSpec { max: SECS(9), ..spec }, "api", clock);
        assert!(matches!(different, Err(OpenError::PacerSettingsConflict { .. })), "{store}");
        let too_long = stores.pacer(PacerSpec { max: Duration::MAX, ..spec }, "long", clock);
        assert!(matches!(too_long, Err(OpenError::Pacer(_))), "{store}");
        let too_long = stores.pacer(PacerSpec { max: SECS(20 * 86_400), ..spec }, "long", clock).unwrap_err();
        assert!(too_long.to_string().contains("shorter longest wait"), "{too_long}");
        drop(two);
        let again = stores.pacer(spec, "api", clock).unwrap();
        again.on_success().await;
        assert_eq!(again.workers(), 1, "{store}");
    }
    // The store is closed when a task has given back the last pacer's place.
    let mut opened = Stores::open(&policy(&file), |_| None).await;
    for _ in 0..100 {
        if opened.is_ok() {
            break;
        }
        tokio::task::spawn_blocking(|| std::thread::sleep(MS(50))).await.unwrap();
        opened = Stores::open(&policy(&file), |_| None).await;
    }
    let again = opened.unwrap().pacer(spec, "api", clock).unwrap();
    again.on_success().await;
    assert_eq!(again.interval(), MS(0), "outlives its last worker, and three successes are a step down");
}

/// The clocks are those of the machine and the server.
#[cfg(feature = "redis")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_share_a_pace_over_redis() {
    let Some(server) = tidegate_testkit::servers::RedisServer::start() else { return };
    let (one, two) = (stores(&server.url()).await, stores(&server.url()).await);
    let spec = constant(MS(20));
    let workers = [&one, &one, &two].map(|stores| Pacer::shared(spec, "api", stores).unwrap());
    workers[0].on_failure().await;
    for worker in &workers {
        worker.on_success().await;
    }
    let calls = Arc::new(AtomicU64::new(0));
    let tasks = workers.each_ref().map(|worker| {
        let (worker, calls) = (worker.clone(), Arc::clone(&calls));
        tokio::spawn(async move {
            loop {
                calls.fetch_add(1, Ordering::Relaxed);
                worker.on_success().await;
            }
        })
    });
    // Only the clones that make calls remain workers.
    drop(workers);
    sleep(MS(300)).await;
    let before = calls.load(Ordering::Relaxed);
    sleep(SECS(3)).await;
    let found = calls.load(Ordering::Relaxed) - before;
    assert!((100..=155).contains(&found), "{found} of 150 in three seconds");
    tasks[0].abort();
    tasks[1].abort();
    sleep(MS(300)).await;
    let before = calls.load(Ordering::Relaxed);
    sleep(SECS(3)).await;
    let found = calls.load(Ordering::Relaxed) - before;
    assert!((100..=155).contains(&found), "{found} of 150 by one alone");
    tasks[2].abort();
}
