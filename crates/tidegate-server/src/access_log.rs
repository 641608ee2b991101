//! The access log: a line for each request, with the gate's decision about it.

mod entry;
mod layer;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use http::StatusCode;
use parking_lot::Mutex;
use tidegate_core::{Clock, Time};
use tidegate_policy::AccessLogMode;

pub(crate) use self::entry::AccessEntry;
pub(crate) use self::layer::{LoggedBody, LoggedResponseFuture};
use crate::rejections::RejectionReason;
use crate::watchdog::Flag;

/// The switch of the access log, and its clock.
pub(crate) struct AccessLog {
    mode: AtomicU8,
    now: Box<dyn Fn() -> Time + Send + Sync>,
}

impl AccessLog {
    pub(crate) fn new(mode: AccessLogMode, clock: impl Clock) -> Arc<Self> {
        Arc::new(Self { mode: AtomicU8::new(mode as u8), now: Box::new(move || clock.now()) })
    }

    /// Takes over the mode of another policy. Requests that have begun without an entry get no line.
    pub(crate) fn set_mode(&self, mode: AccessLogMode) {
        self.mode.store(mode as u8, Ordering::Relaxed);
    }

    fn is_off(&self) -> bool {
        self.mode.load(Ordering::Relaxed) == AccessLogMode::Off as u8
    }

    pub(crate) fn now(&self) -> Time {
        (self.now)()
    }

    /// Writes the line of a request whose head can't be read.
    pub(crate) fn log_unread_head(
        &self,
        listener: &'static str,
        ip: IpAddr,
        reason: RejectionReason,
        status: Option<StatusCode>,
    ) {
        if !self.is_off() {
            let mut entry = AccessEntry::new(listener, self.now(), ip);
            entry.note_rejection(reason);
            status.into_iter().for_each(|status| entry.note_status(status));
            self.write(&entry);
        }
    }

    /// Writes the line of a request that has ended.
    fn write(&self, entry: &AccessEntry) {
        let mode = self.mode.load(Ordering::Relaxed);
        if mode == AccessLogMode::All as u8 || (mode == AccessLogMode::Refused as u8 && entry.is_refusal()) {
            entry.write(self.now());
        }
    }
}

/// The place for the entry of a connection's current request.
#[derive(Default)]
pub(crate) struct AccessSlot {
    /// True if there is an entry, so that requests without one need no lock.
    is_filled: Flag,
    entry: Mutex<Option<Box<AccessEntry>>>,
}

impl fmt::Debug for AccessSlot {
    /// Prints nothing of the request.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessSlot").finish_non_exhaustive()
    }
}

impl AccessSlot {
    fn put(&self, entry: Box<AccessEntry>) {
        *self.entry.lock() = Some(entry);
        self.is_filled.set(true);
    }

    fn take(&self) -> Option<Box<AccessEntry>> {
        self.is_filled.set(false);
        self.entry.lock().take()
    }

    /// Changes the entry. Returns false if the request has none.
    pub(crate) fn note(&self, change: impl FnOnce(&mut AccessEntry)) -> bool {
        if !self.is_filled.get() {
            return false;
        }
        self.entry.lock().as_deref_mut().map(change).is_some()
    }
}
