//! Loss of the server: it stops, freezes, returns, or is replaced by another.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{
    Admission, Batch, Concurrency, Key, Limit, LimitId, LimitKind, Limits, Op, Outcomes, Penalty, PenaltySpec, Span,
    Time, Verb, Window,
};
use tidegate_store::{Redis, RedisOptions, RemoteStore as _, StoreError, TimeSource};
use tidegate_testkit::servers::{RedisSentinelGroup, RedisServer, RedisServerOptions, ScratchDir, free_port};
use tokio::time::timeout;

use crate::common::Stores;

const KEY: Key = Key::new(3, 0x1234_5678_9abc_def1);
const HOUR: Span = Span::from_secs(3600);
/// The timeout of a caller.
const CALLER: Duration = Duration::from_millis(50);
/// The bound for an immediate answer on a busy machine: far below the store's own timeout.
const AT_ONCE: Duration = Duration::from_millis(800);
/// As long as anything here may take on a busy machine.
const LONG: Duration = Duration::from_secs(10);

fn plan() -> (Arc<Limits>, [LimitId; 3]) {
    let window = |limit| Limit::new(LimitKind::Window(Window::new(limit, HOUR, 64).unwrap()));
    let penalty = Penalty::new(PenaltySpec { base: HOUR, ..PenaltySpec::default() }, HOUR).unwrap();
    let held = Limit::new(LimitKind::Concurrency(Concurrency::new(2, HOUR).unwrap()));
    let limits = Arc::new(Limits::new(vec![window(1_000), window(2).with_penalty(penalty), held]).unwrap());
    let ids: Vec<_> = limits.iter().map(|(id, _)| id).collect();
    (limits, ids.try_into().unwrap())
}

fn ask(limit: LimitId, verb: Verb) -> Batch {
    let mut batch = Batch::new(1);
    batch.push(Op::new(limit, verb, KEY, 1)).unwrap();
    batch
}

async fn once(store: &Redis, limit: LimitId, verb: Verb) -> Result<Outcomes, StoreError> {
    store.apply(&ask(limit, verb), Time::ZERO).await
}

/// Asks until there is an answer, as a background ping does.
async fn until_answered(store: &Redis) {
    let answered = async {
        // An answer that took too long is none.
        while !timeout(AT_ONCE, store.apply(&Batch::new(0), Time::ZERO)).await.is_ok_and(|answer| answer.is_ok()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LONG, answered).await.unwrap();
}

#[test]
fn state_survives_a_durable_servers_restart() {
    let Some(mut server) =
        RedisServer::start_with(RedisServerOptions { durable: true, ..RedisServerOptions::default() })
    else {
        return;
    };
    let (limits, [wide, narrow, held]) = plan();
    let read = |stores: &Stores, store: &Redis| {
        let peeks = [wide, narrow, held].map(|id| stores.runtime.block_on(once(store, id, Verb::Peek)).unwrap());
        peeks.map(|outcomes| {
            let outcome = outcomes.list()[0];
            (outcome.admission, outcome.used, outcome.strikes, outcome.block_until)
        })
    };
    let before = {
        let stores = Stores::new(server.url(), TimeSource::Store);
        let store = stores.under("kept:", &limits);
        for _ in 0..7 {
            stores.runtime.block_on(once(&store, wide, Verb::Take)).unwrap();
        }
        for _ in 0..3 {
            stores.runtime.block_on(once(&store, narrow, Verb::Take)).unwrap();
        }
        stores.runtime.block_on(once(&store, held, Verb::Take)).unwrap();
        read(&stores, &store)
    };
    assert_eq!((before[0].1, before[1].0, before[2].1), (7, Admission::Blocked, 1));
    server.restart();
    // The gate was restarted, too.
    let stores = Stores::new(server.url(), TimeSource::Store);
    assert_eq!(read(&stores, &stores.under("kept:", &limits)), before);
}

#[test]
fn a_stopped_server_fails_fast_and_recovers() {
    let Some(mut server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, [wide, ..]) = plan();
    let store = stores.under("down:", &limits);
    stores.runtime.block_on(async {
        once(&store, wide, Verb::Take).await.unwrap();
        server.kill();
        // The end of the connection is noticed without a call, and later calls don't wait.
        tokio::time::sleep(Duration::from_millis(200)).await;
        for _ in 0..100 {
            let answer = timeout(AT_ONCE, once(&store, wide, Verb::Take)).await;
            assert!(answer.unwrap().is_err());
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        server.restart();
        // Asking makes no difference while it is down; it is found by trying again.
        until_answered(&store).await;
        let outcomes = timeout(LONG, once(&store, wide, Verb::Take)).await.unwrap().unwrap();
        // It kept nothing, not even the script.
        assert_eq!(outcomes.list()[0].used, 1);
    });
}

#[test]
fn a_store_may_be_created_before_its_server() {
    let Some(mut server) = RedisServer::start() else { return };
    server.kill();
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, [wide, ..]) = plan();
    let store = stores.under("early:", &limits);
    stores.runtime.block_on(async {
        assert!(once(&store, wide, Verb::Take).await.is_err());
        assert!(store.get_or_insert_seed([1; 16]).await.is_err());
        server.restart();
        until_answered(&store).await;
        once(&store, wide, Verb::Take).await.unwrap();
    });
}

/// Callers with a timeout of 50 ms never learn that a server is frozen. The store does, and later callers don't wait.
#[test]
fn a_frozen_server_fails_fast_and_recovers() {
    let Some(server) = RedisServer::start() else { return };
    let mut stores = Stores::new(server.url(), TimeSource::Store);
    stores.options.answer_timeout = Duration::from_millis(300);
    stores.options.connect_timeout = Duration::from_millis(300);
    let (limits, [wide, ..]) = plan();
    let store = stores.under("frozen:", &limits);
    stores.runtime.block_on(async {
        once(&store, wide, Verb::Take).await.unwrap();
        server.freeze();
        assert!(timeout(CALLER, once(&store, wide, Verb::Take)).await.is_err());
        let fails_at_once =
            async { while !matches!(timeout(CALLER, once(&store, wide, Verb::Take)).await, Ok(Err(_))) {} };
        timeout(LONG, fails_at_once).await.unwrap();
        server.thaw();
        until_answered(&store).await;
        let outcomes = once(&store, wide, Verb::Take).await.unwrap();
        assert!(outcomes.list()[0].used >= 2);
    });
}

/// A server that has become a replica refuses to write. The store leaves it, and is back when it is a master again.
#[test]
fn a_read_only_server_fails_until_promoted() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, [wide, ..]) = plan();
    let store = stores.under("replica:", &limits);
    stores.runtime.block_on(async {
        once(&store, wide, Verb::Take).await.unwrap();
        server.command(&["REPLICAOF", "127.0.0.1", &free_port().to_string()]);
        assert!(once(&store, wide, Verb::Take).await.is_err());
        assert!(timeout(AT_ONCE, once(&store, wide, Verb::Take)).await.unwrap().is_err());
        server.command(&["REPLICAOF", "NO", "ONE"]);
        until_answered(&store).await;
        assert_eq!(once(&store, wide, Verb::Take).await.unwrap().list()[0].used, 2);
    });
}

#[test]
fn a_full_server_fails_without_changes() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, [wide, narrow, _]) = plan();
    let store = stores.under("full:", &limits);
    stores.runtime.block_on(async {
        let mut both = ask(wide, Verb::Take);
        both.push(Op::new(narrow, Verb::Take, KEY, 1)).unwrap();
        store.apply(&both, Time::ZERO).await.unwrap();
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        assert!(store.apply(&both, Time::ZERO).await.is_err());
        server.command(&["CONFIG", "SET", "maxmemory", "0"]);
        let outcomes = store.apply(&both, Time::ZERO).await.unwrap();
        assert_eq!(outcomes.list().iter().map(|outcome| outcome.used).collect::<Vec<_>>(), [2, 2]);
    });
}

/// Scripts that a server has lost are sent again, unnoticed by callers.
#[test]
fn forgotten_scripts_are_loaded_again() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Store);
    let (limits, [wide, ..]) = plan();
    let store = stores.under("scripts:", &limits);
    for calls in 1..=3 {
        server.command(&["SCRIPT", "FLUSH"]);
        let outcomes = stores.runtime.block_on(once(&store, wide, Verb::Take)).unwrap();
        assert_eq!(outcomes.list()[0].used, calls);
    }
}

/// The server needs a password, and the URL has none.
#[test]
fn the_password_is_used_and_never_printed() {
    const SECRET: &str = "hunter2-%7Bx%7D";
    let words = ["--requirepass", "hunter2-{x}"].map(str::to_owned).to_vec();
    let Some(server) =
        RedisServer::start_with(RedisServerOptions { arguments: words, ..RedisServerOptions::default() })
    else {
        return;
    };
    let (limits, [wide, ..]) = plan();
    let host = server.url().replace("redis://", "");
    for (login, is_right) in [(format!(":{SECRET}@"), true), (":hunter2-wrong@".into(), false), (String::new(), false)]
    {
        let stores = Stores::new(format!("redis://{login}{host}"), TimeSource::Store);
        let store = stores.under("secret:", &limits);
        let answer = stores.runtime.block_on(once(&store, wide, Verb::Take));
        assert_eq!(answer.is_ok(), is_right, "{answer:?}");
        let told = format!("{answer:?} {store:?} {:?}", stores.options);
        assert!(!told.contains("hunter2"), "{told}");
    }
}

/// A runtime that ends takes the connection with it. Another one makes its own.
#[test]
fn a_store_survives_its_runtime() {
    let Some(server) = RedisServer::start() else { return };
    let (limits, [wide, ..]) = plan();
    let store = Redis::new(RedisOptions::new(server.url()), limits).unwrap();
    for _ in 0..3 {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            until_answered(&store).await;
            once(&store, wide, Verb::Take).await.unwrap();
        });
    }
}

/// A master is lost, and the sentinels' next one is found.
#[test]
fn a_failover_is_followed() {
    let Some(mut pair) = RedisSentinelGroup::start(Duration::from_millis(500)) else { return };
    let stores = Stores::new(pair.url(), TimeSource::Store);
    let (limits, [wide, ..]) = plan();
    let store = stores.under("failover:", &limits);
    stores.runtime.block_on(async {
        once(&store, wide, Verb::Take).await.unwrap();
        let is_replicated = async {
            while pair.replica.key_count() == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(LONG, is_replicated).await.unwrap();
        pair.master.kill();
        let found = async {
            loop {
                match timeout(CALLER, once(&store, wide, Verb::Take)).await {
                    Ok(Ok(outcomes)) => return outcomes,
                    _ => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        };
        let outcomes = timeout(Duration::from_secs(30), found).await.unwrap();
        assert_eq!(outcomes.list()[0].used, 2, "what the replica had been told");
    });
}

/// Over TLS, the certificate must be signed by a trusted authority.
#[test]
fn tls_requires_a_trusted_server_certificate() {
    let issued = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let scratch = ScratchDir::new();
    let certificate = scratch.write("certificate.pem", &issued.cert.pem());
    let key = scratch.write("key.pem", &issued.signing_key.serialize_pem());
    let port = free_port();
    let path = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let words = [
        ["--tls-port".into(), port.to_string()],
        ["--tls-cert-file".into(), path(&certificate)],
        ["--tls-key-file".into(), path(&key)],
        ["--tls-ca-cert-file".into(), path(&certificate)],
        ["--tls-auth-clients".into(), "no".into()],
    ];
    let setup = RedisServerOptions { arguments: words.concat(), ..RedisServerOptions::default() };
    let Some(_server) = RedisServer::start_with(setup) else { return };
    let (limits, [wide, ..]) = plan();
    for (authorities, is_trusted) in [(Some(issued.cert.pem().into_bytes()), true), (None, false)] {
        let mut stores = Stores::new(format!("rediss://localhost:{port}"), TimeSource::Store);
        stores.options.authorities = authorities;
        let store = stores.under("tls:", &limits);
        let answer = stores.runtime.block_on(once(&store, wide, Verb::Take));
        assert_eq!(answer.is_ok(), is_trusted, "{answer:?}");
    }
}
