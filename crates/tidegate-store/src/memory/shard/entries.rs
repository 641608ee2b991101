//! The entries of a shard, for a store that keeps them in a file.

use tidegate_core::batch::ShareLevel;
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::{KeyState, Time};

use super::{Shard, ShardContext, SlotWord, StateCell, entry_bytes, limit_for_tag};
use crate::memory::table::SearchResult;

impl Shard {
    /// Passes the state of an entry to `visit`, or `None` if there is no entry.
    pub(in crate::memory) fn visit_state(&self, tag: u64, visit: impl FnOnce(Option<&KeyState>)) {
        match self.find_index(tag).map(|at| SlotWord::unpack(self.table.word(at))) {
            None => visit(None),
            Some(SlotWord::State(index)) => match &self.cells[index as usize] {
                StateCell::Used(state) => visit(Some(state)),
                StateCell::Free { .. } => visit(None),
            },
            Some(word) => visit(Some(&Self::state_from_word(word))),
        }
    }

    /// The tags of entries above a tag, in order.
    pub(in crate::memory) fn tags_above(&self, tag: u64) -> impl Iterator<Item = u64> {
        let from = match tag.checked_add(1) {
            Some(next) if self.table.home_count > 0 => match self.table.find(next) {
                SearchResult::Found(at) | SearchResult::Vacant(at) => at,
            },
            _ => self.table.slots.len(),
        };
        self.table.slots[from..].iter().map(|slot| slot.tag).filter(move |found| *found > tag)
    }

    /// Returns true if there is an entry that isn't idle.
    pub(in crate::memory) fn has_live_entry(&self, tag: u64, now: Time, shard_context: &ShardContext<'_>) -> bool {
        self.find_index(tag).is_some_and(|at| !self.is_idle(self.table.slots[at], now, shard_context.limits))
    }

    /// Puts a state back that was stored elsewhere, unless there is one already that isn't idle. If that one has usage of
    /// another kind, only its penalty remains.
    pub(in crate::memory) fn restore(
        &mut self,
        tag: u64,
        mut state: KeyState,
        now: Time,
        shard_context: &ShardContext<'_>,
    ) {
        if let Some(at) = self.find_index(tag) {
            if !self.is_idle(self.table.slots[at], now, shard_context.limits) {
                let kind_id = limit_for_tag(shard_context.limits, tag).map(|limit| limit.kind().id());
                let (mut is_same_kind, mut record) = (true, PenaltyRecord::default());
                self.visit_state(tag, |found| {
                    let Some(found) = found else { return };
                    is_same_kind = found.usage().kind_id() == kind_id;
                    record = *found.penalty_record();
                });
                if is_same_kind {
                    return;
                }
                if record != PenaltyRecord::default() {
                    state = KeyState::new(state.usage().clone(), record);
                }
            }
            self.remove_at(at);
        }
        if state.penalty_record().is_blocked(now) {
            if !self.has_room_for_block(ShareLevel::SmallNetwork, now, shard_context) {
                return;
            }
            self.blocked_bytes += entry_bytes(&state);
        }
        self.insert_state(tag, state, now, shard_context);
    }
}
