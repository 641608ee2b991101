//! The memory store: shards of sorted tables under a fixed number of bytes.
//!
//! A key's entry is 16 bytes where it is a plain rate or a window that saw one call; other states take a cell of
//! their own beside the table. A shard is small, so growing one is over in microseconds and never stops the others;
//! idle entries are taken out a few at a time by later insertions and by [`Store::maintain`]. At the bound the idle go
//! first, then the least used, then full limits, and blocked keys never: once these fill half of it, keys that are new
//! are answered [`Verdict::NoRoom`](tidegate_core::Verdict::NoRoom) and have to [share](tidegate_core::ShareLevel), and no more
//! are blocked.

#[cfg(feature = "file")]
mod dirty_set;
mod shard;
mod shards;
mod table;

use std::sync::Arc;

use tidegate_core::batch::{Op, Outcome};
use tidegate_core::{Batch, Clock, KeyState, Limits, Time};

use crate::{ImmediateStore as _, Losses, Never, Store, StoreResponse};
#[cfg(feature = "file")]
pub(crate) use dirty_set::{DirtyCursor, DirtySet};
use shards::NoTracker;
pub(crate) use shards::{ChangeFlags, Shards};

/// The bytes of one shard: few enough that copying all of them takes a fraction of a millisecond, and enough that a
/// thousand keys lie close together.
const SHARD_BYTES: usize = 1 << 20;
/// A tag leaves out the twelve bits of a key that choose its shard.
const MAX_SHARD_BITS: u32 = 12;
/// Shards for each processor at the least, so that threads seldom meet.
const SHARDS_PER_PROCESSOR: usize = 16;
/// The bytes of one shard at the least, so that half of it holds many blocks.
const MIN_SHARD_BYTES: usize = 16 << 10;

/// State in this process' memory, within a fixed number of bytes.
pub struct Memory(Shards<NoTracker>);

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("max_bytes", &self.0.max_bytes()).finish_non_exhaustive()
    }
}

/// What a memory store holds, and what it has had to let go since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Entries: one for each key under each limit.
    pub entries: usize,
    /// Bytes in use.
    pub bytes: usize,
    /// The configured most.
    pub max_bytes: usize,
    /// What it has had to let go.
    pub losses: Losses,
}

impl Memory {
    /// The bound when nothing else is said: 64 MiB.
    pub const DEFAULT_MAX_BYTES: usize = 64 << 20;

    /// A store for these limits within `max_bytes`. Less than 1 MiB counts as 1 MiB.
    ///
    /// Beyond the bound comes one fixed cost: the shards themselves, 272 bytes for each MiB or for a sixteenth of a
    /// processor, whichever are more.
    pub fn new(limits: Arc<Limits>, max_bytes: usize) -> Self {
        let max_bytes = max_bytes.max(1 << 20);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let min_shards = (processors * SHARDS_PER_PROCESSOR).min(max_bytes / MIN_SHARD_BYTES);
        let shard_count = (max_bytes / SHARD_BYTES).max(min_shards);
        Self(Shards::new(limits, max_bytes, shard_count.ilog2().min(MAX_SHARD_BITS)))
    }

    /// [`Memory::new`] with one shard for each whole MiB, however many processors there are: what it lets go at its bound is
    /// the same on every machine. For simulations, which have no threads that meet, and may have thousands of stores.
    pub fn reproducible(limits: Arc<Limits>, max_bytes: usize) -> Self {
        let max_bytes = max_bytes.max(1 << 20);
        Self(Shards::new(limits, max_bytes, (max_bytes / SHARD_BYTES).ilog2().min(MAX_SHARD_BITS)))
    }

    /// What the store holds and has had to let go. Visits every shard.
    pub fn stats(&self) -> MemoryStats {
        self.0.stats()
    }

    /// A copy of what is remembered of a key under a limit, if anything is.
    pub fn clone_state(&self, op: &Op) -> Option<KeyState> {
        self.0.clone_state(op)
    }

    /// Has the slots of a batch's keys fetched into the processor's cache, for whoever asks that batch soon and has others to
    /// prepare until then. What it is about and what is answered don't depend on it.
    #[inline]
    pub fn prefetch(&self, batch: &Batch) {
        self.0.prefetch(batch);
    }

    /// [`Memory::prefetch`] of the states that those slots name, once they are there.
    #[inline]
    pub fn prefetch_states(&self, batch: &Batch) {
        self.0.prefetch_states(batch);
    }

    /// Takes `op.cost` of one limit for `holder`, without the batch around it.
    #[inline]
    pub fn take(&self, op: &Op, holder: u64, now: Time) -> Outcome {
        self.0.take(op, holder, now)
    }

    /// [`Memory::take`] where only the wait is asked for: when the call has room, and the present moment. They are the
    /// same if that is at once and the cost was taken. For limits without permits, since nobody holds them. A plain rate that is in use reads the clock only roughly.
    #[inline]
    pub fn take_with_clock(&self, op: &Op, clock: &impl Clock) -> (Time, Time) {
        self.0.take_with_clock(op, clock)
    }
}

impl Store for Memory {
    type Future = Never;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        StoreResponse::Ready(self.0.apply(batch, now, &mut ChangeFlags::default()))
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.apply_now(batch, now);
    }

    fn maintain(&self, now: Time) -> Losses {
        self.0.maintain(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reproducible_store_has_one_shard_per_mib() {
        let shards = |mib: usize| Memory::reproducible(Arc::new(Limits::default()), mib << 20).0.len();
        assert_eq!([0, 1, 3, 64, 1 << 20].map(shards), [1, 1, 2, 64, 4096]);
    }
}
