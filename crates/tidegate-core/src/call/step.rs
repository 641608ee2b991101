//! What a driver and a call tell each other.

use crate::breaker::BreakerRefusal;
use crate::lanes::QueueFullError;
use crate::remaining::Remaining;
use crate::retry::{Delivery, NoRetryReason, UnreplayableReason};
use crate::{Class, LimitId, Span, Time};

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttemptReport {
    /// What it means.
    pub class: Class,
    /// Whether the request may be sent again: see [`is_repeatable`](crate::retry::is_repeatable).
    pub is_repeatable: bool,
    /// Why it can't be sent again, if it can't.
    pub unreplayable_reason: Option<UnreplayableReason>,
    /// Whether the provider asks not to be sent it again, whatever it means.
    pub asks_not_to_retry: bool,
    /// How long the provider asks to be left alone.
    pub retry_after: Option<Span>,
    /// Until when the provider says that the credential has nothing left.
    pub spent_until: Option<Time>,
    /// What the provider says is left of the credential's limits.
    pub remaining: Remaining,
    /// How far the request came.
    pub delivery: Delivery,
    /// Whether its body is still to come: if the reply is the call's last, the call stays among those in flight until
    /// [`InFlight::end`](super::InFlight::end).
    pub is_streaming: bool,
}

impl AttemptReport {
    /// The end of an attempt of which nothing else is known, and which isn't to be repeated.
    pub const fn new(class: Class, reach: Delivery) -> Self {
        Self {
            class,
            is_repeatable: false,
            unreplayable_reason: None,
            asks_not_to_retry: false,
            retry_after: None,
            spent_until: None,
            remaining: Remaining { calls: None, cost: None },
            delivery: reach,
            is_streaming: false,
        }
    }
}

/// Why a call failed that got no reply, or whose last reply is not to be had in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// The breaker is open.
    Unavailable(BreakerRefusal),
    /// A limit has no room before the deadline.
    RateLimited {
        /// Which limit.
        limit: LimitId,
        /// When the call could have been sent; [`Time::NEVER`] if never.
        earliest: Time,
    },
    /// A calendar quota is spent for longer than the deadline.
    QuotaSpent {
        /// Which limit.
        limit: LimitId,
        /// When its next period begins.
        resets_at: Time,
    },
    /// No credential is good before the deadline.
    CredentialsCooling {
        /// When the first is; [`Time::NEVER`] if none comes back by itself.
        earliest: Time,
    },
    /// The call's lane rests, as background does outside its hours, beyond the deadline.
    LanePaused {
        /// When the lane goes on.
        until: Time,
    },
    /// The provider's pace has no room before the deadline.
    Paced {
        /// When the call could have been sent.
        earliest: Time,
    },
    /// The call's lane is full.
    QueueFull(QueueFullError),
    /// The deadline passed while the call was waiting for its turn, or for a reply that it left hardly any time for.
    DeadlineExceeded,
    /// The last reply or fault stands: there is no other attempt, for this reason.
    NotRetried(NoRetryReason),
}

/// A call's progress after its turn or a store's answer, once the driver has told the store what
/// [`StoreRequests::updates`](super::StoreRequests::updates) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallProgress {
    /// It waits. The lanes name its ticket again, for [`Call::handle_turn`](super::Call::handle_turn) or
    /// [`Call::handle_expiry`](super::Call::handle_expiry).
    Wait,
    /// The store is to be asked what [`StoreRequests::reservation`](super::StoreRequests::reservation) says, for
    /// [`Call::handle_outcomes`](super::Call::handle_outcomes).
    AskStore,
    /// The request is to be sent with this credential, for [`Call::handle_reply`](super::Call::handle_reply).
    Send {
        /// Its place in the provider's list.
        credential: usize,
    },
    /// It is over without a reply.
    Fail(CallFailure),
}

/// The next step of a call whose attempt has ended, once the driver has told the store what
/// [`StoreRequests::updates`](super::StoreRequests::updates) says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// None: the reply is the call's.
    Done,
    /// None: there is no other attempt, for this reason.
    Failed(CallFailure),
    /// Another attempt from this moment on, by [`Call::start`](super::Call::start).
    RetryAt(Time),
    /// A new login with this credential, then [`Call::start`](super::Call::start). If the login fails, the reply that
    /// asked for it is the call's.
    RenewLogin {
        /// Its place in the provider's list.
        credential: usize,
    },
}
