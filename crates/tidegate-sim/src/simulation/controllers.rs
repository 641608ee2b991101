//! The controllers of plain clients. Each decides from the results of a client's own attempts whether it may send
//! another one.

mod aimd;
mod cubic;
mod envoy;
mod failsafe;
mod gradient2;
mod oracle;
mod vegas;

use std::fmt;

use hdrhistogram::Histogram;
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::Delivery;
use tidegate_core::{Class, Span, Time};

use crate::random::SimRng;
use crate::setup::{ControllerKind, ServiceSpec};

/// A controller of one client's attempts. By default it admits all of them.
pub(super) trait Controller: fmt::Debug {
    /// Returns the number of attempts that may be in flight.
    fn limit(&mut self, _now: Time) -> u32 {
        u32::MAX
    }

    /// Returns the time from which the next attempt may be sent, if there is room in flight.
    fn next_send_at(&mut self, now: Time) -> Time {
        now
    }

    /// Counts an attempt that is sent.
    fn record_send(&mut self, _now: Time) {}

    /// Learns from the end of an attempt.
    fn record_end(&mut self, attempt: &EndedAttempt);
}

/// An attempt that has ended, as its client sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct EndedAttempt {
    pub(super) sent_at: Time,
    pub(super) ended_at: Time,
    /// The client's attempts in flight when it was sent, itself included.
    pub(super) in_flight: u32,
    /// The client's attempts in flight when it ended, itself included.
    pub(super) in_flight_at_end: u32,
    pub(super) result: AttemptResult,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AttemptResult {
    Succeeded,
    /// Refused because of a limit.
    Throttled,
    /// Answered with an error, such as that of a full queue.
    Failed,
    TimedOut,
}

impl AttemptResult {
    pub(super) fn of(report: &AttemptReport) -> Self {
        match (report.verdict.class, report.delivery) {
            (Class::Success, _) => Self::Succeeded,
            (Class::Throttled, _) => Self::Throttled,
            (_, Delivery::Unknown) => Self::TimedOut,
            _ => Self::Failed,
        }
    }
}

impl EndedAttempt {
    /// Returns its round trip in microseconds, at least one.
    fn round_trip(&self) -> f64 {
        self.ended_at.since(self.sent_at).as_micros().max(1) as f64
    }
}

/// Creates a controller. Only the oracle knows the service.
pub(super) fn new_controller<'s>(
    kind: ControllerKind,
    service: &'s ServiceSpec,
    now: Time,
    rng: SimRng,
) -> Box<dyn Controller + 's> {
    match kind {
        ControllerKind::Aimd => Box::new(aimd::Aimd::new()),
        ControllerKind::Cubic => Box::new(cubic::Cubic::new(now)),
        ControllerKind::Envoy => Box::new(envoy::Envoy::new(now, rng)),
        ControllerKind::Failsafe => Box::new(failsafe::Failsafe::new(now)),
        ControllerKind::Gradient2 => Box::new(gradient2::Gradient2::new()),
        ControllerKind::Oracle => Box::new(oracle::Oracle::new(service, now)),
        ControllerKind::Vegas => Box::new(vegas::Vegas::new(rng)),
    }
}

/// Returns the decimal logarithm, rounded down, and at least 1: the step of several controllers.
fn log10_step(limit: f64) -> f64 {
    limit.max(1.0).log10().floor().max(1.0)
}

/// The longest round trip that is distinguished.
const MAX_ROUND_TRIP: Span = Span::from_secs(3600);

/// Creates a histogram of round trips in microseconds, with two significant digits.
fn round_trip_histogram() -> Histogram<u32> {
    Histogram::new_with_max(MAX_ROUND_TRIP.as_micros(), 2).expect("invariant: these bounds make sense")
}

/// An exponential moving average that begins as the mean of its first ten values.
#[derive(Clone, Debug)]
struct MovingAverage {
    value: f64,
    /// The weight of a new value.
    factor: f64,
    count: u32,
}

impl MovingAverage {
    const WARM_UP: u32 = 10;

    /// Creates an average with the weight of a window of this length: 2 / (length + 1).
    fn over(length: u32) -> Self {
        Self { value: 0.0, factor: 2.0 / (f64::from(length) + 1.0), count: 0 }
    }

    fn add(&mut self, value: f64) -> f64 {
        let factor = if self.count < Self::WARM_UP {
            self.count += 1;
            1.0 / f64::from(self.count)
        } else {
            self.factor
        };
        self.value += (value - self.value) * factor;
        self.value
    }
}

#[cfg(test)]
mod testing {
    use super::{AttemptResult, EndedAttempt};
    use tidegate_core::{Span, Time};

    /// An attempt that ended at this millisecond after this round trip, with this many in flight throughout.
    pub(super) fn attempt(ended: u64, round_trip: u64, in_flight: u32, result: AttemptResult) -> EndedAttempt {
        let ended_at = Time::from_secs(100) + Span::from_millis(ended);
        let sent_at = ended_at - Span::from_millis(round_trip);
        EndedAttempt { sent_at, ended_at, in_flight, in_flight_at_end: in_flight, result }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_begin_as_means() {
        let mut average = MovingAverage::over(4);
        let mean = (1..=10).map(|value| average.add(f64::from(value))).last();
        assert!((mean.unwrap_or_default() - 5.5).abs() < 1e-9, "{mean:?}");
        // From then on a weight of 2/5: 5.5 + 0.4 · (10.5 − 5.5).
        assert!((average.add(10.5) - 7.5).abs() < 1e-9);
    }

    #[test]
    fn logarithmic_steps_are_whole_and_positive() {
        assert_eq!([0.0, 1.0, 99.0, 100.0, 999.0, 1000.0].map(log10_step), [1.0, 1.0, 1.0, 2.0, 2.0, 3.0]);
    }
}
