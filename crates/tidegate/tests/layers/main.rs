//! The independent layers, on tokio's paused time.
#![cfg(all(feature = "outbound", feature = "tower"))]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod breaker;
mod common;
mod limit;
mod order;
mod retry;
