//! What is still to happen, in the order of time.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use tidegate_core::Time;

/// What is still to happen. Of two things at the same moment, the one that was entered first happens first, so that a
/// run never depends on how a heap breaks ties.
///
/// What makes entries bounds them: each load has one arrival to come, each attempt at most three moments, each node one
/// moment to wake at.
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

    /// The present moment: that of what happened last.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Enters what is to happen at this moment; what is past happens now.
    pub(crate) fn schedule(&mut self, at: Time, event: E) {
        self.entries.push(ScheduledEvent { at: at.max(self.now), sequence: self.next_sequence, event });
        self.next_sequence += 1;
    }

    /// What happens next, unless that is after `end`; then it becomes `end`.
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
    /// The earliest is the greatest, as the heap gives the greatest.
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
    fn the_earliest_is_first_and_of_two_the_first_entered() {
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
