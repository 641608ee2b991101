//! The gateway to other people's APIs.

mod connect;
mod door;
