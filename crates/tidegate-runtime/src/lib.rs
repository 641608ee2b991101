//! The parts of the machine that Tidegate depends on: clocks, timers and random numbers.

pub mod clock;
#[cfg(feature = "tokio")]
pub mod precise_timer;
pub mod random;
