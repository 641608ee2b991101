//! A service's own limits, counted exactly. Only the calendar is shared with the limits that they are there to judge.

use std::collections::VecDeque;
use std::sync::Arc;

use tidegate_core::quota::Ledger;
use tidegate_core::{Kind, Quota, Span, Time};
use tidegate_policy::Quantity;

/// The largest window, in requests.
pub(crate) const MAX_WINDOW: u64 = 1 << 20;

/// A limit as a service keeps it.
#[derive(Clone, Debug)]
pub(crate) enum Limiter {
    /// The moments of all requests in the trailing window, of which there are at most `limit`.
    Window { limit: usize, window: Span, taken: VecDeque<Time> },
    /// A token bucket.
    Bucket(Bucket),
    /// A calendar's periods.
    Quota { quota: Arc<Quota>, ledger: Ledger },
}

/// A token bucket that begins full. A token is as many parts as a period has microseconds, so that all is whole.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    parts_per_micro: u64,
    token: u64,
    most: u128,
    held: u128,
    filled_at: Time,
}

impl Limiter {
    /// The limit that a quantity says; `None` for none. Of calls in flight, which a service's workers bound, and larger windows
    /// than [`MAX_WINDOW`] reading lets none through.
    pub(crate) fn new(quantity: &Quantity, now: Time) -> Option<Self> {
        match quantity {
            Quantity::Window { limit, window } => {
                let limit = usize::try_from(*limit).unwrap_or(usize::MAX);
                Some(Self::Window { limit, window: *window, taken: VecDeque::new() })
            }
            Quantity::Rate { count, per, burst } => {
                let token = per.as_micros();
                let most = u128::from(*burst) * u128::from(token);
                Some(Self::Bucket(Bucket { parts_per_micro: *count, token, most, held: most, filled_at: now }))
            }
            Quantity::Quota { .. } => match quantity.kind() {
                Ok(Some(Kind::Quota(quota))) => Some(Self::Quota { quota: Arc::new(quota), ledger: Ledger::default() }),
                _ => None,
            },
            Quantity::InFlight { .. } | Quantity::Unlimited => None,
        }
    }

    /// How long a request that comes now is too early.
    pub(crate) fn wait(&mut self, now: Time) -> Span {
        match self {
            Self::Window { limit, window, taken } => {
                while taken.front().is_some_and(|first| *first + *window <= now) {
                    taken.pop_front();
                }
                match taken.front() {
                    Some(first) if taken.len() >= *limit => (*first + *window).since(now),
                    None if *limit == 0 => Span::MAX,
                    _ => Span::ZERO,
                }
            }
            Self::Bucket(bucket) => {
                let earned = u128::from(now.since(bucket.filled_at).as_micros()) * u128::from(bucket.parts_per_micro);
                (bucket.held, bucket.filled_at) = ((bucket.held + earned).min(bucket.most), now);
                let short = u128::from(bucket.token).saturating_sub(bucket.held);
                let wait = short.div_ceil(u128::from(bucket.parts_per_micro.max(1)));
                Span::from_micros(u64::try_from(wait).unwrap_or(u64::MAX))
            }
            Self::Quota { quota, ledger } => {
                quota.settle(ledger, now);
                quota.look(ledger, 1, now).retry_at.since(now)
            }
        }
    }

    /// Counts a request that doesn't come too early.
    pub(crate) fn take(&mut self, now: Time) {
        match self {
            Self::Window { taken, .. } => taken.push_back(now),
            Self::Bucket(bucket) => bucket.held -= u128::from(bucket.token).min(bucket.held),
            Self::Quota { quota, ledger } => quota.charge(ledger, 1, now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(quantity: &str, millis: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let quantity: Quantity = quantity.parse().expect("a quantity");
        let mut limiter = Limiter::new(&quantity, Time::from_secs(0)).expect("a limit");
        let taken = millis.into_iter().filter(|millis| {
            let now = Time::ZERO + Span::from_millis(*millis);
            let free = limiter.wait(now).is_zero();
            if free {
                limiter.take(now);
            }
            free
        });
        taken.collect()
    }

    #[test]
    fn a_window_never_holds_more() {
        assert_eq!(
            admitted("3 per 1s", (0..25).map(|tick| tick * 100)),
            [0, 100, 200, 1000, 1100, 1200, 2000, 2100, 2200]
        );
        assert!(admitted("0 per 1s", [0, 5_000]).is_empty());
    }

    #[test]
    fn a_bucket_begins_full_and_fills_evenly() {
        assert_eq!(admitted("10/s burst 2", [0, 0, 0, 50, 99, 100, 150, 200]), [0, 0, 100, 200]);
        assert_eq!(admitted("3/s", [0, 333, 334, 667, 668]), [0, 334, 668]);
    }

    #[test]
    fn a_quota_ends_with_its_period() {
        let hour = 3_600_000;
        assert_eq!(
            admitted("2 per day", [0, hour, 2 * hour, 24 * hour, 25 * hour, 26 * hour]),
            [0, hour, 24 * hour, 25 * hour]
        );
    }
}
