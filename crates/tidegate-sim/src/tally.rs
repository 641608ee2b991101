//! What was seen of a run.

use hdrhistogram::Histogram;
use tidegate_core::{Span, Time};

use crate::setup::{Setup, Stretch};

/// The most buckets that a run is divided into; at this bound two become one.
pub const MAX_BUCKETS: usize = 240;
/// The most calls whose delay is kept for the picture; at this bound every other is let go.
pub const MAX_POINTS: usize = 4096;
/// How long the stretches are of which the busiest is told.
pub const BUSY: Span = Span::from_millis(100);
/// The width of a bucket at first.
const FINEST: Span = Span::from_millis(1);

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
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
pub struct Bucket {
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

impl Bucket {
    fn add(&mut self, other: &Self) {
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
pub struct Point {
    /// When it ended, from the run's start.
    pub at: Span,
    /// How long it took.
    pub delay: Span,
    /// How it ended.
    pub end: End,
}

/// What was seen of one load's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerLoad {
    /// Calls that began.
    pub offered: u64,
    /// Calls that succeeded.
    pub succeeded: u64,
}

/// Calls in a stretch that is compared with another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Watched {
    from: Span,
    until: Span,
    offered: u64,
    succeeded: u64,
}

impl Watched {
    fn share(&self) -> Option<f64> {
        (self.offered > 0).then(|| self.succeeded as f64 / self.offered as f64)
    }
}

/// What was seen of a run. Its size doesn't grow with the number of calls.
#[derive(Clone, Debug)]
pub struct Tally {
    began: Time,
    width: Span,
    buckets: Vec<Bucket>,
    total: Bucket,
    loads: Vec<PerLoad>,
    delays: Histogram<u64>,
    delay_sum: u128,
    points: Vec<Point>,
    /// Of how many calls one is kept.
    stride: u64,
    ended: u64,
    /// The stretch that goodput is taken over, then those before and after what disturbs.
    watched: [Option<Watched>; 3],
    last_end: Span,
    busy_slot: u64,
    busy_count: u64,
    busiest: u64,
}

impl Tally {
    pub(crate) fn new(setup: &Setup) -> Self {
        let end = setup.duration;
        let watch =
            |from: Span, until: Span| (from < until).then_some(Watched { from, until, offered: 0, succeeded: 0 });
        let measured = setup.measured.unwrap_or(Stretch { from: Span::ZERO, until: end });
        let measured = watch(measured.from, measured.until);
        let disturbed = setup.disturbed();
        let before = disturbed.and_then(|(from, _)| watch(Span::ZERO, from));
        let after = disturbed.and_then(|(_, until)| watch(until + setup.check.within, end));
        // To a thousandth; nothing takes longer than the run, and a histogram holds 2 at the least.
        let delays = Histogram::new_with_max(end.as_micros().max(2), 3).expect("invariant: these bounds make sense");
        Self {
            began: setup.starts_at,
            width: FINEST,
            buckets: Vec::with_capacity(MAX_BUCKETS),
            total: Bucket::default(),
            loads: vec![PerLoad::default(); setup.loads.len()],
            delays,
            delay_sum: 0,
            points: Vec::new(),
            stride: 1,
            ended: 0,
            watched: [measured, before, after],
            last_end: Span::ZERO,
            busy_slot: 0,
            busy_count: 0,
            busiest: 0,
        }
    }

    /// Notes something of the present moment.
    pub(crate) fn note(&mut self, now: Time, note: impl Fn(&mut Bucket)) {
        let at = now.since(self.began);
        let mut index = (at.as_micros() / self.width.as_micros()) as usize;
        while index >= MAX_BUCKETS {
            self.halve();
            index = (at.as_micros() / self.width.as_micros()) as usize;
        }
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, Bucket::default());
        }
        note(&mut self.buckets[index]);
        note(&mut self.total);
    }

    fn halve(&mut self) {
        self.width = self.width.times(2);
        for index in 0..self.buckets.len().div_ceil(2) {
            let mut both = self.buckets[2 * index];
            if let Some(second) = self.buckets.get(2 * index + 1) {
                both.add(second);
            }
            self.buckets[index] = both;
        }
        self.buckets.truncate(self.buckets.len().div_ceil(2));
    }

    pub(crate) fn began(&mut self, load: usize, now: Time) {
        self.note(now, |bucket| bucket.offered += 1);
        self.loads[load].offered += 1;
        let at = now.since(self.began);
        for watched in self.watched.iter_mut().flatten().filter(|watched| (watched.from..watched.until).contains(&at)) {
            watched.offered += 1;
        }
    }

    pub(crate) fn ended(&mut self, load: usize, begun_at: Time, end: End, now: Time) {
        let (at, delay) = (now.since(self.began), now.since(begun_at));
        self.note(now, |bucket| match end {
            End::Succeeded => bucket.succeeded += 1,
            End::Failed => bucket.failed += 1,
            End::Refused => bucket.refused += 1,
            End::Declined => bucket.declined += 1,
        });
        if end == End::Succeeded {
            self.loads[load].succeeded += 1;
            self.delays.saturating_record(delay.as_micros());
            self.delay_sum += u128::from(delay.as_micros());
            for watched in
                self.watched.iter_mut().flatten().filter(|watched| (watched.from..watched.until).contains(&at))
            {
                watched.succeeded += 1;
            }
        }
        self.last_end = at;
        if self.ended.is_multiple_of(self.stride) {
            if self.points.len() == MAX_POINTS {
                let mut number = 0_usize;
                self.points.retain(|_| {
                    number += 1;
                    number % 2 == 1
                });
                self.stride *= 2;
            }
            if self.ended.is_multiple_of(self.stride) {
                self.points.push(Point { at, delay, end });
            }
        }
        self.ended += 1;
    }

    /// A request has come to the service.
    pub(crate) fn arrived(&mut self, now: Time) {
        let slot = now.since(self.began).as_micros() / BUSY.as_micros();
        if slot != self.busy_slot {
            (self.busy_slot, self.busy_count) = (slot, 0);
        }
        self.busy_count += 1;
        self.busiest = self.busiest.max(self.busy_count);
    }

    /// What happened in each stretch of [`Tally::width`].
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The same with so many buckets put together that at most `most` are left, and how long each is.
    pub(crate) fn coarse(&self, most: usize) -> (Vec<Bucket>, Span) {
        let together = self.buckets.len().div_ceil(most).max(1);
        let merged = self.buckets.chunks(together).map(|chunk| {
            chunk.iter().fold(Bucket::default(), |mut all, bucket| {
                all.add(bucket);
                all
            })
        });
        (merged.collect(), self.width.times(together as u64))
    }

    /// How long the buckets are.
    pub fn width(&self) -> Span {
        self.width
    }

    /// What happened in all.
    pub fn total(&self) -> &Bucket {
        &self.total
    }

    /// What was seen of each load, in the order of the setup.
    pub fn loads(&self) -> &[PerLoad] {
        &self.loads
    }

    /// Calls for the picture of delays, evenly thinned out.
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// When the last call ended, from the run's start.
    pub fn last_end(&self) -> Span {
        self.last_end
    }

    /// The most requests that came to the service within [`BUSY`].
    pub fn busiest(&self) -> u64 {
        self.busiest
    }

    /// Calls that succeeded each second, over the stretch that is measured.
    pub fn goodput(&self) -> f64 {
        self.watched[0].map_or(0.0, |watched| {
            // A run may end before its time.
            let until = watched.until.min(self.last_end.max(watched.from + Span::from_micros(1)));
            let secs = if watched.from.is_zero() { until } else { watched.until - watched.from };
            watched.succeeded as f64 / (secs.as_micros() as f64 / 1e6)
        })
    }

    /// Which shares of calls succeeded before the first disturbance and after the last; `None` without one, or without
    /// calls before or after it.
    pub fn recovery(&self) -> Option<(f64, f64)> {
        Some((self.watched[1]?.share()?, self.watched[2]?.share()?))
    }

    /// The mean delay of calls that succeeded, if any did.
    pub fn mean_delay(&self) -> Option<Span> {
        let mean = self.delay_sum.checked_div(u128::from(self.total.succeeded))?;
        Some(Span::from_micros(u64::try_from(mean).unwrap_or(u64::MAX)))
    }

    /// The delay that this share of successful calls didn't exceed, if there are any.
    pub fn delay_at(&self, share: f64) -> Option<Span> {
        (self.total.succeeded > 0).then(|| Span::from_micros(self.delays.value_at_quantile(share)))
    }
}
