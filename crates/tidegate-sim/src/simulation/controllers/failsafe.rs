//! A limit of attempts in flight by recent round trips over their long average, and by the correlation of round trips
//! and throughput with the attempts in flight: the rule of failsafe-go's adaptive limiter, by its documentation, with
//! its default values.
//!
//! Once a second, the 90th percentile of the last round trips is smoothed by a median of five and an average of five,
//! and compared with an average of ten. As in [`super::vegas`], the ratio estimates the service's queue. While the
//! limit is reached, correlations over 50 updates also lower it.

use std::collections::VecDeque;

use hdrhistogram::Histogram;
use tidegate_core::{Span, Time};

use super::{AttemptResult, Controller, EndedAttempt, MovingAverage, log10_step, round_trip_histogram};

const INITIAL: f64 = 20.0;
const MIN: f64 = 1.0;
const MAX: f64 = 200.0;
/// The limit is at most this multiple of the attempts in flight.
const MAX_FACTOR: f64 = 5.0;
const QUANTILE: f64 = 0.9;
const MIN_WINDOW: Span = Span::from_secs(1);
const MAX_WINDOW: Span = Span::from_secs(30);
const MIN_ATTEMPTS: u64 = 50;
const MEDIAN_WINDOW: usize = 5;
const RECENT_WINDOW: u32 = 5;
const BASELINE_WINDOW: u32 = 10;

#[derive(Debug)]
pub(super) struct Failsafe {
    limit: f64,
    round_trips: Histogram<u32>,
    max_in_flight: u32,
    updates_at: Time,
    /// The last percentiles, for their median.
    percentiles: VecDeque<f64>,
    recent: MovingAverage,
    baseline: MovingAverage,
    throughputs: CorrelationWindow,
    delays: CorrelationWindow,
}

impl Failsafe {
    pub(super) fn new(now: Time) -> Self {
        Self {
            limit: INITIAL,
            round_trips: round_trip_histogram(),
            max_in_flight: 0,
            updates_at: now,
            percentiles: VecDeque::with_capacity(MEDIAN_WINDOW),
            recent: MovingAverage::over(RECENT_WINDOW),
            baseline: MovingAverage::over(BASELINE_WINDOW),
            throughputs: CorrelationWindow::default(),
            delays: CorrelationWindow::default(),
        }
    }

    /// Returns the median of the last five percentiles; until there are as many, the last one.
    fn median(&mut self, percentile: f64) -> f64 {
        if self.percentiles.len() == MEDIAN_WINDOW {
            self.percentiles.pop_front();
        }
        self.percentiles.push_back(percentile);
        if self.percentiles.len() < MEDIAN_WINDOW {
            return percentile;
        }
        let mut sorted: Vec<f64> = self.percentiles.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted[MEDIAN_WINDOW / 2]
    }

    fn update(&mut self, recent: f64, in_flight: f64, is_full: bool) {
        let gradient = self.baseline.add(recent) / recent;
        let queue = (self.limit * (1.0 - gradient)).ceil();
        let throughput = self.throughputs.add(in_flight, in_flight / recent);
        let delay = self.delays.add(in_flight, recent);
        let step = log10_step(self.limit);
        let (alpha, beta) = (3.0 * step, 6.0 * step);
        // More in flight take longer, but bring no more throughput.
        let is_overloaded = is_full
            && (throughput.correlation < 0.0
                || (delay.correlation > 0.5 && (throughput.correlation < 0.3 || throughput.variation < 0.2)));
        let change = if queue > beta || is_overloaded {
            -step
        } else if queue < alpha {
            step
        } else {
            0.0
        };
        let most = in_flight * MAX_FACTOR;
        let next = match self.limit + change {
            next if next <= most => next,
            _ if self.limit > most => self.limit - step,
            _ => most,
        };
        self.limit = next.clamp(MIN, MAX);
    }
}

impl Controller for Failsafe {
    fn limit(&mut self, _now: Time) -> u32 {
        self.limit as u32
    }

    fn record_end(&mut self, attempt: &EndedAttempt) {
        let now = attempt.ended_at;
        if attempt.result != AttemptResult::TimedOut {
            self.round_trips.saturating_record(attempt.round_trip() as u64);
            self.max_in_flight = self.max_in_flight.max(attempt.in_flight);
        }
        if now <= self.updates_at || self.round_trips.len() < MIN_ATTEMPTS {
            return;
        }
        let percentile = self.median(self.round_trips.value_at_quantile(QUANTILE).max(1) as f64);
        let recent = self.recent.add(percentile);
        let is_full = attempt.in_flight_at_end >= self.limit as u32;
        self.update(recent, f64::from(self.max_in_flight), is_full);
        let window = Span::from_micros(self.round_trips.min()).times(2).max(MIN_WINDOW).min(MAX_WINDOW);
        self.updates_at = now + window;
        self.round_trips.reset();
        self.max_in_flight = 0;
    }
}

/// The last pairs of values, of which the correlation is calculated.
#[derive(Debug, Default)]
struct CorrelationWindow(VecDeque<(f64, f64)>);

/// The correlation of two values, and the variation of the second: its deviation over its mean. Both are 0 while they
/// are unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Correlation {
    correlation: f64,
    variation: f64,
}

impl CorrelationWindow {
    const LENGTH: usize = 50;
    /// The least number of pairs.
    const WARM_UP: usize = 10;
    /// Values that vary less have no correlation.
    const MIN_VARIATION: f64 = 0.01;

    fn add(&mut self, x: f64, y: f64) -> Correlation {
        if self.0.len() == Self::LENGTH {
            self.0.pop_front();
        }
        self.0.push_back((x, y));
        if self.0.len() < Self::WARM_UP {
            return Correlation::default();
        }
        let mean =
            |of: &dyn Fn(f64, f64) -> f64| self.0.iter().map(|(x, y)| of(*x, *y)).sum::<f64>() / self.0.len() as f64;
        let (mean_x, mean_y) = (mean(&|x, _| x), mean(&|_, y| y));
        let deviation_x = mean(&|x, _| (x - mean_x).powi(2)).sqrt();
        let deviation_y = mean(&|_, y| (y - mean_y).powi(2)).sqrt();
        let variation = deviation_y / mean_y;
        let varies = deviation_x / mean_x >= Self::MIN_VARIATION && variation >= Self::MIN_VARIATION;
        let correlation =
            if varies { mean(&|x, y| (x - mean_x) * (y - mean_y)) / (deviation_x * deviation_y) } else { 0.0 };
        Correlation { correlation, variation }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::attempt;
    use super::*;
    use AttemptResult::{Succeeded, TimedOut};

    /// Creates a controller with this limit and a baseline of 100 ms that doesn't move.
    fn with_limit(limit: f64) -> Failsafe {
        let baseline = MovingAverage { value: 100.0, factor: 0.0, count: MovingAverage::WARM_UP };
        Failsafe { limit, baseline, ..Failsafe::new(Time::from_secs(100)) }
    }

    #[test]
    fn failsafe_keeps_queue_between_alpha_and_beta() {
        // With a step of 1 up to a limit of 99: alpha 3, beta 6.
        let steps = [
            // ceil(20 · (1 − 100/110)) = 2 wait, then 4, then 7.
            (20.0, 110.0, 20.0, 21.0),
            (20.0, 120.0, 20.0, 20.0),
            (20.0, 150.0, 20.0, 19.0),
            (100.0, 100.0, 100.0, 102.0),
            // At most five times the attempts in flight; from above, step by step.
            (20.0, 100.0, 4.0, 20.0),
            (20.0, 100.0, 3.0, 19.0),
            (14.5, 100.0, 3.0, 15.0),
            (200.0, 100.0, 200.0, 200.0),
            (1.0, 1_000.0, 1.0, 2.0),
        ];
        for (limit, recent, in_flight, expected) in steps {
            let mut failsafe = with_limit(limit);
            failsafe.update(recent, in_flight, true);
            assert_eq!(failsafe.limit, expected, "{limit}, {recent} ms, {in_flight} in flight");
        }
    }

    #[test]
    fn failsafe_falls_as_correlations_say() {
        // With more in flight, replies take longer in proportion: no more throughput.
        let mut failsafe = with_limit(50.0);
        for in_flight in 45..54 {
            failsafe.throughputs.add(f64::from(in_flight), 0.5);
            failsafe.delays.add(f64::from(in_flight), 2.0 * f64::from(in_flight));
        }
        failsafe.update(108.0, 54.0, false);
        assert_eq!(failsafe.limit, 50.0, "4 wait, and the limit isn't reached");
        failsafe.update(108.0, 54.0, true);
        assert_eq!(failsafe.limit, 49.0);
    }

    #[test]
    fn failsafe_correlates_by_pearson() {
        let mut window = CorrelationWindow::default();
        for x in 1..10 {
            assert_eq!(window.add(f64::from(x), f64::from(x % 2)), Correlation::default());
        }
        // Of 1 to 10 with 1, 0, 1, 0 …: covariance −0.25, deviations sqrt(8.25) and 0.5.
        let found = window.add(10.0, 0.0);
        assert!((found.correlation + 0.25 / (8.25_f64.sqrt() * 0.5)).abs() < 1e-9, "{found:?}");
        assert!((found.variation - 1.0).abs() < 1e-9, "{found:?}");
        for _ in 0..60 {
            window.add(5.0, 5.0);
        }
        assert_eq!((window.0.len(), window.add(5.0, 5.0)), (50, Correlation::default()));
    }

    #[test]
    fn failsafe_updates_after_second_and_fifty_attempts() {
        let mut failsafe = Failsafe::new(Time::from_secs(100));
        let mut updates = Vec::new();
        for ended in (20..=2_500).step_by(20) {
            let before = failsafe.updates_at;
            let result = if ended <= 200 { TimedOut } else { Succeeded };
            failsafe.record_end(&attempt(ended, 100, 20, result));
            if failsafe.updates_at != before {
                updates.push((ended, failsafe.limit));
            }
        }
        // The first ten aren't recorded; then 50 more, and a second.
        assert_eq!(updates, [(1_200, 21.0), (2_220, 22.0)]);
        let medians = [5.0, 1.0, 4.0, 2.0, 9.0, 3.0].map(|value| Failsafe::median(&mut failsafe, value));
        assert_eq!(medians[4..], [4.0, 3.0]);
    }
}
