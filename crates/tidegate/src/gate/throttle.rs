//! Calls that state their own rate.

use tidegate_core::{Batch, CallerRate, CallerRateDecision, Clock, Decision, Reason};
use tidegate_policy::MatchedActions;
use tidegate_store::{Store, StoreResponse};

use super::{CheckError, Gate};

impl<S: Store, C: Clock> Gate<S, C> {
    /// Decides about a call that states its own rate, and counts it `quantity` times under the key of this name if it is
    /// admitted. 0 asks without counting; a negative quantity gives back. A name that is used with several rates has one
    /// state, as in redis-cell. If the policy has neither `[resp]` nor `[rls]` nor throttlecrab in `api.compat`, or the
    /// store allows everything, each call is admitted.
    ///
    /// ```
    /// use tidegate::Gate;
    /// use tidegate_core::CallerRate;
    /// use tidegate_policy::{Policy, PolicySources};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let gate = Gate::new(&Policy::load(PolicySources::new().file("tidegate.toml", "[resp]\n"))?);
    /// // 30 calls per 60 s, and up to 2 at once.
    /// let rate = CallerRate::new(2, 30, 60)?;
    /// assert_eq!(gate.throttle(rate, b"user-1", 1).await?.remaining, 1);
    /// assert!(!gate.throttle(rate, b"user-1", 1).await?.is_limited);
    /// assert!(gate.throttle(rate, b"user-1", 1).await?.is_limited);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The store failed.
    pub async fn throttle(
        &self,
        rate: CallerRate,
        name: &[u8],
        quantity: i64,
    ) -> Result<CallerRateDecision, CheckError> {
        let (plan, now) = (&self.0.plan, self.0.clock.now());
        let Some(limit) = plan.caller_rate() else { return Ok(rate.admitted(now)) };
        let op = rate.op(limit, plan.caller_rate_key(name, &self.0.seed), quantity);
        let outcomes = match self.0.store.apply(&Batch::with_op(0, op), now) {
            StoreResponse::Ready(outcomes) => outcomes,
            StoreResponse::Pending(later) => later.await?,
        };
        let Some(outcome) = outcomes.list().first() else { return Ok(rate.admitted(now)) };
        let decided = rate.decision(quantity, outcome, outcomes.now());
        if let Some(counts) = self.0.decision_counts.as_ref().filter(|_| quantity > 0) {
            let reason = if decided.is_limited { Reason::Limit } else { Reason::Ok };
            let decision = Decision::without_limit(!decided.is_limited, reason, outcomes.now());
            counts.record(MatchedActions::NONE, &Decision { bound_by: Some(limit), ..decision });
        }
        Ok(decided)
    }
}
