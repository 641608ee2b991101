//! Responsive backoff: a wait between calls that grows when a call fails and shrinks again when calls succeed.
//!
//! Other backoffs count the failures of one call. A pacer outlives calls: batch workers ask it after each call for the
//! wait before the next one, and so reach the pace that a throttled service accepts. It counts nanoseconds, because
//! each of many workers of a fast service may wait less than a microsecond.

mod rules;
mod shared;

use core::time::Duration;

use rand_core::Rng;
use thiserror::Error;

use rules::PacerRules;
pub use rules::PacerState;
pub use shared::{PaceStep, SharedPacerRules};

/// The largest possible wait: 2^63 − 1 nanoseconds, 292 years.
pub const MAX_INTERVAL: Duration = Duration::from_nanos(i64::MAX as u64);
/// The largest step up of a [`SharedPacerRules`] before it is cut to the longest wait: 2^51 nanoseconds, 26 days. Up to
/// this value, stores can calculate jitter with numbers that are exact up to 2^53.
pub const MAX_SHARED_STEP: Duration = Duration::from_nanos(1 << 51);

/// The effect of random numbers on steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PacerMode {
    /// Jitter never undoes a step: each failure lengthens the wait and each step down shortens it. Before jitter, waits
    /// stay so far below the longest one that jitter still spreads them; a failure there changes nothing. A failure
    /// resets the count of successes.
    #[default]
    Steady,
    /// Jitter isn't restricted by the step: the wait may be longer after a success and shorter after a failure, but is
    /// cut to the initial and the longest wait. A failure doesn't change the count of successes.
    Classic,
}

/// The factor or amount by which waits grow and shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacerGrowth {
    /// Each step multiplies.
    Exponential {
        /// The factor of a failure, in thousandths, above 1000. Default 1500.
        up: u32,
        /// The factor of a step down, in thousandths, 1 to 999. Default 900.
        down: u16,
    },
    /// A failure adds the initial wait and a step down subtracts it: 1 s, 2 s, 3 s …
    Linear,
}

impl Default for PacerGrowth {
    fn default() -> Self {
        Self::Exponential { up: 1_500, down: 900 }
    }
}

/// The settings of a pacer, as written by the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacerSpec {
    /// The wait after the first failure, and the shortest wait: a step down below it ends the wait. Default 500 ms.
    pub initial: Duration,
    /// The longest wait, up to [`MAX_INTERVAL`]. Default 15 min.
    pub max: Duration,
    /// The growth of waits. Default ×1.5 and ×0.9.
    pub growth: PacerGrowth,
    /// The largest deviation by jitter from the calculated wait, in thousandths of it, up to 1000. Default 300.
    pub randomization: u16,
    /// The largest deviation by jitter from the calculated wait. Default 2 min.
    pub max_randomization: Duration,
    /// The number of successes for a step down, at least 1. Default 10.
    pub successes: u32,
    /// The effect of random numbers on steps. Default [`PacerMode::Steady`].
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

/// The reason why a pacer can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PacerError {
    /// A setting is 0 but must not be.
    #[error("{setting} must not be 0")]
    Zero {
        /// The name of the setting.
        setting: &'static str,
    },
    /// The longest wait is shorter than the initial one, or longer than [`MAX_INTERVAL`].
    #[error("the longest wait lies between the initial one and 292 years, so it can't be {found:?}")]
    InvalidMax {
        /// The requested longest wait.
        found: Duration,
    },
    /// The factor of a failure doesn't lengthen the wait.
    #[error("a failure multiplies by more than 1000 thousandths, not {found}")]
    InvalidUp {
        /// The requested factor, in thousandths.
        found: u32,
    },
    /// The factor of a step down doesn't shorten the wait, or is 0.
    #[error("a down step multiplies by 1 to 999 thousandths, not {found}")]
    InvalidDown {
        /// The requested factor, in thousandths.
        found: u16,
    },
    /// The jitter is more than the whole wait.
    #[error("a share is up to 1000 thousandths, not {found}")]
    InvalidRandomization {
        /// The requested share, in thousandths.
        found: u16,
    },
    /// A step of a shared pacer is larger than every store can count exactly ([`MAX_SHARED_STEP`]).
    #[error(
        "a failure at the longest wait would make {found:?} of it before it is cut, and stores that are shared count \
         up to {MAX_SHARED_STEP:?}: a shorter longest wait or a smaller factor is needed"
    )]
    SharedStepTooLarge {
        /// The calculated wait after a failure at the longest wait.
        found: Duration,
    },
}

/// The counters of a pacer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacerMetrics {
    /// The number of reported failures and successes.
    pub calls: u64,
    /// The number of steps up: one per failure.
    pub steps_up: u64,
    /// The number of steps down.
    pub steps_down: u64,
    /// The number of waits that it asked for, including those that a step down has shortened to zero.
    pub waits: u64,
    /// The sum of these waits, as they were asked for.
    pub total_wait: Duration,
}

impl PacerMetrics {
    /// Counts a call, a step down after its success, and the wait that was asked for after it.
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

/// One wait between calls, with its counters.
///
/// The first failure sets the wait to exactly [`initial`](PacerSpec::initial), and each further one lengthens it. While
/// there is a wait, each success waits and counts too, and every [`successes`](PacerSpec::successes)-th shortens it.
#[derive(Clone, Debug)]
pub struct LocalPacer {
    rules: PacerRules,
    state: PacerState,
    metrics: PacerMetrics,
}

impl LocalPacer {
    /// Creates a pacer without a wait.
    ///
    /// # Errors
    /// A setting is outside its range, or the longest wait is shorter than the initial one.
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        Ok(Self { rules: PacerRules::new(spec)?, state: PacerState::default(), metrics: PacerMetrics::default() })
    }

    /// The current wait. Zero at first, and again after enough successes.
    pub fn interval(&self) -> Duration {
        self.state.wait()
    }

    /// The counters since the pacer was made.
    pub fn metrics(&self) -> PacerMetrics {
        self.metrics
    }

    /// Records a failed call. Returns the wait before the next one.
    pub fn failed(&mut self, rng: &mut impl Rng) -> Duration {
        self.rules.record_failure(&mut self.state, || rng.next_u64());
        self.metrics.record(true, false, Some(self.interval()));
        self.interval()
    }

    /// Records a successful call. Returns the wait before the next one, or `None` if there is no wait.
    pub fn succeeded(&mut self, rng: &mut impl Rng) -> Option<Duration> {
        let is_step_down = self.rules.record_success(&mut self.state, || rng.next_u64());
        let wait = is_step_down.map(|_| self.interval());
        self.metrics.record(false, is_step_down == Some(true), wait);
        wait
    }
}
