//! Nodes that share one server: processes, clocks, prefixes, and a client that dies.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Admission, Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Penalty, PenaltySpec, Quota, Rate, Span, Time, Verb,
    Window,
};
use tidegate_store::{KeyReset, Redis, RemoteStore as _, TimeSource};
use tidegate_testkit::servers::RedisServer;

use crate::common::Stores;

/// The environment variable with the instructions for the second process of a test.
const SERVER: &str = "TIDEGATE_TEST_REDIS_URL";
const KEY: Key = Key::new(5, 0x5bd1_e995_97f4_a7c1);

fn window(limit: u64, length: Span) -> Limit {
    Limit::new(LimitKind::Window(Window::new(limit, length, 64).unwrap()))
}

fn plan(limits: Vec<Limit>) -> (Arc<Limits>, Vec<LimitId>) {
    let limits = Arc::new(Limits::new(limits).unwrap());
    let ids = limits.iter().map(|(id, _)| id).collect();
    (limits, ids)
}

fn batch(verb: Verb, places: &[(LimitId, Key)]) -> Batch {
    let mut batch = Batch::new(1);
    for &(limit, key) in places {
        batch.push(Op::new(limit, verb, key, 1)).unwrap();
    }
    batch
}

/// The number of admitted calls when each of `tasks` makes `calls`.
async fn hammer(store: &Arc<Redis>, tasks: u64, calls: u64, ask: &Batch, now: impl Fn(u64) -> Time) -> u64 {
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let (store, ask, now) = (Arc::clone(store), ask.clone(), now(task));
            tokio::spawn(async move {
                let mut passed = 0;
                for _ in 0..calls {
                    passed += u64::from(!store.apply(&ask, now).await.unwrap().refuses());
                }
                passed
            })
        })
        .collect();
    let mut passed = 0;
    for task in tasks {
        passed += task.await.unwrap();
    }
    passed
}

/// Of this process and another one, with their own connections.
#[test]
fn two_processes_share_one_limit() {
    let Some(server) = RedisServer::start() else { return };
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "shares::other_process_entry_point", "--nocapture", "--include-ignored"])
        .env(SERVER, server.url())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(other.stdout.take().unwrap()).lines().map(Result::unwrap);
    // Both begin when both are there.
    let here = hundred(&server.url(), || {
        assert!(lines.any(|line| line == "here"));
        other.stdin.take().unwrap().write_all(b"go\n").unwrap();
    });
    let there = lines.find_map(|line| line.strip_prefix("passed ")?.parse::<u64>().ok()).unwrap();
    assert!(other.wait().unwrap().success());
    assert_eq!(here + there, 100, "{here} here and {there} there");
}

#[test]
#[ignore = "the other half of two_processes_share_one_limit"]
fn other_process_entry_point() {
    let Ok(url) = std::env::var(SERVER) else { return };
    let passed = hundred(&url, || {
        println!("here");
        std::io::stdin().read_line(&mut String::new()).unwrap();
    });
    println!("passed {passed}");
}

/// The number of its admitted calls, made after it has connected and got the signal to begin.
fn hundred(url: &str, begin: impl FnOnce()) -> u64 {
    let stores = Stores::new(url, TimeSource::Store);
    let (limits, ids) = plan(vec![window(100, Span::from_secs(60))]);
    let store = Arc::new(stores.under("shared:", &limits));
    stores.runtime.block_on(store.apply(&Batch::new(0), Time::ZERO)).unwrap();
    begin();
    stores.runtime.block_on(hammer(&store, 16, 500, &batch(Verb::Take, &[(ids[0], KEY)]), |_| Time::ZERO))
}

/// A client that goes away in the middle of its calls, again and again, leaves no limit charged without the others.
#[test]
fn a_killed_client_charges_all_or_nothing() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let hour = Span::from_secs(3600);
    let (limits, ids) = plan(vec![window(1 << 30, hour), window(5_000, hour), window(1 << 30, hour)]);
    let places: Vec<_> = ids.iter().map(|&id| (id, KEY)).collect();
    for _ in 0..20 {
        // With its runtime its connection goes, wherever a batch is on its way.
        let client = Stores::new(server.url(), TimeSource::Store);
        let store = Arc::new(client.under("all:", &limits));
        let ask = batch(Verb::Take, &places);
        let answers = Arc::new(AtomicU32::new(0));
        client.runtime.block_on(async {
            for _ in 0..64 {
                let (store, ask, answers) = (Arc::clone(&store), ask.clone(), Arc::clone(&answers));
                tokio::spawn(async move {
                    while store.apply(&ask, Time::ZERO).await.is_ok() {
                        answers.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            while answers.load(Ordering::Relaxed) < 100 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        client.runtime.shutdown_background();
    }
    let store = stores.under("all:", &limits);
    let outcomes = stores.runtime.block_on(store.apply(&batch(Verb::Peek, &places), Time::ZERO)).unwrap();
    let used: Vec<_> = outcomes.list().iter().map(|outcome| outcome.used).collect();
    assert!(used[0] > 0 && used.iter().all(|&each| each == used[0]), "{used:?}");
}

/// Nodes with clocks half a minute apart, one of which steps back by ten seconds, count together, and every wait is
/// within the window.
#[test]
fn node_clocks_do_not_affect_counts() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let day = Span::from_secs(86_400);
    let minute = Span::from_secs(60);
    let quota = Limit::new(LimitKind::Quota(Quota::new(1_000, Arc::new(FixedPeriods(day))).unwrap()));
    let rate = Limit::new(LimitKind::Rate(Rate::new(100, Span::from_secs(3600), 100).unwrap()));
    let (limits, ids) = plan(vec![window(100, minute), quota, rate]);
    let places: Vec<_> = ids.iter().map(|&id| (id, KEY)).collect();
    let store = Arc::new(stores.under("skew:", &limits));
    let ask = batch(Verb::Take, &places);
    let present = || stores.runtime.block_on(store.apply(&Batch::new(0), Time::ZERO)).unwrap().now();
    let begin = present();
    let clocks = |task: u64| match task % 4 {
        0 => begin + Span::from_secs(30),
        1 => begin - Span::from_secs(30),
        2 => begin - Span::from_secs(10),
        _ => begin,
    };
    let passed = stores.runtime.block_on(hammer(&store, 16, 50, &ask, clocks));
    assert_eq!(passed, 100);
    for skew in [30_i64, -30, 20] {
        let now = Time::from_micros(begin.as_micros().saturating_add_signed(skew * 1_000_000));
        let outcomes = stores.runtime.block_on(store.apply(&ask, now)).unwrap();
        assert!(outcomes.now() >= begin && outcomes.now().since(begin) < minute, "by the server's clock");
        let outcome = outcomes.list()[0];
        assert_eq!((outcome.admission, outcome.used), (Admission::Refused, 100));
        let wait = outcome.retry_at.since(outcomes.now());
        assert!(wait > Span::ZERO && wait <= minute, "{wait:?}");
    }
    // A node with its clock a year behind sends the wrong day first, and still gets the right answer.
    let fresh = stores.under("skew:", &limits);
    let last_year = begin - Span::from_secs(365 * 86_400);
    let outcomes = stores.runtime.block_on(fresh.apply(&batch(Verb::Peek, &places[1..2]), last_year)).unwrap();
    assert_eq!(outcomes.list()[0].used, 100);
}

/// The server holds no key after all windows, blocks and strikes have expired, and drops none earlier.
#[test]
fn expired_keys_are_removed_from_the_server() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let second = Span::from_secs(1);
    let spec = PenaltySpec {
        base: Span::from_millis(100),
        cap: Span::from_millis(200),
        forgive_after: Some(Span::from_millis(300)),
        ..PenaltySpec::default()
    };
    let penalised = |limit: Limit| limit.with_penalty(Penalty::new(spec, second).unwrap());
    let (limits, ids) = plan(vec![
        penalised(window(3, second)),
        penalised(Limit::new(LimitKind::Rate(Rate::new(3, second, 3).unwrap()))),
        penalised(Limit::new(LimitKind::Quota(Quota::new(3, Arc::new(FixedPeriods(second))).unwrap()))),
        penalised(Limit::new(LimitKind::Concurrency(tidegate_core::Concurrency::new(3, second).unwrap()))),
        window(500, second),
        Limit::new(LimitKind::Rate(Rate::new(3, second, 3).unwrap())),
    ]);
    let store = stores.under("ttl:", &limits);
    stores.runtime.block_on(async {
        for key in 0..20 {
            for call in 0..5 {
                for &id in &ids {
                    let mut ask = Batch::new(call);
                    ask.push(Op::new(id, Verb::Take, Key::new(key, key), 1)).unwrap();
                    store.apply(&ask, Time::ZERO).await.unwrap();
                }
            }
        }
    });
    assert!(server.key_count() > 0);
    let without = server.command(&[
        "EVAL",
        "local n = 0 for _, k in ipairs(redis.call('KEYS', '*')) do \
        if redis.call('PTTL', k) < 0 then n = n + 1 end end return n",
        "0",
    ]);
    assert_eq!(without, ":0", "keys that never expire");
    for _ in 0..200 {
        if server.key_count() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("{} keys are left", server.key_count());
}

/// A prefix may hold anything, and a limit's tag any number: no name becomes another's.
#[test]
fn hostile_prefixes_never_collide() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, ids) = plan(vec![
        window(1, Span::from_secs(60)).with_tag(0),
        window(1, Span::from_secs(60)).with_tag(u64::MAX),
        window(1, Span::from_secs(60)).with_tag(u64::from_be_bytes(*b"\0*{}\"'\r\n")),
    ]);
    let long = "x".repeat(64 * 1024);
    let prefixes =
        ["", "{", "}", "{}", "a", "a{", "a{AAAAAAAAAAF}w", "\0", "\r\n", "'\"", "🦀", "$where", "*", "?[a-z]", &long];
    let keys = [Key::new(0, 0), Key::new(0, 1), Key::new(1, 0), Key::new(u64::MAX, 5)];
    stores.runtime.block_on(async {
        let each: Vec<_> = prefixes.iter().map(|prefix| stores.under(prefix, &limits)).collect();
        let asks: Vec<_> = keys
            .iter()
            .flat_map(|&key| ids.iter().map(move |&id| (id, key)))
            .flat_map(|place| {
                let mut together = batch(Verb::Take, &[place]);
                together.set_affinity(5);
                [batch(Verb::Take, &[place]), together]
            })
            .collect();
        for passes_now in [true, false] {
            for store in &each {
                for ask in &asks {
                    let outcomes = store.apply(ask, Time::ZERO).await.unwrap();
                    assert_eq!(!outcomes.refuses(), passes_now, "{ask:?}");
                }
            }
        }
    });
    assert_eq!(server.key_count(), (prefixes.len() * keys.len() * ids.len() * 2) as u64);
}

/// All nodes hash their keys under the same seed: the first node's.
#[test]
fn all_nodes_use_the_same_hash_seed() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, _) = plan(vec![window(1, Span::from_secs(60))]);
    let seeds: Vec<_> = (0..20)
        .map(|node| {
            let store = stores.under("seed:", &limits);
            stores.runtime.spawn(async move { store.get_or_insert_seed([node; 16]).await.unwrap() })
        })
        .collect();
    let seeds: Vec<_> = seeds.into_iter().map(|seed| stores.runtime.block_on(seed).unwrap()).collect();
    assert!(seeds.iter().all(|seed| *seed == seeds[0]), "{seeds:?}");
}

/// A reset by one node is told to all.
#[test]
fn resets_are_published_to_all_nodes() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, ids) = plan(vec![window(1, Span::from_secs(60)).with_tag(77)]);
    let (one, other, stranger) =
        (stores.under("told:", &limits), stores.under("told:", &limits), stores.under("else:", &limits));
    stores.runtime.block_on(async {
        let mut heard = [one.subscribe_to_resets().unwrap(), other.subscribe_to_resets().unwrap()];
        let mut elsewhere = stranger.subscribe_to_resets().unwrap();
        // Each new connection says that some may have been missed before it.
        for store in [&one, &other, &stranger] {
            store.apply(&Batch::new(0), Time::ZERO).await.unwrap();
        }
        assert!(!one.apply(&batch(Verb::Take, &[(ids[0], KEY)]), Time::ZERO).await.unwrap().refuses());
        one.apply(&batch(Verb::Reset, &[(ids[0], KEY)]), Time::ZERO).await.unwrap();
        for heard in &mut heard {
            for told in [None, Some(KeyReset { tag: 77, key: KEY })] {
                let heard = tokio::time::timeout(Duration::from_secs(5), heard.recv()).await.unwrap().unwrap();
                assert_eq!(heard, told);
            }
        }
        assert!(!other.apply(&batch(Verb::Take, &[(ids[0], KEY)]), Time::ZERO).await.unwrap().refuses());
        assert_eq!(elsewhere.try_recv().unwrap(), None);
        assert!(elsewhere.try_recv().is_err());
    });
}
