//! Keys under a block, refused here until the block ends.
//!
//! A block never shortens, so what the store said of it stays true until its end, counted from when the question was
//! sent, unless the key is reset. Where the store tells of resets they are heard; elsewhere the block is asked for again
//! every second, for as long as there is a store to ask.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_core::batch::Outcome;
use tidegate_core::{Batch, Key, Limit, LimitId, Limits, Op, Outcomes, Span, Time, Verb, Verdict};

/// Locks, so that callers seldom meet.
const SHARDS: usize = 16;
/// The most keys under each lock; who doesn't fit asks the store.
const KEYS: usize = 4096;

/// How long a block is believed where resets aren't told, and where they are: they may get lost.
const BELIEVED: Span = Span::from_secs(1);
const BELIEVED_WHEN_TOLD: Span = Span::from_secs(60);

type Shard = HashMap<(LimitId, Key), Block>;

pub(super) struct Blocks {
    limits: Arc<Limits>,
    believed: Span,
    shards: [Mutex<Shard>; SHARDS],
}

/// What the store said of a batch in which a key was blocked.
struct Block {
    /// When it was asked, until when its answer is believed, and when the block ends, by this node's clock.
    sent: Time,
    until: Time,
    ends: Time,
    /// When it decided, by its own.
    decided: Time,
    answers: Box<[(Op, Outcome)]>,
}

impl Block {
    /// What was said of an operation's key and limit, and to which cost.
    fn said(&self, op: &Op) -> Option<&(Op, Outcome)> {
        self.answers.iter().find(|(asked, _)| (asked.limit, asked.key) == (op.limit, op.key))
    }

    /// Whether what was said tells how long a call of this cost has to wait. A smaller one waits for the block, and for
    /// nothing else if the larger one had room or only waits for that too; a larger one may wait for more room, or for
    /// good.
    fn tells(&self, op: &Op) -> bool {
        self.said(op).is_none_or(|(asked, outcome)| {
            let room = outcome.retry_at <= self.decided.max(outcome.block_until);
            op.cost == asked.cost || op.cost < asked.cost && room
        })
    }

    /// The answer to an operation now; of one that wasn't asked then only that it doesn't stand in the way.
    fn answer(&self, op: &Op, now: Time) -> Outcome {
        match self.said(op) {
            Some((_, outcome)) if outcome.block_until > now => {
                Outcome { verdict: Verdict::Blocked, remaining: 0, ..*outcome }
            }
            Some((_, outcome)) if outcome.verdict.refuses() && outcome.retry_at > now => *outcome,
            Some((_, outcome)) => Outcome { verdict: Verdict::Admitted, retry_at: now, ..*outcome },
            None => Outcome::plain(Verdict::Admitted, now),
        }
    }
}

impl Blocks {
    pub(super) fn new(limits: Arc<Limits>, resets_are_told: bool) -> Self {
        let believed = if resets_are_told { BELIEVED_WHEN_TOLD } else { BELIEVED };
        Self { limits, believed, shards: Default::default() }
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[key.lo() as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer to a batch that a known block refuses. While the store isn't there to be asked again, it is refused for
    /// as long as the block was told to last.
    pub(super) fn answer(&self, batch: &Batch, is_up: bool, now: Time) -> Option<Outcomes> {
        for op in batch.ops() {
            if !matches!(op.verb, Verb::Take | Verb::Peek) {
                return None;
            }
            let shard = self.shard(op.key);
            let Some(block) = shard.get(&(op.limit, op.key)) else { continue };
            let until = if is_up { block.until } else { block.ends };
            let tells = !is_up || batch.ops().iter().all(|op| block.tells(op));
            if now < block.sent || now >= until || !tells {
                continue;
            }
            let counts = |other: &Op| self.limits.get(other.limit).is_some_and(Limit::counts_refused);
            let uncounted = |other: &Op| op.verb == Verb::Take && counts(other);
            if is_up && batch.ops().iter().any(uncounted) {
                // A limit that counts refused calls must hear of this one.
                return None;
            }
            let there = block.decided + now.since(block.sent);
            return Some(Outcomes::new(there, batch.ops().iter().map(|op| block.answer(op, there))));
        }
        None
    }

    /// Takes note of the blocks in an answer, and of those that are gone.
    pub(super) fn learn(&self, batch: &Batch, outcomes: &Outcomes, sent: Time) {
        let decided = outcomes.now();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            let enforced =
                self.limits.get(op.limit).is_some_and(|limit| !limit.is_shadow() && limit.penalty().is_some());
            if !enforced || !matches!(op.verb, Verb::Take | Verb::Peek) {
                continue;
            }
            let place = (op.limit, op.key);
            let mut shard = self.shard(op.key);
            if outcome.block_until <= decided {
                if shard.get(&place).is_some_and(|block| block.sent <= sent) {
                    shard.remove(&place);
                }
                continue;
            }
            let lasts = outcome.block_until.since(decided);
            let (until, ends) = (sent + lasts.min(self.believed), sent + lasts);
            let answers = batch.ops().iter().copied().zip(outcomes.list().iter().copied()).collect();
            if shard.len() >= KEYS {
                shard.retain(|_, block| block.sent <= sent && sent < block.until);
            }
            if shard.len() < KEYS {
                shard.insert(place, Block { sent, until, ends, decided, answers });
            }
        }
    }

    pub(super) fn forget(&self, limit: LimitId, key: Key) {
        self.shard(key).remove(&(limit, key));
    }

    /// Forgets everything: resets may have been missed.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            shard.lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }
}
