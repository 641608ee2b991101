//! Counts of decisions by action, limit and reason.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate_core::{Decision, LimitId, Reason};
use tidegate_policy::{ActionId, MatchedActions, Plan};
use tidegate_runtime::counters::Counters;

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
const RESULTS: [(DecisionOutcome, Reason); 12] = [
    (DecisionOutcome::Allowed, Reason::Ok),
    (DecisionOutcome::Refused, Reason::Limit),
    (DecisionOutcome::Refused, Reason::Penalty),
    (DecisionOutcome::Refused, Reason::Reserved),
    (DecisionOutcome::Refused, Reason::Share),
    (DecisionOutcome::Allowed, Reason::Unlimited),
    (DecisionOutcome::Allowed, Reason::Parole),
    (DecisionOutcome::Allowed, Reason::Reservation),
    (DecisionOutcome::Allowed, Reason::AllowList),
    (DecisionOutcome::Refused, Reason::DenyList),
    (DecisionOutcome::Shadow, Reason::Limit),
    (DecisionOutcome::Shadow, Reason::Penalty),
];
const ALWAYS_LISTED: usize = 2;
/// The maximum number of counts that are kept of earlier policies. Further ones start again at 0.
const MAX_EARLIER: usize = 1 << 16;

/// The counters of a row: one for each reason, and again for decisions in shadow mode.
const ROW: usize = 20;

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

/// Counts the decisions of a gate, with those that it made by earlier policies.
pub(crate) struct DecisionCounts {
    table: CountTable,
    earlier: Arc<Mutex<EarlierCounts>>,
}

/// The counters of a plan. A limit of an action has a row of counters. A global limit, and decisions without a limit,
/// have a row for each action and one for calls without an action. So the plan bounds the number of rows.
#[derive(Clone)]
struct CountTable {
    counters: Counters,
    /// The rows of decisions without a limit, and then those of each limit by its id.
    rows: Arc<[LimitRows]>,
}

/// The action by its name, the limit, and the index in [`RESULTS`]. An action's id is of one plan only.
type CountName = (Option<String>, Option<LimitId>, usize);

/// The counts of earlier policies.
#[derive(Default)]
struct EarlierCounts {
    totals: HashMap<CountName, u64>,
    /// The tables of earlier plans in which calls that began by them may still be counted.
    tables: Vec<(Arc<Plan>, CountTable)>,
}

impl DecisionCounts {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self { table: CountTable::new(plan), earlier: Arc::default() }
    }

    /// The counts of a gate that decides by the plan `next` instead of `plan`.
    pub(crate) fn next(&self, plan: &Arc<Plan>, next: &Plan) -> Self {
        let mut earlier = self.earlier.lock();
        earlier.merge_ended();
        // A next gate that was given up has left the table there.
        if !earlier.tables.iter().any(|(_, table)| table.counters.is_same(&self.table.counters)) {
            earlier.tables.push((Arc::clone(plan), self.table.clone()));
        }
        Self { table: CountTable::new(next), earlier: Arc::clone(&self.earlier) }
    }

    /// Counts one decision that a client is given.
    #[inline]
    pub(crate) fn record(&self, actions: MatchedActions, decision: &Decision) {
        self.table.record(actions, decision);
    }

    /// The decisions so far. Those of an action's limit that were admitted or refused by it are always there; others if
    /// there are any. Those of actions that the plan doesn't have, and of retired limits, are left out.
    pub(crate) fn list(&self, plan: &Plan) -> Vec<DecisionCount> {
        let earlier = self.earlier.lock().totals_without(&self.table);
        let mut counts = Vec::new();
        self.table.for_each(plan, |action, limit, result, own_count| {
            let name = || (action.map(|action| plan.action(action).name().to_owned()), limit, result);
            let count = own_count + if earlier.is_empty() { 0 } else { earlier.get(&name()).copied().unwrap_or(0) };
            let is_of_action = limit.is_some_and(|limit| plan.limit_info(limit).action().is_some());
            if limit.is_some_and(|limit| plan.is_retired(limit)) {
                return;
            }
            if count > 0 || is_of_action && result < ALWAYS_LISTED {
                let (outcome, reason) = RESULTS[result];
                counts.push(DecisionCount { action, limit, outcome, reason: reason.as_str(), count });
            }
        });
        counts
    }

    /// The number of decisions with this outcome so far, with those of retired limits and of actions that are gone.
    pub(crate) fn total(&self, plan: &Plan, outcome: DecisionOutcome) -> u64 {
        let mut earlier = self.earlier.lock();
        earlier.merge_ended();
        let is_meant = |result: usize| RESULTS[result].0 == outcome;
        let ended = earlier.totals.iter().filter(|((.., result), _)| is_meant(*result));
        let mut total = ended.map(|(_, count)| count).sum();
        let others = earlier.tables.iter().filter(|(_, table)| !table.counters.is_same(&self.table.counters));
        for (plan, table) in others.map(|(plan, table)| (&**plan, table)).chain([(plan, &self.table)]) {
            table.for_each(plan, |_, _, result, count| total += if is_meant(result) { count } else { 0 });
        }
        total
    }
}

impl CountTable {
    fn new(plan: &Plan) -> Self {
        let mut len = 0;
        let mut add_rows = |is_of_action| {
            let (first, per_action) = (len, if is_of_action { 0 } else { ROW });
            len += if is_of_action { ROW } else { ROW * (plan.actions().len() + 1) };
            LimitRows { first, per_action }
        };
        let mut rows = vec![add_rows(false)];
        rows.extend(plan.limits().iter().map(|(id, _)| add_rows(has_one_row(plan, id))));
        Self { counters: Counters::new(len), rows: rows.into() }
    }

    #[inline]
    fn record(&self, actions: MatchedActions, decision: &Decision) {
        let rows = self.rows[decision.bound_by.map_or(0, |limit| limit.index() + 1)];
        self.counters.add(row(rows, actions.first()) + column(decision.shadow, decision.reason), 1);
    }

    /// Calls `visit` with each action, limit, index in [`RESULTS`] and count.
    fn for_each(&self, plan: &Plan, mut visit: impl FnMut(Option<ActionId>, Option<LimitId>, usize, u64)) {
        let limits = [None].into_iter().chain(plan.limits().iter().map(|(id, _)| Some(id)));
        for (limit, rows) in limits.zip(&*self.rows) {
            let of_action = limit.and_then(|limit| plan.limit_info(limit).action());
            let has_one_row = limit.is_some_and(|limit| has_one_row(plan, limit));
            let actions = plan.actions().map(|(id, _)| Some(id)).filter(|_| !has_one_row);
            for action in [of_action].into_iter().chain(actions) {
                for (result, (outcome, reason)) in RESULTS.into_iter().enumerate() {
                    let column = column(outcome == DecisionOutcome::Shadow, reason);
                    visit(action, limit, result, self.counters.get(row(*rows, action) + column));
                }
            }
        }
    }

    fn add_to(&self, plan: &Plan, totals: &mut HashMap<CountName, u64>) {
        self.for_each(plan, |action, limit, result, count| {
            let name = (action.map(|action| plan.action(action).name().to_owned()), limit, result);
            if count > 0 && (totals.len() < MAX_EARLIER || totals.contains_key(&name)) {
                *totals.entry(name).or_default() += count;
            }
        });
    }
}

impl EarlierCounts {
    /// Adds the tables in which nothing is counted any more to the totals.
    fn merge_ended(&mut self) {
        let totals = &mut self.totals;
        self.tables.retain_mut(|(plan, table)| {
            let has_ended = table.counters.is_only_clone();
            if has_ended {
                table.add_to(plan, totals);
            }
            !has_ended
        });
    }

    /// The counts of all tables but this one.
    fn totals_without(&mut self, own: &CountTable) -> HashMap<CountName, u64> {
        self.merge_ended();
        let mut totals = self.totals.clone();
        for (plan, table) in self.tables.iter().filter(|(_, table)| !table.counters.is_same(&own.counters)) {
            table.add_to(plan, &mut totals);
        }
        totals
    }
}

/// True if all decisions of a limit are of one action, or there are none, because the limit is retired.
fn has_one_row(plan: &Plan, limit: LimitId) -> bool {
    plan.limit_info(limit).action().is_some() || plan.is_retired(limit)
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
                    expected.push((*action, *limit, outcome, reason.as_str(), count));
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

    #[test]
    fn totals_outlive_limits_and_actions() {
        let read = |text: &str| PolicySources::new().file("test.toml", text);
        let (a, both) = ("[inbound.action.a]\nlimit = \"5/s\"\n", "[inbound.action.b]\nlimit = \"5/s\"\n");
        let both = Policy::load(read(&format!("{a}{both}"))).expect("a policy");
        let refuse = |counts: &DecisionCounts, plan: &Plan| {
            for (limit, _) in plan.active_limits() {
                let decision =
                    Decision { bound_by: Some(limit), ..Decision::without_limit(false, Reason::Limit, Time::ZERO) };
                counts.record(MatchedActions::from(plan.limit_info(limit).action()), &decision);
            }
        };
        let first = DecisionCounts::new(both.plan());
        refuse(&first, both.plan());
        let one = both.load_next(read(a)).expect("a policy");
        let second = first.next(both.plan(), one.plan());
        for (counts, plan, total) in [(&second, one.plan(), 2), (&first, both.plan(), 2)] {
            assert_eq!(counts.total(plan, DecisionOutcome::Refused), total);
        }
        drop(first);
        refuse(&second, one.plan());
        assert_eq!(second.total(one.plan(), DecisionOutcome::Refused), 3);
        assert_eq!(second.total(one.plan(), DecisionOutcome::Allowed), 0);
        let listed: u64 = second.list(one.plan()).iter().map(|found| found.count).sum();
        assert_eq!(listed, 2, "the list leaves out the action that is gone");
    }
}
