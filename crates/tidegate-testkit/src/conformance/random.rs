//! The checks with one caller.

use std::sync::Arc;

use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Admission, Concurrency, Key, Limit, LimitError, LimitId, LimitKind, Limits, Penalty, PenaltySpec, Quota, Rate,
    Span, Time, Verb, Window,
};

use super::{Backend, ConformanceOptions, StoreUnderTest, admissions, expect_equal, start_time};
use crate::model::Model;
use crate::random::RandomSource;
use crate::traffic::{PlanContents, TrafficGenerator};

/// The number of batches for one random plan.
const BATCHES_PER_PLAN: u32 = 250;

pub(super) fn random_batches<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let mut seeds = RandomSource::from_seed(options.seed);
    let mut left = options.batches;
    while left > 0 {
        let batches = left.min(BATCHES_PER_PLAN);
        let seed = seeds.next_u64();
        run_random_traffic(backend, seed, batches).map_err(|what| format!("world {seed}: {what}"))?;
        left -= batches;
    }
    Ok(())
}

fn run_random_traffic<B: Backend>(backend: &B, seed: u64, batches: u32) -> Result<(), String> {
    let can_set_time = {
        let probe = StoreUnderTest::open(backend, &Arc::default());
        probe.set_now(start_time())
    };
    let wanted = if can_set_time { PlanContents::All } else { PlanContents::RealTime };
    let mut world = TrafficGenerator::new(RandomSource::from_seed(seed), wanted);
    let subject = StoreUnderTest::open(backend, world.limits());
    let mut model = Model::new(Arc::clone(world.limits()));
    for index in 0..batches {
        let now = world.advance_clock();
        subject.set_now(now);
        let batch = world.next_batch();
        let outcomes = subject.apply(&batch, now)?;
        if can_set_time {
            expect_equal("the store's time", outcomes.now(), now)?;
        }
        model.check(&batch, &outcomes).map_err(|mismatch| {
            format!("batch {index} at {now:?}: {mismatch}\n  in {batch:?}\n  under {:?}", world.limits())
        })?;
        world.record_outcomes(&outcomes);
    }
    Ok(())
}

/// Returns a limit of every kind, each of `most`.
fn limits_of_every_kind(most: u64, penalised: bool) -> Result<Arc<Limits>, LimitError> {
    let minute = Span::from_secs(60);
    let kinds = [
        LimitKind::Window(Window::new(most, minute, 64)?),
        LimitKind::Window(Window::new(most, minute, 2)?),
        LimitKind::Rate(Rate::new(most, minute, most)?),
        LimitKind::Quota(Quota::new(most, Arc::new(FixedPeriods(Span::from_secs(86_400))))?),
        LimitKind::Concurrency(Concurrency::new(most, minute)?),
    ];
    let limits = kinds.into_iter().map(|kind| {
        let limit = Limit::new(kind);
        Ok(if penalised { limit.with_penalty(Penalty::new(PenaltySpec::default(), minute)?) } else { limit })
    });
    Ok(Arc::new(Limits::new(limits.collect::<Result<_, LimitError>>()?)?))
}

/// The limits of a plan, and each limit with one key.
type LimitsAndKeys = (Arc<Limits>, Vec<(LimitId, Key)>);

fn limits_and_keys_of_every_kind(key: Key, most: u64, penalised: bool) -> Result<LimitsAndKeys, String> {
    let limits = limits_of_every_kind(most, penalised).map_err(|error| error.to_string())?;
    let places = limits.iter().map(|(limit, _)| (limit, key)).collect();
    Ok((limits, places))
}

/// Checks that peeks, at any moment and by any clock, change no later outcome.
pub(super) fn peek<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    const YEAR: Span = Span::from_secs(365 * 86_400);
    let (limits, places) = limits_and_keys_of_every_kind(Key::new(1, 0x9e37_79b9_7f4a_7c15), 3, true)?;
    let (watched, alone) = (StoreUnderTest::open(backend, &limits), StoreUnderTest::open(backend, &limits));
    let can_set_time = watched.set_now(start_time());
    let mut started = None;
    for call in 0..40_u64 {
        let now = start_time() + Span::from_millis(700).times(call);
        let moments = [now, now - Span::from_secs(10), now - YEAR, now + YEAR];
        for &moment in if can_set_time { &moments[..] } else { &moments[..1] } {
            watched.set_now(moment);
            let first = watched.apply_to_keys(Verb::Peek, call, &places, moment)?;
            let second = watched.apply_to_keys(Verb::Peek, call, &places, moment)?;
            if can_set_time {
                expect_equal("a second look", second.list(), first.list())?;
            }
        }
        watched.set_now(now);
        alone.set_now(now);
        for place in &places {
            let after = watched.apply_to_keys(Verb::Take, call, &[*place], now)?;
            let without = alone.apply_to_keys(Verb::Take, call, &[*place], now)?;
            if can_set_time {
                expect_equal("after looking", after.list(), without.list())?;
            } else {
                // Later, by the server's time, a block of two seconds may end between two calls.
                if without.now().since(*started.get_or_insert(after.now())) > Span::from_secs(1) {
                    return if call < 4 { Err("four calls took more than a second".to_owned()) } else { Ok(()) };
                }
                expect_equal("after looking", admissions(&after), admissions(&without))?;
            }
        }
    }
    Ok(())
}

/// Checks that a reset removes one key under one limit, its block included, even if it is repeated.
pub(super) fn reset<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    let (limits, places) = limits_and_keys_of_every_kind(Key::new(2, 0x51f1_5ea5_ed0d_d00d), 3, true)?;
    let other_key: Vec<_> = places.iter().map(|&(limit, key)| (limit, Key::new(key.hi(), !key.lo()))).collect();
    let subject = StoreUnderTest::open(backend, &limits);
    let now = start_time();
    subject.set_now(now);
    for place in places.iter().chain(&other_key) {
        for call in 0..4 {
            let passed = !subject.apply_to_keys(Verb::Take, call, &[*place], now)?.refuses();
            expect_equal("the first three of four pass", passed, call < 3)?;
        }
    }
    for place in &places {
        for _ in 0..2 {
            subject.apply_to_keys(Verb::Reset, 0, &[*place], now)?;
        }
        let new = subject.apply_to_keys(Verb::Peek, 9, &[*place], now)?;
        let outcome = new.list()[0];
        expect_equal(
            "after the reset",
            (outcome.admission, outcome.remaining, outcome.strikes),
            (Admission::Admitted, 3, 0),
        )?;
        for later in places.iter().filter(|other| other.0 > place.0).chain(&other_key) {
            let blocked = admissions(&subject.apply_to_keys(Verb::Peek, 9, &[*later], now)?);
            expect_equal("another key or limit", blocked, vec![Admission::Blocked])?;
        }
    }
    Ok(())
}

/// Checks that a clock that jumps a year forward and back admits nothing extra, and refuses no caller for longer than
/// the limit's own length.
pub(super) fn clock_jump<B: Backend>(backend: &B, _: &ConformanceOptions) -> Result<(), String> {
    for (most, penalised) in [(3, true), (3, false), (1, false), (1, true)] {
        let (limits, places) = limits_and_keys_of_every_kind(Key::new(3, 0x0123_4567_89ab_cdef), most, penalised)?;
        let subject = StoreUnderTest::open(backend, &limits);
        if !subject.set_now(start_time()) {
            return Ok(());
        }
        for place in places {
            check_clock_jump(&subject, place, most).map_err(|what| format!("{:?}: {what}", limits.get(place.0)))?;
        }
    }
    Ok(())
}

fn check_clock_jump<B: Backend>(
    subject: &StoreUnderTest<'_, B>,
    place: (LimitId, Key),
    most: u64,
) -> Result<(), String> {
    let year_on = start_time() + Span::from_secs(365 * 86_400);
    let take = |holder, now: Time| {
        subject.set_now(now);
        Ok::<_, String>(!subject.apply_to_keys(Verb::Take, holder, &[place], now)?.refuses())
    };
    for call in 0..=most {
        expect_equal("passes in the year to come", take(call, year_on)?, call < most)?;
    }
    expect_equal("passes back in the present", take(99, start_time())?, false)?;
    let end = start_time() + Span::from_secs(86_400 + 600);
    let mut now = start_time();
    while !take(99, now)? {
        now = now + Span::from_secs(20);
        if now > end {
            return Err("locked out".into());
        }
    }
    Ok(())
}
