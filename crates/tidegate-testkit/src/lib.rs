//! Test support of Tidegate: a naive model of its semantics, a conformance suite for every store, a reference store,
//! faulty clocks, and real servers with a client for them.
//!
//! A new store is tested against the others in three lines: see [`conformance`].

pub mod clock;
pub mod conformance;
pub mod fixtures;
pub mod http_client;
pub mod model;
pub mod property;
pub mod random;
pub mod redis_cell;
pub mod reference;
pub mod remote;
pub mod servers;
pub mod traffic;
