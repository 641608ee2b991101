//! A hash table kept sorted by tag: open addressing where a tag's home grows with the tag itself, so that the slots
//! as a whole are in order.
//!
//! Order is what makes it cheap. A search ends at the first larger tag, so a miss costs no more than a hit even when
//! four slots of five are taken; and growing walks both arrays once from front to back, so tables can grow in small
//! steps and stay full.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// One entry: 16 bytes, four to a cache line.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Slot {
    /// What is looked for; 0 is an empty slot.
    pub tag: u64,
    /// What is found.
    pub word: u64,
}

/// Where a tag is, or where it belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Found(usize),
    Vacant(usize),
}

/// Slots in the order of their tags. Every entry stands at its home or in an unbroken run behind it.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Table {
    slots: Vec<Slot>,
    homes: usize,
    len: usize,
}

/// The table is as full as it may get: it must grow, or something must go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

const FEWEST_HOMES: usize = 4;
/// The bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;
/// Slots in one.
const LINE: usize = CACHE_LINE / size_of::<Slot>();

/// Slots behind the last home, for runs that begin near it.
const fn tail(homes: usize) -> usize {
    8 + homes / 16
}

impl Table {
    /// How many homes fit into this many bytes.
    pub(super) fn homes_in(bytes: usize) -> usize {
        (bytes / size_of::<Slot>()).saturating_sub(tail(0)) * 16 / 17
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.len() * size_of::<Slot>()
    }

    pub(super) fn homes(&self) -> usize {
        self.homes
    }

    #[inline]
    fn home(&self, tag: u64) -> usize {
        home(tag, self.homes)
    }

    /// Tells where the slots lie.
    pub(super) fn tell(&self, outlook: &Outlook) {
        outlook.slots.store(self.slots.as_ptr().addr(), Relaxed);
        outlook.homes.store(self.homes, Relaxed);
    }

    /// Where a tag is, or where it belongs. Behind its home come first the smaller tags, then it or its place; so its
    /// offset is the number of smaller ones, which is counted a cache line at a time and without branches to mispredict.
    #[inline]
    pub(super) fn find(&self, tag: u64) -> Place {
        let mut at = self.home(tag);
        while let Some(line) = self.slots.get(at..at + LINE) {
            // An empty slot's 0 wraps to the largest.
            let smaller = line.iter().map(|slot| usize::from(slot.tag.wrapping_sub(1) < tag - 1)).sum::<usize>();
            if let Some(slot) = line.get(smaller) {
                let at = at + smaller;
                return if slot.tag == tag { Place::Found(at) } else { Place::Vacant(at) };
            }
            at += LINE;
        }
        let smaller = self.slots[at..].iter().take_while(|slot| slot.tag.wrapping_sub(1) < tag - 1).count();
        match self.slots.get(at + smaller) {
            Some(slot) if slot.tag == tag => Place::Found(at + smaller),
            _ => Place::Vacant(at + smaller),
        }
    }

    /// Whether the tag stands here.
    #[inline]
    pub(super) fn is_at(&self, at: usize, tag: u64) -> bool {
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

    /// True if one more entry would be too many for so many homes.
    pub(super) fn is_full(&self, homes: usize) -> bool {
        (self.len + 1) * 5 > homes * 4
    }

    /// Puts a tag that isn't there yet into the place that [`Table::find`] gave for it.
    pub(super) fn insert(&mut self, at: usize, slot: Slot) -> Result<(), Full> {
        if self.is_full(self.homes) {
            return Err(Full);
        }
        let run = self.slots[at..].iter().position(|slot| slot.tag == 0).ok_or(Full)?;
        self.slots.copy_within(at..at + run, at + 1);
        self.slots[at] = slot;
        self.len += 1;
        Ok(())
    }

    /// Takes an entry out and closes the gap, so that no run is broken.
    pub(super) fn remove(&mut self, at: usize) {
        let mut end = at + 1;
        while end < self.slots.len() && self.slots[end].tag != 0 && self.home(self.slots[end].tag) < end {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        self.slots[end - 1] = Slot::default();
        self.len -= 1;
    }

    /// Rebuilds the table with about this many homes; more if its entries need them.
    pub(super) fn rebuild(&mut self, homes: usize) {
        let mut homes = homes.max(FEWEST_HOMES).max(self.len * 5 / 4 + 1);
        while !self.try_rebuild(homes) {
            homes += homes / 4 + 1;
        }
    }

    fn try_rebuild(&mut self, homes: usize) -> bool {
        let mut next = Self { slots: vec![Slot::default(); homes + tail(homes)], homes, len: self.len };
        let mut free = 0;
        for slot in self.slots.iter().filter(|slot| slot.tag != 0) {
            let at = next.home(slot.tag).max(free);
            let Some(place) = next.slots.get_mut(at) else { return false };
            *place = *slot;
            free = at + 1;
        }
        *self = next;
        true
    }
}

#[inline]
fn home(tag: u64, homes: usize) -> usize {
    ((u128::from(tag) * homes as u128) >> 64) as usize
}

/// Where a table's slots lay of late. Unlike the table it can be looked at without its lock, and is rarely written, so
/// that every thread keeps it at hand.
#[derive(Debug, Default)]
pub(super) struct Outlook {
    slots: AtomicUsize,
    homes: AtomicUsize,
}

impl Outlook {
    /// Has the slot where a tag likely stands fetched to be written, so that it is on its way while the lock is.
    #[inline]
    pub(super) fn fetch(&self, tag: u64) {
        let offset = home(tag, self.homes.load(Relaxed)) * size_of::<Slot>();
        prefetch(self.slots.load(Relaxed).wrapping_add(offset));
    }
}

/// Has a cache line fetched to be written.
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
            let home = table.home(slot.tag);
            assert!(home <= at && table.slots[home..at].iter().all(|slot| slot.tag != 0), "a broken run");
        }
    }

    fn put(table: &mut Table, tag: u64, word: u64) {
        loop {
            match table.find(tag) {
                Place::Found(at) => return table.set_word(at, word),
                Place::Vacant(at) => {
                    if table.insert(at, Slot { tag, word }).is_ok() {
                        return;
                    }
                    let homes = table.homes();
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
                } else if table.homes() > 0 && let Place::Found(at) = table.find(tag) {
                    table.remove(at);
                    prop_assert!(map.remove(&tag).is_some());
                }
                check(&table);
            }
            prop_assert_eq!(table.len(), map.len());
            let held: Vec<_> = table.slots.iter().filter(|slot| slot.tag != 0).map(|slot| (slot.tag, slot.word)).collect();
            prop_assert_eq!(held, map.into_iter().collect::<Vec<_>>());
        }
    }
}
