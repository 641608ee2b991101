//! The file store: decisions in memory, and a file that outlives the process.
//!
//! A decision is made as the memory store makes it, and notes which entries changed while their shards are locked
//! anyway. A thread of the [`Journal`]'s writes what was noted, all of it in one transaction, within the time that
//! [`FlushMode`] says. An entry in the file is a state as it was at some moment of that writing, and never half of one;
//! several that one decision changed may be of different moments after a crash, all within what a crash may lose.
//!
//! What the file keeps of a key are the 60 bits of it by which the memory knows it, under the limit's
//! [tag](tidegate_core::Limits::tag). The file follows the memory: what that forgets, because it is idle or there is no
//! room for it, is removed from the file by and by. Rows of limits that no plan has stay for a week past their end, since
//! another policy may come back. So does what ended while no process watched, and the period of a quota before the present
//! one, since the clock may be set back.

mod archive;
mod error;
mod journal;
mod persisted_plan;
mod store_file;
#[cfg(test)]
mod tests;
mod wakeup;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::{Batch, Limits, Outcomes, Time};

pub use error::FileError;
pub use journal::{FileHealth, FlushMode, Journal, OnWriteFailure};
use persisted_plan::PersistedPlan;

use crate::memory::ChangeFlags;
use crate::{Losses, MemoryStats, Store, StoreError, StoreResponse};

/// An answer that waits for the disk.
type FileStoreFuture = Pin<Box<dyn Future<Output = Result<Outcomes, StoreError>> + Send>>;

/// State in this process' memory, within a fixed number of bytes, and in a file.
///
/// It goes by the time that comes with each batch. Answers are at hand, but for those that have to wait for the disk: all
/// that change something with [`FlushMode::Always`], else those that the disk is too slow for. None is while the file can't be
/// written and [`OnWriteFailure::Deny`] holds. Dropping the store waits for the disk as well.
pub struct FileStore {
    plan: Arc<PersistedPlan>,
    journal: Arc<Journal>,
}

impl std::fmt::Debug for FileStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileStore").field("journal", &self.journal).finish_non_exhaustive()
    }
}

impl FileStore {
    /// A store for these limits within `max_bytes` of memory, which begins with what the file keeps of them and isn't idle
    /// at `now`; what is worth least goes if that is too much ([`Store::maintain`] counts it). Less than 1 MiB counts as 1 MiB.
    /// Several stores may have one journal, if their limits have different tags.
    ///
    /// Beyond the bound come 256 shards of some 350 bytes, and notes of what changed since the file was written: up to 20
    /// bytes for each second entry.
    ///
    /// # Errors
    /// [`FileError`]: the file can't be read, or one of the tags is taken.
    pub fn new(limits: Arc<Limits>, max_bytes: usize, journal: &Arc<Journal>, now: Time) -> Result<Self, FileError> {
        let plan = Arc::new(PersistedPlan::new(limits, max_bytes, now));
        journal.add_plan(&plan, now)?;
        Ok(Self { plan, journal: Arc::clone(journal) })
    }

    /// The file.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Takes note of a decision, and says which writing it has to wait for, if any.
    #[inline]
    fn record_change(&self, batch: &Batch, flags: ChangeFlags, now: Time) -> Option<u64> {
        if flags.any_reset {
            self.plan.record_resets(batch);
        }
        self.journal.record_change(flags, now)
    }

    /// The answer while nothing may change. As all that fails it is boxed, so that the others are made where they are
    /// returned: they are large, and a copy costs more than most decisions.
    #[cold]
    fn apply_if_unchanged(&self, batch: &Batch, now: Time) -> FileStoreFuture {
        let outcomes = self.plan.shards.apply_if_unchanged(batch, now);
        Box::pin(std::future::ready(outcomes.ok_or(StoreError::Unwritable)))
    }

    /// What the memory holds and has had to let go.
    pub fn stats(&self) -> MemoryStats {
        self.plan.shards.stats()
    }
}

impl Store for FileStore {
    type Future = FileStoreFuture;

    fn limits(&self) -> &Arc<Limits> {
        self.plan.shards.limits()
    }

    #[inline]
    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        if self.journal.denies_changes() {
            return StoreResponse::Pending(self.apply_if_unchanged(batch, now));
        }
        let mut flags = ChangeFlags::default();
        let outcomes = self.plan.shards.apply(batch, now, &mut flags);
        match self.record_change(batch, flags, now) {
            None => StoreResponse::Ready(outcomes),
            Some(write_number) => StoreResponse::Pending(self.journal.wait_for_write(write_number, outcomes)),
        }
    }

    fn submit(&self, batch: &Batch, now: Time) {
        let mut flags = ChangeFlags::default();
        self.plan.shards.apply(batch, now, &mut flags);
        self.record_change(batch, flags, now);
    }

    fn maintain(&self, now: Time) -> Losses {
        self.journal.update_time(now);
        self.plan.shards.maintain(now)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        self.journal.remove_plan(&self.plan);
    }
}
