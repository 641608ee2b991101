//! A client's connection as the HTTP library reads and writes it, with tracking of progress and framing.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, ready};

use http::StatusCode;
use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::framing::FramingTracker;
use crate::stream::ClientStream;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};

/// A stream that notes progress and tracks the framing of the bytes it reads.
#[derive(Debug)]
pub(crate) struct ClientSocket {
    stream: ClientStream,
    framing_tracker: FramingTracker,
    /// The status of the HTTP library's error response to an unreadable head.
    parse_error_status: Option<StatusCode>,
    watch: Arc<ConnectionWatch>,
}

impl ClientSocket {
    pub(crate) fn new(stream: ClientStream, watch: Arc<ConnectionWatch>) -> Self {
        Self { stream, framing_tracker: FramingTracker::new(), parse_error_status: None, watch }
    }

    /// Returns the stream, and the status of the HTTP library's error response, which the client hasn't received yet.
    pub(crate) fn into_parts(self) -> (ClientStream, Option<StatusCode>) {
        (self.stream, self.parse_error_status)
    }

    /// Returns true if `answer` is the HTTP library's own response to an unreadable head, and keeps it back. That
    /// response is the connection's last and has no body, so the connection sends a better one.
    fn hold_back_error_response(&mut self, answer: &[u8]) -> bool {
        if self.watch.response.is_pending.get() {
            return false;
        }
        let status = answer.strip_prefix(b"HTTP/1.1 ").and_then(|rest| rest.get(..3));
        self.parse_error_status = status.and_then(|status| StatusCode::from_bytes(status).ok());
        self.parse_error_status.is_some()
    }

    fn note_written(&self, written: &Poll<io::Result<usize>>) {
        self.watch.response.is_unread.set(written.is_pending());
        if matches!(written, Poll::Ready(Ok(_))) {
            self.watch.touch();
        }
    }
}

/// The maximum size of a head and a body that are copied together. The system writes one piece faster than two.
const MAX_GATHERED_BYTES: usize = 1024;

/// Joins the pieces, if there are several and they are small. `None` otherwise.
fn gather<'s>(pieces: &[io::IoSlice<'_>], buffer: &'s mut [u8; MAX_GATHERED_BYTES]) -> Option<&'s [u8]> {
    if pieces.len() < 2 || pieces.iter().map(|piece| piece.len()).sum::<usize>() > MAX_GATHERED_BYTES {
        return None;
    }
    let mut end = 0;
    for piece in pieces {
        buffer[end..end + piece.len()].copy_from_slice(piece);
        end += piece.len();
    }
    Some(&buffer[..end])
}

impl AsyncRead for ClientSocket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        match Pin::new(&mut self.stream).poll_read(cx, buf) {
            Poll::Ready(read) => read?,
            Poll::Pending => {
                self.watch.note_waiting();
                if self.watch.must_end_phase() {
                    // A request that has arrived isn't cut off.
                    self.stream.read_now(buf, RecvFlags::empty());
                }
                if buf.filled().len() == before {
                    return Poll::Pending;
                }
            }
        }
        let bytes = &buf.filled()[before..];
        if !bytes.is_empty() {
            let this = &mut *self;
            match this.watch.phase() {
                ConnectionPhase::Tunnel => this.watch.touch(),
                phase => {
                    let framing = &mut this.framing_tracker;
                    framing.feed(bytes);
                    if framing.first_ambiguous_head != 0 {
                        this.watch.head.first_ambiguous.store(framing.first_ambiguous_head, Relaxed);
                    }
                    match phase {
                        // The whole head must arrive within its timeout, however slowly its bytes come.
                        ConnectionPhase::Idle | ConnectionPhase::Head => this.watch.note_received(bytes.len()),
                        _ => this.watch.touch(),
                    }
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.hold_back_error_response(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.note_written(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(first) = bufs.first()
            && self.hold_back_error_response(first)
        {
            return Poll::Ready(Ok(bufs.iter().map(|buf| buf.len()).sum()));
        }
        let mut buffer = [0; MAX_GATHERED_BYTES];
        let written = match gather(bufs, &mut buffer) {
            Some(message) => Pin::new(&mut self.stream).poll_write(cx, message),
            None => Pin::new(&mut self.stream).poll_write_vectored(cx, bufs),
        };
        self.note_written(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.watch.on_flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.parse_error_status.is_some() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_write_pieces_are_gathered() {
        let mut buffer = [0; MAX_GATHERED_BYTES];
        let (large, small) = (vec![b'x'; MAX_GATHERED_BYTES], b"abc");
        let pieces = |list: &[&'static [u8]]| list.iter().map(|piece| io::IoSlice::new(piece)).collect::<Vec<_>>();
        assert_eq!(gather(&pieces(&[b"ab", b"", b"c"]), &mut buffer), Some(&b"abc"[..]));
        assert_eq!(gather(&pieces(&[b"abc"]), &mut buffer), None);
        assert_eq!(gather(&[io::IoSlice::new(small), io::IoSlice::new(&large)], &mut buffer), None);
        let fits = &large[..MAX_GATHERED_BYTES - 3];
        let whole = [small, fits].concat();
        assert_eq!(gather(&[io::IoSlice::new(small), io::IoSlice::new(fits)], &mut buffer), Some(&whole[..]));
    }
}
