//! The observer of a gate's decisions, and their counts.

use std::net::IpAddr;

use tidegate_core::{Clock, Decision, Op};
use tidegate_policy::{MatchedActions, Plan};
use tidegate_store::Store;

use super::Gate;

/// The observer of a gate's decisions.
pub(super) type DecisionObserver = Box<dyn Fn(&DecidedCall<'_>) + Send + Sync>;

/// A call and the decision about it, for [`Gate::observe_decisions`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct DecidedCall<'c> {
    /// The plan of the gate.
    pub plan: &'c Plan,
    /// The actions of the call.
    pub actions: MatchedActions,
    /// The client's address, if it is known.
    pub ip: Option<IpAddr>,
    /// The operations on the store, by hashed keys. Empty if a list decides.
    pub ops: &'c [Op],
    /// The decision.
    pub decision: &'c Decision,
}

impl<S: Store, C: Clock> Gate<S, C> {
    /// Calls `observer` with each decision of [`check`](Self::check) from now on, before the caller is given it. It runs
    /// on the caller's thread, so it must return soon. Only the first observer of a gate is called. The gate of a next
    /// policy ([`Gate::next`]) has none.
    pub fn observe_decisions(&self, observer: impl Fn(&DecidedCall<'_>) + Send + Sync + 'static) {
        // A second observer is dropped.
        let _ = self.0.observer.set(Box::new(observer));
    }

    /// Counts and observes a decision that the caller is given, unless it was only looked up.
    #[inline]
    pub(crate) fn count(&self, counted: Option<MatchedActions>, ip: Option<IpAddr>, ops: &[Op], decision: &Decision) {
        let Some(actions) = counted else { return };
        if let Some(counts) = &self.0.decision_counts {
            counts.record(actions, decision);
        }
        if let Some(observer) = self.0.observer.get() {
            observer(&DecidedCall { plan: &self.0.plan, actions, ip, ops, decision });
        }
    }
}
