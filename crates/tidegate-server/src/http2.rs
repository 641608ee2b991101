//! HTTP/2 connections of clients. Each request is a stream, watched as an HTTP/1.1 connection is.

mod frame_parser;
mod frames;

use std::convert::Infallible;
use std::error::Error as _;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use pin_project_lite::pin_project;
use tidegate_policy::is_same_host;

use self::frame_parser::MAX_PIECE;
pub(crate) use self::frame_parser::{FrameContent, FrameParser, PREFACE_BYTES};
use self::frames::{COUNTED_PIECE, FrameCountingStream};
use crate::body::{BoxError, ResponseBody};
use crate::client_limit::{ClientLimit, ClientSlot, TooManyConnectionsError};
use crate::connection::ConnectionService;
use crate::listener::{ConnectionContext, NewService};
use crate::local_response;
use crate::preface::TlsClient;
use crate::rejections::{HeadRejections, RejectionReason};
use crate::stream::ClientStream;
use crate::watchdog::{ConnectionEntry, ConnectionPhase, ConnectionWatch, EndReason, Flag, StreamEntry};

/// The protocol's name in ALPN.
pub(crate) const ALPN_NAME: &[u8] = b"h2";
/// The first bytes of a connection, which no request of HTTP/1.1 shares (RFC 9113 §3.4).
pub(crate) const PREFACE_START: &[u8] = b"PRI * HT";

/// The most streams of a connection at one time. The least that RFC 9113 §6.5.2 recommends.
const MAX_STREAMS: u32 = 100;
/// The bytes of a request's body, and of all bodies of a connection, that a client may send before they are read.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;
/// The bytes of a response that are queued before the client reads them.
const SEND_BUFFER: usize = 64 << 10;
/// From this number of streams on, a connection is ended if the client has broken off more than half of them. Envoy has
/// the same values (`overload.premature_reset_total_stream_count`).
const MIN_JUDGED_STREAMS: usize = 500;

/// The facts about a connection that each of its streams needs.
pub(crate) struct Http2Client {
    pub(crate) address: SocketAddr,
    pub(crate) tls: Option<Arc<TlsClient>>,
    pub(crate) watch: Arc<ConnectionWatch>,
    pub(crate) entry: Arc<ConnectionEntry>,
    pub(crate) rejections: Arc<HeadRejections>,
    /// The address of the client: that of the peer, or of its PROXY header.
    pub(crate) ip: IpAddr,
    pub(crate) client_limit: Option<Arc<ClientLimit>>,
    /// The connection's slot under its client's limit while no stream is open. The first stream takes it.
    pub(crate) free_slot: Mutex<Option<ClientSlot>>,
}

/// A connection's streams.
struct Streams {
    client: Http2Client,
    open: AtomicUsize,
    /// The number of streams so far, and of those that the client broke off before their response.
    total: AtomicUsize,
    broken_off: AtomicUsize,
    /// The number of pieces of responses so far, of at most [`COUNTED_PIECE`] each.
    pieces: AtomicUsize,
    /// True if the client has broken off too many, or sends too much else.
    is_flooded: Flag,
}

/// An open stream. It is dropped when its response is sent.
struct Stream {
    streams: Arc<Streams>,
    watch: Arc<ConnectionWatch>,
    /// Its place among the streams of the listener.
    entry: StreamEntry,
}

/// The client, or the listener, has too many streams.
struct TooManyStreamsError;

impl Drop for Stream {
    fn drop(&mut self) {
        if self.streams.open.fetch_sub(1, Relaxed) == 1 {
            if let Some(slot) = self.entry.client_slot.take() {
                self.streams.client.free_slot.lock().get_or_insert(slot);
            }
            self.streams.client.watch.enter_from(ConnectionPhase::Streams, ConnectionPhase::Idle);
        }
    }
}

impl Streams {
    fn new(client: Http2Client) -> Self {
        let counts = || AtomicUsize::new(0);
        let (open, total, broken_off, pieces) = (counts(), counts(), counts(), counts());
        Self { client, open, total, broken_off, pieces, is_flooded: Flag::default() }
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// The client, or the listener, has too many. The stream is open all the same, for its response.
    fn open(self: &Arc<Self>) -> (Arc<Stream>, Result<(), TooManyStreamsError>) {
        let Http2Client { watch: connection, client_limit, free_slot, ip, .. } = &self.client;
        self.total.fetch_add(1, Relaxed);
        if self.open.fetch_add(1, Relaxed) == 0 {
            connection.enter(ConnectionPhase::Streams);
        }
        let (watch, mut entry, has_capacity) = connection.watchdog.add_stream(connection);
        let mut capacity = if has_capacity { Ok(()) } else { Err(TooManyStreamsError) };
        let free_slot = free_slot.lock().take().map(|slot| Ok(Some(slot)));
        match free_slot.or_else(|| client_limit.as_ref().map(|clients| clients.acquire(*ip))) {
            None => {}
            Some(Ok(slot)) => entry.client_slot = slot,
            Some(Err(TooManyConnectionsError)) => capacity = Err(TooManyStreamsError),
        }
        (Arc::new(Stream { streams: Arc::clone(self), watch, entry }), capacity)
    }

    /// Counts a stream that the client broke off before its response. Ends the connection if most of them are.
    fn count_broken_off(&self) {
        let broken_off = self.broken_off.fetch_add(1, Relaxed) + 1;
        let total = self.total.load(Relaxed);
        if total >= MIN_JUDGED_STREAMS && broken_off * 2 > total {
            self.end_flood("the client breaks off most of its requests");
        }
    }

    /// Ends the connection.
    fn end_flood(&self, why: &str) {
        let Http2Client { watch, rejections, ip, .. } = &self.client;
        if !self.is_flooded.replace(true) {
            rejections.record(*ip, RejectionReason::Http2, None, why);
            watch.wake();
        }
    }
}

/// The settings of a listener's HTTP/2 connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Http2Settings {
    /// The maximum number of bytes of a head. RFC 9113 §6.5.2 counts 32 more for each line.
    pub(crate) header_bytes: usize,
    /// The maximum number of lines of a head.
    pub(crate) headers: usize,
}

impl Http2Settings {
    fn builder(self, executor: StreamExecutor) -> http2::Builder<StreamExecutor> {
        let mut builder = http2::Builder::new(executor);
        builder
            .max_concurrent_streams(MAX_STREAMS)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(u32::try_from(self.header_bytes).unwrap_or(u32::MAX))
            .max_send_buf_size(SEND_BUFFER);
        builder
    }
}

pin_project! {
    /// An HTTP/2 connection, as a future that ends with it.
    pub(crate) struct Http2Connection<S: ConnectionService> {
        #[pin]
        http: http2::Connection<TokioIo<FrameCountingStream>, StreamService<S>, StreamExecutor>,
        streams: Arc<Streams>,
        waker: Option<Waker>,
        is_shutting_down: bool,
    }
}

impl<S: ConnectionService> Http2Connection<S> {
    pub(crate) fn new(
        settings: Http2Settings,
        stream: ClientStream,
        client: Http2Client,
        new_service: NewService<S>,
    ) -> Self {
        let (executor, streams) = (StreamExecutor::default(), Arc::new(Streams::new(client)));
        let (started, max_headers) = (Arc::clone(&executor.started), settings.headers);
        let service = StreamService { new_service, max_headers, streams: Arc::clone(&streams), started };
        let io = TokioIo::new(FrameCountingStream::new(stream, Arc::clone(&streams)));
        let http = settings.builder(executor).serve_connection(io, service);
        Self { http, streams, waker: None, is_shutting_down: false }
    }
}

impl<S: ConnectionService> Future for Http2Connection<S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        let Http2Client { watch, rejections, ip, .. } = &this.streams.client;
        if this.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            watch.register(cx.waker());
            *this.waker = Some(cx.waker().clone());
        }
        loop {
            if let Poll::Ready(ended) = this.http.as_mut().poll(cx) {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a client connection ended");
                    if let Some(violation) = violation(&error) {
                        let why = format!("the client breaks the rules of HTTP/2: {violation}");
                        rejections.record(*ip, RejectionReason::Http2, None, &why);
                    }
                }
                return Poll::Ready(());
            }
            if watch.is_aborted() || this.streams.is_flooded.get() {
                return Poll::Ready(());
            }
            let is_between_requests = matches!(watch.phase(), ConnectionPhase::Idle | ConnectionPhase::Head);
            if is_between_requests && this.streams.open.load(Relaxed) > 0 {
                // A request began while the one before it ended.
                watch.enter(ConnectionPhase::Streams);
                return Poll::Pending;
            }
            let must_end = watch.must_end_phase();
            if must_end && (!is_between_requests || watch.is_ended_for(EndReason::Displaced)) {
                if watch.is_ended_for(EndReason::Displaced) && this.streams.total.load(Relaxed) == 0 {
                    rejections.record_silent(*ip);
                }
                return Poll::Ready(());
            }
            if *this.is_shutting_down {
                if is_between_requests {
                    // The client has a moment to read the end of the connection.
                    watch.start_linger(false);
                }
                return Poll::Pending;
            }
            if !must_end && !watch.is_draining() {
                return Poll::Pending;
            }
            *this.is_shutting_down = true;
            this.http.as_mut().graceful_shutdown();
        }
    }
}

/// The reason for which the library has ended the connection, if it is what the client sent.
fn violation(error: &hyper::Error) -> Option<&h2::Error> {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<h2::Error>());
    cause.filter(|error| error.is_library() && error.reason().is_some())
}

/// The service of a connection's streams.
struct StreamService<S: ConnectionService> {
    new_service: NewService<S>,
    max_headers: usize,
    streams: Arc<Streams>,
    started: Arc<Mutex<Option<Arc<Stream>>>>,
}

impl<S: ConnectionService> Service<Request<Incoming>> for StreamService<S> {
    type Response = Response<StreamBody>;
    type Error = Infallible;
    type Future = StreamFuture<S::Future>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        let is_head = request.method() == Method::HEAD;
        let (stream, capacity) = self.streams.open();
        *self.started.lock() = Some(Arc::clone(&stream));
        let client = &self.streams.client;
        let refusal = if let Err(TooManyStreamsError) = capacity {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            client.rejections.record(client.ip, RejectionReason::Streams, Some(status), "too many requests at once");
            // A body would wait for the client to read it, and so keep the stream beyond the cap.
            let mut response = Response::new(ResponseBody::empty());
            *response.status_mut() = status;
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            Some(response)
        } else if count_lines(request.headers()) > self.max_headers {
            let (status, why) = (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "the request has too many header lines");
            client.rejections.record(client.ip, RejectionReason::HeadSize, Some(status), why);
            Some(local_response::error(status, why))
        } else {
            None
        };
        let respond = refusal.is_none().then(|| {
            normalise(&mut request);
            let context = ConnectionContext {
                address: client.address,
                tls: client.tls.clone(),
                watch: Arc::clone(&stream.watch),
                entry: Arc::clone(&client.entry),
            };
            (self.new_service)(context).call(request)
        });
        StreamFuture { respond, refusal, is_head, unanswered: Unanswered(Some(stream)) }
    }
}

/// The number of a head's lines. The pieces of its cookies are one.
fn count_lines(headers: &HeaderMap) -> usize {
    headers.len() - headers.get_all(COOKIE).iter().count().saturating_sub(1)
}

/// Gives a request the form that it has over HTTP/1.1, so that services treat both alike.
fn normalise(request: &mut Request<Incoming>) {
    normalise_values(request.headers_mut());
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    if let (Some(authority), Some(path)) = (authority, request.uri().path_and_query().cloned()) {
        let is_same = request.headers().get(HOST).map(|host| is_same_host(host.as_bytes(), authority.as_bytes()));
        if is_same.is_none()
            && let Ok(host) = HeaderValue::try_from(authority)
        {
            request.headers_mut().insert(HOST, host);
        }
        // With another host in its target, the request is refused.
        if is_same != Some(false) {
            *request.uri_mut() = Uri::from(path);
        }
    }
    let headers = request.headers_mut();
    // Cookies may come in pieces (RFC 9113 §8.2.3).
    if headers.get_all(COOKIE).iter().nth(1).is_some() {
        let pieces: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
        if let Ok(joined) = HeaderValue::from_bytes(&pieces.join(&b"; "[..])) {
            headers.insert(COOKIE, joined);
        }
    }
    // The library sends no `100 Continue` over HTTP/2, so clients don't wait for one.
    headers.remove(EXPECT);
}

/// Gives header values one form, so that a limit counts the value that the upstream reads.
fn normalise_values(headers: &mut HeaderMap) {
    // Spaces around a value don't belong to it (RFC 9110 §5.5), but the library keeps them.
    for value in headers.values_mut() {
        let trimmed = value.as_bytes().trim_ascii();
        if trimmed.len() < value.len()
            && let Ok(trimmed) = HeaderValue::from_bytes(trimmed)
        {
            *value = trimmed;
        }
    }
    // The library accepts a length several times, and an empty one as 0. The body has that length.
    if let Some(length) = headers.remove(CONTENT_LENGTH).filter(|length| !length.is_empty()) {
        headers.insert(CONTENT_LENGTH, length);
    }
}

/// A stream whose response hasn't begun.
struct Unanswered(Option<Arc<Stream>>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(stream) = &self.0 {
            stream.streams.count_broken_off();
        }
    }
}

pin_project! {
    /// The future of a stream's response.
    struct StreamFuture<F> {
        #[pin]
        respond: Option<F>,
        refusal: Option<Response<ResponseBody>>,
        is_head: bool,
        unanswered: Unanswered,
    }
}

impl<F: Future<Output = Result<Response<ResponseBody>, Infallible>>> Future for StreamFuture<F> {
    type Output = Result<Response<StreamBody>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut response = match (this.respond.as_pin_mut(), this.refusal.take()) {
            (Some(respond), _) => {
                let Ok(response) = ready!(respond.poll(cx));
                response
            }
            (None, refusal) => refusal.expect("invariant: a stream without a service is refused"),
        };
        let stream = this.unanswered.0.take().expect("invariant: a future that is ready is not polled again");
        if *this.is_head {
            // The library sends the body of any response here, as it doesn't over HTTP/1.1.
            if let Some(length @ 1..) = response.body().size_hint().exact() {
                response.headers_mut().entry(CONTENT_LENGTH).or_insert(length.into());
            }
            *response.body_mut() = ResponseBody::empty();
        }
        Poll::Ready(Ok(response.map(|body| StreamBody { body, rest: Bytes::new(), stream })))
    }
}

/// The body of a stream's response. Each piece keeps the stream open until it is written.
struct StreamBody {
    body: ResponseBody,
    /// The bytes that follow the last piece.
    rest: Bytes,
    stream: Arc<Stream>,
}

/// A piece of a response that the client hasn't taken yet.
struct QueuedBytes {
    bytes: Bytes,
    _stream: Arc<Stream>,
}

impl AsRef<[u8]> for QueuedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl StreamBody {
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self;
        if this.rest.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)).map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => this.rest = data,
                Some(Ok(Err(trailers))) => return Poll::Ready(Some(Ok(trailers))),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => return Poll::Ready(None),
            }
        }
        // The body may have ended, but the client hasn't taken it yet.
        this.stream.watch.enter_from(ConnectionPhase::Idle, ConnectionPhase::Download);
        let bytes = this.rest.split_to(this.rest.len().min(MAX_PIECE));
        this.stream.streams.pieces.fetch_add(bytes.len().div_ceil(COUNTED_PIECE), Relaxed);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(QueuedBytes { bytes, _stream: Arc::clone(&this.stream) })))))
    }
}

impl Body for StreamBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        // A task that is dropped resets its stream only if the request has ended.
        if is_over(&self.stream.watch) {
            return Poll::Ready(Some(Err(h2::Error::from(h2::Reason::CANCEL).into())));
        }
        let polled = self.poll_piece(cx);
        // The library asks for the next piece once the client has made room for it.
        self.stream.watch.response.is_unread.set(polled.is_ready());
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (inner, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower() + rest);
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + rest);
        }
        hint
    }
}

/// Runs each stream as a task.
#[derive(Clone, Default)]
struct StreamExecutor {
    /// The stream whose task comes next: the library starts the task right after the service's call.
    started: Arc<Mutex<Option<Arc<Stream>>>>,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, serve: F) {
        let stream = self.started.lock().take();
        tokio::spawn(StreamTask { serve: Some(serve), stream, is_registered: false });
    }
}

pin_project! {
    /// The task of a stream, which ends if a phase lasts too long.
    struct StreamTask<F> {
        #[pin]
        serve: Option<F>,
        stream: Option<Arc<Stream>>,
        is_registered: bool,
    }
}

impl<F: Future<Output = ()>> Future for StreamTask<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        let watch = this.stream.as_ref().map(|stream| &stream.watch);
        if let Some(watch) = watch
            && !*this.is_registered
        {
            watch.register(cx.waker());
            *this.is_registered = true;
        }
        let served = this.serve.as_mut().as_pin_mut().map_or(Poll::Ready(()), |serve| serve.poll(cx));
        if served.is_pending() && !watch.is_some_and(|watch| is_over(watch)) {
            return Poll::Pending;
        }
        // Dropped before its response is sent, a stream is reset.
        this.serve.set(None);
        if let Some(stream) = this.stream.take()
            && Arc::strong_count(&stream) > 1
        {
            stream.watch.enter(ConnectionPhase::Download);
            stream.watch.response.is_queued.set(true);
        }
        Poll::Ready(())
    }
}

/// True if a stream's phase lasts too long, and the service gives no response for that.
fn is_over(watch: &ConnectionWatch) -> bool {
    use ConnectionPhase::{AwaitResponse, Deciding, Upload};
    watch.is_aborted() || watch.must_end_phase() && !matches!(watch.phase(), Deciding | Upload | AwaitResponse)
}
