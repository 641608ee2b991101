//! The core of Tidegate: limits, penalties, backoff and decisions as pure state machines.
//!
//! Nothing in this crate waits, reads a clock or generates random numbers: the caller passes `now` and a random number
//! generator. Every change that a store must make is data ([`Batch`]). The crate is `no_std` with `alloc` and counts
//! time in whole microseconds. So the same input gives the same result in a test, in a simulation and in production.
//!
//! | in words | type |
//! | --- | --- |
//! | "5 per 60s" | [`Window`]: at most 5 in any trailing 60 s |
//! | "10/s burst 20" | [`Rate`]: GCRA, smooth, with a burst |
//! | "1000 per day in Europe/Paris" | [`Quota`]: counted in calendar periods |
//! | "8 in flight" | [`Concurrency`]: permits with a lease |
//! | "blocks of 2 s, 4 s … 1 h" | [`Penalty`]: the blocks for repeated violations |
//! | "open after 5 failures" | [`Breaker`]: stops calls to a provider that fails |
//! | "3 attempts" | [`Retry`]: the decision if and when a failed call is retried, within a [`Budget`] |
//! | "as fast as possible" | [`LocalPacer`]: a wait that grows on failure; [`AdaptiveRate`]: a rate found by trying |
//! | "all processes together" | [`SharedPacerRules`]: the rules of a pacer with a shared wait |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

/// Shares, rates and factors are counted in thousandths.
const PER_MILLE: u64 = 1_000;

pub mod adaptive_limit;
pub mod adaptive_rate;
pub mod backoff;
pub mod batch;
pub mod breaker;
pub mod budget;
pub mod call;
pub mod caller_rate;
pub mod concurrency;
pub mod cooldown;
pub mod credential_pool;
pub mod decision;
mod heap;
pub mod histogram;
pub mod lanes;
pub mod limit;
pub mod pace;
pub mod pacer;
pub mod penalty;
pub mod quota;
pub mod rate;
mod recent_maximum;
pub mod remaining;
pub mod reservation;
pub mod retry;
pub mod state;
mod state_encoding;
pub mod time;
pub mod verdict;
pub mod window;

pub use adaptive_limit::{AdaptiveLimit, AdaptiveLimitError, AdaptiveLimitSpec};
pub use adaptive_rate::{AdaptiveRate, AdaptiveRateError, AdaptiveRateSpec};
pub use backoff::{Backoff, Growth, Jitter};
pub use batch::{Admission, Batch, BatchFullError, Key, MAX_OPS, Op, Outcome, Outcomes, ShareLevel, Verb};
pub use breaker::{Breaker, BreakerError, BreakerRefusal, BreakerSpec, SharedBreaker};
pub use budget::{Budget, BudgetSpec};
pub use caller_rate::{CallerRate, CallerRateDecision, CallerRateError};
pub use concurrency::Concurrency;
pub use cooldown::Cooldown;
pub use credential_pool::{Balance, CredentialPool, MAX_CREDENTIALS, PoolSizeError};
pub use decision::{Decision, Reason};
pub use histogram::DurationHistogram;
pub use lanes::{
    Lane, LaneSpec, Lanes, LanesSpec, QueueFullError, QueueStep, Refusal, RefusalScope, ScopedLane, Ticket, WaitReason,
};
pub use limit::{
    CountMode, LeaseSpec, Limit, LimitError, LimitId, LimitKind, Limits, MAX_COST, MAX_LIMIT, MAX_LIMITS, OnOutage,
    Sharing,
};
pub use pace::Pace;
pub use pacer::{LocalPacer, PacerError, PacerSpec, SharedPacerRules};
pub use penalty::{Penalty, PenaltyMode, PenaltySpec};
pub use quota::{Calendar, Period, Quota};
pub use rate::Rate;
pub use recent_maximum::RecentMaximum;
pub use remaining::{Remaining, RemainingAmount};
pub use reservation::{ReservationError, ReservationRules};
pub use retry::{FailedAttempt, NoRetryReason, Retry, RetryTracker, TransportFault, UnreplayableReason};
pub use state::KeyState;
pub use time::{Clock, MAX_NOW_SPREAD, Span, SpanTooLongError, Time};
pub use verdict::{Class, Scope, Verdict};
pub use window::Window;
