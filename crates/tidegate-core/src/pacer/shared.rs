//! A pacer with its wait in a store, where many callers report the results of their calls.

use core::time::Duration;

use super::rules::{PacerRules, PacerState};
use super::{MAX_SHARED_STEP, PacerError, PacerSpec};
use crate::batch::Outcome;
use crate::state::LimitStatus;
use crate::time::MAX_CLOCK_LAG;
use crate::{Span, Time};

/// The time for which a pace without reports is kept, in addition to its longest wait.
const EXTRA_RETENTION: Span = Span::from_secs(3600);

/// The rules of a shared pacer ([`LimitKind::Pace`](crate::LimitKind::Pace)). They are those of
/// [`LocalPacer`](crate::LocalPacer), but the caller keeps the [`PacerState`] and draws the random numbers.
///
/// A pace is forgotten if no call is reported for its longest wait plus one hour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPacerRules {
    rules: PacerRules,
}

impl SharedPacerRules {
    /// Creates the rules from the settings of a pacer.
    ///
    /// # Errors
    /// As [`LocalPacer::new`](crate::LocalPacer::new), or a step up from the longest wait exceeds [`MAX_SHARED_STEP`].
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        let rules = PacerRules::new(spec)?;
        let max_step = Duration::from_nanos(rules.step_up(rules.max));
        if max_step > MAX_SHARED_STEP {
            Err(PacerError::SharedStepTooLarge { found: max_step })
        } else {
            Ok(Self { rules })
        }
    }

    /// The settings of the pacer.
    pub fn spec(&self) -> PacerSpec {
        let PacerRules { mode, growth, initial, max, randomization, max_randomization, threshold } = self.rules;
        PacerSpec {
            initial: Duration::from_nanos(initial),
            max: Duration::from_nanos(max),
            growth,
            randomization: randomization as u16,
            max_randomization: Duration::from_nanos(max_randomization),
            successes: threshold,
            mode,
        }
    }

    /// The longest wait before jitter that a failure leads to in steady mode, in nanoseconds.
    pub fn max_before_jitter(&self) -> u64 {
        self.rules.max_before_jitter()
    }

    /// The time for which a pace is kept after the last reported call.
    pub fn retention(&self) -> Span {
        Span::from_duration(Duration::from_nanos(self.rules.max)) + EXTRA_RETENTION
    }

    /// Resets a state without reports for a long time, and adjusts a wait to these settings' bounds.
    pub fn refresh(&self, state: &mut PacerState, now: Time) {
        if state.updated_at > now + MAX_CLOCK_LAG {
            state.updated_at = now;
        }
        if self.idle_at(state) <= now {
            *state = PacerState::default();
        } else {
            state.interval = state.interval.clamp(self.rules.initial, self.rules.max);
        }
    }

    /// The status in a refreshed state, which refuses no call: the limit is the longest wait, the used amount the wait.
    pub fn status(&self, state: &PacerState, now: Time) -> LimitStatus {
        let (limit, used) = (self.rules.max, state.interval);
        LimitStatus { limit, used, remaining: limit.saturating_sub(used), retry_at: now, reset_at: now }
    }

    /// Records a failed or successful call. All 32 bits of `draw` are random.
    pub fn record_call(&self, state: &mut PacerState, failed: bool, draw: u32, now: Time) -> PaceStep {
        self.refresh(state, now);
        let before = state.interval;
        let random_word = || u64::from(draw) << 32;
        if failed {
            self.rules.record_failure(state, random_word);
        } else {
            self.rules.record_success(state, random_word);
        }
        touch(state, now);
        let successes_left = if state.interval == 0 { 0 } else { self.rules.threshold.saturating_sub(state.successes) };
        PaceStep { before, after: state.interval, successes_left }
    }

    /// True if a success was a step down.
    pub fn is_down(&self, step: PaceStep) -> bool {
        step.before > 0 && (step.after == 0 || step.successes_left == self.rules.threshold)
    }

    /// The state after a step that was made at `now`.
    pub fn state_after(&self, step: PaceStep, now: Time) -> PacerState {
        let mut state = PacerState {
            interval: step.after,
            successes: self.rules.threshold.saturating_sub(step.successes_left),
            updated_at: now,
        };
        touch(&mut state, now);
        state
    }

    /// Raises the wait to at least `interval`, in nanoseconds, but not above the longest wait.
    pub fn raise_to(&self, state: &mut PacerState, interval: u64, now: Time) {
        self.refresh(state, now);
        if interval > state.interval {
            state.interval = interval.clamp(self.rules.initial, self.rules.max);
        }
        touch(state, now);
    }

    /// The time from which the state is no longer needed.
    pub fn idle_at(&self, state: &PacerState) -> Time {
        if state.interval == 0 { Time::ZERO } else { state.updated_at + self.retention() }
    }
}

/// Without a wait, nothing must be kept.
fn touch(state: &mut PacerState, now: Time) {
    if state.interval == 0 {
        *state = PacerState::default();
    } else {
        state.updated_at = state.updated_at.max(now);
    }
}

/// The result of a report to a pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaceStep {
    /// The wait before, in nanoseconds. 0 means none.
    pub before: u64,
    /// The wait now, in nanoseconds.
    pub after: u64,
    /// The number of successes until the next step down. 0 if there is no wait.
    pub successes_left: u32,
}

impl PaceStep {
    /// Reads an outcome: `limit` is the wait before, `used` the wait now, and `remaining` the successes left.
    pub fn from_outcome(outcome: &Outcome) -> Self {
        let successes_left = u32::try_from(outcome.remaining).unwrap_or(u32::MAX);
        Self { before: outcome.limit, after: outcome.used, successes_left }
    }

    pub(crate) fn write_to(self, outcome: &mut Outcome) {
        (outcome.limit, outcome.used, outcome.remaining) = (self.before, self.after, u64::from(self.successes_left));
    }
}
