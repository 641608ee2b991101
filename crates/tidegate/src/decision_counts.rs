//! Counts of decisions by action, limit and reason.

use tidegate_core::{Decision, LimitId, Reason};
use tidegate_policy::{ActionId, MatchedActions, Plan};
use tidegate_runtime::counters::Counters;

use crate::report::reason_name;

/// The meaning of a decision for its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecisionOutcome {
    /// The call was admitted.
    Allowed,
    /// The call was refused.
    Refused,
    /// The call was admitted, but a limit in shadow mode would have refused it.
    Shadow,
}

impl DecisionOutcome {
    /// The outcome's name in metrics: `allowed`, `refused` or `shadow`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Refused => "refused",
            Self::Shadow => "shadow",
        }
    }
}

/// The number of decisions with the same action, limit, outcome and reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecisionCount {
    /// The action of the limit, or else the first action of the call. `None` if the call has no action.
    pub action: Option<ActionId>,
    /// The limit that determined the decision. `None` if no limit took part.
    pub limit: Option<LimitId>,
    /// The meaning of the decision for the client.
    pub outcome: DecisionOutcome,
    /// The reason, as in [`DecisionReport::reason`](crate::DecisionReport::reason).
    pub reason: &'static str,
    /// The number of decisions.
    pub count: u64,
}

/// The combinations of outcome and reason that decisions have, in the order of their counters.
const RESULTS: [(DecisionOutcome, Reason); 9] = [
    (DecisionOutcome::Allowed, Reason::Ok),
    (DecisionOutcome::Refused, Reason::Limit),
    (DecisionOutcome::Refused, Reason::Penalty),
    (DecisionOutcome::Allowed, Reason::Unlimited),
    (DecisionOutcome::Allowed, Reason::Parole),
    (DecisionOutcome::Allowed, Reason::AllowList),
    (DecisionOutcome::Refused, Reason::DenyList),
    (DecisionOutcome::Shadow, Reason::Limit),
    (DecisionOutcome::Shadow, Reason::Penalty),
];

/// Counts the decisions of a gate. A row has a counter for each result. There is a row for each limit of an action; for
/// each combination of an action, or none, with a global limit, or none; so the plan bounds their number.
pub(crate) struct DecisionCounts {
    counters: Counters,
    /// The position of each limit among the global ones, or [`OF_ACTION`], by its id.
    global_positions: Box<[u16]>,
    /// The number of rows of each action beside those of its own limits.
    rows_per_action: usize,
}

/// Stands for the position of a limit that belongs to an action.
const OF_ACTION: u16 = u16::MAX;

impl DecisionCounts {
    pub(crate) fn new(plan: &Plan) -> Self {
        let position = |id| plan.global().iter().position(|global| *global == id);
        let position = |id| position(id).and_then(|at| u16::try_from(at).ok()).unwrap_or(OF_ACTION);
        let global_positions: Box<[u16]> = plan.limits().iter().map(|(id, _)| position(id)).collect();
        let rows_per_action = plan.global().len() + 1;
        let rows = global_positions.len() + (plan.actions().len() + 1) * rows_per_action;
        Self { counters: Counters::new(rows * RESULTS.len()), global_positions, rows_per_action }
    }

    /// Counts one decision that a client is given.
    #[inline]
    pub(crate) fn record(&self, actions: MatchedActions, decision: &Decision) {
        let position = match decision.bound_by {
            None => 0,
            Some(limit) => match self.global_positions.get(limit.index()) {
                Some(&OF_ACTION) => return self.add(limit.index(), decision),
                Some(&global) => usize::from(global) + 1,
                None => 0,
            },
        };
        self.add(self.row_of_action(actions.first(), position), decision);
    }

    #[inline]
    fn row_of_action(&self, action: Option<ActionId>, position: usize) -> usize {
        let action = action.map_or(0, |action| action.index() + 1);
        self.global_positions.len() + action * self.rows_per_action + position
    }

    #[inline]
    fn add(&self, row: usize, decision: &Decision) {
        let column = match (decision.shadow, decision.reason) {
            (false, Reason::Ok) => 0,
            (false, Reason::Limit) => 1,
            (false, Reason::Penalty) => 2,
            (_, Reason::Unlimited) => 3,
            (_, Reason::Parole) => 4,
            (_, Reason::AllowList) => 5,
            (_, Reason::DenyList) => 6,
            (true, Reason::Limit | Reason::Ok) => 7,
            (true, Reason::Penalty) => 8,
        };
        self.counters.add(row * RESULTS.len() + column, 1);
    }

    /// The decisions so far. Those of an action's limit that were admitted or refused by it are always there; others if
    /// there are any.
    pub(crate) fn list(&self, plan: &Plan) -> Vec<DecisionCount> {
        let own = plan.limits().iter().filter_map(|(id, _)| {
            let action = plan.limit_info(id).action()?;
            Some((id.index(), Some(action), Some(id)))
        });
        let actions = plan.actions().map(|(id, _)| Some(id));
        let shared = [None].into_iter().chain(actions).flat_map(|action| {
            let limits = [None].into_iter().chain(plan.global().iter().copied().map(Some));
            limits.enumerate().map(move |(position, limit)| (self.row_of_action(action, position), action, limit))
        });
        let counts = own.chain(shared).flat_map(|(row, action, limit)| {
            let is_own = row < self.global_positions.len();
            RESULTS.iter().enumerate().filter_map(move |(column, (outcome, reason))| {
                let count = self.counters.get(row * RESULTS.len() + column);
                let is_listed = count > 0 || is_own && column < 2;
                is_listed.then(|| DecisionCount {
                    action,
                    limit,
                    outcome: *outcome,
                    reason: reason_name(*reason),
                    count,
                })
            })
        });
        counts.collect()
    }
}

#[cfg(test)]
mod tests {
    use tidegate_core::Time;
    use tidegate_policy::{Policy, PolicySources};

    use super::*;

    #[test]
    fn each_combination_has_its_own_counter() {
        let text = "[inbound.global]\nlimit = [\"9 per 1s\", \"90 per 1h\"]\n\
            [inbound.action.a]\nlimit = \"5/s\"\n[inbound.action.b]\nlimit = [\"5/s\", \"6 per 1m\"]\n";
        let policy = Policy::load(PolicySources::new().file("test.toml", text)).expect("a policy");
        let plan = policy.plan();
        let counts = DecisionCounts::new(plan);
        let actions: Vec<_> = [None].into_iter().chain(plan.actions().map(|(id, _)| Some(id))).collect();
        let limits: Vec<_> = [None].into_iter().chain(plan.limits().iter().map(|(id, _)| Some(id))).collect();
        let mut expected = Vec::new();
        for (outcome, reason) in RESULTS {
            for limit in &limits {
                for action in &actions {
                    let of_action = limit.and_then(|limit| plan.limit_info(limit).action());
                    if of_action.is_some() && of_action != *action {
                        continue;
                    }
                    let decision = Decision {
                        bound_by: *limit,
                        shadow: outcome == DecisionOutcome::Shadow,
                        ..Decision::without_limit(outcome != DecisionOutcome::Refused, reason, Time::ZERO)
                    };
                    let count = expected.len() as u64 + 1;
                    (0..count).for_each(|_| counts.record(MatchedActions::from(*action), &decision));
                    expected.push((*action, *limit, outcome, reason_name(reason), count));
                }
            }
        }
        let mut found: Vec<_> = counts
            .list(plan)
            .into_iter()
            .map(|count| (count.action, count.limit, count.outcome, count.reason, count.count))
            .collect();
        found.sort_by_key(|count| count.4);
        assert_eq!(found, expected);
    }
}
