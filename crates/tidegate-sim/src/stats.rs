//! The statistics of a run.

use hdrhistogram::Histogram;
use tidegate_core::{Class, Span, Time};

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

impl CallOutcome {
    /// Returns the outcome of a call that ends after a reply of this class.
    pub(crate) fn of_last_reply(class: Class) -> Self {
        match class {
            Class::Success => Self::Succeeded,
            Class::Throttled => Self::Refused,
            _ => Self::Failed,
        }
    }
}

/// The counts of a range of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
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
    fn merged(buckets: &[Self]) -> Self {
        buckets.iter().fold(Self::default(), |sum, bucket| Self {
            offered: sum.offered + bucket.offered,
            attempts: sum.attempts + bucket.attempts,
            admitted: sum.admitted + bucket.admitted,
            throttled: sum.throttled + bucket.throttled,
            succeeded: sum.succeeded + bucket.succeeded,
            failed: sum.failed + bucket.failed,
            refused: sum.refused + bucket.refused,
            declined: sum.declined + bucket.declined,
            queue: sum.queue.max(bucket.queue),
            working: sum.working.max(bucket.working),
            waiting: sum.waiting.max(bucket.waiting),
        })
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

impl LoadCounts {
    fn success_share(self) -> Option<f64> {
        (self.offered > 0).then(|| self.succeeded as f64 / self.offered as f64)
    }
}

/// The counts of the measured range that tell how well a service was used.
#[derive(Clone, Debug)]
pub struct MeasuredStats {
    /// Attempts that ended.
    pub attempts: u64,
    /// Attempts that ended without success.
    pub wasted: u64,
    /// The successful calls of each client.
    pub successes: Vec<u32>,
    delays: Histogram<u64>,
}

impl MeasuredStats {
    /// Returns the delay that this share of the successful calls didn't exceed; `None` if there are none.
    pub fn delay_quantile(&self, share: f64) -> Option<Span> {
        (!self.delays.is_empty()).then(|| Span::from_micros(self.delays.value_at_quantile(share)))
    }

    /// Returns the fairness between clients, by their successful calls: 1 if all have as many, 1/n if one of n has all
    /// (R. Jain, D. Chiu and W. Hawe, 1984). `None` if there are none.
    pub fn fairness(&self) -> Option<f64> {
        let successes = self.successes.iter().map(|count| f64::from(*count));
        let (sum, squares) = successes.fold((0.0, 0.0), |(sum, squares), count| (sum + count, squares + count * count));
        (sum > 0.0).then(|| sum * sum / (squares * self.successes.len() as f64))
    }
}

/// The statistics of a run. Their size doesn't grow with the number of calls.
#[derive(Clone, Debug)]
pub struct RunStats {
    started_at: Time,
    /// The width of the buckets.
    pub bucket_width: Span,
    /// The counts of each range of [`RunStats::bucket_width`].
    pub buckets: Vec<TimeBucket>,
    /// The counts of the whole run.
    pub total: TimeBucket,
    /// The counts of each load, in the order of the setup.
    pub loads: Vec<LoadCounts>,
    /// The counts of the measured range.
    pub measured: MeasuredStats,
    delays: Histogram<u64>,
    delay_sum: u128,
    /// The calls for the picture of delays, evenly thinned out.
    pub samples: Vec<CallSample>,
    /// One of this many calls is kept.
    sample_stride: u64,
    ended_calls: u64,
    /// The range of the goodput, then those before and after the disturbances, with the counts of their calls.
    ranges: [Option<(TimeRange, LoadCounts)>; 3],
    /// The time of the last call's end, from the run's start.
    pub last_ended_at: Span,
    current_window: u64,
    current_window_requests: u64,
    /// The largest number of requests that arrived at the service within one [`BUSIEST_WINDOW`].
    pub busiest: u64,
}

impl RunStats {
    pub(crate) fn new(setup: &Setup) -> Self {
        let end = setup.duration;
        let range =
            |from: Span, until: Span| (from < until).then_some((TimeRange { from, until }, LoadCounts::default()));
        let measured = setup.measured_range.unwrap_or(TimeRange { from: Span::ZERO, until: end });
        let disturbed = setup.disturbance_range();
        let before = disturbed.and_then(|(from, _)| range(Span::ZERO, from));
        let after = disturbed.and_then(|(_, until)| range(until + setup.recovery_check.within, end));
        // Three significant digits. Nothing takes longer than the run, and a histogram's maximum is at least 2.
        let delays = Histogram::new_with_max(end.as_micros().max(2), 3).expect("invariant: these bounds make sense");
        Self {
            started_at: setup.starts_at,
            bucket_width: MIN_BUCKET_WIDTH,
            buckets: Vec::with_capacity(MAX_BUCKETS),
            total: TimeBucket::default(),
            loads: vec![LoadCounts::default(); setup.loads.len()],
            measured: MeasuredStats {
                attempts: 0,
                wasted: 0,
                successes: vec![0; setup.loads.iter().map(|load| load.clients as usize).sum()],
                delays: delays.clone(),
            },
            delays,
            delay_sum: 0,
            samples: Vec::new(),
            sample_stride: 1,
            ended_calls: 0,
            ranges: [range(measured.from, measured.until), before, after],
            last_ended_at: Span::ZERO,
            current_window: 0,
            current_window_requests: 0,
            busiest: 0,
        }
    }

    /// Records something at the present moment, in its bucket and in the total.
    pub(crate) fn record(&mut self, now: Time, update: impl Fn(&mut TimeBucket)) {
        let at = now.since(self.started_at);
        while at >= self.bucket_width.times(MAX_BUCKETS as u64) {
            self.bucket_width = self.bucket_width.times(2);
            self.buckets = self.buckets.chunks(2).map(TimeBucket::merged).collect();
        }
        let index = (at.as_micros() / self.bucket_width.as_micros()) as usize;
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, TimeBucket::default());
        }
        update(&mut self.buckets[index]);
        update(&mut self.total);
    }

    pub(crate) fn record_start(&mut self, load: usize, now: Time) {
        self.record(now, |bucket| bucket.offered += 1);
        self.loads[load].offered += 1;
        let at = now.since(self.started_at);
        self.range_counts_at(at).for_each(|counts| counts.offered += 1);
    }

    /// Returns the counts of the ranges that contain this time.
    fn range_counts_at(&mut self, at: Span) -> impl Iterator<Item = &mut LoadCounts> {
        self.ranges.iter_mut().flatten().filter(move |(range, _)| range.contains(at)).map(|(_, counts)| counts)
    }

    fn is_measured(&self, now: Time) -> bool {
        self.ranges[0].is_some_and(|(range, _)| range.contains(now.since(self.started_at)))
    }

    pub(crate) fn record_attempt_end(&mut self, has_succeeded: bool, now: Time) {
        if self.is_measured(now) {
            self.measured.attempts += 1;
            self.measured.wasted += if has_succeeded { 0 } else { 1 };
        }
    }

    /// Counts the end of a call of this client and load.
    pub(crate) fn record_end(
        &mut self,
        (client, load): (usize, usize),
        started_at: Time,
        outcome: CallOutcome,
        now: Time,
    ) {
        let (at, delay) = (now.since(self.started_at), now.since(started_at));
        self.record(now, |bucket| match outcome {
            CallOutcome::Succeeded => bucket.succeeded += 1,
            CallOutcome::Failed => bucket.failed += 1,
            CallOutcome::Refused => bucket.refused += 1,
            CallOutcome::Declined => bucket.declined += 1,
        });
        if outcome == CallOutcome::Succeeded {
            self.loads[load].succeeded += 1;
            self.delays.saturating_record(delay.as_micros());
            self.delay_sum += u128::from(delay.as_micros());
            self.range_counts_at(at).for_each(|counts| counts.succeeded += 1);
            if self.is_measured(now) {
                self.measured.successes[client] += 1;
                self.measured.delays.saturating_record(delay.as_micros());
            }
        }
        self.last_ended_at = at;
        if self.ended_calls.is_multiple_of(self.sample_stride) {
            if self.samples.len() == MAX_SAMPLES {
                let mut keeps = [true, false].into_iter().cycle();
                self.samples.retain(|_| keeps.next() == Some(true));
                self.sample_stride *= 2;
            }
            if self.ended_calls.is_multiple_of(self.sample_stride) {
                self.samples.push(CallSample { ended_at: at, delay, outcome });
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

    /// Returns at most `max_buckets` buckets, merged from neighbours, and the width of each.
    pub(crate) fn merged_buckets(&self, max_buckets: usize) -> (Vec<TimeBucket>, Span) {
        let group_size = self.buckets.len().div_ceil(max_buckets).max(1);
        let merged = self.buckets.chunks(group_size).map(TimeBucket::merged).collect();
        (merged, self.bucket_width.times(group_size as u64))
    }

    /// Returns the number of calls that succeeded per second, over the measured range.
    pub fn goodput(&self) -> f64 {
        self.ranges[0].map_or(0.0, |(TimeRange { from, until }, counts)| {
            // A run may end before its duration.
            let last = until.min(self.last_ended_at.max(from + Span::from_micros(1)));
            let length = if from.is_zero() { last } else { until - from };
            counts.succeeded as f64 / length.as_secs_f64()
        })
    }

    /// Returns the shares of calls that succeeded before the first disturbance and after the last. `None` without a
    /// disturbance, or without calls before or after it.
    pub fn recovery_shares(&self) -> Option<(f64, f64)> {
        Some((self.ranges[1]?.1.success_share()?, self.ranges[2]?.1.success_share()?))
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
