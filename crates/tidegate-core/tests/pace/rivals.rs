//! Other ways to find a pace, for comparison.

use rand::rngs::SmallRng;
use tidegate_core::{Class, LocalPacer, Pace, Span, Time};

use crate::service::Governor;

/// The pace of a gateway.
pub(crate) struct Paced {
    pub(crate) pace: Pace,
    pub(crate) rng: SmallRng,
}

impl Governor for Paced {
    fn next_at(&self, now: Time) -> Time {
        self.pace.next_at(now)
    }

    fn sent(&mut self, now: Time) {
        self.pace.sent(now);
    }

    fn ended(&mut self, sent_at: Time, throttled: bool, now: Time) -> Span {
        let class = if throttled { Class::Throttled } else { Class::Success };
        self.pace.ended(sent_at, class, None, now, &mut self.rng);
        Span::ZERO
    }

    fn record_wait(&mut self, wait: Span, now: Time) {
        self.pace.record_wait(wait, now);
    }
}

/// Workers that share a pacer. Each sleeps for as long as the pacer says.
pub(crate) struct Shared {
    pub(crate) pacer: LocalPacer,
    pub(crate) rng: SmallRng,
}

impl Governor for Shared {
    fn next_at(&self, now: Time) -> Time {
        now
    }

    fn sent(&mut self, _now: Time) {}

    fn ended(&mut self, _sent_at: Time, throttled: bool, _now: Time) -> Span {
        let slept =
            if throttled { Some(self.pacer.failed(&mut self.rng)) } else { self.pacer.succeeded(&mut self.rng) };
        Span::from_duration(slept.unwrap_or_default())
    }
}

/// Additive increase and multiplicative decrease: one call per second more each second, and half after a throttle, at
/// most once in a fifth of a second (D.-M. Chiu and R. Jain, "Analysis of the Increase and Decrease Algorithms for
/// Congestion Avoidance in Computer Networks", 1989).
pub(crate) struct Aimd {
    rate: f64,
    sent_at: Option<Time>,
    cut_at: Time,
    raised_at: Time,
}

impl Aimd {
    pub(crate) fn new(start: Time) -> Self {
        Self { rate: 10.0, sent_at: None, cut_at: start, raised_at: start }
    }
}

impl Governor for Aimd {
    fn next_at(&self, now: Time) -> Time {
        self.sent_at.map_or(now, |sent_at| sent_at + Span::from_micros((1e6 / self.rate) as u64))
    }

    fn sent(&mut self, now: Time) {
        self.sent_at = Some(now);
    }

    fn ended(&mut self, sent_at: Time, throttled: bool, now: Time) -> Span {
        if throttled && sent_at >= self.cut_at {
            self.rate = (self.rate / 2.0).max(0.5);
            self.cut_at = now;
        }
        self.rate += now.since(self.raised_at).as_micros() as f64 / 1e6;
        self.raised_at = now;
        Span::ZERO
    }
}

/// A token bucket with a rate that follows the cubic function of RFC 9438 around the rate of the last throttle. The
/// constants and the bound of twice the measured rate are those documented for AWS's SDKs: β 0.7, C 0.4, measured in
/// half seconds and smoothed by 0.8, with a bucket of one second.
pub(crate) struct Cubic {
    rate: f64,
    max_rate: f64,
    throttled_at: Option<Time>,
    tokens: f64,
    filled_at: Time,
    measured: f64,
    bucket: (Time, u32),
}

impl Cubic {
    pub(crate) fn new(start: Time) -> Self {
        Self {
            rate: 0.5,
            max_rate: 0.0,
            throttled_at: None,
            tokens: 1.0,
            filled_at: start,
            measured: 0.0,
            bucket: (start, 0),
        }
    }

    fn tokens(&self, now: Time) -> f64 {
        let earned = now.since(self.filled_at).as_micros() as f64 / 1e6 * self.rate;
        (self.tokens + earned).min(self.rate.max(1.0))
    }
}

impl Governor for Cubic {
    fn next_at(&self, now: Time) -> Time {
        let lacks = 1.0 - self.tokens(now);
        // It delays no call before the first throttle.
        if self.throttled_at.is_none() || lacks <= 0.0 {
            return now;
        }
        now + Span::from_micros((lacks / self.rate * 1e6).ceil() as u64)
    }

    fn sent(&mut self, now: Time) {
        self.tokens = (self.tokens(now) - 1.0).max(0.0);
        self.filled_at = now;
    }

    fn ended(&mut self, _sent_at: Time, throttled: bool, now: Time) -> Span {
        self.bucket.1 += 1;
        let passed = now.since(self.bucket.0).as_micros() as f64 / 1e6;
        if passed >= 0.5 {
            self.measured = self.measured * 0.2 + f64::from(self.bucket.1) / passed * 0.8;
            self.bucket = (now, 0);
        }
        (self.tokens, self.filled_at) = (self.tokens(now), now);
        let wanted = if throttled {
            self.max_rate = if self.throttled_at.is_none() { self.measured } else { self.measured.min(self.rate) };
            self.throttled_at = Some(now);
            self.max_rate * 0.7
        } else {
            let since = self.throttled_at.map_or(0.0, |at| now.since(at).as_micros() as f64 / 1e6);
            let back = (self.max_rate * 0.3 / 0.4).cbrt();
            0.4 * (since - back).powi(3) + self.max_rate
        };
        self.rate = wanted.min(2.0 * self.measured).max(0.5);
        Span::ZERO
    }
}
