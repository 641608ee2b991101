//! The execution of batches with keys in several slots of a cluster, slot by slot.
//!
//! First all slots are peeked at. Then each is charged in turn, with the refusals of the others as known from their
//! charge or, before it, from the peek. If a slot refuses that had room at the peek, the others are refunded. So a
//! refused call may be charged for a moment, or until the limit forgets it if the client dies in between. But no charge
//! is missing for an admitted call.

use std::sync::Arc;

use arrayvec::ArrayVec;
use futures_util::future::try_join_all;
use tidegate_core::batch::{MAX_OPS, Outcome, RefusalSummary};
use tidegate_core::{Batch, Limit, Limits, Op, Outcomes, Time, Verb};

use super::RedisInner;
use super::keys::KeyNames;
use crate::StoreError;

/// True if the keys of the batch may be in several slots.
pub(super) fn needs_several_slots(batch: &Batch) -> bool {
    let affinity = batch.context().affinity;
    let mut slot_affinities = batch.ops().iter().map(|op| KeyNames::slot_affinity(affinity, op.key));
    slot_affinities.next().is_some_and(|first| slot_affinities.any(|affinity| affinity != first))
}

/// The operations of a batch in one slot.
struct SlotBatch {
    batch: Batch,
    /// Their positions in the whole batch.
    positions: ArrayVec<usize, MAX_OPS>,
    /// The outcomes before any charge.
    peeked: Outcomes,
    /// The outcomes of the charge, and the other slots' refusals at that time.
    applied: Option<(Outcomes, RefusalSummary)>,
}

impl SlotBatch {
    fn latest_outcomes(&self) -> &Outcomes {
        self.applied.as_ref().map_or(&self.peeked, |(outcomes, _)| outcomes)
    }

    /// True if it was charged with refusals of other slots that no longer hold.
    fn has_outdated_refusals(&self, refusals: &RefusalSummary) -> bool {
        self.applied.as_ref().is_some_and(|(_, refusals_then)| {
            refusals_then.enforced_refused && !refusals.enforced_refused
                || refusals_then.any_refused && !refusals.any_refused
        })
    }

    /// The operations that were charged as those of an admitted call.
    fn charged_ops(&self, limits: &Limits) -> ArrayVec<usize, MAX_OPS> {
        let Some((outcomes, other_parts)) = &self.applied else { return ArrayVec::new() };
        let mut refusals = *other_parts;
        refusals.add_part(&self.batch, limits, outcomes);
        let is_charged = |(index, (op, outcome)): (usize, (&Op, &Outcome))| {
            let limit = limits.get(op.limit)?;
            (op.verb == Verb::Take && refusals.must_refund_if_refused(limit, outcome)).then_some(index)
        };
        self.batch.ops().iter().zip(outcomes.list()).enumerate().filter_map(is_charged).collect()
    }
}

impl RedisInner {
    pub(super) async fn apply_by_slot(self: &Arc<Self>, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        let is_take_or_peek = |op: &Op| matches!(op.verb, Verb::Take | Verb::Peek);
        let slots = split_by_slot(batch, is_take_or_peek);
        let mut parts = try_join_all(slots.map(|(part, positions)| self.peek_slot(part, positions, now))).await?;
        for index in 0..parts.len() {
            self.apply_slot_batch(&mut parts, index, now).await?;
        }
        for index in 0..parts.len() {
            // A slot that was called with an outdated refusal charged nothing.
            if parts[index].has_outdated_refusals(&self.refusal_summary(&parts, None)) {
                self.apply_slot_batch(&mut parts, index, now).await?;
            }
        }
        let refusals = self.refusal_summary(&parts, None);
        let mut at = now;
        let mut outcomes_by_position: ArrayVec<(usize, Outcome), MAX_OPS> = ArrayVec::new();
        for part in &parts {
            let refunded = self.refund(part, |limit| refusals.has_refusal_for(limit), now).await?;
            at = at.max(part.latest_outcomes().now());
            for (index, position) in part.positions.iter().enumerate() {
                let outcomes = if refunded.contains(&index) { &part.peeked } else { part.latest_outcomes() };
                outcomes_by_position.push((*position, outcomes.list()[index]));
            }
        }
        for (part, positions) in split_by_slot(batch, |op| !is_take_or_peek(op)) {
            let outcomes = self.apply_in_one_slot(&part, now, RefusalSummary::default()).await?;
            outcomes_by_position.extend(positions.into_iter().zip(outcomes.list().iter().copied()));
        }
        outcomes_by_position.sort_unstable_by_key(|(position, _)| *position);
        Ok(Outcomes::new(at, outcomes_by_position.into_iter().map(|(_, outcome)| outcome)))
    }

    async fn peek_slot(
        self: &Arc<Self>,
        batch: Batch,
        positions: ArrayVec<usize, MAX_OPS>,
        now: Time,
    ) -> Result<SlotBatch, StoreError> {
        let peek = batch.with_ops(batch.ops().iter().map(|op| Op { verb: Verb::Peek, ..*op }));
        let peeked = self.apply_in_one_slot(&peek, now, RefusalSummary::default()).await?;
        Ok(SlotBatch { batch, positions, peeked, applied: None })
    }

    /// The refusals of all parts, or of all but one.
    fn refusal_summary(&self, parts: &[SlotBatch], except: Option<usize>) -> RefusalSummary {
        let mut refusals = RefusalSummary::default();
        for (_, part) in parts.iter().enumerate().filter(|(index, _)| Some(*index) != except) {
            refusals.add_part(&part.batch, &self.limits, part.latest_outcomes());
        }
        refusals
    }

    /// Applies a part. If that fails, the others are refunded.
    async fn apply_slot_batch(
        self: &Arc<Self>,
        parts: &mut [SlotBatch],
        index: usize,
        now: Time,
    ) -> Result<(), StoreError> {
        let other_parts = self.refusal_summary(parts, Some(index));
        match self.apply_in_one_slot(&parts[index].batch, now, other_parts).await {
            Ok(outcomes) => {
                parts[index].applied = Some((outcomes, other_parts));
                Ok(())
            }
            Err(error) => {
                for part in parts.iter() {
                    // The first error is the one returned.
                    let _ = self.refund(part, |_| true, now).await;
                }
                Err(error)
            }
        }
    }

    /// Refunds the charges of a part under these limits. Returns the indices of the refunded operations.
    async fn refund(
        self: &Arc<Self>,
        part: &SlotBatch,
        applies_to: impl Fn(&Limit) -> bool,
        now: Time,
    ) -> Result<ArrayVec<usize, MAX_OPS>, StoreError> {
        let mut refunded = part.charged_ops(&self.limits);
        refunded.retain(|index| self.limits.get(part.batch.ops()[*index].limit).is_some_and(&applies_to));
        if refunded.is_empty() {
            return Ok(refunded);
        }
        let refund_ops = refunded.iter().map(|&index| {
            let op = part.batch.ops()[index];
            let has_permits = self.limits.get(op.limit).is_some_and(|limit| limit.kind().has_permits());
            Op { verb: if has_permits { Verb::Release } else { Verb::Refund }, ..op }
        });
        let charged_at = part.latest_outcomes().now();
        let counted_at = charged_at + part.batch.context().lead;
        let refund_batch = part.batch.with_ops(refund_ops).with_charged_at(charged_at).with_counted_at(counted_at);
        self.apply_in_one_slot(&refund_batch, now, RefusalSummary::default()).await?;
        Ok(refunded)
    }
}

/// The wanted operations of a batch by slot, with their positions in it.
fn split_by_slot(
    batch: &Batch,
    wanted: impl Fn(&Op) -> bool,
) -> impl Iterator<Item = (Batch, ArrayVec<usize, MAX_OPS>)> {
    let affinity = batch.context().affinity;
    let ops = batch.ops().iter().enumerate().filter(|(_, op)| wanted(op));
    let mut order: ArrayVec<(u64, usize), MAX_OPS> =
        ops.map(|(index, op)| (KeyNames::slot_affinity(affinity, op.key), index)).collect();
    // Always in the same order, so that two calls with the same keys meet at the first one.
    order.sort_unstable();
    let groups: ArrayVec<ArrayVec<usize, MAX_OPS>, MAX_OPS> = order
        .chunk_by(|one, other| one.0 == other.0)
        .map(|group| group.iter().map(|(_, index)| *index).collect())
        .collect();
    groups.into_iter().map(|positions| (batch.with_ops(positions.iter().map(|&at| batch.ops()[at])), positions))
}
