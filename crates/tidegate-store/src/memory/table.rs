//! A hash table that is sorted by tag. It uses open addressing, and a tag's home grows with the tag, so that all slots
//! are in order.
//!
//! The order makes it cheap. A search ends at the first larger tag, so a miss costs no more than a hit, even when four
//! of five slots are used. Growing walks both arrays once from front to back, so tables can grow in small steps and
//! stay full.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// One entry: 16 bytes, four to a cache line.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// The key of the search; 0 is an empty slot.
    pub tag: u64,
    /// The value.
    pub word: u64,
}

/// The position of a tag, or the position at which to insert it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchResult {
    Found(usize),
    Vacant(usize),
}

/// Slots in the order of their tags. Every entry is at its home or in an unbroken run behind it.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Table {
    pub slots: Vec<Slot>,
    pub home_count: usize,
    /// The number of entries.
    pub len: usize,
}

/// The error of a table that is as full as it may get: it must grow, or an entry must be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TableFullError;

const MIN_HOME_COUNT: usize = 4;
pub(super) const CACHE_LINE: usize = 64;
const SLOTS_PER_LINE: usize = CACHE_LINE / size_of::<Slot>();

/// Slots behind the last home, for runs that begin near it.
const fn tail_slots(home_count: usize) -> usize {
    8 + home_count / 16
}

impl Table {
    /// Returns the number of homes that fit into this many bytes.
    pub(super) fn home_count_within(bytes: usize) -> usize {
        (bytes / size_of::<Slot>()).saturating_sub(tail_slots(0)) * 16 / 17
    }

    /// Publishes the position of the slots in `location`.
    pub(super) fn publish_location(&self, location: &TableLocation) {
        location.slots_address.store(self.slots.as_ptr().addr(), Relaxed);
        location.home_count.store(self.home_count, Relaxed);
    }

    /// Returns the position of a tag, or the position at which to insert it. From its home on, the smaller tags come
    /// first. So its offset is the number of smaller tags. They are counted a cache line at a time, without branches to
    /// mispredict.
    #[inline]
    pub(super) fn find(&self, tag: u64) -> SearchResult {
        let mut at = home_index(tag, self.home_count);
        while let Some(line) = self.slots.get(at..at + SLOTS_PER_LINE) {
            // An empty slot's 0 wraps to the largest value.
            let smaller = line.iter().map(|slot| usize::from(slot.tag.wrapping_sub(1) < tag - 1)).sum::<usize>();
            if let Some(slot) = line.get(smaller) {
                let at = at + smaller;
                return if slot.tag == tag { SearchResult::Found(at) } else { SearchResult::Vacant(at) };
            }
            at += SLOTS_PER_LINE;
        }
        let smaller = self.slots[at..].iter().take_while(|slot| slot.tag.wrapping_sub(1) < tag - 1).count();
        match self.slots.get(at + smaller) {
            Some(slot) if slot.tag == tag => SearchResult::Found(at + smaller),
            _ => SearchResult::Vacant(at + smaller),
        }
    }

    /// Returns true if the tag is at this position.
    #[inline]
    pub(super) fn has_tag_at(&self, at: usize, tag: u64) -> bool {
        self.slots.get(at).is_some_and(|slot| slot.tag == tag)
    }

    #[inline]
    pub(super) fn word(&self, at: usize) -> u64 {
        self.slots[at].word
    }

    #[inline]
    pub(super) fn set_word(&mut self, at: usize, word: u64) {
        self.slots[at].word = word;
    }

    /// True if one more entry would be too many for this number of homes.
    pub(super) fn is_full(&self, home_count: usize) -> bool {
        (self.len + 1) * 5 > home_count * 4
    }

    /// Inserts a tag that isn't there yet at the position that [`Table::find`] returned.
    pub(super) fn insert(&mut self, at: usize, slot: Slot) -> Result<(), TableFullError> {
        if self.is_full(self.home_count) {
            return Err(TableFullError);
        }
        let run_length = self.slots[at..].iter().position(|slot| slot.tag == 0).ok_or(TableFullError)?;
        self.slots.copy_within(at..at + run_length, at + 1);
        self.slots[at] = slot;
        self.len += 1;
        Ok(())
    }

    /// Removes an entry and closes the gap, so that no run is broken.
    pub(super) fn remove(&mut self, at: usize) {
        let mut end = at + 1;
        let is_displaced = |slot: &Slot, at| slot.tag != 0 && home_index(slot.tag, self.home_count) < at;
        while self.slots.get(end).is_some_and(|slot| is_displaced(slot, end)) {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = Slot::default();
        self.len -= 1;
    }

    /// Rebuilds the table with about this many homes, or more if its entries need them.
    pub(super) fn rebuild(&mut self, home_count: usize) {
        let mut home_count = home_count.max(MIN_HOME_COUNT).max(self.len * 5 / 4 + 1);
        while !self.try_rebuild(home_count) {
            home_count += home_count / 4 + 1;
        }
    }

    fn try_rebuild(&mut self, home_count: usize) -> bool {
        let mut next =
            Self { slots: vec![Slot::default(); home_count + tail_slots(home_count)], home_count, len: self.len };
        let mut free = 0;
        for slot in self.slots.iter().filter(|slot| slot.tag != 0) {
            let at = home_index(slot.tag, home_count).max(free);
            let Some(target) = next.slots.get_mut(at) else { return false };
            *target = *slot;
            free = at + 1;
        }
        *self = next;
        true
    }
}

#[inline]
fn home_index(tag: u64, home_count: usize) -> usize {
    ((u128::from(tag) * home_count as u128) >> 64) as usize
}

/// The recent position of a table's slots, readable without the lock. It is rarely written, so it stays in caches.
#[derive(Debug, Default)]
pub(super) struct TableLocation {
    slots_address: AtomicUsize,
    home_count: AtomicUsize,
}

impl TableLocation {
    /// Fetches the likely slot of a tag for writing, so that it arrives together with the lock's cache line.
    #[inline]
    pub(super) fn prefetch(&self, tag: u64) {
        let offset = home_index(tag, self.home_count.load(Relaxed)) * size_of::<Slot>();
        prefetch(self.slots_address.load(Relaxed).wrapping_add(offset));
    }
}

/// Fetches a cache line for writing.
#[inline]
#[cfg(target_arch = "x86_64")]
#[expect(unsafe_code, reason = "there is no safe way to prefetch")]
pub(super) fn prefetch(address: usize) {
    use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
    // SAFETY: a prefetch moves cache lines and nothing else; it never faults, whatever the address.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(std::ptr::without_provenance(address)) };
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn prefetch(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn check(table: &Table) {
        let mut last = 0;
        for (at, slot) in table.slots.iter().enumerate().filter(|(_, slot)| slot.tag != 0) {
            assert!(slot.tag > last, "out of order");
            last = slot.tag;
            let home = home_index(slot.tag, table.home_count);
            assert!(home <= at && table.slots[home..at].iter().all(|slot| slot.tag != 0), "a broken run");
        }
    }

    fn put(table: &mut Table, tag: u64, word: u64) {
        loop {
            match table.find(tag) {
                SearchResult::Found(at) => return table.set_word(at, word),
                SearchResult::Vacant(at) => {
                    if table.insert(at, Slot { tag, word }).is_ok() {
                        return;
                    }
                    let homes = table.home_count;
                    table.rebuild(homes + homes / 4 + 1);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn the_table_agrees_with_a_map(steps in prop::collection::vec((any::<bool>(), 1..u64::MAX, 0..64_u64), 1..600)) {
            let mut table = Table::default();
            let mut map = BTreeMap::new();
            for (step, (keep, tag, few)) in steps.into_iter().enumerate() {
                // Half of the tags crowd into the last homes, where runs meet the tail.
                let tag = if step % 2 == 0 { tag } else { u64::MAX - few };
                if keep {
                    put(&mut table, tag, step as u64);
                    map.insert(tag, step as u64);
                } else if table.home_count > 0 && let SearchResult::Found(at) = table.find(tag) {
                    table.remove(at);
                    prop_assert!(map.remove(&tag).is_some());
                }
                check(&table);
            }
            prop_assert_eq!(table.len, map.len());
            let held: Vec<_> = table.slots.iter().filter(|slot| slot.tag != 0).map(|slot| (slot.tag, slot.word)).collect();
            prop_assert_eq!(held, map.into_iter().collect::<Vec<_>>());
        }
    }
}
