//! The file store: decisions in memory, and a file that outlives the process.
//!
//! A decision is made as the memory store makes it, and notes which entries changed while their shards are locked
//! anyway. A thread of the [`Journal`]'s writes what was noted, all of it in one transaction, within the time that
//! [`Flush`] says. An entry in the file is a state as it was at some moment of that writing, and never half of one;
//! several that one decision changed may be of different moments after a crash, all within what a crash may lose.
//!
//! What the file keeps of a key are the 60 bits of it by which the memory knows it, under the limit's
//! [tag](tidegate_core::Limits::tag). The file follows the memory: what that forgets, because it is idle or there is no
//! room for it, is removed from the file by and by. Rows of limits that no plan has stay for a week past their end, since
//! another policy may come back. So does what ended while no process watched, and the period of a quota before the present
//! one, since the clock may be set back.

mod aside;
mod bell;
mod disk;
mod error;
mod journal;
mod plan;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::{Batch, Limits, Outcomes, Time};

pub use error::FileError;
pub use journal::{Flush, Health, Journal, OnFull};
use plan::Plan;

use crate::memory::Change;
use crate::{Answer, Losses, MemoryStats, Store, StoreError};

/// An answer that waits for the disk.
type Later = Pin<Box<dyn Future<Output = Result<Outcomes, StoreError>> + Send>>;

/// State in this process' memory, within a fixed number of bytes, and in a file.
///
/// It goes by the time that comes with each batch. Answers are at hand, but for those that have to wait for the disk: all
/// that change something with [`Flush::Always`], else those that the disk is too slow for. None is while the file can't be
/// written and [`OnFull::Deny`] holds. Dropping the store waits for the disk as well.
pub struct FileStore {
    plan: Arc<Plan>,
    journal: Arc<Journal>,
}

impl std::fmt::Debug for FileStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileStore").field("journal", &self.journal).finish_non_exhaustive()
    }
}

impl FileStore {
    /// A store for these limits within `max_bytes` of memory, which begins with what the file keeps of them and isn't idle
    /// at `now`; what is worth least goes if that is too much ([`Store::tend`] counts it). Less than 1 MiB counts as 1 MiB.
    /// Several stores may have one journal, if their limits have different tags.
    ///
    /// Beyond the bound come 256 shards of some 350 bytes, and notes of what changed since the file was written: up to 20
    /// bytes for each second entry.
    ///
    /// # Errors
    /// [`FileError`]: the file can't be read, or one of the tags is taken.
    pub fn new(limits: Arc<Limits>, max_bytes: usize, journal: &Arc<Journal>, now: Time) -> Result<Self, FileError> {
        let plan = Arc::new(Plan::new(limits, max_bytes, now));
        journal.admit(&plan, now)?;
        Ok(Self { plan, journal: Arc::clone(journal) })
    }

    /// The file.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Takes note of a decision, and says which writing it has to wait for, if any.
    #[inline]
    fn note(&self, batch: &Batch, change: Change, now: Time) -> Option<u64> {
        if change.reset {
            self.plan.forget(batch);
        }
        self.journal.note(change, now)
    }

    /// The answer while nothing may change. As all that fails it is boxed, so that the others are made where they are
    /// returned: they are large, and a copy costs more than most decisions.
    #[cold]
    fn apply_unchanged(&self, batch: &Batch, now: Time) -> Later {
        let outcomes = self.plan.shards.apply_unchanged(batch, now);
        Box::pin(std::future::ready(outcomes.ok_or(StoreError::Unwritable)))
    }

    /// What the memory holds and has had to let go.
    pub fn stats(&self) -> MemoryStats {
        self.plan.shards.stats()
    }
}

impl Store for FileStore {
    type Later = Later;

    fn limits(&self) -> &Arc<Limits> {
        self.plan.shards.limits()
    }

    #[inline]
    fn apply(&self, batch: &Batch, now: Time) -> Answer<Self::Later> {
        if self.journal.denies() {
            return Answer::Later(self.apply_unchanged(batch, now));
        }
        let mut change = Change::default();
        let outcomes = self.plan.shards.apply(batch, now, &mut change);
        match self.note(batch, change, now) {
            None => Answer::Ready(outcomes),
            Some(writing) => Answer::Later(self.journal.wait(writing, outcomes)),
        }
    }

    fn tell(&self, batch: &Batch, now: Time) {
        let mut change = Change::default();
        self.plan.shards.apply(batch, now, &mut change);
        self.note(batch, change, now);
    }

    fn tend(&self, now: Time) -> Losses {
        self.journal.heard(now);
        self.plan.shards.tend(now)
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        self.journal.dismiss(&self.plan);
    }
}
