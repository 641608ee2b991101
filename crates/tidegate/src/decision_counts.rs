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

/// The combinations of outcome and reason that decisions have. Those of an action's limit that are listed even if there
/// are none come first.
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
const ALWAYS_LISTED: usize = 2;

/// The counters of a row: one for each reason, and again for decisions in shadow mode.
const ROW: usize = 16;

/// The counter of a decision within its row.
#[inline]
fn column(is_shadow: bool, reason: Reason) -> usize {
    reason as usize + if is_shadow { ROW / 2 } else { 0 }
}

/// The place of the rows of one limit.
#[derive(Clone, Copy, Debug)]
struct LimitRows {
    /// The first counter.
    first: usize,
    /// The distance between the rows of two actions. 0 if the limit has one row, because it belongs to one action.
    per_action: usize,
}

/// Counts the decisions of a gate. A limit of an action has a row of counters. A global limit, and decisions without a
/// limit, have a row for each action and one for calls without an action. So the plan bounds the number of rows.
pub(crate) struct DecisionCounts {
    counters: Counters,
    /// The rows of decisions without a limit, and then those of each limit by its id.
    rows: Box<[LimitRows]>,
}

impl DecisionCounts {
    pub(crate) fn new(plan: &Plan) -> Self {
        let mut len = 0;
        let mut add_rows = |is_of_action| {
            let (first, per_action) = (len, if is_of_action { 0 } else { ROW });
            len += if is_of_action { ROW } else { ROW * (plan.actions().len() + 1) };
            LimitRows { first, per_action }
        };
        let mut rows = vec![add_rows(false)];
        rows.extend(plan.limits().iter().map(|(id, _)| add_rows(plan.limit_info(id).action().is_some())));
        Self { counters: Counters::new(len), rows: rows.into() }
    }

    /// Counts one decision that a client is given.
    #[inline]
    pub(crate) fn record(&self, actions: MatchedActions, decision: &Decision) {
        let rows = self.rows[decision.bound_by.map_or(0, |limit| limit.index() + 1)];
        self.counters.add(row(rows, actions.first()) + column(decision.shadow, decision.reason), 1);
    }

    /// The decisions so far. Those of an action's limit that were admitted or refused by it are always there; others if
    /// there are any.
    pub(crate) fn list(&self, plan: &Plan) -> Vec<DecisionCount> {
        let limits = [None].into_iter().chain(plan.limits().iter().map(|(id, _)| Some(id)));
        let mut counts = Vec::new();
        for (limit, rows) in limits.zip(&self.rows) {
            let of_action = limit.and_then(|limit| plan.limit_info(limit).action());
            let actions = plan.actions().map(|(id, _)| Some(id)).filter(|_| of_action.is_none());
            for action in [of_action].into_iter().chain(actions) {
                for (place, (outcome, reason)) in RESULTS.into_iter().enumerate() {
                    let column = column(outcome == DecisionOutcome::Shadow, reason);
                    let count = self.counters.get(row(*rows, action) + column);
                    if count > 0 || of_action.is_some() && place < ALWAYS_LISTED {
                        counts.push(DecisionCount { action, limit, outcome, reason: reason_name(reason), count });
                    }
                }
            }
        }
        counts
    }
}

/// The first counter of the row of a limit and an action.
#[inline]
fn row(rows: LimitRows, action: Option<ActionId>) -> usize {
    rows.first + rows.per_action * action.map_or(0, |action| action.index() + 1)
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
