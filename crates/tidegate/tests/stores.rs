//! Gates over stores from policies.
#![cfg(all(feature = "file", feature = "outbound", feature = "remote"))]
#![expect(clippy::unwrap_used, reason = "a test's errors are its failures")]

use std::sync::Arc;
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::policy::{KeySeed, Policy, PolicySources, Query};
use tidegate::store::{AnyStore, Fleet, FleetOptions, fleet_limits};
use tidegate::{Check, CheckError, Clock as _, Gate, OpenError, Reason, Span, Stores};
use tidegate_testkit::remote::{FlakyRemote, RemoteBehaviour};
use tokio::time::sleep;

const POLICY: &str = "
[inbound.global]
limit = \"100 per 1h\"

[inbound.action.login]
key = [\"key\"]
limit = \"3 per 60s\"
penalty = {}

[inbound.action.pay]
key = [\"key\"]
limit = \"3 per 60s\"
on_outage = \"deny\"

[inbound.action.pairs]
key = [\"key\"]
limit = \"2 in flight\"

[inbound.action.slots]
key = [\"key\"]
limit = \"1 in flight\"
";

fn policy(text: &str) -> Policy {
    Policy::load(PolicySources::new().file("test.toml", text)).unwrap()
}

fn ask<'q>(action: &'q str, key: &'q str) -> Query<'q> {
    Query { action: Some(action), key: Some(key), ip: Some([192, 0, 2, 1].into()), ..Query::default() }
}

type Node = Gate<AnyStore, TokioClock>;

fn nodes() -> (FlakyRemote, [Node; 2]) {
    let policy = policy(POLICY);
    let clock = TokioClock::default();
    let limits = fleet_limits(policy.plan().limits()).unwrap();
    let store = FlakyRemote::new(Arc::new(limits), clock, true);
    let node = |number| {
        let fleet = Fleet::start(Box::new(store.clone()), clock, FleetOptions::new(number));
        Gate::from_parts(Arc::clone(policy.plan()), AnyStore::Fleet(fleet), clock, KeySeed::new([1; 16]))
    };
    let nodes = [node(1), node(2)];
    (store, nodes)
}

#[tokio::test(start_paused = true)]
async fn nodes_share_counts() {
    let (store, [one, two]) = nodes();
    sleep(Duration::from_millis(1)).await;
    for gate in [&one, &two, &one] {
        let decision = gate.check(&ask("login", "bob")).await.unwrap();
        assert!(decision.allowed);
    }
    let refused = two.check(&ask("login", "bob")).await.unwrap();
    assert_eq!((refused.allowed, refused.reason), (false, Reason::Penalty));
    assert!(one.check(&ask("login", "alice")).await.unwrap().allowed);
    assert_eq!(two.status(&ask("login", "alice")).await.unwrap().remaining, Some(2));
    let explained = one.explain(&ask("login", "bob")).await.unwrap();
    let explained = format!("{explained:?}");
    assert!(explained.contains("login"), "{explained}");

    let asked = store.request_count();
    let told = two.check(&ask("login", "bob")).await.unwrap();
    assert_eq!(
        (told.allowed, told.blocked, store.request_count()),
        (false, true, asked),
        "a known block is refused at once"
    );
    one.reset(&ask("login", "bob")).await.unwrap();
    sleep(Duration::from_millis(1)).await;
    assert!(two.check(&ask("login", "bob")).await.unwrap().allowed, "a reset is heard");
}

#[tokio::test(start_paused = true)]
async fn permits_are_shared_between_nodes_and_returned() {
    let (_, [one, two]) = nodes();
    sleep(Duration::from_millis(1)).await;
    let query = ask("slots", "k");
    let held = one.check(&query).await.unwrap();
    let hold = one.hold_permit(&query, &held).unwrap();
    assert!(hold.is_some() && !two.check(&query).await.unwrap().allowed);
    drop(hold);
    sleep(Duration::from_millis(5)).await;
    assert!(two.check(&query).await.unwrap().allowed);
}

#[tokio::test(start_paused = true)]
async fn kept_permits_are_shared_between_nodes_and_returned() {
    let (_, [one, two]) = nodes();
    sleep(Duration::from_millis(1)).await;
    let (query, neighbour) = (ask("pairs", "k"), Query { ip: Some([192, 0, 2, 2].into()), ..ask("pairs", "k") });
    let begun = one.check(&query).await.unwrap();
    sleep(Duration::from_secs(20)).await;
    drop(one.hold_permit(&query, &begun).unwrap().unwrap().keep());
    assert!(!one.check(&query).await.unwrap().allowed, "its share is one of two");
    let neighbours = two.check(&neighbour).await.unwrap();
    assert!(neighbours.allowed && !two.check(&neighbour).await.unwrap().allowed);
    sleep(Duration::from_secs(11)).await;
    one.maintain();
    sleep(Duration::from_millis(5)).await;
    assert!(two.check(&neighbour).await.unwrap().allowed, "30 s after the start of the call");
    // Without the process that keeps it, a permit ends with its lease, which was renewed when the client went away.
    let begun = two.check(&ask("slots", "k")).await.unwrap();
    sleep(Duration::from_secs(20)).await;
    let kept = two.hold_permit(&ask("slots", "k"), &begun).unwrap().unwrap().keep().unwrap();
    sleep(Duration::from_secs(29)).await;
    assert!(!one.check(&ask("slots", "k")).await.unwrap().allowed);
    sleep(Duration::from_secs(2)).await;
    assert!(one.check(&ask("slots", "k")).await.unwrap().allowed);
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn checks_are_pending_only_while_they_wait() {
    let (store, [one, _]) = nodes();
    sleep(Duration::from_millis(1)).await;
    let begin = |key| {
        let query = ask("login", key);
        one.begin_check(&query).unwrap()
    };
    let Check::Pending(deciding) = begin("a") else { panic!("a store far away has to be waited for") };
    assert!(deciding.decision().await.unwrap().allowed);
    store.set_behaviour(RemoteBehaviour::Failing);
    let Check::Pending(deciding) = begin("b") else { panic!("nobody knows yet") };
    assert!(deciding.decision().await.unwrap().allowed);
    let Check::Decided(decision) = begin("b") else { panic!("the node goes on by itself") };
    assert!(decision.allowed);
    let refused = one.check(&ask("pay", "b")).await;
    assert!(matches!(refused, Err(CheckError::Store(_))), "{refused:?}");
}

#[tokio::test]
async fn store_opening_errors_are_reported() {
    let open = async |url: &str, more: &str| {
        let policy = policy(&format!("[store]\nurl = \"{url}\"\n{more}\n{POLICY}"));
        Stores::open(&policy, |name| (name == "SHORT").then(|| "short".to_owned())).await
    };
    let short = open("memory", "hash_key = \"env:SHORT\"").await.unwrap_err();
    assert!(matches!(short, OpenError::HashKeyTooShort { found: 5 }), "{short}");
    let unset = open("memory", "hash_key = \"env:NOWHERE\"").await.unwrap_err();
    assert!(unset.to_string().contains("NOWHERE"), "{unset}");
    let file = open("file:/nowhere/at/all", "").await.unwrap_err();
    assert!(matches!(file, OpenError::File(_)), "{file}");
}

/// A file store can't share the counts of a shared provider with other nodes. They are stored in the file like all
/// others.
#[tokio::test(start_paused = true)]
async fn all_providers_keep_their_counts_in_files() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("state");
    let provider = "base_url = \"https://api.test\"\nlimit = \"1 per 1h\"\n";
    let text = format!(
        "[store]\nurl = \"file:{}\"\n[outbound.provider.one]\n{provider}shared = true\n\
         [outbound.provider.two]\n{provider}",
        path.display()
    );
    let policy = policy(&text);
    let stores = Stores::open(&policy, |_| None).await.unwrap();
    let outbound = stores.outbound(&policy, TokioClock::default()).unwrap().unwrap();
    assert_eq!(outbound.providers().len(), 2);
}

/// Counts in a file are restored after a restart, without further settings.
#[tokio::test(start_paused = true)]
async fn file_state_survives_a_restart() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("state");
    let text = format!("[store]\nurl = \"file:{}\"\n{POLICY}", path.display());
    let policy = policy(&text);
    let clock = TokioClock::default();
    for (round, allowed) in [[true, true], [true, false]].into_iter().enumerate() {
        let stores = Stores::open(&policy, |_| None).await.unwrap();
        let gate = stores.gate(&policy, clock).unwrap();
        for allowed in allowed {
            let decision = gate.check(&ask("login", "bob")).await.unwrap();
            assert_eq!(decision.allowed, allowed, "round {round}");
        }
    }
}

/// A clock that is a day ahead for one run of the program loses neither a day's quota nor a block.
#[tokio::test(start_paused = true)]
async fn a_temporarily_wrong_clock_loses_no_file_state() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("state");
    let text = format!(
        "[store]\nurl = \"file:{}\"\n[inbound.action.day]\nkey = [\"key\"]\nlimit = \"3 per day in UTC\"\n\
         [inbound.action.login]\nkey = [\"key\"]\nlimit = \"3 per 60s\"\nban = \"4h\"\n",
        path.display()
    );
    let policy = policy(&text);
    let noon = TokioClock::default().now() + Span::from_secs(12 * 3600);
    for (ahead, allowed) in [(Span::ZERO, 3), (Span::from_secs(86_400), 3), (Span::from_secs(600), 0)] {
        let stores = Stores::open(&policy, |_| None).await.unwrap();
        let gate = stores.gate(&policy, TokioClock::at(noon + ahead)).unwrap();
        for action in ["day", "login"] {
            let mut passed = 0;
            for _ in 0..4 {
                if gate.check(&ask(action, "bob")).await.unwrap().allowed {
                    passed += 1;
                }
            }
            assert_eq!(passed, allowed, "{action}, {ahead:?} ahead");
        }
    }
}

/// A check that is cancelled before the answer arrives holds no permit.
#[tokio::test(start_paused = true)]
async fn permits_of_cancelled_checks_are_returned() {
    let (store, [one, two]) = nodes();
    sleep(Duration::from_millis(1)).await;
    let query = ask("slots", "k");
    for _ in 0..3 {
        store.set_behaviour(RemoteBehaviour::LostReply);
        let mut gone = Box::pin(one.check(&query));
        assert!(futures_util::poll!(&mut gone).is_pending());
        drop(gone);
        store.set_behaviour(RemoteBehaviour::Normal);
        sleep(Duration::from_millis(5)).await;
    }
    let held = two.check(&query).await.unwrap();
    assert!(held.allowed, "{held:?}");
    assert!(!one.check(&query).await.unwrap().allowed);
}

/// The answer was lost, so the node decided by itself. The store may have granted a permit in both cases.
#[tokio::test(start_paused = true)]
async fn permits_with_lost_replies_are_returned() {
    let (store, [one, two]) = nodes();
    sleep(Duration::from_secs(3)).await;
    let query = ask("pairs", "k");
    store.set_behaviour(RemoteBehaviour::LostReply);
    let (first, second) = tokio::join!(one.check(&query), one.check(&query));
    let (admitted, refused): (Vec<_>, Vec<_>) =
        [first.unwrap(), second.unwrap()].into_iter().partition(|decision| decision.allowed);
    assert_eq!((admitted.len(), refused.len()), (1, 1), "its share is one of two");
    let hold = one.hold_permit(&query, &admitted[0]).unwrap();
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(1)).await;
    assert!(two.check(&query).await.unwrap().allowed && !two.check(&query).await.unwrap().allowed);
    drop(hold);
    sleep(Duration::from_secs(1)).await;
    assert!(two.check(&query).await.unwrap().allowed);
}
