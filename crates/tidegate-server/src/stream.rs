//! The stream of a client's connection: TCP, a unix socket, or TLS.
//!
//! *Why here:* each read and write chooses by a `match`, which costs less than a call through a trait object.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::server::TlsStream;

use crate::watchdog::ConnectionWatch;

/// The most bytes that are read outside the runtime.
const READ_NOW_BYTES: usize = 4 << 10;

/// The stream of a client's connection.
#[derive(Debug)]
pub(crate) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TlsTransport>>),
}

/// The stream below TLS.
#[derive(Debug)]
pub(crate) struct TlsTransport {
    stream: ClientStream,
    /// Present during the handshake.
    watch: Option<Arc<ConnectionWatch>>,
}

impl TlsTransport {
    pub(crate) fn new(stream: ClientStream, watch: Arc<ConnectionWatch>) -> Self {
        Self { stream, watch: Some(watch) }
    }

    /// Notes that the handshake is done.
    pub(crate) fn stop_counting(&mut self) {
        self.watch = None;
    }
}

impl ClientStream {
    /// Writes what the system takes at once.
    pub(crate) fn try_write(&mut self, bytes: &[u8]) {
        let cx = &mut Context::from_waker(Waker::noop());
        let _ = Pin::new(&mut *self).poll_write(cx, bytes);
        let _ = Pin::new(self).poll_flush(cx);
    }

    /// Reads what has arrived, even if the runtime hasn't noticed it yet. With TLS nothing is read.
    #[cold]
    pub(crate) fn read_now(&self, buf: &mut ReadBuf<'_>, flags: RecvFlags) {
        if let Self::Tcp(_) | Self::Unix(_) = self {
            let mut bytes = [0; READ_NOW_BYTES];
            let length = bytes.len().min(buf.remaining());
            if let Ok((_, count)) = rustix::net::recv(self, &mut bytes[..length], flags | RecvFlags::DONTWAIT) {
                buf.put_slice(&bytes[..count.min(length)]);
            }
        }
    }

    /// Waits for the first byte, and leaves it in the stream. `None` at the stream's end.
    pub(crate) async fn peek_byte(&self) -> io::Result<Option<u8>> {
        let mut byte = [0];
        let count = self.peek(&mut byte, |_| true).await?;
        Ok((count > 0).then_some(byte[0]))
    }

    /// True if the stream starts with these bytes, of which there are at most 8. They stay in the stream.
    pub(crate) async fn starts_with(&self, start: &[u8]) -> io::Result<bool> {
        let mut buffer = [0; 8];
        let buffer = &mut buffer[..start.len()];
        let is_decisive = |bytes: &[u8]| bytes.len() == start.len() || !start.starts_with(bytes);
        let count = self.peek(buffer, is_decisive).await?;
        Ok(&buffer[..count] == start)
    }

    /// Waits for the first bytes until there are enough of them or no more come, and leaves them in the stream. Returns
    /// their number.
    async fn peek(&self, buffer: &mut [u8], is_enough: impl Fn(&[u8]) -> bool) -> io::Result<usize> {
        loop {
            let ready = match self {
                Self::Tcp(stream) => stream.ready(Interest::READABLE).await?,
                Self::Unix(stream) => stream.ready(Interest::READABLE).await?,
                Self::Tls(_) => return Err(io::ErrorKind::Unsupported.into()),
            };
            let peek = || {
                let count = rustix::net::recv(self, &mut *buffer, RecvFlags::PEEK)?.1;
                if count == 0 || ready.is_read_closed() || is_enough(&buffer[..count]) {
                    return Ok(count);
                }
                Err(io::ErrorKind::WouldBlock.into())
            };
            let peeked = match self {
                Self::Tcp(stream) => stream.try_io(Interest::READABLE, peek),
                Self::Unix(stream) => stream.try_io(Interest::READABLE, peek),
                Self::Tls(_) => return Err(io::ErrorKind::Unsupported.into()),
            };
            match peeked {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                peeked => return peeked,
            }
        }
    }
}

impl AsFd for ClientStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
            Self::Tls(stream) => stream.get_ref().0.stream.as_fd(),
        }
    }
}

/// Calls a method of the stream inside.
macro_rules! delegate {
    ($self:ident.$method:ident($($argument:expr),*)) => {
        match $self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).$method($($argument),*),
            Self::Unix(stream) => Pin::new(stream).$method($($argument),*),
            Self::Tls(stream) => Pin::new(&mut **stream).$method($($argument),*),
        }
    };
}

impl AsyncRead for ClientStream {
    #[inline]
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        delegate!(self.poll_read(cx, buf))
    }
}

impl AsyncWrite for ClientStream {
    #[inline]
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        delegate!(self.poll_write(cx, buf))
    }

    #[inline]
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        delegate!(self.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    #[inline]
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        delegate!(self.poll_shutdown(cx))
    }
}

impl AsyncRead for TlsTransport {
    #[inline]
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let count = buf.filled().len() - before;
        if let Some(watch) = self.watch.as_ref().filter(|_| count > 0) {
            watch.note_received(count);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TlsTransport {
    #[inline]
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    #[inline]
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

    #[inline]
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
