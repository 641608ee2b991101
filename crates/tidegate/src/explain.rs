//! The result of a check, with the state of every limit that it asks.

use serde::{Deserialize, Serialize};
use tidegate_core::batch::RefusalSummary;
use tidegate_core::{Batch, Clock, Decision, Key, Limit, LimitId, Op, Outcomes, Reason, Span};
use tidegate_policy::MatchedActions;
use tidegate_store::Store;

use crate::{DecisionReport, Gate};

/// The decision of a check and the state of every limit that it asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// The action. `None` if only the global limit applies.
    pub action: Option<String>,
    /// Further actions that are checked, because servers may read the path in other ways. Omitted if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<String>,
    /// The decision of the check.
    pub decision: DecisionReport,
    /// Every limit, in the order in which it is asked.
    pub limits: Vec<LimitReport>,
}

/// The state of one limit for one caller. Times are whole seconds, rounded up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitReport {
    /// The name of the limit: the action's name, or `global`.
    pub name: String,
    /// The source of the limit: `action` or `global`.
    pub source: String,
    /// A description of what the limit allows, with its true bound.
    pub words: String,
    /// The parts of the key by which it counts.
    pub key: Vec<String>,
    /// Its capacity.
    pub limit: u64,
    /// The used part of the capacity.
    pub used: u64,
    /// The remaining part of the capacity. 0 during a block.
    pub remaining: u64,
    /// True if it would admit the call.
    pub allowed: bool,
    /// Seconds until it would admit the call. `None` if it admits the call now, or never will.
    pub retry_after: Option<u64>,
    /// Seconds until the full capacity is available again.
    pub reset_after: u64,
    /// True if a penalty is active.
    pub blocked: bool,
    /// The full length of the active block, in seconds. `None` if there is no active block.
    pub backoff_seconds: Option<u64>,
    /// The number of strikes that count.
    pub strikes: u8,
    /// The block that a call would start now, in seconds. `None` if it would start none. Omitted if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_block: Option<u64>,
    /// The number of calls in flight that the client may have, if that is less than the capacity because it has broken off
    /// calls. Omitted if `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<u64>,
    /// True if it is a shadow limit, which never refuses a call.
    pub shadow: bool,
}

/// The result of a reset. Limits are described as they were before it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetReport {
    /// Always true.
    pub reset: bool,
    /// The reset limits that had counted or blocked the caller. Omitted if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limits: Vec<LimitReport>,
    /// The limits that still refuse the caller, because they aren't the action's own. Omitted if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub still_refusing: Vec<LimitReport>,
    /// The limits that were left out, because they count by a part of calls that wasn't given. Omitted if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
    /// The keys whose state was reset. They aren't part of the JSON.
    #[serde(skip)]
    pub keys: Vec<(LimitId, Key)>,
}

/// The result of a block.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockReport {
    /// True if a limit blocks the caller now. False only if a full store has no room for the block.
    pub blocked: bool,
    /// The limits that can block the caller, as they are now.
    pub limits: Vec<LimitReport>,
    /// The limits that were left out, because they count by a part of calls that wasn't given. Omitted if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped: Vec<String>,
    /// The decision of each limit that blocks the caller. They aren't part of the JSON.
    #[serde(skip)]
    pub decisions: Vec<Decision>,
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
        let is_listed = matches!(decision.reason, Reason::AllowList | Reason::DenyList);
        let is_shadow = |op: &Op| plan.limits().get(op.limit).is_some_and(Limit::is_shadow);
        let mut refusals = RefusalSummary::default();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            refusals.add(outcome.admission, is_shadow(op));
        }
        let limits = batch.ops().iter().zip(outcomes.list()).map(|(op, outcome)| {
            let info = plan.limit_info(op.limit);
            let blocked = outcome.block_until > now;
            let allowed = !outcome.admission.refuses();
            // As in a check: while a block lasts, nothing changes, and a shared key gets no strikes.
            let takes_strike =
                !allowed && !is_listed && !outcome.retry_at.is_never() && op.share_level.allows_strikes();
            let limit = plan.limits().get(op.limit).filter(|limit| takes_strike && !refusals.has_block_for(limit));
            let next_block =
                limit.and_then(Limit::penalty).map(|penalty| penalty.block_length(outcome.strikes.saturating_add(1)));
            let wait = (!allowed && !outcome.retry_at.is_never()).then(|| outcome.retry_at.since(now).as_secs_ceil());
            LimitReport {
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
                next_block: next_block.map(Span::as_secs_ceil),
                share: None,
                shadow: is_shadow(op),
            }
        });
        let mut names = actions.iter().map(|id| plan.action(id).name().to_owned());
        Self { action: names.next(), also: names.collect(), decision: gate.report(decision), limits: limits.collect() }
    }
}
