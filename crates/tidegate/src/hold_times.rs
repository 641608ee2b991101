//! The times for which calls hold their permits: an estimate of the wait for the next permit, and of the end of a call that
//! nobody waits for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tidegate_core::{Batch, Concurrency, Limit, LimitId, LimitKind, Limits, Outcomes, RecentMaximum, Span, Time};

/// The maximum number of permits whose start is remembered. Further ones aren't measured.
const MAX_MEASURED: usize = 1024;
/// The time between two searches for permits that were lost, or given back to another process.
const PURGE_INTERVAL: Span = Span::from_secs(1);
/// The parts of the lease by which hold times are counted.
const BUCKETS: usize = 64;
/// At this number of hold times, the earlier ones count half.
const MAX_SAMPLES: u32 = 256;
/// The shortest estimate.
const MIN_ESTIMATE: Span = Span::from_secs(1);

/// The hold times of all limits on calls in flight, as this process has seen them.
#[derive(Debug)]
pub(crate) struct HoldTimes {
    limits: Box<[Arc<LimitHoldTimes>]>,
    longest_lease: Span,
    measured: Arc<Mutex<MeasuredPermits>>,
}

#[derive(Debug, Default)]
struct MeasuredPermits {
    /// The start of each permit, by its holder.
    starts: HashMap<u64, Time>,
    purged_at: Time,
}

#[derive(Debug)]
struct LimitHoldTimes {
    id: LimitId,
    lease: Span,
    samples: Mutex<Samples>,
    /// The 90th percentile of hold times in microseconds, at most the lease. [`u64::MAX`] if none is known.
    estimate: AtomicU64,
}

/// The hold times of a limit.
#[derive(Debug)]
struct Samples {
    histogram: [u32; BUCKETS],
    longest: RecentMaximum,
}

impl HoldTimes {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self { limits: Box::default(), longest_lease: Span::ZERO, measured: Arc::default() }.next(limits)
    }

    /// The hold times of these limits. A limit that had the same id and lease keeps its own.
    pub(crate) fn next(&self, limits: &Limits) -> Self {
        let concurrency = |(id, limit): (LimitId, &Limit)| {
            let LimitKind::Concurrency(concurrency) = limit.kind() else { return None };
            let lease = concurrency.lease();
            let known = self.limits.iter().find(|known| known.id == id && known.lease == lease);
            Some(known.map_or_else(|| Arc::new(LimitHoldTimes::new(id, lease)), Arc::clone))
        };
        let limits: Box<[Arc<LimitHoldTimes>]> = limits.iter().filter_map(concurrency).collect();
        let longest_lease = limits.iter().map(|limit| limit.lease).max().unwrap_or(Span::ZERO);
        Self { limits, longest_lease, measured: Arc::clone(&self.measured) }
    }

    /// True if the plan has no limit on calls in flight.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.limits.is_empty()
    }

    /// The limits on calls in flight.
    pub(crate) fn limits(&self) -> impl Iterator<Item = LimitId> {
        self.limits.iter().map(|limit| limit.id)
    }

    /// Begins to measure the permit of this holder.
    pub(crate) fn begin(&self, holder: u64, now: Time) {
        let MeasuredPermits { starts, purged_at } = &mut *self.measured.lock();
        if starts.len() >= MAX_MEASURED && now.since(*purged_at) >= PURGE_INTERVAL {
            // A time longer than the lease doesn't change the estimate.
            starts.retain(|_, at| now.since(*at) < self.longest_lease);
            *purged_at = now;
        }
        if starts.len() < MAX_MEASURED {
            starts.insert(holder, now);
        }
    }

    /// Records that the holder of a batch has given its permits back.
    pub(crate) fn end(&self, batch: &Batch, now: Time) {
        if let Some(start) = self.take_start(batch.holder()) {
            for limit in batch.ops().iter().filter_map(|op| self.limit(op.limit)) {
                limit.record(now.since(start), now);
            }
        }
    }

    /// Measures the permit of this holder no further. Returns its start, if it was measured.
    pub(crate) fn take_start(&self, holder: u64) -> Option<Time> {
        self.measured.lock().starts.remove(&holder)
    }

    /// The longest recent hold time of the limits of a batch: of the last minutes in which calls have ended. In the first
    /// of these minutes it is the lease.
    pub(crate) fn longest(&self, batch: &Batch) -> Span {
        let limits = batch.ops().iter().filter_map(|op| self.limit(op.limit));
        limits.map(|limit| limit.samples.lock().longest.get()).max().unwrap_or(self.longest_lease)
    }

    /// The time that calls under a limit usually take: the 90th percentile, or the lease if none is known.
    pub(crate) fn usual(&self, id: LimitId) -> Span {
        self.limit(id).map_or(self.longest_lease, |limit| {
            Span::from_micros(limit.estimate.load(Ordering::Relaxed)).min(limit.lease)
        })
    }

    /// Replaces the wait for the end of a lease by the estimate, if that is shorter. A block isn't shortened.
    pub(crate) fn estimate_waits(&self, batch: &Batch, outcomes: &mut Outcomes) {
        let now = outcomes.now();
        for (op, outcome) in batch.ops().iter().zip(outcomes.list_mut()) {
            // A client beyond its share waits for its own calls.
            if Concurrency::is_refused_cost(op.cost) {
                continue;
            }
            let estimate = self.limit(op.limit).map_or(u64::MAX, |limit| limit.estimate.load(Ordering::Relaxed));
            if outcome.admission.refuses() && estimate != u64::MAX && !outcome.retry_at.is_never() {
                let freed_at = now + Span::from_micros(estimate);
                outcome.retry_at = outcome.retry_at.min(freed_at.max(outcome.block_until));
            }
        }
    }

    fn limit(&self, id: LimitId) -> Option<&LimitHoldTimes> {
        self.limits.iter().map(Arc::as_ref).find(|limit| limit.id == id)
    }
}

impl LimitHoldTimes {
    fn new(id: LimitId, lease: Span) -> Self {
        let samples = Samples { histogram: [0; BUCKETS], longest: RecentMaximum::new(lease) };
        Self { id, lease, samples: Mutex::new(samples), estimate: AtomicU64::new(u64::MAX) }
    }

    fn record(&self, held: Span, now: Time) {
        let width = (self.lease.as_micros() / BUCKETS as u64).max(1);
        let bucket = usize::try_from(held.as_micros() / width).unwrap_or(usize::MAX).min(BUCKETS - 1);
        let Samples { histogram, longest } = &mut *self.samples.lock();
        longest.record(held.min(self.lease), now);
        histogram[bucket] += 1;
        let total: u32 = histogram.iter().sum();
        let mut rest = total.div_ceil(10);
        // The bucket in which the longest tenth begins, from the longest times downwards.
        let percentile = (0..BUCKETS).rev().find(|bucket| {
            rest = rest.saturating_sub(histogram[*bucket]);
            rest == 0
        });
        let micros = width * (percentile.unwrap_or(BUCKETS - 1) as u64 + 1);
        let estimate = micros.max(MIN_ESTIMATE.as_micros()).min(self.lease.as_micros());
        self.estimate.store(estimate, Ordering::Relaxed);
        if total >= MAX_SAMPLES {
            histogram.iter_mut().for_each(|count| *count /= 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::{Key, Limit, Op, Verb};

    /// The estimate in milliseconds after permits were held for these many seconds each.
    fn estimate(held: &[u64]) -> Option<u64> {
        let kind = LimitKind::Concurrency(Concurrency::new(1, Span::from_secs(30)).unwrap());
        let limits = Limits::new(vec![Limit::new(kind)]).unwrap();
        let times = HoldTimes::new(&limits);
        let limit = LimitId::from_index(0).unwrap();
        for (holder, secs) in (0..).zip(held) {
            let mut batch = Batch::new(holder);
            batch.push(Op::new(limit, Verb::Release, Key::default(), 1)).unwrap();
            times.begin(holder, Time::ZERO);
            times.end(&batch, Time::from_secs(*secs));
            // A second release measures nothing.
            times.end(&batch, Time::from_secs(3_000));
        }
        let estimate = times.limit(limit).unwrap().estimate.load(Ordering::Relaxed);
        (estimate != u64::MAX).then_some(estimate / 1_000)
    }

    #[test]
    fn the_estimate_is_the_90th_percentile() {
        assert_eq!(estimate(&[]), None);
        assert_eq!(estimate(&[0]), Some(1_000), "at least a second");
        assert_eq!(estimate(&[50]), Some(30_000), "at most the lease");
        let (mut nine, mut eight) = ([3_u64; 10], [3_u64; 10]);
        (nine[9], eight[8], eight[9]) = (20, 20, 20);
        assert_eq!(estimate(&nine), Some(20_156), "one of ten is the longest tenth");
        assert_eq!(estimate(&[&nine[..9], &nine[..9], &nine[8..]].concat()), Some(3_281));
        assert_eq!(estimate(&eight), Some(20_156));
    }

    #[test]
    fn recent_hold_times_outweigh_old_ones() {
        let mut held = vec![20; 1_000];
        held.extend([1; 1_000]);
        assert_eq!(estimate(&held), Some(1_406));
    }

    #[test]
    fn measured_permits_are_bounded() {
        let kind = LimitKind::Concurrency(Concurrency::new(1, Span::from_secs(30)).unwrap());
        let times = HoldTimes::new(&Limits::new(vec![Limit::new(kind)]).unwrap());
        let begin = |holder, secs| {
            times.begin(holder, Time::from_secs(secs));
            times.measured.lock().starts.len()
        };
        for holder in 0..5_000 {
            begin(holder, 100);
        }
        assert_eq!(begin(5_000, 129), MAX_MEASURED);
        assert_eq!(begin(5_001, 130), 1, "permits that were lost make room");
    }
}
