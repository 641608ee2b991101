//! A token bucket whose rate follows CUBIC: the client-side rate limiter of the AWS SDKs' retry mode `adaptive`, with
//! its constants. The curve is that of S. Ha, I. Rhee and L. Xu, "CUBIC: A New TCP-Friendly High-Speed TCP Variant",
//! 2008.
//!
//! It begins with the first throttled reply. Each one sets the rate to 0.7 of the measured rate. From then on the rate
//! rises along the curve, slowly around the old rate, and up to twice the measured rate.

use tidegate_core::{Span, Time};

use super::{AttemptResult, Controller, EndedAttempt};

const BETA: f64 = 0.7;
const SCALE: f64 = 0.4;
/// The weight of the latest half second in the measured rate.
const SMOOTHING: f64 = 0.8;
/// The smallest rate, per second, and the smallest size of the bucket.
const MIN_RATE: f64 = 0.5;
const MIN_CAPACITY: f64 = 1.0;
/// The length of a period of the measured rate.
const PERIOD: Span = Span::from_millis(500);

#[derive(Debug)]
pub(super) struct Cubic {
    /// True from the first throttled reply on.
    is_enabled: bool,
    rate: f64,
    capacity: f64,
    tokens: f64,
    refilled_at: Time,
    /// The rate at the last throttled reply, and its time.
    max_rate: f64,
    throttled_at: Time,
    measured_rate: f64,
    /// The replies since the begin of the period.
    replies: u32,
    period_began_at: Time,
}

impl Cubic {
    pub(super) fn new(now: Time) -> Self {
        Self {
            is_enabled: false,
            rate: MIN_RATE,
            capacity: MIN_CAPACITY,
            tokens: 0.0,
            refilled_at: now,
            max_rate: 0.0,
            throttled_at: now,
            measured_rate: 0.0,
            replies: 0,
            period_began_at: now,
        }
    }

    fn refill(&mut self, now: Time) {
        let elapsed = now.since(self.refilled_at).as_secs_f64();
        (self.tokens, self.refilled_at) = ((self.tokens + elapsed * self.rate).min(self.capacity), now);
    }

    fn measure(&mut self, now: Time) {
        self.replies += 1;
        let periods = now.since(self.period_began_at).as_micros() / PERIOD.as_micros();
        if periods > 0 {
            let length = PERIOD.times(periods);
            let latest = f64::from(self.replies) / length.as_secs_f64();
            self.measured_rate += (latest - self.measured_rate) * SMOOTHING;
            (self.replies, self.period_began_at) = (0, self.period_began_at + length);
        }
    }

    /// Returns the rate of the curve, which is again that of the last throttled reply at its inflection.
    fn curve_at(&self, now: Time) -> f64 {
        let inflection = (self.max_rate * (1.0 - BETA) / SCALE).cbrt();
        SCALE * (now.since(self.throttled_at).as_secs_f64() - inflection).powi(3) + self.max_rate
    }
}

impl Controller for Cubic {
    fn next_send_at(&mut self, now: Time) -> Time {
        if !self.is_enabled {
            return now;
        }
        self.refill(now);
        let missing = (1.0 - self.tokens).max(0.0);
        now + Span::from_micros((missing / self.rate * 1e6).ceil() as u64)
    }

    fn record_send(&mut self, _now: Time) {
        if self.is_enabled {
            // Whole microseconds may leave a token incomplete by a rounding error.
            self.tokens = (self.tokens - 1.0).max(0.0);
        }
    }

    fn record_end(&mut self, attempt: &EndedAttempt) {
        let now = attempt.ended_at;
        self.measure(now);
        let rate = if attempt.result == AttemptResult::Throttled {
            let current = if self.is_enabled { self.rate.min(self.measured_rate) } else { self.measured_rate };
            (self.is_enabled, self.max_rate, self.throttled_at) = (true, current, now);
            current * BETA
        } else {
            self.curve_at(now)
        };
        self.refill(now);
        let rate = rate.min(2.0 * self.measured_rate);
        (self.rate, self.capacity) = (rate.max(MIN_RATE), rate.max(MIN_CAPACITY));
        self.tokens = self.tokens.min(self.capacity);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::attempt;
    use super::*;
    use AttemptResult::{Succeeded, Throttled};

    fn about(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6 * expected.abs().max(1.0), "{found}, not {expected}");
    }

    /// Ends a reply every 10 ms up to this moment.
    fn hundred_per_second(cubic: &mut Cubic, from: u64, until: u64) {
        (from..until).step_by(10).for_each(|millis| cubic.record_end(&attempt(millis, 1, 1, Succeeded)));
    }

    #[test]
    fn cubic_measures_its_rate_by_half_seconds() {
        let mut cubic = Cubic::new(Time::from_secs(100));
        hundred_per_second(&mut cubic, 10, 500);
        about(cubic.measured_rate, 0.0);
        cubic.record_end(&attempt(500, 1, 1, Succeeded));
        // 50 replies in half a second, weighted by 0.8.
        about(cubic.measured_rate, 80.0);
        hundred_per_second(&mut cubic, 510, 1_010);
        about(cubic.measured_rate, 96.0);
        // One reply in the next two periods.
        cubic.record_end(&attempt(2_100, 1, 1, Succeeded));
        about(cubic.measured_rate, 0.2 * 96.0 + 0.8);
    }

    #[test]
    fn cubic_falls_to_beta_and_returns() {
        let mut cubic = Cubic::new(Time::from_secs(100));
        let at = |millis| Time::from_secs(100) + Span::from_millis(millis);
        assert_eq!(cubic.next_send_at(at(0)), at(0));
        cubic.measured_rate = 100.0;
        cubic.record_end(&attempt(0, 1, 1, Throttled));
        about(cubic.rate, 70.0);
        // Inflection at cbrt(100 · 0.3 / 0.4) s = 4.217 s: there, the rate is again 100.
        about(cubic.curve_at(at(0)), 70.0);
        about(cubic.curve_at(at(2_000)), 100.0 + 0.4 * (2.0 - 75_f64.cbrt()).powi(3));
        assert!((cubic.curve_at(at(4_217)) - 100.0).abs() < 0.001);
        about(cubic.curve_at(at(8_000)), 100.0 + 0.4 * (8.0 - 75_f64.cbrt()).powi(3));
        // The bucket is empty at first. At 70 a second, a token takes 14.286 ms.
        assert_eq!(cubic.next_send_at(at(0)), at(0) + Span::from_micros(14_286));
        assert_eq!(cubic.next_send_at(at(15)), at(15));
        cubic.record_send(at(15));
        about(cubic.tokens, 0.05);
        // A throttled reply takes the lower of both rates; the curve never exceeds twice the measured one.
        cubic.measured_rate = 300.0;
        cubic.record_end(&attempt(20, 1, 1, Throttled));
        about(cubic.rate, 0.7 * 70.0);
        cubic.measured_rate = 10.0;
        cubic.record_end(&attempt(400, 1, 1, Succeeded));
        about(cubic.rate, 20.0);
        cubic.measured_rate = 0.0;
        cubic.record_end(&attempt(410, 1, 1, Throttled));
        assert_eq!((cubic.rate, cubic.capacity), (0.5, 1.0));
    }
}
