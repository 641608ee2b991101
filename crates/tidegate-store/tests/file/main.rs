//! The file store answers as every store must, and what it answered outlives the process.
#![cfg(feature = "file")]
#![expect(clippy::unwrap_used, reason = "a test's errors are its failures")]

mod clock;
mod common;
mod conformance;
mod kill;
mod reload;
mod restart;
mod torn;
