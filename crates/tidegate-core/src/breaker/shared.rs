//! A breaker for many threads. It takes no lock while the provider works.

use core::sync::atomic::{AtomicU64, Ordering};

use rand_core::Rng;

use super::{Breaker, BreakerPermit, BreakerRefusal};
use crate::{Class, Span, Time};

/// Mutual exclusion, implemented by a driver, because this crate has no lock of its own.
pub trait ExclusiveAccess<T> {
    /// Runs `work` with exclusive access to the value.
    fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R;
}

/// Stored instead of a generation if the lock must be taken.
const NOT_CLEAN: u64 = u64::MAX;

/// A [`Breaker`] for many threads.
///
/// While it is closed, has recorded no failure and uses no rates, a take and a report cost one load each and write
/// nothing, so threads don't slow each other down. The word beside the lock only says that a take would succeed and
/// that only the report of a failure would change anything.
// It has a cache line of its own: writes to a neighbour would otherwise make every load a miss.
#[derive(Debug)]
#[repr(align(64))]
pub struct SharedBreaker<L> {
    clean_generation: AtomicU64,
    lock: L,
}

impl<L: ExclusiveAccess<Breaker>> SharedBreaker<L> {
    /// Shares the breaker behind this lock.
    pub fn new(lock: L) -> Self {
        let shared = Self { clean_generation: AtomicU64::new(NOT_CLEAN), lock };
        shared.with(|_| ());
        shared
    }

    /// [`Breaker::peek`].
    #[inline]
    pub fn peek(&self, now: Time) -> Result<(), BreakerRefusal> {
        match self.clean_generation() {
            Some(_) => Ok(()),
            None => self.with(|breaker| breaker.peek(now)),
        }
    }

    /// [`Breaker::take`].
    #[inline]
    pub fn take(&self, now: Time) -> Result<BreakerPermit, BreakerRefusal> {
        match self.clean_generation() {
            Some(generation) => Ok(BreakerPermit { generation, probe: 0 }),
            None => self.with(|breaker| breaker.take(now)),
        }
    }

    /// [`Breaker::report`].
    #[inline]
    pub fn report(&self, permit: BreakerPermit, class: Class, elapsed: Span, now: Time, rng: &mut impl Rng) {
        if class.is_failure() || self.clean_generation().is_none() {
            self.with(|breaker| breaker.report(permit, class, elapsed, now, rng));
        }
    }

    /// [`Breaker::give_back`].
    #[inline]
    pub fn give_back(&self, permit: BreakerPermit) {
        if self.clean_generation().is_none() {
            self.with(|breaker| breaker.give_back(permit));
        }
    }

    /// Runs `work` with the breaker itself, for example to read its state or to reset it.
    pub fn with<R>(&self, work: impl FnOnce(&mut Breaker) -> R) -> R {
        self.lock.with(|breaker| {
            let done = work(breaker);
            self.clean_generation.store(breaker.clean_generation().unwrap_or(NOT_CLEAN), Ordering::Relaxed);
            done
        })
    }

    /// The value of [`Breaker::clean_generation`] at the last use of the lock. This word is the only shared data, so a
    /// relaxed load is enough: a thread that knows of a change sees the new word; one that doesn't counts as earlier.
    #[inline]
    fn clean_generation(&self) -> Option<u64> {
        let word = self.clean_generation.load(Ordering::Relaxed);
        (word != NOT_CLEAN).then_some(word)
    }
}
