//! The one place that reads the machine's time, and a clock that tests set by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use tidegate_core::{Clock, Span, Time};

/// The machine's time: the wall clock as it stood when this clock was made, carried on by the monotonic one.
///
/// A wall clock that is set while the program runs therefore frees nobody early and locks nobody out. It is followed
/// all the same, at a rate too slow to matter to any limit, by [`SystemClock::follow`].
#[derive(Clone, Debug)]
pub struct SystemClock(Arc<Anchor>);

#[derive(Debug)]
struct Anchor {
    monotonic: quanta::Clock,
    raw: u64,
    /// Unix time in microseconds at `raw`.
    wall: AtomicU64,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl SystemClock {
    /// How fast the wall clock is followed: half a millisecond a second, as NTP slews.
    const SLEW_DIVISOR: u64 = 2000;

    /// A clock anchored at the present.
    pub fn new() -> Self {
        let monotonic = quanta::Clock::new();
        let raw = monotonic.raw();
        Self(Arc::new(Anchor { monotonic, raw, wall: AtomicU64::new(wall_micros()) }))
    }

    /// Moves towards the wall clock by at most half a millisecond for each second of `since_last`, the time since
    /// this was last called. A long-running program calls it about once a second.
    pub fn follow(&self, since_last: Span) {
        let ours = self.now().as_micros();
        let wall = wall_micros();
        let most = since_last.as_micros() / Self::SLEW_DIVISOR;
        let by = ours.abs_diff(wall).min(most);
        if wall > ours {
            self.0.wall.fetch_add(by, Ordering::Relaxed);
        } else {
            self.0.wall.fetch_sub(by, Ordering::Relaxed);
        }
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Time {
        let anchor = &*self.0;
        let nanos = anchor.monotonic.delta_as_nanos(anchor.raw, anchor.monotonic.raw());
        Time::from_micros(anchor.wall.load(Ordering::Relaxed) + nanos / 1000)
    }
}

#[expect(clippy::disallowed_methods, reason = "this is the clock")]
fn wall_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// A clock that stands still until it is told otherwise. Clones share the time.
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl Default for ManualClock {
    /// Starts at 2026-01-01 00:00:00 UTC.
    fn default() -> Self {
        Self::at(Time::from_secs(1_767_225_600))
    }
}

impl ManualClock {
    /// A clock that stands at `time`.
    pub fn at(time: Time) -> Self {
        Self(Arc::new(AtomicU64::new(time.as_micros())))
    }

    /// Moves the clock on.
    pub fn advance(&self, by: Span) {
        self.set(self.now() + by);
    }

    /// Sets the clock, backwards too.
    pub fn set(&self, time: Time) {
        self.0.store(time.as_micros(), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Time {
        Time::from_micros(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_tells_the_wall_time_and_never_goes_back() {
        let clock = SystemClock::new();
        assert!(clock.now().as_micros().abs_diff(wall_micros()) < 1_000_000);
        let mut last = clock.now();
        for _ in 0..100_000 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
    }

    #[test]
    fn a_wall_clock_that_was_set_is_followed_slowly() {
        let clock = SystemClock::new();
        clock.0.wall.fetch_sub(3_600_000_000, Ordering::Relaxed);
        let before = clock.now();
        clock.follow(Span::from_secs(1));
        let gained = clock.now().since(before);
        assert!(gained >= Span::from_micros(500) && gained < Span::from_secs(1), "{gained}");
    }
}
