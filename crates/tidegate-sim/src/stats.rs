//! The statistics of a run.

use hdrhistogram::Histogram;
use tidegate_core::{Span, Time};

use crate::setup::{Setup, TimeRange};

/// The largest number of buckets of a run. Beyond it, pairs of buckets are merged.
pub const MAX_BUCKETS: usize = 240;
/// The largest number of calls that keep their delay for the picture. Beyond it, every other one is dropped.
pub const MAX_SAMPLES: usize = 4096;
/// The length of the windows of which [`RunStats::busiest`] finds the busiest.
pub const BUSIEST_WINDOW: Span = Span::from_millis(100);
/// The width of a bucket at the run's start.
const MIN_BUCKET_WIDTH: Span = Span::from_millis(1);

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// It has a good reply.
    Succeeded,
    /// It has no reply, or a reply with an error.
    Failed,
    /// Its last request was refused for a limit.
    Refused,
    /// Its own client declined to send it: for a limit, a full queue or an open breaker.
    Declined,
}

/// The counts of a range of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeBucket {
    /// Calls that began.
    pub offered: u64,
    /// Attempts that were sent.
    pub attempts: u64,
    /// Requests that the service accepted.
    pub admitted: u64,
    /// Requests that were refused for a limit or a full queue.
    pub throttled: u64,
    /// Calls that succeeded.
    pub succeeded: u64,
    /// Calls that failed.
    pub failed: u64,
    /// Calls with a refused last request.
    pub refused: u64,
    /// Calls that their own client declined to send.
    pub declined: u64,
    /// The largest number of requests that waited for a worker.
    pub queue: u32,
    /// The largest number of requests that workers had.
    pub working: u32,
    /// The largest number of calls that waited in a client for their turn.
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
    /// The time of its end, from the run's start.
    pub ended_at: Span,
    /// The time from its start to its end.
    pub delay: Span,
    /// The outcome.
    pub outcome: CallOutcome,
}

/// The counts of one load's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadCounts {
    /// Calls that began.
    pub offered: u64,
    /// Calls that succeeded.
    pub succeeded: u64,
}

/// The counts of a range of time that is compared with another.
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

/// The statistics of a run. Their size doesn't grow with the number of calls.
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
    /// One of this many calls is kept.
    sample_stride: u64,
    ended_calls: u64,
    /// The range of the goodput, then those before and after the disturbances.
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
        // Three significant digits. Nothing takes longer than the run, and a histogram's maximum is at least 2.
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

    /// Records something at the present moment, in its bucket and in the total.
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

    /// Counts a request that has arrived at the service.
    pub(crate) fn record_arrival(&mut self, now: Time) {
        let slot = now.since(self.started_at).as_micros() / BUSIEST_WINDOW.as_micros();
        if slot != self.current_window {
            (self.current_window, self.current_window_requests) = (slot, 0);
        }
        self.current_window_requests += 1;
        self.busiest = self.busiest.max(self.current_window_requests);
    }

    /// Returns the counts of each range of [`RunStats::bucket_width`].
    pub fn buckets(&self) -> &[TimeBucket] {
        &self.buckets
    }

    /// Returns at most `max_buckets` buckets, merged from neighbours, and the width of each.
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

    /// Returns the width of the buckets.
    pub fn bucket_width(&self) -> Span {
        self.bucket_width
    }

    /// Returns the counts of the whole run.
    pub fn total(&self) -> &TimeBucket {
        &self.total
    }

    /// Returns the counts of each load, in the order of the setup.
    pub fn loads(&self) -> &[LoadCounts] {
        &self.loads
    }

    /// Returns the calls for the picture of delays, evenly thinned out.
    pub fn samples(&self) -> &[CallSample] {
        &self.samples
    }

    /// Returns the time of the last call's end, from the run's start.
    pub fn last_ended_at(&self) -> Span {
        self.last_ended_at
    }

    /// Returns the largest number of requests that arrived at the service within one [`BUSIEST_WINDOW`].
    pub fn busiest(&self) -> u64 {
        self.busiest
    }

    /// Returns the number of calls that succeeded per second, over the measured range.
    pub fn goodput(&self) -> f64 {
        self.ranges[0].map_or(0.0, |watched| {
            // A run may end before its duration.
            let until = watched.until.min(self.last_ended_at.max(watched.from + Span::from_micros(1)));
            let secs = if watched.from.is_zero() { until } else { watched.until - watched.from };
            watched.succeeded as f64 / (secs.as_micros() as f64 / 1e6)
        })
    }

    /// Returns the shares of calls that succeeded before the first disturbance and after the last. `None` without a
    /// disturbance, or without calls before or after it.
    pub fn recovery_shares(&self) -> Option<(f64, f64)> {
        Some((self.ranges[1]?.success_share()?, self.ranges[2]?.success_share()?))
    }

    /// Returns the mean delay of successful calls; `None` if there are none.
    pub fn mean_delay(&self) -> Option<Span> {
        let mean = self.delay_sum.checked_div(u128::from(self.total.succeeded))?;
        Some(Span::from_micros(u64::try_from(mean).unwrap_or(u64::MAX)))
    }

    /// Returns the delay that this share of successful calls didn't exceed; `None` if there are none.
    pub fn delay_quantile(&self, share: f64) -> Option<Span> {
        (self.total.succeeded > 0).then(|| Span::from_micros(self.delays.value_at_quantile(share)))
    }
}
