//! The clocks: the machine's time, which is read only here, and clocks for tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tidegate_core::{Clock, Span, Time};

/// The machine's time: the wall clock at the moment this clock was made, advanced by the monotonic clock.
///
/// A wall clock that is set while the program runs therefore changes no wait. [`SystemClock::follow`] still follows it,
/// at a rate too slow to matter to any limit.
#[derive(Clone, Debug)]
pub struct SystemClock(Arc<Anchor>);

#[derive(Debug)]
struct Anchor {
    /// The processor's counter if it can be trusted, which costs half as much to read as the kernel's clock.
    counter: quanta::Clock,
    start_ticks: u64,
    /// Microseconds in 2^64 ticks of the counter.
    scale: u64,
    /// Unix time at `start_ticks`, in microseconds.
    wall_at_start: AtomicU64,
    coarse: CoarseClock,
}

/// The relation of the kernel's coarse clock to this clock. The two drift apart by some microseconds per second, so
/// they are compared every second.
#[derive(Debug)]
struct CoarseClock {
    /// The lead of this clock over the coarse clock, in microseconds. It wraps if negative.
    offset: AtomicU64,
    /// The kernel's time of the last comparison, in microseconds.
    compared_at: AtomicU64,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl SystemClock {
    /// The divisor of the rate at which the wall clock is followed: half a millisecond per second, as NTP slews.
    const SLEW_DIVISOR: u64 = 2000;
    /// The largest lag of the kernel's coarse clock: a tick is 1 to 10 ms, and it can be late in a virtual machine.
    const COARSE_LAG: Span = Span::from_millis(50);
    /// The time between two comparisons with the coarse clock, in microseconds.
    const COMPARE_INTERVAL: u64 = 1_000_000;
    /// The largest drift between two comparisons, including the error of the comparison itself.
    const COARSE_DRIFT: Span = Span::from_millis(2);
    /// The longest time of a usable comparison, in microseconds. A longer one was interrupted and is discarded.
    const MAX_COMPARE_TIME: u64 = 200;
    /// The number of readings of the wall clock for the anchor. The reading with the shortest interruption counts.
    const ANCHOR_TRIES: usize = 8;

    /// A clock anchored at the present.
    pub fn new() -> Self {
        Self::anchored(quanta::Clock::new, wall_micros)
    }

    /// A clock that reads `time` now and advances with the machine's time. It is meant for a wall clock known to be
    /// wrong.
    pub fn at(time: Time) -> Self {
        Self::anchored(quanta::Clock::new, || time.as_micros())
    }

    /// A clock that counts with the given counter. Calibration may be slow, so the wall clock is read after it.
    fn anchored(calibrate: impl FnOnce() -> quanta::Clock, wall: impl Fn() -> u64) -> Self {
        let counter = calibrate();
        let scale = scale(&counter);
        let reading = |_| {
            let (before, wall, after) = (counter.raw(), wall(), counter.raw());
            let took = after.saturating_sub(before);
            (took, before + took / 2, wall)
        };
        let (_, start, wall) = (1..Self::ANCHOR_TRIES).map(reading).fold(reading(0), Ord::min);
        let coarse = CoarseClock { offset: AtomicU64::new(0), compared_at: AtomicU64::new(0) };
        Self(Arc::new(Anchor { counter, start_ticks: start, scale, wall_at_start: AtomicU64::new(wall), coarse }))
    }

    /// Moves towards the wall clock by at most half a millisecond for each second of `since_last`, the time since the
    /// last call of this method. A long-running program calls it about once a second.
    pub fn follow(&self, since_last: Span) {
        let drift = self.drift();
        let most = since_last.as_micros() / Self::SLEW_DIVISOR;
        let by = drift.unsigned_abs().min(most);
        if drift > 0 {
            self.0.wall_at_start.fetch_add(by, Ordering::Relaxed);
        } else {
            self.0.wall_at_start.fetch_sub(by, Ordering::Relaxed);
        }
    }

    /// The lead of the wall clock over this one, in microseconds. Negative if the wall clock is behind. More than some
    /// milliseconds mean that the wall clock was set after this clock was made, or that the machine slept.
    pub fn drift(&self) -> i64 {
        wall_micros().cast_signed().wrapping_sub(self.now().as_micros().cast_signed())
    }

    /// Compares the kernel's clock with this one. Returns false if the comparison was interrupted.
    #[cold]
    fn compare_coarse(&self) -> bool {
        let before = clock_micros(ClockId::Monotonic);
        let ours = self.now().as_micros();
        let after = clock_micros(ClockId::Monotonic);
        let usable = after.wrapping_sub(before) <= Self::MAX_COMPARE_TIME;
        if usable {
            self.0.coarse.offset.store(ours.wrapping_sub(after), Ordering::Relaxed);
            self.0.coarse.compared_at.store(after, Ordering::Release);
        }
        usable
    }
}

impl Clock for SystemClock {
    fn is_system(&self) -> bool {
        true
    }

    #[inline]
    fn now(&self) -> Time {
        let anchor = &*self.0;
        let ticks = anchor.counter.raw().saturating_sub(anchor.start_ticks);
        let micros = ((u128::from(ticks) * u128::from(anchor.scale)) >> 64) as u64;
        Time::from_micros(anchor.wall_at_start.load(Ordering::Relaxed) + micros)
    }

    /// On Linux, reads the kernel's coarse clock. It costs a quarter of the exact one and lags behind by up to a tick.
    #[cfg(target_os = "linux")]
    #[inline]
    fn now_bounds(&self) -> (Time, Time) {
        let coarse = &self.0.coarse;
        let kernel = clock_micros(ClockId::MonotonicCoarse);
        // The coarse clock can be behind `compared_at` at first. Saturation avoids another comparison in that case.
        let age = kernel.saturating_sub(coarse.compared_at.load(Ordering::Acquire));
        if age > Self::COMPARE_INTERVAL && !self.compare_coarse() {
            let now = self.now();
            return (now, now);
        }
        let ours = Time::from_micros(kernel.wrapping_add(coarse.offset.load(Ordering::Relaxed)));
        (ours - Self::COARSE_DRIFT, ours + Self::COARSE_LAG)
    }
}

/// Microseconds in 2^64 ticks, from the nanoseconds in 2^50 ticks. That is some days, so rounding is negligible.
fn scale(counter: &quanta::Clock) -> u64 {
    const TICKS: u32 = 50;
    let nanos = u128::from(counter.delta_as_nanos(0, 1 << TICKS));
    u64::try_from((nanos << (64 - TICKS)) / 1000).unwrap_or(u64::MAX)
}

#[inline]
fn clock_micros(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}

#[expect(clippy::disallowed_methods, reason = "this is the clock")]
fn wall_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// A clock that stands still until it is set or advanced. Clones share the time.
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

    /// Advances the clock.
    pub fn advance(&self, by: Span) {
        self.set(self.now() + by);
    }

    /// Sets the clock, forwards or backwards.
    pub fn set(&self, time: Time) {
        self.0.store(time.as_micros(), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Time {
        Time::from_micros(self.0.load(Ordering::SeqCst))
    }
}

/// Tokio's time, counted from a given moment: a clock for tests of programs that wait. It stands still while tokio's
/// time is paused.
#[cfg(feature = "tokio")]
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    time: Time,
    since: tokio::time::Instant,
}

#[cfg(feature = "tokio")]
impl TokioClock {
    /// A clock that reads `time` now.
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    pub fn at(time: Time) -> Self {
        Self { time, since: tokio::time::Instant::now() }
    }
}

#[cfg(feature = "tokio")]
impl Default for TokioClock {
    /// Reads 2026-01-01 00:00:00 UTC now.
    fn default() -> Self {
        Self::at(Time::from_secs(1_767_225_600))
    }
}

#[cfg(feature = "tokio")]
impl Clock for TokioClock {
    fn now(&self) -> Time {
        self.time + Span::from_duration(self.since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_clock_follows_wall_time_and_is_monotonic() {
        let clock = SystemClock::new();
        assert!(clock.now().as_micros().abs_diff(wall_micros()) < 1_000_000);
        let mut last = clock.now();
        for _ in 0..100_000 {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
    }

    /// Holds for any calibration time of the counter.
    #[test]
    fn a_new_clock_agrees_with_the_wall_clock() {
        let calibrate = || {
            std::thread::sleep(std::time::Duration::from_millis(50));
            quanta::Clock::new()
        };
        let clock = SystemClock::anchored(calibrate, wall_micros);
        // An interrupted reading has a larger error than the clock.
        let nearest = (0..1_000).map(|_| clock.drift().unsigned_abs()).min().unwrap();
        assert!(nearest < 10_000, "{nearest} µs");
    }

    #[test]
    fn now_lies_between_its_bounds() {
        let clock = SystemClock::new();
        for _ in 0..100_000 {
            let before = clock.now();
            let (earliest, latest) = clock.now_bounds();
            let after = clock.now();
            assert!(earliest <= after && latest >= before, "{earliest:?} {before:?} {after:?} {latest:?}");
        }
    }

    #[test]
    fn the_clock_runs_at_the_kernel_clocks_rate() {
        let clock = SystemClock::new();
        let (ours, kernel) = (clock.now(), clock_micros(ClockId::Monotonic));
        std::thread::sleep(std::time::Duration::from_millis(200));
        let (ours, kernel) = (clock.now().since(ours).as_micros(), clock_micros(ClockId::Monotonic) - kernel);
        assert!(ours.abs_diff(kernel) < 20_000, "{ours} of ours, {kernel} of the kernel's");
    }

    #[test]
    fn an_adjusted_wall_clock_is_followed_gradually() {
        let hour = Span::from_secs(3600);
        let present = Time::from_micros(wall_micros());
        for (clock, drift) in
            [(SystemClock::at(present - hour), 3_600_000_000), (SystemClock::at(present + hour), -3_600_000_000_i64)]
        {
            let around = |drift: i64, expected: i64| drift.abs_diff(expected) < 1_000_000;
            assert!(around(clock.drift(), drift), "{}", clock.drift());
            let (wall, before) = (clock.0.wall_at_start.load(Ordering::Relaxed), clock.drift());
            clock.follow(Span::from_secs(1));
            let moved = clock.0.wall_at_start.load(Ordering::Relaxed).cast_signed() - wall.cast_signed();
            assert_eq!(moved, 500 * drift.signum());
            assert!(around(clock.drift(), before));
        }
        let clock = SystemClock::new();
        assert!(clock.drift().unsigned_abs() < 1_000_000, "{}", clock.drift());
    }
}
