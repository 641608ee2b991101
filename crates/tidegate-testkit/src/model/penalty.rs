//! Strikes, blocks and parole, computed from the list of all strikes.

use tidegate_core::{Penalty, Span, Time};

/// All strikes, and the parole that the last one left.
#[derive(Clone, Debug, Default)]
pub(super) struct PenaltyHistory {
    strikes: Vec<Strike>,
    max_parole_cost: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Strike {
    number: u8,
    until: Time,
}

impl PenaltyHistory {
    /// Returns the number of strikes that count: the last one's number, less one for each whole `forgive_after` since
    /// its block ended.
    pub(super) fn strikes(&self, penalty: &Penalty, now: Time) -> u8 {
        let Some(last) = self.strikes.last() else { return 0 };
        let mut left = last.number;
        let mut next = u128::from(last.until.as_micros());
        while left > 0 {
            next += u128::from(penalty.forgive_after().as_micros());
            if next > u128::from(now.as_micros()) {
                break;
            }
            left -= 1;
        }
        left
    }

    /// Returns the length and the end of the active block.
    pub(super) fn block(&self, penalty: &Penalty, now: Time) -> Option<(Span, Time)> {
        let last = self.strikes.last().filter(|last| last.until > now)?;
        Some((block_length(penalty, last.number), last.until))
    }

    /// Adds a strike, and returns its number, its block and the block's end.
    pub(super) fn strike(&mut self, penalty: &Penalty, parole: Option<u64>, now: Time) -> (u8, Span, Time) {
        let number = (self.strikes(penalty, now) + 1).min(max_strikes(penalty));
        let block = block_length(penalty, number);
        let until = now + block;
        self.strikes.push(Strike { number, until });
        self.max_parole_cost = parole;
        (number, block, until)
    }

    /// Restores at least this many strikes, and a block of this length.
    pub(super) fn restore(&mut self, penalty: &Penalty, (number, lasts): (u8, Span), parole: Option<u64>, now: Time) {
        let number = number.min(max_strikes(penalty));
        if number == 0 {
            return;
        }
        if self.strikes(penalty, now) == 0 {
            self.max_parole_cost = None;
        }
        let until = now + lasts.min(block_length(penalty, number));
        let until = self.strikes.last().map_or(until, |last| last.until.max(until));
        self.strikes.push(Strike { number: self.strikes(penalty, now).max(number), until });
        self.max_parole_cost = self.max_parole_cost.max(parole);
    }

    /// Returns true if a call of this cost may pass a full limit once the block is served.
    pub(super) fn allows_parole(&self, cost: u64) -> bool {
        self.max_parole_cost.is_some_and(|most| cost <= most)
    }

    /// Records an admitted call. It ends a parole if the call used it, or if there was enough room that it wasn't
    /// needed.
    pub(super) fn record_admitted(&mut self, on_parole: bool, room: u64) {
        if on_parole || self.max_parole_cost.is_some_and(|cost| cost <= room) {
            self.max_parole_cost = None;
        }
    }
}

/// Returns min(base · factor^(n−1), cap), by repeated multiplication.
fn block_length(penalty: &Penalty, number: u8) -> Span {
    let cap = u128::from(penalty.cap().as_micros());
    let mut length = u128::from(penalty.base().as_micros());
    for _ in 1..number {
        length = (length * u128::from(penalty.factor())).min(cap);
    }
    Span::from_micros(length.min(cap) as u64)
}

/// Returns the first strike with a block as long as the cap. With a factor of 1 blocks don't grow, so the largest
/// number is 1.
fn max_strikes(penalty: &Penalty) -> u8 {
    if penalty.factor() == 1 {
        return 1;
    }
    (1..u8::MAX).find(|&number| block_length(penalty, number) == penalty.cap()).unwrap_or(u8::MAX)
}
