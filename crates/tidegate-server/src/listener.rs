//! Accepting connections, never more than the cap at once.

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

/// How many connections may wait to be accepted.
const BACKLOG: u32 = 1024;
/// How long to pause when the process has no descriptors left.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);
/// The smallest read buffer that the HTTP machinery takes.
const MIN_BUFFER_BYTES: usize = 8 << 10;

/// How many lines the HTTP machinery takes unless told. When told, even the same number, it readies its room for them
/// anew for each request, at a third of what reading one costs.
pub(crate) const DEFAULT_MAX_HEADERS: usize = 100;

/// What a listener accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ListenerConfig {
    /// Connections at once. At the bound a new one displaces one without a request under way, or waits until one leaves.
    pub(crate) connections: usize,
    /// Bytes of a head; over it the answer is 431.
    pub(crate) header_bytes: usize,
    /// Lines of a head; over it the answer is 431.
    pub(crate) headers: usize,
    pub(crate) timeouts: PhaseTimeouts,
    /// Whether requests are passed on, so that their framing has to be beyond doubt.
    pub(crate) forwards: bool,
}

/// A listening socket and the connections that came from it.
pub(crate) struct Listener {
    socket: TcpListener,
    config: ListenerConfig,
    pub(crate) watchdog: Arc<Watchdog>,
    http: http1::Builder,
    client_limit: Option<Arc<ClientLimit>>,
}

/// What a service is told of its connection.
pub(crate) struct ConnectionContext {
    pub(crate) address: SocketAddr,
    pub(crate) watch: Arc<ConnectionWatch>,
    pub(crate) entry: Arc<ConnectionEntry>,
}

impl Listener {
    pub(crate) fn bind(address: SocketAddr, bounds: ListenerConfig) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A restarted gate takes its port back while old connections linger in TIME_WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        let mut http = http1::Builder::new();
        http.max_header_size(bounds.header_bytes).max_buf_size(bounds.header_bytes.max(MIN_BUFFER_BYTES));
        if bounds.headers != DEFAULT_MAX_HEADERS {
            http.max_headers(bounds.headers);
        }
        Ok(Self {
            socket: socket.listen(BACKLOG)?,
            config: bounds,
            watchdog: Watchdog::new(bounds.timeouts, bounds.connections),
            http,
            client_limit: None,
        })
    }

    /// Takes at most so many connections of one client address, IPv6 by so many bits; of trusted proxies more.
    pub(crate) fn limit_per_client(mut self, most: Option<usize>, ipv6_prefix: u8, trusted: &Networks) -> Self {
        self.client_limit = most.map(|most| ClientLimit::new(most, ipv6_prefix, trusted.clone()));
        self
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Accepts until `stop` ends, then whoever was waiting already.
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

    /// Accepts those that the system has connected already, and closes. Between the last of them and the close the
    /// system may connect one more, which is then reset; so that it is no more than one, the queue is shut first.
    fn accept_backlog<S>(self, serve: &impl Fn(ConnectionContext) -> S)
    where
        S: ConnectionService + Send + 'static,
        ClientConnection<S>: Future<Output = ()> + Send,
        S: HttpService<Incoming, ResBody = crate::body::ResponseBody>,
        <S as HttpService<Incoming>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let Self { socket, config: bounds, watchdog: sweep, http, client_limit: clients } = self;
        let Ok(socket) = socket.into_std() else { return };
        // Where this can't be done, a few more may be reset.
        let _ = socket2::SockRef::from(&socket).listen(0);
        // Not tokio's accept, which may not have heard of the latest yet.
        while sweep.len() < bounds.connections
            && let Ok((stream, address)) = socket.accept()
        {
            if stream.set_nonblocking(true).is_ok()
                && let Ok(stream) = TcpStream::from_std(stream)
                && let Some(accepted) = acquire_client_slot(clients.as_ref(), &sweep, stream, address)
            {
                spawn_connection(&sweep, &http, bounds.forwards, accepted, serve);
            }
        }
    }

    /// The next connection, once there is room for it. It is `held` meanwhile, so that it isn't lost with the future.
    async fn accept_with_capacity(
        &self,
        held: &mut Option<AcceptedConnection>,
        displaced: &mut DisplacementQueue,
    ) -> AcceptedConnection {
        loop {
            if held.is_none() {
                *held = self.accept_one().await;
            }
            // Who left before the room was looked for would be taken for the one that is displaced.
            self.watchdog.reset_left_signal();
            if self.watchdog.len() >= self.config.connections {
                displaced.displace_one(&self.watchdog);
                // One that is busy now may be idle soon, and leaves only when told.
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

/// A connection that its client may have.
struct AcceptedConnection {
    stream: TcpStream,
    address: SocketAddr,
    client_slot: Option<ClientSlot>,
}

/// A new connection, unless its client has too many.
fn acquire_client_slot(
    clients: Option<&Arc<ClientLimit>>,
    sweep: &Watchdog,
    stream: TcpStream,
    address: SocketAddr,
) -> Option<AcceptedConnection> {
    let seat = match clients {
        None => None,
        Some(clients) => match clients.acquire(address.ip()) {
            Ok(seat) => seat,
            Err(TooManyConnectionsError) => {
                clients.reject_connection(&stream, address.ip(), sweep);
                return None;
            }
        },
    };
    Some(AcceptedConnection { stream, address, client_slot: seat })
}

fn spawn_connection<S>(
    sweep: &Arc<Watchdog>,
    http: &http1::Builder,
    forwards: bool,
    AcceptedConnection { stream, address, client_slot: seat }: AcceptedConnection,
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
    let (watch, mut entry) = sweep.add_connection();
    entry.client_slot = seat;
    let entry = Arc::new(entry);
    let service = serve(ConnectionContext { address, watch: Arc::clone(&watch), entry: Arc::clone(&entry) });
    let io = TokioIo::new(ClientSocket::new(stream, Arc::clone(&watch), forwards));
    let http = http.serve_connection(io, service).with_upgrades();
    tokio::spawn(ClientConnection::new(http, watch, entry));
}

/// Whether an error of `accept` is about one connection only.
fn is_connection_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
