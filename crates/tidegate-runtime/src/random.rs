//! Random numbers that are hard to guess and differ between processes.

/// A number from the operating system's generator.
pub fn random_u64() -> u64 {
    u64::from_ne_bytes(random_bytes())
}

/// Bytes from the operating system's generator.
///
/// # Panics
/// The operating system has no random number generator, as in a sandbox that forbids the system call.
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("invariant: the operating system has a random number generator");
    bytes
}

#[cfg(feature = "tokio")]
pub use shared::SharedRng;

#[cfg(feature = "tokio")]
mod shared {
    use std::convert::Infallible;

    use parking_lot::Mutex;
    use rand::rngs::SmallRng;
    use rand::{SeedableRng, TryRng};

    use super::random_u64;

    /// A generator for many threads. It is locked only while a number is drawn.
    #[derive(Debug)]
    pub struct SharedRng(Mutex<SmallRng>);

    impl Default for SharedRng {
        fn default() -> Self {
            Self(Mutex::new(SmallRng::seed_from_u64(random_u64())))
        }
    }

    impl TryRng for &SharedRng {
        type Error = Infallible;

        fn try_next_u32(&mut self) -> Result<u32, Infallible> {
            self.0.lock().try_next_u32()
        }

        fn try_next_u64(&mut self) -> Result<u64, Infallible> {
            self.0.lock().try_next_u64()
        }

        fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
            self.0.lock().try_fill_bytes(bytes)
        }
    }
}
