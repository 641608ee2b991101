//! The room of a shard: eviction, the bound on blocks, and the removal of idle entries.

use tidegate_core::batch::{BatchContext, Op, OpContext, ShareLevel};
use tidegate_core::{Key, LimitId, LimitKind, Limits, Span, Time, Verb};

use super::{Shard, ShardContext, SlotWord, StateCell, entry_bytes, limit_for_tag, tag};
use crate::memory::table::{Slot, Table};

/// The number of shares in which a shard is swept.
const SWEEP_SHARES: usize = 60;
/// The number of entries that compete to be evicted.
const MAX_CANDIDATES: usize = 24;
/// The number of slots after which the search for an entry to evict ends, even with fewer candidates.
const MAX_SCANNED_SLOTS: usize = 4096;
/// The divisor of the number of cells: when more than this fraction is unused, the others are moved together, to make
/// room for the memory that states hold outside their cells.
const COMPACTION_DIVISOR: usize = 16;
/// The divisor of the bytes for blocks: blocks of keys that a network shares may fill this fraction more.
const SHARED_BLOCKS_DIVISOR: usize = 8;
/// The time for which a count of blocked entries is trusted.
const RECOUNT_INTERVAL: Span = Span::from_secs(1);

/// The bytes that a shard's parts may take.
#[derive(Clone, Copy, Debug)]
pub(in crate::memory) struct ShardCapacity {
    pub home_count: usize,
    /// Bytes of states, with the memory that they hold outside their cells.
    pub state_bytes: usize,
    /// Bytes of blocked entries from which new keys must share, and keys of their own aren't blocked.
    pub blocked_bytes: usize,
}

impl ShardCapacity {
    /// The bytes of blocked entries from which keys of this share level aren't blocked.
    pub(super) fn max_blocked_bytes(&self, share: ShareLevel) -> usize {
        match share {
            ShareLevel::Own => self.blocked_bytes,
            _ => self.blocked_bytes + self.blocked_bytes / SHARED_BLOCKS_DIVISOR,
        }
    }
}

/// The worth of an entry without a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RetentionRank {
    Idle,
    /// The thousandths of its limit that are used.
    Used(u64),
    Exhausted,
}

impl Shard {
    /// Evicts states until `additional_bytes` fit beside those in use. May move cells, so the caller may hold no index.
    pub(super) fn make_room(&mut self, additional_bytes: usize, tag: u64, now: Time, shard_context: &ShardContext<'_>) {
        for _ in 0..=2 * self.table.len {
            let has_spare_cell = self.first_free.is_some() || self.cells.len() < self.cells.capacity();
            let new_cells = if additional_bytes == 0 || has_spare_cell { 0 } else { self.cells.len() / 4 + 4 };
            let used_bytes = (self.cells.capacity() + new_cells) * size_of::<StateCell>() + self.heap_bytes;
            let additional_heap_bytes = additional_bytes.saturating_sub(size_of::<StateCell>());
            if used_bytes + additional_heap_bytes <= shard_context.capacity.state_bytes {
                return;
            }
            if self.free_count * COMPACTION_DIVISOR > self.cells.len() {
                self.compact();
            } else if !self.evict(tag, true, now, shard_context) {
                return;
            }
        }
    }

    /// Removes the least valuable of a few entries, but no blocked entry and none of the client that asks.
    pub(super) fn evict(&mut self, tag: u64, states_only: bool, now: Time, shard_context: &ShardContext<'_>) -> bool {
        let Some((rank, at)) = self.eviction_candidate(tag, states_only, now, shard_context) else { return false };
        match rank {
            RetentionRank::Idle => {}
            RetentionRank::Used(_) => self.losses.evicted_used += 1,
            RetentionRank::Exhausted => self.losses.evicted_exhausted += 1,
        }
        self.sweep_position = at;
        self.remove_at(at);
        true
    }

    /// The entry that [`Shard::evict`] removes, or `None` if there is none.
    fn eviction_candidate(
        &mut self,
        tag: u64,
        states_only: bool,
        now: Time,
        shard_context: &ShardContext<'_>,
    ) -> Option<(RetentionRank, usize)> {
        let slots = self.table.slots.len();
        let mut best: Option<(RetentionRank, usize)> = None;
        let mut candidates = 0;
        for step in 0..slots {
            let at = (self.sweep_position + step) % slots;
            let slot = self.table.slots[at];
            let word = SlotWord::unpack(slot.word);
            if slot.tag == 0 || slot.tag >> 12 == tag >> 12 || (states_only && !matches!(word, SlotWord::State(_))) {
                continue;
            }
            if let Some(rank) = self.retention_rank(slot, now, shard_context.limits) {
                if best.is_none_or(|(least, _)| rank < least) {
                    best = Some((rank, at));
                }
                candidates += 1;
                if rank == RetentionRank::Idle || candidates >= MAX_CANDIDATES {
                    break;
                }
            }
            if step >= MAX_SCANNED_SLOTS && best.is_some() {
                break;
            }
        }
        best
    }

    /// The worth of an entry, or `None` if it is blocked. An entry of a limit that only a later handle has is worth as
    /// much as an exhausted one, because its terms are unknown here.
    fn retention_rank(&mut self, slot: Slot, now: Time, limits: &Limits) -> Option<RetentionRank> {
        let word = SlotWord::unpack(slot.word);
        let mut owned_state;
        let state = match word {
            SlotWord::State(index) => self.state(index),
            _ => {
                owned_state = Self::state_from_word(word);
                &mut owned_state
            }
        };
        let limit = limit_for_tag(limits, slot.tag);
        if limit.is_some_and(|limit| state.idle_at(limit) <= now) {
            return Some(RetentionRank::Idle);
        }
        if state.penalty_record().is_blocked(now) {
            return None;
        }
        let Some(limit) = limit else { return Some(RetentionRank::Exhausted) };
        let op = Op::new(LimitId::FIRST, Verb::Peek, Key::default(), 0);
        let outcome = state.evaluate(&OpContext { op: &op, limit, batch: BatchContext::default(), now });
        Some(match outcome.remaining {
            0 => RetentionRank::Exhausted,
            _ => RetentionRank::Used(outcome.used.saturating_mul(1000) / outcome.limit.max(1)),
        })
    }

    /// True if a new key must be shared more widely: its block, or without blocks the key itself, has no room.
    #[cold]
    pub(super) fn must_share(&mut self, op: &Op, now: Time, shard_context: &ShardContext<'_>) -> bool {
        if op.must_fit {
            return false;
        }
        if op.share_level.allows_strikes() {
            return self.is_blocked_capacity_reached(shard_context.capacity.max_blocked_bytes(op.share_level), now);
        }
        let used_bytes = self.cells.capacity() * size_of::<StateCell>() + self.heap_bytes;
        let is_full = self.table.is_full(shard_context.capacity.home_count)
            || self.free_count == 0 && used_bytes + size_of::<StateCell>() > shard_context.capacity.state_bytes;
        is_full && self.eviction_candidate(tag(op), true, now, shard_context).is_none()
    }

    /// True if a block of a key of this share level has room. If it hasn't, that is counted as a loss.
    #[inline]
    pub(super) fn has_room_for_block(
        &mut self,
        share_level: ShareLevel,
        now: Time,
        shard_context: &ShardContext<'_>,
    ) -> bool {
        let is_full = self.is_blocked_capacity_reached(shard_context.capacity.max_blocked_bytes(share_level), now);
        if is_full {
            self.losses.refused_blocks += 1;
        }
        !is_full
    }

    /// True if blocked entries fill at least `bytes`.
    #[inline]
    pub(super) fn is_blocked_capacity_reached(&mut self, bytes: usize, now: Time) -> bool {
        self.blocked_bytes >= bytes && self.recount_blocked_bytes(now) >= bytes
    }

    /// The bytes of blocked entries, counted again if the last count is old.
    #[cold]
    fn recount_blocked_bytes(&mut self, now: Time) -> usize {
        if now.since(self.blocked_counted_at) >= RECOUNT_INTERVAL || now < self.blocked_counted_at {
            let blocked_entries = self.cells.iter().filter_map(|cell| match cell {
                StateCell::Used(state) if state.penalty_record().is_blocked(now) => Some(entry_bytes(state)),
                _ => None,
            });
            self.blocked_bytes = blocked_entries.sum();
            self.blocked_counted_at = now;
        }
        self.blocked_bytes
    }

    /// Checks a share of the slots. Called once a second, it checks all of them in a minute.
    pub(in crate::memory) fn sweep_share(&mut self, now: Time, shard_context: &ShardContext<'_>) {
        self.sweep(self.table.slots.len() / SWEEP_SHARES + 1, now, shard_context);
        self.shrink();
    }

    /// Checks the next `slots` slots and removes idle entries.
    pub(super) fn sweep(&mut self, slots: usize, now: Time, shard_context: &ShardContext<'_>) {
        for _ in 0..slots {
            if self.sweep_position >= self.table.slots.len() {
                self.sweep_position = 0;
            }
            let Some(&slot) = self.table.slots.get(self.sweep_position) else { return };
            if slot.tag != 0 && self.is_idle(slot, now, shard_context.limits) {
                self.remove_at(self.sweep_position);
            } else {
                self.sweep_position += 1;
            }
        }
    }

    #[inline]
    pub(super) fn is_idle(&self, slot: Slot, now: Time, limits: &Limits) -> bool {
        // Only a later handle knows when an entry of its new limits is idle.
        let Some(limit) = limit_for_tag(limits, slot.tag) else { return false };
        match (SlotWord::unpack(slot.word), limit.kind()) {
            (SlotWord::Arrival(arrival), _) => arrival.idle_at() <= now,
            (SlotWord::SingleCall(at), LimitKind::Window(window)) => now.since(at) >= window.window(),
            (SlotWord::SingleCall(_), _) => true,
            (SlotWord::State(index), _) => match &self.cells[index as usize] {
                StateCell::Used(state) => state.idle_at(limit) <= now,
                StateCell::Free { .. } => true,
            },
        }
    }

    /// Makes the table as small as its capacity. Entries that then have no room are evicted, the least valuable first.
    pub(in crate::memory) fn shrink_table_to_capacity(&mut self, now: Time, shard_context: &ShardContext<'_>) {
        let max_home_count = shard_context.capacity.home_count;
        if self.table.home_count <= max_home_count {
            return;
        }
        // A rebuilt table has a fifth of its slots free at least.
        while self.table.len * 5 / 4 >= max_home_count && self.evict(0, false, now, shard_context) {}
        self.resize_table(max_home_count);
    }

    /// Frees memory of a mostly empty table or mostly free cells. May move cells, so the caller may hold no index.
    fn shrink(&mut self) {
        if self.table.len == 0 {
            self.table = Table::default();
            self.cells = Vec::new();
            self.first_free = None;
            self.free_count = 0;
            return;
        }
        let home_count = self.table.home_count;
        if home_count > 64 && self.table.len * 4 < home_count {
            self.resize_table(self.table.len * 2);
        }
        if self.free_count > 64 && self.free_count * 4 > self.cells.len() * 3 {
            self.compact();
        }
    }

    /// Moves the used cells together, and frees the memory of the others.
    #[cold]
    fn compact(&mut self) {
        let used = Vec::with_capacity(self.cells.len() - self.free_count);
        let mut cells = std::mem::replace(&mut self.cells, used);
        self.first_free = None;
        self.free_count = 0;
        for at in 0..self.table.slots.len() {
            let slot = self.table.slots[at];
            if slot.tag != 0
                && let SlotWord::State(index) = SlotWord::unpack(slot.word)
            {
                let cell = std::mem::replace(&mut cells[index as usize], StateCell::Free { next: None });
                self.cells.push(cell);
                self.table.set_word(at, SlotWord::State((self.cells.len() - 1) as u32).pack());
            }
        }
    }
}
