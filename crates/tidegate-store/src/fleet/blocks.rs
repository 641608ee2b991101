//! Keys under a block, refused here until the block ends.
//!
//! A block never shortens, so what the store said of it stays true until its end, counted from when the question was
//! sent, unless the key is reset. Where the store tells of resets they are heard; elsewhere the block is asked for again
//! every second, for as long as there is a store to ask. An answer that knows nothing of it doesn't end it: the store may have
//! lost it. It is *doubted* then, as are all once the store is back from an outage, and ends only if the store says that the
//! key was reset.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tidegate_core::batch::Outcome;
use tidegate_core::{Batch, Key, Limit, LimitId, Limits, Op, Outcomes, Span, Time, Verb, Verdict};
use tokio::sync::Notify;

use super::returns::Known;

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
    /// The last moment at which a key was reset, in microseconds by this node's clock.
    reset_at: AtomicU64,
    /// Wakes the task that settles doubts.
    pub(super) doubts: Notify,
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
    /// The batch's affinity.
    affinity: u64,
    standing: Standing,
}

/// The source of a block, and the trust in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// The store said so.
    Told,
    /// The store may have lost it, or the key was reset: it is to be asked.
    Doubted,
    /// This node imposed it, and the store hasn't heard of it.
    Own,
}

impl Block {
    fn new(batch: &Batch, outcomes: &Outcomes, until_end: Span, sent: Time, standing: Standing) -> Self {
        let answers = batch.ops().iter().copied().zip(outcomes.list().iter().copied()).collect();
        let (ends, affinity) = (sent + until_end, batch.context().affinity);
        Self { sent, until: ends, ends, decided: outcomes.now(), answers, affinity, standing }
    }

    /// What was said of an operation's key and limit, and to which cost.
    fn said(&self, limit: LimitId, key: Key) -> Option<&(Op, Outcome)> {
        self.answers.iter().find(|(asked, _)| (asked.limit, asked.key) == (limit, key))
    }

    /// Whether what was said tells how long a call of this cost has to wait. A smaller one waits for the block, and for
    /// nothing else if the larger one had room or only waits for that too; a larger one may wait for more room, or for
    /// good.
    fn tells(&self, op: &Op) -> bool {
        self.said(op.limit, op.key).is_none_or(|(asked, outcome)| {
            let room = outcome.retry_at <= self.decided.max(outcome.block_until);
            op.cost == asked.cost || op.cost < asked.cost && room
        })
    }

    /// The answer to an operation now; of one that wasn't asked then only that it doesn't stand in the way.
    fn answer(&self, op: &Op, now: Time) -> Outcome {
        match self.said(op.limit, op.key) {
            Some((_, outcome)) if outcome.block_until > now => {
                Outcome { verdict: Verdict::Blocked, remaining: 0, ..*outcome }
            }
            Some((_, outcome)) if outcome.verdict.refuses() && outcome.retry_at > now => *outcome,
            Some((_, outcome)) => Outcome { verdict: Verdict::Admitted, retry_at: now, ..*outcome },
            None => Outcome::without_limit(Verdict::Admitted, now),
        }
    }
}

impl Blocks {
    pub(super) fn new(limits: Arc<Limits>, resets_are_told: bool) -> Self {
        let believed = if resets_are_told { BELIEVED_WHEN_TOLD } else { BELIEVED };
        Self { limits, believed, shards: Default::default(), reset_at: AtomicU64::new(0), doubts: Notify::new() }
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        self.shards[key.lo() as usize % SHARDS].lock()
    }

    /// The answer to a batch that a known block refuses. While the store isn't there to be asked again, or is to be asked
    /// whether it lost the block, it is refused for as long as the block was told to last.
    pub(super) fn answer(&self, batch: &Batch, is_up: bool, now: Time) -> Option<Outcomes> {
        for op in batch.ops() {
            if !matches!(op.verb, Verb::Take | Verb::Peek) {
                return None;
            }
            let shard = self.shard(op.key);
            let Some(block) = shard.get(&(op.limit, op.key)) else { continue };
            let asks = is_up && block.standing == Standing::Told;
            let until = if asks { block.until } else { block.ends };
            let tells = !asks || batch.ops().iter().all(|op| block.tells(op));
            if now < block.sent || now >= until || !tells {
                continue;
            }
            let counts = |other: &Op| self.limits.get(other.limit).is_some_and(Limit::counts_refused);
            let uncounted = |other: &Op| op.verb == Verb::Take && counts(other);
            if asks && batch.ops().iter().any(uncounted) {
                // A limit that counts refused calls must hear of this one.
                return None;
            }
            let there = block.decided + now.since(block.sent);
            return Some(Outcomes::new(there, batch.ops().iter().map(|op| block.answer(op, there))));
        }
        None
    }

    /// True if a node remembers blocks that the answer to such an operation tells of.
    fn is_known(&self, op: &Op) -> bool {
        let is_enforced = |limit: &Limit| !limit.is_shadow() && limit.penalty().is_some();
        matches!(op.verb, Verb::Take | Verb::Peek) && self.limits.get(op.limit).is_some_and(is_enforced)
    }

    /// Takes note of the blocks in an answer. True if it knows nothing of one that should still live.
    pub(super) fn learn(&self, batch: &Batch, outcomes: &Outcomes, sent: Time) -> bool {
        let mut any_doubt = false;
        let decided = outcomes.now();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()).filter(|(op, _)| self.is_known(op)) {
            let place = (op.limit, op.key);
            let mut shard = self.shard(op.key);
            if outcome.block_until <= decided {
                if let Some(block) = shard.get_mut(&place).filter(|block| block.sent <= sent) {
                    if block.ends <= sent {
                        shard.remove(&place);
                    } else if block.standing != Standing::Own {
                        block.standing = Standing::Doubted;
                        any_doubt = true;
                    }
                }
                continue;
            }
            let mut block = Block::new(batch, outcomes, outcome.block_until.since(decided), sent, Standing::Told);
            // A reset may have been heard before the answer to an older question.
            let is_reset = self.reset_at.load(Ordering::Relaxed) >= sent.as_micros();
            block.until = block.ends.min(sent + if is_reset { BELIEVED } else { self.believed });
            insert(&mut shard, place, block);
        }
        any_doubt
    }

    /// Takes note of the blocks that this node imposed without the store.
    pub(super) fn impose(&self, batch: &Batch, outcomes: &Outcomes, now: Time) {
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()).filter(|(op, _)| self.is_known(op)) {
            if outcome.block_until > now {
                let block = Block::new(batch, outcomes, outcome.block_until.since(now), now, Standing::Own);
                insert(&mut self.shard(op.key), (op.limit, op.key), block);
            }
        }
    }

    /// A block that the store may have lost, if it still lives.
    pub(super) fn known(&self, limit: LimitId, key: Key, now: Time) -> Option<Known> {
        let shard = self.shard(key);
        let block = shard.get(&(limit, key)).filter(|block| block.ends > now && block.standing == Standing::Doubted)?;
        let (op, outcome) = block.said(limit, key)?;
        let began = outcome.block_until - outcome.block;
        let parole = if outcome.retry_at <= outcome.block_until { op.cost } else { 0 };
        Some(Known {
            limit,
            key,
            affinity: block.affinity,
            strikes: outcome.strikes,
            more: 0,
            parole,
            began: Some(began),
            struck: block.sent - block.decided.since(began),
            ends: block.ends,
        })
    }

    /// The store knows the block.
    pub(super) fn confirm(&self, limit: LimitId, key: Key, now: Time) {
        if let Some(block) = self.shard(key).get_mut(&(limit, key)) {
            block.standing = Standing::Told;
            block.until = block.ends.min(now + self.believed);
        }
    }

    /// Doubts these blocks: the store is to be asked whether it still knows them. Those that this node imposed it hears of
    /// anyhow.
    pub(super) fn doubt(&self, is_there: impl Fn(u64, Key) -> bool) {
        for shard in &self.shards {
            for ((_, key), block) in shard.lock().iter_mut() {
                if block.standing == Standing::Told && is_there(block.affinity, *key) {
                    block.standing = Standing::Doubted;
                }
            }
        }
    }

    /// The keys whose blocks are doubted.
    pub(super) fn doubted(&self) -> Vec<(LimitId, Key)> {
        let doubted =
            |(place, block): (&(LimitId, Key), &Block)| (block.standing == Standing::Doubted).then_some(*place);
        self.shards.iter().flat_map(|shard| shard.lock().iter().filter_map(doubted).collect::<Vec<_>>()).collect()
    }

    pub(super) fn forget(&self, limit: LimitId, key: Key, now: Time) {
        self.reset_at.fetch_max(now.as_micros(), Ordering::Relaxed);
        self.shard(key).remove(&(limit, key));
    }

    /// Believes no answer any more: resets may have been missed. Each block is asked for again with the next call.
    pub(super) fn disbelieve(&self) {
        for shard in &self.shards {
            shard.lock().values_mut().for_each(|block| block.until = block.sent);
        }
    }
}

/// Keeps a block, if there is room for it, or one that ends later.
fn insert(shard: &mut Shard, place: (LimitId, Key), block: Block) {
    if shard.len() >= KEYS {
        shard.retain(|_, known| known.sent <= block.sent && block.sent < known.ends);
    }
    let stays = |known: &Block| block.standing == Standing::Own && known.ends > block.ends;
    let known = shard.get(&place);
    if known.map_or(shard.len() < KEYS, |known| !stays(known)) {
        shard.insert(place, block);
    }
}
