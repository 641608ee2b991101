//! The gate over real sockets.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod abandoned;
mod access;
mod access_log;
mod alerts;
mod api;
#[path = "../listeners/authority.rs"]
#[expect(dead_code, reason = "other tests use the rest")]
mod authority;
mod browser;
mod caps;
mod changes;
mod common;
mod compat;
mod dashboard;
mod dashboard_browser;
mod ext_authz;
mod fleet;
mod floods;
mod flow;
mod forward_auth;
mod hop;
mod keys;
mod listeners;
mod logs;
mod metrics;
mod openapi;
mod paths;
mod permits;
mod reload;
mod reservations;
mod resp;
mod rls;
mod shutdown;
mod smuggling;
mod state;
mod streaming;
mod timeouts;
mod tokens;
mod trials;
mod turns;
mod upgrade;
mod uploads;
mod wire;
