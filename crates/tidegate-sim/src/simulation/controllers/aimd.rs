//! Additive increase and multiplicative decrease of the attempts in flight: the rule of `AIMDLimit` in Netflix's
//! concurrency-limits, with its default values, after D. Chiu and R. Jain, "Analysis of the Increase and Decrease
//! Algorithms for Congestion Avoidance in Computer Networks", 1989.

use tidegate_core::{Span, Time};

use super::{AttemptResult, Controller, EndedAttempt};

const INITIAL: u32 = 20;
const MIN: u32 = 20;
const MAX: u32 = 200;
/// The factor of a decrease, in tenths.
const BACKOFF_TENTHS: u32 = 9;
/// A reply that takes longer counts as dropped.
const TIMEOUT: Span = Span::from_secs(5);

#[derive(Debug)]
pub(super) struct Aimd {
    limit: u32,
}

impl Aimd {
    pub(super) fn new() -> Self {
        Self { limit: INITIAL }
    }
}

impl Controller for Aimd {
    fn limit(&mut self, _now: Time) -> u32 {
        self.limit
    }

    fn record_end(&mut self, attempt: &EndedAttempt) {
        let is_dropped =
            attempt.result != AttemptResult::Succeeded || attempt.ended_at.since(attempt.sent_at) > TIMEOUT;
        if is_dropped {
            self.limit = self.limit * BACKOFF_TENTHS / 10;
        } else if attempt.in_flight * 2 >= self.limit {
            self.limit += 1;
        }
        self.limit = self.limit.clamp(MIN, MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::attempt;
    use super::*;
    use AttemptResult::{Failed, Succeeded, Throttled, TimedOut};

    #[test]
    fn aimd_rises_by_one_falls_by_tenth() {
        let mut aimd = Aimd::new();
        let steps = [
            (100, 20, Succeeded, 21),
            (100, 10, Succeeded, 21),
            (100, 11, Succeeded, 22),
            (100, 22, Throttled, 20),
            (0, 20, Failed, 20),
        ];
        for (round_trip, in_flight, result, expected) in steps {
            aimd.record_end(&attempt(0, round_trip, in_flight, result));
            assert_eq!(aimd.limit, expected, "{round_trip} ms, {in_flight} in flight, {result:?}");
        }
        for (limit, round_trip, result, expected) in [
            (199, 5_000, Succeeded, 200),
            (200, 100, Succeeded, 200),
            (200, 5_001, Succeeded, 180),
            (101, 100, TimedOut, 90),
        ] {
            aimd.limit = limit;
            aimd.record_end(&attempt(0, round_trip, limit, result));
            assert_eq!(aimd.limit, expected, "from {limit}, {round_trip} ms, {result:?}");
        }
    }
}
