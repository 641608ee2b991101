//! The watched state of one connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use hyper::body::Incoming;
use parking_lot::Mutex;

use super::phase::{ConnectionPhase, EndReason, MAX_HEAD_BYTES, PHASE_MASK, UNCOUNTED_HEAD_BYTES, ticks};
use super::{LingerSlot, Watchdog};

/// A fault of a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum UploadFault {
    /// No fault.
    None = 0,
    /// It is larger than the cap.
    TooLarge = 1,
    /// The client closed early or sent bad framing.
    Broken = 2,
}

/// The watched state of one connection. Shared by the connection, its current request and the sweeper.
#[derive(Debug)]
pub(crate) struct ConnectionWatch {
    pub(super) watchdog: Arc<Watchdog>,
    /// The phase, and the bit of an [`EndReason`] if the phase must end.
    pub(super) phase_and_reason: AtomicU8,
    pub(super) last_progress: AtomicU32,
    /// The ticks after which the current response is overdue, if it has a timeout of its own; else 0.
    pub(super) download_timeout_ticks: AtomicU32,
    pub(super) answering: AtomicBool,
    pub(super) waits_on_client: AtomicBool,
    pub(super) uploading: AtomicBool,
    pub(super) first_ambiguous_head: AtomicU32,
    pub(super) fault: AtomicU8,
    pub(super) request_count: AtomicU32,
    pub(super) must_linger: AtomicBool,
    pub(super) blocked: AtomicBool,
    /// True if the client has sent any byte.
    pub(super) has_sent: AtomicBool,
    /// The bytes of the current head that are counted in the listener's total.
    pub(super) head_bytes: AtomicUsize,
    /// True if the request's body must keep a minimum rate.
    pub(super) has_min_rate: AtomicBool,
    /// The bytes of the body, and the ticks spent waiting for the client, since its rate was last judged.
    pub(super) body_bytes: AtomicU64,
    pub(super) waited_ticks: AtomicU32,
    /// The tick at which lingering began.
    pub(super) linger_started: AtomicU32,
    pub(super) waker: Mutex<Option<Waker>>,
    pub(super) has_unread_body: AtomicBool,
    pub(super) unread_body: Mutex<Option<Incoming>>,
}

impl ConnectionWatch {
    /// Moves the connection to a phase, which starts now.
    pub(crate) fn enter(&self, phase: ConnectionPhase) {
        self.touch();
        self.phase_and_reason.store(phase as u8, Ordering::Relaxed);
        if phase != ConnectionPhase::Head {
            self.answering.store(true, Ordering::Relaxed);
            self.finish_head();
        }
    }

    /// Notes received bytes of a head, or between requests.
    pub(crate) fn note_received(&self, count: usize) {
        let more = match self.phase() {
            ConnectionPhase::Head => self.has_sent.load(Ordering::Relaxed),
            _ => {
                self.enter(ConnectionPhase::Head);
                false
            }
        };
        if !more {
            self.has_sent.store(true, Ordering::Relaxed);
            // The sweeper may have ended the silent phase at the same moment. The new bytes clear that.
            self.phase_and_reason.store(ConnectionPhase::Head as u8, Ordering::Relaxed);
        }
        if more || count > UNCOUNTED_HEAD_BYTES {
            self.add_head_bytes(count);
        }
    }

    /// True if the client has sent any byte.
    pub(crate) fn has_sent(&self) -> bool {
        self.has_sent.load(Ordering::Relaxed)
    }

    #[cold]
    fn add_head_bytes(&self, count: usize) {
        // The total is increased first, so that it is never less than its parts.
        let sum = self.watchdog.head_bytes.fetch_add(count, Ordering::Relaxed) + count;
        self.head_bytes.fetch_add(count, Ordering::Relaxed);
        if sum > MAX_HEAD_BYTES {
            self.watchdog.end_oldest_heads();
        }
    }

    /// Removes the head's bytes from the listener's total.
    pub(super) fn finish_head(&self) {
        if self.head_bytes.load(Ordering::Relaxed) > 0 {
            self.release_head_bytes();
        }
    }

    #[cold]
    pub(super) fn release_head_bytes(&self) {
        let count = self.head_bytes.swap(0, Ordering::Relaxed);
        self.watchdog.head_bytes.fetch_sub(count, Ordering::Relaxed);
    }

    /// Makes the connection end this phase, if it is still in it. A request that arrived in the meantime isn't cut off.
    pub(crate) fn end_phase(&self, phase: ConnectionPhase, why: EndReason) {
        let from = phase as u8;
        let hurried =
            self.phase_and_reason.compare_exchange(from, from | why as u8, Ordering::Relaxed, Ordering::Relaxed);
        if hurried.unwrap_or_else(|state| state & PHASE_MASK) == from {
            self.wake();
        }
    }

    /// Returns true if the phase was ended for this reason.
    pub(crate) fn is_ended_for(&self, why: EndReason) -> bool {
        self.phase_and_reason.load(Ordering::Relaxed) & why as u8 != 0
    }

    /// Notes that a request's body begins, and if it must keep a minimum rate.
    pub(crate) fn begin_body(&self, paced: bool) {
        self.set_min_rate(paced);
        self.set_uploading(true);
    }

    /// Starts or stops judging a body's rate.
    pub(crate) fn set_min_rate(&self, paced: bool) {
        self.has_min_rate.store(paced, Ordering::Relaxed);
        self.body_bytes.store(0, Ordering::Relaxed);
        self.waited_ticks.store(0, Ordering::Relaxed);
        self.set_waits_on_client(false);
    }

    /// Notes that the rest of the request is discarded from now on, and if it must keep a minimum rate.
    pub(crate) fn start_linger(&self, paced: bool) {
        self.enter(ConnectionPhase::Linger);
        self.linger_started.store(self.current_tick(), Ordering::Relaxed);
        self.set_min_rate(paced);
    }

    /// The tick of the last progress; for a lingering connection, the tick at which lingering began.
    pub(crate) fn phase_started(&self, phase: ConnectionPhase) -> u32 {
        let since = if phase == ConnectionPhase::Linger { &self.linger_started } else { &self.last_progress };
        since.load(Ordering::Relaxed)
    }

    /// Counts bytes of a body.
    pub(crate) fn count_body(&self, count: u64) {
        self.body_bytes.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns true if the client sent too little of a body in a period of waiting for it. If it sent nothing, the
    /// phase's timeout applies instead.
    pub(super) fn is_below_min_rate(&self) -> bool {
        let Some((least, whole)) = self.watchdog.body_rate else { return false };
        if !self.has_min_rate.load(Ordering::Relaxed) || !self.waits_on_client() {
            return false;
        }
        let waited = self.waited_ticks.load(Ordering::Relaxed) + 1;
        if waited < whole {
            self.waited_ticks.store(waited, Ordering::Relaxed);
            return false;
        }
        self.waited_ticks.store(0, Ordering::Relaxed);
        (1..least).contains(&self.body_bytes.swap(0, Ordering::Relaxed))
    }

    /// Moves the connection to the download of a response's body, with a timeout of its own.
    pub(crate) fn enter_download(&self, patience: Duration) {
        self.download_timeout_ticks.store(ticks(patience, self.watchdog.tick), Ordering::Relaxed);
        self.enter(ConnectionPhase::Download);
    }

    /// Moves the connection to a phase, if it is still in `from`.
    pub(crate) fn enter_from(&self, from: ConnectionPhase, to: ConnectionPhase) {
        self.touch();
        let _ = self.phase_and_reason.try_update(Ordering::Relaxed, Ordering::Relaxed, |state| {
            (state & PHASE_MASK == from as u8).then_some(to as u8)
        });
    }

    /// Notes progress.
    pub(crate) fn touch(&self) {
        self.last_progress.store(self.watchdog.current_tick.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Returns true if a request is with the service, or its response isn't fully sent to the client.
    pub(crate) fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Relaxed)
    }

    /// Notes that all written bytes are sent to the client. If the service has finished the request, its response is
    /// complete.
    pub(crate) fn on_flushed(&self) {
        if matches!(self.phase(), ConnectionPhase::Idle | ConnectionPhase::Head | ConnectionPhase::Linger) {
            self.answering.store(false, Ordering::Relaxed);
        }
    }

    pub(crate) fn phase(&self) -> ConnectionPhase {
        ConnectionPhase::from_u8(self.phase_and_reason.load(Ordering::Relaxed) & PHASE_MASK)
    }

    /// Returns true if the connection must end its phase.
    pub(crate) fn must_end_phase(&self) -> bool {
        self.phase_and_reason.load(Ordering::Relaxed) > PHASE_MASK || self.is_aborted()
    }

    /// Counts a request and returns its number on this connection, from 1.
    pub(crate) fn count_request(&self) -> u32 {
        self.finish_head();
        let number = self.request_count.load(Ordering::Relaxed).wrapping_add(1);
        self.request_count.store(number, Ordering::Relaxed);
        number
    }

    /// Notes that the last response is sent while the client may still be sending.
    pub(crate) fn set_must_linger(&self) {
        self.must_linger.store(true, Ordering::Relaxed);
    }

    pub(crate) fn must_linger(&self) -> bool {
        self.must_linger.load(Ordering::Relaxed)
    }

    /// Notes if the client was refused by a block or the deny list. Such a client may not linger for long.
    pub(crate) fn set_blocked(&self, blocked: bool) {
        self.blocked.store(blocked, Ordering::Relaxed);
    }

    /// Acquires one of the few slots of connections that may linger for long. `None` for a blocked client, or if all
    /// are taken.
    pub(crate) fn acquire_linger_slot(&self) -> Option<LingerSlot> {
        if self.blocked.load(Ordering::Relaxed) {
            return None;
        }
        let (watchdog, max_lingering) = (&self.watchdog, self.watchdog.max_lingering);
        let update = watchdog
            .lingering
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |taken| (taken < max_lingering).then_some(taken + 1));
        update.is_ok().then(|| LingerSlot(Arc::clone(watchdog)))
    }

    /// The current tick.
    pub(crate) fn current_tick(&self) -> u32 {
        self.watchdog.current_tick()
    }

    /// Returns true if this much time has passed since a tick.
    pub(crate) fn has_elapsed(&self, tick: u32, time: Duration) -> bool {
        self.watchdog.has_elapsed(tick, time)
    }

    /// Returns true if the shutdown time is over and the connection must end, in any phase.
    pub(crate) fn is_aborted(&self) -> bool {
        self.watchdog.aborting.load(Ordering::Relaxed)
    }

    /// Returns true if the server shuts down, so that this connection takes no further request.
    pub(crate) fn is_draining(&self) -> bool {
        self.watchdog.draining.load(Ordering::Relaxed)
    }

    /// Returns true if part of the request's body is still to come.
    pub(crate) fn is_uploading(&self) -> bool {
        self.uploading.load(Ordering::Relaxed)
    }

    pub(crate) fn set_uploading(&self, uploading: bool) {
        self.uploading.store(uploading, Ordering::Relaxed);
    }

    /// Notes if the request's body waits for the client. Otherwise it waits for the upstream to take it.
    pub(crate) fn set_waits_on_client(&self, waits: bool) {
        self.waits_on_client.store(waits, Ordering::Relaxed);
    }

    pub(crate) fn waits_on_client(&self) -> bool {
        self.waits_on_client.load(Ordering::Relaxed)
    }

    /// Sets the waker of the task that is woken when the connection is overdue or the shutdown time is over.
    pub(crate) fn register(&self, waker: &Waker) {
        *self.waker.lock() = Some(waker.clone());
    }

    pub(super) fn wake(&self) {
        if let Some(waker) = &*self.waker.lock() {
            waker.wake_by_ref();
        }
    }

    pub(crate) fn set_ambiguous_head(&self, number: u32) {
        self.first_ambiguous_head.store(number, Ordering::Relaxed);
    }

    /// The number, from 1, of the connection's first head with two framings; 0 if there is none.
    pub(crate) fn ambiguous_head(&self) -> u32 {
        self.first_ambiguous_head.load(Ordering::Relaxed)
    }

    /// Notes a fault of the client's body.
    pub(crate) fn set_fault(&self, fault: UploadFault) {
        self.fault.store(fault as u8, Ordering::Relaxed);
    }

    pub(crate) fn fault(&self) -> UploadFault {
        match self.fault.load(Ordering::Relaxed) {
            1 => UploadFault::TooLarge,
            2 => UploadFault::Broken,
            _ => UploadFault::None,
        }
    }

    /// Leaves the rest of a refused request's body to the connection, which reads and discards it.
    pub(crate) fn leave_body(&self, body: Incoming) {
        self.start_linger(true);
        *self.unread_body.lock() = Some(body);
        self.has_unread_body.store(true, Ordering::Release);
    }

    /// Takes the body that [`ConnectionWatch::leave_body`] left.
    pub(crate) fn take_unread_body(&self) -> Option<Incoming> {
        if !self.has_unread_body.load(Ordering::Acquire) {
            return None;
        }
        self.has_unread_body.store(false, Ordering::Relaxed);
        self.unread_body.lock().take()
    }
}
