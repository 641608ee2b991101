//! `rate`: the generic cell rate algorithm (GCRA) in the virtual-scheduling form of ITU-T I.371. Each call moves a
//! theoretical arrival time forward by its share of the period, at most a burst ahead of the clock.

use crate::limit::{LimitError, checked_limit};
use crate::state::LimitStatus;
use crate::time::MAX_CLOCK_LAG;
use crate::{Span, Time};

/// The unit of the calculation is 1/1024 µs, so that a million calls per second are still spaced within 0.1 %.
const FRACTION_BITS: u32 = 10;
/// The longest refill time of a burst, in units.
const MAX_REFILL: u64 = 1 << 61;
/// The largest arrival time of a state: 62 bits, so that a store can use the other two bits of the word.
const MAX_ARRIVAL: u64 = (1 << 62) - 1;

/// A smooth rate with a burst: each call moves the key's *theoretical arrival time* forward by `period ÷ count`.
///
/// Any window of length W admits at most `burst + W · count ÷ period` calls ([`Rate::max_in`]), however long the key
/// was idle. The spacing is rounded up to 1/1024 µs, so that no rate is exceeded. Rates above 10^9/s run slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    count: u64,
    per: Span,
    burst: u64,
    units_per_call: u64,
    refill_units: u64,
}

impl Rate {
    /// Creates a rate of `count` calls per `per`, with up to `burst` at once (1 means evenly spaced).
    ///
    /// # Errors
    /// `count`, `per` or `burst` is zero, `count` or `burst` is above 2^40, or the burst takes over 71 years to refill.
    pub fn new(count: u64, per: Span, burst: u64) -> Result<Self, LimitError> {
        checked_limit(count)?;
        checked_limit(burst)?;
        if count == 0 {
            return Err(LimitError::ZeroRate);
        }
        if burst == 0 {
            return Err(LimitError::ZeroBurst);
        }
        if per.is_zero() {
            return Err(LimitError::ZeroPeriod);
        }
        let spacing = (u128::from(per.as_micros()) << FRACTION_BITS).div_ceil(u128::from(count));
        let refill = spacing * u128::from(burst);
        match (u64::try_from(spacing), u64::try_from(refill)) {
            (Ok(spacing), Ok(refill)) if refill <= MAX_REFILL => {
                Ok(Self { count, per, burst, units_per_call: spacing, refill_units: refill })
            }
            _ => Err(LimitError::TooSlow),
        }
    }

    /// The number of calls per [`Rate::per`].
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The period of the count.
    pub fn per(&self) -> Span {
        self.per
    }

    /// The maximum number of calls at once.
    pub fn burst(&self) -> u64 {
        self.burst
    }

    /// The time in which a spent burst refills.
    pub fn refill_time(&self) -> Span {
        Span::from_micros(self.refill_units >> FRACTION_BITS)
    }

    /// The distance by which a call of `cost` moves the arrival time forward, in the units of [`ArrivalTime::to_bits`]:
    /// the period divided by the count, rounded up, times the cost. Below 2^62.
    #[inline]
    pub fn cost_units(&self, cost: u64) -> u64 {
        self.units_per_call.saturating_mul(cost).min(MAX_ARRIVAL)
    }

    /// The distance of the arrival time ahead of now after a whole burst, in the same units. At most 2^61.
    pub fn refill_units(&self) -> u64 {
        self.refill_units
    }

    /// The maximum that any window of this length admits: burst + rate × window.
    pub fn max_in(&self, window: Span) -> u64 {
        let more = u128::from(window.as_micros()) * u128::from(self.count) / u128::from(self.per.as_micros());
        self.burst.saturating_add(u64::try_from(more).unwrap_or(u64::MAX))
    }

    /// Moves an arrival time that is too far ahead, because the clock has stepped back since, back to a full burst from
    /// `now`. A caller that decides at `now` must store the result. Otherwise the announced wait would never end.
    #[inline]
    pub fn refresh(&self, arrival: ArrivalTime, now: Time) -> ArrivalTime {
        let now = time_to_units(now);
        if arrival.0 > self.latest_arrival(now) { ArrivalTime(now + self.refill_units) } else { arrival }
    }

    /// The latest possible arrival time: a full burst, one more overdrawn by paroles, and the lag of this call's clock.
    #[inline]
    fn latest_arrival(&self, now: u64) -> u64 {
        now + 2 * self.refill_units + time_to_units(Time::ZERO + MAX_CLOCK_LAG)
    }

    fn arrival_at(&self, arrival: ArrivalTime, now: u64) -> u64 {
        if arrival.0 > self.latest_arrival(now) { now + self.refill_units } else { arrival.0.max(now) }
    }

    /// The status for a call of `cost` at `now`.
    #[inline]
    pub fn status(&self, arrival: ArrivalTime, cost: u64, now: Time) -> LimitStatus {
        let now_units = time_to_units(now);
        let current = self.arrival_at(arrival, now_units);
        let free = (now_units + self.refill_units).saturating_sub(current);
        let retry_at = self.retry_at(arrival, cost, now);
        let remaining = if free >= self.refill_units { self.burst } else { free / self.units_per_call };
        let (limit, used) = (self.burst, self.burst - remaining);
        LimitStatus { limit, used, remaining, retry_at, reset_at: micros_ceil(current) }
    }

    /// The time at which a call of `cost` has room: `now` if it has, [`Time::NEVER`] if it never will.
    #[inline]
    pub fn retry_at(&self, arrival: ArrivalTime, cost: u64, now: Time) -> Time {
        let now_units = time_to_units(now);
        let after = self.arrival_at(arrival, now_units).saturating_add(self.cost_units(cost));
        if cost > self.burst {
            Time::NEVER
        } else if after <= now_units + self.refill_units || cost == 0 {
            now
        } else {
            micros_ceil(after - self.refill_units)
        }
    }

    /// True if [`Rate::take_between`] can ever admit a call with times this far apart.
    #[inline]
    pub fn can_take_between(&self, apart: Span) -> bool {
        self.refill_units > apart.as_micros() << FRACTION_BITS
    }

    /// Admits a call of `cost` at an unknown time between two times, if the exact time makes no difference. An arrival
    /// time ahead of both moves forward by the cost, and a call with room at the earlier time also has room at the
    /// later. `None` is no decision: call again with the exact time.
    #[inline]
    pub fn take_between(
        &self,
        arrival: ArrivalTime,
        cost: u64,
        (earliest, latest): (Time, Time),
    ) -> Option<ArrivalTime> {
        let after = arrival.0.saturating_add(self.cost_units(cost));
        let fits = after <= (time_to_units(earliest) + self.refill_units).min(MAX_ARRIVAL);
        (arrival.0 >= time_to_units(latest) && fits).then_some(ArrivalTime(after))
    }

    /// The wait of a call of `cost` at an unknown time between two times. It is counted from the earlier one, so it is
    /// true at both and at most 1 % too long. `None` is no decision: ask again with the exact time.
    #[inline]
    pub fn wait_between(&self, arrival: ArrivalTime, cost: u64, (earliest, latest): (Time, Time)) -> Option<Span> {
        let retry_at = self.retry_at(arrival, cost, latest);
        let wait = retry_at.since(earliest);
        let is_precise = wait.as_micros() / 100 >= latest.since(earliest).as_micros();
        let is_valid = arrival.0 <= self.latest_arrival(time_to_units(earliest));
        (retry_at > latest && !retry_at.is_never() && is_precise && is_valid).then_some(wait)
    }

    /// The arrival time after a call of `cost` at `now`, which had room or a parole. Paroles overdraw up to one burst.
    #[inline]
    pub fn charge(&self, arrival: ArrivalTime, cost: u64, now: Time) -> ArrivalTime {
        let now = time_to_units(now);
        let current = self.arrival_at(arrival, now);
        let most = current.max(now + 2 * self.refill_units).min(MAX_ARRIVAL);
        ArrivalTime(current.saturating_add(self.cost_units(cost)).min(most))
    }

    /// The arrival time if a cost of `held` can't be used by others at `now`, though it is charged.
    pub(crate) fn hold(&self, arrival: ArrivalTime, held: u64, now: Time) -> ArrivalTime {
        if held == 0 {
            return arrival;
        }
        ArrivalTime(arrival.0.max(time_to_units(now).saturating_add(self.cost_units(held))).min(MAX_ARRIVAL))
    }

    /// The arrival time after a charge of `cost` at a time that may be past.
    pub(crate) fn charge_at(&self, arrival: ArrivalTime, cost: u64, at: Time) -> ArrivalTime {
        ArrivalTime(arrival.0.max(time_to_units(at)).saturating_add(self.cost_units(cost)).min(MAX_ARRIVAL))
    }

    /// The arrival time after a refund of `cost` at a time that may be past.
    pub(crate) fn refund_at(&self, arrival: ArrivalTime, cost: u64, at: Time) -> ArrivalTime {
        ArrivalTime(arrival.0.saturating_sub(self.cost_units(cost)).max(time_to_units(at)))
    }

    /// The time of so many units of 1/1024 µs, rounded up.
    pub(crate) fn units_to_span(units: u64) -> Span {
        Span::from_micros(units.div_ceil(1 << FRACTION_BITS))
    }

    /// The arrival time after a refund of `cost`. It is never before `now`, so that idle time earns nothing.
    pub fn refund(&self, arrival: ArrivalTime, cost: u64, now: Time) -> ArrivalTime {
        let now = time_to_units(now);
        ArrivalTime(self.arrival_at(arrival, now).saturating_sub(self.cost_units(cost)).max(now))
    }
}

/// A key's theoretical arrival time, in 1/1024 µs since the Unix epoch. A time in the past has no effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ArrivalTime(u64);

impl ArrivalTime {
    /// Creates an arrival time from a result of [`ArrivalTime::to_bits`].
    pub const fn from_bits(bits: u64) -> Self {
        Self(if bits > MAX_ARRIVAL { MAX_ARRIVAL } else { bits })
    }

    /// The arrival time as a number below 2^62.
    pub const fn to_bits(self) -> u64 {
        self.0
    }

    /// Creates an arrival time from nanoseconds. [`ArrivalTime::to_nanos`] returns the same number, below 2^62.
    pub(crate) fn from_nanos(nanos: u64) -> Self {
        Self::from_bits((nanos / 1000) << FRACTION_BITS | ((nanos % 1000) << FRACTION_BITS).div_ceil(1000))
    }

    /// The arrival time in nanoseconds, rounded down. There are more units than nanoseconds, so none is lost.
    pub(crate) fn to_nanos(self) -> u64 {
        let rest = self.0 & ((1 << FRACTION_BITS) - 1);
        (self.0 >> FRACTION_BITS) * 1000 + ((rest * 1000) >> FRACTION_BITS)
    }

    /// The time from which the key's state equals a new one.
    pub fn idle_at(self) -> Time {
        micros_ceil(self.0)
    }
}

#[inline]
fn time_to_units(time: Time) -> u64 {
    time.as_micros() << FRACTION_BITS
}

#[inline]
fn micros_ceil(units: u64) -> Time {
    Time::from_micros(units.div_ceil(1 << FRACTION_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::from_micros(1_000_000_000_000_000 + millis * 1000)
    }

    #[test]
    fn a_rate_admits_its_burst_then_paces() {
        let rate = Rate::new(10, Span::from_secs(1), 20).unwrap();
        let mut arrival = ArrivalTime::default();
        for left in (0..20).rev() {
            assert_eq!(rate.status(arrival, 1, at(0)).retry_at, at(0));
            arrival = rate.charge(arrival, 1, at(0));
            assert_eq!(rate.status(arrival, 1, at(0)).remaining, left);
        }
        assert_eq!(rate.status(arrival, 1, at(0)).retry_at, at(100));
        assert_eq!(rate.status(arrival, 1, at(99)).retry_at, at(100));
        assert_eq!(rate.status(arrival, 1, at(100)).retry_at, at(100));
        assert_eq!(rate.status(arrival, 20, at(100)).retry_at, at(2000));
        assert_eq!(rate.status(arrival, 21, at(100)).retry_at, Time::NEVER);
        assert_eq!(rate.status(arrival, 1, at(500)).reset_at, at(2000));
        assert_eq!(rate.max_in(Span::from_secs(60)), 620);
    }

    #[test]
    fn extreme_values_saturate() {
        let huge = Rate::new(1 << 40, Span::from_micros(1), 1 << 40).unwrap();
        let arrival = huge.charge(ArrivalTime::from_bits(u64::MAX), 1 << 40, Time::NEVER);
        let _ = huge.status(arrival, u64::MAX, Time::NEVER);
        let _ = huge.refund(arrival, u64::MAX, Time::ZERO);
        assert_eq!(Rate::new(1, Span::MAX, 1 << 40), Err(LimitError::TooSlow));
        assert_eq!(huge.max_in(Span::MAX), u64::MAX);
    }

    #[test]
    fn a_clock_step_back_locks_out_no_caller() {
        let rate = Rate::new(10, Span::from_secs(1), 20).unwrap();
        let year = 365 * 86_400_000;
        let arrival = rate.charge(ArrivalTime::default(), 20, at(year));
        let status = rate.status(arrival, 1, at(0));
        assert!(status.retry_at <= at(2000), "{status:?}");
    }

    #[test]
    fn a_wait_between_two_times_is_true() {
        let rate = Rate::new(1, Span::from_secs(1), 20).unwrap();
        let full = rate.charge(ArrivalTime::default(), 20, at(0));
        let apart = (at(1_000), at(1_052));
        for cost in 1..=20 {
            let wait = rate.wait_between(full, cost, apart);
            assert_eq!(wait.is_some(), cost >= 7, "{cost}: {wait:?}");
            for time in [apart.0, apart.1] {
                let Some(wait) = wait else { continue };
                let exact = rate.retry_at(full, cost, time);
                assert!(exact > time && exact <= time + wait, "{cost}");
                assert!(wait.as_micros() <= exact.since(time).as_micros() * 101 / 100 + 1, "{cost}: {wait:?}");
            }
        }
        assert_eq!(rate.wait_between(full, 21, apart), None);
        // An arrival time of a later clock counts from the present.
        let later = rate.charge(ArrivalTime::default(), 20, at(86_400_000));
        assert_eq!(rate.wait_between(later, 20, apart), None);
    }

    #[test]
    fn refunds_never_exceed_the_burst() {
        let rate = Rate::new(10, Span::from_secs(1), 20).unwrap();
        let arrival = rate.refund(ArrivalTime::default(), 1 << 40, at(0));
        assert_eq!(rate.status(arrival, 1, at(0)).remaining, 20);
    }
}
