//! The longest of the recent times of calls.

use crate::{Span, Time};

/// The number of periods whose longest times are kept.
const PERIODS: usize = 5;
/// The length of a period.
const PERIOD: Span = Span::from_secs(60);

/// The longest of the times that were recorded in the last five minutes. Only minutes count in which some were, so that it
/// is known after a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecentMaximum {
    /// The longest time of each period, that of the last one first.
    longest: [Span; PERIODS],
    /// The start of the last period. `None` before the first time.
    period_start: Option<Time>,
}

impl RecentMaximum {
    /// A maximum that is at least `assumed` in the first minute in which times are recorded, because the first ones say
    /// little about the longest.
    pub const fn new(assumed: Span) -> Self {
        let mut longest = [Span::ZERO; PERIODS];
        longest[PERIODS - 1] = assumed;
        Self { longest, period_start: None }
    }

    /// Records a time that has ended at `now`.
    pub fn record(&mut self, time: Span, now: Time) {
        let start = *self.period_start.get_or_insert(now);
        if now.since(start) >= PERIOD {
            self.longest.rotate_right(1);
            (self.longest[0], self.period_start) = (Span::ZERO, Some(now));
        }
        self.longest[0] = self.longest[0].max(time);
    }

    /// The longest time, and this one while none was recorded.
    pub fn get_or(&self, unknown: Span) -> Span {
        if self.period_start.is_none() { unknown } else { self.get() }
    }

    /// The longest time.
    pub fn get(&self) -> Span {
        self.longest.into_iter().max().unwrap_or(Span::ZERO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_time_is_forgotten_after_five_minutes_with_others() {
        let at = Time::from_secs;
        let mut maximum = RecentMaximum::new(Span::from_secs(30));
        for secs in 100..160 {
            maximum.record(Span::from_secs(2), at(secs));
            assert_eq!(maximum.get(), Span::from_secs(30), "assumed");
        }
        maximum.record(Span::from_secs(7), at(160));
        assert_eq!(maximum.get(), Span::from_secs(7));
        for minute in 1..5 {
            maximum.record(Span::from_secs(1), at(160 + 60 * minute));
            assert_eq!(maximum.get(), Span::from_secs(7));
        }
        maximum.record(Span::from_secs(1), at(160 + 60 * 5));
        assert_eq!(maximum.get(), Span::from_secs(1));
        let mut paused = maximum;
        paused.record(Span::from_millis(1), at(100_000));
        assert_eq!(paused.get(), Span::from_secs(1), "a pause tells nothing");
    }
}
