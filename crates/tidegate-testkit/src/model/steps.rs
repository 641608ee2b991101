//! How long those who share a pace wait, from the list of all that was ever told of their calls.

use std::time::Duration;

use tidegate_core::pacer::{Growth, Mode};
use tidegate_core::{PacerSpec, SharedPacer, Span, Time};

use super::Look;

/// For how long a pace that nobody tells of calls is remembered, beyond its longest wait.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// All that was told, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Steps(Vec<(Time, Event)>);

#[derive(Clone, Copy, Debug)]
enum Event {
    Call { failed: bool, draw: u32 },
    AtLeast(u64),
}

/// Where a pace stands after some of it.
#[derive(Clone, Copy, Default)]
struct Standing {
    interval: u128,
    successes: u32,
    told_at: Time,
}

impl Steps {
    /// What somebody meets who looks.
    pub(super) fn look(&self, pacer: &SharedPacer, now: Time) -> Look {
        let (interval, max) = (self.interval(pacer, now), longest(pacer));
        Look { fits: true, used: interval, remaining: max - interval, retry_at: now, reset_at: now }
    }

    /// A call that failed or succeeded: the wait before, the wait after, and the successes that are left until it shrinks.
    pub(super) fn call(&mut self, pacer: &SharedPacer, failed: bool, draw: u32, now: Time) -> (u64, u64, u64) {
        let before = self.interval(pacer, now);
        self.0.push((now, Event::Call { failed, draw }));
        let after = self.standing(pacer, now);
        let left = if after.interval == 0 { 0 } else { u64::from(pacer.spec().successes - after.successes) };
        (before, after.interval as u64, left)
    }

    pub(super) fn at_least(&mut self, interval: u64, now: Time) {
        self.0.push((now, Event::AtLeast(interval)));
    }

    fn interval(&self, pacer: &SharedPacer, now: Time) -> u64 {
        self.standing(pacer, now).interval as u64
    }

    fn standing(&self, pacer: &SharedPacer, now: Time) -> Standing {
        let spec = pacer.spec();
        let mut standing = Standing::default();
        for (at, event) in &self.0 {
            standing = standing.at(&spec, *at).after(&spec, *event);
            standing.told_at = *at;
        }
        standing.at(&spec, now)
    }
}

impl Standing {
    fn at(self, spec: &PacerSpec, now: Time) -> Self {
        let forgotten = self.told_at + Span::from_duration(spec.max) + Span::from_duration(REMEMBERED);
        if self.interval == 0 || now >= forgotten { Self::default() } else { self }
    }

    fn after(self, spec: &PacerSpec, event: Event) -> Self {
        let (initial, max) = (spec.initial.as_nanos(), spec.max.as_nanos());
        let failures_count = u32::from(spec.mode == Mode::Classic);
        match event {
            Event::AtLeast(interval) if u128::from(interval) <= self.interval => self,
            Event::AtLeast(interval) => Self { interval: u128::from(interval).max(initial).min(max), ..self },
            Event::Call { failed: true, .. } if self.interval == 0 => {
                Self { interval: initial, successes: self.successes * failures_count, ..self }
            }
            Event::Call { failed: true, draw } => {
                let up = match spec.growth {
                    Growth::Exponential { up, .. } => rounded(self.interval * u128::from(up)).max(self.interval + 1),
                    Growth::Linear => self.interval + initial,
                };
                let interval = match spec.mode {
                    Mode::Classic => near(spec, up, up, draw).max(initial).min(max),
                    Mode::Steady => {
                        let share = u128::from(spec.randomization);
                        let reach = (max * share / (1_000 + share)).min(spec.max_randomization.as_nanos());
                        let goal = up.min(max - reach);
                        if goal <= self.interval {
                            self.interval
                        } else {
                            near(spec, goal, goal - self.interval - 1, draw).min(max)
                        }
                    }
                };
                Self { interval, successes: self.successes * failures_count, ..self }
            }
            Event::Call { failed: false, .. } if self.interval == 0 => self,
            Event::Call { failed: false, .. } if self.successes + 1 < spec.successes => {
                Self { successes: self.successes + 1, ..self }
            }
            Event::Call { failed: false, draw } => {
                let goal = match spec.growth {
                    Growth::Exponential { down, .. } => {
                        rounded(self.interval * u128::from(down)).min(self.interval - 1)
                    }
                    Growth::Linear => self.interval.max(initial) - initial,
                };
                let most = if spec.mode == Mode::Classic { goal } else { self.interval - goal - 1 };
                let lower = near(spec, goal, most, draw).min(max);
                Self { interval: if lower < initial { 0 } else { lower }, successes: 0, ..self }
            }
        }
    }
}

/// Thousandths to whole ones.
fn rounded(thousandths: u128) -> u128 {
    (2 * thousandths + 1_000) / 2_000
}

/// A wait that is up to its share, and up to `most`, longer or shorter than the goal.
fn near(spec: &PacerSpec, goal: u128, most: u128, draw: u32) -> u128 {
    let share = rounded(goal * u128::from(spec.randomization));
    let reach = share.min(spec.max_randomization.as_nanos()).min(most);
    goal - reach + u128::from(draw) * (2 * reach + 1) / (1 << 32)
}

/// The longest wait in nanoseconds.
pub(super) fn longest(pacer: &SharedPacer) -> u64 {
    pacer.spec().max.as_nanos() as u64
}
