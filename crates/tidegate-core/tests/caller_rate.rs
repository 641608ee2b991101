//! Calls with terms of their own, against the model of redis-cell.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use tidegate_core::batch::{self, Batch};
use tidegate_core::{CallerRate, CallerRateError, Key, KeyState, Limit, LimitId, LimitKind, Limits, Rate, Span, Time};
use tidegate_testkit::random::{RandomSource, case_count, run_seed};
use tidegate_testkit::redis_cell::{RedisCell, Throttle};

fn limits() -> Limits {
    Limits::with_limit(Limit::new(LimitKind::Rate(Rate::new(1, Span::from_secs(1), 1).unwrap())))
}

#[test]
fn random_calls_get_the_models_answers() {
    let seed = run_seed();
    let (mut random, mut model, limits) = (RandomSource::from_seed(seed), RedisCell::default(), limits());
    let mut states = vec![KeyState::default(); 50];
    let mut now = Time::from_secs(1_700_000_000);
    for index in 0..case_count(100_000, 1_000_000) {
        now = now + Span::from_micros(random.pick(&[0, 0, 1, 500, 999, 1_000, 1_001, 33_333, 700_000, 3_600_000_000]));
        let (key, call) = (random.below(50), Throttle::random(&mut random));
        let [limit, count, period] = [call.max_burst + 1, call.count, call.period].map(i64::unsigned_abs);
        let rate = CallerRate::new(limit, count, period).unwrap();
        let op = rate.op(LimitId::FIRST, Key::default(), call.quantity);
        let state = &mut states[usize::try_from(key).unwrap()..][..1];
        let outcomes = batch::execute(&Batch::with_op(0, op), &limits, state, now);
        let found = rate.decision(call.quantity, &outcomes.list()[0], now);
        let limited = if found.is_limited { 1 } else { 0 };
        let numbers = [
            limited,
            limit.cast_signed(),
            found.redis_cell_remaining,
            found.retry_after_secs(),
            found.reset_after_secs(),
        ];
        let expected = model.throttle(key, &call, i128::from(now.as_micros()) * 1000);
        assert_eq!(numbers, expected, "call {index}, {call:?} of key {key}, TIDEGATE_SEED={seed}");
        // A wait is true: the same call passes then, and not a microsecond before.
        if let Some(wait) = found.retry_after {
            let micros = wait.div_ceil(1_000);
            for (at, is_limited) in [(micros, false), (micros - 1, true)] {
                let outcomes = batch::execute(
                    &Batch::with_op(0, op),
                    &limits,
                    &mut state.to_vec()[..],
                    now + Span::from_micros(at),
                );
                assert_eq!(outcomes.list()[0].admission.refuses(), is_limited, "{call:?} after {at} of {wait}");
            }
        }
    }
}

#[test]
fn terms_are_bounded() {
    for (limit, count, period, expected) in [
        (0, 1, 1, Ok(())),
        (16, 30, 60, Ok(())),
        (1, 1_000_000_000, 1, Ok(())),
        (1, 1_000_000_001, 1, Err(CallerRateError::ZeroRate)),
        (1, 0, 1, Err(CallerRateError::ZeroRate)),
        (1, 1, 0, Err(CallerRateError::ZeroRate)),
        (1, 1, 2_300_000_000, Ok(())),
        (2, 1, 2_300_000_000, Err(CallerRateError::TooSlow)),
        (u64::MAX, 1, 1, Err(CallerRateError::TooSlow)),
        (1, 1, u64::MAX, Err(CallerRateError::TooSlow)),
        (0, 500_000_000, 1 << 62, Err(CallerRateError::TooSlow)),
        (0, 1, i64::MAX as u64, Err(CallerRateError::TooSlow)),
    ] {
        assert_eq!(CallerRate::new(limit, count, period).map(drop), expected, "{limit} {count} {period}");
    }
    let rate = CallerRate::new(1, 1, 2_300_000_000).unwrap();
    for (quantity, now) in
        [(i64::MAX, Time::ZERO), (i64::MIN, Time::ZERO), (1, Time::from_secs(1_700_000_000)), (i64::MAX, Time::NEVER)]
    {
        let op = rate.op(LimitId::FIRST, Key::default(), quantity);
        let outcomes = batch::execute(&Batch::with_op(0, op), &limits(), &mut [KeyState::default()][..], now);
        let found = rate.decision(quantity, &outcomes.list()[0], outcomes.now());
        assert_eq!(found.is_limited, quantity > 1, "{quantity}");
        assert!(found.retry_after.is_none());
    }
}
