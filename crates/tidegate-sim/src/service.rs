//! What is called: workers, a queue, limits, and the ways in which it fails.

use std::collections::VecDeque;

use rand::RngExt;
use slab::Slab;
use tidegate_core::{Span, Time};

use crate::limiter::Limiter;
use crate::random::Stream;
use crate::setup::{RetryAfter, ServiceSpec, Stretch};

/// What a request asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asks {
    /// Some work.
    Work,
    /// The row, and its version.
    Read,
    /// To write the row, if it still has this version.
    Write { version: u64 },
}

/// What a service says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    /// The row's version.
    Row {
        version: u64,
    },
    /// Another has written the row since.
    Conflict,
    /// A server error.
    Failed,
    /// Too many requests.
    Throttled {
        retry_after: Option<Span>,
    },
    /// The connection was refused.
    Refused,
}

/// A request that the service has in hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobId {
    index: usize,
    number: u64,
}

#[derive(Debug)]
struct Job<R> {
    number: u64,
    request: R,
    asks: Asks,
}

/// What became of a request that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// Nothing: this is its answer.
    Answered(Answer),
    /// A worker has it, for so long.
    Started(JobId, Span),
    /// It waits for a worker.
    Queued(JobId),
}

/// What a worker has finished.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finished<R> {
    pub(crate) request: R,
    pub(crate) answer: Answer,
    /// The request that the worker takes on next, and how long that will take.
    pub(crate) next: Option<(JobId, Span)>,
}

/// A service. `R` is what it keeps of a request until its answer.
///
/// What waits is bounded by the spec's queue, what is worked on by its workers or, where it takes all that come, by
/// what clients have under way.
#[derive(Debug)]
pub(crate) struct Service<'s, R> {
    spec: &'s ServiceSpec,
    began: Time,
    asked_at: Option<Time>,
    limiters: Vec<Limiter>,
    jobs: Slab<Job<R>>,
    queue: VecDeque<usize>,
    working: u32,
    version: u64,
    numbers: u64,
    rng: Stream,
}

impl<'s, R: Copy> Service<'s, R> {
    pub(crate) fn new(spec: &'s ServiceSpec, began: Time, rng: Stream) -> Self {
        let limiters = spec.limits.iter().filter_map(|limit| Limiter::new(limit, began)).collect();
        let (jobs, queue) = (Slab::new(), VecDeque::new());
        Self { spec, began, asked_at: None, limiters, jobs, queue, working: 0, version: 0, numbers: 0, rng }
    }

    /// How many requests wait for a worker.
    pub(crate) fn waiting(&self) -> u32 {
        self.queue.len() as u32
    }

    /// How many requests workers have.
    pub(crate) fn working(&self) -> u32 {
        self.working
    }

    /// A request has arrived.
    pub(crate) fn arrive(&mut self, request: R, asks: Asks, now: Time) -> Taken {
        if Stretch::any_holds(&self.spec.outages, now.since(self.began)) {
            return Taken::Answered(Answer::Refused);
        }
        let spacing = Span::from_micros((self.spec.spacing.at(now.since(self.began)) * 1e6).round() as u64);
        let is_close = self.asked_at.replace(now).is_some_and(|before| now.since(before) < spacing);
        let spacing = Some(spacing).filter(|_| is_close);
        let waits = self.limiters.iter_mut().map(|limiter| limiter.wait(now)).chain(spacing);
        if let Some(wait) = waits.max().filter(|wait| !wait.is_zero()) {
            let retry_after = match self.spec.retry_after {
                RetryAfter::None => None,
                RetryAfter::True => Some(Span::from_secs(wait.as_secs_ceil())),
                RetryAfter::Always(span) => Some(span),
            };
            return Taken::Answered(Answer::Throttled { retry_after });
        }
        let busy = self.spec.workers.is_some_and(|workers| self.working >= workers);
        if busy && self.queue.len() >= self.spec.queue as usize {
            return Taken::Answered(Answer::Failed);
        }
        for limiter in &mut self.limiters {
            limiter.take(now);
        }
        self.numbers += 1;
        let index = self.jobs.insert(Job { number: self.numbers, request, asks });
        let id = JobId { index, number: self.numbers };
        if busy {
            self.queue.push_back(index);
            return Taken::Queued(id);
        }
        Taken::Started(id, self.start())
    }

    /// A worker begins; how long it will take.
    fn start(&mut self) -> Span {
        self.working += 1;
        let load = u64::from(self.working) + self.queue.len() as u64;
        self.spec.latency.sample(&mut self.rng) + self.spec.latency_per_request.times(load)
    }

    /// A worker has finished. `None` if its client went away and the service noticed.
    pub(crate) fn finish(&mut self, id: JobId, now: Time) -> Option<Finished<R>> {
        let job = self.remove(id)?;
        self.working -= 1;
        let failures = self.spec.failures.at(now.since(self.began));
        // Drawn whatever the share, so that the numbers that follow don't depend on it.
        let fails = self.rng.random::<f64>() < failures;
        let answer = match job.asks {
            _ if fails => Answer::Failed,
            Asks::Work => Answer::Done,
            Asks::Read => Answer::Row { version: self.version },
            Asks::Write { version } if version == self.version => {
                self.version += 1;
                Answer::Done
            }
            Asks::Write { .. } => Answer::Conflict,
        };
        Some(Finished { request: job.request, answer, next: self.next() })
    }

    /// A request's client has gone away: if the service notices, the next request with how long that will take.
    pub(crate) fn abandon(&mut self, id: JobId) -> Option<(JobId, Span)> {
        if !self.spec.notices_timeouts {
            return None;
        }
        self.remove(id)?;
        match self.queue.iter().position(|index| *index == id.index) {
            Some(place) => {
                self.queue.remove(place);
                None
            }
            None => {
                self.working -= 1;
                self.next()
            }
        }
    }

    fn next(&mut self) -> Option<(JobId, Span)> {
        let index = self.queue.pop_front()?;
        let id = JobId { index, number: self.jobs.get(index)?.number };
        Some((id, self.start()))
    }

    fn remove(&mut self, id: JobId) -> Option<Job<R>> {
        self.jobs.get(id.index).filter(|job| job.number == id.number)?;
        self.jobs.try_remove(id.index)
    }
}
