//! Events as a stream of server-sent events.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame};
use parking_lot::Mutex;
use tokio::time::{Interval, MissedTickBehavior};

use super::ServerEvents;
use crate::watchdog::ConnectionWatch;

/// The interval at which a stream looks for new events.
const INTERVAL: Duration = Duration::from_millis(250);
/// The number of intervals without an event after which a comment shows that the connection works.
const QUIET_INTERVALS: u32 = 40;

/// The maximum number of streams at the same time, so that connections for health checks remain.
const MAX_STREAMS: usize = 16;
/// The maximum of one reader, so that others have places too.
const MAX_STREAMS_PER_READER: usize = MAX_STREAMS / 2;

/// A party that reads streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StreamReader {
    /// All that use the token with this name.
    Token(Box<str>),
    /// A client without a token.
    Client(IpAddr),
}

/// The places of streams.
#[derive(Debug, Default)]
pub(crate) struct StreamPlaces(Mutex<Vec<StreamReader>>);

/// The place of an open stream, which is free again when it is dropped.
pub(crate) struct StreamPlace {
    places: Arc<StreamPlaces>,
    reader: StreamReader,
}

impl StreamPlaces {
    /// Takes a place for a reader. `None` if all are taken, or too many by this reader.
    pub(crate) fn take(self: &Arc<Self>, reader: StreamReader) -> Option<StreamPlace> {
        let mut taken = self.0.lock();
        let own = taken.iter().filter(|other| **other == reader).count();
        if taken.len() >= MAX_STREAMS || own >= MAX_STREAMS_PER_READER {
            return None;
        }
        taken.push(reader.clone());
        Some(StreamPlace { places: Arc::clone(self), reader })
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        let mut taken = self.places.0.lock();
        if let Some(own) = taken.iter().position(|reader| *reader == self.reader) {
            taken.swap_remove(own);
        }
    }
}

/// The body of a response with the events as they happen. It ends when the server stops, and with the right to read it.
pub(crate) struct EventStream {
    events: Arc<ServerEvents>,
    seen: u64,
    ticks: Interval,
    quiet_intervals: u32,
    watch: Arc<ConnectionWatch>,
    may_go_on: Box<dyn Fn() -> bool + Send>,
    _place: StreamPlace,
}

impl EventStream {
    /// The longest time without any byte in a stream.
    pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(30);

    /// Returns a stream of the events after the one with this number, while `may_go_on` is true.
    pub(crate) fn new(
        events: Arc<ServerEvents>,
        seen: u64,
        watch: Arc<ConnectionWatch>,
        may_go_on: Box<dyn Fn() -> bool + Send>,
        place: StreamPlace,
    ) -> Self {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first look sends a comment, so that the client knows at once that the stream is open.
        Self { events, seen, ticks, quiet_intervals: QUIET_INTERVALS, watch, may_go_on, _place: place }
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
