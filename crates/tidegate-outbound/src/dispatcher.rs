//! The dispatcher: the loop that runs the calls of a provider.
//!
//! Each event (a new call, a reply, a timer) takes the lock and makes one step of the state machine. Then the lanes
//! select calls until none is due. The holder of the lock advances each selected call, not the call's own task. So a
//! future that isn't polled for a while doesn't block the calls behind it.

mod call_slot;
mod changes;
mod operator;
mod peer_votes;
mod timer;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

use rand::SeedableRng;
use rand::rngs::SmallRng;
use slab::Slab;
use tidegate_core::call::{
    AttemptReport, Call, CallFailure, CallProgress, CallRules, InFlight, NextStep, ProviderState,
};
use tidegate_core::retry::Delivery;
use tidegate_core::{Batch, Class, Clock, Lane, Outcomes, QueueStep, Ticket, Time};
use tidegate_policy::{KeySeed, outbound};
use tidegate_runtime::random::random_u64;
use tidegate_store::spin_lock::{SpinLock, SpinLockGuard};
use tidegate_store::{Store, StoreError, StoreResponse};
use tokio::runtime::Handle;

use super::events::{ProviderChange, ProviderEvents};
use super::{CallErrorKind, Urgency};
pub(super) use call_slot::{CallSlot, StartOutcome};
use changes::CredentialChange;
use peer_votes::PeerVotes;
use timer::{Timer, TimerSignals};

/// The state that all calls to one provider share.
pub(super) struct ProviderInner<S, C> {
    pub outbound_config: Arc<outbound::OutboundConfig>,
    pub index: usize,
    pub rules: CallRules,
    pub store: Arc<S>,
    pub clock: C,
    dispatcher: SpinLock<Dispatcher>,
    timer_signals: Arc<TimerSignals>,
    peer_votes: PeerVotes,
    events: Arc<ProviderEvents>,
    /// The provider of this name by an earlier policy, while calls that began with it go on.
    earlier: Weak<Self>,
    /// The number of calls that have failed for each reason of [`CallErrorKind::REASONS`].
    pub failures: [AtomicU64; CallErrorKind::REASONS.len()],
}

struct Dispatcher {
    context: StepContext,
    /// The calls that wait or have a result that their futures haven't read yet. Bounded by the callers' futures.
    waiting_calls: Slab<WaitingCall>,
    /// The index of each queued call in `waiting_calls`, by its ticket's index.
    waiting_by_ticket: Vec<Option<usize>>,
    /// The time when the timer wakes, if it runs.
    timer_wakes_at: Time,
    last_step_at: Time,
    /// The number of the breaker's transitions that were published. Only replies and votes cause others.
    published_transitions: u64,
    /// The last published change of each credential; empty before the first.
    published_changes: Vec<CredentialChange>,
    /// The changes of credentials to be published after this step.
    changes: Vec<ProviderChange>,
}

/// The input of a step besides its call.
struct StepContext {
    state: ProviderState,
    rng: SmallRng,
    /// The runtime on which the last waiting call was added.
    runtime: Option<Handle>,
}

struct WaitingCall {
    call: Call,
    waker: Option<Waker>,
    result: Option<DispatchResult>,
    urgency: Option<Urgency>,
}

/// The result of the dispatch of a call: the credential to send it with, or the reason that it ends.
pub(super) type DispatchResult = Result<usize, CallErrorKind>;

impl Dispatcher {
    fn waiting_index(&self, ticket: Ticket) -> Option<usize> {
        let index = self.waiting_by_ticket.get(ticket.index()).copied().flatten()?;
        (self.waiting_calls.get(index)?.call.ticket() == Some(ticket)).then_some(index)
    }

    fn add_waiting(&mut self, call: Call, ticket: Ticket, urgency: Option<Urgency>) -> usize {
        self.context.runtime = Handle::try_current().ok().or_else(|| self.context.runtime.take());
        let index = self.waiting_calls.insert(WaitingCall { call, waker: None, result: None, urgency });
        if self.waiting_by_ticket.len() <= ticket.index() {
            self.waiting_by_ticket.resize(ticket.index() + 1, None);
        }
        self.waiting_by_ticket[ticket.index()] = Some(index);
        index
    }

    fn remove_waiting(&mut self, index: usize) -> Option<WaitingCall> {
        let waiting_call = self.waiting_calls.try_remove(index)?;
        if let Some(urgency) = &waiting_call.urgency {
            urgency.clear_waiting_index();
        }
        if self.waiting_calls.is_empty() && self.waiting_calls.capacity() > MAX_IDLE_CAPACITY {
            self.waiting_calls.shrink_to_fit();
        }
        Some(waiting_call)
    }

    fn set_result(&mut self, index: usize, result: DispatchResult) {
        if let Some(waiting_call) = self.waiting_calls.get_mut(index) {
            waiting_call.result = Some(result);
            if let Some(waker) = waiting_call.waker.take() {
                waker.wake();
            }
        }
    }
}

/// The largest capacity that is kept while no call waits.
const MAX_IDLE_CAPACITY: usize = 1024;

/// The call that holds the lock. If it can be decided at once, it need not wait.
struct InlineCall<'a> {
    call: &'a mut Call,
    result: Option<DispatchResult>,
}

impl<S, C> ProviderInner<S, C> {
    pub(super) fn config(&self) -> &outbound::ProviderConfig {
        &self.outbound_config.providers()[self.index]
    }

    pub(super) fn error_kind(&self, failure: CallFailure) -> CallErrorKind {
        CallErrorKind::new(&self.outbound_config, self.config(), failure)
    }
}

impl<S: Store, C: Clock> ProviderInner<S, C> {
    pub(super) fn new(
        outbound_config: Arc<outbound::OutboundConfig>,
        index: usize,
        seed: &KeySeed,
        store: Arc<S>,
        clock: C,
        events: Arc<ProviderEvents>,
        earlier: Option<&Arc<Self>>,
    ) -> Self {
        let config = &outbound_config.providers()[index];
        let rules = config.rules(seed);
        let mut state = config.new_state(&rules);
        state.is_paused = earlier.is_some_and(|earlier| earlier.inspect(|state, _| state.is_paused));
        let context = StepContext { state, rng: SmallRng::seed_from_u64(random_u64()), runtime: None };
        let dispatcher = Dispatcher {
            context,
            waiting_calls: Slab::new(),
            waiting_by_ticket: Vec::new(),
            timer_wakes_at: Time::NEVER,
            last_step_at: Time::ZERO,
            published_transitions: 0,
            published_changes: Vec::new(),
            changes: Vec::new(),
        };
        Self {
            outbound_config,
            index,
            rules,
            store,
            clock,
            dispatcher: SpinLock::new(dispatcher),
            timer_signals: Arc::default(),
            peer_votes: PeerVotes::default(),
            events,
            earlier: earlier.map(Arc::downgrade).unwrap_or_default(),
            failures: Default::default(),
        }
    }

    /// Takes the lock for a change at the present time.
    fn lock_for_step(&self) -> (SpinLockGuard<'_, Dispatcher>, Time) {
        // A panic can only come from a waker, after the step was complete.
        let mut dispatcher = self.dispatcher.lock();
        let now = self.clock.now();
        self.begin_step(&mut dispatcher, now);
        (dispatcher, now)
    }

    fn begin_step(&self, dispatcher: &mut Dispatcher, now: Time) {
        dispatcher.last_step_at = now;
        if let Some(hours) = &self.config().hours {
            dispatcher.context.state.lanes.pause(Lane::Background, hours.next_within(now));
        }
    }

    /// Makes a step for a call that doesn't wait, sends its updates to the store, and dispatches the due calls.
    fn run_step<T>(self: &Arc<Self>, step: impl FnOnce(&mut StepContext, Time) -> T) -> (T, Time) {
        let (mut guard, now) = self.lock_for_step();
        let dispatcher = &mut *guard;
        let done = step(&mut dispatcher.context, now);
        self.submit_updates(&dispatcher.context.state, now);
        self.dispatch(dispatcher, None, now);
        let has_changed = dispatcher.context.state.breaker.transitions() != dispatcher.published_transitions;
        drop(guard);
        if has_changed {
            self.publish_changes();
        }
        (done, now)
    }

    pub(super) fn inspect<T>(&self, look: impl FnOnce(&ProviderState, Time) -> T) -> T {
        let dispatcher = self.dispatcher.lock();
        look(&dispatcher.context.state, self.clock.now())
    }

    /// Queues a call, and decides about it at once if possible; otherwise the call waits. `started_at` is set if the
    /// caller has just read the clock. It is used as the present time if the lock is free.
    pub(super) fn start(
        self: &Arc<Self>,
        slot: &mut CallSlot,
        urgency: Option<&Urgency>,
        started_at: Option<Time>,
    ) -> StartOutcome {
        // A later step must not have happened, or windows would count the call at another time than it assumes.
        let uncontended =
            started_at.and_then(|at| Some((self.dispatcher.try_lock().filter(|free| free.last_step_at <= at)?, at)));
        let (mut dispatcher, now) = match uncontended {
            Some((mut dispatcher, at)) => {
                self.begin_step(&mut dispatcher, at);
                (dispatcher, at)
            }
            None => self.lock_for_step(),
        };
        let dispatcher = &mut *dispatcher;
        let call = slot.call();
        if let Some(lane) = urgency.and_then(Urgency::lane) {
            call.raise(lane, &mut dispatcher.context.state, now);
        }
        let state = &mut dispatcher.context.state;
        let started = call.start(state, now);
        self.submit_updates(state, now);
        if let Err(failure) = started {
            return StartOutcome::Decided(Err(self.error_kind(failure)), now);
        }
        let mut inline_call = InlineCall { call, result: None };
        self.dispatch(dispatcher, Some(&mut inline_call), now);
        if let Some(result) = inline_call.result {
            return StartOutcome::Decided(result, now);
        }
        if call.cancel_queued_hedge(&mut dispatcher.context.state) {
            return StartOutcome::Decided(Err(CallErrorKind::DeadlineExceeded), now);
        }
        let ticket = call.ticket().expect("invariant: a call that has entered and isn't decided about is in the queue");
        let index = dispatcher.add_waiting(slot.take(), ticket, urgency.cloned());
        *slot = CallSlot::Waiting(index);
        if let Some(urgency) = urgency {
            urgency.set_waiting_index(index);
        }
        StartOutcome::Waiting(index)
    }

    /// Makes the call of a hedged request; `None` if the retry budget is spent.
    pub(super) fn new_hedge(&self, call: &Call) -> Option<Call> {
        self.inspect(|state, _| call.new_hedge(state))
    }

    /// Handles the failure of one of two parallel requests, while the other is still running.
    pub(super) fn hedge_lost(self: &Arc<Self>, call: &mut Call, reply: &AttemptReport) {
        self.run_credential_step(|StepContext { state, rng, .. }, now| {
            call.hedge_lost(&self.rules, state, reply, now, rng);
        });
    }

    pub(super) async fn wait_for_result(self: &Arc<Self>, index: usize) -> (Call, DispatchResult, Time) {
        let mut timer_stopped = pin!(self.timer_signals.stopped.notified());
        poll_fn(|context| {
            // This precedes the check for a running timer, so that the end of a timer in between isn't missed.
            while timer_stopped.as_mut().poll(context).is_ready() {
                timer_stopped.set(self.timer_signals.stopped.notified());
            }
            let dispatcher = &mut *self.dispatcher.lock();
            let waiting_call =
                dispatcher.waiting_calls.get_mut(index).expect("invariant: a call waits until its future takes it");
            match waiting_call.result.take() {
                Some(result) => {
                    let waiting_call =
                        dispatcher.remove_waiting(index).expect("invariant: it is there under the same lock");
                    Poll::Ready((waiting_call.call, result, self.clock.now()))
                }
                None => {
                    let own_waker = context.waker();
                    waiting_call.waker.get_or_insert_with(|| own_waker.clone()).clone_from(own_waker);
                    if !self.timer_signals.is_running.load(Ordering::Acquire) && Handle::try_current().is_ok() {
                        self.schedule_wake(dispatcher, dispatcher.timer_wakes_at);
                    }
                    Poll::Pending
                }
            }
        })
        .await
    }

    pub(super) fn handle_reply(self: &Arc<Self>, call: &mut Call, reply: &AttemptReport) -> (NextStep, Time) {
        let closes = reply.verdict.class == Class::Auth || reply.verdict.class.is_refusal();
        if closes || reply.verdict.announced_wait().is_some() || call.has_switched_credential() {
            return self.run_credential_step(|StepContext { state, rng, .. }, now| {
                call.handle_reply(&self.rules, state, reply, now, rng)
            });
        }
        self.run_step(|StepContext { state, rng, .. }, now| call.handle_reply(&self.rules, state, reply, now, rng))
    }

    /// As [`run_step`](Self::run_step), for a reply after which a credential may not be used for a while.
    #[cold]
    fn run_credential_step<T>(self: &Arc<Self>, step: impl FnOnce(&mut StepContext, Time) -> T) -> (T, Time) {
        let (mut guard, now) = self.lock_for_step();
        let dispatcher = &mut *guard;
        let done = step(&mut dispatcher.context, now);
        self.submit_updates(&dispatcher.context.state, now);
        self.note_credential_changes(dispatcher, now);
        self.dispatch(dispatcher, None, now);
        drop(guard);
        self.publish_changes();
        (done, now)
    }

    /// Ends a call after its reply's body, and corrects the cost if it is known now.
    pub(super) fn end_in_flight(self: &Arc<Self>, in_flight: &mut InFlight, cost: Option<u64>) {
        let (mut dispatcher, now) = self.lock_for_step();
        let dispatcher = &mut *dispatcher;
        let state = &mut dispatcher.context.state;
        in_flight.end(&self.rules, state);
        if let Some(cost) = cost {
            in_flight.correct_cost(&self.rules, state, cost);
            self.submit_updates(state, now);
            state.lanes.clear_refusals();
        }
        self.dispatch(dispatcher, None, now);
    }

    /// Handles the rejection of a credential's login. Returns true if the request is to be sent again with another one.
    #[cold]
    pub(super) fn handle_renewal_failure(self: &Arc<Self>, call: &mut Call, credential: usize) -> bool {
        let (switches, _) = self.run_step(|StepContext { state, rng, .. }, now| {
            call.handle_renewal_failure(&self.rules, state, credential, now, rng)
        });
        switches
    }

    /// Cancels a call that its own task holds.
    pub(super) fn cancel(self: &Arc<Self>, call: &mut Call) {
        self.run_step(|StepContext { state, rng, .. }, now| match std::thread::panicking() {
            true => call.cancel_panicked(&self.rules, state, now, rng),
            false => call.cancel(&self.rules, state, Delivery::Unknown, now, rng),
        });
    }

    pub(super) fn cancel_waiting(self: &Arc<Self>, index: usize) {
        let (mut dispatcher, now) = self.lock_for_step();
        let dispatcher = &mut *dispatcher;
        let Some(mut waiting_call) = dispatcher.remove_waiting(index) else { return };
        let StepContext { state, rng, .. } = &mut dispatcher.context;
        // Nothing was sent, even if the call was already granted its turn.
        waiting_call.call.cancel(&self.rules, state, Delivery::Unsent, now, rng);
        self.submit_updates(state, now);
        self.dispatch(dispatcher, None, now);
    }

    pub(super) fn raise(self: &Arc<Self>, urgency: &Urgency) {
        let (mut dispatcher, now) = self.lock_for_step();
        let dispatcher = &mut *dispatcher;
        let (Some(index), Some(lane)) = (urgency.waiting_index(), urgency.lane()) else { return };
        let Some(waiting_call) = dispatcher.waiting_calls.get_mut(index) else { return };
        waiting_call.call.raise(lane, &mut dispatcher.context.state, now);
        self.dispatch(dispatcher, None, now);
    }

    fn submit_updates(&self, state: &ProviderState, now: Time) {
        if let Some(batch) = state.store_requests.updates() {
            self.store.submit(batch, now);
        }
    }

    /// Dispatches the calls that are due, and sets the timer.
    fn dispatch(self: &Arc<Self>, dispatcher: &mut Dispatcher, inline_call: Option<&mut InlineCall<'_>>, now: Time) {
        let at = self.dispatch_due(dispatcher, inline_call, now);
        self.schedule_wake(dispatcher, at);
    }

    /// Advances the calls that the lanes select. Returns the time until which none is due.
    fn dispatch_due(
        self: &Arc<Self>,
        dispatcher: &mut Dispatcher,
        mut inline_call: Option<&mut InlineCall<'_>>,
        now: Time,
    ) -> Time {
        loop {
            let step = dispatcher.context.state.poll(now);
            let ticket = match step {
                QueueStep::Sleep(at) => return at,
                QueueStep::AskStore(ticket) | QueueStep::Expired(ticket) | QueueStep::Displaced(ticket) => ticket,
            };
            if let Some(own) = inline_call.as_mut().filter(|own| own.call.ticket() == Some(ticket)) {
                own.result = self.advance(own.call, ticket, step, &mut dispatcher.context, now);
            } else if let Some(index) = dispatcher.waiting_index(ticket) {
                let call = &mut dispatcher.waiting_calls[index].call;
                if let Some(result) = self.advance(call, ticket, step, &mut dispatcher.context, now) {
                    dispatcher.set_result(index, result);
                }
            } else {
                dispatcher.context.state.lanes.cancel(ticket);
            }
        }
    }

    /// Advances a selected call. Returns its result, or `None` if it still waits.
    #[inline]
    fn advance(
        self: &Arc<Self>,
        call: &mut Call,
        ticket: Ticket,
        step: QueueStep,
        context: &mut StepContext,
        now: Time,
    ) -> Option<DispatchResult> {
        let StepContext { state, rng, .. } = context;
        let progress = call.handle_step(step, &self.rules, state, now, rng);
        self.resolve_step(progress, call, ticket, context, now)
    }

    /// Continues a step to a result, with as many requests to the store as it needs. `None` if the call still waits, or
    /// an answer of the store is pending.
    fn resolve_step(
        self: &Arc<Self>,
        mut progress: CallProgress,
        call: &mut Call,
        ticket: Ticket,
        context: &mut StepContext,
        now: Time,
    ) -> Option<DispatchResult> {
        loop {
            self.submit_updates(&context.state, now);
            match progress {
                CallProgress::AskStore => {}
                CallProgress::Send { credential } => return Some(Ok(credential)),
                CallProgress::Fail(failure) => return Some(Err(self.error_kind(failure))),
                CallProgress::Wait => return None,
            }
            match self.store.apply(context.state.store_requests.reservation(), now) {
                // Borrowed, because outcomes are large.
                StoreResponse::Ready(ref outcomes) => progress = self.handle_outcomes(call, outcomes, context, now),
                StoreResponse::Pending(answer) => {
                    let Some(runtime) = Handle::try_current().ok().or_else(|| context.runtime.clone()) else {
                        call.handle_store_error(&mut context.state);
                        let error = StoreError::Failed("there is no runtime to wait in".to_owned());
                        return Some(Err(CallErrorKind::Store(error)));
                    };
                    let (provider, batch) = (Arc::clone(self), context.state.store_requests.reservation().clone());
                    runtime.spawn(async move { provider.handle_store_answer(ticket, &batch, answer.await) });
                    return None;
                }
            }
        }
    }

    fn handle_outcomes(
        &self,
        call: &mut Call,
        outcomes: &Outcomes,
        context: &mut StepContext,
        now: Time,
    ) -> CallProgress {
        let StepContext { state, rng, .. } = context;
        call.handle_outcomes(&self.rules, self.store.limits(), state, outcomes, now, rng)
    }

    /// Handles a pending answer of a store.
    fn handle_store_answer(self: &Arc<Self>, ticket: Ticket, batch: &Batch, answer: Result<Outcomes, StoreError>) {
        let (mut dispatcher, now) = self.lock_for_step();
        let dispatcher = &mut *dispatcher;
        match (dispatcher.waiting_index(ticket), answer) {
            (Some(index), Ok(outcomes)) => {
                let Dispatcher { context, waiting_calls, .. } = dispatcher;
                let call = &mut waiting_calls[index].call;
                let progress = self.handle_outcomes(call, &outcomes, context, now);
                let result = self.resolve_step(progress, call, ticket, context, now);
                if let Some(result) = result {
                    dispatcher.set_result(index, result);
                }
            }
            (Some(index), Err(error)) => {
                dispatcher.waiting_calls[index].call.handle_store_error(&mut dispatcher.context.state);
                dispatcher.set_result(index, Err(CallErrorKind::Store(error)));
            }
            (None, Ok(outcomes)) => {
                if let Some(refund) = Call::refund_after_cancel(&self.rules, batch, &outcomes) {
                    self.store.submit(&refund, now);
                }
                dispatcher.context.state.lanes.clear_refusals();
            }
            (None, Err(_)) => {}
        }
        self.dispatch(dispatcher, None, now);
    }

    /// Ensures that a step happens at this time at the latest.
    fn schedule_wake(self: &Arc<Self>, dispatcher: &mut Dispatcher, at: Time) {
        let is_running = self.timer_signals.is_running.load(Ordering::Acquire);
        if at.is_never() || is_running && dispatcher.timer_wakes_at <= at {
            return;
        }
        dispatcher.timer_wakes_at = at;
        if is_running {
            self.timer_signals.reschedule.notify_one();
        } else if let Some(runtime) = Handle::try_current().ok().or_else(|| dispatcher.context.runtime.clone()) {
            self.timer_signals.is_running.store(true, Ordering::Release);
            // A runtime that is shutting down drops the future at once, and the drop must not need this lock.
            runtime.spawn(Timer::new(self).run());
        }
    }
}

impl<S, C> Drop for ProviderInner<S, C> {
    fn drop(&mut self) {
        self.timer_signals.reschedule.notify_one();
    }
}
