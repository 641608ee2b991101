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
//! server.run(signals::stop_signal()?).await;
//! # Ok(())
//! # }
//! ```
//!
//! | listener | serves | limits |
//! | --- | --- | --- |
//! | inbound, 8080 | the reverse proxy, if the policy has an upstream | `inbound.caps`, `inbound.timeouts` |
//! | outbound, 8081 | the gateway to external APIs, with `[outbound]` | `outbound.connections`, 64 KiB per head |
//! | API, 8082 | the decision API and forward-auth, `/v1/…` | 1024 connections, 16 KiB per decision request |
//! | admin, 8083 | `/healthz`, `/readyz` | 64 connections |
//!
//! # Access
//! Every listener except inbound checks its token, if it has one. Beyond loopback a token is required.
//!
//! Without a token, a listener accepts requests of programs on this machine, but not of web pages:
//! - `Host` must be loopback, the listener's own address or one of the section's `hosts` (else 421).
//! - `Origin` and `Sec-Fetch-Site`, if present, must name the listener's own page or a page of those `hosts` (else
//!   403).
//!
//! Forward-auth skips these two checks, because front servers pass on the headers of browsers.
//!
//! # Protocols of the proxy
//! The proxy speaks HTTP/1.1 and 1.0 on both sides. It streams bodies and never collects them. If a client disconnects,
//! its upstream request is cancelled. HTTP/2 isn't supported: guard a gRPC service with the tower layer of the crate
//! `tidegate`, or with forward-auth. `CONNECT` and `TRACE` are refused with 405. All upgrades except `h2c` pass.
//!
//! # Behaviour at the limits
//! - **Connections**: at the cap a new connection displaces another one. The first choice is the connection that has
//!   been idle longest between requests, or silent since it was accepted. The second is the oldest with an unfinished
//!   head (503), so a client that sends its head slowly may lose its connection. The third is the oldest that has its
//!   response and still sends. A connection with a request in progress is never displaced: if all have one, new
//!   connections wait.
//! - **Connections of one client address** (IPv6: by `inbound.ipv6_prefix`) beyond `connections_per_client`: 503 and a
//!   close. Loopback and trusted proxies are not counted.
//! - **Heads** that are too large or have too many lines: 431. **Slow heads**: 408. Unfinished heads take at most 32
//!   MiB in total, without those of which no more than 8 KiB have arrived. Beyond that the oldest gets 503.
//! - **Bodies** over the cap: 413. **Slow bodies**: 408 if less than `body_rate` arrives in 10 s of waiting for the
//!   client. This also applies to outbound calls and decision requests. Upgrades and gRPC may be slow.
//! - **The body of a refused request** is read and discarded up to 64 KiB, so that the connection can be reused. Beyond
//!   that the response is the connection's last. The body is then discarded for up to 30 s while it arrives at 64 KiB
//!   per second or more, so that the client can read the response. One in eight connections may do so at a time. For
//!   the others, and for blocked clients, the limit is 1 MiB or 2 s.
//! - **Shutdown** stops accepting and lets every request in flight finish, each response with `Connection: close`. It
//!   closes idle connections after two ticks, and ends the remaining connections after `timeouts.shutdown`.

mod access;
mod body;
mod bound_server;
mod client_limit;
mod connection;
pub mod descriptors;
mod displacement;
mod framing;
mod gateway;
mod hop_headers;
mod housekeeping;
mod linger;
mod listener;
mod local_response;
pub mod log;
mod permit_renewer;
mod proxy;
mod refusal_cache;
mod refusal_log;
mod rejections;
pub mod signals;
mod snapshots;
mod socket;
mod upgrade;
mod upstream;
mod watchdog;
mod wire;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use http::StatusCode;
use tidegate::clock::SystemClock;
use tidegate::outbound::{CredentialError, Outbound, Snapshot, SnapshotError};
use tidegate::reply::Replies;
use tidegate::store::{AnyStore, Memory, Store};
use tidegate::{Gate, OpenError, Stores};
use tidegate_core::Clock;
use tidegate_policy::{InboundConfig, KeyPart, Policy, Secret, SecretError, SecretSource};

use crate::access::Access;
use crate::bound_server::OpenListener;
pub use crate::bound_server::{BoundServer, ShutdownSummary};
use crate::gateway::{GatewayError, GatewayState};
use crate::listener::{Listener, ListenerConfig};
use crate::permit_renewer::PermitRenewer;
use crate::proxy::ProxyState;
use crate::refusal_log::RefusalLog;
use crate::watchdog::PhaseTimeouts;
use crate::wire::admin::AdminState;
use crate::wire::http_api::ApiState;

/// The maximum number of connections of the API listener. Front servers and programs keep their connections open.
const API_CONNECTIONS: usize = 1024;
/// The maximum number of connections of the admin listener.
const ADMIN_CONNECTIONS: usize = 64;
/// The maximum size of a request head on the API and admin listeners, and on the outbound listener, in bytes.
const INTERNAL_HEADER_BYTES: usize = 64 << 10;

/// A function that looks up the value of an environment variable.
type EnvLookup = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// A server to be started: a policy, and the gate that decides by it.
pub struct Server<S: Store = Memory, C: Clock = SystemClock> {
    gate: Gate<S, C>,
    outbound: Option<Outbound<S, C>>,
    policy: Policy,
    env: EnvLookup,
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
        address: SocketAddr,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A listener is open to the network and has no token.
    #[error("{listener}.listen = \"{address}\" is beyond loopback and needs {listener}.token = \"env:NAME\"")]
    TokenRequired {
        /// `outbound`, `api` or `admin`.
        listener: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// A listener's token can't be read.
    #[error("{listener}.token: {source}")]
    Token {
        /// `outbound`, `api` or `admin`.
        listener: &'static str,
        /// The cause.
        source: SecretError,
    },
    /// A provider's credential can't be read, or isn't valid in the part of a request that carries it.
    #[error("outbound.provider.{provider}.credentials: {source}")]
    Credential {
        /// The provider.
        provider: String,
        /// The cause.
        source: CredentialError,
    },
    /// The system's root certificates can't be read, so no provider can be trusted.
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
        Self { gate, outbound: None, policy: policy.clone(), env, followed_clock: None }
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

    /// Opens the listeners. Clients can connect from then on; [`BoundServer::run`] answers them. Needs a tokio runtime
    /// with IO and time.
    ///
    /// # Errors
    /// See [`ServeError`]. On an error no listener stays open.
    pub fn bind(self) -> Result<BoundServer<S, C>, ServeError> {
        let (api, admin) = (self.policy.api(), self.policy.admin());
        let api_token = self.resolve_token("api", api.listen, api.token.as_ref())?;
        let admin_token = self.resolve_token("admin", admin.listen, admin.token.as_ref())?;
        if self.policy.inbound().upstream.is_some() {
            self.check_proxied_key_parts()?;
        }
        let refusals = Arc::new(RefusalLog::new(self.policy.log().refusals_per_second));
        let permit_renewer = Arc::new(PermitRenewer::default());
        let draining = Arc::new(AtomicBool::new(false));
        let inbound = self.open_proxy(&permit_renewer, &refusals)?;
        let restore = |outbound: &Outbound<S, C>| {
            outbound.config().snapshot.as_ref().map(|path| Snapshot::restore(outbound, path)).transpose()
        };
        let snapshot = self.outbound.as_ref().map(restore).transpose()?.flatten();
        let outbound =
            self.outbound.as_ref().map(|outbound| self.open_gateway(outbound, &refusals)).transpose()?.flatten();
        let api = api.listen.map(|address| self.open_api(address, api_token, &refusals)).transpose()?;
        let admin =
            admin.listen.map(|address| self.open_admin(address, admin_token, &refusals, &draining)).transpose()?;
        Ok(BoundServer {
            shutdown_timeout: self.policy.inbound().timeouts.shutdown,
            gate: self.gate,
            providers: self.outbound,
            snapshot: snapshot.map(Arc::new),
            inbound,
            outbound,
            api,
            admin,
            permit_renewer,
            refusals,
            draining,
            followed_clock: self.followed_clock,
        })
    }

    fn phase_timeouts(&self) -> PhaseTimeouts {
        let InboundConfig { timeouts, caps, .. } = self.policy.inbound();
        PhaseTimeouts {
            idle: timeouts.idle,
            head: timeouts.header,
            body: timeouts.body,
            response: timeouts.response,
            tunnel: timeouts.idle,
            body_rate: caps.body_rate,
        }
    }

    /// The bounds of a listener that answers by itself.
    fn internal_config(&self, connections: usize) -> ListenerConfig {
        ListenerConfig {
            connections,
            header_bytes: INTERNAL_HEADER_BYTES,
            headers: listener::DEFAULT_MAX_HEADERS,
            timeouts: self.phase_timeouts(),
            forwards: false,
        }
    }

    fn open_proxy(
        &self,
        permit_renewer: &Arc<PermitRenewer>,
        refusals: &Arc<RefusalLog>,
    ) -> Result<Option<OpenListener<ProxyState<S, C>>>, ServeError> {
        let inbound = self.policy.inbound();
        let Some(upstream) = &inbound.upstream else { return Ok(None) };
        let config = ListenerConfig {
            connections: usize::try_from(inbound.caps.connections).unwrap_or(usize::MAX).max(1),
            header_bytes: inbound.caps.header_bytes,
            headers: inbound.caps.headers,
            timeouts: self.phase_timeouts(),
            forwards: true,
        };
        let listener = bind_listener("inbound", inbound.listen, config)?.limit_per_client(
            inbound.caps.connections_per_client,
            self.gate.plan().ipv6_prefix(),
            &inbound.forwarding.trusted,
        );
        let (permit_renewer, refusals) = (Arc::clone(permit_renewer), Arc::clone(refusals));
        let proxy = ProxyState::new(self.gate.clone(), inbound, upstream, permit_renewer, refusals);
        Ok(Some(OpenListener { listener, service: Arc::new(proxy) }))
    }

    fn open_api(
        &self,
        address: SocketAddr,
        token: Option<Secret>,
        refusals: &Arc<RefusalLog>,
    ) -> Result<OpenListener<ApiState<S, C>>, ServeError> {
        let (inbound, api) = (self.policy.inbound(), self.policy.api());
        let kind = access::ListenerKind::Api;
        let state = ApiState {
            gate: self.gate.clone(),
            replies: Replies::new(self.gate.plan(), inbound.headers, inbound.x_ratelimit),
            access: Access::new(kind, address, &api.hosts, token, Arc::clone(refusals)),
            forwarding: inbound.forwarding.clone(),
            forward_auth: api.forward_auth,
            deny_status: StatusCode::from_u16(api.deny_status).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
            refusals: Arc::clone(refusals),
            untrusted_peer_logged: AtomicBool::new(false),
        };
        let listener = bind_listener("api", address, self.internal_config(API_CONNECTIONS))?;
        Ok(OpenListener { listener, service: Arc::new(state) })
    }

    fn open_admin(
        &self,
        address: SocketAddr,
        token: Option<Secret>,
        refusals: &Arc<RefusalLog>,
        draining: &Arc<AtomicBool>,
    ) -> Result<OpenListener<AdminState<S, C>>, ServeError> {
        let (kind, hosts) = (access::ListenerKind::Admin, &self.policy.admin().hosts);
        let state = AdminState {
            gate: self.gate.clone(),
            access: Access::new(kind, address, hosts, token, Arc::clone(refusals)),
            draining: Arc::clone(draining),
        };
        let listener = bind_listener("admin", address, self.internal_config(ADMIN_CONNECTIONS))?;
        Ok(OpenListener { listener, service: Arc::new(state) })
    }

    fn open_gateway(
        &self,
        outbound: &Outbound<S, C>,
        refusals: &Arc<RefusalLog>,
    ) -> Result<Option<OpenListener<GatewayState<S, C>>>, ServeError> {
        let plan = outbound.config();
        let token = self.resolve_token("outbound", plan.listen, plan.token.as_ref())?;
        let Some(address) = plan.listen else { return Ok(None) };
        let gateway = GatewayState::new(outbound, address, token, Arc::clone(refusals), &self.env).map_err(
            |error| match error {
                GatewayError::Credential { provider, source } => ServeError::Credential { provider, source },
                GatewayError::Roots(error) => ServeError::RootCertificates(error),
            },
        )?;
        let (ipv6_prefix, trusted) = (self.gate.plan().ipv6_prefix(), &self.policy.inbound().forwarding.trusted);
        let config = ListenerConfig { forwards: true, ..self.internal_config(plan.connections) };
        let listener = bind_listener("outbound", address, config)?.limit_per_client(
            plan.connections_per_client,
            ipv6_prefix,
            trusted,
        );
        Ok(Some(OpenListener { listener, service: Arc::new(gateway) }))
    }

    fn resolve_token(
        &self,
        listener: &'static str,
        address: Option<SocketAddr>,
        source: Option<&SecretSource>,
    ) -> Result<Option<Secret>, ServeError> {
        match (address, source) {
            (None, _) => Ok(None),
            (Some(address), None) if !address.ip().to_canonical().is_loopback() => {
                Err(ServeError::TokenRequired { listener, address })
            }
            (Some(_), None) => Ok(None),
            (Some(_), Some(source)) => {
                let secret = source.resolve(&self.env).map_err(|source| ServeError::Token { listener, source })?;
                Ok(Some(secret))
            }
        }
    }

    fn check_proxied_key_parts(&self) -> Result<(), ServeError> {
        let plan = self.gate.plan();
        let matched = plan.actions().filter(|(_, action)| action.matcher().is_some()).map(|(id, _)| Some(id));
        for action in matched.chain([None]) {
            if let Some((limit, part)) = plan.part_not_in_requests(action) {
                let (limit, part) = (plan.limit_info(limit).name().to_owned(), KeyPart::to_string(part));
                return Err(ServeError::MissingKeyPart { limit, part });
            }
        }
        Ok(())
    }
}

fn bind_listener(listener: &'static str, address: SocketAddr, bounds: ListenerConfig) -> Result<Listener, ServeError> {
    Listener::bind(address, bounds).map_err(|source| ServeError::Bind { listener, address, source })
}
