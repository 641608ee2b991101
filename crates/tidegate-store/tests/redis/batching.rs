//! Decisions that are asked in one script.

use std::future::poll_fn;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tidegate_core::{
    Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Outcomes, Penalty, PenaltySpec, Rate, Span, Time, Verb, Window,
};
use tidegate_store::{Redis, RemoteFuture, RemoteStore as _, StoreError, TimeSource};
use tidegate_testkit::random::{RandomSource, case_count, run_seed};
use tidegate_testkit::servers::RedisServer;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::common::Stores;

/// As many convoys as are under way before decisions wait for each other.
const UNDER_WAY: usize = 8;
const NOW: Time = Time::from_secs(1_700_000_000);

fn plan() -> (Arc<Limits>, [LimitId; 3]) {
    let minute = Span::from_secs(60);
    let window = |limit| Limit::new(LimitKind::Window(Window::new(limit, minute, 64).unwrap()));
    let strict = window(400).with_penalty(Penalty::new(PenaltySpec::default(), minute).unwrap());
    let rate = Limit::new(LimitKind::Rate(Rate::new(1, minute, 100).unwrap()));
    let limits = Arc::new(Limits::new(vec![window(100), strict, rate]).unwrap());
    let ids: Vec<_> = limits.iter().map(|(id, _)| id).collect();
    (limits, ids.try_into().unwrap())
}

fn take(limits: &[LimitId], key: u64) -> Batch {
    let mut batch = Batch::new(1);
    for limit in limits {
        batch.push(Op::new(*limit, Verb::Take, Key::new(1, key), 1)).unwrap();
    }
    batch
}

/// A server, and a store in it of a limit of each kind: a window, one with a penalty, a rate.
fn start(prefix: &str) -> Option<(RedisServer, Stores, Arc<Redis>, [LimitId; 3])> {
    let server = RedisServer::start()?;
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, ids) = plan();
    let store = Arc::new(stores.under(prefix, &limits));
    Some((server, stores, store, ids))
}

/// One task for each batch.
fn ask_all(
    runtime: &Runtime,
    store: &Arc<Redis>,
    batches: impl IntoIterator<Item = Batch>,
) -> Vec<JoinHandle<Result<Outcomes, StoreError>>> {
    let ask = |batch: Batch| {
        let store = Arc::clone(store);
        runtime.spawn(async move { store.apply(&batch, NOW).await })
    };
    batches.into_iter().map(ask).collect()
}

/// Also while the server forgets the scripts again and again.
#[test]
fn many_decisions_share_few_script_calls() {
    let Some((server, stores, store, [window, strict, rate])) = start("together:") else { return };
    const CALLS: usize = 9_600;
    // Three kinds of scripts at a time, and keys that many of a group share.
    let kinds: [&[LimitId]; 3] = [&[window, strict], &[rate, window], &[strict, rate]];
    let batches = (0..CALLS).map(|call| take(kinds[call % 3], (call % 24) as u64));
    let tasks = ask_all(&stores.runtime, &store, batches);
    for _ in 0..20 {
        server.command(&["SCRIPT", "FLUSH"]);
        thread::sleep(Duration::from_millis(10));
    }
    let mut passed = [0; 24];
    stores.runtime.block_on(async {
        for (call, task) in tasks.into_iter().enumerate() {
            passed[call % 24] += u32::from(!task.await.unwrap().unwrap().refuses());
        }
    });
    for (key, passed) in passed.into_iter().enumerate() {
        assert_eq!(passed, 100, "of 400 calls of key {key}");
    }
    let scripts = server.script_count();
    assert!(scripts <= CALLS as u64 / 2, "{scripts} scripts for {CALLS} decisions");
}

#[test]
fn an_error_affects_only_its_own_decision() {
    let Some((server, stores, store, [window, _, rate])) = start("trouble:") else { return };
    stores.runtime.block_on(store.apply(&take(&[window, rate], 0), NOW)).unwrap();
    // Another program's value under the name of a state.
    let spoil =
        "local name = redis.call('KEYS', 'trouble:*')[1] redis.call('DEL', name) redis.call('LPUSH', name, 'x')";
    server.command(&["EVAL", spoil, "0"]);
    // As many of each as there is room for.
    let tasks = ask_all(&stores.runtime, &store, (0..900).map(|call| take(&[window, rate], call % 9)));
    stores.runtime.block_on(async {
        for (call, task) in tasks.into_iter().enumerate() {
            match task.await.unwrap() {
                Ok(outcomes) => assert!(call % 9 != 0 && !outcomes.refuses(), "the others are charged once"),
                Err(error) => {
                    assert_eq!(call % 9, 0, "{error}");
                    assert!(error.to_string().contains("WRONGTYPE"), "{error}");
                }
            }
        }
    });
}

#[test]
fn cancelled_waiting_requests_are_not_sent() {
    let Some((server, _stores, store, [window, _, rate])) = start("gone:") else { return };
    let ask = take(&[window, rate], 7);
    one_thread().block_on(async {
        store.apply(&ask, NOW).await.unwrap();
        server.freeze();
        let mut asked: Vec<_> = (0..UNDER_WAY + 20).map(|_| store.apply(&ask, NOW)).collect();
        for (place, ask) in asked.iter_mut().enumerate() {
            assert!(is_pending(ask).await);
            // The first go each by itself, and the rest find no place.
            if place < UNDER_WAY {
                let_go().await;
            }
        }
        asked.truncate(UNDER_WAY + 5);
        server.thaw();
        for answer in join_all(asked).await {
            assert!(!answer.unwrap().refuses());
        }
        let used = store.apply(&ask, NOW).await.unwrap().list()[0].used;
        assert_eq!(used, 1 + UNDER_WAY as u64 + 5 + 1);
    });
}

/// A runtime that looks at what is waited for after each task that it has carried on.
fn one_thread() -> Runtime {
    tokio::runtime::Builder::new_current_thread().event_interval(1).enable_all().build().unwrap()
}

/// Lets waiting requests be batched and sent, in a runtime of one thread.
async fn let_go() {
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
}

/// Looks at an answer once.
async fn is_pending(ask: &mut RemoteFuture<Outcomes>) -> bool {
    poll_fn(|context| Poll::Ready(ask.as_mut().poll(context).is_pending())).await
}

/// The server has answered, and the runtime of the callers and of the first waiter is blocked.
#[test]
fn an_unpolled_caller_delays_no_other_caller() {
    let Some((server, stores, store, [window, _, rate])) = start("held:") else { return };
    let ask = take(&[window, rate], 7);
    stores.runtime.block_on(store.apply(&ask, NOW)).unwrap();
    server.freeze();
    let still = one_thread();
    let mut held: Vec<_> = (0..=UNDER_WAY).map(|_| store.apply(&ask, NOW)).collect();
    still.block_on(async {
        for ask in &mut held {
            assert!(is_pending(ask).await);
            let_go().await;
        }
    });
    server.thaw();
    stores.runtime.block_on(async {
        for others in ask_all(&stores.runtime, &store, vec![ask.clone(); 20]) {
            let answer = tokio::time::timeout(Duration::from_millis(500), others).await;
            assert!(!answer.expect("nobody is held up").unwrap().unwrap().refuses());
        }
    });
}

/// A way to a server on which each answer takes this much longer.
#[expect(clippy::disallowed_methods, reason = "a network of the test's own")]
fn slow_way(to: String, delay: Duration) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut from_client, mut from_server) = (client.unwrap(), TcpStream::connect(&to).unwrap());
            let (mut to_client, mut to_server) = (from_client.try_clone().unwrap(), from_server.try_clone().unwrap());
            let (sends, comes) = mpsc::channel();
            thread::spawn(move || io::copy(&mut from_client, &mut to_server));
            thread::spawn(move || {
                let mut bytes = vec![0; 1 << 16];
                while let Ok(count @ 1..) = from_server.read(&mut bytes) {
                    if sends.send((Instant::now() + delay, bytes[..count].to_vec())).is_err() {
                        return;
                    }
                }
            });
            thread::spawn(move || {
                for (due, bytes) in comes {
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    if to_client.write_all(&bytes).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A hundred trips one behind the other would take ten seconds.
#[test]
fn requests_are_pipelined_at_high_latency() {
    let Some(server) = RedisServer::start() else { return };
    let address = slow_way(server.url().trim_start_matches("redis://").to_owned(), Duration::from_millis(100));
    let stores = Stores::new(format!("redis://{address}"), TimeSource::Store);
    let (limits, [window, _, rate]) = plan();
    let store = Arc::new(stores.under("slow:", &limits));
    stores.runtime.block_on(store.apply(&take(&[window, rate], 0), NOW)).unwrap();
    let asked = ask_all(&stores.runtime, &store, (0..6_400).map(|key| take(&[window, rate], key)));
    let all = async { tokio::time::timeout(Duration::from_secs(3), join_all(asked)).await };
    for answer in stores.runtime.block_on(all).expect("nobody waits for others to return") {
        assert!(!answer.unwrap().unwrap().refuses());
    }
}

/// The other requests are sent when one is answered, although its runtime does nothing more.
#[test]
fn waiters_proceed_after_the_first_caller_finishes() {
    let Some((server, stores, store, [window, _, rate])) = start("done:") else { return };
    let ask = take(&[window, rate], 7);
    stores.runtime.block_on(store.apply(&ask, NOW)).unwrap();
    let (still, goes_on) = (one_thread(), one_thread());
    server.freeze();
    let mut first = store.apply(&ask, NOW);
    let mut others: Vec<_> = (0..20).map(|_| store.apply(&ask, NOW)).collect();
    still.block_on(is_pending(&mut first));
    goes_on.block_on(async {
        for ask in &mut others {
            is_pending(ask).await;
        }
    });
    server.thaw();
    still.block_on(first).unwrap();
    let answers = goes_on.block_on(async { tokio::time::timeout(Duration::from_millis(500), join_all(others)).await });
    for answer in answers.expect("nobody is held up") {
        assert!(!answer.unwrap().refuses());
    }
}

/// The batch is sent just before a runtime ends.
#[test]
fn waiters_are_served_when_another_runtime_ends() {
    let Some((server, stores, store, [window, _, rate])) = start("ended:") else { return };
    let ask = take(&[window, rate], 7);
    stores.runtime.block_on(store.apply(&ask, NOW)).unwrap();
    let (ends, goes_on) = (one_thread(), one_thread());
    let look = async |asks: &mut [RemoteFuture<Outcomes>]| {
        for ask in asks {
            is_pending(ask).await;
        }
    };
    server.freeze();
    let [mut first, mut others] = [2, 20].map(|count| (0..count).map(|_| store.apply(&ask, NOW)).collect::<Vec<_>>());
    ends.block_on(look(&mut first));
    goes_on.block_on(look(&mut others));
    // They are gathered, and sent on their way, but that has not begun.
    ends.block_on(async {
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
    });
    drop(ends);
    server.thaw();
    for answer in goes_on.block_on(join_all(others)) {
        assert!(!answer.unwrap().refuses());
    }
}

/// One store is asked call by call, another by many at once: by their callers' time each answer is the same.
#[test]
fn batched_replies_equal_single_replies() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Caller);
    let mut random = RandomSource::from_seed(run_seed());
    for round in 0..case_count(6, 60) {
        let mut limits = Vec::new();
        for _ in 0..4 {
            let (limit, length) = (random.between(1, 30), Span::from_millis(random.between(10, 20_000)));
            let limit = Limit::new(if random.chance(50) {
                LimitKind::Rate(Rate::new(limit, length, random.between(1, 40)).unwrap())
            } else {
                LimitKind::Window(Window::new(limit, length, random.pick(&[4, 16, 64])).unwrap())
            });
            let penalty = Penalty::new(PenaltySpec::default(), length);
            limits.push(if let (true, Ok(penalty)) = (random.chance(30), penalty) {
                limit.with_penalty(penalty)
            } else {
                limit
            });
        }
        let limits = Arc::new(Limits::new(limits).unwrap());
        let ids: Vec<_> = limits.iter().map(|(id, _)| id).collect();
        let ids = &ids[..random.between(1, 4) as usize];
        let [alone, group] =
            ["alone", "group"].map(|name| Arc::new(stores.under(&format!("{round}:{name}:"), &limits)));
        let calls: Vec<Vec<(Batch, Time)>> = (0..64)
            .map(|key| {
                let mut now = NOW;
                let call = |_| {
                    now = now + Span::from_micros(random.below(2_000_000));
                    let mut batch = Batch::new(1);
                    for id in ids {
                        batch.push(Op::new(*id, Verb::Take, Key::new(1, key), random.below(4))).unwrap();
                    }
                    (batch, now)
                };
                (0..40).map(call).collect()
            })
            .collect();
        let ask = |store: &Arc<Redis>, calls: Vec<(Batch, Time)>| {
            let store = Arc::clone(store);
            async move {
                let mut answers = Vec::new();
                for (batch, now) in calls {
                    let outcomes = store.apply(&batch, now).await.unwrap();
                    answers.push((outcomes.now(), outcomes.list().to_vec()));
                }
                answers
            }
        };
        stores.runtime.block_on(async {
            let together: Vec<_> = calls.iter().map(|calls| tokio::spawn(ask(&group, calls.clone()))).collect();
            for (calls, together) in calls.into_iter().zip(together) {
                let together = together.await.unwrap();
                assert_eq!(ask(&alone, calls).await, together, "seed {}, round {round}", run_seed());
            }
        });
    }
}

#[test]
fn an_ended_runtime_leaves_no_caller_waiting() {
    let Some((server, stores, store, [window, _, rate])) = start("runtime:") else { return };
    let ask = take(&[window, rate], 7);
    stores.runtime.block_on(store.apply(&ask, NOW)).unwrap();
    server.freeze();
    let _ended = ask_all(&stores.runtime, &store, vec![ask.clone(); 3 * UNDER_WAY]);
    thread::sleep(Duration::from_millis(100));
    stores.runtime.shutdown_background();
    thread::sleep(Duration::from_millis(50));
    server.thaw();
    let stores = Stores::new(server.url(), TimeSource::Store);
    let asked = ask_all(&stores.runtime, &store, vec![ask; 3 * UNDER_WAY]);
    stores.runtime.block_on(async {
        for task in asked {
            let answer = tokio::time::timeout(Duration::from_secs(10), task).await.expect("nobody waits for ever");
            // The first request may meet the connection of the runtime that ended.
            drop(answer.unwrap());
        }
        assert!(store.apply(&take(&[window, rate], 8), NOW).await.is_ok());
    });
}
