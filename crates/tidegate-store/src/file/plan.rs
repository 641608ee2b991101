//! What one plan has in the file, and its states in memory.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;
use tidegate_core::state::Usage;
use tidegate_core::{Batch, Key, KeyState, Limit, LimitId, Limits, Time, Verb};

use super::aside::{Kept, period};
use super::disk::{Encoded, Rows, begin_value, row, set_aside};
use crate::memory::{Changed, Noted, Shards};

/// Two to this power are a file store's shards, on every machine and whatever its size: which shard a key is in is part
/// of what the file keeps of it.
const SHARD_BITS: u32 = 8;
/// What a tag of the memory keeps of a key beside the shard.
const TAG_BITS: u32 = 52;

/// The most resets that are remembered until they are written. A further one leaves what was set aside of its key, which
/// counts again after a restart if it still would: an earlier period's strikes, or what a clock that was set back has
/// ahead of it.
const MOST_RESETS: usize = 1 << 16;

/// A plan's limits by their tags, and their states.
pub(super) struct Plan {
    pub(super) shards: Shards<Noted>,
    /// In order.
    by_tag: Vec<(u64, LimitId)>,
    /// The moment at which its states were read.
    since: Time,
    /// True once the file has its rows as they were arranged then.
    arranged: AtomicBool,
    /// Keys that were reset since the file was written.
    reset: Mutex<Reset>,
}

/// Keys that were reset, by their limit's tag and what the file keeps of each.
pub(super) type Reset = HashSet<(u64, u64)>;

/// What writing a plan down needs, used again and again.
#[derive(Default)]
pub(super) struct Scratch {
    changed: Changed,
    values: Vec<u8>,
    rows: Vec<(u128, Change)>,
}

/// A row's change.
enum Change {
    /// It is put: where its value ends, and when the period began if it counts one of a quota and what is kept of another
    /// is set aside.
    Put { end: usize, period: Option<Time> },
    /// It is removed: of a quota whose period began then only what is kept of that.
    Remove { period: Option<Time> },
}

impl Plan {
    pub(super) fn new(limits: Arc<Limits>, max_bytes: usize, now: Time) -> Self {
        let mut by_tag: Vec<_> = limits.iter().map(|(id, _)| (limits.tag(id), id)).collect();
        by_tag.sort_unstable();
        let shards = Shards::new(limits, max_bytes.max(1 << 20), SHARD_BITS);
        Self { shards, by_tag, since: now, arranged: AtomicBool::new(true), reset: Mutex::default() }
    }

    /// The tags of its limits, in order.
    pub(super) fn tags(&self) -> impl Iterator<Item = u64> {
        self.by_tag.iter().map(|(tag, _)| *tag)
    }

    /// The limit of this tag.
    pub(super) fn limit(&self, tag: u64) -> Option<LimitId> {
        let at = self.by_tag.binary_search_by_key(&tag, |(tag, _)| *tag).ok()?;
        Some(self.by_tag[at].1)
    }

    /// True of a quota.
    pub(super) fn counts_periods(&self, id: LimitId) -> bool {
        self.shards.limits().get(id).is_some_and(|limit| limit.kind().has_periods())
    }

    /// Takes in what the file keeps of a key. False if it can't be read.
    pub(super) fn restore(&self, id: LimitId, of_key: u64, encoded: Encoded<'_>) -> bool {
        let Some(limit) = self.shards.limits().get(id) else { return true };
        let Some(kept) = decoded(encoded, limit) else { return false };
        let (kept, is_moved) = kept.arranged(limit, self.since);
        if is_moved {
            self.arranged.store(false, Relaxed);
        }
        if let Some(state) = kept.state {
            let (shard, tag) = place(id, of_key);
            self.shards.restore(shard, tag, state, self.since);
        }
        true
    }

    /// Takes note of keys that were reset: nothing of them is to stay, nor to be set aside.
    #[cold]
    pub(super) fn forget(&self, batch: &Batch) {
        let limits = self.shards.limits();
        let resets = batch.ops().iter().filter(|op| op.verb == Verb::Reset && limits.get(op.limit).is_some());
        self.keep_resets(resets.map(|op| (limits.tag(op.limit), of_key(op.key))));
    }

    /// The keys that were reset, to be forgotten by the next writing.
    pub(super) fn take_resets(&self) -> Reset {
        std::mem::take(&mut self.reset.lock())
    }

    pub(super) fn keep_resets(&self, resets: impl IntoIterator<Item = (u64, u64)>) {
        let mut reset = self.reset.lock();
        let room = MOST_RESETS.saturating_sub(reset.len());
        reset.extend(resets.into_iter().take(room));
    }

    /// The rows are in the file as they were arranged when they were read.
    pub(super) fn is_arranged(&self) {
        self.arranged.store(true, Relaxed);
    }

    /// Arranges the rows, if that isn't done.
    fn arrange(&self, rows: &mut Rows<'_>) -> Result<(), redb::StorageError> {
        if self.arranged.load(Relaxed) {
            return Ok(());
        }
        for &(tag, id) in &self.by_tag {
            let Some(limit) = self.shards.limits().get(id) else { continue };
            rows.arrange(tag, |encoded| {
                let (kept, is_moved) = decoded(encoded, limit)?.arranged(limit, self.since);
                is_moved.then(|| [kept.state, kept.aside].map(|state| state.map(|state| value(&state, limit))))
            })?;
        }
        Ok(())
    }

    /// Whether the memory holds what the file keeps of a key.
    pub(super) fn holds(&self, id: LimitId, of_key: u64, now: Time) -> bool {
        let (shard, tag) = place(id, of_key);
        self.shards.holds(shard, tag, now)
    }

    /// Writes down what has changed. States are read as they are now, a few at a time, so that nobody waits long.
    pub(super) fn write(
        &self,
        rows: &mut Rows<'_>,
        scratch: &mut Scratch,
        reset: &Reset,
        now: Time,
    ) -> Result<(), redb::StorageError> {
        self.arrange(rows)?;
        for &(tag, of_key) in reset {
            rows.remove(set_aside(row(tag, of_key)))?;
            if !self.limit(tag).is_some_and(|id| self.holds(id, of_key, now)) {
                rows.remove(row(tag, of_key))?;
            }
        }
        let limits = self.shards.limits();
        for shard in 0..self.shards.len() {
            self.shards.changed(shard, &mut scratch.changed);
            loop {
                let (values, listed) = (&mut scratch.values, &mut scratch.rows);
                values.clear();
                listed.clear();
                let more = self.shards.read(shard, &mut scratch.changed, |tag, id, state| {
                    let place = (limits.tag(id), (shard as u64) << TAG_BITS | tag >> (64 - TAG_BITS));
                    let key = row(place.0, place.1);
                    let kept = state.zip(limits.get(id));
                    let idle_at = kept.map(|(state, limit)| (state, state.idle_at(limit)));
                    let change = match idle_at {
                        Some((state, idle_at)) if idle_at > now => {
                            begin_value(idle_at, values);
                            state.encode(values);
                            // What the row has of a key that was reset since isn't set aside.
                            let period = period(state).filter(|_| !reset.contains(&place));
                            Change::Put { end: values.len(), period }
                        }
                        // What the row has of an earlier period is set aside when it is looked over.
                        Some((state, _)) if counts_any(state) => return,
                        _ => Change::Remove { period: kept.and_then(|(state, _)| period(state)) },
                    };
                    listed.push((key, change));
                });
                let mut from = 0;
                for (key, change) in listed.drain(..) {
                    match change {
                        Change::Put { end, period } => {
                            let value = &values[std::mem::replace(&mut from, end)..end];
                            match period {
                                None => rows.put(key, value)?,
                                Some(began) => {
                                    rows.put_period(key, value, now, |before| is_of_another(before, began))?
                                }
                            }
                        }
                        Change::Remove { period: None } => rows.remove(key)?,
                        Change::Remove { period: Some(began) } => {
                            rows.remove_if(key, |before| !is_of_another(before, began))?
                        }
                    }
                }
                if !more {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// True if anything of a quota is used in its period.
fn counts_any(state: &KeyState) -> bool {
    matches!(state.usage(), Usage::Quota(ledger) if ledger.used > 0)
}

/// True if an encoded state counts another period of a quota than the one that began then.
fn is_of_another(encoded: &[u8], began: Time) -> bool {
    KeyState::decode(encoded).and_then(|state| period(&state)).is_some_and(|own| own != began)
}

/// A key's rows as states of this limit. `None` if it can't be read.
fn decoded(encoded: Encoded<'_>, limit: &Limit) -> Option<Kept> {
    let state = |encoded: Option<&[u8]>| match encoded {
        None => Some(None),
        Some(encoded) => KeyState::decode(encoded).map(|state| of_limit(state, limit)),
    };
    let [own, aside] = encoded;
    Some(Kept { state: state(own)?, aside: state(aside)? })
}

/// A row's value.
fn value(state: &KeyState, limit: &Limit) -> Vec<u8> {
    let mut value = Vec::new();
    begin_value(state.idle_at(limit), &mut value);
    state.encode(&mut value);
    value
}

/// The bits of a key that the file keeps.
fn of_key(key: Key) -> u64 {
    key.lo() >> (64 - SHARD_BITS) << TAG_BITS | key.lo() & ((1 << TAG_BITS) - 1)
}

/// The shard and the tag of what the file keeps of a key.
fn place(id: LimitId, of_key: u64) -> (usize, u64) {
    let shard = (of_key >> TAG_BITS) & ((1 << SHARD_BITS) - 1);
    (shard as usize, of_key << (64 - TAG_BITS) | u64::from(id.get()))
}

/// The state as one of this limit, if it is one: another policy may have meant something else by its name.
fn of_limit(state: KeyState, limit: &Limit) -> Option<KeyState> {
    let same = state.usage().kind_id().is_none_or(|id| id == limit.kind().id());
    let record = limit.penalty().map(|_| *state.penalty_record()).unwrap_or_default();
    same.then(|| KeyState::new(state.usage().clone(), record))
}
