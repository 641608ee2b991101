//! The penalty for repeated violations: blocks that grow exponentially and are forgiven after some time.
//!
//! The n-th strike blocks for `min(base · factor^(n−1), cap)`. A block never shortens, refills or resets the limit
//! itself. While it lasts, refused calls change nothing. Then it leaves a *parole* for one call, so that the announced
//! wait stays true even if the window is still full.

mod bound;

use crate::limit::LimitError;
use crate::time::MAX_CLOCK_LAG;
use crate::{Span, Time};

/// The announced wait, and the effect of a block after its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PenaltyMode {
    /// The wait is the block. After it, one call of at most the refused cost passes even if the limit is still full.
    #[default]
    Parole,
    /// The wait is the longer of the block and the limit's own wait. No call passes a full limit.
    Strict,
}

/// The settings of a penalty, as written by the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PenaltySpec {
    /// The first block. Default 2 s.
    pub base: Span,
    /// The factor of each further block. Default 2. With 1, all blocks are as long as the base.
    pub factor: u32,
    /// The longest block. Default 1 h.
    pub cap: Span,
    /// The time without a refusal after a block that forgives one strike. Default: the longer of cap and window.
    pub forgive_after: Option<Span>,
    /// The announced wait and the parole. Default [`PenaltyMode::Parole`].
    pub mode: PenaltyMode,
}

impl Default for PenaltySpec {
    fn default() -> Self {
        Self {
            base: Span::from_secs(2),
            factor: 2,
            cap: Span::from_secs(3600),
            forgive_after: None,
            mode: PenaltyMode::Parole,
        }
    }
}

/// A checked penalty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Penalty {
    base: Span,
    factor: u32,
    cap: Span,
    forgive_after: Span,
    mode: PenaltyMode,
    max_strikes: u8,
}

impl Penalty {
    /// Creates the penalty of a limit with a window (or refill time, or lease) of `window`.
    ///
    /// # Errors
    /// The base or `forgive_after` is zero, the factor is 0, or the cap is below the base.
    pub fn new(spec: PenaltySpec, window: Span) -> Result<Self, LimitError> {
        let PenaltySpec { base, factor, cap, forgive_after, mode } = spec;
        let forgive_after = forgive_after.unwrap_or(cap.max(window));
        if base.is_zero() || forgive_after.is_zero() {
            return Err(LimitError::ZeroPeriod);
        }
        if factor == 0 {
            return Err(LimitError::ZeroFactor);
        }
        if cap < base {
            return Err(LimitError::CapBelowBase);
        }
        let mut penalty = Self { base, factor, cap, forgive_after, mode, max_strikes: 1 };
        // A factor of at least 2 reaches any cap within 53 steps: spans have 52 bits.
        while penalty.factor > 1 && penalty.block_length(penalty.max_strikes) < cap {
            penalty.max_strikes += 1;
        }
        Ok(penalty)
    }

    /// Creates a ban: every block has the same `length`.
    ///
    /// # Errors
    /// `length` is zero.
    pub fn ban(length: Span, window: Span) -> Result<Self, LimitError> {
        Self::new(PenaltySpec { base: length, factor: 1, cap: length, ..PenaltySpec::default() }, window)
    }

    /// The length of the n-th block, n counted from 1: `min(base · factor^(n−1), cap)`.
    pub fn block_length(&self, strike: u8) -> Span {
        let factor = u64::from(self.factor).saturating_pow(u32::from(strike.saturating_sub(1)));
        self.base.times(factor).min(self.cap)
    }

    /// The length of the first block.
    pub fn base(&self) -> Span {
        self.base
    }

    /// The factor of each further block.
    pub fn factor(&self) -> u32 {
        self.factor
    }

    /// The length of the longest block.
    pub fn cap(&self) -> Span {
        self.cap
    }

    /// The time without a refusal after which one strike is forgiven.
    pub fn forgive_after(&self) -> Span {
        self.forgive_after
    }

    /// The announced wait, and the effect of a block after its end.
    pub fn mode(&self) -> PenaltyMode {
        self.mode
    }

    /// The maximum number of strikes: the first with a block as long as the cap.
    pub fn max_strikes(&self) -> u8 {
        self.max_strikes
    }

    /// Empties the record of strikes that are all forgiven at `now`, and shortens a block that a step back of the clock
    /// has lengthened. A parole outlives its strikes, because the announced wait must stay true.
    pub fn refresh(&self, record: &mut PenaltyRecord, now: Time) {
        if record.strikes == 0 {
            return;
        }
        let longest = self.block_length(record.strikes);
        if record.blocked_until > now + longest + MAX_CLOCK_LAG {
            record.blocked_until = now + longest;
        }
        let forgiven = now.since(record.blocked_until).as_micros() / self.forgive_after.as_micros();
        if forgiven >= u64::from(record.strikes) {
            *record = PenaltyRecord { parole: record.parole, ..PenaltyRecord::default() };
        }
    }

    /// The number of strikes that count at `now`.
    pub fn strikes(&self, record: &PenaltyRecord, now: Time) -> u8 {
        let forgiven = now.since(record.blocked_until).as_micros() / self.forgive_after.as_micros();
        record.strikes.saturating_sub(u8::try_from(forgiven).unwrap_or(u8::MAX))
    }

    /// Adds a strike for a refused call of `cost`. The block starts at `now`.
    pub fn strike(&self, record: &mut PenaltyRecord, cost: u64, now: Time) {
        let strikes = self.strikes(record, now).saturating_add(1).min(self.max_strikes);
        let parole = match self.mode {
            PenaltyMode::Parole => cost,
            PenaltyMode::Strict => 0,
        };
        *record = PenaltyRecord { blocked_until: now + self.block_length(strikes), parole, strikes };
    }

    /// Adds to a record what it lacks of `strikes` strikes, a parole, and a block of `remaining` from `now`. A parole
    /// whose strikes are all forgiven ends here, since a store may have dropped it with an idle state.
    pub fn restore(&self, record: &mut PenaltyRecord, strikes: u8, parole: u64, remaining: Span, now: Time) {
        self.refresh(record, now);
        let strikes = strikes.min(self.max_strikes);
        if strikes == 0 {
            return;
        }
        if record.strikes == 0 {
            record.parole = 0;
        }
        let until = now + remaining.min(self.block_length(strikes));
        record.strikes = self.strikes(record, now).max(strikes);
        record.blocked_until = record.blocked_until.max(until);
        if self.mode == PenaltyMode::Parole {
            record.parole = record.parole.max(parole);
        }
    }

    /// The time at which the record becomes empty.
    pub fn idle_at(&self, record: &PenaltyRecord) -> Time {
        if record.strikes == 0 {
            Time::ZERO
        } else {
            record.blocked_until + self.forgive_after.times(u64::from(record.strikes))
        }
    }
}

/// The violations of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PenaltyRecord {
    /// The end of the last block.
    pub blocked_until: Time,
    /// The largest cost that may pass a full limit once. 0 means none.
    pub parole: u64,
    /// The number of strikes. 0 means none.
    pub strikes: u8,
}

impl PenaltyRecord {
    /// True if a block lasts at `now`.
    pub fn is_blocked(&self, now: Time) -> bool {
        self.strikes > 0 && self.blocked_until > now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn penalty(spec: PenaltySpec) -> Penalty {
        Penalty::new(spec, Span::from_secs(60)).unwrap()
    }

    #[test]
    fn blocks_double_up_to_the_cap() {
        let penalty = penalty(PenaltySpec::default());
        let blocks: Vec<u64> = (1..=13).map(|n| penalty.block_length(n).as_secs_ceil()).collect();
        assert_eq!(blocks, [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600]);
        assert_eq!(penalty.max_strikes(), 12);
    }

    #[test]
    fn block_lengths_grow_by_the_factor() {
        let penalty = penalty(PenaltySpec { base: Span::from_secs(3), factor: 3, ..PenaltySpec::default() });
        let blocks: Vec<u64> = (1..=3).map(|n| penalty.block_length(n).as_secs_ceil()).collect();
        assert_eq!(blocks, [3, 9, 27]);
    }

    #[test]
    fn strikes_are_capped_and_never_overflow() {
        let penalty = penalty(PenaltySpec::default());
        let mut record = PenaltyRecord::default();
        let mut now = Time::from_secs(1000);
        for _ in 0..1_000_000 {
            penalty.strike(&mut record, 1, now);
            now = record.blocked_until;
        }
        assert_eq!(record.strikes, 12);
        assert_eq!(penalty.block_length(u8::MAX), Span::from_secs(3600));
        let widest = Penalty::new(
            PenaltySpec { base: Span::from_micros(1), factor: 2, cap: Span::MAX, ..PenaltySpec::default() },
            Span::MAX,
        );
        assert_eq!(widest.unwrap().max_strikes(), 53);
    }

    #[test]
    fn forgiveness_starts_at_the_blocks_end() {
        let penalty = penalty(PenaltySpec { forgive_after: Some(Span::from_secs(100)), ..PenaltySpec::default() });
        let mut record = PenaltyRecord::default();
        let start = Time::from_secs(1000);
        for _ in 0..3 {
            penalty.strike(&mut record, 1, start);
        }
        let end = record.blocked_until;
        for (after, left) in [(0, 3), (99, 3), (100, 2), (199, 2), (200, 1), (300, 0)] {
            assert_eq!(penalty.strikes(&record, end + Span::from_secs(after)), left, "after {after} s");
        }
        assert_eq!(penalty.idle_at(&record), end + Span::from_secs(300));
        penalty.strike(&mut record, 1, end + Span::from_secs(100));
        assert_eq!(record.strikes, 3, "one was forgiven, one is new");
    }

    #[test]
    fn restoring_merges_with_the_known_penalty() {
        let penalty = penalty(PenaltySpec::default());
        let (start, secs) = (Time::from_secs(10_000), Span::from_secs);
        let mut lost = PenaltyRecord::default();
        penalty.restore(&mut lost, 5, 3, secs(20), start);
        assert_eq!(lost, PenaltyRecord { blocked_until: start + secs(20), parole: 3, strikes: 5 });
        penalty.restore(&mut lost, 5, 3, secs(20), start);
        penalty.restore(&mut lost, 4, 1, secs(2), start + secs(3));
        assert_eq!(
            lost,
            PenaltyRecord { blocked_until: start + secs(20), parole: 3, strikes: 5 },
            "it is known already"
        );
        penalty.restore(&mut lost, 2, 3, secs(3600), start);
        assert_eq!(lost.blocked_until, start + secs(20), "no block of two strikes lasts for longer than the second");
        penalty.restore(&mut lost, 200, 0, Span::ZERO, start + secs(30));
        assert_eq!((lost.strikes, lost.blocked_until), (12, start + secs(30)), "strikes alone block nobody");
        let mut forgiven = PenaltyRecord { blocked_until: start, parole: 0, strikes: 3 };
        penalty.restore(&mut forgiven, 1, 0, Span::ZERO, start + secs(7200));
        assert_eq!(forgiven.strikes, 1, "two were forgiven");
        let mut alone = PenaltyRecord { parole: 3, ..PenaltyRecord::default() };
        penalty.restore(&mut alone, 0, 1, secs(9), start);
        assert_eq!(alone.parole, 3, "there is nothing to restore");
        penalty.restore(&mut alone, 1, 1, secs(2), start);
        assert_eq!(alone, PenaltyRecord { blocked_until: start + secs(2), parole: 1, strikes: 1 });
    }

    #[test]
    fn a_clock_step_back_never_lengthens_blocks() {
        let penalty = penalty(PenaltySpec::default());
        let mut record = PenaltyRecord::default();
        penalty.strike(&mut record, 1, Time::from_secs(50_000_000));
        let now = Time::from_secs(1000);
        penalty.refresh(&mut record, now);
        assert_eq!(record.blocked_until, now + Span::from_secs(2));
    }
}
