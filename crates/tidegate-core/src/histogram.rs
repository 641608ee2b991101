//! A histogram of durations, with fixed buckets from 100 µs to 100 s.

use crate::{PER_MILLE, Span};

/// The inclusive upper bounds of the buckets. Longer durations are in one more bucket. Steps of 1, 2.5 and 5 keep the
/// error of an estimated percentile below a factor of 2.5.
pub const BUCKET_BOUNDS: [Span; 19] = {
    let micros: [u64; 19] = [
        100,
        250,
        500,
        1_000,
        2_500,
        5_000,
        10_000,
        25_000,
        50_000,
        100_000,
        250_000,
        500_000,
        1_000_000,
        2_500_000,
        5_000_000,
        10_000_000,
        25_000_000,
        50_000_000,
        100_000_000,
    ];
    let mut bounds = [Span::ZERO; 19];
    let mut index = 0;
    while index < bounds.len() {
        bounds[index] = Span::from_micros(micros[index]);
        index += 1;
    }
    bounds
};

/// The number of buckets, including the one without an upper bound.
pub const BUCKETS: usize = BUCKET_BOUNDS.len() + 1;

/// The number of durations in each bucket, and their sum.
///
/// ```
/// use tidegate_core::{DurationHistogram, Span};
///
/// let mut histogram = DurationHistogram::default();
/// histogram.record(Span::from_millis(3));
/// assert_eq!((histogram.count(), histogram.sum()), (1, Span::from_millis(3)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurationHistogram {
    counts: [u64; BUCKETS],
    sum_micros: u64,
}

impl DurationHistogram {
    /// A histogram of these counts and this sum.
    pub const fn new(counts: [u64; BUCKETS], sum: Span) -> Self {
        Self { counts, sum_micros: sum.as_micros() }
    }

    /// Counts a duration.
    #[inline]
    pub fn record(&mut self, duration: Span) {
        self.counts[bucket_of(duration)] += 1;
        self.sum_micros = self.sum_micros.wrapping_add(duration.as_micros());
    }

    /// The number of durations in each bucket, in the order of [`BUCKET_BOUNDS`], and last those above all bounds.
    pub fn counts(&self) -> &[u64; BUCKETS] {
        &self.counts
    }

    /// The number of all durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all durations.
    pub fn sum(&self) -> Span {
        Span::from_micros(self.sum_micros)
    }

    /// An upper bound of the duration that this many thousandths of all durations don't exceed: the bound of its bucket.
    /// Zero if there are no durations; [`Span::MAX`] if the bucket has no bound.
    pub fn percentile(&self, per_mille: u64) -> Span {
        let rank = self.count().saturating_mul(per_mille).div_ceil(PER_MILLE).max(1);
        let mut cumulative = 0;
        let mut buckets = self.counts.iter().zip(BUCKET_BOUNDS.iter().chain([&Span::MAX]));
        let found = buckets.find(|(count, _)| {
            cumulative += **count;
            cumulative >= rank
        });
        found.map_or(Span::ZERO, |(_, bound)| *bound)
    }
}

/// For each length of a number in bits, the first bucket of numbers of this length, and its bound in microseconds. A
/// number of this length is in this bucket or in the next one, because each bound is at least twice the one before.
const BUCKETS_BY_LENGTH: [(usize, u64); MAX_LENGTH + 1] = {
    let mut buckets = [(0, u64::MAX); MAX_LENGTH + 1];
    let mut length = 0;
    while length <= MAX_LENGTH {
        let least = if length == 0 { 0 } else { 1 << (length - 1) };
        let mut bucket = 0;
        while bucket < BUCKET_BOUNDS.len() && BUCKET_BOUNDS[bucket].as_micros() < least {
            bucket += 1;
        }
        buckets[length] =
            (bucket, if bucket < BUCKET_BOUNDS.len() { BUCKET_BOUNDS[bucket].as_micros() } else { u64::MAX });
        length += 1;
    }
    buckets
};

/// The length in bits from which numbers are above all bounds.
const MAX_LENGTH: usize = 28;

/// The index of a duration's bucket.
#[inline]
pub fn bucket_of(duration: Span) -> usize {
    let length = (u64::BITS - duration.as_micros().leading_zeros()) as usize;
    let (bucket, bound) = BUCKETS_BY_LENGTH[length.min(MAX_LENGTH)];
    if duration.as_micros() > bound { bucket + 1 } else { bucket }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_upper_bounds() {
        let mut histogram = DurationHistogram::default();
        assert_eq!(histogram.percentile(500), Span::ZERO);
        (1..=100).for_each(|millis| histogram.record(Span::from_millis(millis)));
        let percentiles = [1, 500, 510, 900, 1000].map(|rank| histogram.percentile(rank).as_micros() / 1000);
        assert_eq!(percentiles, [1, 50, 100, 100, 100]);
        histogram.record(Span::from_secs(101));
        assert_eq!(histogram.percentile(1000), Span::MAX);
    }

    #[test]
    fn bounds_belong_to_their_buckets() {
        for (index, bound) in BUCKET_BOUNDS.iter().enumerate() {
            assert_eq!(bucket_of(*bound), index);
            assert_eq!(bucket_of(*bound + Span::from_micros(1)), index + 1);
        }
        assert_eq!((bucket_of(Span::ZERO), bucket_of(Span::MAX)), (0, BUCKETS - 1));
    }
}
