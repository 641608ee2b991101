//! A plan and a memory store on the clock of past requests.

use std::net::IpAddr;
use std::sync::Arc;

use tidegate_core::decision::{decide, move_to_shared_keys};
use tidegate_core::{Batch, Decision, Outcomes, Time, Verb};
use tidegate_policy::{KeySeed, Plan, Policy};
use tidegate_store::{ImmediateStore, Memory};

/// Decides as a gate with an empty store and a clock at the time of each request.
pub(super) struct VirtualGate {
    pub(super) plan: Arc<Plan>,
    pub(super) store: Memory,
    pub(super) seed: KeySeed,
}

impl VirtualGate {
    pub(super) fn new(policy: &Policy) -> Self {
        let plan = Arc::clone(policy.plan());
        let max_bytes = usize::try_from(policy.store().max_bytes).unwrap_or(usize::MAX);
        Self {
            store: Memory::reproducible(Arc::clone(plan.limits()), max_bytes),
            // A fixed seed, so that the same log gives the same report.
            seed: KeySeed::new([0x7d; 16]),
            plan,
        }
    }

    /// Applies the operations of a call, under shared keys if the store has no room for others.
    #[inline]
    pub(super) fn apply(&self, batch: &mut Batch, ip: Option<IpAddr>, now: Time) -> Outcomes {
        loop {
            let outcomes = self.store.apply_now(batch, now);
            if !move_to_shared_keys(batch, &outcomes, |limit, share| self.plan.shared_key(limit, share, ip, &self.seed))
            {
                return outcomes;
            }
        }
    }

    /// The decision of these outcomes. Its permits are given back at once: the duration of the call isn't known, so it
    /// counts as zero.
    #[inline]
    pub(super) fn decide(&self, batch: &mut Batch, outcomes: &Outcomes, now: Time) -> Decision {
        let decision = decide(batch, self.plan.limits(), outcomes);
        if decision.permit.is_some() {
            for op in batch.ops_mut() {
                op.verb = Verb::Release;
            }
            self.store.apply_now(batch, now);
        }
        decision
    }

    /// Returns the losses of the full store: entries that it dropped while they still counted, and outcomes that moved
    /// a new key to a shared limit. A gate with more memory might have decided differently.
    pub(super) fn losses(&self) -> u64 {
        let losses = self.store.stats().losses;
        losses.evicted() + losses.forced_shares
    }
}
