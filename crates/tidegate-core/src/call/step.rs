//! The types that a driver and a call exchange.

use crate::breaker::BreakerRefusal;
use crate::lanes::QueueFullError;
use crate::retry::{Delivery, NoRetryReason, UnreplayableReason};
use crate::{Class, LimitId, Time, Verdict};

/// The end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptReport {
    /// The meaning of the reply, or the class of the fault.
    pub verdict: Verdict,
    /// True if the request may be sent again: see [`is_repeatable`](crate::retry::is_repeatable).
    pub is_repeatable: bool,
    /// The reason why the request can't be sent again, if there is one.
    pub unreplayable_reason: Option<UnreplayableReason>,
    /// True if the request presented a reservation. If it is throttled, the call backs off, also if the provider keeps
    /// room for it again.
    pub presented_reservation: bool,
    /// The delivery of the request: unsent, answered or unknown.
    pub delivery: Delivery,
    /// True if the body is still to be read. After its last reply, a call is then in flight until
    /// [`InFlight::end`](super::InFlight::end).
    pub is_streaming: bool,
    /// True if the request wasn't sent because something that it needs, such as a login, took long: limits have counted it
    /// at another time than the provider would. It takes its turn again, at its place.
    pub is_postponed: bool,
    /// True if the connection has switched protocols. Such a call may last for hours, so the adaptive limit doesn't count
    /// it.
    pub is_tunnel: bool,
    /// True if no caller waits for the reply any more, although the provider may still work on the request: by default, if the
    /// attempt was cancelled and its delivery is unknown. A driver sets it, too, if the time of the attempt was over. The
    /// request is then in flight until it is likely over, if a limit counts that.
    pub is_abandoned: bool,
}

impl AttemptReport {
    /// The end of an attempt without other data, which isn't repeatable.
    pub const fn new(class: Class, delivery: Delivery) -> Self {
        Self::from_verdict(Verdict::new(class), delivery)
    }

    /// The end of an attempt with this verdict, which isn't repeatable.
    pub const fn from_verdict(verdict: Verdict, delivery: Delivery) -> Self {
        Self {
            verdict,
            is_repeatable: false,
            unreplayable_reason: None,
            presented_reservation: false,
            delivery,
            is_streaming: false,
            is_postponed: false,
            is_tunnel: false,
            is_abandoned: matches!((verdict.class, delivery), (Class::Cancelled, Delivery::Unknown)),
        }
    }
}

/// The reason why a call failed without a reply, or why its last reply isn't followed by another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// The breaker refuses the call.
    Unavailable(BreakerRefusal),
    /// A limit has no room before the deadline.
    RateLimited {
        /// The limit.
        limit: LimitId,
        /// The time at which the call could have been sent. [`Time::NEVER`] if never.
        earliest: Time,
    },
    /// A calendar quota is spent until after the deadline.
    QuotaSpent {
        /// The limit.
        limit: LimitId,
        /// The start of its next period.
        resets_at: Time,
    },
    /// No credential is good before the deadline.
    CredentialsCooling {
        /// The time at which the first one is good. [`Time::NEVER`] if none becomes good by itself.
        earliest: Time,
    },
    /// An operator has stopped the calls to the provider.
    ProviderPaused,
    /// The call's lane is paused until after the deadline, like the background lane outside its hours.
    LanePaused {
        /// The time at which the lane continues.
        until: Time,
    },
    /// The provider's pace has no room before the deadline.
    Paced {
        /// The time at which the call could have been sent.
        earliest: Time,
    },
    /// The queue of the call's lane is full, and has no place for the call or has given it to a later one.
    QueueFull(QueueFullError),
    /// The deadline passed while the call was waiting for its turn, or the time left was too short for a reply.
    DeadlineExceeded,
    /// The last reply or error is final. There is no other attempt, for this reason.
    NotRetried(NoRetryReason),
}

/// The progress of a call after its turn or after outcomes of the store. First the driver must send
/// [`StoreRequests::updates`](super::StoreRequests::updates) to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallProgress {
    /// The call waits. The lanes will return its ticket again, for [`Call::handle_step`](super::Call::handle_step).
    Wait,
    /// The store must execute [`StoreRequests::reservation`](super::StoreRequests::reservation), for
    /// [`Call::handle_outcomes`](super::Call::handle_outcomes).
    AskStore,
    /// The request must be sent with this credential, for [`Call::handle_reply`](super::Call::handle_reply).
    Send {
        /// Its index in the provider's list.
        credential: usize,
    },
    /// The call has ended without a reply.
    Fail(CallFailure),
}

/// The next step of a call after the end of an attempt. First the driver must send
/// [`StoreRequests::updates`](super::StoreRequests::updates) to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// None: the reply is the result of the call.
    Done,
    /// None: there is no other attempt, for this reason.
    Failed(CallFailure),
    /// Another attempt at this time or later, with [`Call::start`](super::Call::start).
    RetryAt(Time),
    /// A new login with this credential, then [`Call::start`](super::Call::start), or this reply if it fails.
    RenewLogin {
        /// Its index in the provider's list.
        credential: usize,
    },
}
