//! The sections of a policy file, checked and with every default filled in.

use std::fmt;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate_core::Span;

use crate::forwarding::Forwarding;
use crate::listen::{CertificateFiles, ListenConfig};
use crate::path::{AmbiguousPaths, PathQuirks};
use crate::quantity::Quantity;
use crate::ratelimit_yaml::{Amount, LimitTable};
use crate::secret::SecretSource;

/// `[inbound]`: the gate in front of a server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct InboundConfig {
    /// The addresses on which the gate listens. Default 127.0.0.1:8080.
    pub listen: ListenConfig,
    /// The server behind the gate. `None` means that no proxy runs: the policy serves only the decision API,
    /// forward-auth or a Rust program.
    pub upstream: Option<UpstreamAddress>,
    /// The trust of an `https` upstream.
    pub upstream_tls: UpstreamTls,
    /// True if the gate speaks HTTP/2 to the upstream: by ALPN with TLS, else with prior knowledge. Default false.
    pub upstream_http2: bool,
    /// The proxies that are trusted, and the forwarding header that they set. By default no proxy is trusted.
    pub forwarding: Forwarding,
    /// The spellings that the upstream treats as the same path beyond RFC 3986. By default `%2F` is a slash; see
    /// [`Matcher`](crate::Matcher).
    pub path_quirks: PathQuirks,
    /// The treatment of paths that can be read in several ways. Default [`AmbiguousPaths::Union`].
    pub ambiguous_paths: AmbiguousPaths,
    /// The end of calls under a limit on calls in flight whose client goes away. Default [`OnDisconnect::Close`].
    pub on_disconnect: OnDisconnect,
    /// The number of bits of an IPv6 address that are one client: 32 to 64. Default 64.
    pub ipv6_prefix: u8,
    /// The rate-limit headers of responses. Default [`HeaderDialect::Draft10`].
    pub headers: HeaderDialect,
    /// True if responses also carry `X-RateLimit-Limit`, `-Remaining` and `-Reset`. Default false.
    pub x_ratelimit: bool,
    /// The time limits of the phases of a request.
    pub timeouts: InboundTimeouts,
    /// The limits on connections and on the sizes of requests.
    pub caps: InboundCaps,
}

/// `inbound.upstream_tls`: the trust of an `https` upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UpstreamTls {
    /// The PEM file of the certificates that sign the upstream's. Default the system's.
    pub ca: Option<PathBuf>,
    /// The name that the upstream's certificate must have. Default the host of its URL.
    pub server_name: Option<String>,
    /// The certificate that the gate shows. By default none.
    pub certificate: Option<CertificateFiles>,
}

/// The server behind the gate: a host and a port, or a unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamAddress {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) explicit_port: bool,
    pub(crate) unix_path: Option<PathBuf>,
    pub(crate) https: bool,
}

impl UpstreamAddress {
    /// The host: a name, an IPv4 address, or an IPv6 address without brackets. `localhost` for a unix socket.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// True if the gate uses TLS to it.
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// The port; 80, or 443 for `https`, if the URL has none.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The path of a unix socket, if the upstream is one.
    pub fn unix_path(&self) -> Option<&Path> {
        self.unix_path.as_deref()
    }

    /// The `host:port` of a URL: IPv6 in brackets, the port only if it was written.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.explicit_port { format!("{host}:{}", self.port) } else { host }
    }
}

impl fmt::Display for UpstreamAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.unix_path {
            Some(path) => write!(f, "unix:{}", path.display()),
            None => write!(f, "{}://{}", if self.https { "https" } else { "http" }, self.authority()),
        }
    }
}

/// The end of a call under a limit on calls in flight whose client goes away before the reply has begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDisconnect {
    /// The connection to the upstream is closed, so that a server that watches it stops. The call keeps its permit until its
    /// work is over or likely over, for at most 30 s.
    #[default]
    Close,
    /// The call goes on, for at most [`InboundTimeouts::response`], and its reply is discarded.
    Finish,
}

/// The rate-limit headers of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderDialect {
    /// `RateLimit-Policy` and `RateLimit` of the IETF's draft-ietf-httpapi-ratelimit-headers-10.
    Draft10,
    /// `RateLimit-Limit`, `-Remaining`, `-Reset` and `RateLimit-Policy` of its version 06, known as "draft-7".
    Draft7,
    /// No such headers.
    None,
}

/// `[inbound.timeouts]`: the time limits of the phases of a request. Each is above zero and at most ten years.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InboundTimeouts {
    /// The time from a request's first byte to the end of its head. Default 10 s.
    pub header: Duration,
    /// The time between two pieces of a body, in either direction. Default 30 s.
    pub body: Duration,
    /// The time to connect to the upstream. Default 5 s.
    pub connect: Duration,
    /// The time until the head of the upstream's response. Default 60 s.
    pub response: Duration,
    /// The time for which a connection is kept between two requests. Default 75 s.
    pub idle: Duration,
    /// The time for which a shutdown waits for requests in flight. Default 30 s.
    pub shutdown: Duration,
}

/// `[inbound.caps]`: the limits on connections and on the sizes of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InboundCaps {
    /// The most connections open at once. Default 10,000; 1 to 1,000,000.
    pub connections: u32,
    /// The most connections open at once from one client address (IPv6: from one network of `ipv6_prefix`). Default a
    /// quarter of `connections`; `None` for `"off"`. Loopback and trusted proxies are not counted.
    pub connections_per_client: Option<usize>,
    /// The most bytes in a request's head. Default 64 KiB; 8 KiB to 1 MiB.
    pub header_bytes: usize,
    /// The most header lines in a request. Default 100; 1 to 10,000.
    pub headers: usize,
    /// The most bytes in a request's body; `None` is unlimited, which is the default.
    pub body: Option<u64>,
    /// The lowest rate of a request's body in bytes per second, over 10 s of waiting for the client. Default 100;
    /// `None` for `"off"`. Upgrades and gRPC may be slower.
    pub body_rate: Option<u64>,
    /// The most idle connections kept to the upstream. Default 128; 0 to 100,000.
    pub pool_idle: usize,
}

/// `[api]`: the decision API and forward-auth.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ApiConfig {
    /// The addresses on which it listens; none for `listen = "off"`. Default 127.0.0.1:8082.
    pub listen: ListenConfig,
    /// The bearer token that callers must send. Required beyond loopback, unless clients need a certificate.
    pub token: Option<SecretSource>,
    /// The names that a request's `Host` may have besides loopback's and the listener's own address. Web pages of these
    /// names may send requests, too. Any other request is refused, unless it carries the token or is a forward-auth
    /// request.
    pub hosts: Vec<String>,
    /// The most connections open at once from one client address. Loopback and trusted proxies are not counted. Default
    /// 512, half of all; `None` for `"off"`.
    pub connections_per_client: Option<usize>,
    /// True if forward-auth is served. Default true, unless a request can meet a limit on calls in flight
    /// ([`Plan::requests_meet_concurrency`](crate::Plan::requests_meet_concurrency)), which forward-auth can't keep.
    pub forward_auth: bool,
    /// The status of a refusal by forward-auth: 400 to 599, default 429. nginx' `auth_request` accepts 401 or 403.
    pub deny_status: u16,
    /// The other servers whose paths are answered, too. Default none.
    pub compat: Vec<CompatibleServer>,
}

/// A server whose HTTP API the decision API also has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompatibleServer {
    /// [limitador](https://github.com/Kuadrant/limitador): `/check`, `/report`, `/check_and_report`, `/limits/NAMESPACE`,
    /// `/counters/NAMESPACE` and `/status`, about the limits of [`RlsConfig::files`].
    Limitador,
    /// [throttlecrab](https://github.com/lazureykis/throttlecrab): `/throttle` and `/health`.
    Throttlecrab,
}

impl CompatibleServer {
    /// The name in policies.
    pub fn name(self) -> &'static str {
        match self {
            Self::Limitador => "limitador",
            Self::Throttlecrab => "throttlecrab",
        }
    }
}

/// `[rls]`: Envoy's rate limit service, over gRPC.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RlsConfig {
    /// The addresses on which it listens; none for `listen = "off"`. Default 127.0.0.1:8084. Its `http2` is
    /// [`Http2Mode::Always`](crate::Http2Mode::Always).
    pub listen: ListenConfig,
    /// The bearer token that callers must send. Required beyond loopback, unless clients need a certificate.
    pub token: Option<SecretSource>,
    /// The most connections open at once from one client address. Loopback and trusted proxies are not counted. Default
    /// 512, half of all; `None` for `"off"`.
    pub connections_per_client: Option<usize>,
    /// The files with limits in the format of Envoy's ratelimit service, and the directories whose YAML files are read.
    pub files: Vec<PathBuf>,
    /// True if several files may have one domain. Default false.
    pub merge_domains: bool,
    /// The count of the limits of these files. Default [`RlsAlgorithm::Strict`].
    pub algorithm: RlsAlgorithm,
    /// The limits of these files, which are also actions of the plan. `None` without files.
    pub limits: Option<Arc<LimitTable>>,
    pub(crate) watched: WatchedFiles,
}

/// Files and directories, each with its state just before it was read.
pub(crate) type WatchedFiles = Vec<(PathBuf, Metadata)>;

impl RlsConfig {
    /// The files and directories that were read, each with its state just before.
    pub fn watched_files(&self) -> impl Iterator<Item = (&Path, &Metadata)> {
        self.watched.iter().map(|(path, metadata)| (path.as_path(), metadata))
    }
}

/// The count of a limit of `rls.files`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RlsAlgorithm {
    /// A strict window: no period of the unit's length, wherever it begins, admits more.
    #[default]
    Strict,
    /// As in the original, each unit of the clock begins with a count of 0: a period across two units may admit twice as
    /// much. Weeks begin on Monday; months and years are those of the calendar. All are in UTC.
    Fixed,
}

impl RlsAlgorithm {
    pub(crate) fn quantity(self, amount: Amount) -> Quantity {
        let (requests, unit) = match amount {
            Amount::Unlimited => return Quantity::Unlimited,
            Amount::PerUnit { requests, unit } => (requests.into(), unit),
            // The original's windows begin with a first hit, and not with a unit of the clock.
            Amount::PerSeconds { hits, seconds } => {
                return Quantity::Window { limit: hits, window: Span::from_secs(seconds) };
            }
        };
        match self {
            Self::Strict => Quantity::Window { limit: requests, window: Span::from_secs(unit.seconds()) },
            Self::Fixed => Quantity::Quota { limit: requests, unit: unit.into(), zone: None },
        }
    }
}

/// `[resp]`: the Redis protocol.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RespConfig {
    /// The addresses on which it listens; none for `listen = "off"`. Default 127.0.0.1:8085.
    pub listen: ListenConfig,
    /// The password that callers must give with `AUTH`. Required beyond loopback, unless clients need a certificate.
    pub token: Option<SecretSource>,
    /// The most connections open at once from one client address. Loopback and trusted proxies are not counted. Default
    /// 8,192, half of all; `None` for `"off"`.
    pub connections_per_client: Option<usize>,
}

/// `[admin]`: health, metrics, the state and changes to it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AdminConfig {
    /// The addresses on which it listens; none for `listen = "off"`. Default 127.0.0.1:8083.
    pub listen: ListenConfig,
    /// The bearer token that callers must send, with full rights. Beyond loopback this or one of `tokens` is required.
    pub token: Option<SecretSource>,
    /// More tokens, of which callers send one. At most 64.
    pub tokens: Vec<NamedToken>,
    /// The same as [`ApiConfig::hosts`].
    pub hosts: Vec<String>,
    /// The most connections open at once from one client address. Loopback and trusted proxies are not counted. Default
    /// 32, half of all; `None` for `"off"`.
    pub connections_per_client: Option<usize>,
    /// True to count requests and calls, and to answer `/metrics`. Default true.
    pub metrics: bool,
    /// The maximum memory for the requests of the last hour, over which other limits can be tried, in bytes. `None`
    /// keeps none. Default 16 MiB.
    pub history_bytes: Option<usize>,
}

/// A bearer token with a name, by which log lines tell its requests from others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedToken {
    /// The name: at most 64 letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// The place of the token.
    pub source: SecretSource,
    /// True if requests with the token can't change anything. Default false.
    pub read_only: bool,
}

/// `[reload]`: the replacement of the policy while the server runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReloadConfig {
    /// True if a change of the policy file reloads it. Default false.
    pub watch: bool,
}

/// `[log]`: the log on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LogConfig {
    /// Text or JSON. Default text.
    pub format: LogFormat,
    /// The least important level that is written. Default info.
    pub level: LogLevel,
    /// The requests that each get a line. Default [`AccessLogMode::Off`].
    pub access: AccessLogMode,
    /// The most lines about refusals in any second, unless each refused request gets a line. Default 10; 1 to
    /// 1,000,000.
    pub refusals_per_second: u32,
}

impl Default for LogConfig {
    fn default() -> Self {
        crate::read::default_log()
    }
}

/// The requests that each get a line in the log when they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessLogMode {
    /// None.
    Off,
    /// Those that weren't admitted, or that a limit in shadow mode would have refused.
    Refused,
    /// All.
    All,
}

/// The form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// The lowest importance of the log lines that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Only failures.
    Error,
    /// Also signs of possible failures.
    Warn,
    /// Also events.
    Info,
    /// Also the details of events.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// The words of a policy.
    pub(crate) const WORDS: [(&'static str, Self); 5] = [
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];

    /// The word in the file: `error`, `warn`, `info`, `debug` or `trace`.
    pub fn as_str(self) -> &'static str {
        Self::WORDS[self as usize].0
    }
}
