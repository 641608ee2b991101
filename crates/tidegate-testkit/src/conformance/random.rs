//! What one caller can find out.

use std::sync::Arc;

use tidegate_core::quota::Every;
use tidegate_core::{
    Concurrency, Key, Kind, Limit, LimitError, LimitId, Limits, Penalty, PenaltySpec, Quota, Rate, Span, Time, Verb,
    Verdict, Window,
};

use super::{Backend, Effort, Subject, expect, start, verdicts};
use crate::dice::Dice;
use crate::model::Model;
use crate::world::{Wanted, World};

/// Batches of one world, before the next.
const WORLD: u32 = 250;

pub(super) fn batches<B: Backend>(backend: &B, effort: &Effort) -> Result<(), String> {
    let mut seeds = Dice::seeded(effort.seed);
    let mut left = effort.batches;
    while left > 0 {
        let batches = left.min(WORLD);
        let seed = seeds.word();
        world(backend, seed, batches).map_err(|what| format!("world {seed}: {what}"))?;
        left -= batches;
    }
    Ok(())
}

fn world<B: Backend>(backend: &B, seed: u64, batches: u32) -> Result<(), String> {
    let told = {
        let probe = Subject::open(backend, &Arc::default());
        probe.set_now(start())
    };
    let wanted = if told { Wanted::All } else { Wanted::RealTime };
    let mut world = World::new(Dice::seeded(seed), wanted);
    let subject = Subject::open(backend, world.limits());
    let mut model = Model::new(Arc::clone(world.limits()));
    for index in 0..batches {
        let now = world.pass_time();
        subject.set_now(now);
        let batch = world.batch();
        let outcomes = subject.ask(&batch, now)?;
        if told {
            expect("the store's time", outcomes.now(), now)?;
        }
        model.check(&batch, &outcomes).map_err(|mismatch| {
            format!("batch {index} at {now:?}: {mismatch}\n  in {batch:?}\n  under {:?}", world.limits())
        })?;
        world.heard(&outcomes);
    }
    Ok(())
}

/// A limit of every kind, each of `most`.
fn every_kind(most: u64, penalised: bool) -> Result<Arc<Limits>, LimitError> {
    let minute = Span::from_secs(60);
    let kinds = [
        Kind::Window(Window::new(most, minute, 64)?),
        Kind::Window(Window::new(most, minute, 2)?),
        Kind::Rate(Rate::new(most, minute, most)?),
        Kind::Quota(Quota::new(most, Arc::new(Every(Span::from_secs(86_400))))?),
        Kind::Concurrency(Concurrency::new(most, minute)?),
    ];
    let limits = kinds.into_iter().map(|kind| {
        let limit = Limit::new(kind);
        Ok(if penalised { limit.with_penalty(Penalty::new(PenaltySpec::default(), minute)?) } else { limit })
    });
    Ok(Arc::new(Limits::new(limits.collect::<Result<_, LimitError>>()?)?))
}

/// A plan, and its limits each on one key.
type Plan = (Arc<Limits>, Vec<(LimitId, Key)>);

fn each_kind(key: Key, most: u64, penalised: bool) -> Result<Plan, String> {
    let limits = every_kind(most, penalised).map_err(|error| error.to_string())?;
    let places = limits.iter().map(|(limit, _)| (limit, key)).collect();
    Ok((limits, places))
}

/// Peeks, at any moment and by any clock, leave every later answer as it would have been.
pub(super) fn peek<B: Backend>(backend: &B, _: &Effort) -> Result<(), String> {
    const YEAR: Span = Span::from_secs(365 * 86_400);
    let (limits, places) = each_kind(Key::new(1, 0x9e37_79b9_7f4a_7c15), 3, true)?;
    let (watched, alone) = (Subject::open(backend, &limits), Subject::open(backend, &limits));
    let told = watched.set_now(start());
    for call in 0..40_u64 {
        let now = start() + Span::from_millis(700).times(call);
        let moments = [now, now - Span::from_secs(10), now - YEAR, now + YEAR];
        for &moment in if told { &moments[..] } else { &moments[..1] } {
            watched.set_now(moment);
            let first = watched.one(Verb::Peek, call, &places, moment)?;
            let second = watched.one(Verb::Peek, call, &places, moment)?;
            if told {
                expect("a second look", second.list(), first.list())?;
            }
        }
        watched.set_now(now);
        alone.set_now(now);
        for place in &places {
            let after = watched.one(Verb::Take, call, &[*place], now)?;
            let without = alone.one(Verb::Take, call, &[*place], now)?;
            if told {
                expect("after looking", after.list(), without.list())?;
            } else {
                expect("after looking", verdicts(&after), verdicts(&without))?;
            }
        }
    }
    Ok(())
}

/// A reset forgets one key under one limit, block and all, however often it is asked.
pub(super) fn reset<B: Backend>(backend: &B, _: &Effort) -> Result<(), String> {
    let (limits, places) = each_kind(Key::new(2, 0x51f1_5ea5_ed0d_d00d), 3, true)?;
    let other_key: Vec<_> = places.iter().map(|&(limit, key)| (limit, Key::new(key.hi(), !key.lo()))).collect();
    let subject = Subject::open(backend, &limits);
    let now = start();
    subject.set_now(now);
    for place in places.iter().chain(&other_key) {
        for call in 0..4 {
            let passed = !subject.one(Verb::Take, call, &[*place], now)?.refuses();
            expect("the first three of four pass", passed, call < 3)?;
        }
    }
    for place in &places {
        for _ in 0..2 {
            subject.one(Verb::Reset, 0, &[*place], now)?;
        }
        let new = subject.one(Verb::Peek, 9, &[*place], now)?;
        let outcome = new.list()[0];
        expect("after the reset", (outcome.verdict, outcome.remaining, outcome.strikes), (Verdict::Admitted, 3, 0))?;
        for later in places.iter().filter(|other| other.0 > place.0).chain(&other_key) {
            let blocked = verdicts(&subject.one(Verb::Peek, 9, &[*later], now)?);
            expect("another key or limit", blocked, vec![Verdict::Blocked])?;
        }
    }
    Ok(())
}

/// A clock that jumps a year ahead and back mints nothing, and locks nobody out for longer than the limit's own length.
pub(super) fn jump<B: Backend>(backend: &B, _: &Effort) -> Result<(), String> {
    for (most, penalised) in [(3, true), (3, false), (1, false), (1, true)] {
        let (limits, places) = each_kind(Key::new(3, 0x0123_4567_89ab_cdef), most, penalised)?;
        let subject = Subject::open(backend, &limits);
        if !subject.set_now(start()) {
            return Ok(());
        }
        for place in places {
            jump_once(&subject, place, most).map_err(|what| format!("{:?}: {what}", limits.get(place.0)))?;
        }
    }
    Ok(())
}

fn jump_once<B: Backend>(subject: &Subject<'_, B>, place: (LimitId, Key), most: u64) -> Result<(), String> {
    let year_on = start() + Span::from_secs(365 * 86_400);
    let take = |holder, now: Time| {
        subject.set_now(now);
        Ok::<_, String>(!subject.one(Verb::Take, holder, &[place], now)?.refuses())
    };
    for call in 0..=most {
        expect("passes in the year to come", take(call, year_on)?, call < most)?;
    }
    expect("passes back in the present", take(99, start())?, false)?;
    let end = start() + Span::from_secs(86_400 + 600);
    let mut now = start();
    while !take(99, now)? {
        now = now + Span::from_secs(20);
        if now > end {
            return Err("locked out".into());
        }
    }
    Ok(())
}
