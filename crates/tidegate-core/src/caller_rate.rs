//! A rate whose terms come with each call. The state of a key is its theoretical arrival time alone, as in the command
//! `CL.THROTTLE` of [redis-cell](https://github.com/brandur/redis-cell), whose arithmetic this is, to the nanosecond.

use thiserror::Error;

use crate::rate::ArrivalTime;
use crate::{Admission, Key, LimitId, Op, Outcome, Time, Verb};

const NANOS_PER_SEC: u64 = 1_000_000_000;
/// The longest time in which a spent burst refills, in nanoseconds: 73 years.
const MAX_TOLERANCE: u64 = 1 << 61;
/// An increment above every tolerance.
const MAX_INCREMENT: u64 = 1 << 62;

/// A number of nanoseconds in two halves, so that an operation that has it needs no more space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitNanos {
    high: u32,
    low: u32,
}

impl SplitNanos {
    const fn new(nanos: u64) -> Self {
        Self { high: (nanos >> 32) as u32, low: nanos as u32 }
    }

    /// The number of nanoseconds.
    pub const fn get(self) -> u64 {
        (self.high as u64) << 32 | self.low as u64
    }
}

/// The terms of a rate that a call states: so many calls per period, and so many at once.
///
/// ```
/// use tidegate_core::{CallerRate, ShareLevel};
///
/// // 30 calls per 60 s, and up to 16 at once.
/// let rate = CallerRate::new(16, 30, 60)?;
/// assert_eq!(rate.limit(), 16);
/// # Ok::<(), tidegate_core::CallerRateError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerRate {
    limit: u64,
    /// The time between calls that are evenly spaced, in nanoseconds.
    interval: u64,
}

/// The reason why terms can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CallerRateError {
    /// The count or the period is 0, or the count is more than one per nanosecond.
    #[error("Zero rates are not supported")]
    ZeroRate,
    /// A spent burst would refill in more than 73 years (2^61 ns).
    #[error("the burst would take more than 73 years to refill")]
    TooSlow,
}

/// The decision about a call by its own terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerRateDecision {
    /// True if the call is refused.
    pub is_limited: bool,
    /// The most calls at once.
    pub limit: u64,
    /// The remaining calls.
    pub remaining: u64,
    /// The remaining calls as redis-cell counts them, in whole microseconds: for more than a thousand calls per second
    /// they are too many.
    pub redis_cell_remaining: i64,
    /// The nanoseconds until the same call is admitted. `None` if it was admitted, or never is.
    pub retry_after: Option<u64>,
    /// The nanoseconds until the key is as new.
    pub reset_after: i64,
}

impl CallerRateDecision {
    /// [`CallerRateDecision::retry_after`] in the seconds of redis-cell; -1 if there is none.
    pub fn retry_after_secs(&self) -> i64 {
        self.retry_after.map_or(-1, |nanos| to_secs(nanos.cast_signed()))
    }

    /// [`CallerRateDecision::reset_after`] in the seconds of redis-cell.
    pub fn reset_after_secs(&self) -> i64 {
        to_secs(self.reset_after)
    }
}

impl CallerRate {
    /// Terms of `count` calls per `period` in seconds, with up to `limit` at once.
    ///
    /// # Errors
    /// The terms can't be counted.
    pub fn new(limit: u64, count: u64, period: u64) -> Result<Self, CallerRateError> {
        let nanos = u128::from(period) * u128::from(NANOS_PER_SEC);
        if count == 0 || nanos == 0 {
            return Err(CallerRateError::ZeroRate);
        }
        // In floating point, because redis-cell's results are those of its rounding.
        let interval = (nanos as f64 / count as f64) as u64;
        if interval == 0 {
            return Err(CallerRateError::ZeroRate);
        }
        match interval.checked_mul(limit.max(1)) {
            Some(0..=MAX_TOLERANCE) => Ok(Self { limit, interval }),
            _ => Err(CallerRateError::TooSlow),
        }
    }

    /// The most calls at once.
    pub fn limit(self) -> u64 {
        self.limit
    }

    fn tolerance(self) -> u64 {
        self.interval * self.limit
    }

    fn increment(self, quantity: i64) -> u64 {
        self.interval.saturating_mul(quantity.unsigned_abs()).min(MAX_INCREMENT)
    }

    /// The operation of a call that counts `quantity` times. 0 asks without counting; a negative quantity gives back.
    /// The limit must be a [`Rate`](crate::Rate), whose own terms have no effect, and no other operation may have the
    /// same key.
    pub fn op(self, limit: LimitId, key: Key, quantity: i64) -> Op {
        let tolerance = SplitNanos::new(self.tolerance());
        let verb = Verb::TakeByTerms { gives_back: quantity < 0, tolerance };
        Op::new(limit, verb, key, self.increment(quantity))
    }

    /// The decision about a call that is admitted without counting.
    pub fn admitted(self, now: Time) -> CallerRateDecision {
        self.decision(0, &Outcome::without_limit(Admission::Admitted, now), now)
    }

    /// Reads the decision about a call of this quantity from the outcome of its operation at `now`.
    pub fn decision(self, quantity: i64, outcome: &Outcome, now: Time) -> CallerRateDecision {
        let (tolerance, interval) = (self.tolerance().cast_signed(), self.interval.cast_signed());
        let increment = self.increment(quantity).cast_signed() * quantity.signum();
        let ahead = outcome.used.saturating_sub(to_nanos(now)).cast_signed();
        let is_limited = outcome.admission.refuses();
        let reset_after = if is_limited { ahead } else { (ahead + increment).max(0) };
        let retry_after = is_limited && increment <= tolerance;
        let room = tolerance - reset_after;
        let redis_cell_remaining = if room > -interval { (room / 1000) as f64 / (interval / 1000) as f64 } else { 0.0 };
        CallerRateDecision {
            is_limited,
            limit: self.limit,
            remaining: u64::try_from(room / interval).unwrap_or(0),
            redis_cell_remaining: redis_cell_remaining as i64,
            // While the store is away, a refusal may have another reason, whose end isn't known.
            retry_after: retry_after.then(|| u64::try_from(ahead + increment - tolerance).unwrap_or(NANOS_PER_SEC)),
            reset_after,
        }
    }
}

/// Counts a call by its own terms. Returns the arrival time before it, but not before now, in nanoseconds, and the one
/// after it. `None` if it has no room.
pub(crate) fn take(
    arrival: ArrivalTime,
    (gives_back, increment, tolerance): (bool, u64, u64),
    now: Time,
) -> (u64, Option<ArrivalTime>) {
    let now = to_nanos(now);
    let before = arrival.to_nanos().max(now);
    let after = if gives_back { before.saturating_sub(increment) } else { before.saturating_add(increment) };
    let has_room = after <= now.saturating_add(tolerance);
    (before, has_room.then(|| ArrivalTime::from_nanos(after.max(now))))
}

/// Whole seconds as redis-cell rounds them: up, but less than a millisecond is nothing. In floating point, as there.
fn to_secs(nanos: i64) -> i64 {
    let per_sec = NANOS_PER_SEC.cast_signed();
    let (whole, rest) = (nanos / per_sec, nanos % per_sec);
    let secs = (whole as f64 + rest as f64 / per_sec as f64) as i64;
    if rest / 1_000_000 > 0 { secs + 1 } else { secs }
}

fn to_nanos(time: Time) -> u64 {
    time.as_micros().saturating_mul(1000)
}
