//! The future events, in the order of time.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use tidegate_core::Time;

/// The future events. Of two events at the same moment, the one scheduled first happens first, so that a run never
/// depends on the tie-breaking of a heap.
///
/// The number of events is bounded by their sources: one arrival per load client, at most three events per attempt, one
/// wake-up per node.
#[derive(Debug)]
pub(crate) struct EventQueue<E> {
    entries: BinaryHeap<ScheduledEvent<E>>,
    next_sequence: u64,
    now: Time,
}

#[derive(Debug)]
struct ScheduledEvent<E> {
    at: Time,
    sequence: u64,
    event: E,
}

impl<E> EventQueue<E> {
    pub(crate) fn new(now: Time) -> Self {
        Self { entries: BinaryHeap::new(), next_sequence: 0, now }
    }

    /// Returns the present moment: that of the last event.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Schedules an event at this moment, or now if the moment is past.
    pub(crate) fn schedule(&mut self, at: Time, event: E) {
        self.entries.push(ScheduledEvent { at: at.max(self.now), sequence: self.next_sequence, event });
        self.next_sequence += 1;
    }

    /// Removes and returns the next event. `None` if there is none until `end`.
    pub(crate) fn pop_until(&mut self, end: Time) -> Option<E> {
        if self.entries.peek().is_none_or(|entry| entry.at > end) {
            return None;
        }
        let entry = self.entries.pop()?;
        self.now = entry.at;
        Some(entry.event)
    }
}

impl<E> Ord for ScheduledEvent<E> {
    /// The earliest event is the greatest, because a heap returns its greatest entry first.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.sequence).cmp(&(self.at, self.sequence))
    }
}

impl<E> PartialOrd for ScheduledEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for ScheduledEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for ScheduledEvent<E> {}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::Span;

    #[test]
    fn events_pop_by_time_then_insertion_order() {
        let at = |millis| Time::ZERO + Span::from_millis(millis);
        let mut agenda = EventQueue::new(at(1));
        for (millis, name) in [(5, "d"), (2, "b"), (5, "e"), (0, "a"), (2, "c"), (9, "f")] {
            agenda.schedule(at(millis), name);
        }
        let mut order = String::new();
        while let Some(name) = agenda.pop_until(at(8)) {
            order.push_str(name);
        }
        assert_eq!((order.as_str(), agenda.now()), ("abcde", at(5)));
    }
}
