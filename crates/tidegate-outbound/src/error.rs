//! The errors of calls, in Rust and as JSON.

use std::fmt;

use serde::Serialize;
use tidegate_core::breaker::BreakerState;
use tidegate_core::call::CallFailure;
use tidegate_core::retry::{NoRetryReason, UnreplayableReason};
use tidegate_core::time::UtcText;
use tidegate_core::{Lane, Span, Time};
use tidegate_policy::describe_seconds;
use tidegate_policy::outbound::{OutboundConfig, ProviderConfig};
use tidegate_store::StoreError;

use super::CallStats;

/// A call without a successful reply.
#[derive(Debug)]
pub struct CallError<T = ()> {
    /// The provider of the call.
    pub provider: String,
    /// The reason of the failure.
    pub kind: CallErrorKind,
    /// The last reply, if it made the call fail. Pass it on, because it says more than an error of Tidegate.
    pub last_reply: Option<T>,
    /// The statistics of the call until then.
    pub stats: CallStats,
    /// The time of the failure.
    pub failed_at: Time,
}

/// The reason that a call failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CallErrorKind {
    /// The provider failed too often. Its breaker is open, or is half-open with all its test calls in flight.
    #[error("the circuit breaker is {}", state.name())]
    Unavailable {
        /// The state of the breaker.
        state: BreakerState,
        /// The failures that opened it.
        failures: u32,
        /// The time until it may let a call through.
        reset_in: Span,
    },
    /// A limit has no room before the call's deadline.
    #[error("the limit `{limit}` has no room before the deadline")]
    RateLimited {
        /// The limit.
        limit: String,
        /// The time when the call could be sent; `None` if never.
        earliest: Option<Time>,
    },
    /// The pace that the provider sustains has no room before the call's deadline.
    #[error("the provider's pace has no room before the deadline")]
    Paced {
        /// The time when the call could be sent.
        earliest: Time,
    },
    /// A calendar quota is spent.
    #[error("the quota `{limit}` is spent")]
    QuotaSpent {
        /// The limit.
        limit: String,
        /// The start of its next period; `None` if no period has room for the call.
        resets_at: Option<Time>,
    },
    /// The provider has asked for pauses, so that no credential is usable for the call before its deadline.
    #[error("the provider has asked for pauses: no credential is usable for this call before its deadline")]
    CredentialsCooling {
        /// The time when the first is usable again; `None` if none becomes usable without a change.
        earliest: Option<Time>,
    },
    /// The provider, which has no credentials, has asked for a pause and takes no such call before the deadline.
    #[error("the provider has asked for a pause and takes no such call before the deadline")]
    CoolingDown {
        /// The time when calls are sent again; `None` if not without a change.
        earliest: Option<Time>,
    },
    /// An operator has stopped the calls to the provider, and ends that when it is time.
    #[error("an operator has paused the provider")]
    ProviderPaused,
    /// The call's lane is paused until after the deadline.
    #[error("background calls rest outside their hours")]
    LanePaused {
        /// The end of the pause.
        until: Time,
    },
    /// The queue of the call's lane is full, and has no place for the call or has given it to a later one.
    #[error("the queue of the {} lane is full", lane.name())]
    QueueFull {
        /// The lane.
        lane: Lane,
    },
    /// The deadline passed while the call waited in the queue, or for a reply that had hardly any time left.
    #[error("the deadline passed before there was a reply")]
    DeadlineExceeded,
    /// No attempt succeeded.
    #[error("{}", exhausted_text(*attempts))]
    RetriesExhausted {
        /// The number of requests that were sent.
        attempts: u32,
        /// The time when calls are sent again, if the provider has throttled the last request and this is known.
        earliest: Option<Time>,
    },
    /// The provider asks for a longer pause than calls may wait.
    #[error("the provider takes calls again in {}, later than calls wait (`retry.max_retry_after`)", describe_seconds(retry_after.as_secs_ceil()))]
    RetryAfterTooLong {
        /// The length of the pause.
        retry_after: Span,
    },
    /// The next attempt would come too late.
    #[error("the next attempt would come after the deadline")]
    NoTimeLeft {
        /// The time of the next attempt.
        earliest: Time,
    },
    /// The request may have been carried out, and must not be carried out twice.
    #[error("the request isn't idempotent and has no idempotency key, so it isn't sent again")]
    NotIdempotent,
    /// The request can't be sent again.
    #[error("the request can't be sent again: {}", unreplayable_text(.0))]
    Unreplayable(UnreplayableReason),
    /// The provider fails too many calls, so not all of them can be retried.
    #[error("the provider's retry budget is spent")]
    BudgetSpent,
    /// The reply is final.
    #[error("the reply says that another attempt would fare no better")]
    Final,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn exhausted_text(attempts: u32) -> String {
    if attempts == 1 { "the only attempt failed".to_owned() } else { format!("none of {attempts} attempts succeeded") }
}

fn unreplayable_text(reason: &UnreplayableReason) -> &'static str {
    match reason {
        UnreplayableReason::BodyTooLarge => "its body is larger than what is kept for another attempt",
        UnreplayableReason::OneShotBody => "its body can be read only once",
    }
}

impl CallErrorKind {
    /// The reasons of failures, as in metrics.
    pub const REASONS: [&str; 18] = [
        "breaker",
        "rate_limited",
        "paced",
        "quota_spent",
        "credentials_cooling",
        "cooling_down",
        "lane_paused",
        "queue_full",
        "deadline_exceeded",
        "retries_exhausted",
        "retry_after_too_long",
        "no_time_left",
        "not_idempotent",
        "unreplayable",
        "budget_spent",
        "final",
        "store",
        "provider_paused",
    ];

    /// The index of its reason in [`REASONS`](Self::REASONS).
    pub(super) fn reason_index(&self) -> usize {
        match self {
            Self::Unavailable { .. } => 0,
            Self::RateLimited { .. } => 1,
            Self::Paced { .. } => 2,
            Self::QuotaSpent { .. } => 3,
            Self::CredentialsCooling { .. } => 4,
            Self::CoolingDown { .. } => 5,
            Self::LanePaused { .. } => 6,
            Self::QueueFull { .. } => 7,
            Self::DeadlineExceeded => 8,
            Self::RetriesExhausted { .. } => 9,
            Self::RetryAfterTooLong { .. } => 10,
            Self::NoTimeLeft { .. } => 11,
            Self::NotIdempotent => 12,
            Self::Unreplayable(_) => 13,
            Self::BudgetSpent => 14,
            Self::Final => 15,
            Self::Store(_) => 16,
            Self::ProviderPaused => 17,
        }
    }

    /// The HTTP status for the caller, and the error's name in JSON.
    fn status_and_name(&self) -> (u16, &'static str) {
        match self {
            Self::RateLimited { .. } | Self::Paced { .. } | Self::CoolingDown { .. } => (429, "RateLimitedError"),
            Self::QuotaSpent { .. } => (429, "QuotaSpentError"),
            Self::CredentialsCooling { .. } => (429, "CredentialsCoolingError"),
            Self::RetryAfterTooLong { .. } => (429, "RetryAfterTooLongError"),
            Self::RetriesExhausted { .. } | Self::BudgetSpent => (502, "RetriesExhaustedError"),
            Self::NotIdempotent => (502, "NotIdempotentError"),
            Self::Unreplayable(_) => (502, "UnreplayableBodyError"),
            Self::Final => (502, "UpstreamError"),
            Self::Unavailable { .. } => (503, "ProviderUnavailableError"),
            Self::ProviderPaused => (503, "ProviderPausedError"),
            Self::LanePaused { .. } => (503, "OutsideHoursError"),
            Self::QueueFull { .. } => (503, "QueueFullError"),
            Self::Store(_) => (503, "StoreError"),
            Self::DeadlineExceeded | Self::NoTimeLeft { .. } => (504, "DeadlineExceededError"),
        }
    }

    pub(super) fn new(config: &OutboundConfig, provider: &ProviderConfig, failure: CallFailure) -> Self {
        let name = |limit| config.limit_info(limit).name.clone();
        let known_time = |at: Time| (!at.is_never()).then_some(at);
        match failure {
            CallFailure::Unavailable(refusal) => {
                Self::Unavailable { state: refusal.state, failures: refusal.failures, reset_in: refusal.reset_in }
            }
            CallFailure::RateLimited { limit, earliest } => {
                Self::RateLimited { limit: name(limit), earliest: known_time(earliest) }
            }
            CallFailure::QuotaSpent { limit, resets_at } => {
                Self::QuotaSpent { limit: name(limit), resets_at: known_time(resets_at) }
            }
            CallFailure::Paced { earliest } => Self::Paced { earliest },
            CallFailure::CredentialsCooling { earliest } if provider.credentials.is_empty() => {
                Self::CoolingDown { earliest: known_time(earliest) }
            }
            CallFailure::CredentialsCooling { earliest } => Self::CredentialsCooling { earliest: known_time(earliest) },
            CallFailure::ProviderPaused => Self::ProviderPaused,
            CallFailure::LanePaused { until } => Self::LanePaused { until },
            CallFailure::QueueFull(full) => Self::QueueFull { lane: full.lane },
            CallFailure::DeadlineExceeded => Self::DeadlineExceeded,
            CallFailure::NotRetried(reason) => match reason {
                NoRetryReason::Final => Self::Final,
                NoRetryReason::NotIdempotent => Self::NotIdempotent,
                NoRetryReason::Unreplayable(why) => Self::Unreplayable(why),
                NoRetryReason::Exhausted { attempts } => Self::RetriesExhausted { attempts, earliest: None },
                NoRetryReason::RetryAfterTooLong { retry_after } => Self::RetryAfterTooLong { retry_after },
                NoRetryReason::Deadline { earliest } => Self::NoTimeLeft { earliest },
                NoRetryReason::BudgetSpent => Self::BudgetSpent,
            },
        }
    }
}

impl<T> CallError<T> {
    /// Converts the last reply.
    pub(super) fn map_reply<R>(self, convert: impl FnOnce(T) -> R) -> CallError<R> {
        let Self { provider, kind, last_reply, stats, failed_at } = self;
        CallError { provider, kind, last_reply: last_reply.map(convert), stats, failed_at }
    }

    /// The time after which another call can succeed, if known.
    pub fn retry_after(&self) -> Option<Span> {
        let at = match self.kind {
            CallErrorKind::Unavailable { reset_in: wait, .. }
            | CallErrorKind::RetryAfterTooLong { retry_after: wait } => return Some(wait),
            CallErrorKind::RateLimited { earliest: at, .. }
            | CallErrorKind::QuotaSpent { resets_at: at, .. }
            | CallErrorKind::CredentialsCooling { earliest: at }
            | CallErrorKind::CoolingDown { earliest: at }
            | CallErrorKind::RetriesExhausted { earliest: at, .. } => at,
            CallErrorKind::LanePaused { until: at }
            | CallErrorKind::NoTimeLeft { earliest: at }
            | CallErrorKind::Paced { earliest: at } => Some(at),
            _ => None,
        };
        at.map(|at| at.since(self.failed_at))
    }

    /// The HTTP status of the error: 429 for a limit, 502, 503 or 504 for a failure.
    pub fn status(&self) -> u16 {
        self.kind.status_and_name().0
    }

    /// The error in the form for JSON.
    pub fn to_body(&self) -> CallErrorBody<'_> {
        let (mut retry_after, mut attempts) = (self.retry_after(), Some(self.stats.attempts));
        let (mut state, mut failure_count, mut reset_in) = (None, None, None);
        let message = match &self.kind {
            CallErrorKind::Unavailable { state: found, failures, reset_in: wait } => {
                (state, failure_count) = (Some(found.name()), Some(*failures));
                reset_in = Some(wait.as_micros().div_ceil(1000));
                (retry_after, attempts) = (None, None);
                format!("Circuit breaker is {} for {}", found.name(), self.provider)
            }
            kind => format!("{}: {kind}", self.provider),
        };
        let limit = match &self.kind {
            CallErrorKind::RateLimited { limit, .. } | CallErrorKind::QuotaSpent { limit, .. } => Some(limit.as_str()),
            _ => None,
        };
        CallErrorBody {
            error: self.kind.status_and_name().1,
            message,
            provider: &self.provider,
            state,
            failure_count,
            reset_in,
            limit,
            retry_after: retry_after.map(Span::as_secs_ceil),
            earliest: retry_after.map(|span| UtcText::from(self.failed_at + span).to_string()),
            attempts,
        }
    }
}

impl<T> fmt::Display for CallError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the call to {} failed: {}", self.provider, self.kind)?;
        match self.retry_after().filter(|_| !matches!(self.kind, CallErrorKind::RetryAfterTooLong { .. })) {
            Some(wait) => write!(f, "; retry in {}", describe_seconds(wait.as_secs_ceil())),
            None => Ok(()),
        }
    }
}

impl<T: fmt::Debug> std::error::Error for CallError<T> {}

/// The JSON form of a call's failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CallErrorBody<'a> {
    /// The kind of the error: `ProviderUnavailableError`, `RateLimitedError` …
    pub error: &'static str,
    /// A message for people.
    pub message: String,
    /// The provider of the call.
    pub provider: &'a str,
    /// The state of an open breaker: `open` or `half-open`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<&'static str>,
    /// The failures that opened it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure_count: Option<u32>,
    /// Milliseconds until it may let a call through.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reset_in: Option<u64>,
    /// The limit that has no room.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<&'a str>,
    /// Seconds until another call can succeed, rounded up. For an open breaker see `reset_in`.
    #[serde(rename = "retry_after", skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<u64>,
    /// The same as a time, in UTC: `2026-11-21 12:01:45Z`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub earliest: Option<String>,
    /// The number of requests that were sent; omitted for an open breaker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
}
