//! What calls the writer, and how far it is behind.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};
use tidegate_core::{Span, Time};

/// Rung by who changes something, and heard by the writer.
#[derive(Default)]
pub(super) struct Bell {
    calls: Mutex<Calls>,
    rung: Condvar,
}

/// What the writer is wanted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Calls {
    /// Something has changed.
    pub changed: bool,
    /// Somebody waits.
    pub urgent: bool,
    /// It is to go home.
    pub closing: bool,
}

impl Bell {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock()
    }

    pub(super) fn ring(&self, call: impl FnOnce(&mut Calls)) {
        let mut calls = self.calls();
        let before = *calls;
        call(&mut calls);
        if before != *calls {
            self.rung.notify_all();
        }
    }

    /// Waits for a call, for `idle` at the most, and then for `delay` whether it is urgent.
    pub(super) fn wait(&self, idle: Duration, delay: Duration) -> Calls {
        let mut calls = self.calls();
        self.rung.wait_while_for(&mut calls, |calls| *calls == Calls::default(), idle);
        self.rung.wait_while_for(&mut calls, |calls| calls.changed && !calls.urgent && !calls.closing, delay);
        let heard = *calls;
        *calls = Calls { closing: heard.closing, ..Calls::default() };
        heard
    }
}

/// Since when there are changes that the file doesn't have, by the time of decisions.
pub(super) struct Lag {
    /// Those that nobody has begun to write.
    waiting: AtomicU64,
    /// Those that are being written.
    writing: AtomicU64,
}

const NONE: u64 = u64::MAX;

impl Default for Lag {
    fn default() -> Self {
        Self { waiting: AtomicU64::new(NONE), writing: AtomicU64::new(NONE) }
    }
}

impl Lag {
    /// Something has changed. True for the first change since the last writing began.
    pub(super) fn begins(&self, now: Time) -> bool {
        self.waiting.compare_exchange(NONE, now.as_micros(), Relaxed, Relaxed).is_ok()
    }

    pub(super) fn writing(&self) {
        self.writing.store(self.waiting.swap(NONE, Relaxed), Relaxed);
    }

    pub(super) fn written(&self) {
        self.writing.store(NONE, Relaxed);
    }

    /// Whether there are changes older than this.
    #[inline]
    pub(super) fn exceeds(&self, most: Span, now: Time) -> bool {
        let since = self.waiting.load(Relaxed).min(self.writing.load(Relaxed));
        since != NONE && now.since(Time::from_micros(since)) > most
    }
}
