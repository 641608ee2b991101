//! A limit of attempts in flight by the ratio of a long to a short average of round trips: the rule of
//! `Gradient2Limit` in Netflix's concurrency-limits, with its default values.
//!
//! Each round trip that is longer than 1.5 times the long average lowers the limit, by at most half of it, and each
//! attempt adds four for the service's queue. Both are smoothed. Failures have no effect beyond their round trips.

use tidegate_core::Time;

use super::{Controller, EndedAttempt, MovingAverage};

const INITIAL: f64 = 20.0;
const MIN: f64 = 20.0;
const MAX: f64 = 200.0;
/// The weight of a new limit.
const SMOOTHING: f64 = 0.2;
/// The attempts that may wait at the service.
const QUEUE: f64 = 4.0;
/// The ratio of a round trip to the long average up to which the limit doesn't fall.
const TOLERANCE: f64 = 1.5;
const LONG_WINDOW: u32 = 600;
/// If the long average is more than twice the last round trip, it shrinks by this factor.
const RECOVERY: f64 = 0.95;

#[derive(Debug)]
pub(super) struct Gradient2 {
    limit: f64,
    long: MovingAverage,
}

impl Gradient2 {
    pub(super) fn new() -> Self {
        Self { limit: INITIAL, long: MovingAverage::over(LONG_WINDOW) }
    }
}

impl Controller for Gradient2 {
    fn limit(&mut self, _now: Time) -> u32 {
        self.limit as u32
    }

    fn record_end(&mut self, attempt: &EndedAttempt) {
        let short = attempt.round_trip();
        let long = self.long.add(short);
        if long > 2.0 * short {
            self.long.value *= RECOVERY;
        }
        if f64::from(attempt.in_flight) < self.limit / 2.0 {
            return;
        }
        let gradient = (TOLERANCE * long / short).clamp(0.5, 1.0);
        let next = self.limit * gradient + QUEUE;
        self.limit = (self.limit + (next - self.limit) * SMOOTHING).clamp(MIN, MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::super::AttemptResult::Succeeded;
    use super::super::testing::attempt;
    use super::*;

    #[test]
    fn gradient2_follows_ratio_of_averages() {
        let steps = [
            // Up to 1.5 times the average: 100 + 0.2 · 4.
            (100.0, 100, 100, 100.8, 100.0),
            (100.0, 150, 100, 100.8, 100.0),
            // A ratio of 1.5/2: 100 + 0.2 · (75 + 4 − 100).
            (100.0, 200, 100, 95.8, 100.0),
            // At most half: 100 + 0.2 · (50 + 4 − 100).
            (100.0, 900, 100, 90.8, 100.0),
            (100.0, 200, 49, 100.0, 100.0),
            // An average of more than twice the round trip shrinks.
            (100.0, 40, 100, 100.8, 95.0),
            (200.0, 100, 200, 200.0, 100.0),
            (20.0, 900, 20, 20.0, 100.0),
        ];
        for (limit, round_trip, in_flight, expected, average) in steps {
            // A weight of zero isolates the rule of the limit from that of the average.
            let long = MovingAverage { value: 100_000.0, factor: 0.0, count: MovingAverage::WARM_UP };
            let mut gradient2 = Gradient2 { limit, long };
            gradient2.record_end(&attempt(0, round_trip, in_flight, Succeeded));
            let found = (gradient2.limit, gradient2.long.value / 1e3);
            assert!(
                (found.0 - expected).abs() < 1e-9 && (found.1 - average).abs() < 1e-9,
                "{round_trip} ms: {found:?}"
            );
        }
    }
}
