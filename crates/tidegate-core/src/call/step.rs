//! What a driver and a call tell each other.

use crate::allowance::Rests;
use crate::breaker::BreakerRefusal;
use crate::lanes::QueueFull;
use crate::retry::{GiveUp, Reach, Unreplayable};
use crate::{Class, LimitId, Span, Time};

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What it means.
    pub class: Class,
    /// Whether the request may be sent again: see [`is_repeatable`](crate::retry::is_repeatable).
    pub repeatable: bool,
    /// Why it can't be sent again, if it can't.
    pub unreplayable: Option<Unreplayable>,
    /// Whether the provider asks not to be sent it again, whatever it means.
    pub stop: bool,
    /// How long the provider asks to be left alone.
    pub retry_after: Option<Span>,
    /// Until when the provider says that the credential has nothing left.
    pub spent_until: Option<Time>,
    /// What the provider says is left of the credential's limits.
    pub rests: Rests,
    /// How far the request came.
    pub reach: Reach,
    /// Whether its body is still to come: if the reply is the call's last, the call stays among those in flight until
    /// [`Remainder::ended`](super::Remainder::ended).
    pub streams: bool,
}

impl Reply {
    /// The end of an attempt of which nothing else is known, and which isn't to be repeated.
    pub const fn of(class: Class, reach: Reach) -> Self {
        Self {
            class,
            repeatable: false,
            unreplayable: None,
            stop: false,
            retry_after: None,
            spent_until: None,
            rests: Rests { calls: None, cost: None },
            reach,
            streams: false,
        }
    }
}

/// Why a call failed that got no reply, or whose last reply is not to be had in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
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
    Cooling {
        /// When the first is; [`Time::NEVER`] if none comes back by itself.
        earliest: Time,
    },
    /// The call's lane rests, as background does outside its hours, beyond the deadline.
    Resting {
        /// When the lane goes on.
        until: Time,
    },
    /// The provider's pace has no room before the deadline.
    Paced {
        /// When the call could have been sent.
        earliest: Time,
    },
    /// The call's lane is full.
    QueueFull(QueueFull),
    /// The deadline passed while the call was waiting for its turn, or for a reply that it left hardly any time for.
    DeadlineExceeded,
    /// The last reply or fault stands: there is no other attempt, for this reason.
    GaveUp(GiveUp),
}

/// What a driver is to do, after it has told the store what the desk's [`Orders`](super::Orders) say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait until the desk's lanes name the call's ticket, for [`Call::turn`](super::Call::turn) or [`Call::expired`](super::Call::expired).
    Queue,
    /// Ask the store what the [`Orders`](super::Orders) say, for [`Call::decided`](super::Call::decided).
    Ask,
    /// Send the request with this credential, for [`Call::replied`](super::Call::replied).
    Send {
        /// Its place in the provider's list.
        credential: usize,
    },
    /// Log this credential in anew, for [`Call::start`](super::Call::start). If that fails, the reply that asked for it is the call's.
    Renew {
        /// Its place in the provider's list.
        credential: usize,
    },
    /// Wait until this moment, for [`Call::start`](super::Call::start).
    Sleep(Time),
    /// It is over: the last reply is the call's, or there is a reason why it has none.
    Finish(Result<(), Failure>),
}
