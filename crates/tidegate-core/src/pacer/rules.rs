//! The rules by which a pacer's wait grows and shrinks.

use core::time::Duration;

use super::{MAX_INTERVAL, PacerError, PacerGrowth, PacerMode, PacerSpec};
use crate::backoff::scale_to_range;
use crate::{PER_MILLE, Time};

/// The state of a pacer. The default is a pacer without failures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacerState {
    /// The wait in nanoseconds. 0 means none.
    pub interval: u64,
    /// The number of successes since the last step down. In steady mode, a failure resets it.
    pub successes: u32,
    /// The time of the last reported call. Only shared pacers use it; otherwise it is the epoch.
    pub updated_at: Time,
}

impl PacerState {
    /// The wait as a duration.
    pub fn wait(&self) -> Duration {
        Duration::from_nanos(self.interval)
    }
}

/// A pacer's checked settings. Random numbers are words of 64 bits. They are drawn only if they are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PacerRules {
    pub(super) mode: PacerMode,
    pub(super) growth: PacerGrowth,
    pub(super) initial: u64,
    pub(super) max: u64,
    pub(super) randomization: u64,
    pub(super) max_randomization: u64,
    pub(super) threshold: u32,
}

impl PacerRules {
    pub(super) fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        for (setting, is_zero) in [("initial", spec.initial.is_zero()), ("successes", spec.successes == 0)] {
            if is_zero {
                return Err(PacerError::Zero { setting });
            }
        }
        if !(spec.initial..=MAX_INTERVAL).contains(&spec.max) {
            return Err(PacerError::InvalidMax { found: spec.max });
        }
        if let PacerGrowth::Exponential { up, down } = spec.growth {
            if u64::from(up) <= PER_MILLE {
                return Err(PacerError::InvalidUp { found: up });
            }
            if !(1..PER_MILLE).contains(&u64::from(down)) {
                return Err(PacerError::InvalidDown { found: down });
            }
        }
        if u64::from(spec.randomization) > PER_MILLE {
            return Err(PacerError::InvalidRandomization { found: spec.randomization });
        }
        Ok(Self {
            mode: spec.mode,
            growth: spec.growth,
            initial: nanos(spec.initial),
            max: nanos(spec.max),
            randomization: u64::from(spec.randomization),
            max_randomization: nanos(spec.max_randomization),
            threshold: spec.successes,
        })
    }

    pub(super) fn record_failure(&self, state: &mut PacerState, random_word: impl FnOnce() -> u64) {
        state.interval = match (state.interval, self.mode) {
            (0, _) => self.initial,
            (before, PacerMode::Classic) => {
                self.add_jitter(self.step_up(before), u64::MAX, random_word).clamp(self.initial, self.max)
            }
            (before, PacerMode::Steady) => {
                let value = self.step_up(before).min(self.max_before_jitter());
                if value > before {
                    self.add_jitter(value, value - before - 1, random_word).min(self.max)
                } else {
                    before
                }
            }
        };
        if self.mode == PacerMode::Steady {
            state.successes = 0;
        }
    }

    /// Records a successful call. Returns true if it was a step down, and `None` if there is no wait.
    pub(super) fn record_success(&self, state: &mut PacerState, random_word: impl FnOnce() -> u64) -> Option<bool> {
        if state.interval == 0 {
            return None;
        }
        state.successes = state.successes.saturating_add(1);
        let is_step = state.successes >= self.threshold;
        if is_step {
            let value = self.step_down(state.interval);
            let max_jitter = if self.mode == PacerMode::Steady { state.interval - value - 1 } else { u64::MAX };
            let lower = self.add_jitter(value, max_jitter, random_word).min(self.max);
            state.successes = 0;
            state.interval = if lower < self.initial { 0 } else { lower };
        }
        Some(is_step)
    }

    /// Returns a longer wait than `interval`, not cut to the longest one. `interval` must be at most the longest.
    pub(super) fn step_up(&self, interval: u64) -> u64 {
        match self.growth {
            // Otherwise rounding could leave a wait of a few nanoseconds unchanged.
            PacerGrowth::Exponential { up, .. } => scale_per_mille(interval, u64::from(up)).max(interval + 1),
            PacerGrowth::Linear => interval.saturating_add(self.initial),
        }
    }

    fn step_down(&self, interval: u64) -> u64 {
        match self.growth {
            PacerGrowth::Exponential { down, .. } => scale_per_mille(interval, u64::from(down)).min(interval - 1),
            PacerGrowth::Linear => interval.saturating_sub(self.initial),
        }
    }

    /// The longest wait that leaves room for jitter.
    pub(super) fn max_before_jitter(&self) -> u64 {
        let jitter_share =
            u128::from(self.max) * u128::from(self.randomization) / u128::from(PER_MILLE + self.randomization);
        self.max - self.max_randomization.min(jitter_share as u64)
    }

    /// Returns a wait at most `max_jitter` from `value`. In steady mode, this keeps jitter from undoing the step.
    fn add_jitter(&self, value: u64, max_jitter: u64, random_word: impl FnOnce() -> u64) -> u64 {
        let jitter = scale_per_mille(value, self.randomization).min(self.max_randomization).min(max_jitter);
        if jitter == 0 {
            value
        } else {
            scale_to_range(value.saturating_sub(jitter), value.saturating_add(jitter), random_word())
        }
    }
}

/// `share` thousandths of `nanos`, rounded to the nearest.
fn scale_per_mille(nanos: u64, share: u64) -> u64 {
    let scaled = (u128::from(nanos) * u128::from(share) + u128::from(PER_MILLE) / 2) / u128::from(PER_MILLE);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
