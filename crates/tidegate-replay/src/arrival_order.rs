//! The requests of a log that is sorted by the ends of its responses, in the order of their arrivals.

use std::collections::BTreeMap;

use http::HeaderMap;
use tidegate_core::Time;

use super::MAX_LATENESS;
use super::request::LoggedRequest;

/// The largest number of requests that wait for others that arrived earlier.
const MAX_WAITING: usize = 1 << 14;
/// The largest size of their texts in bytes.
const MAX_WAITING_BYTES: usize = 16 << 20;

/// A request that isn't decided yet, with the number of its line and its wanted headers.
pub(super) struct PendingRequest<'l> {
    pub(super) line: u64,
    pub(super) request: LoggedRequest<'l>,
    pub(super) headers: HeaderMap,
}

impl PendingRequest<'_> {
    fn into_owned(self) -> PendingRequest<'static> {
        PendingRequest { line: self.line, request: self.request.into_owned(), headers: self.headers }
    }

    fn text_bytes(&self) -> usize {
        self.request.text_bytes() + self.headers.values().map(|value| value.len()).sum::<usize>()
    }
}

/// Requests by their arrival. Those of a log without durations don't wait.
#[derive(Default)]
pub(super) struct ArrivalOrder {
    waiting: BTreeMap<(Time, u64), PendingRequest<'static>>,
    bytes: usize,
}

impl ArrivalOrder {
    /// Adds the request of the next line. Appends those that wait no longer to `ready`.
    #[inline]
    pub(super) fn push<'l>(&mut self, pending: PendingRequest<'l>, ready: &mut Vec<PendingRequest<'l>>) {
        if self.waiting.is_empty() && pending.request.duration.is_none() {
            ready.push(pending);
            return;
        }
        let written_at = pending.request.time + pending.request.duration.unwrap_or_default();
        // No request arrives after the line of a later one is written. So the log's clock was set back.
        if self.waiting.last_key_value().is_some_and(|((last, _), _)| last.since(written_at) > MAX_LATENESS) {
            ready.extend(std::mem::take(self).into_rest());
        }
        let pending = pending.into_owned();
        self.bytes += pending.text_bytes();
        self.waiting.insert((pending.request.time, pending.line), pending);
        while self.waiting.len() > MAX_WAITING || self.bytes > MAX_WAITING_BYTES {
            let Some((_, first)) = self.waiting.pop_first() else { return };
            self.bytes -= first.text_bytes();
            ready.push(first);
        }
    }

    /// Returns all that still wait.
    pub(super) fn into_rest(self) -> Vec<PendingRequest<'static>> {
        self.waiting.into_values().collect()
    }
}
