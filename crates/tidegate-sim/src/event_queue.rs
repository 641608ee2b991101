//! The future events, in the order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use slab::Slab;
use tidegate_core::{Span, Time};

/// The future events. Of two events at the same moment, the one scheduled first happens first, so that a run never
/// depends on the tie-breaking of a heap.
///
/// Their number is bounded by their sources: an arrival per client, three events per attempt, a wake-up per node.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    /// The time, the sequence number and the slot of each event.
    order: BinaryHeap<Reverse<(Time, u64, usize)>>,
    events: Slab<E>,
    next_sequence: u64,
    /// The present moment: that of the last event.
    pub(crate) now: Time,
}

impl<E> EventQueue<E> {
    pub(crate) fn new(now: Time) -> Self {
        Self { order: BinaryHeap::new(), events: Slab::new(), next_sequence: 0, now }
    }

    /// Schedules an event at this moment, or now if the moment is past.
    pub(crate) fn schedule(&mut self, at: Time, event: E) {
        let slot = self.events.insert(event);
        self.order.push(Reverse((at.max(self.now), self.next_sequence, slot)));
        self.next_sequence += 1;
    }

    /// Schedules an event after a delay.
    pub(crate) fn schedule_after(&mut self, delay: Span, event: E) {
        self.schedule(self.now + delay, event);
    }

    /// Removes and returns the next event. `None` if there is none until `end`.
    pub(crate) fn pop_until(&mut self, end: Time) -> Option<E> {
        let next = self.order.peek_mut().filter(|next| next.0.0 <= end)?;
        let Reverse((at, _, slot)) = PeekMut::pop(next);
        self.now = at;
        self.events.try_remove(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_pop_by_time_then_insertion_order() {
        let at = |millis| Time::ZERO + Span::from_millis(millis);
        let mut queue = EventQueue::new(at(1));
        for (millis, name) in [(5, "d"), (2, "b"), (5, "e"), (0, "a"), (2, "c"), (9, "f")] {
            queue.schedule(at(millis), name);
        }
        let mut order = String::new();
        while let Some(name) = queue.pop_until(at(8)) {
            order.push_str(name);
        }
        assert_eq!((order.as_str(), queue.now), ("abcde", at(5)));
    }
}
