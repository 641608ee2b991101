//! A pacer whose wait lives in a store, where many tell it how their calls went.

use core::time::Duration;

use super::rules::{Rules, Tempo};
use super::{MAX_SHARED_STEP, PacerError, PacerSpec};
use crate::batch::Outcome;
use crate::state::Look;
use crate::time::OVERTAKEN;
use crate::{Span, Time};

/// For how long a pace that nobody tells of calls is remembered, beyond its longest wait.
const REMEMBERED: Span = Span::from_secs(3600);

/// The rules of a pacer that many share ([`Kind::Pace`](crate::Kind::Pace)): those of [`Pacer`](crate::Pacer), for a
/// [`Tempo`] that is kept elsewhere and a random number that is drawn there too.
///
/// A pace that nobody has told of a call for an hour beyond its longest wait is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPacer {
    rules: Rules,
}

impl SharedPacer {
    /// The rules of this pacer.
    ///
    /// # Errors
    /// As [`Pacer::new`](crate::Pacer::new), and a step up from the longest wait that comes to more than
    /// [`MAX_SHARED_STEP`].
    pub fn new(spec: PacerSpec) -> Result<Self, PacerError> {
        let rules = Rules::new(spec)?;
        let found = Duration::from_nanos(rules.raised(rules.max));
        if found > MAX_SHARED_STEP { Err(PacerError::SharedStep { found }) } else { Ok(Self { rules }) }
    }

    /// What it was made of.
    pub fn spec(&self) -> PacerSpec {
        let Rules { mode, growth, initial, max, randomization, max_randomization, threshold } = self.rules;
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
    pub fn summit(&self) -> u64 {
        self.rules.summit()
    }

    /// How long a pace is remembered after it was told of a call.
    pub fn remembered(&self) -> Span {
        Span::from_duration(Duration::from_nanos(self.rules.max)) + REMEMBERED
    }

    /// Brings the tempo to `now`: forgets one that nobody has told of a call for long, and takes in one that was come to
    /// under other settings.
    pub fn settle(&self, tempo: &mut Tempo, now: Time) {
        if tempo.told_at > now + OVERTAKEN {
            tempo.told_at = now;
        }
        if self.idle_at(tempo) <= now {
            *tempo = Tempo::default();
        } else {
            tempo.interval = tempo.interval.clamp(self.rules.initial, self.rules.max);
        }
    }

    /// What somebody meets who only looks, in a tempo that was settled for `now`: of the longest wait, in nanoseconds, as
    /// much is used as calls wait. It refuses nobody.
    pub fn look(&self, tempo: &Tempo, now: Time) -> Look {
        let (limit, used) = (self.rules.max, tempo.interval);
        Look { limit, used, remaining: limit.saturating_sub(used), retry_at: now, reset_at: now }
    }

    /// A call has failed or succeeded. All 32 bits of `draw` are random.
    pub fn told(&self, tempo: &mut Tempo, failed: bool, draw: u32, now: Time) -> Step {
        self.settle(tempo, now);
        let before = tempo.interval;
        let word = || u64::from(draw) << 32;
        if failed {
            self.rules.failed(tempo, word);
        } else {
            self.rules.succeeded(tempo, word);
        }
        note(tempo, now);
        let left = if tempo.interval == 0 { 0 } else { self.rules.threshold.saturating_sub(tempo.successes) };
        Step { before, after: tempo.interval, left }
    }

    /// Whether a success was a step down.
    pub fn is_down(&self, step: Step) -> bool {
        step.before > 0 && (step.after == 0 || step.left == self.rules.threshold)
    }

    /// The tempo after a step that was made at `now`.
    pub fn tempo(&self, step: Step, now: Time) -> Tempo {
        let mut tempo =
            Tempo { interval: step.after, successes: self.rules.threshold.saturating_sub(step.left), told_at: now };
        note(&mut tempo, now);
        tempo
    }

    /// An interval, in nanoseconds, that was come to elsewhere: calls wait for that long at the least.
    pub fn at_least(&self, tempo: &mut Tempo, interval: u64, now: Time) {
        self.settle(tempo, now);
        if interval > tempo.interval {
            tempo.interval = interval.clamp(self.rules.initial, self.rules.max);
        }
        note(tempo, now);
    }

    /// From when on nothing of it is remembered.
    pub fn idle_at(&self, tempo: &Tempo) -> Time {
        if tempo.interval == 0 { Time::ZERO } else { tempo.told_at + self.remembered() }
    }
}

/// Nothing needs to be remembered where there is no wait.
fn note(tempo: &mut Tempo, now: Time) {
    if tempo.interval == 0 {
        *tempo = Tempo::default();
    } else {
        tempo.told_at = tempo.told_at.max(now);
    }
}

/// What telling a pace of a call has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The wait before, in nanoseconds; 0 is none.
    pub before: u64,
    /// The wait now.
    pub after: u64,
    /// How many successes are left until the next step down; 0 where there is no wait.
    pub left: u32,
}

impl Step {
    /// What an operation's outcome says: `limit` is the wait before, `used` the wait now, and `remaining` what is left.
    pub fn of(outcome: &Outcome) -> Self {
        let left = u32::try_from(outcome.remaining).unwrap_or(u32::MAX);
        Self { before: outcome.limit, after: outcome.used, left }
    }

    pub(crate) fn tell(self, outcome: &mut Outcome) {
        (outcome.limit, outcome.used, outcome.remaining) = (self.before, self.after, u64::from(self.left));
    }
}
