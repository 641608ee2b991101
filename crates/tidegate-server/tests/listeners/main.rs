//! The bytes before HTTP on a listener: headers of the PROXY protocol, and TLS; HTTP/2; TLS to the upstream.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod authority;
mod common;
mod http2;
mod http2_floods;
mod page;
mod proxy_protocol;
mod tls;
mod upstream_tls;
