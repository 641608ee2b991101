//! The pace of the calls to one provider, responsive or adaptive.

use core::time::Duration;

use rand_core::Rng;

use crate::time::MAX_CLOCK_LAG;
use crate::{AdaptiveRate, Class, LocalPacer, RemainingAmount, Span, Time};

/// The controller of the time between calls to a provider, in addition to its limits.
///
/// Calls that end as `throttled` slow it down, `success` and `permanent` let it go faster. Other classes prove nothing.
#[derive(Clone, Debug)]
pub enum Pace {
    /// A wait between calls that grows and shrinks ([`ResponsivePace`]).
    Responsive(ResponsivePace),
    /// A rate that is found by trying ([`AdaptiveRate`]).
    Adaptive(AdaptiveRate),
}

/// The wait of a [`LocalPacer`], kept between all calls instead of after each call by its task.
///
/// Calls sent before the last step up belong to the previous pace: neither their throttles nor their successes count.
#[derive(Clone, Debug)]
pub struct ResponsivePace {
    pacer: LocalPacer,
    sent_at: Time,
    raised_at: Time,
}

impl From<LocalPacer> for Pace {
    fn from(pacer: LocalPacer) -> Self {
        Self::Responsive(ResponsivePace { pacer, sent_at: Time::ZERO, raised_at: Time::ZERO })
    }
}

impl From<AdaptiveRate> for Pace {
    fn from(adaptive: AdaptiveRate) -> Self {
        Self::Adaptive(adaptive)
    }
}

impl Pace {
    /// The current time between two calls.
    pub fn interval(&self) -> Duration {
        match self {
            Self::Responsive(responsive) => responsive.pacer.interval(),
            Self::Adaptive(adaptive) => adaptive.interval().as_duration(),
        }
    }

    /// The time at which the next call may be sent. A time in the past means immediately.
    pub fn next_at(&self, now: Time) -> Time {
        match self {
            Self::Responsive(responsive) => responsive.next_at(now),
            Self::Adaptive(adaptive) => adaptive.next_at(now),
        }
    }

    /// Records that a call is sent.
    pub fn sent(&mut self, now: Time) {
        match self {
            Self::Responsive(responsive) => responsive.sent_at = now,
            Self::Adaptive(adaptive) => adaptive.sent(now),
        }
    }

    /// Records the end of a call that was sent at `sent_at`. A responsive pace ignores `rest`, the remaining amount in
    /// its reply.
    pub fn ended(&mut self, sent_at: Time, class: Class, rest: Option<RemainingAmount>, now: Time, rng: &mut impl Rng) {
        match (self, class) {
            (Self::Responsive(responsive), Class::Throttled) if responsive.is_current(sent_at, now) => {
                responsive.raised_at = now;
                responsive.pacer.failed(rng);
            }
            (Self::Responsive(responsive), Class::Success | Class::Permanent)
                if responsive.is_current(sent_at, now) =>
            {
                responsive.pacer.succeeded(rng);
            }
            (Self::Responsive(_), _) => {}
            (Self::Adaptive(adaptive), Class::Throttled) => adaptive.throttled(sent_at, rest, now),
            (Self::Adaptive(adaptive), Class::Success | Class::Permanent) => adaptive.succeeded(sent_at, rest, now),
            (Self::Adaptive(_), _) => {}
        }
    }

    /// Records that no call will be sent for a time, because a throttled reply asked for it.
    pub fn record_wait(&mut self, wait: Span, now: Time) {
        if let Self::Adaptive(adaptive) = self {
            adaptive.record_wait(wait, now);
        }
    }
}

impl ResponsivePace {
    fn next_at(&self, now: Time) -> Time {
        // If the last call is in the future, the clock has stepped back since.
        if self.sent_at > now + MAX_CLOCK_LAG { now } else { self.sent_at + Span::from_duration(self.pacer.interval()) }
    }

    /// True if a call sent at `sent_at` was sent at the current pace.
    fn is_current(&self, sent_at: Time, now: Time) -> bool {
        // If the last step is in the future, the clock has stepped back since. Every call then counts.
        sent_at >= self.raised_at || self.raised_at > now + MAX_CLOCK_LAG
    }
}
