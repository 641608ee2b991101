//! One shard: a table of tags, and the states that don't fit into a word.

#[cfg(feature = "file")]
mod entries;
mod eviction;
mod word;

use std::sync::Arc;

use tidegate_core::batch::{Admission, Op, OpContext, Outcome};
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::rate::ArrivalTime;
use tidegate_core::state::Usage;
use tidegate_core::window::WindowLog;
use tidegate_core::{Clock, KeyState, Limit, LimitId, LimitKind, Limits, MAX_NOW_SPREAD, Rate, Time, Verb};

use super::MemoryStats;
use super::table::{CACHE_LINE, SearchResult, Slot, Table, TableLocation, prefetch};
use crate::Losses;
pub(in crate::memory) use eviction::ShardCapacity;
use word::{SlotWord, StateCell};

/// The number of slots that an insertion checks for idle entries.
const SWEPT_PER_INSERT: usize = 4;
/// The bytes of an entry's slot at the load of a full table.
const SLOT_BYTES: usize = 20;

/// The table comes first, so that it shares a cache line with the lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Shard {
    table: Table,
    cells: Vec<StateCell>,
    first_free: Option<u32>,
    free_count: usize,
    heap_bytes: usize,
    sweep_position: usize,
    blocked_bytes: usize,
    blocked_counted_at: Time,
    losses: Losses,
    table_locations: Arc<[TableLocation]>,
    shard_index: usize,
}

/// The tag of a key under a limit: 52 bits of the key, then the limit. All limits of one client are side by side.
#[inline]
pub(super) fn tag(op: &Op) -> u64 {
    op.key.lo() << 12 | u64::from(op.limit.get())
}

/// The bytes of an entry with this state.
fn entry_bytes(state: &KeyState) -> usize {
    size_of::<StateCell>() + SLOT_BYTES + state.heap_bytes()
}

pub(super) fn limit_id(tag: u64) -> Option<LimitId> {
    LimitId::from_index((tag as usize & 0xfff).checked_sub(1)?)
}

fn limit_for_tag(limits: &Limits, tag: u64) -> Option<&Limit> {
    limits.get(limit_id(tag)?)
}

impl Shard {
    /// An empty shard. It publishes the position of its table in the location of this index.
    pub(super) fn new(table_locations: Arc<[TableLocation]>, shard_index: usize) -> Self {
        Self { table_locations, shard_index, ..Self::default() }
    }

    fn resize_table(&mut self, home_count: usize) {
        self.table.rebuild(home_count);
        self.table.publish_location(&self.table_locations[self.shard_index]);
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.table.len
    }

    /// Adds the shard's contents and losses to `stats`.
    pub(super) fn add_to_stats(&self, stats: &mut MemoryStats) {
        stats.entries += self.table.len;
        stats.bytes += self.table.slots.len() * size_of::<Slot>()
            + self.cells.capacity() * size_of::<StateCell>()
            + self.heap_bytes;
        stats.losses = stats.losses.plus(self.losses);
    }

    #[inline]
    fn find_index(&self, tag: u64) -> Option<usize> {
        if self.table.home_count == 0 {
            return None;
        }
        match self.table.find(tag) {
            SearchResult::Found(at) => Some(at),
            SearchResult::Vacant(_) => None,
        }
    }

    /// Evaluates an operation. Leaves the entry's position in `slot_hint`, for [`Shard::charge`].
    #[inline]
    pub(super) fn evaluate(
        &mut self,
        context: &OpContext<'_>,
        shard_context: &ShardContext<'_>,
        slot_hint: &mut usize,
    ) -> Outcome {
        let &OpContext { op, limit, now, .. } = context;
        let found = self.find_index(tag(op));
        *slot_hint = found.unwrap_or(usize::MAX);
        match found {
            None => {
                if self.blocked_bytes >= shard_context.capacity.blocked_bytes && self.must_share(op, now, shard_context)
                {
                    if op.verb == Verb::Take {
                        self.losses.forced_shares += 1;
                    }
                    return Outcome::without_limit(Admission::NoRoom, now);
                }
                KeyState::evaluate_unseen(context)
            }
            Some(at) => match (SlotWord::unpack(self.table.word(at)), limit.kind()) {
                (SlotWord::Arrival(arrival), LimitKind::Rate(rate))
                    if op.verb == Verb::Take && limit.reservations().is_none() =>
                {
                    let arrival = self.refresh_arrival(at, arrival, rate, now);
                    Outcome::from_status(rate.status(arrival, op.cost, now), now)
                }
                (SlotWord::State(index), _) if op.verb == Verb::Take && limit.reservations().is_some() => {
                    // Reservations that have ended are remembered, which may need memory.
                    let mut outcome = Outcome::without_limit(Admission::Admitted, now);
                    if self.update_state(index, |state| outcome = state.evaluate(context)) {
                        self.make_room(0, tag(op), now, shard_context);
                    }
                    outcome
                }
                (SlotWord::State(index), _) if op.verb == Verb::Take => self.state(index).evaluate(context),
                (SlotWord::State(index), _) => self.state(index).peek(context),
                (word, _) => {
                    let mut state = Self::state_from_word(word);
                    let outcome = state.evaluate(context);
                    // After a clock was set back, the changed time is kept.
                    if op.verb == Verb::Take
                        && let (SlotWord::SingleCall(before), Usage::Window(log)) = (word, state.usage())
                        && let Some(slot) = log.iter().next()
                        && slot.at != before
                    {
                        self.table.set_word(at, SlotWord::SingleCall(slot.at).pack());
                    }
                    outcome
                }
            },
        }
    }

    /// Takes from a plain rate. Returns the time at which the cost has room, and the present time. `None` if the entry
    /// isn't one of a plain rate, because the limit had other terms.
    #[inline]
    pub(super) fn take_with_clock(
        &mut self,
        op: &Op,
        rate: &Rate,
        clock: &impl Clock,
        shard_context: &ShardContext<'_>,
    ) -> Option<(Time, Time)> {
        let tag = tag(op);
        let found = match self.find_index(tag) {
            Some(at) => match SlotWord::unpack(self.table.word(at)) {
                SlotWord::Arrival(arrival) => Some((at, arrival)),
                _ => return None,
            },
            None => None,
        };
        if let Some((at, arrival)) = found
            && rate.can_take_between(MAX_NOW_SPREAD)
        {
            let (earliest, latest) = clock.now_bounds();
            if let Some(arrival) = rate.take_between(arrival, op.cost, (earliest, latest)) {
                self.table.set_word(at, SlotWord::Arrival(arrival).pack());
                return Some((earliest, earliest));
            }
        }
        let now = clock.now();
        let arrival = match found {
            Some((at, arrival)) => self.refresh_arrival(at, arrival, rate, now),
            None => ArrivalTime::default(),
        };
        let retry_at = rate.retry_at(arrival, op.cost, now);
        if retry_at <= now {
            let word = SlotWord::Arrival(rate.charge(arrival, op.cost, now));
            match found {
                Some((at, _)) => self.table.set_word(at, word.pack()),
                None => self.insert_word(tag, word, now, shard_context),
            }
        }
        Some((retry_at, now))
    }

    /// The arrival time as it counts now. If the clock was set back, the changed time is kept.
    #[inline]
    fn refresh_arrival(&mut self, at: usize, arrival: ArrivalTime, rate: &Rate, now: Time) -> ArrivalTime {
        let refreshed = rate.refresh(arrival, now);
        if refreshed != arrival {
            self.table.set_word(at, SlotWord::Arrival(refreshed).pack());
        }
        refreshed
    }

    /// The state that a word represents.
    fn state_from_word(word: SlotWord) -> KeyState {
        match word {
            SlotWord::Arrival(arrival) => KeyState::new(Usage::Rate(arrival), PenaltyRecord::default()),
            SlotWord::SingleCall(at) => {
                KeyState::new(Usage::Window(WindowLog::with_call(at, 1)), PenaltyRecord::default())
            }
            SlotWord::State(_) => KeyState::default(),
        }
    }

    /// Fetches the state of the entry's slot into the cache.
    #[inline]
    pub(super) fn prefetch_state(&self, op: &Op) {
        if let Some(at) = self.find_index(tag(op))
            && let SlotWord::State(index) = SlotWord::unpack(self.table.word(at))
        {
            let cell = self.cells.as_ptr().addr() + index as usize * size_of::<StateCell>();
            (cell..cell + size_of::<StateCell>()).step_by(CACHE_LINE).for_each(prefetch);
        }
    }

    pub(super) fn clone_state(&mut self, op: &Op) -> Option<KeyState> {
        let at = self.find_index(tag(op))?;
        Some(match SlotWord::unpack(self.table.word(at)) {
            SlotWord::State(index) => self.state(index).clone(),
            word => Self::state_from_word(word),
        })
    }

    #[inline]
    fn state(&mut self, index: u32) -> &mut KeyState {
        match &mut self.cells[index as usize] {
            StateCell::Used(state) => state,
            StateCell::Free { .. } => unreachable!("invariant: a word of the table names a used cell"),
        }
    }

    /// Charges an operation. Returns true if that is stored.
    #[inline]
    pub(super) fn charge(
        &mut self,
        context: &OpContext<'_>,
        outcome: &mut Outcome,
        shard_context: &ShardContext<'_>,
        slot_hint: usize,
    ) -> bool {
        let &OpContext { op, limit, now, .. } = context;
        let tag = tag(op);
        let found = if self.table.has_tag_at(slot_hint, tag) { Some(slot_hint) } else { self.find_index(tag) };
        let word = found.map(|at| SlotWord::unpack(self.table.word(at)));
        let new_word = match (limit.kind(), word) {
            // Their state is more than a word.
            _ if limit.reservations().is_some() => None,
            (LimitKind::Rate(rate), None | Some(SlotWord::Arrival(_))) => {
                let before = if let Some(SlotWord::Arrival(arrival)) = word { arrival } else { ArrivalTime::default() };
                let arrival = rate.charge(before, op.cost, now);
                outcome.record_charge(op.cost);
                outcome.reset_at = arrival.idle_at();
                Some(SlotWord::Arrival(arrival))
            }
            (LimitKind::Window(window), None | Some(SlotWord::SingleCall(_)))
                if op.cost == 1 && context.batch.lead.is_zero() =>
            {
                let is_single_call = match word {
                    Some(SlotWord::SingleCall(at)) => now.since(at) >= window.window(),
                    _ => true,
                };
                if is_single_call {
                    outcome.record_charge(1);
                    outcome.reset_at = now + window.window();
                }
                is_single_call.then_some(SlotWord::SingleCall(now))
            }
            // A credential that was never throttled has no state, and neither has a pace without a reported call.
            (LimitKind::Cooldown(_) | LimitKind::Pace(_), None) => return false,
            _ => None,
        };
        match (new_word, found) {
            (Some(word), Some(at)) => self.table.set_word(at, word.pack()),
            (Some(word), None) => self.insert_word(tag, word, now, shard_context),
            (None, _) => match word {
                Some(SlotWord::State(index)) => {
                    if self.update_state(index, |state| state.charge(context, outcome)) {
                        self.make_room(0, tag, now, shard_context);
                    }
                }
                _ => self.update_or_insert(op, now, shard_context, |state| state.charge(context, outcome)),
            },
        }
        true
    }

    /// Adds a strike if the limit has a penalty and its block has room. Returns true if it was added.
    pub(super) fn strike(
        &mut self,
        context: &OpContext<'_>,
        outcome: &mut Outcome,
        shard_context: &ShardContext<'_>,
    ) -> bool {
        let &OpContext { op, limit, now, .. } = context;
        if limit.reservations().is_some() {
            let mut has_changed = false;
            self.update_or_insert(op, now, shard_context, |state| has_changed = state.strike(context, outcome));
            return has_changed;
        }
        if limit.penalty().is_none() || outcome.retry_at.is_never() || !op.share_level.allows_strikes() {
            return false;
        }
        if !self.has_room_for_block(op.share_level, now, shard_context) {
            return false;
        }
        let counted_at = self.blocked_counted_at;
        let mut newly_blocked = 0;
        self.update_or_insert(op, now, shard_context, |state| {
            if state.penalty_record().strikes == 0 || state.penalty_record().blocked_until <= counted_at {
                newly_blocked = entry_bytes(state);
            }
            state.strike(context, outcome);
        });
        self.blocked_bytes += newly_blocked;
        true
    }

    /// True if a restored block has room. It may be counted twice, until the next recount.
    #[cold]
    pub(super) fn reserve_block(&mut self, op: &Op, now: Time, shard_context: &ShardContext<'_>) -> bool {
        let has_room = self.has_room_for_block(op.share_level, now, shard_context);
        if has_room {
            self.blocked_bytes += entry_bytes(&self.clone_state(op).unwrap_or_default());
        }
        has_room
    }

    /// Runs `change` on the key's whole state, which is created if there is none.
    pub(super) fn update_or_insert(
        &mut self,
        op: &Op,
        now: Time,
        shard_context: &ShardContext<'_>,
        change: impl FnOnce(&mut KeyState),
    ) {
        let tag = tag(op);
        if let Some(at) = self.find_index(tag) {
            let word = SlotWord::unpack(self.table.word(at));
            if let SlotWord::State(index) = word {
                if self.update_state(index, change) {
                    self.make_room(0, tag, now, shard_context);
                }
            } else {
                let mut state = Self::state_from_word(word);
                change(&mut state);
                if let (Usage::Rate(arrival), true) =
                    (state.usage(), *state.penalty_record() == PenaltyRecord::default())
                {
                    self.table.set_word(at, SlotWord::Arrival(*arrival).pack());
                    return;
                }
                let index = self.allocate_cell(state, tag, now, shard_context);
                // The allocation may have moved the entry.
                if let Some(at) = self.find_index(tag) {
                    self.table.set_word(at, SlotWord::State(index).pack());
                }
            }
        } else {
            let mut state = KeyState::default();
            change(&mut state);
            self.insert_state(tag, state, now, shard_context);
        }
    }

    /// Puts a state where there is none. At the bound another entry is evicted, as for any insertion.
    fn insert_state(&mut self, tag: u64, state: KeyState, now: Time, shard_context: &ShardContext<'_>) {
        // A store of plain rates may have no room for states.
        let word = match state.usage() {
            _ if *state.penalty_record() != PenaltyRecord::default() => None,
            Usage::Rate(arrival) => Some(SlotWord::Arrival(*arrival)),
            Usage::Window(log) if log.total() == 1 => log.iter().next().map(|slot| SlotWord::SingleCall(slot.at)),
            _ => None,
        };
        let word = word.unwrap_or_else(|| SlotWord::State(self.allocate_cell(state, tag, now, shard_context)));
        self.insert_word(tag, word, now, shard_context);
    }

    pub(super) fn has_entry(&self, op: &Op) -> bool {
        self.find_index(tag(op)).is_some()
    }

    pub(super) fn remove_key(&mut self, op: &Op) {
        if let Some(at) = self.find_index(tag(op)) {
            self.remove_at(at);
        }
    }

    /// Runs `change` on a state. Returns true if it holds more memory than before.
    fn update_state(&mut self, index: u32, change: impl FnOnce(&mut KeyState)) -> bool {
        let state = self.state(index);
        let before = state.heap_bytes();
        change(state);
        let after = state.heap_bytes();
        self.heap_bytes = self.heap_bytes + after - before;
        after > before
    }

    fn insert_word(&mut self, tag: u64, word: SlotWord, now: Time, shard_context: &ShardContext<'_>) {
        self.sweep(SWEPT_PER_INSERT, now, shard_context);
        let slot = Slot { tag, word: word.pack() };
        // Each turn either enlarges the table or removes an entry. The table of a store that has any room has room for
        // one entry.
        for _ in 0..=self.table.slots.len() + 1 {
            let home_count = self.table.home_count;
            if home_count > 0
                && let SearchResult::Vacant(at) = self.table.find(tag)
                && self.table.insert(at, slot) == Ok(())
            {
                return;
            }
            if home_count < shard_context.capacity.home_count {
                self.resize_table((home_count + home_count / 4 + 4).min(shard_context.capacity.home_count));
            } else if !self.evict(tag, false, now, shard_context) {
                break;
            }
        }
        self.free_cell(word);
    }

    fn allocate_cell(&mut self, state: KeyState, tag: u64, now: Time, shard_context: &ShardContext<'_>) -> u32 {
        self.make_room(size_of::<StateCell>() + state.heap_bytes(), tag, now, shard_context);
        self.heap_bytes += state.heap_bytes();
        match self.first_free {
            Some(index) => {
                self.free_count -= 1;
                let cell = &mut self.cells[index as usize];
                self.first_free = if let StateCell::Free { next } = cell { *next } else { None };
                *cell = StateCell::Used(state);
                index
            }
            None => {
                if self.cells.len() == self.cells.capacity() {
                    self.cells.reserve_exact(self.cells.len() / 4 + 4);
                }
                self.cells.push(StateCell::Used(state));
                (self.cells.len() - 1) as u32
            }
        }
    }

    fn free_cell(&mut self, word: SlotWord) {
        if let SlotWord::State(index) = word {
            let cell = &mut self.cells[index as usize];
            if let StateCell::Used(state) = cell {
                self.heap_bytes -= state.heap_bytes();
            }
            *cell = StateCell::Free { next: self.first_free };
            self.first_free = Some(index);
            self.free_count += 1;
        }
    }

    fn remove_at(&mut self, at: usize) {
        let word = SlotWord::unpack(self.table.word(at));
        self.free_cell(word);
        self.table.remove(at);
    }
}

/// A shard's view of its store.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShardContext<'a> {
    pub limits: &'a Limits,
    pub capacity: ShardCapacity,
}
