//! A client that is the production machine: the same calls, desk and store as in [`tidegate`'s driver], carried on by
//! events instead of tasks.
//!
//! [`tidegate`'s driver]: https://docs.rs/tidegate

use std::sync::Arc;

use slab::Slab;
use tidegate_core::call::{Call, Desk, Failure, Reply, Rules, Step};
use tidegate_core::{Batch, Class, Lane, Limits, Outcomes, Span, Ticket, Time, Turn};
use tidegate_policy::KeySeed;
use tidegate_policy::outbound::{Outbound, Provider};
use tidegate_store::{Immediate, Memory, Store};

use super::event::CallId;
use crate::random::Stream;
use crate::tally::End;

/// All calls of one client to the provider. Its calls are bounded by what its lanes let wait and what is in flight.
#[derive(Debug)]
pub(super) struct Hall<'s> {
    provider: &'s Provider,
    limits: Arc<Limits>,
    rules: Rules,
    desk: Desk,
    /// Answers in place; `None` where the store is asked by messages.
    store: Option<Arc<Memory>>,
    calls: Slab<Held>,
    /// Where a queued call is held, by its ticket's index.
    places: Vec<Option<usize>>,
    pub(super) wakes_at: Time,
    rng: Stream,
}

#[derive(Debug)]
struct Held {
    call: Call,
    id: CallId,
}

/// What the world is to do for a client.
#[derive(Debug)]
pub(super) enum Effect {
    /// Send a request, and wait for its reply for so long; to be given up earlier than that would be its caller's doing.
    Send { id: CallId, patience: Span, enough: Span },
    /// Go on at this moment of the client's clock.
    Again { id: CallId, at: Time },
    /// It is over.
    Ends { id: CallId, end: End },
    /// Ask the shared store.
    Ask { place: usize, ticket: Ticket, batch: Box<Batch> },
    /// Tell the shared store.
    Tell { batch: Box<Batch> },
}

impl<'s> Hall<'s> {
    pub(super) fn new(
        plan: &'s Outbound,
        provider: &'s Provider,
        store: Option<Arc<Memory>>,
        seed: &KeySeed,
        rng: Stream,
    ) -> Self {
        let rules = provider.rules(seed);
        let desk = provider.desk(&rules);
        let (calls, places) = (Slab::new(), Vec::new());
        let limits = Arc::clone(plan.limits());
        Self { provider, limits, rules, desk, store, calls, places, wakes_at: Time::NEVER, rng }
    }

    /// How many calls wait for their turn.
    pub(super) fn waiting(&self) -> u32 {
        Lane::ALL.iter().map(|lane| self.desk.lanes.waiting(*lane) as u32).sum()
    }

    /// A call begins; where it is held.
    pub(super) fn begin(&mut self, id: CallId, lane: Lane, now: Time, effects: &mut Vec<Effect>) -> usize {
        let lane = if self.provider.sequential { Lane::User } else { lane };
        let call = Call::new(&self.rules, lane, 1, None, now);
        let place = self.calls.insert(Held { call, id });
        self.start(place, now, effects);
        place
    }

    /// A call enters the queue, at first or again.
    pub(super) fn start(&mut self, place: usize, now: Time, effects: &mut Vec<Effect>) {
        self.rest(now);
        let step = self.calls[place].call.start(&mut self.desk, now);
        if let Some(ticket) = self.calls[place].call.ticket() {
            if self.places.len() <= ticket.index() {
                self.places.resize(ticket.index() + 1, None);
            }
            self.places[ticket.index()] = Some(place);
        }
        self.follow(step, place, now, effects);
        self.name(now, effects);
    }

    /// An attempt has ended.
    pub(super) fn replied(&mut self, place: usize, reply: &Reply, now: Time, effects: &mut Vec<Effect>) {
        self.rest(now);
        let step = self.calls[place].call.replied(&self.rules, &mut self.desk, reply, now, &mut self.rng);
        self.tell(now, effects);
        let id = self.calls[place].id;
        match step {
            Step::Sleep(at) => effects.push(Effect::Again { id, at }),
            Step::Finish(Err(failure)) => self.end(place, end_of(&failure, reply.class), effects),
            Step::Renew { .. } | Step::Queue | Step::Ask | Step::Send { .. } | Step::Finish(Ok(())) => {
                let end = if reply.class == Class::Success { End::Succeeded } else { End::Failed };
                self.end(place, end, effects);
            }
        }
        self.name(now, effects);
    }

    /// It is the moment that [`Hall::wakes_at`] said.
    pub(super) fn wake(&mut self, now: Time, effects: &mut Vec<Effect>) {
        self.rest(now);
        self.name(now, effects);
    }

    /// The shared store has answered; `None` if it couldn't be reached.
    pub(super) fn answered(
        &mut self,
        (place, ticket): (usize, Ticket),
        batch: &Batch,
        outcomes: Option<&Outcomes>,
        now: Time,
        effects: &mut Vec<Effect>,
    ) {
        self.rest(now);
        let asks = self.calls.get(place).is_some_and(|held| held.call.ticket() == Some(ticket));
        match (asks, outcomes) {
            (true, Some(outcomes)) => {
                let held = &mut self.calls[place];
                let step = held.call.decided(&self.rules, &self.limits, &mut self.desk, outcomes, now, &mut self.rng);
                self.follow(step, place, now, effects);
            }
            (true, None) => {
                self.calls[place].call.undecided(&mut self.desk);
                self.end(place, End::Failed, effects);
            }
            (false, Some(outcomes)) => {
                let refund = Call::unwanted(&self.rules, batch, outcomes);
                effects.extend(refund.map(|batch| Effect::Tell { batch: Box::new(batch) }));
                self.desk.lanes.poke();
            }
            (false, None) => {}
        }
        self.name(now, effects);
    }

    fn rest(&mut self, now: Time) {
        if let Some(hours) = &self.provider.hours {
            self.desk.lanes.pause(Lane::Background, hours.next(now));
        }
    }

    /// Carries on whom the lanes name, until they say to sleep.
    fn name(&mut self, now: Time, effects: &mut Vec<Effect>) {
        loop {
            let (ticket, expired) = match self.desk.lanes.poll(now) {
                Turn::Sleep(at) => {
                    self.wakes_at = at;
                    return;
                }
                Turn::Ask(ticket) => (ticket, false),
                Turn::Expired(ticket) => (ticket, true),
            };
            let place = self.places.get(ticket.index()).copied().flatten();
            let Some(place) =
                place.filter(|place| self.calls.get(*place).is_some_and(|held| held.call.ticket() == Some(ticket)))
            else {
                self.desk.lanes.cancel(ticket);
                continue;
            };
            let call = &mut self.calls[place].call;
            let step = match expired {
                true => call.expired(&mut self.desk),
                false => call.turn(&self.rules, &mut self.desk, now, &mut self.rng),
            };
            self.follow(step, place, now, effects);
        }
    }

    /// Follows a step as far as it leads without waiting.
    fn follow(&mut self, mut step: Step, place: usize, now: Time, effects: &mut Vec<Effect>) {
        loop {
            self.tell(now, effects);
            let held = &mut self.calls[place];
            match step {
                Step::Ask => match &self.store {
                    Some(store) => {
                        let outcomes = store.apply_now(self.desk.orders.ask(), now);
                        step =
                            held.call.decided(&self.rules, &self.limits, &mut self.desk, &outcomes, now, &mut self.rng);
                    }
                    None => {
                        let batch = Box::new(self.desk.orders.ask().clone());
                        let asking = held.call.ticket();
                        effects.extend(asking.map(|ticket| Effect::Ask { place, ticket, batch }));
                        return;
                    }
                },
                Step::Send { .. } => {
                    let attempt = Span::from_duration(self.provider.attempt_timeout);
                    let usual = self.rules.lane_rules[held.call.lane() as usize].timeout.min(attempt);
                    let patience = attempt.min(held.call.deadline().since(now));
                    let enough = Span::from_micros(usual.as_micros() / 2);
                    return effects.push(Effect::Send { id: held.id, patience, enough });
                }
                Step::Finish(Err(failure)) => return self.end(place, end_of(&failure, Class::Cancelled), effects),
                Step::Queue | Step::Renew { .. } | Step::Sleep(_) | Step::Finish(Ok(())) => return,
            }
        }
    }

    fn tell(&self, now: Time, effects: &mut Vec<Effect>) {
        let Some(batch) = self.desk.orders.tell() else { return };
        match &self.store {
            Some(store) => store.tell(batch, now),
            None => effects.push(Effect::Tell { batch: Box::new(batch.clone()) }),
        }
    }

    fn end(&mut self, place: usize, end: End, effects: &mut Vec<Effect>) {
        if let Some(held) = self.calls.try_remove(place) {
            effects.push(Effect::Ends { id: held.id, end });
        }
    }
}

/// How a call has ended that failed for this reason, after a last reply of this class.
fn end_of(failure: &Failure, last: Class) -> End {
    match failure {
        Failure::DeadlineExceeded => End::Failed,
        Failure::GaveUp(_) if last == Class::Throttled => End::Refused,
        Failure::GaveUp(_) => End::Failed,
        Failure::Unavailable(_)
        | Failure::RateLimited { .. }
        | Failure::QuotaSpent { .. }
        | Failure::Cooling { .. }
        | Failure::Resting { .. }
        | Failure::Paced { .. }
        | Failure::QueueFull(_) => End::Declined,
    }
}
