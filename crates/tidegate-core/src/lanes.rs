//! Who goes next among the queued outbound calls of one provider in one process.
//!
//! Calls wait in three lanes, first come, first served within each. One call at a time is named to ask the store; the
//! store grants it or tells a moment before which asking again is no use, and never queues anybody itself.
//!
//! More urgent lanes go first, with two exceptions that keep the others from starving. A lane that waits earns a share
//! of what is granted, its *floor*, as credit, and goes first once that pays for its next call (deficit round robin of
//! M. Shreedhar and G. Varghese, "Efficient Fair Queuing Using Deficit Round Robin", SIGCOMM 1995, with a share in
//! place of the quantum). And of lanes that have waited for a whole window the one that has waited longest goes first,
//! so that even a limit of a few calls a window reaches every lane. A lane that is held back by something of its own, be
//! it a cap, a ceiling or its hours, holds nobody else back, and earns nothing.

mod spec;

use alloc::vec::Vec;
use arrayvec::ArrayVec;
use core::cmp::Reverse;

use crate::heap::IndexHeap;
use crate::time::MAX_CLOCK_LAG;
use crate::{LimitId, MAX_COST, Span, Time};
pub use spec::{Lane, LaneSpec, LanesSpec, MAX_FLOOR, MAX_WAITING, QueueFullError};

/// Credit is counted in thousandths of a unit of cost.
const PERMILLE: u64 = 1000;

/// Names a queued call. Once the call has left the queue its ticket does nothing, until its slot has been used by
/// another 2^32 calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    index: u32,
    generation: u32,
}

impl Ticket {
    /// A number that no other waiting call has, below the sum of the lanes' `max_waiting`: a place for what a driver
    /// keeps beside the queue.
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

/// What a driver is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueueStep {
    /// Fail this call: its deadline has passed, and it has left the queue.
    Expired(Ticket),
    /// Ask the store for this call, and tell the answer: [`Lanes::grant`], [`Lanes::refuse_until`],
    /// [`Lanes::refuse_spent_until`], or [`Lanes::cancel`] if it gave none or refused for good. Nobody else is named before.
    AskStore(Ticket),
    /// Nothing before this moment, unless a call arrives, ends, leaves or is answered meanwhile. [`Time::NEVER`] if
    /// nothing is bound to time.
    Sleep(Time),
}

/// Whom a refusal concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalScope {
    /// The call's lane: a limit of the lane's own is among those that refuse. The other lanes go on.
    Lane,
    /// Everybody: only limits that all lanes share refuse. The call keeps its turn.
    Provider,
}

/// A queued call.
#[derive(Clone, Copy, Debug)]
struct QueuedCall {
    /// The number of its arrival, by which it stands in its lane.
    arrival: u64,
    cost: u64,
    generation: u32,
    lane: Lane,
}

/// What the store told a call, as far as it concerns those that come after it.
#[derive(Clone, Copy, Debug)]
struct StoreRefusal {
    refused_at: Time,
    until: Time,
    lane: Lane,
    cost: u64,
    /// The limit that is spent until then, if it can't have room before.
    spent_limit: Option<LimitId>,
}

impl StoreRefusal {
    const NONE: Self =
        Self { refused_at: Time::ZERO, until: Time::ZERO, lane: Lane::Background, cost: 0, spent_limit: None };

    /// Whether asking for such a call is no use yet. A more urgent one may have reserves, a cheaper one may fit; and
    /// what was told by a clock that has since stepped back is worth asking again.
    fn applies_to(&self, lane: Lane, cost: u64, now: Time) -> bool {
        now < self.until && self.refused_at <= now + MAX_CLOCK_LAG && lane <= self.lane && cost >= self.cost
    }
}

/// One lane.
#[derive(Clone, Debug)]
struct LaneQueue {
    spec: LaneSpec,
    order: IndexHeap<u64>,
    in_flight: u32,
    /// What the floor has earned the lane since it began to wait and it hasn't spent, in thousandths of cost.
    credit: u64,
    /// When the lane will have had to do without a grant for a whole window.
    overdue_at: Time,
    paused_until: Time,
    refusal: StoreRefusal,
}

/// The queued calls of one provider in one process, and how many calls are in flight.
///
/// A driver reports what happens and then calls [`Lanes::poll`] until it says to sleep. Entering, leaving and being
/// named take O(log n); at most `max_waiting` calls wait in each lane, and their memory is kept for the next.
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
    /// Whether something has changed since the call that asks was named, so that a refusal may be out of date.
    refusals_outdated: bool,
    refusal: StoreRefusal,
}

impl Lanes {
    /// Empty lanes. Numbers above their bounds count as the bounds.
    pub fn new(spec: LanesSpec) -> Self {
        let queue = |spec: LaneSpec| LaneQueue {
            spec: LaneSpec { max_waiting: spec.max_waiting.min(MAX_WAITING), ..spec },
            order: IndexHeap::default(),
            in_flight: 0,
            credit: 0,
            overdue_at: Time::ZERO,
            paused_until: Time::ZERO,
            refusal: StoreRefusal::NONE,
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
            refusals_outdated: false,
            refusal: StoreRefusal::NONE,
        }
    }

    /// How many calls wait in a lane, the one that asks included.
    pub fn waiting(&self, lane: Lane) -> usize {
        self.queue(lane).order.len()
    }

    /// How many calls of a lane are in flight.
    pub fn in_flight(&self, lane: Lane) -> u32 {
        self.queue(lane).in_flight
    }

    /// Lets a call of `cost` (up to 2^40; more counts as that) wait in a lane until it is granted, cancelled or, at its
    /// deadline, expired.
    ///
    /// # Errors
    /// [`QueueFullError`] if as many wait as may.
    #[inline]
    pub fn enqueue(&mut self, lane: Lane, cost: u64, deadline: Time, now: Time) -> Result<Ticket, QueueFullError> {
        self.check_room(lane)?;
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let call = QueuedCall { arrival, cost: cost.min(MAX_COST), generation: 0, lane };
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
        self.insert(lane, index, now);
        Ok(self.ticket(index))
    }

    /// Moves a call to a more urgent lane, where it stands before all that arrived after it; true if it moved. A call
    /// that has left, or is as urgent already, stays as it is.
    ///
    /// # Errors
    /// [`QueueFullError`] if as many wait there as may; the call keeps its place.
    pub fn raise(&mut self, ticket: Ticket, lane: Lane, now: Time) -> Result<bool, QueueFullError> {
        let Some(from) = self.call(ticket).map(|call| call.lane).filter(|&from| from < lane) else { return Ok(false) };
        self.check_room(lane)?;
        self.queue_mut(from).order.remove(ticket.index);
        self.calls[ticket.index()].lane = lane;
        self.insert(lane, ticket.index, now);
        // What it is about to be told, it is told as a call of its old lane.
        self.refusals_outdated |= self.asking == Some(ticket);
        Ok(true)
    }

    /// Takes a call out of the queue; false if it has left before. An answer to it that is under way will find the
    /// ticket stale.
    pub fn cancel(&mut self, ticket: Ticket) -> bool {
        self.remove(ticket).is_some()
    }

    /// What to do next. To be called again until it says to sleep.
    pub fn poll(&mut self, now: Time) -> QueueStep {
        let Some((deadline, index)) = self.deadlines.first() else { return QueueStep::Sleep(Time::NEVER) };
        if deadline <= now {
            let ticket = self.ticket(index);
            self.remove(ticket);
            return QueueStep::Expired(ticket);
        }
        for queue in &mut self.queues {
            // Further off only if the clock has stepped back.
            queue.overdue_at = queue.overdue_at.min(now + self.window);
        }
        let mut wake_at = deadline;
        if self.asking.is_none() && self.total_in_flight() < u64::from(self.max_in_flight) {
            if let Some((lane, index, cost)) = self.next_call(now) {
                if !self.refusal.applies_to(lane, cost, now) {
                    let ticket = self.ticket(index);
                    (self.asking, self.refusals_outdated) = (Some(ticket), false);
                    return QueueStep::AskStore(ticket);
                }
                wake_at = wake_at.min(self.refusal.until);
            }
            for lane in Lane::ALL {
                let changes = self.ready_at(lane, now).map(|ready_at| [ready_at, self.queue(lane).overdue_at]);
                let next = changes.into_iter().flatten().filter(|&change| change > now).min();
                wake_at = wake_at.min(next.unwrap_or(Time::NEVER));
            }
        }
        QueueStep::Sleep(wake_at)
    }

    /// The store has granted a call: it leaves the queue and counts as in flight for the lane returned, until
    /// [`Lanes::record_end`]. `None` if it had left before: what the store charged is to be given back.
    pub fn grant(&mut self, ticket: Ticket, now: Time) -> Option<Lane> {
        let call = self.remove(ticket)?;
        // A call that costs nothing takes a turn all the same.
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
        queue.credit = queue.credit.saturating_sub(charged * PERMILLE);
        queue.overdue_at = due_at;
        queue.in_flight = queue.in_flight.saturating_add(1);
        Some(call.lane)
    }

    /// The store has refused a call until a moment. It keeps its place, and no call that would meet the same refusal is
    /// named before that moment, unless [`Lanes::clear_refusals`] says that it is worth it.
    ///
    /// A call that is refused for good has to be cancelled instead, or those behind it would wait with it.
    pub fn refuse_until(&mut self, ticket: Ticket, until: Time, scope: RefusalScope, now: Time) {
        self.handle_refusal(ticket, until, None, scope, now);
    }

    /// [`Lanes::refuse_until`] where the limit that refuses can't have room before that moment, as a quota whose calls are
    /// never cheaper than they were taken for can't before its period ends. So [`Lanes::spent_limit`] may say it to others.
    pub fn refuse_spent_until(&mut self, ticket: Ticket, limit: LimitId, until: Time, scope: RefusalScope, now: Time) {
        self.handle_refusal(ticket, until, Some(limit), scope, now);
    }

    /// Which limit is known to have no room for a call of this lane and cost that arrives now, and until when. It needn't
    /// queue if its deadline comes first.
    ///
    /// Only what [`Lanes::refuse_spent_until`] told counts. Other moments may come earlier: a window's slots come free with a
    /// reply ([`Verb::Settle`](crate::Verb::Settle)), permits are released and costs refunded, and a call that waits may
    /// yet be granted. A [`Lanes::clear_refusals`] ends this hold as it ends every other.
    pub fn spent_limit(&self, lane: Lane, cost: u64, now: Time) -> Option<(LimitId, Time)> {
        let refusals = [self.refusal, self.queue(lane).refusal];
        let applicable = refusals.iter().filter(|told| told.applies_to(lane, cost, now));
        applicable.filter_map(|told| Some((told.spent_limit?, told.until))).max_by_key(|&(_, until)| until)
    }

    /// What was told may be better now: a permit or a cost was given back, or a limit was reset. Also makes a refusal
    /// of the call that is asking at this moment count for nothing.
    pub fn clear_refusals(&mut self) {
        self.refusal = StoreRefusal::NONE;
        for queue in &mut self.queues {
            queue.refusal = StoreRefusal::NONE;
        }
        self.refusals_outdated = true;
    }

    /// A call that was granted for this lane is no longer in flight.
    pub fn record_end(&mut self, lane: Lane) {
        let queue = self.queue_mut(lane);
        queue.in_flight = queue.in_flight.saturating_sub(1);
    }

    /// Bounds how many calls of all lanes may be in flight from now on. Those that are, stay; at 0 nobody goes.
    pub fn set_max_in_flight(&mut self, max_in_flight: u32) {
        self.max_in_flight = max_in_flight;
    }

    /// Holds a lane back until a moment, as outside its hours. The latest word counts; one that has passed lets it go.
    pub fn pause(&mut self, lane: Lane, until: Time) {
        self.queue_mut(lane).paused_until = until;
    }

    /// Until when a lane was told to pause; a moment that has passed holds nothing back.
    pub fn paused_until(&self, lane: Lane) -> Time {
        self.queue(lane).paused_until
    }

    fn handle_refusal(
        &mut self,
        ticket: Ticket,
        until: Time,
        spent_limit: Option<LimitId>,
        scope: RefusalScope,
        now: Time,
    ) {
        if self.asking != Some(ticket) {
            return;
        }
        self.asking = None;
        if !self.refusals_outdated {
            let QueuedCall { lane, cost, .. } = self.calls[ticket.index()];
            let refusal = StoreRefusal { refused_at: now, until, lane, cost, spent_limit };
            match scope {
                RefusalScope::Lane => self.queue_mut(lane).refusal = refusal,
                RefusalScope::Provider => self.refusal = refusal,
            }
        }
    }

    /// The call that goes next if there is capacity: its lane, slot and cost.
    fn next_call(&self, now: Time) -> Option<(Lane, u32, u64)> {
        // Who waits alone needn't be chosen.
        if let (1, Some((_, index))) = (self.deadlines.len(), self.deadlines.first()) {
            let QueuedCall { lane, cost, .. } = self.calls[index as usize];
            return self.is_ready(lane, now).then_some((lane, index, cost));
        }
        let ready: ArrayVec<Lane, 3> = Lane::ALL.into_iter().filter(|&lane| self.is_ready(lane, now)).collect();
        // Of two that are owed, the lower: its floor is a share of all that is granted, the other's floor included.
        let with_credit = ready.iter().copied().find(|&lane| self.has_credit_for_next(lane));
        let overdue = || {
            let due_times = ready.iter().map(|&lane| (self.queue(lane).overdue_at, Reverse(lane)));
            due_times.filter(|&(due_at, _)| due_at <= now).min().map(|(_, Reverse(lane))| lane)
        };
        let lane = with_credit.or_else(overdue).or(ready.last().copied())?;
        let (index, cost) = self.first_call(lane)?;
        Some((lane, index, cost))
    }

    /// From when on nothing of its own holds the lane back; `None` if that isn't a matter of time.
    fn ready_at(&self, lane: Lane, now: Time) -> Option<Time> {
        let queue = self.queue(lane);
        let (_, cost) = self.first_call(lane).filter(|_| queue.in_flight < queue.spec.max_in_flight)?;
        let refused_until = if queue.refusal.applies_to(lane, cost, now) { queue.refusal.until } else { Time::ZERO };
        Some(queue.paused_until.max(refused_until))
    }

    fn is_ready(&self, lane: Lane, now: Time) -> bool {
        self.ready_at(lane, now).is_some_and(|ready_at| ready_at <= now)
    }

    /// Whether the lane's credit pays for its first call.
    fn has_credit_for_next(&self, lane: Lane) -> bool {
        self.first_call(lane).is_some_and(|(_, cost)| self.queue(lane).credit >= cost.max(1) * PERMILLE)
    }

    /// The slot and cost of a lane's first call.
    fn first_call(&self, lane: Lane) -> Option<(u32, u64)> {
        self.queue(lane).order.first().map(|(_, index)| (index, self.calls[index as usize].cost))
    }

    fn total_in_flight(&self) -> u64 {
        self.queues.iter().map(|queue| u64::from(queue.in_flight)).sum()
    }

    fn check_room(&self, lane: Lane) -> Result<(), QueueFullError> {
        let room = self.waiting(lane) < self.queue(lane).spec.max_waiting as usize;
        if room { Ok(()) } else { Err(QueueFullError { lane }) }
    }

    /// Puts a call in its place in a lane, which begins to wait if it was empty: without credit, and its window counts
    /// from the last grant, if that isn't longer ago, or a lane that is often empty would miss the moment at which its
    /// last slot comes free again.
    fn insert(&mut self, lane: Lane, index: u32, now: Time) {
        let (arrival, due_at) = (self.calls[index as usize].arrival, now + self.window);
        let queue = self.queue_mut(lane);
        if queue.order.is_empty() {
            queue.credit = 0;
            if queue.overdue_at <= now {
                queue.overdue_at = due_at;
            }
        }
        queue.order.set(index, arrival);
    }

    fn remove(&mut self, ticket: Ticket) -> Option<QueuedCall> {
        let call = *self.call(ticket)?;
        self.calls[ticket.index()].generation = ticket.generation.wrapping_add(1);
        self.queue_mut(call.lane).order.remove(ticket.index);
        self.deadlines.remove(ticket.index);
        self.free_slots.push(ticket.index);
        if self.asking == Some(ticket) {
            self.asking = None;
        }
        Some(call)
    }

    /// The call that a ticket names, if it still waits: the generation of a slot moves on when its call leaves.
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
