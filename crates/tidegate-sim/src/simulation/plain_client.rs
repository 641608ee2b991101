//! A client that retries by its own replies alone.

use tidegate_core::backoff::BackoffState;
use tidegate_core::call::AttemptReport;
use tidegate_core::{Budget, Class, LocalPacer, Span};

use crate::random::SimRng;
use crate::setup::PlainClientSpec;

/// The state that all calls of one client share.
#[derive(Debug)]
pub(super) struct PlainClient<'s> {
    spec: &'s PlainClientSpec,
    budget: Option<Budget>,
    pacer: Option<LocalPacer>,
    in_flight: u32,
    rng: SimRng,
}

/// The progress of one call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RetryState {
    attempts: u32,
    backoff: BackoffState,
}

impl<'s> PlainClient<'s> {
    pub(super) fn new(spec: &'s PlainClientSpec, rng: SimRng) -> Self {
        let pacer =
            spec.pacer.map(|spec| LocalPacer::new(spec).expect("invariant: reading the scenario checks the pacer"));
        Self { spec, budget: spec.budget.map(Budget::new), pacer, in_flight: 0, rng }
    }

    /// Returns the wait of a new call for its client's pace.
    pub(super) fn pace_delay(&self) -> Span {
        self.pacer.as_ref().map_or(Span::ZERO, |pacer| Span::from_duration(pacer.interval()))
    }

    /// Counts an attempt as in flight and returns its timeout; `None` if it may not be sent.
    pub(super) fn start_attempt(&mut self, retry: &mut RetryState) -> Option<Span> {
        if self.spec.in_flight.is_some_and(|max| self.in_flight >= max) {
            return None;
        }
        self.in_flight += 1;
        retry.attempts = retry.attempts.saturating_add(1);
        if let Some(budget) = self.budget.as_ref().filter(|_| retry.attempts == 1) {
            budget.record_first_try();
        }
        Some(self.spec.timeout.unwrap_or(Span::MAX))
    }

    /// Counts the end of an attempt and returns the wait before the next one; `None` if the call ends.
    pub(super) fn end_attempt(&mut self, retry: &mut RetryState, report: &AttemptReport) -> Option<Span> {
        self.in_flight -= 1;
        let has_succeeded = report.class == Class::Success;
        match &mut self.pacer {
            Some(pacer) if has_succeeded => drop(pacer.succeeded(&mut self.rng)),
            Some(pacer) => drop(pacer.failed(&mut self.rng)),
            None => {}
        }
        let is_last = self.spec.attempts.is_some_and(|max| retry.attempts >= max);
        if has_succeeded || is_last || self.budget.as_ref().is_some_and(|budget| !budget.take()) {
            return None;
        }
        let wait = self.spec.backoff.map_or(self.pace_delay(), |backoff| retry.backoff.next(&backoff, &mut self.rng));
        let asked = report.retry_after.filter(|_| self.spec.honours_retry_after).unwrap_or(Span::ZERO);
        Some(wait.max(asked))
    }
}
