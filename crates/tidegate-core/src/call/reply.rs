//! The end of an attempt: what it tells the breaker, the limits and the credentials, and the next step.

use rand_core::Rng;

use super::{
    AttemptReport, Call, CallFailure, CallRules, CallStage, DISABLE_TIME, MIN_SECOND_DISABLE, NO_CREDENTIAL, NextStep,
    ProviderState, SentRequest, push_required,
};
use crate::retry::{Delivery, FailedAttempt, NoRetryReason};
use crate::{Class, MAX_COST, Op, Remaining, Span, Time, Verb};

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
        let Some(credential) = self.finish_attempt(rules, state, reply, now, rng) else { return NextStep::Done };
        if self.needs_login_renewal(rules, reply, credential) {
            self.renewed_credential = u16::try_from(credential).unwrap_or(NO_CREDENTIAL);
            return NextStep::RenewLogin { credential };
        }
        // A provider that asks not to retry means the rejected credential.
        if reply.class == Class::Auth
            && reply.rejects_credential
            && reply.unreplayable_reason.is_none()
            && self.switch_credential(rules, state, credential, now, rng)
        {
            self.end_streaming(state);
            return NextStep::RetryAt(now);
        }
        if reply.class == Class::Cancelled && now >= self.deadline {
            return NextStep::Failed(CallFailure::DeadlineExceeded);
        }
        if matches!(reply.class, Class::Success | Class::Permanent | Class::Auth | Class::Cancelled) {
            return NextStep::Done;
        }
        let attempt = FailedAttempt {
            class: reply.class,
            is_repeatable: reply.is_repeatable,
            unreplayable_reason: reply.unreplayable_reason,
            asks_not_to_retry: reply.asks_not_to_retry,
            retry_after: reply.retry_after,
            has_reservation: self.has_reservation,
            has_other_credential: state.pool.next(now, rng).is_some_and(|other| other != credential),
        };
        let retry = &rules.lane_rules[self.own_lane as usize].retry;
        match self.retry_tracker.next_attempt_at(retry, &attempt, Some(&state.budget), now, rng) {
            Ok(at) => {
                self.holds_budget_retry = reply.class == Class::Transient;
                // The reply's body is not read further.
                self.end_streaming(state);
                // It waits for its closed credential in the queue, ahead of later calls, unless another would take it.
                let waits_in_queue = attempt.has_reservation && !attempt.has_other_credential;
                NextStep::RetryAt(if waits_in_queue { now } else { at })
            }
            Err(reason) => NextStep::Failed(match (reason, reply.spent_quota, reply.retry_after) {
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
        reply.class == Class::Auth
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

    /// Notes that a credential was rejected for this call. Returns true if another one can be tried now. A rejected
    /// credential is disabled only after another one was accepted for the same request, because a provider may also
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
        self.renewed_credential = NO_CREDENTIAL;
        self.rejected.push(credential)
            && state.other_credential(self.cost, self.rejected, now, rng).is_some()
            && self.retry_tracker.take_token_retry(retry)
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
        let sent = self.take_sent()?;
        let elapsed = now.since(sent.sent_at);
        self.has_reservation = false;
        if reply.class == Class::Throttled {
            state.gives_reservations = reply.has_reservation && reply.retry_after.is_some_and(|wait| !wait.is_zero());
            // A reservation that was of no use may have been used by another request, or the provider keeps none.
            self.has_reservation = state.gives_reservations && !reply.presented_reservation;
        }
        // A provider that gives reservations tells the exact time as it refuses a call.
        let calls_left = reply.remaining.calls.filter(|left| left.amount > 0 || !state.gives_reservations);
        state.stats.attempts[reply.class as usize] += 1;
        if reply.delivery == Delivery::Answered {
            state.stats.reply_times.record(elapsed);
        }
        let is_outage = reply.class == Class::Transient
            && (state.round_trips.record_failure(sent.sent_at, now)
                || state.lanes.total_in_flight().saturating_sub(state.tunnels) <= 1);
        state.breaker.report_beside(sent.permit, (reply.class, elapsed), is_outage, now, rng);
        // Earlier refusals by a rate were computed without this round trip.
        if state.round_trips.record_end(sent.sent_at, reply.delivery, reply.class, now) && !rules.jitter.is_zero() {
            state.lanes.clear_refusals();
        }
        if let Some(tracker) = state.remaining_trackers.get_mut(sent.credential) {
            let remaining = Remaining { calls: calls_left, ..reply.remaining };
            tracker.record_end(self.cost, sent.sent_at, reply.delivery == Delivery::Answered, remaining);
            if self.has_reservation {
                tracker.keep_room();
            }
            state.lanes.clear_refusals();
        }
        let is_alone = rules.credential_keys.len() == 1;
        if let Some(pace) = &mut state.pace {
            pace.ended(sent.sent_at, reply.class, calls_left.filter(|_| is_alone), now, rng);
            state.lanes.clear_refusals();
        }
        if let Some(adaptive) = &mut state.adaptive_limit {
            adaptive.sample(elapsed, sent.in_flight, reply.class, now);
            state.apply_adaptive_limit(rules);
        }
        if reply.is_streaming && !self.needs_login_renewal(rules, reply, sent.credential) {
            self.stage = CallStage::Streaming(sent.lane, sent.credential);
            self.is_tunnel = reply.is_tunnel;
            if reply.is_tunnel {
                state.tunnels += 1;
                state.apply_adaptive_limit(rules);
            }
        } else {
            state.record_end(sent.lane, sent.credential);
        }
        let correction = match reply.delivery {
            Delivery::Unsent => Some(Verb::Refund),
            Delivery::Answered if sent.counted_at > now && rules.lead > Span::ZERO => Some(Verb::Settle),
            Delivery::Answered | Delivery::Unknown => None,
        };
        (self.charged_at, self.counted_at) = (sent.charged_at, sent.counted_at);
        if let Some(verb) = correction {
            self.prepare_correction(rules, state, sent.credential, verb);
            if state.store_requests.updates().is_some() {
                state.lanes.clear_refusals();
                if verb == Verb::Settle {
                    self.counted_at = now;
                }
            }
        }
        let generation = sent.generation;
        match reply.class {
            // A pace risks throttles. Closing the cool-down at each of them would cost more than the pace gains.
            Class::Throttled if state.pace.is_some() && is_alone && reply.retry_after.is_none() => {}
            Class::Throttled => {
                state.double_lead(sent.sent_at, now);
                let requested_wait = reply.retry_after.unwrap_or(Span::ZERO).min(Span::from_micros(MAX_COST));
                // At the end of a longer closing, the reservation could be over.
                let verb = if self.has_reservation { Verb::Debit } else { Verb::Throttle { generation } };
                update_cooldown(rules, state, sent.credential, verb, requested_wait);
                // Only the store knows the whole cool-down. Until it answers, the requested wait is used.
                if requested_wait.is_zero() {
                    state.pool.set_cooling_until(sent.credential, now + Span::from_micros(1), now);
                } else {
                    let free_at = now + requested_wait;
                    if self.has_reservation {
                        state.pool.set_reserved_at(sent.credential, free_at, now);
                        state.lanes.clear_refusals();
                    } else {
                        state.pool.set_closed_until(sent.credential, free_at, now);
                    }
                    if let Some(quota) = reply.spent_quota {
                        state.pool.set_spent_quota(sent.credential, quota, now + requested_wait);
                    } else if let Some(pace) = state.pace.as_mut().filter(|_| is_alone) {
                        pace.record_wait(requested_wait, now);
                    }
                }
            }
            Class::Success if generation > 0 => {
                update_cooldown(rules, state, sent.credential, Verb::Success { generation }, Span::ZERO)
            }
            Class::Auth
                if !reply.rejects_credential && (!rules.can_renew_login || self.has_renewed(sent.credential)) =>
            {
                disable_credential(rules, state, sent.credential, now)
            }
            _ => {}
        }
        if reply.class == Class::Success {
            for rejected in core::mem::take(&mut self.rejected).iter() {
                disable_credential(rules, state, rejected, now);
            }
        }
        if let Some(until) = reply.spent_until.filter(|until| *until > now && !state.gives_reservations) {
            state.pool.set_cooling_until(sent.credential, until, now);
        }
        Some(sent.credential)
    }

    fn take_sent(&mut self) -> Option<SentRequest> {
        match core::mem::replace(&mut self.stage, CallStage::Idle) {
            CallStage::Sent(sent) => Some(sent),
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

/// Disables a rejected credential, unless no other is good: the provider may reject this one request for all of them.
/// Of many calls that were rejected together, only the first disables it.
fn disable_credential(rules: &CallRules, state: &mut ProviderState, credential: usize, now: Time) {
    let is_disabled = state.pool.cooling_until(credential).is_some_and(|until| until.since(now) > MIN_SECOND_DISABLE);
    if !is_disabled && state.pool.has_other_not_cooling(credential, now) {
        let op = cooldown_op(rules, credential, Verb::Disable, DISABLE_TIME);
        // With many limits, several rejected credentials don't fit into one batch. The others are disabled in this
        // process alone.
        let _ = state.store_requests.updates.push(op);
        state.pool.set_cooling_until(credential, now + DISABLE_TIME, now);
    }
}

fn update_cooldown(rules: &CallRules, state: &mut ProviderState, credential: usize, verb: Verb, cost: Span) {
    push_required(&mut state.store_requests.updates, cooldown_op(rules, credential, verb, cost));
}

fn cooldown_op(rules: &CallRules, credential: usize, verb: Verb, cost: Span) -> Op {
    Op::new(rules.cooldown, verb, rules.credential_keys[credential], cost.as_micros())
}
