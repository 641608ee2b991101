//! Strikes, blocks and parole from the list of all strikes ever taken.

use tidegate_core::{Penalty, Span, Time};

/// Every strike ever taken, and the parole that the last one left.
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
    /// How many strikes count: the last one's number less one for each whole `forgive_after` since its block ended.
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

    /// The block that lives: its length and its end.
    pub(super) fn block(&self, penalty: &Penalty, now: Time) -> Option<(Span, Time)> {
        let last = self.strikes.last().filter(|last| last.until > now)?;
        Some((block_length(penalty, last.number), last.until))
    }

    /// Takes a strike: its number, its block, and when that ends.
    pub(super) fn strike(&mut self, penalty: &Penalty, parole: Option<u64>, now: Time) -> (u8, Span, Time) {
        let number = (self.strikes(penalty, now) + 1).min(max_strikes(penalty));
        let block = block_length(penalty, number);
        let until = now + block;
        self.strikes.push(Strike { number, until });
        self.max_parole_cost = parole;
        (number, block, until)
    }

    /// Brings back so many strikes at the least, and a block that lasts so long.
    pub(super) fn restore(&mut self, penalty: &Penalty, (number, lasts): (u8, Span), parole: Option<u64>, now: Time) {
        let number = number.min(max_strikes(penalty));
        if number == 0 {
            return;
        }
        let until = now + lasts.min(block_length(penalty, number));
        let until = self.strikes.last().map_or(until, |last| last.until.max(until));
        self.strikes.push(Strike { number: self.strikes(penalty, now).max(number), until });
        self.max_parole_cost = self.max_parole_cost.max(parole);
    }

    /// Whether a call of this cost may pass a full limit once the block is served.
    pub(super) fn allows_parole(&self, cost: u64) -> bool {
        self.max_parole_cost.is_some_and(|most| cost <= most)
    }

    /// A call was admitted: on parole, or with so much room that the parole, if there is one, wasn't needed any more.
    pub(super) fn record_admitted(&mut self, on_parole: bool, room: u64) {
        if on_parole || self.max_parole_cost.is_some_and(|cost| cost <= room) {
            self.max_parole_cost = None;
        }
    }
}

/// min(base · factor^(n−1), cap), multiplied out.
fn block_length(penalty: &Penalty, number: u8) -> Span {
    let cap = u128::from(penalty.cap().as_micros());
    let mut length = u128::from(penalty.base().as_micros());
    for _ in 1..number {
        length = (length * u128::from(penalty.factor())).min(cap);
    }
    Span::from_micros(length.min(cap) as u64)
}

/// The first strike whose block is the cap; with a factor of 1 blocks don't grow, and one strike is all there is.
fn max_strikes(penalty: &Penalty) -> u8 {
    if penalty.factor() == 1 {
        return 1;
    }
    (1..u8::MAX).find(|&number| block_length(penalty, number) == penalty.cap()).unwrap_or(u8::MAX)
}
