//! Which entries have changed since they were last written down, and how somebody who writes them down reads them.

use std::collections::HashSet;

use foldhash::fast::RandomState;
use tidegate_core::{KeyState, LimitId, Time};

use super::shard::limit_id;
use super::shards::{Change, Notes, Shards};

/// How many entries may be noted in a shard that is nearly empty.
const FEWEST: usize = 64;
/// How many entries are read while a shard is locked.
const AT_ONCE: usize = 64;

/// The tags of entries that changed. Once they are half of all, every entry counts as changed, so that notes take less
/// than half of what is noted does.
#[derive(Debug, Default)]
pub(crate) struct Noted {
    tags: HashSet<u64, RandomState>,
    all: bool,
}

impl Notes for Noted {
    #[inline]
    fn note(&mut self, tag: u64, entries: usize) -> Change {
        let new = !self.all && self.tags.insert(tag);
        if new && self.tags.len() > entries / 2 + FEWEST {
            self.note_all();
        }
        Change { any: true, new, reset: false }
    }
}

impl Noted {
    fn note_all(&mut self) {
        self.all = true;
        self.tags.clear();
    }
}

/// Entries that were noted in one shard, a few at a time.
#[derive(Debug, Default)]
pub(crate) struct Changed {
    noted: Noted,
    tags: Vec<u64>,
    read: usize,
}

impl Shards<Noted> {
    /// Takes the notes of a shard: what changes from now on is noted anew.
    pub(crate) fn changed(&self, shard: usize, changed: &mut Changed) {
        changed.noted.tags.clear();
        changed.noted.all = false;
        std::mem::swap(&mut self.lock(shard).notes, &mut changed.noted);
        changed.tags.clear();
        changed.tags.extend(&changed.noted.tags);
        changed.tags.sort_unstable();
        changed.read = 0;
    }

    /// Shows the next [`AT_ONCE`] entries that were noted, by their tags, and nothing for one that has gone. False once
    /// all were shown.
    pub(crate) fn read(
        &self,
        shard: usize,
        changed: &mut Changed,
        mut show: impl FnMut(u64, LimitId, Option<&KeyState>),
    ) -> bool {
        let noting = &mut *self.lock(shard);
        if changed.noted.all && changed.read == changed.tags.len() {
            let after = changed.tags.last().copied().unwrap_or(0);
            changed.tags.clear();
            changed.tags.extend(noting.shard.tags_above(after).take(AT_ONCE));
            changed.read = 0;
        }
        let end = changed.tags.len().min(changed.read + AT_ONCE);
        for &tag in &changed.tags[changed.read..end] {
            if let Some(limit) = limit_id(tag) {
                noting.shard.show(tag, |state| show(tag, limit, state));
            }
        }
        let more = end > changed.read;
        changed.read = end;
        more
    }

    /// Notes every entry.
    pub(crate) fn note_all(&self) {
        for shard in 0..self.len() {
            self.lock(shard).notes.note_all();
        }
    }

    /// Whether a shard has an entry that isn't idle.
    pub(crate) fn holds(&self, shard: usize, tag: u64, now: Time) -> bool {
        self.lock(shard).shard.holds(tag, now, &self.about())
    }

    /// Puts an entry where there is none, as if it had always been there.
    pub(crate) fn restore(&self, shard: usize, tag: u64, state: KeyState, now: Time) {
        self.lock(shard).shard.restore(tag, state, now, &self.about());
    }
}
