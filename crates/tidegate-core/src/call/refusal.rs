//! The refusals of a call's turn: the wait until its next turn, or its failure.

use super::scopes::{ChargedScope, Scopes};
use super::{Call, CallFailure, CallProgress, CallRules, MIN_CREDENTIAL_WAIT, Measure, ProviderState};
use crate::lanes::{Refusal, RefusalScope, WaitReason};
use crate::{LimitId, LimitKind, Span, Time};

/// The time after which a call asks again that waits for the end of a call with another credential.
const BUSY_RECHECK_INTERVAL: Span = Span::from_millis(20);

/// The refusal of a call by one limit, or by the cool-down of a credential.
pub(super) struct LimitRefusal<'a> {
    pub limit: LimitId,
    pub kind: Option<&'a LimitKind>,
    pub retry_at: Time,
    /// The time of the decision, by the store's clock.
    pub refused_at: Time,
}

impl LimitRefusal<'_> {
    /// The time of the next attempt.
    fn until(&self, rules: &CallRules, state: &ProviderState) -> Time {
        self.retry_at + state.extra_spacing(rules, self.kind)
    }

    /// The time before which the limit has no room, unless a request under way turns out unsent. [`Time::ZERO`] if it is
    /// unknown: calls under way may cost less than was reserved for them, and a success may end a cool-down's slots.
    fn closed_until(&self, rules: &CallRules, state: &ProviderState) -> Time {
        match self.kind {
            Some(LimitKind::Cooldown(cooldown)) if cooldown.is_closing(self.retry_at, self.refused_at) => self.retry_at,
            Some(_) if rules.measure(self.limit) != Some(Measure::Calls) => Time::ZERO,
            // A reply frees a slot up to a lead earlier.
            Some(LimitKind::Window(_)) => self.retry_at - state.lead,
            Some(LimitKind::Quota(_) | LimitKind::Rate(_)) => self.retry_at,
            _ => Time::ZERO,
        }
    }

    fn reason(&self) -> WaitReason {
        let limit = self.limit;
        match self.kind {
            Some(LimitKind::Quota(_)) => WaitReason::Quota(limit),
            Some(LimitKind::Window(window)) => {
                WaitReason::Limit { limit, calls: window.limit().max(1), every: window.window() }
            }
            Some(LimitKind::Rate(rate)) => {
                WaitReason::Limit { limit, calls: 1, every: Span::from_micros(rate.per().as_micros() / rate.count()) }
            }
            _ => WaitReason::Limit { limit, calls: 1, every: Span::ZERO },
        }
    }
}

impl Call {
    /// Handles the refusal of a limit that doesn't depend on the credential.
    pub(super) fn handle_shared_refusal(
        &mut self,
        rules: &CallRules,
        state: &mut ProviderState,
        refused: &LimitRefusal<'_>,
        is_in_scope: bool,
        now: Time,
    ) -> CallProgress {
        let (limit, until) = (refused.limit, refused.until(rules, state));
        let mut lane_limits = rules.lane_limits[self.charged_lane as usize].iter();
        let is_lane_limit = lane_limits.any(|provider_limit| provider_limit.limit == limit);
        let scope = match is_lane_limit {
            _ if is_in_scope => RefusalScope::Part,
            true => RefusalScope::Lane,
            false => RefusalScope::Provider,
        };
        // A call under way may cost less than was reserved for it.
        let may_free_earlier =
            rules.measure(limit) == Some(Measure::Cost) && !until.is_never() && state.lanes.total_in_flight() > 0;
        self.failure_at_deadline =
            (may_free_earlier && until >= self.deadline).then_some(CallFailure::RateLimited { limit, earliest: until });
        let closed_until = refused.closed_until(rules, state);
        self.wait_or_fail(Refusal { until, closed_until, reason: refused.reason(), scope }, state, now)
    }

    /// Stays in the queue until a time, or fails now if that is at or after the deadline. A hedge always fails.
    pub(super) fn wait_or_fail(&mut self, refusal: Refusal, state: &mut ProviderState, now: Time) -> CallProgress {
        let Some(ticket) = self.ticket() else { return CallProgress::Wait };
        if self.is_hedge || refusal.until >= self.deadline && self.failure_at_deadline.is_none() {
            return self.fail(refusal.failure(), state);
        }
        state.lanes.refuse(ticket, refusal, now);
        CallProgress::Wait
    }
}

impl ProviderState {
    /// Records that a limit or the cool-down of a credential refuses it.
    pub(super) fn close_credential(
        &mut self,
        credential: usize,
        rules: &CallRules,
        refused: &LimitRefusal<'_>,
        now: Time,
    ) {
        // A minimum wait, so that a store with a slow clock isn't asked again and again.
        let until = refused.until(rules, self).max(now + MIN_CREDENTIAL_WAIT);
        let closed_until = refused.closed_until(rules, self);
        if let Some(LimitKind::Cooldown(_)) = refused.kind {
            self.pool.set_cooling_until(credential, until, now);
            self.pool.set_closed_until(credential, closed_until, now);
        } else {
            self.pool.set_full_until(credential, refused.limit, until, closed_until, now);
        }
        if let Some(LimitKind::Quota(_)) = refused.kind {
            self.pool.set_spent_quota(credential, refused.limit, until);
        }
    }

    /// Records that a limit or the cool-down of a scope refuses it with this credential. Returns false if there is no room
    /// for the scope.
    pub(super) fn close_scope(
        &mut self,
        scope: u64,
        credential: usize,
        rules: &CallRules,
        refused: &LimitRefusal<'_>,
        now: Time,
    ) -> bool {
        let until = refused.until(rules, self).max(now + MIN_CREDENTIAL_WAIT);
        if let Some(LimitKind::Cooldown(_)) = refused.kind {
            return self.scopes.close(scope, credential, until, false, now);
        }
        let closed_until = refused.closed_until(rules, self);
        let refusal = Refusal { until, closed_until, reason: refused.reason(), scope: RefusalScope::Part };
        self.scopes.set_full(scope, credential, refusal, now)
    }

    /// The refusal while none of the other credentials is good for a scope.
    #[cold]
    pub(super) fn no_credential_except(
        &mut self,
        is_excluded: impl Fn(usize) -> bool,
        scope: ChargedScope,
        cost: u64,
        now: Time,
    ) -> Refusal {
        let tracks = scope.counted() != 0 && !self.remaining_trackers.is_empty();
        let Self { pool, scopes, routes, .. } = self;
        let candidates =
            (0..pool.size()).filter(|it| !is_excluded(*it) && (pool.size() == 1 || routes.is_enabled(*it, now)));
        let free_at = |credential: usize, scopes: &mut Scopes| {
            let in_scope =
                if scope.is_none() { now } else { scopes.free_at(scope.key(), credential, cost, tracks, now) };
            // A credential that is busy becomes free at an unknown time.
            let unknown = if pool.is_busy(credential) { now + BUSY_RECHECK_INTERVAL } else { now };
            pool.closing_end(credential).unwrap_or(unknown).max(in_scope)
        };
        let closed_until = |credential: usize, scopes: &Scopes| match scope.key() {
            0 => Time::ZERO,
            key => scopes.closed_until(key, credential),
        };
        let reason = |credential: usize, until: Time, scopes: &Scopes| {
            let in_scope = scopes.full_until(scope.key(), credential, until);
            let full = pool.full_until(credential).filter(|(_, full_until)| *full_until == until);
            let of_credential = full.map(|(limit, _)| WaitReason::Limit { limit, calls: 1, every: Span::ZERO });
            in_scope.or(of_credential).unwrap_or(WaitReason::Credentials)
        };
        let mut refusal = Refusal {
            until: Time::NEVER,
            closed_until: Time::NEVER,
            reason: WaitReason::Credentials,
            scope: RefusalScope::Part,
        };
        for credential in candidates {
            let until = free_at(credential, scopes);
            if until < refusal.until {
                (refusal.until, refusal.reason) = (until, reason(credential, until, scopes));
            }
            refusal.closed_until = refusal.closed_until.min(closed_until(credential, scopes));
        }
        refusal.closed_until = refusal.closed_until.min(refusal.until);
        refusal
    }

    /// The refusal while no credential is available. The reason is that of the first one that is free again.
    pub(super) fn no_credential(&mut self, now: Time) -> Refusal {
        let until = self.pool.next_rejoin_at();
        let full = self.pool.next_rejoin_limit();
        let full = full.map(|limit| WaitReason::Limit { limit, calls: 1, every: Span::ZERO });
        Refusal {
            until,
            closed_until: self.pool.all_closed_until(now).unwrap_or(Time::ZERO),
            reason: self
                .pool
                .quota_spent_until(until)
                .map(WaitReason::Quota)
                .or(full)
                .unwrap_or(WaitReason::Credentials),
            scope: RefusalScope::Provider,
        }
    }
}

impl Refusal {
    /// The failure of a call that can't wait so long.
    pub(super) fn failure(&self) -> CallFailure {
        let earliest = self.until;
        match self.reason {
            WaitReason::Limit { limit, .. } => CallFailure::RateLimited { limit, earliest },
            WaitReason::Quota(limit) => CallFailure::QuotaSpent { limit, resets_at: earliest },
            WaitReason::Credentials => CallFailure::CredentialsCooling { earliest },
            WaitReason::Pace => CallFailure::Paced { earliest },
        }
    }
}
