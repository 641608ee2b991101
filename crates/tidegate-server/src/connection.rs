//! One client connection from its first byte to its last.

use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::{Buf as _, Bytes};
use hyper::body::Incoming;
use hyper::server::conn::http1::UpgradeableConnection;
use hyper::service::HttpService;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncWrite as _;
use tokio::net::TcpStream;

use crate::answer::{self, Trouble};
use crate::body::Body;
use crate::linger::Linger;
use crate::socket::Socket;
use crate::watch::{Entry, Hurry, Phase, Watch};

/// How much of a refused request's body is read away to keep its connection.
pub(crate) const DRAINED: usize = 64 << 10;

/// What a service must be for a connection to carry it.
pub(crate) trait Serves:
    HttpService<Incoming, ResBody = Body, Error = std::convert::Infallible> + Unpin
{
}
impl<S: HttpService<Incoming, ResBody = Body, Error = std::convert::Infallible> + Unpin> Serves for S {}

/// One client connection, as a future that ends with it.
pub(crate) struct Connection<S: Serves> {
    state: State<S>,
    watch: Arc<Watch>,
    _entry: Arc<Entry>,
    waker: Option<Waker>,
    leftover: Option<Incoming>,
    drained: usize,
}

#[expect(clippy::large_enum_variant, reason = "a connection spends its life in the large one")]
enum State<S: Serves> {
    Http(UpgradeableConnection<TokioIo<Socket>, S>),
    Farewell { stream: TcpStream, words: Bytes, said: bool, linger: Linger },
    Over,
}

impl<S: Serves> Connection<S> {
    pub(crate) fn new(http: UpgradeableConnection<TokioIo<Socket>, S>, watch: Arc<Watch>, entry: Arc<Entry>) -> Self {
        Self { state: State::Http(http), watch, _entry: entry, waker: None, leftover: None, drained: 0 }
    }

    /// What to do about a phase that lasts too long; true if the connection is over.
    fn overdue(&mut self) -> bool {
        if self.watch.is_aborted() {
            return true;
        }
        match self.watch.phase() {
            // The request in hand answers with 408 or 504.
            Phase::Deciding | Phase::Upload | Phase::Await => false,
            Phase::Idle | Phase::Download | Phase::Tunnel | Phase::Linger => true,
            Phase::Head => {
                let State::Http(http) = mem::replace(&mut self.state, State::Over) else { return true };
                let Some(parts) = http.into_parts() else { return true };
                if parts.read_buf.is_empty() {
                    return true;
                }
                let (stream, _) = parts.io.into_inner().into_parts();
                if self.watch.is_hurried(Hurry::Place) {
                    // The place is needed now: what can be said at once is said.
                    let _ = stream.try_write(&Trouble::Busy.last_words());
                    return true;
                }
                let is_given_up = self.watch.is_hurried(Hurry::Bytes);
                let trouble = if is_given_up { Trouble::Busy } else { Trouble::ClientTimeout };
                self.farewell(stream, trouble.last_words());
                false
            }
        }
    }

    fn farewell(&mut self, stream: TcpStream, words: Bytes) {
        self.watch.begin_lingering(false);
        self.state = State::Farewell { stream, words, said: false, linger: Linger::new(&self.watch) };
    }

    /// Reads away what a refused request left. False if there is nothing to do before the connection moves.
    fn drain(&mut self, cx: &mut Context<'_>) -> bool {
        if let Some(body) = self.watch.take_leftover() {
            self.drained = 0;
            self.leftover = Some(body);
        }
        let Some(body) = &mut self.leftover else { return false };
        match http_body::Body::poll_frame(Pin::new(body), cx) {
            Poll::Pending => {
                self.watch.set_waits_on_client(true);
                return false;
            }
            Poll::Ready(Some(Ok(frame))) => {
                let count = frame.data_ref().map_or(0, |data| data.len());
                self.watch.count_body(count as u64);
                self.drained += count;
                if self.drained <= DRAINED {
                    return true;
                }
                self.watch.set_lingers();
            }
            Poll::Ready(Some(Err(_)) | None) => {}
        }
        self.leftover = None;
        self.watch.enter_from(Phase::Linger, Phase::Idle);
        true
    }
}

impl<S> Future for Connection<S>
where
    S: Serves,
    UpgradeableConnection<TokioIo<Socket>, S>: Future<Output = hyper::Result<()>> + Unpin,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            this.watch.register(cx.waker());
            this.waker = Some(cx.waker().clone());
        }
        loop {
            match &mut this.state {
                State::Over => return Poll::Ready(()),
                State::Http(http) => match Pin::new(http).poll(cx) {
                    Poll::Pending => {
                        // Not before: a request that has just come saves a connection that was to go for being idle.
                        if this.watch.is_overdue() {
                            if this.overdue() {
                                return Poll::Ready(());
                            }
                            if matches!(this.state, State::Farewell { .. }) {
                                continue;
                            }
                        }
                        if !this.drain(cx) {
                            return Poll::Pending;
                        }
                    }
                    Poll::Ready(ended) => {
                        let lingers = match &ended {
                            Ok(()) => this.watch.lingers(),
                            Err(error) => error.is_parse(),
                        };
                        if let Err(error) = &ended {
                            tracing::debug!(%error, "a client connection ended");
                        }
                        let State::Http(http) = mem::replace(&mut this.state, State::Over) else { continue };
                        if let Some(parts) = http.into_parts().filter(|_| lingers) {
                            let (stream, refusal) = parts.io.into_inner().into_parts();
                            let words = match (ended, refusal) {
                                (Err(error), Some(status)) => {
                                    answer::last_words(status, &format!("the request's head can't be read: {error}"))
                                }
                                _ => Bytes::new(),
                            };
                            this.farewell(stream, words);
                        }
                    }
                },
                State::Farewell { stream, words, said, linger } => {
                    if this.watch.is_overdue() {
                        return Poll::Ready(());
                    }
                    while !words.is_empty() {
                        match Pin::new(&mut *stream).poll_write(cx, words) {
                            Poll::Pending => return Poll::Pending,
                            Poll::Ready(Ok(written)) if written > 0 => words.advance(written),
                            Poll::Ready(_) => return Poll::Ready(()),
                        }
                    }
                    if !*said {
                        match Pin::new(&mut *stream).poll_shutdown(cx) {
                            Poll::Pending => return Poll::Pending,
                            Poll::Ready(Err(_)) => return Poll::Ready(()),
                            Poll::Ready(Ok(())) => *said = true,
                        }
                    }
                    return linger.poll(stream, &this.watch, cx);
                }
            }
        }
    }
}
