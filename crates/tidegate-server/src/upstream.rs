//! A client of one server, with a pool of its connections.
//!
//! *Why here:* a general client keys its pool by host. It has each request wait both for an idle connection and for a
//! new one, and passes every response through a task of its own. One server and one protocol only need a stack of idle
//! connections under one lock. The newest is used first, and the oldest are closed before the server closes them.

mod http1_pool;
mod http2_pool;
mod reply_stream;
mod work;

use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::uri::{Authority, Scheme};
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tidegate_core::retry::TransportFault;
use tidegate_outbound::{causes, fault_of};
use tidegate_policy::outbound::BaseUrl;
use tidegate_policy::{UpstreamAddress, UpstreamTls};
use tidegate_runtime::file_watcher::FileStamp;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio_rustls::TlsConnector;
use tower_service::Service as _;

use self::http1_pool::{Http1Connection, Http1Pool};
pub(crate) use self::http2_pool::{CONNECTION_WINDOW, PING, STREAM_WINDOW};
use self::http2_pool::{Http2Pool, Http2Stream, to_http2};
pub(crate) use self::reply_stream::ReplyStream;
use self::work::{CurrentWork, ObservedStream};
pub(crate) use self::work::{MAX_OBSERVED, UpstreamWork, observed_calls};
use crate::body::{BoxError, Upload, is_last};
use crate::http2::ALPN_NAME;
use crate::tls::{TlsError, client_config};

/// The most bytes in the head of a response, and the most header lines over HTTP/1.1. A response with more is a failure.
/// Over HTTP/1.1, a head of up to twice the bytes may pass if it arrives at once; over HTTP/2, each line counts 32 bytes
/// more (RFC 9113 §6.5.2).
pub(crate) const MAX_HEAD_BYTES: usize = 256 << 10;
pub(crate) const MAX_HEAD_LINES: usize = 1000;

/// The settings of a pool of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolSettings {
    /// The time for connecting, including the name look-up.
    pub(crate) connect_timeout: Duration,
    /// The time that an idle connection is kept.
    pub(crate) idle_timeout: Duration,
    /// The maximum number of idle connections.
    pub(crate) max_idle: usize,
}

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerAddress {
    /// Its name in requests.
    authority: Authority,
    transport: Transport,
    /// True if it is spoken to in HTTP/2.
    http2: bool,
}

/// The way to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Transport {
    Tcp,
    Unix(PathBuf),
    Tls(UpstreamTrust),
}

/// The trust in a server, and the stamps of its files, by which a reload sees that they have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UpstreamTrust {
    settings: UpstreamTls,
    stamps: Vec<Option<FileStamp>>,
}

impl From<Option<&Path>> for Transport {
    fn from(unix_path: Option<&Path>) -> Self {
        unix_path.map_or(Self::Tcp, |path| Self::Unix(path.to_owned()))
    }
}

impl ServerAddress {
    /// The address of the proxy's server.
    pub(crate) fn upstream(address: &UpstreamAddress, settings: &UpstreamTls, http2: bool) -> Self {
        let authority = Authority::try_from(address.authority()).expect("invariant: the policy was read");
        if !address.is_https() {
            return Self { authority, transport: address.unix_path().into(), http2 };
        }
        let pair = settings.certificate.iter().flat_map(|files| [&files.certificate, &files.key]);
        let stamps = settings.ca.iter().chain(pair).map(|path| FileStamp::read(path)).collect();
        Self { authority, transport: Transport::Tls(UpstreamTrust { settings: settings.clone(), stamps }), http2 }
    }

    /// The port if the authority has none.
    fn default_port(&self) -> u16 {
        if matches!(self.transport, Transport::Tls(_)) { 443 } else { 80 }
    }
}

impl From<&BaseUrl> for ServerAddress {
    fn from(base: &BaseUrl) -> Self {
        Self { authority: base.authority().clone(), transport: base.unix_path().into(), http2: false }
    }
}

/// A server, and the connections to it. Requests have bodies of type `B`.
pub(crate) struct UpstreamClient<B = Upload> {
    address: ServerAddress,
    /// The host and port to connect to, as the connector takes them.
    destination: Uri,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    /// The server's name as a `Host` value.
    pub(crate) host: HeaderValue,
    connector: HttpConnector,
    settings: PoolSettings,
    http: http1::Builder,
    http1: Arc<Http1Pool<B>>,
    http2: Arc<Http2Pool<B>>,
    /// The task that closes connections that have been idle for too long.
    cleanup: AbortHandle,
}

/// A connection that takes a request, or a place on one.
enum Sender<B> {
    Http1(Http1Connection<B>),
    Http2(Http2Stream<B>),
}

impl<B> Sender<B> {
    /// Notes that a request with a permit is being sent.
    fn begin(&self, work: &Arc<UpstreamWork>) {
        let attempt = work.begin(matches!(self, Self::Http1(_)));
        if let Self::Http1(connection) = self {
            *connection.work.lock() = Some((Arc::clone(work), attempt));
        }
    }

    /// Notes that it has its response.
    fn forget_work(&self) {
        if let Self::Http1(connection) = self {
            *connection.work.lock() = None;
        }
    }
}

/// The reason why there is no response of the server to forward.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("can't connect to the upstream: {0}")]
    Connect(io::Error),
    #[error("connecting to the upstream takes too long")]
    ConnectTimeout,
    #[error("the upstream broke off: {0}")]
    Broken(#[source] hyper::Error),
    /// The request was never sent, because its connection ended before that.
    #[error("the upstream broke off: {0}")]
    Unsent(#[source] hyper::Error),
    /// The upstream has told that it did not process the request.
    #[error("the upstream took no more requests: {0}")]
    Unprocessed(#[source] hyper::Error),
    #[error("the upstream switched protocols, but the request asked for no upgrade")]
    UnexpectedUpgrade,
    #[error("no progress in time")]
    Timeout,
}

impl UpstreamError {
    /// The reasons in metrics.
    pub(crate) const REASONS: [&str; 5] = ["connect", "connect_timeout", "broken", "unexpected_upgrade", "timeout"];

    /// The error of a request that was sent.
    fn of_sent(error: hyper::Error) -> Self {
        if fault_of(&error) == TransportFault::Unsent { Self::Unprocessed(error) } else { Self::Broken(error) }
    }

    /// The index of its reason in [`REASONS`](Self::REASONS).
    pub(crate) fn reason_index(&self) -> usize {
        match self {
            Self::Connect(_) => 0,
            Self::ConnectTimeout => 1,
            Self::Broken(_) | Self::Unsent(_) | Self::Unprocessed(_) => 2,
            Self::UnexpectedUpgrade => 3,
            Self::Timeout => 4,
        }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static> UpstreamClient<B> {
    /// Returns a client of the server at this address. The default port may be left out.
    ///
    /// # Errors
    /// The certificates of the server's trust can't be used.
    pub(crate) fn new(address: impl Into<ServerAddress>, settings: PoolSettings) -> Result<Arc<Self>, TlsError> {
        let address = address.into();
        let authority = &address.authority;
        let tls = match &address.transport {
            Transport::Tls(trust) => {
                let name = trust.settings.server_name.as_deref();
                let name = name.unwrap_or_else(|| authority.host().trim_matches(['[', ']'])).to_owned();
                let name = ServerName::try_from(name).map_err(|_| TlsError::ServerName(authority.to_string()))?;
                Some((TlsConnector::from(client_config(&trust.settings, address.http2)?), name))
            }
            Transport::Tcp | Transport::Unix(_) => None,
        };
        let port = authority.port_u16().unwrap_or_else(|| address.default_port());
        let destination = Uri::try_from(format!("http://{}:{port}", authority.host()));
        let destination = destination.expect("invariant: an authority is part of a URL");
        // Most clients leave out the default port, and some sign the header that way.
        let port = Some(port).filter(|port| *port != address.default_port());
        let host = port.map_or_else(|| authority.host().to_owned(), |port| format!("{}:{port}", authority.host()));
        let host = HeaderValue::try_from(host).expect("invariant: an authority's host is a value of Host");
        let http1 = Arc::new(Http1Pool::new(settings));
        let http2 = Arc::new(Http2Pool::default());
        let cleanup = match address.http2 {
            true => tokio::spawn(Arc::clone(&http2).run_idle_cleanup()),
            false => tokio::spawn(Arc::clone(&http1).run_idle_cleanup()),
        };
        Ok(Arc::new(Self {
            tls,
            destination,
            address,
            host,
            connector: tcp_connector(settings.connect_timeout),
            settings,
            http: http1_builder(),
            cleanup: cleanup.abort_handle(),
            http1,
            http2,
        }))
    }

    /// True if the client is for this server, with these settings.
    pub(crate) fn is_for(&self, address: &ServerAddress, settings: PoolSettings) -> bool {
        self.address == *address && self.settings == settings
    }

    /// True if requests are sent in HTTP/2, which has no upgrades.
    pub(crate) fn speaks_http2(&self) -> bool {
        self.address.http2
    }

    /// Sends a request and waits for the head of the response. Notes in `work` what is known of the server's work on it.
    ///
    /// An idle connection may turn out to be closed. While nothing was sent, the request is tried on another one.
    #[expect(clippy::manual_async_fn, reason = "one would hold the request twice, as it came and as it goes on")]
    pub(crate) fn send(
        self: Arc<Self>,
        mut request: Request<B>,
        work: Option<Arc<UpstreamWork>>,
    ) -> impl Future<Output = Result<Response<UpstreamBody<B>>, UpstreamError>> + Send {
        async move {
            loop {
                let (mut sender, kept) = match self.take_open() {
                    Some(sender) => (sender, true),
                    // Boxed, because requests over an idle connection would need the space for it too.
                    None => Box::pin(self.connect()).await?,
                };
                if let Some(work) = &work {
                    sender.begin(work);
                }
                let sent = match &mut sender {
                    Sender::Http1(connection) => connection.sender.try_send_request(request).await,
                    Sender::Http2(stream) => {
                        to_http2(&mut request, self.scheme());
                        stream.sender.try_send_request(request).await
                    }
                };
                match sent {
                    Ok(response) => {
                        if let Some(work) = &work {
                            work.answer();
                            sender.forget_work();
                        }
                        // A connection that has switched protocols takes no further request.
                        let stays = response.status() != StatusCode::SWITCHING_PROTOCOLS;
                        let connection = stays.then_some((sender, self));
                        return Ok(response.map(|body| UpstreamBody::new(body, connection)));
                    }
                    Err(mut error) => match error.take_message() {
                        Some(unsent) if kept => {
                            request = unsent;
                            if let Some(work) = &work {
                                work.cancel();
                            }
                        }
                        Some(_) => return Err(UpstreamError::Unsent(error.into_error())),
                        None => return Err(UpstreamError::of_sent(error.into_error())),
                    },
                }
            }
        }
    }

    /// Connects. Returns true if another request has connected in the meantime, and this one shares its connection.
    async fn connect(&self) -> Result<(Sender<B>, bool), UpstreamError> {
        let connecting = async {
            let _turn = if self.address.http2 { Some(self.http2.connecting.lock().await) } else { None };
            if let Some(stream) = self.http2.take() {
                return Ok((Sender::Http2(stream), true));
            }
            let sender = match &self.address.transport {
                Transport::Tcp | Transport::Tls(_) => {
                    let connecting = self.connector.clone().call(self.destination.clone());
                    let stream = connecting.await.map_err(|error| connect_error(&error))?.into_inner();
                    let Some((connector, name)) = &self.tls else {
                        return Ok((self.handshake(stream).await?, false));
                    };
                    let stream = connector.connect(name.clone(), stream).await;
                    let stream = stream.map_err(UpstreamError::Connect)?;
                    if self.address.http2 && stream.get_ref().1.alpn_protocol() != Some(ALPN_NAME) {
                        return Err(UpstreamError::Connect(io::Error::other("it doesn't offer HTTP/2 by ALPN")));
                    }
                    self.handshake(stream).await
                }
                Transport::Unix(path) => {
                    let stream = UnixStream::connect(path).await.map_err(UpstreamError::Connect)?;
                    self.handshake(stream).await
                }
            };
            Ok((sender?, false))
        };
        let connected = tokio::time::timeout(self.settings.connect_timeout, connecting).await;
        connected.unwrap_or(Err(UpstreamError::ConnectTimeout))
    }

    /// Starts HTTP on a new connection.
    async fn handshake<T>(&self, stream: T) -> Result<Sender<B>, UpstreamError>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        if self.address.http2 {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.timer(TokioTimer::new()).keep_alive_interval(PING.0).keep_alive_timeout(PING.1);
            builder.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW);
            builder.max_header_list_size(MAX_HEAD_BYTES as u32);
            let (sender, mut connection) =
                builder.handshake(TokioIo::new(ReplyStream::new(stream))).await.map_err(UpstreamError::Unsent)?;
            let stream = self.http2.add(sender);
            let usage = Arc::clone(&stream.usage);
            // The library tells the server's maximum only here, and polls this with each request.
            spawn_connection(poll_fn(move |cx| {
                let polled = Pin::new(&mut connection).poll(cx);
                usage.max_streams.store(connection.current_max_send_streams(), Relaxed);
                polled
            }));
            return Ok(Sender::Http2(stream));
        }
        let work = CurrentWork::default();
        let io = ObservedStream::new(stream, Arc::clone(&work));
        let (sender, connection) = self.http.handshake(io).await.map_err(UpstreamError::Unsent)?;
        spawn_connection(connection.with_upgrades());
        Ok(Sender::Http1(Http1Connection { sender, work }))
    }
}

/// Runs a connection until its end.
fn spawn_connection(connection: impl Future<Output = Result<(), hyper::Error>> + Send + 'static) {
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "a connection to the upstream ended");
        }
    });
}

impl<B> Drop for UpstreamClient<B> {
    fn drop(&mut self) {
        self.cleanup.abort();
    }
}

impl<B> UpstreamClient<B> {
    fn scheme(&self) -> Scheme {
        if self.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP }
    }

    fn take_open(&self) -> Option<Sender<B>> {
        match self.address.http2 {
            true => self.http2.take().map(Sender::Http2),
            false => self.http1.take().map(Sender::Http1),
        }
    }
}

/// Returns the settings of HTTP/1.1, which survive the heads of real servers.
///
/// Spaces before a colon are removed and folded lines joined, as RFC 9112 demands of proxies (§5.1, §5.2): lines about the
/// framing then count as for other readers. Other unreadable lines are dropped. The library doesn't tell that, so they
/// aren't counted. Lines with a NUL or a bare CR are still a failure.
fn http1_builder() -> http1::Builder {
    let mut http = http1::Builder::new();
    http.allow_spaces_after_header_name_in_responses(true)
        .allow_obsolete_multiline_headers_in_responses(true)
        .ignore_invalid_headers_in_responses(true)
        .max_headers(MAX_HEAD_LINES)
        .max_buf_size(MAX_HEAD_BYTES);
    http
}

/// Makes connections with a timeout of `connect` each, which is divided among the addresses of a name.
pub(crate) fn tcp_connector(connect: Duration) -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect));
    connector
}

/// Classifies a failure to connect by the system's error.
fn connect_error(error: &(dyn Error + 'static)) -> UpstreamError {
    let cause = causes(error).find_map(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::TimedOut) => UpstreamError::ConnectTimeout,
        kind => {
            let text = cause.map_or_else(|| error.to_string(), io::Error::to_string);
            UpstreamError::Connect(io::Error::new(kind.unwrap_or(io::ErrorKind::Other), text))
        }
    }
}

/// The body of a response. Its end returns the connection to the pool. Dropping the body early does the same if the rest
/// of it has already arrived. Otherwise the connection is closed, which tells the server that the rest isn't read.
pub(crate) struct UpstreamBody<B: Send + 'static = Upload> {
    /// `None` while it is being dropped.
    inner: Option<Incoming>,
    /// The connection in use, and the client whose pool it returns to. `None` if another client made the connection.
    connection: Option<ActiveConnection<B>>,
}

type ActiveConnection<B> = (Sender<B>, Arc<UpstreamClient<B>>);

impl<B: Send + 'static> UpstreamBody<B> {
    /// Returns a body that came over a connection of another client.
    pub(crate) fn unpooled(inner: Incoming) -> Self {
        Self { inner: Some(inner), connection: None }
    }

    fn new(inner: Incoming, connection: Option<ActiveConnection<B>>) -> Self {
        let mut body = Self { inner: Some(inner), connection };
        if body.is_end_stream() {
            body.return_to_pool();
        }
        body
    }

    /// Takes the rest of the body.
    pub(crate) fn take(&mut self) -> Self {
        Self { inner: self.inner.take(), connection: self.connection.take() }
    }

    /// Keeps the connection for the next request. If its last message hasn't quite ended on the wire, a task waits for
    /// that; this is rare under load.
    fn return_to_pool(&mut self) {
        let Some((Sender::Http1(mut connection), upstream)) = self.connection.take() else { return };
        if connection.sender.is_ready() {
            upstream.http1.put(connection);
        } else if !connection.sender.is_closed()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move {
                if connection.sender.ready().await.is_ok() {
                    upstream.http1.put(connection);
                }
            });
        }
    }
}

impl<B: Send + 'static> Drop for UpstreamBody<B> {
    fn drop(&mut self) {
        // Dropped first: the connection can then discard the rest of the body that has already arrived, and become
        // ready.
        self.inner = None;
        self.return_to_pool();
    }
}

impl<B: Send + 'static> Body for UpstreamBody<B> {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else { return Poll::Ready(None) };
        let polled = Pin::new(inner).poll_frame(cx);
        match &polled {
            Poll::Ready(Some(Ok(frame))) if is_last(frame, &*self) => self.return_to_pool(),
            Poll::Ready(None) => self.return_to_pool(),
            Poll::Ready(Some(Err(_))) => self.connection = None,
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.as_ref().map_or_else(|| SizeHint::with_exact(0), Incoming::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use tidegate_policy::{InboundConfig, Policy, PolicySources};

    use super::*;

    #[tokio::test]
    async fn the_host_header_omits_the_default_port() {
        for (authority, host) in [
            ("a.example", "a.example"),
            ("a.example:80", "a.example"),
            ("a.example:8080", "a.example:8080"),
            ("[::1]:80", "[::1]"),
            ("[::80]", "[::80]"),
            ("[::1]:81", "[::1]:81"),
            ("user@a.example:81", "a.example:81"),
        ] {
            let second = Duration::from_secs(1);
            let settings = PoolSettings { connect_timeout: second, idle_timeout: second, max_idle: 1 };
            let client =
                UpstreamClient::<Upload>::new(&BaseUrl::new(false, authority.parse().unwrap(), ""), settings).unwrap();
            assert_eq!(client.host, host, "{authority}");
        }
    }

    #[test]
    fn a_changed_certificate_file_changes_the_address() {
        let directory = tempfile::tempdir().unwrap();
        let ca = directory.path().join("ca.pem");
        let text = format!("[inbound]\nupstream = \"https://a.test\"\nupstream_tls = {{ ca = {ca:?} }}\n");
        let policy = Policy::load(PolicySources::new().file("t", &text)).unwrap();
        let InboundConfig { upstream, upstream_tls, .. } = policy.inbound();
        let address = || ServerAddress::upstream(upstream.as_ref().unwrap(), upstream_tls, false);
        let missing = address();
        assert_eq!(missing.default_port(), 443);
        std::fs::write(&ca, "one").unwrap();
        let first = address();
        assert!(first != missing && first == address());
        std::fs::write(&ca, "other").unwrap();
        assert_ne!(first, address());
    }
}
