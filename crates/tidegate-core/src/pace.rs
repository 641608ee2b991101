//! The pace of the calls to one provider, however it is found.

use core::time::Duration;

use rand_core::Rng;

use crate::time::MAX_CLOCK_LAG;
use crate::{AdaptiveRate, Class, LocalPacer, RemainingAmount, Span, Time};

/// What keeps calls to a provider apart beyond its limits: it is asked before a call is sent and told of each end.
///
/// Of the classes that a call may end with, `throttled` slows it down, `success` and `permanent` let it go faster, since
/// the provider has taken the call, and the others say nothing about its limits.
#[derive(Clone, Debug)]
pub enum Pace {
    /// A wait between calls that grows and shrinks: see [`ResponsivePace`].
    Responsive(ResponsivePace),
    /// A rate that is looked for: see [`AdaptiveRate`].
    Adaptive(AdaptiveRate),
}

/// A [`LocalPacer`]'s wait kept between the calls of many, instead of by each after its own.
///
/// Calls that were sent before its last step up tell of the pace before: their throttles count as one with it, and their
/// successes don't count.
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
    /// The time between two calls now.
    pub fn interval(&self) -> Duration {
        match self {
            Self::Responsive(spaced) => spaced.pacer.interval(),
            Self::Adaptive(adaptive) => adaptive.interval().as_duration(),
        }
    }

    /// When the next call may be sent; a moment that has passed means at once.
    pub fn next_at(&self, now: Time) -> Time {
        match self {
            Self::Responsive(spaced) => spaced.next_at(now),
            Self::Adaptive(adaptive) => adaptive.next_at(now),
        }
    }

    /// A call is sent.
    pub fn sent(&mut self, now: Time) {
        match self {
            Self::Responsive(spaced) => spaced.sent_at = now,
            Self::Adaptive(adaptive) => adaptive.sent(now),
        }
    }

    /// A call that was sent at `sent_at` has ended. `rest` is what its reply says is left of the calls, which a responsive pace
    /// doesn't go by. That a reply asks to be left alone for a while is the business of the gate
    /// ([`CredentialPool`](crate::CredentialPool)): it may be about one of several credentials, and a pace is all calls'.
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
        // Further off only if the clock has stepped back.
        (self.sent_at + wait).min(now + wait)
    }

    /// Whether a call that was sent at `sent_at` tells of the pace as it is.
    fn is_current_call(&self, sent_at: Time, now: Time) -> bool {
        // No call was sent after a step of which the clock says that it is still to come.
        sent_at >= self.raised_at || self.raised_at > now + MAX_CLOCK_LAG
    }
}
