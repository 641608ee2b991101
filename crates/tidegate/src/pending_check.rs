//! A check with an answer that may be still pending.

use std::net::IpAddr;

use tidegate_core::{Batch, Clock, Decision};
use tidegate_policy::MatchedActions;
use tidegate_store::{Store, StoreResponse};

use crate::{CheckError, Gate};

/// A check that was begun.
#[expect(
    clippy::large_enum_variant,
    reason = "a box would cost an allocation for each check of a store that answers later"
)]
pub enum Check<S: Store, C: Clock> {
    /// The store answered at once.
    Decided(Decision),
    /// The store's answer is pending.
    Pending(PendingCheck<S, C>),
}

/// A check that waits for the store's answer. A store in this process has already applied it. A remote store receives
/// it at the first poll, and may then count the call even if the wait is cancelled. Permits of a cancelled check are
/// released.
#[must_use = "nothing is decided before somebody waits for it"]
pub struct PendingCheck<S: Store, C: Clock> {
    request: ReleaseGuard<S, C>,
    /// The caller's address, from which shared keys are derived if the store has no room.
    ip: Option<IpAddr>,
    /// The actions under which the decision is counted; `None` if it is only looked up.
    counted: Option<MatchedActions>,
    /// The error instead of an admission, for a call that is counted by `inbound.global` alone.
    uncountable: Option<CheckError>,
    pub(crate) answer: S::Future,
}

impl<S: Store, C: Clock> PendingCheck<S, C> {
    pub(crate) fn new(
        gate: Gate<S, C>,
        batch: Batch,
        ip: Option<IpAddr>,
        counted: Option<MatchedActions>,
        uncountable: Option<CheckError>,
        answer: S::Future,
    ) -> Self {
        Self { request: ReleaseGuard { gate, batch, is_answered: false }, ip, counted, uncountable, answer }
    }

    /// Waits for the decision.
    ///
    /// # Errors
    /// The store failed, or the call can't be counted.
    pub async fn decision(self) -> Result<Decision, CheckError> {
        let Self { mut request, ip, counted, uncountable, answer } = self;
        let ReleaseGuard { gate, batch, is_answered } = &mut request;
        let mut outcomes = gate.outcomes(batch, ip, StoreResponse::Pending(answer)).await?;
        *is_answered = true;
        gate.conclude(batch, &mut outcomes, ip, counted, uncountable)
    }
}

/// The batch of a check, which the store may have applied although its answer was lost or the wait was cancelled.
struct ReleaseGuard<S: Store, C: Clock> {
    gate: Gate<S, C>,
    batch: Batch,
    is_answered: bool,
}

impl<S: Store, C: Clock> Drop for ReleaseGuard<S, C> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.gate.release_unused(&self.batch);
        }
    }
}
