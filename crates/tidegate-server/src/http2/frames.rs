//! The stream of an HTTP/2 connection, with a bound on the frames that are neither requests nor data, and with small pieces of
//! data joined.
//!
//! *Why here:* the library answers or ignores such frames by itself, and doesn't report them. It ends a connection of which
//! some 2,000 small pieces wait for their reader, as the messages of a gRPC client do until the upstream is connected.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};

use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::frame_parser::{FrameContent, FrameParser, MAX_PIECE, PREFACE_BYTES};
use super::{MAX_STREAMS, Streams};
use crate::stream::ClientStream;

/// The most frames beyond requests and data that a client may send at once: PING, SETTINGS, PRIORITY, WINDOW_UPDATE, and
/// all others that carry neither. One more ends the connection.
const MAX_CONTROL_FRAMES: u32 = 1000;
/// The number of such frames that each request adds to what the client may send. Browsers send a priority and a window
/// beside it.
const CONTROL_FRAMES_PER_REQUEST: u32 = 8;
/// The number that each piece of a response adds. Some clients update two windows for each, and send a PING.
/// Larger pieces count as several, as clients with small windows read them. Smaller windows than that may be too slow.
const CONTROL_FRAMES_PER_PIECE: usize = 4;
pub(super) const COUNTED_PIECE: usize = 64;
/// The most pieces whose frames may still come: those of all streams that the client reads at the same time.
const MAX_UNREAD_PIECES: usize = MAX_STREAMS as usize * MAX_PIECE / COUNTED_PIECE;
/// The number that each second adds, so that a connection with a slow stream may send PINGs for as long as it likes.
const CONTROL_FRAMES_PER_SECOND: u32 = 10;

/// A client's stream whose frames are counted.
pub(super) struct FrameCountingStream {
    stream: ClientStream,
    parser: FrameParser,
    allowance: FrameAllowance,
}

/// The frames beyond requests and data that a client may send.
struct FrameAllowance {
    streams: Arc<Streams>,
    /// The frames beyond requests and data that the client may still send.
    allowed: u32,
    /// The tick at which time has last allowed more.
    refilled: u32,
    /// The number of pieces of responses that have allowed more.
    pieces: usize,
}

impl FrameCountingStream {
    pub(super) fn new(stream: ClientStream, streams: Arc<Streams>) -> Self {
        let refilled = streams.client.watch.watchdog.current_tick();
        let allowance = FrameAllowance { streams, allowed: MAX_CONTROL_FRAMES, refilled, pieces: 0 };
        Self { stream, parser: FrameParser::new(PREFACE_BYTES), allowance }
    }
}

impl FrameAllowance {
    fn count_frame(&mut self, content: FrameContent) {
        match content {
            FrameContent::Data => {}
            FrameContent::Head { .. } => self.allow(CONTROL_FRAMES_PER_REQUEST),
            FrameContent::Control => self.count_control_frame(),
        }
    }

    fn allow(&mut self, more: u32) {
        self.allowed = self.allowed.saturating_add(more).min(MAX_CONTROL_FRAMES);
    }

    fn count_control_frame(&mut self) {
        if self.allowed == 0 {
            self.refill();
        }
        match self.allowed.checked_sub(1) {
            Some(left) => self.allowed = left,
            None => self.streams.end_flood("the client sends too many frames without requests or data"),
        }
    }

    /// Allows what time and responses allow since the last call.
    fn refill(&mut self) {
        let watchdog = &self.streams.client.watch.watchdog;
        let seconds = u32::try_from(watchdog.time_since(self.refilled).as_secs()).unwrap_or(u32::MAX);
        if seconds > 0 {
            self.refilled = watchdog.current_tick();
            self.allow(CONTROL_FRAMES_PER_SECOND.saturating_mul(seconds));
        }
        let pieces = self.streams.pieces.load(Relaxed);
        // A piece counts as soon as it is queued, and the client may still be about to read it in small steps.
        let unread = pieces.wrapping_sub(self.pieces);
        let used = unread.min(MAX_CONTROL_FRAMES as usize / CONTROL_FRAMES_PER_PIECE);
        self.pieces = pieces.wrapping_sub((unread - used).min(MAX_UNREAD_PIECES));
        self.allow((used * CONTROL_FRAMES_PER_PIECE) as u32);
    }
}

impl AsyncRead for FrameCountingStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.allowance.streams.is_flooded.get() {
            // The connection ends as soon as the library waits.
            return Poll::Pending;
        }
        let before = buf.filled().len();
        match Pin::new(&mut this.stream).poll_read(cx, buf) {
            Poll::Ready(read) => read?,
            Poll::Pending => {
                if this.allowance.streams.client.watch.must_end_phase() {
                    // A request that has arrived isn't cut off.
                    this.stream.read_now(buf, RecvFlags::empty());
                }
                if buf.filled().len() == before {
                    return Poll::Pending;
                }
            }
        }
        let read = &mut buf.filled_mut()[before..];
        let left = this.parser.join_data(read, |content| this.allowance.count_frame(content));
        buf.set_filled(before + left);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for FrameCountingStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::task::Waker;
    use std::time::Duration;

    use parking_lot::Mutex;
    use proptest::prelude::*;
    use tidegate::clock::ManualClock;
    use tidegate_core::Time;
    use tidegate_policy::AccessLogMode;
    use tokio::net::UnixStream;

    use super::super::frame_parser::{DATA, END_STREAM, FRAME_HEAD_BYTES, HEADERS, PADDED};
    use super::*;
    use crate::access_log::AccessLog;
    use crate::events::server_events;
    use crate::http2::Http2Client;
    use crate::refusal_log::RefusalLog;
    use crate::rejections::HeadRejections;
    use crate::watchdog::tests::uniform_timeouts;
    use crate::watchdog::{ConnectionPhase, EndReason, Watchdog};

    fn contents(parser: &mut FrameParser, mut bytes: &[u8]) -> Vec<FrameContent> {
        let mut found = Vec::new();
        while let Some((content, rest)) = parser.next(bytes) {
            found.push(content);
            bytes = rest;
        }
        found
    }

    /// The frames of whole bytes, with joined data.
    fn frames(mut bytes: &[u8]) -> Vec<(u8, u8, u8, Vec<u8>)> {
        let mut found: Vec<(u8, u8, u8, Vec<u8>)> = Vec::new();
        while let [_, high, low, kind, flags, _, _, _, stream, rest @ ..] = bytes {
            let (payload, rest) = rest.split_at(usize::from(*high) << 8 | usize::from(*low));
            match found.last_mut().filter(|last| (last.0, last.1, last.2) == (DATA, 0, *stream)) {
                Some(last) if (*kind, *flags) == (DATA, 0) => last.3.extend_from_slice(payload),
                _ => found.push((*kind, *flags, *stream, payload.to_vec())),
            }
            bytes = rest;
        }
        found
    }

    #[tokio::test]
    async fn what_has_arrived_is_read_before_displacement() {
        let watchdog = Watchdog::new(&uniform_timeouts(Duration::from_secs(1)), None, 8, true);
        let (watch, entry) = watchdog.add_connection(None);
        watch.enter(ConnectionPhase::Idle);
        let rejections = HeadRejections {
            listener: "inbound",
            access_log: AccessLog::new(AccessLogMode::Off, ManualClock::default()),
            refusals: Arc::new(RefusalLog::new(1, Arc::new(server_events(Time::ZERO)))),
        };
        let client = Http2Client {
            address: ([192, 0, 2, 1], 1).into(),
            tls: None,
            watch: Arc::clone(&watch),
            entry: Arc::new(entry),
            rejections: Arc::new(rejections),
            ip: [192, 0, 2, 1].into(),
            client_limit: None,
            free_slot: Mutex::default(),
        };
        let (near, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = ClientStream::Unix(UnixStream::from_std(near).unwrap());
        let mut stream = FrameCountingStream::new(near, Arc::new(Streams::new(client)));
        let mut bytes = [0; 64];
        let mut buffer = ReadBuf::new(&mut bytes);
        let mut poll =
            || Pin::new(&mut stream).poll_read(&mut Context::from_waker(Waker::noop()), &mut buffer).is_ready();
        assert!(!poll());
        far.write_all(b"PRI").unwrap();
        assert!(!poll(), "the runtime hasn't noticed it");
        watch.end_phase(ConnectionPhase::Idle, EndReason::Displaced);
        assert!(poll());
        assert_eq!(buffer.filled(), b"PRI");
    }

    #[test]
    fn small_data_is_joined() {
        let message = [&[0, 0, 10, DATA, 0, 0, 0, 0, 1][..], &[7; 10]].concat();
        let mut bytes = [vec![b'P'; PREFACE_BYTES], message.repeat(100)].concat();
        let left = FrameParser::new(PREFACE_BYTES).join_data(&mut bytes, |_| {});
        assert_eq!(left, PREFACE_BYTES + FRAME_HEAD_BYTES + 1000);
        assert_eq!(bytes[PREFACE_BYTES..][..3], [0, 3, 232]);
        let mut begun = message.repeat(3);
        begun.pop();
        assert_eq!(
            FrameParser::new(0).join_data(&mut begun, |_| {}),
            begun.len() - FRAME_HEAD_BYTES,
            "the last isn't whole"
        );
    }

    proptest! {
        #[test]
        fn joined_frames_have_the_same_data(
            frames_of in prop::collection::vec((0..2_u8, 0..2_u8, 0..2_u8, prop::collection::vec(any::<u8>(), 0..300)), 0..30),
            size in 1..900_usize,
        ) {
            let mut bytes = vec![b'P'; PREFACE_BYTES];
            for (kind, flags, stream, payload) in &frames_of {
                bytes.extend([0, (payload.len() >> 8) as u8, payload.len() as u8, *kind, *flags, 0, 0, 0, *stream]);
                bytes.extend(payload);
            }
            let expected = frames(&bytes[PREFACE_BYTES..]);
            let (mut joiner, mut joined) = (FrameParser::new(PREFACE_BYTES), Vec::new());
            for piece in bytes.chunks_mut(size) {
                let left = joiner.join_data(piece, |_| {});
                prop_assert!(left > 0, "nothing would be the end of the stream");
                joined.extend_from_slice(&piece[..left]);
            }
            prop_assert_eq!(frames(&joined[PREFACE_BYTES..]), expected);
        }

        #[test]
        fn frames_are_found_however_their_bytes_arrive(
            frames in prop::collection::vec((0..12_u8, any::<u8>(), prop::collection::vec(0..4_u8, 0..9)), 0..20),
            size in 1..40_usize,
        ) {
            let mut bytes = vec![b'P'; PREFACE_BYTES];
            let mut expected = Vec::new();
            for (kind, flags, payload) in &frames {
                bytes.extend([0, 0, payload.len() as u8, *kind, *flags, 0, 0, 0, 1]);
                bytes.extend(payload);
                let padding = match payload.first() {
                    Some(padding) if flags & PADDED != 0 => 1 + usize::from(*padding),
                    _ => 0,
                };
                expected.push(match *kind {
                    HEADERS => FrameContent::Head { is_last: flags & END_STREAM != 0 },
                    DATA if payload.len() > padding => FrameContent::Data,
                    _ => FrameContent::Control,
                });
            }
            prop_assert_eq!(&contents(&mut FrameParser::new(PREFACE_BYTES), &bytes), &expected);
            let mut parser = FrameParser::new(PREFACE_BYTES);
            let pieces: Vec<_> = bytes.chunks(size).flat_map(|piece| contents(&mut parser, piece)).collect();
            prop_assert_eq!(&pieces, &expected);
        }
    }
}
