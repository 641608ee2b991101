//! Reading away what a client still sends after its connection's last answer: a close with bytes unread resets the
//! connection, and the client may lose the answer. A client that uploads reads it only once its upload is through.

use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::net::TcpStream;

use crate::watch::{Place, Watch};

/// The bytes that are read away of any client. Past it the socket closes, unless the client may go on.
const LINGERED: usize = 1 << 20;
/// The bytes that have to come within `Phase::Linger`'s two seconds for the reading to go on: 64 KiB a second.
const PIECE: usize = 128 << 10;
/// The longest that the reading may go on in all.
const LONGEST: Duration = Duration::from_secs(30);
/// The bytes that are read in one go.
const BUFFER: usize = 32 << 10;

/// The bytes that were read away so far.
pub(crate) struct Linger {
    read: usize,
    /// The bytes that were read of the present piece.
    piece: usize,
    /// The tick at which the reading began.
    begun: u32,
    place: Option<Place>,
}

impl Linger {
    pub(crate) fn new(watch: &Watch) -> Self {
        Self { read: 0, piece: 0, begun: watch.tick(), place: None }
    }

    /// Reads until the client has ended, or may not go on.
    #[cold]
    #[inline(never)]
    pub(crate) fn poll(&mut self, stream: &mut TcpStream, watch: &Arc<Watch>, cx: &mut Context<'_>) -> Poll<()> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        loop {
            let mut buf = ReadBuf::uninit(&mut buffer);
            let read = ready!(Pin::new(&mut *stream).poll_read(cx, &mut buf));
            if read.is_err() || buf.filled().is_empty() || !self.goes_on(buf.filled().len(), watch) {
                return Poll::Ready(());
            }
        }
    }

    fn goes_on(&mut self, count: usize, watch: &Arc<Watch>) -> bool {
        self.read += count;
        self.piece += count;
        if self.piece < PIECE {
            return true;
        }
        self.piece = 0;
        if self.place.is_none() {
            self.place = watch.place_to_linger();
        }
        if self.place.is_some() && !watch.is_draining() && !watch.is_past(self.begun, LONGEST) {
            watch.touch();
            return true;
        }
        self.read < LINGERED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::{Patience, Sweep};

    #[test]
    fn lingering_ends_after_its_longest_time_and_while_the_server_drains() {
        let patience = Patience::of_each(Duration::from_secs(1));
        let sweep = Sweep::new(patience, 8);
        let (watch, _entry) = sweep.join();
        let mut linger = Linger::new(&watch);
        let tick = patience.tick();
        for _ in 0..LONGEST.as_nanos() / tick.as_nanos() {
            assert!(linger.goes_on(PIECE, &watch));
            sweep.sweep();
        }
        sweep.sweep();
        assert!(!linger.goes_on(PIECE, &watch), "1 MiB is behind it");

        let mut linger = Linger::new(&watch);
        sweep.drain();
        let pieces = (0..100).take_while(|_| linger.goes_on(PIECE, &watch)).count();
        assert_eq!(pieces, LINGERED / PIECE - 1);
    }
}
