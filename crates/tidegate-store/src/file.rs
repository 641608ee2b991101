//! The file store: decisions in memory, and a file that outlives the process.
//!
//! A decision is made as in the memory store. It also notes which entries changed, while their shards are locked
//! anyway. A thread of the [`Journal`] writes all noted entries in one transaction, within the time that [`FlushMode`]
//! says. An entry in the file is a complete state as it was at some moment of that writing, never half of one. After a
//! crash, several entries that one decision changed may be of different moments, all within what a crash may lose.
//!
//! The file identifies a key by the 60 bits of it that the memory stores, under the limit's
//! [tag](tidegate_core::Limits::tag). The file follows the memory: entries that the memory forgets, because they are
//! idle or there is no room, are removed from the file later. Three kinds of rows stay for a week past their end. Rows
//! of limits that no plan has stay, since another policy may come back. Rows that ended while no process ran stay, and
//! so does the period of a quota before the present one, since the clock may be set back.

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
use crate::{Losses, MemoryStats, Store, StoreError, StoreResponse, latest_block};

/// An answer that waits for the disk.
type FileStoreFuture = Pin<Box<dyn Future<Output = Result<Outcomes, StoreError>> + Send>>;

/// State in this process' memory, within a fixed number of bytes, and in a file.
///
/// The time is the one that comes with each batch. Answers are immediate, except those that wait for the disk. With
/// [`FlushMode::Always`], all answers that change something wait; otherwise only those that the disk is too slow for.
/// No answer is immediate while the file can't be written and [`OnWriteFailure::Deny`] holds. Dropping the store waits
/// for the disk, if it is the last handle.
pub struct FileStore {
    plan: Arc<PersistedPlan>,
    journal: Arc<Journal>,
    registration: Arc<PlanRegistration>,
}

/// The place of a store among the plans that the journal writes. It ends with the last handle to the store.
struct PlanRegistration {
    plan: Arc<PersistedPlan>,
    journal: Arc<Journal>,
}

impl Drop for PlanRegistration {
    fn drop(&mut self) {
        self.journal.remove_plan(&self.plan);
    }
}

impl std::fmt::Debug for FileStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileStore").field("journal", &self.journal).finish_non_exhaustive()
    }
}

impl FileStore {
    /// Returns a store for these limits within `max_bytes` of memory. It begins with the file's entries of these limits
    /// that aren't idle at `now`. If they don't fit, the least valuable are dropped ([`Store::maintain`] counts them).
    /// Less than 1 MiB counts as 1 MiB. Several stores may share one journal, if their limits have different tags.
    ///
    /// In addition to `max_bytes`, the store needs 256 shards of about 350 bytes, and notes of what changed since the
    /// file was written: up to 20 bytes for every second entry.
    ///
    /// # Errors
    /// [`FileError`]: the file can't be read, or one of the tags is already in use.
    pub fn new(limits: Arc<Limits>, max_bytes: usize, journal: &Arc<Journal>, now: Time) -> Result<Self, FileError> {
        let plan = Arc::new(PersistedPlan::new(limits, max_bytes, now));
        journal.add_plan(&plan, now)?;
        let registration = PlanRegistration { plan: Arc::clone(&plan), journal: Arc::clone(journal) };
        Ok(Self { plan, journal: Arc::clone(journal), registration: Arc::new(registration) })
    }

    /// The journal that writes the file.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Takes note of a decision, and returns the writing that it has to wait for, if any.
    #[inline]
    fn record_change(&self, batch: &Batch, flags: ChangeFlags, now: Time) -> Option<u64> {
        if flags.any_reset {
            self.plan.record_resets(batch);
        }
        self.journal.record_change(flags, now)
    }

    /// The answer while nothing may change. It is boxed, because only these answers can fail. Other answers are made
    /// where they are returned: they are large, and a copy costs more than most decisions.
    #[cold]
    fn apply_if_unchanged(&self, batch: &Batch, now: Time) -> FileStoreFuture {
        let outcomes = self.plan.shards.apply_if_unchanged(batch, now);
        Box::pin(std::future::ready(outcomes.ok_or(StoreError::Unwritable)))
    }

    /// Returns the memory's contents and losses.
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
        let response = StoreResponse::write(|outcomes| self.plan.shards.apply(batch, now, &mut flags, outcomes));
        match (self.record_change(batch, flags, now), response) {
            (Some(write_number), StoreResponse::Ready(outcomes)) => {
                StoreResponse::Pending(self.journal.wait_for_write(write_number, outcomes))
            }
            (_, response) => response,
        }
    }

    fn known_block(&self, batch: &Batch, now: Time) -> Option<Time> {
        let mut outcomes = Outcomes::new(now, []);
        self.plan.shards.apply(batch, now, &mut ChangeFlags::default(), &mut outcomes);
        latest_block(batch, self.limits(), &outcomes)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        let mut flags = ChangeFlags::default();
        self.plan.shards.apply(batch, now, &mut flags, &mut Outcomes::new(now, []));
        self.record_change(batch, flags, now);
    }

    /// The file is written by the new limits from then on. The states that it has of new [tags](Limits::tag) are
    /// restored, unless the memory has one already.
    fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Result<Option<Self>, StoreError> {
        let plan = self.journal.replace_plan(&self.plan, limits, now);
        let plan = plan.map_err(|error| StoreError::Failed(error.to_string()))?;
        let (journal, registration) = (Arc::clone(&self.journal), Arc::clone(&self.registration));
        Ok(Some(Self { plan, journal, registration }))
    }

    fn maintain(&self, now: Time) -> Losses {
        self.journal.update_time(now);
        self.plan.shards.maintain(now)
    }
}
