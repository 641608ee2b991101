//! The class of a reply, and the decision if its call is retried.
//!
//! A retry must be useful (the class), harmless (the request may be repeated), possible (its body can be sent again)
//! and in time (the deadline, the server's `Retry-After`). It also must not amplify an outage (the [`Budget`]).
//! [`RetryTracker`] checks all of that in one place, once per attempt.

use rand_core::Rng;

use crate::backoff::{Backoff, BackoffState};
use crate::{Budget, Span, Time};

/// The class of a reply. All code that learns from a reply uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The provider did the requested work.
    Success,
    /// The provider has received too many calls: back off, or use another credential.
    Throttled,
    /// The provider or the connection failed, and may work later.
    Transient,
    /// The request itself is wrong and would fail again.
    Permanent,
    /// The credential is rejected.
    Auth,
    /// The caller cancelled the call before a reply came.
    Cancelled,
}

impl Class {
    /// The class of an HTTP reply by its status code.
    ///
    /// | status | class |
    /// | --- | --- |
    /// | 1xx, 2xx, 3xx | success |
    /// | 401, 403 | auth |
    /// | 408 | transient |
    /// | 429 | throttled |
    /// | any other 4xx; 501, 505 | permanent |
    /// | any other 5xx | transient |
    ///
    /// A number outside 100 to 599 is no status code and counts as 5xx (RFC 9110 §15).
    pub const fn from_status(status: u16) -> Self {
        match status {
            100..=399 => Self::Success,
            401 | 403 => Self::Auth,
            408 => Self::Transient,
            429 => Self::Throttled,
            400..=499 | 501 | 505 => Self::Permanent,
            _ => Self::Transient,
        }
    }

    /// Returns true if the same request might succeed later: throttled and transient.
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::Throttled | Self::Transient)
    }

    /// The name of the class in logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Throttled => "throttled",
            Self::Transient => "transient",
            Self::Permanent => "permanent",
            Self::Auth => "auth",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The fault of an attempt without a complete reply. Its class is always [`Class::Transient`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportFault {
    /// The provider never processed the request. Its name didn't resolve, or the connection was refused, timed out or
    /// failed its TLS handshake. Or the stream was refused unprocessed (HTTP/2 `REFUSED_STREAM`, `GOAWAY`; RFC 9113
    /// §8.7).
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

    /// Returns true if the provider may have processed the request.
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
    /// True if the server asks not to send it again, whatever its class.
    pub asks_not_to_retry: bool,
    /// The wait that the server asks for. Zero is the same as `None`.
    pub retry_after: Option<Span>,
    /// True if another credential could be used immediately.
    pub has_other_credential: bool,
}

/// The rules of retries. At most `max_attempts + max_token_retries` requests are sent for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// The maximum number of attempts per call, including the first. Default 3. With 0 or 1, calls are never retried.
    pub max_attempts: u32,
    /// The maximum number of token retries per call: throttled requests that are sent again immediately with another
    /// credential. They don't count as attempts. Default 5.
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

    /// The number of token retries: throttled requests that were sent again with another credential.
    pub fn token_retries(&self) -> u32 {
        self.token_retries
    }

    /// The time at which a request that failed at `now` is sent again: immediately with another credential, otherwise
    /// after the backoff, but not before the server's `Retry-After`.
    ///
    /// A retry of a transient failure is taken from `budget` if there is one. This is the last check, so a retry that
    /// is refused for another reason costs nothing. A call that is dropped before its retry is sent must give it back.
    ///
    /// # Errors
    /// The reason why the call fails now. There is no wait after the last failure.
    pub fn next_attempt_at(
        &mut self,
        retry: &Retry,
        attempt: &FailedAttempt,
        budget: Option<&Budget>,
        now: Time,
        rng: &mut impl Rng,
    ) -> Result<Time, NoRetryReason> {
        let switches_credential = attempt.class == Class::Throttled
            && attempt.has_other_credential
            && self.token_retries < retry.max_token_retries;
        if !switches_credential {
            self.attempts = self.attempts.saturating_add(1);
        }
        if attempt.asks_not_to_retry || !attempt.class.is_retryable() {
            return Err(NoRetryReason::Final);
        }
        if !attempt.is_repeatable {
            return Err(NoRetryReason::NotIdempotent);
        }
        if let Some(reason) = attempt.unreplayable_reason {
            return Err(NoRetryReason::Unreplayable(reason));
        }
        let wait = if switches_credential { Span::ZERO } else { self.next_wait(retry, attempt.retry_after, rng)? };
        let at = now + wait;
        if at >= self.deadline {
            return Err(NoRetryReason::Deadline { earliest: at });
        }
        if switches_credential {
            self.token_retries += 1;
        } else if attempt.class == Class::Transient && budget.is_some_and(|budget| !budget.take()) {
            return Err(NoRetryReason::BudgetSpent);
        }
        Ok(at)
    }

    fn next_wait(
        &mut self,
        retry: &Retry,
        retry_after: Option<Span>,
        rng: &mut impl Rng,
    ) -> Result<Span, NoRetryReason> {
        if self.attempts >= retry.max_attempts {
            return Err(NoRetryReason::Exhausted { attempts: self.attempts });
        }
        let min_wait = retry_after.unwrap_or(Span::ZERO);
        if min_wait > retry.max_retry_after {
            return Err(NoRetryReason::RetryAfterTooLong { retry_after: min_wait });
        }
        Ok(self.backoff.next(&retry.backoff, rng).max(min_wait))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BudgetSpec, Jitter};
    use core::convert::Infallible;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;
    use std::vec::Vec;

    const NOW: Time = Time::from_secs(1_000_000);
    const FAILED: FailedAttempt = FailedAttempt {
        class: Class::Transient,
        is_repeatable: true,
        unreplayable_reason: None,
        asks_not_to_retry: false,
        retry_after: None,
        has_other_credential: false,
    };
    const THROTTLED: FailedAttempt = FailedAttempt { class: Class::Throttled, ..FAILED };

    /// A generator that always returns the largest number.
    struct Highest;

    impl rand_core::TryRng for Highest {
        type Error = Infallible;
        fn try_next_u32(&mut self) -> Result<u32, Infallible> {
            Ok(u32::MAX)
        }
        fn try_next_u64(&mut self) -> Result<u64, Infallible> {
            Ok(u64::MAX)
        }
        fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
            bytes.fill(u8::MAX);
            Ok(())
        }
    }

    fn policy(max_attempts: u32, base_ms: u64, cap_s: u64) -> Retry {
        let backoff = Backoff::exponential(Span::from_millis(base_ms), Span::from_secs(cap_s));
        Retry { max_attempts, backoff: backoff.with_jitter(Jitter::None), ..Retry::default() }
    }

    /// The waits in milliseconds of a call with the same result for every attempt, and the reason why it ended.
    fn waits(retry: Retry, attempt: FailedAttempt, deadline: Time, rng: &mut impl Rng) -> (Vec<u64>, NoRetryReason) {
        let mut tries = RetryTracker::new(deadline);
        let (mut now, mut waits) = (NOW, Vec::new());
        loop {
            match tries.next_attempt_at(&retry, &attempt, None, now, rng) {
                Ok(at) => {
                    waits.push(at.since(now).as_micros() / 1_000);
                    now = at;
                }
                Err(why) => return (waits, why),
            }
        }
    }

    #[test]
    fn every_status_has_its_class() {
        for status in 0..=u16::MAX {
            let class = match status {
                401 | 403 => Class::Auth,
                408 => Class::Transient,
                429 => Class::Throttled,
                501 | 505 => Class::Permanent,
                _ => match status / 100 {
                    1..=3 => Class::Success,
                    4 => Class::Permanent,
                    _ => Class::Transient,
                },
            };
            assert_eq!(Class::from_status(status), class, "{status}");
        }
        for status in [500, 502, 503, 504, 520, 524, 529, 599] {
            assert_eq!(Class::from_status(status), Class::Transient, "{status}");
        }
    }

    #[test]
    fn throttled_calls_back_off_up_to_the_cap() {
        for retry_after in [None, Some(Span::ZERO)] {
            let (waits, why) =
                waits(policy(7, 1_000, 30), FailedAttempt { retry_after, ..THROTTLED }, Time::NEVER, &mut Highest);
            assert_eq!(waits, [1_000, 2_000, 4_000, 8_000, 16_000, 30_000]);
            assert_eq!(why, NoRetryReason::Exhausted { attempts: 7 });
        }
    }

    #[test]
    fn retry_after_is_a_minimum_wait() {
        let attempt = FailedAttempt { retry_after: Some(Span::from_secs(7)), ..THROTTLED };
        let (waited, _) = waits(policy(7, 1_000, 30), attempt, Time::NEVER, &mut Highest);
        assert_eq!(waited, [7_000, 7_000, 7_000, 8_000, 16_000, 30_000]);
        let (waited, _) = waits(
            policy(2, 1_000, 30),
            FailedAttempt { class: Class::Transient, ..attempt },
            Time::NEVER,
            &mut Highest,
        );
        assert_eq!(waited, [7_000]);
    }

    #[test]
    fn too_long_retry_after_fails_with_the_value() {
        let day = Span::from_secs(86_400);
        let attempt = FailedAttempt { retry_after: Some(day), ..THROTTLED };
        let deadline = NOW + Span::from_secs(60);
        let (waited, why) = waits(Retry::default(), attempt, deadline, &mut Highest);
        assert_eq!((waited.len(), why), (0, NoRetryReason::RetryAfterTooLong { retry_after: day }));
        let patient = Retry { max_retry_after: day, ..Retry::default() };
        let (waited, why) = waits(patient, attempt, deadline, &mut Highest);
        assert_eq!((waited.len(), why), (0, NoRetryReason::Deadline { earliest: NOW + day }));
        let (waited, _) = waits(patient, attempt, Time::NEVER, &mut Highest);
        assert_eq!(waited, [86_400_000, 86_400_000], "exactly the longest that is waited for");
    }

    #[test]
    fn three_attempts_wait_twice() {
        let (waited, why) = waits(policy(3, 500, 8), FAILED, Time::NEVER, &mut Highest);
        assert_eq!((waited, why), ([500, 1_000].to_vec(), NoRetryReason::Exhausted { attempts: 3 }));
        for max_attempts in [0, 1] {
            let (waited, why) = waits(policy(max_attempts, 500, 8), FAILED, Time::NEVER, &mut Highest);
            assert_eq!((waited.len(), why), (0, NoRetryReason::Exhausted { attempts: 1 }));
        }
    }

    #[test]
    fn no_attempt_starts_at_or_after_the_deadline() {
        let half = Span::from_millis(500);
        let (waited, why) = waits(policy(3, 500, 8), FAILED, NOW + half, &mut Highest);
        assert_eq!((waited.len(), why), (0, NoRetryReason::Deadline { earliest: NOW + half }));
        let (waited, _) = waits(policy(3, 500, 8), FAILED, NOW + half + Span::from_micros(1), &mut Highest);
        assert_eq!(waited, [500]);
    }

    #[test]
    fn only_repeatable_requests_are_retried() {
        let sends = |method, has_key, was_sent| {
            let attempt = FailedAttempt { is_repeatable: is_repeatable(method, has_key, was_sent), ..FAILED };
            let (waits, why) = waits(Retry::default(), attempt, Time::NEVER, &mut Highest);
            (waits.len() + 1, why)
        };
        for method in ["POST", "PATCH", "CONNECT", "get", ""] {
            assert_eq!(sends(method, false, true), (1, NoRetryReason::NotIdempotent), "{method}");
            assert_eq!(sends(method, true, true), (3, NoRetryReason::Exhausted { attempts: 3 }), "{method} with a key");
            assert_eq!(
                sends(method, false, TransportFault::Unsent.was_sent()).0,
                3,
                "{method} on a refused connection"
            );
            assert_eq!(sends(method, false, TransportFault::Reset.was_sent()).0, 1, "{method} on a reset connection");
        }
        for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
            assert_eq!(sends(method, false, true).0, 3, "{method}");
        }
        for fault in
            [TransportFault::Unsent, TransportFault::Reset, TransportFault::TimedOut, TransportFault::InvalidReply]
        {
            assert_eq!((fault.class(), fault.was_sent()), (Class::Transient, fault != TransportFault::Unsent));
        }
    }

    #[test]
    fn final_and_unreplayable_attempts_state_their_reason() {
        for class in [Class::Success, Class::Permanent, Class::Auth, Class::Cancelled] {
            let (waited, why) = waits(Retry::default(), FailedAttempt { class, ..FAILED }, Time::NEVER, &mut Highest);
            assert_eq!((waited.len(), why), (0, NoRetryReason::Final), "{class:?}");
        }
        for attempt in [FAILED, THROTTLED, FailedAttempt { is_repeatable: false, ..FAILED }] {
            let attempt = FailedAttempt { asks_not_to_retry: true, has_other_credential: true, ..attempt };
            let (waited, why) = waits(Retry::default(), attempt, Time::NEVER, &mut Highest);
            assert_eq!((waited.len(), why), (0, NoRetryReason::Final), "the server asks for none: {attempt:?}");
        }
        for reason in [UnreplayableReason::BodyTooLarge, UnreplayableReason::OneShotBody] {
            let attempt = FailedAttempt { unreplayable_reason: Some(reason), ..FAILED };
            let (waited, why) = waits(Retry::default(), attempt, Time::NEVER, &mut Highest);
            assert_eq!((waited.len(), why), (0, NoRetryReason::Unreplayable(reason)));
        }
    }

    #[test]
    fn full_jitter_spreads_clients_at_the_cap() {
        let backoff = Backoff::exponential(Span::from_secs(1), Span::from_secs(32));
        let retry = Retry { max_attempts: 8, backoff, ..Retry::default() };
        let mut rng = SmallRng::seed_from_u64(32);
        let mut buckets = [0; 321];
        for _ in 0..1_000 {
            let (waits, _) = waits(retry, FAILED, Time::NEVER, &mut rng);
            buckets[(waits[6] / 100) as usize] += 1;
        }
        assert!(buckets.iter().all(|&count| count <= 50), "{buckets:?}");
        assert!(buckets.iter().filter(|&&count| count > 0).count() > 200, "the whole cap is used");
    }

    #[test]
    fn additive_jitter_is_capped_after_adding() {
        let backoff = Backoff::exponential(Span::from_secs(1), Span::from_secs(32));
        let backoff = backoff.with_jitter(Jitter::Additive(Span::from_secs(1)));
        let retry = Retry { max_attempts: 8, backoff, ..Retry::default() };
        let (waited, _) = waits(retry, THROTTLED, Time::NEVER, &mut Highest);
        assert_eq!(waited, [2_000, 3_000, 5_000, 9_000, 17_000, 32_000, 32_000]);
    }

    #[test]
    fn switching_credentials_is_immediate_and_no_attempt() {
        let free = FailedAttempt { has_other_credential: true, retry_after: Some(Span::from_secs(7)), ..THROTTLED };
        let (waited, why) = waits(policy(3, 500, 8), free, Time::NEVER, &mut Highest);
        assert_eq!(waited, [0, 0, 0, 0, 0, 7_000, 7_000]);
        assert_eq!(why, NoRetryReason::Exhausted { attempts: 3 });

        let (retry, mut tries) = (policy(3, 500, 8), RetryTracker::new(NOW + Span::from_secs(60)));
        assert_eq!(tries.next_attempt_at(&retry, &free, None, NOW, &mut Highest), Ok(NOW));
        assert_eq!((tries.attempts(), tries.token_retries()), (0, 1));
        let post = FailedAttempt { is_repeatable: false, ..free };
        assert_eq!(tries.next_attempt_at(&retry, &post, None, NOW, &mut Highest), Err(NoRetryReason::NotIdempotent));
        let late = NOW + Span::from_secs(60);
        assert_eq!(
            tries.next_attempt_at(&retry, &free, None, late, &mut Highest),
            Err(NoRetryReason::Deadline { earliest: late })
        );
        assert_eq!(tries.token_retries(), 1, "neither was sent");
        let failed = FailedAttempt { has_other_credential: true, ..FAILED };
        assert_eq!(
            tries.next_attempt_at(&retry, &failed, None, NOW, &mut Highest),
            Ok(NOW + Span::from_millis(500)),
            "another credential mends no outage"
        );
        assert_eq!(tries.attempts(), 1);
    }

    #[test]
    fn only_sent_transient_retries_spend_budget() {
        let budget = Budget::new(BudgetSpec { ratio: 0, min: 1, reserve: 1 });
        let after = |attempt: FailedAttempt, deadline| {
            RetryTracker::new(deadline)
                .next_attempt_at(&policy(3, 500, 8), &attempt, Some(&budget), NOW, &mut Highest)
                .err()
        };
        assert_eq!(after(THROTTLED, Time::NEVER), None);
        assert_eq!(
            after(FailedAttempt { is_repeatable: false, ..FAILED }, Time::NEVER),
            Some(NoRetryReason::NotIdempotent)
        );
        assert!(matches!(after(FAILED, NOW), Some(NoRetryReason::Deadline { .. })));
        assert_eq!(budget.remaining(), 1);
        assert_eq!(after(FAILED, Time::NEVER), None);
        assert_eq!(after(FAILED, Time::NEVER), Some(NoRetryReason::BudgetSpent));
        assert_eq!(after(THROTTLED, Time::NEVER), None);
    }
}
