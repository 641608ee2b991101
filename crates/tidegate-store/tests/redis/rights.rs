//! The documented rights of a user are enough, and decisions go on without those for the list of nodes.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::{
    Batch, Concurrency, Key, Limit, LimitKind, Limits, Op, Penalty, PenaltySpec, Rate, Span, Time, Verb, Window,
};
use tidegate_store::{Announcement, Redis, RedisOptions, RemoteStore as _};
use tidegate_testkit::servers::RedisServer;

const HOUR: Span = Span::from_secs(3600);

/// The command of the page about stores that gives a user its rights.
fn documented_rights() -> Vec<&'static str> {
    let page = include_str!("../../../../docs/stores.md");
    let line = page.lines().map(str::trim).find(|line| line.starts_with("ACL SETUSER gate ")).unwrap();
    line.split(' ').map(|word| if word == ">PASSWORD" { ">hunter2" } else { word }).collect()
}

fn plan() -> Arc<Limits> {
    let penalty = Penalty::new(PenaltySpec { base: HOUR, ..PenaltySpec::default() }, HOUR).unwrap();
    let window = Limit::new(LimitKind::Window(Window::new(1, HOUR, 64).unwrap())).with_penalty(penalty);
    let rate = Limit::new(LimitKind::Rate(Rate::new(9, HOUR, 9).unwrap()));
    let permits = Limit::new(LimitKind::Concurrency(Concurrency::new(9, HOUR).unwrap()));
    Arc::new(Limits::new(vec![window, rate, permits]).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_with_the_documented_rights_can_do_all() {
    let Some(server) = RedisServer::start() else { return };
    assert_eq!(server.command(&documented_rights()), "+OK");
    let url = format!("redis://gate:hunter2@127.0.0.1:{}", server.port());
    let limits = plan();
    let store = Redis::new(RedisOptions::new(url), Arc::clone(&limits)).unwrap();
    let mut resets = store.subscribe_to_resets().unwrap();
    assert_eq!(store.get_or_insert_seed([7; 16]).await.unwrap(), [7; 16]);
    for verb in [Verb::Take, Verb::Take, Verb::Peek, Verb::Renew, Verb::Refund, Verb::Debit, Verb::Release, Verb::Reset]
    {
        for (limit, _) in limits.iter() {
            let batch = Batch::new(1).with_ops([Op::new(limit, verb, Key::new(1, 2), 1)]);
            store.apply(&batch, Time::ZERO).await.unwrap_or_else(|error| panic!("{verb:?}: {error}"));
        }
    }
    store.apply(&Batch::new(1), Time::ZERO).await.unwrap();
    let announce = async |kept_for| {
        let announcement = Announcement::new(1, kept_for, b"node".to_vec()).unwrap();
        store.announce(announcement, Time::ZERO).await.unwrap().len()
    };
    assert_eq!((announce(HOUR).await, announce(Span::ZERO).await), (1, 0));
    store.maintain().await.unwrap();
    let reset = async { while resets.recv().await.unwrap().is_none() {} };
    tokio::time::timeout(Duration::from_secs(10), reset).await.unwrap();

    assert_eq!(server.command(&["ACL", "SETUSER", "gate", "-hset"]), "+OK");
    let announcement = Announcement::new(1, HOUR, Vec::new()).unwrap();
    let error = store.announce(announcement, Time::ZERO).await.unwrap_err().to_string();
    assert!(error.contains("can't run this command") && !error.contains("hunter2"), "{error}");
    let (limit, _) = limits.iter().next().unwrap();
    store.apply(&Batch::new(1).with_ops([Op::new(limit, Verb::Take, Key::new(1, 2), 1)]), Time::ZERO).await.unwrap();
}
