//! Calls with terms of their own, against the model of redis-cell.

use std::sync::Arc;

use tidegate_core::{Batch, CallerRate, Key, Limit, LimitId, LimitKind, Limits, Rate, Span, Time};

use super::concurrent::count_admitted;
use super::{Backend, ConformanceOptions, StoreUnderTest, expect_equal, start_time};
use crate::random::RandomSource;
use crate::redis_cell::{RedisCell, Throttle, ThrottleAnswer};

/// Checks that each call gets the answer of redis-cell, and that no more than the limit are admitted at once.
pub(super) fn answers<B: Backend>(backend: &B, options: &ConformanceOptions) -> Result<(), String> {
    let rate = Rate::new(1, Span::from_secs(1), 1).map_err(|error| error.to_string())?;
    let limits = Arc::new(Limits::with_limit(Limit::new(LimitKind::Rate(rate))));
    let subject = StoreUnderTest::open(backend, &limits);
    let (mut model, mut random) = (RedisCell::default(), RandomSource::from_seed(options.seed));
    let mut now = start_time();
    for index in 0..options.batches.min(5_000) {
        now = now + Span::from_micros(random.pick(&[0, 1, 999, 1_000, 700_000, 20_000_000]));
        subject.set_now(now);
        let (key, call) = (random.below(4), Throttle::random(&mut random));
        let (found, decided_at) = throttle(&subject, key, &call, now)?;
        let expected = model.throttle(key, &call, i128::from(decided_at.as_micros()) * 1000);
        expect_equal(&format!("call {index}, {call:?} of key {key}"), found, expected)?;
    }
    let call = Throttle { max_burst: 6, count: 1, period: 86_400, quantity: 1 };
    let admitted = count_admitted(options.tasks, 5, |_, _| Ok(throttle(&subject, 9, &call, now)?.0[0] == 0))?;
    expect_equal("admitted at once", admitted, 7.min(u64::from(options.tasks) * 5))
}

/// The answer to a call, and the time of its decision.
fn throttle<B: Backend>(
    subject: &StoreUnderTest<'_, B>,
    key: u64,
    call: &Throttle,
    now: Time,
) -> Result<(ThrottleAnswer, Time), String> {
    let [limit, count, period] = [call.max_burst + 1, call.count, call.period].map(i64::unsigned_abs);
    let rate = CallerRate::new(limit, count, period).map_err(|error| error.to_string())?;
    let op = rate.op(LimitId::FIRST, Key::new(key, key), call.quantity);
    let outcomes = subject.apply(&Batch::with_op(0, op), now)?;
    let decided = rate.decision(call.quantity, &outcomes.list()[0], outcomes.now());
    let limited = if decided.is_limited { 1 } else { 0 };
    let (retry_after, reset_after) = (decided.retry_after_secs(), decided.reset_after_secs());
    Ok(([limited, call.max_burst + 1, decided.redis_cell_remaining, retry_after, reset_after], outcomes.now()))
}
