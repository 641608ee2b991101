//! The order of the queued outbound calls of one provider in one process.
//!
//! Calls wait in three lanes, in the order of arrival within each. One call at a time is selected to ask the store,
//! which either grants it or names a time before which another attempt can't succeed.
//!
//! More urgent lanes go first, with two exceptions that prevent starvation. First, a waiting lane earns a share of the
//! granted cost, its *floor*, as credit. It goes first once the credit pays for its next call (deficit round robin of
//! M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", SIGCOMM 1995, with a share in
//! place of the quantum). Second, among lanes that have waited for a whole window, the one that has waited longest goes
//! first, so that even a limit of a few calls per window reaches every lane. A lane that is held back by a limit of its
//! own (calls in flight, a quota, its hours) doesn't hold back others, and earns nothing.
//!
//! A part of the provider's API may be closed on its own: a *scope*, such as its search, a model or a route. While it
//! is, its calls are held, and those behind them in their lane go past. The calls of a scope keep their order.

mod refusal;
mod scopes;
mod spec;

use alloc::vec::Vec;
use arrayvec::ArrayVec;
use core::cmp::Reverse;

use crate::heap::IndexHeap;
use crate::{MAX_COST, PER_MILLE, Span, Time};
use refusal::RefusedCall;
pub use refusal::{Refusal, RefusalScope, WaitReason};
use scopes::{Arrival, ScopeQueues};
pub use spec::{Lane, LaneSpec, LanesSpec, MAX_FLOOR, MAX_WAITING, QueueFullError, ScopedLane};

/// Identifies a queued call. Once the call has left, it has no effect until 2^32 other calls have used its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    index: u32,
    generation: u32,
}

impl Ticket {
    /// A number that no other waiting call has, at most the number of calls that have waited at once: an index for a driver's data.
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

/// The next action of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueStep {
    /// Fail this call: its deadline has passed, or a refusal shows that it can't be sent before ([`Lanes::refused_past`]).
    /// It has left the queue.
    Expired(Ticket),
    /// Fail this call with [`QueueFullError`]: it has lost its place to a later one ([`Lanes::make_room`]). It has left the
    /// queue.
    Displaced(Ticket),
    /// Ask the store for this call and report the answer: [`Lanes::grant`] or [`Lanes::refuse`]. If it gave none
    /// or refused permanently, call [`Lanes::cancel`]. No other call is selected before.
    AskStore(Ticket),
    /// Wait until this time, or until a call arrives, ends, leaves or is answered. [`Time::NEVER`] if no time matters.
    Sleep(Time),
}

#[derive(Clone, Copy, Debug)]
struct QueuedCall {
    arrival: u64,
    cost: u64,
    scope: u64,
    generation: u32,
    lane: Lane,
    /// True if it isn't displaced: other callers wait for it too, or it has [entered again](Lanes::enqueue_again).
    keeps_place: bool,
}

impl QueuedCall {
    fn place(&self) -> ScopedLane {
        self.lane.with_scope(self.scope)
    }
}

/// The refusals that don't count if the answer of the store brings them, since something has changed after the
/// question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outdated {
    Nothing,
    /// Those of the scope.
    Scope,
    All,
}

#[derive(Clone, Debug, Default)]
struct LaneQueue {
    spec: LaneSpec,
    /// The calls without a scope, and the first call of each scope that isn't held.
    order: IndexHeap<u64>,
    /// The number of waiting calls that aren't in `order`.
    unlisted: u32,
    in_flight: u32,
    /// The credit that the floor has earned since the lane began to wait, less the spent one, in thousandths of cost.
    credit: u64,
    /// The time at which the lane will have waited a whole window without a grant.
    overdue_at: Time,
    paused_until: Time,
    refused: RefusedCall,
}

impl LaneQueue {
    fn waiting(&self) -> usize {
        self.order.len() + self.unlisted as usize
    }
}

/// The queued calls of one provider in one process, and the number of calls in flight.
///
/// A driver reports each event and then calls [`Lanes::poll`] until it returns [`QueueStep::Sleep`]. Enqueueing,
/// removing, selecting and refusing a call take O(log n); if several held scopes open at once, O(log n) for each. At
/// most `max_waiting` calls wait in each lane, also held ones, and those that have entered
/// [again](Self::enqueue_again). Their memory is kept. A scope is known only while a call of it waits.
#[derive(Clone, Debug)]
pub struct Lanes {
    max_in_flight: u32,
    floor: u64,
    window: Span,
    queues: [LaneQueue; 3],
    calls: Vec<QueuedCall>,
    free_slots: Vec<u32>,
    deadlines: IndexHeap<Time>,
    next_arrival: u64,
    asking: Option<Ticket>,
    /// The call that has lost its place, until the driver is told. Its slot is free only then.
    displaced: Option<Ticket>,
    outdated: Outdated,
    refused: RefusedCall,
    scopes: ScopeQueues,
}

impl Lanes {
    /// Creates empty lanes. Values above their maximums are lowered to them.
    pub fn new(spec: LanesSpec) -> Self {
        let queue = |spec: LaneSpec| LaneQueue {
            spec: LaneSpec { max_waiting: spec.max_waiting.min(MAX_WAITING), ..spec },
            ..LaneQueue::default()
        };
        Self {
            max_in_flight: spec.max_in_flight,
            floor: u64::from(spec.floor.min(MAX_FLOOR)),
            window: spec.window,
            queues: spec.lanes.map(queue),
            calls: Vec::new(),
            free_slots: Vec::new(),
            deadlines: IndexHeap::default(),
            next_arrival: 0,
            asking: None,
            displaced: None,
            outdated: Outdated::Nothing,
            refused: RefusedCall::default(),
            scopes: ScopeQueues::default(),
        }
    }

    /// The number of waiting calls of a lane, including the one that is asking and those that are held.
    pub fn waiting(&self, lane: Lane) -> usize {
        self.queue(lane).waiting()
    }

    /// The number of calls of a lane in flight.
    pub fn in_flight(&self, lane: Lane) -> u32 {
        self.queue(lane).in_flight
    }

    pub(crate) fn total_in_flight(&self) -> u32 {
        self.queues.iter().fold(0, |sum, queue| sum.saturating_add(queue.in_flight))
    }

    /// Displaces a call of a full lane that [`displaces`](LaneSpec::displaces), so that a new one with this deadline
    /// finds room: the second one of those that aren't held, which has waited longest of those whose turn it isn't. If
    /// at least half of the lane's calls are held, rather the first call of the held scope that opens last, so that
    /// closed scopes don't take the places of the others. The next [`Lanes::poll`] names it.
    ///
    /// A call with a later deadline, one that is asking the store, was [joined](Self::join) or has entered
    /// [again](Self::enqueue_again) keeps its place. Changes nothing, and returns false, if no call gives way, if the
    /// lane has more calls than its maximum, or if the last displaced call is still to be named. A router may drop from
    /// the front of a full queue, too (RFC 7567 §2): as many calls are sent, each after a shorter wait.
    #[cold]
    pub fn make_room(&mut self, lane: Lane, deadline: Time) -> bool {
        let LaneSpec { max_waiting, displaces, .. } = self.queue(lane).spec;
        let waiting = self.waiting(lane);
        // The place of one of too many calls isn't free for another.
        if waiting != max_waiting as usize || !displaces || self.displaced.is_some() {
            return false;
        }
        let gives_way = |index: &u32| {
            let ticket = self.ticket(*index);
            // A call that can wait less long than this one might leave the place unused.
            let is_as_patient = self.deadlines.key(*index).is_some_and(|own| own <= deadline);
            // An answer that is under way would be wasted.
            is_as_patient && self.asking != Some(ticket) && !self.calls[ticket.index()].keeps_place
        };
        let held = self.scopes.first_of_last_held(lane).filter(|_| self.scopes.held_calls(lane) >= waiting.div_ceil(2));
        let Some(index) = held.into_iter().chain(self.second_call(lane)).find(gives_way) else { return false };
        let ticket = self.ticket(index);
        self.remove(ticket);
        // Its slot isn't used again before the driver is told.
        self.free_slots.pop();
        self.displaced = Some(ticket);
        true
    }

    /// Adds a call to a lane, and to a [scope](Lane::with_scope) if it has one, until it is granted, cancelled,
    /// displaced or expired at its deadline. `cost` is cut to 2^40. If the scope is held, the call waits with the
    /// others of it.
    ///
    /// # Errors
    /// [`QueueFullError`] if the lane already has the maximum number of waiting calls.
    #[inline]
    pub fn enqueue(
        &mut self,
        place: impl Into<ScopedLane>,
        cost: u64,
        deadline: Time,
        now: Time,
    ) -> Result<Ticket, QueueFullError> {
        let place = place.into();
        self.check_room(place.lane)?;
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        Ok(self.add(arrival, place, cost, deadline, now))
    }

    /// [Adds](Self::enqueue) a call that was granted before, at the place of its first [arrival](Self::arrival), even if the
    /// lane is full: there are only as many such calls as were in flight. It isn't displaced.
    pub fn enqueue_again(
        &mut self,
        arrival: u64,
        place: impl Into<ScopedLane>,
        cost: u64,
        deadline: Time,
        now: Time,
    ) -> Ticket {
        let ticket = self.add(arrival, place.into(), cost, deadline, now);
        self.calls[ticket.index()].keeps_place = true;
        ticket
    }

    #[inline]
    fn add(&mut self, arrival: u64, place: ScopedLane, cost: u64, deadline: Time, now: Time) -> Ticket {
        let ScopedLane { lane, scope } = place;
        let call = QueuedCall { arrival, cost: cost.min(MAX_COST), scope, generation: 0, lane, keeps_place: false };
        let index = match self.free_slots.pop() {
            Some(index) => {
                let entry = &mut self.calls[index as usize];
                *entry = QueuedCall { generation: entry.generation, ..call };
                index
            }
            None => {
                self.calls.push(call);
                self.calls.len() as u32 - 1
            }
        };
        self.deadlines.set(index, deadline);
        self.insert(place, (arrival, index), now);
        self.ticket(index)
    }

    /// Moves a call to a more urgent lane, ahead of later arrivals. It keeps its scope. Returns false if it has left or
    /// isn't less urgent. A full lane [makes room](Self::make_room) for it if it can.
    ///
    /// # Errors
    /// [`QueueFullError`] if the other lane is full and makes no room. The call keeps its position.
    pub fn raise(&mut self, ticket: Ticket, lane: Lane, now: Time) -> Result<bool, QueueFullError> {
        let Some(&call) = self.call(ticket).filter(|call| call.lane < lane) else { return Ok(false) };
        self.make_room(lane, self.deadlines.key(ticket.index).unwrap_or(Time::NEVER));
        self.check_room(lane)?;
        let entry = (call.arrival, ticket.index);
        self.remove_from_order(call.place(), entry);
        self.calls[ticket.index()].lane = lane;
        self.insert(lane.with_scope(call.scope), entry, now);
        if self.asking == Some(ticket) {
            // An answer that is still to come belongs to the old lane.
            self.outdated = Outdated::All;
        }
        Ok(true)
    }

    /// Moves a call without a scope to one, at its place in the order of arrival.
    #[cold]
    pub(crate) fn move_to_scope(&mut self, ticket: Ticket, scope: u64, now: Time) {
        let Some(&call) = self.call(ticket).filter(|call| call.scope == 0) else { return };
        let entry = (call.arrival, ticket.index);
        self.remove_from_order(call.place(), entry);
        self.calls[ticket.index()].scope = scope;
        self.insert(call.lane.with_scope(scope), entry, now);
    }

    /// The number of a waiting call in the order of arrival. `None` if it has left.
    #[inline]
    pub fn arrival(&self, ticket: Ticket) -> Option<u64> {
        self.call(ticket).map(|call| call.arrival)
    }

    /// Records that other callers wait for a call too. It isn't displaced any longer.
    pub fn join(&mut self, ticket: Ticket) {
        if self.call(ticket).is_some() {
            self.calls[ticket.index()].keeps_place = true;
        }
    }

    /// Removes a call from the queue. Returns false if it has left before. A later answer to it has no effect.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        self.remove(ticket).is_some()
    }

    /// Returns the next action. Must be called again until it returns [`QueueStep::Sleep`].
    pub fn poll(&mut self, now: Time) -> QueueStep {
        if self.displaced.is_some() {
            return self.name_displaced();
        }
        if self.scopes.any_held() {
            self.release_due(now);
        }
        let Some((deadline, index)) = self.deadlines.first() else { return QueueStep::Sleep(Time::NEVER) };
        let call = &self.calls[index as usize];
        if deadline <= now || self.refused_past(deadline, call.place(), call.cost, now).is_some() {
            let ticket = self.ticket(index);
            self.remove(ticket);
            return QueueStep::Expired(ticket);
        }
        for queue in &mut self.queues {
            // It is later only if the clock has stepped back.
            queue.overdue_at = queue.overdue_at.min(now + self.window);
        }
        let mut wake_at = deadline;
        if self.asking.is_none() && self.total_in_flight() < self.max_in_flight {
            if let Some((lane, index, cost)) = self.next_call(now) {
                if !self.refused.applies_to(lane, cost, now) {
                    let ticket = self.ticket(index);
                    (self.asking, self.outdated) = (Some(ticket), Outdated::Nothing);
                    return QueueStep::AskStore(ticket);
                }
                wake_at = wake_at.min(self.refused.refusal.until);
            }
            for lane in Lane::ALL {
                let changes = self.ready_at(lane, now).map(|ready_at| [ready_at, self.queue(lane).overdue_at]);
                let next = changes.into_iter().flatten().filter(|&change| change > now).min();
                wake_at = wake_at.min(next.unwrap_or(Time::NEVER));
            }
            if self.scopes.any_held() {
                wake_at = wake_at.min(self.next_release_at());
            }
        }
        QueueStep::Sleep(wake_at)
    }

    /// Records that the store has granted a call. It leaves the queue and counts as in flight for the returned lane,
    /// until [`Lanes::record_end`]. `None` if it had left before: the driver must then give back the charged cost.
    pub fn grant(&mut self, ticket: Ticket, now: Time) -> Option<Lane> {
        let call = self.remove(ticket)?;
        if self.scopes.any_held() {
            self.release_due(now);
        }
        // A call that costs nothing also uses a turn.
        let charged = call.cost.max(1);
        for lane in Lane::ALL {
            if !self.deadlines.is_empty() && self.is_ready(lane, now) {
                let earned = charged * self.floor;
                let queue = self.queue_mut(lane);
                queue.credit = queue.credit.saturating_add(earned);
            }
        }
        let due_at = now + self.window;
        let queue = self.queue_mut(call.lane);
        queue.credit = queue.credit.saturating_sub(charged * PER_MILLE);
        queue.overdue_at = due_at;
        queue.in_flight = queue.in_flight.saturating_add(1);
        Some(call.lane)
    }

    /// Records that a call was refused its turn. The call keeps its position. Until then, no call with the same refusal
    /// is selected, unless [`Lanes::clear_refusals`] is called, or [`Lanes::clear_scope_refusals`] for a refused scope.
    ///
    /// A call that is refused permanently must be cancelled instead. Otherwise the calls behind it would wait with it.
    pub fn refuse(&mut self, ticket: Ticket, refusal: Refusal, now: Time) {
        if self.asking != Some(ticket) {
            return;
        }
        self.asking = None;
        let call = self.calls[ticket.index()];
        let is_of_scope = refusal.scope == RefusalScope::Part && call.scope != 0;
        if self.outdated == Outdated::All || self.outdated == Outdated::Scope && is_of_scope {
            return;
        }
        let refused = RefusedCall { refusal, refused_at: now, lane: call.lane, cost: call.cost };
        match refusal.scope {
            RefusalScope::Provider => self.refused = refused,
            RefusalScope::Part if is_of_scope => self.hold(call.place(), refusal, now),
            RefusalScope::Part | RefusalScope::Lane => self.queue_mut(call.lane).refused = refused,
        }
    }

    /// Deletes all refusals but those of scopes, also one still to come for the asking call, because something was
    /// given back or reset.
    pub fn clear_refusals(&mut self) {
        self.refused = RefusedCall::default();
        for queue in &mut self.queues {
            queue.refused = RefusedCall::default();
        }
        self.outdated = Outdated::All;
    }

    /// Deletes the refusals of a scope in all lanes, also one still to come for the asking call, because the scope is
    /// open again.
    pub fn clear_scope_refusals(&mut self, scope: u64) {
        for lane in Lane::ALL {
            self.release(lane.with_scope(scope));
        }
        let asks = self.asking.is_some_and(|ticket| self.calls[ticket.index()].scope == scope);
        if asks && self.outdated == Outdated::Nothing {
            self.outdated = Outdated::Scope;
        }
    }

    /// Deletes all refusals, also those of scopes. Takes O(log n) for each held scope.
    pub fn clear_all_refusals(&mut self) {
        self.clear_refusals();
        self.release_all();
    }

    /// Records the end of a call that was granted for this lane.
    pub fn record_end(&mut self, lane: Lane) {
        let queue = self.queue_mut(lane);
        queue.in_flight = queue.in_flight.saturating_sub(1);
    }

    /// Sets the maximum number of calls in flight of all lanes. Those in flight continue. At 0, no call is granted.
    pub fn set_max_in_flight(&mut self, max_in_flight: u32) {
        self.max_in_flight = max_in_flight;
    }

    /// Pauses a lane until a time, for example outside its hours. A time in the past ends the pause.
    pub fn pause(&mut self, lane: Lane, until: Time) {
        self.queue_mut(lane).paused_until = until;
    }

    /// The time until which a lane is paused. A time in the past has no effect.
    pub fn paused_until(&self, lane: Lane) -> Time {
        self.queue(lane).paused_until
    }

    /// The call that goes next if there is capacity: its lane, slot and cost.
    #[inline]
    fn next_call(&self, now: Time) -> Option<(Lane, u32, u64)> {
        // A single waiting call needs no choice.
        if let (1, Some((_, index))) = (self.deadlines.len(), self.deadlines.first()) {
            let QueuedCall { lane, cost, .. } = self.calls[index as usize];
            return self.is_ready(lane, now).then_some((lane, index, cost));
        }
        let ready: ArrayVec<Lane, 3> = Lane::ALL.into_iter().filter(|&lane| self.is_ready(lane, now)).collect();
        // If two lanes have enough credit, the lower goes first: its floor is a share of all grants, also to the other.
        let pays = |lane: Lane, cost: u64| self.queue(lane).credit >= cost.max(1) * PER_MILLE;
        let has_credit = |lane: &Lane| self.first_call(*lane).is_some_and(|(_, cost)| pays(*lane, cost));
        let with_credit = ready.iter().copied().find(has_credit);
        let overdue = || {
            let due_times = ready.iter().map(|&lane| (self.queue(lane).overdue_at, Reverse(lane)));
            due_times.filter(|&(due_at, _)| due_at <= now).min().map(|(_, Reverse(lane))| lane)
        };
        let lane = with_credit.or_else(overdue).or(ready.last().copied())?;
        let (index, cost) = self.first_call(lane)?;
        Some((lane, index, cost))
    }

    /// The time from which no limit of its own holds the lane back. `None` if that doesn't depend on time.
    fn ready_at(&self, lane: Lane, now: Time) -> Option<Time> {
        let queue = self.queue(lane);
        let (_, cost) = self.first_call(lane).filter(|_| queue.in_flight < queue.spec.max_in_flight)?;
        let refused_until =
            if queue.refused.applies_to(lane, cost, now) { queue.refused.refusal.until } else { Time::ZERO };
        Some(queue.paused_until.max(refused_until))
    }

    fn is_ready(&self, lane: Lane, now: Time) -> bool {
        self.ready_at(lane, now).is_some_and(|ready_at| ready_at <= now)
    }

    /// The slot and cost of a lane's first call that isn't held.
    fn first_call(&self, lane: Lane) -> Option<(u32, u64)> {
        self.queue(lane).order.first().map(|(_, index)| (index, self.calls[index as usize].cost))
    }

    fn check_room(&self, lane: Lane) -> Result<(), QueueFullError> {
        let room = self.waiting(lane) < self.queue(lane).spec.max_waiting as usize;
        if room { Ok(()) } else { Err(QueueFullError { lane }) }
    }

    #[cold]
    fn name_displaced(&mut self) -> QueueStep {
        let ticket = self.displaced.take().expect("invariant: the caller has just seen it");
        self.free_slots.push(ticket.index);
        QueueStep::Displaced(ticket)
    }

    /// Inserts a call at its position in a lane. An empty lane begins to wait now, without credit. Its window starts at
    /// its last grant if that is less than a window ago, so that a lane that is often empty gets its last slot in time.
    fn insert(&mut self, place: ScopedLane, call: Arrival, now: Time) {
        let due_at = now + self.window;
        let queue = self.queue_mut(place.lane);
        if queue.waiting() == 0 {
            queue.credit = 0;
            if queue.overdue_at <= now {
                queue.overdue_at = due_at;
            }
        }
        if place.scope != 0 {
            return self.insert_scoped(place, call);
        }
        let (arrival, index) = call;
        queue.order.set(index, arrival);
    }

    fn remove(&mut self, ticket: Ticket) -> Option<QueuedCall> {
        let call = *self.call(ticket)?;
        self.calls[ticket.index()].generation = ticket.generation.wrapping_add(1);
        self.remove_from_order(call.place(), (call.arrival, ticket.index));
        self.deadlines.remove(ticket.index);
        self.free_slots.push(ticket.index);
        if self.asking == Some(ticket) {
            self.asking = None;
        }
        Some(call)
    }

    fn remove_from_order(&mut self, place: ScopedLane, call: Arrival) {
        if place.scope != 0 {
            return self.remove_scoped(place, call);
        }
        let (_, index) = call;
        self.queue_mut(place.lane).order.remove(index);
    }

    /// The call of a ticket. `None` if it has left: then the slot has another generation.
    fn call(&self, ticket: Ticket) -> Option<&QueuedCall> {
        self.calls.get(ticket.index()).filter(|call| call.generation == ticket.generation)
    }

    fn ticket(&self, index: u32) -> Ticket {
        Ticket { index, generation: self.calls[index as usize].generation }
    }

    fn queue(&self, lane: Lane) -> &LaneQueue {
        &self.queues[lane as usize]
    }

    fn queue_mut(&mut self, lane: Lane) -> &mut LaneQueue {
        &mut self.queues[lane as usize]
    }
}
