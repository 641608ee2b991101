//! A traffic governor for inbound and outbound requests: rate limits, quotas, growing penalties and exact waits.
//!
//! A [`Gate`] decides for each call if it is allowed and, if not, when to retry. Its [`Policy`](policy::Policy) is read
//! from a TOML file, or is built in Rust with the same names:
//!
//! ```
//! use tidegate::clock::ManualClock;
//! use tidegate::policy::{ActionSpec, Policy, Query};
//! use tidegate::{Gate, Span};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let policy = Policy::builder()
//!     .action("login", ActionSpec::new("5 per 60s").penalty("2s", "1h").key(["client_ip"]))
//!     .build()?;
//! let clock = ManualClock::default();
//! let gate = Gate::in_memory(&policy, clock.clone());
//!
//! let call = Query { action: Some("login"), ip: Some("203.0.113.7".parse()?), ..Query::default() };
//! for left in (0..5).rev() {
//!     assert_eq!(gate.check_now(&call)?.remaining, Some(left));
//! }
//! let refused = gate.check_now(&call)?;
//! assert!(!refused.allowed);
//! assert_eq!(refused.retry_after, Some(Span::from_secs(2)));
//!
//! clock.advance(Span::from_secs(2));
//! assert!(gate.check_now(&call)?.allowed, "the wait that was told is true");
//! # Ok(())
//! # }
//! ```
//!
//! | to | use |
//! | --- | --- |
//! | guard an axum or tonic service, or any other tower service | `GateLayer`, feature `tower` (on by default) |
//! | retry, break or limit calls of any tower service | `layers`, feature `outbound` |
//! | call external APIs with a reqwest client | `outbound::OutboundMiddleware`, feature `reqwest` |
//! | call them with any client that is a tower service | `outbound::OutboundLayer`, feature `outbound` |
//! | check calls in your own code | [`Gate::check`], or [`Gate::check_now`] if the state is in memory |
//! | limit one thing, or one kind of key, without any policy | [`Limiter`], [`KeyedLimiter`] |
//! | let workers find the pace that a service can sustain, in one process or many | `Pacer`, feature `outbound` |
//! | test with a clock of your own | [`clock::ManualClock`] |
//! | write a decision out | [`Gate::report`], [`reply::Replies`] |

mod decision_counts;
mod explain;
mod gate;
mod hold_times;
#[cfg(feature = "tower")]
mod layer;
#[cfg(feature = "outbound")]
pub mod layers;
mod limiter;
#[cfg(feature = "outbound")]
pub mod outbound;
#[cfg(feature = "outbound")]
mod pacer;
mod pending_check;
mod permit_guard;
pub mod reply;
mod report;
mod stores;

pub use decision_counts::{DecisionCount, DecisionOutcome};
pub use explain::{BlockReport, Explanation, LimitReport, ResetReport};
pub use gate::{BlockError, CheckError, DecidedCall, Gate, KeptPermit, MAX_FINISHED_CALLS, NextPolicyError};
#[cfg(feature = "tower")]
pub use layer::{GateBody, GateLayer, GateService};
pub use limiter::{KeyedLimiter, Limiter, LimiterDecision, LimiterError};
#[cfg(feature = "outbound")]
pub use pacer::Pacer;
pub use pending_check::{Check, PendingCheck};
pub use permit_guard::PermitGuard;
pub use report::{DecisionReport, PermitId, ReservationReport};
pub use stores::{OpenError, Stores};

pub use tidegate_core::{Backoff, Clock, Decision, Growth, Jitter, Reason, Span, Time};
#[cfg(feature = "outbound")]
pub use tidegate_core::{
    PacerSpec,
    pacer::{PacerGrowth, PacerMetrics, PacerMode},
};
pub use tidegate_policy as policy;
pub use tidegate_runtime::clock;

/// Stores: where counts live. [`Stores::open`] opens the one that a policy names; a [`Store`](store::Store) of your own
/// goes into [`Gate::with_store`].
pub mod store {
    pub use tidegate_core::{Batch, Key, Limits, Outcomes};
    pub use tidegate_store::*;
}

/// The examples of the README and of the guides, included so that they are tested. Some need reqwest.
#[cfg(all(doctest, feature = "axum", feature = "reqwest"))]
#[doc = include_str!("../../../README.md")]
#[doc = include_str!("../../../docs/outbound.md")]
#[doc = include_str!("../../../docs/rust.md")]
struct DocumentExamples;
