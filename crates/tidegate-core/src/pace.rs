//! The pace of the calls to one provider, responsive or adaptive.

use core::time::Duration;

use rand_core::Rng;

use crate::time::MAX_CLOCK_LAG;
use crate::{AdaptiveRate, Class, LocalPacer, RemainingAmount, Span, Time};

/// The controller of the time between calls to a provider, in addition to its limits. It is asked before each call is
/// sent, and each end is reported to it.
///
/// The class of an ended call decides: `throttled` slows the calls down. `success` and `permanent` let them go faster,
/// because the provider has processed the call. The other classes say nothing about the provider's limits.
#[derive(Clone, Debug)]
pub enum Pace {
    /// A wait between calls that grows and shrinks ([`ResponsivePace`]).
    Responsive(ResponsivePace),
    /// A rate that is found by trying ([`AdaptiveRate`]).
    Adaptive(AdaptiveRate),
}

/// The wait of a [`LocalPacer`], kept between all calls instead of after each call by its task.
///
/// Calls that were sent before the last step up belong to the previous pace: their throttles count together with it as
/// one, and their successes don't count.
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
            Self::Responsive(spaced) => spaced.pacer.interval(),
            Self::Adaptive(adaptive) => adaptive.interval().as_duration(),
        }
    }

    /// The time at which the next call may be sent. A time in the past means immediately.
    pub fn next_at(&self, now: Time) -> Time {
        match self {
            Self::Responsive(spaced) => spaced.next_at(now),
            Self::Adaptive(adaptive) => adaptive.next_at(now),
        }
    }

    /// Records that a call is sent.
    pub fn sent(&mut self, now: Time) {
        match self {
            Self::Responsive(spaced) => spaced.sent_at = now,
            Self::Adaptive(adaptive) => adaptive.sent(now),
        }
    }

    /// Records the end of a call that was sent at `sent_at`. `rest` is the remaining amount in its reply; a responsive
    /// pace ignores it. A wait that a reply asks for is handled by the gate
    /// ([`CredentialPool`](crate::CredentialPool)): it may concern one of several credentials, but a pace applies to
    /// all calls.
    pub fn ended(&mut self, sent_at: Time, class: Class, rest: Option<RemainingAmount>, now: Time, rng: &mut impl Rng) {
        match (self, class) {
            (Self::Responsive(spaced), Class::Throttled) if spaced.is_current_call(sent_at, now) => {
                spaced.raised_at = now;
                spaced.pacer.failed(rng);
            }
            (Self::Responsive(spaced), Class::Success | Class::Permanent) if spaced.is_current_call(sent_at, now) => {
                spaced.pacer.succeeded(rng);
            }
            (Self::Responsive(_), _) => {}
            (Self::Adaptive(adaptive), Class::Throttled) => adaptive.throttled(sent_at, rest, now),
            (Self::Adaptive(adaptive), Class::Success | Class::Permanent) => adaptive.succeeded(sent_at, rest, now),
            (Self::Adaptive(_), Class::Transient | Class::Auth | Class::Cancelled) => {}
        }
    }
}

impl ResponsivePace {
    fn next_at(&self, now: Time) -> Time {
        let wait = Span::from_duration(self.pacer.interval());
        // It is later only if the clock has stepped back.
        (self.sent_at + wait).min(now + wait)
    }

    /// Returns true if a call sent at `sent_at` was sent at the current pace.
    fn is_current_call(&self, sent_at: Time, now: Time) -> bool {
        // If the last step is in the future, the clock has stepped back since. Every call then counts.
        sent_at >= self.raised_at || self.raised_at > now + MAX_CLOCK_LAG
    }
}
