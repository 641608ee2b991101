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

use super::Shared;
use super::keys::Keys;
use crate::StoreError;

/// Whether no slot is sure to hold all keys of the batch.
pub(super) fn is_spread(batch: &Batch) -> bool {
    let affinity = batch.context().affinity;
    let mut places = batch.ops().iter().map(|op| Keys::place(affinity, op.key));
    places.next().is_some_and(|first| places.any(|place| place != first))
}

/// The questions of a batch that lie in one slot.
struct Part {
    batch: Batch,
    /// Where they stand in the whole batch.
    places: ArrayVec<usize, MAX_OPS>,
    /// What was found before anything was charged.
    looked: Outcomes,
    /// What was answered, and what stood against the call elsewhere by then.
    asked: Option<(Outcomes, RefusalSummary)>,
}

impl Part {
    /// What is known of it.
    fn known(&self) -> &Outcomes {
        self.asked.as_ref().map_or(&self.looked, |(outcomes, _)| outcomes)
    }

    /// Whether it was asked when more stood against the call than does now.
    fn is_outdated(&self, against: &RefusalSummary) -> bool {
        self.asked.as_ref().is_some_and(|(_, then)| {
            then.enforced_refused && !against.enforced_refused || then.any_refused && !against.any_refused
        })
    }

    /// Which of its operations were charged as those of a call that is admitted.
    fn charged(&self, limits: &Limits) -> ArrayVec<usize, MAX_OPS> {
        let Some((outcomes, elsewhere)) = &self.asked else { return ArrayVec::new() };
        let mut against = *elsewhere;
        against.add_part(&self.batch, limits, outcomes);
        let is_charged = |(index, (op, outcome)): (usize, (&Op, &Outcome))| {
            let limit = limits.get(op.limit)?;
            (op.verb == Verb::Take && against.must_refund_if_refused(limit, outcome)).then_some(index)
        };
        self.batch.ops().iter().zip(outcomes.list()).enumerate().filter_map(is_charged).collect()
    }
}

impl Shared {
    pub(super) async fn ask_in_parts(self: &Arc<Self>, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        let asks = |op: &Op| matches!(op.verb, Verb::Take | Verb::Peek);
        let mut parts = try_join_all(divided(batch, asks).map(|(part, places)| self.look(part, places, now))).await?;
        for place in 0..parts.len() {
            self.ask_part(&mut parts, place, now).await?;
        }
        for place in 0..parts.len() {
            // Told of a refusal that wasn't one any more when it was asked, it charged nothing.
            if parts[place].is_outdated(&self.against(&parts, None)) {
                self.ask_part(&mut parts, place, now).await?;
            }
        }
        let against = self.against(&parts, None);
        let mut at = now;
        let mut answers: ArrayVec<(usize, Outcome), MAX_OPS> = ArrayVec::new();
        for part in &parts {
            let taken_back = self.give_back(part, |limit| against.has_refusal_for(limit), now).await?;
            at = at.max(part.known().now());
            for (index, place) in part.places.iter().enumerate() {
                let outcomes = if taken_back.contains(&index) { &part.looked } else { part.known() };
                answers.push((*place, outcomes.list()[index]));
            }
        }
        for (part, places) in divided(batch, |op| !asks(op)) {
            let outcomes = self.ask_one(&part, now, RefusalSummary::default()).await?;
            answers.extend(places.into_iter().zip(outcomes.list().iter().copied()));
        }
        answers.sort_unstable_by_key(|(place, _)| *place);
        Ok(Outcomes::new(at, answers.into_iter().map(|(_, outcome)| outcome)))
    }

    async fn look(
        self: &Arc<Self>,
        batch: Batch,
        places: ArrayVec<usize, MAX_OPS>,
        now: Time,
    ) -> Result<Part, StoreError> {
        let look = batch.with_ops(batch.ops().iter().map(|op| Op { verb: Verb::Peek, ..*op }));
        let looked = self.ask_one(&look, now, RefusalSummary::default()).await?;
        Ok(Part { batch, places, looked, asked: None })
    }

    /// What stands against the call in all parts but one.
    fn against(&self, parts: &[Part], except: Option<usize>) -> RefusalSummary {
        let mut against = RefusalSummary::default();
        for (_, part) in parts.iter().enumerate().filter(|(place, _)| Some(*place) != except) {
            against.add_part(&part.batch, &self.limits, part.known());
        }
        against
    }

    /// Asks a part. If it can't be asked, the others give back what they were charged.
    async fn ask_part(self: &Arc<Self>, parts: &mut [Part], place: usize, now: Time) -> Result<(), StoreError> {
        let elsewhere = self.against(parts, Some(place));
        match self.ask_one(&parts[place].batch, now, elsewhere).await {
            Ok(outcomes) => {
                parts[place].asked = Some((outcomes, elsewhere));
                Ok(())
            }
            Err(error) => {
                for part in parts.iter() {
                    // It is the first error that is told.
                    let _ = self.give_back(part, |_| true, now).await;
                }
                Err(error)
            }
        }
    }

    /// Gives back what a part was charged under these limits, and says for which of its operations.
    async fn give_back(
        self: &Arc<Self>,
        part: &Part,
        concerns: impl Fn(&Limit) -> bool,
        now: Time,
    ) -> Result<ArrayVec<usize, MAX_OPS>, StoreError> {
        let mut given = part.charged(&self.limits);
        given.retain(|index| self.limits.get(part.batch.ops()[*index].limit).is_some_and(&concerns));
        if given.is_empty() {
            return Ok(given);
        }
        let back = given.iter().map(|&index| {
            let op = part.batch.ops()[index];
            let holds = self.limits.get(op.limit).is_some_and(|limit| limit.kind().has_permits());
            Op { verb: if holds { Verb::Release } else { Verb::Refund }, ..op }
        });
        let charged_at = part.known().now();
        let back = part
            .batch
            .with_ops(back)
            .with_charged_at(charged_at)
            .with_counted_at(charged_at + part.batch.context().lead);
        self.ask_one(&back, now, RefusalSummary::default()).await?;
        Ok(given)
    }
}

/// The operations of a batch that are wanted, slot by slot, and where they stand in it.
fn divided(batch: &Batch, wanted: impl Fn(&Op) -> bool) -> impl Iterator<Item = (Batch, ArrayVec<usize, MAX_OPS>)> {
    let affinity = batch.context().affinity;
    let ops = batch.ops().iter().enumerate().filter(|(_, op)| wanted(op));
    let mut order: ArrayVec<(u64, usize), MAX_OPS> =
        ops.map(|(index, op)| (Keys::place(affinity, op.key), index)).collect();
    // Always in the same order, so that two who ask for the same meet at the first of it.
    order.sort_unstable();
    let groups: ArrayVec<ArrayVec<usize, MAX_OPS>, MAX_OPS> = order
        .chunk_by(|one, other| one.0 == other.0)
        .map(|group| group.iter().map(|(_, index)| *index).collect())
        .collect();
    groups.into_iter().map(|places| (batch.with_ops(places.iter().map(|&place| batch.ops()[place])), places))
}
