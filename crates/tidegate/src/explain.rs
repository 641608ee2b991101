//! Every limit that a check would ask, one by one.

use serde::{Deserialize, Serialize};
use tidegate_core::{Batch, Clock, Decision, Outcomes, Span};
use tidegate_policy::MatchedActions;
use tidegate_store::Store;

use crate::{DecisionReport, Gate};

/// What a check would answer, and every limit that it would ask.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The action, or null if only the global limit applies.
    pub action: Option<String>,
    /// Further actions that are asked, since servers may read the path in other ways; left out if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
    /// What a check would answer.
    pub decision: DecisionReport,
    /// Every limit, in the order in which it is asked.
    pub limits: Vec<LimitState>,
}

/// One limit as it stands for one caller. Times are whole seconds, rounded up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitState {
    /// Its name: the action's, or `global`.
    pub name: String,
    /// Whose it is: `action` or `global`.
    pub source: String,
    /// What it allows, in words, with its true bound.
    pub words: String,
    /// What it counts by.
    pub key: Vec<String>,
    /// Its capacity.
    pub limit: u64,
    /// What is used of it.
    pub used: u64,
    /// What is left of it; 0 while a block lives.
    pub remaining: u64,
    /// Whether it would admit the call.
    pub allowed: bool,
    /// If not, seconds until it would; null if never.
    pub retry_after: Option<u64>,
    /// Seconds until it is whole again.
    pub reset_after: u64,
    /// Whether a penalty lives.
    pub blocked: bool,
    /// The whole length of the block in force, in seconds.
    pub backoff_seconds: Option<u64>,
    /// Strikes that count.
    pub strikes: u8,
    /// Whether it only watches.
    pub shadow: bool,
}

impl Explanation {
    pub(crate) fn new<S: Store, C: Clock>(
        gate: &Gate<S, C>,
        actions: MatchedActions,
        decision: &Decision,
        batch: &Batch,
        outcomes: &Outcomes,
    ) -> Self {
        let plan = gate.plan();
        let now = outcomes.now();
        let limits = batch.ops().iter().zip(outcomes.list()).map(|(op, outcome)| {
            let info = plan.limit_info(op.limit);
            let blocked = outcome.block_until > now;
            let allowed = !outcome.verdict.refuses();
            let wait = (!allowed && !outcome.retry_at.is_never()).then(|| outcome.retry_at.since(now).as_secs_ceil());
            LimitState {
                name: info.name().to_owned(),
                source: info.scope().as_str().to_owned(),
                words: info.description().to_owned(),
                key: plan.key_parts(op.limit).iter().map(ToString::to_string).collect(),
                limit: outcome.limit,
                used: outcome.used,
                remaining: outcome.remaining,
                allowed,
                retry_after: wait,
                reset_after: outcome.reset_at.since(now).as_secs_ceil(),
                blocked,
                backoff_seconds: blocked.then(|| Span::as_secs_ceil(outcome.block)),
                strikes: outcome.strikes,
                shadow: plan.limits().get(op.limit).is_some_and(tidegate_core::Limit::is_shadow),
            }
        });
        let mut names = actions.iter().map(|id| plan.action(id).name().to_owned());
        Self { action: names.next(), also: names.collect(), decision: gate.report(decision), limits: limits.collect() }
    }
}
