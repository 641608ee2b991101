//! `quota`: a count per calendar period, which is two times here. Time zones and leap years are outside this crate.

use alloc::sync::Arc;
use core::cmp::Ordering;
use core::fmt;

use crate::limit::{LimitError, checked_limit};
use crate::state::LimitStatus;
use crate::{Span, Time};

/// One period of a calendar: from `start` up to, not including, `end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Period {
    /// The first time of the period.
    pub start: Time,
    /// The first time after the period.
    pub end: Time,
}

/// A calendar: the start and end of its periods.
pub trait Calendar: Send + Sync + fmt::Debug {
    /// The period that contains `now`: `start <= now < end`.
    fn period(&self, now: Time) -> Period;
}

/// At most `limit` in each period of a calendar.
#[derive(Clone, Debug)]
pub struct Quota {
    limit: u64,
    calendar: Arc<dyn Calendar>,
}

impl Quota {
    /// Creates a quota of at most `limit` in each of the calendar's periods.
    ///
    /// # Errors
    /// `limit` is above 2^40.
    pub fn new(limit: u64, calendar: Arc<dyn Calendar>) -> Result<Self, LimitError> {
        Ok(Self { limit: checked_limit(limit)?, calendar })
    }

    /// Returns another limit with the same calendar.
    ///
    /// # Errors
    /// `limit` is above 2^40.
    pub fn with_limit(&self, limit: u64) -> Result<Self, LimitError> {
        Self::new(limit, Arc::clone(&self.calendar))
    }

    /// The maximum of one period.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The period that contains `now`.
    pub fn period(&self, now: Time) -> Period {
        self.calendar.period(now)
    }

    /// Moves usage of a time after the next period, from before a step back of the clock, to the current period. After
    /// a smaller step, the later period's count continues, so that no period is granted twice.
    pub fn refresh(&self, usage: &mut QuotaUsage, now: Time) {
        let period = self.calendar.period(now);
        if usage.period.start > period.end {
            usage.period = period;
        }
    }

    /// The usage at `now`, 0 in a new period. Only a charge stores it, so no clock that jumps ahead and back resets it.
    fn usage_at(&self, usage: &QuotaUsage, now: Time) -> QuotaUsage {
        let period = self.calendar.period(now);
        match usage.period.start.cmp(&period.start) {
            Ordering::Less => QuotaUsage { period, used: 0 },
            Ordering::Equal => QuotaUsage { period, used: usage.used },
            Ordering::Greater => *usage,
        }
    }

    /// The status for a call of `cost` at `now`, in a usage that was refreshed for `now`.
    pub fn status(&self, usage: &QuotaUsage, cost: u64, now: Time) -> LimitStatus {
        let usage = self.usage_at(usage, now);
        let remaining = self.limit.saturating_sub(usage.used);
        let retry_at = if cost > self.limit {
            Time::NEVER
        } else if cost <= remaining {
            now
        } else {
            usage.period.end
        };
        let reset_at = if usage.used == 0 { now } else { usage.period.end };
        LimitStatus { limit: self.limit, used: usage.used, remaining, retry_at, reset_at }
    }

    /// Records a call of `cost` at `now`.
    pub fn charge(&self, usage: &mut QuotaUsage, cost: u64, now: Time) {
        *usage = self.usage_at(usage, now);
        usage.used = usage.used.saturating_add(cost);
    }

    /// Gives back a `cost` that was charged at `charged_at`, down to 0 used. A charge of an earlier period is ignored.
    pub fn refund(&self, usage: &mut QuotaUsage, cost: u64, charged_at: Time, now: Time) {
        let current = self.usage_at(usage, now);
        if current.used > 0 && charged_at >= current.period.start {
            usage.used = usage.used.saturating_sub(cost);
        }
    }
}

/// The usage of one period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaUsage {
    /// The counted period.
    pub period: Period,
    /// The used amount.
    pub used: u64,
}

impl QuotaUsage {
    /// The time from which the usage is no longer needed.
    pub fn idle_at(&self) -> Time {
        if self.used == 0 { Time::ZERO } else { self.period.end }
    }
}

/// Periods of equal length, counted from the Unix epoch: a calendar for tests and for days and hours in UTC.
#[derive(Clone, Copy, Debug)]
pub struct FixedPeriods(
    /// The length of a period. Zero counts as one microsecond.
    pub Span,
);

impl Calendar for FixedPeriods {
    fn period(&self, now: Time) -> Period {
        let length = self.0.as_micros().max(1);
        let start = Time::from_micros(now.as_micros() / length * length);
        Period { start, end: start + Span::from_micros(length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400;

    fn take(quota: &Quota, usage: &mut QuotaUsage, now: Time) -> bool {
        quota.refresh(usage, now);
        let fits = quota.status(usage, 1, now).retry_at == now;
        if fits {
            quota.charge(usage, 1, now);
        }
        fits
    }

    #[test]
    fn a_quota_resets_once_per_boundary() {
        let quota = Quota::new(2, Arc::new(FixedPeriods(Span::from_secs(DAY)))).unwrap();
        let mut usage = QuotaUsage::default();
        let day = |day: u64, secs: u64| Time::from_secs((20_000 + day) * DAY + secs);
        assert!(take(&quota, &mut usage, day(0, 5)));
        assert!(take(&quota, &mut usage, day(0, 6)));
        assert!(!take(&quota, &mut usage, day(0, DAY - 1)));
        assert_eq!(quota.status(&usage, 1, day(0, DAY - 1)).retry_at, day(1, 0));
        assert!(take(&quota, &mut usage, day(1, 0)));
        assert!(take(&quota, &mut usage, day(0, DAY - 10)), "the later day's own second call");
        assert!(!take(&quota, &mut usage, day(0, DAY - 9)));
        assert!(!take(&quota, &mut usage, day(1, 0)), "granted twice");
        assert!(take(&quota, &mut usage, day(2, 0)));
    }

    #[test]
    fn refunds_never_move_to_a_later_period() {
        let quota = Quota::new(3, Arc::new(FixedPeriods(Span::from_secs(DAY)))).unwrap();
        let mut usage = QuotaUsage::default();
        let at = |secs: u64| Time::from_secs(20_000 * DAY + secs);
        assert!(take(&quota, &mut usage, at(DAY - 1)));
        quota.refund(&mut usage, 1, at(DAY - 1), at(DAY + 5));
        for _ in 0..3 {
            assert!(take(&quota, &mut usage, at(DAY + 5)));
        }
        for unknown_or_before in [Time::ZERO, at(DAY - 1)] {
            quota.refund(&mut usage, 1, unknown_or_before, at(DAY + 6));
            assert!(!take(&quota, &mut usage, at(DAY + 6)));
        }
        for since in [at(DAY), at(DAY + 5), Time::NEVER] {
            quota.refund(&mut usage, 1, since, at(DAY + 6));
            assert!(take(&quota, &mut usage, at(DAY + 6)) && !take(&quota, &mut usage, at(DAY + 6)));
        }
        // The clock had stepped back, and the call was charged to the later day.
        quota.refund(&mut usage, 1, at(DAY - 1), at(DAY - 1));
        assert!(!take(&quota, &mut usage, at(DAY - 1)));
    }

    #[test]
    fn a_temporary_clock_jump_locks_out_no_caller() {
        let quota = Quota::new(2, Arc::new(FixedPeriods(Span::from_secs(DAY)))).unwrap();
        let mut usage = QuotaUsage::default();
        let day = |day: u64| Time::from_secs((20_000 + day) * DAY);
        assert!(take(&quota, &mut usage, day(365)) && take(&quota, &mut usage, day(365)));
        assert!(!take(&quota, &mut usage, day(0)), "nothing is minted");
        assert!(take(&quota, &mut usage, day(1)), "nor is anybody locked out");
    }
}
