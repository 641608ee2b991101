//! The calls of a trailing window, counted in tenths of it.

use crate::time::MAX_CLOCK_LAG;
use crate::{Span, Time};

const TENTHS: usize = 10;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CallCounts {
    pub(super) calls: u64,
    pub(super) failures: u64,
    pub(super) slow: u64,
}

/// The calls of the present tenth and the nine before it. Tenths lie on a fixed grid of time and expire as a whole.
#[derive(Clone, Debug, Default)]
pub(super) struct CallWindow {
    tenth: Span,
    /// The number of the present tenth. Its counts are at `head`.
    current_tenth: u64,
    head: usize,
    counts: [CallCounts; TENTHS],
    totals: CallCounts,
}

impl CallWindow {
    pub(super) fn new(window: Span) -> Self {
        Self { tenth: Span::from_micros(window.as_micros().div_ceil(TENTHS as u64)), ..Self::default() }
    }

    /// The counts of the window at the time of the last recorded call.
    pub(super) fn totals(&self) -> CallCounts {
        self.totals
    }

    pub(super) fn record(&mut self, failed: bool, slow: bool, now: Time) {
        self.advance(now);
        for counts in [&mut self.counts[self.head], &mut self.totals] {
            counts.calls += 1;
            if failed {
                counts.failures += 1;
            }
            if slow {
                counts.slow += 1;
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.counts = [CallCounts::default(); TENTHS];
        self.totals = CallCounts::default();
    }

    fn advance(&mut self, now: Time) {
        let present = now.as_micros() / self.tenth.as_micros();
        for _ in self.current_tenth..present.min(self.current_tenth.saturating_add(TENTHS as u64)) {
            self.head = (self.head + 1) % TENTHS;
            let expired = core::mem::take(&mut self.counts[self.head]);
            self.totals.calls -= expired.calls;
            self.totals.failures -= expired.failures;
            self.totals.slow -= expired.slow;
        }
        // After a step back, older counts age from the new time. A call that was overtaken counts in the newest tenth.
        let is_clock_lag = Time::ZERO + self.tenth.times(self.current_tenth) <= now + MAX_CLOCK_LAG;
        if present > self.current_tenth || !is_clock_lag {
            self.current_tenth = present;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Time = Time::from_secs(1_000_000);

    fn at(secs: u64) -> Time {
        START + Span::from_secs(secs)
    }

    #[test]
    fn each_tenth_expires_whole_and_on_time() {
        let mut calls = CallWindow::new(Span::from_secs(100));
        for tenth in 0..10 {
            for _ in 0..=tenth {
                calls.record(true, false, at(tenth * 10 + 9));
            }
        }
        assert_eq!(calls.totals(), CallCounts { calls: 55, failures: 55, slow: 0 });
        let mut left = 55;
        for tenth in 0..10 {
            let mut just_before = calls.clone();
            just_before.record(false, true, START + Span::from_micros((100 + tenth * 10) * 1_000_000 - 1));
            assert_eq!(just_before.totals().failures, left);
            left -= tenth + 1;
            let mut then = calls.clone();
            then.record(false, true, at(100 + tenth * 10));
            assert_eq!(then.totals(), CallCounts { calls: left + 1, failures: left, slow: 1 });
        }
        calls.record(false, false, Time::NEVER);
        assert_eq!(calls.totals(), CallCounts { calls: 1, failures: 0, slow: 0 });
    }

    #[test]
    fn clock_steps_back_keep_calls_one_window() {
        let mut calls = CallWindow::new(Span::from_secs(10));
        calls.record(true, false, at(5_000));
        calls.record(true, false, at(4));
        assert_eq!(calls.totals().failures, 2);
        calls.record(true, false, at(13));
        assert_eq!(calls.totals().failures, 3);
        calls.record(true, false, at(14));
        assert_eq!(calls.totals().failures, 2, "both of the start aged from the step");
    }

    #[test]
    fn an_overtaken_call_counts_in_the_newest_tenth() {
        let mut calls = CallWindow::new(Span::from_millis(100));
        calls.record(true, false, at(1));
        calls.record(true, false, at(1) - MAX_CLOCK_LAG);
        let mut later = calls.clone();
        later.record(false, false, at(1) + Span::from_millis(99));
        assert_eq!(later.totals().calls, 3);
        calls.record(false, false, at(1) + Span::from_millis(100));
        assert_eq!(calls.totals().calls, 1);
    }
}
