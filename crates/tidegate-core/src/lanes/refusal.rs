//! The refusals of the store, as far as they apply to later calls.

use alloc::vec::Vec;

use super::Lanes;
use super::scopes::Arrival;
use crate::lanes::{Lane, ScopedLane};
use crate::time::MAX_CLOCK_LAG;
use crate::{LimitId, Span, Time};

/// The calls that a refusal applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RefusalScope {
    /// The call's lane: a limit of the lane itself is among those that refuse. The other lanes continue.
    Lane,
    /// The calls of the same [scope](super::ScopedLane) in the same lane, at any cost: that part of the provider's API
    /// is closed. Others continue, also behind them in the lane. Without a scope, it is the call's lane.
    Part,
    /// All calls: only limits that all lanes share refuse. The call keeps its turn.
    #[default]
    Provider,
}

/// The reason why no call can be sent before a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WaitReason {
    /// A limit has no room. From then on, it admits at most `calls` in each `every`.
    Limit {
        /// The limit.
        limit: LimitId,
        /// The number of calls, at least 1.
        calls: u64,
        /// The time in which it admits them. Zero if it is unknown.
        every: Span,
    },
    /// A calendar quota is spent.
    Quota(LimitId),
    /// All credentials are cooling down.
    Credentials,
    /// The provider's pace has no room.
    #[default]
    Pace,
}

/// A refusal of a call's turn. The default applies to no call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// The time of the next attempt.
    pub until: Time,
    /// The time before which no such call can be sent, unless a request under way turns out unsent. At most `until`;
    /// [`Time::ZERO`] if it is unknown.
    pub closed_until: Time,
    /// The reason.
    pub reason: WaitReason,
    /// The calls that it applies to.
    pub scope: RefusalScope,
}

impl Refusal {
    /// The same refusal for a call behind `ahead` others.
    pub(super) fn behind(self, ahead: usize) -> Self {
        let wait = match self.reason {
            WaitReason::Limit { calls, every, .. } => every.times(ahead as u64 / calls),
            WaitReason::Quota(_) | WaitReason::Credentials | WaitReason::Pace => Span::ZERO,
        };
        let is_known = self.closed_until > Time::ZERO;
        let closed_until = if is_known { self.closed_until + wait } else { Time::ZERO };
        Self { until: self.until + wait, closed_until, ..self }
    }
}

/// A refusal with its call. The default applies to no call.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RefusedCall {
    pub refusal: Refusal,
    pub refused_at: Time,
    pub lane: Lane,
    pub cost: u64,
}

impl RefusedCall {
    /// True if this refusal also applies to such a call. A more urgent call may have reserves, and a cheaper one may
    /// fit. If the clock has stepped back since the refusal, another attempt is worthwhile.
    pub(super) fn applies_to(&self, lane: Lane, cost: u64, now: Time) -> bool {
        let is_current = now < self.refusal.until && self.refused_at <= now + MAX_CLOCK_LAG;
        is_current && lane <= self.lane && cost >= self.cost
    }
}

impl Lanes {
    /// The refusal that a call of this lane, scope and cost would wait for until its deadline or longer, even as the
    /// first of its lane. `None` if no refusal shows that.
    #[inline]
    pub fn refused_past(&self, deadline: Time, place: impl Into<ScopedLane>, cost: u64, now: Time) -> Option<Refusal> {
        let place = place.into();
        if self.may_refuse(place, now) { self.find_refused_past(deadline, place, cost, now) } else { None }
    }

    fn find_refused_past(&self, deadline: Time, place: ScopedLane, cost: u64, now: Time) -> Option<Refusal> {
        let refusals = self.refusals(place.lane, cost, now).filter(|refusal| refusal.closed_until >= deadline);
        let refusal = refusals.max_by_key(|refusal| refusal.until);
        if place.scope == 0 {
            return refusal;
        }
        let of_scope = self.scopes.refusal(place, now).filter(|refusal| refusal.closed_until >= deadline);
        refusal.into_iter().chain(of_scope).max_by_key(|refusal| refusal.until)
    }

    /// Like [`Lanes::refused_past`], for a new call behind the waiting calls of its lane that aren't held, or those of
    /// its scope if that is refused. Those that can be sent before their deadlines are assumed to stay, also one that
    /// would make room. The refusal's times are those of the new call.
    ///
    /// It takes constant time, O(log n) with a scope, or O(n log n) if the new call is refused or calls before it can't
    /// be sent in time.
    #[inline]
    pub fn refused_behind(
        &self,
        deadline: Time,
        place: impl Into<ScopedLane>,
        cost: u64,
        now: Time,
    ) -> Option<Refusal> {
        let place = place.into();
        if self.may_refuse(place, now) { self.find_refused_behind(deadline, place, cost, now) } else { None }
    }

    fn find_refused_behind(&self, deadline: Time, place: ScopedLane, cost: u64, now: Time) -> Option<Refusal> {
        let behind_all = |refusal: &Refusal| refusal.behind(self.open_calls(place.lane)).closed_until >= deadline;
        let refusals = self.refusals(place.lane, cost, now).filter(behind_all);
        let refusals = refusals.map(|refusal| refusal.behind(self.sendable_ahead(place.lane, refusal)));
        let refusal = refusals.filter(|refusal| refusal.closed_until >= deadline).max_by_key(|refusal| refusal.until);
        if place.scope == 0 {
            return refusal;
        }
        refusal.into_iter().chain(self.scope_refused_behind(deadline, place, now)).max_by_key(|refusal| refusal.until)
    }

    /// False if no refusal can apply to a call of this place, as is usual.
    #[inline]
    fn may_refuse(&self, place: ScopedLane, now: Time) -> bool {
        let until = self.refused.refusal.until.max(self.queue(place.lane).refused.refusal.until);
        now < until || place.scope != 0
    }

    /// The refusals that apply to such a call.
    fn refusals(&self, lane: Lane, cost: u64, now: Time) -> impl Iterator<Item = Refusal> {
        let refused = [&self.refused, &self.queue(lane).refused].into_iter();
        refused.filter(move |refused| refused.applies_to(lane, cost, now)).map(|refused| refused.refusal)
    }

    /// The number of a lane's waiting calls that this refusal and a pause let send before their deadlines, one after
    /// the other, without those of held scopes. Any number if it makes no difference to the wait.
    #[cold]
    fn sendable_ahead(&self, lane: Lane, refusal: Refusal) -> usize {
        let queue = self.queue(lane);
        if refusal.behind(self.open_calls(lane)) == refusal {
            return 0;
        }
        let mut calls: Vec<Arrival> = (0..queue.order.len()).filter_map(|place| queue.order.nth(place)).collect();
        if queue.unlisted > 0 {
            for place in 0..calls.len() {
                let (_, index) = calls[place];
                calls.extend(self.scopes.followers(self.calls[index as usize].place()));
            }
        }
        calls.sort_unstable();
        self.sendable(calls.into_iter(), lane, refusal)
    }

    /// The number of these calls of a lane, in the order of arrival, that this refusal and a pause let send before
    /// their deadlines, one after the other.
    pub(super) fn sendable(&self, calls: impl Iterator<Item = Arrival>, lane: Lane, refusal: Refusal) -> usize {
        let paused_until = self.paused_until(lane);
        calls.fold(0, |ahead, (_, index)| {
            let earliest = refusal.behind(ahead).closed_until.max(paused_until);
            ahead + usize::from(self.deadlines.key(index).is_some_and(|deadline| deadline > earliest))
        })
    }

    /// The number of a lane's waiting calls that aren't held.
    fn open_calls(&self, lane: Lane) -> usize {
        self.waiting(lane) - self.scopes.held_calls(lane)
    }
}
