//! Counters that many threads increment at the same time.

use std::array;
use std::cell::Cell;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tidegate_core::histogram::{BUCKETS, bucket_of};
use tidegate_core::{DurationHistogram, Span};

/// The maximum number of shards.
const MAX_SHARDS: usize = 16;
/// The maximum size of all shards together, if there is more than one.
const MAX_BYTES: usize = 4 << 20;
const COUNTERS_PER_LINE: usize = 8;

/// The counters that share a cache line.
#[derive(Debug, Default)]
#[repr(align(64))]
struct CacheLine([AtomicU64; COUNTERS_PER_LINE]);

/// A fixed number of counters, which start at 0.
///
/// There are several shards of them, and each thread increments those of its own shard, so that threads on different
/// processors rarely wait for each other's cache lines. An increment is never lost.
///
/// ```
/// use tidegate_runtime::counters::Counters;
///
/// let counters = Counters::new(2);
/// counters.add(1, 5);
/// assert_eq!((counters.get(0), counters.get(1)), (0, 5));
/// ```
///
/// Cheap to clone; all clones are the same counters.
#[derive(Clone, Debug)]
pub struct Counters {
    lines: Arc<[CacheLine]>,
    len: usize,
    lines_per_shard: usize,
    shard_mask: usize,
}

impl Counters {
    /// Returns `len` counters. They take a multiple of 64 bytes for each processor, up to 16 processors and 4 MiB.
    pub fn new(len: usize) -> Self {
        let lines_per_shard = len.div_ceil(COUNTERS_PER_LINE);
        let processors = std::thread::available_parallelism().map_or(1, usize::from).next_power_of_two();
        let mut shards = processors.min(MAX_SHARDS);
        while shards > 1 && shards * lines_per_shard * size_of::<CacheLine>() > MAX_BYTES {
            shards /= 2;
        }
        let lines = iter::repeat_with(CacheLine::default).take(shards * lines_per_shard).collect();
        Self { lines, len, lines_per_shard, shard_mask: shards - 1 }
    }

    /// Adds to a counter. An index that doesn't exist is ignored.
    #[inline]
    pub fn add(&self, index: usize, amount: u64) {
        if let Some(counter) = self.counter(thread_number() & self.shard_mask, index) {
            counter.fetch_add(amount, Ordering::Relaxed);
        }
    }

    /// The value of a counter. Increments at the same time may be in it or not.
    pub fn get(&self, index: usize) -> u64 {
        let counters = (0..=self.shard_mask).filter_map(|shard| self.counter(shard, index));
        counters.fold(0, |sum, counter| sum.wrapping_add(counter.load(Ordering::Relaxed)))
    }

    /// True if there is no other clone, so that nothing else can increment them.
    pub fn is_only_clone(&mut self) -> bool {
        // Unlike the number of clones, this also waits for the increments of a clone that was dropped.
        Arc::get_mut(&mut self.lines).is_some()
    }

    /// True if both are the same counters.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.lines, &other.lines)
    }

    #[inline]
    fn counter(&self, shard: usize, index: usize) -> Option<&AtomicU64> {
        if index >= self.len {
            return None;
        }
        let line = self.lines.get(shard * self.lines_per_shard + index / COUNTERS_PER_LINE)?;
        Some(&line.0[index % COUNTERS_PER_LINE])
    }
}

/// A [`DurationHistogram`] that many threads record in.
#[derive(Debug)]
pub struct SharedHistogram(Counters);

impl Default for SharedHistogram {
    fn default() -> Self {
        Self(Counters::new(BUCKETS + 1))
    }
}

impl SharedHistogram {
    /// Counts a duration.
    #[inline]
    pub fn record(&self, duration: Span) {
        self.0.add(bucket_of(duration), 1);
        self.0.add(BUCKETS, duration.as_micros());
    }

    /// The durations so far.
    pub fn snapshot(&self) -> DurationHistogram {
        DurationHistogram::new(array::from_fn(|bucket| self.0.get(bucket)), Span::from_micros(self.0.get(BUCKETS)))
    }
}

/// The number of this thread, in the order in which threads ask for it.
#[inline]
fn thread_number() -> usize {
    const UNKNOWN: usize = usize::MAX;
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: Cell<usize> = const { Cell::new(UNKNOWN) };
    }
    NUMBER.with(|number| {
        if number.get() == UNKNOWN {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        number.get()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_increment_of_a_thread_is_lost() {
        let (counters, histogram) = (Counters::new(9), SharedHistogram::default());
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    for _ in 0..1_000 {
                        counters.add(8, 3);
                        histogram.record(Span::from_millis(2));
                    }
                });
            }
        });
        assert_eq!((counters.get(0), counters.get(8)), (0, 60_000));
        let recorded = histogram.snapshot();
        assert_eq!((recorded.count(), recorded.sum()), (20_000, Span::from_secs(40)));
    }

    #[test]
    fn many_counters_share_fewer_shards() {
        let many = Counters::new(1 << 20);
        assert_eq!(many.shard_mask, 0);
        many.add((1 << 20) - 1, 1);
        assert_eq!(many.get((1 << 20) - 1), 1);
    }

    #[test]
    fn an_unknown_index_is_ignored() {
        for len in [0, 5] {
            let counters = Counters::new(len);
            for index in [len, len + 3, 8] {
                counters.add(index, 1);
                std::thread::scope(|scope| scope.spawn(|| counters.add(index, 1)).join()).expect("no panic");
            }
            assert!((0..16).all(|index| counters.get(index) == 0));
        }
    }
}
