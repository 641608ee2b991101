//! What one plan has in the file, and its states in memory.

use std::sync::Arc;

use tidegate_core::state::Usage;
use tidegate_core::{Kind, Limit, LimitId, Limits, State, Time};

use super::disk::{Rows, begin_value, row};
use crate::memory::{Changed, Noted, Shards};

/// Two to this power are a file store's shards, on every machine and whatever its size: which shard a key is in is part
/// of what the file keeps of it.
const SHARD_BITS: u32 = 8;
/// What a tag of the memory keeps of a key beside the shard.
const TAG_BITS: u32 = 52;

/// A plan's limits by their tags, and their states.
pub(super) struct Plan {
    pub(super) shards: Shards<Noted>,
    /// In order.
    by_tag: Vec<(u64, LimitId)>,
}

/// What writing a plan down needs, used again and again.
#[derive(Default)]
pub(super) struct Scratch {
    changed: Changed,
    values: Vec<u8>,
    /// Each row, and where its value ends; nothing for a row that is to go.
    rows: Vec<(u128, Option<usize>)>,
}

impl Plan {
    pub(super) fn new(limits: Arc<Limits>, max_bytes: usize) -> Self {
        let mut by_tag: Vec<_> = limits.iter().map(|(id, _)| (limits.tag(id), id)).collect();
        by_tag.sort_unstable();
        Self { shards: Shards::new(limits, max_bytes.max(1 << 20), SHARD_BITS), by_tag }
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

    /// Takes in what the file keeps of a key. False if it can't be read.
    pub(super) fn restore(&self, id: LimitId, of_key: u64, bytes: &[u8], now: Time) -> bool {
        let Some(limit) = self.shards.limits().get(id) else { return true };
        let Some(state) = State::decode(bytes) else { return false };
        if let Some(state) = of_limit(state, limit)
            && state.idle_at(limit) > now
        {
            let (shard, tag) = place(id, of_key);
            self.shards.restore(shard, tag, state, now);
        }
        true
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
        now: Time,
    ) -> Result<(), redb::StorageError> {
        let limits = self.shards.limits();
        for shard in 0..self.shards.len() {
            self.shards.changed(shard, &mut scratch.changed);
            loop {
                let (values, listed) = (&mut scratch.values, &mut scratch.rows);
                values.clear();
                listed.clear();
                let more = self.shards.read(shard, &mut scratch.changed, |tag, id, state| {
                    let key = row(limits.tag(id), (shard as u64) << TAG_BITS | tag >> (64 - TAG_BITS));
                    let idle_at = |state: &State| limits.get(id).map_or(Time::ZERO, |limit| state.idle_at(limit));
                    let kept = state.map(|state| (state, idle_at(state))).filter(|(_, idle_at)| *idle_at > now);
                    listed.push((
                        key,
                        kept.map(|(state, idle_at)| {
                            begin_value(idle_at, values);
                            state.encode(values);
                            values.len()
                        }),
                    ));
                });
                let mut from = 0;
                for (key, end) in listed.drain(..) {
                    match end {
                        Some(end) => rows.put(key, &values[std::mem::replace(&mut from, end)..end])?,
                        None => rows.remove(key)?,
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

/// The shard and the tag of what the file keeps of a key.
fn place(id: LimitId, of_key: u64) -> (usize, u64) {
    let shard = (of_key >> TAG_BITS) & ((1 << SHARD_BITS) - 1);
    (shard as usize, of_key << (64 - TAG_BITS) | u64::from(id.get()))
}

/// The state as one of this limit, if it is one: another policy may have meant something else by its name.
fn of_limit(state: State, limit: &Limit) -> Option<State> {
    let same = matches!(
        (limit.kind(), state.usage()),
        (_, Usage::None)
            | (Kind::Window(_), Usage::Window(_))
            | (Kind::Rate(_), Usage::Rate(_))
            | (Kind::Quota(_), Usage::Quota(_))
            | (Kind::Concurrency(_), Usage::Concurrency(_))
            | (Kind::Cooldown(_), Usage::Cooldown(_))
            | (Kind::Pace(_), Usage::Pace(_))
    );
    let record = limit.penalty().map(|_| *state.record()).unwrap_or_default();
    same.then(|| State::new(state.usage().clone(), record))
}
