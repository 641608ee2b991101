//! What one plan has in the file, and its states in memory.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::Mutex;
use tidegate_core::state::Usage;
use tidegate_core::{Batch, Key, KeyState, Limit, LimitId, Limits, Time, Verb};

use super::archive::{StoredStates, period_start};
use super::store_file::{EncodedStates, RowWriter, archived_key, row_key, write_value_header};
use crate::memory::{DirtyCursor, DirtySet, Shards};

/// Two to this power are a file store's shards, on every machine and whatever its size: which shard a key is in is part
/// of what the file keeps of it.
const SHARD_BITS: u32 = 8;
/// What a tag of the memory keeps of a key beside the shard.
const TAG_BITS: u32 = 52;

/// The most resets that are remembered until they are written. A further one leaves what was set aside of its key, which
/// counts again after a restart if it still would: an earlier period's strikes, or what a clock that was set back has
/// ahead of it.
const MAX_PENDING_RESETS: usize = 1 << 16;

/// A plan's limits by their tags, and their states.
pub(super) struct PersistedPlan {
    pub(super) shards: Shards<DirtySet>,
    /// In order.
    by_tag: Vec<(u64, LimitId)>,
    /// The moment at which its states were read.
    opened_at: Time,
    /// True once the file has its rows as they were arranged then.
    is_reconciled: AtomicBool,
    /// Keys that were reset since the file was written.
    pending_resets: Mutex<ResetKeys>,
}

/// Keys that were reset, by their limit's tag and what the file keeps of each.
pub(super) type ResetKeys = HashSet<(u64, u64)>;

/// What writing a plan down needs, used again and again.
#[derive(Default)]
pub(super) struct WriteBuffers {
    dirty_cursor: DirtyCursor,
    values: Vec<u8>,
    rows: Vec<(u128, RowUpdate)>,
}

/// A row's change.
enum RowUpdate {
    /// It is put: where its value ends, and when the period began if it counts one of a quota and what is kept of another
    /// is set aside.
    Put { end: usize, period: Option<Time> },
    /// It is removed: of a quota whose period began then only what is kept of that.
    Remove { period: Option<Time> },
}

impl PersistedPlan {
    pub(super) fn new(limits: Arc<Limits>, max_bytes: usize, now: Time) -> Self {
        let mut by_tag: Vec<_> = limits.iter().map(|(id, _)| (limits.tag(id), id)).collect();
        by_tag.sort_unstable();
        let shards = Shards::new(limits, max_bytes.max(1 << 20), SHARD_BITS);
        Self { shards, by_tag, opened_at: now, is_reconciled: AtomicBool::new(true), pending_resets: Mutex::default() }
    }

    /// The tags of its limits, in order.
    pub(super) fn tags(&self) -> impl Iterator<Item = u64> {
        self.by_tag.iter().map(|(tag, _)| *tag)
    }

    /// The limit of this tag.
    pub(super) fn limit_id(&self, tag: u64) -> Option<LimitId> {
        let at = self.by_tag.binary_search_by_key(&tag, |(tag, _)| *tag).ok()?;
        Some(self.by_tag[at].1)
    }

    /// True of a quota.
    pub(super) fn is_quota(&self, id: LimitId) -> bool {
        self.shards.limits().get(id).is_some_and(|limit| limit.kind().has_periods())
    }

    /// Takes in what the file keeps of a key. False if it can't be read.
    pub(super) fn restore(&self, id: LimitId, key_bits: u64, encoded: EncodedStates<'_>) -> bool {
        let Some(limit) = self.shards.limits().get(id) else { return true };
        let Some(stored) = decode_states(encoded, limit) else { return false };
        let (stored, has_changed) = stored.reconcile(limit, self.opened_at);
        if has_changed {
            self.is_reconciled.store(false, Relaxed);
        }
        if let Some(state) = stored.state {
            let (shard, tag) = shard_and_tag(id, key_bits);
            self.shards.restore(shard, tag, state, self.opened_at);
        }
        true
    }

    /// Takes note of keys that were reset: nothing of them is to stay, nor to be set aside.
    #[cold]
    pub(super) fn record_resets(&self, batch: &Batch) {
        let limits = self.shards.limits();
        let resets = batch.ops().iter().filter(|op| op.verb == Verb::Reset && limits.get(op.limit).is_some());
        self.add_resets(resets.map(|op| (limits.tag(op.limit), key_bits(op.key))));
    }

    /// The keys that were reset, to be forgotten by the next writing.
    pub(super) fn take_resets(&self) -> ResetKeys {
        std::mem::take(&mut self.pending_resets.lock())
    }

    pub(super) fn add_resets(&self, resets: impl IntoIterator<Item = (u64, u64)>) {
        let mut pending_resets = self.pending_resets.lock();
        let room = MAX_PENDING_RESETS.saturating_sub(pending_resets.len());
        pending_resets.extend(resets.into_iter().take(room));
    }

    /// The rows are in the file as they were arranged when they were read.
    pub(super) fn set_reconciled(&self) {
        self.is_reconciled.store(true, Relaxed);
    }

    /// Arranges the rows, if that isn't done.
    fn reconcile(&self, rows: &mut RowWriter<'_>) -> Result<(), redb::StorageError> {
        if self.is_reconciled.load(Relaxed) {
            return Ok(());
        }
        for &(tag, id) in &self.by_tag {
            let Some(limit) = self.shards.limits().get(id) else { continue };
            rows.reconcile(tag, |encoded| {
                let (stored, has_changed) = decode_states(encoded, limit)?.reconcile(limit, self.opened_at);
                has_changed.then(|| {
                    [stored.state, stored.archived].map(|state| state.map(|state| encode_value(&state, limit)))
                })
            })?;
        }
        Ok(())
    }

    /// Whether the memory holds what the file keeps of a key.
    pub(super) fn has_live_entry(&self, id: LimitId, key_bits: u64, now: Time) -> bool {
        let (shard, tag) = shard_and_tag(id, key_bits);
        self.shards.has_live_entry(shard, tag, now)
    }

    /// Writes down what has changed. States are read as they are now, a few at a time, so that nobody waits long.
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
                            write_value_header(idle_at, values);
                            state.encode(values);
                            // What the row has of a key that was reset since isn't set aside.
                            let period = period_start(state).filter(|_| !resets.contains(&tag_and_key));
                            RowUpdate::Put { end: values.len(), period }
                        }
                        // What the row has of an earlier period is set aside when it is looked over.
                        Some((state, _)) if has_quota_usage(state) => return,
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

/// True if anything of a quota is used in its period.
fn has_quota_usage(state: &KeyState) -> bool {
    matches!(state.usage(), Usage::Quota(ledger) if ledger.used > 0)
}

/// True if an encoded state counts another period of a quota than the one that began then.
fn is_other_period(encoded: &[u8], start: Time) -> bool {
    KeyState::decode(encoded).and_then(|state| period_start(&state)).is_some_and(|own_start| own_start != start)
}

/// A key's rows as states of this limit. `None` if it can't be read.
fn decode_states(encoded: EncodedStates<'_>, limit: &Limit) -> Option<StoredStates> {
    let decode = |encoded: Option<&[u8]>| match encoded {
        None => Some(None),
        Some(encoded) => KeyState::decode(encoded).map(|state| for_limit(state, limit)),
    };
    let [own, archived] = encoded;
    Some(StoredStates { state: decode(own)?, archived: decode(archived)? })
}

/// A row's value.
fn encode_value(state: &KeyState, limit: &Limit) -> Vec<u8> {
    let mut value = Vec::new();
    write_value_header(state.idle_at(limit), &mut value);
    state.encode(&mut value);
    value
}

/// The bits of a key that the file keeps.
fn key_bits(key: Key) -> u64 {
    key.lo() >> (64 - SHARD_BITS) << TAG_BITS | key.lo() & ((1 << TAG_BITS) - 1)
}

/// The shard and the tag of what the file keeps of a key.
fn shard_and_tag(id: LimitId, key_bits: u64) -> (usize, u64) {
    let shard = (key_bits >> TAG_BITS) & ((1 << SHARD_BITS) - 1);
    (shard as usize, key_bits << (64 - TAG_BITS) | u64::from(id.get()))
}

/// The state as one of this limit, if it is one: another policy may have meant something else by its name.
fn for_limit(state: KeyState, limit: &Limit) -> Option<KeyState> {
    let is_same_kind = state.usage().kind_id().is_none_or(|id| id == limit.kind().id());
    let record = limit.penalty().map(|_| *state.penalty_record()).unwrap_or_default();
    is_same_kind.then(|| KeyState::new(state.usage().clone(), record))
}
