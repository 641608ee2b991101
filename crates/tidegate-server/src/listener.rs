//! Accepts connections, never more than the cap at once.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::HttpService;
use hyper_util::rt::TokioIo;
use tidegate_policy::Networks;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::client_limit::{ClientLimit, ClientSlot, TooManyConnectionsError};
use crate::connection::{ClientConnection, ConnectionService};
use crate::displacement::DisplacementQueue;
use crate::socket::ClientSocket;
use crate::watchdog::{ConnectionEntry, ConnectionWatch, PhaseTimeouts, Watchdog};

/// The maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 1024;
/// The pause before the next accept if the process has no free descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// The smallest read buffer that the HTTP library accepts.
const MIN_BUFFER_BYTES: usize = 8 << 10;

/// The default limit of the HTTP library on header lines. If it is set, even to the same number, the library allocates
/// space for the headers anew for each request. That takes a third of the time of reading a request.
pub(crate) const DEFAULT_MAX_HEADERS: usize = 100;

/// The limits of a listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenerConfig {
    /// The maximum number of connections. At the cap a new one displaces one without a request in progress, or waits.
    pub(crate) connections: usize,
    /// The maximum size of a head in bytes; beyond it the response is 431.
    pub(crate) header_bytes: usize,
    /// The maximum number of lines of a head; beyond it the response is 431.
    pub(crate) headers: usize,
    pub(crate) timeouts: PhaseTimeouts,
    /// True if requests are forwarded, so that their framing must be unambiguous.
    pub(crate) forwards: bool,
}

/// A listening socket and its connections.
pub(crate) struct Listener {
    socket: TcpListener,
    config: ListenerConfig,
    pub(crate) watchdog: Arc<Watchdog>,
    http: http1::Builder,
    client_limit: Option<Arc<ClientLimit>>,
}

/// The facts about a connection that its service needs.
pub(crate) struct ConnectionContext {
    pub(crate) address: SocketAddr,
    pub(crate) watch: Arc<ConnectionWatch>,
    pub(crate) entry: Arc<ConnectionEntry>,
}

impl Listener {
    pub(crate) fn bind(address: SocketAddr, config: ListenerConfig) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A restarted gate can reuse its port while old connections are in TIME_WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        let mut http = http1::Builder::new();
        http.max_header_size(config.header_bytes).max_buf_size(config.header_bytes.max(MIN_BUFFER_BYTES));
        if config.headers != DEFAULT_MAX_HEADERS {
            http.max_headers(config.headers);
        }
        Ok(Self {
            socket: socket.listen(BACKLOG)?,
            config,
            watchdog: Watchdog::new(config.timeouts, config.connections),
            http,
            client_limit: None,
        })
    }

    /// Limits the connections of one client address, IPv6 by the first `ipv6_prefix` bits. Trusted proxies aren't
    /// limited.
    pub(crate) fn limit_per_client(mut self, most: Option<usize>, ipv6_prefix: u8, trusted: &Networks) -> Self {
        self.client_limit = most.map(|most| ClientLimit::new(most, ipv6_prefix, trusted.clone()));
        self
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Accepts until `stop` ends, then the connections that were already waiting.
    pub(crate) async fn run<S>(self, serve: impl Fn(ConnectionContext) -> S, stop: impl Future<Output = ()>)
    where
        S: ConnectionService + Send + 'static,
        ClientConnection<S>: Future<Output = ()> + Send,
        S: HttpService<Incoming, ResBody = crate::body::ResponseBody>,
        <S as HttpService<Incoming>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut stop = std::pin::pin!(stop);
        let (mut waiting, mut displaced) = (None, DisplacementQueue::default());
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                accepted = self.accept_with_capacity(&mut waiting, &mut displaced) => {
                    spawn_connection(&self.watchdog, &self.http, self.config.forwards, accepted, &serve);
                }
            }
        }
        if let Some(held) = waiting.filter(|_| self.watchdog.len() < self.config.connections) {
            spawn_connection(&self.watchdog, &self.http, self.config.forwards, held, &serve);
        }
        self.accept_backlog(&serve);
    }

    /// Accepts the connections that the system has already established, then closes the socket. The system may
    /// establish one more before the close, which is then reset. The queue is closed first so that it is at most one.
    fn accept_backlog<S>(self, serve: &impl Fn(ConnectionContext) -> S)
    where
        S: ConnectionService + Send + 'static,
        ClientConnection<S>: Future<Output = ()> + Send,
        S: HttpService<Incoming, ResBody = crate::body::ResponseBody>,
        <S as HttpService<Incoming>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let Self { socket, config, watchdog, http, client_limit } = self;
        let Ok(socket) = socket.into_std() else { return };
        // If this fails, a few more connections may be reset.
        let _ = socket2::SockRef::from(&socket).listen(0);
        // The socket's own accept, because tokio may not know of the latest connections yet.
        while watchdog.len() < config.connections
            && let Ok((stream, address)) = socket.accept()
        {
            if stream.set_nonblocking(true).is_ok()
                && let Ok(stream) = TcpStream::from_std(stream)
                && let Some(accepted) = acquire_client_slot(client_limit.as_ref(), &watchdog, stream, address)
            {
                spawn_connection(&watchdog, &http, config.forwards, accepted, serve);
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
        loop {
            if held.is_none() {
                *held = self.accept_one().await;
            }
            // An earlier leave would otherwise be mistaken for that of the displaced connection.
            self.watchdog.reset_left_signal();
            if self.watchdog.len() >= self.config.connections {
                displaced.displace_one(&self.watchdog);
                // A connection that is busy now may be idle soon, but only leaves if it is displaced.
                let _ = tokio::time::timeout(self.watchdog.tick, self.watchdog.wait_for_leave()).await;
            } else if let Some(accepted) = held.take() {
                return accepted;
            }
        }
    }

    async fn accept_one(&self) -> Option<AcceptedConnection> {
        match self.socket.accept().await {
            Ok((stream, address)) => acquire_client_slot(self.client_limit.as_ref(), &self.watchdog, stream, address),
            Err(error) if is_connection_error(&error) => None,
            Err(error) => {
                tracing::warn!(%error, "can't accept connections");
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                None
            }
        }
    }
}

/// An accepted connection with its client's slot.
struct AcceptedConnection {
    stream: TcpStream,
    address: SocketAddr,
    client_slot: Option<ClientSlot>,
}

/// Returns the new connection, unless its client has too many.
fn acquire_client_slot(
    client_limit: Option<&Arc<ClientLimit>>,
    watchdog: &Watchdog,
    stream: TcpStream,
    address: SocketAddr,
) -> Option<AcceptedConnection> {
    let client_slot = match client_limit {
        None => None,
        Some(clients) => match clients.acquire(address.ip()) {
            Ok(client_slot) => client_slot,
            Err(TooManyConnectionsError) => {
                clients.reject_connection(&stream, address.ip(), watchdog);
                return None;
            }
        },
    };
    Some(AcceptedConnection { stream, address, client_slot })
}

fn spawn_connection<S>(
    watchdog: &Arc<Watchdog>,
    http: &http1::Builder,
    forwards: bool,
    AcceptedConnection { stream, address, client_slot }: AcceptedConnection,
    serve: &impl Fn(ConnectionContext) -> S,
) where
    S: ConnectionService + Send + 'static,
    ClientConnection<S>: Future<Output = ()> + Send,
    S: HttpService<Incoming, ResBody = crate::body::ResponseBody>,
    <S as HttpService<Incoming>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let (watch, mut entry) = watchdog.add_connection();
    entry.client_slot = client_slot;
    let entry = Arc::new(entry);
    let service = serve(ConnectionContext { address, watch: Arc::clone(&watch), entry: Arc::clone(&entry) });
    let io = TokioIo::new(ClientSocket::new(stream, Arc::clone(&watch), forwards));
    let http = http.serve_connection(io, service).with_upgrades();
    tokio::spawn(ClientConnection::new(http, watch, entry));
}

/// True if an error of `accept` concerns one connection only.
fn is_connection_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
