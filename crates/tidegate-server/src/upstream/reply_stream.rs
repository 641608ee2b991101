//! The stream of a server's replies, with a bound on informational ones.
//!
//! *Why here:* the library reads past informational replies without a bound. Over HTTP/1.1 it can report each to a function, but
//! that would cost every request an allocation.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper_util::client::legacy::connect::{Connected, Connection};
use memchr::memchr;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::http2_pool::MAX_STREAMS;
use crate::http2::{FrameContent, FrameParser, PREFACE_BYTES, PREFACE_START};

/// The most informational replies (1xx) to a request. One more ends the connection. Usual servers send one or two.
const MAX_INFORMATIONAL_REPLIES: u32 = 32;
/// The beginning of an informational reply. Each `d` is a digit.
const INFORMATIONAL: &[u8] = b"HTTP/1.d 1dd";
const SWITCHING_PROTOCOLS: &[u8] = b"101";

/// A stream whose informational replies are counted.
pub(crate) struct ReplyStream<T> {
    stream: T,
    has_sent: bool,
    http2: Option<Box<Http2Heads>>,
    place: Place,
    /// The last bytes of [`INFORMATIONAL`], as they were received.
    status: [u8; 3],
    /// The number of informational replies to the present request.
    count: u32,
}

/// The place in the replies, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the start of a reply, behind this number of bytes that an informational one has.
    Start(usize),
    /// In the head of an informational reply.
    Informational { is_line_empty: bool },
    /// In another reply, or behind it.
    Final,
    /// Behind a switch of protocols.
    Switched,
}

/// The heads on a connection of HTTP/2. They are counted together, because their replies come in any order.
struct Http2Heads {
    sent: FrameParser,
    received: FrameParser,
    /// The heads that may still come, beside the trailers.
    allowed: u32,
}

impl Http2Heads {
    fn note_sent(&mut self, mut bytes: &[u8]) {
        const PER_REQUEST: u32 = MAX_INFORMATIONAL_REPLIES + 1;
        while let Some((content, rest)) = self.sent.next(bytes) {
            bytes = rest;
            if matches!(content, FrameContent::Head { .. }) {
                self.allowed = (self.allowed + PER_REQUEST).min(MAX_STREAMS as u32 * PER_REQUEST);
            }
        }
    }

    fn count_replies(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while let Some((content, rest)) = self.received.next(bytes) {
            bytes = rest;
            if content == (FrameContent::Head { is_last: false }) {
                self.allowed = self.allowed.checked_sub(1).ok_or_else(too_many_replies)?;
            }
        }
        Ok(())
    }
}

fn too_many_replies() -> io::Error {
    io::Error::other(format!("it sent more than {MAX_INFORMATIONAL_REPLIES} informational replies"))
}

impl<T> ReplyStream<T> {
    pub(crate) fn new(stream: T) -> Self {
        Self { stream, has_sent: false, http2: None, place: Place::Start(0), status: [0; 3], count: 0 }
    }

    /// True if the last reply to the present request has begun, over HTTP/1.1.
    pub(super) fn has_final_reply(&self) -> bool {
        matches!(self.place, Place::Final | Place::Switched)
    }

    fn count_replies(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        if let Some(http2) = &mut self.http2 {
            return http2.count_replies(bytes);
        }
        while let [first, rest @ ..] = bytes {
            match self.place {
                Place::Final | Place::Switched => return Ok(()),
                // The library skips empty lines before a reply.
                Place::Start(0) if matches!(first, b'\r' | b'\n') => bytes = rest,
                Place::Start(position) => {
                    let expected = INFORMATIONAL[position];
                    if *first != expected && !(expected == b'd' && first.is_ascii_digit()) {
                        self.place = Place::Final;
                        return Ok(());
                    }
                    self.status.rotate_left(1);
                    self.status[2] = *first;
                    self.place = Place::Start(position + 1);
                    if position + 1 == INFORMATIONAL.len() {
                        self.count_reply()?;
                    }
                    bytes = rest;
                }
                Place::Informational { is_line_empty } => {
                    let end = memchr(b'\n', bytes);
                    let line = &bytes[..end.unwrap_or(bytes.len())];
                    let is_line_empty = is_line_empty && line.iter().all(|byte| *byte == b'\r');
                    self.place = match (end, is_line_empty) {
                        (Some(_), true) => Place::Start(0),
                        (Some(_), false) => Place::Informational { is_line_empty: true },
                        (None, is_line_empty) => Place::Informational { is_line_empty },
                    };
                    bytes = end.map_or(&[], |end| &bytes[end + 1..]);
                }
            }
        }
        Ok(())
    }

    fn count_reply(&mut self) -> io::Result<()> {
        if self.status == SWITCHING_PROTOCOLS {
            self.place = Place::Switched;
            return Ok(());
        }
        self.place = Place::Informational { is_line_empty: false };
        self.count += 1;
        if self.count > MAX_INFORMATIONAL_REPLIES { Err(too_many_replies()) } else { Ok(()) }
    }

    /// Notes bytes that were sent. Over HTTP/1.1, they are those of the next request if they come behind a final reply.
    #[inline]
    fn note_sent(&mut self, bytes: &[u8]) {
        if !std::mem::replace(&mut self.has_sent, true) && bytes.starts_with(PREFACE_START) {
            let (sent, received) = (FrameParser::new(PREFACE_BYTES), FrameParser::new(0));
            self.http2 = Some(Box::new(Http2Heads { sent, received, allowed: 0 }));
        }
        match &mut self.http2 {
            Some(http2) => http2.note_sent(bytes),
            None if self.place == Place::Final => (self.place, self.count) = (Place::Start(0), 0),
            None => {}
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for ReplyStream<T> {
    #[inline]
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        Poll::Ready(self.count_replies(&buf.filled()[before..]))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for ReplyStream<T> {
    #[inline]
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        self.note_sent(&buf[..written]);
        Poll::Ready(Ok(written))
    }

    #[inline]
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs))?;
        let mut left = written;
        for buf in bufs {
            let step = left.min(buf.len());
            self.note_sent(&buf[..step]);
            left -= step;
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    #[inline]
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<T: Connection> Connection for ReplyStream<T> {
    fn connected(&self) -> Connected {
        self.stream.connected()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of informational replies that are counted, however the bytes arrive.
    fn counted(bytes: &str) -> u32 {
        let (mut whole, mut pieces) = (ReplyStream::new(()), ReplyStream::new(()));
        let _ = whole.count_replies(bytes.as_bytes());
        let _ = bytes.as_bytes().chunks(1).try_for_each(|byte| pieces.count_replies(byte));
        assert_eq!((whole.count, whole.place), (pieces.count, pieces.place), "{bytes:?}");
        whole.count
    }

    #[test]
    fn informational_replies_are_counted() {
        let early = "HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n";
        let last = "HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n";
        for (bytes, expected) in [
            (early.repeat(3), 3),
            (format!("{early}{early}{last}{early}"), 2),
            (format!("{last}{early}"), 0),
            ("\r\n\nHTTP/1.0 100\n\n".repeat(2), 2),
            ("HTTP/1.1 102\r\na: \r\n\r\n".repeat(2), 2),
            (format!("HTTP/1.1 101 x\r\n\r\n{early}"), 0),
            (format!("HTTP/1.1 1x3 x\r\n\r\n{early}"), 0),
            (early.repeat(50), 33),
        ] {
            assert_eq!(counted(&bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn each_request_has_its_own_bound() {
        let mut stream = ReplyStream::new(());
        for _ in 0..9 {
            stream.note_sent(b"GET");
            let replies = "HTTP/1.1 103 x\r\n\r\n".repeat(32) + "HTTP/1.1 204 x\r\n\r\n";
            stream.count_replies(replies.as_bytes()).unwrap();
        }
        stream.note_sent(b"GET");
        assert!(stream.count_replies("HTTP/1.1 103 x\r\n\r\n".repeat(33).as_bytes()).is_err());
    }
}
