//! A client's connection as the HTTP machinery reads and writes it, with a watchful eye on both.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::framing::Framing;
use crate::watch::{Phase, Watch};

/// A TCP stream that notes progress and follows the framing of what it reads.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    /// Followed where requests are passed on to a server that might read them differently.
    framing: Option<Framing>,
    watch: Arc<Watch>,
}

impl Socket {
    pub(crate) fn new(stream: TcpStream, watch: Arc<Watch>, follows: bool) -> Self {
        Self { stream, framing: follows.then(Framing::new), watch }
    }

    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let bytes = &buf.filled()[before..];
        if !bytes.is_empty() {
            let this = &mut *self;
            match this.watch.phase() {
                Phase::Tunnel => this.watch.touch(),
                phase => {
                    if let Some(framing) = &mut this.framing {
                        framing.follow(bytes);
                        if framing.ambiguous() != 0 {
                            this.watch.set_ambiguous_head(framing.ambiguous());
                        }
                    }
                    match phase {
                        Phase::Idle => this.watch.enter(Phase::Head),
                        // The whole head has to arrive within its time, however it trickles.
                        Phase::Head => {}
                        _ => this.watch.touch(),
                    }
                }
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write(cx, buf))?;
        self.watch.touch();
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, bufs))?;
        self.watch.touch();
        Poll::Ready(Ok(written))
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
