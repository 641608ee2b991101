//! The timeouts of connections: one clock tick for all connections of a listener instead of a timer each.
//!
//! Each connection notes its phase and the tick of its last progress, in two plain stores. Each tick, one sweeper task
//! checks all connections and wakes those that have been silent for longer than their phase allows. So a request costs
//! no timer and an idle process has nothing to do. A timeout is never early, and at most one tick late. A tick is an
//! eighth of the shortest timeout, at most a second.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use std::time::Duration;

use futures_util::FutureExt as _;
use hyper::body::Incoming;
use parking_lot::Mutex;
use slab::Slab;
use tokio::sync::Notify;

use crate::client_limit::ClientSlot;

/// The phase of a connection's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ConnectionPhase {
    /// Between requests.
    Idle = 0,
    /// A head has begun to arrive (or the connection is new).
    Head = 1,
    /// The gate decides. The store has its own deadlines.
    Deciding = 2,
    /// The client is sending a body.
    Upload = 3,
    /// The upstream has the whole request and hasn't answered.
    AwaitResponse = 4,
    /// The response's body is being sent to the client.
    Download = 5,
    /// The connection has been upgraded.
    Tunnel = 6,
    /// The last response is sent. The rest of the request is read and discarded, so that a reset doesn't lose the
    /// response.
    Linger = 7,
}

/// The bits of [`ConnectionWatch::phase_and_reason`] that hold the phase.
const PHASE_MASK: u8 = 7;

/// The reason why a connection must end its phase. It is a bit beside the phase, so that both change together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum EndReason {
    /// The phase's timeout is over.
    Timeout = 8,
    /// Unfinished heads take too many bytes in total.
    HeadBytes = 16,
    /// A new connection takes its place.
    Displaced = 32,
}

impl ConnectionPhase {
    const ALL: [Self; 8] = [
        Self::Idle,
        Self::Head,
        Self::Deciding,
        Self::Upload,
        Self::AwaitResponse,
        Self::Download,
        Self::Tunnel,
        Self::Linger,
    ];

    fn from_u8(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Idle)
    }
}

/// The time that the rest of a request may keep arriving after its response.
const LINGER_TIMEOUT: Duration = Duration::from_secs(2);

/// The period after which a body's rate is judged each time. Only time spent waiting for the client counts.
const BODY_RATE_PERIOD: Duration = Duration::from_secs(10);
/// The maximum bytes of unfinished heads over all connections of a listener. Beyond it the oldest head is ended.
const MAX_HEAD_BYTES: usize = 32 << 20;
/// The maximum bytes of a head's first piece that don't count as unfinished, so that a usual head is never counted.
const UNCOUNTED_HEAD_BYTES: usize = 8 << 10;

/// The time that each phase may go without progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PhaseTimeouts {
    pub(crate) idle: Duration,
    pub(crate) head: Duration,
    pub(crate) body: Duration,
    pub(crate) response: Duration,
    pub(crate) tunnel: Duration,
    /// The minimum bytes per second of a request's body. `None` if there is no such limit.
    pub(crate) body_rate: Option<u64>,
}

impl PhaseTimeouts {
    /// Returns the same timeout for each phase, and no minimum rate of bodies.
    #[cfg(test)]
    pub(crate) fn uniform(time: Duration) -> Self {
        Self { idle: time, head: time, body: time, response: time, tunnel: time, body_rate: None }
    }

    fn timeout_of(&self, phase: ConnectionPhase) -> Option<Duration> {
        match phase {
            ConnectionPhase::Idle => Some(self.idle),
            ConnectionPhase::Head => Some(self.head),
            ConnectionPhase::Deciding => None,
            ConnectionPhase::Upload | ConnectionPhase::Download => Some(self.body),
            ConnectionPhase::AwaitResponse => Some(self.response),
            ConnectionPhase::Tunnel => Some(self.tunnel),
            ConnectionPhase::Linger => Some(LINGER_TIMEOUT),
        }
    }

    pub(crate) fn tick(&self) -> Duration {
        let shortest = [self.idle, self.head, self.body, self.response, self.tunnel, LINGER_TIMEOUT].into_iter().min();
        (shortest.unwrap_or(Duration::from_secs(8)) / 8).clamp(Duration::from_millis(5), Duration::from_secs(1))
    }

    fn ticks(&self, phase: ConnectionPhase) -> u32 {
        self.timeout_of(phase).map_or(u32::MAX, |patience| ticks(patience, self.tick()))
    }
}

fn ticks(timeout: Duration, tick: Duration) -> u32 {
    // One more, because the first tick may come right after the phase began.
    let whole = timeout.as_nanos().div_ceil(tick.as_nanos().max(1));
    u32::try_from(whole).unwrap_or(u32::MAX).saturating_add(1)
}

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
    watchdog: Arc<Watchdog>,
    /// The phase, and the bit of an [`EndReason`] if the phase must end.
    phase_and_reason: AtomicU8,
    last_progress: AtomicU32,
    /// The ticks after which the current response is overdue, if it has a timeout of its own; else 0.
    download_timeout_ticks: AtomicU32,
    answering: AtomicBool,
    waits_on_client: AtomicBool,
    uploading: AtomicBool,
    first_ambiguous_head: AtomicU32,
    fault: AtomicU8,
    request_count: AtomicU32,
    must_linger: AtomicBool,
    blocked: AtomicBool,
    /// True if the client has sent any byte.
    has_sent: AtomicBool,
    /// The bytes of the current head that are counted in the listener's total.
    head_bytes: AtomicUsize,
    /// True if the request's body must keep a minimum rate.
    has_min_rate: AtomicBool,
    /// The bytes of the body, and the ticks spent waiting for the client, since its rate was last judged.
    body_bytes: AtomicU64,
    waited_ticks: AtomicU32,
    /// The tick at which lingering began.
    linger_started: AtomicU32,
    waker: Mutex<Option<Waker>>,
    has_unread_body: AtomicBool,
    unread_body: Mutex<Option<Incoming>>,
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
    fn finish_head(&self) {
        if self.head_bytes.load(Ordering::Relaxed) > 0 {
            self.release_head_bytes();
        }
    }

    #[cold]
    fn release_head_bytes(&self) {
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
    fn is_below_min_rate(&self) -> bool {
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

    fn wake(&self) {
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

/// A slot of a connection that may linger for long. Dropping it returns the slot.
#[derive(Debug)]
pub(crate) struct LingerSlot(Arc<Watchdog>);

impl Drop for LingerSlot {
    fn drop(&mut self) {
        self.0.lingering.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection's entry in its listener's list. Dropping it removes the entry.
pub(crate) struct ConnectionEntry {
    watchdog: Arc<Watchdog>,
    index: usize,
    /// The connection's slot under its client's limit.
    pub(crate) client_slot: Option<ClientSlot>,
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        let left = {
            let mut open = self.watchdog.connections.lock();
            if let Some(watch) = open.try_remove(self.index) {
                watch.finish_head();
            }
            open.len()
        };
        self.watchdog.connection_left.notify_one();
        if left == 0 {
            self.watchdog.all_left.notify_waiters();
        }
    }
}

/// All connections of one listener.
#[derive(Debug)]
pub(crate) struct Watchdog {
    pub(crate) current_tick: AtomicU32,
    draining: AtomicBool,
    aborting: AtomicBool,
    timeout_ticks: [u32; ConnectionPhase::ALL.len()],
    pub(crate) tick: Duration,
    lingering: AtomicUsize,
    max_lingering: usize,
    /// The bytes of unfinished heads.
    head_bytes: AtomicUsize,
    /// The minimum bytes of a body per number of ticks.
    body_rate: Option<(u64, u32)>,
    pub(crate) connections: Mutex<Slab<Arc<ConnectionWatch>>>,
    not_empty: Notify,
    connection_left: Notify,
    all_left: Notify,
}

/// One in this number of connections may linger for long at the same time.
const LINGER_DIVISOR: usize = 8;

/// The ticks that an idle connection is kept while the server drains, so that a request already sent still gets its
/// response.
const DRAIN_TICKS: u32 = 2;

impl Watchdog {
    /// Returns the watchdog of a listener with this maximum number of connections.
    pub(crate) fn new(patience: PhaseTimeouts, connections: usize) -> Arc<Self> {
        Arc::new(Self {
            current_tick: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            aborting: AtomicBool::new(false),
            timeout_ticks: ConnectionPhase::ALL.map(|phase| patience.ticks(phase)),
            tick: patience.tick(),
            lingering: AtomicUsize::new(0),
            max_lingering: (connections / LINGER_DIVISOR).max(1),
            head_bytes: AtomicUsize::new(0),
            body_rate: patience.body_rate.map(|rate| {
                (rate.saturating_mul(BODY_RATE_PERIOD.as_secs()), ticks(BODY_RATE_PERIOD, patience.tick()))
            }),
            connections: Mutex::default(),
            not_empty: Notify::new(),
            connection_left: Notify::new(),
            all_left: Notify::new(),
        })
    }

    /// Adds a connection.
    pub(crate) fn add_connection(self: &Arc<Self>) -> (Arc<ConnectionWatch>, ConnectionEntry) {
        let watch = Arc::new(ConnectionWatch {
            watchdog: Arc::clone(self),
            phase_and_reason: AtomicU8::new(ConnectionPhase::Head as u8),
            last_progress: AtomicU32::new(self.current_tick.load(Ordering::Relaxed)),
            download_timeout_ticks: AtomicU32::new(0),
            answering: AtomicBool::new(false),
            waits_on_client: AtomicBool::new(false),
            uploading: AtomicBool::new(false),
            first_ambiguous_head: AtomicU32::new(0),
            fault: AtomicU8::new(UploadFault::None as u8),
            request_count: AtomicU32::new(0),
            must_linger: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            has_sent: AtomicBool::new(false),
            head_bytes: AtomicUsize::new(0),
            has_min_rate: AtomicBool::new(false),
            body_bytes: AtomicU64::new(0),
            waited_ticks: AtomicU32::new(0),
            linger_started: AtomicU32::new(0),
            waker: Mutex::new(None),
            has_unread_body: AtomicBool::new(false),
            unread_body: Mutex::new(None),
        });
        let (index, first) = {
            let mut open = self.connections.lock();
            let first = open.is_empty();
            (open.insert(Arc::clone(&watch)), first)
        };
        if first {
            self.not_empty.notify_one();
        }
        (watch, ConnectionEntry { watchdog: Arc::clone(self), index, client_slot: None })
    }

    /// The current tick.
    pub(crate) fn current_tick(&self) -> u32 {
        self.current_tick.load(Ordering::Relaxed)
    }

    /// Returns true if this much time has passed since a tick.
    pub(crate) fn has_elapsed(&self, tick: u32, time: Duration) -> bool {
        self.current_tick().wrapping_sub(tick) >= ticks(time, self.tick)
    }

    /// Ends the oldest unfinished heads until the total is within its limit.
    #[cold]
    fn end_oldest_heads(&self) {
        let open = self.connections.lock();
        while self.head_bytes.load(Ordering::Relaxed) > MAX_HEAD_BYTES {
            let counted =
                open.iter().rev().map(|(_, watch)| watch).filter(|watch| watch.head_bytes.load(Ordering::Relaxed) > 0);
            let age = |watch: &&Arc<ConnectionWatch>| {
                self.current_tick().wrapping_sub(watch.last_progress.load(Ordering::Relaxed))
            };
            let Some(oldest) = counted.max_by_key(age) else { return };
            oldest.release_head_bytes();
            oldest.end_phase(ConnectionPhase::Head, EndReason::HeadBytes);
        }
    }

    /// The number of open connections.
    pub(crate) fn len(&self) -> usize {
        self.connections.lock().len()
    }

    /// Clears the signal of earlier leaves.
    pub(crate) fn reset_left_signal(&self) {
        let _ = self.connection_left.notified().now_or_never();
    }

    /// Returns once a connection has left since the last call.
    pub(crate) async fn wait_for_leave(&self) {
        self.connection_left.notified().await;
    }

    /// Makes every connection end after its current request.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Ends every connection that is still open.
    pub(crate) fn abort(&self) {
        self.aborting.store(true, Ordering::Relaxed);
        for (_, watch) in &*self.connections.lock() {
            watch.wake();
        }
    }

    /// Returns once no connection is open.
    pub(crate) async fn wait_until_empty(&self) {
        loop {
            let emptied = self.all_left.notified();
            if self.connections.lock().is_empty() {
                return;
            }
            emptied.await;
        }
    }

    /// Runs the sweeper; never returns.
    pub(crate) async fn run(&self) {
        loop {
            while self.connections.lock().is_empty() {
                self.not_empty.notified().await;
            }
            tokio::time::sleep(self.tick).await;
            self.sweep_once();
        }
    }

    pub(crate) fn sweep_once(&self) {
        let now = self.current_tick.load(Ordering::Relaxed).wrapping_add(1);
        self.current_tick.store(now, Ordering::Relaxed);
        let draining = self.draining.load(Ordering::Relaxed);
        for (_, watch) in &*self.connections.lock() {
            let phase = watch.phase();
            let mut limit = match watch.download_timeout_ticks.load(Ordering::Relaxed) {
                granted if granted > 0 && phase == ConnectionPhase::Download => granted,
                _ => self.timeout_ticks[phase as usize],
            };
            if draining && phase == ConnectionPhase::Idle {
                limit = limit.min(DRAIN_TICKS);
            }
            let silent = now.wrapping_sub(watch.last_progress.load(Ordering::Relaxed)) > limit;
            let has_body =
                matches!(phase, ConnectionPhase::Upload | ConnectionPhase::Deciding | ConnectionPhase::Linger);
            if silent || has_body && watch.is_below_min_rate() {
                watch.end_phase(phase, EndReason::Timeout);
            }
        }
    }
}

#[cfg(test)]
mod tests;
