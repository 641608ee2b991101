//! Clocks with errors.

use tidegate_core::{Span, Time};

use crate::setup::ClockStep;

/// A node's own clock. It is right at first, then drifts and is set.
#[derive(Clone, Debug)]
pub(crate) struct NodeClock {
    started_at: Time,
    /// The share by which it runs faster than time.
    drift: f64,
    steps: Vec<ClockStep>,
}

impl NodeClock {
    pub(crate) fn new(started_at: Time, drift: f64, steps: &[ClockStep]) -> Self {
        Self { started_at, drift, steps: steps.to_vec() }
    }

    /// Returns its reading at a moment.
    pub(crate) fn reading_at(&self, now: Time) -> Time {
        if self.drift == 0.0 && self.steps.is_empty() {
            return now;
        }
        let elapsed = now.since(self.started_at);
        let drifted =
            self.started_at + Span::from_micros((elapsed.as_micros() as f64 * (1.0 + self.drift)).round() as u64);
        self.steps
            .iter()
            .filter(|step| step.at <= elapsed)
            .fold(drifted, |shown, step| if step.is_backward { shown - step.amount } else { shown + step.amount })
    }

    /// Returns the moment at which a timer fires that is set at `now` for a reading of `until`. Timers follow the
    /// clock's drift but not its steps, as the system's timers do.
    pub(crate) fn timer_fires_at(&self, until: Time, now: Time) -> Time {
        if until.is_never() {
            return until;
        }
        let wait = until.since(self.reading_at(now));
        now + Span::from_micros((wait.as_micros() as f64 / (1.0 + self.drift)).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_clock_drifts_steps_and_fires_timers() {
        let start = Time::from_secs(1_000);
        let at = |secs| start + Span::from_secs(secs);
        let step = ClockStep { at: Span::from_secs(100), amount: Span::from_secs(30), is_backward: true };
        let clock = NodeClock::new(start, 0.01, &[step]);
        assert_eq!((clock.reading_at(start), clock.reading_at(at(50))), (start, at(50) + Span::from_millis(500)));
        assert_eq!(clock.reading_at(at(100)), at(71));
        assert_eq!(clock.timer_fires_at(at(71) + Span::from_millis(1_010), at(100)), at(101));
        assert_eq!(clock.timer_fires_at(at(0), at(100)), at(100), "a reading of the past fires at once");
    }
}
