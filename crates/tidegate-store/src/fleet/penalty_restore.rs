//! Restores penalties that a store doesn't know: blocks that it has lost, and strikes of an outage.
//!
//! A penalty ends by its time or by a reset. So the store keeps the time of each key's last reset under a limit of its
//! own: a window as long as the longest block, which every store can keep. A penalty older than the last reset is
//! forgotten here, and a newer one is restored.

use std::sync::Arc;

use tidegate_core::batch::MAX_OPS;
use tidegate_core::{
    Batch, Key, Limit, LimitError, LimitId, LimitKind, Limits, Op, Outcome, Outcomes, Penalty, Span, Time, Verb, Window,
};

use super::{FleetNode, new_batch};
use crate::StoreError;

/// The tag of the limit of resets: the same in every plan.
const RESET_LOG_TAG: u64 = 0x7265_7365_7473_2121;

/// The limit under which a store keeps the times of resets of these limits' keys. `None` if no limit blocks.
pub(super) fn reset_log_limit<'a>(limits: impl Iterator<Item = &'a Limit>) -> Result<Option<Limit>, LimitError> {
    let longest = limits.filter_map(Limit::penalty).map(Penalty::cap).max();
    let window = longest.map(|longest| Window::new(1, longest, 1)).transpose()?;
    Ok(window.map(|window| Limit::new(LimitKind::Window(window)).with_tag(RESET_LOG_TAG)))
}

/// The times of resets, as the store keeps them.
pub(super) struct ResetLog {
    limits: Arc<Limits>,
    /// The limit that keeps the times, and its window.
    limit_and_window: Option<(LimitId, Span)>,
}

impl ResetLog {
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        let limit_and_window = limits.iter().find_map(|(id, limit)| match limit.kind() {
            LimitKind::Window(window) if limits.tag(id) == RESET_LOG_TAG => Some((id, window.window())),
            _ => None,
        });
        Self { limits, limit_and_window }
    }

    /// The operation that notes a reset, or asks for the last one.
    fn reset_log_op(&self, verb: Verb, limit: LimitId, key: Key) -> Option<Op> {
        let (log_limit, _) = self.limit_and_window?;
        self.limits.get(limit)?.penalty()?;
        // The lower half selects the part of the store: the one of the key that was reset.
        Some(Op::new(log_limit, verb, Key::new(key.hi() ^ self.limits.tag(limit), key.lo()), 1))
    }

    /// The time of a key's last reset by the store's clock, from the outcomes of a batch with that operation second.
    fn last_reset_at(&self, outcomes: &Outcomes) -> Option<Time> {
        let (outcome, (_, window)) = (outcomes.list().get(1)?, self.limit_and_window?);
        (outcome.used > 0 && outcome.reset_at > outcomes.now()).then(|| outcome.reset_at - window)
    }

    /// Batches that reset keys and note the resets, with their numbers of operations of `batch`. Mostly one batch.
    pub(super) fn batches_with_log_entries<'a>(
        &'a self,
        batch: &'a Batch,
    ) -> impl Iterator<Item = (Batch, usize)> + 'a {
        batch.ops().chunks(MAX_OPS / 2).map(move |ops| {
            let resets = ops.iter().filter(|op| op.verb == Verb::Reset);
            let log_ops = resets.filter_map(|op| self.reset_log_op(Verb::Debit, op.limit, op.key));
            (batch.with_ops(ops.iter().copied().chain(log_ops)), ops.len())
        })
    }
}

/// A key's penalty as a node knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KnownPenalty {
    /// The common affinity of the keys of its batch.
    pub(super) affinity: u64,
    /// Strikes that the store knows or has lost.
    pub(super) strikes: u8,
    /// Strikes that the store doesn't know of yet.
    pub(super) unreported_strikes: u8,
    pub(super) parole_cost: u64,
    /// The time of the last strike by the store's clock. `None` if this node counted it.
    pub(super) last_strike_store_time: Option<Time>,
    /// The time of the last strike and the end of its block, by this node's clock: never too late.
    pub(super) last_strike_at: Time,
    pub(super) block_ends_at: Time,
}

/// The cost of the call that a refused call's block admits at its end.
pub(super) fn parole_cost(op: &Op, outcome: &Outcome) -> u64 {
    if outcome.retry_at <= outcome.block_until { op.cost } else { 0 }
}

impl FleetNode {
    /// Restores a penalty in the store, or forgets the key if it was reset since. An error leaves the strikes unknown.
    pub(super) async fn restore_penalty(
        &self,
        (limit, key): (LimitId, Key),
        penalty: &mut KnownPenalty,
    ) -> Result<(), StoreError> {
        if self.restore_unless_reset(limit, key, penalty).await? {
            self.state.blocks.confirm(limit, key, self.state.clock.now());
        } else {
            self.forget(limit, key);
        }
        Ok(())
    }

    /// Returns false if the key was reset since.
    async fn restore_unless_reset(
        &self,
        limit: LimitId,
        key: Key,
        penalty: &mut KnownPenalty,
    ) -> Result<bool, StoreError> {
        let reset_log_op = self.reset_log.reset_log_op(Verb::Peek, limit, key);
        let with_reset_log_op = |op: Op| new_batch(0, penalty.affinity, [op].into_iter().chain(reset_log_op));
        let asked_at = self.state.clock.now();
        let before = self.apply_remote(&with_reset_log_op(Op::new(limit, Verb::Peek, key, 1)), asked_at).await?;
        let answered_at = self.state.clock.now();
        // By the store's clock the comparison is exact, unless the clock was set in between. By this node's clock, the
        // strike counts as old as it can be: the time of the store's decision within the round trip is unknown. In
        // doubt the reset counts.
        let is_after_strike = |reset: Time| {
            penalty.last_strike_store_time.is_some_and(|began| reset >= began)
                || before.now().since(reset) <= answered_at.since(penalty.last_strike_at)
        };
        if self.reset_log.last_reset_at(&before).is_some_and(is_after_strike) {
            return Ok(false);
        }
        let Some(outcome) = before.list().first() else { return Ok(true) };
        let strikes = outcome.strikes.max(penalty.strikes).saturating_add(penalty.unreported_strikes);
        (penalty.strikes, penalty.unreported_strikes) = (strikes, 0);
        let now = self.state.clock.now();
        let time_left = penalty.block_ends_at.since(now);
        let is_blocked = time_left.is_zero() || outcome.block_until > before.now();
        if strikes <= outcome.strikes && is_blocked {
            return Ok(true);
        }
        let parole = u32::try_from(penalty.parole_cost).unwrap_or(u32::MAX);
        let restore_op = Op::new(limit, Verb::RestorePenalty { strikes, parole }, key, time_left.as_micros());
        let after = self.apply_remote(&with_reset_log_op(restore_op), now).await?;
        let since = self.state.clock.now().since(asked_at);
        let is_reset_meanwhile = |reset: Time| after.now().since(reset) <= since;
        if self.reset_log.last_reset_at(&after).is_some_and(is_reset_meanwhile) {
            let reset = new_batch(0, penalty.affinity, [Op::new(limit, Verb::Reset, key, 1)]);
            self.apply_remote(&reset, self.state.clock.now()).await?;
            return Ok(false);
        }
        Ok(true)
    }

    /// Asks the store if it still knows a block, and restores it if not. Without an answer nothing changes.
    pub(super) async fn recheck_block(&self, limit: LimitId, key: Key) {
        if let Some(mut penalty) = self.state.blocks.unconfirmed_penalty(limit, key, self.state.clock.now()) {
            let _ = self.restore_penalty((limit, key), &mut penalty).await;
        }
    }
}
