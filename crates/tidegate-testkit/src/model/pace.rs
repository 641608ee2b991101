//! The wait of callers that share a pace, computed from the list of all reported calls.

use std::time::Duration;

use tidegate_core::pacer::{PacerGrowth, PacerMode};
use tidegate_core::{PacerSpec, SharedPacerRules, Span, Time};

use super::ModelStatus;

/// The time after the last report for which a pace is kept, beyond its longest wait.
const RETENTION: Duration = Duration::from_secs(3600);

/// All reports in order.
#[derive(Clone, Debug, Default)]
pub(super) struct PaceHistory(Vec<(Time, PaceEvent)>);

#[derive(Clone, Copy, Debug)]
enum PaceEvent {
    Call { failed: bool, draw: u32 },
    RaiseTo(u64),
}

/// The state of a pace after some of its events.
#[derive(Clone, Copy, Default)]
struct PaceModelState {
    interval: u128,
    successes: u32,
    last_event_at: Time,
}

impl PaceHistory {
    /// Returns the status of a look at the pace.
    pub(super) fn status(&self, pacer: &SharedPacerRules, now: Time) -> ModelStatus {
        let (interval, max) = (self.interval(pacer, now), max_interval_nanos(pacer));
        ModelStatus { fits: true, used: interval, remaining: max - interval, retry_at: now, reset_at: now }
    }

    /// Records a call that failed or succeeded. Returns the wait before, the wait after, and the number of successes
    /// left until it shrinks.
    pub(super) fn record_call(
        &mut self,
        pacer: &SharedPacerRules,
        failed: bool,
        draw: u32,
        now: Time,
    ) -> (u64, u64, u64) {
        let before = self.interval(pacer, now);
        self.0.push((now, PaceEvent::Call { failed, draw }));
        let after = self.state_at(pacer, now);
        let left = if after.interval == 0 { 0 } else { u64::from(pacer.spec().successes - after.successes) };
        (before, after.interval as u64, left)
    }

    pub(super) fn raise_to(&mut self, interval: u64, now: Time) {
        self.0.push((now, PaceEvent::RaiseTo(interval)));
    }

    fn interval(&self, pacer: &SharedPacerRules, now: Time) -> u64 {
        self.state_at(pacer, now).interval as u64
    }

    fn state_at(&self, pacer: &SharedPacerRules, now: Time) -> PaceModelState {
        let spec = pacer.spec();
        let mut standing = PaceModelState::default();
        for (at, event) in &self.0 {
            standing = standing.forget_if_expired(&spec, *at).after_event(&spec, *event);
            standing.last_event_at = *at;
        }
        standing.forget_if_expired(&spec, now)
    }
}

impl PaceModelState {
    fn forget_if_expired(self, spec: &PacerSpec, now: Time) -> Self {
        let forgotten = self.last_event_at + Span::from_duration(spec.max) + Span::from_duration(RETENTION);
        if self.interval == 0 || now >= forgotten { Self::default() } else { self }
    }

    fn after_event(self, spec: &PacerSpec, event: PaceEvent) -> Self {
        let (initial, max) = (spec.initial.as_nanos(), spec.max.as_nanos());
        let failures_count = u32::from(spec.mode == PacerMode::Classic);
        match event {
            PaceEvent::RaiseTo(interval) if u128::from(interval) <= self.interval => self,
            PaceEvent::RaiseTo(interval) => Self { interval: u128::from(interval).max(initial).min(max), ..self },
            PaceEvent::Call { failed: true, .. } if self.interval == 0 => {
                Self { interval: initial, successes: self.successes * failures_count, ..self }
            }
            PaceEvent::Call { failed: true, draw } => {
                let up = match spec.growth {
                    PacerGrowth::Exponential { up, .. } => {
                        divide_by_thousand(self.interval * u128::from(up)).max(self.interval + 1)
                    }
                    PacerGrowth::Linear => self.interval + initial,
                };
                let interval = match spec.mode {
                    PacerMode::Classic => jittered(spec, up, up, draw).max(initial).min(max),
                    PacerMode::Steady => {
                        let share = u128::from(spec.randomization);
                        let reach = (max * share / (1_000 + share)).min(spec.max_randomization.as_nanos());
                        let goal = up.min(max - reach);
                        if goal <= self.interval {
                            self.interval
                        } else {
                            jittered(spec, goal, goal - self.interval - 1, draw).min(max)
                        }
                    }
                };
                Self { interval, successes: self.successes * failures_count, ..self }
            }
            PaceEvent::Call { failed: false, .. } if self.interval == 0 => self,
            PaceEvent::Call { failed: false, .. } if self.successes + 1 < spec.successes => {
                Self { successes: self.successes + 1, ..self }
            }
            PaceEvent::Call { failed: false, draw } => {
                let goal = match spec.growth {
                    PacerGrowth::Exponential { down, .. } => {
                        divide_by_thousand(self.interval * u128::from(down)).min(self.interval - 1)
                    }
                    PacerGrowth::Linear => self.interval.max(initial) - initial,
                };
                let most = if spec.mode == PacerMode::Classic { goal } else { self.interval - goal - 1 };
                let lower = jittered(spec, goal, most, draw).min(max);
                Self { interval: if lower < initial { 0 } else { lower }, successes: 0, ..self }
            }
        }
    }
}

/// Divides thousandths by a thousand, rounded to the nearest.
fn divide_by_thousand(thousandths: u128) -> u128 {
    (2 * thousandths + 1_000) / 2_000
}

/// Returns a wait that is longer or shorter than the goal by up to its random share, and by at most `most`.
fn jittered(spec: &PacerSpec, goal: u128, most: u128, draw: u32) -> u128 {
    let share = divide_by_thousand(goal * u128::from(spec.randomization));
    let reach = share.min(spec.max_randomization.as_nanos()).min(most);
    goal - reach + u128::from(draw) * (2 * reach + 1) / (1 << 32)
}

/// Returns the longest wait in nanoseconds.
pub(super) fn max_interval_nanos(pacer: &SharedPacerRules) -> u64 {
    pacer.spec().max.as_nanos() as u64
}
