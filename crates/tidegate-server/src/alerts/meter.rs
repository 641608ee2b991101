//! Rates from counts that only grow.

use std::collections::{BTreeMap, VecDeque};

use tidegate::{Span, Time};

/// The shortest time over which a rate is measured.
const SHORTEST: Span = Span::from_secs(1);

/// The counts of one subject since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// The counted part.
    pub(super) part: u64,
    /// The number of which it is a part.
    pub(super) whole: u64,
}

/// Measures the growth of counts over the last seconds. It keeps a sample for each second at most.
#[derive(Debug)]
pub(super) struct Meter {
    window: Span,
    samples: VecDeque<(Time, BTreeMap<String, Totals>)>,
}

/// The growth of counts, by subject.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Growth {
    pub(super) elapsed: Span,
    pub(super) counts: BTreeMap<String, Totals>,
}

impl Meter {
    pub(super) fn new(window: Span) -> Self {
        Self { window, samples: VecDeque::new() }
    }

    /// Measures these counts. Without any, forgets the earlier ones, so that a later growth isn't that of a long time.
    pub(super) fn measure_or_clear(&mut self, now: Time, totals: Option<BTreeMap<String, Totals>>) -> Option<Growth> {
        if totals.is_none() {
            self.clear();
        }
        self.measure(now, totals?)
    }

    /// Forgets earlier counts.
    pub(super) fn clear(&mut self) {
        self.samples.clear();
    }

    /// Notes the counts at `now`, and returns their growth within the window. `None` if no time has passed.
    pub(super) fn measure(&mut self, now: Time, totals: BTreeMap<String, Totals>) -> Option<Growth> {
        // A clock that was set back makes earlier samples useless.
        self.samples.retain(|(at, _)| *at <= now);
        let is_due = self.samples.back().is_none_or(|(at, _)| now.since(*at) >= SHORTEST);
        // The first sample is the latest one that is at least a window old.
        while self.samples.get(1).is_some_and(|(at, _)| now.since(*at) >= self.window) {
            self.samples.pop_front();
        }
        let growth = self.samples.front().and_then(|(at, earlier)| {
            let elapsed = now.since(*at);
            let counts = totals.iter().map(|(subject, now)| {
                // Nothing is known of the growth of a count that wasn't there.
                let before = earlier.get(subject).unwrap_or(now);
                let part = now.part.saturating_sub(before.part);
                (subject.clone(), Totals { part, whole: now.whole.saturating_sub(before.whole) })
            });
            (elapsed >= SHORTEST).then(|| Growth { elapsed, counts: counts.collect() })
        });
        if is_due {
            self.samples.push_back((now, totals));
        }
        growth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_that_of_the_window() {
        let mut meter = Meter::new(Span::from_secs(10));
        let at = |seconds: u64| Time::from_secs(1_800_000_000 + seconds);
        let totals = |part, whole| BTreeMap::from([("a".to_owned(), Totals { part, whole })]);
        for (second, counts, expected) in [
            (0, (5, 10), None),
            (0, (6, 12), None),
            (1, (7, 14), Some((1, 2, 4))),
            (5, (9, 20), Some((5, 4, 10))),
            (10, (10, 30), Some((10, 5, 20))),
            (11, (10, 30), Some((10, 3, 16))),
            // Counts that started again.
            (12, (0, 1), Some((11, 0, 0))),
            // A clock that was set back.
            (3, (10, 30), Some((2, 3, 16))),
            (100, (20, 40), Some((97, 10, 10))),
            (101, (20, 40), Some((98, 10, 10))),
        ] {
            let growth = meter.measure(at(second), totals(counts.0, counts.1));
            let found = growth.map(|growth| {
                let Totals { part, whole } = growth.counts["a"];
                (growth.elapsed.as_secs_ceil(), part, whole)
            });
            assert_eq!(found, expected, "second {second}");
            assert!(meter.samples.len() <= 12);
        }
    }

    #[test]
    fn a_new_subject_has_not_grown() {
        let mut meter = Meter::new(Span::from_secs(10));
        let at = |seconds: u64| Time::from_secs(1_800_000_000 + seconds);
        let totals = |subject: &str, part| BTreeMap::from([(subject.to_owned(), Totals { part, whole: part })]);
        assert_eq!(meter.measure(at(0), totals("a", 1)), None);
        let growth = meter.measure(at(1), totals("b", 1_000_000)).unwrap();
        assert_eq!(growth.counts["b"], Totals::default());
        meter.clear();
        assert_eq!(meter.measure(at(2), totals("b", 1_000_001)), None);
    }
}
