//! Two plans that count the same requests by the same keys.

use tidegate_core::LimitId;

use super::{Action, Plan};

impl Plan {
    /// Returns true if the operations of a call under this plan are also those under `next`, which follows it
    /// ([`Policy::load_next`](crate::Policy::load_next)): all actions, costs, lists and keys are the same. `next` may
    /// have other quantities, penalties and modes, and fewer limits.
    pub fn counts_same_requests(&self, next: &Self) -> bool {
        let is_same = |own: &Action, other: &Action| {
            own.name == other.name
                && own.matcher == other.matcher
                && own.cost == other.cost
                && self.has_limits_of(next, &own.limits, &other.limits)
        };
        self.actions.len() == next.actions.len()
            && self.actions.iter().zip(&next.actions).all(|(own, other)| is_same(own, other))
            && self.has_limits_of(next, &self.global, &next.global)
            && self.listed_networks == next.listed_networks
            && (self.path_quirks, self.ambiguous_paths) == (next.path_quirks, next.ambiguous_paths)
            && self.ipv6_prefix == next.ipv6_prefix
    }

    /// Returns true if each of the next plan's limits is one of these, and counts by the same key.
    fn has_limits_of(&self, next: &Self, own: &[LimitId], others: &[LimitId]) -> bool {
        let is_same = |limit: &LimitId| own.contains(limit) && self.key_template(*limit) == next.key_template(*limit);
        others.iter().all(is_same)
    }
}
