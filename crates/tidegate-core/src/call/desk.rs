//! What calls to one provider share, and what their steps have the store do.

use alloc::vec::Vec;

use rand_core::Rng;

use super::{MAX_LEAD, Rules};
use crate::allowance::Allowances;
use crate::retry::Reach;
use crate::{AdaptiveLimit, Batch, Breaker, Budget, Lane, Lanes, LimitKind, Pace, Pool, Span, Time};

/// What all calls to one provider in one process share and change. One lock's worth: whoever drives calls holds it for
/// each step.
#[derive(Debug)]
pub struct Desk {
    /// Who goes next.
    pub lanes: Lanes,
    /// Which credential goes next.
    pub pool: Pool,
    /// How many calls the provider bears at a time; `None` where that isn't to be found out.
    pub inflight: Option<AdaptiveLimit>,
    /// What keeps calls apart beyond the limits; `None`, as at first, where the limits alone say it.
    ///
    /// With a pace, a throttled reply that doesn't say for how long to come back slows it down and leaves everything else as
    /// it is, unless there is another credential: that comes first.
    pub pace: Option<Pace>,
    /// What is left of each credential's limits, where that is learnt.
    pub(super) allowances: Vec<Allowances>,
    /// Whether the provider is well.
    pub breaker: Breaker,
    /// What bounds retries.
    pub budget: Budget,
    /// What the last step has the store do.
    pub orders: Orders,
    pub(super) lead: Span,
    widened_at: Time,
    pub(super) transit: Transit,
}

/// How long calls are under way, as far as their replies show.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Transit {
    /// The shortest time from a grant to its reply; it drifts up slowly, in case the way has become longer.
    quickest: Option<Span>,
    /// The usual time and its mean deviation, smoothed as TCP smooths round trips (RFC 6298 §2).
    usual: Span,
    deviation: Span,
    granted_at: Time,
    /// How much later than others the last call may have come to the provider.
    late: Span,
}

impl Transit {
    /// Of how many calls each may raise the shortest time to its own.
    const DRIFT: u64 = 256;

    pub(super) fn granted(&mut self, now: Time) {
        (self.granted_at, self.late) = (now, Span::ZERO);
    }

    /// Learns from a request's end: from one that got no reply only that it took at least so long, and nothing from one
    /// that wasn't sent. Whether it may put off the next call.
    pub(super) fn ended(&mut self, granted_at: Time, elapsed: Span, reach: Reach) -> bool {
        if reach == Reach::Unsent {
            return false;
        }
        let first = self.quickest.is_none();
        let quickest = self.quickest.map_or(elapsed, |quickest| quickest.min(elapsed));
        let excess = elapsed.as_micros() - quickest.as_micros();
        if reach == Reach::Answered {
            self.quickest = Some(Span::from_micros(quickest.as_micros() + excess / Self::DRIFT));
            self.learn(elapsed.as_micros(), first);
        }
        // The first has nothing to be compared with, and its connection still had to be made.
        let late = if first { elapsed } else { Span::from_micros(excess) };
        if granted_at == self.granted_at {
            self.late = late;
        }
        granted_at == self.granted_at && !late.is_zero()
    }

    fn learn(&mut self, elapsed: u64, first: bool) {
        let (usual, deviation) = (self.usual.as_micros(), self.deviation.as_micros());
        let (usual, deviation) = match first {
            true => (elapsed, elapsed / 2),
            false => (usual - usual / 8 + elapsed / 8, deviation - deviation / 4 + usual.abs_diff(elapsed) / 4),
        };
        (self.usual, self.deviation) = (Span::from_micros(usual), Span::from_micros(deviation));
    }

    /// How long a reply takes but rarely.
    pub(super) fn ample(&self) -> Span {
        self.usual + self.deviation.times(2)
    }
}

impl Desk {
    /// The desk of a provider of which nothing is known yet.
    pub fn new(rules: &Rules, pool: Pool, breaker: Breaker, inflight: Option<AdaptiveLimit>) -> Self {
        let mut desk = Self {
            lanes: Lanes::new(rules.lanes),
            allowances: alloc::vec![Allowances::default(); if rules.learns { pool.size() } else { 0 }],
            pool: pool.with_max_in_flight(rules.credential_in_flight),
            inflight,
            pace: None,
            breaker,
            budget: Budget::new(rules.budget),
            orders: Orders::default(),
            lead: rules.lead,
            widened_at: Time::ZERO,
            transit: Transit::default(),
        };
        desk.bound(rules);
        desk
    }

    /// How far ahead calls are counted now.
    pub fn lead(&self) -> Span {
        self.lead
    }

    /// How much longer than a limit says the next call waits, so that it doesn't arrive too close behind the last.
    pub(super) fn apart(&self, rules: &Rules, kind: Option<&LimitKind>) -> Span {
        match kind {
            Some(LimitKind::Rate(_)) => rules.jitter + self.transit.late.min(rules.jitter.times(9)),
            _ => Span::ZERO,
        }
    }

    /// The credential to ask for next, of those that aren't known to be cooling, busy or to have too little left.
    pub(super) fn next_credential(&mut self, cost: u64, now: Time, rng: &mut impl Rng) -> Option<usize> {
        loop {
            let credential = self.pool.next(now, rng)?;
            let allowances = self.allowances.get_mut(credential);
            let free_at = allowances.map_or(now, |allowances| allowances.free_at(cost, now));
            if free_at <= now {
                return Some(credential);
            }
            self.pool.not_before(credential, free_at, now);
        }
    }

    /// A request with this credential is no longer in flight.
    pub(super) fn ended(&mut self, lane: Lane, credential: usize) {
        self.lanes.ended(lane);
        if self.pool.ended(credential) {
            self.lanes.poke();
        }
    }

    pub(super) fn in_flight(&self) -> u32 {
        Lane::ALL.iter().fold(0, |sum, lane| sum.saturating_add(self.lanes.in_flight(*lane)))
    }

    pub(super) fn bound(&mut self, rules: &Rules) {
        if let Some(inflight) = &self.inflight {
            self.lanes.set_max_in_flight(inflight.limit().min(rules.lanes.max_in_flight));
        }
    }

    /// A throttled reply says that the longest transit was taken too short, once for all that were under way.
    pub(super) fn widen(&mut self, sent_at: Time, now: Time) {
        if sent_at >= self.widened_at {
            self.lead = self.lead.times(2).min(MAX_LEAD);
            self.widened_at = now;
        }
    }
}

/// What a step has the store do. It lies on the desk from step to step, so that no batch is ever copied.
#[derive(Clone, Debug)]
pub struct Orders {
    pub(super) tell: Batch,
    pub(super) ask: Batch,
}

impl Default for Orders {
    fn default() -> Self {
        Self { tell: Batch::new(0), ask: Batch::new(0) }
    }
}

impl Orders {
    /// Says what the keys of all batches have in common ([`Batch::set_affinity`]).
    pub fn set_affinity(&mut self, affinity: u64) {
        self.tell.set_affinity(affinity);
        self.ask.set_affinity(affinity);
    }

    /// What the store is to be told, without waiting for an answer, before anything else is done.
    pub fn tell(&self) -> Option<&Batch> {
        (!self.tell.ops().is_empty()).then_some(&self.tell)
    }

    /// What the store is to be asked, after [`Step::Ask`](super::Step::Ask).
    pub fn ask(&self) -> &Batch {
        &self.ask
    }

    pub(super) fn begin(&mut self) {
        self.tell.clear();
    }
}
