//! What was seen of a run.

use hdrhistogram::Histogram;
use tidegate_core::{Span, Time};

use crate::setup::{Setup, TimeRange};

/// The most buckets that a run is divided into; at this bound two become one.
pub const MAX_BUCKETS: usize = 240;
/// The most calls whose delay is kept for the picture; at this bound every other is let go.
pub const MAX_SAMPLES: usize = 4096;
/// How long the stretches are of which the busiest is told.
pub const BUSIEST_WINDOW: Span = Span::from_millis(100);
/// The width of a bucket at first.
const MIN_BUCKET_WIDTH: Span = Span::from_millis(1);

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// It has its reply.
    Succeeded,
    /// It has none, or one that says so.
    Failed,
    /// Its last request was refused for a limit.
    Refused,
    /// Its own side declined to send it: for a limit, a full queue or an open breaker.
    Declined,
}

/// What happened in a stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeBucket {
    /// Calls that began.
    pub offered: u64,
    /// Attempts that were sent.
    pub attempts: u64,
    /// Requests that the service took on.
    pub admitted: u64,
    /// Requests that were refused for a limit or a full queue.
    pub throttled: u64,
    /// Calls that succeeded.
    pub succeeded: u64,
    /// Calls that failed.
    pub failed: u64,
    /// Calls whose last request was refused.
    pub refused: u64,
    /// Calls that their own side declined to send.
    pub declined: u64,
    /// The most requests that waited for a worker.
    pub queue: u32,
    /// The most requests that workers had.
    pub working: u32,
    /// The most calls that waited at clients for their turn.
    pub waiting: u32,
}

impl TimeBucket {
    fn merge(&mut self, other: &Self) {
        self.offered += other.offered;
        self.attempts += other.attempts;
        self.admitted += other.admitted;
        self.throttled += other.throttled;
        self.succeeded += other.succeeded;
        self.failed += other.failed;
        self.refused += other.refused;
        self.declined += other.declined;
        self.queue = self.queue.max(other.queue);
        self.working = self.working.max(other.working);
        self.waiting = self.waiting.max(other.waiting);
    }
}

/// A call in the picture of delays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallSample {
    /// When it ended, from the run's start.
    pub ended_at: Span,
    /// How long it took.
    pub delay: Span,
    /// How it ended.
    pub outcome: CallOutcome,
}

/// What was seen of one load's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Calls that began.
    pub offered: u64,
    /// Calls that succeeded.
    pub succeeded: u64,
}

/// Calls in a stretch that is compared with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RangeCounts {
    from: Span,
    until: Span,
    offered: u64,
    succeeded: u64,
}

impl RangeCounts {
    fn success_share(&self) -> Option<f64> {
        (self.offered > 0).then(|| self.succeeded as f64 / self.offered as f64)
    }
}

/// What was seen of a run. Its size doesn't grow with the number of calls.
#[derive(Clone, Debug)]
pub struct RunStats {
    started_at: Time,
    bucket_width: Span,
    buckets: Vec<TimeBucket>,
    total: TimeBucket,
    loads: Vec<LoadCounts>,
    delays: Histogram<u64>,
    delay_sum: u128,
    samples: Vec<CallSample>,
    /// Of how many calls one is kept.
    sample_stride: u64,
    ended_calls: u64,
    /// The stretch that goodput is taken over, then those before and after what disturbs.
    ranges: [Option<RangeCounts>; 3],
    last_ended_at: Span,
    current_window: u64,
    current_window_requests: u64,
    busiest: u64,
}

impl RunStats {
    pub(crate) fn new(setup: &Setup) -> Self {
        let end = setup.duration;
        let watch =
            |from: Span, until: Span| (from < until).then_some(RangeCounts { from, until, offered: 0, succeeded: 0 });
        let measured = setup.measured_range.unwrap_or(TimeRange { from: Span::ZERO, until: end });
        let measured = watch(measured.from, measured.until);
        let disturbed = setup.disturbance_range();
        let before = disturbed.and_then(|(from, _)| watch(Span::ZERO, from));
        let after = disturbed.and_then(|(_, until)| watch(until + setup.recovery_check.within, end));
        // To a thousandth; nothing takes longer than the run, and a histogram holds 2 at the least.
        let delays = Histogram::new_with_max(end.as_micros().max(2), 3).expect("invariant: these bounds make sense");
        Self {
            started_at: setup.starts_at,
            bucket_width: MIN_BUCKET_WIDTH,
            buckets: Vec::with_capacity(MAX_BUCKETS),
            total: TimeBucket::default(),
            loads: vec![LoadCounts::default(); setup.loads.len()],
            delays,
            delay_sum: 0,
            samples: Vec::new(),
            sample_stride: 1,
            ended_calls: 0,
            ranges: [measured, before, after],
            last_ended_at: Span::ZERO,
            current_window: 0,
            current_window_requests: 0,
            busiest: 0,
        }
    }

    /// Notes something of the present moment.
    pub(crate) fn record(&mut self, now: Time, note: impl Fn(&mut TimeBucket)) {
        let at = now.since(self.started_at);
        let mut index = (at.as_micros() / self.bucket_width.as_micros()) as usize;
        while index >= MAX_BUCKETS {
            self.double_bucket_width();
            index = (at.as_micros() / self.bucket_width.as_micros()) as usize;
        }
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, TimeBucket::default());
        }
        note(&mut self.buckets[index]);
        note(&mut self.total);
    }

    fn double_bucket_width(&mut self) {
        self.bucket_width = self.bucket_width.times(2);
        for index in 0..self.buckets.len().div_ceil(2) {
            let mut both = self.buckets[2 * index];
            if let Some(second) = self.buckets.get(2 * index + 1) {
                both.merge(second);
            }
            self.buckets[index] = both;
        }
        self.buckets.truncate(self.buckets.len().div_ceil(2));
    }

    pub(crate) fn record_start(&mut self, load: usize, now: Time) {
        self.record(now, |bucket| bucket.offered += 1);
        self.loads[load].offered += 1;
        let at = now.since(self.started_at);
        for watched in self.ranges.iter_mut().flatten().filter(|watched| (watched.from..watched.until).contains(&at)) {
            watched.offered += 1;
        }
    }

    pub(crate) fn record_end(&mut self, load: usize, begun_at: Time, end: CallOutcome, now: Time) {
        let (at, delay) = (now.since(self.started_at), now.since(begun_at));
        self.record(now, |bucket| match end {
            CallOutcome::Succeeded => bucket.succeeded += 1,
            CallOutcome::Failed => bucket.failed += 1,
            CallOutcome::Refused => bucket.refused += 1,
            CallOutcome::Declined => bucket.declined += 1,
        });
        if end == CallOutcome::Succeeded {
            self.loads[load].succeeded += 1;
            self.delays.saturating_record(delay.as_micros());
            self.delay_sum += u128::from(delay.as_micros());
            for watched in
                self.ranges.iter_mut().flatten().filter(|watched| (watched.from..watched.until).contains(&at))
            {
                watched.succeeded += 1;
            }
        }
        self.last_ended_at = at;
        if self.ended_calls.is_multiple_of(self.sample_stride) {
            if self.samples.len() == MAX_SAMPLES {
                let mut number = 0_usize;
                self.samples.retain(|_| {
                    number += 1;
                    number % 2 == 1
                });
                self.sample_stride *= 2;
            }
            if self.ended_calls.is_multiple_of(self.sample_stride) {
                self.samples.push(CallSample { ended_at: at, delay, outcome: end });
            }
        }
        self.ended_calls += 1;
    }

    /// A request has come to the service.
    pub(crate) fn record_arrival(&mut self, now: Time) {
        let slot = now.since(self.started_at).as_micros() / BUSIEST_WINDOW.as_micros();
        if slot != self.current_window {
            (self.current_window, self.current_window_requests) = (slot, 0);
        }
        self.current_window_requests += 1;
        self.busiest = self.busiest.max(self.current_window_requests);
    }

    /// What happened in each stretch of [`RunStats::bucket_width`].
    pub fn buckets(&self) -> &[TimeBucket] {
        &self.buckets
    }

    /// The same with so many buckets put together that at most `most` are left, and how long each is.
    pub(crate) fn merged_buckets(&self, max_buckets: usize) -> (Vec<TimeBucket>, Span) {
        let group_size = self.buckets.len().div_ceil(max_buckets).max(1);
        let merged = self.buckets.chunks(group_size).map(|chunk| {
            chunk.iter().fold(TimeBucket::default(), |mut all, bucket| {
                all.merge(bucket);
                all
            })
        });
        (merged.collect(), self.bucket_width.times(group_size as u64))
    }

    /// How long the buckets are.
    pub fn bucket_width(&self) -> Span {
        self.bucket_width
    }

    /// What happened in all.
    pub fn total(&self) -> &TimeBucket {
        &self.total
    }

    /// What was seen of each load, in the order of the setup.
    pub fn loads(&self) -> &[LoadCounts] {
        &self.loads
    }

    /// Calls for the picture of delays, evenly thinned out.
    pub fn samples(&self) -> &[CallSample] {
        &self.samples
    }

    /// When the last call ended, from the run's start.
    pub fn last_ended_at(&self) -> Span {
        self.last_ended_at
    }

    /// The most requests that came to the service within [`BUSIEST_WINDOW`].
    pub fn busiest(&self) -> u64 {
        self.busiest
    }

    /// Calls that succeeded each second, over the stretch that is measured.
    pub fn goodput(&self) -> f64 {
        self.ranges[0].map_or(0.0, |watched| {
            // A run may end before its time.
            let until = watched.until.min(self.last_ended_at.max(watched.from + Span::from_micros(1)));
            let secs = if watched.from.is_zero() { until } else { watched.until - watched.from };
            watched.succeeded as f64 / (secs.as_micros() as f64 / 1e6)
        })
    }

    /// Which shares of calls succeeded before the first disturbance and after the last; `None` without one, or without
    /// calls before or after it.
    pub fn recovery_shares(&self) -> Option<(f64, f64)> {
        Some((self.ranges[1]?.success_share()?, self.ranges[2]?.success_share()?))
    }

    /// The mean delay of calls that succeeded, if any did.
    pub fn mean_delay(&self) -> Option<Span> {
        let mean = self.delay_sum.checked_div(u128::from(self.total.succeeded))?;
        Some(Span::from_micros(u64::try_from(mean).unwrap_or(u64::MAX)))
    }

    /// The delay that this share of successful calls didn't exceed, if there are any.
    pub fn delay_quantile(&self, share: f64) -> Option<Span> {
        (self.total.succeeded > 0).then(|| Span::from_micros(self.delays.value_at_quantile(share)))
    }
}
