//! One client connection, from its first byte to its last.

use std::convert::Infallible;
use std::mem;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf as _, Bytes};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1::{Parts, UpgradeableConnection};
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWrite as _;

use crate::body::ResponseBody;
use crate::linger::LingerState;
use crate::local_response::{self, HttpError};
use crate::proxy_protocol::{NOT_LISTED, is_header};
use crate::rejections::{HeadRejections, RejectionReason};
use crate::socket::ClientSocket;
use crate::stream::ClientStream;
use crate::watchdog::{ConnectionEntry, ConnectionPhase, ConnectionWatch, EndReason};

/// The maximum bytes of a refused request's body that are discarded to keep its connection.
pub(crate) const MAX_DRAINED_BYTES: usize = 64 << 10;

/// The service of a connection's requests.
pub(crate) trait ConnectionService:
    Service<Request<Incoming>, Response = Response<ResponseBody>, Error = Infallible, Future: Send + 'static>
    + Send
    + 'static
{
}

impl<S: Send + 'static> ConnectionService for S where
    S: Service<Request<Incoming>, Response = Response<ResponseBody>, Error = Infallible, Future: Send + 'static>
{
}

/// One client connection, as a future that ends with it.
pub(crate) struct ClientConnection<S: ConnectionService> {
    state: ConnectionStage<S>,
    watch: Arc<ConnectionWatch>,
    _entry: Arc<ConnectionEntry>,
    rejections: Arc<HeadRejections>,
    /// The address of the client: that of the peer, or of its PROXY header.
    ip: IpAddr,
    waker: Option<Waker>,
    unread_body: Option<Incoming>,
    drained_bytes: usize,
}

#[expect(clippy::large_enum_variant, reason = "a connection spends its life in the large one")]
enum ConnectionStage<S: ConnectionService> {
    Http(UpgradeableConnection<TokioIo<ClientSocket>, S>),
    Closing { stream: ClientStream, response: Bytes, is_shut_down: bool, linger: LingerState },
    Closed,
}

impl<S: ConnectionService> ClientConnection<S> {
    pub(crate) fn new(
        http: UpgradeableConnection<TokioIo<ClientSocket>, S>,
        watch: Arc<ConnectionWatch>,
        entry: Arc<ConnectionEntry>,
        rejections: Arc<HeadRejections>,
        ip: IpAddr,
    ) -> Self {
        Self::in_stage(ConnectionStage::Http(http), watch, entry, rejections, ip)
    }

    /// A connection that only takes this response.
    pub(crate) fn closing(
        stream: ClientStream,
        response: Bytes,
        watch: Arc<ConnectionWatch>,
        entry: Arc<ConnectionEntry>,
        rejections: Arc<HeadRejections>,
        ip: IpAddr,
    ) -> Self {
        let mut connection = Self::in_stage(ConnectionStage::Closed, watch, entry, rejections, ip);
        connection.start_closing(stream, response);
        connection
    }

    fn in_stage(
        state: ConnectionStage<S>,
        watch: Arc<ConnectionWatch>,
        entry: Arc<ConnectionEntry>,
        rejections: Arc<HeadRejections>,
        ip: IpAddr,
    ) -> Self {
        Self { state, watch, _entry: entry, rejections, ip, waker: None, unread_body: None, drained_bytes: 0 }
    }

    /// Ends a phase that lasts too long. Returns true if the connection is over.
    fn handle_phase_end(&mut self) -> bool {
        if self.watch.is_aborted() {
            return true;
        }
        let is_displaced = self.watch.is_ended_for(EndReason::Displaced);
        match self.watch.phase() {
            // The request waits for its client, and its place is needed.
            ConnectionPhase::Upload if is_displaced => true,
            // The current request answers with 408 or 504. HTTP/1.1 has no streams.
            ConnectionPhase::Deciding
            | ConnectionPhase::Upload
            | ConnectionPhase::AwaitResponse
            | ConnectionPhase::Streams => false,
            ConnectionPhase::Idle | ConnectionPhase::Download | ConnectionPhase::Tunnel | ConnectionPhase::Linger => {
                true
            }
            ConnectionPhase::Head => {
                let Some(parts) = self.take_parts().filter(|parts| !parts.read_buf.is_empty()) else {
                    if is_displaced {
                        self.rejections.record_silent(self.ip);
                    }
                    return true;
                };
                let (mut stream, _) = parts.io.into_inner().into_parts();
                let too_many = is_displaced || self.watch.is_ended_for(EndReason::HeadBytes);
                let error = if too_many { HttpError::TooManyHeads } else { HttpError::ClientTimeout };
                if let Some(reason) = RejectionReason::of_head_error(error) {
                    let (status, why) = error.status_and_message();
                    self.rejections.record(self.ip, reason, Some(status), why);
                }
                if is_displaced {
                    // The slot is needed at once, so only bytes that can be written immediately are sent.
                    stream.try_write(&error.raw_response());
                } else {
                    self.start_closing(stream, error.raw_response());
                }
                is_displaced
            }
        }
    }

    /// Takes the socket back from the HTTP library. `None` if the connection was upgraded.
    fn take_parts(&mut self) -> Option<Parts<TokioIo<ClientSocket>, S>> {
        match mem::replace(&mut self.state, ConnectionStage::Closed) {
            ConnectionStage::Http(http) => http.into_parts(),
            _ => None,
        }
    }

    /// Records a head that the HTTP library can't read. Returns the response, if the library has given a status.
    #[cold]
    fn reject_head(&self, error: &hyper::Error, status: Option<StatusCode>, head: &[u8]) -> Bytes {
        let is_too_large = error.is_parse_too_large();
        let reason = if is_too_large { RejectionReason::HeadSize } else { RejectionReason::Head };
        let why = match is_header(head) {
            true => NOT_LISTED.to_owned(),
            false => format!("the request's head can't be read: {error}"),
        };
        self.rejections.record(self.ip, reason, status, &why);
        status.map_or_else(Bytes::new, |status| local_response::raw_error_response(status, &why))
    }

    fn start_closing(&mut self, stream: ClientStream, response: Bytes) {
        self.watch.start_linger(false);
        let linger = LingerState::default();
        self.state = ConnectionStage::Closing { stream, response, is_shut_down: false, linger };
    }

    /// Discards the rest of a refused request's body. Returns false if there is nothing to do before the connection
    /// moves.
    fn drain_body(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(body) = self.watch.take_unread_body() {
            self.drained_bytes = 0;
            self.unread_body = Some(body);
        }
        let Some(body) = &mut self.unread_body else { return false };
        match http_body::Body::poll_frame(Pin::new(body), cx) {
            Poll::Pending => {
                self.watch.body.waits_on_client.set(true);
                return false;
            }
            Poll::Ready(Some(Ok(frame))) => {
                let count = frame.data_ref().map_or(0, |data| data.len());
                self.watch.count_body(count as u64);
                self.drained_bytes += count;
                if self.drained_bytes <= MAX_DRAINED_BYTES {
                    return true;
                }
                self.watch.response.must_linger.set(true);
            }
            Poll::Ready(Some(Err(_)) | None) => {}
        }
        self.unread_body = None;
        self.watch.enter_from(ConnectionPhase::Linger, ConnectionPhase::Idle);
        true
    }
}

impl<S: ConnectionService> Future for ClientConnection<S> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            this.watch.register(cx.waker());
            this.waker = Some(cx.waker().clone());
        }
        loop {
            match &mut this.state {
                ConnectionStage::Closed => return Poll::Ready(()),
                ConnectionStage::Http(http) => match Pin::new(http).poll(cx) {
                    Poll::Pending => {
                        // Checked after polling, so that a request that has just arrived saves a connection from the
                        // idle timeout.
                        if this.watch.must_end_phase() {
                            if this.handle_phase_end() {
                                return Poll::Ready(());
                            }
                            if matches!(this.state, ConnectionStage::Closing { .. }) {
                                continue;
                            }
                        }
                        if !this.drain_body(cx) {
                            return Poll::Pending;
                        }
                    }
                    Poll::Ready(ended) => {
                        let lingers = match &ended {
                            Ok(()) => this.watch.response.must_linger.get(),
                            Err(error) => {
                                tracing::debug!(%error, "a client connection ended");
                                error.is_parse()
                            }
                        };
                        if let Some(parts) = this.take_parts().filter(|_| lingers) {
                            let Parts { io, read_buf, .. } = parts;
                            let (stream, status) = io.into_inner().into_parts();
                            let response = match &ended {
                                Ok(()) => Bytes::new(),
                                Err(error) => this.reject_head(error, status, &read_buf),
                            };
                            this.start_closing(stream, response);
                        }
                    }
                },
                ConnectionStage::Closing { stream, response, is_shut_down, linger } => {
                    if this.watch.must_end_phase() {
                        return Poll::Ready(());
                    }
                    while !response.is_empty() {
                        match Pin::new(&mut *stream).poll_write(cx, response) {
                            Poll::Pending => return Poll::Pending,
                            Poll::Ready(Ok(written)) if written > 0 => response.advance(written),
                            Poll::Ready(_) => return Poll::Ready(()),
                        }
                    }
                    if !*is_shut_down {
                        match Pin::new(&mut *stream).poll_shutdown(cx) {
                            Poll::Pending => return Poll::Pending,
                            Poll::Ready(Err(_)) => return Poll::Ready(()),
                            Poll::Ready(Ok(())) => *is_shut_down = true,
                        }
                    }
                    return linger.poll(stream, &this.watch, cx);
                }
            }
        }
    }
}
