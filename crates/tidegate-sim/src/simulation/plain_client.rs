//! A client that retries by its own replies alone.

use tidegate_core::backoff::BackoffState;
use tidegate_core::call::AttemptReport;
use tidegate_core::{Budget, Class, LocalPacer, Span, Time};

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
    /// The time at which its controller let it pass, and the attempts in flight then.
    pub(super) admitted: (Time, u32),
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

    /// Returns the time that is left for a call after this time.
    pub(super) fn time_left(&self, elapsed: Span) -> Span {
        self.spec.deadline.map_or(Span::MAX, |deadline| deadline - elapsed)
    }

    /// Counts an attempt as in flight and returns its timeout; `None` if it may not be sent.
    pub(super) fn start_attempt(&mut self, retry: &mut RetryState, time_left: Span) -> Option<Span> {
        if self.spec.in_flight.is_some_and(|max| self.in_flight >= max) {
            return None;
        }
        self.in_flight += 1;
        retry.attempts = retry.attempts.saturating_add(1);
        if let Some(budget) = self.budget.as_ref().filter(|_| retry.attempts == 1) {
            budget.record_first_try();
        }
        // A call that may still be sent has some time.
        Some(self.spec.timeout.unwrap_or(Span::MAX).min(time_left).max(Span::from_micros(1)))
    }

    /// Counts the end of an attempt and returns the wait before the next one; `None` if the call ends.
    pub(super) fn end_attempt(
        &mut self,
        retry: &mut RetryState,
        report: &AttemptReport,
        time_left: Span,
    ) -> Option<Span> {
        self.in_flight -= 1;
        let has_succeeded = report.verdict.class == Class::Success;
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
        let asked = report.verdict.wait.filter(|_| self.spec.honours_retry_after).unwrap_or(Span::ZERO);
        Some(wait.max(asked)).filter(|wait| *wait < time_left)
    }
}
