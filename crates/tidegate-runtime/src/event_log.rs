//! The latest events, within a bound.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

/// The latest events, each with a number, from one after a given number. A new event displaces the oldest one when the
/// log is full. So a writer never waits for a reader, and a reader that is too slow learns how many events it has missed.
/// A log that begins with the time in milliseconds has higher numbers than one of an earlier process, unless that one had
/// more than a thousand events a second.
///
/// ```
/// use tidegate_runtime::event_log::EventLog;
///
/// let log = EventLog::new(2, 0);
/// for event in ["opened", "half-open", "closed"] {
///     log.publish(event);
/// }
/// let news = log.after(0);
/// assert_eq!((news.missed, news.events.len(), *news.events[1]), (1, 2, "closed"));
/// assert!(log.after(news.last).events.is_empty());
/// ```
#[derive(Debug)]
pub struct EventLog<T> {
    capacity: usize,
    events: Mutex<Events<T>>,
}

#[derive(Debug)]
struct Events<T> {
    /// The number before that of the first event.
    start: u64,
    /// The number of the last event.
    last: u64,
    kept: VecDeque<Arc<T>>,
}

/// The events after a number that a reader knows.
#[derive(Clone, Debug)]
pub struct NewEvents<T> {
    /// The events, oldest first.
    pub events: Vec<Arc<T>>,
    /// The number of the last event, with which a reader asks for the next ones.
    pub last: u64,
    /// The number of events that were displaced before the reader asked.
    pub missed: u64,
}

impl<T> NewEvents<T> {
    /// The events with their numbers.
    pub fn numbered(&self) -> impl Iterator<Item = (u64, &T)> {
        (self.last - self.events.len() as u64 + 1..).zip(self.events.iter().map(|event| &**event))
    }
}

impl<T> EventLog<T> {
    /// Returns a log that keeps `capacity` events, at least 1. The first event has the number after `start`.
    pub fn new(capacity: usize, start: u64) -> Self {
        Self { capacity: capacity.max(1), events: Mutex::new(Events { start, last: start, kept: VecDeque::new() }) }
    }

    /// Adds an event.
    pub fn publish(&self, event: T) {
        let event = Arc::new(event);
        let mut events = self.events.lock();
        events.last += 1;
        // The displaced event is dropped after the lock.
        let _displaced = if events.kept.len() == self.capacity { events.kept.pop_front() } else { None };
        events.kept.push_back(event);
        drop(events);
    }

    /// The kept events after the one with this number; all of them after 0. A number outside the log counts as 0, because
    /// it belongs to an earlier log.
    pub fn after(&self, seen: u64) -> NewEvents<T> {
        let events = self.events.lock();
        let seen = if (events.start..=events.last).contains(&seen) { seen } else { events.start };
        let unseen = events.last - seen;
        let kept = events.kept.len();
        let new = usize::try_from(unseen).unwrap_or(usize::MAX).min(kept);
        NewEvents {
            events: events.kept.range(kept - new..).cloned().collect(),
            last: events.last,
            missed: unseen - new as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_gets_each_event_once() {
        let log = EventLog::new(4, 0);
        assert_eq!((log.after(0).events.len(), log.after(7).last), (0, 0));
        let mut seen = 0;
        for round in 0..10u32 {
            log.publish(2 * round);
            log.publish(2 * round + 1);
            let news = log.after(seen);
            assert_eq!(news.missed, 0);
            assert_eq!(news.events.iter().map(|event| **event).collect::<Vec<_>>(), [2 * round, 2 * round + 1]);
            seen = news.last;
        }
        assert_eq!(seen, 20);
    }

    #[test]
    fn a_slow_reader_learns_the_number_of_missed_events() {
        let log = EventLog::new(4, 0);
        (1..=10).for_each(|number| log.publish(number));
        let news = log.after(3);
        assert_eq!((news.missed, news.last), (3, 10));
        assert_eq!(news.events.iter().map(|event| **event).collect::<Vec<_>>(), [7, 8, 9, 10]);
        assert_eq!(log.after(11).events.len(), 4);
    }

    #[test]
    fn numbers_of_an_earlier_log_skip_nothing() {
        let log = EventLog::new(4, 1000);
        (1..=6).for_each(|number| log.publish(number));
        for (seen, events, missed) in [(0, 4, 2), (7, 4, 2), (1000, 4, 2), (1005, 1, 0), (1007, 4, 2)] {
            let news = log.after(seen);
            assert_eq!((news.events.len(), news.missed, news.last), (events, missed, 1006), "{seen}");
        }
    }
}
