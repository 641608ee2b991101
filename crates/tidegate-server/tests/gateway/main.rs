//! The gateway to external APIs over real sockets.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod access_log;
mod alerts;
mod cache;
mod common;
mod connections;
mod dashboard;
mod door;
mod errors;
mod headers;
mod login;
mod logs;
mod operators;
mod reload;
mod retries;
mod state;
mod streaming;
mod upgrade;
#[expect(dead_code, reason = "what only the gate's tests use")]
#[path = "../gate/common.rs"]
mod wire;
