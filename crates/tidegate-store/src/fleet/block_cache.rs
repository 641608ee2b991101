//! Keys under a block, refused here until the block ends.
//!
//! A block never gets shorter. So the store's answer about it stays true until the block ends, counted from when the
//! request was sent, unless the key is reset. If the store reports resets, the node receives them. Otherwise the block
//! is asked for again every second while the store can be reached. An answer without the block doesn't end it, since
//! the store may have lost it. The block is *unconfirmed* then, as all blocks are after an outage. It ends only if the
//! store reports that the key was reset.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tidegate_core::batch::Outcome;
use tidegate_core::{Admission, Batch, Key, Limit, LimitId, Limits, Op, Outcomes, Span, Time, Verb};
use tokio::sync::Notify;

use super::penalty_restore::{KnownPenalty, parole_cost};

/// The number of locks, so that callers rarely contend.
const SHARD_COUNT: usize = 16;
/// The most keys under each lock. For further keys, the store is asked.
const MAX_BLOCKS_PER_SHARD: usize = 4096;

/// The time for which a block is believed where resets aren't reported, and where they are: reports may get lost.
const TRUST_DURATION: Span = Span::from_secs(1);
const TRUST_DURATION_WITH_RESETS: Span = Span::from_secs(60);

type BlockShard = HashMap<(LimitId, Key), CachedBlock>;

pub(super) struct BlockCache {
    trust_duration: Span,
    shards: [Mutex<BlockShard>; SHARD_COUNT],
    /// The last time at which a key was reset, in microseconds by this node's clock.
    last_reset_at: AtomicU64,
    /// Wakes the task that rechecks unconfirmed blocks.
    pub(super) recheck_wakeup: Notify,
}

/// The store's answer to a batch with a blocked key.
struct CachedBlock {
    /// The times by this node's clock at which the request was sent, the answer expires and the block ends.
    sent_at: Time,
    trusted_until: Time,
    ends_at: Time,
    /// The time of the decision, by the store's clock.
    decided_at: Time,
    ops_and_outcomes: Box<[(Op, Outcome)]>,
    affinity: u64,
    status: BlockStatus,
}

/// The source of a block, and the trust in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockStatus {
    /// The store reported it.
    Confirmed,
    /// The store may have lost it, or the key was reset: the store is to be asked.
    Unconfirmed,
    /// This node imposed it, and the store doesn't know of it yet.
    LocalOnly,
}

impl CachedBlock {
    /// The block in one of these outcomes.
    fn new(batch: &Batch, outcomes: &Outcomes, block_until: Time, sent_at: Time, status: BlockStatus) -> Self {
        let ops_and_outcomes = batch.ops().iter().copied().zip(outcomes.list().iter().copied()).collect();
        let (decided_at, affinity) = (outcomes.now(), batch.context().affinity);
        let ends_at = sent_at + block_until.since(decided_at);
        Self { sent_at, trusted_until: ends_at, ends_at, decided_at, ops_and_outcomes, affinity, status }
    }

    /// The operation on this key and limit that was asked, with its cost, and its outcome.
    fn cached_outcome(&self, limit: LimitId, key: Key) -> Option<&(Op, Outcome)> {
        self.ops_and_outcomes.iter().find(|(cached_op, _)| (cached_op.limit, cached_op.key) == (limit, key))
    }

    /// Returns true if the answer also determines how long a call of this cost has to wait. A smaller call waits only
    /// for the block, if the larger one had room or waits only for the block too. A larger call may wait for more room,
    /// or never be admitted.
    fn determines_wait(&self, op: &Op) -> bool {
        self.cached_outcome(op.limit, op.key).is_none_or(|(cached_op, outcome)| {
            let has_room_after_block = outcome.retry_at <= self.decided_at.max(outcome.block_until);
            op.cost == cached_op.cost || op.cost < cached_op.cost && has_room_after_block
        })
    }

    /// The present outcome of an operation. An operation that wasn't asked is treated as admitted.
    fn outcome_now(&self, op: &Op, now: Time) -> Outcome {
        match self.cached_outcome(op.limit, op.key) {
            Some((_, outcome)) if outcome.block_until > now => {
                Outcome { admission: Admission::Blocked, remaining: 0, ..*outcome }
            }
            Some((_, outcome)) if outcome.admission.refuses() && outcome.retry_at > now => *outcome,
            Some((_, outcome)) => Outcome { admission: Admission::Admitted, retry_at: now, ..*outcome },
            None => Outcome::without_limit(Admission::Admitted, now),
        }
    }
}

impl BlockCache {
    pub(super) fn new(has_reset_events: bool) -> Self {
        let trust_duration = if has_reset_events { TRUST_DURATION_WITH_RESETS } else { TRUST_DURATION };
        Self {
            trust_duration,
            shards: Default::default(),
            last_reset_at: Default::default(),
            recheck_wakeup: Default::default(),
        }
    }

    fn lock_shard(&self, key: Key) -> MutexGuard<'_, BlockShard> {
        self.shards[key.lo() as usize % SHARD_COUNT].lock()
    }

    /// The answer to a batch that a known block refuses. If the store can't be reached, or may have lost the block, the
    /// batch is refused until the reported end of the block.
    pub(super) fn refusal_from_cache(
        &self,
        limits: &Limits,
        batch: &Batch,
        is_up: bool,
        now: Time,
    ) -> Option<Outcomes> {
        for op in batch.ops() {
            if !matches!(op.verb, Verb::Take | Verb::Peek) {
                return None;
            }
            let shard = self.lock_shard(op.key);
            let Some(block) = shard.get(&(op.limit, op.key)) else { continue };
            // Under earlier limits it may have been cacheable.
            if !is_cacheable(limits, op) {
                continue;
            }
            let is_store_preferred = is_up && block.status == BlockStatus::Confirmed;
            let valid_until = if is_store_preferred { block.trusted_until } else { block.ends_at };
            let is_conclusive = !is_store_preferred || batch.ops().iter().all(|op| block.determines_wait(op));
            if now < block.sent_at || now >= valid_until || !is_conclusive {
                continue;
            }
            let counts_refused = |other: &Op| limits.get(other.limit).is_some_and(Limit::counts_refused);
            let must_reach_store = |other: &Op| op.verb == Verb::Take && counts_refused(other);
            if is_store_preferred && batch.ops().iter().any(must_reach_store) {
                // A limit that counts refused calls must count this one.
                return None;
            }
            let store_now = block.decided_at + now.since(block.sent_at);
            return Some(Outcomes::new(store_now, batch.ops().iter().map(|op| block.outcome_now(op, store_now))));
        }
        None
    }

    /// Takes note of the blocks in an answer. Returns true if the answer lacks a block that should still hold.
    pub(super) fn update_from_store(&self, limits: &Limits, batch: &Batch, outcomes: &Outcomes, sent_at: Time) -> bool {
        let mut any_unconfirmed = false;
        let decided_at = outcomes.now();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()).filter(|(op, _)| is_cacheable(limits, op)) {
            let limit_and_key = (op.limit, op.key);
            let mut shard = self.lock_shard(op.key);
            if outcome.block_until <= decided_at {
                if let Some(block) = shard.get_mut(&limit_and_key).filter(|block| block.sent_at <= sent_at) {
                    if block.ends_at <= sent_at {
                        shard.remove(&limit_and_key);
                    } else if block.status != BlockStatus::LocalOnly {
                        block.status = BlockStatus::Unconfirmed;
                        any_unconfirmed = true;
                    }
                }
                continue;
            }
            let mut block = CachedBlock::new(batch, outcomes, outcome.block_until, sent_at, BlockStatus::Confirmed);
            // A reset may have arrived before the answer to an older request.
            let is_reset = self.last_reset_at.load(Ordering::Relaxed) >= sent_at.as_micros();
            let trust_duration = if is_reset { TRUST_DURATION } else { self.trust_duration };
            block.trusted_until = block.ends_at.min(sent_at + trust_duration);
            insert_block(&mut shard, limit_and_key, block);
        }
        any_unconfirmed
    }

    /// Takes note of the blocks that this node imposed without the store.
    pub(super) fn add_local_blocks(&self, limits: &Limits, batch: &Batch, outcomes: &Outcomes, now: Time) {
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()).filter(|(op, _)| is_cacheable(limits, op)) {
            if outcome.block_until > now {
                let block = CachedBlock::new(batch, outcomes, outcome.block_until, now, BlockStatus::LocalOnly);
                insert_block(&mut self.lock_shard(op.key), (op.limit, op.key), block);
            }
        }
    }

    /// A block that the store may have lost, if it still holds.
    pub(super) fn unconfirmed_penalty(&self, limit: LimitId, key: Key, now: Time) -> Option<KnownPenalty> {
        let is_unconfirmed = |block: &&CachedBlock| block.ends_at > now && block.status == BlockStatus::Unconfirmed;
        let shard = self.lock_shard(key);
        let block = shard.get(&(limit, key)).filter(is_unconfirmed)?;
        let (op, outcome) = block.cached_outcome(limit, key)?;
        let block_started_at = outcome.block_until - outcome.block;
        Some(KnownPenalty {
            affinity: block.affinity,
            strikes: outcome.strikes,
            unreported_strikes: 0,
            parole_cost: parole_cost(op, outcome),
            last_strike_store_time: Some(block_started_at),
            last_strike_at: block.sent_at - block.decided_at.since(block_started_at),
            block_ends_at: block.ends_at,
        })
    }

    /// Confirms a block that the store knows.
    pub(super) fn confirm(&self, limit: LimitId, key: Key, now: Time) {
        if let Some(block) = self.lock_shard(key).get_mut(&(limit, key)) {
            block.status = BlockStatus::Confirmed;
            block.trusted_until = block.ends_at.min(now + self.trust_duration);
        }
    }

    /// Makes these blocks unconfirmed: the store is to be asked if it still knows them. Blocks that this node imposed
    /// are left out, because they are sent to the store anyway.
    pub(super) fn mark_unconfirmed(&self, is_affected: impl Fn(u64, Key) -> bool) {
        for shard in &self.shards {
            for ((_, key), block) in shard.lock().iter_mut() {
                if block.status == BlockStatus::Confirmed && is_affected(block.affinity, *key) {
                    block.status = BlockStatus::Unconfirmed;
                }
            }
        }
    }

    /// The keys with unconfirmed blocks.
    pub(super) fn unconfirmed_keys(&self) -> Vec<(LimitId, Key)> {
        let mut keys = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            let unconfirmed = shard.iter().filter(|(_, block)| block.status == BlockStatus::Unconfirmed);
            keys.extend(unconfirmed.map(|(limit_and_key, _)| *limit_and_key));
        }
        keys
    }

    pub(super) fn forget(&self, limit: LimitId, key: Key, now: Time) {
        self.last_reset_at.fetch_max(now.as_micros(), Ordering::Relaxed);
        self.lock_shard(key).remove(&(limit, key));
    }

    /// Makes all answers expire, since resets may have been missed. Each block is asked for again with the next call.
    pub(super) fn expire_trust(&self) {
        for shard in &self.shards {
            shard.lock().values_mut().for_each(|block| block.trusted_until = block.sent_at);
        }
    }
}

/// True if a node remembers the blocks in the answer to such an operation.
fn is_cacheable(limits: &Limits, op: &Op) -> bool {
    let is_enforced = |limit: &Limit| !limit.is_shadow() && limit.penalty().is_some();
    matches!(op.verb, Verb::Take | Verb::Peek) && limits.get(op.limit).is_some_and(is_enforced)
}

/// Stores a block if there is room. One that this node imposed doesn't replace a block that ends later.
fn insert_block(shard: &mut BlockShard, limit_and_key: (LimitId, Key), block: CachedBlock) {
    if shard.len() >= MAX_BLOCKS_PER_SHARD {
        shard.retain(|_, cached| cached.sent_at <= block.sent_at && block.sent_at < cached.ends_at);
    }
    let must_keep = |cached: &CachedBlock| block.status == BlockStatus::LocalOnly && cached.ends_at > block.ends_at;
    let cached = shard.get(&limit_and_key);
    if cached.map_or(shard.len() < MAX_BLOCKS_PER_SHARD, |known| !must_keep(known)) {
        shard.insert(limit_and_key, block);
    }
}
