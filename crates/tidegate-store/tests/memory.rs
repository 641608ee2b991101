//! The memory store answers as every store must.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::sync::Arc;

use tidegate_core::batch::Outcome;
use tidegate_core::{Admission, Batch, Clock, Key, Limit, LimitKind, Limits, Op, PenaltyMode, Rate, Span, Time, Verb};
use tidegate_store::{ImmediateStore, Memory, Store as _};
use tidegate_testkit::conformance::{ConformanceOptions, check_conformance};
use tidegate_testkit::traffic::{PlanContents, TrafficGenerator};
use tidegate_testkit::{fixtures, property, random};

/// A clock that tells the present only roughly unless it is asked exactly.
struct Rough(Time);

impl Clock for Rough {
    fn now(&self) -> Time {
        self.0
    }

    fn now_bounds(&self) -> (Time, Time) {
        (self.0 - Span::from_millis(20), self.0 + Span::from_millis(32))
    }
}

fn memory(limits: Arc<Limits>) -> Memory {
    Memory::new(limits, Memory::DEFAULT_MAX_BYTES)
}

#[test]
fn the_memory_store_conforms() {
    check_conformance(&memory, &ConformanceOptions::default()).unwrap();
}

/// In a single shard too.
#[test]
fn the_reproducible_memory_store_conforms() {
    check_conformance(&|limits| Memory::reproducible(limits, 1 << 20), &ConformanceOptions::default()).unwrap();
}

/// The shorter ways in answer as a batch of one does.
#[test]
fn fast_paths_agree_with_batches() {
    property::check(random::case_count(400, 8_000), 800, |random| {
        let mut world = TrafficGenerator::new(random, PlanContents::Simple);
        let (whole, short) = (memory(Arc::clone(world.limits())), memory(Arc::clone(world.limits())));
        let turns = memory(Arc::clone(world.limits()));
        while !world.random().is_exhausted() {
            let now = world.advance_clock();
            let call = world.take_batch();
            let mut batch = Batch::new(0);
            batch.push(call.ops()[0]).map_err(|full| full.to_string())?;
            let outcomes = whole.apply_now(&batch, now);
            let (expected, found) = (outcomes.list()[0], short.take(&call.ops()[0], 0, now));
            if found != expected {
                return Err(format!("take answered {found:?}, a batch {expected:?}, to {:?}", call.ops()[0]));
            }
            let turn = turns.take_with_clock(&call.ops()[0], &Rough(now)).0;
            // Admitted in the rough, the moment that is told is the earlier bound.
            let admitted = turn <= now;
            if admitted == expected.admission.refuses() || (!admitted && turn != expected.retry_at) {
                return Err(format!("turn answered {turn:?}, a batch {expected:?}, to {:?}", call.ops()[0]));
            }
            world.record_outcomes(&outcomes);
        }
        Ok(())
    });
}

#[test]
fn a_clock_jump_locks_out_no_caller() {
    let rate = Rate::new(1, Span::from_secs(60), 1).unwrap();
    let limits = Limits::new(vec![Limit::new(LimitKind::Rate(rate))]).unwrap();
    let store = memory(Arc::new(limits));
    let op = Op::new(fixtures::limit_id(0), Verb::Take, fixtures::client_key(1), 1);
    let year_on = fixtures::test_time(0) + Span::from_secs(365 * 86_400);
    assert_eq!(store.take_with_clock(&op, &Rough(year_on)).0, year_on);
    let told = store.take_with_clock(&op, &Rough(fixtures::test_time(0))).0;
    assert!(told <= fixtures::test_time(60_000), "{told:?}");
    assert_eq!(store.take_with_clock(&op, &Rough(told)).0, told);
}

/// Giving back under a plain rate costs no other client what it had used.
#[test]
fn a_refund_affects_no_other_client() {
    let rate = Rate::new(5, Span::from_secs(3600), 5).unwrap();
    let store = memory(Arc::new(Limits::new(vec![Limit::new(LimitKind::Rate(rate))]).unwrap()));
    let one = |verb, client| {
        let mut batch = Batch::new(0);
        batch.push(Op::new(fixtures::limit_id(0), verb, fixtures::client_key(client), 1)).unwrap();
        store.apply_now(&batch, fixtures::test_time(0)).list()[0].used
    };
    for client in 0..1_000 {
        one(Verb::Take, client);
        one(Verb::Take, client);
    }
    for client in 0..1_000 {
        one(Verb::Refund, client);
    }
    let wrong = (0..1_000).filter(|&client| one(Verb::Peek, client) != 1).count();
    assert_eq!((wrong, store.stats().losses.evicted()), (0, 0));
}

/// Nor does what is told of a limit of another kind.
#[test]
fn inapplicable_operations_on_rates_change_nothing() {
    let rate = Rate::new(5, Span::from_secs(3600), 5).unwrap();
    let store = Memory::reproducible(Arc::new(Limits::new(vec![Limit::new(LimitKind::Rate(rate))]).unwrap()), 1 << 20);
    let one = |verb, client| {
        let mut batch = Batch::new(0);
        batch.push(Op::new(fixtures::limit_id(0), verb, fixtures::client_key(client), 1)).unwrap();
        store.apply_now(&batch, fixtures::test_time(0)).list()[0].used
    };
    let penalise = Verb::RestorePenalty { strikes: 1, parole: 0 };
    for verb in [Verb::Throttle { generation: 0 }, Verb::Disable, penalise, Verb::Pace { failed: true, draw: 0 }] {
        for client in 0..100 {
            one(verb, client);
            one(Verb::Take, client);
            one(verb, client + 1_000);
        }
    }
    let wrong = (0..100).filter(|&client| one(Verb::Peek, client) != 4).count();
    assert_eq!((wrong, store.stats().entries, store.stats().losses.evicted()), (0, 100, 0));
}

/// Of keys in one shard of a store for plain rates alone, which keeps no room for other states.
#[test]
fn costs_beyond_the_reservation_count_per_key() {
    let rate = Rate::new(10, Span::from_secs(60), 10).unwrap();
    let store = memory(Arc::new(Limits::new(vec![Limit::new(LimitKind::Rate(rate))]).unwrap()));
    let limit = store.limits().iter().next().unwrap().0;
    let now = Time::from_secs(1_700_000_000);
    let of = |key, verb, cost| {
        let mut batch = Batch::new(0);
        batch.push(Op::new(limit, verb, Key::new(0, key), cost)).unwrap();
        store.apply_now(&batch, now).list()[0]
    };
    for key in 1..=20 {
        of(key, Verb::Debit, 7);
    }
    for key in 1..=20 {
        assert_eq!(of(key, Verb::Peek, 1).used, 7, "{key}");
    }
}

fn limits(limits: impl IntoIterator<Item = Limit>) -> Arc<Limits> {
    Arc::new(Limits::new(limits.into_iter().collect()).unwrap())
}

fn plain_rate(per_second: u64) -> Limit {
    Limit::new(LimitKind::Rate(Rate::new(per_second, Span::from_secs(1), per_second).unwrap()))
}

fn reload(store: &Memory, limits: &Arc<Limits>) -> Memory {
    store.with_limits(Arc::clone(limits), fixtures::test_time(0)).unwrap().unwrap()
}

fn one(store: &Memory, verb: Verb, limit: usize, client: u64) -> Outcome {
    let op = Op::new(fixtures::limit_id(limit), verb, fixtures::client_key(client), 1);
    store.apply_now(&Batch::with_op(0, op), fixtures::test_time(0)).list()[0]
}

#[test]
fn a_block_survives_another_kind_of_limit() {
    let penalty = || fixtures::doubling_penalty(600, 3600, PenaltyMode::Parole, Span::from_secs(60));
    let store = memory(limits([fixtures::window_limit(1, 60).with_penalty(penalty())]));
    one(&store, Verb::Take, 0, 1);
    let block_until = one(&store, Verb::Take, 0, 1).block_until;
    let reloaded = reload(&store, &limits([plain_rate(1_000).with_penalty(penalty())]));
    let outcome = one(&reloaded, Verb::Take, 0, 1);
    assert_eq!((outcome.admission, outcome.block_until), (Admission::Blocked, block_until));
}

#[test]
fn a_thousand_reloads_take_no_memory() {
    let plans = [limits([fixtures::window_limit(5, 60)]), limits([fixtures::window_limit(9, 60), plain_rate(3)])];
    let mut store = memory(Arc::clone(&plans[0]));
    for client in 0..100 {
        one(&store, Verb::Take, 0, client);
        one(&store, Verb::Take, 0, client);
    }
    let before = store.stats();
    for turn in 1..=1_000 {
        store = reload(&store, &plans[turn % 2]);
    }
    assert_eq!(store.stats(), before);
    assert_eq!(plans.each_ref().map(Arc::strong_count), [2, 1], "only the last handle has limits");
    assert_eq!(one(&store, Verb::Peek, 0, 7).used, 2);
}

/// A store for plain rates gives all its memory to their table.
#[test]
fn a_window_finds_room_among_plain_rates() {
    let slow = || Limit::new(LimitKind::Rate(Rate::new(5, Span::from_secs(3600), 5).unwrap()));
    let store = Memory::reproducible(limits([slow()]), 1 << 20);
    for client in 0..60_000 {
        one(&store, Verb::Take, 0, client);
    }
    let reloaded = reload(&store, &limits([slow(), fixtures::window_limit(3, 60)]));
    let admitted = |client| (0..5).filter(|_| !one(&reloaded, Verb::Take, 1, client).admission.refuses()).count();
    assert_eq!((0..500).map(admitted).filter(|count| *count != 3).count(), 0);
    let stats = reloaded.stats();
    assert!(stats.bytes <= stats.max_bytes, "{stats:?}");
}

/// The entries of a limit that only the new handle has stay, whatever room the earlier one needs.
#[test]
fn an_earlier_handle_keeps_new_entries() {
    let store = Memory::reproducible(limits([fixtures::window_limit(5, 60)]), 1 << 20);
    let reloaded = reload(&store, &limits([fixtures::window_limit(5, 60), fixtures::window_limit(1, 60)]));
    one(&reloaded, Verb::Take, 1, 1);
    for client in 10..1_000 {
        one(&store, Verb::Take, 0, client);
    }
    for _ in 0..120 {
        store.maintain(fixtures::test_time(0));
    }
    assert_eq!(one(&reloaded, Verb::Take, 1, 1).admission, Admission::Refused);
}

#[test]
fn fast_takes_agree_after_other_terms() {
    let penalty = fixtures::doubling_penalty(600, 3600, PenaltyMode::Parole, Span::from_secs(60));
    for before in [fixtures::window_limit(2, 60), plain_rate(2).with_penalty(penalty)] {
        let store = memory(limits([before]));
        for client in 0..100 {
            for _ in 0..client % 4 {
                one(&store, Verb::Take, 0, client);
            }
        }
        let now = fixtures::test_time(0);
        let reloaded = reload(&store, &limits([plain_rate(5)]));
        for client in 0..100 {
            let op = Op::new(fixtures::limit_id(0), Verb::Take, fixtures::client_key(client), 1);
            let is_refused = one(&reloaded, Verb::Peek, 0, client).admission.refuses();
            assert_eq!(reloaded.take_with_clock(&op, &Rough(now)).0 > now, is_refused, "client {client}");
        }
    }
}
