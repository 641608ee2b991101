//! The end of an attempt: what it tells the breaker, the limits and the credentials, and the next step.

use rand_core::Rng;

use super::routes::Rejection;
use super::scopes::ALL_CREDENTIALS;
use super::{
    AttemptReport, Call, CallFailure, CallRules, CallScope, CallStage, DISABLE_TIME, MIN_SECOND_DISABLE, NO_CREDENTIAL,
    NextStep, ProviderState, SentRequest, push_required,
};
use crate::breaker::{BreakerPermit, BreakerState};
use crate::retry::{Delivery, FailedAttempt, NoRetryReason};
use crate::{Batch, Class, Key, MAX_COST, Op, Remaining, RemainingAmount, Scope, Span, Time, Verb, Verdict};

/// The time after which a credential is tried again whose quota is spent for an unknown time.
const QUOTA_PROBE_INTERVAL: Span = Span::from_secs(300);
/// The longest closing, by the costs that stores can hold. A longer one ends with a probe, whose reply closes again.
const MAX_CLOSING: Span = Span::from_micros(MAX_COST);
/// The closing until the store tells the length that it has chosen.
const MIN_CLOSING: Span = Span::from_micros(1);
/// The length of a closing without a wait of another scope than the request's.
const OTHER_SCOPE_CLOSING: Span = Span::from_secs(1);

impl Call {
    /// Handles the end of an attempt and decides the next step.
    pub fn handle_reply(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        reply: &AttemptReport,
        now: Time,
        rng: &mut impl Rng,
    ) -> NextStep {
        state.store_requests.updates.clear();
        let verdict = &reply.verdict;
        let Some(credential) = self.finish_attempt(rules, state, reply, now, rng) else { return NextStep::Done };
        if reply.is_postponed && now < self.deadline {
            // The credential that has just logged in is used next, if it still has room.
            self.preferred_credential = u16::try_from(credential).unwrap_or(NO_CREDENTIAL);
            self.requests -= 1;
            state.stats.postponed += 1;
            self.keeps_place = true;
            return NextStep::RetryAt(now);
        }
        if self.needs_login_renewal(rules, reply, credential) {
            self.renewed_credential = u16::try_from(credential).unwrap_or(NO_CREDENTIAL);
            self.preferred_credential = self.renewed_credential;
            return NextStep::RenewLogin { credential };
        }
        // A provider that asks not to retry means the rejected credential.
        if verdict.class == Class::Auth
            && verdict.rejects_credential
            && reply.unreplayable_reason.is_none()
            && self.switch_credential(rules, state, credential, now, rng)
        {
            self.end_streaming(state);
            return NextStep::RetryAt(now);
        }
        if verdict.class == Class::Cancelled && now >= self.deadline {
            return NextStep::Failed(CallFailure::DeadlineExceeded);
        }
        match verdict.class {
            Class::Success | Class::Permanent | Class::Auth | Class::Cancelled => return NextStep::Done,
            Class::Unknown => {
                let reason = if reply.is_repeatable { NoRetryReason::Final } else { NoRetryReason::NotIdempotent };
                return NextStep::Failed(CallFailure::NotRetried(reason));
            }
            Class::Throttled | Class::Quota | Class::Unavailable | Class::Transient => {}
        }
        let attempt = FailedAttempt {
            class: verdict.class,
            is_repeatable: reply.is_repeatable,
            unreplayable_reason: reply.unreplayable_reason,
            asks_not_to_retry: verdict.asks_not_to_retry,
            retry_after: verdict.wait.or((verdict.class == Class::Quota).then_some(QUOTA_PROBE_INTERVAL)),
            has_reservation: self.has_reservation,
            has_other_credential: verdict.class.is_refusal()
                && state
                    .credential_except(|other| other == credential, self.charged_scope, self.cost, now, rng)
                    .is_some(),
        };
        let retry = &rules.lane_rules[self.own_lane as usize].retry;
        match self.retry_tracker.next_attempt_at(retry, &attempt, Some(&state.budget), now, rng) {
            Ok(at) => {
                self.holds_budget_retry = attempt.spends_budget();
                // The reply's body is not read further.
                self.end_streaming(state);
                // It waits for its closed credential in the queue, ahead of later calls, unless another would take it.
                // A reservation that was of no use is followed by a back-off.
                let has_time = verdict.announced_wait().is_some() && !reply.presented_reservation;
                self.keeps_place = attempt.has_reservation || has_time;
                let waits_in_queue = self.keeps_place && !attempt.has_other_credential;
                NextStep::RetryAt(if waits_in_queue { now } else { at })
            }
            Err(reason) => NextStep::Failed(match (reason, verdict.spent_quota, verdict.wait) {
                (
                    NoRetryReason::RetryAfterTooLong { .. }
                    | NoRetryReason::Deadline { .. }
                    | NoRetryReason::Exhausted { .. },
                    Some(limit),
                    Some(wait),
                ) => CallFailure::QuotaSpent { limit, resets_at: now + wait },
                _ => CallFailure::NotRetried(reason),
            }),
        }
    }

    /// True if the reply asks for a new login and the request can be sent again after it.
    fn needs_login_renewal(&self, rules: &CallRules, reply: &AttemptReport, credential: usize) -> bool {
        reply.verdict.class == Class::Auth
            && rules.can_renew_login
            && !self.has_renewed(credential)
            && reply.unreplayable_reason.is_none()
    }

    /// Called when the login requested by [`NextStep::RenewLogin`] was rejected. Returns true if the request is to be
    /// sent again at once, with another credential; otherwise the call is done.
    pub fn handle_renewal_failure(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        credential: usize,
        now: Time,
        rng: &mut impl Rng,
    ) -> bool {
        state.store_requests.updates.clear();
        self.switch_credential(rules, state, credential, now, rng)
    }

    /// Notes that a credential was rejected for this call. Returns true if another one can be tried before the deadline. A
    /// rejected credential is disabled only after another one was accepted for the same request, because a provider may also
    /// reject the request.
    fn switch_credential(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        credential: usize,
        now: Time,
        rng: &mut impl Rng,
    ) -> bool {
        let retry = &rules.lane_rules[self.own_lane as usize].retry;
        if rules.credential_keys.len() == 1 || now >= self.deadline {
            return false;
        }
        (self.renewed_credential, self.preferred_credential) = (NO_CREDENTIAL, NO_CREDENTIAL);
        if !self.rejected.push(credential) {
            return false;
        }
        let (rejected, scope) = (self.rejected, self.current_scope(rules, state));
        let is_rejected = |it: usize| rejected.contains(it);
        let has_other = state.credential_except(is_rejected, scope, self.cost, now, rng).is_some()
            || state.left_out_credential(is_rejected, scope, now, rng).is_some()
            || state.routes.has_other(is_rejected, now)
                && state.no_credential_except(is_rejected, scope, self.cost, now).until < self.deadline;
        // It waits for the other one at its place in the queue.
        self.keeps_place = has_other && self.retry_tracker.take_token_retry(retry);
        self.keeps_place
    }

    /// Reports the end of the request under way, if there is one, to all that learn from it. Returns its credential.
    pub(super) fn finish_attempt(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        reply: &AttemptReport,
        now: Time,
        rng: &mut impl Rng,
    ) -> Option<usize> {
        let (sent, permit) = self.take_sent()?;
        let verdict = &reply.verdict;
        let (class, elapsed) = (verdict.class, now.since(sent.sent_at));
        (self.has_reservation, self.keeps_place) = (false, false);
        if class == Class::Throttled {
            state.gives_reservations = verdict.has_reservation && verdict.announced_wait().is_some();
            // A reservation that was of no use may have been used by another request, or the provider keeps none.
            self.has_reservation = state.gives_reservations && !reply.presented_reservation;
        }
        if !reply.is_postponed {
            state.stats.attempts[class as usize] += 1;
        }
        if reply.delivery == Delivery::Answered {
            state.stats.reply_times.record(elapsed);
            state.longest_reply.record(elapsed, now);
        }
        let is_one_route = self.report_to_breaker(state, permit, &sent, verdict, now, rng);
        // Earlier refusals by a rate were computed without this round trip.
        if state.round_trips.record_end(sent.sent_at, reply.delivery, class, now) && !rules.jitter.is_zero() {
            state.lanes.clear_refusals();
        }
        if rules.tracks_remaining || !sent.scope.is_none() {
            self.learn_remaining(state, &sent, reply, now);
        }
        let is_alone = rules.credential_keys.len() == 1;
        let counted = sent.scope.counted();
        let gives_reservations = state.gives_reservations;
        if let Some(pace) = state.pace_of_mut(counted, now) {
            let calls_left = told_calls(verdict, gives_reservations);
            pace.ended(sent.sent_at, class, calls_left.filter(|_| is_alone), now, rng);
            match counted {
                0 => state.lanes.clear_refusals(),
                _ => state.lanes.clear_scope_refusals(self.scope.queue_key()),
            }
        }
        if let Some(adaptive) = &mut state.adaptive_limit {
            adaptive.sample(elapsed, sent.in_flight, class, now);
            state.apply_adaptive_limit(rules);
        }
        if reply.is_streaming && !self.needs_login_renewal(rules, reply, sent.credential) {
            self.stage = CallStage::Streaming(sent.lane, sent.credential);
            self.is_tunnel = reply.is_tunnel;
            if reply.is_tunnel {
                state.tunnels += 1;
                state.apply_adaptive_limit(rules);
            }
        } else if reply.is_abandoned {
            state.record_abandoned(rules, &sent, now);
        } else {
            state.record_end(sent.lane, sent.credential);
        }
        if state.pool.record_trial_end(sent.credential, sent.sent_at, class.proves_provider()) {
            state.lanes.clear_refusals();
        }
        let correction = match reply.delivery {
            Delivery::Unsent => Some(Verb::Refund),
            Delivery::Answered if sent.counted_at > now && rules.lead > Span::ZERO => Some(Verb::Settle),
            Delivery::Answered | Delivery::Unknown => None,
        };
        // Another request of the call may have been charged since.
        (self.charged_at, self.counted_at, self.charged_scope) = (sent.charged_at, sent.counted_at, sent.scope);
        if let Some(verb) = correction {
            self.prepare_correction(rules, state, sent.credential, verb);
            if state.store_requests.updates().is_some() {
                state.lanes.clear_refusals();
                if verb == Verb::Settle {
                    self.counted_at = now;
                }
            }
        }
        let is_plain = class == Class::Success && verdict.wait.is_none() && verdict.spent_until.is_none();
        let has_closed = sent.generation > 0 || sent.scope_generation > 0 || !self.rejected.is_empty();
        if !is_plain || has_closed || verdict.scope != Scope::Call {
            self.close_and_open(rules, state, &sent, (verdict, is_one_route), now);
        }
        Some(sent.credential)
    }

    /// Tells the breaker. Calls that meet one announced pause are one event. Returns true if the route of the call fails
    /// while others work.
    fn report_to_breaker(
        &self,
        state: &mut ProviderState,
        permit: BreakerPermit,
        sent: &SentRequest,
        verdict: &Verdict,
        now: Time,
        rng: &mut impl Rng,
    ) -> bool {
        let class = verdict.class;
        let (mut may_open, mut is_one_route) = (false, false);
        if class.is_failure() {
            let is_pause = verdict.announced_wait().is_some();
            let is_outage = state.round_trips.record_failure(sent.sent_at, now)
                || state.lanes.total_in_flight().saturating_sub(state.tunnels) <= 1;
            is_one_route = state.routes.record_failure(self.scope.route, now);
            may_open = (is_outage || is_pause) && !is_one_route;
            // The probe of a half-open breaker is sent after the last failure.
            let is_counted = is_pause && state.breaker.has_failed_since(sent.sent_at, now);
            // A probe at a route that always fails says nothing about the others.
            if is_counted || is_one_route && state.breaker.state(now) == BreakerState::HalfOpen {
                state.breaker.give_back(permit);
                return is_one_route;
            }
        } else if class.proves_provider() {
            state.routes.record_good(self.scope.route, sent.credential, class != Class::Auth, now);
        }
        state.breaker.report_beside(permit, (class, now.since(sent.sent_at)), may_open, now, rng);
        is_one_route
    }

    /// Learns the remaining amounts that a reply reports, for its scope or for the credential.
    fn learn_remaining(&self, state: &mut ProviderState, sent: &SentRequest, reply: &AttemptReport, now: Time) {
        let calls = told_calls(&reply.verdict, state.gives_reservations);
        let remaining = Remaining { calls, ..reply.verdict.remaining };
        let was_answered = reply.delivery == Delivery::Answered;
        let counted = sent.scope.counted();
        if !sent.scope.is_none() {
            state.lanes.clear_scope_refusals(self.scope.queue_key());
        }
        if counted != 0 {
            let told = match self.told_scope(&reply.verdict) {
                Scope::Named(key) => key,
                Scope::Call | Scope::Credential | Scope::Provider => counted,
            };
            let request = (self.cost, (sent.sent_at, sent.ended_before), was_answered);
            state.scopes.record_end([counted, told], sent.credential, request, remaining, now);
        } else if let Some(tracker) = state.remaining_trackers.get_mut(sent.credential) {
            tracker.record_end(self.cost, (sent.sent_at, sent.ended_before), was_answered, remaining);
            if self.has_reservation {
                tracker.keep_room();
            }
            state.lanes.clear_refusals();
        }
    }

    /// The scope that a reply is about. Another name than that of the request counts only if calls learn theirs from
    /// replies: no other call waits for it.
    fn told_scope(&self, verdict: &Verdict) -> Scope {
        match verdict.scope {
            Scope::Named(key) if key != self.scope.key && !self.scope.is_learnt => Scope::Call,
            scope => scope,
        }
    }

    /// Closes what the verdict is about, or records that it is open.
    #[cold]
    fn close_and_open(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        sent: &SentRequest,
        (verdict, is_one_route): (&Verdict, bool),
        now: Time,
    ) {
        let counted = sent.scope.counted();
        let told = self.told_scope(verdict);
        if let (Scope::Named(key), CallScope { route, is_learnt: true, closes_only: false, .. }) = (told, self.scope) {
            state.scopes.teach(route, key, now, now);
        }
        let is_alone = rules.credential_keys.len() == 1;
        let wait = verdict.announced_wait().unwrap_or(Span::ZERO).min(MAX_CLOSING);
        let is_quota = verdict.class == Class::Quota;
        let wait = if is_quota && wait.is_zero() { QUOTA_PROBE_INTERVAL } else { wait };
        let closes = !wait.is_zero() || verdict.class.is_refusal();
        let part = if closes {
            self.closed_part(rules, state, sent, (verdict, is_one_route), now + wait, now)
        } else {
            Part::default()
        };
        match verdict.class {
            // A pace risks throttles. Closing the cool-down at each of them would cost more than the pace gains.
            Class::Throttled if state.pace.is_some() && is_alone && wait.is_zero() => {}
            Class::Throttled | Class::Quota => {
                if !is_quota && part == Part::default() {
                    state.double_lead(sent.sent_at, now);
                }
                let closing = if self.has_reservation { Closing::Reserved } else { Closing::Throttled };
                state.close(rules, sent, part, closing, (wait, verdict.is_cut), now);
                if let Some(quota) = verdict.spent_quota {
                    state.pool.set_spent_quota(sent.credential, quota, now + wait);
                } else if !wait.is_zero()
                    && let Some(pace) = state.pace_of_mut(counted, now).filter(|_| is_alone)
                {
                    pace.record_wait(wait, now);
                }
            }
            // The end of the pause is another first call.
            Class::Unavailable | Class::Transient | Class::Unknown | Class::Success if closes => {
                state.close(rules, sent, part, Closing::Paused, (wait, verdict.is_cut), now);
            }
            Class::Success => {
                if sent.generation > 0 {
                    let key = rules.credential_keys[sent.credential];
                    push_required(
                        state.updates(),
                        cooldown_op(rules, key, Verb::Success { generation: sent.generation }),
                    );
                }
                if sent.scope_generation > 0 {
                    let key = rules.scope_key(sent.credential, sent.scope.key());
                    let verb = Verb::Success { generation: sent.scope_generation };
                    // Without it, the next closing lasts longer.
                    let _ = state.updates().push(cooldown_op(rules, key, verb));
                }
                if !sent.scope.is_none() {
                    state.scopes.end_leaving_out(sent.scope.key(), sent.credential);
                }
            }
            Class::Auth if !rules.can_renew_login || self.has_renewed(sent.credential) => {
                let is_certain = verdict.rejects_credential;
                match state.routes.record_rejection(self.scope.route, sent.credential, is_certain, now) {
                    // Without routes, a credential that another one replaces for the same request is known to be rejected.
                    Rejection::OfCredential if is_certain && self.scope.route == 0 => {}
                    Rejection::OfCredential => disable_credential(rules, state, sent.credential, now),
                    Rejection::AtRoute => self.leave_out_at_route(rules, state, sent, now),
                    Rejection::Unknown => {}
                }
            }
            _ => {}
        }
        if verdict.class == Class::Success {
            // A credential that works elsewhere may not use this path, which a caller has chosen.
            for rejected in core::mem::take(&mut self.rejected).iter() {
                if !state.routes.works(rejected, now) {
                    disable_credential(rules, state, rejected, now);
                }
            }
        }
        // Where the amounts are learnt, they tell it, and newer replies correct them.
        let is_known =
            rules.tracks_remaining && (verdict.remaining.calls.is_some() || verdict.remaining.cost.is_some());
        if let Some(until) = verdict.spent_until.filter(|until| *until > now && !state.gives_reservations && !is_known)
        {
            let key = match told {
                Scope::Named(key) if counted != 0 => key,
                _ => counted,
            };
            if key == 0 || !state.scopes.close(key, sent.credential, until, key != counted, now) {
                state.pool.set_cooling_until(sent.credential, until, now);
            }
        }
    }

    /// The part of the provider that a reply closes until a time.
    fn closed_part(
        &self,
        rules: &CallRules,
        state: &mut ProviderState,
        sent: &SentRequest,
        (verdict, is_one_route): (&Verdict, bool),
        until: Time,
        now: Time,
    ) -> Part {
        // An outage isn't one of the credential.
        let for_all = verdict.class.is_failure();
        let CallScope { route, key: own, is_learnt, .. } = self.scope;
        let has_room = rules.has_room_for_scope(self.lane);
        match self.told_scope(verdict) {
            Scope::Named(key) if has_room => {
                let until = until.max(now + OTHER_SCOPE_CLOSING);
                let is_known = !is_learnt || state.scopes.teach(route, key, until, now);
                if is_known { Part { key, for_all, is_taught: key != own } } else { Part::default() }
            }
            Scope::Call => {
                let counted = sent.scope.counted();
                // One route that fails while others work.
                let closes_route = counted == 0 && for_all && is_one_route && has_room;
                let key = match own {
                    _ if !closes_route => counted,
                    0 if !state.scopes.teach(route, route, until, now) => 0,
                    0 => route,
                    own => own,
                };
                Part { key, for_all, is_taught: false }
            }
            Scope::Named(_) | Scope::Credential => Part::default(),
            Scope::Provider => Part { for_all: true, ..Part::default() },
        }
    }

    /// Leaves a credential out for its scope or its route, for which others are accepted, unless it is the last there.
    fn leave_out_at_route(&self, rules: &CallRules, state: &mut ProviderState, sent: &SentRequest, now: Time) {
        let ProviderState { scopes, routes, .. } = state;
        let CallScope { route, .. } = self.scope;
        let (credential, until) = (sent.credential, now + DISABLE_TIME);
        let key = if sent.scope.is_none() { route } else { sent.scope.key() };
        let is_closed =
            |it: usize| it == credential || scopes.closed_until(key, it) > now || scopes.is_left_out(key, it, now);
        let has_other = rules.has_room_for_scope(self.lane) && routes.has_other(is_closed, now);
        if has_other && (!sent.scope.is_none() || scopes.teach(route, route, until, now)) {
            scopes.leave_out(key, credential, until, now);
        }
    }

    fn take_sent(&mut self) -> Option<(SentRequest, BreakerPermit)> {
        match core::mem::replace(&mut self.stage, CallStage::Idle) {
            CallStage::Sent(sent, permit) => Some((sent, permit)),
            other => {
                self.stage = other;
                None
            }
        }
    }

    /// Prepares the correction of the last charge or of the time at which it was counted.
    pub(super) fn prepare_correction(
        &self,
        rules: &CallRules,
        state: &mut ProviderState,
        credential: usize,
        verb: Verb,
    ) {
        self.fill_batch(&mut state.store_requests.updates, rules, credential, verb);
        state.store_requests.updates.set_charged(self.charged_at, self.counted_at);
    }
}

/// The calls that are left. A provider that gives reservations tells the exact time as it refuses a call.
fn told_calls(verdict: &Verdict, gives_reservations: bool) -> Option<RemainingAmount> {
    verdict.remaining.calls.filter(|left| left.amount > 0 || !gives_reservations)
}

/// Disables a rejected credential, unless no other is good: the provider may reject this one request for all of them.
/// Of many calls that were rejected together, only the first disables it.
fn disable_credential(rules: &CallRules, state: &mut ProviderState, credential: usize, now: Time) {
    let until = now + DISABLE_TIME;
    if state.routes.disable(credential, until, MIN_SECOND_DISABLE, now) {
        let op = cooldown_op(rules, rules.credential_keys[credential], Verb::Disable);
        let op = Op { cost: DISABLE_TIME.as_micros(), ..op };
        // With many limits, several rejected credentials don't fit into one batch. The others are disabled in this
        // process alone.
        let _ = state.store_requests.updates.push(op);
        state.pool.set_cooling_until(credential, until, now);
    }
}

impl ProviderState {
    pub(super) fn updates(&mut self) -> &mut Batch {
        &mut self.store_requests.updates
    }

    /// Closes a part for a wait, here and in the store. Zero is the length that the store chooses. `is_cut` if the provider
    /// has asked for more.
    fn close(
        &mut self,
        rules: &CallRules,
        sent: &SentRequest,
        part: Part,
        closing: Closing,
        (wait, is_cut): (Span, bool),
        now: Time,
    ) {
        let Part { mut key, for_all, is_taught } = part;
        let is_other = key != 0 && key != sent.scope.key();
        // The request hasn't passed the gate of another scope, so that it can't lengthen its closings.
        let wait = if is_other && wait.is_zero() { OTHER_SCOPE_CLOSING } else { wait };
        let free_at = now + wait;
        let credential = sent.credential;
        if key != 0 {
            // Only the store knows the whole cool-down. Until it answers, the requested wait is used.
            let until = if wait.is_zero() { now + MIN_CLOSING } else { free_at };
            let place = if for_all { ALL_CREDENTIALS } else { credential };
            let has_room = match closing {
                Closing::Reserved => self.scopes.close_exactly(key, place, until, now),
                Closing::Throttled | Closing::Paused => self.scopes.close(key, place, until, is_taught, now),
            };
            if !has_room {
                key = 0;
            }
        }
        let store_key = |credential: usize| match key {
            0 => rules.credential_keys[credential],
            _ => rules.scope_key(credential, key),
        };
        let generation = if key == 0 { sent.generation } else { sent.scope_generation };
        let verb = match closing {
            Closing::Throttled if key == 0 || !is_other => Verb::Throttle { generation },
            // At the end of a longer closing, a reservation could be over.
            Closing::Throttled | Closing::Reserved | Closing::Paused => Verb::Debit,
        };
        let op = |credential, verb| Op { cost: wait.as_micros(), ..cooldown_op(rules, store_key(credential), verb) };
        let own = op(credential, verb);
        if key == 0 {
            push_required(self.updates(), own);
            match closing {
                _ if wait.is_zero() => self.pool.set_cooling_until(credential, now + MIN_CLOSING, now),
                Closing::Reserved => {
                    self.pool.set_reserved_at(credential, free_at, now);
                    self.lanes.clear_refusals();
                }
                Closing::Throttled | Closing::Paused => self.pool.set_closed_until(credential, free_at, now),
            }
            if is_cut {
                self.pool.set_cut(credential);
            }
        } else {
            let _ = self.updates().push(own);
        }
        for other in (0..rules.credential_keys.len()).filter(|other| for_all && !wait.is_zero() && *other != credential)
        {
            if key == 0 {
                self.pool.set_closed_until(other, free_at, now);
                if is_cut {
                    self.pool.set_cut(other);
                }
            }
            // Those that don't fit into the batch are closed in this process alone.
            let _ = self.updates().push(op(other, Verb::Debit));
        }
    }
}

/// The part of a provider that a reply closes. The default is the credential.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Part {
    /// The key of a scope; 0 for everything.
    key: u64,
    /// True for all credentials.
    for_all: bool,
    /// True if the reply names the scope.
    is_taught: bool,
}

/// The reason of a closing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Closing {
    /// The provider has refused a call: a step of the back-off.
    Throttled,
    /// It keeps room for the call at the end.
    Reserved,
    /// It takes no calls until the end.
    Paused,
}

fn cooldown_op(rules: &CallRules, key: Key, verb: Verb) -> Op {
    Op::new(rules.cooldown, verb, key, 0)
}
