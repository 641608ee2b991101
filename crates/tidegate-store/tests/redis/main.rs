//! The Redis store, against real servers.
#![expect(clippy::unwrap_used, reason = "a failed setup is a failed test")]

mod batching;
mod cluster;
mod common;
mod conformance;
mod connection;
mod equivalence;
mod nodes;
mod outages;
mod reservations;
mod rights;
mod shares;
