//! Three masters that divide the keys among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tidegate_core::{Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Outcomes, Span, Time, Verb, Window};
use tidegate_store::{DirectStore, Redis, RemoteFuture, RemoteStore, Store, StoreError, StoreResponse, TimeSource};
use tidegate_testkit::conformance::{Backend, ConformanceOptions, check_conformance};
use tidegate_testkit::random;
use tidegate_testkit::servers::RedisCluster;

use crate::common::Stores;

const HOUR: Span = Span::from_secs(3600);

/// A store that gives all batches an affinity.
struct Together(DirectStore);

impl Store for Together {
    type Future = RemoteFuture<Outcomes>;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        let mut batch = batch.clone();
        batch.set_affinity(0xfeed);
        self.0.apply(&batch, now)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        let mut batch = batch.clone();
        batch.set_affinity(0xfeed);
        self.0.submit(&batch, now);
    }

    fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Result<Option<Self>, StoreError> {
        Ok(self.0.with_limits(limits, now)?.map(Self))
    }
}

struct Gathered(Stores);

impl Backend for Gathered {
    type Store = Together;

    fn open(&self, limits: Arc<Limits>) -> Together {
        Together(self.0.open(limits))
    }

    fn set_now(&self, store: &Together, now: Time) -> bool {
        self.0.set_now(&store.0, now)
    }

    fn wait<F: Future>(&self, answer: F) -> F::Output {
        self.0.wait(answer)
    }
}

#[test]
fn a_cluster_conforms_with_keys_sharing_slots() {
    let Some(cluster) = RedisCluster::start() else { return };
    let effort = ConformanceOptions {
        batches: random::case_count(2_000, 50_000),
        tasks: 16,
        calls_per_task: 200,
        ..ConformanceOptions::default()
    };
    check_conformance(&Gathered(Stores::new(cluster.url(), TimeSource::Caller)), &effort).unwrap();
}

/// Carried out in parts, batches answer a lone caller as everywhere, and many at once never get more than there is.
#[test]
fn a_cluster_conforms_with_split_batches() {
    let Some(cluster) = RedisCluster::start() else { return };
    let mut stores = Stores::new(cluster.url(), TimeSource::Caller);
    stores.options.reserve = true;
    let effort = ConformanceOptions {
        batches: random::case_count(2_000, 50_000),
        tasks: 1,
        calls_per_task: 200,
        ..ConformanceOptions::default()
    };
    check_conformance(&stores, &effort).unwrap();
}

fn plan(most: &[u64]) -> (Arc<Limits>, Vec<LimitId>) {
    let window = |&limit| Limit::new(LimitKind::Window(Window::new(limit, HOUR, 64).unwrap()));
    let limits = Arc::new(Limits::new(most.iter().map(window).collect()).unwrap());
    let ids = limits.iter().map(|(id, _)| id).collect();
    (limits, ids)
}

fn take(places: &[(LimitId, Key)]) -> Batch {
    let mut batch = Batch::new(1);
    for &(limit, key) in places {
        batch.push(Op::new(limit, Verb::Take, key, 1)).unwrap();
    }
    batch
}

/// Keys that lie anywhere.
fn key(number: u64) -> Key {
    Key::new(number, number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

async fn used(store: &Redis, limit: LimitId, key: Key) -> u64 {
    let mut peek = Batch::new(0);
    peek.push(Op::new(limit, Verb::Peek, key, 1)).unwrap();
    store.apply(&peek, Time::ZERO).await.unwrap().list()[0].used
}

/// Without leave, a batch over several slots is an error; and keys spread over all masters.
#[test]
fn keys_spread_but_batches_need_one_slot() {
    let Some(cluster) = RedisCluster::start() else { return };
    let stores = Stores::new(cluster.url(), TimeSource::Store);
    let (limits, ids) = plan(&[10, 10]);
    let store = stores.under("spread:", &limits);
    stores.runtime.block_on(async {
        for number in 1..=300 {
            let both = take(&[(ids[0], key(number)), (ids[1], key(number))]);
            assert!(!store.apply(&both, Time::ZERO).await.unwrap().refuses());
        }
        let across = store.apply(&take(&[(ids[0], key(1)), (ids[1], key(2))]), Time::ZERO).await;
        assert!(across.unwrap_err().to_string().contains("several slots"));
    });
    let counts: Vec<_> = cluster.nodes().iter().map(|node| node.key_count()).collect();
    assert!(counts.iter().all(|&count| count > 100) && counts.iter().sum::<u64>() == 600, "{counts:?}");
}

/// In parts: never more admitted than the narrowest limit holds, and what isn't admitted isn't charged in the end.
#[test]
fn split_batches_never_exceed_limits_and_refund() {
    let Some(cluster) = RedisCluster::start() else { return };
    let mut stores = Stores::new(cluster.url(), TimeSource::Store);
    stores.options.reserve = true;
    let (limits, ids) = plan(&[1_000, 40, 1_000]);
    let store = Arc::new(stores.under("parts:", &limits));
    let places: Vec<_> = ids.iter().zip(1..).map(|(&id, number)| (id, key(number))).collect();
    stores.runtime.block_on(async {
        let tasks: Vec<_> = (0..16)
            .map(|_| {
                let (store, ask) = (Arc::clone(&store), take(&places));
                tokio::spawn(async move {
                    let mut passed = 0_u64;
                    for _ in 0..40 {
                        passed += u64::from(!store.apply(&ask, Time::ZERO).await.unwrap().refuses());
                    }
                    passed
                })
            })
            .collect();
        let mut passed = 0;
        for task in tasks {
            passed += task.await.unwrap();
        }
        assert!(passed <= 40 && passed > 0, "{passed}");
        for &(id, key) in &places {
            assert_eq!(used(&store, id, key).await, passed);
        }
    });
}

/// A client that dies between the parts leaves charges, and never a call that was admitted without them.
#[test]
fn a_client_killed_between_parts_admits_nothing() {
    let Some(cluster) = RedisCluster::start() else { return };
    let mut stores = Stores::new(cluster.url(), TimeSource::Store);
    stores.options.reserve = true;
    let (limits, ids) = plan(&[100_000, 100_000, 100_000]);
    let places: Vec<_> = ids.iter().zip(1..).map(|(&id, number)| (id, key(number))).collect();
    let mut admitted = 0;
    for _ in 0..10 {
        let mut client = Stores::new(cluster.url(), TimeSource::Store);
        client.options.reserve = true;
        let store = Arc::new(client.under("dies:", &limits));
        let passed = Arc::new(std::sync::atomic::AtomicU64::new(0));
        client.runtime.block_on(async {
            for _ in 0..16 {
                let (store, ask, passed) = (Arc::clone(&store), take(&places), Arc::clone(&passed));
                tokio::spawn(async move {
                    while store.apply(&ask, Time::ZERO).await.is_ok_and(|outcomes| !outcomes.refuses()) {
                        passed.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            while passed.load(Ordering::SeqCst) == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        });
        client.runtime.shutdown_timeout(Duration::from_secs(5));
        admitted += passed.load(Ordering::SeqCst);
    }
    let store = stores.under("dies:", &limits);
    assert!(admitted > 0);
    for &(id, key) in &places {
        let used = stores.runtime.block_on(used(&store, id, key));
        assert!(used >= admitted, "{used} counted of {admitted} that were admitted");
    }
}

/// One master is lost: only its keys are, and at once.
#[test]
fn a_lost_master_affects_only_its_slots() {
    let Some(mut cluster) = RedisCluster::start() else { return };
    let mut stores = Stores::new(cluster.url(), TimeSource::Store);
    stores.options.answer_timeout = Duration::from_millis(500);
    let (limits, ids) = plan(&[1_000]);
    let store = stores.under("loss:", &limits);
    let ask = |number| take(&[(ids[0], key(number))]);
    stores.runtime.block_on(async {
        for number in 1..=60 {
            store.apply(&ask(number), Time::ZERO).await.unwrap();
        }
        let kept: u64 = cluster.nodes()[1..].iter().map(|node| node.key_count()).sum();
        cluster.node_mut(0).kill();
        // The others take a while to agree that it is gone.
        tokio::time::sleep(Duration::from_millis(3_000)).await;
        for _ in 0..2 {
            let mut answered = 0;
            for number in 1..=60 {
                answered += u64::from(store.apply(&ask(number), Time::ZERO).await.is_ok());
            }
            assert_eq!(answered, kept);
        }
        cluster.node_mut(0).restart();
        let all_back = async {
            loop {
                let answers = (1..=60).map(|number| store.apply(&ask(number), Time::ZERO));
                if futures_all(answers).await {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), all_back).await.unwrap();
    });
}

async fn futures_all(answers: impl Iterator<Item = RemoteFuture<Outcomes>>) -> bool {
    let mut all = true;
    for answer in answers {
        all &= answer.await.is_ok();
    }
    all
}

/// A slot moves to another master during calls: no call is wrongly refused, and none is counted twice or lost.
#[test]
fn a_slot_moving_under_load_counts_exactly() {
    let Some(cluster) = RedisCluster::start() else { return };
    let stores = Stores::new(cluster.url(), TimeSource::Store);
    let (limits, ids) = plan(&[100_000, 100_000]);
    let store = Arc::new(stores.under("moves:", &limits));
    // All of these keys are in the slot of their affinity.
    let affinity = 0x5107;
    let mut first = take(&[(ids[0], key(1)), (ids[1], key(1))]);
    first.set_affinity(affinity);
    assert!(!stores.runtime.block_on(store.apply(&first, Time::ZERO)).unwrap().refuses());
    let slot: u16 = {
        let holder = cluster.nodes().iter().find(|node| node.key_count() > 0).unwrap();
        let answer = holder.command(&["CLUSTER", "KEYSLOT", &holder.command(&["RANDOMKEY"])]);
        answer.trim_start_matches(':').parse().unwrap()
    };
    let from = usize::from(slot / (16_384 / 3)).min(2);
    let is_over = Arc::new(AtomicBool::new(false));
    let load = {
        let (store, ids, is_over) = (Arc::clone(&store), ids.clone(), Arc::clone(&is_over));
        stores.runtime.spawn(async move {
            let mut counts = [0_u64; 20];
            counts[0] = 1;
            let mut errors = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                for (number, count) in (1..).zip(&mut counts) {
                    let mut ask = take(&[(ids[0], key(number)), (ids[1], key(number))]);
                    ask.set_affinity(affinity);
                    match store.apply(&ask, Time::ZERO).await {
                        Ok(outcomes) => *count += u64::from(!outcomes.refuses()),
                        Err(error) => errors.push(error),
                    }
                }
            }
            (counts, errors)
        })
    };
    std::thread::sleep(Duration::from_millis(200));
    for hop in 0..4 {
        cluster.move_slot(slot, (from + hop) % 3, (from + hop + 1) % 3);
        std::thread::sleep(Duration::from_millis(100));
    }
    is_over.store(true, Ordering::Relaxed);
    let (counts, errors): (_, Vec<StoreError>) = stores.runtime.block_on(load).unwrap();
    assert!(errors.is_empty(), "{} errors, the first: {}", errors.len(), errors[0]);
    stores.runtime.block_on(async {
        for (number, count) in (1..).zip(counts) {
            let mut peek = Batch::new(0);
            peek.set_affinity(affinity);
            for &id in &ids {
                peek.push(Op::new(id, Verb::Peek, key(number), 1)).unwrap();
            }
            let outcomes = store.apply(&peek, Time::ZERO).await.unwrap();
            let found: Vec<_> = outcomes.list().iter().map(|outcome| outcome.used).collect();
            assert!(count > 0 && found == [count, count], "{found:?}, not {count}");
        }
    });
}
