//! Why a call has no good reply, in Rust and as JSON.

use std::fmt;

use serde::Serialize;
use tidegate_core::breaker::BreakerState;
use tidegate_core::call::Failure;
use tidegate_core::retry::{GiveUp, Unreplayable};
use tidegate_core::{Lane, Span, Time};
use tidegate_policy::outbound::OutboundConfig;
use tidegate_store::StoreError;

use super::Happened;
use super::floor::Broken;
use crate::reply::timestamp;

/// A call without a good reply.
#[derive(Debug)]
pub struct CallError<T = ()> {
    /// Whom it was for.
    pub provider: String,
    /// Why it failed.
    pub why: Why,
    /// The last reply, if that is what failed it: to be passed on, as it says more than an error of ours could.
    pub value: Option<T>,
    /// What happened until then.
    pub happened: Happened,
    /// When it failed.
    pub at: Time,
}

/// Why a call failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// The provider failed too often: its breaker is open, or all that may try it are under way.
    #[error("the circuit breaker is {}", state.name())]
    Unavailable {
        /// What the breaker does.
        state: BreakerState,
        /// The failures that opened it.
        failures: u32,
        /// After how long it may let a call through.
        reset_in: Span,
    },
    /// A limit has no room before the call's deadline.
    #[error("the limit `{limit}` has no room before the deadline")]
    RateLimited {
        /// Which limit.
        limit: String,
        /// When the call could be sent; `None` if never.
        earliest: Option<Time>,
    },
    /// The pace that the provider is found to bear has no room before the call's deadline.
    #[error("the provider's pace has no room before the deadline")]
    Paced {
        /// When the call could be sent.
        earliest: Time,
    },
    /// A calendar quota is spent.
    #[error("the quota `{limit}` is spent")]
    QuotaSpent {
        /// Which limit.
        limit: String,
        /// When its next period begins; `None` if no period has room for the call.
        resets_at: Option<Time>,
    },
    /// No credential is good before the deadline.
    #[error("all credentials are cooling down")]
    CredentialsCooling {
        /// When the first is good again; `None` if none comes back by itself.
        earliest: Option<Time>,
    },
    /// The call's lane rests until after the deadline.
    #[error("background calls rest outside their hours")]
    Resting {
        /// When it goes on.
        until: Time,
    },
    /// As many calls wait as may.
    #[error("the queue of the {} lane is full", lane.name())]
    QueueFull {
        /// In which lane.
        lane: Lane,
    },
    /// The deadline passed while the call waited for its turn, or for a reply that it left hardly any time for.
    #[error("the deadline passed before there was a reply")]
    DeadlineExceeded,
    /// No attempt succeeded.
    #[error("none of {attempts} attempts succeeded")]
    RetriesExhausted {
        /// How many there were, other credentials' not counted.
        attempts: u32,
    },
    /// The provider asks for a longer pause than calls wait.
    #[error("the provider asks to be left alone for {} s", retry_after.as_secs_ceil())]
    RetryAfterTooLong {
        /// For how long.
        retry_after: Span,
    },
    /// The next attempt would come too late.
    #[error("the next attempt would come after the deadline")]
    NoTimeLeft {
        /// When it would come.
        earliest: Time,
    },
    /// The request may have been carried out, and must not be twice.
    #[error("the request isn't idempotent and has no idempotency key, so it isn't sent again")]
    NotIdempotent,
    /// The request can't be sent again.
    #[error("the request can't be sent again: {}", unreplayable(.0))]
    Unreplayable(Unreplayable),
    /// The provider fails too many calls for all of them to be tried again.
    #[error("the provider's retry budget is spent")]
    BudgetSpent,
    /// What the reply says is final.
    #[error("the reply says that another attempt would fare no better")]
    Final,
    /// The store broke.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn unreplayable(why: &Unreplayable) -> &'static str {
    match why {
        Unreplayable::BodyTooLarge => "its body is larger than what is kept for another attempt",
        Unreplayable::OneShotBody => "its body can be read only once",
    }
}

impl Why {
    /// The status that tells it to whoever asked.
    fn status(&self) -> u16 {
        match self {
            Self::RateLimited { .. }
            | Self::Paced { .. }
            | Self::QuotaSpent { .. }
            | Self::CredentialsCooling { .. }
            | Self::RetryAfterTooLong { .. } => 429,
            Self::Unavailable { .. } | Self::Resting { .. } | Self::QueueFull { .. } | Self::Store(_) => 503,
            Self::DeadlineExceeded | Self::NoTimeLeft { .. } => 504,
            Self::RetriesExhausted { .. }
            | Self::NotIdempotent
            | Self::Unreplayable(_)
            | Self::BudgetSpent
            | Self::Final => 502,
        }
    }

    fn error(&self) -> &'static str {
        match self {
            Self::Unavailable { .. } => "ProviderUnavailableError",
            Self::RateLimited { .. } | Self::Paced { .. } => "RateLimitedError",
            Self::QuotaSpent { .. } => "QuotaSpentError",
            Self::CredentialsCooling { .. } => "CredentialsCoolingError",
            Self::Resting { .. } => "OutsideHoursError",
            Self::QueueFull { .. } => "QueueFullError",
            Self::DeadlineExceeded | Self::NoTimeLeft { .. } => "DeadlineExceededError",
            Self::RetriesExhausted { .. } | Self::BudgetSpent => "RetriesExhaustedError",
            Self::RetryAfterTooLong { .. } => "RetryAfterTooLongError",
            Self::NotIdempotent => "NotIdempotentError",
            Self::Unreplayable(_) => "UnreplayableBodyError",
            Self::Final => "UpstreamError",
            Self::Store(_) => "StoreError",
        }
    }
}

impl<T> CallError<T> {
    pub(super) fn new(
        plan: &OutboundConfig,
        provider: &str,
        broken: Broken,
        value: Option<T>,
        happened: Happened,
        at: Time,
    ) -> Self {
        let name = |limit| plan.limit_info(limit).name.clone();
        let moment = |at: Time| (!at.is_never()).then_some(at);
        let why = match broken {
            Broken::Store(error) => Why::Store(error),
            Broken::Failed(failure) => match failure {
                Failure::Unavailable(refusal) => {
                    Why::Unavailable { state: refusal.state, failures: refusal.failures, reset_in: refusal.reset_in }
                }
                Failure::RateLimited { limit, earliest } => {
                    Why::RateLimited { limit: name(limit), earliest: moment(earliest) }
                }
                Failure::QuotaSpent { limit, resets_at } => {
                    Why::QuotaSpent { limit: name(limit), resets_at: moment(resets_at) }
                }
                Failure::Paced { earliest } => Why::Paced { earliest },
                Failure::Cooling { earliest } => Why::CredentialsCooling { earliest: moment(earliest) },
                Failure::Resting { until } => Why::Resting { until },
                Failure::QueueFull(full) => Why::QueueFull { lane: full.lane },
                Failure::DeadlineExceeded => Why::DeadlineExceeded,
                Failure::GaveUp(give_up) => match give_up {
                    GiveUp::Final => Why::Final,
                    GiveUp::NotIdempotent => Why::NotIdempotent,
                    GiveUp::Unreplayable(why) => Why::Unreplayable(why),
                    GiveUp::Exhausted { attempts } => Why::RetriesExhausted { attempts },
                    GiveUp::RetryAfterTooLong { retry_after } => Why::RetryAfterTooLong { retry_after },
                    GiveUp::Deadline { earliest } => Why::NoTimeLeft { earliest },
                    GiveUp::BudgetSpent => Why::BudgetSpent,
                },
            },
        };
        Self { provider: provider.to_owned(), why, value, happened, at }
    }

    /// After how long another call has a chance, as far as that is known.
    pub fn retry_after(&self) -> Option<Span> {
        let at = |moment: Time| Some(moment.since(self.at));
        match self.why {
            Why::Unavailable { reset_in, .. } => Some(reset_in),
            Why::RateLimited { earliest: moment, .. }
            | Why::QuotaSpent { resets_at: moment, .. }
            | Why::CredentialsCooling { earliest: moment } => moment.and_then(at),
            Why::Resting { until: moment } | Why::NoTimeLeft { earliest: moment } | Why::Paced { earliest: moment } => {
                at(moment)
            }
            Why::RetryAfterTooLong { retry_after } => Some(retry_after),
            _ => None,
        }
    }

    /// The HTTP status that tells it: 429 for a limit, 502, 503 or 504 for a failure.
    pub fn status(&self) -> u16 {
        self.why.status()
    }

    /// The error as JSON tells it.
    pub fn problem(&self) -> Problem<'_> {
        let (mut retry_after, mut attempts) = (self.retry_after(), Some(self.happened.attempts));
        let (mut state, mut failure_count, mut reset_in) = (None, None, None);
        let message = match &self.why {
            Why::Unavailable { state: found, failures, reset_in: span } => {
                state = Some(found.name());
                failure_count = Some(*failures);
                reset_in = Some(span.as_micros().div_ceil(1000));
                (retry_after, attempts) = (None, None);
                format!("Circuit breaker is {} for {}", found.name(), self.provider)
            }
            why => format!("{}: {why}", self.provider),
        };
        let limit = match &self.why {
            Why::RateLimited { limit, .. } | Why::QuotaSpent { limit, .. } => Some(limit.as_str()),
            _ => None,
        };
        Problem {
            error: self.why.error(),
            message,
            provider: &self.provider,
            state,
            failure_count,
            reset_in,
            limit,
            retry_after: retry_after.map(Span::as_secs_ceil),
            earliest: retry_after.map(|span| timestamp(self.at + span).to_string()),
            attempts,
        }
    }
}

impl<T> fmt::Display for CallError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the call to {} failed: {}", self.provider, self.why)
    }
}

impl<T: fmt::Debug> std::error::Error for CallError<T> {}

/// A call's failure as programs read it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem<'a> {
    /// What kind: `ProviderUnavailableError`, `RateLimitedError` …
    pub error: &'static str,
    /// What happened, in words.
    pub message: String,
    /// Whom the call was for.
    pub provider: &'a str,
    /// Of an open breaker: `open` or `half-open`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<&'static str>,
    /// The failures that opened it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_count: Option<u32>,
    /// After how many milliseconds it may let a call through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reset_in: Option<u64>,
    /// The limit that has no room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<&'a str>,
    /// After how many seconds another call has a chance, rounded up; of an open breaker, `reset_in` says it.
    #[serde(rename = "retry_after", skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<u64>,
    /// The same as a moment, in UTC: `2026-11-21 12:01:45Z`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub earliest: Option<String>,
    /// How many requests were sent; not of an open breaker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
}
