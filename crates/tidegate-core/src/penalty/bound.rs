//! The most calls of a client under a limit with a penalty.

use super::{Penalty, PenaltyMode};
use crate::Span;

impl Penalty {
    /// The most paroles in less than `time` for a client that obeys every wait.
    ///
    /// Each of them follows a block that lies within the time. There are two ways to the next parole: another refusal
    /// at once, and the next longer block; or a wait of [`Penalty::forgive_after`], and the same block again. A client
    /// gets the most if it repeats the shortest block, or the longest one if that takes less time, and goes through each
    /// block between them once.
    pub fn max_paroles(&self, time: Span) -> u64 {
        let Some(last) = time.as_micros().checked_sub(1).filter(|_| self.mode == PenaltyMode::Parole) else { return 0 };
        let repeated = (self.base + self.forgive_after).as_micros();
        let longest = self.block_length(self.max_strikes).as_micros();
        let mut climbed = Span::ZERO;
        let mut most = 0;
        for strike in 1..=self.max_strikes {
            climbed = climbed + self.block_length(strike);
            let Some(rest) = last.checked_sub(climbed.as_micros()) else { break };
            let each = if strike == self.max_strikes { repeated.min(longest) } else { repeated };
            most = most.max(u64::from(strike) + rest / each);
        }
        most
    }
}
