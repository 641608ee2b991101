//! A gate that goes on by another policy.

use std::sync::{Arc, OnceLock};

use tidegate_core::Clock;
use tidegate_policy::{Plan, Policy};
use tidegate_store::{Store, StoreError};

use super::{Gate, GateInner, HolderIds};
use crate::decision_counts::DecisionCounts;

/// The reason why a gate can't go on by another policy.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NextPolicyError {
    /// The policy wasn't read with [`Policy::load_next`] from the policy that the gate decides by.
    #[error("the policy doesn't follow the present one: its limits have other ids")]
    OtherIds,
    /// The store can't go on with other limits.
    #[error("the store can't go on with other limits; a restart is needed")]
    Store,
    /// The store failed.
    #[error(transparent)]
    StoreFailed(#[from] StoreError),
}

impl<S: Store, C: Clock + Clone> Gate<S, C> {
    /// A gate that decides by this policy, on the state of this gate. What clients have used stays used, and blocks stay.
    /// This gate goes on for calls that began with it. The new policy is read with [`Policy::load_next`].
    ///
    /// ```
    /// use tidegate::Gate;
    /// use tidegate::policy::{Policy, PolicySources, Query};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let read = |limit: &str| {
    ///     PolicySources::new().file("tidegate.toml", format!("[inbound.action.login]\nlimit = \"{limit}\"\n"))
    /// };
    /// let policy = Policy::load(read("5 per 60s"))?;
    /// let gate = Gate::new(&policy);
    /// let client = Query { action: Some("login"), ip: Some("203.0.113.9".parse()?), ..Query::default() };
    /// assert_eq!(gate.check_now(&client)?.remaining, Some(4));
    ///
    /// let gate = gate.next(&policy.load_next(read("3 per 60s"))?)?;
    /// assert_eq!(gate.check_now(&client)?.remaining, Some(1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`NextPolicyError`].
    pub fn next(&self, policy: &Policy) -> Result<Self, NextPolicyError> {
        let GateInner { plan, store, clock, seed, hold_times, kept_permits, decision_counts, .. } = &*self.0;
        let next = policy.plan();
        if !has_same_ids(plan, next) {
            return Err(NextPolicyError::OtherIds);
        }
        let limits = Arc::clone(next.limits());
        let store = store.with_limits(limits, clock.now())?.ok_or(NextPolicyError::Store)?;
        let decision_counts = policy.admin().metrics.then(|| match decision_counts {
            Some(counts) => counts.next(plan, next),
            None => DecisionCounts::new(next),
        });
        Ok(Self(Arc::new(GateInner {
            plan: Arc::clone(next),
            store,
            clock: clock.clone(),
            seed: seed.clone(),
            holder_ids: HolderIds::new(),
            hold_times: hold_times.next(next.limits()),
            kept_permits: Arc::clone(kept_permits),
            decision_counts,
            observer: OnceLock::new(),
        })))
    }
}

/// True if each limit of the plan has the same id in the next one.
fn has_same_ids(plan: &Plan, next: &Plan) -> bool {
    let is_same = |id| plan.limit_info(id).name() == next.limit_info(id).name();
    plan.limits().len() <= next.limits().len() && plan.limits().iter().all(|(id, _)| is_same(id))
}

#[cfg(test)]
mod tests {
    use tidegate_policy::{PolicySources, Query};
    use tidegate_runtime::clock::ManualClock;

    use super::*;

    fn read(limit: &str) -> PolicySources {
        PolicySources::new().file("test.toml", format!("[inbound.action.a]\nlimit = \"{limit}\"\n"))
    }

    fn count<S: Store, C: Clock>(gate: &Gate<S, C>) -> u64 {
        gate.decision_counts().iter().map(|found| found.count).sum()
    }

    #[test]
    fn each_decision_is_counted_once_over_policies() {
        let policy = Policy::load(read("100 per 1h")).expect("a policy");
        let first = Gate::in_memory(&policy, ManualClock::default());
        let ip = "203.0.113.1".parse().ok();
        let check = |gate: &Gate<_, _>| {
            gate.check_now(&Query { action: Some("a"), ip, ..Query::default() }).expect("a decision");
        };
        check(&first);
        // Two next gates that are given up.
        for _ in 0..2 {
            drop(first.next(&policy.load_next(read("90 per 1h")).expect("a policy")).expect("a gate"));
        }
        check(&first);
        assert_eq!(count(&first), 2);
        let second = first.next(&policy.load_next(read("80 per 1h")).expect("a policy")).expect("a gate");
        check(&first);
        check(&second);
        assert_eq!((count(&first), count(&second)), (3, 4));
        drop(first);
        assert_eq!(count(&second), 4);
    }

    #[test]
    fn a_policy_that_does_not_follow_is_refused() {
        let policy = Policy::load(read("5 per 1h")).expect("a policy");
        let gate = Gate::in_memory(&policy, ManualClock::default());
        let other = PolicySources::new().file("b.toml", "[inbound.action.b]\nlimit = \"5 per 1h\"\n");
        let other = Policy::load(other).expect("a policy");
        assert!(matches!(gate.next(&other), Err(NextPolicyError::OtherIds)));
    }
}
