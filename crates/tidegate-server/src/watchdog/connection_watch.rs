//! The watched state of one connection.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize};
use std::task::{Poll, Waker};
use std::time::Duration;

use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::sync::OwnedSemaphorePermit;

use super::Watchdog;
use super::phase::{ConnectionPhase, EndReason, MAX_HEAD_BYTES, PHASE_MASK, UNCOUNTED_HEAD_BYTES, ticks};
use crate::access_log::AccessSlot;
use crate::turn::MAX_TURN_BYTES;

/// The bytes for which a smaller request counts, so that at most 16 are answered in a turn. The HTTP library itself yields as
/// often, but its task goes on before the runtime has looked for what other clients have sent.
const MIN_REQUEST_BYTES: usize = MAX_TURN_BYTES / 16;

/// A flag that several tasks read and write, without any order towards other memory.
#[derive(Debug, Default)]
pub(crate) struct Flag(AtomicBool);

impl Flag {
    pub(crate) fn get(&self) -> bool {
        self.0.load(Relaxed)
    }

    pub(crate) fn set(&self, value: bool) {
        self.0.store(value, Relaxed);
    }

    /// Sets the flag and returns its value before.
    pub(crate) fn replace(&self, value: bool) -> bool {
        self.0.swap(value, Relaxed)
    }
}

/// The watched state of one connection. Shared by the connection, its current request and the sweeper.
#[derive(Debug)]
pub(crate) struct ConnectionWatch {
    pub(crate) watchdog: Arc<Watchdog>,
    is_stream: bool,
    /// The phase, and the bit of an [`EndReason`] if the phase must end.
    phase_and_reason: AtomicU8,
    /// The tick of the last progress.
    pub(super) last_progress: AtomicU32,
    /// The tick at which the phase began.
    phase_began: AtomicU32,
    waker: Mutex<Option<Waker>>,
    pub(crate) head: HeadState,
    pub(crate) body: BodyState,
    pub(crate) response: ResponseState,
    pub(crate) access: AccessSlot,
}

/// The heads of a connection's requests.
#[derive(Debug, Default)]
pub(crate) struct HeadState {
    /// True if the client has sent any byte of its first head, or of what comes before it.
    pub(crate) has_begun: Flag,
    /// True if a whole head has arrived on the connection.
    pub(crate) has_had_request: Flag,
    /// The bytes of the current head that are counted in the listener's total.
    pub(super) counted_bytes: AtomicUsize,
    request_count: AtomicU32,
    /// The bytes of the requests since other tasks last ran, or the client was last waited for.
    turn_bytes: AtomicUsize,
    /// True if the current request had arrived before the connection waited for it.
    is_pipelined: Flag,
    /// The number, from 1, of the first head that servers may read in different ways; 0 if there is none.
    pub(crate) first_ambiguous: AtomicU32,
}

/// The body of a connection's current request.
#[derive(Debug, Default)]
pub(crate) struct BodyState {
    /// True if part of the body is still to come.
    pub(crate) is_uploading: Flag,
    /// True if the body waits for the client. Otherwise it waits for the upstream to take it.
    pub(crate) waits_on_client: Flag,
    /// True if the body is larger than the cap.
    pub(crate) is_too_large: Flag,
    /// True if the client closed early or sent bad framing.
    pub(crate) is_broken: Flag,
    has_min_rate: Flag,
    /// The bytes of the body, and the ticks spent waiting for the client, since its rate was last judged.
    bytes: AtomicU64,
    waited_ticks: AtomicU32,
}

/// The response to a connection's current request, and the rest of the request after it.
#[derive(Debug, Default)]
pub(crate) struct ResponseState {
    /// True if a request is with the service, or its response isn't fully sent to the client.
    pub(crate) is_pending: Flag,
    /// The ticks after which the response is overdue, if it has a timeout of its own; else 0.
    pub(super) timeout_ticks: AtomicU32,
    /// True if the last response is sent while the client may still be sending.
    pub(crate) must_linger: Flag,
    /// True if the last bytes of the response wait for the client to read them.
    pub(crate) is_unread: Flag,
    /// True if the whole response of an HTTP/2 stream is queued, and only waits for the client to read it.
    pub(crate) is_queued: Flag,
    /// True if the client was refused by a block or the deny list. Such a client may not linger for long.
    pub(crate) is_blocked: Flag,
    has_unread_body: AtomicBool,
    unread_body: Mutex<Option<Incoming>>,
}

impl ConnectionWatch {
    pub(super) fn new(watchdog: Arc<Watchdog>, is_stream: bool) -> Self {
        Self {
            is_stream,
            phase_and_reason: AtomicU8::new(ConnectionPhase::Head as u8),
            last_progress: AtomicU32::new(watchdog.current_tick()),
            phase_began: AtomicU32::new(watchdog.current_tick()),
            watchdog,
            waker: Mutex::default(),
            head: HeadState::default(),
            body: BodyState::default(),
            response: ResponseState::default(),
            access: AccessSlot::default(),
        }
    }

    /// True if this is a stream of an HTTP/2 connection. Its last owner may be a piece of its response, which the library
    /// drops under the connection's lock, so nothing of the library may be kept here.
    pub(crate) fn is_stream(&self) -> bool {
        self.is_stream
    }

    /// Moves the connection to a phase, which starts now.
    pub(crate) fn enter(&self, phase: ConnectionPhase) {
        self.touch();
        self.phase_began.store(self.watchdog.current_tick(), Relaxed);
        self.phase_and_reason.store(phase as u8, Relaxed);
        if phase != ConnectionPhase::Head {
            self.response.is_pending.set(true);
            self.head.has_had_request.set(true);
            self.finish_head();
        }
    }

    /// Notes received bytes of a head, or between requests.
    pub(crate) fn note_received(&self, count: usize) {
        let state = self.phase_and_reason.load(Relaxed);
        let more = match ConnectionPhase::from_u8(state & PHASE_MASK) {
            ConnectionPhase::Head => self.head.has_begun.get(),
            _ => {
                self.enter(ConnectionPhase::Head);
                false
            }
        };
        if !more {
            self.head.has_begun.set(true);
            // The silent phase may have been ended at the same moment. The new bytes clear that.
            self.phase_and_reason.store(ConnectionPhase::Head as u8, Relaxed);
            if state & EndReason::Displaced as u8 != 0 {
                // Another connection must leave instead.
                self.watchdog.connection_left.notify_one();
            }
        }
        if more || count > UNCOUNTED_HEAD_BYTES {
            self.add_head_bytes(count);
        }
    }

    #[cold]
    fn add_head_bytes(&self, count: usize) {
        // The total is increased first, so that it is never less than its parts.
        let sum = self.watchdog.head_bytes.fetch_add(count, Relaxed) + count;
        self.head.counted_bytes.fetch_add(count, Relaxed);
        if sum > MAX_HEAD_BYTES {
            self.watchdog.end_oldest_heads();
        }
    }

    /// Removes the head's bytes from the listener's total.
    pub(super) fn finish_head(&self) {
        if self.head.counted_bytes.load(Relaxed) > 0 {
            self.release_head_bytes();
        }
    }

    /// Notes that the bytes before HTTP have arrived, and that the client has the whole time of a head for the next ones.
    pub(crate) fn restart_head(&self) {
        self.finish_head();
        self.head.has_begun.set(false);
        self.touch();
    }

    #[cold]
    pub(super) fn release_head_bytes(&self) {
        let count = self.head.counted_bytes.swap(0, Relaxed);
        self.watchdog.head_bytes.fetch_sub(count, Relaxed);
    }

    /// Makes the connection end this phase, if it is still in it. A request that arrived in the meantime isn't cut off.
    pub(crate) fn end_phase(&self, phase: ConnectionPhase, why: EndReason) {
        let from = phase as u8;
        let changed = self.phase_and_reason.compare_exchange(from, from | why as u8, Relaxed, Relaxed);
        if changed.unwrap_or_else(|state| state & PHASE_MASK) == from {
            self.wake();
        }
    }

    /// Returns true if the phase was ended for this reason.
    pub(crate) fn is_ended_for(&self, why: EndReason) -> bool {
        self.phase_and_reason.load(Relaxed) & why as u8 != 0
    }

    /// Notes that a request's body begins, and if it must keep a minimum rate.
    pub(crate) fn begin_body(&self, paced: bool) {
        self.set_min_rate(paced);
        self.body.is_uploading.set(true);
    }

    /// Notes that a request's body has arrived whole.
    pub(crate) fn end_body(&self) {
        self.enter_from(ConnectionPhase::Upload, ConnectionPhase::AwaitResponse);
        self.body.is_uploading.set(false);
    }

    /// Starts or stops judging a body's rate.
    pub(crate) fn set_min_rate(&self, paced: bool) {
        self.body.has_min_rate.set(paced);
        self.body.bytes.store(0, Relaxed);
        self.body.waited_ticks.store(0, Relaxed);
        self.body.waits_on_client.set(false);
    }

    /// Notes that the rest of the request is discarded from now on, and if it must keep a minimum rate.
    pub(crate) fn start_linger(&self, paced: bool) {
        self.enter(ConnectionPhase::Linger);
        self.set_min_rate(paced);
    }

    /// The tick of the last progress. Where bytes that trickle in don't count as such, the tick at which the phase began:
    /// while lingering, and for the small requests and replies of listeners that don't forward any.
    pub(crate) fn phase_started(&self, phase: ConnectionPhase) -> u32 {
        use ConnectionPhase::{Download, Linger, Upload};
        let is_short = phase == Linger || !self.watchdog.forwards && matches!(phase, Upload | Download);
        if is_short { &self.phase_began } else { &self.last_progress }.load(Relaxed)
    }

    /// The ticks since then.
    pub(crate) fn ticks_in(&self, phase: ConnectionPhase) -> u32 {
        self.watchdog.current_tick().wrapping_sub(self.phase_started(phase))
    }

    pub(crate) fn count_body(&self, count: u64) {
        self.body.bytes.fetch_add(count, Relaxed);
    }

    /// Returns true if the client sent too little of a body in a period of waiting for it. If it sent nothing, the
    /// phase's timeout applies instead.
    pub(super) fn is_below_min_rate(&self) -> bool {
        let Some((least, whole)) = self.watchdog.body_rate else { return false };
        let BodyState { has_min_rate, waits_on_client, bytes, waited_ticks, .. } = &self.body;
        if !has_min_rate.get() || !waits_on_client.get() {
            return false;
        }
        let waited = waited_ticks.load(Relaxed) + 1;
        if waited < whole {
            waited_ticks.store(waited, Relaxed);
            return false;
        }
        waited_ticks.store(0, Relaxed);
        (1..least).contains(&bytes.swap(0, Relaxed))
    }

    /// Moves the connection to the download of a response's body, with a timeout of its own.
    pub(crate) fn enter_download(&self, timeout: Duration) {
        self.response.timeout_ticks.store(ticks(timeout, self.watchdog.tick), Relaxed);
        self.enter(ConnectionPhase::Download);
    }

    /// Moves the connection to a phase, if it is still in `from`.
    pub(crate) fn enter_from(&self, from: ConnectionPhase, to: ConnectionPhase) {
        self.touch();
        let _ = self
            .phase_and_reason
            .try_update(Relaxed, Relaxed, |state| (state & PHASE_MASK == from as u8).then_some(to as u8));
    }

    pub(crate) fn touch(&self) {
        self.last_progress.store(self.watchdog.current_tick(), Relaxed);
    }

    /// Notes that all written bytes are sent to the client. If the service has finished the request, its response is
    /// complete.
    pub(crate) fn on_flushed(&self) {
        if matches!(self.phase(), ConnectionPhase::Idle | ConnectionPhase::Head | ConnectionPhase::Linger) {
            self.response.is_pending.set(false);
        }
    }

    pub(crate) fn phase(&self) -> ConnectionPhase {
        ConnectionPhase::from_u8(self.phase_and_reason.load(Relaxed) & PHASE_MASK)
    }

    pub(crate) fn must_end_phase(&self) -> bool {
        self.phase_and_reason.load(Relaxed) > PHASE_MASK || self.is_aborted()
    }

    /// Counts a request of this connection.
    pub(crate) fn count_request(&self) {
        self.finish_head();
        self.head.request_count.store(self.head.request_count.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// True if servers may read the current request, or the end of one before it, in different ways.
    pub(crate) fn is_ambiguous(&self) -> bool {
        (1..=self.head.request_count.load(Relaxed)).contains(&self.head.first_ambiguous.load(Relaxed))
    }

    /// Counts a request of this many bytes that is answered now. Returns true if all other tasks must run before, because the
    /// client has sent so much at once.
    pub(crate) fn must_yield(&self, bytes: usize) -> bool {
        let (before, bytes) = (self.head.turn_bytes.load(Relaxed), bytes.max(MIN_REQUEST_BYTES));
        let must_yield = before >= MAX_TURN_BYTES;
        self.head.is_pipelined.set(before > 0);
        self.head.turn_bytes.store(if must_yield { bytes } else { before.saturating_add(bytes) }, Relaxed);
        must_yield
    }

    /// True if the connection ends with its current response, because the client sends requests without waiting for
    /// responses, and a new connection waits for a place. A listener that forwards requests ends none that has arrived.
    pub(crate) fn gives_way(&self) -> bool {
        let Watchdog { forwards, is_full, .. } = &*self.watchdog;
        is_full.get() && !forwards && self.head.is_pipelined.get()
    }

    /// Notes that the client has sent no more, so that other tasks run.
    pub(crate) fn note_waiting(&self) {
        self.head.turn_bytes.store(0, Relaxed);
    }

    /// Acquires one of the few slots of connections that may linger for long. `None` for a blocked client, or if all
    /// are taken.
    pub(crate) fn acquire_linger_slot(&self) -> Option<OwnedSemaphorePermit> {
        if self.response.is_blocked.get() {
            return None;
        }
        Arc::clone(&self.watchdog.linger_slots).try_acquire_owned().ok()
    }

    /// Returns true if the shutdown time is over and the connection must end, in any phase.
    pub(crate) fn is_aborted(&self) -> bool {
        self.watchdog.is_aborting.get()
    }

    /// Returns true if the server shuts down, so that this connection takes no further request.
    pub(crate) fn is_draining(&self) -> bool {
        self.watchdog.is_draining.get()
    }

    /// Sets the waker of the task that is woken when the connection is overdue or the shutdown time is over.
    pub(crate) fn register(&self, waker: &Waker) {
        *self.waker.lock() = Some(waker.clone());
    }

    /// Waits for a future. `None` if the phase must end before it does. What has arrived in the meantime isn't cut off.
    pub(crate) async fn until_phase_ends<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        let mut is_registered = false;
        poll_fn(|cx| {
            // One registration is enough, because a task's waker stays the same.
            if !std::mem::replace(&mut is_registered, true) {
                self.register(cx.waker());
            }
            match future.as_mut().poll(cx) {
                Poll::Pending if self.must_end_phase() => Poll::Ready(None),
                polled => polled.map(Some),
            }
        })
        .await
    }

    pub(crate) fn wake(&self) {
        if let Some(waker) = &*self.waker.lock() {
            waker.wake_by_ref();
        }
    }

    /// Leaves the rest of a refused request's body to the connection, which reads and discards it.
    pub(crate) fn leave_body(&self, body: Incoming) {
        self.start_linger(true);
        *self.response.unread_body.lock() = Some(body);
        self.response.has_unread_body.store(true, Release);
    }

    /// Takes the body that [`ConnectionWatch::leave_body`] left.
    pub(crate) fn take_unread_body(&self) -> Option<Incoming> {
        if !self.response.has_unread_body.load(Acquire) {
            return None;
        }
        self.response.has_unread_body.store(false, Relaxed);
        self.response.unread_body.lock().take()
    }
}
