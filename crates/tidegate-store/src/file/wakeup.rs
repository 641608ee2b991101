//! The signal that wakes the writer, and the age of the unwritten changes.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tidegate_core::{Span, Time};

/// Wakes the writer after changes.
#[derive(Default)]
pub(super) struct WriterWakeup {
    signals: Mutex<WriterSignals>,
    condvar: Condvar,
}

/// The reasons for which the writer is woken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WriterSignals {
    /// Something has changed.
    pub changed: bool,
    /// A caller waits for the writing.
    pub urgent: bool,
    /// The writer is to stop.
    pub closing: bool,
}

impl WriterWakeup {
    pub(super) fn signal(&self, set_signals: impl FnOnce(&mut WriterSignals)) {
        let mut signals = self.signals.lock();
        let before = *signals;
        set_signals(&mut signals);
        if before != *signals {
            self.condvar.notify_all();
        }
    }

    /// Waits for a signal, for `idle` at most. Then waits for an urgent one, for `delay` at most.
    pub(super) fn wait(&self, idle: Duration, delay: Duration) -> WriterSignals {
        let mut signals = self.signals.lock();
        self.condvar.wait_while_for(&mut signals, |signals| *signals == WriterSignals::default(), idle);
        let can_wait = |signals: &mut WriterSignals| signals.changed && !signals.urgent && !signals.closing;
        self.condvar.wait_while_for(&mut signals, can_wait, delay);
        let received = *signals;
        *signals = WriterSignals { closing: received.closing, ..WriterSignals::default() };
        received
    }
}

/// The times since when there are changes that the file doesn't have, by the time of decisions.
pub(super) struct WriteLag {
    /// The first change that isn't being written yet.
    oldest_unwritten: AtomicU64,
    /// The first change that is being written.
    oldest_in_write: AtomicU64,
}

const NO_CHANGE: u64 = u64::MAX;

impl Default for WriteLag {
    fn default() -> Self {
        Self { oldest_unwritten: AtomicU64::new(NO_CHANGE), oldest_in_write: AtomicU64::new(NO_CHANGE) }
    }
}

impl WriteLag {
    /// Notes a change. Returns true for the first change since the last writing began.
    pub(super) fn record_change(&self, now: Time) -> bool {
        self.oldest_unwritten.compare_exchange(NO_CHANGE, now.as_micros(), Relaxed, Relaxed).is_ok()
    }

    pub(super) fn start_write(&self) {
        self.oldest_in_write.store(self.oldest_unwritten.swap(NO_CHANGE, Relaxed), Relaxed);
    }

    pub(super) fn finish_write(&self) {
        self.oldest_in_write.store(NO_CHANGE, Relaxed);
    }

    /// True if there are unwritten changes older than `max_lag`.
    #[inline]
    pub(super) fn exceeds(&self, max_lag: Span, now: Time) -> bool {
        let since = self.oldest_unwritten.load(Relaxed).min(self.oldest_in_write.load(Relaxed));
        since != NO_CHANGE && now.since(Time::from_micros(since)) > max_lag
    }
}
