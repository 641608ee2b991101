//! The simulated service: workers, a queue, limits, and the ways in which it fails.

use std::collections::VecDeque;

use rand::RngExt;
use slab::Slab;
use tidegate_core::{Span, Time};

use crate::limiter::ServiceLimiter;
use crate::random::SimRng;
use crate::setup::{RetryAfterMode, ServiceSpec, TimeRange};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// Work without a result.
    Work,
    /// A read of the row and its version.
    Read,
    /// A write of the row, which succeeds if the row still has this version.
    Write { version: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ServiceReply {
    Done,
    /// The row's version.
    Row {
        version: u64,
    },
    /// Another call has written the row since.
    Conflict,
    /// A server error.
    Failed,
    /// Too many requests.
    Throttled {
        retry_after: Option<Span>,
    },
    /// The connection was refused.
    ConnectionRefused,
}

/// The identity of a request that the service holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobId {
    index: usize,
    sequence: u64,
}

#[derive(Debug)]
struct Job<R> {
    sequence: u64,
    request: R,
    kind: RequestKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrivalOutcome {
    /// The request is not accepted; this is its reply.
    Rejected(ServiceReply),
    /// The request is accepted. If a worker has started it, it ends after this time; otherwise it waits for a worker.
    Accepted(JobId, Option<Span>),
}

/// A job that a worker has finished.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FinishedJob<R> {
    pub(crate) request: R,
    pub(crate) reply: ServiceReply,
}

/// A service. `R` is the data that it keeps of a request until its reply.
///
/// The queue is bounded by the spec's `queue`. The jobs are bounded by its `workers` or, without those, by the calls
/// that clients have in flight.
#[derive(Debug)]
pub(crate) struct SimService<'s, R> {
    spec: &'s ServiceSpec,
    started_at: Time,
    last_request_at: Option<Time>,
    limiters: Vec<ServiceLimiter>,
    jobs: Slab<Job<R>>,
    queue: VecDeque<usize>,
    pub(crate) busy_workers: u32,
    version: u64,
    last_sequence: u64,
    rng: SimRng,
}

impl<'s, R: Copy> SimService<'s, R> {
    pub(crate) fn new(spec: &'s ServiceSpec, started_at: Time, rng: SimRng) -> Self {
        Self {
            spec,
            started_at,
            last_request_at: None,
            limiters: spec.limiters(started_at),
            jobs: Slab::new(),
            queue: VecDeque::new(),
            busy_workers: 0,
            version: 0,
            last_sequence: 0,
            rng,
        }
    }

    /// Returns the number of requests that wait for a worker.
    pub(crate) fn queued_requests(&self) -> u32 {
        self.queue.len() as u32
    }

    pub(crate) fn submit(&mut self, request: R, kind: RequestKind, now: Time) -> ArrivalOutcome {
        if TimeRange::any_contains(&self.spec.outages, now.since(self.started_at)) {
            return ArrivalOutcome::Rejected(ServiceReply::ConnectionRefused);
        }
        let spacing = Span::from_micros((self.spec.spacing.value_at(now.since(self.started_at)) * 1e6).round() as u64);
        let is_close = self.last_request_at.replace(now).is_some_and(|before| now.since(before) < spacing);
        let spacing = Some(spacing).filter(|_| is_close);
        let waits = self.limiters.iter_mut().map(|limiter| limiter.time_until_allowed(now)).chain(spacing);
        if let Some(wait) = waits.max().filter(|wait| !wait.is_zero()) {
            let retry_after = match self.spec.retry_after {
                RetryAfterMode::None => None,
                RetryAfterMode::Accurate => Some(Span::from_secs(wait.as_secs_ceil())),
                RetryAfterMode::Fixed(span) => Some(span),
            };
            return ArrivalOutcome::Rejected(ServiceReply::Throttled { retry_after });
        }
        let busy = !self.has_free_worker(now);
        if busy && self.queue.len() >= self.spec.queue as usize {
            return ArrivalOutcome::Rejected(ServiceReply::Failed);
        }
        for limiter in &mut self.limiters {
            limiter.take(now);
        }
        self.last_sequence += 1;
        let index = self.jobs.insert(Job { sequence: self.last_sequence, request, kind });
        let id = JobId { index, sequence: self.last_sequence };
        if busy {
            self.queue.push_back(index);
        }
        ArrivalOutcome::Accepted(id, (!busy).then(|| self.start_job(now)))
    }

    fn has_free_worker(&self, now: Time) -> bool {
        self.spec.workers_at(now.since(self.started_at)).is_none_or(|workers| self.busy_workers < workers)
    }

    /// Starts a job at a worker and returns the time until its end.
    fn start_job(&mut self, now: Time) -> Span {
        self.busy_workers += 1;
        let load = u64::from(self.busy_workers) + self.queue.len() as u64;
        let work = self.spec.latency.sample(&mut self.rng) + self.spec.latency_per_request.times(load);
        let start = now.since(self.started_at);
        self.spec.pauses.map_or(work, |pauses| pauses.end_of_work(start, work) - start)
    }

    /// Handles the end of a job. Returns `None` if its client went away and the service noticed.
    pub(crate) fn finish(&mut self, id: JobId, now: Time) -> Option<FinishedJob<R>> {
        let job = self.remove(id)?;
        self.busy_workers -= 1;
        let failures = self.spec.failures.value_at(now.since(self.started_at));
        // Drawn even if the share is 0 or 1, so that later random numbers don't depend on the share.
        let fails = self.rng.random::<f64>() < failures;
        let reply = match job.kind {
            _ if fails => ServiceReply::Failed,
            RequestKind::Work => ServiceReply::Done,
            RequestKind::Read => ServiceReply::Row { version: self.version },
            RequestKind::Write { version } if version == self.version => {
                self.version += 1;
                ServiceReply::Done
            }
            RequestKind::Write { .. } => ServiceReply::Conflict,
        };
        Some(FinishedJob { request: job.request, reply })
    }

    /// Drops a request of a client that has gone away, if the service notices.
    pub(crate) fn cancel(&mut self, id: JobId) {
        if !self.spec.notices_timeouts || self.remove(id).is_none() {
            return;
        }
        match self.queue.iter().position(|index| *index == id.index) {
            Some(place) => drop(self.queue.remove(place)),
            None => self.busy_workers -= 1,
        }
    }

    /// Starts the next request that waits, if a worker is free. Returns it and the time until its end.
    pub(crate) fn start_next(&mut self, now: Time) -> Option<(JobId, Span)> {
        if !self.has_free_worker(now) {
            return None;
        }
        let index = self.queue.pop_front()?;
        let id = JobId { index, sequence: self.jobs.get(index)?.sequence };
        Some((id, self.start_job(now)))
    }

    fn remove(&mut self, id: JobId) -> Option<Job<R>> {
        self.jobs.get(id.index).filter(|job| job.sequence == id.sequence)?;
        self.jobs.try_remove(id.index)
    }
}
