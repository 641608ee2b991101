//! Reads and discards bytes that a client still sends after its connection's last response. Closing with unread bytes
//! resets the connection, and the client may lose the response. An uploading client reads the response only after its
//! upload.

use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;

use crate::stream::ClientStream;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};

/// The bytes that are discarded for any client. Beyond that the socket closes, unless the client may go on.
const MAX_BYTES: usize = 1 << 20;
/// The bytes that must arrive within the two seconds of `ConnectionPhase::Linger` to go on: 64 KiB per second.
const PROGRESS_BYTES: usize = 128 << 10;
/// The maximum duration of lingering.
const MAX_TIME: Duration = Duration::from_secs(30);
/// The maximum bytes per read.
const BUFFER: usize = 32 << 10;

/// The progress of reading and discarding on one connection.
#[derive(Default)]
pub(crate) struct LingerState {
    read_bytes: usize,
    /// The bytes that were read since progress was last checked.
    progress_bytes: usize,
    slot: Option<OwnedSemaphorePermit>,
}

impl LingerState {
    /// Reads until the client closes, or may not go on.
    #[cold]
    #[inline(never)]
    pub(crate) fn poll(
        &mut self,
        stream: &mut ClientStream,
        watch: &ConnectionWatch,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        loop {
            let mut buf = ReadBuf::uninit(&mut buffer);
            let read = ready!(Pin::new(&mut *stream).poll_read(cx, &mut buf));
            if read.is_err() || buf.filled().is_empty() || !self.may_continue(buf.filled().len(), watch) {
                return Poll::Ready(());
            }
        }
    }

    fn may_continue(&mut self, count: usize, watch: &ConnectionWatch) -> bool {
        self.read_bytes += count;
        self.progress_bytes += count;
        if self.progress_bytes < PROGRESS_BYTES {
            return true;
        }
        self.progress_bytes = 0;
        if self.slot.is_none() {
            self.slot = watch.acquire_linger_slot();
        }
        let started = watch.phase_started(ConnectionPhase::Linger);
        if self.slot.is_some() && !watch.is_draining() && !watch.watchdog.has_elapsed(started, MAX_TIME) {
            watch.touch();
            return true;
        }
        self.read_bytes < MAX_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watchdog::Watchdog;
    use crate::watchdog::tests::uniform_timeouts;

    #[test]
    fn lingering_ends_by_time_or_server_drain() {
        let watchdog = Watchdog::new(&uniform_timeouts(Duration::from_secs(1)), None, 8, true);
        let (watch, _entry) = watchdog.add_connection(None);
        watch.start_linger(false);
        let mut linger = LingerState::default();
        for _ in 0..MAX_TIME.as_nanos() / watchdog.tick.as_nanos() {
            assert!(linger.may_continue(PROGRESS_BYTES, &watch));
            watchdog.sweep_once();
        }
        watchdog.sweep_once();
        assert!(!linger.may_continue(PROGRESS_BYTES, &watch), "1 MiB is behind it");

        watch.start_linger(false);
        let mut linger = LingerState::default();
        watchdog.drain();
        let pieces = (0..100).take_while(|_| linger.may_continue(PROGRESS_BYTES, &watch)).count();
        assert_eq!(pieces, MAX_BYTES / PROGRESS_BYTES - 1);
    }
}
