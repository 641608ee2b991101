//! The Tidegate server: reverse proxy, gateway for outbound calls, forward-auth and decision API.
//!
//! ```no_run
//! use tidegate_policy::{Policy, PolicySources};
//! use tidegate_server::{Server, signals};
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let policy = Policy::load(PolicySources::new().env(std::env::vars()))?;
//! let server = Server::new(&policy).bind()?;
//! println!("guarding {:?}", server.inbound());
//! server.run(signals::stop_signal(Default::default())?).await;
//! # Ok(())
//! # }
//! ```
//!
//! | listener | serves | limits |
//! | --- | --- | --- |
//! | inbound, 8080 | the reverse proxy, if the policy has an upstream | `inbound.caps`, `inbound.timeouts` |
//! | outbound, 8081 | the gateway to external APIs, with `[outbound]` | `outbound.connections`, 64 KiB per head |
//! | API, 8082 | the decision API and forward-auth, `/v1/…` | 1024 connections, 16 KiB per decision request |
//! | admin, 8083 | the dashboard, health, metrics, the state as JSON, trials, and changes by operators | 64 connections, 16 KiB per change |
//!
//! A listener has several addresses: TCP, and unix sockets with their permissions. Connections of the load balancers in
//! `proxy_protocol` begin with a header of the PROXY protocol. With `tls`, all TCP connections begin with a TLS handshake,
//! and the certificates are replaced when their files change.
//!
//! # Access
//! Every listener except inbound checks its token, if it has one. Beyond loopback a token is required. The admin listener
//! may have several; some may only be for reading. There, browsers exchange a token for a session, and health checks need
//! neither.
//!
//! Without a token, a listener accepts requests of programs on this machine, but not of web pages:
//! - `Host` must be loopback, the listener's own address or one of the section's `hosts` (else 421).
//! - `Origin` and `Sec-Fetch-Site`, if present, must name the listener's own page or a page of those `hosts` (else
//!   403).
//!
//! Forward-auth skips these two checks, because front servers pass on the headers of browsers.
//!
//! # Protocols of the proxy
//! The proxy speaks HTTP/1.1 and 1.0, and HTTP/2 by ALPN or, with `http2 = "always"`, with prior knowledge. To the
//! upstream it speaks HTTP/1.1, or with `upstream_http2` HTTP/2, to an `https` upstream over TLS. It streams bodies and
//! never collects them. If a client disconnects or resets its stream, its upstream request is cancelled. `CONNECT` and
//! `TRACE` are refused with 405. All upgrades of HTTP/1.1 except `h2c` pass.
//!
//! # Behaviour at the limits
//! - **Connections**: at the cap a new connection displaces another one. The first choice is the oldest that has never
//!   sent a whole head (503 if it has begun one), of the clients that have most of them, while such connections take
//!   more than a quarter of the places. Then comes the connection that has been idle longest between requests, then the
//!   oldest that has its response and still sends, and at last again those without a whole head. A connection with a
//!   request in progress is never displaced by the proxy and the gateway: if all have one, new connections wait. The
//!   other listeners displace those whose clients don't send the rest of their requests, or don't read their replies.
//! - **Connections of one client address** (IPv6: by `inbound.ipv6_prefix`) beyond `connections_per_client`: 503 and a
//!   close; with TLS only a close. Loopback and trusted proxies are not counted.
//! - **Descriptors**: the caps on connections are lower if the process may have too few, see [`descriptors`].
//! - **Requests sent at once** (pipelining), and the descriptors of one request to the rate limit service: after 16 (over
//!   HTTP/1.1) or 64 of them, or 16 KiB, other tasks have a turn.
//! - **Heads** that are too large or have too many lines: 431. **Slow heads**: 408. Unfinished heads take at most 32
//!   MiB in total, without those of which no more than 8 KiB have arrived. Beyond that the oldest gets 503.
//!   Unfinished TLS handshakes count as heads, and are closed without an answer.
//! - **Bodies** over the cap: 413. **Slow bodies**: 408 if less than `body_rate` arrives in 10 s of waiting for the
//!   client. This also applies to outbound calls and decision requests. Upgrades and gRPC may be slow.
//! - **The body of a refused request** is read and discarded up to 64 KiB, so that the connection can be reused. Beyond
//!   that the response is the connection's last. The body is then discarded for up to 30 s while it arrives at 64 KiB
//!   per second or more, so that the client can read the response. One in eight connections may do so at a time. For
//!   the others, and for blocked clients, the limit is 1 MiB or 2 s.
//! - **Shutdown** stops accepting and lets every request in flight finish, each response with `Connection: close`. It
//!   closes idle connections after two ticks, and ends the remaining connections after `timeouts.shutdown`.

mod access;
mod access_log;
mod alerts;
mod audit_log;
mod body;
mod bound_server;
mod client_limit;
mod connection;
mod dashboard;
pub mod descriptors;
mod displacement;
mod events;
mod finish;
mod fleet;
mod framing;
mod gateway;
mod hop_headers;
mod housekeeping;
mod http2;
mod linger;
mod listen_socket;
mod listener;
mod local_response;
pub mod log;
pub mod metrics;
mod permit_renewer;
mod preface;
mod proxy;
mod proxy_protocol;
mod refusal_cache;
mod refusal_log;
mod refused_clients;
mod rejections;
mod reload;
mod request_history;
pub mod signals;
mod socket;
mod state_cell;
mod states;
mod stream;
mod tls;
mod trace_context;
mod trial;
mod turn;
mod upgrade;
mod upstream;
mod watchdog;
mod wire;

use std::error::Error;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate::clock::SystemClock;
use tidegate::outbound::{CredentialError, Outbound, Snapshot, SnapshotError};
use tidegate::store::{AnyStore, Memory, Store};
use tidegate::{Gate, OpenError, Stores};
use tidegate_core::Clock;
use tidegate_policy::alerts::WebhookError;
use tidegate_policy::{
    AccessLogMode, Http2Mode, InboundConfig, ListenAddress, ListenConfig, Networks, Policy, SecretError,
};
pub use tidegate_runtime::file_watcher::FileWatcher;
use tokio::sync::Semaphore;

use crate::access_log::AccessLog;
use crate::alerts::AlertSet;
use crate::bound_server::OpenListener;
pub use crate::bound_server::{BoundServer, ShutdownSummary};
use crate::client_limit::ClientLimit;
use crate::dashboard::{Sessions, sign_in_limiter};
use crate::descriptors::{ConnectionCap, ConnectionCaps, Shortage};
use crate::events::{ProviderEventPublisher, server_events};
use crate::fleet::FleetView;
use crate::listener::{ConnectionHandler, HttpHandler, Listener, ListenerConfig};
use crate::metrics::{History, RequestMetrics};
use crate::preface::Preface;
use crate::refusal_log::RefusalLog;
use crate::rejections::HeadRejections;
pub use crate::reload::{ReloadError, ReloadHandle, ReloadReport};
use crate::reload::{Reloader, reload_channel};
use crate::request_history::RequestHistory;
use crate::state_cell::{CurrentService, ListenerState, StateCell};
use crate::states::{Engine, ListenerStates, SharedParts, StateCells};
use crate::tls::ListenerTls;
pub use crate::tls::{TlsError, certificate_faults, tls_connector};
use crate::wire::resp::RespHandler;

/// The maximum number of connections of the API listener. Front servers and programs keep their connections open.
const API_CONNECTIONS: usize = 1024;
/// The maximum number of connections of the rate limit service. Each carries many calls at once.
const RLS_CONNECTIONS: usize = 1024;
/// The maximum number of connections with the Redis protocol, of which each process of a program has several.
const RESP_CONNECTIONS: usize = 16_384;
/// The time for which a connection without a request is kept, where it is as good as unlimited.
const MAX_IDLE: Duration = Duration::from_secs(10 * 366 * 86_400);
/// The maximum number of connections of the admin listener.
const ADMIN_CONNECTIONS: usize = 64;
/// The maximum size of a request head on the API and admin listeners, and on the outbound listener, in bytes.
const INTERNAL_HEADER_BYTES: usize = 64 << 10;

/// A function that looks up the value of an environment variable.
type EnvLookup = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// A function that reads the policy again, given the present one.
type PolicySource = Arc<dyn Fn(&Policy) -> Result<Policy, Box<dyn Error + Send + Sync>> + Send + Sync>;

/// A server to be started: a policy, and the gate that decides by it.
pub struct Server<S: Store = Memory, C: Clock = SystemClock> {
    gate: Gate<S, C>,
    outbound: Option<Outbound<S, C>>,
    policy: Policy,
    env: EnvLookup,
    policy_source: Option<PolicySource>,
    policy_files: Option<FileWatcher>,
    followed_clock: Option<SystemClock>,
}

/// The reason why a server can't start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A listener's address is in use or doesn't belong to this machine.
    #[error("{listener}.listen: can't listen on {address}: {source}")]
    Bind {
        /// `inbound`, `outbound`, `api` or `admin`.
        listener: &'static str,
        /// The address.
        address: ListenAddress,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The certificates of a listener can't be used.
    #[error("{listener}.tls: {source}")]
    Tls {
        /// `inbound`, `outbound`, `api` or `admin`.
        listener: &'static str,
        /// The cause.
        source: TlsError,
    },
    /// The certificates of the trust in an `https` upstream can't be used.
    #[error("inbound.upstream_tls: {0}")]
    UpstreamTls(TlsError),
    /// A listener is open to the network, and has no token and requires no certificates of clients.
    #[error("{listener}.listen = \"{address}\" is beyond loopback and needs {listener}.token = \"env:NAME\"")]
    TokenRequired {
        /// `outbound`, `api` or `admin`.
        listener: &'static str,
        /// The address.
        address: ListenAddress,
    },
    /// A listener's token can't be read.
    #[error("{setting}: {source}")]
    Token {
        /// The setting: `api.token`, `admin.tokens.NAME`.
        setting: String,
        /// The cause.
        source: SecretError,
    },
    /// Two tokens of a listener are the same, so that the rights of a request would be uncertain.
    #[error("{section}: the tokens `{first}` and `{second}` are the same secret")]
    SameToken {
        /// The section of the listener.
        section: &'static str,
        /// The name of one of them.
        first: String,
        /// The name of the other.
        second: String,
    },
    /// A provider's credential can't be read, or isn't valid in the part of a request that carries it.
    #[error("outbound.provider.{provider}.credentials: {source}")]
    Credential {
        /// The provider.
        provider: String,
        /// The cause.
        source: CredentialError,
    },
    /// The secret of an alert's receiver can't be read, or isn't valid.
    #[error("alert.{alert}: {source}")]
    Alert {
        /// The alert.
        alert: String,
        /// The cause.
        source: WebhookError,
    },
    /// The system's root certificates can't be read, so no provider or webhook can be trusted.
    #[error("the system's root certificates can't be read: {0}")]
    RootCertificates(io::Error),
    /// The snapshot file of the outbound state can't be used.
    #[error("outbound.snapshot: {0}")]
    Snapshot(#[from] SnapshotError),
    /// An action that matches proxied requests counts by a key part that no request has.
    #[error("the limit `{limit}` counts by `{part}`, which a proxied request doesn't have")]
    MissingKeyPart {
        /// The limit.
        limit: String,
        /// The key part.
        part: String,
    },
}

impl Server {
    /// Returns a server for a policy, with state in memory and the machine's clock.
    pub fn new(policy: &Policy) -> Self {
        let clock = SystemClock::new();
        let mut server = Self::from_gate(Gate::in_memory(policy, clock.clone()), policy);
        server.outbound = Outbound::in_memory(policy, clock.clone());
        server.follow_clock(clock)
    }
}

impl Server<AnyStore> {
    /// Returns a server for a policy, with state in the store of `store.url` and the machine's clock. Needs a tokio
    /// runtime with IO and time.
    ///
    /// # Errors
    /// The store can't be used; see [`OpenError`].
    pub async fn open(policy: &Policy) -> Result<Self, OpenError> {
        let clock = SystemClock::new();
        let stores = Stores::open(policy, |name: &str| std::env::var(name).ok()).await?;
        let mut server = Self::from_gate(stores.gate(policy, clock.clone())?, policy);
        server.outbound = stores.outbound(policy, clock.clone())?;
        Ok(server.follow_clock(clock))
    }
}

impl<S: Store, C: Clock + Clone> Server<S, C> {
    /// Returns a server for a gate that was made from this policy.
    pub fn from_gate(gate: Gate<S, C>, policy: &Policy) -> Self {
        let env = Box::new(|name: &str| std::env::var(name).ok());
        Self {
            gate,
            outbound: None,
            policy: policy.clone(),
            env,
            policy_source: None,
            policy_files: None,
            followed_clock: None,
        }
    }

    /// Serves these providers, which were made from the same policy. [`Server::new`] does so by itself.
    #[must_use]
    pub fn outbound(mut self, outbound: Outbound<S, C>) -> Self {
        self.outbound = Some(outbound);
        self
    }

    /// Moves the gate's clock towards the wall clock while the server runs, and warns once if the two are more than a
    /// second apart. [`Server::new`] does so by itself.
    #[must_use]
    pub fn follow_clock(mut self, clock: SystemClock) -> Self {
        self.followed_clock = Some(clock);
        self
    }

    /// Looks up tokens (`env:NAME`) with this function instead of in the environment of the process.
    #[must_use]
    pub fn env(mut self, look_up: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        self.env = Box::new(look_up);
        self
    }

    /// Reads the policy again with this function, when a [`ReloadHandle`] asks for it. The function gets the present policy,
    /// whose [`Policy::load_next`] reads the next one. It runs on a blocking thread.
    #[must_use]
    pub fn policy_source(
        mut self,
        read: impl Fn(&Policy) -> Result<Policy, Box<dyn Error + Send + Sync>> + Send + Sync + 'static,
    ) -> Self {
        self.policy_source = Some(Arc::new(read));
        self
    }

    /// Reloads when these files change, while the policy in force has `reload.watch`. The watcher must be older than the
    /// policy, so that no change is missed. A file that is gone changes nothing. One that may be half-written isn't
    /// applied ([`ReloadError::Removed`]), and watching goes on until a [`ReloadHandle`] reloads without `reload.watch`.
    #[must_use]
    pub fn policy_files(mut self, files: FileWatcher) -> Self {
        self.policy_files = Some(files);
        self
    }

    /// Opens the listeners. Clients can connect from then on; [`BoundServer::run`] answers them. Needs a tokio runtime
    /// with IO and time.
    ///
    /// # Errors
    /// See [`ServeError`]. On an error no listener stays open.
    pub fn bind(self) -> Result<BoundServer<S, C>, ServeError> {
        let admin = self.policy.admin();
        let events = Arc::new(server_events(self.gate.clock().now()));
        let (reload, reload_requests) = reload_channel();
        let parts = Arc::new(SharedParts {
            env: self.env,
            permit_renewer: Arc::default(),
            refusals: Arc::new(RefusalLog::new(self.policy.log().refusals_per_second, Arc::clone(&events))),
            access_log: AccessLog::new(self.policy.log().access, self.gate.clock().clone()),
            metrics: Arc::new(RequestMetrics::new(admin.metrics)),
            events,
            reload,
            history: History::default(),
            fleet: FleetView::new(self.policy.store(), self.gate.clock().now()),
            sessions: Sessions::default(),
            sign_in_limiter: Arc::new(sign_in_limiter(self.gate.clock().clone())),
            event_streams: Arc::default(),
            request_history: admin
                .history_bytes
                .filter(|_| !admin.listen.is_off())
                .map(|bytes| Arc::new(RequestHistory::new(bytes))),
            trials: Arc::new(Semaphore::new(1)),
            draining: Arc::default(),
            started_at: self.gate.clock().now(),
            connections: OnceLock::new(),
            tls: OnceLock::new(),
        });
        parts.remember_requests(&self.gate, 0);
        let alerts = Arc::new(AlertSet::new(&self.policy, &parts, None)?);
        // The dashboard asks every second, and the audit log has its changes.
        let no_log = AccessLog::new(AccessLogMode::Off, self.gate.clock().clone());
        let is_watched = self.policy.reload().watch;
        let engine = Engine { policy: self.policy, gate: self.gate, providers: self.outbound, alerts, is_watched };
        let states = ListenerStates::new(&engine, &parts, None)?;
        if let Some(admin) = &states.admin {
            parts.sessions.follow(&admin.access);
        }
        let snapshot = match &engine.providers {
            Some(providers) => {
                let file = providers.config().snapshot.as_ref();
                file.map(|file| Snapshot::restore(providers, file)).transpose()?.map(Arc::new)
            }
            None => None,
        };
        let configs = ListenerConfigs { policy: &engine.policy, caps: ConnectionCaps::of(&engine.policy) };
        if let Some(shortage) = Shortage::of(&engine.policy) {
            tracing::warn!("{shortage}");
        }
        let (log, refusals) = (&parts.access_log, &parts.refusals);
        let (inbound, proxy) = open_http("inbound", Some(configs.inbound()), states.proxy, log, refusals)?.unzip();
        let (outbound, gateway) = open_http("outbound", configs.outbound(), states.gateway, log, refusals)?.unzip();
        let (api, api_cell) = open_http("api", Some(configs.api()), states.api, log, refusals)?.unzip();
        let (rls, rls_cell) = open_http("rls", configs.rls(), states.rls, log, refusals)?.unzip();
        let (resp, resp_cell) =
            open("resp", configs.resp(), states.resp, log, refusals, |cell| RespHandler(cell))?.unzip();
        let (admin, admin_cell) = open_http("admin", Some(configs.admin()), states.admin, &no_log, refusals)?.unzip();
        let all = [&inbound, &outbound, &api, &rls, &resp, &admin];
        parts.tls.get_or_init(|| all.into_iter().flatten().filter_map(|open| open.tls().cloned()).collect());
        let listeners = [("inbound", &inbound), ("outbound", &outbound), ("api", &api), ("rls", &rls), ("resp", &resp)];
        let listeners = listeners.into_iter().filter_map(|(name, open)| Some((name, open.as_ref()?.watchdog())));
        parts.connections.get_or_init(|| listeners.map(|(name, watchdog)| (name, Arc::clone(watchdog))).collect());
        // Last, because only one server can observe the providers.
        if let Some(providers) = &engine.providers {
            let publisher = ProviderEventPublisher::new(Arc::clone(&parts.events));
            providers.observe(move |event| publisher.publish(event));
        }
        let cells = StateCells {
            engine: StateCell::new(engine),
            proxy,
            gateway,
            api: api_cell,
            rls: rls_cell,
            resp: resp_cell,
            admin: admin_cell,
        };
        Ok(BoundServer {
            reloader: Reloader::new(cells, parts, self.policy_source, snapshot.clone(), reload_requests),
            policy_files: self.policy_files,
            snapshot,
            inbound,
            outbound,
            api,
            rls,
            resp,
            admin,
            followed_clock: self.followed_clock,
        })
    }
}

/// The limits of the listeners that a policy opens.
struct ListenerConfigs<'p> {
    policy: &'p Policy,
    caps: ConnectionCaps,
}

impl ListenerConfigs<'_> {
    fn inbound(&self) -> (&ListenConfig, ListenerConfig) {
        let inbound = self.policy.inbound();
        let caps = &inbound.caps;
        let config = ListenerConfig {
            header_bytes: caps.header_bytes,
            headers: caps.headers,
            forwards: true,
            ..self.limits(&inbound.listen, self.caps.inbound, caps.connections_per_client)
        };
        (&inbound.listen, config)
    }

    fn outbound(&self) -> Option<(&ListenConfig, ListenerConfig)> {
        let outbound = self.policy.outbound()?;
        let limits = self.limits(&outbound.listen, self.caps.outbound, outbound.connections_per_client);
        Some((&outbound.listen, ListenerConfig { forwards: true, ..limits }))
    }

    fn api(&self) -> (&ListenConfig, ListenerConfig) {
        let api = self.policy.api();
        (&api.listen, self.limits(&api.listen, self.caps.api, api.connections_per_client))
    }

    fn rls(&self) -> Option<(&ListenConfig, ListenerConfig)> {
        let rls = self.policy.rls()?;
        Some((&rls.listen, self.limits(&rls.listen, self.caps.rls, rls.connections_per_client)))
    }

    fn resp(&self) -> Option<(&ListenConfig, ListenerConfig)> {
        let resp = self.policy.resp()?;
        let mut config = self.limits(&resp.listen, self.caps.resp, resp.connections_per_client);
        // Pools of clients keep connections for as long as they like, as with Redis.
        config.timeouts.idle = MAX_IDLE;
        Some((&resp.listen, config))
    }

    fn admin(&self) -> (&ListenConfig, ListenerConfig) {
        let admin = self.policy.admin();
        (&admin.listen, self.limits(&admin.listen, self.caps.admin, admin.connections_per_client))
    }

    /// The limits of a listener, as far as no section says otherwise.
    fn limits(&self, listen: &ListenConfig, cap: ConnectionCap, per_client: Option<usize>) -> ListenerConfig {
        let InboundConfig { timeouts, caps, forwarding, .. } = self.policy.inbound();
        let ipv6_prefix = self.policy.plan().ipv6_prefix();
        let client_limit =
            per_client.map(|most| ClientLimit::new(cap.of_client(most), ipv6_prefix, forwarding.trusted.clone()));
        ListenerConfig {
            connections: cap.connections,
            client_limit,
            header_bytes: INTERNAL_HEADER_BYTES,
            headers: listener::DEFAULT_MAX_HEADERS,
            timeouts: *timeouts,
            body_rate: caps.body_rate,
            forwards: false,
            preface: Preface {
                proxies: Networks::new(listen.proxy_protocol.iter().copied()),
                tls: None,
                http2: listen.http2,
            },
        }
    }
}

/// An open listener, and the state of its connections.
type Opened<T> = (OpenListener, Arc<StateCell<T>>);

/// Opens a listener for HTTP whose connections share this state. `None` if the policy has none.
fn open_http<T: ListenerState>(
    listener: &'static str,
    config: Option<(&ListenConfig, ListenerConfig)>,
    state: Option<T>,
    access_log: &Arc<AccessLog>,
    refusals: &Arc<RefusalLog>,
) -> Result<Option<Opened<T>>, ServeError> {
    open(listener, config, state, access_log, refusals, |cell| {
        let (log, refusals) = (Arc::clone(access_log), Arc::clone(refusals));
        HttpHandler(Arc::new(move |client| {
            CurrentService::new(listener, Arc::clone(&cell), Arc::clone(&log), Arc::clone(&refusals), client)
        }))
    })
}

/// Opens a listener whose connections share this state. `None` if the policy has none.
fn open<T, H: ConnectionHandler>(
    listener: &'static str,
    config: Option<(&ListenConfig, ListenerConfig)>,
    state: Option<T>,
    access_log: &Arc<AccessLog>,
    refusals: &Arc<RefusalLog>,
    handler: impl FnOnce(Arc<StateCell<T>>) -> H,
) -> Result<Option<Opened<T>>, ServeError> {
    let (Some((listen, mut config)), Some(state)) = (config.filter(|(listen, _)| !listen.is_off()), state) else {
        return Ok(None);
    };
    let has_http2 = listen.http2 != Http2Mode::Never;
    let load = |tls| ListenerTls::load(listener, tls, has_http2, access_log.now());
    let tls = listen.tls.as_ref().map(load).transpose();
    config.preface.tls = tls.map_err(|source| ServeError::Tls { listener, source })?;
    let rejections = HeadRejections { listener, access_log: Arc::clone(access_log), refusals: Arc::clone(refusals) };
    let bound = Listener::bind(listen, config, rejections).map_err(|(address, source)| ServeError::Bind {
        listener,
        address,
        source,
    })?;
    let cell = StateCell::new(state);
    Ok(Some((OpenListener::new(bound, handler(Arc::clone(&cell))), cell)))
}
