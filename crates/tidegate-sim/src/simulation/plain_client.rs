//! A client that retries by its own replies alone.

use tidegate_core::backoff::BackoffState;
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

    /// Returns the timeout of an attempt; `None` if it waits without end.
    pub(super) fn reply_timeout(&self) -> Option<Span> {
        self.spec.timeout
    }

    /// Returns true if an attempt may be sent, and counts it as in flight then.
    pub(super) fn try_start_attempt(&mut self, tried: &mut RetryState) -> bool {
        let may_send = self.spec.in_flight.is_none_or(|most| self.in_flight < most);
        if may_send {
            self.in_flight += 1;
            tried.attempts = tried.attempts.saturating_add(1);
            if let Some(budget) = self.budget.as_ref().filter(|_| tried.attempts == 1) {
                budget.record_first_try();
            }
        }
        may_send
    }

    /// Removes an attempt from those in flight and tells the pacer its result.
    pub(super) fn end_attempt(&mut self, class: Class) {
        self.in_flight -= 1;
        match &mut self.pacer {
            Some(pacer) if class == Class::Success => drop(pacer.succeeded(&mut self.rng)),
            Some(pacer) => drop(pacer.failed(&mut self.rng)),
            None => {}
        }
    }

    /// Returns the wait before the next attempt after a failed one; `None` if there is no next attempt. `retry_after`
    /// is what the failed attempt's reply asked for.
    pub(super) fn next_retry_delay(&mut self, tried: &mut RetryState, retry_after: Option<Span>) -> Option<Span> {
        if self.spec.attempts.is_some_and(|most| tried.attempts >= most) {
            return None;
        }
        if self.budget.as_ref().is_some_and(|budget| !budget.take()) {
            return None;
        }
        let wait = self.spec.backoff.map_or(self.pace_delay(), |backoff| tried.backoff.next(&backoff, &mut self.rng));
        let asked = retry_after.filter(|_| self.spec.honours_retry_after).unwrap_or(Span::ZERO);
        Some(wait.max(asked))
    }
}
