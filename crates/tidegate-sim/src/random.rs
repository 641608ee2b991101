//! Random numbers: one stream for each actor, so that what one does never changes what another draws.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// A stream. Its bits are the same on every machine.
pub(crate) type SimRng = Xoshiro256PlusPlus;

/// Streams for actors, in the order in which they are asked for. Every strategy of a scenario asks in the same order and
/// so meets the same arrivals, latencies and losses.
#[derive(Debug)]
pub(crate) struct RngStreams(SimRng);

impl RngStreams {
    pub(crate) fn new(seed: u64, trial: u32) -> Self {
        // Any odd number would do; this one is 2^64 ÷ the golden ratio.
        Self(SimRng::seed_from_u64(seed.wrapping_add(u64::from(trial).wrapping_mul(0x9e37_79b9_7f4a_7c15))))
    }

    pub(crate) fn next_rng(&mut self) -> SimRng {
        SimRng::seed_from_u64(self.0.random())
    }
}
