//! The verdict: the meaning of a reply, decided once from the request, the head and the body of its reply.
//!
//! A reply can say four things: its [class](Class), a wait, allowances, and its [scope](Scope). Retries, breaker,
//! cool-downs, learning, reports and logs follow from the verdict alone.

use crate::{LimitId, Remaining, Span, Time};

/// The class of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The provider did the requested work. With a wait, it asks for a pause.
    Success,
    /// The provider has received too many calls and has not carried this one out: back off, or use another credential.
    Throttled,
    /// A quota of the credential is spent, of a day, a month or an amount of money. The call was not carried out.
    Quota,
    /// The provider is overloaded or closed for a while. The call may have been carried out.
    Unavailable,
    /// The provider or the connection failed, and may work later.
    Transient,
    /// The request itself is wrong and would fail again.
    Permanent,
    /// The credential is rejected.
    Auth,
    /// The request was sent, and its outcome is unclear. It is never sent again.
    Unknown,
    /// The caller cancelled the call before a reply came.
    Cancelled,
}

impl Class {
    /// All classes.
    pub const ALL: [Self; 9] = [
        Self::Success,
        Self::Throttled,
        Self::Quota,
        Self::Unavailable,
        Self::Transient,
        Self::Permanent,
        Self::Auth,
        Self::Unknown,
        Self::Cancelled,
    ];

    /// The class of an HTTP reply by its status code alone.
    ///
    /// | status | class |
    /// | --- | --- |
    /// | 1xx, 2xx, 3xx | success |
    /// | 401, 403 | auth |
    /// | 408 | transient |
    /// | 418, 420, 429, 509 | throttled |
    /// | 425, 449, 529 | unavailable |
    /// | any other 4xx; 501, 505 | permanent |
    /// | any other 5xx | transient |
    ///
    /// 418, 420, 449, 509 and 529 are used by providers without being registered. A number outside 100 to 599 is no status
    /// code and counts as 5xx (RFC 9110 §15).
    pub const fn from_status(status: u16) -> Self {
        match status {
            100..=399 => Self::Success,
            401 | 403 => Self::Auth,
            408 => Self::Transient,
            418 | 420 | 429 | 509 => Self::Throttled,
            425 | 449 | 529 => Self::Unavailable,
            400..=499 | 501 | 505 => Self::Permanent,
            _ => Self::Transient,
        }
    }

    /// True if the same request might succeed later.
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::Throttled | Self::Quota | Self::Unavailable | Self::Transient)
    }

    /// True if the provider has refused the request before any work, so that it may be sent again with any method.
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::Throttled | Self::Quota)
    }

    /// True if it counts as a failure of the provider.
    pub const fn is_failure(self) -> bool {
        matches!(self, Self::Unavailable | Self::Transient | Self::Unknown)
    }

    /// True if it proves that the provider works.
    pub const fn proves_provider(self) -> bool {
        matches!(self, Self::Success | Self::Permanent | Self::Auth)
    }

    /// The name of the class in policies, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Throttled => "throttled",
            Self::Quota => "quota",
            Self::Unavailable => "unavailable",
            Self::Transient => "transient",
            Self::Permanent => "permanent",
            Self::Auth => "auth",
            Self::Unknown => "unknown",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The part of a provider that a verdict is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// The [scope of the call](crate::call::CallScope); the whole credential if the call has none.
    #[default]
    Call,
    /// Everything that uses the credential.
    Credential,
    /// All credentials: an address, or the service itself.
    Provider,
    /// The scope of this key, which the reply names. Calls of the same route belong to it from now on.
    Named(u64),
}

/// The meaning of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The class.
    pub class: Class,
    /// The wait that the reply asks for. Zero is the same as `None`.
    pub wait: Option<Span>,
    /// True if the provider asks for more than this wait, which is the longest pause. Then one call at a time tries it.
    pub is_cut: bool,
    /// The part of the provider that waits.
    pub scope: Scope,
    /// True if the request was not carried out, so that it may be sent again with any method.
    pub was_refused: bool,
    /// True if the provider asks not to send the request again with this credential, whatever the class is.
    pub asks_not_to_retry: bool,
    /// True if the reply, of [`Class::Auth`], rejects the credential itself (401), so that another one may be accepted.
    /// False if it refuses what this credential asks for (403).
    pub rejects_credential: bool,
    /// True if the provider keeps room for the call from the end of the wait on, with a throttled reply.
    pub has_reservation: bool,
    /// The calendar quota of the policy that the provider reports to be spent. The wait is then the time until its period
    /// ends.
    pub spent_quota: Option<LimitId>,
    /// The time until which the provider reports that nothing is left.
    pub spent_until: Option<Time>,
    /// The remaining amounts, as the provider reports them.
    pub remaining: Remaining,
}

impl Verdict {
    /// A verdict of a class without anything else.
    pub const fn new(class: Class) -> Self {
        Self {
            class,
            wait: None,
            is_cut: false,
            scope: Scope::Call,
            was_refused: class.is_refusal(),
            asks_not_to_retry: false,
            rejects_credential: false,
            has_reservation: false,
            spent_quota: None,
            spent_until: None,
            remaining: Remaining { calls: None, cost: None },
        }
    }

    /// The wait that the reply asks for, if it isn't zero.
    pub fn announced_wait(&self) -> Option<Span> {
        self.wait.filter(|wait| !wait.is_zero())
    }
}
