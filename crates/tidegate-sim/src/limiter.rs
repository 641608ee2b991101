//! A service's own limits, counted exactly. They share only the calendar code with the limits that they test.

use std::collections::VecDeque;
use std::sync::Arc;

use tidegate_core::quota::QuotaUsage;
use tidegate_core::{LimitKind, Quota, Span, Time};
use tidegate_policy::Quantity;

/// The largest limit of a window, in requests.
pub(crate) const MAX_WINDOW_REQUESTS: u64 = 1 << 20;

/// A limit of a service, with its count.
#[derive(Clone, Debug)]
pub(crate) enum ServiceLimiter {
    /// The times of all requests in the trailing window, of which there are at most `limit`.
    Window { limit: usize, window: Span, request_times: VecDeque<Time> },
    /// A token bucket that is full at first. A token has as many parts as its period has microseconds, so that all
    /// arithmetic is in integers.
    Bucket { refill_parts_per_micro: u64, parts_per_token: u64, max_parts: u128, parts: u128, refilled_at: Time },
    /// A quota per calendar period.
    Quota { quota: Arc<Quota>, usage: QuotaUsage },
}

impl ServiceLimiter {
    /// Returns the limit of a quantity; `None` if it is unlimited or of calls in flight. A service's workers bound
    /// those. The reader of a scenario refuses windows larger than [`MAX_WINDOW_REQUESTS`].
    pub(crate) fn new(quantity: &Quantity, now: Time) -> Option<Self> {
        match quantity {
            Quantity::Window { limit, window } => {
                let limit = usize::try_from(*limit).unwrap_or(usize::MAX);
                Some(Self::Window { limit, window: *window, request_times: VecDeque::new() })
            }
            Quantity::Rate { count, per, burst } => {
                let (refill_parts_per_micro, parts_per_token) = (*count, per.as_micros());
                let max_parts = u128::from(*burst) * u128::from(parts_per_token);
                let (parts, refilled_at) = (max_parts, now);
                Some(Self::Bucket { refill_parts_per_micro, parts_per_token, max_parts, parts, refilled_at })
            }
            Quantity::Quota { .. } => match quantity.to_limit_kind() {
                Ok(Some(LimitKind::Quota(quota))) => {
                    Some(Self::Quota { quota: Arc::new(quota), usage: QuotaUsage::default() })
                }
                _ => None,
            },
            Quantity::InFlight { .. } | Quantity::Unlimited => None,
        }
    }

    /// Returns the time until a request is allowed; zero if it is allowed now.
    pub(crate) fn time_until_allowed(&mut self, now: Time) -> Span {
        match self {
            Self::Window { limit, window, request_times } => {
                while request_times.pop_front_if(|first| *first + *window <= now).is_some() {}
                match request_times.front() {
                    Some(first) if request_times.len() >= *limit => (*first + *window).since(now),
                    None if *limit == 0 => Span::MAX,
                    _ => Span::ZERO,
                }
            }
            Self::Bucket { refill_parts_per_micro, parts_per_token, max_parts, parts, refilled_at } => {
                let refilled = u128::from(now.since(*refilled_at).as_micros()) * u128::from(*refill_parts_per_micro);
                (*parts, *refilled_at) = ((*parts + refilled).min(*max_parts), now);
                let missing = u128::from(*parts_per_token).saturating_sub(*parts);
                let wait = missing.div_ceil(u128::from((*refill_parts_per_micro).max(1)));
                Span::from_micros(u64::try_from(wait).unwrap_or(u64::MAX))
            }
            Self::Quota { quota, usage } => {
                quota.refresh(usage, now);
                quota.status(usage, 1, now).retry_at.since(now)
            }
        }
    }

    /// Counts a request that is allowed.
    pub(crate) fn take(&mut self, now: Time) {
        match self {
            Self::Window { request_times, .. } => request_times.push_back(now),
            Self::Bucket { parts_per_token, parts, .. } => *parts = parts.saturating_sub(u128::from(*parts_per_token)),
            Self::Quota { quota, usage } => quota.charge(usage, 1, now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(quantity: &str, millis: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let quantity: Quantity = quantity.parse().expect("a quantity");
        let mut limiter = ServiceLimiter::new(&quantity, Time::from_secs(0)).expect("a limit");
        let taken = millis.into_iter().filter(|millis| {
            let now = Time::ZERO + Span::from_millis(*millis);
            let free = limiter.time_until_allowed(now).is_zero();
            if free {
                limiter.take(now);
            }
            free
        });
        taken.collect()
    }

    #[test]
    fn a_window_never_exceeds_its_limit() {
        assert_eq!(
            admitted("3 per 1s", (0..25).map(|tick| tick * 100)),
            [0, 100, 200, 1000, 1100, 1200, 2000, 2100, 2200]
        );
        assert!(admitted("0 per 1s", [0, 5_000]).is_empty());
    }

    #[test]
    fn a_bucket_starts_full_and_refills_evenly() {
        assert_eq!(admitted("10/s burst 2", [0, 0, 0, 50, 99, 100, 150, 200]), [0, 0, 100, 200]);
        assert_eq!(admitted("3/s", [0, 333, 334, 667, 668]), [0, 334, 668]);
    }

    #[test]
    fn a_quota_resets_with_its_period() {
        let hour = 3_600_000;
        assert_eq!(
            admitted("2 per calendar day", [0, hour, 2 * hour, 24 * hour, 25 * hour, 26 * hour]),
            [0, hour, 24 * hour, 25 * hour]
        );
    }
}
