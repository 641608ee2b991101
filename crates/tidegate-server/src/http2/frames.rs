//! The stream of an HTTP/2 connection, with a bound on the frames that are neither requests nor data.
//!
//! *Why here:* the library answers or ignores such frames by itself, and doesn't report them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{MAX_PIECE, MAX_STREAMS, Streams};
use crate::stream::ClientStream;

/// The most frames beyond requests and data that a client may send at once: PING, SETTINGS, PRIORITY, WINDOW_UPDATE, and
/// all others that carry neither. One more ends the connection.
const MAX_CONTROL_FRAMES: u32 = 1000;
/// The further ones that each request allows. Browsers send a priority and a window beside it.
const CONTROL_FRAMES_PER_REQUEST: u32 = 8;
/// The further ones that each piece of a response allows. Some clients update two windows for each, and send a PING.
/// Larger pieces count as several, as clients with small windows read them. Smaller windows than that may be too slow.
const CONTROL_FRAMES_PER_PIECE: usize = 4;
pub(super) const COUNTED_PIECE: usize = 64;
/// The most pieces whose frames may still come: those of all streams that the client reads at the same time.
const MAX_UNREAD_PIECES: usize = MAX_STREAMS as usize * MAX_PIECE / COUNTED_PIECE;
/// The further ones of each second, so that a connection with a slow stream may send PINGs for as long as it likes.
const CONTROL_FRAMES_PER_SECOND: u32 = 10;

/// The bytes with which a client begins (RFC 9113 §3.4).
pub(crate) const PREFACE_BYTES: usize = 24;
const FRAME_HEAD_BYTES: usize = 9;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const END_STREAM: u8 = 1;
const PADDED: u8 = 8;

/// A client's stream whose frames are counted.
pub(super) struct FrameCountingStream {
    stream: ClientStream,
    streams: Arc<Streams>,
    parser: FrameParser,
    /// The frames beyond requests and data that the client may still send.
    allowed: u32,
    /// The tick at which time has last allowed more.
    refilled: u32,
    /// The number of pieces of responses that have allowed more.
    pieces: usize,
}

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameContent {
    /// The head of a request or a reply, or trailers.
    Head {
        is_last: bool,
    },
    Data,
    /// Neither.
    Control,
}

/// Finds the frames in the bytes of a client or a server, by their heads.
#[derive(Debug)]
pub(crate) struct FrameParser {
    /// The bytes before the next frame.
    skipped: usize,
    /// The beginning of a frame: its head, and the length of its padding.
    head: [u8; FRAME_HEAD_BYTES + 1],
    count: usize,
}

impl FrameParser {
    /// A parser of the frames behind a preface with this number of bytes.
    pub(crate) fn new(preface: usize) -> Self {
        Self { skipped: preface, head: [0; FRAME_HEAD_BYTES + 1], count: 0 }
    }

    /// Processes the next bytes, and returns the content of a frame whose beginning is whole, and the bytes behind it.
    pub(crate) fn next<'b>(&mut self, mut bytes: &'b [u8]) -> Option<(FrameContent, &'b [u8])> {
        while !bytes.is_empty() {
            if self.skipped > 0 {
                let step = self.skipped.min(bytes.len());
                self.skipped -= step;
                bytes = &bytes[step..];
                continue;
            }
            let step = (self.needed() - self.count).min(bytes.len());
            self.head[self.count..self.count + step].copy_from_slice(&bytes[..step]);
            self.count += step;
            bytes = &bytes[step..];
            if self.count == self.needed() {
                self.skipped = FRAME_HEAD_BYTES + self.payload_length() - self.count;
                let content = self.content();
                self.count = 0;
                return Some((content, bytes));
            }
        }
        None
    }

    /// The number of bytes that tell a frame's content, as far as it is known.
    fn needed(&self) -> usize {
        let is_padded = self.head[3] == DATA && self.head[4] & PADDED != 0 && self.payload_length() > 0;
        FRAME_HEAD_BYTES + usize::from(self.count >= FRAME_HEAD_BYTES && is_padded)
    }

    fn payload_length(&self) -> usize {
        let [high, middle, low, ..] = self.head;
        usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low)
    }

    fn content(&self) -> FrameContent {
        let padding = if self.count > FRAME_HEAD_BYTES { 1 + usize::from(self.head[FRAME_HEAD_BYTES]) } else { 0 };
        match self.head[3] {
            DATA if self.payload_length() > padding => FrameContent::Data,
            HEADERS => FrameContent::Head { is_last: self.head[4] & END_STREAM != 0 },
            _ => FrameContent::Control,
        }
    }
}

impl FrameCountingStream {
    pub(super) fn new(stream: ClientStream, streams: Arc<Streams>) -> Self {
        let refilled = streams.client.watch.watchdog.current_tick();
        Self {
            stream,
            streams,
            parser: FrameParser::new(PREFACE_BYTES),
            allowed: MAX_CONTROL_FRAMES,
            refilled,
            pieces: 0,
        }
    }

    fn count_frames(&mut self, mut bytes: &[u8]) {
        while let Some((content, rest)) = self.parser.next(bytes) {
            bytes = rest;
            match content {
                FrameContent::Data => {}
                FrameContent::Head { .. } => self.allow(CONTROL_FRAMES_PER_REQUEST),
                FrameContent::Control => self.count_control_frame(),
            }
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
        if this.streams.is_flooded.get() {
            // The connection ends as soon as the library waits.
            return Poll::Pending;
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        this.count_frames(&buf.filled()[before..]);
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
    use proptest::prelude::*;

    use super::*;

    fn contents(parser: &mut FrameParser, mut bytes: &[u8]) -> Vec<FrameContent> {
        let mut found = Vec::new();
        while let Some((content, rest)) = parser.next(bytes) {
            found.push(content);
            bytes = rest;
        }
        found
    }

    proptest! {
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
