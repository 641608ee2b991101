//! Penalties that come back to a store that doesn't know them: blocks that it has lost, and strikes of an outage.
//!
//! A penalty ends by its time or by a reset. So the store keeps when each key was last reset, under a limit of its own: a
//! window as long as the longest block, which every store can keep. What is older than the last reset is forgotten here, and
//! what is newer comes back.

use std::sync::Arc;

use tidegate_core::batch::MAX_OPS;
use tidegate_core::{
    Batch, Key, Limit, LimitError, LimitId, LimitKind, Limits, Op, Outcome, Outcomes, Penalty, Span, Time,
};
use tidegate_core::{Verb, Window};

use super::Node;
use crate::StoreError;

/// The tag of the limit of resets: the same in every plan.
const TAG: u64 = 0x7265_7365_7473_2121;

/// The limit under which a store keeps when keys of these limits were reset; none where nothing is ever blocked.
pub(super) fn limit<'a>(limits: impl Iterator<Item = &'a Limit>) -> Result<Option<Limit>, LimitError> {
    let longest = limits.filter_map(Limit::penalty).map(Penalty::cap).max();
    let window = longest.map(|longest| Window::new(1, longest, 1)).transpose()?;
    Ok(window.map(|window| Limit::new(LimitKind::Window(window)).with_tag(TAG)))
}

/// The times of resets, as the store keeps them.
pub(super) struct Resets {
    limits: Arc<Limits>,
    /// Under which limit, and for how long.
    kept: Option<(LimitId, Span)>,
}

impl Resets {
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        let kept = limits.iter().filter(|(id, _)| limits.tag(*id) == TAG).find_map(|(id, limit)| match limit.kind() {
            LimitKind::Window(window) => Some((id, window.window())),
            _ => None,
        });
        Self { limits, kept }
    }

    /// The operation that notes a reset, or asks for the last one.
    fn op(&self, verb: Verb, limit: LimitId, key: Key) -> Option<Op> {
        let (kept, _) = self.kept?;
        self.limits.get(limit)?.penalty()?;
        // The lower half decides where a store keeps it: beside what was reset.
        Some(Op::new(kept, verb, Key::new(key.hi() ^ self.limits.tag(limit), key.lo()), 1))
    }

    /// The moment of a key's last reset by the store's clock, by the answer to that operation.
    fn last(&self, outcome: &Outcome, decided: Time) -> Option<Time> {
        let (_, length) = self.kept?;
        (outcome.used > 0 && outcome.reset_at > decided).then(|| outcome.reset_at - length)
    }

    /// A batch that resets keys, with the notes of that: in one piece, unless a batch can't hold as much.
    pub(super) fn noted<'a>(&'a self, batch: &'a Batch) -> impl Iterator<Item = (Batch, usize)> + 'a {
        batch.ops().chunks(MAX_OPS / 2).map(move |ops| {
            let resets = ops.iter().filter(|op| op.verb == Verb::Reset);
            let notes = resets.filter_map(|op| self.op(Verb::Debit, op.limit, op.key));
            (batch.with_ops(ops.iter().copied().chain(notes)), ops.len())
        })
    }
}

/// A key's penalty as a node knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) limit: LimitId,
    pub(super) key: Key,
    /// Its batch's affinity.
    pub(super) affinity: u64,
    /// Strikes that the store knows or has lost.
    pub(super) strikes: u8,
    /// Strikes that it hasn't heard of.
    pub(super) more: u8,
    pub(super) parole: u64,
    /// The moment of the last one by the store's clock, unless this node took it.
    pub(super) began: Option<Time>,
    /// The moment of the last one and the end of its block, by this node's clock: not later than they were.
    pub(super) struck: Time,
    pub(super) ends: Time,
}

/// The outcome of bringing a penalty back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Returned {
    /// The store knows it.
    Known,
    /// The key was reset since.
    Reset,
}

impl Node {
    /// Has the store know a penalty, unless its key was reset since. After an error the store may have heard of all strikes.
    pub(super) async fn bring_back(&self, known: &mut Known) -> Result<Returned, StoreError> {
        let Known { limit, key, affinity, .. } = *known;
        let one = |op: Op| {
            let mut batch = Batch::new(0).with_ops([op].into_iter().chain(self.resets.op(Verb::Peek, limit, key)));
            batch.set_affinity(affinity);
            batch
        };
        let asked_at = self.clock.now();
        let found = self.ask_only(&one(Op::new(limit, Verb::Peek, key, 1)), asked_at).await?;
        let answered_at = self.clock.now();
        // By the store's clock that is exact, unless the clock was set between the two. By this node's clock the strike is
        // taken for as old as it may be: a question and its answer take time, and at which end of it the store decided isn't
        // known. In doubt it is the reset that counts.
        let is_since = |reset: Time| {
            known.began.is_some_and(|began| reset >= began)
                || found.now().since(reset) <= answered_at.since(known.struck)
        };
        if self.last_reset(&found).is_some_and(is_since) {
            return Ok(Returned::Reset);
        }
        let Some(outcome) = found.list().first() else { return Ok(Returned::Known) };
        let strikes = outcome.strikes.max(known.strikes).saturating_add(known.more);
        (known.strikes, known.more) = (strikes, 0);
        let now = self.clock.now();
        let left = known.ends.since(now);
        let is_blocked = left.is_zero() || outcome.block_until > found.now();
        if strikes <= outcome.strikes && is_blocked {
            return Ok(Returned::Known);
        }
        let parole = u32::try_from(known.parole).unwrap_or(u32::MAX);
        let penalise = Op::new(limit, Verb::RestorePenalty { strikes, parole }, key, left.as_micros());
        let done = self.ask_only(&one(penalise), now).await?;
        let since = self.clock.now().since(asked_at);
        if self.last_reset(&done).is_some_and(|reset| done.now().since(reset) <= since) {
            // It was reset between the two questions.
            let mut reset = Batch::with_op(0, Op::new(limit, Verb::Reset, key, 1));
            reset.set_affinity(affinity);
            self.ask_only(&reset, self.clock.now()).await?;
            return Ok(Returned::Reset);
        }
        Ok(Returned::Known)
    }

    fn last_reset(&self, outcomes: &Outcomes) -> Option<Time> {
        self.resets.last(outcomes.list().get(1)?, outcomes.now())
    }

    /// Finds out whether the store still knows a block, and brings it back if it doesn't. Without an answer it stays as it is.
    pub(super) async fn settle_doubt(&self, limit: LimitId, key: Key) {
        let now = self.clock.now();
        let Some(mut known) = self.blocks.known(limit, key, now) else { return };
        match self.bring_back(&mut known).await {
            Ok(Returned::Known) => self.blocks.confirm(limit, key, self.clock.now()),
            Ok(Returned::Reset) => self.forget(limit, key),
            Err(_) => {}
        }
    }
}
