//! Responsive back-off: a wait between calls that grows when one fails and shrinks again when calls succeed.
//!
//! Other back-offs count the failures of one call and forget them with it. A pacer outlives calls: batch workers ask it
//! after each how long to wait before the next, and so settle at the pace that a throttled service bears. It counts
//! nanoseconds, because many workers of a fast service wait for less than a microsecond each.

mod rules;
mod shared;

use core::fmt;
use core::time::Duration;

use rand_core::Rng;

use rules::PacerRules;
pub use rules::PacerState;
pub use shared::{PaceStep, SharedPacerRules};

/// The longest wait there is: 2^63 − 1 nanoseconds, 292 years.
pub const MAX_INTERVAL: Duration = Duration::from_nanos(i64::MAX as u64);
/// The most that a step up from the longest wait of a [`SharedPacerRules`] may come to before it is cut to that wait: 2^51
/// nanoseconds, 26 days, of which stores can calculate jitter in numbers that count exactly to 2^53.
pub const MAX_SHARED_STEP: Duration = Duration::from_nanos(1 << 51);

/// How faithfully a pacer follows its random numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PacerMode {
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
pub enum PacerGrowth {
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

impl Default for PacerGrowth {
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
    pub growth: PacerGrowth,
    /// How much longer or shorter than calculated a wait may be, as a share of it in thousandths, up to 1000. Default
    /// 300.
    pub randomization: u16,
    /// The most that a wait may be longer or shorter than calculated. Default 2 min.
    pub max_randomization: Duration,
    /// How many successes make a down step. Default 10.
    pub successes: u32,
    /// How faithfully it follows its random numbers. Default [`PacerMode::Steady`].
    pub mode: PacerMode,
}

impl Default for PacerSpec {
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(500),
            max: Duration::from_secs(900),
            growth: PacerGrowth::default(),
            randomization: 300,
            max_randomization: Duration::from_secs(120),
            successes: 10,
            mode: PacerMode::default(),
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
    InvalidMax {
        /// What was asked.
        found: Duration,
    },
    /// A failure must lengthen the wait.
    InvalidUp {
        /// What was asked, in thousandths.
        found: u32,
    },
    /// A down step must shorten the wait, and leave some of it.
    InvalidDown {
        /// What was asked, in thousandths.
        found: u16,
    },
    /// A wait that is randomized by more than all of it.
    InvalidRandomization {
        /// What was asked, in thousandths.
        found: u16,
    },
    /// A pacer that is shared can't step beyond what every store counts exactly ([`MAX_SHARED_STEP`]).
    SharedStepTooLarge {
        /// What a failure at the longest wait calculates.
        found: Duration,
    },
}

impl fmt::Display for PacerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero { setting } => write!(f, "{setting} must not be 0"),
            Self::InvalidMax { found } => {
                write!(f, "the longest wait lies between the initial one and 292 years, so it can't be {found:?}")
            }
            Self::InvalidUp { found } => write!(f, "a failure multiplies by more than 1000 thousandths, not {found}"),
            Self::InvalidDown { found } => write!(f, "a down step multiplies by 1 to 999 thousandths, not {found}"),
            Self::InvalidRandomization { found } => write!(f, "a share is up to 1000 thousandths, not {found}"),
            Self::SharedStepTooLarge { found } => write!(
                f,
                "a failure at the longest wait would make {found:?} of it before it is cut, and stores that are shared \
                 count up to {MAX_SHARED_STEP:?}: a shorter longest wait or a smaller factor is needed"
            ),
        }
    }
}

impl core::error::Error for PacerError {}

/// What a pacer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacerMetrics {
    /// Failures and successes that it was told of.
    pub calls: u64,
    /// Steps up: one a failure.
    pub steps_up: u64,
    /// Steps down.
    pub steps_down: u64,
    /// Waits that it asked for, those included that a step down has shortened to nothing.
    pub waits: u64,
    /// How long these were together, as they were asked for.
    pub total_wait: Duration,
}

impl PacerMetrics {
    /// Counts a call that failed or succeeded: whether the success was a step down, and the wait that was asked for, if
    /// there was one.
    pub fn record(&mut self, failed: bool, stepped_down: bool, wait: Option<Duration>) {
        self.calls += 1;
        if failed {
            self.steps_up += 1;
        }
        if stepped_down {
            self.steps_down += 1;
        }
        if let Some(wait) = wait {
            self.waits += 1;
            self.total_wait = self.total_wait.saturating_add(wait);
        }
    }
}

/// One wait between calls, and what has become of it.
///
/// The first failure makes the wait exactly [`initial`](PacerSpec::initial); each further one lengthens it. While there is
/// a wait, every success waits for it too, and every [`successes`](PacerSpec::successes)-th shortens it. Successes while
/// there is none aren't counted.
#[derive(Clone, Debug)]
pub struct LocalPacer {
    rules: PacerRules,
    state: PacerState,
    metrics: PacerMetrics,
}

impl LocalPacer {
    /// A pacer that has met no failure yet.
    ///
    /// # Errors
    /// A setting that is out of its range, or a longest wait that is shorter than the initial one.
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        Ok(Self { rules: PacerRules::new(spec)?, state: PacerState::default(), metrics: PacerMetrics::default() })
    }

    /// How long calls wait now; zero at first and once enough have succeeded.
    pub fn interval(&self) -> Duration {
        self.state.wait()
    }

    /// What it has done since it was made.
    pub fn metrics(&self) -> PacerMetrics {
        self.metrics
    }

    /// A call has failed; returns how long to wait before the next.
    pub fn failed(&mut self, rng: &mut impl Rng) -> Duration {
        self.rules.failed(&mut self.state, || rng.next_u64());
        self.metrics.record(true, false, Some(self.interval()));
        self.interval()
    }

    /// A call has succeeded; returns how long to wait before the next, `None` where there is no wait.
    pub fn succeeded(&mut self, rng: &mut impl Rng) -> Option<Duration> {
        let stepped = self.rules.succeeded(&mut self.state, || rng.next_u64());
        let wait = stepped.map(|_| self.interval());
        self.metrics.record(false, stepped == Some(true), wait);
        wait
    }
}
