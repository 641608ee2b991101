//! Accepts connections, never more than the cap at once.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt as _;
use http::StatusCode;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tidegate_policy::{InboundTimeouts, ListenAddress, ListenConfig, canonical_ip};

use crate::client_limit::{ClientLimit, ClientSlot, TooManyConnectionsError, reject_connection};
use crate::connection::{ClientConnection, ConnectionService};
use crate::displacement::DisplacementQueue;
use crate::http2::{Http2Client, Http2Connection, Http2Settings};
use crate::listen_socket::{Accepted, ListenSocket};
use crate::local_response;
use crate::preface::{OpenedStream, PlainText, Preface, PrefaceReader, TlsClient};
use crate::rejections::{HeadRejections, RejectionReason};
use crate::socket::ClientSocket;
use crate::stream::ClientStream;
use crate::tls::ListenerTls;
use crate::watchdog::{ConnectionEntry, ConnectionWatch, Watchdog};

/// The pause before the next accept if the process has no free descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// The pause after as many displacements as one scan finds. Without it, the connections of a flood would be accepted faster
/// than they are read.
const DISPLACEMENT_PAUSE: Duration = Duration::from_millis(1);
/// The time that a displaced connection has to leave before another one is displaced.
const DISPLACEMENT_TIME: Duration = Duration::from_millis(5);
/// The pause before the next search for a connection to displace if all have a request in progress.
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(25);
/// The smallest read buffer that the HTTP library accepts.
const MIN_BUFFER_BYTES: usize = 8 << 10;

/// The default limit of the HTTP library on header lines. If it is set, even to the same number, the library allocates
/// space for the headers anew for each request. That takes a third of the time of reading a request.
pub(crate) const DEFAULT_MAX_HEADERS: usize = 100;

pub(crate) struct ListenerConfig {
    /// The maximum number of connections. At the cap a new one displaces one without a request in progress, or waits.
    pub(crate) connections: usize,
    /// The limit on connections of one client address, if there is one.
    pub(crate) client_limit: Option<Arc<ClientLimit>>,
    /// The maximum size of a head in bytes; beyond it the response is 431.
    pub(crate) header_bytes: usize,
    /// The maximum number of lines of a head; beyond it the response is 431.
    pub(crate) headers: usize,
    pub(crate) timeouts: InboundTimeouts,
    /// The minimum bytes per second of a request's body, if there is such a limit.
    pub(crate) body_rate: Option<u64>,
    /// True if requests are forwarded. Then none that has begun is displaced.
    pub(crate) forwards: bool,
    /// The bytes before HTTP.
    pub(crate) preface: Preface,
}

/// Listening sockets and their connections.
pub(crate) struct Listener {
    sockets: Vec<ListenSocket>,
    /// The number of the socket that is asked first. The next one follows each time, so that none is left waiting.
    first: AtomicUsize,
    starter: Arc<ConnectionStarter>,
}

/// Starts the connections of a listener.
pub(crate) struct ConnectionStarter {
    config: ListenerConfig,
    watchdog: Arc<Watchdog>,
    http: http1::Builder,
    pub(crate) rejections: Arc<HeadRejections>,
}

/// A connection on which the listener's protocol begins.
pub(crate) struct NewConnection {
    pub(crate) opened: OpenedStream,
    pub(crate) watch: Arc<ConnectionWatch>,
    pub(crate) entry: ConnectionEntry,
}

/// The protocol of a listener's connections.
pub(crate) trait ConnectionHandler: Send + Sync + 'static {
    /// Returns the future of a connection.
    fn serve(&self, starter: &ConnectionStarter, new: NewConnection) -> impl Future<Output = ()> + Send + 'static;

    /// Returns the future of a connection that begins as HTTP/2 does.
    fn serve_http2(&self, starter: &ConnectionStarter, new: NewConnection)
    -> impl Future<Output = ()> + Send + 'static;

    /// Returns the future of a connection that doesn't begin with TLS, as it should.
    fn refuse_plain(
        &self,
        starter: &ConnectionStarter,
        new: NewConnection,
    ) -> impl Future<Output = ()> + Send + 'static;
}

/// HTTP, with the service of each connection.
pub(crate) struct HttpHandler<S>(pub(crate) NewService<S>);

/// The facts about a connection that its service needs.
pub(crate) struct ConnectionContext {
    pub(crate) address: SocketAddr,
    /// Present if the connection uses TLS.
    pub(crate) tls: Option<Arc<TlsClient>>,
    pub(crate) watch: Arc<ConnectionWatch>,
    pub(crate) entry: Arc<ConnectionEntry>,
}

/// Makes the service of a connection.
pub(crate) type NewService<S> = Arc<dyn Fn(ConnectionContext) -> S + Send + Sync>;

struct AcceptedConnection {
    stream: ClientStream,
    address: SocketAddr,
    client_slot: Option<ClientSlot>,
}

impl Listener {
    /// Opens all sockets.
    ///
    /// # Errors
    /// The address that can't be opened; no socket stays open then.
    pub(crate) fn bind(
        listen: &ListenConfig,
        config: ListenerConfig,
        rejections: HeadRejections,
    ) -> Result<Self, (ListenAddress, io::Error)> {
        let bind =
            |address: &ListenAddress| ListenSocket::bind(address, listen).map_err(|error| (address.clone(), error));
        let sockets = listen.addresses.iter().map(bind).collect::<Result<_, _>>()?;
        let mut http = http1::Builder::new();
        http.max_header_size(config.header_bytes).max_buf_size(config.header_bytes.max(MIN_BUFFER_BYTES));
        if config.headers != DEFAULT_MAX_HEADERS {
            http.max_headers(config.headers);
        }
        let watchdog = Watchdog::new(&config.timeouts, config.body_rate, config.connections, config.forwards);
        let rejections = Arc::new(rejections);
        Ok(Self {
            sockets,
            first: AtomicUsize::new(0),
            starter: Arc::new(ConnectionStarter { config, watchdog, http, rejections }),
        })
    }

    /// The addresses; for TCP those that the system has chosen.
    pub(crate) fn addresses(&self) -> Vec<ListenAddress> {
        self.sockets.iter().filter_map(|socket| socket.address().ok()).collect()
    }

    /// The TLS of its IP addresses, if it has any.
    pub(crate) fn tls(&self) -> Option<&Arc<ListenerTls>> {
        self.starter.config.preface.tls.as_ref()
    }

    pub(crate) fn watchdog(&self) -> &Arc<Watchdog> {
        &self.starter.watchdog
    }

    /// Accepts until `stop` ends, then the connections that were already waiting.
    pub(crate) async fn run(self, handler: Arc<impl ConnectionHandler>, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        let (mut waiting, mut displaced) = (None, DisplacementQueue::default());
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                accepted = self.accept_with_capacity(&mut waiting, &mut displaced) => {
                    self.starter.spawn(accepted, &handler);
                }
            }
        }
        if let Some(held) = waiting.filter(|_| self.starter.has_capacity()) {
            self.starter.spawn(held, &handler);
        }
        self.accept_backlog(&handler);
    }

    /// Accepts the connections that the system has already established, then closes the sockets. The system may
    /// establish one more before the close, which is then reset.
    fn accept_backlog(self, handler: &Arc<impl ConnectionHandler>) {
        for socket in self.sockets {
            let Ok(socket) = socket.into_std() else { continue };
            // The socket's own accept, because tokio may not know of the latest connections yet.
            while self.starter.has_capacity()
                && let Ok(accepted) = socket.accept()
            {
                if let Some(accepted) = self.starter.admit(accepted) {
                    self.starter.spawn(accepted, handler);
                }
            }
        }
    }

    /// Returns the next connection once there is capacity. `held` keeps it until then, so that dropping the future
    /// doesn't lose it.
    async fn accept_with_capacity(
        &self,
        held: &mut Option<AcceptedConnection>,
        displaced: &mut DisplacementQueue,
    ) -> AcceptedConnection {
        let watchdog = &self.starter.watchdog;
        loop {
            if held.is_none() {
                *held = self.accept_one().await;
                // No connection is displaced for one that isn't accepted.
                if held.is_none() {
                    continue;
                }
            }
            // An earlier leave would otherwise be mistaken for that of the displaced connection.
            let _ = watchdog.connection_left.notified().now_or_never();
            let is_full = !self.starter.has_capacity();
            watchdog.is_full.set(is_full);
            if is_full {
                if displaced.is_empty() {
                    tokio::time::sleep(DISPLACEMENT_PAUSE).await;
                }
                // A displaced connection leaves at once, unless its request has just arrived. One that is busy may be idle
                // soon, but only leaves if it is displaced.
                let wait = if displaced.displace_one(watchdog) { DISPLACEMENT_TIME } else { BUSY_RETRY_DELAY };
                let _ = tokio::time::timeout(wait, watchdog.connection_left.notified()).await;
            } else if let Some(accepted) = held.take() {
                return accepted;
            }
        }
    }

    async fn accept_any(&self) -> io::Result<Accepted> {
        poll_fn(|cx| {
            let first = self.first.fetch_add(1, Ordering::Relaxed) % self.sockets.len().max(1);
            let in_turn = self.sockets.iter().skip(first).chain(self.sockets.iter().take(first));
            in_turn.map(|socket| socket.poll_accept(cx)).find(Poll::is_ready).unwrap_or(Poll::Pending)
        })
        .await
    }

    async fn accept_one(&self) -> Option<AcceptedConnection> {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
        match self.accept_any().await {
            Ok(accepted) => self.starter.admit(accepted),
            // These errors concern one connection only.
            Err(error) if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) => None,
            Err(error) => {
                tracing::warn!(%error, "can't accept connections");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                None
            }
        }
    }
}

impl ConnectionStarter {
    fn has_capacity(&self) -> bool {
        self.watchdog.len() < self.config.connections
    }

    /// Returns the new connection, unless its client has too many.
    fn admit(&self, (stream, address): Accepted) -> Option<AcceptedConnection> {
        // The header names the client.
        let counted = !self.config.preface.has_proxy_header(address.ip());
        let client_slot = if counted { self.client_slot(&stream, address)? } else { None };
        Some(AcceptedConnection { stream, address, client_slot })
    }

    /// Counts the connection of a client. `None` if the client has too many, and then has its answer, except with TLS,
    /// because it can't read one before its handshake.
    fn client_slot(&self, stream: &ClientStream, address: SocketAddr) -> Option<Option<ClientSlot>> {
        let Some(clients) = &self.config.client_limit else { return Some(None) };
        match clients.acquire(address.ip()) {
            Ok(slot) => Some(slot),
            Err(TooManyConnectionsError) => {
                let why = format!(
                    "more than {} connections of one address (connections_per_client)",
                    clients.max_connections
                );
                let is_answered = self.config.preface.tls_of(stream).is_none();
                if is_answered {
                    reject_connection(stream, &why);
                }
                let (ip, status) = (canonical_ip(address.ip()), StatusCode::SERVICE_UNAVAILABLE);
                self.rejections.record(ip, RejectionReason::ClientConnections, is_answered.then_some(status), &why);
                None
            }
        }
    }

    fn spawn<H: ConnectionHandler>(
        self: &Arc<Self>,
        AcceptedConnection { mut stream, mut address, client_slot }: AcceptedConnection,
        handler: &Arc<H>,
    ) {
        if let ClientStream::Tcp(stream) = &stream
            && stream.set_nodelay(true).is_err()
        {
            return;
        }
        let (watch, mut entry) = self.watchdog.add_connection(client_slot);
        if !self.config.preface.is_expected(&stream, address.ip()) {
            let opened = OpenedStream { stream, address, tls: None, is_http2: false };
            tokio::spawn(handler.serve(self, NewConnection { opened, watch, entry }));
            return;
        }
        let (starter, handler) = (Arc::clone(self), Arc::clone(handler));
        tokio::spawn(async move {
            let preface = &starter.config.preface;
            let reader = PrefaceReader { preface, watch: &watch, rejections: &starter.rejections };
            if preface.has_proxy_header(address.ip()) {
                let Some(client) = reader.read_proxy_header(&mut stream, address).await else { return };
                let Some(slot) = starter.client_slot(&stream, client) else { return };
                address = client;
                entry.set_client(slot);
            }
            match reader.open(stream, address).await {
                Some(Ok(opened)) if opened.is_http2 => {
                    handler.serve_http2(&starter, NewConnection { opened, watch, entry }).await;
                }
                Some(Ok(opened)) => handler.serve(&starter, NewConnection { opened, watch, entry }).await,
                Some(Err(PlainText(stream))) => {
                    let opened = OpenedStream { stream, address, tls: None, is_http2: false };
                    handler.refuse_plain(&starter, NewConnection { opened, watch, entry }).await;
                }
                None => {}
            }
        });
    }
}

impl<S: ConnectionService> ConnectionHandler for HttpHandler<S> {
    fn serve(
        &self,
        starter: &ConnectionStarter,
        NewConnection { opened: OpenedStream { stream, address, tls, .. }, watch, entry }: NewConnection,
    ) -> impl Future<Output = ()> + Send + 'static {
        let entry = Arc::new(entry);
        let service = self.0(ConnectionContext { address, tls, watch: Arc::clone(&watch), entry: Arc::clone(&entry) });
        let io = TokioIo::new(ClientSocket::new(stream, Arc::clone(&watch)));
        let (rejections, ip) = (Arc::clone(&starter.rejections), canonical_ip(address.ip()));
        let http = starter.http.serve_connection(io, service).with_upgrades();
        ClientConnection::new(http, watch, entry, rejections, ip)
    }

    fn serve_http2(
        &self,
        starter: &ConnectionStarter,
        NewConnection { opened: OpenedStream { stream, address, tls, .. }, watch, mut entry }: NewConnection,
    ) -> impl Future<Output = ()> + Send + 'static {
        let ListenerConfig { header_bytes, headers, .. } = starter.config;
        let client = Http2Client {
            address,
            tls,
            watch,
            free_slot: Mutex::new(entry.client_slot.take()),
            entry: Arc::new(entry),
            rejections: Arc::clone(&starter.rejections),
            ip: canonical_ip(address.ip()),
            client_limit: starter.config.client_limit.clone(),
        };
        Http2Connection::new(Http2Settings { header_bytes, headers }, stream, client, Arc::clone(&self.0))
    }

    fn refuse_plain(
        &self,
        starter: &ConnectionStarter,
        NewConnection { opened: OpenedStream { stream, address, .. }, watch, entry }: NewConnection,
    ) -> impl Future<Output = ()> + Send + 'static {
        let response =
            local_response::raw_error_response(StatusCode::BAD_REQUEST, "this port takes only TLS: use https://");
        let (rejections, ip) = (Arc::clone(&starter.rejections), canonical_ip(address.ip()));
        ClientConnection::<S>::closing(stream, response, watch, Arc::new(entry), rejections, ip)
    }
}
