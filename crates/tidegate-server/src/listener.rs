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

use crate::clients::{Clients, Seat, TooMany};
use crate::connection::{Connection, Serves};
use crate::displace::Displaced;
use crate::socket::Socket;
use crate::watch::{Entry, Patience, Sweep, Watch};

/// How many connections may wait to be accepted.
const BACKLOG: u32 = 1024;
/// How long to pause when the process has no descriptors left.
const OUT_OF_FILES: Duration = Duration::from_millis(50);
/// The smallest read buffer that the HTTP machinery takes.
const MIN_BUFFER: usize = 8 << 10;

/// How many lines the HTTP machinery takes unless told. When told, even the same number, it readies its room for them
/// anew for each request, at a third of what reading one costs.
pub(crate) const USUAL_HEADERS: usize = 100;

/// What a listener accepts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Connections at once. At the bound a new one displaces one without a request under way, or waits until one leaves.
    pub(crate) connections: usize,
    /// Bytes of a head; over it the answer is 431.
    pub(crate) header_bytes: usize,
    /// Lines of a head; over it the answer is 431.
    pub(crate) headers: usize,
    pub(crate) patience: Patience,
    /// Whether requests are passed on, so that their framing has to be beyond doubt.
    pub(crate) forwards: bool,
}

/// A listening socket and the connections that came from it.
pub(crate) struct Listener {
    socket: TcpListener,
    bounds: Bounds,
    pub(crate) sweep: Arc<Sweep>,
    http: http1::Builder,
    clients: Option<Arc<Clients>>,
}

/// What a service is told of its connection.
pub(crate) struct Client {
    pub(crate) address: SocketAddr,
    pub(crate) watch: Arc<Watch>,
    pub(crate) entry: Arc<Entry>,
}

impl Listener {
    pub(crate) fn bind(address: SocketAddr, bounds: Bounds) -> io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A restarted gate takes its port back while old connections linger in TIME_WAIT.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        let mut http = http1::Builder::new();
        http.max_header_size(bounds.header_bytes).max_buf_size(bounds.header_bytes.max(MIN_BUFFER));
        if bounds.headers != USUAL_HEADERS {
            http.max_headers(bounds.headers);
        }
        Ok(Self {
            socket: socket.listen(BACKLOG)?,
            bounds,
            sweep: Sweep::new(bounds.patience, bounds.connections),
            http,
            clients: None,
        })
    }

    /// Takes at most so many connections of one client address, IPv6 by so many bits; of trusted proxies more.
    pub(crate) fn per_client(mut self, most: Option<usize>, ipv6_prefix: u8, trusted: &Networks) -> Self {
        self.clients = most.map(|most| Clients::new(most, ipv6_prefix, trusted.clone()));
        self
    }

    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Accepts until `stop` ends, then whoever was waiting already.
    pub(crate) async fn run<S>(self, serve: impl Fn(Client) -> S, stop: impl Future<Output = ()>)
    where
        S: Serves + Send + 'static,
        Connection<S>: Future<Output = ()> + Send,
        S: HttpService<Incoming, ResBody = crate::body::Body>,
        <S as HttpService<Incoming>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut stop = std::pin::pin!(stop);
        let (mut held, mut displaced) = (None, Displaced::default());
        loop {
            tokio::select! {
                biased;
                () = &mut stop => break,
                accepted = self.accept(&mut held, &mut displaced) => {
                    admit(&self.sweep, &self.http, self.bounds.forwards, accepted, &serve);
                }
            }
        }
        if let Some(held) = held.filter(|_| self.sweep.len() < self.bounds.connections) {
            admit(&self.sweep, &self.http, self.bounds.forwards, held, &serve);
        }
        self.take_who_waits(&serve);
    }

    /// Accepts those that the system has connected already, and closes. Between the last of them and the close the
    /// system may connect one more, which is then reset; so that it is no more than one, the queue is shut first.
    fn take_who_waits<S>(self, serve: &impl Fn(Client) -> S)
    where
        S: Serves + Send + 'static,
        Connection<S>: Future<Output = ()> + Send,
        S: HttpService<Incoming, ResBody = crate::body::Body>,
        <S as HttpService<Incoming>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let Self { socket, bounds, sweep, http, clients } = self;
        let Ok(socket) = socket.into_std() else { return };
        // Where this can't be done, a few more may be reset.
        let _ = socket2::SockRef::from(&socket).listen(0);
        // Not tokio's accept, which may not have heard of the latest yet.
        while sweep.len() < bounds.connections
            && let Ok((stream, address)) = socket.accept()
        {
            if stream.set_nonblocking(true).is_ok()
                && let Ok(stream) = TcpStream::from_std(stream)
                && let Some(accepted) = seated(clients.as_ref(), &sweep, stream, address)
            {
                admit(&sweep, &http, bounds.forwards, accepted, serve);
            }
        }
    }

    /// The next connection, once there is room for it. It is `held` meanwhile, so that it isn't lost with the future.
    async fn accept(&self, held: &mut Option<Accepted>, displaced: &mut Displaced) -> Accepted {
        loop {
            if held.is_none() {
                *held = self.next().await;
            }
            // Who left before the room was looked for would be taken for the one that is displaced.
            self.sweep.forget_left();
            if self.sweep.len() >= self.bounds.connections {
                displaced.one(&self.sweep);
                // One that is busy now may be idle soon, and leaves only when told.
                let _ = tokio::time::timeout(self.sweep.tick, self.sweep.one_left()).await;
            } else if let Some(accepted) = held.take() {
                return accepted;
            }
        }
    }

    async fn next(&self) -> Option<Accepted> {
        match self.socket.accept().await {
            Ok((stream, address)) => seated(self.clients.as_ref(), &self.sweep, stream, address),
            Err(error) if is_the_clients(&error) => None,
            Err(error) => {
                tracing::warn!(%error, "can't accept connections");
                tokio::time::sleep(OUT_OF_FILES).await;
                None
            }
        }
    }
}

/// A connection that its client may have.
struct Accepted {
    stream: TcpStream,
    address: SocketAddr,
    seat: Option<Seat>,
}

/// A new connection, unless its client has too many.
fn seated(clients: Option<&Arc<Clients>>, sweep: &Sweep, stream: TcpStream, address: SocketAddr) -> Option<Accepted> {
    let seat = match clients {
        None => None,
        Some(clients) => match clients.seat(address.ip()) {
            Ok(seat) => seat,
            Err(TooMany) => {
                clients.turn_away(&stream, address.ip(), sweep);
                return None;
            }
        },
    };
    Some(Accepted { stream, address, seat })
}

fn admit<S>(
    sweep: &Arc<Sweep>,
    http: &http1::Builder,
    forwards: bool,
    Accepted { stream, address, seat }: Accepted,
    serve: &impl Fn(Client) -> S,
) where
    S: Serves + Send + 'static,
    Connection<S>: Future<Output = ()> + Send,
    S: HttpService<Incoming, ResBody = crate::body::Body>,
    <S as HttpService<Incoming>>::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    if stream.set_nodelay(true).is_err() {
        return;
    }
    let (watch, mut entry) = sweep.join();
    entry.seat = seat;
    let entry = Arc::new(entry);
    let service = serve(Client { address, watch: Arc::clone(&watch), entry: Arc::clone(&entry) });
    let io = TokioIo::new(Socket::new(stream, Arc::clone(&watch), forwards));
    let http = http.serve_connection(io, service).with_upgrades();
    tokio::spawn(Connection::new(http, watch, entry));
}

/// Whether an error of `accept` is about one connection only.
fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
