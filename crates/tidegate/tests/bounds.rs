//! The bounds that are printed, against the most that a client gets which obeys every wait.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use tidegate::clock::ManualClock;
use tidegate::policy::{Policy, PolicySources, Query};
use tidegate::{Clock as _, Gate, Span, Time};

fn block_on<T>(future: impl Future<Output = T>) -> T {
    match std::pin::pin!(future).poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("a gate in memory doesn't wait"),
    }
}

/// The times at which a client is admitted that begins with all calls that pass at once. It waits for room `paced`
/// times instead of risking a refusal. After each of `forgiven` blocks, it waits until a strike is forgiven.
fn admitted(policy: &Policy, paced: u32, forgiven: u32, forgive_after: Span, end: Time) -> Vec<Time> {
    let clock = ManualClock::default();
    let gate = Gate::in_memory(policy, clock.clone());
    let query = Query { action: Some("a"), ip: Some("203.0.113.7".parse().unwrap()), ..Query::default() };
    let (mut paced, mut forgiven) = (0..paced, 0..forgiven);
    let mut times = Vec::new();
    while clock.now() <= end {
        let status = block_on(gate.status(&query)).unwrap();
        if !status.allowed && paced.next().is_some() {
            clock.advance(status.retry_after.unwrap());
        }
        let decision = gate.check_now(&query).unwrap();
        if decision.allowed {
            times.push(clock.now());
            continue;
        }
        clock.advance(decision.retry_after.unwrap());
        assert!(gate.check_now(&query).unwrap().allowed, "the wait is true");
        times.push(clock.now());
        if forgiven.next().is_some() {
            clock.advance(forgive_after);
        }
    }
    times
}

/// The number and the seconds in "at most 9 in any 60 s".
fn printed_bound(words: &str) -> (usize, u64) {
    let words: Vec<&str> = words.split("at most ").nth(1).unwrap().split([' ', ';', '(']).collect();
    assert_eq!((words[1], words[2], words[4]), ("in", "any", "s"), "{words:?}");
    (words[0].parse().unwrap(), words[3].parse().unwrap())
}

#[test]
fn printed_bounds_are_never_exceeded() {
    for (limit, penalty, forgive_after, expected) in [
        ("3 per 60s", "ban = \"1s\"", 60, 62),
        ("5 per 60s", "penalty = { base = \"2s\", cap = \"4s\" }", 60, 20),
        ("5 per 60s", "penalty = { base = \"2s\", cap = \"1h\" }", 3600, 9),
        ("5 per 60s", "penalty = { base = \"2s\", cap = \"1h\", forgive_after = \"5s\" }", 5, 14),
        ("5 per 60s", "penalty = { base = \"2s\", cap = \"1h\", mode = \"strict\" }", 3600, 5),
        ("5 per 60s", "ban = \"60s\"", 60, 5),
        ("5 per 60s", "ban = \"10m\"", 600, 5),
        ("5 per 60s", "penalty = \"none\"", 60, 5),
        ("5 per 60s", "count = \"all\"\npenalty = { base = \"2s\", cap = \"1h\" }", 3600, 9),
        ("6/m", "penalty = { base = \"2s\", cap = \"1h\" }", 3600, 11),
        ("6/m burst 3", "ban = \"1s\"", 10, 69),
        ("6/m burst 3", "penalty = { base = \"20s\", cap = \"1h\" }", 3600, 11),
        ("12/m", "penalty = { base = \"1s\", cap = \"16s\", forgive_after = \"4s\" }", 4, 26),
        ("3000/s", "penalty = { base = \"2m\", cap = \"1h\" }", 3600, 180_001),
        ("5 per 60s", "penalty = { base = \"2s\", factor = 1 }", 3600, 34),
    ] {
        let text = format!("[inbound.action.a]\nlimit = \"{limit}\"\n{penalty}\n");
        let policy = Policy::load(PolicySources::new().file("test.toml", &text)).unwrap();
        let (id, _) = policy.plan().limits().iter().next().unwrap();
        let words = policy.plan().limit_info(id).description();
        let (most, seconds) = printed_bound(words);
        assert_eq!((most, seconds), (expected, 60), "{text}{words}");
        let (window, forgive_after) = (Span::from_secs(seconds), Span::from_secs(forgive_after));
        let end = ManualClock::default().now() + window.times(2);
        // Rates have room again at the very end of the time.
        let closed = limit.contains('/');
        if most > 1_000 {
            continue;
        }
        let mut found = 0;
        for (paced, forgiven) in (0..=10).flat_map(|paced| (0..=10).map(move |forgiven| (paced, forgiven))) {
            let times = admitted(&policy, paced, forgiven, forgive_after, end);
            for (index, last) in times.iter().enumerate() {
                let before = times.partition_point(|at| *at + window < *last || !closed && *at + window == *last);
                found = found.max(index + 1 - before);
            }
        }
        // Of a rate, the bound isn't always reached: its paroles use up a part of its room.
        assert!(found == most || closed && found < most, "{text}{words}: {found}");
    }
}
