//! The word of a slot, and the cells of the states that don't fit into it.

use tidegate_core::rate::ArrivalTime;
use tidegate_core::{KeyState, Time};

/// The contents of a slot's word. Most keys are seen once or are plain rates; they need no state of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotWord {
    /// A rate's arrival time, with a clean record.
    Arrival(ArrivalTime),
    /// A window that admitted one call of cost 1 at this time, with a clean record.
    SingleCall(Time),
    /// The state at this index.
    State(u32),
}

const SINGLE_CALL_BIT: u64 = 1 << 62;
const STATE_BIT: u64 = 2 << 62;
const PAYLOAD_MASK: u64 = (1 << 62) - 1;

impl SlotWord {
    #[inline]
    pub(super) fn unpack(word: u64) -> Self {
        match word & !PAYLOAD_MASK {
            0 => Self::Arrival(ArrivalTime::from_bits(word)),
            SINGLE_CALL_BIT => Self::SingleCall(Time::from_micros(word & PAYLOAD_MASK)),
            _ => Self::State((word & PAYLOAD_MASK) as u32),
        }
    }

    #[inline]
    pub(super) fn pack(self) -> u64 {
        match self {
            Self::Arrival(arrival) => arrival.to_bits(),
            Self::SingleCall(at) => SINGLE_CALL_BIT | at.as_micros(),
            Self::State(index) => STATE_BIT | u64::from(index),
        }
    }
}

#[derive(Debug)]
pub(super) enum StateCell {
    Free { next: Option<u32> },
    Used(KeyState),
}
