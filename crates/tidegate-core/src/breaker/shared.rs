//! A breaker for many threads, whose lock nobody takes while all is well.

use core::sync::atomic::{AtomicU64, Ordering};

use rand_core::Rng;

use super::{Breaker, BreakerPermit, BreakerRefusal, is_failure};
use crate::{Class, Span, Time};

/// Mutual exclusion as a driver brings it; this crate has no lock of its own.
pub trait ExclusiveAccess<T> {
    /// Does `work` while nobody else can reach the value.
    fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R;
}

/// In place of a generation: the lock must be asked.
const NOT_CLEAN: u64 = u64::MAX;

/// A [`Breaker`] for many threads.
///
/// While it is closed, remembers no failure and takes no rates, a take and a report cost a load each and write
/// nothing, so threads don't slow one another. Judgement is the breaker's alone: beside its lock lies a word that says
/// that a take would succeed and a report of anything but a failure would change nothing.
// Alone in its cache line, or a neighbour that is written to would make every load a miss.
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
    ///
    /// # Errors
    /// Why a call would be refused.
    #[inline]
    pub fn peek(&self, now: Time) -> Result<(), BreakerRefusal> {
        match self.clean_generation() {
            Some(_) => Ok(()),
            None => self.with(|breaker| breaker.peek(now)),
        }
    }

    /// [`Breaker::take`].
    ///
    /// # Errors
    /// Why the call is refused.
    #[inline]
    pub fn take(&self, now: Time) -> Result<BreakerPermit, BreakerRefusal> {
        match self.clean_generation() {
            Some(generation) => Ok(BreakerPermit::without_probe(generation)),
            None => self.with(|breaker| breaker.take(now)),
        }
    }

    /// [`Breaker::report`].
    #[inline]
    pub fn report(&self, permit: BreakerPermit, class: Class, elapsed: Span, now: Time, rng: &mut impl Rng) {
        if is_failure(class) || self.clean_generation().is_none() {
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

    /// Does `work` with the breaker itself, as for its state or a reset.
    pub fn with<R>(&self, work: impl FnOnce(&mut Breaker) -> R) -> R {
        self.lock.with(|breaker| {
            let done = work(breaker);
            self.clean_generation.store(breaker.clean_generation().unwrap_or(NOT_CLEAN), Ordering::Relaxed);
            done
        })
    }

    /// What [`Breaker::clean_generation`] said when the lock was last held. A thread that was told of a change sees it, for the
    /// word is all there is to see; one that wasn't has come before it.
    #[inline]
    fn clean_generation(&self) -> Option<u64> {
        let word = self.clean_generation.load(Ordering::Relaxed);
        (word != NOT_CLEAN).then_some(word)
    }
}
