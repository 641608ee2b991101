//! Events as a stream of server-sent events.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Interval, MissedTickBehavior};

use super::ServerEvents;
use crate::watchdog::ConnectionWatch;

/// The interval at which a stream looks for new events.
const INTERVAL: Duration = Duration::from_millis(250);
/// The number of intervals without an event after which a comment shows that the connection works.
const QUIET_INTERVALS: u32 = 40;

/// The body of a response with the events as they happen. It ends when the server stops, and with the right to read it.
pub(crate) struct EventStream {
    events: Arc<ServerEvents>,
    seen: u64,
    ticks: Interval,
    quiet_intervals: u32,
    watch: Arc<ConnectionWatch>,
    may_go_on: Box<dyn Fn() -> bool + Send>,
    /// The permission to stream, which ends with the stream.
    _permit: OwnedSemaphorePermit,
}

impl EventStream {
    /// The longest time without any byte in a stream.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(30);

    /// The maximum number of streams at the same time, so that connections for health checks remain.
    pub(crate) const MAX_STREAMS: usize = 16;

    /// Returns a stream of the events after the one with this number, while `may_go_on` is true.
    pub(crate) fn new(
        events: Arc<ServerEvents>,
        seen: u64,
        watch: Arc<ConnectionWatch>,
        may_go_on: Box<dyn Fn() -> bool + Send>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first look sends a comment, so that the client knows at once that the stream is open.
        Self { events, seen, ticks, quiet_intervals: QUIET_INTERVALS, watch, may_go_on, _permit: permit }
    }

    /// The text of new events, or of a comment if there has been nothing to send for long.
    fn news(&mut self) -> String {
        let news = self.events.after(self.seen);
        let mut text = String::new();
        if news.missed > 0 {
            let _ = write!(text, "event: missed\ndata: {{\"missed\":{}}}\n\n", news.missed);
        }
        for (number, event) in news.numbered() {
            let _ = write!(text, "id: {number}\ndata: {}\n\n", event.json(number));
        }
        self.seen = news.last;
        self.quiet_intervals += 1;
        if text.is_empty() && self.quiet_intervals > QUIET_INTERVALS {
            text.push_str(":\n\n");
        }
        if !text.is_empty() {
            self.quiet_intervals = 0;
        }
        text
    }
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        loop {
            ready!(self.ticks.poll_tick(cx));
            if self.watch.is_draining() || !(self.may_go_on)() {
                return Poll::Ready(None);
            }
            let text = self.news();
            if !text.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(text.into()))));
            }
        }
    }
}
