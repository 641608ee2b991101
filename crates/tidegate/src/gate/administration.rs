//! The changes that operators make: resets and blocks of single clients.

use tidegate_core::decision::decide;
use tidegate_core::{Batch, Clock, Decision, Limit, LimitId, Op, Outcomes, Penalty, Span, Verb};
use tidegate_policy::{KeyPart, MatchedActions, Query, UnknownActionError};
use tidegate_store::{Store, StoreError};

use super::{CheckError, Gate};
use crate::explain::{BlockReport, Explanation, LimitReport, ResetReport};

/// The name of the global limit in decisions and in [`Gate::reset`]. No action has this name.
const GLOBAL: &str = "global";

/// The reason that a client can't be blocked as asked. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockError {
    /// No limit of the action that counts by what was given has a penalty, or all that have one are in shadow.
    #[error("no enforced limit that counts by what was given has a penalty, so none can block this client")]
    NoPenalty,
    /// No limit of the action blocks for so long.
    #[error("no limit of this action blocks for so long; the longest block is {longest}, the `cap` of {limit}")]
    TooLong {
        /// The limit with the longest block.
        limit: String,
        /// The length of its longest block.
        longest: Span,
    },
}

/// The own limits of actions as operations on the caller's keys.
struct OwnLimits {
    batches: Vec<(MatchedActions, Batch)>,
    /// The limits that count by a part of calls that the query doesn't have.
    skipped: Vec<String>,
}

impl<S: Store, C: Clock> Gate<S, C> {
    /// Resets usage, block and strikes of the caller in the action's own limits. Other actions, the global limit and
    /// what the caller shares with its network while the store is full stay as they are. Repeating it changes nothing.
    /// The action `global` is the global limit. A limit that counts by a part that the query doesn't have is left out;
    /// if that leaves none, it is an error.
    ///
    /// Without an action and a path, resets the caller's address or key, as far as given, in all limits that count by
    /// it.
    ///
    /// # Errors
    /// As [`Gate::check`].
    pub async fn reset(&self, query: &Query<'_>) -> Result<ResetReport, CheckError> {
        let OwnLimits { batches, skipped } = self.own_limits(query)?;
        let mut report = ResetReport { reset: true, skipped, ..ResetReport::default() };
        let mut result = Ok(());
        // After a failure, the others are reset nevertheless.
        for (actions, own) in batches {
            result = self.reset_limits(actions, &own, query, &mut report).await.and(result);
        }
        result.map(|()| report).map_err(CheckError::from)
    }

    /// Blocks the caller for this time in the action's own limits that have a penalty, as if it had violated them. Limits
    /// in shadow don't take part. A block that ends later stays as it is. A limit with a shorter longest block (`cap`)
    /// blocks for that time. Strikes rise to those of such a block, so that the next violation leads to a longer one.
    /// Clients on the allow list pass nevertheless.
    ///
    /// Selects limits as [`Gate::reset`] does.
    ///
    /// ```
    /// use tidegate::policy::{Policy, PolicySources, Query};
    /// use tidegate::{Gate, Reason, Span};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let policy = "[inbound.action.login]\nlimit = \"5 per 60s\"\npenalty = { base = \"2s\", cap = \"1h\" }\n";
    /// let gate = Gate::new(&Policy::load(PolicySources::new().file("gate.toml", policy))?);
    /// let login = Query { action: Some("login"), ip: Some("203.0.113.7".parse()?), ..Query::default() };
    /// let report = gate.block(&login, Span::from_secs(600)).await?;
    /// assert_eq!((report.blocked, report.limits[0].retry_after), (true, Some(600)));
    /// assert_eq!(gate.check(&login).await?.reason, Reason::Penalty);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Gate::check`], and [`BlockError`].
    pub async fn block(&self, query: &Query<'_>, span: Span) -> Result<BlockReport, CheckError> {
        let OwnLimits { batches, skipped } = self.own_limits(query)?;
        let mut report = BlockReport { skipped, ..BlockReport::default() };
        let mut longest: Option<(Span, LimitId)> = None;
        let mut blocks = Vec::with_capacity(batches.len());
        for (actions, own) in &batches {
            let with_penalty = own.ops().iter().filter_map(|op| Some((op, self.enforced_penalty(op.limit)?)));
            longest = with_penalty.clone().map(|(op, penalty)| (penalty.cap(), op.limit)).chain(longest).max();
            blocks.push((*actions, own.with_ops(with_penalty.map(|(op, penalty)| block_op(op, penalty, span)))));
        }
        let Some((longest, limit)) = longest else { return Err(BlockError::NoPenalty.into()) };
        if longest < span {
            let limit = self.plan().limit_info(limit).name().to_owned();
            return Err(BlockError::TooLong { limit, longest }.into());
        }
        let mut result = Ok(());
        for (actions, blocks) in blocks.into_iter().filter(|(_, blocks)| !blocks.ops().is_empty()) {
            result = self.block_limits(actions, &blocks, &mut report).await.and(result);
        }
        report.blocked = !report.decisions.is_empty();
        result.map(|()| report).map_err(CheckError::from)
    }

    /// The own limits of the actions that a query selects, or of all actions and the global limit those that count by
    /// its address or key.
    fn own_limits(&self, query: &Query<'_>) -> Result<OwnLimits, CheckError> {
        if query.actions.is_none() && query.action.is_none() && query.path.is_none() {
            return self.limits_of_caller(query);
        }
        let actions = match query.action {
            Some(GLOBAL) => MatchedActions::NONE,
            _ => self.all_actions(query)?,
        };
        // The action `default` applies to all unknown names, but it is not the action that the caller has named.
        if let (Some(id), Some(found)) = (actions.first(), query.action)
            && self.plan().action(id).name() != found
        {
            return Err(UnknownActionError { found: found.chars().take(128).collect(), nearest: None }.into());
        }
        let mut found = OwnLimits { batches: Vec::new(), skipped: Vec::new() };
        let own = self.own_batch(actions, query, &mut found.skipped)?;
        if own.ops().is_empty() {
            // The error says what is missing.
            self.batch(actions, &Query { skips_global: actions.first().is_some(), ..*query }, Verb::Peek, 0)?;
        }
        found.batches.push((actions, own));
        Ok(found)
    }

    /// The own limits of these actions, or the global limit's, as operations. Appends the names of those that are left out.
    fn own_batch(
        &self,
        actions: MatchedActions,
        query: &Query<'_>,
        skipped: &mut Vec<String>,
    ) -> Result<Batch, CheckError> {
        let (plan, own) = (self.plan(), self.batch(actions, query, Verb::Reset, 0)?);
        let limits: Vec<LimitId> = match actions.first() {
            None => plan.global().to_vec(),
            Some(_) => actions.iter().flat_map(|id| plan.action(id).limits()).copied().collect(),
        };
        let is_left_out = |limit: &LimitId| !own.ops().iter().any(|op| op.limit == *limit);
        skipped.extend(limits.into_iter().filter(is_left_out).map(|limit| plan.limit_info(limit).name().to_owned()));
        Ok(own)
    }

    fn limits_of_caller(&self, query: &Query<'_>) -> Result<OwnLimits, CheckError> {
        let plan = self.plan();
        let counts_by_caller = |op: &&Op| {
            plan.key_parts(op.limit).iter().any(|part| match part {
                KeyPart::ClientIp | KeyPart::Ipv6Network(_) => query.ip.is_some(),
                KeyPart::Key => query.key.is_some(),
                _ => false,
            })
        };
        let mut found = OwnLimits { batches: Vec::new(), skipped: Vec::new() };
        let actions = plan.actions().map(|(id, _)| MatchedActions::from(id));
        for actions in [MatchedActions::NONE].into_iter().chain(actions) {
            match self.own_batch(actions, query, &mut found.skipped) {
                Ok(own) => {
                    let own = own.with_ops(own.ops().iter().filter(counts_by_caller).copied());
                    found.batches.push((actions, own));
                }
                Err(CheckError::Key(_)) => {
                    let name = actions.first().map_or(GLOBAL, |id| plan.action(id).name());
                    found.skipped.push(name.to_owned());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Resets the caller in these limits.
    async fn reset_limits(
        &self,
        actions: MatchedActions,
        own: &Batch,
        query: &Query<'_>,
        report: &mut ResetReport,
    ) -> Result<(), StoreError> {
        let found = self.peek(actions, own).await?;
        report.limits.extend(found.into_iter().filter(|limit| limit.used > 0 || limit.blocked || limit.strikes > 0));
        if !own.ops().is_empty() {
            self.apply(own).await?;
            self.forget_shares(own, query.ip);
            report.keys.extend(own.ops().iter().map(|op| (op.limit, op.key)));
        }
        // The other limits may count by more than was given.
        let Ok(all) = self.batch(actions, query, Verb::Peek, 0) else { return Ok(()) };
        let others = all.ops().iter().filter(|op| !own.ops().iter().any(|own| own.limit == op.limit));
        for limit in self.peek(actions, &all.with_ops(others.copied())).await? {
            if !limit.allowed && !limit.shadow && !report.still_refusing.iter().any(|known| known.name == limit.name) {
                report.still_refusing.push(limit);
            }
        }
        Ok(())
    }

    /// Imposes these blocks, and reports what the store then knows: a full one may have no room for a block.
    async fn block_limits(
        &self,
        actions: MatchedActions,
        blocks: &Batch,
        report: &mut BlockReport,
    ) -> Result<(), StoreError> {
        self.apply(blocks).await?;
        let peek = blocks.with_ops(blocks.ops().iter().map(|op| Op { verb: Verb::Peek, cost: 1, ..*op }));
        let outcomes = self.apply(&peek).await?;
        let limits = self.plan().limits();
        for (op, outcome) in peek.ops().iter().zip(outcomes.list()) {
            let decision = decide(&peek.with_ops([*op]), limits, &Outcomes::new(outcomes.now(), [*outcome]));
            if decision.blocked {
                report.decisions.push(decision);
            }
        }
        report.limits.extend(self.limit_reports(actions, &peek, &outcomes));
        Ok(())
    }

    /// The state of the limits of a batch's operations.
    async fn peek(&self, actions: MatchedActions, batch: &Batch) -> Result<Vec<LimitReport>, StoreError> {
        let batch = batch.with_ops(batch.ops().iter().map(|op| Op { verb: Verb::Peek, ..*op }));
        if batch.ops().is_empty() {
            return Ok(Vec::new());
        }
        let outcomes = self.apply(&batch).await?;
        Ok(self.limit_reports(actions, &batch, &outcomes))
    }

    fn limit_reports(&self, actions: MatchedActions, batch: &Batch, outcomes: &Outcomes) -> Vec<LimitReport> {
        let decision: Decision = decide(batch, self.plan().limits(), outcomes);
        Explanation::new(self, actions, &decision, batch, outcomes).limits
    }

    fn enforced_penalty(&self, limit: LimitId) -> Option<&Penalty> {
        self.plan().limits().get(limit).filter(|limit| !limit.is_shadow()).and_then(Limit::penalty)
    }
}

/// The operation that blocks a key for this time, or for the longest block. The first strike with a block as long is
/// counted, because no strike may have a longer block than its own.
fn block_op(op: &Op, penalty: &Penalty, span: Span) -> Op {
    let last = penalty.max_strikes();
    let strikes = (1..last).find(|strikes| penalty.block_length(*strikes) >= span).unwrap_or(last);
    Op { verb: Verb::RestorePenalty { strikes, parole: 0 }, cost: span.as_micros(), ..*op }
}
