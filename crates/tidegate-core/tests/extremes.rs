//! Limits of 0 and 2^40, costs above capacity, numbers at the ends of their types: an error or saturation, no panic.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::batch::settle;
use tidegate_core::concurrency::Permits;
use tidegate_core::cooldown::Gate;
use tidegate_core::pacer::{Growth, Mode, Tempo};
use tidegate_core::penalty::Record;
use tidegate_core::quota::{Every, Ledger, Period};
use tidegate_core::rate::Arrival;
use tidegate_core::state::Usage;
use tidegate_core::window::Log;
use tidegate_core::{
    Batch, Concurrency, Cooldown, Count, Kind, Limit, LimitError, LimitId, Limits, MAX_COST, MAX_LIMIT, Op, PacerSpec,
    Penalty, PenaltyMode, PenaltySpec, Quota, Rate, SharedPacer, Span, State, Time, Verb, Window,
};
use tidegate_testkit::desk::{Desk, at, doubling, id, key, window};
use tidegate_testkit::dice::{Dice, count};
use tidegate_testkit::property;

const ENDS: [u64; 12] = [
    0,
    1,
    2,
    (1 << 40) - 1,
    1 << 40,
    (1 << 40) + 1,
    (1 << 52) - 1,
    1 << 52,
    1 << 62,
    i64::MAX as u64,
    i64::MAX as u64 + 1,
    u64::MAX,
];

fn any_number(dice: &mut Dice) -> u64 {
    match dice.below(3) {
        0 => dice.pick(&ENDS),
        1 => dice.word(),
        _ => dice.below(100),
    }
}

fn any_kind(dice: &mut Dice) -> Result<Kind, LimitError> {
    let (number, span, other) = (any_number(dice), Span::from_micros(any_number(dice)), any_number(dice));
    match dice.below(6) {
        0 => Window::new(number, span, dice.pick(&[0, 1, 2, 64, 1 << 16, u32::MAX]))
            .map(|window| Kind::Window(window.with_lead(Span::from_micros(other)))),
        1 => Rate::new(number, span, other).map(Kind::Rate),
        3 => {
            let [base, cap, stagger] = [number, other, any_number(dice)].map(Span::from_micros);
            Ok(Kind::Cooldown(Cooldown { base, cap, stagger }))
        }
        4 => {
            let (up, down) = (any_number(dice) as u32, any_number(dice) as u16);
            let spec = PacerSpec {
                initial: Duration::from_nanos(number),
                max: Duration::from_nanos(other),
                growth: dice.pick(&[Growth::Linear, Growth::Exponential { up, down }]),
                randomization: any_number(dice) as u16,
                max_randomization: span.as_duration(),
                successes: any_number(dice) as u32,
                mode: dice.pick(&[Mode::Steady, Mode::Classic]),
            };
            SharedPacer::new(spec).map(Kind::Pace).map_err(|_| LimitError::ZeroPeriod)
        }
        2 => Quota::new(number, Arc::new(Every(span))).map(Kind::Quota),
        _ => Concurrency::new(number, span).map(Kind::Concurrency),
    }
}

fn any_limit(dice: &mut Dice) -> Result<Limit, LimitError> {
    let mut limit = Limit::new(any_kind(dice)?);
    if dice.percent(70) {
        let spec = PenaltySpec {
            base: Span::from_micros(any_number(dice)),
            factor: dice.pick(&[0, 1, 2, 3, u32::MAX]),
            cap: Span::from_micros(any_number(dice)),
            forgive_after: dice.percent(50).then(|| Span::from_micros(any_number(dice))),
            mode: dice.pick(&[PenaltyMode::Parole, PenaltyMode::Strict]),
        };
        limit = limit.with_penalty(Penalty::new(spec, Span::from_micros(any_number(dice)))?);
    }
    Ok(limit.counting(dice.pick(&[Count::Admitted, Count::All])).in_shadow(dice.percent(20)))
}

/// Operations of any number at any moment, the clock running wild: nothing panics, and a call above its capacity, or
/// any call under a limit of 0, never passes.
#[test]
fn any_numbers_at_any_time() {
    property::check(count(6_000, 200_000), 200, |mut dice| {
        let mut limits = Vec::new();
        while limits.len() < 3 && !dice.exhausted() {
            limits.extend(any_limit(&mut dice));
        }
        let limits = Arc::new(Limits::new(limits).map_err(|error| error.to_string())?);
        let desk = Desk::over(Arc::clone(&limits));
        while !dice.exhausted() && !limits.is_empty() {
            let now = Time::from_micros(any_number(&mut dice));
            let counted_at = Time::from_micros(any_number(&mut dice));
            let lead = Span::from_micros(any_number(&mut dice));
            let mut batch = Batch::new(any_number(&mut dice)).ahead(lead).counted_at(counted_at);
            let generation = any_number(&mut dice) as u32;
            let verb = dice.pick(&[
                Verb::Take,
                Verb::Take,
                Verb::Take,
                Verb::Take,
                Verb::Peek,
                Verb::Refund,
                Verb::Release,
                Verb::Renew,
                Verb::Reset,
                Verb::Debit,
                Verb::Settle,
                Verb::Disable,
                Verb::Penalise { strikes: generation as u8, parole: generation },
                Verb::Throttle { generation },
                Verb::Succeed { generation },
                Verb::Pace { failed: true, draw: generation },
                Verb::Pace { failed: false, draw: generation },
            ]);
            for (limit, _) in limits.iter() {
                let cost = any_number(&mut dice);
                batch.push(Op::new(limit, verb, key(dice.below(2)), cost)).map_err(|full| full.to_string())?;
            }
            let (_, outcomes) = desk.ask(&batch, now);
            for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
                let limit = limits.get(op.limit).ok_or("a limit is gone")?;
                let holds = matches!(limit.kind(), Kind::Concurrency(_));
                let asks = matches!(verb, Verb::Take | Verb::Peek);
                if asks && !holds && op.cost > limit.kind().capacity() && !outcome.verdict.refuses() {
                    return Err(format!("{op:?} passed {limit:?} at {now:?}: {outcome:?}"));
                }
            }
        }
        Ok(())
    });
}

/// States as a store could read them back from damaged memory are judged, charged and given back without a panic.
#[test]
fn any_state_is_survived() {
    property::check(count(6_000, 200_000), 40, |mut dice| {
        let Ok(limit) = any_limit(&mut dice) else { return Ok(()) };
        let time = |dice: &mut Dice| Time::from_micros(any_number(dice));
        let usage = match dice.below(7) {
            0 => Usage::None,
            1 => Usage::Window(Log::once(time(&mut dice), any_number(&mut dice))),
            2 => Usage::Rate(Arrival::from_bits(any_number(&mut dice))),
            3 => {
                let period = Period { start: time(&mut dice), end: time(&mut dice) };
                Usage::Quota(Ledger { period, used: any_number(&mut dice) })
            }
            4 => {
                let [until, last] = [time(&mut dice), time(&mut dice)];
                let [generation, step] = [any_number(&mut dice) as u32, any_number(&mut dice) as u32];
                Usage::Cooldown(Gate { until, last, generation, step: step as u8 })
            }
            5 => Usage::Pace(Tempo {
                interval: any_number(&mut dice),
                successes: any_number(&mut dice) as u32,
                told_at: time(&mut dice),
            }),
            _ => Usage::Concurrency(Permits::default()),
        };
        let record = Record {
            until: time(&mut dice),
            parole: any_number(&mut dice),
            strikes: dice.pick(&[0, 1, 2, 12, 53, 54, 255]),
        };
        let limits = Limits::new(vec![limit]).map_err(|error| error.to_string())?;
        let mut cells = [State::new(usage, record)];
        while !dice.exhausted() {
            let mut batch = Batch::new(any_number(&mut dice));
            batch = batch.ahead(Span::from_micros(any_number(&mut dice))).counted_at(time(&mut dice));
            let generation = any_number(&mut dice) as u32;
            let verb = dice.pick(&[
                Verb::Take,
                Verb::Peek,
                Verb::Refund,
                Verb::Release,
                Verb::Renew,
                Verb::Debit,
                Verb::Settle,
                Verb::Disable,
                Verb::Penalise { strikes: generation as u8, parole: generation },
                Verb::Throttle { generation },
                Verb::Succeed { generation },
                Verb::Pace { failed: true, draw: generation },
                Verb::Pace { failed: false, draw: generation },
            ]);
            batch.push(Op::new(id(0), verb, key(0), any_number(&mut dice))).map_err(|full| full.to_string())?;
            let now = time(&mut dice);
            settle(&batch, &limits, cells.as_mut_slice(), now);
            let idle = limits.get(id(0)).map(|limit| cells[0].idle_at(limit));
            assert!(idle.is_some());
        }
        Ok(())
    });
}

#[test]
fn a_limit_of_nothing_refuses_for_good() {
    let none = [
        Kind::Window(Window::new(0, Span::from_secs(60), 64).unwrap()),
        Kind::Quota(Quota::new(0, Arc::new(Every(Span::from_secs(60)))).unwrap()),
        Kind::Concurrency(Concurrency::new(0, Span::from_secs(60)).unwrap()),
    ];
    for kind in none {
        let limit = Limit::new(kind).with_penalty(doubling(2, 8, PenaltyMode::Parole, Span::from_secs(60)));
        let desk = Desk::new([limit]);
        for now in [Time::ZERO, at(0), at(1), Time::NEVER - Span::from_micros(1), Time::NEVER, at(0)] {
            let refused = desk.call(1, now);
            assert!(!refused.allowed && !refused.blocked, "{now:?}: {refused:?}");
            assert_eq!((refused.retry_after, refused.next_allowed_at, refused.limit), (None, None, Some(0)));
            assert!(desk.take(1, 0, at(0)).allowed, "nothing asked, nothing refused");
        }
    }
}

#[test]
fn a_cost_above_capacity_is_refused_for_good_and_earns_no_strike() {
    let desk = Desk::new([window(5, 60).with_penalty(doubling(2, 8, PenaltyMode::Parole, Span::from_secs(60)))]);
    for cost in [6, MAX_COST, MAX_COST + 1, u64::MAX] {
        let refused = desk.take(1, cost, at(0));
        assert_eq!((refused.allowed, refused.retry_after, refused.blocked), (false, None, false));
    }
    assert!(desk.take(1, 5, at(0)).allowed);
}

#[test]
fn the_largest_limits_count() {
    let most = Kind::Window(Window::new(MAX_LIMIT, Span::from_secs(60), 64).unwrap());
    let desk = Desk::new([Limit::new(most)]);
    assert_eq!(desk.take(1, MAX_COST - 1, at(0)).remaining, Some(1));
    assert_eq!(desk.take(1, 2, at(1)).retry_after, Some(Span::from_millis(59_999)));
    assert_eq!(desk.take(1, 1, at(1)).remaining, Some(0));
    for step in 0..200 {
        assert!(!desk.call(1, at(2 + step)).allowed);
    }
    assert!(desk.take(1, MAX_COST - 1, at(60_000)).allowed);
}

#[test]
fn refunds_stop_at_the_capacity() {
    let hour = Arc::new(Every(Span::from_secs(3600)));
    let limits = [
        window(5, 60),
        Limit::new(Kind::Rate(Rate::new(5, Span::from_secs(60), 5).unwrap())),
        Limit::new(Kind::Quota(Quota::new(5, hour).unwrap())),
    ];
    for place in 0..limits.len() {
        for back in [3, 5, 6, MAX_COST, i64::MAX as u64, u64::MAX] {
            let desk = Desk::new(limits.clone());
            let here = [(id(place), 1)];
            desk.under(Verb::Refund, &here, back, at(0));
            assert!(desk.under(Verb::Take, &here, 3, at(0)).allowed);
            desk.under(Verb::Refund, &here, back, at(0));
            assert_eq!(desk.under(Verb::Peek, &here, 1, at(0)).remaining, Some(5));
            assert!(desk.under(Verb::Take, &here, 5, at(0)).allowed);
            assert!(!desk.under(Verb::Take, &here, 1, at(0)).allowed);
        }
    }
}

#[test]
fn what_cannot_be_is_an_error() {
    let second = Span::from_secs(1);
    for found in [MAX_LIMIT + 1, i64::MAX as u64, u64::MAX] {
        assert_eq!(Window::new(found, second, 64).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Rate::new(found, second, 1).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Rate::new(1, second, found).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Quota::new(found, Arc::new(Every(second))).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Concurrency::new(found, second).err(), Some(LimitError::TooManyPermits { found }));
    }
    assert_eq!(Window::new(1, Span::ZERO, 64).err(), Some(LimitError::ZeroPeriod));
    assert_eq!(Window::new(1, second, 0).err(), Some(LimitError::Entries { found: 0 }));
    assert_eq!(Rate::new(0, second, 1).err(), Some(LimitError::ZeroRate));
    assert_eq!(Rate::new(1, second, 0).err(), Some(LimitError::ZeroBurst));
    assert_eq!(Rate::new(1, Span::ZERO, 1).err(), Some(LimitError::ZeroPeriod));
    assert_eq!(Rate::new(1, Span::MAX, MAX_LIMIT).err(), Some(LimitError::TooSlow));
    assert_eq!(Concurrency::new(1, Span::ZERO).err(), Some(LimitError::ZeroPeriod));
    let spec = PenaltySpec::default();
    let error = |spec| Penalty::new(spec, second).err();
    assert_eq!(error(PenaltySpec { base: Span::ZERO, ..spec }), Some(LimitError::ZeroPeriod));
    assert_eq!(error(PenaltySpec { factor: 0, ..spec }), Some(LimitError::ZeroFactor));
    assert_eq!(error(PenaltySpec { cap: second, ..spec }), Some(LimitError::CapBelowBase));
    assert_eq!(error(PenaltySpec { forgive_after: Some(Span::ZERO), ..spec }), Some(LimitError::ZeroPeriod));
    assert_eq!(LimitId::from_index(4095), None);
    let many = vec![window(1, 1); 4096];
    assert_eq!(Limits::new(many).err(), Some(LimitError::TooMany { found: 4096 }));
}

#[test]
fn a_batch_holds_eight() {
    let mut batch = Batch::new(0);
    let op = Op::new(id(0), Verb::Take, key(0), 1);
    for _ in 0..8 {
        batch.push(op).unwrap();
    }
    assert!(batch.push(op).is_err());
    assert_eq!(batch.ops().len(), 8);
}
