//! The shared connection to the server. It is opened at the first request, and again after each loss.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, ProtocolVersion, PushInfo, PushKind, RedisError, ServerErrorKind,
    TlsCertificates, TlsMode, Value,
};
use tidegate_core::backoff::BackoffState;
use tidegate_core::{Backoff, Span};
use tokio::runtime::Handle;
use tokio::sync::{broadcast, watch};

use super::address::{RedisAddress, Topology};
use super::keys::KeyNames;
use crate::KeyReset;

/// The waits between attempts to reach the server.
const RECONNECT_BACKOFF: Backoff = Backoff::exponential(Span::from_millis(50), Span::from_secs(1));
/// The number of commands that may wait for the socket. Further callers wait for room.
const PIPELINE_CAPACITY: usize = 1_024;
/// The maximum number of redirections and retries of a cluster's client: enough for the steps of a slot's move.
const MAX_CLUSTER_RETRIES: u32 = 4;
const CLUSTER_RETRY_MILLIS: (u64, u64) = (5, 50);
/// The number of resets that a receiver may lag behind before it misses some.
const RESET_CHANNEL_CAPACITY: usize = 1_024;

/// The maximum times for connecting and for answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct RedisTimeouts {
    pub(super) connect: Duration,
    pub(super) answer: Duration,
}

/// The shared connection, as the module describes it.
pub(super) struct SharedConnection {
    address: RedisAddress,
    /// The trusted certificate authorities, as PEM; the system's if `None`.
    authorities: Option<Vec<u8>>,
    timeouts: RedisTimeouts,
    key_names: Arc<KeyNames>,
    state: watch::Sender<ConnectionState>,
    /// True while a probe tests if the server still answers.
    is_probing: AtomicBool,
    reset_sender: broadcast::Sender<Option<KeyReset>>,
    /// True if the server refuses the subscription to resets.
    cannot_subscribe: AtomicBool,
}

#[derive(Clone)]
enum ConnectionState {
    /// No request has come yet, or the runtime of the connection has ended.
    Idle,
    /// The first attempt is running.
    Connecting,
    Connected(OpenConnection),
    /// The last attempt failed, and another follows.
    Failed(Arc<str>),
}

impl ConnectionState {
    /// True if this is the connection of this id, to a single server. A cluster's client reconnects by itself.
    fn is_server_connection(&self, id: u64) -> bool {
        matches!(self, Self::Connected(open) if open.id == id && matches!(open.connection, RedisConnection::Server(_)))
    }
}

#[derive(Clone)]
struct OpenConnection {
    connection: RedisConnection,
    /// A number that no earlier connection had.
    id: u64,
    /// The runtime of its tasks.
    runtime: Handle,
}

#[derive(Clone)]
enum RedisConnection {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl RedisConnection {
    async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        match self {
            Self::Server(server) => server.send_packed_command(command).await,
            Self::Cluster(cluster) => cluster.req_packed_command(command).await,
        }
        .and_then(Value::extract_error)
    }
}

impl fmt::Debug for SharedConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedConnection").field("address", &self.address).finish_non_exhaustive()
    }
}

impl SharedConnection {
    pub(super) fn new(
        address: RedisAddress,
        authorities: Option<Vec<u8>>,
        timeouts: RedisTimeouts,
        key_names: Arc<KeyNames>,
    ) -> Arc<Self> {
        Arc::new(Self {
            address,
            authorities,
            timeouts,
            key_names,
            state: watch::Sender::new(ConnectionState::Idle),
            is_probing: AtomicBool::new(false),
            reset_sender: broadcast::Sender::new(RESET_CHANNEL_CAPACITY),
            cannot_subscribe: AtomicBool::new(false),
        })
    }

    /// True if keys in different slots may be on different servers.
    pub(super) fn is_cluster(&self) -> bool {
        self.address.topology == Topology::Cluster
    }

    pub(super) fn subscribe_to_resets(&self) -> broadcast::Receiver<Option<KeyReset>> {
        self.reset_sender.subscribe()
    }

    /// Without a subscription, resets may have been missed at any time.
    pub(super) fn report_possibly_missed_resets(&self) {
        if self.cannot_subscribe.load(Ordering::Relaxed) {
            self.broadcast_reset(None);
        }
    }

    /// The runtime of the connection, if there is one. While it is blocked, no request gets an answer.
    pub(super) fn runtime(&self) -> Option<Handle> {
        match &*self.state.borrow() {
            ConnectionState::Connected(open) => Some(open.runtime.clone()),
            _ => None,
        }
    }

    /// Sends a command and waits for its answer. Waits for the first attempt to connect, and fails during later ones.
    pub(super) async fn send(self: &Arc<Self>, command: &Cmd) -> Result<Value, RedisCommandError> {
        let mut open = self.open_connection().await?;
        let mut pending = PendingCommand { shared: self, connection_id: open.id, is_answered: false };
        let answer = open.connection.send(command).await;
        pending.is_answered = true;
        if let Err(error) = &answer {
            self.handle_error(open.id, error);
        }
        answer.map_err(RedisCommandError::Redis)
    }

    async fn open_connection(self: &Arc<Self>) -> Result<OpenConnection, RedisCommandError> {
        if let ConnectionState::Connected(open) = &*self.state.borrow() {
            return Ok(open.clone());
        }
        let mut states = self.state.subscribe();
        loop {
            let state = states.borrow_and_update().clone();
            match state {
                ConnectionState::Connected(open) => return Ok(open),
                ConnectionState::Failed(reason) => return Err(RedisCommandError::NotConnected(reason)),
                ConnectionState::Idle => {
                    self.start_connecting(|state| matches!(state, ConnectionState::Idle), None);
                }
                ConnectionState::Connecting => {
                    // The sender lives as long as `self`.
                    let _ = states.changed().await;
                }
            }
        }
    }
}

/// The reason why a command has no answer.
pub(super) enum RedisCommandError {
    Redis(RedisError),
    /// There is no connection.
    NotConnected(Arc<str>),
}

/// A command without an answer yet. If its caller is cancelled first, a probe tests if the server still answers.
/// Otherwise later callers might wait for a dead connection too.
struct PendingCommand<'a> {
    shared: &'a Arc<SharedConnection>,
    connection_id: u64,
    is_answered: bool,
}

impl Drop for PendingCommand<'_> {
    fn drop(&mut self) {
        if self.is_answered {
            return;
        }
        let open = match &*self.shared.state.borrow() {
            state @ ConnectionState::Connected(open) if state.is_server_connection(self.connection_id) => open.clone(),
            _ => return,
        };
        if let Ok(runtime) = Handle::try_current()
            && !self.shared.is_probing.swap(true, Ordering::Relaxed)
        {
            runtime.spawn(LivenessProbe(Arc::clone(self.shared)).run(open));
        }
    }
}

/// A task that sends the server a `PING`.
struct LivenessProbe(Arc<SharedConnection>);

impl LivenessProbe {
    async fn run(self, mut open: OpenConnection) {
        if let Err(error) = open.connection.send(&redis::cmd("PING")).await {
            self.0.handle_error(open.id, &error);
        }
    }
}

impl Drop for LivenessProbe {
    fn drop(&mut self) {
        self.0.is_probing.store(false, Ordering::Relaxed);
    }
}

impl SharedConnection {
    /// Replaces a connection to a single server after an error that makes it unusable.
    fn handle_error(self: &Arc<Self>, connection_id: u64, error: &RedisError) {
        let delay_reason = match error.kind() {
            // A new connection to the same address may lead to the same server for a while.
            ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => {
                Some(error.to_string().into())
            }
            _ if error.is_unrecoverable_error() || error.is_timeout() => None,
            _ => return,
        };
        self.start_connecting(|state| state.is_server_connection(connection_id), delay_reason);
    }

    /// Starts connecting if the state is the expected one: at once, or, with a reason to delay, after the first wait.
    fn start_connecting(
        self: &Arc<Self>,
        expected: impl FnOnce(&ConnectionState) -> bool,
        delay_reason: Option<Arc<str>>,
    ) {
        let runtime = Handle::try_current().ok();
        let (next, waits_first) = match (&runtime, delay_reason) {
            (None, _) => (ConnectionState::Idle, false),
            (_, Some(why)) => (ConnectionState::Failed(why), true),
            (_, None) => (ConnectionState::Connecting, false),
        };
        let mut id = 0;
        let is_started = self.state.send_if_modified(|state| {
            let expected = expected(state);
            if expected {
                id = if let ConnectionState::Connected(open) = state { open.id + 1 } else { 1 };
                *state = next;
            }
            expected
        });
        if let (true, Some(runtime)) = (is_started, runtime) {
            runtime.spawn(ConnectTask { shared: Arc::downgrade(self), connection_id: id }.run(waits_first));
        }
    }

    async fn connect(self: &Arc<Self>, connection_id: u64) -> Result<RedisConnection, RedisError> {
        if self.address.is_encrypted && rustls::crypto::CryptoProvider::get_default().is_none() {
            // Fails only if another thread was faster.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let mut nodes = self.address.connection_infos()?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.timeouts.connect))
            .set_response_timeout(Some(self.timeouts.answer))
            .set_pipeline_buffer_size(PIPELINE_CAPACITY)
            .set_push_sender(self.push_handler(connection_id));
        let reset_channel = self.key_names.reset_channel();
        let (connection, subscribed) = match &self.address.topology {
            Topology::Cluster => {
                let mut builder = ClusterClientBuilder::new(nodes)
                    .use_protocol(ProtocolVersion::RESP3)
                    .connection_timeout(self.timeouts.connect)
                    .response_timeout(self.timeouts.answer)
                    .retries(MAX_CLUSTER_RETRIES)
                    .min_retry_wait(CLUSTER_RETRY_MILLIS.0)
                    .max_retry_wait(CLUSTER_RETRY_MILLIS.1)
                    .push_sender(self.push_handler(connection_id));
                if let Some(certificates) = self.own_certificates() {
                    builder = builder.certs(certificates);
                }
                let mut cluster = builder.build()?.get_async_connection().await?;
                let subscribed = cluster.subscribe(reset_channel).await;
                (RedisConnection::Cluster(cluster), subscribed)
            }
            topology => {
                let client = match topology {
                    Topology::Sentinel(service) => self.client_from_sentinels(service).await?,
                    _ => {
                        let node = nodes.pop().ok_or((ErrorKind::InvalidClientConfig, "no host"))?;
                        match self.own_certificates() {
                            Some(certificates) => Client::build_with_tls(node, certificates)?,
                            None => Client::open(node)?,
                        }
                    }
                };
                let mut server = client.get_multiplexed_async_connection_with_config(&config).await?;
                let subscribed = server.subscribe(reset_channel).await;
                (RedisConnection::Server(server), subscribed)
            }
        };
        // A user that may not subscribe gets no resets; all other commands work.
        let cannot_subscribe = match subscribed {
            Ok(_) => false,
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => true,
            Err(error) => return Err(error),
        };
        self.cannot_subscribe.store(cannot_subscribe, Ordering::Relaxed);
        // Resets between two connections may have been missed.
        self.broadcast_reset(None);
        Ok(connection)
    }

    /// The certificates of an encrypted server that has other authorities than the system's.
    fn own_certificates(&self) -> Option<TlsCertificates> {
        let root_cert = self.authorities.clone().filter(|_| self.address.is_encrypted)?;
        Some(TlsCertificates { client_tls: None, root_cert: Some(root_cert) })
    }

    fn broadcast_reset(&self, reset: Option<KeyReset>) {
        // An error means that there is no receiver.
        let _ = self.reset_sender.send(reset);
    }

    async fn client_from_sentinels(&self, service: &str) -> Result<Client, RedisError> {
        let login = &self.address.login;
        let sentinels = self.address.connection_infos()?.into_iter().map(|node| node.addr().clone());
        let mut builder = SentinelClientBuilder::new(sentinels, service, SentinelServerType::Master)?
            .set_client_to_redis_db(login.db())
            .set_client_to_redis_protocol(ProtocolVersion::RESP3);
        if let Some(user) = login.username() {
            builder = builder.set_client_to_redis_username(user);
        }
        if let Some(password) = login.password() {
            builder = builder.set_client_to_redis_password(password);
        }
        if self.address.is_encrypted {
            builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
        }
        if let Some(certificates) = self.own_certificates() {
            builder = builder
                .set_client_to_redis_certificates(certificates.clone())
                .set_client_to_sentinel_certificates(certificates);
        }
        builder.build()?.async_get_client().await
    }

    /// The handler of push messages: resets, and the end of the connection.
    fn push_handler(
        self: &Arc<Self>,
        connection_id: u64,
    ) -> impl Fn(PushInfo) -> Result<(), RedisError> + Send + Sync + 'static {
        let shared = Arc::downgrade(self);
        move |push: PushInfo| {
            let Some(shared) = shared.upgrade() else { return Ok(()) };
            match (push.kind, push.data.as_slice()) {
                (PushKind::Message, [_, Value::BulkString(message)]) => {
                    if let Some(reset) = KeyNames::parse_reset(message) {
                        shared.broadcast_reset(Some(reset));
                    }
                }
                (PushKind::Disconnection, _) => {
                    shared.start_connecting(|state| state.is_server_connection(connection_id), None);
                }
                _ => {}
            }
            Ok(())
        }
    }
}

/// A task that tries to connect until it succeeds or the store is dropped.
struct ConnectTask {
    shared: Weak<SharedConnection>,
    connection_id: u64,
}

impl ConnectTask {
    async fn run(self, mut waits_first: bool) {
        let mut backoff = BackoffState::default();
        let mut random = SmallRng::from_rng(&mut rand::rng());
        loop {
            if std::mem::replace(&mut waits_first, true) {
                tokio::time::sleep(backoff.next(&RECONNECT_BACKOFF, &mut random).as_duration()).await;
            }
            let Some(shared) = self.shared.upgrade() else { return };
            let timeout = shared.timeouts.connect + shared.timeouts.answer;
            let reason = match tokio::time::timeout(timeout, shared.connect(self.connection_id)).await {
                Ok(Ok(connection)) => {
                    let open = OpenConnection { connection, id: self.connection_id, runtime: Handle::current() };
                    shared.state.send_replace(ConnectionState::Connected(open));
                    return;
                }
                Ok(Err(error)) => error.to_string().into(),
                Err(_) => "connecting took too long".into(),
            };
            shared.state.send_replace(ConnectionState::Failed(reason));
        }
    }
}

impl Drop for ConnectTask {
    /// A runtime that ends drops its tasks. A request in another runtime must then start a new attempt.
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.state.send_if_modified(|state| {
                let is_unfinished = !matches!(state, ConnectionState::Connected(_) | ConnectionState::Idle);
                if is_unfinished {
                    *state = ConnectionState::Idle;
                }
                is_unfinished
            });
        }
    }
}
