//! Reservations, against core and under concurrency.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tidegate_core::quota::FixedPeriods;
use tidegate_core::rate::ArrivalTime;
use tidegate_core::reservation::MAX_RECORDS;
use tidegate_core::{
    Admission, Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Outcome, Quota, Rate, ReservationRules, Span, Time,
    Verb, Window,
};
use tidegate_store::{ImmediateStore as _, Store as _};

use super::concurrent::count_admitted;
use super::{Backend, ConformanceOptions, StoreUnderTest, expect_equal, start_time};
use crate::random::RandomSource;
use crate::reference::ReferenceStore;

const KEY: Key = Key::new(7, 0x9e37_79b9_7f4a_7c15);

/// Places in [`limits`].
const RATE: usize = 0;
const WINDOW: usize = 2;
const QUOTA: usize = 3;

/// Limits of each kind that reserves or spreads, and two plain ones that may refuse beside them.
fn limits() -> Result<Arc<Limits>, String> {
    limits_with([(500, 400), (1000, 300), (600, 500), (500, 1000)])
}

/// The limits of [`limits`] with these shares in thousandths and graces in milliseconds.
fn limits_with(terms: [(u16, u64); 4]) -> Result<Arc<Limits>, String> {
    let [first, second, third, fourth] =
        terms.map(|(share, grace)| ReservationRules::new(Span::from_secs(5), share, Span::from_millis(grace)));
    let spread = ReservationRules::spread(Span::from_secs(4));
    let rate = |count, burst| Rate::new(count, Span::from_secs(1), burst).map(LimitKind::Rate);
    let window = |limit| Window::new(limit, Span::from_secs(2), 64).map(LimitKind::Window);
    let quota = |limit| Quota::new(limit, Arc::new(FixedPeriods(Span::from_secs(3)))).map(LimitKind::Quota);
    let reserving = [
        (rate(10, 5), first),
        (rate(3, 1), second),
        (window(4), third),
        (quota(6), fourth),
        (rate(7, 3), spread),
        (window(5), spread),
        (quota(4), spread),
    ];
    let mut limits = Vec::new();
    for (kind, rules) in reserving {
        let limit = Limit::new(kind.map_err(|error| error.to_string())?);
        limits.push(limit.with_reservations(rules.map_err(|error| error.to_string())?));
    }
    for kind in [rate(9, 4), window(6)] {
        limits.push(Limit::new(kind.map_err(|error| error.to_string())?));
    }
    Limits::new(limits).map(Arc::new).map_err(|error| error.to_string())
}

fn call(limit: usize, caller: u64, cost: u64, presented: Time) -> Result<Batch, String> {
    let limit = LimitId::from_index(limit).ok_or("no such limit")?;
    let mut batch = Batch::with_op(0, Op::new(limit, Verb::Take, KEY, cost));
    batch.set_caller(caller, presented);
    Ok(batch)
}

/// Checks that each call gets the outcomes of core over one map of whole states.
pub(super) fn outcomes<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let limits = limits()?;
    let plain = limits.len() - 2;
    let mut subject = StoreUnderTest::open(backend, &limits);
    let mut reference = ReferenceStore::with_encoding(Arc::clone(&limits));
    let changed_limits = limits_with([(1000, 900), (100, 100), (300, 200), (900, 300)])?;
    let mut random = RandomSource::from_seed(options.seed);
    let mut now = start_time();
    let mut given: Vec<(usize, u64, Time)> = Vec::new();
    for index in 0..options.batches.min(20_000) {
        now = now + Span::from_micros(random.pick(&[0, 0, 1, 20_000, 100_000, 333_333, 700_000]));
        if random.below(2_000) == 0 {
            now = now + Span::from_secs(120);
        }
        if random.below(500) == 0 {
            let limits = random.pick(&[&limits, &changed_limits]);
            if let Some(reloaded) = subject.with_limits(limits, now)? {
                subject = reloaded;
                reference = reference.with_limits(Arc::clone(limits), now).ok().flatten().ok_or("no such limits")?;
            }
        }
        subject.set_now(now);
        let known =
            if given.is_empty() { None } else { Some(given.swap_remove(random.below(given.len() as u64) as usize)) };
        let (limit, caller, presented) = match known.filter(|_| random.below(3) > 0) {
            // Many return in time, some without their reservation, and some with an earlier, a later or a wrong one.
            Some((limit, caller, at)) => {
                if random.below(2) == 0 && at > now && at.since(now) < Span::from_secs(2) {
                    now = at + Span::from_micros(random.pick(&[0, 1, 100_000]));
                    subject.set_now(now);
                }
                let (earlier, later) = (at - Span::from_micros(1), at + Span::from_secs(2));
                (limit, caller, random.pick(&[at, at, earlier, Time::ZERO, Time::NEVER, later]))
            }
            None => (random.below(plain as u64) as usize, 1 + random.below(12), Time::ZERO),
        };
        let cost = random.pick(&[1, 1, 1, 1, 2, 3, 0, 9]);
        let mut batch = call(limit, caller, cost, presented)?;
        let verb = random.pick(&[
            Verb::Take,
            Verb::Take,
            Verb::Take,
            Verb::Take,
            Verb::Take,
            Verb::Peek,
            Verb::Refund,
            Verb::Debit,
            Verb::Reset,
        ]);
        if verb != Verb::Take && (verb != Verb::Reset || random.below(20) == 0) {
            batch.ops_mut()[0].verb = verb;
        } else if random.below(4) == 0 {
            for other in [plain, plain + 1, random.below(plain as u64) as usize] {
                let other = LimitId::from_index(other).ok_or("no such limit")?;
                batch.push(Op::new(other, Verb::Take, KEY, 1)).map_err(|full| full.to_string())?;
            }
            batch.dedup();
        }
        let found = subject.apply(&batch, now)?;
        let expected = reference.apply_now(&batch, found.now());
        for (op, (found, expected)) in batch.ops().iter().zip(found.list().iter().zip(expected.list())) {
            let seen = |outcome: &Outcome| {
                let Outcome { admission, used, remaining, retry_at, reset_at, reserved_at, .. } = *outcome;
                (admission, used, remaining, retry_at, reset_at, reserved_at)
            };
            if matches!(op.verb, Verb::Take | Verb::Peek) {
                expect_equal(&format!("call {index} at {now:?}, {op:?} of {caller}"), seen(found), seen(expected))?;
            }
            if found.reserved_at > now && given.len() < 64 {
                given.push((op.limit.index(), caller, found.reserved_at));
            }
        }
    }
    Ok(())
}

/// Checks that reservations outlast a clock that is set back, and end if that was by far.
pub(super) fn clock_steps<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let limits = limits()?;
    let subject = StoreUnderTest::open(backend, &limits);
    let start = start_time();
    if !subject.set_now(start) {
        return Ok(());
    }
    let ask = |limit: usize, caller: u64, presented: Time, now: Time| {
        subject.set_now(now);
        Ok::<Outcome, String>(subject.apply(&call(limit, caller, 1, presented)?, now)?.list()[0])
    };
    for limit in 0..4 {
        let mut given = Vec::new();
        for caller in 1..=12 {
            let outcome = ask(limit, caller, Time::ZERO, start)?;
            given.extend((outcome.reserved_at > start).then_some((outcome.reserved_at, caller)));
        }
        expect_equal("reservations", given.is_empty(), false)?;
        for (at, caller) in given {
            let lag = Span::from_millis(200);
            let earlier = Time::ZERO + at.since(Time::ZERO + lag);
            for now in [at, earlier] {
                ask(limit, 100, Time::ZERO, now)?;
            }
            let outcome = ask(limit, caller, at, at + lag)?;
            let found = (outcome.admission, outcome.reserved_at);
            expect_equal(&format!("limit {limit}, caller {caller}"), found, (Admission::Admitted, at))?;
        }
    }
    let late = start + Span::from_secs(600);
    while ask(0, 1, Time::ZERO, late)?.admission == Admission::Admitted {}
    let reserved = ask(0, 2, Time::ZERO, late)?;
    expect_equal("reserved", reserved.reserved_at > late, true)?;
    let early = start + Span::from_secs(500);
    while ask(0, 3, Time::ZERO, early)?.admission == Admission::Admitted {}
    let found = ask(0, 2, reserved.reserved_at, early)?.reserved_at;
    expect_equal("reserved anew", found > early && found < late, true)
}

/// Checks that reservations hold by the store's time, though the clocks of two gates are wrong.
pub(super) fn wrong_clocks<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let limits = limits_with([(500, 1500), (1000, 300), (600, 1500), (500, 1500)])?;
    let first = StoreUnderTest::open(backend, &limits);
    if first.set_now(start_time()) {
        // Such a store has the time of its gates.
        return Ok(());
    }
    let Some(second) = first.with_limits(&limits, start_time())? else { return Ok(()) };
    let gates = [first, second];
    let (mut admitted, mut agenda) = ([const { Vec::new() }; 4], BTreeSet::new());
    let (skew, mut store_time) = (Span::from_millis(200), start_time());
    let mut ask = |gate: usize, limit: usize, caller: u64, presented: Time| {
        let clock = Time::ZERO + store_time.since(Time::ZERO + skew) + skew.times(2 * gate as u64);
        let outcomes = gates[gate].apply(&call(limit, caller, 1, presented)?, clock)?;
        let (now, outcome) = (outcomes.now(), outcomes.list()[0]);
        store_time = now;
        if outcome.admission == Admission::Admitted {
            admitted[limit].push(now);
        }
        Ok::<(Time, Outcome), String>((now, outcome))
    };
    for limit in [RATE, WINDOW, QUOTA] {
        for caller in 1..=20 {
            let (_, outcome) = ask(caller as usize % 2, limit, caller, Time::ZERO)?;
            if outcome.reserved_at > Time::ZERO {
                agenda.insert((outcome.reserved_at, limit, caller));
            }
        }
        let reserved = agenda.iter().filter(|(_, of, _)| *of == limit).count();
        expect_equal(&format!("limit {limit} reserves: {reserved}"), reserved >= 2, true)?;
    }
    for (at, limit, caller) in agenda {
        loop {
            // A caller without a reservation takes no room from it, and tells the store's time.
            let (now, _) = ask(1, limit, 100, Time::NEVER)?;
            if now >= at {
                break;
            }
            thread::sleep((at.since(now)).as_duration().min(Duration::from_millis(50)));
        }
        let (now, outcome) = ask((caller as usize + 1) % 2, limit, caller, at)?;
        let found = (outcome.admission, outcome.reserved_at);
        expect_equal(&format!("limit {limit}, caller {caller} at {now:?}"), found, (Admission::Admitted, at))?;
    }
    let rate = Rate::new(10, Span::from_secs(1), 5).map_err(|error| error.to_string())?;
    let mut arrival = ArrivalTime::default();
    for &now in &admitted[RATE] {
        expect_equal("calls beyond the rate", rate.retry_at(arrival, 1, now) > now, false)?;
        arrival = rate.charge(arrival, 1, now);
    }
    for (first, fifth) in admitted[WINDOW].iter().zip(admitted[WINDOW].iter().skip(4)) {
        expect_equal("calls beyond the window", fifth.since(*first) < Span::from_secs(2), false)?;
    }
    let period = |now: &Time| now.since(Time::ZERO).as_micros() / 3_000_000;
    for (first, seventh) in admitted[QUOTA].iter().zip(admitted[QUOTA].iter().skip(6)) {
        expect_equal("calls beyond the quota", period(first) == period(seventh), false)?;
    }
    Ok(())
}

/// Checks that callers that never came don't end the reservations of others: the oldest forfeits are forgotten.
pub(super) fn many_forfeits<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let rate = Rate::new(1000, Span::from_secs(1), 1).map_err(|error| error.to_string())?;
    let rules = ReservationRules::new(Span::from_secs(30), 1000, Span::from_millis(1));
    let limit = Limit::new(LimitKind::Rate(rate)).with_reservations(rules.map_err(|error| error.to_string())?);
    let limits = Limits::new(vec![limit]).map(Arc::new).map_err(|error| error.to_string())?;
    let subject = StoreUnderTest::open(backend, &limits);
    let start = start_time();
    if !subject.set_now(start) {
        return Ok(());
    }
    let has_reservation = |caller: u64, now: Time| {
        let outcomes = subject.apply(&call(0, caller, 1, Time::ZERO)?, now)?;
        Ok::<bool, String>(outcomes.list()[0].reserved_at > now)
    };
    let last = MAX_RECORDS as u64 + 1;
    for caller in 1..=last {
        expect_equal(&format!("reservation of {caller}"), has_reservation(caller, start)?, caller > 1)?;
    }
    expect_equal("one more reservation", has_reservation(last + 1, start)?, false)?;
    let late = start + Span::from_secs(20);
    subject.set_now(late);
    has_reservation(last + 2, late)?;
    // The first was admitted, and the second's forfeit is forgotten. The last two are behind, and only one of them gets another.
    let found = [last + 3, 2, last, last - 1].map(|caller| has_reservation(caller, late));
    expect_equal("reservations", found, [Ok(true), Ok(true), Ok(true), Ok(false)])
}

/// Checks that callers at the same moment get different reservations, and that each reservation admits one call.
pub(super) fn concurrent_callers<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let limits = limits()?;
    let subject = StoreUnderTest::open(backend, &limits);
    let now = start_time();
    if !subject.set_now(now) {
        return Ok(());
    }
    let reservations = Mutex::new(BTreeSet::new());
    let calls = 4;
    let admitted = count_admitted(options.tasks, calls, |task, number| {
        let caller = u64::from(task * calls + number) + 1;
        let outcome = subject.apply(&call(0, caller, 1, Time::ZERO)?, now)?.list()[0];
        if outcome.reserved_at > now {
            reservations.lock().map_err(|error| error.to_string())?.insert((outcome.reserved_at, caller));
        }
        Ok(outcome.admission == Admission::Admitted)
    })?;
    let callers = u64::from(options.tasks * calls);
    expect_equal("admitted at once", admitted, 5.min(callers))?;
    let reservations = reservations.into_inner().map_err(|error| error.to_string())?;
    // Five a second, at most five seconds ahead.
    expect_equal("reservations", reservations.len() as u64, 25.min(callers - admitted))?;
    let instants: BTreeSet<Time> = reservations.iter().map(|(at, _)| *at).collect();
    expect_equal("different reservations", instants.len(), reservations.len())?;
    for (at, caller) in reservations {
        subject.set_now(at);
        let admitted = count_admitted(options.tasks, 1, |_, _| {
            let outcome = subject.apply(&call(0, caller, 1, at)?, at)?.list()[0];
            Ok(outcome.admission == Admission::Admitted && outcome.reserved_at == at)
        })?;
        expect_equal("calls by one reservation", admitted, 1)?;
    }
    Ok(())
}
