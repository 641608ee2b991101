//! The counts of requests over time, in as many intervals as a picture shows.

use tidegate_core::{Decision, Reason, Span, Time};

/// The largest number of intervals of a log. Beyond it, neighbours are merged.
const MAX_INTERVALS: usize = 600;
/// The lengths of an interval in seconds, each a multiple of the one before. Longer ones grow tenfold.
const WIDTHS: [u64; 10] = [1, 5, 15, 60, 300, 900, 3600, 21_600, 86_400, 604_800];

/// The requests of an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntervalCounts {
    /// Admitted requests.
    pub admitted: u64,
    /// Requests that were refused because a limit was full.
    pub refused_by_limit: u64,
    /// Requests that were refused by a block.
    pub refused_by_block: u64,
    /// Requests that were refused because the client is on the deny list.
    pub refused_by_deny_list: u64,
}

impl IntervalCounts {
    /// Returns the number of all requests.
    pub fn requests(&self) -> u64 {
        self.admitted + self.refused()
    }

    /// Returns the number of refused requests.
    pub fn refused(&self) -> u64 {
        self.refused_by_limit + self.refused_by_block + self.refused_by_deny_list
    }

    pub(super) fn record(&mut self, decision: &Decision) {
        let count = match (decision.allowed, decision.bound_by, decision.reason) {
            (true, ..) => &mut self.admitted,
            (false, Some(_), Reason::Penalty) => &mut self.refused_by_block,
            (false, Some(_), _) => &mut self.refused_by_limit,
            (false, None, _) => &mut self.refused_by_deny_list,
        };
        *count += 1;
    }

    fn merge(&mut self, other: &Self) {
        self.admitted += other.admitted;
        self.refused_by_limit += other.refused_by_limit;
        self.refused_by_block += other.refused_by_block;
        self.refused_by_deny_list += other.refused_by_deny_list;
    }
}

/// Consecutive intervals of one length.
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The width of an interval in seconds.
    width_seconds: u64,
    /// The start of the first interval, in widths since the Unix epoch.
    first_index: u64,
    intervals: Vec<IntervalCounts>,
    max_intervals: usize,
}

impl Default for Timeline {
    fn default() -> Self {
        Self::new(MAX_INTERVALS)
    }
}

impl Timeline {
    pub(super) fn new(max_intervals: usize) -> Self {
        Self { width_seconds: WIDTHS[0], first_index: 0, intervals: Vec::new(), max_intervals }
    }

    /// Returns the length of an interval.
    pub fn width(&self) -> Span {
        Span::from_secs(self.width_seconds)
    }

    /// Returns the start of the first interval: a whole multiple of the width.
    pub fn start(&self) -> Time {
        Time::from_secs(self.first_index.saturating_mul(self.width_seconds))
    }

    /// Returns all intervals, empty ones included.
    pub fn intervals(&self) -> &[IntervalCounts] {
        &self.intervals
    }

    /// Returns the interval of a moment. A moment before the first interval counts in the first.
    pub(super) fn interval_at(&mut self, now: Time) -> &mut IntervalCounts {
        let second = now.as_micros() / 1_000_000;
        if self.intervals.is_empty() {
            self.first_index = second / self.width_seconds;
        }
        loop {
            let place = (second / self.width_seconds).saturating_sub(self.first_index) as usize;
            if place < self.max_intervals {
                if place >= self.intervals.len() {
                    self.intervals.resize(place + 1, IntervalCounts::default());
                }
                return &mut self.intervals[place];
            }
            self.widen();
        }
    }

    fn widen(&mut self) {
        let next = WIDTHS
            .into_iter()
            .find(|width| *width > self.width_seconds)
            .unwrap_or(self.width_seconds.saturating_mul(10));
        let factor = next / self.width_seconds;
        let first = self.first_index / factor;
        let mut wider: Vec<IntervalCounts> = Vec::new();
        for (place, interval) in (self.first_index..).zip(&self.intervals) {
            let place = (place / factor - first) as usize;
            wider.resize(place + 1, IntervalCounts::default());
            wider[place].merge(interval);
        }
        (self.width_seconds, self.first_index, self.intervals) = (next, first, wider);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn intervals_count_the_events_within_them(
            start in 0_u64..2_000_000_000, steps in prop::collection::vec((0_u32..24).prop_flat_map(|bits| 0_u64..1 << bits), 1..200),
        ) {
            let (mut timeline, mut second, mut seconds) = (Timeline::default(), start, Vec::new());
            for step in steps {
                second += step;
                seconds.push(second);
                timeline.interval_at(Time::from_secs(second)).admitted += 1;
            }
            prop_assert!(timeline.intervals().len() <= MAX_INTERVALS);
            let (width, begins) = (timeline.width_seconds, timeline.first_index * timeline.width_seconds);
            for (place, interval) in timeline.intervals().iter().enumerate() {
                let from = begins + place as u64 * width;
                let expected = seconds.iter().filter(|second| (from..from + width).contains(second)).count();
                prop_assert_eq!(interval.admitted, expected as u64);
            }
        }
    }

    #[test]
    fn earlier_events_count_in_the_first_interval() {
        let mut timeline = Timeline::default();
        timeline.interval_at(Time::from_secs(100)).admitted += 1;
        timeline.interval_at(Time::from_secs(50)).refused_by_deny_list += 1;
        assert_eq!(
            timeline.intervals(),
            [IntervalCounts { admitted: 1, refused_by_deny_list: 1, ..IntervalCounts::default() }]
        );
        assert_eq!((timeline.start(), timeline.width()), (Time::from_secs(100), Span::from_secs(1)));
    }
}
