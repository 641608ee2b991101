//! A limit of attempts in flight by the ratio of the round trip without load to the present one: the gradient
//! controller of Envoy's adaptive concurrency filter, by its documentation, with its default values, and for those
//! without a default the values of the example there (100 ms and 60 s).
//!
//! At times the limit is 3 until 50 round trips are measured; their median is the round trip without load. Otherwise
//! the limit is multiplied every 100 ms by the ratio, and its square root is added.

use hdrhistogram::Histogram;
use rand::RngExt;
use tidegate_core::{Span, Time};

use super::{AttemptResult, Controller, EndedAttempt, round_trip_histogram};
use crate::random::SimRng;

const MIN: u32 = 3;
const MAX: u32 = 1000;
const UPDATE_INTERVAL: Span = Span::from_millis(100);
const MEASURE_INTERVAL: Span = Span::from_secs(60);
/// The largest share by which the time until the next measurement is longer.
const JITTER: f64 = 0.15;
const MEASURED_ATTEMPTS: u64 = 50;
/// The share by which a round trip may be longer before the limit falls.
const BUFFER: f64 = 0.25;
/// The round trip without load is measured again after this many updates that leave the limit at its least.
const MAX_UPDATES_AT_MIN: u32 = 5;

#[derive(Debug)]
pub(super) struct Envoy {
    limit: u32,
    /// While the round trip without load is measured, the limit that holds afterwards.
    limit_after: Option<u32>,
    /// In microseconds.
    unloaded: f64,
    measured_since: Time,
    measures_at: Time,
    updates_at: Time,
    updates_at_min: u32,
    round_trips: Histogram<u32>,
    rng: SimRng,
}

impl Envoy {
    pub(super) fn new(now: Time, rng: SimRng) -> Self {
        Self {
            limit: MIN,
            limit_after: Some(MIN),
            unloaded: 0.0,
            measured_since: now,
            measures_at: Time::NEVER,
            updates_at: Time::NEVER,
            updates_at_min: 0,
            round_trips: round_trip_histogram(),
            rng,
        }
    }

    /// Does what is due: an update of the limit, and the begin of a measurement.
    fn advance(&mut self, now: Time) {
        if self.limit_after.is_none() && now >= self.updates_at {
            self.updates_at = now + UPDATE_INTERVAL;
            if !self.round_trips.is_empty() {
                self.update();
            }
        }
        if self.limit_after.is_none() && (now >= self.measures_at || self.updates_at_min >= MAX_UPDATES_AT_MIN) {
            self.limit_after = Some(std::mem::replace(&mut self.limit, MIN));
            (self.measured_since, self.updates_at_min) = (now, 0);
            self.round_trips.reset();
        }
    }

    fn update(&mut self) {
        let gradient = (self.unloaded * (1.0 + BUFFER) / self.take_median()).clamp(0.5, 2.0);
        let limit = f64::from(self.limit) * gradient;
        let limit = ((limit + limit.sqrt()) as u32).clamp(MIN, MAX);
        self.updates_at_min = if (self.limit, limit) == (MIN, MIN) { self.updates_at_min + 1 } else { 0 };
        self.limit = limit;
    }

    fn take_median(&mut self) -> f64 {
        let median = self.round_trips.value_at_quantile(0.5).max(1) as f64;
        self.round_trips.reset();
        median
    }
}

impl Controller for Envoy {
    fn limit(&mut self, now: Time) -> u32 {
        self.advance(now);
        self.limit
    }

    fn record_end(&mut self, attempt: &EndedAttempt) {
        let now = attempt.ended_at;
        self.advance(now);
        if attempt.sent_at < self.measured_since || attempt.result == AttemptResult::TimedOut {
            return;
        }
        self.round_trips.saturating_record(attempt.round_trip() as u64);
        if let Some(limit) = self.limit_after.filter(|_| self.round_trips.len() >= MEASURED_ATTEMPTS) {
            self.unloaded = self.take_median();
            (self.limit, self.limit_after) = (limit, None);
            let wait = MEASURE_INTERVAL.as_secs_f64() * (1.0 + JITTER * self.rng.random::<f64>());
            (self.measures_at, self.updates_at) = (now + Span::from_micros((wait * 1e6) as u64), now + UPDATE_INTERVAL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::attempt;
    use super::*;
    use crate::random::RngStreams;
    use AttemptResult::{Failed, Succeeded, TimedOut};

    const START: Time = Time::from_secs(100);

    /// Creates a controller that has measured a round trip of 100 ms within its first second.
    fn measured() -> Envoy {
        let mut envoy = Envoy::new(START, RngStreams::new(1, 0).next_rng());
        for count in 0..50 {
            assert_eq!((envoy.limit_after, envoy.limit), (Some(3), 3), "after {count} replies");
            envoy.record_end(&attempt(900, 100, 3, Succeeded));
        }
        assert!((envoy.unloaded / 1e5 - 1.0).abs() < 0.01, "{}", envoy.unloaded);
        // The histogram has two significant digits.
        envoy.unloaded = 1e5;
        envoy
    }

    #[test]
    fn envoy_follows_gradient_plus_square_root() {
        let mut envoy = measured();
        let steps = [
            // 100 · 1.25 + sqrt(125) = 136.2.
            (100, 100, Succeeded, 136),
            // 100 · 1.25/1.25 + sqrt(100).
            (100, 125, Succeeded, 110),
            // 100 · 0.625 + sqrt(62.5) = 70.4.
            (100, 200, Failed, 70),
            // The gradient is at least 0.5 and at most 2: 50 + 7.07, 200 + 14.1.
            (100, 900, Succeeded, 57),
            (100, 10, Succeeded, 214),
            (1000, 100, Succeeded, 1000),
            // 3 · 0.5 + sqrt(1.5) = 2.7.
            (3, 900, Succeeded, 3),
        ];
        for (index, (limit, round_trip, result, expected)) in (0_u64..).zip(steps) {
            envoy.limit = limit;
            let ended = 1_000 + 1_000 * index;
            envoy.round_trips.record(round_trip * 1_000).expect("a round trip");
            envoy.record_end(&attempt(ended, round_trip, 1, result));
            assert!(envoy.limit.abs_diff(expected) <= expected / 50, "{round_trip} ms: {}", envoy.limit);
            envoy.round_trips.reset();
        }
        let limit = envoy.limit;
        envoy.record_end(&attempt(20_000, 100, 1, TimedOut));
        assert_eq!((envoy.limit, envoy.round_trips.len()), (limit, 0));
    }

    #[test]
    fn envoy_measures_again_after_a_minute() {
        let mut envoy = measured();
        envoy.limit = 80;
        let at = |millis| START + Span::from_millis(millis);
        assert_eq!(envoy.limit(at(60_800)), 80);
        assert_eq!((envoy.limit(at(70_000)), envoy.limit_after), (3, Some(80)));
        // Attempts from before the measurement don't count.
        envoy.record_end(&attempt(70_050, 100, 3, Succeeded));
        assert_eq!(envoy.round_trips.len(), 0);
        (0..50).for_each(|_| envoy.record_end(&attempt(70_300, 200, 3, Succeeded)));
        assert_eq!((envoy.limit, envoy.limit_after), (80, None));
        assert!((envoy.unloaded / 2e5 - 1.0).abs() < 0.01);
    }

    #[test]
    fn envoy_measures_again_at_its_least() {
        let mut envoy = measured();
        for update in 0..5 {
            assert_eq!(envoy.limit_after, None, "{update} updates");
            envoy.round_trips.record(900_000).expect("a round trip");
            envoy.advance(START + Span::from_millis(1_000 + 100 * update));
        }
        assert_eq!((envoy.limit, envoy.limit_after), (3, Some(3)));
    }
}
