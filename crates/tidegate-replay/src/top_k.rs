//! The heaviest keys of a stream, in bounded memory.

use std::collections::HashMap;
use std::hash::Hash;

use foldhash::fast::RandomState;

/// A table of bounded size. A new key in a full table drops the lighter half first. So no heavy key is lost, and no
/// weight is more than [`TopK::max_undercount`] too small (the bound of lossy counting: G. Manku and R. Motwani,
/// "Approximate Frequency Counts over Data Streams", VLDB 2002).
#[derive(Clone, Debug)]
pub(super) struct TopK<K, V> {
    entries: HashMap<K, V, RandomState>,
    capacity: usize,
    /// The weight of an entry. The light entries are dropped first.
    weight: fn(&V) -> u64,
    /// The number of dropped entries.
    pub(super) evicted: u64,
    /// The largest weight that an entry may lack because it was dropped before.
    pub(super) max_undercount: u64,
}

impl<K: Eq + Hash + Copy + Ord, V> TopK<K, V> {
    pub(super) fn new(capacity: usize, weight: fn(&V) -> u64) -> Self {
        Self { entries: HashMap::default(), capacity: capacity.max(2), weight, evicted: 0, max_undercount: 0 }
    }

    /// Returns the entry of a key, a new one if there is none.
    #[inline]
    pub(super) fn entry(&mut self, key: K, new: impl FnOnce() -> V) -> &mut V {
        if self.entries.len() >= self.capacity && !self.entries.contains_key(&key) {
            self.evict_lighter_half();
        }
        self.entries.entry(key).or_insert_with(new)
    }

    #[cold]
    fn evict_lighter_half(&mut self) {
        let mut weights: Vec<u64> = self.entries.values().map(self.weight).collect();
        let middle = weights.len() / 2;
        let (_, median, _) = weights.select_nth_unstable(middle);
        let median = *median;
        let before = self.entries.len();
        self.entries.retain(|_, value| (self.weight)(value) > median);
        self.evicted += (before - self.entries.len()) as u64;
        self.max_undercount += median;
    }

    /// Returns the `count` entries of the highest rank, the highest first, and equal ones in the order of their keys.
    /// Entries without a rank are left out.
    pub(super) fn top<R: Ord>(&self, count: usize, rank: impl Fn(&K, &V) -> Option<R>) -> Vec<(K, &V)> {
        let mut ranked: Vec<(R, K, &V)> =
            self.entries.iter().filter_map(|(key, value)| Some((rank(key, value)?, *key, value))).collect();
        let order = |one: &(R, K, &V), other: &(R, K, &V)| other.0.cmp(&one.0).then(one.1.cmp(&other.1));
        if ranked.len() > count && count > 0 {
            ranked.select_nth_unstable_by(count - 1, order);
        }
        ranked.truncate(count);
        ranked.sort_unstable_by(order);
        ranked.into_iter().map(|(_, key, value)| (key, value)).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.values()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_table_is_bounded_with_known_error(
            keys in prop::collection::vec((0_u32..6).prop_flat_map(|bits| 0_u32..1 << bits), 0..2000), most in 2_usize..20,
        ) {
            let (mut table, mut exact) = (TopK::new(most, u64::clone), HashMap::<u32, u64>::new());
            for key in keys {
                *table.entry(key, || 0) += 1;
                *exact.entry(key).or_default() += 1;
                prop_assert!(table.len() <= most);
            }
            for (key, weight) in &exact {
                let found = table.entries.get(key).copied().unwrap_or(0);
                prop_assert!(found <= *weight && found + table.max_undercount >= *weight, "{} {} {}", key, found, weight);
            }
            if exact.len() <= most {
                prop_assert_eq!((table.evicted, table.max_undercount), (0, 0));
            }
        }
    }

    #[test]
    fn the_top_is_sorted_with_ties_by_key() {
        let mut table = TopK::new(100, u64::clone);
        for (key, weight) in [(5, 1), (4, 7), (3, 7), (2, 9), (1, 0)] {
            *table.entry(key, || 0) += weight;
        }
        let top = |count| {
            table
                .top(count, |_, weight| (*weight > 0).then_some(*weight))
                .iter()
                .map(|(key, _)| *key)
                .collect::<Vec<_>>()
        };
        assert_eq!(top(3), [2, 3, 4]);
        assert_eq!(top(9), [2, 3, 4, 5]);
        assert_eq!(top(0), [0; 0]);
    }
}
