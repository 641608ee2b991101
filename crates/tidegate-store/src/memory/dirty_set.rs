//! Notes of the entries that changed since they were last written to a file, and reading them for the next writing.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use tidegate_core::{KeyState, LimitId, Time};

use super::shard::limit_id;
use super::shards::{ChangeFlags, ChangeTracker, Shards};

/// The number of entries that may be noted in a shard that is nearly empty.
const MIN_TAGS: usize = 64;
/// The number of entries that are read while a shard is locked.
const READ_BATCH: usize = 64;

/// The tags of entries that changed. Once they are half of all entries, every entry counts as changed. So notes take
/// less than half of the memory of the entries.
#[derive(Debug, Default)]
pub(crate) struct DirtySet {
    tags: HashSet<u64, RandomState>,
    is_all_dirty: bool,
}

impl ChangeTracker for DirtySet {
    #[inline]
    fn mark_changed(&mut self, tag: u64, entries: usize) -> ChangeFlags {
        let new = !self.is_all_dirty && self.tags.insert(tag);
        if new && self.tags.len() > entries / 2 + MIN_TAGS {
            self.mark_all();
        }
        ChangeFlags { any_changed: true, newly_dirty: new, any_reset: false }
    }
}

impl DirtySet {
    fn mark_all(&mut self) {
        self.is_all_dirty = true;
        self.tags.clear();
    }
}

/// The noted entries of one shard, read a few at a time.
#[derive(Debug, Default)]
pub(crate) struct DirtyCursor {
    dirty: DirtySet,
    tags: Vec<u64>,
    read_count: usize,
}

impl Shards<DirtySet> {
    /// Takes the notes of a shard. Later changes are noted anew.
    pub(crate) fn take_dirty(&self, shard: usize, changed: &mut DirtyCursor) {
        changed.dirty.tags.clear();
        changed.dirty.is_all_dirty = false;
        std::mem::swap(&mut self.lock_shard(shard).tracker, &mut changed.dirty);
        changed.tags.clear();
        changed.tags.extend(&changed.dirty.tags);
        changed.tags.sort_unstable();
        changed.read_count = 0;
    }

    /// Passes the next [`READ_BATCH`] noted entries to `visit`, `None` for a removed one. False once all were passed.
    pub(crate) fn read_next(
        &self,
        shard: usize,
        cursor: &mut DirtyCursor,
        mut visit: impl FnMut(u64, LimitId, Option<&KeyState>),
    ) -> bool {
        let tracked = &mut *self.lock_shard(shard);
        if cursor.dirty.is_all_dirty && cursor.read_count == cursor.tags.len() {
            let after = cursor.tags.last().copied().unwrap_or(0);
            cursor.tags.clear();
            cursor.tags.extend(tracked.shard.tags_above(after).take(READ_BATCH));
            cursor.read_count = 0;
        }
        let end = cursor.tags.len().min(cursor.read_count + READ_BATCH);
        for &tag in &cursor.tags[cursor.read_count..end] {
            if let Some(limit) = limit_id(tag) {
                tracked.shard.visit_state(tag, |state| visit(tag, limit, state));
            }
        }
        let more = end > cursor.read_count;
        cursor.read_count = end;
        more
    }

    pub(crate) fn mark_all_dirty(&self) {
        for shard in 0..self.len() {
            self.lock_shard(shard).tracker.mark_all();
        }
    }

    /// Returns true if a shard has an entry of this tag that isn't idle.
    pub(crate) fn has_live_entry(&self, shard: usize, tag: u64, now: Time) -> bool {
        self.lock_shard(shard).shard.has_live_entry(tag, now, &self.shard_context())
    }

    /// Inserts an entry, as if it had always been there.
    pub(crate) fn restore(&self, shard: usize, tag: u64, state: KeyState, now: Time) {
        self.lock_shard(shard).shard.restore(tag, state, now, &self.shard_context());
    }
}
