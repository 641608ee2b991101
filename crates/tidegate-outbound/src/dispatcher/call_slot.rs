//! The place of a call: with its caller, or waiting in the dispatcher.

use tidegate_core::Time;
use tidegate_core::call::Call;

use super::DispatchResult;

/// The place of a running call.
pub(crate) enum CallSlot {
    /// Its own task holds it.
    Owned(Call),
    /// It waits at this index.
    Waiting(usize),
    /// It has ended.
    Finished,
}

impl CallSlot {
    pub(crate) fn call(&mut self) -> &mut Call {
        match self {
            Self::Owned(call) => call,
            Self::Waiting(_) | Self::Finished => {
                unreachable!("a call is held until it is parked, and from its turn to its end")
            }
        }
    }

    pub(crate) fn take(&mut self) -> Call {
        match std::mem::replace(self, Self::Finished) {
            Self::Owned(call) => call,
            Self::Waiting(_) | Self::Finished => {
                unreachable!("a call is held until it is parked, and from its turn to its end")
            }
        }
    }
}

/// The outcome of queueing a call.
pub(crate) enum StartOutcome {
    /// It may be sent at once, or has ended.
    Decided(DispatchResult, Time),
    /// It waits at this index.
    Waiting(usize),
}
