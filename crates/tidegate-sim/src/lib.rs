//! Simulates Tidegate's production code on a virtual clock.
//!
//! A [`Scenario`] describes a service and its failures, a network, the clients and their calls, and the strategies that
//! are compared. [`Scenario::run`] plays it event by event without waiting, and returns a [`Report`] of numbers and
//! pictures. Clients of the strategy `tidegate` run [`tidegate_core::call`], and the gate before a service runs
//! [`tidegate_core::decision`]. Both are the code that runs in production. Only the clock, the network and the service
//! are simulated.
//!
//! The same scenario and the same seed give the same bytes on every machine of one platform. Logarithms and
//! exponentials are the platform's, and may differ in their last digit between platforms.
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
