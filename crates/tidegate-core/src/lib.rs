//! The judgement of Tidegate: limits, penalties, backoff and decisions as pure machines.
//!
//! Nothing in this crate waits, reads a clock or draws ambient randomness: `now` and random numbers come in, and
//! every change that a store must make is data ([`Batch`]). It is `no_std` with `alloc`, and counts time in whole
//! microseconds, so that the same question gets the same answer in a test, in a simulation and in production.
//!
//! | a person's word | here |
//! | --- | --- |
//! | "5 per 60s" | [`Window`]: no trailing 60 s ever holds more than 5 |
//! | "10/s burst 20" | [`Rate`]: GCRA, smooth, with a burst |
//! | "1000 per day in Europe/Paris" | [`Quota`]: counted by calendar periods |
//! | "8 in flight" | [`Concurrency`]: permits with a lease |
//! | "blocks of 2 s, 4 s … 1 h" | [`Penalty`]: what repeated violation costs |
//! | "open after 5 failures" | [`Breaker`]: stops calling a provider that fails |
//! | "3 attempts" | [`Retry`]: whether and when a failed call is tried again, within a [`Budget`] |
//! | "as fast as it bears" | [`LocalPacer`]: a wait that grows on failure; [`AdaptiveRate`]: a rate that is found |
//! | "all of us together" | [`SharedPacerRules`]: the rules of a pacer whose wait many share |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod adaptive_limit;
pub mod adaptive_rate;
pub mod backoff;
pub mod batch;
pub mod breaker;
pub mod budget;
pub mod call;
pub mod concurrency;
pub mod cooldown;
pub mod credential_pool;
pub mod decision;
mod heap;
pub mod lanes;
pub mod limit;
pub mod pace;
pub mod pacer;
pub mod penalty;
pub mod quota;
pub mod rate;
pub mod remaining;
pub mod retry;
pub mod state;
mod state_encoding;
pub mod time;
pub mod window;

pub use adaptive_limit::{AdaptiveLimit, AdaptiveLimitError, AdaptiveLimitSpec};
pub use adaptive_rate::{AdaptiveRate, AdaptiveRateError, AdaptiveRateSpec};
pub use backoff::{Backoff, Growth, Jitter};
pub use batch::{Batch, BatchFullError, Key, MAX_OPS, Op, Outcome, Outcomes, ShareLevel, Verb, Verdict};
pub use breaker::{Breaker, BreakerError, BreakerRefusal, BreakerSpec, SharedBreaker};
pub use budget::{Budget, BudgetSpec};
pub use concurrency::Concurrency;
pub use cooldown::Cooldown;
pub use credential_pool::{Balance, CredentialPool, MAX_CREDENTIALS, PoolSizeError};
pub use decision::{Decision, Reason};
pub use lanes::{Lane, LaneSpec, Lanes, LanesSpec, QueueFullError, QueueStep, RefusalScope, Ticket};
pub use limit::{
    CountMode, LeaseSpec, Limit, LimitError, LimitId, LimitKind, Limits, MAX_COST, MAX_LIMIT, OnOutage, Sharing,
};
pub use pace::Pace;
pub use pacer::{LocalPacer, PacerError, PacerSpec, SharedPacerRules};
pub use penalty::{Penalty, PenaltyMode, PenaltySpec};
pub use quota::{Calendar, Period, Quota};
pub use rate::Rate;
pub use remaining::{Remaining, RemainingAmount};
pub use retry::{Class, FailedAttempt, NoRetryReason, Retry, RetryTracker, TransportFault, UnreplayableReason};
pub use state::KeyState;
pub use time::{Clock, MAX_NOW_SPREAD, Span, SpanTooLongError, Time};
pub use window::Window;
