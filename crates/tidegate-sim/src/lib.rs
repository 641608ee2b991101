//! Tidegate's own machines on a virtual clock: what would happen if.
//!
//! A [`Scenario`] is a world in words: a service and how it fails, a network, clients and when they call, and the
//! strategies that are compared in it. [`Scenario::run`] lets it happen, event by event and without waiting, and gives a
//! [`Report`] of numbers and pictures. Clients of the strategy `tidegate` are driven by
//! [`tidegate_core::call`] and the gate before a service by [`tidegate_core::decision`], the code that runs in production;
//! only the clock, the wire and the other side are made up.
//!
//! The same scenario and the same seed give the same bytes, on every machine of one platform: logarithms and exponentials are
//! the platform's, and may differ in their last digit.
#![forbid(unsafe_code)]

mod clock;
pub mod delay;
mod event_queue;
mod limiter;
pub mod profile;
mod random;
mod read;
pub mod report;
mod scenario;
mod service;
pub mod setup;
pub mod shipped;
mod simulation;
pub mod stats;

pub use report::{Report, Run, RunSummary};
pub use scenario::Scenario;
