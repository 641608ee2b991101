//! What must be hard to guess, and never the same in two processes.

use std::hash::{BuildHasher, RandomState};

use tidegate_policy::KeySeed;

pub(crate) fn random_u64() -> u64 {
    // The standard library keys its hasher from the operating system's randomness.
    RandomState::new().hash_one(0)
}

pub(crate) fn random_bytes() -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&random_u64().to_le_bytes());
    bytes[8..].copy_from_slice(&random_u64().to_le_bytes());
    bytes
}

pub(crate) fn random_seed() -> KeySeed {
    KeySeed::new(random_bytes())
}

#[cfg(all(feature = "outbound", feature = "tower"))]
pub(crate) use shared::SharedRng;

#[cfg(all(feature = "outbound", feature = "tower"))]
mod shared {
    use std::convert::Infallible;
    use std::sync::{Mutex, PoisonError};

    use rand::rngs::SmallRng;
    use rand::{SeedableRng, TryRng};

    use super::random_u64;

    /// A generator for many threads, locked for each number and not before one is drawn.
    #[derive(Debug)]
    pub(crate) struct SharedRng(Mutex<SmallRng>);

    impl Default for SharedRng {
        fn default() -> Self {
            Self(Mutex::new(SmallRng::seed_from_u64(random_u64())))
        }
    }

    impl SharedRng {
        fn with<T>(&self, draw: impl FnOnce(&mut SmallRng) -> Result<T, Infallible>) -> Result<T, Infallible> {
            draw(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
        }
    }

    impl TryRng for &SharedRng {
        type Error = Infallible;

        fn try_next_u32(&mut self) -> Result<u32, Infallible> {
            self.with(SmallRng::try_next_u32)
        }

        fn try_next_u64(&mut self) -> Result<u64, Infallible> {
            self.with(SmallRng::try_next_u64)
        }

        fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
            self.with(|rng| rng.try_fill_bytes(bytes))
        }
    }
}
