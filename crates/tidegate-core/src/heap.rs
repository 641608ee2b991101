//! A priority queue over small indexes that can also remove or move an entry that isn't the first.

use alloc::vec::Vec;

/// The children of a node. With 16 bytes each they share a cache line, and the heap is half as deep as a binary one.
const ARITY: usize = 4;
const ABSENT: u32 = u32::MAX;

/// Indexes below `u32::MAX`, ordered by a key, ties by the index. All changes are O(log n). Memory grows with the
/// largest index and is kept, so a heap that was as full before allocates nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct IndexHeap<K> {
    entries: Vec<(K, u32)>,
    positions: Vec<u32>,
}

impl<K: Copy + Ord> IndexHeap<K> {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(crate) fn first(&self) -> Option<(K, u32)> {
        self.entries.first().copied()
    }

    /// The entry that comes after the first.
    pub(crate) fn second(&self) -> Option<(K, u32)> {
        // It is a child of the first.
        self.entries.iter().skip(1).take(ARITY).min().copied()
    }

    /// The key and index at a position below [`IndexHeap::len`]. The order of positions is unspecified.
    pub(crate) fn nth(&self, place: usize) -> Option<(K, u32)> {
        self.entries.get(place).copied()
    }

    /// The key of an index. `None` if the index isn't in the heap.
    pub(crate) fn key(&self, index: u32) -> Option<K> {
        self.position(index).map(|place| self.entries[place].0)
    }

    pub(crate) fn set(&mut self, index: u32, key: K) {
        let place = self.position(index).unwrap_or_else(|| {
            if self.positions.len() <= index as usize {
                self.positions.resize(index as usize + 1, ABSENT);
            }
            self.entries.push((key, index));
            self.entries.len() - 1
        });
        self.sift(place, (key, index));
    }

    /// Removes an index. Returns false if it isn't in the heap.
    pub(crate) fn remove(&mut self, index: u32) -> bool {
        let Some(place) = self.position(index) else { return false };
        self.positions[index as usize] = ABSENT;
        if let Some(last) = self.entries.pop()
            && place < self.entries.len()
        {
            self.sift(place, last);
        }
        true
    }

    fn position(&self, index: u32) -> Option<usize> {
        self.positions.get(index as usize).filter(|&&place| place != ABSENT).map(|&place| place as usize)
    }

    /// Moves an entry up or down from a free position to the position that its key requires.
    fn sift(&mut self, mut place: usize, entry: (K, u32)) {
        while place > 0 {
            let parent = (place - 1) / ARITY;
            if self.entries[parent] <= entry {
                break;
            }
            self.write_entry(place, self.entries[parent]);
            place = parent;
        }
        loop {
            let children = place * ARITY + 1..self.entries.len().min(place * ARITY + 1 + ARITY);
            let Some(smallest_child) = children.min_by_key(|&child| self.entries[child]) else { break };
            if self.entries[smallest_child] >= entry {
                break;
            }
            self.write_entry(place, self.entries[smallest_child]);
            place = smallest_child;
        }
        self.write_entry(place, entry);
    }

    fn write_entry(&mut self, place: usize, entry: (K, u32)) {
        self.entries[place] = entry;
        self.positions[entry.1 as usize] = place as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};
    use std::collections::BTreeMap;

    #[test]
    fn the_heap_agrees_with_a_sorted_map() {
        let mut rng = SmallRng::seed_from_u64(3);
        let (mut heap, mut keys) = (IndexHeap::default(), BTreeMap::new());
        for step in 0..60_000 {
            let index = rng.random_range(0..200_u32);
            // The heap alternately grows and shrinks, so that all depths are tested.
            if rng.random_ratio(if step / 3_000 % 2 == 0 { 2 } else { 1 }, 3) {
                let key = rng.random_range(0..100_u64);
                heap.set(index, key);
                keys.insert(index, key);
            } else {
                assert_eq!(heap.remove(index), keys.remove(&index).is_some());
            }
            let mut sorted: std::vec::Vec<_> = keys.iter().map(|(&index, &key)| (key, index)).collect();
            sorted.sort_unstable();
            assert_eq!((heap.first(), heap.second()), (sorted.first().copied(), sorted.get(1).copied()));
            assert_eq!(heap.key(index), keys.get(&index).copied());
            assert_eq!((heap.len(), heap.is_empty()), (keys.len(), keys.is_empty()));
        }
        let mut listed: std::vec::Vec<_> = (0..heap.len()).filter_map(|place| heap.nth(place)).collect();
        listed.sort_unstable_by_key(|&(_, index)| index);
        assert!(listed.into_iter().eq(keys.into_iter().map(|(index, key)| (key, index))));
        assert_eq!(heap.nth(heap.len()), None);
    }
}
