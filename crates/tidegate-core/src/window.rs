//! `window`: a strict trailing window, kept as a log of when calls were admitted.
//!
//! The log is exact up to its number of entries. A limit above that shares slots: once the log is full, entries that
//! fall into the same cell of a grid of width `window ÷ entries` are merged, and count as made at the later of their
//! moments. So a slot may come free up to `window ÷ entries` late, and never early; and since the grid is fixed, an
//! entry can never drift further by being merged again.

use alloc::boxed::Box;
use alloc::vec;

use crate::limit::{LimitError, checked_limit};
use crate::state::Look;
use crate::time::OVERTAKEN;
use crate::{Span, Time};

/// The most entries that a window keeps exactly, which leaves room for half as many more in 16 bits.
const MAX_ENTRIES: u32 = 1 << 15;

/// At most `limit` in any trailing `window`: a call made at `t` counts until exactly `t + window`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    limit: u64,
    window: Span,
    entries: u32,
    cell: u64,
    lead: Span,
}

impl Window {
    /// At most `limit` in any trailing `window`, keeping up to `entries` moments exactly.
    ///
    /// # Errors
    /// A limit above 2^40, a window of no length, or entries outside 1 to 32,768.
    pub fn new(limit: u64, window: Span, entries: u32) -> Result<Self, LimitError> {
        checked_limit(limit)?;
        if window.is_zero() {
            return Err(LimitError::ZeroPeriod);
        }
        if entries == 0 || entries > MAX_ENTRIES {
            return Err(LimitError::Entries { found: entries });
        }
        let cell = window.as_micros().div_ceil(u64::from(entries));
        Ok(Self { limit, window, entries, cell, lead: Span::ZERO })
    }

    /// Lets calls be counted up to `lead` ahead of the present ([`Batch::ahead`](crate::Batch::ahead)). An entry further
    /// ahead can only come from a clock that has since stepped back.
    #[must_use]
    pub fn with_lead(mut self, lead: Span) -> Self {
        self.lead = lead;
        self
    }

    /// How far ahead of the present calls may be counted. Zero unless said.
    pub fn lead(&self) -> Span {
        self.lead
    }

    /// The most that any trailing window holds.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The window's length.
    pub fn window(&self) -> Span {
        self.window
    }

    /// How many moments are kept exactly.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// How late a slot may come free: zero while the log is exact.
    pub fn lateness(&self) -> Span {
        if self.is_exact() { Span::ZERO } else { Span::from_micros(self.cell) }
    }

    /// How many slots a log has at most: room beyond the exact entries, so that merging is paid for by many calls.
    pub fn physical(&self) -> usize {
        let entries = self.entries as usize;
        if self.is_exact() { entries.max(2) } else { entries + entries / 2 + 2 }
    }

    /// Whether all moments are kept, however many calls there are.
    pub fn is_exact(&self) -> bool {
        self.limit <= u64::from(self.entries)
    }

    /// Forgets what no longer counts, and returns the moment to judge at: `now`, or the newest entry's where this
    /// call was overtaken.
    pub fn settle(&self, log: &mut Log, now: Time) -> Time {
        let mut now = now;
        if let Some(newest) = log.newest()
            && newest > now + self.lead
        {
            let overtaken = newest - self.lead;
            if overtaken.since(now) <= OVERTAKEN {
                now = overtaken;
            } else {
                log.pull_back(now + self.lead);
            }
        }
        while let Some(oldest) = log.oldest()
            && now.since(oldest) >= self.window
        {
            log.pop_front();
        }
        // Few enough to be kept one by one again.
        log.coarse &= log.total() > u64::from(self.entries);
        now
    }

    /// What a call of `cost` would meet at `now`, in a log that was settled for `now`.
    pub fn look(&self, log: &Log, cost: u64, now: Time) -> Look {
        let used = log.total();
        let retry_at = if cost > self.limit {
            Time::NEVER
        } else if cost <= self.limit.saturating_sub(used) {
            now
        } else {
            let mut missing = used.saturating_add(cost) - self.limit;
            let mut free_at = now;
            for slot in log.iter() {
                free_at = slot.at + self.window;
                missing = missing.saturating_sub(slot.count);
                if missing == 0 {
                    break;
                }
            }
            free_at
        };
        let reset_at = log.newest().map_or(now, |newest| newest + self.window);
        Look { limit: self.limit, used, remaining: self.limit.saturating_sub(used), retry_at, reset_at }
    }

    /// Records a call of `cost` at `now`, or where it was overtaken at the newest entry's moment, in a log that was
    /// settled for `now`.
    pub fn charge(&self, log: &mut Log, cost: u64, now: Time) {
        if cost == 0 {
            return;
        }
        let now = log.newest().map_or(now, |newest| newest.max(now));
        let merges = log
            .newest()
            .is_some_and(|newest| newest == now || (log.coarse && self.cell_of(newest) == self.cell_of(now)));
        if merges {
            log.add_to_newest(Slot { at: now, count: cost });
            return;
        }
        if log.len() >= self.physical() {
            if self.is_exact() {
                self.make_room(log);
            } else {
                self.merge(log);
            }
        }
        log.push_back(Slot { at: now, count: cost }, self.physical());
    }

    /// Makes room for another slot in an exact log. That is full only when paroles or debits have overfilled it: as many
    /// of the oldest must expire before a slot is free as there are calls too many, so merging those delays nothing, unless
    /// something is given back meanwhile.
    fn make_room(&self, log: &mut Log) {
        while log.len() >= self.physical() {
            log.merge_oldest();
        }
    }

    /// Has what was charged ahead, at `from`, count as made at `now` in a log that was settled for `now`. Where entries
    /// have been merged nobody knows which is whose, and it stays where it is: later, never early.
    pub fn bring_forward(&self, log: &mut Log, cost: u64, from: Time, now: Time) {
        if cost > 0 && from > now && self.is_exact() && log.take_at(from, cost) {
            self.make_room(log);
            log.put_at(Slot { at: now, count: cost }, self.physical());
        }
    }

    /// Gives `cost` back in a log that was settled for `now`: what was counted at `from` if that is still told apart, and
    /// nothing if it has left the window. Otherwise, or if nobody knows when it was counted, the oldest entries give
    /// first: whichever call it was, nothing then comes free early.
    pub fn refund(&self, log: &mut Log, cost: u64, from: Time, now: Time) {
        if from > Time::ZERO {
            let gone = now.since(from) >= self.window;
            if gone || self.is_exact() && log.take_at(from, cost) {
                return;
            }
        }
        let mut rest = cost;
        while rest > 0 {
            let Some(oldest) = log.front() else { return };
            if oldest.count > rest {
                let total = log.total().saturating_sub(rest);
                log.set(0, Slot { count: oldest.count - rest, ..oldest });
                log.set_total(total);
                return;
            }
            rest -= oldest.count;
            log.pop_front();
        }
    }

    /// Merges entries that lie in the same cell of the grid. From then on, and until few calls are left, new ones are
    /// merged as they come: a key in constant use then needs a slot a cell, and mostly touches one.
    fn merge(&self, log: &mut Log) {
        let (total, mut kept) = (log.total(), 0);
        for index in 1..log.len() {
            let (slot, into) = (log.get(index), log.get(kept));
            if self.cell_of(into.at) == self.cell_of(slot.at) {
                log.set(kept, Slot { at: slot.at, count: into.count.saturating_add(slot.count) });
            } else {
                kept += 1;
                log.set(kept, slot);
            }
        }
        log.truncate(kept + 1);
        log.set_total(total);
        log.coarse = true;
        log.fit();
    }

    fn cell_of(&self, at: Time) -> u64 {
        at.as_micros() / self.cell
    }

    /// When the log no longer holds anything.
    pub fn idle_at(&self, log: &Log) -> Time {
        log.newest().map_or(Time::ZERO, |newest| newest + self.window)
    }
}

/// How many bits of a packed slot tell how much.
const COUNT_BITS: u32 = 12;

/// What was admitted at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// When.
    pub at: Time,
    /// How much.
    pub count: u64,
}

impl Slot {
    /// In eight bytes, as nearly all are: 52 bits for when, and 12 for how much.
    fn pack(self) -> Option<u64> {
        (self.count >> COUNT_BITS == 0).then_some(self.at.as_micros() << COUNT_BITS | self.count)
    }

    fn unpack(word: u64) -> Self {
        Self { at: Time::from_micros(word >> COUNT_BITS), count: word & ((1 << COUNT_BITS) - 1) }
    }

    #[inline]
    fn write(self, words: &mut [u64], place: usize, wide: bool) {
        match self.pack() {
            Some(word) if !wide => words[place] = word,
            _ => words[place..place + 2].copy_from_slice(&[self.at.as_micros(), self.count]),
        }
    }
}

/// How many packed slots a log holds before it takes memory of its own.
const INLINE: usize = 5;

/// A ring's words: a slot each, or two where one doesn't fit.
#[derive(Clone, Debug)]
enum Ring {
    /// Packed slots; what isn't one is zero.
    Inline([u64; INLINE]),
    /// All slots but the newest. What most calls need is beside them, since they are rarely at hand; it takes the
    /// space of the inline ones.
    Heap { words: Box<[u64]>, total: u64, oldest: Time, newest: Slot },
}

/// When calls were admitted, oldest first: a ring that grows with use.
#[derive(Clone, Debug)]
pub struct Log {
    head: u16,
    len: u16,
    /// Entries have been merged, and new ones are.
    coarse: bool,
    /// A slot takes two words: its moment and its count.
    wide: bool,
    ring: Ring,
}

impl Default for Log {
    fn default() -> Self {
        Self { head: 0, len: 0, coarse: false, wide: false, ring: Ring::Inline([0; INLINE]) }
    }
}

impl Log {
    /// A log of one admitted call.
    pub fn once(at: Time, count: u64) -> Self {
        let mut log = Self::default();
        log.push_back(Slot { at, count }, 1);
        log
    }

    /// A log of these slots, oldest first; `coarse` says that some were merged. Slots out of order or beyond what a
    /// log holds are `None`.
    pub fn of(slots: &[Slot], coarse: bool) -> Option<Self> {
        let ordered = slots.is_sorted_by_key(|slot| slot.at);
        if !ordered || slots.len() > 2 * MAX_ENTRIES as usize - 1 || slots.iter().any(|slot| slot.count == 0) {
            return None;
        }
        let mut log = Self { coarse, ..Self::default() };
        log.lay_out(slots.len(), false);
        for slot in slots {
            log.push_back(*slot, slots.len());
        }
        Some(log)
    }

    /// Whether entries have been merged, and new ones are.
    pub fn is_coarse(&self) -> bool {
        self.coarse
    }

    /// The sum of all counts.
    pub fn total(&self) -> u64 {
        match &self.ring {
            Ring::Inline(words) => words.iter().map(|word| Slot::unpack(*word).count).sum(),
            Ring::Heap { total, .. } => *total,
        }
    }

    /// How many slots are in use.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The slots, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = Slot> {
        (0..self.len()).map(|index| self.get(index))
    }

    /// Bytes held outside the log itself.
    pub fn heap_bytes(&self) -> usize {
        match &self.ring {
            Ring::Inline(_) => 0,
            Ring::Heap { words, .. } => size_of_val::<[u64]>(words),
        }
    }

    /// How many slots there is room for.
    fn capacity(&self) -> usize {
        match &self.ring {
            Ring::Inline(_) => INLINE,
            Ring::Heap { words, .. } => words.len() / self.width() + 1,
        }
    }

    /// How many words a slot takes.
    fn width(&self) -> usize {
        1 + usize::from(self.wide)
    }

    fn get(&self, index: usize) -> Slot {
        match &self.ring {
            Ring::Inline(words) => Slot::unpack(words[index]),
            Ring::Heap { newest, .. } if index + 1 == self.len() => *newest,
            Ring::Heap { words, .. } => match &words[self.place(index)..] {
                [at, count, ..] if self.wide => Slot { at: Time::from_micros(*at), count: *count },
                words => Slot::unpack(words[0]),
            },
        }
    }

    /// Where in the ring a slot begins.
    fn place(&self, index: usize) -> usize {
        let place = (self.head as usize + index) * self.width();
        match &self.ring {
            Ring::Heap { words, .. } if place >= words.len() => place - words.len(),
            _ => place,
        }
    }

    /// Puts a slot in the place of another, and leaves the total to the caller.
    fn set(&mut self, index: usize, slot: Slot) {
        let (last, wide) = (index + 1 == self.len(), self.wide);
        let place = self.place(index);
        match (&mut self.ring, slot.pack()) {
            (Ring::Inline(words), Some(word)) => words[index] = word,
            (Ring::Heap { words, oldest, newest, .. }, packed) if last || wide || packed.is_some() => {
                if index == 0 {
                    *oldest = slot.at;
                }
                if last {
                    *newest = slot;
                } else {
                    slot.write(words, place, wide);
                }
            }
            _ => {
                self.lay_out(self.capacity(), true);
                self.set(index, slot);
            }
        }
    }

    /// Notes the sum of all counts, where it isn't found by adding them.
    fn set_total(&mut self, sum: u64) {
        if let Ring::Heap { total, .. } = &mut self.ring {
            *total = sum;
        }
    }

    fn front(&self) -> Option<Slot> {
        (self.len > 0).then(|| self.get(0))
    }

    #[inline]
    fn back(&self) -> Option<Slot> {
        let last = self.len().checked_sub(1)?;
        Some(match &self.ring {
            Ring::Inline(words) => Slot::unpack(words[last]),
            Ring::Heap { newest, .. } => *newest,
        })
    }

    /// When the oldest entry was made.
    fn oldest(&self) -> Option<Time> {
        match &self.ring {
            _ if self.len == 0 => None,
            Ring::Inline(words) => Some(Slot::unpack(words[0]).at),
            Ring::Heap { oldest, .. } => Some(*oldest),
        }
    }

    /// When the newest entry was made.
    fn newest(&self) -> Option<Time> {
        self.back().map(|slot| slot.at)
    }

    /// Counts more at the newest entry, which is then made at `more.at`.
    fn add_to_newest(&mut self, more: Slot) {
        let Some(newest) = self.back() else { return };
        let last = self.len() - 1;
        let merged = Slot { at: more.at, count: newest.count.saturating_add(more.count) };
        match (&mut self.ring, merged.pack()) {
            (Ring::Inline(words), Some(word)) => words[last] = word,
            (Ring::Inline(_), None) => {
                self.lay_out(INLINE, true);
                self.add_to_newest(more);
            }
            (Ring::Heap { total, oldest, newest, .. }, _) => {
                *total = total.saturating_add(more.count);
                *newest = merged;
                if last == 0 {
                    *oldest = merged.at;
                }
            }
        }
    }

    fn pop_front(&mut self) {
        let Some(slot) = self.front() else { return };
        self.len -= 1;
        if let Ring::Inline(words) = &mut self.ring {
            words.copy_within(1.., 0);
            words[INLINE - 1] = 0;
            return;
        }
        self.head = if self.len == 0 || self.place(1) == 0 { 0 } else { self.head + 1 };
        let front = self.front();
        if let Ring::Heap { total, oldest, .. } = &mut self.ring {
            *total = total.saturating_sub(slot.count);
            *oldest = front.map_or(Time::ZERO, |front| front.at);
        }
    }

    fn push_back(&mut self, slot: Slot, most: usize) {
        let len = self.len();
        if let (Ring::Inline(words), Some(word)) = (&mut self.ring, slot.pack())
            && len < INLINE
        {
            words[len] = word;
            self.len += 1;
            return;
        }
        // What was the newest joins the others.
        let (capacity, before) = (self.capacity(), self.back());
        let wide = self.wide || slot.pack().is_none() || before.is_some_and(|before| before.pack().is_none());
        if len == capacity {
            self.lay_out((capacity * 2 - 1).min(most.max(capacity + 1)), wide);
        } else if wide != self.wide {
            self.lay_out(capacity, wide);
        }
        let place = before.map(|before| (self.place(len - 1), before));
        self.len += 1;
        let Ring::Heap { words, total, oldest, newest } = &mut self.ring else {
            unreachable!("invariant: what fits into the log itself is there by now");
        };
        match place {
            Some((place, before)) => before.write(words, place, wide),
            None => *oldest = slot.at,
        }
        *newest = slot;
        *total = total.saturating_add(slot.count);
    }

    /// Takes `cost` from the entry made at this moment; false if there is none, or it holds less.
    fn take_at(&mut self, at: Time, cost: u64) -> bool {
        let Some(index) = (0..self.len()).rev().find(|index| self.get(*index).at <= at) else {
            return false;
        };
        let slot = self.get(index);
        if slot.at != at || slot.count < cost {
            return false;
        }
        let total = self.total().saturating_sub(cost);
        self.set(index, Slot { at, count: slot.count - cost });
        if slot.count == cost {
            for index in index..self.len() - 1 {
                self.set(index, self.get(index + 1));
            }
            self.truncate(self.len() - 1);
        }
        self.set_total(total);
        true
    }

    /// Puts an entry where its moment belongs: behind those that are as old.
    fn put_at(&mut self, slot: Slot, most: usize) {
        let behind = (0..self.len()).rev().find(|index| self.get(*index).at <= slot.at);
        if let Some(behind) = behind {
            let same = self.get(behind);
            if same.at == slot.at {
                let total = self.total().saturating_add(slot.count);
                self.set(behind, Slot { count: same.count.saturating_add(slot.count), ..same });
                self.set_total(total);
                return;
            }
        }
        self.push_back(slot, most);
        let target = behind.map_or(0, |behind| behind + 1);
        for index in (target + 1..self.len()).rev() {
            self.set(index, self.get(index - 1));
        }
        self.set(target, slot);
    }

    /// Keeps only the `len` oldest slots, and leaves the total to the caller.
    fn truncate(&mut self, len: usize) {
        let newest = len.checked_sub(1).map(|last| self.get(last));
        for index in len..self.len() {
            self.set(index, Slot::default());
        }
        self.len = self.len.min(len as u16);
        if let Some(newest) = newest {
            self.set(len - 1, newest);
        }
    }

    /// Moves to a ring of so many slots.
    fn lay_out(&mut self, capacity: usize, wide: bool) {
        let ring = if capacity <= INLINE && !wide {
            Ring::Inline([0; INLINE])
        } else {
            let words = vec![0; capacity.saturating_sub(1).max(1) * (1 + usize::from(wide))].into_boxed_slice();
            Ring::Heap { words, total: 0, oldest: Time::ZERO, newest: Slot::default() }
        };
        let mut log = Self { head: 0, wide, ring, ..*self };
        for (index, slot) in self.iter().enumerate() {
            log.set(index, slot);
        }
        log.set_total(self.total());
        *self = log;
    }

    /// Gives memory back when most of it is unused.
    fn fit(&mut self) {
        if self.len() * 4 <= self.capacity() {
            self.lay_out(self.len().next_power_of_two() + 1, false);
        }
    }

    /// Brings entries of the future to `now`: a clock stepped back, and who waited for it would be locked out.
    fn pull_back(&mut self, now: Time) {
        for index in (0..self.len()).rev() {
            let slot = self.get(index);
            if slot.at <= now {
                break;
            }
            self.set(index, Slot { at: now, ..slot });
        }
    }

    fn merge_oldest(&mut self) {
        if self.len < 2 {
            return;
        }
        let (total, oldest, next) = (self.total(), self.get(0), self.get(1));
        self.pop_front();
        self.set(0, Slot { count: next.count.saturating_add(oldest.count), ..next });
        self.set_total(total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn at(secs: u64) -> Time {
        Time::from_secs(1_000_000 + secs)
    }

    fn take(window: &Window, log: &mut Log, cost: u64, now: Time) -> Look {
        let now = window.settle(log, now);
        let look = window.look(log, cost, now);
        if look.retry_at == now {
            window.charge(log, cost, now);
        }
        look
    }

    #[test]
    fn five_in_any_minute() {
        let window = Window::new(5, Span::from_secs(60), 64).unwrap();
        let mut log = Log::default();
        for second in [0, 10, 20, 30, 40] {
            assert_eq!(take(&window, &mut log, 1, at(second)).retry_at, at(second));
        }
        assert_eq!(take(&window, &mut log, 1, at(50)).retry_at, at(60));
        assert_eq!(take(&window, &mut log, 2, at(50)).retry_at, at(70));
        assert_eq!(take(&window, &mut log, 6, at(50)).retry_at, Time::NEVER);
        assert_eq!(take(&window, &mut log, 1, at(60)).retry_at, at(60));
        assert_eq!(take(&window, &mut log, 1, at(60)).retry_at, at(70));
    }

    #[test]
    fn merging_is_late_by_at_most_a_cell_and_never_early() {
        let window = Window::new(1000, Span::from_secs(64), 64).unwrap();
        let mut log = Log::default();
        for step in 0..1000 {
            let now = at(0) + Span::from_millis(step * 60);
            assert_eq!(take(&window, &mut log, 1, now).retry_at, now, "step {step}");
        }
        assert_eq!(log.total(), 1000);
        assert!(log.len() <= 98, "{}", log.len());
        let retry = take(&window, &mut log, 1, at(60)).retry_at;
        assert!(retry >= at(64) && retry <= at(65), "{retry:?}");
    }

    #[test]
    fn five_calls_take_no_memory_of_their_own() {
        let window = Window::new(5, Span::from_secs(60), 64).unwrap();
        let mut log = Log::default();
        for second in 0..200 {
            take(&window, &mut log, 1, at(second * 7));
            assert_eq!(log.heap_bytes(), 0);
        }
        assert!(size_of::<Log>() <= 56, "{}", size_of::<Log>());
        assert!(size_of::<crate::State>() <= 80, "{}", size_of::<crate::State>());
    }

    #[test]
    fn refunds_give_back_the_oldest_first() {
        let window = Window::new(5, Span::from_secs(60), 64).unwrap();
        let mut log = Log::default();
        take(&window, &mut log, 3, at(0));
        take(&window, &mut log, 2, at(30));
        window.refund(&mut log, 4, Time::ZERO, at(30));
        assert_eq!(log.iter().collect::<Vec<_>>(), [Slot { at: at(30), count: 1 }]);
        window.refund(&mut log, u64::MAX, Time::ZERO, at(30));
        assert_eq!((log.total(), log.len()), (0, 0));
    }

    #[test]
    fn a_step_back_locks_out_for_at_most_the_window() {
        let window = Window::new(2, Span::from_secs(60), 64).unwrap();
        let mut log = Log::default();
        take(&window, &mut log, 2, at(31_536_000));
        assert_eq!(take(&window, &mut log, 1, at(0)).retry_at, at(60));
        assert_eq!(take(&window, &mut log, 1, at(60)).retry_at, at(60));
    }

    #[test]
    fn an_overtaken_call_is_judged_at_the_newest_entry() {
        let window = Window::new(2, Span::from_secs(60), 64).unwrap();
        let mut log = Log::default();
        take(&window, &mut log, 1, at(1));
        let look = take(&window, &mut log, 1, at(1) - Span::from_millis(1));
        assert_eq!((look.remaining, log.len()), (1, 1));
        assert_eq!(log.iter().next().unwrap().at, at(1));
    }
}
