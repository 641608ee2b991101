//! The most calls of a client under a limit with a penalty.

use super::{Penalty, PenaltyMode};
use crate::Span;

impl Penalty {
    /// The most calls beyond the limit's own that a client can make in less than `time` if it obeys every wait.
    ///
    /// Each of them is a parole, after a block that lies within the time. There are two ways to the next parole:
    /// another refusal at once, and the next longer block; or a wait of [`Penalty::forgive_after`], and the same block
    /// again. A client makes the most calls if it repeats the shortest block, or the longest one if that takes less
    /// time, and goes through each block between them once.
    ///
    /// `interval` is the time after which a rate has room for one more call. Calls that wait for it are included. For
    /// a window it is [`Span::MAX`], because its calls count for its whole length.
    pub fn max_extra_calls(&self, time: Span, interval: Span) -> u64 {
        let Some(last) = time.as_micros().checked_sub(1) else { return 0 };
        let interval = interval.as_micros().max(1);
        let mut most = last / interval;
        if self.mode == PenaltyMode::Strict {
            return most;
        }
        let repeated = (self.base + self.forgive_after).as_micros().min(interval);
        let mut climbed = Span::ZERO;
        for strike in 1..=self.max_strikes {
            climbed = climbed + self.block_length(strike);
            let Some(rest) = last.checked_sub(climbed.as_micros()) else { break };
            let each = if strike == self.max_strikes { repeated.min(self.cap.as_micros()) } else { repeated };
            most = most.max(u64::from(strike) + rest / each);
        }
        most
    }
}
