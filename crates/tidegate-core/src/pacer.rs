//! Responsive back-off: a wait between calls that grows when one fails and shrinks again when calls succeed.
//!
//! Other back-offs count the failures of one call and forget them with it. A pacer outlives calls: batch workers ask it
//! after each how long to wait before the next, and so settle at the pace that a throttled service bears. It counts
//! nanoseconds, because many workers of a fast service wait for less than a microsecond each.

use core::fmt;
use core::time::Duration;

use rand_core::Rng;

use crate::backoff::drawn;

/// Factors and shares are counted in thousandths.
const WHOLE: u64 = 1_000;
/// The longest wait there is: 2^63 − 1 nanoseconds, 292 years.
pub const MAX_INTERVAL: Duration = Duration::from_nanos(i64::MAX as u64);

/// How faithfully a pacer follows its random numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Jitter never undoes a step: each failure lengthens the wait and each step down shortens it. Jitter stays inside the
    /// longest wait, so that pacers that have come there still differ, and a failure there changes nothing. A failure begins
    /// the count of successes anew.
    #[default]
    Steady,
    /// Jitter is what it is: after a success the wait may be longer than before and after a failure shorter, though
    /// never outside the initial and the longest. Waits that would be longer than the longest are all that. A failure
    /// leaves the count of successes alone.
    Classic,
}

/// By how much waits grow and shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Each step multiplies.
    Exponential {
        /// What a failure multiplies the wait by, in thousandths, above 1000. Default 1500.
        up: u32,
        /// What a down step multiplies it by, in thousandths, 1 to 999. Default 900.
        down: u16,
    },
    /// A failure adds the initial wait and a down step takes it off: 1 s, 2 s, 3 s …
    Linear,
}

impl Default for Growth {
    fn default() -> Self {
        Self::Exponential { up: 1_500, down: 900 }
    }
}

/// A pacer as it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacerSpec {
    /// The wait after the first failure, and the shortest there is: a down step below it leads to none. Default 500 ms.
    pub initial: Duration,
    /// The longest wait, up to [`MAX_INTERVAL`]. Default 15 min.
    pub max: Duration,
    /// How waits grow and shrink. Default by ×1.5 and ×0.9.
    pub growth: Growth,
    /// How much longer or shorter than calculated a wait may be, as a share of it in thousandths, up to 1000. Default
    /// 300.
    pub randomization: u16,
    /// The most that a wait may be longer or shorter than calculated. Default 2 min.
    pub max_randomization: Duration,
    /// How many successes make a down step. Default 10.
    pub successes: u32,
    /// How faithfully it follows its random numbers. Default [`Mode::Steady`].
    pub mode: Mode,
}

impl Default for PacerSpec {
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(500),
            max: Duration::from_secs(900),
            growth: Growth::default(),
            randomization: 300,
            max_randomization: Duration::from_secs(120),
            successes: 10,
            mode: Mode::default(),
        }
    }
}

/// Why a pacer can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacerError {
    /// A setting that must not be 0.
    Zero {
        /// Its name.
        setting: &'static str,
    },
    /// The longest wait is shorter than the initial one, or longer than [`MAX_INTERVAL`].
    Max {
        /// What was asked.
        found: Duration,
    },
    /// A failure must lengthen the wait.
    Up {
        /// What was asked, in thousandths.
        found: u32,
    },
    /// A down step must shorten the wait, and leave some of it.
    Down {
        /// What was asked, in thousandths.
        found: u16,
    },
    /// A wait that is randomized by more than all of it.
    Randomization {
        /// What was asked, in thousandths.
        found: u16,
    },
}

impl fmt::Display for PacerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero { setting } => write!(f, "{setting} must not be 0"),
            Self::Max { found } => {
                write!(f, "the longest wait lies between the initial one and 292 years, so it can't be {found:?}")
            }
            Self::Up { found } => write!(f, "a failure multiplies by more than 1000 thousandths, not {found}"),
            Self::Down { found } => write!(f, "a down step multiplies by 1 to 999 thousandths, not {found}"),
            Self::Randomization { found } => write!(f, "a share is up to 1000 thousandths, not {found}"),
        }
    }
}

impl core::error::Error for PacerError {}

/// What a pacer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Failures and successes that it was told of.
    pub invocations: u64,
    /// Steps up: one a failure.
    pub up: u64,
    /// Steps down.
    pub down: u64,
    /// Waits that it asked for, those included that a step down has shortened to nothing.
    pub slept: u64,
    /// How long these were together, as they were asked for.
    pub total: Duration,
}

/// One wait between calls, and what has become of it.
///
/// The first failure makes the wait exactly [`initial`](PacerSpec::initial); each further one lengthens it. While there is
/// a wait, every success waits for it too, and every [`successes`](PacerSpec::successes)-th shortens it. Successes while
/// there is none aren't counted.
#[derive(Clone, Debug)]
pub struct Pacer {
    mode: Mode,
    growth: Growth,
    initial: u64,
    max: u64,
    randomization: u64,
    max_randomization: u64,
    threshold: u32,
    interval: u64,
    successes: u32,
    metrics: Metrics,
}

impl Pacer {
    /// A pacer that has met no failure yet.
    ///
    /// # Errors
    /// A setting that is out of its range, or a longest wait that is shorter than the initial one.
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        let zeros = [("initial", spec.initial.is_zero()), ("successes", spec.successes == 0)];
        if let Some((setting, _)) = zeros.into_iter().find(|(_, zero)| *zero) {
            return Err(PacerError::Zero { setting });
        }
        if !(spec.initial..=MAX_INTERVAL).contains(&spec.max) {
            return Err(PacerError::Max { found: spec.max });
        }
        if let Growth::Exponential { up, down } = spec.growth {
            if u64::from(up) <= WHOLE {
                return Err(PacerError::Up { found: up });
            }
            if !(1..WHOLE).contains(&u64::from(down)) {
                return Err(PacerError::Down { found: down });
            }
        }
        if u64::from(spec.randomization) > WHOLE {
            return Err(PacerError::Randomization { found: spec.randomization });
        }
        Ok(Self {
            mode: spec.mode,
            growth: spec.growth,
            initial: nanos(spec.initial),
            max: nanos(spec.max),
            randomization: u64::from(spec.randomization),
            max_randomization: nanos(spec.max_randomization),
            threshold: spec.successes,
            interval: 0,
            successes: 0,
            metrics: Metrics::default(),
        })
    }

    /// How long calls wait now; zero at first and once enough have succeeded.
    pub fn interval(&self) -> Duration {
        Duration::from_nanos(self.interval)
    }

    /// What it has done since it was made.
    pub fn metrics(&self) -> Metrics {
        self.metrics
    }

    /// A call has failed; returns how long to wait before the next.
    pub fn failed(&mut self, rng: &mut impl Rng) -> Duration {
        self.metrics.invocations += 1;
        self.metrics.up += 1;
        self.interval = match (self.interval, self.mode) {
            (0, _) => self.initial,
            (before, Mode::Classic) => self.jittered(self.raised(before), u64::MAX, rng).clamp(self.initial, self.max),
            (before, Mode::Steady) => {
                let value = self.raised(before).min(self.summit());
                if value > before { self.jittered(value, value - before - 1, rng).min(self.max) } else { before }
            }
        };
        if self.mode == Mode::Steady {
            self.successes = 0;
        }
        self.slept()
    }

    /// A call has succeeded; returns how long to wait before the next, `None` where there is no wait.
    pub fn succeeded(&mut self, rng: &mut impl Rng) -> Option<Duration> {
        self.metrics.invocations += 1;
        if self.interval == 0 {
            return None;
        }
        self.successes += 1;
        if self.successes >= self.threshold {
            self.successes = 0;
            self.metrics.down += 1;
            let value = self.lowered(self.interval);
            let most = if self.mode == Mode::Steady { self.interval - value - 1 } else { u64::MAX };
            let lower = self.jittered(value, most, rng).min(self.max);
            self.interval = if lower < self.initial { 0 } else { lower };
        }
        Some(self.slept())
    }

    fn slept(&mut self) -> Duration {
        self.metrics.slept += 1;
        self.metrics.total = self.metrics.total.saturating_add(self.interval());
        self.interval()
    }

    /// A longer wait than this one, which isn't longer than the longest.
    fn raised(&self, interval: u64) -> u64 {
        match self.growth {
            // Rounding must leave no step of a few nanoseconds where it began.
            Growth::Exponential { up, .. } => thousandths(interval, u64::from(up)).max(interval + 1),
            Growth::Linear => interval.saturating_add(self.initial),
        }
    }

    /// A shorter wait than this one, which isn't none.
    fn lowered(&self, interval: u64) -> u64 {
        match self.growth {
            Growth::Exponential { down, .. } => thousandths(interval, u64::from(down)).min(interval - 1),
            Growth::Linear => interval.saturating_sub(self.initial),
        }
    }

    /// The longest wait that leaves room for jitter.
    fn summit(&self) -> u64 {
        let shared = u128::from(self.max) * u128::from(self.randomization) / u128::from(WHOLE + self.randomization);
        self.max - self.max_randomization.min(shared as u64)
    }

    /// A wait near `value`, at most `most` from it. In steady mode that is as much as leaves something of the step.
    fn jittered(&self, value: u64, most: u64, rng: &mut impl Rng) -> u64 {
        let spread = thousandths(value, self.randomization).min(self.max_randomization).min(most);
        if spread == 0 { value } else { drawn(value.saturating_sub(spread), value.saturating_add(spread), rng) }
    }
}

/// So many thousandths of it, rounded to the nearest.
fn thousandths(nanos: u64, share: u64) -> u64 {
    let times = (u128::from(nanos) * u128::from(share) + u128::from(WHOLE) / 2) / u128::from(WHOLE);
    u64::try_from(times).unwrap_or(u64::MAX)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
