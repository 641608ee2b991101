//! The best that a controller can do: it knows the service's workers and limits at each time, and those of all clients'
//! attempts that are in flight.

use tidegate_core::{Span, Time};

use super::{Controller, EndedAttempt};
use crate::limiter::ServiceLimiter;
use crate::setup::ServiceSpec;

#[derive(Debug)]
pub(super) struct Oracle<'s> {
    service: &'s ServiceSpec,
    started_at: Time,
    limiters: Vec<ServiceLimiter>,
}

impl<'s> Oracle<'s> {
    pub(super) fn new(service: &'s ServiceSpec, started_at: Time) -> Self {
        Self { service, started_at, limiters: service.limiters(started_at) }
    }
}

impl Controller for Oracle<'_> {
    fn limit(&mut self, now: Time) -> u32 {
        self.service.workers_at(now.since(self.started_at)).unwrap_or(u32::MAX)
    }

    fn next_send_at(&mut self, now: Time) -> Time {
        let waits = self.limiters.iter_mut().map(|limiter| limiter.time_until_allowed(now));
        now + waits.max().unwrap_or(Span::ZERO)
    }

    fn record_send(&mut self, now: Time) {
        self.limiters.iter_mut().for_each(|limiter| limiter.take(now));
    }

    fn record_end(&mut self, _attempt: &EndedAttempt) {}
}
