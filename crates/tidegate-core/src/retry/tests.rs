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
    has_reservation: false,
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
            418 | 420 | 429 | 509 => Class::Throttled,
            425 | 449 | 529 => Class::Unavailable,
            501 | 505 => Class::Permanent,
            _ => match status / 100 {
                1..=3 => Class::Success,
                4 => Class::Permanent,
                _ => Class::Transient,
            },
        };
        assert_eq!(Class::from_status(status), class, "{status}");
    }
    for status in [500, 502, 503, 504, 520, 524, 599] {
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
    let (waited, _) =
        waits(policy(2, 1_000, 30), FailedAttempt { class: Class::Transient, ..attempt }, Time::NEVER, &mut Highest);
    assert_eq!(waited, [7_000]);
}

#[test]
fn a_reservation_sets_the_wait_exactly() {
    let attempt = FailedAttempt { retry_after: Some(Span::from_millis(70)), has_reservation: true, ..THROTTLED };
    let (waited, why) = waits(policy(4, 1_000, 30), attempt, Time::NEVER, &mut Highest);
    assert_eq!((&waited[..], why), (&[70, 70, 70][..], NoRetryReason::Exhausted { attempts: 4 }));
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
        assert_eq!(sends(method, false, TransportFault::Unsent.was_sent()).0, 3, "{method} on a refused connection");
        assert_eq!(sends(method, false, TransportFault::Reset.was_sent()).0, 1, "{method} on a reset connection");
    }
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
        assert_eq!(sends(method, false, true).0, 3, "{method}");
    }
    for fault in [TransportFault::Unsent, TransportFault::Reset, TransportFault::TimedOut, TransportFault::InvalidReply]
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
