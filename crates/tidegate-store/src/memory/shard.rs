//! One shard: a table of tags, the states that don't fit into a word, and what must go when there is no room.

use std::sync::Arc;

use tidegate_core::batch::{BatchContext, Op, OpContext, Outcome, ShareLevel, Verdict};
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::rate::ArrivalTime;
use tidegate_core::state::Usage;
use tidegate_core::window::WindowLog;
use tidegate_core::{Clock, Key, KeyState, Limit, LimitId, LimitKind, Limits, MAX_NOW_SPREAD, Rate, Span, Time, Verb};

use super::MemoryStats;
use super::table::{CACHE_LINE, Outlook, Place, Slot, Table, prefetch};
use crate::Losses;

/// How many slots an insertion looks over for idle entries.
const SWEPT_PER_INSERT: usize = 4;
/// How many shares a shard is swept in.
const SHARES: usize = 60;
/// How many entries compete to be evicted.
const CANDIDATES: usize = 24;
/// After how many slots looked over an entry goes although fewer compete.
const LOOKED_OVER: usize = 4096;
/// One in how many cells is unused before the others are moved together to make room for what states hold outside their
/// cells.
const SCATTERED: usize = 16;
/// What an entry's slot takes at the load of a full table.
const SLOT_BYTES: usize = 20;
/// One in how many bytes more blocks may fill if they are of keys that a network shares.
const BEYOND: usize = 8;
/// How long a count of blocked entries is trusted.
const RECOUNT: Span = Span::from_secs(1);

/// What a slot's word says. Most keys are seen once or are plain rates; they need no state of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    /// A rate's arrival time, with a clean record.
    Arrival(ArrivalTime),
    /// A window that admitted one call of cost 1 at this moment, with a clean record.
    Once(Time),
    /// The state at this index.
    State(u32),
}

const ONCE: u64 = 1 << 62;
const STATE: u64 = 2 << 62;
const PAYLOAD: u64 = (1 << 62) - 1;

impl Word {
    #[inline]
    fn unpack(word: u64) -> Self {
        match word & !PAYLOAD {
            0 => Self::Arrival(ArrivalTime::from_bits(word)),
            ONCE => Self::Once(Time::from_micros(word & PAYLOAD)),
            _ => Self::State((word & PAYLOAD) as u32),
        }
    }

    #[inline]
    fn pack(self) -> u64 {
        match self {
            Self::Arrival(arrival) => arrival.to_bits(),
            Self::Once(at) => ONCE | at.as_micros(),
            Self::State(index) => STATE | u64::from(index),
        }
    }
}

#[derive(Debug)]
enum Cell {
    Free { next: Option<u32> },
    Used(KeyState),
}

/// How many bytes a shard's parts may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Homes of the table.
    pub homes: usize,
    /// Bytes of states, with what they hold outside themselves.
    pub states: usize,
    /// Bytes of blocked entries from which on new keys must share, and keys of their own aren't blocked any more.
    pub blocked: usize,
}

impl Room {
    /// The bytes of blocked entries from which on no more keys that are shared like this are blocked.
    fn of_blocks(&self, share: ShareLevel) -> usize {
        match share {
            ShareLevel::Own => self.blocked,
            _ => self.blocked + self.blocked / BEYOND,
        }
    }
}

/// The worth of an entry without a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Worth {
    Idle,
    /// With the thousandths of its limit that are used.
    Used(u64),
    Full,
}

/// The table comes first, so that it shares a cache line with the lock.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Shard {
    table: Table,
    cells: Vec<Cell>,
    free: Option<u32>,
    unused: usize,
    heap: usize,
    hand: usize,
    blocked: usize,
    counted_at: Time,
    losses: Losses,
    outlooks: Arc<[Outlook]>,
    index: usize,
}

/// The tag of a key under a limit: 52 bits of the key, then the limit. The key leads, so that all limits of one
/// client lie side by side.
#[inline]
pub(super) fn tag(op: &Op) -> u64 {
    op.key.lo() << 12 | u64::from(op.limit.get())
}

/// The bytes that an entry with this state takes.
fn weight(state: &KeyState) -> usize {
    size_of::<Cell>() + SLOT_BYTES + state.heap_bytes()
}

/// The limit of a tag.
pub(super) fn limit_id(tag: u64) -> Option<LimitId> {
    LimitId::from_index((tag as usize & 0xfff).checked_sub(1)?)
}

fn limit_of(limits: &Limits, tag: u64) -> Option<&Limit> {
    limits.get(limit_id(tag)?)
}

impl Shard {
    /// An empty shard, which tells in the outlook of this index where its table lies.
    pub(super) fn new(outlooks: Arc<[Outlook]>, index: usize) -> Self {
        Self {
            table: Table::default(),
            cells: Vec::new(),
            free: None,
            unused: 0,
            heap: 0,
            hand: 0,
            blocked: 0,
            counted_at: Time::ZERO,
            losses: Losses::default(),
            outlooks,
            index,
        }
    }

    fn resize_table(&mut self, homes: usize) {
        self.table.rebuild(homes);
        self.table.tell(&self.outlooks[self.index]);
    }

    /// How many entries there are.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Adds what the shard holds and has lost.
    pub(super) fn count(&self, stats: &mut MemoryStats) {
        stats.entries += self.table.len();
        stats.bytes += self.table.bytes() + self.cells.capacity() * size_of::<Cell>() + self.heap;
        stats.losses.used += self.losses.used;
        stats.losses.full += self.losses.full;
        stats.losses.blocked += self.losses.blocked;
        stats.losses.shared += self.losses.shared;
    }

    #[inline]
    fn find(&self, tag: u64) -> Option<usize> {
        if self.table.homes() == 0 {
            return None;
        }
        match self.table.find(tag) {
            Place::Found(at) => Some(at),
            Place::Vacant(_) => None,
        }
    }

    /// Judges, and leaves in `hint` where the entry stood, which spares [`Shard::charge`] looking for it.
    #[inline]
    pub(super) fn judge(&mut self, ask: &OpContext<'_>, about: &About<'_>, hint: &mut usize) -> Outcome {
        let &OpContext { op, limit, now, .. } = ask;
        let found = self.find(tag(op));
        *hint = found.unwrap_or(usize::MAX);
        match found {
            None => {
                if self.blocked >= about.room.blocked && self.must_share(op, now, about) {
                    if op.verb == Verb::Take {
                        self.losses.shared += 1;
                    }
                    return Outcome::without_limit(Verdict::NoRoom, now);
                }
                match limit.kind() {
                    LimitKind::Rate(rate) => {
                        Outcome::from_status(rate.status(ArrivalTime::default(), op.cost, now), now)
                    }
                    _ => KeyState::default().evaluate(ask),
                }
            }
            Some(at) => match (Word::unpack(self.table.word(at)), limit.kind()) {
                (Word::Arrival(arrival), LimitKind::Rate(rate)) if op.verb == Verb::Take => {
                    let arrival = self.settled(at, arrival, rate, now);
                    Outcome::from_status(rate.status(arrival, op.cost, now), now)
                }
                (Word::State(index), _) if op.verb == Verb::Take => self.state(index).evaluate(ask),
                (Word::State(index), _) => self.state(index).peek(ask),
                (word, _) => {
                    let mut state = Self::unfold(word);
                    let outcome = state.evaluate(ask);
                    // A clock that stepped back makes the moment another one for good.
                    if op.verb == Verb::Take
                        && let (Word::Once(before), Usage::Window(log)) = (word, state.usage())
                        && let Some(slot) = log.iter().next()
                        && slot.at != before
                    {
                        self.table.set_word(at, Word::Once(slot.at).pack());
                    }
                    outcome
                }
            },
        }
    }

    /// A take of a plain rate, answered with when it has room and the present moment.
    #[inline]
    pub(super) fn turn(&mut self, op: &Op, rate: &Rate, clock: &impl Clock, about: &About<'_>) -> (Time, Time) {
        let tag = tag(op);
        let found = self.find(tag);
        if let Some(at) = found
            && rate.can_take_between(MAX_NOW_SPREAD)
        {
            let (earliest, latest) = clock.now_bounds();
            let arrival = ArrivalTime::from_bits(self.table.word(at));
            if let Some(arrival) = rate.take_between(arrival, op.cost, (earliest, latest)) {
                self.table.set_word(at, Word::Arrival(arrival).pack());
                return (earliest, earliest);
            }
        }
        let now = clock.now();
        let arrival = match found {
            Some(at) => self.settled(at, ArrivalTime::from_bits(self.table.word(at)), rate, now),
            None => ArrivalTime::default(),
        };
        let retry_at = rate.retry_at(arrival, op.cost, now);
        if retry_at <= now {
            let word = Word::Arrival(rate.charge(arrival, op.cost, now));
            match found {
                Some(at) => self.table.set_word(at, word.pack()),
                None => self.insert(tag, word, now, about),
            }
        }
        (retry_at, now)
    }

    /// The arrival time as it counts now, which a clock that stepped back makes another one for good.
    #[inline]
    fn settled(&mut self, at: usize, arrival: ArrivalTime, rate: &Rate, now: Time) -> ArrivalTime {
        let settled = rate.refresh(arrival, now);
        if settled != arrival {
            self.table.set_word(at, Word::Arrival(settled).pack());
        }
        settled
    }

    /// The state that a word stands for.
    fn unfold(word: Word) -> KeyState {
        match word {
            Word::Arrival(arrival) => KeyState::new(Usage::Rate(arrival), PenaltyRecord::default()),
            Word::Once(at) => KeyState::new(Usage::Window(WindowLog::with_call(at, 1)), PenaltyRecord::default()),
            Word::State(_) => KeyState::default(),
        }
    }

    /// Has the state that the entry's slot names fetched.
    #[inline]
    pub(super) fn fetch_state(&self, op: &Op) {
        if let Some(at) = self.find(tag(op))
            && let Word::State(index) = Word::unpack(self.table.word(at))
        {
            let cell = self.cells.as_ptr().addr() + index as usize * size_of::<Cell>();
            (cell..cell + size_of::<Cell>()).step_by(CACHE_LINE).for_each(prefetch);
        }
    }

    pub(super) fn copy(&mut self, op: &Op) -> Option<KeyState> {
        let at = self.find(tag(op))?;
        Some(match Word::unpack(self.table.word(at)) {
            Word::State(index) => self.state(index).clone(),
            word => Self::unfold(word),
        })
    }

    fn state(&mut self, index: u32) -> &mut KeyState {
        match &mut self.cells[index as usize] {
            Cell::Used(state) => state,
            Cell::Free { .. } => unreachable!("invariant: a word of the table names a used cell"),
        }
    }

    /// Charges, and says whether that is remembered.
    #[inline]
    pub(super) fn charge(
        &mut self,
        ask: &OpContext<'_>,
        outcome: &mut Outcome,
        about: &About<'_>,
        hint: usize,
    ) -> bool {
        let &OpContext { op, limit, now, .. } = ask;
        let tag = tag(op);
        let found = if self.table.is_at(hint, tag) { Some(hint) } else { self.find(tag) };
        let word = found.map(|at| Word::unpack(self.table.word(at)));
        let folded = match (limit.kind(), word) {
            (LimitKind::Rate(rate), None | Some(Word::Arrival(_))) => {
                let before = if let Some(Word::Arrival(arrival)) = word { arrival } else { ArrivalTime::default() };
                let arrival = rate.charge(before, op.cost, now);
                outcome.record_charge(op.cost);
                outcome.reset_at = arrival.idle_at();
                Some(Word::Arrival(arrival))
            }
            (LimitKind::Window(window), None | Some(Word::Once(_))) if op.cost == 1 && ask.batch.lead.is_zero() => {
                let fresh = match word {
                    Some(Word::Once(at)) => now.since(at) >= window.window(),
                    _ => true,
                };
                if fresh {
                    outcome.record_charge(1);
                    outcome.reset_at = now + window.window();
                }
                fresh.then_some(Word::Once(now))
            }
            // A credential that was never throttled is nothing to remember, and neither is a pace that nobody told of a call.
            (LimitKind::Cooldown(_) | LimitKind::Pace(_), None) => return false,
            _ => None,
        };
        match (folded, found) {
            (Some(word), Some(at)) => self.table.set_word(at, word.pack()),
            (Some(word), None) => self.insert(tag, word, now, about),
            (None, _) => match word {
                Some(Word::State(index)) => {
                    if self.change(index, |state| state.charge(ask, outcome)) {
                        self.make_room(0, tag, now, about);
                    }
                }
                _ => self.alter(op, now, about, |state| state.charge(ask, outcome)),
            },
        }
        true
    }

    /// Takes a strike if the limit has a penalty for the call and there is room for its block, and says whether it has.
    pub(super) fn strike(&mut self, ask: &OpContext<'_>, outcome: &mut Outcome, about: &About<'_>) -> bool {
        let &OpContext { op, limit, now, .. } = ask;
        if limit.penalty().is_none() || outcome.retry_at.is_never() || !op.share_level.allows_strikes() {
            return false;
        }
        if self.is_crowded(about.room.of_blocks(op.share_level), now) {
            self.losses.blocked += 1;
            return false;
        }
        let counted_at = self.counted_at;
        let mut newly_blocked = 0;
        self.alter(op, now, about, |state| {
            if state.penalty_record().strikes == 0 || state.penalty_record().blocked_until <= counted_at {
                newly_blocked = weight(state);
            }
            state.strike(ask, outcome);
        });
        self.blocked += newly_blocked;
        true
    }

    /// True if a block that is brought back has room. It is counted, even if it was known: what is counted too much is
    /// counted anew.
    #[cold]
    pub(super) fn fits_block(&mut self, op: &Op, now: Time, about: &About<'_>) -> bool {
        if self.is_crowded(about.room.of_blocks(op.share_level), now) {
            self.losses.blocked += 1;
            return false;
        }
        self.blocked += weight(&self.copy(op).unwrap_or_default());
        true
    }

    /// Runs `change` on the key's whole state, making one if need be.
    pub(super) fn alter(&mut self, op: &Op, now: Time, about: &About<'_>, change: impl FnOnce(&mut KeyState)) {
        let tag = tag(op);
        if let Some(at) = self.find(tag) {
            let word = Word::unpack(self.table.word(at));
            if let Word::State(index) = word {
                if self.change(index, change) {
                    self.make_room(0, tag, now, about);
                }
            } else {
                let mut state = Self::unfold(word);
                change(&mut state);
                if let (Usage::Rate(arrival), true) =
                    (state.usage(), *state.penalty_record() == PenaltyRecord::default())
                {
                    self.table.set_word(at, Word::Arrival(*arrival).pack());
                    return;
                }
                let index = self.allocate(state, tag, now, about);
                // Making room may have moved the entry.
                if let Some(at) = self.find(tag) {
                    self.table.set_word(at, Word::State(index).pack());
                }
            }
        } else {
            let mut state = KeyState::default();
            change(&mut state);
            self.put(tag, state, now, about);
        }
    }

    /// Puts a state where there is none. At the bound something goes for it, as for any other.
    fn put(&mut self, tag: u64, state: KeyState, now: Time, about: &About<'_>) {
        // Beside plain rates there may be no room for states at all.
        let word = match state.usage() {
            _ if *state.penalty_record() != PenaltyRecord::default() => None,
            Usage::Rate(arrival) => Some(Word::Arrival(*arrival)),
            Usage::Window(log) if log.total() == 1 => log.iter().next().map(|slot| Word::Once(slot.at)),
            _ => None,
        };
        let word = word.unwrap_or_else(|| Word::State(self.allocate(state, tag, now, about)));
        self.insert(tag, word, now, about);
    }

    /// Runs `change` on the key's state if there is one, and says whether there is.
    pub(super) fn alter_existing(
        &mut self,
        op: &Op,
        now: Time,
        about: &About<'_>,
        change: impl FnOnce(&mut KeyState),
    ) -> bool {
        let exists = self.find(tag(op)).is_some();
        if exists {
            self.alter(op, now, about, change);
        }
        exists
    }

    pub(super) fn forget(&mut self, op: &Op) {
        if let Some(at) = self.find(tag(op)) {
            self.remove(at);
        }
    }

    /// Runs `change` on a state; true if it holds more memory than before.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut KeyState)) -> bool {
        let state = self.state(index);
        let before = state.heap_bytes();
        change(state);
        let after = state.heap_bytes();
        self.heap = self.heap + after - before;
        after > before
    }

    fn insert(&mut self, tag: u64, word: Word, now: Time, about: &About<'_>) {
        self.sweep(SWEPT_PER_INSERT, now, about);
        let slot = Slot { tag, word: word.pack() };
        // Each turn either makes the table larger or takes an entry out; the table of a store with room for
        // anything has room for one.
        for _ in 0..=self.table.slots().len() + 1 {
            let homes = self.table.homes();
            if homes > 0
                && let Place::Vacant(at) = self.table.find(tag)
                && self.table.insert(at, slot) == Ok(())
            {
                return;
            }
            if homes < about.room.homes {
                self.resize_table((homes + homes / 4 + 4).min(about.room.homes));
            } else if !self.evict(tag, false, now, about) {
                break;
            }
        }
        self.free_cell(word);
    }

    fn allocate(&mut self, state: KeyState, tag: u64, now: Time, about: &About<'_>) -> u32 {
        self.make_room(size_of::<Cell>() + state.heap_bytes(), tag, now, about);
        self.heap += state.heap_bytes();
        match self.free {
            Some(index) => {
                self.unused -= 1;
                let cell = &mut self.cells[index as usize];
                self.free = if let Cell::Free { next } = cell { *next } else { None };
                *cell = Cell::Used(state);
                index
            }
            None => {
                if self.cells.len() == self.cells.capacity() {
                    self.cells.reserve_exact(self.cells.len() / 4 + 4);
                }
                self.cells.push(Cell::Used(state));
                (self.cells.len() - 1) as u32
            }
        }
    }

    /// Shows the state that an entry stands for, or nothing where there is none.
    #[cfg(feature = "file")]
    pub(super) fn show(&self, tag: u64, show: impl FnOnce(Option<&KeyState>)) {
        match self.find(tag).map(|at| Word::unpack(self.table.word(at))) {
            None => show(None),
            Some(Word::State(index)) => match &self.cells[index as usize] {
                Cell::Used(state) => show(Some(state)),
                Cell::Free { .. } => show(None),
            },
            Some(word) => show(Some(&Self::unfold(word))),
        }
    }

    /// The tags of entries above a tag, in order.
    #[cfg(feature = "file")]
    pub(super) fn tags_above(&self, tag: u64) -> impl Iterator<Item = u64> {
        let from = match tag.checked_add(1) {
            Some(next) if self.table.homes() > 0 => match self.table.find(next) {
                Place::Found(at) | Place::Vacant(at) => at,
            },
            _ => self.table.slots().len(),
        };
        self.table.slots()[from..].iter().map(|slot| slot.tag).filter(move |found| *found > tag)
    }

    /// Whether there is an entry that isn't idle.
    #[cfg(feature = "file")]
    pub(super) fn holds(&self, tag: u64, now: Time, about: &About<'_>) -> bool {
        self.find(tag).is_some_and(|at| !self.is_idle(self.table.slots()[at], now, about.limits))
    }

    /// Puts a state back that was kept elsewhere, where there is none.
    #[cfg(feature = "file")]
    pub(super) fn restore(&mut self, tag: u64, state: KeyState, now: Time, about: &About<'_>) {
        if self.find(tag).is_some() {
            return;
        }
        if state.penalty_record().is_blocked(now) {
            if self.is_crowded(about.room.of_blocks(ShareLevel::SmallNetwork), now) {
                self.losses.blocked += 1;
                return;
            }
            self.blocked += weight(&state);
        }
        self.put(tag, state, now, about);
    }

    fn free_cell(&mut self, word: Word) {
        if let Word::State(index) = word {
            let cell = &mut self.cells[index as usize];
            if let Cell::Used(state) = cell {
                self.heap -= state.heap_bytes();
            }
            *cell = Cell::Free { next: self.free };
            self.free = Some(index);
            self.unused += 1;
        }
    }

    fn remove(&mut self, at: usize) {
        let word = Word::unpack(self.table.word(at));
        self.free_cell(word);
        self.table.remove(at);
    }

    /// Evicts states until `more` bytes fit beside those in use; a free cell counts as room. May move cells, so that no index
    /// may be held meanwhile.
    fn make_room(&mut self, more: usize, tag: u64, now: Time, about: &About<'_>) {
        for _ in 0..=2 * self.table.len() {
            let spare = self.free.is_some() || self.cells.len() < self.cells.capacity();
            let cells = if more == 0 || spare { 0 } else { self.cells.len() / 4 + 4 };
            let held = (self.cells.capacity() + cells) * size_of::<Cell>() + self.heap;
            let grown = more.saturating_sub(size_of::<Cell>());
            if held + grown <= about.room.states {
                return;
            }
            if self.unused * SCATTERED > self.cells.len() {
                self.compact();
            } else if !self.evict(tag, true, now, about) {
                return;
            }
        }
    }

    /// Takes out the entry that will be missed least among a few, sparing blocks and every entry of the client that asks.
    fn evict(&mut self, tag: u64, states_only: bool, now: Time, about: &About<'_>) -> bool {
        let Some((worth, at)) = self.least(tag, states_only, now, about) else { return false };
        match worth {
            Worth::Idle => {}
            Worth::Used(_) => self.losses.used += 1,
            Worth::Full => self.losses.full += 1,
        }
        self.hand = at;
        self.remove(at);
        true
    }

    /// The entry that [`Shard::evict`] takes out, if there is one.
    fn least(&mut self, tag: u64, states_only: bool, now: Time, about: &About<'_>) -> Option<(Worth, usize)> {
        let slots = self.table.slots().len();
        let mut best: Option<(Worth, usize)> = None;
        let mut seen = 0;
        for step in 0..slots {
            let at = (self.hand + step) % slots;
            let slot = self.table.slots()[at];
            let word = Word::unpack(slot.word);
            if slot.tag == 0 || slot.tag >> 12 == tag >> 12 || (states_only && !matches!(word, Word::State(_))) {
                continue;
            }
            if let Some(worth) = self.worth(slot, now, about.limits) {
                if best.is_none_or(|(least, _)| worth < least) {
                    best = Some((worth, at));
                }
                seen += 1;
                if worth == Worth::Idle || seen >= CANDIDATES {
                    break;
                }
            }
            if step >= LOOKED_OVER && best.is_some() {
                break;
            }
        }
        best
    }

    /// The worth of an entry, or none if it is blocked.
    fn worth(&mut self, slot: Slot, now: Time, limits: &Limits) -> Option<Worth> {
        let Some(limit) = limit_of(limits, slot.tag) else { return Some(Worth::Idle) };
        let word = Word::unpack(slot.word);
        let mut unfolded;
        let state = match word {
            Word::State(index) => self.state(index),
            _ => {
                unfolded = Self::unfold(word);
                &mut unfolded
            }
        };
        if state.idle_at(limit) <= now {
            return Some(Worth::Idle);
        }
        if state.penalty_record().is_blocked(now) {
            return None;
        }
        let op = Op::new(LimitId::FIRST, Verb::Peek, Key::default(), 0);
        let outcome = state.evaluate(&OpContext { op: &op, limit, batch: BatchContext::default(), now });
        Some(match outcome.remaining {
            0 => Worth::Full,
            _ => Worth::Used(outcome.used.saturating_mul(1000) / outcome.limit.max(1)),
        })
    }

    /// True if a new key must be shared more widely: where its block would have no room, and where a key without one would
    /// have none beside those that are blocked.
    #[cold]
    fn must_share(&mut self, op: &Op, now: Time, about: &About<'_>) -> bool {
        if op.must_fit {
            return false;
        }
        if op.share_level.allows_strikes() {
            return self.is_crowded(about.room.of_blocks(op.share_level), now);
        }
        let held = self.cells.capacity() * size_of::<Cell>() + self.heap;
        let is_full =
            self.table.is_full(about.room.homes) || self.unused == 0 && held + size_of::<Cell>() > about.room.states;
        is_full && self.least(tag(op), true, now, about).is_none()
    }

    /// True if blocked entries fill so many bytes.
    #[inline]
    fn is_crowded(&mut self, bytes: usize, now: Time) -> bool {
        self.blocked >= bytes && self.recounted(now) >= bytes
    }

    /// The bytes of blocked entries, counted anew if that was a while ago.
    #[cold]
    fn recounted(&mut self, now: Time) -> usize {
        if now.since(self.counted_at) >= RECOUNT || now < self.counted_at {
            let blocked = self.cells.iter().filter_map(|cell| match cell {
                Cell::Used(state) if state.penalty_record().is_blocked(now) => Some(weight(state)),
                _ => None,
            });
            self.blocked = blocked.sum();
            self.counted_at = now;
        }
        self.blocked
    }

    /// Looks over a share of the slots: called once a second, it comes round every minute.
    pub(super) fn sweep_share(&mut self, now: Time, about: &About<'_>) {
        self.sweep(self.table.slots().len() / SHARES + 1, now, about);
        self.shrink();
    }

    /// Looks over the next `slots` slots and takes out what is idle.
    fn sweep(&mut self, slots: usize, now: Time, about: &About<'_>) {
        for _ in 0..slots {
            if self.hand >= self.table.slots().len() {
                self.hand = 0;
            }
            let Some(&slot) = self.table.slots().get(self.hand) else { return };
            if slot.tag != 0 && self.is_idle(slot, now, about.limits) {
                self.remove(self.hand);
            } else {
                self.hand += 1;
            }
        }
    }

    #[inline]
    fn is_idle(&self, slot: Slot, now: Time, limits: &Limits) -> bool {
        let Some(limit) = limit_of(limits, slot.tag) else { return true };
        match (Word::unpack(slot.word), limit.kind()) {
            (Word::Arrival(arrival), _) => arrival.idle_at() <= now,
            (Word::Once(at), LimitKind::Window(window)) => now.since(at) >= window.window(),
            (Word::Once(_), _) => true,
            (Word::State(index), _) => match &self.cells[index as usize] {
                Cell::Used(state) => state.idle_at(limit) <= now,
                Cell::Free { .. } => true,
            },
        }
    }

    /// Gives memory back when most of the table, or most of the cells, is empty. May move cells, so that no index may be held
    /// meanwhile.
    fn shrink(&mut self) {
        if self.table.len() == 0 {
            self.table = Table::default();
            self.cells = Vec::new();
            self.free = None;
            self.unused = 0;
            return;
        }
        let homes = self.table.homes();
        if homes > 64 && self.table.len() * 4 < homes {
            self.resize_table(self.table.len() * 2);
        }
        if self.unused > 64 && self.unused * 4 > self.cells.len() * 3 {
            self.compact();
        }
    }

    /// Moves the cells in use together, and gives the others' memory back.
    #[cold]
    fn compact(&mut self) {
        let used = Vec::with_capacity(self.cells.len() - self.unused);
        let mut cells = std::mem::replace(&mut self.cells, used);
        self.free = None;
        self.unused = 0;
        for at in 0..self.table.slots().len() {
            let slot = self.table.slots()[at];
            if slot.tag != 0
                && let Word::State(index) = Word::unpack(slot.word)
            {
                let cell = std::mem::replace(&mut cells[index as usize], Cell::Free { next: None });
                self.cells.push(cell);
                self.table.set_word(at, Word::State((self.cells.len() - 1) as u32).pack());
            }
        }
    }
}

/// What a shard must know of the store it is part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct About<'a> {
    pub limits: &'a Limits,
    pub room: Room,
}
