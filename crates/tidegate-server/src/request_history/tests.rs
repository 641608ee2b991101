use std::net::{IpAddr, Ipv4Addr};

use tidegate::Gate;
use tidegate::clock::ManualClock;
use tidegate::policy::{PolicySources, Query};
use tidegate_core::Clock as _;
use tidegate_policy::Policy;

use super::*;

const TEXT: &str = "[inbound]\nallow = [\"10.9.0.0/16\"]\n[inbound.global]\nlimit = \"100000 per 1m\"\n\
    [inbound.action.login]\nmatch = { path = \"/login\" }\nlimit = [\"5 per 60s\", \"100 per 1h\"]\ncost = 3\n";

struct Recorder {
    gate: Gate<tidegate::store::Memory, ManualClock>,
    history: std::sync::Arc<RequestHistory>,
}

impl Recorder {
    fn new(bytes: usize) -> Self {
        Self::with_policy(TEXT, bytes, |history, call| history.record(0, call))
    }

    fn with_policy(
        text: &str,
        bytes: usize,
        record: impl Fn(&RequestHistory, &DecidedCall<'_>) + Send + Sync + 'static,
    ) -> Self {
        let policy = Policy::load(PolicySources::new().file("test.toml", text)).expect("a policy");
        let gate = Gate::in_memory(&policy, ManualClock::default());
        gate.clock().advance(Span::from_secs(1_000_000));
        let history = std::sync::Arc::new(RequestHistory::new(bytes));
        let recorder = std::sync::Arc::clone(&history);
        gate.observe_decisions(move |call| record(&recorder, call));
        Self { gate, history }
    }

    fn check(&self, client: u32, path: &str) {
        let ip = Some(IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + client)));
        self.gate.check_now(&Query { ip, path: Some(path), ..Query::default() }).expect("a decision");
        self.gate.clock().advance(Span::from_micros(1700));
    }

    fn calls(&self) -> RememberedCalls {
        self.history.calls(self.gate.clock().now())
    }
}

fn per_client(calls: &RememberedCalls, plan: &Plan) -> Vec<usize> {
    let mut counts = std::collections::HashMap::new();
    calls.iter(plan).for_each(|call| *counts.entry(call.client).or_default() += 1);
    counts.into_values().collect()
}

#[test]
fn requests_come_back_as_they_were_decided() {
    let recorder = Recorder::new(1 << 20);
    recorder.check(1, "/login");
    recorder.check(0x9_0001, "/login");
    recorder.check(1, "/other");
    let (plan, calls) = (recorder.gate.plan(), recorder.calls());
    let calls: Vec<RecordedCall> = calls.iter(plan).collect();
    let limits = |call: &RecordedCall| -> Vec<(String, u64)> {
        let name = |op: &Op| plan.limit_info(op.limit).name().to_owned();
        call.batch.ops().iter().map(|op| (name(op), op.cost)).collect()
    };
    assert_eq!(
        limits(&calls[0]),
        [("login.1", 3), ("login.2", 3), ("global", 3)].map(|(name, cost)| (name.into(), cost))
    );
    assert_eq!(limits(&calls[2]), [("global".to_owned(), 1)]);
    assert_eq!(calls[0].batch.ops()[2].key, calls[2].batch.ops()[0].key);
    assert_eq!((calls[0].client, calls[0].actions.first()), (calls[2].client, plan.find_action("login").ok()));
    assert_eq!((calls[1].list, calls[1].batch.ops().len(), calls[1].actions), (ListStatus::Allow, 0, calls[0].actions));
    assert_eq!(calls[2].at.since(calls[0].at), Span::from_micros(3400));
}

#[test]
fn calls_of_many_actions_come_back() {
    let text: String = (0..6).map(|name| format!("[inbound.action.a{name}]\nlimit = \"9 per 60s\"\n")).collect();
    let recorder = Recorder::with_policy(&text, 1 << 20, |history, call| history.record(0, call));
    let plan = recorder.gate.plan();
    let mut actions = MatchedActions::NONE;
    let ids: Vec<ActionId> = plan.actions().map(|(id, _)| id).collect();
    ids.iter().rev().for_each(|id| actions.insert(*id).expect("room for six"));
    let query = Query { actions: Some(actions), ip: "2001:db8::1".parse().ok(), ..Query::default() };
    recorder.gate.check_now(&query).expect("a decision");
    let call = recorder.calls().iter(plan).next().expect("a call");
    assert_eq!((call.actions, call.batch.ops().len()), (actions, 6));
}

#[test]
fn a_full_history_keeps_whole_clients() {
    let recorder = Recorder::new(256 << 10);
    // Each has 30 requests of 32 bytes: 2.9 MB.
    for _ in 0..30 {
        (0..3000).for_each(|client| recorder.check(client, "/other"));
    }
    let calls = recorder.calls();
    assert!((1.0 / 64.0..=1.0 / 16.0).contains(&calls.share()), "{}", calls.share());
    let counts = per_client(&calls, recorder.gate.plan());
    assert!(counts.iter().all(|count| *count == 30), "{counts:?}");
    let expected = 3000.0 * calls.share();
    assert!((expected * 0.5..expected * 1.6).contains(&(counts.len() as f64)), "{} of {expected}", counts.len());
}

#[test]
fn after_an_hour_with_room_all_clients_are_kept() {
    let recorder = Recorder::new(64 << 10);
    (0..20_000).for_each(|client| recorder.check(client, "/other"));
    let full = recorder.calls().share();
    assert!(full < 1.0);
    let pass = |hours: u64| {
        recorder.gate.clock().advance(Span::from_secs(hours * 3600 + 1));
        recorder.history.maintain(recorder.gate.clock().now());
    };
    pass(1);
    assert_eq!(recorder.calls().len(), 0);
    recorder.check(1, "/other");
    assert_eq!(recorder.calls().share(), full, "requests of the last hour may lack clients");
    pass(1);
    recorder.check(1, "/other");
    assert_eq!((recorder.calls().share(), recorder.calls().len()), (1.0, 1));
}

#[test]
fn one_client_beyond_the_memory_stays_bounded() {
    let recorder = Recorder::with_policy(TEXT, 64 << 10, |history, call| history.keep(0, 0, call));
    (0..30_000).for_each(|_| recorder.check(1, "/other"));
    let words: usize = recorder.history.shards.iter().map(|shard| shard.lock().words.len()).sum();
    assert!((7000..=8192).contains(&words), "{words}");
    let calls = recorder.calls();
    let first = calls.first_time().expect("a call");
    assert!(calls.len() > 1700 && recorder.gate.clock().now().since(first) < Span::from_secs(10), "{}", calls.len());
}

#[test]
fn requests_stay_over_a_reload_of_numbers() {
    let recorder = Recorder::new(1 << 20);
    recorder.check(1, "/login");
    let policy = Policy::load(PolicySources::new().file("test.toml", TEXT)).expect("a policy");
    let next = |from: &str, to: &str| {
        policy.load_next(PolicySources::new().file("test.toml", TEXT.replace(from, to))).expect("a policy")
    };
    let follow = |policy: &Policy| recorder.history.follow(recorder.gate.plan(), policy.plan());
    assert_eq!((follow(&next("5 per 60s", "4 per 60s")), recorder.calls().len()), (0, 1));
    assert_eq!((follow(&next("cost = 3", "cost = 2")), recorder.calls().len()), (1, 0));
    recorder.check(1, "/login");
    assert_eq!(recorder.calls().len(), 0, "a call of the gate before");
}
