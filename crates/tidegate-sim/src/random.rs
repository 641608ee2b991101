//! Random numbers. Each actor has its own stream, so that one actor's draws never change another's.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;

/// A random stream. Its bits are the same on every machine.
pub(crate) type SimRng = Xoshiro256PlusPlus;

/// Creates the streams of the actors, in the order of the requests. Every strategy of a scenario requests them in the
/// same order, and so meets the same arrivals, latencies and losses.
#[derive(Debug)]
pub(crate) struct RngStreams(SimRng);

impl RngStreams {
    pub(crate) fn new(seed: u64, trial: u32) -> Self {
        // Any odd number works; this one is 2^64 ÷ the golden ratio.
        Self(SimRng::seed_from_u64(seed.wrapping_add(u64::from(trial).wrapping_mul(0x9e37_79b9_7f4a_7c15))))
    }

    pub(crate) fn next_rng(&mut self) -> SimRng {
        SimRng::seed_from_u64(self.0.random())
    }
}
