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
//! | "as fast as it bears" | [`Pacer`]: a wait that grows on failure; [`Adaptive`]: a rate that is found |
//! | "all of us together" | [`SharedPacer`]: the rules of a pacer whose wait many share |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod adaptive;
pub mod admit;
pub mod allowance;
pub mod backoff;
pub mod batch;
pub mod breaker;
pub mod budget;
pub mod call;
pub mod concurrency;
pub mod cooldown;
mod encoding;
mod heap;
pub mod inflight;
pub mod lanes;
pub mod limit;
pub mod pace;
pub mod pacer;
pub mod penalty;
pub mod pool;
pub mod quota;
pub mod rate;
pub mod retry;
pub mod state;
pub mod time;
pub mod window;

pub use adaptive::{Adaptive, AdaptiveError, AdaptiveSpec};
pub use admit::{Decision, Reason};
pub use allowance::{Rest, Rests};
pub use backoff::{Backoff, Growth, Jitter};
pub use batch::{Batch, BatchFull, Key, MAX_OPS, Op, Outcome, Outcomes, Share, Verb, Verdict};
pub use breaker::{Breaker, BreakerError, BreakerSpec, Refusal, SharedBreaker};
pub use budget::{Budget, BudgetSpec};
pub use concurrency::Concurrency;
pub use cooldown::Cooldown;
pub use inflight::{Inflight, InflightError, InflightSpec};
pub use lanes::{Lane, LaneSpec, Lanes, LanesSpec, QueueFull, Scope, Ticket, Turn};
pub use limit::{Count, Kind, LeaseSpec, Limit, LimitError, LimitId, Limits, MAX_COST, MAX_LIMIT, OnOutage, Sharing};
pub use pace::Pace;
pub use pacer::{Pacer, PacerError, PacerSpec, SharedPacer};
pub use penalty::{Penalty, PenaltyMode, PenaltySpec};
pub use pool::{Balance, MAX_CREDENTIALS, Pool, PoolSize};
pub use quota::{Calendar, Period, Quota};
pub use rate::Rate;
pub use retry::{Attempt, Class, Fault, GiveUp, Retry, Tries, Unreplayable};
pub use state::State;
pub use time::{ABOUT, Clock, Span, Time};
pub use window::Window;
