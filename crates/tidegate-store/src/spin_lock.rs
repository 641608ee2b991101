//! A lock for sections of tens to hundreds of nanoseconds: its waiters spin.
//!
//! Its release is a plain store. A lock that lets threads sleep needs a second atomic exchange there, to see if any
//! thread sleeps. A waiter checks the lock less and less often, because a check takes the cache line from the holder. A
//! lock that two threads want at the same time costs least when each holds it for several calls in a row. After some
//! microseconds of spinning, a waiter yields its time slice, since the holder has probably lost its own.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, Ordering};

use lock_api::{GuardSend, RawMutex};

/// The number of pauses before the second check; each is 20 to 50 ns.
const MIN_PAUSES: u32 = 8;
/// The number of pauses before the last check without a yield, after some microseconds in all.
const MAX_PAUSES: u32 = 64;

/// The lock without its data, for [`lock_api`].
#[derive(Debug)]
pub struct RawSpinLock(AtomicBool);

/// Data behind a spinning lock.
pub type SpinLock<T> = lock_api::Mutex<RawSpinLock, T>;
/// Access to the data of a [`SpinLock`], until it is dropped.
pub type SpinLockGuard<'a, T> = lock_api::MutexGuard<'a, RawSpinLock, T>;

#[expect(unsafe_code, reason = "the trait is unsafe to implement: it promises mutual exclusion")]
// SAFETY: `lock` and `try_lock` return (true) only after this thread changed the flag from false to true with Acquire
// ordering, and only `unlock`, which the holder alone calls, changes it back, with Release ordering.
unsafe impl RawMutex for RawSpinLock {
    const INIT: Self = Self(AtomicBool::new(false));
    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_slow();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.0.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }
}

impl RawSpinLock {
    #[cold]
    fn lock_slow(&self) {
        let mut pauses = MIN_PAUSES;
        loop {
            if pauses <= MAX_PAUSES {
                (0..pauses).for_each(|_| spin_loop());
                pauses *= 2;
            } else {
                std::thread::yield_now();
            }
            if !self.0.load(Ordering::Relaxed) && self.try_lock() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_is_mutually_exclusive() {
        let lock = SpinLock::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        *lock.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*lock.lock(), 200_000);
    }
}
