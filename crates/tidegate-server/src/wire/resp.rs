//! The Redis protocol, version 2 and 3: the decisions of the API as commands.
//!
//! A client may send many requests before it reads the replies. All that has arrived is answered, in order, before the
//! replies are sent. After a number of requests, all other tasks run before the connection answers more.

mod commands;
mod parser;
mod reply;

use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use rustix::net::RecvFlags;
use tidegate::Gate;
use tidegate::store::Store;
use tidegate_core::Clock;
use tidegate_policy::canonical_ip;
use tokio::io::{AsyncRead as _, AsyncWrite as _, AsyncWriteExt as _, ReadBuf};

use self::commands::{Next, Session};
use self::parser::parse;
use self::reply::ReplyWriter;
use crate::access::Access;
use crate::linger::LingerState;
use crate::listener::{ConnectionContext, ConnectionHandler, ConnectionStarter, NewConnection};
use crate::preface::OpenedStream;
use crate::rejections::{HeadRejections, RejectionReason};
use crate::state_cell::StateCell;
use crate::states::SharedParts;
use crate::stream::ClientStream;
use crate::turn::Turn;
use crate::watchdog::{ConnectionPhase, ConnectionWatch, EndReason};

/// The bytes that are read at once.
const READ_BYTES: usize = 16 << 10;
/// From this number of bytes on, replies are sent before further requests are answered.
const MAX_OUTPUT: usize = 64 << 10;

/// The state that all connections share.
pub(crate) struct RespState<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) access: Access,
    pub(crate) parts: Arc<SharedParts>,
}

/// The protocol of a listener's connections.
pub(crate) struct RespHandler<S: Store, C: Clock>(pub(crate) Arc<StateCell<RespState<S, C>>>);

impl<S: Store, C: Clock> ConnectionHandler for RespHandler<S, C> {
    fn serve(
        &self,
        starter: &ConnectionStarter,
        NewConnection { opened: OpenedStream { stream, address, tls, .. }, watch, entry }: NewConnection,
    ) -> impl Future<Output = ()> + Send + 'static {
        let mut connection = Connection {
            state: Arc::clone(&self.0),
            rejections: Arc::clone(&starter.rejections),
            client: ConnectionContext { address, tls, watch, entry: Arc::new(entry) },
            stream,
            session: Session::new(),
            input: Vec::new(),
            output: Vec::new(),
            turn: Turn::default(),
        };
        async move { connection.run().await }
    }

    fn serve_http2(
        &self,
        starter: &ConnectionStarter,
        new: NewConnection,
    ) -> impl Future<Output = ()> + Send + 'static {
        // ALPN offers no HTTP/2 here.
        self.serve(starter, new)
    }

    fn refuse_plain(
        &self,
        _: &ConnectionStarter,
        NewConnection { opened: OpenedStream { mut stream, .. }, .. }: NewConnection,
    ) -> impl Future<Output = ()> + Send + 'static {
        stream.try_write(b"-ERR this port takes only TLS\r\n");
        std::future::ready(())
    }
}

struct Connection<S: Store, C: Clock> {
    state: Arc<StateCell<RespState<S, C>>>,
    rejections: Arc<HeadRejections>,
    client: ConnectionContext,
    stream: ClientStream,
    session: Session,
    /// The beginning of a request that hasn't arrived whole. A connection without one keeps no buffer.
    input: Vec<u8>,
    output: Vec<u8>,
    turn: Turn,
}

impl<S: Store, C: Clock> Connection<S, C> {
    async fn run(&mut self) {
        let watch = Arc::clone(&self.client.watch);
        // Pools open connections long before they use them, so the time of a head doesn't apply to the first request.
        watch.enter_from(ConnectionPhase::Head, ConnectionPhase::Idle);
        while let Some(Ok(count)) = watch.until_phase_ends(read_some(&mut self.stream, &mut self.input, &watch)).await
            && count > 0
        {
            // More bytes of a request don't extend the time in which it must arrive whole.
            watch.note_received(count);
            let Some(next) = self.answer_all().await else { continue };
            watch.enter(ConnectionPhase::Download);
            if !self.flush().await {
                return;
            }
            if next != Next::Read || watch.is_draining() {
                return self.close(next == Next::Refuse).await;
            }
            self.rest();
        }
        let ip = canonical_ip(self.client.address.ip());
        let is_displaced = watch.is_ended_for(EndReason::Displaced) || watch.is_ended_for(EndReason::HeadBytes);
        if is_displaced && !watch.head.has_begun.get() {
            self.rejections.record_silent(ip);
        } else if !self.input.is_empty() && !watch.is_aborted() {
            let (reason, why) = match is_displaced {
                true => (RejectionReason::HeadDisplaced, "too many connections"),
                false => (RejectionReason::HeadTimeout, "the request didn't arrive whole in time"),
            };
            self.rejections.record(ip, reason, None, why);
        }
    }

    /// Ends the connection after its last reply, which a client that is still sending would otherwise lose.
    async fn close(&mut self, lingers: bool) {
        let (watch, stream) = (&self.client.watch, &mut self.stream);
        if lingers {
            watch.start_linger(false);
        }
        let mut linger = LingerState::default();
        watch
            .until_phase_ends(async {
                let is_shut_down = stream.shutdown().await.is_ok();
                if is_shut_down && lingers {
                    poll_fn(|cx| linger.poll(stream, watch, cx)).await;
                }
            })
            .await;
    }

    /// Waits for the next request, or the rest of one.
    fn rest(&self) {
        let watch = &self.client.watch;
        watch.enter(ConnectionPhase::Idle);
        if !self.input.is_empty() {
            watch.note_received(self.input.len());
        }
        watch.on_flushed();
    }

    /// Answers all requests that have arrived whole. `None` if none has.
    async fn answer_all(&mut self) -> Option<Next> {
        let state = self.state.load();
        let mut input = std::mem::take(&mut self.input);
        let (mut begin, mut places, mut arguments) = (0, Vec::new(), Vec::new());
        let next = loop {
            let rest = &input[begin..];
            let parsed = match parse(rest, &mut places) {
                Ok(Some(parsed)) => parsed,
                Ok(None) => break Next::Read,
                Err(error) => {
                    let why = format!("Protocol error: {error}");
                    ReplyWriter { output: &mut self.output, version: self.session.version }.error("ERR", &why);
                    let ip = canonical_ip(self.client.address.ip());
                    self.rejections.record(ip, RejectionReason::Head, None, &why);
                    begin = input.len();
                    break Next::Refuse;
                }
            };
            if begin == 0 {
                self.client.watch.enter(ConnectionPhase::Deciding);
            }
            self.turn.count(parsed.length).await;
            arguments.clear();
            arguments.extend(places.iter().map(|place: &Range<usize>| &rest[place.clone()]));
            let (session, output) = (&mut self.session, &mut self.output);
            let next = state.answer(session, &self.client, &arguments, parsed.is_inline, output).await;
            begin += parsed.length;
            if next != Next::Read {
                break next;
            }
            if self.output.len() > MAX_OUTPUT {
                self.client.watch.enter(ConnectionPhase::Download);
                if !self.flush().await {
                    break Next::Close;
                }
                self.client.watch.enter(ConnectionPhase::Deciding);
            }
        };
        if begin < input.len() {
            input.drain(..begin);
            self.input = input;
        }
        (begin > 0).then_some(next)
    }

    /// Sends the replies. Returns false if the client doesn't take them.
    async fn flush(&mut self) -> bool {
        let (watch, stream, output) = (&self.client.watch, &mut self.stream, &self.output);
        let mut sent = 0;
        let write = poll_fn(|cx| {
            while sent < output.len() {
                match Pin::new(&mut *stream).poll_write(cx, &output[sent..]) {
                    Poll::Ready(Ok(count)) if count > 0 => {
                        sent += count;
                        watch.touch();
                    }
                    Poll::Ready(_) => return Poll::Ready(false),
                    Poll::Pending => {
                        watch.response.is_unread.set(true);
                        return Poll::Pending;
                    }
                }
            }
            Pin::new(&mut *stream).poll_flush(cx).map(|flushed| flushed.is_ok())
        });
        let is_sent = watch.until_phase_ends(write).await;
        if is_sent.is_none() && watch.is_ended_for(EndReason::Timeout) {
            // The client gets no error, because there is no room for one.
            let why = "a client of the Redis protocol reads no replies: it may write a whole pipeline first";
            self.rejections.refusals.log_failure(self.rejections.access_log.now(), &why);
        }
        watch.response.is_unread.set(false);
        self.output = Vec::new();
        is_sent.unwrap_or(false)
    }
}

/// Reads what has arrived, and appends it. Returns the number of bytes: 0 at the end of the stream. While nothing arrives,
/// no memory is held for it.
async fn read_some(stream: &mut ClientStream, input: &mut Vec<u8>, watch: &ConnectionWatch) -> io::Result<usize> {
    poll_fn(|cx| {
        let mut bytes = [std::mem::MaybeUninit::uninit(); READ_BYTES];
        let mut buffer = ReadBuf::uninit(&mut bytes);
        match Pin::new(&mut *stream).poll_read(cx, &mut buffer) {
            Poll::Ready(read) => read?,
            Poll::Pending => {
                if watch.must_end_phase() {
                    // A request that has arrived isn't cut off.
                    stream.read_now(&mut buffer, RecvFlags::empty());
                }
                if buffer.filled().is_empty() {
                    return Poll::Pending;
                }
            }
        }
        input.extend_from_slice(buffer.filled());
        Poll::Ready(Ok(buffer.filled().len()))
    })
    .await
}
