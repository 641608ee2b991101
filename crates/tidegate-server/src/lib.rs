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
//! | admin, 8083 | health, metrics, the state as JSON, and changes by operators | 64 connections, 16 KiB per change |
//!
//! # Access
//! Every listener except inbound checks its token, if it has one. Beyond loopback a token is required. The admin listener
//! may have several; some may only be for reading.
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
mod audit_log;
mod body;
mod bound_server;
mod client_limit;
mod connection;
pub mod descriptors;
mod displacement;
mod events;
mod framing;
mod gateway;
mod hop_headers;
mod housekeeping;
mod linger;
mod listener;
mod local_response;
pub mod log;
pub mod metrics;
mod permit_renewer;
mod proxy;
mod refusal_cache;
mod refusal_log;
mod refused_clients;
mod rejections;
pub mod signals;
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
use hyper::service::service_fn;
use tidegate::clock::SystemClock;
use tidegate::outbound::{CredentialError, Outbound, Snapshot, SnapshotError};
use tidegate::reply::Replies;
use tidegate::store::{AnyStore, Memory, Store};
use tidegate::{Gate, OpenError, Stores};
use tidegate_core::Clock;
use tidegate_policy::{InboundConfig, KeyPart, NamedToken, Policy, SecretError, SecretSource};
use tokio::sync::Semaphore;

use crate::access::{Access, AccessToken, ListenerKind};
use crate::bound_server::OpenListener;
pub use crate::bound_server::{BoundServer, ShutdownSummary};
use crate::client_limit::ClientLimit;
use crate::connection::ConnectionService;
use crate::events::{EventStream, ProviderEventPublisher, ServerEvents, server_events};
use crate::gateway::{GatewayState, PlainClient};
use crate::listener::{ConnectionContext, Listener, ListenerConfig};
use crate::metrics::{MetricsSource, RequestMetrics};
use crate::permit_renewer::PermitRenewer;
use crate::proxy::ProxyState;
use crate::refusal_log::RefusalLog;
use crate::upstream::UpstreamClient;
use crate::wire::admin::{self, AdminState};
use crate::wire::forward_auth::ForwardAuthWarnings;
use crate::wire::http_api::{ApiService, ApiState};

/// The maximum number of connections of the API listener. Front servers and programs keep their connections open.
const API_CONNECTIONS: usize = 1024;
/// The maximum number of connections of the admin listener.
const ADMIN_CONNECTIONS: usize = 64;
/// The maximum size of a request head on the API and admin listeners, and on the outbound listener, in bytes.
const INTERNAL_HEADER_BYTES: usize = 64 << 10;

/// The gateway's listener, and its clients whose idle connections must be closed in time.
type OpenGateway = (Vec<Arc<PlainClient>>, OpenListener);

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
    #[error("{setting}: {source}")]
    Token {
        /// The setting: `api.token`, `admin.tokens.NAME`.
        setting: String,
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
        let events = Arc::new(server_events(self.gate.clock().now()));
        let (lines, limits) = (self.policy.log().refusals_per_second, self.policy.plan().limits().len());
        let refusals = Arc::new(RefusalLog::new(lines, limits, Arc::clone(&events)));
        let (api, admin) = (self.policy.api(), self.policy.admin());
        let api_access = self.access(ListenerKind::Api, api.listen, api.token.as_ref(), &[], &api.hosts, &refusals)?;
        let (token, tokens) = (admin.token.as_ref(), &admin.tokens);
        let admin_access = self.access(ListenerKind::Admin, admin.listen, token, tokens, &admin.hosts, &refusals)?;
        let permit_renewer = Arc::new(PermitRenewer::default());
        let draining = Arc::new(AtomicBool::new(false));
        let providers = self.outbound.as_ref().map_or(0, |outbound| outbound.providers().len());
        let metrics = Arc::new(RequestMetrics::new(admin.metrics, providers));
        let proxy = self.open_proxy(&permit_renewer, &refusals, &metrics)?;
        let (upstream, inbound) = proxy.unzip();
        let (mut snapshot, mut outbound) = (None, None);
        if let Some(providers) = &self.outbound {
            let file = providers.config().snapshot.as_ref();
            snapshot = file.map(|file| Snapshot::restore(providers, file)).transpose()?.map(Arc::new);
            outbound = self.open_gateway(providers, &refusals, &metrics)?;
        }
        let (plain_clients, outbound) = outbound.unzip();
        let api =
            api_access.map(|(address, access)| self.open_api(address, access, &refusals, &metrics)).transpose()?;
        let listeners = [("inbound", &inbound), ("outbound", &outbound), ("api", &api)];
        let listeners = listeners.into_iter().filter_map(|(name, open)| Some((name, open.as_ref()?.watchdog())));
        let source = MetricsSource {
            gate: self.gate.clone(),
            providers: self.outbound.clone(),
            requests: Arc::clone(&metrics),
            refusals: Arc::clone(&refusals),
            listeners: listeners.map(|(name, watchdog)| (name, Arc::clone(watchdog))).collect(),
            started_at: self.gate.clock().now(),
        };
        let admin = admin_access
            .map(|(address, access)| self.open_admin(address, access, &draining, source, &events))
            .transpose()?;
        // Last, because only one server can observe the providers.
        if let Some(providers) = &self.outbound {
            let names = providers.config().providers().iter().map(|provider| provider.name.as_str());
            let publisher = ProviderEventPublisher::new(names, Arc::clone(&events));
            providers.observe(move |event| publisher.publish(event));
        }
        Ok(BoundServer {
            shutdown_timeout: self.policy.inbound().timeouts.shutdown,
            gate: self.gate,
            providers: self.outbound,
            snapshot,
            upstream,
            plain_clients: plain_clients.unwrap_or_default(),
            inbound,
            outbound,
            api,
            admin,
            permit_renewer,
            refusals,
            metrics,
            events,
            draining,
            followed_clock: self.followed_clock,
        })
    }

    /// The limits of a listener that answers by itself.
    fn internal_config(&self, connections: usize) -> ListenerConfig {
        let InboundConfig { timeouts, caps, .. } = self.policy.inbound();
        ListenerConfig {
            connections,
            client_limit: None,
            header_bytes: INTERNAL_HEADER_BYTES,
            headers: listener::DEFAULT_MAX_HEADERS,
            timeouts: *timeouts,
            body_rate: caps.body_rate,
            forwards: false,
        }
    }

    /// The limits of a listener that forwards requests.
    fn forwarding_config(&self, connections: usize, per_client: Option<usize>) -> ListenerConfig {
        let trusted = &self.policy.inbound().forwarding.trusted;
        let client_limit =
            per_client.map(|most| ClientLimit::new(most, self.gate.plan().ipv6_prefix(), trusted.clone()));
        ListenerConfig { client_limit, forwards: true, ..self.internal_config(connections) }
    }

    fn open_proxy(
        &self,
        permit_renewer: &Arc<PermitRenewer>,
        refusals: &Arc<RefusalLog>,
        metrics: &Arc<RequestMetrics>,
    ) -> Result<Option<(Arc<UpstreamClient>, OpenListener)>, ServeError> {
        let inbound = self.policy.inbound();
        let Some(upstream) = &inbound.upstream else { return Ok(None) };
        self.check_proxied_key_parts()?;
        let caps = &inbound.caps;
        let config = ListenerConfig {
            header_bytes: caps.header_bytes,
            headers: caps.headers,
            ..self.forwarding_config(caps.connections.max(1) as usize, caps.connections_per_client)
        };
        let proxy = ProxyState::new(
            self.gate.clone(),
            inbound,
            upstream,
            Arc::clone(permit_renewer),
            Arc::clone(refusals),
            Arc::clone(metrics),
        );
        let proxy = Arc::new(proxy);
        let upstream = Arc::clone(&proxy.upstream);
        let listener =
            open_listener("inbound", inbound.listen, config, move |client| proxy.connection_service(client))?;
        Ok(Some((upstream, listener)))
    }

    fn open_api(
        &self,
        address: SocketAddr,
        access: Access,
        refusals: &Arc<RefusalLog>,
        metrics: &Arc<RequestMetrics>,
    ) -> Result<OpenListener, ServeError> {
        let (inbound, api) = (self.policy.inbound(), self.policy.api());
        let state = Arc::new(ApiState {
            gate: self.gate.clone(),
            replies: Replies::new(self.gate.plan(), inbound.headers, inbound.x_ratelimit),
            access,
            forwarding: inbound.forwarding.clone(),
            forward_auth: api.forward_auth,
            deny_status: StatusCode::from_u16(api.deny_status).unwrap_or(StatusCode::TOO_MANY_REQUESTS),
            refusals: Arc::clone(refusals),
            metrics: Arc::clone(metrics),
            warnings: ForwardAuthWarnings::default(),
        });
        let config = self.internal_config(API_CONNECTIONS);
        open_listener("api", address, config, move |client| ApiService::new(&state, client))
    }

    fn open_admin(
        &self,
        address: SocketAddr,
        access: Access,
        draining: &Arc<AtomicBool>,
        metrics: MetricsSource<S, C>,
        events: &Arc<ServerEvents>,
    ) -> Result<OpenListener, ServeError> {
        let state = Arc::new(AdminState {
            gate: self.gate.clone(),
            access,
            draining: Arc::clone(draining),
            metrics,
            events: Arc::clone(events),
            streams: Arc::new(Semaphore::new(EventStream::MAX_STREAMS)),
        });
        open_listener("admin", address, self.internal_config(ADMIN_CONNECTIONS), move |client| {
            let (state, client) = (Arc::clone(&state), Arc::new(client));
            service_fn(move |request| admin::serve(Arc::clone(&state), Arc::clone(&client), request))
        })
    }

    fn open_gateway(
        &self,
        providers: &Outbound<S, C>,
        refusals: &Arc<RefusalLog>,
        metrics: &Arc<RequestMetrics>,
    ) -> Result<Option<OpenGateway>, ServeError> {
        let plan = providers.config();
        let access =
            self.access(ListenerKind::Gateway, plan.listen, plan.token.as_ref(), &[], &plan.hosts, refusals)?;
        let Some((address, access)) = access else { return Ok(None) };
        let (refusals, metrics) = (Arc::clone(refusals), Arc::clone(metrics));
        let gateway = Arc::new(GatewayState::new(providers, access, refusals, metrics, &self.env)?);
        let config = self.forwarding_config(plan.connections, plan.connections_per_client);
        let plain_clients = gateway.plain_clients.clone();
        let listener = open_listener("outbound", address, config, move |client| gateway.connection_service(client))?;
        Ok(Some((plain_clients, listener)))
    }

    /// Returns the address and the access check of a listener. `None` if the policy turns it off.
    fn access(
        &self,
        kind: ListenerKind,
        address: Option<SocketAddr>,
        token: Option<&SecretSource>,
        named: &[NamedToken],
        hosts: &[String],
        refusals: &Arc<RefusalLog>,
    ) -> Result<Option<(SocketAddr, Access)>, ServeError> {
        let (Some(address), listener) = (address, kind.section()) else { return Ok(None) };
        let resolve = |setting: String, name: &str, source: &SecretSource, read_only| {
            let secret = source.resolve(&self.env).map_err(|source| ServeError::Token { setting, source })?;
            Ok(AccessToken { name: name.into(), secret, read_only })
        };
        let token = token.map(|source| resolve(format!("{listener}.token"), "token", source, false));
        let named = named.iter().map(|NamedToken { name, source, read_only, .. }| {
            resolve(format!("{listener}.tokens.{name}"), name, source, *read_only)
        });
        let tokens: Vec<AccessToken> = token.into_iter().chain(named).collect::<Result<_, ServeError>>()?;
        if tokens.is_empty() && !address.ip().to_canonical().is_loopback() {
            return Err(ServeError::TokenRequired { listener, address });
        }
        Ok(Some((address, Access::new(kind, address, hosts, tokens, Arc::clone(refusals)))))
    }

    fn check_proxied_key_parts(&self) -> Result<(), ServeError> {
        let plan = self.gate.plan();
        let matched = plan.actions().filter(|(_, action)| action.matcher().is_some()).map(|(id, _)| Some(id));
        match matched.chain([None]).find_map(|action| plan.part_not_in_requests(action)) {
            None => Ok(()),
            Some((limit, part)) => {
                let (limit, part) = (plan.limit_info(limit).name().to_owned(), KeyPart::to_string(part));
                Err(ServeError::MissingKeyPart { limit, part })
            }
        }
    }
}

/// Opens a listener with a service for each of its connections.
fn open_listener<T: ConnectionService>(
    listener: &'static str,
    address: SocketAddr,
    config: ListenerConfig,
    new_service: impl Fn(ConnectionContext) -> T + Send + Sync + 'static,
) -> Result<OpenListener, ServeError> {
    match Listener::bind(address, config) {
        Ok(bound) => Ok(OpenListener::new(bound, new_service)),
        Err(source) => Err(ServeError::Bind { listener, address, source }),
    }
}
