//! Calls driven as programs drive them, on tokio's paused time.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that can't go on should stop")]

mod breaker;
mod calls;
mod common;
mod lanes;
mod outage;
mod pace;
mod pool;
mod retry;
#[cfg(feature = "remote")]
mod shared;
mod snapshot;
