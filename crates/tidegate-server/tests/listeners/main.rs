//! The bytes before HTTP on a listener: headers of the PROXY protocol, and TLS; TLS to the upstream.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod authority;
mod common;
mod proxy_protocol;
mod tls;
mod upstream_tls;
