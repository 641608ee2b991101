//! What a reply means, and whether its call is tried again.
//!
//! A retry must be worth it (the class), harmless (the request may be repeated), possible (its body can be sent again)
//! and in time (the deadline, the server's `Retry-After`), and an outage must not be amplified by it (the
//! [`Budget`]). [`RetryTracker`] asks all of that in one place, once an attempt.

use rand_core::Rng;

use crate::backoff::{Backoff, BackoffState};
use crate::{Budget, Span, Time};

/// What a reply means, decided once for everything that learns from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The provider did what it was asked.
    Success,
    /// The provider has had too much: back off, or use another credential.
    Throttled,
    /// The provider or the way there failed, and may not fail again.
    Transient,
    /// The request itself is at fault and would fail again.
    Permanent,
    /// The credential isn't accepted.
    Auth,
    /// The caller went away before there was a reply.
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

    /// Whether the same request might fare better later: throttled and transient.
    pub const fn is_retryable(self) -> bool {
        matches!(self, Self::Throttled | Self::Transient)
    }

    /// The class as it stands in logs and metrics.
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

/// How an attempt failed that got no whole reply. Always [`Class::Transient`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransportFault {
    /// The provider never took the request: its name didn't resolve, the connection was refused, timed out or failed
    /// its TLS handshake, or the stream was refused unprocessed (HTTP/2 `REFUSED_STREAM`, `GOAWAY`; RFC 9113 §8.7).
    Unsent,
    /// The connection broke after some of the request was sent.
    Reset,
    /// There was no reply in time.
    TimedOut,
    /// The reply couldn't be understood, or broke off.
    InvalidReply,
}

impl TransportFault {
    /// What the fault means.
    pub const fn class(self) -> Class {
        Class::Transient
    }

    /// Whether the provider may have acted on the request.
    pub const fn was_sent(self) -> bool {
        !matches!(self, Self::Unsent)
    }

    /// How far the request came.
    pub const fn delivery(self) -> Delivery {
        match self {
            Self::Unsent => Delivery::Unsent,
            Self::Reset | Self::TimedOut => Delivery::Unknown,
            Self::InvalidReply => Delivery::Answered,
        }
    }
}

/// How far a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// Nothing of it was sent: what it was charged goes back.
    Unsent,
    /// It may still be on its way, and be counted as late as was assumed.
    Unknown,
    /// It was answered, and so counted before its reply.
    Answered,
}

/// Whether a request may be sent again without doing its work twice: its method is idempotent (RFC 9110 §9.2.2), it
/// carries an idempotency key that the provider honours, or nothing of it was sent.
pub fn is_repeatable(method: &str, has_idempotency_key: bool, was_sent: bool) -> bool {
    has_idempotency_key || !was_sent || matches!(method, "GET" | "HEAD" | "OPTIONS" | "TRACE" | "PUT" | "DELETE")
}

/// Why a request that might be repeated can't be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnreplayableReason {
    /// Its body was larger than what is kept for another attempt.
    BodyTooLarge,
    /// Its body is a stream that can be read once.
    OneShotBody,
}

/// How an attempt ended, as far as another depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailedAttempt {
    /// What the reply or fault means.
    pub class: Class,
    /// Whether the request may be sent again without doing its work twice: see [`is_repeatable`].
    pub is_repeatable: bool,
    /// Why the request can't be sent again, if it can't.
    pub unreplayable_reason: Option<UnreplayableReason>,
    /// Whether the server asks not to be sent it again, whatever it means.
    pub asks_not_to_retry: bool,
    /// How long the server asks to be left alone. Zero is as good as `None`.
    pub retry_after: Option<Span>,
    /// Whether another credential could be used at once.
    pub has_other_credential: bool,
}

/// When calls are tried again. At most `max_attempts + max_token_retries` requests are sent for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Attempts a call, the first included. Default 3; 0 and 1 never retry.
    pub max_attempts: u32,
    /// Throttled requests a call that are sent again at once with another credential, and are no attempts. Default 5.
    pub max_token_retries: u32,
    /// The waits between attempts. Default 500 ms, doubling up to 8 s, full jitter.
    pub backoff: Backoff,
    /// The longest `Retry-After` that a call waits for; beyond, it fails at once. Default 5 min.
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

/// Why a call that failed isn't tried again, in the order in which the reasons are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRetryReason {
    /// The class says that another attempt would fare no better, or the server asks for none.
    Final,
    /// The request may have been carried out and must not be twice.
    NotIdempotent,
    /// The request can't be sent again.
    Unreplayable(UnreplayableReason),
    /// That was the last attempt.
    Exhausted {
        /// How many there were; token retries aren't counted.
        attempts: u32,
    },
    /// The server asks for a longer pause than calls wait.
    RetryAfterTooLong {
        /// What it asks for.
        retry_after: Span,
    },
    /// The next attempt would start at the call's deadline or later.
    Deadline {
        /// When it would start: nothing succeeds earlier.
        earliest: Time,
    },
    /// The provider fails too many calls for all of them to be tried again.
    BudgetSpent,
}

/// The tries of one call: counts them, and decides after each whether and when there is another.
#[derive(Clone, Copy, Debug)]
pub struct RetryTracker {
    deadline: Time,
    attempts: u32,
    token_retries: u32,
    backoff: BackoffState,
}

impl RetryTracker {
    /// The tries of a call that must be over by `deadline` ([`Time::NEVER`] for none).
    pub fn new(deadline: Time) -> Self {
        Self { deadline, attempts: 0, token_retries: 0, backoff: BackoffState::default() }
    }

    /// Attempts that have ended, token retries not counted.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Throttled requests that were sent again with another credential.
    pub fn token_retries(&self) -> u32 {
        self.token_retries
    }

    /// When the request that ended at `now` without success is sent again: at once with another credential, or after
    /// the back-off, but not before the server's `Retry-After`.
    ///
    /// A transient failure's retry is taken out of `budget` if there is one, last of all: what is refused for another
    /// reason costs nothing. A call that is dropped before its retry was sent gives it back.
    ///
    /// # Errors
    /// Why the call fails now; there is no wait after the last failure.
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

    /// Draws the largest number every time.
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

    /// The waits of a call whose every attempt ends like this, in milliseconds, and why it gave up.
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
