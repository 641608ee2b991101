//! A client that runs the production code: the same calls, state and store as in [`tidegate`'s driver], driven by
//! events instead of tasks.
//!
//! [`tidegate`'s driver]: https://docs.rs/tidegate

use std::sync::Arc;

use slab::Slab;
use tidegate_core::call::{AttemptReport, Call, CallFailure, CallProgress, CallRules, NextStep, ProviderState};
use tidegate_core::{Batch, Lane, Limits, Outcomes, QueueStep, Span, Ticket, Time};
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
    slot_by_ticket: Vec<usize>,
    pub(super) wake_at: Time,
    /// The actions that the simulation is still to carry out.
    pub(super) effects: Vec<Effect>,
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
        let limits = Arc::clone(plan.limits());
        Self {
            provider,
            limits,
            rules,
            state,
            store,
            calls: Slab::new(),
            slot_by_ticket: Vec::new(),
            wake_at: Time::NEVER,
            effects: Vec::new(),
            rng,
        }
    }

    /// Returns the number of calls that wait for their turn.
    pub(super) fn waiting_calls(&self) -> u32 {
        Lane::ALL.iter().map(|lane| self.state.lanes.waiting(*lane) as u32).sum()
    }

    /// Returns the slot of the next call to begin.
    pub(super) fn next_slot(&self) -> usize {
        self.calls.vacant_key()
    }

    pub(super) fn begin(&mut self, id: CallId, lane: Lane, now: Time) {
        let lane = if self.provider.sequential { Lane::User } else { lane };
        let call = Call::new(&self.rules, lane, 1, None, now);
        let slot = self.calls.insert(ActiveCall { call, id });
        self.enqueue(slot, now);
    }

    /// Puts a call into the queue, for the first or a further time.
    pub(super) fn enqueue(&mut self, slot: usize, now: Time) {
        self.pause_outside_hours(now);
        let call = &mut self.calls[slot].call;
        let progress = match call.start(&mut self.state, now) {
            Ok(()) => CallProgress::Wait,
            Err(failure) => CallProgress::Fail(failure),
        };
        if let Some(ticket) = call.ticket() {
            if self.slot_by_ticket.len() <= ticket.index() {
                self.slot_by_ticket.resize(ticket.index() + 1, usize::MAX);
            }
            self.slot_by_ticket[ticket.index()] = slot;
        }
        self.advance(progress, slot, now);
        self.poll_lanes(now);
    }

    pub(super) fn handle_reply(&mut self, slot: usize, reply: &AttemptReport, now: Time) {
        self.pause_outside_hours(now);
        let next = self.calls[slot].call.handle_reply(&self.rules, &mut self.state, reply, now, &mut self.rng);
        self.send_notification(now);
        match next {
            NextStep::RetryAt(at) => self.effects.push(Effect::Resume { id: self.calls[slot].id, at }),
            NextStep::Failed(_) | NextStep::RenewLogin { .. } | NextStep::Done => {
                self.finish_call(slot, CallOutcome::of_last_reply(reply.verdict.class));
            }
        }
        self.poll_lanes(now);
    }

    /// Handles the timer that [`TidegateClient::wake_at`] set.
    pub(super) fn handle_timer(&mut self, now: Time) {
        self.pause_outside_hours(now);
        self.poll_lanes(now);
    }

    /// Handles the reply of the shared store; `outcomes` is `None` if the store couldn't be reached.
    pub(super) fn handle_store_reply(
        &mut self,
        (slot, ticket): (usize, Ticket),
        batch: &Batch,
        outcomes: Option<&Outcomes>,
        now: Time,
    ) {
        self.pause_outside_hours(now);
        match (self.has_ticket(slot, ticket), outcomes) {
            (true, Some(outcomes)) => {
                let progress = self.handle_outcomes(slot, outcomes, now);
                self.advance(progress, slot, now);
            }
            (true, None) => {
                self.calls[slot].call.handle_store_error(&mut self.state);
                self.finish_call(slot, CallOutcome::Failed);
            }
            (false, Some(outcomes)) => {
                let refund = Call::refund_after_cancel(&self.rules, batch, outcomes);
                self.effects.extend(refund.map(|batch| Effect::NotifyStore { batch: Box::new(batch) }));
                self.state.lanes.clear_refusals();
            }
            (false, None) => {}
        }
        self.poll_lanes(now);
    }

    /// Returns true if the call in this slot still waits with this ticket.
    fn has_ticket(&self, slot: usize, ticket: Ticket) -> bool {
        self.calls.get(slot).is_some_and(|active| active.call.ticket() == Some(ticket))
    }

    fn handle_outcomes(&mut self, slot: usize, outcomes: &Outcomes, now: Time) -> CallProgress {
        let call = &mut self.calls[slot].call;
        call.handle_outcomes(&self.rules, &self.limits, &mut self.state, outcomes, now, &mut self.rng)
    }

    fn pause_outside_hours(&mut self, now: Time) {
        if let Some(hours) = &self.provider.hours {
            self.state.lanes.pause(Lane::Background, hours.next_within(now));
        }
    }

    /// Advances the calls that the lanes name, until the lanes have none left for now.
    fn poll_lanes(&mut self, now: Time) {
        loop {
            let step = self.state.poll(now);
            let ticket = match step {
                QueueStep::Sleep(at) => {
                    self.wake_at = at;
                    return;
                }
                QueueStep::AskStore(ticket) | QueueStep::Expired(ticket) | QueueStep::Displaced(ticket) => ticket,
            };
            let slot = self.slot_by_ticket.get(ticket.index()).copied();
            let Some(slot) = slot.filter(|slot| self.has_ticket(*slot, ticket)) else {
                self.state.lanes.cancel(ticket);
                continue;
            };
            let call = &mut self.calls[slot].call;
            let progress = call.handle_step(step, &self.rules, &mut self.state, now, &mut self.rng);
            self.advance(progress, slot, now);
        }
    }

    /// Follows a call as far as it gets without waiting.
    fn advance(&mut self, mut progress: CallProgress, slot: usize, now: Time) {
        loop {
            self.send_notification(now);
            let active = &self.calls[slot];
            match progress {
                CallProgress::AskStore => match &self.store {
                    Some(store) => {
                        let outcomes = store.apply_now(self.state.store_requests.reservation(), now);
                        progress = self.handle_outcomes(slot, &outcomes, now);
                    }
                    None => {
                        let batch = Box::new(self.state.store_requests.reservation().clone());
                        let asking = active.call.ticket();
                        self.effects.extend(asking.map(|ticket| Effect::AskStore { slot, ticket, batch }));
                        return;
                    }
                },
                CallProgress::Send { .. } => {
                    let attempt = Span::from_duration(self.provider.attempt_timeout);
                    let usual = self.rules.lane_rules[active.call.lane() as usize].timeout.min(attempt);
                    let reply_timeout = attempt.min(active.call.deadline().since(now));
                    let conclusive_after = Span::from_micros(usual.as_micros() / 2);
                    return self.effects.push(Effect::Send { id: active.id, reply_timeout, conclusive_after });
                }
                CallProgress::Fail(CallFailure::DeadlineExceeded | CallFailure::NotRetried(_)) => {
                    return self.finish_call(slot, CallOutcome::Failed);
                }
                CallProgress::Fail(
                    CallFailure::Unavailable(_)
                    | CallFailure::RateLimited { .. }
                    | CallFailure::QuotaSpent { .. }
                    | CallFailure::CredentialsCooling { .. }
                    | CallFailure::ProviderPaused
                    | CallFailure::LanePaused { .. }
                    | CallFailure::Paced { .. }
                    | CallFailure::QueueFull(_),
                ) => return self.finish_call(slot, CallOutcome::Declined),
                CallProgress::Wait => return,
            }
        }
    }

    fn send_notification(&mut self, now: Time) {
        let Some(batch) = self.state.store_requests.updates() else { return };
        match &self.store {
            Some(store) => store.submit(batch, now),
            None => self.effects.push(Effect::NotifyStore { batch: Box::new(batch.clone()) }),
        }
    }

    fn finish_call(&mut self, slot: usize, outcome: CallOutcome) {
        if let Some(active) = self.calls.try_remove(slot) {
            self.effects.push(Effect::Finish { id: active.id, outcome });
        }
    }
}
