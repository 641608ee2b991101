//! What calls to one provider share, and what their steps have the store do.

use alloc::vec::Vec;

use rand_core::Rng;

use super::{CallRules, MAX_LEAD};
use crate::remaining::RemainingTracker;
use crate::retry::Delivery;
use crate::{AdaptiveLimit, Batch, Breaker, Budget, CredentialPool, Lane, Lanes, LimitKind, Pace, Span, Time};

/// What all calls to one provider in one process share and change. One lock's worth: whoever drives calls holds it for
/// each step.
#[derive(Debug)]
pub struct ProviderState {
    /// Who goes next.
    pub lanes: Lanes,
    /// Which credential goes next.
    pub pool: CredentialPool,
    /// How many calls the provider bears at a time; `None` where that isn't to be found out.
    pub adaptive_limit: Option<AdaptiveLimit>,
    /// What keeps calls apart beyond the limits; `None`, as at first, where the limits alone say it.
    ///
    /// With a pace, a throttled reply that doesn't say for how long to come back slows it down and leaves everything else as
    /// it is, unless there is another credential: that comes first.
    pub pace: Option<Pace>,
    /// What is left of each credential's limits, where that is learnt.
    pub(super) remaining_trackers: Vec<RemainingTracker>,
    /// Whether the provider is well.
    pub breaker: Breaker,
    /// What bounds retries.
    pub budget: Budget,
    /// What the last step has the store do.
    pub store_requests: StoreRequests,
    pub(super) lead: Span,
    lead_doubled_at: Time,
    pub(super) round_trips: RoundTripStats,
}

/// How long calls are under way, as far as their replies show.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundTripStats {
    /// The shortest time from a grant to its reply; it drifts up slowly, in case the way has become longer.
    shortest: Option<Span>,
    /// The usual time and its mean deviation, smoothed as TCP smooths round trips (RFC 6298 §2).
    smoothed: Span,
    deviation: Span,
    granted_at: Time,
    /// How much later than others the last call may have come to the provider.
    last_excess: Span,
}

impl RoundTripStats {
    /// Of how many calls each may raise the shortest time to its own.
    const DRIFT: u64 = 256;

    pub(super) fn record_grant(&mut self, now: Time) {
        (self.granted_at, self.last_excess) = (now, Span::ZERO);
    }

    /// Learns from a request's end: from one that got no reply only that it took at least so long, and nothing from one
    /// that wasn't sent. Whether it may put off the next call.
    pub(super) fn record_end(&mut self, granted_at: Time, elapsed: Span, reach: Delivery) -> bool {
        if reach == Delivery::Unsent {
            return false;
        }
        let is_first = self.shortest.is_none();
        let quickest = self.shortest.map_or(elapsed, |quickest| quickest.min(elapsed));
        let excess = elapsed.as_micros() - quickest.as_micros();
        if reach == Delivery::Answered {
            self.shortest = Some(Span::from_micros(quickest.as_micros() + excess / Self::DRIFT));
            self.update_smoothed(elapsed.as_micros(), is_first);
        }
        // The first has nothing to be compared with, and its connection still had to be made.
        let late = if is_first { elapsed } else { Span::from_micros(excess) };
        if granted_at == self.granted_at {
            self.last_excess = late;
        }
        granted_at == self.granted_at && !late.is_zero()
    }

    fn update_smoothed(&mut self, elapsed: u64, is_first: bool) {
        let (usual, deviation) = (self.smoothed.as_micros(), self.deviation.as_micros());
        let (usual, deviation) = match is_first {
            true => (elapsed, elapsed / 2),
            false => (usual - usual / 8 + elapsed / 8, deviation - deviation / 4 + usual.abs_diff(elapsed) / 4),
        };
        (self.smoothed, self.deviation) = (Span::from_micros(usual), Span::from_micros(deviation));
    }

    /// How long a reply takes but rarely.
    pub(super) fn usual_max(&self) -> Span {
        self.smoothed + self.deviation.times(2)
    }
}

impl ProviderState {
    /// The desk of a provider of which nothing is known yet.
    pub fn new(rules: &CallRules, pool: CredentialPool, breaker: Breaker, inflight: Option<AdaptiveLimit>) -> Self {
        let mut state = Self {
            lanes: Lanes::new(rules.lanes),
            remaining_trackers: alloc::vec![RemainingTracker::default(); if rules.tracks_remaining { pool.size() } else { 0 }],
            pool: pool.with_max_in_flight(rules.max_in_flight_per_credential),
            adaptive_limit: inflight,
            pace: None,
            breaker,
            budget: Budget::new(rules.budget),
            store_requests: StoreRequests::default(),
            lead: rules.lead,
            lead_doubled_at: Time::ZERO,
            round_trips: RoundTripStats::default(),
        };
        state.apply_adaptive_limit(rules);
        state
    }

    /// How far ahead calls are counted now.
    pub fn lead(&self) -> Span {
        self.lead
    }

    /// How much longer than a limit says the next call waits, so that it doesn't arrive too close behind the last.
    pub(super) fn extra_spacing(&self, rules: &CallRules, kind: Option<&LimitKind>) -> Span {
        match kind {
            Some(LimitKind::Rate(_)) => rules.jitter + self.round_trips.last_excess.min(rules.jitter.times(9)),
            _ => Span::ZERO,
        }
    }

    /// The credential to ask for next, of those that aren't known to be cooling, busy or to have too little left.
    pub(super) fn next_credential(&mut self, cost: u64, now: Time, rng: &mut impl Rng) -> Option<usize> {
        loop {
            let credential = self.pool.next(now, rng)?;
            let allowances = self.remaining_trackers.get_mut(credential);
            let free_at = allowances.map_or(now, |allowances| allowances.free_at(cost, now));
            if free_at <= now {
                return Some(credential);
            }
            self.pool.set_cooling_until(credential, free_at, now);
        }
    }

    /// A request with this credential is no longer in flight.
    pub(super) fn record_end(&mut self, lane: Lane, credential: usize) {
        self.lanes.record_end(lane);
        if self.pool.record_end(credential) {
            self.lanes.clear_refusals();
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        Lane::ALL.iter().fold(0, |sum, lane| sum.saturating_add(self.lanes.in_flight(*lane)))
    }

    pub(super) fn apply_adaptive_limit(&mut self, rules: &CallRules) {
        if let Some(inflight) = &self.adaptive_limit {
            self.lanes.set_max_in_flight(inflight.limit().min(rules.lanes.max_in_flight));
        }
    }

    /// A throttled reply says that the longest transit was taken too short, once for all that were under way.
    pub(super) fn double_lead(&mut self, sent_at: Time, now: Time) {
        if sent_at >= self.lead_doubled_at {
            self.lead = self.lead.times(2).min(MAX_LEAD);
            self.lead_doubled_at = now;
        }
    }
}

/// What a step has the store do. It lies on the desk from step to step, so that no batch is ever copied.
#[derive(Clone, Debug)]
pub struct StoreRequests {
    pub(super) updates: Batch,
    pub(super) reservation: Batch,
}

impl Default for StoreRequests {
    fn default() -> Self {
        Self { updates: Batch::new(0), reservation: Batch::new(0) }
    }
}

impl StoreRequests {
    /// Says what the keys of all batches have in common ([`Batch::set_affinity`]).
    pub fn set_affinity(&mut self, affinity: u64) {
        self.updates.set_affinity(affinity);
        self.reservation.set_affinity(affinity);
    }

    /// What the store is to be told, without waiting for an answer, before anything else is done.
    pub fn updates(&self) -> Option<&Batch> {
        (!self.updates.ops().is_empty()).then_some(&self.updates)
    }

    /// What the store is to be asked, after [`CallProgress::AskStore`](super::CallProgress::AskStore).
    pub fn reservation(&self) -> &Batch {
        &self.reservation
    }

    pub(super) fn clear_updates(&mut self) {
        self.updates.clear();
    }
}
