//! The turns of tasks: a task that has much to do lets all others run once between its pieces.

/// The bytes of requests that a task works on in one turn. The runtime itself interrupts only reads and writes, and one read
/// or one message brings hundreds of decisions.
pub(crate) const MAX_TURN_BYTES: usize = 16 << 10;
/// The bytes for which a smaller piece counts, so that there are at most 64 decisions in a turn.
const MIN_PIECE_BYTES: usize = MAX_TURN_BYTES / 64;

/// The turn of one task.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    bytes: usize,
}

impl Turn {
    /// Counts a piece of this many bytes that is worked on next. If the turn is over, all other tasks run before.
    pub(crate) async fn count(&mut self, bytes: usize) {
        if self.bytes >= MAX_TURN_BYTES {
            tokio::task::yield_now().await;
            self.bytes = 0;
        }
        self.bytes += bytes.max(MIN_PIECE_BYTES);
    }
}
