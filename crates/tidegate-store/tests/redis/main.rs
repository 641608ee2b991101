//! The Redis store, against real servers.
#![expect(clippy::unwrap_used, reason = "a failed setup is a failed test")]

mod cluster;
mod common;
mod conforms;
mod equals;
mod life;
mod outages;
mod shares;
mod together;
