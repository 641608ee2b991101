//! The tests of every store with rows, in addition to those of every store: on a real server, from several processes,
//! through kills, restarts and different clocks.

mod kept;
mod processes;

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidegate_core::{Batch, Limits, Op, Outcomes, Span, Time, Verb};
use tidegate_store::{DatabaseOptions, DirectStore, RemoteStore, StoreError, TimeSource};
use tidegate_testkit::conformance::{Backend, ConformanceOptions, check_conformance};
use tidegate_testkit::servers::database::DatabaseServer;
use tidegate_testkit::{fixtures, random};
use tokio::runtime::Runtime;

pub(crate) use kept::{
    comes_back_empty, expires, keys_apart, learns_lost_blocks_again, leaves_later_versions_alone, outlives_restarts,
    refuses_hostile_names, removes_junk_nodes, tells_of_outages,
};
pub(crate) use processes::{child, counts_with_another_process, survives_a_killed_client};

/// A kind of store.
pub(crate) trait Kind: Sync + 'static {
    /// The store.
    type Store: RemoteStore;

    /// True if a killed client may leave a batch half charged.
    const HALF_TAKEN: bool;

    /// A URL with a password, of a port where no server listens.
    const NOWHERE: &str;

    /// Ways for a server to go and come back with its data.
    const RESTARTS: &[fn(&DatabaseServer)];

    /// A server for it, if one is installed.
    fn server() -> Option<DatabaseServer>;

    /// The number of rows in the table or collection of states.
    fn rows(server: &DatabaseServer, prefix: &str) -> impl Future<Output = u64>;

    /// Removes the tables or collections.
    fn forget(server: &DatabaseServer, prefix: &str) -> impl Future<Output = ()>;

    /// Has the tables or collections say that they are of a later version.
    fn make_later(server: &DatabaseServer, prefix: &str) -> impl Future<Output = ()>;

    /// Writes 1,500 values that are no announcements beside those of nodes.
    fn add_junk_nodes(server: &DatabaseServer, prefix: &str) -> impl Future<Output = ()>;

    /// The number of those values that are left.
    fn junk_nodes(server: &DatabaseServer, prefix: &str) -> impl Future<Output = u64>;

    /// A store there.
    fn open(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<Self::Store, StoreError>;
}

/// Ways that every server bears.
pub(crate) fn stop_and_start(server: &DatabaseServer) {
    server.stop();
    server.restart();
}

/// Killed, with whatever was written.
pub(crate) fn kill_and_start(server: &DatabaseServer) {
    server.kill();
    server.restart();
}

/// Every check by its name.
#[macro_export]
macro_rules! suite {
    ($kind:ty) => {
        #[test]
        fn conforms_with_caller_time() {
            rows::conforms::<$kind>(tidegate_store::TimeSource::Caller);
        }

        #[test]
        fn conforms_with_server_time() {
            rows::conforms::<$kind>(tidegate_store::TimeSource::Store);
        }

        #[test]
        fn wrong_caller_clocks_have_no_effect() {
            rows::ignores_clocks::<$kind>();
        }

        #[test]
        fn unknown_limits_create_no_rows() {
            rows::knows_no_such_limit::<$kind>();
        }

        #[test]
        fn concurrent_batches_succeed_in_any_row_order() {
            rows::orders::<$kind>();
        }

        #[test]
        fn counts_with_another_process() {
            rows::counts_with_another_process::<$kind>();
        }

        #[test]
        fn survives_a_killed_client() {
            rows::survives_a_killed_client::<$kind>();
        }

        #[test]
        fn outlives_restarts() {
            rows::outlives_restarts::<$kind>();
        }

        #[test]
        fn expired_rows_are_removed() {
            rows::expires::<$kind>();
        }

        #[test]
        fn every_bit_distinguishes_keys() {
            rows::keys_apart::<$kind>();
        }

        #[test]
        fn dropped_tables_are_created_again() {
            rows::comes_back_empty::<$kind>();
        }

        #[test]
        fn lost_blocks_are_restored() {
            rows::learns_lost_blocks_again::<$kind>();
        }

        #[test]
        fn tables_of_newer_versions_are_unchanged() {
            rows::leaves_later_versions_alone::<$kind>();
        }

        #[test]
        fn junk_is_removed_from_the_list_of_nodes() {
            rows::removes_junk_nodes::<$kind>();
        }

        #[test]
        fn an_outage_fails_immediately() {
            rows::tells_of_outages::<$kind>();
        }

        #[test]
        fn hostile_names_are_refused() {
            rows::refuses_hostile_names::<$kind>();
        }

        #[test]
        #[ignore = "a process of its own, started by other tests"]
        fn child() {
            rows::child::<$kind>();
        }
    };
}

/// Stores of this kind on one server, each with tables of its own.
struct Stores<'a, K> {
    server: &'a DatabaseServer,
    time: TimeSource,
    runtime: Runtime,
    next: AtomicU32,
    kind: PhantomData<K>,
}

impl<'a, K: Kind> Stores<'a, K> {
    fn on(server: &'a DatabaseServer, time: TimeSource) -> Self {
        let runtime = runtime();
        Self { server, time, runtime, next: AtomicU32::new(0), kind: PhantomData }
    }
}

pub(crate) fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn options(url: &str, prefix: &str, time: TimeSource) -> DatabaseOptions {
    DatabaseOptions { prefix: prefix.into(), connections: 4, time_source: time, ..DatabaseOptions::new(url) }
}

impl<K: Kind> Backend for Stores<'_, K> {
    type Store = DirectStore;

    fn open(&self, limits: Arc<Limits>) -> Self::Store {
        let prefix = format!("t{}_", self.next.fetch_add(1, Ordering::Relaxed));
        DirectStore(Box::new(K::open(limits, &options(self.server.url(), &prefix, self.time)).unwrap()))
    }

    fn set_now(&self, _: &Self::Store, _: Time) -> bool {
        self.time == TimeSource::Caller
    }

    fn wait<F: Future>(&self, answer: F) -> F::Output {
        self.runtime.block_on(answer)
    }
}

fn an_hour(limit: u64) -> tidegate_core::Limit {
    fixtures::window_limit(limit, 3600)
}

fn plan(limits: Vec<tidegate_core::Limit>) -> Arc<Limits> {
    Arc::new(Limits::new(limits).unwrap())
}

/// One operation of cost 1 for each limit and client.
fn batch(verb: Verb, places: &[(usize, u64)]) -> Batch {
    let mut batch = Batch::new(0);
    for &(limit, client) in places {
        batch.push(Op::new(fixtures::limit_id(limit), verb, fixtures::client_key(client), 1)).unwrap();
    }
    batch
}

/// The usage of each limit.
async fn used(store: &impl RemoteStore, places: &[(usize, u64)]) -> Vec<u64> {
    let outcomes = store.apply(&batch(Verb::Peek, places), Time::ZERO).await.unwrap();
    outcomes.list().iter().map(|outcome| outcome.used).collect()
}

/// Repeats a call for up to 20 seconds until it succeeds: a server that was just started may not be ready.
async fn patiently(store: &impl RemoteStore, batch: &Batch, now: Time) -> Outcomes {
    let mut last = None;
    for _ in 0..200 {
        match store.apply(batch, now).await {
            Ok(outcomes) => return outcomes,
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("no answer: {last:?}");
}

pub(crate) fn conforms<K: Kind>(time: TimeSource) {
    let Some(server) = K::server() else { return };
    let batches = if time == TimeSource::Caller { random::case_count(2_000, 10_000) } else { 250 };
    let effort = ConformanceOptions { batches, tasks: 64, calls_per_task: 100, seed: random::run_seed() };
    check_conformance(&Stores::<K>::on(&server, time), &effort).unwrap();
}

/// Operations on another plan's limits are answered as in memory, and change nothing.
pub(crate) fn knows_no_such_limit<K: Kind>() {
    let Some(server) = K::server() else { return };
    let store = K::open(plan(vec![an_hour(1)]), &options(server.url(), "n_", TimeSource::Store)).unwrap();
    runtime().block_on(async {
        for verb in [Verb::Take, Verb::Refund, Verb::Reset, Verb::Peek] {
            let outcomes = store.apply(&batch(verb, &[(7, 1)]), Time::ZERO).await.unwrap();
            assert!(outcomes.list().len() == 1 && !outcomes.refuses(), "{verb:?}: {outcomes:?}");
        }
        assert_eq!(K::rows(&server, "n_").await, 0);
        assert!(!store.apply(&batch(Verb::Take, &[(0, 1), (7, 1)]), Time::ZERO).await.unwrap().refuses());
    });
}

/// 64 tasks, 100 calls each, 100 an hour, by clocks that differ by a minute and step back: exactly 100 pass, and no
/// wait is longer than the hour.
pub(crate) fn ignores_clocks<K: Kind>() {
    let Some(server) = K::server() else { return };
    let store = Arc::new(K::open(plan(vec![an_hour(100)]), &options(server.url(), "a_", TimeSource::Store)).unwrap());
    runtime().block_on(async {
        let tasks: Vec<_> = (0..64_u64)
            .map(|task| {
                let store = Arc::clone(&store);
                tokio::spawn(async move {
                    let mut admitted = 0;
                    for call in 0..100_u64 {
                        let stepped = if call < 50 { Span::ZERO } else { Span::from_secs(10) };
                        let told = fixtures::test_time(task * 937) - stepped;
                        let outcomes = store.apply(&batch(Verb::Take, &[(0, 1)]), told).await.unwrap();
                        admitted += u32::from(!outcomes.refuses());
                        let wait = outcomes.list()[0].retry_at.since(outcomes.now());
                        assert!(wait <= Span::from_secs(3600), "{wait:?}");
                    }
                    admitted
                })
            })
            .collect();
        let mut admitted = 0;
        for task in tasks {
            admitted += task.await.unwrap();
        }
        assert_eq!(admitted, 100);
    });
}

/// Three rows in every order, from many tasks of two stores that know nothing of each other: all get an answer, and
/// each row was charged for just the calls that passed.
pub(crate) fn orders<K: Kind>() {
    const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    let Some(server) = K::server() else { return };
    let limits = plan(vec![an_hour(100_000), an_hour(400), an_hour(100_000)]);
    let open = || Arc::new(K::open(Arc::clone(&limits), &options(server.url(), "o_", TimeSource::Store)).unwrap());
    let stores = [open(), open()];
    runtime().block_on(async {
        let tasks: Vec<_> = (0..32_usize)
            .map(|task| {
                let store = Arc::clone(&stores[task % 2]);
                tokio::spawn(async move {
                    let mut admitted = 0_u64;
                    for call in 0..25 {
                        let places = ORDERS[(task / 2 + call) % ORDERS.len()].map(|limit| (limit, limit as u64));
                        // Some keys are new to the store, so that rows are made and locked in one go.
                        let fresh = (0, 1_000 + (call as u64));
                        let mut places = places.to_vec();
                        places.insert(call % 4, fresh);
                        let outcomes = store.apply(&batch(Verb::Take, &places), Time::ZERO).await.unwrap();
                        admitted += u64::from(!outcomes.refuses());
                    }
                    admitted
                })
            })
            .collect();
        let mut admitted = 0;
        for task in tasks {
            admitted += task.await.unwrap();
        }
        assert_eq!(admitted, 400);
        assert_eq!(used(&*stores[0], &[(0, 0), (1, 1), (2, 2)]).await, [400, 400, 400]);
    });
}
