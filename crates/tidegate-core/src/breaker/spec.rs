//! The settings of a breaker and their validation.

use alloc::vec::Vec;

use thiserror::Error;

use crate::backoff::{Backoff, Growth, Jitter};
use crate::{PER_MILLE, Span};

/// The maximum number of probes at a time.
pub const MAX_PROBES: usize = 16;
/// The maximum number of steps of a ramp.
pub const MAX_RAMP: usize = 8;

/// The share of slow calls that opens a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowCalls {
    /// A call that takes longer is slow.
    pub threshold: Span,
    /// Opens if this many of a thousand calls are slow, 1 to 1000.
    pub rate: u16,
}

/// A period in which a closing breaker admits a share of all calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RampStep {
    /// The number of admitted calls in a thousand, 1 to 1000.
    pub share: u16,
    /// The length of the period, more than 0.
    pub length: Span,
}

/// The settings of a breaker, as written by the user, with at least one of `failures`, `failure_rate`, `slow_calls`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BreakerSpec {
    /// Opens at this many failures since the last reply that proves that the provider works. Default 5. In calls, failures
    /// must also have lasted for some time while others are in flight; see [`Breaker::report_beside`](super::Breaker::report_beside).
    pub failures: Option<u32>,
    /// Opens if this many of a thousand calls in the window fail, 1 to 1000. Default none.
    pub failure_rate: Option<u16>,
    /// Opens at a share of slow calls in the window. A slow probe counts as failed. Default none.
    pub slow_calls: Option<SlowCalls>,
    /// The trailing time of both rates. It moves in tenths, so a call counts for 90 % to 100 % of it. Default 60 s.
    pub window: Span,
    /// The minimum number of calls in the window for a rate. Default 10.
    pub min_calls: u32,
    /// The length of the n-th opening since the breaker was completely closed. Default 5 min for every n. Full jitter
    /// may give almost 0; equal jitter gives at least half.
    pub open: Backoff,
    /// The maximum number of probes at a time, up to [`MAX_PROBES`]. Default 1.
    pub probes: u32,
    /// The time after which another probe may be sent beside an unanswered or dropped one, whose reply still counts.
    /// Default 5 s.
    pub probe_lease: Span,
    /// The number of successful probes that close it. Default 2.
    pub successes: u32,
    /// The steps from closing to completely closed, up to [`MAX_RAMP`]. Default none. A usual ramp is
    /// [`Breaker::DEFAULT_RAMP`](super::Breaker::DEFAULT_RAMP).
    pub ramp: Vec<RampStep>,
}

impl Default for BreakerSpec {
    fn default() -> Self {
        let open = Span::from_secs(300);
        Self {
            failures: Some(5),
            failure_rate: None,
            slow_calls: None,
            window: Span::from_secs(60),
            min_calls: 10,
            open: Backoff { growth: Growth::Constant, base: open, cap: open, jitter: Jitter::None },
            probes: 1,
            probe_lease: Span::from_secs(5),
            successes: 2,
            ramp: Vec::new(),
        }
    }
}

impl BreakerSpec {
    pub(super) fn check(&self) -> Result<(), BreakerError> {
        if self.failures.is_none() && self.failure_rate.is_none() && self.slow_calls.is_none() {
            return Err(BreakerError::NeverOpens);
        }
        let zeros = [
            ("failures", self.failures == Some(0)),
            ("slow_calls.threshold", self.slow_calls.is_some_and(|slow| slow.threshold.is_zero())),
            ("window", self.window.is_zero()),
            ("min_calls", self.min_calls == 0),
            ("open", self.open.base_wait(1).is_zero()),
            ("probes", self.probes == 0),
            ("probe_lease", self.probe_lease.is_zero()),
            ("successes", self.successes == 0),
            ("ramp.length", self.ramp.iter().any(|step| step.length.is_zero())),
        ];
        if let Some((setting, _)) = zeros.into_iter().find(|(_, zero)| *zero) {
            return Err(BreakerError::Zero { setting });
        }
        let rates = self.failure_rate.into_iter().chain(self.slow_calls.map(|slow| slow.rate));
        let mut rates_and_shares = rates.chain(self.ramp.iter().map(|step| step.share));
        if let Some(found) = rates_and_shares.find(|rate| !(1..=PER_MILLE).contains(&u64::from(*rate))) {
            return Err(BreakerError::InvalidRate { found });
        }
        if self.probes as usize > MAX_PROBES {
            return Err(BreakerError::TooManyProbes { found: self.probes });
        }
        if self.ramp.len() > MAX_RAMP {
            return Err(BreakerError::TooManySteps { found: self.ramp.len() });
        }
        Ok(())
    }

    pub(super) fn ramp_length(&self) -> Span {
        self.ramp.iter().fold(Span::ZERO, |sum, step| sum + step.length)
    }

    /// The share of calls that is admitted while `left` of the ramp remains.
    pub(super) fn ramp_share(&self, mut left: Span) -> u64 {
        for step in self.ramp.iter().rev() {
            if left <= step.length {
                return step.share.into();
            }
            left = left - step.length;
        }
        self.ramp.first().map_or(PER_MILLE, |step| step.share.into())
    }
}

/// The reason why a breaker can't be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BreakerError {
    /// None of the conditions that open it is set.
    #[error("nothing opens the breaker: set a number of failures, a failure rate or a share of slow calls")]
    NeverOpens,
    /// A setting that must not be 0.
    #[error("{setting} must not be 0")]
    Zero {
        /// Its name.
        setting: &'static str,
    },
    /// A rate or share outside 1 to 1000 thousandths.
    #[error("a rate or share is 1 to 1000 thousandths, not {found}")]
    InvalidRate {
        /// The given value.
        found: u16,
    },
    /// More probes at a time than [`MAX_PROBES`].
    #[error("{found} probes at a time; at most {MAX_PROBES}")]
    TooManyProbes {
        /// The given value.
        found: u32,
    },
    /// A ramp of more than [`MAX_RAMP`] steps.
    #[error("a ramp of {found} steps; at most {MAX_RAMP}")]
    TooManySteps {
        /// The given number of steps.
        found: usize,
    },
}
