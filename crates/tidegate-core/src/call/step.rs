//! The types that a driver and a call exchange.

use crate::breaker::BreakerRefusal;
use crate::lanes::QueueFullError;
use crate::remaining::Remaining;
use crate::retry::{Delivery, NoRetryReason, UnreplayableReason};
use crate::{Class, LimitId, Span, Time};

/// The end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptReport {
    /// The class of the result.
    pub class: Class,
    /// True if the request may be sent again: see [`is_repeatable`](crate::retry::is_repeatable).
    pub is_repeatable: bool,
    /// The reason why the request can't be sent again, if there is one.
    pub unreplayable_reason: Option<UnreplayableReason>,
    /// True if the provider asks not to send it again, whatever its class is.
    pub asks_not_to_retry: bool,
    /// True if the reply, of [`Class::Auth`], rejects the credential itself (401), so that another one may be accepted.
    /// False if it refuses what this credential asks for (403).
    pub rejects_credential: bool,
    /// The wait that the provider asks for.
    pub retry_after: Option<Span>,
    /// True if the provider keeps room for the call from the end of `retry_after` on, with a throttled reply.
    pub has_reservation: bool,
    /// True if the request presented a reservation. If it is throttled, the call backs off, also if the provider keeps
    /// room for it again.
    pub presented_reservation: bool,
    /// The calendar quota that the provider reports to be spent, with a throttled reply. `retry_after` is then the time
    /// until its period ends.
    pub spent_quota: Option<LimitId>,
    /// The time until which the provider reports that the credential has nothing left.
    pub spent_until: Option<Time>,
    /// The remaining amounts of the credential's limits, as the provider reports them.
    pub remaining: Remaining,
    /// The delivery of the request: unsent, answered or unknown.
    pub delivery: Delivery,
    /// True if the body is still to be read. After its last reply, a call is then in flight until
    /// [`InFlight::end`](super::InFlight::end).
    pub is_streaming: bool,
    /// True if the connection has switched protocols. Such a call may last for hours, so the adaptive limit doesn't count
    /// it.
    pub is_tunnel: bool,
}

impl AttemptReport {
    /// The end of an attempt without other data, which isn't repeatable.
    pub const fn new(class: Class, delivery: Delivery) -> Self {
        Self {
            class,
            is_repeatable: false,
            unreplayable_reason: None,
            asks_not_to_retry: false,
            rejects_credential: false,
            retry_after: None,
            has_reservation: false,
            presented_reservation: false,
            spent_quota: None,
            spent_until: None,
            remaining: Remaining { calls: None, cost: None },
            delivery,
            is_streaming: false,
            is_tunnel: false,
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
