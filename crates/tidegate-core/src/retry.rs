//! The class of a reply, and the decision if its call is retried.
//!
//! [`RetryTracker`] checks if a retry is useful (the class), harmless (the request may be repeated), possible (its body
//! can be sent again), in time (the deadline, `Retry-After`) and doesn't amplify an outage (the [`Budget`]).

use rand_core::Rng;

use crate::backoff::{Backoff, BackoffState};
use crate::{Budget, Class, Span, Time};

/// The fault of an attempt without a complete reply. Its class is always [`Class::Transient`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportFault {
    /// The provider never processed the request: no name, connection or TLS session, or the stream was refused
    /// unprocessed (HTTP/2 `REFUSED_STREAM`, `GOAWAY`; RFC 9113 §8.7).
    Unsent,
    /// The connection broke after part of the request was sent.
    Reset,
    /// No reply came in time.
    TimedOut,
    /// The reply couldn't be understood, or broke off.
    InvalidReply,
}

impl TransportFault {
    /// The class of the fault.
    pub const fn class(self) -> Class {
        Class::Transient
    }

    /// True if the provider may have processed the request.
    pub const fn was_sent(self) -> bool {
        !matches!(self, Self::Unsent)
    }

    /// The stage that the request reached.
    pub const fn delivery(self) -> Delivery {
        match self {
            Self::Unsent => Delivery::Unsent,
            Self::Reset | Self::TimedOut => Delivery::Unknown,
            Self::InvalidReply => Delivery::Answered,
        }
    }
}

/// The stage that a request reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Nothing was sent: its charge is refunded.
    Unsent,
    /// It may still be on its way, and may be counted as late as assumed.
    Unknown,
    /// It was answered, so it was counted before its reply.
    Answered,
}

/// Returns true if a request may be sent again without doing its work twice: its method is idempotent (RFC 9110
/// §9.2.2), it carries an idempotency key that the provider supports, or nothing of it was sent.
pub fn is_repeatable(method: &str, has_idempotency_key: bool, was_sent: bool) -> bool {
    has_idempotency_key || !was_sent || matches!(method, "GET" | "HEAD" | "OPTIONS" | "TRACE" | "PUT" | "DELETE")
}

/// The reason why a repeatable request can't be sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnreplayableReason {
    /// Its body is larger than what is kept for another attempt.
    BodyTooLarge,
    /// Its body is a stream that can be read only once.
    OneShotBody,
}

/// The result of an attempt, as far as the decision on a retry needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedAttempt {
    /// The class of the reply or fault.
    pub class: Class,
    /// True if the request may be sent again without doing its work twice ([`is_repeatable`]).
    pub is_repeatable: bool,
    /// The reason why the request can't be sent again. `None` if it can.
    pub unreplayable_reason: Option<UnreplayableReason>,
    /// True if the server asks not to send it again, whatever its class. A spent quota may still be followed by a request
    /// with another credential.
    pub asks_not_to_retry: bool,
    /// The wait that the server asks for. Zero is the same as `None`.
    pub retry_after: Option<Span>,
    /// True if the server keeps room for the request from the end of `retry_after` on.
    pub has_reservation: bool,
    /// True if another credential could be used immediately.
    pub has_other_credential: bool,
}

impl FailedAttempt {
    /// True if its retry is taken from the budget: it would add to an outage. A retry after a wait that the server has
    /// named is expected.
    pub fn spends_budget(&self) -> bool {
        match self.class {
            Class::Transient => true,
            Class::Unavailable => self.retry_after.is_none_or(Span::is_zero),
            _ => false,
        }
    }
}

/// The rules of retries. At most `max_attempts + max_token_retries` requests are sent for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// The maximum number of attempts per call, including the first. Default 3. With 0 or 1, calls are never retried.
    pub max_attempts: u32,
    /// The maximum number of token retries: requests sent again at once with another credential, because the first was
    /// throttled or rejected. Default 5.
    pub max_token_retries: u32,
    /// The waits between attempts. Default 500 ms, doubling up to 8 s, with full jitter.
    pub backoff: Backoff,
    /// The longest `Retry-After` that a call waits for. With a longer one, it fails immediately. Default 5 min.
    pub max_retry_after: Span,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            max_token_retries: 5,
            backoff: Backoff::exponential(Span::from_millis(500), Span::from_secs(8)),
            max_retry_after: Span::from_secs(300),
        }
    }
}

/// The reason why a failed call isn't retried, in the order of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRetryReason {
    /// Another attempt would fail too, according to the class, or the server asks for no retry.
    Final,
    /// The request may have been processed and must not be processed twice.
    NotIdempotent,
    /// The request can't be sent again.
    Unreplayable(UnreplayableReason),
    /// It was the last attempt.
    Exhausted {
        /// The number of attempts, without token retries.
        attempts: u32,
    },
    /// The server asks for a longer wait than calls accept.
    RetryAfterTooLong {
        /// The wait that the server asks for.
        retry_after: Span,
    },
    /// The next attempt would start at the call's deadline or later.
    Deadline {
        /// The time at which it would start.
        earliest: Time,
    },
    /// The provider fails too many calls to retry all of them.
    BudgetSpent,
}

/// Counts the attempts of one call, and decides after each if and when there is another.
#[derive(Clone, Copy, Debug)]
pub struct RetryTracker {
    deadline: Time,
    attempts: u32,
    token_retries: u32,
    backoff: BackoffState,
}

impl RetryTracker {
    /// Creates the tracker of a call that must end by `deadline` ([`Time::NEVER`] for none).
    pub fn new(deadline: Time) -> Self {
        Self { deadline, attempts: 0, token_retries: 0, backoff: BackoffState::default() }
    }

    /// The number of ended attempts, without token retries.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The number of token retries: requests that were sent again at once with another credential.
    pub fn token_retries(&self) -> u32 {
        self.token_retries
    }

    /// Counts a token retry. Returns false if the call has made all that the rules allow.
    pub(crate) fn take_token_retry(&mut self, retry: &Retry) -> bool {
        let is_allowed = self.token_retries < retry.max_token_retries;
        if is_allowed {
            self.token_retries += 1;
        }
        is_allowed
    }

    /// The time at which a request that failed at `now` is sent again: immediately with another credential, otherwise
    /// after the backoff, but not before the server's `Retry-After`. With a reservation, exactly then.
    ///
    /// A retry of a transient failure is taken from `budget` as the last check. If it isn't sent, give it back.
    ///
    /// # Errors
    /// The reason why the call fails now, without another wait.
    pub fn next_attempt_at(
        &mut self,
        retry: &Retry,
        attempt: &FailedAttempt,
        budget: Option<&Budget>,
        now: Time,
        rng: &mut impl Rng,
    ) -> Result<Time, NoRetryReason> {
        // A provider that asks not to retry a spent quota means the credential.
        let may_switch =
            attempt.class == Class::Quota || attempt.class == Class::Throttled && !attempt.asks_not_to_retry;
        let switches_credential =
            may_switch && attempt.has_other_credential && self.token_retries < retry.max_token_retries;
        if !switches_credential {
            self.attempts = self.attempts.saturating_add(1);
        }
        if !switches_credential && attempt.asks_not_to_retry || !attempt.class.is_retryable() {
            return Err(NoRetryReason::Final);
        }
        if !attempt.is_repeatable {
            return Err(NoRetryReason::NotIdempotent);
        }
        if let Some(reason) = attempt.unreplayable_reason {
            return Err(NoRetryReason::Unreplayable(reason));
        }
        let min_wait = attempt.retry_after.unwrap_or(Span::ZERO);
        let wait = if switches_credential {
            Span::ZERO
        } else if self.attempts >= retry.max_attempts {
            return Err(NoRetryReason::Exhausted { attempts: self.attempts });
        } else if min_wait > retry.max_retry_after {
            return Err(NoRetryReason::RetryAfterTooLong { retry_after: min_wait });
        } else {
            let backoff = if attempt.has_reservation { Span::ZERO } else { self.backoff.next(&retry.backoff, rng) };
            backoff.max(min_wait)
        };
        let at = now + wait;
        if at >= self.deadline {
            return Err(NoRetryReason::Deadline { earliest: at });
        }
        if switches_credential {
            self.token_retries += 1;
        } else if attempt.spends_budget() && budget.is_some_and(|budget| !budget.take()) {
            return Err(NoRetryReason::BudgetSpent);
        }
        Ok(at)
    }
}

#[cfg(test)]
mod tests;
