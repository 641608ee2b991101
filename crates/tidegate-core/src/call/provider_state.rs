//! The state that all calls to one provider share, and the store requests of their steps.

use alloc::vec::Vec;
use core::time::Duration;

use rand_core::Rng;

use super::routes::Routes;
use super::scopes::{ChargedScope, Scopes};
use super::{CallFailure, CallRules, MAX_LEAD, ProviderStats, SentRequest};
use crate::breaker::{BreakerRefusal, BreakerState};
use crate::remaining::RemainingTracker;
use crate::retry::Delivery;
use crate::{
    AdaptiveLimit, Batch, Breaker, Budget, Class, Concurrency, CredentialPool, Lane, Lanes, LimitKind, Pace, QueueStep,
    RecentMaximum, Span, Time,
};

/// The time for which failures open no breaker beside other calls in flight, before the first good reply.
const FIRST_TIME_FOR_OTHERS: Span = Span::from_secs(1);
/// The longest such time.
const MAX_TIME_FOR_OTHERS: Span = Span::from_secs(10);
/// The shortest time for which a probe keeps others back.
const MIN_PROBE_TIME: Span = Span::from_secs(1);

/// The longest time for which a call is in flight after it was abandoned.
const MAX_KEPT_TIME: Span = Concurrency::DEFAULT_LEASE;
/// The maximum number of abandoned calls that are in flight. Further ones end at once.
const MAX_ABANDONED: usize = 4096;

/// The state that all calls to one provider in one process share and change. A driver locks it for each step.
#[derive(Debug)]
pub struct ProviderState {
    /// The queue, which chooses the next call.
    pub lanes: Lanes,
    /// The credentials, of which it chooses the next one.
    pub pool: CredentialPool,
    /// The adaptive limit of calls in flight. `None` if it isn't used.
    pub adaptive_limit: Option<AdaptiveLimit>,
    /// The pace between calls, in addition to the limits. `None`, the default, if only the limits apply.
    ///
    /// With a pace and a single credential, a throttled reply without a retry time doesn't start the cool-down. Each scope
    /// begins with a copy, because it has limits of its own.
    pub pace: Option<Pace>,
    pub(super) remaining_trackers: Vec<RemainingTracker>,
    pub(super) scopes: Scopes,
    pub(super) routes: Routes,
    /// The calls in flight whose connections have switched protocols.
    pub(super) tunnels: u32,
    /// True if the last throttled reply had a reservation.
    pub(super) gives_reservations: bool,
    /// The circuit breaker of the provider.
    pub breaker: Breaker,
    /// The budget of retries.
    pub budget: Budget,
    /// True while an operator has stopped the calls. No call starts or is sent; those under way continue.
    pub is_paused: bool,
    /// The counts of calls and attempts.
    pub stats: ProviderStats,
    /// The store requests of the last step.
    pub store_requests: StoreRequests,
    pub(super) lead: Span,
    lead_doubled_at: Time,
    pub(super) round_trips: RoundTripStats,
    /// The longest recent time of a request until its reply.
    pub(super) longest_reply: RecentMaximum,
    abandoned: Vec<AbandonedCall>,
}

/// A request without a waiting caller, on which the provider likely works.
#[derive(Debug)]
struct AbandonedCall {
    likely_end: Time,
    lane: Lane,
    credential: usize,
}

/// The time that calls are under way, as measured from replies.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTripStats {
    /// The shortest time from a grant to its reply. It rises slowly, in case the network path becomes longer.
    shortest: Option<Span>,
    /// The smoothed time of replies that prove a working provider, and its mean deviation, computed like TCP round trips
    /// (RFC 6298 §2). Quick errors would make it too short.
    smoothed: Span,
    deviation: Span,
    /// The time of the last such reply.
    good_at: Time,
    /// The time since which there were only failures: from when the first of them was sent.
    failing_since: Option<Time>,
    granted_at: Time,
    /// The delay with which the last call may have reached the provider, compared with the fastest one.
    last_excess: Span,
}

impl RoundTripStats {
    /// Each longer time raises the shortest one by the difference divided by this.
    const DRIFT: u64 = 256;

    pub(super) fn record_grant(&mut self, now: Time) {
        (self.granted_at, self.last_excess) = (now, Span::ZERO);
    }

    /// Learns from the end of a request at `now`, without a reply only a lower bound. Returns true if it may delay the next
    /// one.
    pub(super) fn record_end(&mut self, granted_at: Time, delivery: Delivery, class: Class, now: Time) -> bool {
        let elapsed = now.since(granted_at);
        if delivery == Delivery::Unsent {
            return false;
        }
        let is_first = self.shortest.is_none();
        let quickest = self.shortest.map_or(elapsed, |quickest| quickest.min(elapsed));
        let excess = elapsed.as_micros() - quickest.as_micros();
        if delivery == Delivery::Answered {
            self.shortest = Some(Span::from_micros(quickest.as_micros() + excess / Self::DRIFT));
            if class.proves_provider() {
                (self.good_at, self.failing_since) = (now, None);
                self.update_smoothed(elapsed.as_micros());
            }
        }
        // The first one can't be compared, and its time includes the connection setup.
        let late = if is_first { elapsed } else { Span::from_micros(excess) };
        if granted_at == self.granted_at {
            self.last_excess = late;
        }
        granted_at == self.granted_at && !late.is_zero()
    }

    /// Notes a failure. Returns true if failures have lasted for twice the time within which good replies come, or for a
    /// second before the first one: a call that was sent before them would have been answered.
    pub(super) fn record_failure(&mut self, sent_at: Time, now: Time) -> bool {
        // If the clock stepped back, failures would otherwise not count for as long as the step.
        let since = self.failing_since.unwrap_or(self.good_at.max(sent_at)).min(now);
        self.failing_since = Some(since);
        let longest = match self.smoothed {
            Span::ZERO => FIRST_TIME_FOR_OTHERS,
            _ => self.usual_max().times(2).min(MAX_TIME_FOR_OTHERS),
        };
        now.since(since) >= longest
    }

    fn update_smoothed(&mut self, elapsed: u64) {
        let (usual, deviation) = (self.smoothed.as_micros(), self.deviation.as_micros());
        let (usual, deviation) = if usual == 0 {
            (elapsed, elapsed / 2)
        } else {
            (usual - usual / 8 + elapsed / 8, deviation - deviation / 4 + usual.abs_diff(elapsed) / 4)
        };
        (self.smoothed, self.deviation) = (Span::from_micros(usual), Span::from_micros(deviation));
    }

    /// An upper bound that replies rarely exceed.
    pub(super) fn usual_max(&self) -> Span {
        self.smoothed + self.deviation.times(2)
    }
}

impl ProviderState {
    /// The state of a provider without any history.
    pub fn new(rules: &CallRules, pool: CredentialPool, breaker: Breaker, limit: Option<AdaptiveLimit>) -> Self {
        let trackers = if rules.tracks_remaining { pool.size() } else { 0 };
        let mut state = Self {
            lanes: Lanes::new(rules.lanes),
            remaining_trackers: alloc::vec![RemainingTracker::default(); trackers],
            scopes: Scopes::default(),
            routes: Routes::new(pool.size()),
            tunnels: 0,
            gives_reservations: false,
            pool: pool.with_max_in_flight(rules.max_in_flight_per_credential),
            adaptive_limit: limit,
            pace: None,
            breaker,
            budget: Budget::new(rules.budget),
            is_paused: false,
            stats: ProviderStats::default(),
            store_requests: StoreRequests::default(),
            lead: rules.lead,
            lead_doubled_at: Time::ZERO,
            round_trips: RoundTripStats::default(),
            longest_reply: RecentMaximum::new(Span::ZERO),
            abandoned: Vec::new(),
        };
        state.apply_adaptive_limit(rules);
        state
    }

    /// Forgets what failures and replies have taught: closes the breaker, ends the cool-downs, and starts with this pace
    /// and this adaptive limit. Counts of limits stay, as do cool-downs in the store.
    pub fn forget_failures(&mut self, rules: &CallRules, pace: Option<Pace>, limit: Option<AdaptiveLimit>) {
        self.breaker.reset();
        self.pool.end_all_cooldowns();
        self.remaining_trackers.fill(RemainingTracker::default());
        self.scopes.clear();
        self.routes.clear();
        (self.pace, self.adaptive_limit, self.lead) = (pace, limit, rules.lead);
        self.gives_reservations = false;
        self.apply_adaptive_limit(rules);
        self.lanes.clear_all_refusals();
    }

    /// The scopes that replies have closed: their keys, each with its credential (`None` for all) and its end, which may be
    /// over.
    pub fn scope_closings(&self) -> impl Iterator<Item = (u64, Option<usize>, Time)> {
        self.scopes.closings()
    }

    /// Continues with what an adaptive limit has [learnt](AdaptiveLimit::learnt) before.
    pub fn resume_adaptive_limit(&mut self, rules: &CallRules, learnt: (u32, Span), now: Time) {
        if let Some(adaptive) = &mut self.adaptive_limit {
            adaptive.resume(learnt, now);
        }
        self.apply_adaptive_limit(rules);
    }

    /// The present lead: the time between the start of a call and the time at which windows count it.
    pub fn lead(&self) -> Span {
        self.lead
    }

    /// The wait of the next call beyond the time of the limit, so that it doesn't arrive too early after the last one.
    pub(super) fn extra_spacing(&self, rules: &CallRules, kind: Option<&LimitKind>) -> Span {
        match kind {
            Some(LimitKind::Rate(_)) => rules.jitter + self.round_trips.last_excess.min(rules.jitter.times(9)),
            _ => Span::ZERO,
        }
    }

    /// The time between two calls at the current pace: of the scopes, the longest. `None` without a pace.
    pub fn pace_interval(&self) -> Option<Duration> {
        let shared = self.pace.as_ref()?;
        Some(self.scopes.longest_interval().unwrap_or_else(|| shared.interval()))
    }

    /// The pace of the calls of a scope (0 for none).
    pub(super) fn pace_of(&self, scope: u64) -> Option<&Pace> {
        let own = if scope == 0 { None } else { self.scopes.pace(scope) };
        own.or(self.pace.as_ref())
    }

    /// The pace of the calls of a scope (0 for none), to be changed. Scopes without room share that of the provider.
    pub(super) fn pace_of_mut(&mut self, scope: u64, now: Time) -> Option<&mut Pace> {
        let Self { scopes, pace, .. } = self;
        let shared = pace.as_mut()?;
        let own = if scope == 0 { None } else { scopes.pace_mut(scope, shared, now) };
        Some(own.unwrap_or(shared))
    }

    /// The next credential to try. Skips those that are known to be cooling, to be busy or to have too little left.
    // Alone, it would save and restore more registers than it does work.
    #[inline(always)]
    pub(super) fn next_credential(&mut self, cost: u64, now: Time, rng: &mut impl Rng) -> Option<usize> {
        loop {
            let credential = self.pool.next(now, rng)?;
            if self.has_enough_left(credential, cost, now) {
                return Some(credential);
            }
        }
    }

    /// The next credential to try for a scope, except those that are excluded.
    pub(super) fn credential_except(
        &mut self,
        is_excluded: impl Fn(usize) -> bool,
        scope: ChargedScope,
        cost: u64,
        now: Time,
        rng: &mut impl Rng,
    ) -> Option<usize> {
        let is_counted = scope.counted() != 0;
        let tracks = is_counted && !self.remaining_trackers.is_empty();
        loop {
            let Self { pool, scopes, .. } = self;
            let mut is_free = |it| scope.is_none() || scopes.free_at(scope.key(), it, cost, tracks, now) <= now;
            let credential =
                pool.next_except(|credential| is_excluded(credential) || !is_free(credential), now, rng)?;
            if is_counted || self.has_enough_left(credential, cost, now) {
                return Some(credential);
            }
        }
    }

    /// A credential that is left out for a scope, except those that are excluded.
    #[cold]
    pub(super) fn left_out_credential(
        &mut self,
        is_excluded: impl Fn(usize) -> bool,
        scope: ChargedScope,
        now: Time,
        rng: &mut impl Rng,
    ) -> Option<usize> {
        let Self { pool, scopes, .. } = self;
        let is_left_out = |it| !scope.is_none() && scopes.is_only_left_out(scope.key(), it, now);
        pool.next_except(|it| is_excluded(it) || !is_left_out(it), now, rng)
    }

    /// True if the provider has reported enough left for this cost. Otherwise the credential cools until it has.
    #[inline]
    fn has_enough_left(&mut self, credential: usize, cost: u64, now: Time) -> bool {
        self.remaining_trackers.is_empty() || self.has_reported_enough(credential, cost, now)
    }

    #[inline(never)]
    fn has_reported_enough(&mut self, credential: usize, cost: u64, now: Time) -> bool {
        let tracker = self.remaining_trackers.get_mut(credential);
        let free_at = tracker.map_or(now, |tracker| tracker.free_at(cost, now));
        if free_at > now {
            self.pool.set_cooling_until(credential, free_at, now);
        }
        free_at <= now
    }

    /// The time at which the first credential is free again, as far as this process knows. `None` if one is free now.
    pub fn cooling_until(&mut self, now: Time, rng: &mut impl Rng) -> Option<Time> {
        if self.pool.next(now, rng).is_some() { None } else { Some(self.pool.next_rejoin_at()) }
    }

    /// The time for which a probe keeps others back.
    pub(super) fn probe_time(&self) -> Span {
        self.round_trips.usual_max().max(MIN_PROBE_TIME)
    }

    /// The failure of a call that the breaker refuses. The end of a probe is unknown, so the wait is at most the usual time of a call.
    pub(super) fn unavailable(&self, mut refusal: BreakerRefusal) -> CallFailure {
        if refusal.state == BreakerState::HalfOpen {
            refusal.reset_in = refusal.reset_in.min(self.probe_time());
        }
        CallFailure::Unavailable(refusal)
    }

    pub(super) fn record_end(&mut self, lane: Lane, credential: usize) {
        self.lanes.record_end(lane);
        // Calls that have waited for the end of this one wait for the end of the closing now.
        let was_busy = self.pool.is_busy(credential) && self.pool.closing_end(credential).is_some();
        if self.pool.record_end(credential) || was_busy {
            self.lanes.clear_refusals();
        }
    }

    /// Ends a request without a reply, on which the provider may still work: at once if no limit counts the calls in flight,
    /// and otherwise when a long call would have its reply. The adaptive limit is none: it only guesses.
    pub(super) fn record_abandoned(&mut self, rules: &CallRules, sent: &SentRequest, now: Time) {
        // The first replies are believed: callers are programs of the operator, and no attackers.
        let longest = self.longest_reply.get_or(MAX_KEPT_TIME);
        let likely_end = (sent.sent_at + longest).min(now + MAX_KEPT_TIME);
        let most = rules.lanes.max_in_flight.min(rules.lanes.lanes[sent.lane as usize].max_in_flight);
        let is_limited = most.min(rules.max_in_flight_per_credential) < u32::MAX;
        if is_limited && likely_end > now && self.abandoned.len() < MAX_ABANDONED {
            self.abandoned.push(AbandonedCall { likely_end, lane: sent.lane, credential: sent.credential });
        } else {
            self.record_end(sent.lane, sent.credential);
        }
    }

    /// The lane and the credential of each abandoned request that is in flight.
    pub fn abandoned(&self) -> impl ExactSizeIterator<Item = (Lane, usize)> {
        self.abandoned.iter().map(|call| (call.lane, call.credential))
    }

    /// Ends the abandoned requests on which the provider likely works no more, and polls the lanes.
    #[inline]
    pub fn poll(&mut self, now: Time) -> QueueStep {
        if self.abandoned.is_empty() { self.lanes.poll(now) } else { self.poll_beside_abandoned(now) }
    }

    #[cold]
    fn poll_beside_abandoned(&mut self, now: Time) -> QueueStep {
        for call in self.abandoned.extract_if(.., |call| call.likely_end <= now).collect::<Vec<_>>() {
            self.record_end(call.lane, call.credential);
        }
        match self.lanes.poll(now) {
            QueueStep::Sleep(at) => {
                QueueStep::Sleep(self.abandoned.iter().map(|call| call.likely_end).fold(at, Time::min))
            }
            step => step,
        }
    }

    pub(super) fn apply_adaptive_limit(&mut self, rules: &CallRules) {
        if let Some(adaptive) = &self.adaptive_limit {
            self.lanes.set_max_in_flight(adaptive.limit().saturating_add(self.tunnels).min(rules.lanes.max_in_flight));
        }
    }

    /// Doubles the lead, because a throttled reply shows that it was too short: once for all requests under way.
    pub(super) fn double_lead(&mut self, sent_at: Time, now: Time) {
        if sent_at >= self.lead_doubled_at {
            self.lead = self.lead.times(2).min(MAX_LEAD);
            self.lead_doubled_at = now;
        }
    }
}

/// The store requests of a step. They stay in the [`ProviderState`] between steps, so that no batch is copied.
#[derive(Clone, Debug, Default)]
pub struct StoreRequests {
    pub(super) updates: Batch,
    pub(super) reservation: Batch,
}

impl StoreRequests {
    /// Sets the hash of the part that the keys of all batches share ([`Batch::set_affinity`]).
    pub fn set_affinity(&mut self, affinity: u64) {
        self.updates.set_affinity(affinity);
        self.reservation.set_affinity(affinity);
    }

    /// The updates to send to the store before anything else, without waiting for their outcomes, if there are any.
    pub fn updates(&self) -> Option<&Batch> {
        (!self.updates.ops().is_empty()).then_some(&self.updates)
    }

    /// The batch to execute after [`CallProgress::AskStore`](super::CallProgress::AskStore).
    pub fn reservation(&self) -> &Batch {
        &self.reservation
    }
}
