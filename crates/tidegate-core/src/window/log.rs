//! The times at which calls were admitted, stored in little memory.

use alloc::boxed::Box;
use alloc::vec;

use super::MAX_ENTRIES;
use crate::Time;

/// The number of bits of a packed slot for the count.
const COUNT_BITS: u32 = 12;

/// The calls that were admitted at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowSlot {
    /// The time of the calls.
    pub at: Time,
    /// The sum of their costs.
    pub count: u64,
}

impl WindowSlot {
    /// Packs the slot into eight bytes: 52 bits for the time and 12 for the count. `None` if the count needs more bits.
    fn pack(self) -> Option<u64> {
        (self.count >> COUNT_BITS == 0).then_some(self.at.as_micros() << COUNT_BITS | self.count)
    }

    fn unpack(word: u64) -> Self {
        Self { at: Time::from_micros(word >> COUNT_BITS), count: word & ((1 << COUNT_BITS) - 1) }
    }

    #[inline]
    fn read(words: &[u64], place: usize, wide: bool) -> Self {
        match &words[place..] {
            [at, count, ..] if wide => Self { at: Time::from_micros(*at), count: *count },
            words => Self::unpack(words[0]),
        }
    }

    #[inline]
    fn write(self, words: &mut [u64], place: usize, wide: bool) {
        match self.pack() {
            Some(word) if !wide => words[place] = word,
            _ => words[place..place + 2].copy_from_slice(&[self.at.as_micros(), self.count]),
        }
    }
}

/// The number of packed slots that a log stores without heap memory.
const INLINE: usize = 5;

/// The words of a ring: one per slot, or two if a slot doesn't fit into one.
#[derive(Clone, Debug)]
enum SlotStorage {
    /// Packed slots. Unused ones are zero.
    Inline([u64; INLINE]),
    /// All slots but the newest. The fields that most calls need are here, because `words` are rarely in the CPU cache.
    Heap { words: Box<[u64]>, total: u64, oldest: Time, newest: WindowSlot },
}

/// The times at which calls were admitted, oldest first: a ring that grows with use.
#[derive(Clone, Debug)]
pub struct WindowLog {
    head: u16,
    len: u16,
    /// True if entries have been merged. Then new ones are merged, too.
    pub(super) merged: bool,
    /// True if a slot takes two words: its time and its count.
    wide: bool,
    ring: SlotStorage,
}

impl Default for WindowLog {
    fn default() -> Self {
        Self { head: 0, len: 0, merged: false, wide: false, ring: SlotStorage::Inline([0; INLINE]) }
    }
}

impl WindowLog {
    /// Creates a log of one admitted call.
    pub fn with_call(at: Time, count: u64) -> Self {
        let mut log = Self::default();
        log.push_back(WindowSlot { at, count }, 1);
        log
    }

    /// Creates a log of these slots, oldest first. `merged` is true if some were merged. `None` if the slots are out of
    /// order, a count is 0, or there are more than a log can hold (65,535).
    pub fn from_slots(slots: &[WindowSlot], merged: bool) -> Option<Self> {
        let ordered = slots.is_sorted_by_key(|slot| slot.at);
        if !ordered || slots.len() > 2 * MAX_ENTRIES as usize - 1 || slots.iter().any(|slot| slot.count == 0) {
            return None;
        }
        let mut log = Self { merged, ..Self::default() };
        log.reallocate(slots.len(), false);
        for slot in slots {
            log.push_back(*slot, slots.len());
        }
        Some(log)
    }

    /// True if entries have been merged. Then new ones are merged, too.
    pub fn is_merged(&self) -> bool {
        self.merged
    }

    /// The sum of all counts.
    pub fn total(&self) -> u64 {
        match &self.ring {
            SlotStorage::Inline(words) => words.iter().map(|word| WindowSlot::unpack(*word).count).sum(),
            SlotStorage::Heap { total, .. } => *total,
        }
    }

    /// The number of used slots.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// True if the log is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The slots, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = WindowSlot> {
        (0..self.len()).map(|index| self.get(index))
    }

    /// The number of bytes of heap memory.
    pub fn heap_bytes(&self) -> usize {
        match &self.ring {
            SlotStorage::Inline(_) => 0,
            SlotStorage::Heap { words, .. } => size_of_val::<[u64]>(words),
        }
    }

    fn capacity(&self) -> usize {
        match &self.ring {
            SlotStorage::Inline(_) => INLINE,
            SlotStorage::Heap { words, .. } => words.len() / self.words_per_slot() + 1,
        }
    }

    fn words_per_slot(&self) -> usize {
        1 + usize::from(self.wide)
    }

    pub(super) fn get(&self, index: usize) -> WindowSlot {
        match &self.ring {
            SlotStorage::Inline(words) => WindowSlot::unpack(words[index]),
            SlotStorage::Heap { newest, .. } if index + 1 == self.len() => *newest,
            SlotStorage::Heap { words, .. } => WindowSlot::read(words, self.word_index(index), self.wide),
        }
    }

    /// The index of the slot's first word in the ring.
    fn word_index(&self, index: usize) -> usize {
        let place = (self.head as usize + index) * self.words_per_slot();
        match &self.ring {
            SlotStorage::Heap { words, .. } if place >= words.len() => place - words.len(),
            _ => place,
        }
    }

    pub(super) fn set(&mut self, index: usize, slot: WindowSlot) {
        let (last, wide) = (index + 1 == self.len(), self.wide);
        let place = self.word_index(index);
        match (&mut self.ring, slot.pack()) {
            (SlotStorage::Inline(words), Some(word)) => words[index] = word,
            (SlotStorage::Heap { words, total, oldest, newest }, packed) if last || wide || packed.is_some() => {
                if index == 0 {
                    *oldest = slot.at;
                }
                let before = if last { *newest } else { WindowSlot::read(words, place, wide) };
                *total = total.saturating_sub(before.count).saturating_add(slot.count);
                if last {
                    *newest = slot;
                } else {
                    slot.write(words, place, wide);
                }
            }
            _ => {
                self.reallocate(self.capacity(), true);
                self.set(index, slot);
            }
        }
    }

    pub(super) fn front(&self) -> Option<WindowSlot> {
        (self.len > 0).then(|| self.get(0))
    }

    #[inline]
    fn back(&self) -> Option<WindowSlot> {
        let last = self.len().checked_sub(1)?;
        Some(match &self.ring {
            SlotStorage::Inline(words) => WindowSlot::unpack(words[last]),
            SlotStorage::Heap { newest, .. } => *newest,
        })
    }

    pub(super) fn oldest(&self) -> Option<Time> {
        match &self.ring {
            _ if self.len == 0 => None,
            SlotStorage::Inline(words) => Some(WindowSlot::unpack(words[0]).at),
            SlotStorage::Heap { oldest, .. } => Some(*oldest),
        }
    }

    pub(super) fn newest(&self) -> Option<Time> {
        self.back().map(|slot| slot.at)
    }

    /// Adds to the count of the newest entry and changes its time to `more.at`.
    pub(super) fn add_to_newest(&mut self, more: WindowSlot) {
        let Some(newest) = self.back() else { return };
        let merged = WindowSlot { at: more.at, count: newest.count.saturating_add(more.count) };
        match &mut self.ring {
            // The usual case for a key in constant use.
            SlotStorage::Heap { total, newest, .. } if self.len > 1 => {
                *total = total.saturating_add(more.count);
                *newest = merged;
            }
            _ => self.set(self.len() - 1, merged),
        }
    }

    pub(super) fn pop_front(&mut self) {
        let Some(slot) = self.front() else { return };
        self.len -= 1;
        if let SlotStorage::Inline(words) = &mut self.ring {
            words.copy_within(1.., 0);
            words[INLINE - 1] = 0;
            return;
        }
        self.head = if self.len == 0 || self.word_index(1) == 0 { 0 } else { self.head + 1 };
        let front = self.front();
        if let SlotStorage::Heap { total, oldest, .. } = &mut self.ring {
            *total = total.saturating_sub(slot.count);
            *oldest = front.map_or(Time::ZERO, |front| front.at);
        }
    }

    pub(super) fn push_back(&mut self, slot: WindowSlot, most: usize) {
        let len = self.len();
        if let (SlotStorage::Inline(words), Some(word)) = (&mut self.ring, slot.pack())
            && len < INLINE
        {
            words[len] = word;
            self.len += 1;
            return;
        }
        // The previous newest slot moves to the others.
        let (capacity, before) = (self.capacity(), self.back());
        let wide = self.wide || slot.pack().is_none() || before.is_some_and(|before| before.pack().is_none());
        if len == capacity {
            self.reallocate((capacity * 2 - 1).min(most.max(capacity + 1)), wide);
        } else if wide != self.wide {
            self.reallocate(capacity, wide);
        }
        let place = before.map(|before| (self.word_index(len - 1), before));
        self.len += 1;
        let SlotStorage::Heap { words, total, oldest, newest } = &mut self.ring else {
            unreachable!("invariant: what fits into the log itself is there by now");
        };
        match place {
            Some((place, before)) => before.write(words, place, wide),
            None => *oldest = slot.at,
        }
        *newest = slot;
        *total = total.saturating_add(slot.count);
    }

    /// Subtracts `cost` from the entry at exactly this time. Returns false if there is none of at least that count.
    pub(super) fn subtract_at(&mut self, at: Time, cost: u64) -> bool {
        let Some(index) = (0..self.len()).rev().find(|index| self.get(*index).at <= at) else {
            return false;
        };
        let slot = self.get(index);
        if slot.at != at || slot.count < cost {
            return false;
        }
        self.set(index, WindowSlot { at, count: slot.count - cost });
        if slot.count == cost {
            for index in index..self.len() - 1 {
                self.set(index, self.get(index + 1));
            }
            self.truncate(self.len() - 1);
        }
        true
    }

    /// Inserts an entry in the order of time, or adds its count to an entry of the same time.
    pub(super) fn insert_at(&mut self, slot: WindowSlot, most: usize) {
        let previous_index = (0..self.len()).rev().find(|index| self.get(*index).at <= slot.at);
        if let Some(behind) = previous_index {
            let same = self.get(behind);
            if same.at == slot.at {
                self.set(behind, WindowSlot { count: same.count.saturating_add(slot.count), ..same });
                return;
            }
        }
        self.push_back(slot, most);
        let target = previous_index.map_or(0, |behind| behind + 1);
        for index in (target + 1..self.len()).rev() {
            self.set(index, self.get(index - 1));
        }
        self.set(target, slot);
    }

    /// Keeps only the `len` oldest slots.
    pub(super) fn truncate(&mut self, len: usize) {
        if len >= self.len() {
            return;
        }
        for index in len..self.len() {
            self.set(index, WindowSlot::default());
        }
        // The last slot that is kept is the new newest one.
        let last = len.checked_sub(1).map_or(WindowSlot::default(), |last| self.get(last));
        self.len = len as u16;
        if let SlotStorage::Heap { newest, .. } = &mut self.ring {
            *newest = last;
        }
    }

    fn reallocate(&mut self, capacity: usize, wide: bool) {
        let ring = if capacity <= INLINE && !wide {
            SlotStorage::Inline([0; INLINE])
        } else {
            let words = vec![0; capacity.saturating_sub(1).max(1) * (1 + usize::from(wide))].into_boxed_slice();
            SlotStorage::Heap { words, total: 0, oldest: Time::ZERO, newest: WindowSlot::default() }
        };
        let mut log = Self { head: 0, wide, ring, ..*self };
        for (index, slot) in self.iter().enumerate() {
            log.set(index, slot);
        }
        *self = log;
    }

    /// Frees memory if most of it is unused.
    pub(super) fn shrink_to_fit(&mut self) {
        if self.len() * 4 <= self.capacity() {
            self.reallocate(self.len().next_power_of_two() + 1, false);
        }
    }

    /// Moves entries in the future to `now`: after a step back, they would block calls for as long as the step.
    pub(super) fn clamp_to(&mut self, now: Time) {
        for index in (0..self.len()).rev() {
            let slot = self.get(index);
            if slot.at <= now {
                break;
            }
            self.set(index, WindowSlot { at: now, ..slot });
        }
    }

    pub(super) fn merge_oldest(&mut self) {
        if self.len < 2 {
            return;
        }
        let (oldest, next) = (self.get(0), self.get(1));
        self.pop_front();
        self.set(0, WindowSlot { count: next.count.saturating_add(oldest.count), ..next });
    }
}
