//! Keys under a block, refused here until the block ends.
//!
//! A block never shortens, so what the store said of it stays true until its end, counted from when the question was
//! sent, unless the key is reset. Where the store tells of resets they are heard; elsewhere the block is asked for again
//! every second.

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
    /// When it was asked, and until when its answer holds, by this node's clock.
    sent: Time,
    until: Time,
    /// When it decided, by its own.
    decided: Time,
    answers: Box<[(LimitId, Key, Outcome)]>,
}

impl Block {
    /// The answer to an operation now; of one that wasn't asked then only that it doesn't stand in the way.
    fn answer(&self, op: &Op, now: Time) -> Outcome {
        let same = self.answers.iter().find(|(limit, key, _)| (*limit, *key) == (op.limit, op.key));
        match same {
            Some((_, _, outcome)) if outcome.block_until > now => {
                Outcome { verdict: Verdict::Blocked, remaining: 0, ..*outcome }
            }
            Some((_, _, outcome)) if outcome.verdict.refuses() && outcome.retry_at > now => *outcome,
            Some((_, _, outcome)) => Outcome { verdict: Verdict::Admitted, retry_at: now, ..*outcome },
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

    /// The answer to a batch that a known block refuses.
    pub(super) fn answer(&self, batch: &Batch, now: Time) -> Option<Outcomes> {
        for op in batch.ops() {
            if !matches!(op.verb, Verb::Take | Verb::Peek) {
                return None;
            }
            let shard = self.shard(op.key);
            let Some(block) = shard.get(&(op.limit, op.key)) else { continue };
            if now < block.sent || now >= block.until {
                continue;
            }
            let counts = |other: &Op| self.limits.get(other.limit).is_some_and(Limit::counts_refused);
            let uncounted = |other: &Op| op.verb == Verb::Take && counts(other);
            if batch.ops().iter().any(uncounted) {
                // A limit that counts refused calls must hear of this one.
                return None;
            }
            let there = block.decided + now.since(block.sent);
            return Some(Outcomes::new(there, batch.ops().iter().map(|op| block.answer(op, there))));
        }
        None
    }

    /// Takes note of the blocks in an answer.
    pub(super) fn learn(&self, batch: &Batch, outcomes: &Outcomes, sent: Time) {
        let decided = outcomes.now();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            let enforced = self.limits.get(op.limit).is_some_and(|limit| !limit.is_shadow());
            if outcome.block_until <= decided || !enforced || !matches!(op.verb, Verb::Take | Verb::Peek) {
                continue;
            }
            let until = sent + outcome.block_until.since(decided).min(self.believed);
            let answers = batch.ops().iter().zip(outcomes.list()).map(|(op, outcome)| (op.limit, op.key, *outcome));
            let block = Block { sent, until, decided, answers: answers.collect() };
            let mut shard = self.shard(op.key);
            if shard.len() >= KEYS {
                shard.retain(|_, block| block.sent <= sent && sent < block.until);
            }
            if shard.len() < KEYS {
                shard.insert((op.limit, op.key), block);
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
