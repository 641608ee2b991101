//! The waiting calls of scopes. Of each scope that isn't held, only the first call is in its lane's order.
//!
//! All maps are ordered, so the work grows with the logarithm of the number of waiting calls, whatever their scopes are.
//! A scope is known for as long as a call of it waits.

use alloc::collections::btree_map::{BTreeMap, Entry};
use alloc::collections::btree_set::BTreeSet;

use super::Lanes;
use crate::Time;
use crate::lanes::{Lane, Refusal, ScopedLane};
use crate::time::MAX_CLOCK_LAG;

/// A waiting call: its number in the order of arrival, and its slot.
pub(super) type Arrival = (u64, u32);

/// The waiting calls of one scope in one lane.
#[derive(Clone, Debug)]
struct ScopeQueue {
    first: Arrival,
    waiting: usize,
    /// The refusal that holds it.
    refusal: Option<Refusal>,
}

/// The calls that leave and enter a lane's order, because the first call of a scope has changed, is held or is
/// released.
#[derive(Clone, Copy, Debug, Default)]
#[must_use]
pub(super) struct OrderChange {
    leaves: Option<u32>,
    enters: Option<Arrival>,
}

impl OrderChange {
    const NONE: Self = Self { leaves: None, enters: None };
}

/// The waiting calls of all scopes.
#[derive(Clone, Debug, Default)]
pub(super) struct ScopeQueues {
    queues: BTreeMap<ScopedLane, ScopeQueue>,
    /// The calls behind the first of their scope.
    followers: BTreeSet<(ScopedLane, Arrival)>,
    /// The held scopes of each lane, the one that opens first at the beginning.
    held: BTreeSet<(Lane, Time, u64)>,
    /// The number of calls of held scopes in each lane.
    held_calls: [usize; 3],
    /// The time of the latest refusal since none was held.
    held_at: Time,
}

impl ScopeQueues {
    fn insert(&mut self, place: ScopedLane, call: Arrival) -> OrderChange {
        let queue = match self.queues.entry(place) {
            Entry::Vacant(vacant) => {
                vacant.insert(ScopeQueue { first: call, waiting: 1, refusal: None });
                return OrderChange { leaves: None, enters: Some(call) };
            }
            Entry::Occupied(occupied) => occupied.into_mut(),
        };
        queue.waiting += 1;
        let is_held = queue.refusal.is_some();
        if is_held {
            self.held_calls[place.lane as usize] += 1;
        }
        if call > queue.first {
            self.followers.insert((place, call));
            return OrderChange::NONE;
        }
        // It was granted before, or comes from another lane.
        let overtaken = core::mem::replace(&mut queue.first, call);
        self.followers.insert((place, overtaken));
        if is_held { OrderChange::NONE } else { OrderChange { leaves: Some(overtaken.1), enters: Some(call) } }
    }

    fn remove(&mut self, place: ScopedLane, call: Arrival) -> OrderChange {
        let Entry::Occupied(mut occupied) = self.queues.entry(place) else { return OrderChange::NONE };
        let queue = occupied.get_mut();
        queue.waiting -= 1;
        let refusal = queue.refusal;
        self.held_calls[place.lane as usize] -= usize::from(refusal.is_some());
        if self.followers.remove(&(place, call)) {
            return OrderChange::NONE;
        }
        let next = first_of(&self.followers, place);
        match next {
            Some(next) => {
                self.followers.remove(&(place, next));
                queue.first = next;
            }
            None => {
                occupied.remove();
                if let Some(refusal) = refusal {
                    self.held.remove(&(place.lane, refusal.until, place.scope));
                }
            }
        }
        if refusal.is_some() { OrderChange::NONE } else { OrderChange { leaves: Some(call.1), enters: next } }
    }

    /// Keeps the calls of a scope out of the lane's order.
    fn hold(&mut self, place: ScopedLane, refusal: Refusal) -> OrderChange {
        let Some(queue) = self.queues.get_mut(&place) else { return OrderChange::NONE };
        let before = queue.refusal.replace(refusal);
        self.held.insert((place.lane, refusal.until, place.scope));
        match before {
            Some(before) => {
                if before.until != refusal.until {
                    self.held.remove(&(place.lane, before.until, place.scope));
                }
                OrderChange::NONE
            }
            None => {
                self.held_calls[place.lane as usize] += queue.waiting;
                OrderChange { leaves: Some(queue.first.1), enters: None }
            }
        }
    }

    fn release(&mut self, place: ScopedLane) -> OrderChange {
        let Some(queue) = self.queues.get_mut(&place) else { return OrderChange::NONE };
        let Some(refusal) = queue.refusal.take() else { return OrderChange::NONE };
        self.held.remove(&(place.lane, refusal.until, place.scope));
        self.held_calls[place.lane as usize] -= queue.waiting;
        OrderChange { leaves: None, enters: Some(queue.first) }
    }

    pub(super) fn any_held(&self) -> bool {
        !self.held.is_empty()
    }

    /// The number of a lane's waiting calls whose scopes are held.
    pub(super) fn held_calls(&self, lane: Lane) -> usize {
        self.held_calls[lane as usize]
    }

    /// The number of waiting calls of a scope.
    pub(super) fn waiting(&self, place: ScopedLane) -> usize {
        self.queues.get(&place).map_or(0, |queue| queue.waiting)
    }

    fn first_held(&self, lane: Lane) -> Option<(Time, ScopedLane)> {
        self.held_in(lane).next().map(|&(lane, opens_at, scope)| (opens_at, lane.with_scope(scope)))
    }

    /// The first call of the held scope that opens last.
    pub(super) fn first_of_last_held(&self, lane: Lane) -> Option<u32> {
        let &(_, _, scope) = self.held_in(lane).next_back()?;
        self.queues.get(&lane.with_scope(scope)).map(|queue| queue.first.1)
    }

    fn held_in(&self, lane: Lane) -> impl DoubleEndedIterator<Item = &(Lane, Time, u64)> {
        self.held.range((lane, Time::ZERO, 0)..=(lane, Time::NEVER, u64::MAX))
    }

    /// The calls of a scope behind its first one, in the order of arrival.
    pub(super) fn followers(&self, place: ScopedLane) -> impl Iterator<Item = Arrival> {
        self.followers.range((place, (0, 0))..=(place, (u64::MAX, u32::MAX))).map(|&(_, call)| call)
    }

    /// All calls of a scope in the order of arrival.
    pub(super) fn calls(&self, place: ScopedLane) -> impl Iterator<Item = Arrival> {
        self.queues.get(&place).map(|queue| queue.first).into_iter().chain(self.followers(place))
    }

    /// The refusal that holds a scope. `None` if the clock has stepped back since the last one: then another attempt is
    /// worthwhile.
    pub(super) fn refusal(&self, place: ScopedLane, now: Time) -> Option<Refusal> {
        let refusal = self.queues.get(&place)?.refusal?;
        (now < refusal.until && !self.has_stepped_back(now)).then_some(refusal)
    }

    fn has_stepped_back(&self, now: Time) -> bool {
        self.held_at > now + MAX_CLOCK_LAG
    }
}

fn first_of(followers: &BTreeSet<(ScopedLane, Arrival)>, place: ScopedLane) -> Option<Arrival> {
    followers.range((place, (0, 0))..).next().filter(|(of, _)| *of == place).map(|&(_, call)| call)
}

impl Lanes {
    #[cold]
    pub(super) fn insert_scoped(&mut self, place: ScopedLane, call: Arrival) {
        self.queue_mut(place.lane).unlisted += 1;
        let change = self.scopes.insert(place, call);
        self.apply(place.lane, change);
    }

    #[cold]
    pub(super) fn remove_scoped(&mut self, place: ScopedLane, call: Arrival) {
        let change = self.scopes.remove(place, call);
        self.apply(place.lane, change);
        self.queue_mut(place.lane).unlisted -= 1;
    }

    #[cold]
    pub(super) fn hold(&mut self, place: ScopedLane, refusal: Refusal, now: Time) {
        self.release_due(now);
        self.scopes.held_at = if self.scopes.any_held() { self.scopes.held_at.max(now) } else { now };
        let change = self.scopes.hold(place, refusal);
        self.apply(place.lane, change);
    }

    pub(super) fn release(&mut self, place: ScopedLane) {
        let change = self.scopes.release(place);
        self.apply(place.lane, change);
    }

    /// Releases the held scopes that open now. Each is held and released once per refusal, so the work is O(log n) for
    /// each refusal.
    #[cold]
    pub(super) fn release_due(&mut self, now: Time) {
        if self.scopes.has_stepped_back(now) {
            self.release_all();
        }
        for lane in Lane::ALL {
            while let Some((_, place)) = self.scopes.first_held(lane).filter(|(opens_at, _)| *opens_at <= now) {
                self.release(place);
            }
        }
    }

    pub(super) fn release_all(&mut self) {
        while let Some(&(lane, _, scope)) = self.scopes.held.first() {
            self.release(lane.with_scope(scope));
        }
    }

    /// The time at which the first held scope of a lane that has room in flight opens.
    #[cold]
    pub(super) fn next_release_at(&self) -> Time {
        let opens_at = |lane: Lane| {
            let queue = self.queue(lane);
            let has_room = queue.in_flight < queue.spec.max_in_flight;
            self.scopes.first_held(lane).filter(|_| has_room).map(|(opens_at, _)| opens_at.max(queue.paused_until))
        };
        Lane::ALL.into_iter().filter_map(opens_at).min().unwrap_or(Time::NEVER)
    }

    /// The second call of a lane in the order of arrival, without those of held scopes.
    pub(super) fn second_call(&self, lane: Lane) -> Option<u32> {
        let order = &self.queue(lane).order;
        let (_, first) = order.first()?;
        let follower = first_of(&self.scopes.followers, self.calls[first as usize].place());
        order.second().into_iter().chain(follower).min().map(|(_, index)| index)
    }

    /// The refusal of a scope, for a new call behind the others of it, if the call can't be sent before its deadline.
    #[cold]
    pub(super) fn scope_refused_behind(&self, deadline: Time, place: ScopedLane, now: Time) -> Option<Refusal> {
        let refusal = self.scopes.refusal(place, now)?;
        let behind_all = refusal.behind(self.scopes.waiting(place));
        if behind_all.closed_until < deadline {
            return None;
        }
        if behind_all == refusal {
            return Some(refusal);
        }
        let ahead = self.sendable(self.scopes.calls(place), place.lane, refusal);
        Some(refusal.behind(ahead)).filter(|refusal| refusal.closed_until >= deadline)
    }

    fn apply(&mut self, lane: Lane, change: OrderChange) {
        let queue = self.queue_mut(lane);
        if let Some(index) = change.leaves {
            queue.order.remove(index);
            queue.unlisted += 1;
        }
        if let Some((arrival, index)) = change.enters {
            queue.order.set(index, arrival);
            queue.unlisted -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{LaneSpec, LanesSpec, QueueStep, RefusalScope, Ticket};
    use std::vec::Vec;

    const COUNT: u64 = 10_000;
    const OPENS_AT: Time = Time::from_secs(60);

    fn lanes_of(scope: impl Fn(u64) -> u64) -> (Lanes, Vec<Ticket>) {
        let lane = LaneSpec { max_waiting: u32::MAX, ..LaneSpec::default() };
        let mut lanes = Lanes::new(LanesSpec { lanes: [lane; 3], ..LanesSpec::default() });
        let tickets = (0..COUNT).map(|call| {
            let place = Lane::User.with_scope(scope(call));
            lanes.enqueue(place, 1, Time::NEVER, Time::ZERO).expect("room in the queue")
        });
        let tickets = tickets.collect();
        (lanes, tickets)
    }

    /// Refuses each call that asks, and returns their number.
    fn hold_all(lanes: &mut Lanes) -> usize {
        let mut asked = 0;
        while let QueueStep::AskStore(ticket) = lanes.poll(Time::ZERO) {
            let refusal = Refusal { until: OPENS_AT, scope: RefusalScope::Part, ..Refusal::default() };
            lanes.refuse(ticket, refusal, Time::ZERO);
            asked += 1;
        }
        asked
    }

    /// The order of a lane has nothing to skip: whatever is held is in the maps that are searched by key.
    #[test]
    fn ten_thousand_held_scopes_cost_no_scan() {
        for (scopes, scope) in [(COUNT, (|call| 1 + call) as fn(u64) -> u64), (1, |_| 7)] {
            let (mut lanes, tickets) = lanes_of(scope);
            let is_listed = |lanes: &Lanes| lanes.queue(Lane::User).order.len() as u64;
            assert_eq!(is_listed(&lanes), scopes, "one call of each scope");
            assert_eq!(hold_all(&mut lanes) as u64, scopes, "each scope asks once");
            assert_eq!((is_listed(&lanes), lanes.scopes.held.len() as u64), (0, scopes));
            assert_eq!(lanes.scopes.held_calls(Lane::User), tickets.len());
            assert_eq!(lanes.waiting(Lane::User), tickets.len());
            for ticket in tickets {
                assert!(lanes.cancel(ticket));
            }
            let ScopeQueues { queues, followers, held, held_calls, .. } = &lanes.scopes;
            assert_eq!((queues.len(), followers.len(), held.len(), *held_calls), (0, 0, 0, [0; 3]));
            assert_eq!(lanes.waiting(Lane::User), 0);
        }
    }
}
