//! Batches whose keys lie in several slots of a cluster: carried out slot by slot.
//!
//! First all slots are looked at, then each is asked in turn, and told what stands against the call in the others: what
//! was found when they were asked, or else when they were looked at. Where one refuses that had room when it was looked
//! at, the others give back what they were charged. So a charge may stand for a moment for a call that is refused, and
//! for as long as its limit counts it where the client dies between; but none is missing for a call that is admitted.

use std::sync::Arc;

use arrayvec::ArrayVec;
use futures_util::future::try_join_all;
use tidegate_core::batch::{MAX_OPS, Outcome, RefusalSummary};
use tidegate_core::{Batch, Limit, Limits, Op, Outcomes, Time, Verb};

use super::RedisInner;
use super::keys::KeyNames;
use crate::StoreError;

/// Whether no slot is sure to hold all keys of the batch.
pub(super) fn needs_several_slots(batch: &Batch) -> bool {
    let affinity = batch.context().affinity;
    let mut slot_affinities = batch.ops().iter().map(|op| KeyNames::slot_affinity(affinity, op.key));
    slot_affinities.next().is_some_and(|first| slot_affinities.any(|place| place != first))
}

/// The questions of a batch that lie in one slot.
struct SlotBatch {
    batch: Batch,
    /// Where they stand in the whole batch.
    positions: ArrayVec<usize, MAX_OPS>,
    /// What was found before anything was charged.
    peeked: Outcomes,
    /// What was answered, and what stood against the call elsewhere by then.
    applied: Option<(Outcomes, RefusalSummary)>,
}

impl SlotBatch {
    /// What is known of it.
    fn latest_outcomes(&self) -> &Outcomes {
        self.applied.as_ref().map_or(&self.peeked, |(outcomes, _)| outcomes)
    }

    /// Whether it was asked when more stood against the call than does now.
    fn has_outdated_refusals(&self, refusals: &RefusalSummary) -> bool {
        self.applied.as_ref().is_some_and(|(_, refusals_then)| {
            refusals_then.enforced_refused && !refusals.enforced_refused
                || refusals_then.any_refused && !refusals.any_refused
        })
    }

    /// Which of its operations were charged as those of a call that is admitted.
    fn charged_ops(&self, limits: &Limits) -> ArrayVec<usize, MAX_OPS> {
        let Some((outcomes, elsewhere)) = &self.applied else { return ArrayVec::new() };
        let mut refusals = *elsewhere;
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
        let mut parts =
            try_join_all(split_by_slot(batch, is_take_or_peek).map(|(part, places)| self.peek_slot(part, places, now)))
                .await?;
        for index in 0..parts.len() {
            self.apply_slot_batch(&mut parts, index, now).await?;
        }
        for place in 0..parts.len() {
            // Told of a refusal that wasn't one any more when it was asked, it charged nothing.
            if parts[place].has_outdated_refusals(&self.refusal_summary(&parts, None)) {
                self.apply_slot_batch(&mut parts, place, now).await?;
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
        for (part, places) in split_by_slot(batch, |op| !is_take_or_peek(op)) {
            let outcomes = self.apply_in_one_slot(&part, now, RefusalSummary::default()).await?;
            outcomes_by_position.extend(places.into_iter().zip(outcomes.list().iter().copied()));
        }
        outcomes_by_position.sort_unstable_by_key(|(place, _)| *place);
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

    /// What stands against the call in all parts but one.
    fn refusal_summary(&self, parts: &[SlotBatch], except: Option<usize>) -> RefusalSummary {
        let mut refusals = RefusalSummary::default();
        for (_, part) in parts.iter().enumerate().filter(|(place, _)| Some(*place) != except) {
            refusals.add_part(&part.batch, &self.limits, part.latest_outcomes());
        }
        refusals
    }

    /// Asks a part. If it can't be asked, the others give back what they were charged.
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
                    // It is the first error that is told.
                    let _ = self.refund(part, |_| true, now).await;
                }
                Err(error)
            }
        }
    }

    /// Gives back what a part was charged under these limits, and says for which of its operations.
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
        let refund_batch = part
            .batch
            .with_ops(refund_ops)
            .with_charged_at(charged_at)
            .with_counted_at(charged_at + part.batch.context().lead);
        self.apply_in_one_slot(&refund_batch, now, RefusalSummary::default()).await?;
        Ok(refunded)
    }
}

/// The operations of a batch that are wanted, slot by slot, and where they stand in it.
fn split_by_slot(
    batch: &Batch,
    wanted: impl Fn(&Op) -> bool,
) -> impl Iterator<Item = (Batch, ArrayVec<usize, MAX_OPS>)> {
    let affinity = batch.context().affinity;
    let ops = batch.ops().iter().enumerate().filter(|(_, op)| wanted(op));
    let mut order: ArrayVec<(u64, usize), MAX_OPS> =
        ops.map(|(index, op)| (KeyNames::slot_affinity(affinity, op.key), index)).collect();
    // Always in the same order, so that two who ask for the same meet at the first of it.
    order.sort_unstable();
    let groups: ArrayVec<ArrayVec<usize, MAX_OPS>, MAX_OPS> = order
        .chunk_by(|one, other| one.0 == other.0)
        .map(|group| group.iter().map(|(_, index)| *index).collect())
        .collect();
    groups.into_iter().map(|places| (batch.with_ops(places.iter().map(|&place| batch.ops()[place])), places))
}
