//! What Tidegate's tests share: a naive model of its semantics, a conformance suite that every store passes, a
//! reference store, bad clocks, and real servers with a client for them.
//!
//! A new store is held to the others by three lines: see [`conformance`].

pub mod clock;
pub mod conformance;
pub mod fixtures;
pub mod http_client;
pub mod model;
pub mod property;
pub mod random;
pub mod reference;
pub mod remote;
pub mod servers;
pub mod traffic;
