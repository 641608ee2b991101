//! A pacer whose wait lives in a store, where many tell it how their calls went.

use core::time::Duration;

use super::rules::{PacerRules, PacerState};
use super::{MAX_SHARED_STEP, PacerError, PacerSpec};
use crate::batch::Outcome;
use crate::state::LimitStatus;
use crate::time::MAX_CLOCK_LAG;
use crate::{Span, Time};

/// For how long a pace that nobody tells of calls is remembered, beyond its longest wait.
const EXTRA_RETENTION: Span = Span::from_secs(3600);

/// The rules of a pacer that many share ([`LimitKind::Pace`](crate::LimitKind::Pace)): those of [`LocalPacer`](crate::LocalPacer), for a
/// [`PacerState`] that is kept elsewhere and a random number that is drawn there too.
///
/// A pace that nobody has told of a call for an hour beyond its longest wait is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPacerRules {
    rules: PacerRules,
}

impl SharedPacerRules {
    /// The rules of this pacer.
    ///
    /// # Errors
    /// As [`LocalPacer::new`](crate::LocalPacer::new), and a step up from the longest wait that comes to more than
    /// [`MAX_SHARED_STEP`].
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        let rules = PacerRules::new(spec)?;
        let found = Duration::from_nanos(rules.raised(rules.max));
        if found > MAX_SHARED_STEP { Err(PacerError::SharedStepTooLarge { found }) } else { Ok(Self { rules }) }
    }

    /// What it was made of.
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

    /// The longest wait that a failure leads to before jitter, in nanoseconds, where the mode is steady.
    pub fn max_before_jitter(&self) -> u64 {
        self.rules.max_before_jitter()
    }

    /// How long a pace is remembered after it was told of a call.
    pub fn retention(&self) -> Span {
        Span::from_duration(Duration::from_nanos(self.rules.max)) + EXTRA_RETENTION
    }

    /// Brings the tempo to `now`: forgets one that nobody has told of a call for long, and takes in one that was come to
    /// under other settings.
    pub fn refresh(&self, tempo: &mut PacerState, now: Time) {
        if tempo.updated_at > now + MAX_CLOCK_LAG {
            tempo.updated_at = now;
        }
        if self.idle_at(tempo) <= now {
            *tempo = PacerState::default();
        } else {
            tempo.interval = tempo.interval.clamp(self.rules.initial, self.rules.max);
        }
    }

    /// What somebody meets who only looks, in a tempo that was settled for `now`: of the longest wait, in nanoseconds, as
    /// much is used as calls wait. It refuses nobody.
    pub fn status(&self, tempo: &PacerState, now: Time) -> LimitStatus {
        let (limit, used) = (self.rules.max, tempo.interval);
        LimitStatus { limit, used, remaining: limit.saturating_sub(used), retry_at: now, reset_at: now }
    }

    /// A call has failed or succeeded. All 32 bits of `draw` are random.
    pub fn record_call(&self, tempo: &mut PacerState, failed: bool, draw: u32, now: Time) -> PaceStep {
        self.refresh(tempo, now);
        let before = tempo.interval;
        let word = || u64::from(draw) << 32;
        if failed {
            self.rules.failed(tempo, word);
        } else {
            self.rules.succeeded(tempo, word);
        }
        touch(tempo, now);
        let left = if tempo.interval == 0 { 0 } else { self.rules.threshold.saturating_sub(tempo.successes) };
        PaceStep { before, after: tempo.interval, successes_left: left }
    }

    /// Whether a success was a step down.
    pub fn is_down(&self, step: PaceStep) -> bool {
        step.before > 0 && (step.after == 0 || step.successes_left == self.rules.threshold)
    }

    /// The tempo after a step that was made at `now`.
    pub fn state_after(&self, step: PaceStep, now: Time) -> PacerState {
        let mut tempo = PacerState {
            interval: step.after,
            successes: self.rules.threshold.saturating_sub(step.successes_left),
            updated_at: now,
        };
        touch(&mut tempo, now);
        tempo
    }

    /// An interval, in nanoseconds, that was come to elsewhere: calls wait for that long at the least.
    pub fn raise_to(&self, tempo: &mut PacerState, interval: u64, now: Time) {
        self.refresh(tempo, now);
        if interval > tempo.interval {
            tempo.interval = interval.clamp(self.rules.initial, self.rules.max);
        }
        touch(tempo, now);
    }

    /// From when on nothing of it is remembered.
    pub fn idle_at(&self, tempo: &PacerState) -> Time {
        if tempo.interval == 0 { Time::ZERO } else { tempo.updated_at + self.retention() }
    }
}

/// Nothing needs to be remembered where there is no wait.
fn touch(tempo: &mut PacerState, now: Time) {
    if tempo.interval == 0 {
        *tempo = PacerState::default();
    } else {
        tempo.updated_at = tempo.updated_at.max(now);
    }
}

/// What telling a pace of a call has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaceStep {
    /// The wait before, in nanoseconds; 0 is none.
    pub before: u64,
    /// The wait now.
    pub after: u64,
    /// How many successes are left until the next step down; 0 where there is no wait.
    pub successes_left: u32,
}

impl PaceStep {
    /// What an operation's outcome says: `limit` is the wait before, `used` the wait now, and `remaining` what is left.
    pub fn from_outcome(outcome: &Outcome) -> Self {
        let left = u32::try_from(outcome.remaining).unwrap_or(u32::MAX);
        Self { before: outcome.limit, after: outcome.used, successes_left: left }
    }

    pub(crate) fn write_to(self, outcome: &mut Outcome) {
        (outcome.limit, outcome.used, outcome.remaining) = (self.before, self.after, u64::from(self.successes_left));
    }
}
