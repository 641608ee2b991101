//! The memory store: shards of sorted tables under a fixed number of bytes.
//!
//! A key's entry is 16 bytes if it is a plain rate or a window that saw one call; other states have a cell of their own
//! beside the table. A shard is small, so growing one takes microseconds and never stops the others. Later insertions
//! and [`Store::maintain`] remove idle entries, a few at a time. At the bound, idle entries are dropped first, then the
//! least used, then full limits, and never blocked keys. Once blocked keys fill half of a shard, no more keys are
//! blocked. New keys are then answered [`Admission::NoRoom`](tidegate_core::Admission::NoRoom) and have to
//! [share](tidegate_core::ShareLevel).

#[cfg(feature = "file")]
mod dirty_set;
mod shard;
mod shards;
mod table;

use std::sync::Arc;

use tidegate_core::{Batch, Limits, Time};

use crate::{ImmediateStore as _, Losses, Never, Store, StoreError, StoreResponse, latest_block};
#[cfg(feature = "file")]
pub(crate) use dirty_set::{DirtyCursor, DirtySet};
use shards::NoTracker;
pub(crate) use shards::{ChangeFlags, Shards};

/// The bytes of one shard: copied in a fraction of a millisecond, and enough for a thousand neighbouring keys.
const SHARD_BYTES: usize = 1 << 20;
/// The most bits of a key that select its shard. A tag leaves these twelve bits out.
const MAX_SHARD_BITS: u32 = 12;
/// The least number of shards for each processor, so that threads rarely contend.
const SHARDS_PER_PROCESSOR: usize = 16;
/// The least bytes of one shard, so that half of it holds many blocks.
const MIN_SHARD_BYTES: usize = 16 << 10;

/// State in this process' memory, within a fixed number of bytes. [`Store::with_limits`] makes a further handle to it.
pub struct Memory(Shards<NoTracker>);

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("max_bytes", &self.0.max_bytes).finish_non_exhaustive()
    }
}

/// The contents of a memory store, and its losses since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Entries: one for each key under each limit.
    pub entries: usize,
    /// Bytes in use.
    pub bytes: usize,
    /// The configured bound in bytes.
    pub max_bytes: usize,
    /// The losses so far.
    pub losses: Losses,
}

impl Memory {
    /// The default bound: 64 MiB.
    pub const DEFAULT_MAX_BYTES: usize = 64 << 20;

    /// Returns a store for these limits within `max_bytes`. Less than 1 MiB counts as 1 MiB.
    ///
    /// In addition to `max_bytes` there is one fixed cost: the shards themselves, 272 bytes each. Their number is at
    /// most one per MiB or 16 per processor, whichever is more.
    pub fn new(limits: Arc<Limits>, max_bytes: usize) -> Self {
        let max_bytes = max_bytes.max(1 << 20);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let min_shards = (processors * SHARDS_PER_PROCESSOR).min(max_bytes / MIN_SHARD_BYTES);
        let shard_count = (max_bytes / SHARD_BYTES).max(min_shards);
        Self(Shards::new(limits, max_bytes, shard_count.ilog2().min(MAX_SHARD_BITS)))
    }

    /// [`Memory::new`] with one shard for each whole MiB, on any number of processors: the same entries are dropped at
    /// the bound on every machine. For simulations, which have no contending threads, and may have thousands of stores.
    pub fn reproducible(limits: Arc<Limits>, max_bytes: usize) -> Self {
        let max_bytes = max_bytes.max(1 << 20);
        Self(Shards::new(limits, max_bytes, (max_bytes / SHARD_BYTES).ilog2().min(MAX_SHARD_BITS)))
    }

    /// [`Store::with_limits`], which never fails here.
    pub(crate) fn handle_with_limits(&self, limits: Arc<Limits>, now: Time) -> Self {
        Self(self.0.with_limits(limits, now))
    }

    /// Returns the store's contents and losses. Visits every shard.
    pub fn stats(&self) -> MemoryStats {
        self.0.stats()
    }
}

impl Store for Memory {
    type Future = Never;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        StoreResponse::write(|outcomes| self.0.apply(batch, now, &mut ChangeFlags::default(), outcomes))
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.apply_now(batch, now);
    }

    fn known_block(&self, batch: &Batch, now: Time) -> Option<Time> {
        latest_block(batch, self.limits(), &self.apply_now(batch, now))
    }

    fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Result<Option<Self>, StoreError> {
        Ok(Some(self.handle_with_limits(limits, now)))
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
