//! Retry budget: limits retries to a share of first tries, so that retries don't amplify an outage.
//!
//! It is a token bucket that is filled by traffic instead of time. Source: M. Brooker, "Fixing retries with token
//! buckets and circuit breakers", 2022. The share and the minimum are those of Finagle's `RetryBudget`.

use core::sync::atomic::{AtomicU64, Ordering};

/// The units of one retry: the calculation uses thousandths of a retry.
const RETRY_UNITS: u64 = 1_000;

/// The settings of a retry budget, as written by the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetSpec {
    /// The thousandths of a retry that a first try earns: 0 to 1000, more counts as 1000. Default 200, a fifth.
    pub ratio: u16,
    /// The number of retries available at the start. Default 3.
    pub min: u32,
    /// The maximum number of retries that are kept for later, at least `min`. Default 10.
    pub reserve: u32,
}

impl BudgetSpec {
    /// No budget in practice: four billion retries at the start, and one more for each first try.
    pub const UNLIMITED: Self = Self { ratio: 1000, min: u32::MAX, reserve: u32::MAX };
}

impl Default for BudgetSpec {
    fn default() -> Self {
        Self { ratio: 200, min: 3, reserve: 10 }
    }
}

/// The retry budget of a provider, shared by all its calls.
///
/// From the start, at most `min + ratio × first tries` retries are spent. In any later period, at most `reserve + ratio
/// × first tries` are spent: retries beyond the reserve are lost, so that a quiet period doesn't save a burst. While
/// the reserve is full, a first try writes nothing and doesn't slow other threads.
#[derive(Debug)]
pub struct Budget {
    ratio: u64,
    max_units: u64,
    units: AtomicU64,
}

impl Budget {
    /// Creates a budget that holds the minimum.
    pub fn new(spec: BudgetSpec) -> Self {
        Self {
            ratio: u64::from(spec.ratio).min(RETRY_UNITS),
            max_units: u64::from(spec.reserve.max(spec.min)) * RETRY_UNITS,
            units: AtomicU64::new(u64::from(spec.min) * RETRY_UNITS),
        }
    }

    /// Adds the share of a first try.
    #[inline]
    pub fn record_first_try(&self) {
        self.add_units(self.ratio);
    }

    /// Spends a retry. Returns false if none is left.
    pub fn take(&self) -> bool {
        self.units.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| held.checked_sub(RETRY_UNITS)).is_ok()
    }

    /// Gives back a retry that was taken and not sent.
    pub fn give_back(&self) {
        self.add_units(RETRY_UNITS);
    }

    /// The number of retries that can be spent now.
    pub fn remaining(&self) -> u64 {
        self.units.load(Ordering::Relaxed) / RETRY_UNITS
    }

    #[inline]
    fn add_units(&self, earned: u64) {
        // Threads share only this counter, so relaxed order is enough. It fails only if there is nothing to add.
        let _ = self.units.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
            let after = (held + earned).min(self.max_units);
            (after != held).then_some(after)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn the_minimum_is_spent_before_the_share() {
        let budget = Budget::new(BudgetSpec::default());
        assert_eq!((0..5).filter(|_| budget.take()).count(), 3);
        for _ in 0..4 {
            budget.record_first_try();
            assert!(!budget.take());
        }
        budget.record_first_try();
        assert!(budget.take() && !budget.take());
    }

    #[test]
    fn savings_never_exceed_the_reserve() {
        let budget = Budget::new(BudgetSpec::default());
        for _ in 0..1_000_000 {
            budget.record_first_try();
        }
        assert_eq!(budget.remaining(), 10);
        assert_eq!((0..100).filter(|_| budget.take()).count(), 10);
        let generous = Budget::new(BudgetSpec { ratio: 0, min: 20, reserve: 10 });
        assert_eq!((0..100).filter(|_| generous.take()).count(), 20);
    }

    #[test]
    fn a_returned_retry_can_be_taken_once() {
        let budget = Budget::new(BudgetSpec { ratio: 0, min: 1, reserve: 0 });
        assert!(budget.take() && !budget.take());
        budget.give_back();
        assert!(budget.take() && !budget.take());
        budget.give_back();
        budget.give_back();
        assert_eq!(budget.remaining(), 1, "never above the reserve");
    }

    #[test]
    fn a_ratio_above_one_counts_as_one() {
        let budget = Budget::new(BudgetSpec { ratio: u16::MAX, min: 0, reserve: u32::MAX });
        budget.record_first_try();
        assert!(budget.take() && !budget.take());
    }

    #[test]
    fn concurrent_threads_stay_within_the_budget() {
        let budget = Budget::new(BudgetSpec { ratio: 300, min: 3, reserve: 7 });
        let spent: u64 = thread::scope(|scope| {
            let works = [(); 4].map(|()| {
                scope.spawn(|| {
                    let mut spent = 0;
                    for turn in 0..10_000 {
                        budget.record_first_try();
                        if budget.take() {
                            spent += 1;
                            if turn % 3 == 0 {
                                budget.give_back();
                                spent -= 1;
                            }
                        }
                    }
                    spent
                })
            });
            works.map(|work| work.join().unwrap()).iter().sum()
        });
        assert!(spent <= 3 + 12_000, "{spent}");
        // Every turn takes a retry as soon as there is a whole one, so almost nothing is lost beyond the reserve.
        assert!(spent >= 11_000, "{spent}");
    }
}
