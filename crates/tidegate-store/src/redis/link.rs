//! The way to the server: one connection that all share, made when it is first needed and again whenever it is lost.

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

use super::address::{Address, Way};
use super::keys::Keys;
use crate::{Reset, StoreError};

/// How long to wait before the next attempt at a server that can't be reached.
const RECONNECT: Backoff = Backoff::exponential(Span::from_millis(50), Span::from_secs(1));
/// Commands that wait for the socket before who asks has to wait for a place.
const QUEUE: usize = 1_024;
/// How often a cluster's client goes where a node sends it on to, or back to a node that it has lost: a few steps of a
/// slot's move, and no storm at what is down.
const REDIRECTS: u32 = 4;
const REDIRECT_WAITS: (u64, u64) = (5, 50);
/// Resets that a reader may lag behind before it misses some.
const RESETS: usize = 1_024;

/// How long things may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// To connect and log in.
    pub(super) connect: Duration,
    /// To answer a command.
    pub(super) answer: Duration,
}

/// See the module.
pub(super) struct Link {
    shared: Arc<Shared>,
}

struct Shared {
    address: Address,
    /// Whom to trust, as PEM; the system's authorities if nobody is said.
    authorities: Option<Vec<u8>>,
    patience: Patience,
    keys: Arc<Keys>,
    state: watch::Sender<State>,
    /// Whether somebody is finding out if the server still answers.
    probed: AtomicBool,
    news: broadcast::Sender<Option<Reset>>,
    /// Whether the server doesn't let this node hear of resets.
    is_deaf: AtomicBool,
}

#[derive(Clone)]
enum State {
    /// Nobody has asked yet, or the runtime that a connection lived in has gone.
    Idle,
    /// An attempt is under way, and there is no reason to think that it fails.
    Connecting,
    Up(Line),
    /// The last attempt failed, and another follows.
    Down(Arc<str>),
}

/// One connection.
#[derive(Clone)]
struct Line {
    connection: Connection,
    /// Tells it from those before.
    number: u64,
    /// Where it lives.
    runtime: Handle,
}

#[derive(Clone)]
enum Connection {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Connection {
    async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        match self {
            Self::Server(server) => server.send_packed_command(command).await,
            Self::Cluster(cluster) => cluster.req_packed_command(command).await,
        }
        .and_then(Value::extract_error)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("address", &self.shared.address).finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn new(address: Address, authorities: Option<Vec<u8>>, patience: Patience, keys: Arc<Keys>) -> Self {
        let shared = Shared {
            address,
            authorities,
            patience,
            keys,
            state: watch::Sender::new(State::Idle),
            probed: AtomicBool::new(false),
            news: broadcast::Sender::new(RESETS),
            is_deaf: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Whether keys in different slots lie on different servers.
    pub(super) fn is_divided(&self) -> bool {
        self.shared.address.way == Way::Cluster
    }

    pub(super) fn resets(&self) -> broadcast::Receiver<Option<Reset>> {
        self.shared.news.subscribe()
    }

    /// Who hears of no resets may have missed some at any time.
    pub(super) fn admit_deafness(&self) {
        if self.shared.is_deaf.load(Ordering::Relaxed) {
            self.shared.tell(None);
        }
    }

    /// The runtime that the connection lives in, if there is one: where that stands still, nobody gets an answer.
    pub(super) fn runtime(&self) -> Option<Handle> {
        if let State::Up(line) = &*self.shared.state.borrow() { Some(line.runtime.clone()) } else { None }
    }

    /// Sends a command and waits for its answer. Without a connection it waits for the attempt that is under way, unless
    /// the one before has failed.
    pub(super) async fn send(&self, command: &Cmd) -> Result<Value, LinkError> {
        let mut line = self.line().await?;
        let mut pending = Pending { shared: &self.shared, number: line.number, is_answered: false };
        let answer = line.connection.send(command).await;
        pending.is_answered = true;
        if let Err(error) = &answer {
            self.shared.judge(&line, error);
        }
        answer.map_err(LinkError::Redis)
    }

    async fn line(&self) -> Result<Line, LinkError> {
        if let State::Up(line) = &*self.shared.state.borrow() {
            return Ok(line.clone());
        }
        let mut states = self.shared.state.subscribe();
        loop {
            let state = states.borrow_and_update().clone();
            match state {
                State::Up(line) => return Ok(line),
                State::Down(why) => return Err(LinkError::Down(why)),
                State::Idle => self.shared.connect_from(|state| matches!(state, State::Idle), None),
                State::Connecting => {
                    // The sender lives as long as this does.
                    let _ = states.changed().await;
                }
            }
        }
    }
}

/// Why a command has no answer.
pub(super) enum LinkError {
    Redis(RedisError),
    /// There is no connection.
    Down(Arc<str>),
}

impl LinkError {
    pub(super) fn is(&self, kind: ServerErrorKind) -> bool {
        matches!(self, Self::Redis(error) if error.kind() == ErrorKind::Server(kind))
    }

    pub(super) fn into_store_error(self, patience: Patience) -> StoreError {
        match self {
            Self::Redis(error) if error.is_timeout() => StoreError::Timeout(patience.answer),
            Self::Redis(error) => StoreError::Failed(error.to_string()),
            Self::Down(why) => StoreError::Failed(why.to_string()),
        }
    }
}

/// A command under way. Where its caller goes away before the answer, somebody has to find out whether the server still
/// answers at all: those who come later would wait in vain too.
struct Pending<'a> {
    shared: &'a Arc<Shared>,
    /// Of the connection.
    number: u64,
    is_answered: bool,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.is_answered {
            return;
        }
        let line = match &*self.shared.state.borrow() {
            State::Up(line @ Line { connection: Connection::Server(_), number, .. }) if *number == self.number => {
                line.clone()
            }
            _ => return,
        };
        if let Ok(runtime) = Handle::try_current()
            && !self.shared.probed.swap(true, Ordering::Relaxed)
        {
            runtime.spawn(Probe(Arc::clone(self.shared)).run(line));
        }
    }
}

/// Asks the server for a sign of life.
struct Probe(Arc<Shared>);

impl Probe {
    async fn run(self, mut line: Line) {
        if let Err(error) = line.connection.send(&redis::cmd("PING")).await {
            self.0.judge(&line, &error);
        }
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.0.probed.store(false, Ordering::Relaxed);
    }
}

impl Shared {
    /// Gives a connection up that can't be used any more.
    fn judge(self: &Arc<Self>, line: &Line, error: &RedisError) {
        // A cluster's client looks after its connections by itself.
        let Connection::Server(_) = line.connection else { return };
        let is_ours = |state: &State| matches!(state, State::Up(up) if up.number == line.number);
        match error.kind() {
            // The same address may lead to the same server for a while.
            ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown) => {
                self.connect_from(is_ours, Some(error.to_string().into()));
            }
            _ if error.is_unrecoverable_error() || error.is_timeout() => self.connect_from(is_ours, None),
            _ => {}
        }
    }

    /// Starts connecting if the state is the expected one: at once, or for a reason not to, after the first wait.
    fn connect_from(self: &Arc<Self>, expected: impl FnOnce(&State) -> bool, unless: Option<Arc<str>>) {
        let runtime = Handle::try_current().ok();
        let (next, waits) = match (&runtime, unless) {
            (None, _) => (State::Idle, false),
            (_, Some(why)) => (State::Down(why), true),
            (_, None) => (State::Connecting, false),
        };
        let mut number = 0;
        let starts = self.state.send_if_modified(|state| {
            let expected = expected(state);
            if expected {
                number = if let State::Up(line) = state { line.number + 1 } else { 1 };
                *state = next;
            }
            expected
        });
        if let (true, Some(runtime)) = (starts, runtime) {
            runtime.spawn(Attempts { shared: Arc::downgrade(self), number }.run(waits));
        }
    }

    async fn open(self: &Arc<Self>, number: u64) -> Result<Connection, RedisError> {
        if self.address.is_encrypted && rustls::crypto::CryptoProvider::get_default().is_none() {
            // Fails only where another thread was faster.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        let certificates = || TlsCertificates { client_tls: None, root_cert: self.authorities.clone() };
        let is_trusting = self.address.is_encrypted && self.authorities.is_some();
        let mut nodes = self.address.nodes()?;
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.patience.connect))
            .set_response_timeout(Some(self.patience.answer))
            .set_pipeline_buffer_size(QUEUE)
            .set_push_sender(self.listener(number));
        let subscription = self.keys.resets();
        let (connection, subscribed) = match &self.address.way {
            Way::Cluster => {
                let mut builder = ClusterClientBuilder::new(nodes)
                    .use_protocol(ProtocolVersion::RESP3)
                    .connection_timeout(self.patience.connect)
                    .response_timeout(self.patience.answer)
                    .retries(REDIRECTS)
                    .min_retry_wait(REDIRECT_WAITS.0)
                    .max_retry_wait(REDIRECT_WAITS.1)
                    .push_sender(self.listener(number));
                if is_trusting {
                    builder = builder.certs(certificates());
                }
                let mut cluster = builder.build()?.get_async_connection().await?;
                let subscribed = cluster.subscribe(subscription).await;
                (Connection::Cluster(cluster), subscribed)
            }
            way => {
                let client = match way {
                    Way::Sentinel(service) => self.ask_sentinels(service).await?,
                    _ => {
                        let node = nodes.pop().ok_or((ErrorKind::InvalidClientConfig, "no host"))?;
                        if is_trusting { Client::build_with_tls(node, certificates())? } else { Client::open(node)? }
                    }
                };
                let mut server = client.get_multiplexed_async_connection_with_config(&config).await?;
                let subscribed = server.subscribe(subscription).await;
                (Connection::Server(server), subscribed)
            }
        };
        // Who may not subscribe is told of no resets, and can be asked for everything else.
        let is_deaf = match subscribed {
            Ok(_) => false,
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => true,
            Err(error) => return Err(error),
        };
        self.is_deaf.store(is_deaf, Ordering::Relaxed);
        // Between one connection and the next some may have been told.
        self.tell(None);
        Ok(connection)
    }

    fn tell(&self, reset: Option<Reset>) {
        // An error says that nobody listens.
        let _ = self.news.send(reset);
    }

    async fn ask_sentinels(&self, service: &str) -> Result<Client, RedisError> {
        let login = self.address.login();
        let sentinels = self.address.nodes()?.into_iter().map(|node| node.addr().clone());
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
            if let Some(root_cert) = &self.authorities {
                let certificates = || TlsCertificates { client_tls: None, root_cert: Some(root_cert.clone()) };
                builder = builder
                    .set_client_to_redis_certificates(certificates())
                    .set_client_to_sentinel_certificates(certificates());
            }
        }
        builder.build()?.async_get_client().await
    }

    /// What is done with messages that come unasked: resets, and the end of the connection.
    fn listener(self: &Arc<Self>, number: u64) -> impl Fn(PushInfo) -> Result<(), RedisError> + Send + Sync + 'static {
        let shared = Arc::downgrade(self);
        move |push: PushInfo| {
            let Some(shared) = shared.upgrade() else { return Ok(()) };
            match (push.kind, push.data.as_slice()) {
                (PushKind::Message, [_, Value::BulkString(message)]) => {
                    if let Some(reset) = Keys::reset(message) {
                        shared.tell(Some(reset));
                    }
                }
                (PushKind::Disconnection, _) => {
                    let is_ours = |state: &State| match state {
                        State::Up(Line { connection: Connection::Server(_), number: up, .. }) => *up == number,
                        _ => false,
                    };
                    shared.connect_from(is_ours, None);
                }
                _ => {}
            }
            Ok(())
        }
    }
}

/// Connects, for as long as anybody has a use for it.
struct Attempts {
    shared: Weak<Shared>,
    number: u64,
}

impl Attempts {
    async fn run(self, waits_first: bool) {
        let mut waits = BackoffState::default();
        let mut random = SmallRng::from_rng(&mut rand::rng());
        let mut is_due = !waits_first;
        loop {
            if !is_due {
                tokio::time::sleep(waits.next(&RECONNECT, &mut random).as_duration()).await;
            }
            is_due = false;
            let Some(shared) = self.shared.upgrade() else { return };
            let patience = shared.patience.connect + shared.patience.answer;
            let next = match tokio::time::timeout(patience, shared.open(self.number)).await {
                Ok(Ok(connection)) => State::Up(Line { connection, number: self.number, runtime: Handle::current() }),
                Ok(Err(error)) => State::Down(error.to_string().into()),
                Err(_) => State::Down("connecting took too long".into()),
            };
            let is_up = matches!(next, State::Up(_));
            shared.state.send_replace(next);
            if is_up {
                return;
            }
        }
    }
}

impl Drop for Attempts {
    /// A runtime that ends takes its tasks with it; who asks in another one has to start anew.
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.state.send_if_modified(|state| {
                let given_up = !matches!(state, State::Up(_) | State::Idle);
                if given_up {
                    *state = State::Idle;
                }
                given_up
            });
        }
    }
}
