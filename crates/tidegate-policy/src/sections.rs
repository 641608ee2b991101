//! What a policy file's sections say, checked and with every default filled in.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use crate::address::Ipv6Prefix;
use crate::forwarding::Forwarding;
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::secret::SecretSource;

const fn loopback(port: u16) -> SocketAddr {
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// `[inbound]`: the gate in front of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct InboundConfig {
    /// Where the gate listens. Default 127.0.0.1:8080.
    pub listen: SocketAddr,
    /// The server behind the gate. `None` means that no proxy runs: the policy serves the decision API, forward-auth
    /// or a Rust program only.
    pub upstream: Option<UpstreamAddress>,
    /// Whose forwarding headers are believed, and which one. Nobody's by default.
    pub forwarding: Forwarding,
    /// What the upstream takes for the same path beyond RFC 3986. By default that `%2F` is a slash; see
    /// [`Matcher`](crate::Matcher).
    pub path_quirks: PathQuirks,
    /// The treatment of paths that can be read in several ways. Default [`AmbiguousPaths::Union`].
    pub ambiguous_paths: AmbiguousPaths,
    /// The number of bits of an IPv6 address that are one client: 32 to 64. Default 64.
    pub ipv6_prefix: u8,
    /// Which rate-limit headers answers carry. Default [`HeaderDialect::Draft10`].
    pub headers: HeaderDialect,
    /// Whether answers also carry `X-RateLimit-Limit`, `-Remaining` and `-Reset`. Default false.
    pub x_ratelimit: bool,
    /// How long each phase of a request may take.
    pub timeouts: InboundTimeouts,
    /// How much of everything is accepted.
    pub caps: InboundCaps,
}

impl Default for InboundConfig {
    fn default() -> Self {
        Self {
            listen: loopback(8080),
            upstream: None,
            forwarding: Forwarding::default(),
            path_quirks: PathQuirks::default(),
            ambiguous_paths: AmbiguousPaths::Union,
            ipv6_prefix: Ipv6Prefix::DEFAULT.length(),
            headers: HeaderDialect::Draft10,
            x_ratelimit: false,
            timeouts: InboundTimeouts::default(),
            caps: InboundCaps::default(),
        }
    }
}

/// The server behind the gate: plain HTTP, a host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamAddress {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) explicit_port: bool,
}

impl UpstreamAddress {
    /// The host: a name, an IPv4 address, or an IPv6 address without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port; 80 if the URL has none.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `host:port` as a URL has it (IPv6 in brackets, the port only if it was written).
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.explicit_port { format!("{host}:{}", self.port) } else { host }
    }
}

impl fmt::Display for UpstreamAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.authority())
    }
}

/// Which rate-limit headers an answer carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderDialect {
    /// `RateLimit-Policy` and `RateLimit` as the IETF's draft-ietf-httpapi-ratelimit-headers-10 has them.
    Draft10,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset` and `RateLimit-Policy` as its version 06 (in use as "draft-7") had them.
    Draft7,
    /// None.
    None,
}

/// `[inbound.timeouts]`: how long each phase of a request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InboundTimeouts {
    /// From a request's first byte to the end of its head. Default 10 s.
    pub header: Duration,
    /// Between two pieces of a body, either way. Default 30 s.
    pub body: Duration,
    /// Connecting to the upstream. Default 5 s.
    pub connect: Duration,
    /// Until the head of the upstream's answer. Default 60 s.
    pub response: Duration,
    /// How long a connection is kept without a request. Default 75 s.
    pub idle: Duration,
    /// How long a shutdown waits for requests in flight. Default 30 s.
    pub shutdown: Duration,
}

impl Default for InboundTimeouts {
    fn default() -> Self {
        Self {
            header: Duration::from_secs(10),
            body: Duration::from_secs(30),
            connect: Duration::from_secs(5),
            response: Duration::from_secs(60),
            idle: Duration::from_secs(75),
            shutdown: Duration::from_secs(30),
        }
    }
}

/// `[inbound.caps]`: how much of everything is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InboundCaps {
    /// Connections open at once. Default 10,000.
    pub connections: u32,
    /// Connections of one client address (IPv6: of one network of `ipv6_prefix`) open at once; `None` for `"off"`. Default a quarter of
    /// `connections`. Loopback and trusted proxies are not counted.
    pub connections_per_client: Option<usize>,
    /// Bytes in a request's head. Default 64 KiB; 8 KiB to 1 MiB.
    pub header_bytes: usize,
    /// Header lines in a request. Default 100.
    pub headers: usize,
    /// Bytes in a request's body; `None` is unlimited, which is the default.
    pub body: Option<u64>,
    /// The least bytes a second of a request's body, over 10 s spent waiting for the client; `None` for `"off"`. Default
    /// 100. Upgrades and gRPC may be slower.
    pub body_rate: Option<u64>,
    /// Idle connections kept to the upstream. Default 128.
    pub pool_idle: usize,
}

impl Default for InboundCaps {
    fn default() -> Self {
        Self {
            connections: 10_000,
            connections_per_client: Some(2500),
            header_bytes: 64 << 10,
            headers: 100,
            body: None,
            body_rate: Some(100),
            pool_idle: 128,
        }
    }
}

/// `[api]`: the decision API and forward-auth.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ApiConfig {
    /// Where it listens; `None` for `listen = "off"`. Default 127.0.0.1:8082.
    pub listen: Option<SocketAddr>,
    /// The bearer token callers must show. Required beyond loopback.
    pub token: Option<SecretSource>,
    /// Names that a request's `Host` may have besides loopback's and the listener's own address, and whose web pages may
    /// ask. Any other is refused, unless the request shows the token or is forward-auth's.
    pub hosts: Vec<String>,
    /// Whether forward-auth is answered. Default true, unless a request can meet a limit on calls in flight
    /// ([`Plan::requests_meet_concurrency`](crate::Plan::requests_meet_concurrency)), which forward-auth can't keep.
    pub forward_auth: bool,
    /// The status with which forward-auth refuses: 400 to 599, default 429. nginx' `auth_request` takes 401 or 403.
    pub deny_status: u16,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self { listen: Some(loopback(8082)), token: None, hosts: Vec::new(), forward_auth: true, deny_status: 429 }
    }
}

/// `[admin]`: health and readiness.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AdminConfig {
    /// Where it listens; `None` for `listen = "off"`. Default 127.0.0.1:8083.
    pub listen: Option<SocketAddr>,
    /// The bearer token callers must show. Required beyond loopback.
    pub token: Option<SecretSource>,
    /// As [`ApiConfig::hosts`].
    pub hosts: Vec<String>,
}

impl Default for AdminConfig {
    fn default() -> Self {
        Self { listen: Some(loopback(8083)), token: None, hosts: Vec::new() }
    }
}

/// `[log]`: what is written to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogConfig {
    /// Text or JSON. Default text.
    pub format: LogFormat,
    /// The least important level that is written. Default info.
    pub level: LogLevel,
    /// The most lines about refusals in any second, at least 1. Default 10.
    pub refusals_per_second: u32,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: LogLevel::Info, refusals_per_second: 10 }
    }
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// How important a log line must be to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Only what broke.
    Error,
    /// Also what may break soon.
    Warn,
    /// Also what happened.
    Info,
    /// Also how.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// The word that the file uses: `error`, `warn`, `info`, `debug` or `trace`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}
