//! Limits of 0 and 2^40, costs above capacity, numbers at the ends of their types: an error or saturation, no panic. A key
//! never seen is like an empty state.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::batch::{OpContext, execute};
use tidegate_core::concurrency::Permits;
use tidegate_core::cooldown::CooldownGate;
use tidegate_core::pacer::{PacerGrowth, PacerMode, PacerState};
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::quota::{FixedPeriods, Period, QuotaUsage};
use tidegate_core::rate::ArrivalTime;
use tidegate_core::state::Usage;
use tidegate_core::window::WindowLog;
use tidegate_core::{
    Batch, Concurrency, Cooldown, CountMode, KeyState, Limit, LimitError, LimitId, LimitKind, Limits, MAX_COST,
    MAX_LIMIT, Op, PacerSpec, Penalty, PenaltyMode, PenaltySpec, Quota, Rate, ReservationRules, SharedPacerRules, Span,
    Time, Verb, Window,
};
use tidegate_testkit::fixtures::{TestLimiter, client_key, doubling_penalty, limit_id, test_time, window_limit};
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

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

fn any_number(random: &mut RandomSource) -> u64 {
    match random.below(3) {
        0 => random.pick(&ENDS),
        1 => random.next_u64(),
        _ => random.below(100),
    }
}

fn any_kind(random: &mut RandomSource) -> Result<LimitKind, LimitError> {
    let (number, span, other) = (any_number(random), Span::from_micros(any_number(random)), any_number(random));
    match random.below(6) {
        0 => Window::new(number, span, random.pick(&[0, 1, 2, 64, 1 << 16, u32::MAX]))
            .map(|window| LimitKind::Window(window.with_lead(Span::from_micros(other)))),
        1 => Rate::new(number, span, other).map(LimitKind::Rate),
        3 => {
            let numbers = [number, other, any_number(random), any_number(random)];
            let [base, cap, stagger, max_release_time] = numbers.map(Span::from_micros);
            Ok(LimitKind::Cooldown(Cooldown { base, cap, stagger, max_release_time }))
        }
        4 => {
            let (up, down) = (any_number(random) as u32, any_number(random) as u16);
            let spec = PacerSpec {
                initial: Duration::from_nanos(number),
                max: Duration::from_nanos(other),
                growth: random.pick(&[PacerGrowth::Linear, PacerGrowth::Exponential { up, down }]),
                randomization: any_number(random) as u16,
                max_randomization: span.as_duration(),
                successes: any_number(random) as u32,
                mode: random.pick(&[PacerMode::Steady, PacerMode::Classic]),
            };
            SharedPacerRules::new(spec).map(LimitKind::Pace).map_err(|_| LimitError::ZeroPeriod)
        }
        2 => Quota::new(number, Arc::new(FixedPeriods(span))).map(LimitKind::Quota),
        _ => Concurrency::new(number, span).map(LimitKind::Concurrency),
    }
}

fn any_limit(random: &mut RandomSource) -> Result<Limit, LimitError> {
    let mut limit = Limit::new(any_kind(random)?);
    if random.chance(70) {
        let spec = PenaltySpec {
            base: Span::from_micros(any_number(random)),
            factor: random.pick(&[0, 1, 2, 3, u32::MAX]),
            cap: Span::from_micros(any_number(random)),
            forgive_after: random.chance(50).then(|| Span::from_micros(any_number(random))),
            mode: random.pick(&[PenaltyMode::Parole, PenaltyMode::Strict]),
        };
        limit = limit.with_penalty(Penalty::new(spec, Span::from_micros(any_number(random)))?);
    }
    Ok(limit.with_count_mode(random.pick(&[CountMode::Admitted, CountMode::All])).with_shadow(random.chance(20)))
}

/// Operations with any numbers at any time, with a clock that jumps at random. Nothing panics. A call above the
/// capacity, or any call under a limit of 0, never passes.
#[test]
fn extreme_operations_never_panic_or_exceed_capacity() {
    property::check(case_count(6_000, 200_000), 200, |mut random| {
        let mut limits = Vec::new();
        while limits.len() < 3 && !random.is_exhausted() {
            limits.extend(any_limit(&mut random));
        }
        let limits = Arc::new(Limits::new(limits).map_err(|error| error.to_string())?);
        let limiter = TestLimiter::with_shared_limits(Arc::clone(&limits));
        while !random.is_exhausted() && !limits.is_empty() {
            let now = Time::from_micros(any_number(&mut random));
            let counted_at = Time::from_micros(any_number(&mut random));
            let lead = Span::from_micros(any_number(&mut random));
            let mut batch = Batch::new(any_number(&mut random)).with_lead(lead).with_counted_at(counted_at);
            let generation = any_number(&mut random) as u32;
            let verb = random.pick(&[
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
                Verb::RestorePenalty { strikes: generation as u8, parole: generation },
                Verb::Throttle { generation },
                Verb::Success { generation },
                Verb::Pace { failed: true, draw: generation },
                Verb::Pace { failed: false, draw: generation },
            ]);
            for (limit, _) in limits.iter() {
                let cost = any_number(&mut random);
                batch.push(Op::new(limit, verb, client_key(random.below(2)), cost)).map_err(|full| full.to_string())?;
            }
            let (_, outcomes) = limiter.decide(&batch, now);
            for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
                let limit = limits.get(op.limit).ok_or("a limit is gone")?;
                let holds = matches!(limit.kind(), LimitKind::Concurrency(_));
                let asks = matches!(verb, Verb::Take | Verb::Peek);
                if asks && !holds && op.cost > limit.kind().capacity() && !outcome.admission.refuses() {
                    return Err(format!("{op:?} passed {limit:?} at {now:?}: {outcome:?}"));
                }
            }
        }
        Ok(())
    });
}

/// States that a store reads back from damaged memory are evaluated, charged and refunded without a panic.
#[test]
fn damaged_states_never_panic() {
    property::check(case_count(6_000, 200_000), 40, |mut random| {
        let Ok(limit) = any_limit(&mut random) else { return Ok(()) };
        let time = |random: &mut RandomSource| Time::from_micros(any_number(random));
        let usage = match random.below(7) {
            0 => Usage::None,
            1 => Usage::Window(WindowLog::with_call(time(&mut random), any_number(&mut random))),
            2 => Usage::Rate(ArrivalTime::from_bits(any_number(&mut random))),
            3 => {
                let period = Period { start: time(&mut random), end: time(&mut random) };
                Usage::Quota(QuotaUsage { period, used: any_number(&mut random) })
            }
            4 => {
                let [until, last] = [time(&mut random), time(&mut random)];
                let [generation, step] = [any_number(&mut random) as u32, any_number(&mut random) as u32];
                Usage::Cooldown(CooldownGate {
                    opens_at: until,
                    last_event_at: last,
                    generation,
                    closings_in_row: step as u8,
                })
            }
            5 => Usage::Pace(PacerState {
                interval: any_number(&mut random),
                successes: any_number(&mut random) as u32,
                updated_at: time(&mut random),
            }),
            _ => Usage::Concurrency(Permits::default()),
        };
        let record = PenaltyRecord {
            blocked_until: time(&mut random),
            parole: any_number(&mut random),
            strikes: random.pick(&[0, 1, 2, 12, 53, 54, 255]),
        };
        let limits = Limits::new(vec![limit]).map_err(|error| error.to_string())?;
        let mut cells = [KeyState::new(usage, record)];
        while !random.is_exhausted() {
            let mut batch = Batch::new(any_number(&mut random));
            batch = batch.with_lead(Span::from_micros(any_number(&mut random))).with_counted_at(time(&mut random));
            let generation = any_number(&mut random) as u32;
            let verb = random.pick(&[
                Verb::Take,
                Verb::Peek,
                Verb::Refund,
                Verb::Release,
                Verb::Renew,
                Verb::Debit,
                Verb::Settle,
                Verb::Disable,
                Verb::RestorePenalty { strikes: generation as u8, parole: generation },
                Verb::Throttle { generation },
                Verb::Success { generation },
                Verb::Pace { failed: true, draw: generation },
                Verb::Pace { failed: false, draw: generation },
            ]);
            batch
                .push(Op::new(limit_id(0), verb, client_key(0), any_number(&mut random)))
                .map_err(|full| full.to_string())?;
            let now = time(&mut random);
            execute(&batch, &limits, cells.as_mut_slice(), now);
            let idle = limits.get(limit_id(0)).map(|limit| cells[0].idle_at(limit));
            assert!(idle.is_some());
        }
        Ok(())
    });
}

#[test]
fn unseen_keys_are_like_empty_states() {
    property::check(case_count(50_000, 500_000), 40, |mut random| {
        let Ok(mut limit) = any_limit(&mut random) else { return Ok(()) };
        let rules = ReservationRules::new(Span::from_secs(30), random.pick(&[1, 500, 1000]), Span::from_millis(900));
        if random.chance(50) && limit.penalty().is_none() {
            limit = limit.with_reservations(rules.map_err(|error| error.to_string())?);
        }
        let mut batch = Batch::new(any_number(&mut random));
        batch.set_caller(any_number(&mut random), Time::from_micros(any_number(&mut random)));
        let batch = batch.context();
        let op = Op::new(limit_id(0), random.pick(&[Verb::Take, Verb::Peek]), client_key(0), any_number(&mut random));
        let now = Time::from_micros(any_number(&mut random));
        let context = OpContext { op: &op, limit: &limit, batch, now };
        let (unseen, empty) = (KeyState::evaluate_unseen(&context), KeyState::default().evaluate(&context));
        if unseen == empty { Ok(()) } else { Err(format!("{unseen:?} isn't {empty:?} of {limit:?} for {op:?}")) }
    });
}

#[test]
fn a_zero_limit_refuses_permanently() {
    let none = [
        LimitKind::Window(Window::new(0, Span::from_secs(60), 64).unwrap()),
        LimitKind::Quota(Quota::new(0, Arc::new(FixedPeriods(Span::from_secs(60)))).unwrap()),
        LimitKind::Concurrency(Concurrency::new(0, Span::from_secs(60)).unwrap()),
    ];
    for kind in none {
        let limit = Limit::new(kind).with_penalty(doubling_penalty(2, 8, PenaltyMode::Parole, Span::from_secs(60)));
        let limiter = TestLimiter::new([limit]);
        for now in
            [Time::ZERO, test_time(0), test_time(1), Time::NEVER - Span::from_micros(1), Time::NEVER, test_time(0)]
        {
            let refused = limiter.call(1, now);
            assert!(!refused.allowed && !refused.blocked, "{now:?}: {refused:?}");
            assert_eq!((refused.retry_after, refused.next_allowed_at, refused.limit), (None, None, Some(0)));
            assert!(limiter.take(1, 0, test_time(0)).allowed, "nothing asked, nothing refused");
        }
    }
}

#[test]
fn a_cost_above_capacity_earns_no_strike() {
    let limiter = TestLimiter::new([window_limit(5, 60).with_penalty(doubling_penalty(
        2,
        8,
        PenaltyMode::Parole,
        Span::from_secs(60),
    ))]);
    for cost in [6, MAX_COST, MAX_COST + 1, u64::MAX] {
        let refused = limiter.take(1, cost, test_time(0));
        assert_eq!((refused.allowed, refused.retry_after, refused.blocked), (false, None, false));
    }
    assert!(limiter.take(1, 5, test_time(0)).allowed);
}

#[test]
fn the_largest_limits_count_exactly() {
    let most = LimitKind::Window(Window::new(MAX_LIMIT, Span::from_secs(60), 64).unwrap());
    let limiter = TestLimiter::new([Limit::new(most)]);
    assert_eq!(limiter.take(1, MAX_COST - 1, test_time(0)).remaining, Some(1));
    assert_eq!(limiter.take(1, 2, test_time(1)).retry_after, Some(Span::from_millis(59_999)));
    assert_eq!(limiter.take(1, 1, test_time(1)).remaining, Some(0));
    for step in 0..200 {
        assert!(!limiter.call(1, test_time(2 + step)).allowed);
    }
    assert!(limiter.take(1, MAX_COST - 1, test_time(60_000)).allowed);
}

#[test]
fn refunds_stop_at_the_capacity() {
    let hour = Arc::new(FixedPeriods(Span::from_secs(3600)));
    let limits = [
        window_limit(5, 60),
        Limit::new(LimitKind::Rate(Rate::new(5, Span::from_secs(60), 5).unwrap())),
        Limit::new(LimitKind::Quota(Quota::new(5, hour).unwrap())),
    ];
    for place in 0..limits.len() {
        for back in [3, 5, 6, MAX_COST, i64::MAX as u64, u64::MAX] {
            let limiter = TestLimiter::new(limits.clone());
            let here = [(limit_id(place), 1)];
            limiter.apply(Verb::Refund, &here, back, test_time(0));
            assert!(limiter.apply(Verb::Take, &here, 3, test_time(0)).allowed);
            limiter.apply(Verb::Refund, &here, back, test_time(0));
            assert_eq!(limiter.apply(Verb::Peek, &here, 1, test_time(0)).remaining, Some(5));
            assert!(limiter.apply(Verb::Take, &here, 5, test_time(0)).allowed);
            assert!(!limiter.apply(Verb::Take, &here, 1, test_time(0)).allowed);
        }
    }
}

#[test]
fn invalid_limits_are_errors() {
    let second = Span::from_secs(1);
    for found in [MAX_LIMIT + 1, i64::MAX as u64, u64::MAX] {
        assert_eq!(Window::new(found, second, 64).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Rate::new(found, second, 1).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Rate::new(1, second, found).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Quota::new(found, Arc::new(FixedPeriods(second))).err(), Some(LimitError::LimitTooLarge { found }));
        assert_eq!(Concurrency::new(found, second).err(), Some(LimitError::TooManyPermits { found }));
    }
    assert_eq!(Window::new(1, Span::ZERO, 64).err(), Some(LimitError::ZeroPeriod));
    assert_eq!(Window::new(1, second, 0).err(), Some(LimitError::InvalidEntries { found: 0 }));
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
    let many = vec![window_limit(1, 1); 4096];
    assert_eq!(Limits::new(many).err(), Some(LimitError::TooMany { found: 4096 }));
}

#[test]
fn a_batch_holds_eight_operations() {
    let mut batch = Batch::new(0);
    let op = Op::new(limit_id(0), Verb::Take, client_key(0), 1);
    for _ in 0..8 {
        batch.push(op).unwrap();
    }
    assert!(batch.push(op).is_err());
    assert_eq!(batch.ops().len(), 8);
}
