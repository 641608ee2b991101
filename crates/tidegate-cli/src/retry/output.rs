//! A command's output: forwarded as it arrives, and searched for patterns.

use std::io::{Read, Write};

use clap::Args;
use clap::builder::ArgPredicate;
use parking_lot::Mutex;
use regex::bytes::Regex;
use tidegate_core::{Clock, Span, Time};
use tidegate_policy::ReplyReservation;
use tidegate_policy::verdict::parse_wait;

use super::curl;

/// The maximum bytes that are forwarded at a time.
const CHUNK_BYTES: usize = 1 << 16;
/// The maximum length of a line that is searched. A longer line is searched in pieces of this length.
const MAX_LINE: usize = 1 << 16;

/// The patterns to search for.
#[derive(Args, Clone, Debug, Default)]
pub(super) struct OutputPatterns {
    /// If a command fails and a line of its output matches, it was throttled.
    #[arg(long, value_name = "REGEX")]
    throttled_output: Option<Regex>,
    /// If a command fails and a line of its output matches, it would fail again.
    #[arg(long, value_name = "REGEX")]
    permanent_output: Option<Regex>,
    /// A matching line of output gives the minimum wait: its first group is seconds, a time like 1m30s, or an HTTP
    /// date.
    #[arg(long, value_name = "REGEX", default_value_if("curl", ArgPredicate::IsPresent, curl::RETRY_AFTER_LINE))]
    retry_after_output: Option<Regex>,
    /// The command is curl: its exit codes, the HTTP status in its message and the header Retry-After in its output
    /// decide, unless another of these flags does.
    #[arg(long)]
    pub(super) curl: bool,
}

impl OutputPatterns {
    pub(super) fn any(&self) -> bool {
        self.throttled_output.is_some() || self.permanent_output.is_some() || self.retry_after_output.is_some()
    }
}

/// The matches that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OutputMatches {
    pub(super) throttled: bool,
    pub(super) permanent: bool,
    /// The longest requested wait.
    pub(super) retry_after: Option<Span>,
    /// The HTTP status in the last message of curl.
    pub(super) http_status: Option<u16>,
    /// The reservation that curl's output tells, and the time at which it did.
    pub(super) reservation: Option<(ReplyReservation, Time)>,
}

impl OutputMatches {
    pub(super) fn merge(self, other: Self) -> Self {
        Self {
            throttled: self.throttled | other.throttled,
            permanent: self.permanent | other.permanent,
            retry_after: self.retry_after.max(other.retry_after),
            http_status: other.http_status.or(self.http_status),
            reservation: other.reservation.or(self.reservation),
        }
    }

    /// The token of the reservation that the output tells, and the time at which its wait is over. A reservation without a
    /// wait is ignored.
    pub(super) fn reservation(&self) -> Option<(&str, Time)> {
        let (reservation, told_at) = self.reservation.as_ref()?;
        let wait = reservation.wait_within(self.retry_after?, *told_at);
        (!wait.is_zero()).then_some((&reservation.token, *told_at + wait))
    }
}

/// The forwarder of one output of an attempt. Its matches can be read while the output is still open, because a process
/// that the command started may keep it open.
pub(super) struct OutputForwarder<C> {
    clock: C,
    state: Mutex<OutputState>,
}

struct OutputState {
    matcher: LineMatcher,
    /// The start of the current idle time; `None` while output is being forwarded.
    idle_since: Option<Time>,
    /// The total idle time before that.
    idle: Span,
    is_closed: bool,
}

impl<C: Clock> OutputForwarder<C> {
    pub(super) fn new(patterns: OutputPatterns, clock: C) -> Self {
        let matcher = LineMatcher { patterns, line: Vec::new(), reservations: None, matches: OutputMatches::default() };
        let state = OutputState { matcher, idle_since: None, idle: Span::ZERO, is_closed: false };
        Self { clock, state: Mutex::new(state) }
    }

    /// Forwards everything until `from` ends or `to` is closed.
    pub(super) fn forward(&self, mut from: impl Read, mut to: impl Write) {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            self.state.lock().idle_since = Some(self.clock.now());
            let read = from.read(&mut chunk);
            let mut state = self.state.lock();
            if let Some(since) = state.idle_since.take() {
                state.idle = state.idle + self.clock.now().since(since);
            }
            drop(state);
            let count = match read {
                Ok(0) => break,
                Ok(count) => count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            // Dropping `from` lets the command see a closed output, as it would without this process in between.
            if to.write_all(&chunk[..count]).and_then(|()| to.flush()).is_err() {
                break;
            }
            self.state.lock().matcher.feed(&chunk[..count], self.clock.now());
        }
        self.state.lock().is_closed = true;
    }

    /// Starts the count of idle time again.
    pub(super) fn restart_idle_time(&self) {
        let mut state = self.state.lock();
        state.idle = Span::ZERO;
        state.idle_since = state.idle_since.map(|_| self.clock.now());
    }

    /// Returns the remaining time to wait for output if the total idle time may be `most`; `None` if the wait is over.
    /// Time spent forwarding doesn't count.
    pub(super) fn remaining_wait(&self, most: Span) -> Option<Span> {
        let state = self.state.lock();
        let idle = state.idle + state.idle_since.map_or(Span::ZERO, |since| self.clock.now().since(since));
        let is_over = state.is_closed || state.idle_since.is_some() && idle >= most;
        (!is_over).then_some(most - idle)
    }

    /// Returns all matches, including those in a last line without a line end.
    pub(super) fn matches(&self) -> OutputMatches {
        let matcher = &mut self.state.lock().matcher;
        matcher.match_line(self.clock.now());
        matcher.matches.clone()
    }
}

struct LineMatcher {
    patterns: OutputPatterns,
    /// The current line so far.
    line: Vec<u8>,
    /// The number of reservations in the headers so far. `None` outside of headers.
    reservations: Option<usize>,
    matches: OutputMatches,
}

impl LineMatcher {
    fn feed(&mut self, mut bytes: &[u8], now: Time) {
        while !bytes.is_empty() {
            let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
            let room = MAX_LINE - self.line.len();
            self.line.extend_from_slice(&bytes[..end.min(room)]);
            if end >= room {
                self.match_line(now);
                bytes = &bytes[room..];
            } else if end < bytes.len() {
                self.match_line(now);
                bytes = &bytes[end + 1..];
            } else {
                return;
            }
        }
    }

    /// Searches the current line and starts the next.
    fn match_line(&mut self, now: Time) {
        let line = self.line.strip_suffix(b"\r").unwrap_or(&self.line);
        let matches = |pattern: &Option<Regex>| pattern.as_ref().is_some_and(|pattern| pattern.is_match(line));
        self.matches.throttled |= matches(&self.patterns.throttled_output);
        self.matches.permanent |= matches(&self.patterns.permanent_output);
        if let Some(found) = self.patterns.retry_after_output.as_ref().and_then(|pattern| pattern.captures(line)) {
            let wait = found.get(1).or(found.get(0)).and_then(|wait| str::from_utf8(wait.as_bytes()).ok());
            self.matches.retry_after = self.matches.retry_after.max(wait.and_then(|text| parse_wait(text, now)));
        }
        if self.patterns.curl {
            self.matches.http_status = curl::http_status(line).or(self.matches.http_status);
            // Only the headers of the last reply count.
            if line.starts_with(b"HTTP/") {
                (self.reservations, self.matches.reservation) = (Some(0), None);
            } else if line.is_empty() {
                self.reservations = None;
            } else if let (Some(count), Some(read)) = (&mut self.reservations, curl::reservation(line)) {
                // A field in two lines is ignored, as RFC 9651 requires.
                *count += 1;
                self.matches.reservation = read.ok().filter(|_| *count == 1).map(|reservation| (reservation, now));
            }
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate::clock::ManualClock;

    fn patterns() -> OutputPatterns {
        let regex = |text| Some(Regex::new(text).unwrap());
        OutputPatterns {
            throttled_output: regex("429|slow down|busy$"),
            permanent_output: regex("^no such "),
            retry_after_output: regex("(?i)retry[- ]after:? (.*)"),
            curl: true,
        }
    }

    fn seen(bytes: &[u8]) -> OutputMatches {
        let mut passed = Vec::new();
        let output = OutputForwarder::new(patterns(), ManualClock::at(Time::from_secs(1_700_000_000)));
        output.forward(bytes, &mut passed);
        assert_eq!(passed, bytes);
        output.matches()
    }

    #[test]
    fn patterns_match_lines_regardless_of_chunking() {
        let throttled = OutputMatches { throttled: true, ..OutputMatches::default() };
        assert_eq!(seen(b"all is well\nreally"), OutputMatches::default());
        assert_eq!(seen(b"please slow down"), throttled);
        assert_eq!(seen(b"this is\nno such thing"), OutputMatches { permanent: true, ..OutputMatches::default() });
        assert_eq!(seen(b"this is no such thing\n"), OutputMatches::default());
        let mut long = vec![b'x'; MAX_LINE + 10];
        long.extend(b" 429\nno such");
        assert_eq!(seen(&long), throttled, "the last line lacks what it has to match");
        for length in CHUNK_BYTES - 8..CHUNK_BYTES + 8 {
            let mut line = vec![b'\n'; length];
            line.extend(b"slow down\n");
            assert_eq!(seen(&line), throttled, "{length}");
        }
    }

    #[test]
    fn lines_end_before_their_carriage_return() {
        assert!(seen(b"busy\r\nmore").throttled);
        assert!(seen(b"busy\r").throttled);
        assert!(!seen(b"busy\r \n").throttled);
    }

    #[test]
    fn curls_last_message_gives_the_http_status() {
        let status = |output: &str| seen(output.as_bytes()).http_status;
        assert_eq!(status("\r  0  0\ncurl: (22) The requested URL returned error: 503\n"), Some(503));
        assert_eq!(status("curl: (22) The requested URL returned error: 404 Not Found"), Some(404));
        let message = "curl: (22) The requested URL returned error: ";
        assert_eq!(status(&format!("{message}503\n{message}429\ndone")), Some(429));
        assert_eq!(status(&format!("{message}200")), None, "no error");
        assert_eq!(status("curl: (7) Failed to connect"), None);
    }

    #[test]
    fn a_reservation_is_one_header_of_the_last_reply() {
        let at = Time::from_secs(1_700_000_000) + Span::from_millis(4_300);
        let field = "tidegate-reservation: r;at=1700000004300\r\n";
        let (start, waits) = ("HTTP/1.1 429 \r\n", "retry-after: 5\r\n");
        let by_wait = "Tidegate-Reservation: r;at=1;wait=4300\r\n";
        for output in [
            [start, waits, field, "\r\n"],
            [start, by_wait, waits, "\r\n"],
            [start, field, &format!("\r\n{start}{waits}"), field],
        ] {
            assert_eq!(seen(output.concat().as_bytes()).reservation(), Some(("r", at)), "{output:?}");
        }
        for output in [
            [start, field, "", ""],
            [start, field, "retry-after: 0\r\n", ""],
            [start, waits, field, field],
            [start, waits, field, "tidegate-reservation: nonsense\r\n"],
            ["", waits, field, ""],
            [start, waits, "\r\n", field],
            [start, waits, field, "\r\nHTTP/2 429\r\n"],
        ] {
            assert_eq!(seen(output.concat().as_bytes()).reservation(), None, "{output:?}");
        }
    }

    #[test]
    fn waits_may_be_seconds_durations_or_dates() {
        let wait = |output: &str| seen(output.as_bytes()).retry_after;
        assert_eq!(wait("Retry-After: 7\r\n"), Some(Span::from_secs(7)));
        assert_eq!(wait("retry after 0.25"), Some(Span::from_millis(250)));
        assert_eq!(wait("retry after 1m30s\nretry after 2"), Some(Span::from_secs(90)));
        assert_eq!(wait("Retry-After: Tue, 14 Nov 2023 22:13:30 GMT"), Some(Span::from_secs(10)));
        assert_eq!(wait("Retry-After: Tue, 14 Nov 2023 22:13:10 GMT"), Some(Span::ZERO));
        assert_eq!(wait("retry after lunch"), None);
        assert_eq!(wait("retry after -1"), None);
    }
}
