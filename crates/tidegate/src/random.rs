//! What must be hard to guess, and never the same in two processes.

use std::hash::{BuildHasher, RandomState};

use tidegate_policy::KeySeed;

pub(crate) fn random_u64() -> u64 {
    // The standard library keys its hasher from the operating system's randomness.
    RandomState::new().hash_one(0)
}

pub(crate) fn random_seed() -> KeySeed {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&random_u64().to_le_bytes());
    bytes[8..].copy_from_slice(&random_u64().to_le_bytes());
    KeySeed::new(bytes)
}
