//! The Tidegate gate as a server: reverse proxy, forward-auth and decision API.
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
//! | listener | serves | bounded by |
//! | --- | --- | --- |
//! | inbound, 8080 | the reverse proxy, if the policy has an upstream | `inbound.caps`, `inbound.timeouts` |
//! | outbound, 8081 | the gateway to other people's APIs, if the policy has `[outbound]` | `outbound.connections`, 64 KiB a head |
//! | API, 8082 | the decision API and forward-auth, `/v1/…` | 1024 connections, 16 KiB a question |
//! | admin, 8083 | `/healthz`, `/readyz` | 64 connections |
//!
//! # Who may ask
//! The listeners but inbound ask for their token, if they have one; beyond loopback they must have one. Without, they
//! answer programs of this machine and no web pages: `Host` is loopback, the listener's own address or one of the
//! section's `hosts` (else 421), and `Origin` and `Sec-Fetch-Site`, where there are any, tell of no page but the
//! listener's own and those of `hosts` (else 403). Forward-auth is left out, as front servers pass on what browsers say.
//!
//! # What the proxy speaks
//! HTTP/1.1 and 1.0, both ways. Bodies stream through; nothing is collected. A client that goes away takes its
//! upstream request with it. HTTP/2 is not spoken: a gRPC service is guarded by the tower layer of the crate
//! `tidegate`, or by forward-auth. `CONNECT` and `TRACE` are refused with 405. Upgrades other than `h2c` pass.
//!
//! # At the bounds
//! - **Connections**: at the cap a new one displaces the connection that has been longest between requests, or silent since
//!   it came; else the oldest unfinished head (503), so a client that is slow to send its head may lose its place; else the
//!   oldest whose answer is out and which still sends. A request under way is never displaced: while all have one, new
//!   connections wait.
//! - **Connections of one client address** (IPv6: by `inbound.ipv6_prefix`) beyond `connections_per_client`: 503 and a close.
//!   Loopback and trusted proxies are not counted.
//! - **Heads** too large or with too many lines: 431. **Slow heads**: 408. Unfinished heads take at most 32 MiB in all,
//!   those aside of which no more than 8 KiB came; past that the oldest gets 503.
//! - **Bodies** over the cap: 413. **Slow bodies**, of calls and questions too: 408 where less than `body_rate` comes over
//!   10 s spent waiting for the client. Upgrades and gRPC may be slow.
//! - **A refused request's body** is read away up to 64 KiB, so that the connection lives on. Past that the answer is the
//!   connection's last, and the body is read away for up to 30 s while it comes at 64 KiB a second or more, so that the
//!   client gets to read the answer. One in eight connections may do so at a time; beyond that, and for blocked clients,
//!   1 MiB or 2 s are the end.
//! - **Shutdown** stops accepting, lets every request in flight end, each answer with `Connection: close`, closes
//!   idle connections after two ticks, and ends what is left when `timeouts.shutdown` is over.

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
use tidegate::core::Clock;
use tidegate::outbound::{CredentialError, Outbound, Snapshot, SnapshotError};
use tidegate::reply::Replies;
use tidegate::store::Store;
use tidegate::{AnyStore, Gate, Memory, OpenError, Stores, SystemClock};
use tidegate_policy::{KeyPart, Policy, Secret, SecretError, SecretSource};

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

/// How many connections the API takes at once: front servers and programs keep theirs.
const API_CONNECTIONS: usize = 1024;
/// How many connections the admin listener takes at once.
const ADMIN_CONNECTIONS: usize = 64;
/// The most bytes of a head on the API and admin listeners.
const INTERNAL_HEADER_BYTES: usize = 64 << 10;

/// Finds an environment variable's value.
type EnvLookup = Box<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// A gate that is to be served: a policy, and the gate that decides by it.
pub struct Server<S: Store = Memory, C: Clock = SystemClock> {
    gate: Gate<S, C>,
    outbound: Option<Outbound<S, C>>,
    policy: Policy,
    env: EnvLookup,
    followed_clock: Option<SystemClock>,
}

/// Why a gate can't be served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// A listener's address is taken or isn't this machine's.
    #[error("{listener} can't listen on {address}: {source}")]
    Bind {
        /// `inbound`, `outbound`, `api` or `admin`.
        listener: &'static str,
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// A listener would be open to the network without a token.
    #[error("{listener}.listen = \"{address}\" is beyond loopback and needs {listener}.token = \"env:NAME\"")]
    TokenRequired {
        /// `outbound`, `api` or `admin`.
        listener: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// A listener's token can't be had.
    #[error("{listener}.token: {source}")]
    Token {
        /// `outbound`, `api` or `admin`.
        listener: &'static str,
        /// Why.
        source: SecretError,
    },
    /// A provider's credential can't be had, or can't be sent where it belongs.
    #[error("outbound.provider.{provider}.credentials: {source}")]
    Credential {
        /// The provider.
        provider: String,
        /// Why.
        source: CredentialError,
    },
    /// The system's root certificates can't be read, so that no provider could be trusted.
    #[error("the system's root certificates can't be read: {0}")]
    RootCertificates(io::Error),
    /// The file that outbound state outlives the process in can't be used.
    #[error("outbound.snapshot: {0}")]
    Snapshot(#[from] SnapshotError),
    /// An action that proxied requests match counts by something that no request carries.
    #[error("the limit `{limit}` counts by `{part}`, which a proxied request doesn't have")]
    MissingKeyPart {
        /// The limit.
        limit: String,
        /// The part.
        part: String,
    },
}

impl Server {
    /// A server for a policy, with state in memory and the machine's clock.
    pub fn new(policy: &Policy) -> Self {
        let clock = SystemClock::new();
        let mut server = Self::from_gate(Gate::in_memory(policy, clock.clone()), policy);
        server.outbound = Outbound::in_memory(policy, clock.clone());
        server.follow_clock(clock)
    }
}

impl Server<AnyStore> {
    /// A server for a policy, with state where its `store.url` says and the machine's clock. Needs a tokio runtime with IO
    /// and time.
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
    /// A server for a gate that was made from this policy.
    pub fn from_gate(gate: Gate<S, C>, policy: &Policy) -> Self {
        let env = Box::new(|name: &str| std::env::var(name).ok());
        Self { gate, outbound: None, policy: policy.clone(), env, followed_clock: None }
    }

    /// Serves these providers, made from the same policy. [`Server::new`] does so by itself.
    #[must_use]
    pub fn outbound(mut self, outbound: Outbound<S, C>) -> Self {
        self.outbound = Some(outbound);
        self
    }

    /// Moves this clock, which the gate tells the time by, towards the wall clock while the server runs, and warns
    /// once when the two are more than a second apart. [`Server::new`] does so by itself.
    #[must_use]
    pub fn follow_clock(mut self, clock: SystemClock) -> Self {
        self.followed_clock = Some(clock);
        self
    }

    /// Looks tokens (`env:NAME`) up here instead of in the process' environment.
    #[must_use]
    pub fn env(mut self, look_up: impl Fn(&str) -> Option<String> + Send + Sync + 'static) -> Self {
        self.env = Box::new(look_up);
        self
    }

    /// Opens the listeners. From here on clients can connect; they are answered by [`BoundServer::run`]. Needs a tokio
    /// runtime with IO and time.
    ///
    /// # Errors
    /// See [`ServeError`]; nothing is left half-open.
    pub fn bind(self) -> Result<BoundServer<S, C>, ServeError> {
        let inbound = self.policy.inbound();
        let api = self.policy.api();
        let admin = self.policy.admin();
        let api_token = self.resolve_token("api", api.listen, api.token.as_ref())?;
        let admin_token = self.resolve_token("admin", admin.listen, admin.token.as_ref())?;
        if inbound.upstream.is_some() {
            self.check_proxied_key_parts()?;
        }
        let timeouts = PhaseTimeouts {
            idle: inbound.timeouts.idle,
            head: inbound.timeouts.header,
            body: inbound.timeouts.body,
            response: inbound.timeouts.response,
            tunnel: inbound.timeouts.idle,
            body_rate: inbound.caps.body_rate,
        };
        let internal_config = |connections| ListenerConfig {
            connections,
            header_bytes: INTERNAL_HEADER_BYTES,
            headers: listener::DEFAULT_MAX_HEADERS,
            timeouts,
            forwards: false,
        };
        let proxy_config = ListenerConfig {
            connections: usize::try_from(inbound.caps.connections).unwrap_or(usize::MAX).max(1),
            header_bytes: inbound.caps.header_bytes,
            headers: inbound.caps.headers,
            timeouts,
            forwards: true,
        };
        let ipv6_prefix = self.gate.plan().ipv6_prefix();
        let refusals = Arc::new(RefusalLog::new(self.policy.log().refusals_per_second));
        let keeper = Arc::new(PermitRenewer::default());
        let draining = Arc::new(AtomicBool::new(false));
        let inbound = match &inbound.upstream {
            None => None,
            Some(upstream) => Some(OpenListener {
                listener: bind_listener("inbound", inbound.listen, proxy_config)?.limit_per_client(
                    inbound.caps.connections_per_client,
                    ipv6_prefix,
                    &inbound.forwarding.trusted,
                ),
                service: Arc::new(ProxyState::new(
                    self.gate.clone(),
                    inbound,
                    upstream,
                    Arc::clone(&keeper),
                    Arc::clone(&refusals),
                )),
            }),
        };
        let snapshot = match &self.outbound {
            None => None,
            Some(outbound) => {
                outbound.config().snapshot.as_ref().map(|path| Snapshot::restore(outbound, path)).transpose()?
            }
        };
        let outbound = match &self.outbound {
            None => None,
            Some(outbound) => self.gateway(
                outbound,
                &refusals,
                ListenerConfig { forwards: true, ..internal_config(outbound.config().connections) },
            )?,
        };
        let settings = self.policy.inbound();
        let api = match api.listen {
            None => None,
            Some(address) => Some(OpenListener {
                listener: bind_listener("api", address, internal_config(API_CONNECTIONS))?,
                service: Arc::new(ApiState {
                    gate: self.gate.clone(),
                    replies: Replies::new(self.gate.plan(), settings.headers, settings.x_ratelimit),
                    access: Access::new(
                        access::ListenerKind::Api,
                        address,
                        &api.hosts,
                        api_token,
                        Arc::clone(&refusals),
                    ),
                    forwarding: settings.forwarding.clone(),
                    forward_auth: api.forward_auth,
                    deny_status: StatusCode::from_u16(api.deny_status).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
                    refusals: Arc::clone(&refusals),
                    untrusted_peer_logged: AtomicBool::new(false),
                }),
            }),
        };
        let admin = match admin.listen {
            None => None,
            Some(address) => Some(OpenListener {
                listener: bind_listener("admin", address, internal_config(ADMIN_CONNECTIONS))?,
                service: Arc::new(AdminState {
                    gate: self.gate.clone(),
                    access: Access::new(
                        access::ListenerKind::Admin,
                        address,
                        &admin.hosts,
                        admin_token,
                        Arc::clone(&refusals),
                    ),
                    draining: Arc::clone(&draining),
                }),
            }),
        };
        Ok(BoundServer {
            gate: self.gate,
            providers: self.outbound,
            snapshot: snapshot.map(Arc::new),
            inbound,
            outbound,
            api,
            admin,
            permit_renewer: keeper,
            refusals,
            draining,
            shutdown_timeout: settings.timeouts.shutdown,
            followed_clock: self.followed_clock,
        })
    }

    fn gateway(
        &self,
        outbound: &Outbound<S, C>,
        refusals: &Arc<RefusalLog>,
        bounds: ListenerConfig,
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
        let listener = bind_listener("outbound", address, bounds)?.limit_per_client(
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
