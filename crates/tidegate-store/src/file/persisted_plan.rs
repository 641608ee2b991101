//! A plan's rows in the file, and its states in memory.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::state::Usage;
use tidegate_core::{Batch, Key, KeyState, Limit, LimitId, Limits, Time, Verb};

use super::archive::{StoredStates, period_start};
use super::store_file::{EncodedStates, RowWriter, archived_key, encode_value, row_key};
use crate::memory::{DirtyCursor, DirtySet, Shards};

/// The base-2 logarithm of a file store's number of shards, on every machine and for every size. It is fixed because a
/// key's shard is part of the bits that the file stores.
const SHARD_BITS: u32 = 8;
/// The number of a key's bits in a tag of the memory, beside the shard.
const TAG_BITS: u32 = 52;

/// The maximum number of resets that are remembered until they are written. A further reset doesn't remove the archived
/// state of its key, which a later opening may use again: strikes of an earlier period, or a later period after the
/// clock was set back.
const MAX_PENDING_RESETS: usize = 1 << 16;

/// A plan's limits by their tags, and their states. Plans of one store with different limits share the states.
pub(super) struct PersistedPlan {
    pub(super) shards: Shards<DirtySet>,
    /// The limits by their tags, in order.
    pub(super) by_tag: Vec<(u64, LimitId)>,
    /// The tags whose states are read from the file, and when.
    pub(super) restored_tags: Vec<(u64, LimitId, Time)>,
    /// True once the file has its rows as they were arranged then.
    pub(super) is_reconciled: AtomicBool,
    /// Keys that were reset since the file was written.
    pub(super) pending_resets: Arc<Mutex<ResetKeys>>,
}

/// Keys that were reset: the limit's tag, and the key's bits in the file.
pub(super) type ResetKeys = HashSet<(u64, u64)>;

/// Buffers for writing a plan, used again and again.
#[derive(Default)]
pub(super) struct WriteBuffers {
    dirty_cursor: DirtyCursor,
    values: Vec<u8>,
    rows: Vec<(u128, RowUpdate)>,
}

enum RowUpdate {
    /// The row is put. `end` is where its value ends. `period` is the start of a quota's period: if the row counts
    /// another period, its earlier value is archived.
    Put { end: usize, period: Option<Time> },
    /// The row is removed. If `period` is the start of a quota's period, it is removed only if it counts that period.
    Remove { period: Option<Time> },
}

impl PersistedPlan {
    pub(super) fn new(limits: Arc<Limits>, max_bytes: usize, now: Time) -> Self {
        let by_tag = limits_by_tag(&limits);
        let restored_tags = by_tag.iter().map(|&(tag, id)| (tag, id, now)).collect();
        let shards = Shards::new(limits, max_bytes.max(1 << 20), SHARD_BITS);
        let is_reconciled = AtomicBool::new(true);
        Self { shards, by_tag, restored_tags, is_reconciled, pending_resets: Arc::default() }
    }

    /// A plan of the same store with these limits. Only the states of tags that are new remain to be restored.
    pub(super) fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Self {
        let by_tag = limits_by_tag(&limits);
        let new_tags = by_tag.iter().filter(|(tag, _)| self.limit_id(*tag).is_none());
        let restored_tags = new_tags.map(|&(tag, id)| (tag, id, now)).collect();
        Self {
            shards: self.shards.with_limits(limits, now),
            by_tag,
            restored_tags,
            is_reconciled: AtomicBool::new(true),
            pending_resets: Arc::clone(&self.pending_resets),
        }
    }

    pub(super) fn is_same_store(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.pending_resets, &other.pending_resets)
    }

    /// Takes over the rows that an earlier plan of the store has yet to arrange.
    pub(super) fn take_over_rows(&mut self, earlier: &Self) {
        if earlier.is_reconciled.load(Relaxed) {
            return;
        }
        let has_tag = |tag: u64| self.by_tag.binary_search_by_key(&tag, |(tag, _)| *tag).is_ok();
        let unarranged = earlier.restored_tags.iter().copied().filter(|(tag, ..)| has_tag(*tag));
        self.restored_tags.extend(unarranged.collect::<Vec<_>>());
        self.is_reconciled.store(false, Relaxed);
    }

    pub(super) fn limit_id(&self, tag: u64) -> Option<LimitId> {
        let at = self.by_tag.binary_search_by_key(&tag, |(tag, _)| *tag).ok()?;
        Some(self.by_tag[at].1)
    }

    pub(super) fn is_quota(&self, id: LimitId) -> bool {
        self.shards.limits().get(id).is_some_and(|limit| limit.kind().has_periods())
    }

    /// Restores the states of a key from its rows. Returns false if they can't be read.
    pub(super) fn restore(&self, id: LimitId, key_bits: u64, encoded: EncodedStates<'_>, now: Time) -> bool {
        let Some(limit) = self.shards.limits().get(id) else { return true };
        let Some(stored) = decode_states(encoded, limit) else { return false };
        let (stored, has_changed) = stored.reconcile(limit, now);
        if has_changed {
            self.is_reconciled.store(false, Relaxed);
        }
        if let Some(state) = stored.state {
            let (shard, tag) = shard_and_tag(id, key_bits);
            self.shards.restore(shard, tag, state, now);
        }
        true
    }

    /// Takes note of keys that were reset: none of their rows may stay or be archived.
    #[cold]
    pub(super) fn record_resets(&self, batch: &Batch) {
        let limits = self.shards.limits();
        let resets = batch.ops().iter().filter(|op| op.verb == Verb::Reset && limits.get(op.limit).is_some());
        self.add_resets(resets.map(|op| (limits.tag(op.limit), key_bits(op.key))));
    }

    pub(super) fn add_resets(&self, resets: impl IntoIterator<Item = (u64, u64)>) {
        let mut pending_resets = self.pending_resets.lock();
        let room = MAX_PENDING_RESETS.saturating_sub(pending_resets.len());
        pending_resets.extend(resets.into_iter().take(room));
    }

    /// Arranges the rows, if they aren't yet.
    fn reconcile(&self, rows: &mut RowWriter<'_>) -> Result<(), redb::StorageError> {
        if self.is_reconciled.load(Relaxed) {
            return Ok(());
        }
        for &(tag, id, restored_at) in &self.restored_tags {
            let Some(limit) = self.shards.limits().get(id) else { continue };
            rows.reconcile(tag, |encoded| {
                let (stored, has_changed) = decode_states(encoded, limit)?.reconcile(limit, restored_at);
                let value = |state: KeyState| {
                    let mut value = Vec::new();
                    encode_value(&state, state.idle_at(limit), &mut value);
                    value
                };
                has_changed.then(|| [stored.state, stored.archived].map(|state| state.map(value)))
            })?;
        }
        Ok(())
    }

    /// Returns true if the memory holds the state of a key of the file.
    pub(super) fn has_live_entry(&self, id: LimitId, key_bits: u64, now: Time) -> bool {
        let (shard, tag) = shard_and_tag(id, key_bits);
        self.shards.has_live_entry(shard, tag, now)
    }

    /// Writes the changes. Reads few states at a time, so that decisions don't wait long for a lock.
    pub(super) fn write_changes(
        &self,
        rows: &mut RowWriter<'_>,
        buffers: &mut WriteBuffers,
        resets: &ResetKeys,
        now: Time,
    ) -> Result<(), redb::StorageError> {
        self.reconcile(rows)?;
        for &(tag, key_bits) in resets {
            rows.remove(archived_key(row_key(tag, key_bits)))?;
            if !self.limit_id(tag).is_some_and(|id| self.has_live_entry(id, key_bits, now)) {
                rows.remove(row_key(tag, key_bits))?;
            }
        }
        let limits = self.shards.limits();
        for shard in 0..self.shards.len() {
            self.shards.take_dirty(shard, &mut buffers.dirty_cursor);
            loop {
                let (values, updates) = (&mut buffers.values, &mut buffers.rows);
                values.clear();
                updates.clear();
                let has_more = self.shards.read_next(shard, &mut buffers.dirty_cursor, |tag, id, state| {
                    let tag_and_key = (limits.tag(id), (shard as u64) << TAG_BITS | tag >> (64 - TAG_BITS));
                    let key = row_key(tag_and_key.0, tag_and_key.1);
                    let state_and_limit = state.zip(limits.get(id));
                    let idle_at = state_and_limit.map(|(state, limit)| (state, state.idle_at(limit)));
                    let update = match idle_at {
                        Some((state, idle_at)) if idle_at > now => {
                            encode_value(state, idle_at, values);
                            // The row of a key that was reset since then isn't archived.
                            let period = period_start(state).filter(|_| !resets.contains(&tag_and_key));
                            RowUpdate::Put { end: values.len(), period }
                        }
                        // A row of an earlier period is archived when the rows are checked.
                        Some((state, _)) if matches!(state.usage(), Usage::Quota(usage) if usage.used > 0) => return,
                        _ => RowUpdate::Remove { period: state_and_limit.and_then(|(state, _)| period_start(state)) },
                    };
                    updates.push((key, update));
                });
                let mut from = 0;
                for (key, update) in updates.drain(..) {
                    match update {
                        RowUpdate::Put { end, period } => {
                            let value = &values[std::mem::replace(&mut from, end)..end];
                            match period {
                                None => rows.put(key, value)?,
                                Some(period_start) => rows.put_and_archive_other(key, value, now, |before| {
                                    is_other_period(before, period_start)
                                })?,
                            }
                        }
                        RowUpdate::Remove { period: None } => rows.remove(key)?,
                        RowUpdate::Remove { period: Some(period_start) } => {
                            rows.remove_matching(key, |before| !is_other_period(before, period_start))?
                        }
                    }
                }
                if !has_more {
                    break;
                }
            }
        }
        Ok(())
    }
}

fn limits_by_tag(limits: &Limits) -> Vec<(u64, LimitId)> {
    let mut by_tag: Vec<_> = limits.iter().map(|(id, _)| (limits.tag(id), id)).collect();
    by_tag.sort_unstable();
    by_tag
}

/// True if an encoded state counts a quota's period that didn't begin at `start`.
fn is_other_period(encoded: &[u8], start: Time) -> bool {
    KeyState::decode(encoded).and_then(|state| period_start(&state)).is_some_and(|own_start| own_start != start)
}

/// A key's rows as states of this limit. `None` if they can't be read.
fn decode_states(encoded: EncodedStates<'_>, limit: &Limit) -> Option<StoredStates> {
    let decode = |encoded: Option<&[u8]>| match encoded {
        None => Some(None),
        Some(encoded) => KeyState::decode(encoded).map(|state| for_limit(state, limit)),
    };
    let [own, archived] = encoded;
    Some(StoredStates { state: decode(own)?, archived: decode(archived)? })
}

/// The bits of a key that the file stores.
fn key_bits(key: Key) -> u64 {
    key.lo() >> (64 - SHARD_BITS) << TAG_BITS | key.lo() & ((1 << TAG_BITS) - 1)
}

/// The shard and the tag of a key's bits in the file.
fn shard_and_tag(id: LimitId, key_bits: u64) -> (usize, u64) {
    let shard = (key_bits >> TAG_BITS) & ((1 << SHARD_BITS) - 1);
    (shard as usize, key_bits << (64 - TAG_BITS) | u64::from(id.get()))
}

/// The state as one of this limit. Of another kind, which another policy or an earlier one may have given it, only the
/// penalty remains, or `None` without one.
fn for_limit(state: KeyState, limit: &Limit) -> Option<KeyState> {
    let is_same_kind = state.usage().kind_id().is_none_or(|id| id == limit.kind().id());
    let record = limit.penalty().map(|_| *state.penalty_record()).unwrap_or_default();
    let usage = if is_same_kind { state.usage().clone() } else { Usage::None };
    (is_same_kind || record != PenaltyRecord::default()).then(|| KeyState::new(usage, record))
}
