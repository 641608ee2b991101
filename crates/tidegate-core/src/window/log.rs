//! When calls were admitted, in as little memory as that takes.

use alloc::boxed::Box;
use alloc::vec;

use super::MAX_ENTRIES;
use crate::Time;

/// How many bits of a packed slot tell how much.
const COUNT_BITS: u32 = 12;

/// What was admitted at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowSlot {
    /// When.
    pub at: Time,
    /// How much.
    pub count: u64,
}

impl WindowSlot {
    /// In eight bytes, as nearly all are: 52 bits for when, and 12 for how much.
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

/// How many packed slots a log holds before it takes memory of its own.
const INLINE: usize = 5;

/// A ring's words: a slot each, or two where one doesn't fit.
#[derive(Clone, Debug)]
enum SlotStorage {
    /// Packed slots; what isn't one is zero.
    Inline([u64; INLINE]),
    /// All slots but the newest. What most calls need is beside them, since they are rarely at hand; it takes the
    /// space of the inline ones.
    Heap { words: Box<[u64]>, total: u64, oldest: Time, newest: WindowSlot },
}

/// When calls were admitted, oldest first: a ring that grows with use.
#[derive(Clone, Debug)]
pub struct WindowLog {
    head: u16,
    len: u16,
    /// Entries have been merged, and new ones are.
    pub(super) merged: bool,
    /// A slot takes two words: its moment and its count.
    wide: bool,
    ring: SlotStorage,
}

impl Default for WindowLog {
    fn default() -> Self {
        Self { head: 0, len: 0, merged: false, wide: false, ring: SlotStorage::Inline([0; INLINE]) }
    }
}

impl WindowLog {
    /// A log of one admitted call.
    pub fn with_call(at: Time, count: u64) -> Self {
        let mut log = Self::default();
        log.push_back(WindowSlot { at, count }, 1);
        log
    }

    /// A log of these slots, oldest first; `coarse` says that some were merged. Slots out of order or beyond what a
    /// log holds are `None`.
    pub fn from_slots(slots: &[WindowSlot], coarse: bool) -> Option<Self> {
        let ordered = slots.is_sorted_by_key(|slot| slot.at);
        if !ordered || slots.len() > 2 * MAX_ENTRIES as usize - 1 || slots.iter().any(|slot| slot.count == 0) {
            return None;
        }
        let mut log = Self { merged: coarse, ..Self::default() };
        log.reallocate(slots.len(), false);
        for slot in slots {
            log.push_back(*slot, slots.len());
        }
        Some(log)
    }

    /// Whether entries have been merged, and new ones are.
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

    /// How many slots are in use.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether nothing is recorded.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The slots, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = WindowSlot> {
        (0..self.len()).map(|index| self.get(index))
    }

    /// Bytes held outside the log itself.
    pub fn heap_bytes(&self) -> usize {
        match &self.ring {
            SlotStorage::Inline(_) => 0,
            SlotStorage::Heap { words, .. } => size_of_val::<[u64]>(words),
        }
    }

    /// How many slots there is room for.
    fn capacity(&self) -> usize {
        match &self.ring {
            SlotStorage::Inline(_) => INLINE,
            SlotStorage::Heap { words, .. } => words.len() / self.words_per_slot() + 1,
        }
    }

    /// How many words a slot takes.
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

    /// Where in the ring a slot begins.
    fn word_index(&self, index: usize) -> usize {
        let place = (self.head as usize + index) * self.words_per_slot();
        match &self.ring {
            SlotStorage::Heap { words, .. } if place >= words.len() => place - words.len(),
            _ => place,
        }
    }

    /// Puts a slot in the place of another.
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

    /// When the oldest entry was made.
    pub(super) fn oldest(&self) -> Option<Time> {
        match &self.ring {
            _ if self.len == 0 => None,
            SlotStorage::Inline(words) => Some(WindowSlot::unpack(words[0]).at),
            SlotStorage::Heap { oldest, .. } => Some(*oldest),
        }
    }

    /// When the newest entry was made.
    pub(super) fn newest(&self) -> Option<Time> {
        self.back().map(|slot| slot.at)
    }

    /// Counts more at the newest entry, which is then made at `more.at`.
    pub(super) fn add_to_newest(&mut self, more: WindowSlot) {
        let Some(newest) = self.back() else { return };
        let merged = WindowSlot { at: more.at, count: newest.count.saturating_add(more.count) };
        match &mut self.ring {
            // Where a key in constant use comes with most of its calls.
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
        // What was the newest joins the others.
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

    /// Takes `cost` from the entry made at this moment; false if there is none, or it holds less.
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

    /// Puts an entry where its moment belongs: behind those that are as old.
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
        // The last that is kept is the newest now.
        let last = len.checked_sub(1).map_or(WindowSlot::default(), |last| self.get(last));
        self.len = len as u16;
        if let SlotStorage::Heap { newest, .. } = &mut self.ring {
            *newest = last;
        }
    }

    /// Moves to a ring of so many slots.
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

    /// Gives memory back when most of it is unused.
    pub(super) fn shrink_to_fit(&mut self) {
        if self.len() * 4 <= self.capacity() {
            self.reallocate(self.len().next_power_of_two() + 1, false);
        }
    }

    /// Brings entries of the future to `now`: a clock stepped back, and who waited for it would be locked out.
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
