//! `concurrency`: the maximum number of calls in flight. Each holds a permit until it gives it back or its lease ends.

use alloc::vec::Vec;

use crate::limit::{LimitError, MAX_COST};
use crate::state::LimitStatus;
use crate::time::MAX_CLOCK_LAG;
use crate::{Span, Time};

/// The maximum number of permits of one key: small enough to search all of them within microseconds.
const MAX_PERMITS: u64 = 1 << 12;

/// At most `limit` permits at a time, each until it is released or its lease ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    limit: u64,
    lease: Span,
}

impl Concurrency {
    /// The lifetime of a permit that isn't renewed: 30 s.
    pub const DEFAULT_LEASE: Span = Span::from_secs(30);
    /// The interval at which a holder renews: 10 s.
    pub const RENEW_INTERVAL: Span = Span::from_secs(10);

    /// At most `limit` in flight, with leases of `lease`.
    ///
    /// # Errors
    /// `limit` is more than 4,096, or `lease` is zero.
    pub fn new(limit: u64, lease: Span) -> Result<Self, LimitError> {
        if limit > MAX_PERMITS {
            return Err(LimitError::TooManyPermits { found: limit });
        }
        if lease.is_zero() {
            return Err(LimitError::ZeroPeriod);
        }
        Ok(Self { limit, lease })
    }

    /// The maximum number of calls in flight.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The lifetime of a permit that isn't renewed.
    pub fn lease(&self) -> Span {
        self.lease
    }

    /// The cost of a call that is refused for this time, as if the limit were full. Its caller isn't to get more permits,
    /// although there may be some.
    pub fn refused_cost(wait: Span) -> u64 {
        MAX_COST.saturating_add(wait.as_micros().max(1))
    }

    /// True if this is a [`refused_cost`](Self::refused_cost).
    pub fn is_refused_cost(cost: u64) -> bool {
        cost > MAX_COST
    }

    /// Removes permits after the end of their lease. Shortens leases that a step back of the clock has lengthened.
    pub fn refresh(&self, permits: &mut Permits, now: Time) {
        let longest = now + self.lease;
        permits.0.retain_mut(|permit| {
            if permit.expires > longest + MAX_CLOCK_LAG {
                permit.expires = longest;
            }
            permit.expires > now
        });
    }

    /// The status for a call of `cost` permits at `now`. The list must be refreshed for `now`.
    pub fn status(&self, permits: &Permits, cost: u64, now: Time) -> LimitStatus {
        let used = permits.used();
        let is_refused = Self::is_refused_cost(cost);
        let retry_at = if is_refused {
            now + Span::from_micros(cost - MAX_COST)
        } else if cost > self.limit {
            Time::NEVER
        } else if used + cost <= self.limit {
            now
        } else {
            let mut missing = used + cost - self.limit;
            let mut expiries: Vec<&PermitLease> = permits.0.iter().collect();
            expiries.sort_unstable_by_key(|permit| permit.expires);
            let last_needed = expiries.iter().find(|permit| {
                missing = missing.saturating_sub(permit.count);
                missing == 0
            });
            last_needed.map_or(now, |permit| permit.expires)
        };
        let reset_at = permits.0.iter().map(|permit| permit.expires).max().unwrap_or(now);
        let remaining = if is_refused { 0 } else { self.limit.saturating_sub(used) };
        LimitStatus { limit: self.limit, used, remaining, retry_at, reset_at }
    }

    /// Gives `cost` permits to `holder`. A holder that has permits keeps its number and gets a new lease.
    pub fn charge(&self, permits: &mut Permits, holder: u64, cost: u64, now: Time) {
        let expires = now + self.lease;
        match permits.0.iter_mut().find(|permit| permit.holder == holder) {
            Some(permit) => permit.expires = expires,
            None if cost > 0 => permits.0.push(PermitLease { holder, count: cost, expires }),
            None => {}
        }
    }

    /// Records that `holder` has `cost` permits, even if they weren't free, unless all together would exceed 4,096.
    pub fn debit(&self, permits: &mut Permits, holder: u64, cost: u64, now: Time) {
        if permits.holds(holder) || cost <= MAX_PERMITS.saturating_sub(permits.used()) {
            self.charge(permits, holder, cost, now);
        }
    }

    /// Extends the lease of the holder from `now`. Returns false if it holds none.
    pub fn renew(&self, permits: &mut Permits, holder: u64, now: Time) -> bool {
        let permit = permits.0.iter_mut().find(|permit| permit.holder == holder);
        permit.map(|permit| permit.expires = now + self.lease).is_some()
    }

    /// Takes back the permits of the holder. Returns false if it holds none.
    pub fn release(&self, permits: &mut Permits, holder: u64) -> bool {
        let before = permits.0.len();
        permits.0.retain(|permit| permit.holder != holder);
        permits.0.len() < before
    }
}

/// The permits of one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PermitLease {
    /// The holder: the id of the batch that took it.
    pub holder: u64,
    /// The number of permits.
    pub count: u64,
    /// The end of the lease.
    pub expires: Time,
}

/// The permits of one key.
#[derive(Clone, Debug, Default)]
pub struct Permits(Vec<PermitLease>);

impl Permits {
    /// Creates a list of these permits.
    pub fn from_leases(permits: Vec<PermitLease>) -> Self {
        Self(permits)
    }

    /// The permits of each holder.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &PermitLease> {
        self.0.iter()
    }

    /// The sum of all permits.
    pub fn used(&self) -> u64 {
        self.0.iter().map(|permit| permit.count).sum()
    }

    /// True if `holder` has any.
    pub fn holds(&self, holder: u64) -> bool {
        self.0.iter().any(|permit| permit.holder == holder)
    }

    /// The end of the last lease.
    pub fn idle_at(&self) -> Time {
        self.0.iter().map(|permit| permit.expires).max().unwrap_or(Time::ZERO)
    }

    /// The number of bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.0.capacity() * size_of::<PermitLease>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_end_by_release_or_lease_expiry() {
        let limit = Concurrency::new(2, Concurrency::DEFAULT_LEASE).unwrap();
        let at = |secs: u64| Time::from_secs(1000 + secs);
        let mut permits = Permits::default();
        limit.charge(&mut permits, 1, 1, at(0));
        limit.charge(&mut permits, 2, 1, at(5));
        limit.charge(&mut permits, 2, 1, at(5));
        assert_eq!(limit.status(&permits, 1, at(5)).retry_at, at(30));
        assert!(limit.renew(&mut permits, 1, at(10)));
        assert_eq!(limit.status(&permits, 1, at(10)).retry_at, at(35));
        assert!(limit.release(&mut permits, 2) && !limit.release(&mut permits, 2));
        assert_eq!(limit.status(&permits, 1, at(10)).retry_at, at(10));
        limit.refresh(&mut permits, at(40));
        assert_eq!(permits.used(), 0);
        assert!(!limit.renew(&mut permits, 1, at(40)));
    }

    #[test]
    fn a_refused_cost_finds_the_limit_full() {
        let limit = Concurrency::new(2, Concurrency::DEFAULT_LEASE).unwrap();
        let status = |cost| limit.status(&Permits::default(), cost, Time::from_secs(1000));
        let refused = status(Concurrency::refused_cost(Span::from_secs(7)));
        assert_eq!((refused.used, refused.remaining, refused.retry_at), (0, 0, Time::from_secs(1007)));
        assert_eq!((status(MAX_COST).remaining, status(MAX_COST).retry_at), (2, Time::NEVER));
    }

    #[test]
    fn a_debit_may_exceed_the_limit() {
        let limit = Concurrency::new(2, Concurrency::DEFAULT_LEASE).unwrap();
        let at = |secs: u64| Time::from_secs(1000 + secs);
        let mut permits = Permits::default();
        for _ in 0..2 {
            limit.debit(&mut permits, 1, 3, at(0));
        }
        limit.debit(&mut permits, 2, MAX_PERMITS - 2, at(0));
        let status = limit.status(&permits, 1, at(0));
        assert_eq!((status.used, status.remaining, status.retry_at), (3, 0, at(30)));
        assert!(limit.renew(&mut permits, 1, at(10)) && !limit.renew(&mut permits, 2, at(10)));
    }
}
