//! The place of a call: with its caller, or waiting in the dispatcher.

use tidegate_core::Time;
use tidegate_core::call::Call;

use super::DispatchResult;

/// The place of a running call.
#[expect(clippy::large_enum_variant, reason = "a box would cost each call an allocation")]
pub(crate) enum CallSlot {
    /// Its own task holds it.
    Owned(Call),
    /// It waits at this index.
    Waiting(usize),
    /// It has ended.
    Finished,
}

const NOT_OWNED: &str = "a call's task holds it until it waits, and from its turn to its end";

impl CallSlot {
    pub(crate) fn call(&mut self) -> &mut Call {
        let Self::Owned(call) = self else { unreachable!("{NOT_OWNED}") };
        call
    }

    pub(crate) fn take(&mut self) -> Call {
        let Self::Owned(call) = std::mem::replace(self, Self::Finished) else { unreachable!("{NOT_OWNED}") };
        call
    }
}

/// The outcome of queueing a call.
pub(crate) enum StartOutcome {
    /// It may be sent at once, or has ended.
    Decided(DispatchResult, Time),
    /// It waits at this index.
    Waiting(usize),
}
