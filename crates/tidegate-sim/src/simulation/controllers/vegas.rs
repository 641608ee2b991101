//! A limit of attempts in flight by the estimated length of the service's queue: the rule of `VegasLimit` in Netflix's
//! concurrency-limits, with its default values, after L. Brakmo and L. Peterson, "TCP Vegas: End to End Congestion
//! Avoidance on a Global Internet", 1995.
//!
//! With the shortest round trip seen, `limit · (1 − shortest / round trip)` attempts wait in the queue. Fewer than
//! alpha raise the limit, more than beta lower it. At times, the next round trip replaces the shortest.

use rand::RngExt;
use tidegate_core::Time;

use super::{AttemptResult, Controller, EndedAttempt, log10_step};
use crate::random::SimRng;

const INITIAL: f64 = 20.0;
const MAX: f64 = 1000.0;
/// The shortest round trip is measured again after up to this many attempts per attempt of the limit.
const PROBE_FACTOR: f64 = 30.0;

#[derive(Debug)]
pub(super) struct Vegas {
    limit: f64,
    shortest: f64,
    /// The attempts since the shortest round trip was replaced.
    attempts: f64,
    /// The share of [`PROBE_FACTOR`] until the next replacement.
    probe_share: f64,
    rng: SimRng,
}

impl Vegas {
    pub(super) fn new(mut rng: SimRng) -> Self {
        let probe_share = rng.random_range(0.5..1.0);
        Self { limit: INITIAL, shortest: f64::MAX, attempts: 0.0, probe_share, rng }
    }
}

impl Controller for Vegas {
    fn limit(&mut self, _now: Time) -> u32 {
        self.limit as u32
    }

    fn record_end(&mut self, attempt: &EndedAttempt) {
        let round_trip = attempt.round_trip();
        self.attempts += 1.0;
        if self.attempts >= self.probe_share * PROBE_FACTOR * self.limit {
            (self.shortest, self.attempts) = (round_trip, 0.0);
            self.probe_share = self.rng.random_range(0.5..1.0);
            return;
        }
        if round_trip < self.shortest {
            self.shortest = round_trip;
            return;
        }
        let step = log10_step(self.limit);
        let (alpha, beta) = (3.0 * step, 6.0 * step);
        let queue = (self.limit * (1.0 - self.shortest / round_trip)).ceil();
        let change = if attempt.result != AttemptResult::Succeeded {
            -step
        } else if f64::from(attempt.in_flight) * 2.0 < self.limit {
            0.0
        } else if queue <= step {
            beta
        } else if queue < alpha {
            step
        } else if queue > beta {
            -step
        } else {
            0.0
        };
        self.limit = (self.limit + change).clamp(1.0, MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::attempt;
    use super::*;
    use crate::random::RngStreams;
    use AttemptResult::{Succeeded, TimedOut};

    #[test]
    fn vegas_keeps_queue_between_alpha_and_beta() {
        let mut vegas = Vegas::new(RngStreams::new(1, 0).next_rng());
        vegas.record_end(&attempt(0, 100, 20, Succeeded));
        assert_eq!((vegas.limit, vegas.shortest), (20.0, 100_000.0));
        // With a step of 1 up to a limit of 99: alpha 3, beta 6.
        let steps = [
            // ceil(20 · (1 − 100/105)) = 1 waits.
            (20.0, 105, 20, Succeeded, 26.0),
            // ceil(20 · (1 − 100/110)) = 2.
            (20.0, 110, 20, Succeeded, 21.0),
            // ceil(20 · (1 − 100/120)) = 4.
            (20.0, 120, 20, Succeeded, 20.0),
            // ceil(20 · (1 − 100/150)) = 7.
            (20.0, 150, 20, Succeeded, 19.0),
            (20.0, 110, 9, Succeeded, 20.0),
            (20.0, 110, 9, TimedOut, 19.0),
            // With a step of 2: ceil(100 · (1 − 100/102)) = 2, and beta is 12.
            (100.0, 102, 100, Succeeded, 112.0),
            (999.0, 100, 999, Succeeded, 1000.0),
            (1.0, 300, 1, TimedOut, 1.0),
        ];
        for (limit, round_trip, in_flight, result, expected) in steps {
            vegas.limit = limit;
            vegas.record_end(&attempt(0, round_trip, in_flight, result));
            assert_eq!(vegas.limit, expected, "{limit}, {round_trip} ms, {in_flight} in flight, {result:?}");
        }
    }

    #[test]
    fn vegas_measures_shortest_round_trip_again() {
        let mut vegas = Vegas::new(RngStreams::new(1, 0).next_rng());
        vegas.record_end(&attempt(0, 100, 1, Succeeded));
        let until = (1..).take_while(|_| {
            vegas.record_end(&attempt(0, 200, 1, Succeeded));
            vegas.shortest < 200_000.0
        });
        // Between 0.5 · 30 · 20 and 30 · 20 attempts, the first included.
        assert!((298..600).contains(&until.count()));
    }
}
