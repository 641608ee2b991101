//! A client that runs the production code: the same calls, state and store as in [`tidegate`'s driver], driven by
//! events instead of tasks.
//!
//! [`tidegate`'s driver]: https://docs.rs/tidegate

use std::sync::Arc;

use slab::Slab;
use tidegate_core::call::{AttemptReport, Call, CallFailure, CallProgress, CallRules, NextStep, ProviderState};
use tidegate_core::{Batch, Class, Lane, Limits, Outcomes, QueueStep, Span, Ticket, Time};
use tidegate_policy::KeySeed;
use tidegate_policy::outbound::{OutboundConfig, ProviderConfig};
use tidegate_store::{ImmediateStore, Memory, Store};

use super::event::CallId;
use crate::random::SimRng;
use crate::stats::CallOutcome;

/// All calls of one client to the provider. Their number is bounded by the lanes' queues and the calls in flight.
#[derive(Debug)]
pub(super) struct TidegateClient<'s> {
    provider: &'s ProviderConfig,
    limits: Arc<Limits>,
    rules: CallRules,
    state: ProviderState,
    /// The store that answers at once; `None` if the store is asked by messages.
    store: Option<Arc<Memory>>,
    calls: Slab<ActiveCall>,
    /// The slot of each queued call, by its ticket's index.
    slot_by_ticket: Vec<Option<usize>>,
    pub(super) wake_at: Time,
    rng: SimRng,
}

#[derive(Debug)]
struct ActiveCall {
    call: Call,
    id: CallId,
}

/// An action that the simulation carries out for a client.
#[derive(Debug)]
pub(super) enum Effect {
    /// Send a request and wait for its reply until `reply_timeout`. A timeout below `conclusive_after` is due to the
    /// caller's deadline, not to the service.
    Send { id: CallId, reply_timeout: Span, conclusive_after: Span },
    /// Continue the call at this moment of the client's clock.
    Resume { id: CallId, at: Time },
    /// End the call.
    Finish { id: CallId, outcome: CallOutcome },
    /// Send a request to the shared store.
    AskStore { slot: usize, ticket: Ticket, batch: Box<Batch> },
    /// Send a message to the shared store, without a reply.
    NotifyStore { batch: Box<Batch> },
}

impl<'s> TidegateClient<'s> {
    pub(super) fn new(
        plan: &'s OutboundConfig,
        provider: &'s ProviderConfig,
        store: Option<Arc<Memory>>,
        seed: &KeySeed,
        rng: SimRng,
    ) -> Self {
        let rules = provider.rules(seed);
        let state = provider.new_state(&rules);
        let (calls, places) = (Slab::new(), Vec::new());
        let limits = Arc::clone(plan.limits());
        Self { provider, limits, rules, state, store, calls, slot_by_ticket: places, wake_at: Time::NEVER, rng }
    }

    /// Returns the number of calls that wait for their turn.
    pub(super) fn waiting_calls(&self) -> u32 {
        Lane::ALL.iter().map(|lane| self.state.lanes.waiting(*lane) as u32).sum()
    }

    /// Starts a call and returns its slot.
    pub(super) fn begin(&mut self, id: CallId, lane: Lane, now: Time, effects: &mut Vec<Effect>) -> usize {
        let lane = if self.provider.sequential { Lane::User } else { lane };
        let call = Call::new(&self.rules, lane, 1, None, now);
        let slot = self.calls.insert(ActiveCall { call, id });
        self.enqueue(slot, now, effects);
        slot
    }

    /// Puts a call into the queue, for the first or a further time.
    pub(super) fn enqueue(&mut self, slot: usize, now: Time, effects: &mut Vec<Effect>) {
        self.pause_outside_hours(now);
        let call = &mut self.calls[slot].call;
        let progress = match call.start(&mut self.state, now) {
            Ok(()) => CallProgress::Wait,
            Err(failure) => CallProgress::Fail(failure),
        };
        if let Some(ticket) = call.ticket() {
            if self.slot_by_ticket.len() <= ticket.index() {
                self.slot_by_ticket.resize(ticket.index() + 1, None);
            }
            self.slot_by_ticket[ticket.index()] = Some(slot);
        }
        self.advance(progress, slot, now, effects);
        self.poll_lanes(now, effects);
    }

    /// Handles the end of an attempt.
    pub(super) fn handle_reply(&mut self, slot: usize, reply: &AttemptReport, now: Time, effects: &mut Vec<Effect>) {
        self.pause_outside_hours(now);
        let next = self.calls[slot].call.handle_reply(&self.rules, &mut self.state, reply, now, &mut self.rng);
        self.send_notification(now, effects);
        let id = self.calls[slot].id;
        match next {
            NextStep::RetryAt(at) => effects.push(Effect::Resume { id, at }),
            NextStep::Failed(failure) => self.finish_call(slot, outcome_of_failure(&failure, reply.class), effects),
            NextStep::RenewLogin { .. } | NextStep::Done => {
                let end = if reply.class == Class::Success { CallOutcome::Succeeded } else { CallOutcome::Failed };
                self.finish_call(slot, end, effects);
            }
        }
        self.poll_lanes(now, effects);
    }

    /// Handles the timer that [`TidegateClient::wake_at`] set.
    pub(super) fn handle_timer(&mut self, now: Time, effects: &mut Vec<Effect>) {
        self.pause_outside_hours(now);
        self.poll_lanes(now, effects);
    }

    /// Handles the reply of the shared store; `outcomes` is `None` if the store couldn't be reached.
    pub(super) fn handle_store_reply(
        &mut self,
        (slot, ticket): (usize, Ticket),
        batch: &Batch,
        outcomes: Option<&Outcomes>,
        now: Time,
        effects: &mut Vec<Effect>,
    ) {
        self.pause_outside_hours(now);
        let is_still_asking = self.calls.get(slot).is_some_and(|held| held.call.ticket() == Some(ticket));
        match (is_still_asking, outcomes) {
            (true, Some(outcomes)) => {
                let held = &mut self.calls[slot];
                let progress =
                    held.call.handle_outcomes(&self.rules, &self.limits, &mut self.state, outcomes, now, &mut self.rng);
                self.advance(progress, slot, now, effects);
            }
            (true, None) => {
                self.calls[slot].call.handle_store_error(&mut self.state);
                self.finish_call(slot, CallOutcome::Failed, effects);
            }
            (false, Some(outcomes)) => {
                let refund = Call::refund_after_cancel(&self.rules, batch, outcomes);
                effects.extend(refund.map(|batch| Effect::NotifyStore { batch: Box::new(batch) }));
                self.state.lanes.clear_refusals();
            }
            (false, None) => {}
        }
        self.poll_lanes(now, effects);
    }

    fn pause_outside_hours(&mut self, now: Time) {
        if let Some(hours) = &self.provider.hours {
            self.state.lanes.pause(Lane::Background, hours.next_within(now));
        }
    }

    /// Advances the calls that the lanes name, until the lanes have none left for now.
    fn poll_lanes(&mut self, now: Time, effects: &mut Vec<Effect>) {
        loop {
            let (ticket, expired) = match self.state.lanes.poll(now) {
                QueueStep::Sleep(at) => {
                    self.wake_at = at;
                    return;
                }
                QueueStep::AskStore(ticket) => (ticket, false),
                QueueStep::Expired(ticket) => (ticket, true),
            };
            let slot = self.slot_by_ticket.get(ticket.index()).copied().flatten();
            let Some(place) =
                slot.filter(|place| self.calls.get(*place).is_some_and(|held| held.call.ticket() == Some(ticket)))
            else {
                self.state.lanes.cancel(ticket);
                continue;
            };
            let call = &mut self.calls[place].call;
            let progress = match expired {
                true => CallProgress::Fail(call.handle_expiry(&mut self.state)),
                false => call.handle_turn(&self.rules, &mut self.state, now, &mut self.rng),
            };
            self.advance(progress, place, now, effects);
        }
    }

    /// Follows a call as far as it gets without waiting.
    fn advance(&mut self, mut progress: CallProgress, slot: usize, now: Time, effects: &mut Vec<Effect>) {
        loop {
            self.send_notification(now, effects);
            let held = &mut self.calls[slot];
            match progress {
                CallProgress::AskStore => match &self.store {
                    Some(store) => {
                        let outcomes = store.apply_now(self.state.store_requests.reservation(), now);
                        progress = held.call.handle_outcomes(
                            &self.rules,
                            &self.limits,
                            &mut self.state,
                            &outcomes,
                            now,
                            &mut self.rng,
                        );
                    }
                    None => {
                        let batch = Box::new(self.state.store_requests.reservation().clone());
                        let asking = held.call.ticket();
                        effects.extend(asking.map(|ticket| Effect::AskStore { slot, ticket, batch }));
                        return;
                    }
                },
                CallProgress::Send { .. } => {
                    let attempt = Span::from_duration(self.provider.attempt_timeout);
                    let usual = self.rules.lane_rules[held.call.lane() as usize].timeout.min(attempt);
                    let patience = attempt.min(held.call.deadline().since(now));
                    let conclusive_after = Span::from_micros(usual.as_micros() / 2);
                    return effects.push(Effect::Send { id: held.id, reply_timeout: patience, conclusive_after });
                }
                CallProgress::Fail(failure) => {
                    return self.finish_call(slot, outcome_of_failure(&failure, Class::Cancelled), effects);
                }
                CallProgress::Wait => return,
            }
        }
    }

    fn send_notification(&self, now: Time, effects: &mut Vec<Effect>) {
        let Some(batch) = self.state.store_requests.updates() else { return };
        match &self.store {
            Some(store) => store.submit(batch, now),
            None => effects.push(Effect::NotifyStore { batch: Box::new(batch.clone()) }),
        }
    }

    fn finish_call(&mut self, slot: usize, end: CallOutcome, effects: &mut Vec<Effect>) {
        if let Some(held) = self.calls.try_remove(slot) {
            effects.push(Effect::Finish { id: held.id, outcome: end });
        }
    }
}

/// Returns the outcome of a call that failed for this reason, after a last reply of this class.
fn outcome_of_failure(failure: &CallFailure, last: Class) -> CallOutcome {
    match failure {
        CallFailure::DeadlineExceeded => CallOutcome::Failed,
        CallFailure::NotRetried(_) if last == Class::Throttled => CallOutcome::Refused,
        CallFailure::NotRetried(_) => CallOutcome::Failed,
        CallFailure::Unavailable(_)
        | CallFailure::RateLimited { .. }
        | CallFailure::QuotaSpent { .. }
        | CallFailure::CredentialsCooling { .. }
        | CallFailure::LanePaused { .. }
        | CallFailure::Paced { .. }
        | CallFailure::QueueFull(_) => CallOutcome::Declined,
    }
}
