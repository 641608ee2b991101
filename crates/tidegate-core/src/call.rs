//! One outbound call, from its start to its end.
//!
//! ```text
//! start ── breaker ── queue ── turn ── ask ── decided ── breaker ── send ── replied ── finish
//!   ▲                   ▲               │ refused │                              │
//!   │                   └───────────────┴─────────┘                              │
//!   └────────────────────────────── sleep (retry) ◄──────────────────────────────┘
//! ```
//!
//! The breaker is checked early, so that no call waits in the queue without a chance. Its permit is taken late, so that
//! no probe is held during the wait. [`ProviderState`] is what all calls of a provider in this process share. Changes
//! in a store are a [`Batch`]. A driver does what [`CallProgress`] and [`NextStep`] say, and reports back.

mod hedge;
mod in_flight;
mod provider_state;
mod refusal;
mod reply;
mod routes;
mod rules;
mod scopes;
mod stats;
mod step;

pub use in_flight::InFlight;
pub use provider_state::{ProviderState, StoreRequests};
use rand_core::Rng;
use refusal::LimitRefusal;
pub use rules::{CallRules, LaneRules, MAX_LEAD, Measure, ProviderLimit};
use scopes::ChargedScope;
pub use scopes::{CallScope, MAX_SCOPES};
pub use stats::ProviderStats;
pub use step::{AttemptReport, CallFailure, CallProgress, NextStep};

use crate::breaker::{BreakerPermit, BreakerRefusal, BreakerState};
use crate::lanes::{Lane, QueueFullError, QueueStep, Refusal, RefusalScope, ScopedLane, Ticket, WaitReason};
use crate::remaining::EndedTotals;
use crate::retry::{Delivery, RetryTracker};
use crate::{Batch, Class, Limits, MAX_COST, Op, Outcomes, Span, Time, Verb};

/// The time for which a rejected credential isn't used.
pub const DISABLE_TIME: Span = Span::from_secs(300);

/// A credential that is left out for longer than this isn't disabled again.
const MIN_SECOND_DISABLE: Span = Span::from_secs(270);

/// The minimum time before a refused credential is tried again.
const MIN_CREDENTIAL_WAIT: Span = Span::from_millis(1);

/// The credentials that were rejected for one call, in a few bytes, because calls are moved often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RejectedCredentials([u16; 4]);

const NO_CREDENTIAL: u16 = u16::MAX;

/// The mark of a call that waits alone.
const ALONE: u64 = scopes::UNUSED_BIT;

impl Default for RejectedCredentials {
    fn default() -> Self {
        Self([NO_CREDENTIAL; 4])
    }
}

impl RejectedCredentials {
    fn is_empty(self) -> bool {
        self.0[0] == NO_CREDENTIAL
    }

    fn contains(self, credential: usize) -> bool {
        self.iter().any(|rejected| rejected == credential)
    }

    fn iter(self) -> impl Iterator<Item = usize> {
        self.0.into_iter().filter(|credential| *credential != NO_CREDENTIAL).map(usize::from)
    }

    /// Adds a credential. Returns false if the list is full.
    fn push(&mut self, credential: usize) -> bool {
        let place = self.0.iter_mut().find(|place| **place == NO_CREDENTIAL).zip(u16::try_from(credential).ok());
        place.map(|(place, credential)| *place = credential).is_some()
    }
}

#[derive(Debug)]
enum CallStage {
    Idle,
    Queued(Ticket),
    /// The store was asked for a grant with the credential of this index.
    Asking(Ticket, usize),
    Sent(SentRequest, BreakerPermit),
    /// Its last reply has arrived, to a request with this credential, but its body is still being read.
    Streaming(Lane, usize),
}

#[derive(Debug)]
struct SentRequest {
    credential: usize,
    sent_at: Time,
    charged_at: Time,
    counted_at: Time,
    lane: Lane,
    generation: u32,
    scope: ChargedScope,
    scope_generation: u32,
    /// The number of requests under way when it was sent, including itself.
    in_flight: u32,
    ended_before: EndedTotals,
}

/// One call to a provider.
#[derive(Debug)]
pub struct Call {
    lane: Lane,
    /// The lane that it was made for: its retries and its statistics are those of this lane.
    own_lane: Lane,
    /// The lane of the limits that were charged last.
    charged_lane: Lane,
    cost: u64,
    scope: CallScope,
    /// The scope that was charged last.
    charged_scope: ChargedScope,
    deadline: Time,
    started_at: Time,
    queued_at: Time,
    /// The failure to report at its deadline, if it waits past the known time because room may come earlier.
    failure_at_deadline: Option<CallFailure>,
    retry_tracker: RetryTracker,
    stage: CallStage,
    requests: u32,
    /// The time of the last charge, and the time at which windows counted it. Set by each grant and at the end of its
    /// request.
    charged_at: Time,
    counted_at: Time,
    /// The credential that has logged in again for this call, because its token was rejected.
    renewed_credential: u16,
    /// The credential that has just logged in, which is used first.
    preferred_credential: u16,
    /// True if its connection has switched protocols.
    is_tunnel: bool,
    /// The credentials that were rejected for this call.
    rejected: RejectedCredentials,
    /// True if it holds a retry of the budget that wasn't sent yet.
    holds_budget_retry: bool,
    /// True if another caller waits for it too.
    is_joined: bool,
    /// Its number in the order of arrival, once it was granted. It enters the queue there again if it keeps its place.
    arrival: Option<u64>,
    /// True if it was refused until a known time, for which it waits in the queue.
    keeps_place: bool,
    /// True if the provider keeps room for its next request, since it refused the last one.
    has_reservation: bool,
    /// True if it is a hedge: a second request beside another one, which waits for nothing.
    is_hedge: bool,
}

impl Call {
    /// A call of `cost` that starts at `now` and must have its reply by `deadline`. Default: after the lane's timeout.
    pub fn new(rules: &CallRules, lane: Lane, cost: u64, deadline: Option<Time>, now: Time) -> Self {
        let deadline = deadline.unwrap_or(now + rules.lane_rules[lane as usize].timeout);
        Self {
            lane,
            own_lane: lane,
            charged_lane: lane,
            cost: cost.min(MAX_COST),
            scope: CallScope::default(),
            charged_scope: ChargedScope::default(),
            deadline,
            started_at: now,
            queued_at: now,
            failure_at_deadline: None,
            retry_tracker: RetryTracker::new(deadline),
            stage: CallStage::Idle,
            requests: 0,
            charged_at: Time::ZERO,
            counted_at: Time::ZERO,
            renewed_credential: NO_CREDENTIAL,
            preferred_credential: NO_CREDENTIAL,
            is_tunnel: false,
            rejected: RejectedCredentials::default(),
            holds_budget_retry: false,
            is_joined: false,
            arrival: None,
            keeps_place: false,
            has_reservation: false,
            is_hedge: false,
        }
    }

    /// Sets what it calls. Default: nothing is known about that.
    pub fn set_scope(&mut self, scope: CallScope) {
        self.scope = scope;
    }

    /// The deadline for its reply.
    pub fn deadline(&self) -> Time {
        self.deadline
    }

    /// Its lane.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// True if a credential was rejected for it, and it continues with others.
    pub fn has_switched_credential(&self) -> bool {
        !self.rejected.is_empty()
    }

    /// The number of requests sent, without hedges.
    pub fn requests(&self) -> u32 {
        self.requests
    }

    /// Its start time.
    pub fn started_at(&self) -> Time {
        self.started_at
    }

    /// Its ticket in the queue, while it is queued or asks the store.
    pub fn ticket(&self) -> Option<Ticket> {
        match self.stage {
            CallStage::Queued(ticket) | CallStage::Asking(ticket, _) => Some(ticket),
            CallStage::Idle | CallStage::Sent(..) | CallStage::Streaming(..) => None,
        }
    }

    /// Enters the queue, for the first or for another attempt.
    pub fn start(&mut self, state: &mut ProviderState, now: Time) -> Result<(), CallFailure> {
        state.store_requests.updates.clear();
        if self.requests == 0 {
            state.stats.calls[self.own_lane as usize] += 1;
        }
        self.join_closed_route(state, now);
        let ticket = self.enqueue(state, now).inspect_err(|_| self.leave_queue(state))?;
        (self.stage, self.queued_at, self.failure_at_deadline) = (CallStage::Queued(ticket), now, None);
        Ok(())
    }

    /// Enqueues it, unless waiting is useless: its lane is paused or the credentials are closed until after its deadline,
    /// or it can't have its turn before, if the calls of its lane before it stay as long as they can.
    fn enqueue(&self, state: &mut ProviderState, now: Time) -> Result<Ticket, CallFailure> {
        if state.is_paused {
            return Err(CallFailure::ProviderPaused);
        }
        state.breaker.peek(now).map_err(|refusal| state.unavailable(refusal))?;
        if now >= self.deadline {
            return Err(CallFailure::DeadlineExceeded);
        }
        let until = state.lanes.paused_until(self.lane);
        if until >= self.deadline {
            return Err(CallFailure::LanePaused { until });
        }
        if state.pool.all_closed_until(now).is_some_and(|closed_until| closed_until >= self.deadline) {
            return Err(state.no_credential(now).failure());
        }
        let (arrival, place) = (self.arrival.filter(|_| self.keeps_place), self.place());
        let refusal = match arrival {
            None => state.lanes.refused_behind(self.deadline, place, self.cost, now),
            Some(_) => state.lanes.refused_past(self.deadline, place, self.cost, now),
        };
        if let Some(refusal) = refusal {
            return Err(refusal.failure());
        }
        let ticket = match arrival {
            Some(arrival) => state.lanes.enqueue_again(arrival, place, self.cost, self.deadline, now),
            None => match state.lanes.enqueue(place, self.cost, self.deadline, now) {
                Ok(ticket) => ticket,
                Err(full) => self.enqueue_by_displacing(full, state, now).map_err(CallFailure::QueueFull)?,
            },
        };
        if self.is_joined {
            state.lanes.join(ticket);
        }
        Ok(ticket)
    }

    #[cold]
    fn enqueue_by_displacing(
        &self,
        full: QueueFullError,
        state: &mut ProviderState,
        now: Time,
    ) -> Result<Ticket, QueueFullError> {
        // A hedge that must wait isn't sent.
        if self.is_hedge || !state.lanes.make_room(self.lane, self.deadline) {
            return Err(full);
        }
        state.lanes.enqueue(self.place(), self.cost, self.deadline, now)
    }

    /// Its place in the queue, with the calls of its scope. After a rejection it waits for another credential, alone.
    fn place(&self) -> ScopedLane {
        let alone = || ALONE | self.arrival.unwrap_or(0);
        self.lane.with_scope(if self.rejected.is_empty() { self.scope.queue_key() } else { alone() })
    }

    /// Handles the step that the lanes have named the call for: its turn, its expiry or its displacement. A sleep names none.
    #[inline]
    pub fn handle_step(
        &mut self,
        step: QueueStep,
        rules: &CallRules,
        state: &mut ProviderState,
        now: Time,
        rng: &mut impl Rng,
    ) -> CallProgress {
        match step {
            QueueStep::AskStore(_) => self.handle_turn(rules, state, now, rng),
            QueueStep::Expired(_) => CallProgress::Fail(self.handle_expiry(state, now)),
            QueueStep::Displaced(_) => {
                state.store_requests.updates.clear();
                self.fail(CallFailure::QueueFull(QueueFullError { lane: self.lane }), state)
            }
            QueueStep::Sleep(_) => CallProgress::Wait,
        }
    }

    /// Called when the lanes have chosen the call. Asks the store with the first credential that seems available.
    pub fn handle_turn(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        now: Time,
        rng: &mut impl Rng,
    ) -> CallProgress {
        state.store_requests.updates.clear();
        let CallStage::Queued(ticket) = self.stage else { return CallProgress::Wait };
        if state.is_paused {
            return self.fail(CallFailure::ProviderPaused, state);
        }
        if let Err(refusal) = state.breaker.peek(now) {
            return self.fail(state.unavailable(refusal), state);
        }
        // Its calls would take the probes of a half-open breaker again and again, which are for the other routes.
        if state.routes.is_only_failing(self.scope.route, now) && state.breaker.state(now) == BreakerState::HalfOpen {
            let failures = state.breaker.failures();
            let refusal = BreakerRefusal { state: BreakerState::HalfOpen, failures, reset_in: Span::MAX };
            return self.fail(state.unavailable(refusal), state);
        }
        if self.is_too_late(state, now) {
            return self.fail(CallFailure::DeadlineExceeded, state);
        }
        if self.join_closed_route(state, now) {
            state.lanes.move_to_scope(ticket, self.scope.queue_key(), now);
        }
        let scope = self.current_scope(rules, state);
        let pace = state.pace_of(scope.counted());
        if let Some(earliest) = pace.map(|pace| pace.next_at(now)).filter(|next_at| *next_at > now) {
            self.failure_at_deadline = None;
            let applies_to = if scope.counted() == 0 { RefusalScope::Provider } else { RefusalScope::Part };
            // A reply may raise the pace.
            let refusal =
                Refusal { until: earliest, reason: WaitReason::Pace, scope: applies_to, ..Refusal::default() };
            return self.wait_or_fail(refusal, state, now);
        }
        self.charged_scope = scope;
        let next = match self.preferred_credential == NO_CREDENTIAL && self.rejected.is_empty() {
            true if scope.is_none() => state.next_credential(self.cost, now, rng),
            true => state.credential_except(|_| false, scope, self.cost, now, rng),
            false => self.credential_after_rejection(state, now, rng),
        };
        match next {
            Some(credential) => {
                (self.stage, self.charged_lane) = (CallStage::Asking(ticket, credential), self.lane);
                self.fill_batch(&mut state.store_requests.reservation, rules, credential, Verb::Take);
                state.store_requests.reservation.context.lead = state.lead;
                CallProgress::AskStore
            }
            None => {
                // The end of the first call under way is unknown.
                self.failure_at_deadline = state.pool.has_busy().then_some(CallFailure::DeadlineExceeded);
                let rejected = self.rejected;
                let refusal = match scope.is_none() && rejected.is_empty() || state.pool.next(now, rng).is_none() {
                    true => state.no_credential(now),
                    false => state.no_credential_except(|it| rejected.contains(it), scope, self.cost, now),
                };
                self.wait_or_fail(refusal, state, now)
            }
        }
    }

    /// The scope that it belongs to now.
    #[inline]
    fn current_scope(&self, rules: &CallRules, state: &ProviderState) -> ChargedScope {
        match self.scope.queue_key() != 0 && rules.has_room_for_scope(self.lane) {
            true => state.scopes.charged_to(self.scope),
            false => ChargedScope::default(),
        }
    }

    /// Joins the scope of its route if it has no other and replies have closed that. Returns true if it has.
    #[inline]
    fn join_closed_route(&mut self, state: &mut ProviderState, now: Time) -> bool {
        let may_join = state.scopes.has_routes() && self.scope.queue_key() == 0;
        let joins = may_join && state.scopes.is_route_closed(self.scope.route, now);
        if joins {
            self.scope = CallScope::of_closed_route(self.scope.route);
        }
        joins
    }

    /// The credential to try after a login or a rejection: the one that has just logged in, or one that wasn't rejected.
    #[cold]
    fn credential_after_rejection(&self, state: &mut ProviderState, now: Time, rng: &mut impl Rng) -> Option<usize> {
        let preferred = usize::from(self.preferred_credential);
        if self.preferred_credential != NO_CREDENTIAL && state.pool.is_free(preferred, now) {
            return Some(preferred);
        }
        let (rejected, scope) = (self.rejected, self.charged_scope);
        let is_rejected = |it: usize| rejected.contains(it);
        let other = state.credential_except(is_rejected, scope, self.cost, now, rng);
        // Others than those that are left out may not use this path either.
        let other = other.or_else(|| state.left_out_credential(is_rejected, scope, now, rng));
        // If no other is left, the rejection is the call's answer.
        let none_is_left = || !state.routes.has_other(is_rejected, now);
        if other.is_none() && none_is_left() { state.pool.next(now, rng) } else { other }
    }

    fn has_renewed(&self, credential: usize) -> bool {
        usize::from(self.renewed_credential) == credential
    }

    /// True if its reply would hardly arrive in time after its wait, while other calls could still succeed: under
    /// overload, all capacity would be used for calls that time out. Half of its total time is always enough.
    fn is_too_late(&self, state: &ProviderState, now: Time) -> bool {
        let half_of_total = Span::from_micros(self.deadline.since(self.started_at).as_micros() / 2);
        now > self.queued_at
            && now + state.round_trips.usual_max().min(half_of_total) > self.deadline
            && Lane::ALL.iter().map(|lane| state.lanes.waiting(*lane)).sum::<usize>() > 1
    }

    /// Called when the lanes have removed it: its deadline has passed, or it can't have its turn before.
    pub fn handle_expiry(&mut self, state: &mut ProviderState, now: Time) -> CallFailure {
        state.store_requests.updates.clear();
        self.leave_queue(state);
        let refusal = state.lanes.refused_past(self.deadline, self.place(), self.cost, now);
        let known = refusal.map(|refusal| refusal.failure()).or(self.failure_at_deadline);
        known.unwrap_or(CallFailure::DeadlineExceeded)
    }

    /// Called for a waiting call when an operator stops the calls to the provider. An answer of the store that is still
    /// pending is then for [`refund_after_cancel`](Self::refund_after_cancel).
    pub fn handle_pause(&mut self, state: &mut ProviderState) -> CallFailure {
        state.store_requests.updates.clear();
        self.leave_queue(state);
        CallFailure::ProviderPaused
    }

    /// Handles the outcomes of [`StoreRequests::reservation`], which the last step of the call has filled.
    pub fn handle_outcomes(
        &mut self,
        rules: &CallRules,
        limits: &Limits,
        state: &mut ProviderState,
        outcomes: &Outcomes,
        now: Time,
        rng: &mut impl Rng,
    ) -> CallProgress {
        state.store_requests.updates.clear();
        let CallStage::Asking(ticket, credential) = self.stage else { return CallProgress::Wait };
        let ops = state.store_requests.reservation.ops().iter();
        let refused = ops.zip(outcomes.list()).filter(|(_, outcome)| outcome.admission.refuses());
        // If only the credential is refused, another may be granted. Other refusals are independent of the credential.
        let scope = self.charged_scope;
        let is_in_shared_scope = |op: &Op| !scope.is_none() && op.key == rules.shared_scope_key(scope.key());
        let is_shared = |op: &Op| op.key == rules.key || is_in_shared_scope(op);
        let Some((op, outcome)) = refused.max_by_key(|(op, outcome)| (is_shared(op), outcome.retry_at)) else {
            return self.handle_grant(ticket, credential, rules, state, outcomes, now);
        };
        self.stage = CallStage::Queued(ticket);
        let is_shared = is_shared(op);
        let refusal = LimitRefusal {
            limit: op.limit,
            kind: limits.get(op.limit).map(crate::Limit::kind),
            retry_at: outcome.retry_at,
            refused_at: outcomes.now(),
        };
        if is_shared {
            let is_in_scope = op.key != rules.key;
            return self.handle_shared_refusal(rules, state, &refusal, is_in_scope, now);
        }
        let is_in_scope = !scope.is_none() && op.key == rules.scope_key(credential, scope.key());
        if is_in_scope && state.close_scope(scope.key(), credential, rules, &refusal, now) {
            return self.handle_turn(rules, state, now, rng);
        }
        state.close_credential(credential, rules, &refusal, now);
        self.handle_turn(rules, state, now, rng)
    }

    /// Handles a store that failed and returned no outcomes.
    pub fn handle_store_error(&mut self, state: &mut ProviderState) {
        self.leave_queue(state);
    }

    fn handle_grant(
        &mut self,
        ticket: Ticket,
        credential: usize,
        rules: &CallRules,
        state: &mut ProviderState,
        outcomes: &Outcomes,
        now: Time,
    ) -> CallProgress {
        (self.charged_at, self.counted_at) = (outcomes.now(), outcomes.now() + state.lead);
        self.arrival = state.lanes.arrival(ticket);
        let granted = state.lanes.grant(ticket, now).ok_or(CallFailure::DeadlineExceeded).and_then(|lane| {
            state.breaker.take_for(state.probe_time(), now).map(|permit| (lane, permit)).map_err(|refusal| {
                state.lanes.record_end(lane);
                state.lanes.clear_refusals();
                state.unavailable(refusal)
            })
        });
        let (lane, permit) = match granted {
            Ok(granted) => granted,
            Err(failure) => {
                self.stage = CallStage::Idle;
                self.prepare_correction(rules, state, credential, Verb::Refund);
                return self.fail(failure, state);
            }
        };
        state.pool.record_use(credential);
        if state.pool.is_on_trial(credential) {
            state.pool.record_trial(credential, now);
        }
        let scope = self.charged_scope;
        let ended_before = if scope.counted() != 0 {
            state.scopes.record_sent(scope.counted(), credential, self.cost, now)
        } else {
            let tracker = state.remaining_trackers.get_mut(credential);
            tracker.map_or(EndedTotals::default(), |tracker| tracker.record_sent(self.cost))
        };
        state.round_trips.record_grant(now);
        if let Some(pace) = state.pace_of_mut(scope.counted(), now) {
            pace.sent(now);
        }
        state.stats.waits[self.own_lane as usize].record(now.since(self.queued_at));
        if self.requests == 0 {
            state.budget.record_first_try();
        } else {
            state.stats.retries += 1;
        }
        self.holds_budget_retry = false;
        self.requests += 1;
        let generation = |place: usize| outcomes.list().get(place).map_or(0, |outcome| outcome.generation);
        let sent = SentRequest {
            credential,
            sent_at: now,
            charged_at: self.charged_at,
            counted_at: self.counted_at,
            lane,
            generation: generation(0),
            scope,
            scope_generation: if scope.is_none() { 0 } else { generation(1) },
            in_flight: state.lanes.total_in_flight().saturating_sub(state.tunnels),
            ended_before,
        };
        self.stage = CallStage::Sent(sent, permit);
        CallProgress::Send { credential }
    }

    fn end_streaming(&mut self, state: &mut ProviderState) {
        // A connection that has switched protocols has the call's last reply, so it isn't ended here.
        if let CallStage::Streaming(lane, credential) = self.stage {
            state.record_end(lane, credential);
            self.stage = CallStage::Idle;
        }
    }

    /// A caller of this lane waits for it too: moves it to that lane if that is more urgent, unless it was sent already,
    /// and lets no other call take its place.
    pub fn raise(&mut self, lane: Lane, state: &mut ProviderState, now: Time) {
        self.is_joined = true;
        match self.stage {
            CallStage::Idle => self.lane = self.lane.max(lane),
            CallStage::Queued(ticket) | CallStage::Asking(ticket, _) => {
                state.lanes.join(ticket);
                if state.lanes.raise(ticket, lane, now) == Ok(true) {
                    self.lane = lane;
                }
            }
            CallStage::Sent(..) | CallStage::Streaming(..) => {}
        }
    }

    /// Called when no caller waits for it. Gives back everything but the charge of a request that was sent, which stays in
    /// flight while the provider may work on it.
    pub fn cancel(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        delivery: Delivery,
        now: Time,
        rng: &mut impl Rng,
    ) {
        self.cancel_with(&AttemptReport::new(Class::Cancelled, delivery), rules, state, now, rng);
    }

    /// Does the same after a panic of the caller's code. What was sent is unknown, and nothing stays in flight.
    pub fn cancel_panicked(&mut self, rules: &CallRules, state: &mut ProviderState, now: Time, rng: &mut impl Rng) {
        let report = AttemptReport::new(Class::Cancelled, Delivery::Unknown);
        self.cancel_with(&AttemptReport { is_abandoned: false, ..report }, rules, state, now, rng);
    }

    fn cancel_with(
        &mut self,
        report: &AttemptReport,
        rules: &CallRules,
        state: &mut ProviderState,
        now: Time,
        rng: &mut impl Rng,
    ) {
        state.store_requests.updates.clear();
        self.leave_queue(state);
        self.end_streaming(state);
        self.finish_attempt(rules, state, report, now, rng);
    }

    /// Returns the refund for outcomes that arrive after the call was abandoned. `None` if nothing was charged.
    pub fn refund_after_cancel(rules: &CallRules, batch: &Batch, outcomes: &Outcomes) -> Option<Batch> {
        if outcomes.refuses() {
            return None;
        }
        let charged_at = outcomes.now();
        let mut refund = Batch::new(0).with_charged_at(charged_at).with_counted_at(charged_at + batch.context().lead);
        for op in batch.ops().iter().filter(|op| op.limit != rules.cooldown) {
            push_required(&mut refund, Op::new(op.limit, Verb::Refund, op.key, op.cost));
        }
        Some(refund)
    }

    fn fail(&mut self, failure: CallFailure, state: &mut ProviderState) -> CallProgress {
        self.leave_queue(state);
        CallProgress::Fail(failure)
    }

    /// Leaves the queue and gives back an unsent retry of the budget.
    fn leave_queue(&mut self, state: &mut ProviderState) {
        if let Some(ticket) = self.ticket() {
            state.lanes.cancel(ticket);
            self.stage = CallStage::Idle;
        }
        if core::mem::take(&mut self.holds_budget_retry) {
            state.budget.give_back();
        }
    }

    /// Fills a batch with the operations of an attempt with this credential. The cool-downs come first.
    fn fill_batch(&self, batch: &mut Batch, rules: &CallRules, credential: usize, verb: Verb) {
        batch.clear();
        if verb == Verb::Take {
            push_required(batch, Op::new(rules.cooldown, verb, rules.credential_keys[credential], 1));
            if !self.charged_scope.is_none() {
                let key = rules.scope_key(credential, self.charged_scope.key());
                push_required(batch, Op::new(rules.cooldown, verb, key, 1));
            }
        }
        let counted = self.charged_scope.counted();
        rules.limits_with_keys(self.charged_lane, credential, counted).for_each(|(provider_limit, key)| {
            if verb != Verb::Settle || provider_limit.settles {
                let cost = if provider_limit.measure == Measure::Calls { 1 } else { self.cost };
                push_required(batch, Op::new(provider_limit.limit, verb, key, cost));
            }
        });
    }
}

fn push_required(batch: &mut Batch, mut op: Op) {
    op.must_fit = true;
    batch.push(op).expect("invariant: a provider's limits and its cool-down fit into one batch");
}
