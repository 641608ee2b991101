//! How long a connection has been where it is: one clock tick for all of them, no timer of their own.
//!
//! Each connection notes, in two plain stores, its phase and the tick at which it last got anywhere. One sweeper task
//! looks over all connections every tick and wakes those that have been silent for longer than their phase allows.
//! So a request costs no timer, a timeout is never early and at most one tick (an eighth of the shortest timeout, at
//! most a second) late, and an idle process has nothing to do.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use futures_util::FutureExt as _;
use hyper::body::Incoming;
use slab::Slab;
use tokio::sync::Notify;

use crate::clients::Seat;

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    /// Between requests.
    Idle = 0,
    /// A head has begun to arrive (or the connection is new).
    Head = 1,
    /// The gate decides; the store has its own deadlines.
    Deciding = 2,
    /// The client is sending a body.
    Upload = 3,
    /// The upstream has the whole request and hasn't answered.
    Await = 4,
    /// The answer's body is on its way to the client.
    Download = 5,
    /// The connection has been upgraded.
    Tunnel = 6,
    /// The last answer is out; what the client still sends is read away, so that the answer isn't lost to a reset.
    Linger = 7,
}

/// The bits of [`Watch::state`] that hold the phase.
const PHASE: u8 = 7;

/// The reason for which a connection has to end its phase. A bit beside the phase, so that it goes with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Hurry {
    /// Its time is over.
    Time = 8,
    /// Unfinished heads take too many bytes.
    Bytes = 16,
    /// A new connection takes its place.
    Place = 32,
}

impl Phase {
    const ALL: [Self; 8] =
        [Self::Idle, Self::Head, Self::Deciding, Self::Upload, Self::Await, Self::Download, Self::Tunnel, Self::Linger];

    fn from_u8(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Idle)
    }
}

/// How long what is left of a request may keep coming after its answer.
const LINGER: Duration = Duration::from_secs(2);

/// The time after which a body's rate is judged, again and again. Only time spent waiting for the client counts.
const JUDGED: Duration = Duration::from_secs(10);
/// The most bytes of unfinished heads over all connections of a listener. Past it the oldest head is given up.
const UNFINISHED: usize = 32 << 20;
/// The most bytes of a head's first piece that don't count as unfinished, so that a usual head is never counted.
const UNCOUNTED: usize = 8 << 10;

/// How long each phase may go without progress.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    pub(crate) idle: Duration,
    pub(crate) head: Duration,
    pub(crate) body: Duration,
    pub(crate) response: Duration,
    pub(crate) tunnel: Duration,
    /// The least bytes of a request's body in a second, where there is such a bound.
    pub(crate) body_rate: Option<u64>,
}

impl Patience {
    /// The same for each phase, and no bound on a body's rate.
    #[cfg(test)]
    pub(crate) fn of_each(time: Duration) -> Self {
        Self { idle: time, head: time, body: time, response: time, tunnel: time, body_rate: None }
    }

    fn of(&self, phase: Phase) -> Option<Duration> {
        match phase {
            Phase::Idle => Some(self.idle),
            Phase::Head => Some(self.head),
            Phase::Deciding => None,
            Phase::Upload | Phase::Download => Some(self.body),
            Phase::Await => Some(self.response),
            Phase::Tunnel => Some(self.tunnel),
            Phase::Linger => Some(LINGER),
        }
    }

    pub(crate) fn tick(&self) -> Duration {
        let shortest = [self.idle, self.head, self.body, self.response, self.tunnel, LINGER].into_iter().min();
        (shortest.unwrap_or(Duration::from_secs(8)) / 8).clamp(Duration::from_millis(5), Duration::from_secs(1))
    }

    fn ticks(&self, phase: Phase) -> u32 {
        self.of(phase).map_or(u32::MAX, |patience| ticks(patience, self.tick()))
    }
}

fn ticks(patience: Duration, tick: Duration) -> u32 {
    // One more than fits, because the first tick may come right after the phase began.
    let whole = patience.as_nanos().div_ceil(tick.as_nanos().max(1));
    u32::try_from(whole).unwrap_or(u32::MAX).saturating_add(1)
}

/// What is wrong with a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Fault {
    /// Nothing.
    None = 0,
    /// It is larger than the cap.
    TooLarge = 1,
    /// The client broke off or sent bad framing.
    Broken = 2,
}

/// One connection's place in the sweep. Shared by the connection, its current request and the sweeper.
#[derive(Debug)]
pub(crate) struct Watch {
    sweep: Arc<Sweep>,
    /// The phase, and the bit of a [`Hurry`] that was put on it.
    state: AtomicU8,
    since: AtomicU32,
    /// After how many ticks the present answer is overdue, where that is its own; else 0.
    granted: AtomicU32,
    answering: AtomicBool,
    waits_on_client: AtomicBool,
    uploading: AtomicBool,
    ambiguous_head: AtomicU32,
    fault: AtomicU8,
    requests: AtomicU32,
    lingers: AtomicBool,
    blocked: AtomicBool,
    /// True if the client has sent anything yet.
    heard: AtomicBool,
    /// Bytes of the present head, as far as they are counted among the listener's.
    unfinished: AtomicUsize,
    /// True if the request's body has to come at a rate.
    paced: AtomicBool,
    /// Bytes of the body, and ticks spent waiting for the client, since its rate was last judged.
    came: AtomicU64,
    waited: AtomicU32,
    /// The tick at which the reading away began.
    lingers_since: AtomicU32,
    waker: Mutex<Option<Waker>>,
    has_leftover: AtomicBool,
    leftover: Mutex<Option<Incoming>>,
}

impl Watch {
    /// Moves the connection on to a phase, from now.
    pub(crate) fn enter(&self, phase: Phase) {
        self.touch();
        self.state.store(phase as u8, Ordering::Relaxed);
        if phase != Phase::Head {
            self.answering.store(true, Ordering::Relaxed);
            self.end_head();
        }
    }

    /// Notes bytes of a head, or of what comes between requests.
    pub(crate) fn hear(&self, count: usize) {
        let more = match self.phase() {
            Phase::Head => self.heard.load(Ordering::Relaxed),
            _ => {
                self.enter(Phase::Head);
                false
            }
        };
        if !more {
            self.heard.store(true, Ordering::Relaxed);
            // It may have been found silent in the moment that it spoke.
            self.state.store(Phase::Head as u8, Ordering::Relaxed);
        }
        if more || count > UNCOUNTED {
            self.count_head(count);
        }
    }

    /// True if the client has sent anything yet.
    pub(crate) fn was_heard(&self) -> bool {
        self.heard.load(Ordering::Relaxed)
    }

    #[cold]
    fn count_head(&self, count: usize) {
        // In this order the sum is never less than its parts.
        let sum = self.sweep.unfinished.fetch_add(count, Ordering::Relaxed) + count;
        self.unfinished.fetch_add(count, Ordering::Relaxed);
        if sum > UNFINISHED {
            self.sweep.give_up_heads();
        }
    }

    /// Gives back what the head took.
    fn end_head(&self) {
        if self.unfinished.load(Ordering::Relaxed) > 0 {
            self.give_back_head();
        }
    }

    #[cold]
    fn give_back_head(&self) {
        let count = self.unfinished.swap(0, Ordering::Relaxed);
        self.sweep.unfinished.fetch_sub(count, Ordering::Relaxed);
    }

    /// Has the connection end this phase, if it still is in it: a request that came meanwhile isn't cut off.
    pub(crate) fn hurry(&self, phase: Phase, why: Hurry) {
        let from = phase as u8;
        let hurried = self.state.compare_exchange(from, from | why as u8, Ordering::Relaxed, Ordering::Relaxed);
        if hurried.unwrap_or_else(|state| state & PHASE) == from {
            self.wake();
        }
    }

    /// True if the phase was ended for this reason.
    pub(crate) fn is_hurried(&self, why: Hurry) -> bool {
        self.state.load(Ordering::Relaxed) & why as u8 != 0
    }

    /// Notes that a request's body begins, and whether it has to come at a rate.
    pub(crate) fn begin_body(&self, paced: bool) {
        self.pace(paced);
        self.set_uploading(true);
    }

    /// Begins to judge a body's rate, or ends it.
    pub(crate) fn pace(&self, paced: bool) {
        self.paced.store(paced, Ordering::Relaxed);
        self.came.store(0, Ordering::Relaxed);
        self.waited.store(0, Ordering::Relaxed);
        self.set_waits_on_client(false);
    }

    /// Notes that what the client still sends is read away from now, and whether it has to come at a rate.
    pub(crate) fn begin_lingering(&self, paced: bool) {
        self.enter(Phase::Linger);
        self.lingers_since.store(self.tick(), Ordering::Relaxed);
        self.pace(paced);
    }

    /// The tick at which the connection began what it does, however much moved since where its answer is out.
    pub(crate) fn since(&self, phase: Phase) -> u32 {
        let since = if phase == Phase::Linger { &self.lingers_since } else { &self.since };
        since.load(Ordering::Relaxed)
    }

    /// Notes bytes of a body.
    pub(crate) fn count_body(&self, count: u64) {
        self.came.fetch_add(count, Ordering::Relaxed);
    }

    /// True if the client has sent less of a body than it must, in a tick that was spent waiting for it. One that has sent
    /// nothing is the silence that has a time of its own.
    fn trickles(&self) -> bool {
        let Some((least, whole)) = self.sweep.body_rate else { return false };
        if !self.paced.load(Ordering::Relaxed) || !self.waits_on_client() {
            return false;
        }
        let waited = self.waited.load(Ordering::Relaxed) + 1;
        if waited < whole {
            self.waited.store(waited, Ordering::Relaxed);
            return false;
        }
        self.waited.store(0, Ordering::Relaxed);
        (1..least).contains(&self.came.swap(0, Ordering::Relaxed))
    }

    /// Moves the connection on to an answer's body, which may go for so long without progress.
    pub(crate) fn enter_download(&self, patience: Duration) {
        self.granted.store(ticks(patience, self.sweep.tick), Ordering::Relaxed);
        self.enter(Phase::Download);
    }

    /// Moves the connection on, if it still is where it is thought to be.
    pub(crate) fn enter_from(&self, from: Phase, to: Phase) {
        self.touch();
        let _ = self.state.try_update(Ordering::Relaxed, Ordering::Relaxed, |state| {
            (state & PHASE == from as u8).then_some(to as u8)
        });
    }

    /// Notes that something moved.
    pub(crate) fn touch(&self) {
        self.since.store(self.sweep.now.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Whether a request is with the service, or its answer not yet with the client.
    pub(crate) fn is_answering(&self) -> bool {
        self.answering.load(Ordering::Relaxed)
    }

    /// Notes that all that was written is with the client. Where the service is through with the request, so is the
    /// answer.
    pub(crate) fn flushed(&self) {
        if matches!(self.phase(), Phase::Idle | Phase::Head | Phase::Linger) {
            self.answering.store(false, Ordering::Relaxed);
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        Phase::from_u8(self.state.load(Ordering::Relaxed) & PHASE)
    }

    /// True if the connection has to end its phase.
    pub(crate) fn is_overdue(&self) -> bool {
        self.state.load(Ordering::Relaxed) > PHASE || self.is_aborted()
    }

    /// Counts a request; gives its number on this connection, from 1.
    pub(crate) fn count_request(&self) -> u32 {
        self.end_head();
        let number = self.requests.load(Ordering::Relaxed).wrapping_add(1);
        self.requests.store(number, Ordering::Relaxed);
        number
    }

    /// Notes that the last answer goes out while the client may still be sending.
    pub(crate) fn set_lingers(&self) {
        self.lingers.store(true, Ordering::Relaxed);
    }

    pub(crate) fn lingers(&self) -> bool {
        self.lingers.load(Ordering::Relaxed)
    }

    /// Notes whether the client was refused by a block or the deny list, which earns it no patience.
    pub(crate) fn set_blocked(&self, blocked: bool) {
        self.blocked.store(blocked, Ordering::Relaxed);
    }

    /// A place among the few connections that may linger for long. None for a blocked client.
    pub(crate) fn place_to_linger(&self) -> Option<Place> {
        if self.blocked.load(Ordering::Relaxed) {
            return None;
        }
        let (sweep, most) = (&self.sweep, self.sweep.may_linger);
        let taken = sweep
            .lingering
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |taken| (taken < most).then_some(taken + 1));
        taken.is_ok().then(|| Place(Arc::clone(sweep)))
    }

    /// The present tick.
    pub(crate) fn tick(&self) -> u32 {
        self.sweep.tick_now()
    }

    /// True if this much time has passed since a tick.
    pub(crate) fn is_past(&self, tick: u32, time: Duration) -> bool {
        self.sweep.is_past(tick, time)
    }

    /// Whether the server's time is up and the connection has to go, whatever it is doing.
    pub(crate) fn is_aborted(&self) -> bool {
        self.sweep.aborting.load(Ordering::Relaxed)
    }

    /// Whether the server is going down, so that this connection takes no further request.
    pub(crate) fn is_draining(&self) -> bool {
        self.sweep.draining.load(Ordering::Relaxed)
    }

    /// Whether part of the request's body is still to come.
    pub(crate) fn is_uploading(&self) -> bool {
        self.uploading.load(Ordering::Relaxed)
    }

    pub(crate) fn set_uploading(&self, uploading: bool) {
        self.uploading.store(uploading, Ordering::Relaxed);
    }

    /// Notes whether the request's body waits for the client (or else for the upstream to take it).
    pub(crate) fn set_waits_on_client(&self, waits: bool) {
        self.waits_on_client.store(waits, Ordering::Relaxed);
    }

    pub(crate) fn waits_on_client(&self) -> bool {
        self.waits_on_client.load(Ordering::Relaxed)
    }

    /// Who is woken when the connection is overdue or the server drains.
    pub(crate) fn register(&self, waker: &Waker) {
        *lock(&self.waker) = Some(waker.clone());
    }

    fn wake(&self) {
        if let Some(waker) = &*lock(&self.waker) {
            waker.wake_by_ref();
        }
    }

    pub(crate) fn set_ambiguous_head(&self, number: u32) {
        self.ambiguous_head.store(number, Ordering::Relaxed);
    }

    /// The number, from 1, of the connection's first head with two framings; 0 if there is none.
    pub(crate) fn ambiguous_head(&self) -> u32 {
        self.ambiguous_head.load(Ordering::Relaxed)
    }

    /// Notes what is wrong with the body that the client sends.
    pub(crate) fn set_fault(&self, fault: Fault) {
        self.fault.store(fault as u8, Ordering::Relaxed);
    }

    pub(crate) fn fault(&self) -> Fault {
        match self.fault.load(Ordering::Relaxed) {
            1 => Fault::TooLarge,
            2 => Fault::Broken,
            _ => Fault::None,
        }
    }

    /// Leaves the rest of a refused request's body to the connection, which reads it away.
    pub(crate) fn leave(&self, body: Incoming) {
        self.begin_lingering(true);
        *lock(&self.leftover) = Some(body);
        self.has_leftover.store(true, Ordering::Release);
    }

    /// Takes what [`Watch::leave`] left.
    pub(crate) fn take_leftover(&self) -> Option<Incoming> {
        if !self.has_leftover.load(Ordering::Acquire) {
            return None;
        }
        self.has_leftover.store(false, Ordering::Relaxed);
        lock(&self.leftover).take()
    }
}

/// A place among the connections that may linger for long; leaving scope gives it back.
#[derive(Debug)]
pub(crate) struct Place(Arc<Sweep>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.lingering.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection's entry in its server's list; leaving scope takes it off.
pub(crate) struct Entry {
    sweep: Arc<Sweep>,
    index: usize,
    /// The connection among those of its client.
    pub(crate) seat: Option<Seat>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let left = {
            let mut open = lock(&self.sweep.open);
            if let Some(watch) = open.try_remove(self.index) {
                watch.end_head();
            }
            open.len()
        };
        self.sweep.left.notify_one();
        if left == 0 {
            self.sweep.emptied.notify_waiters();
        }
    }
}

/// All connections of one listener.
#[derive(Debug)]
pub(crate) struct Sweep {
    pub(crate) now: AtomicU32,
    draining: AtomicBool,
    aborting: AtomicBool,
    limits: [u32; Phase::ALL.len()],
    pub(crate) tick: Duration,
    lingering: AtomicUsize,
    may_linger: usize,
    /// Bytes of unfinished heads.
    unfinished: AtomicUsize,
    /// The least bytes of a body in so many ticks.
    body_rate: Option<(u64, u32)>,
    pub(crate) open: Mutex<Slab<Arc<Watch>>>,
    joined: Notify,
    left: Notify,
    emptied: Notify,
}

/// One in so many connections may linger for long at the same time.
const LINGERING_SHARE: usize = 8;

/// How many ticks an idle connection is kept while the server drains: a request that is already on its way still
/// gets its answer.
const DRAIN_TICKS: u32 = 2;

impl Sweep {
    /// The list of a listener that takes so many connections at once.
    pub(crate) fn new(patience: Patience, connections: usize) -> Arc<Self> {
        Arc::new(Self {
            now: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            aborting: AtomicBool::new(false),
            limits: Phase::ALL.map(|phase| patience.ticks(phase)),
            tick: patience.tick(),
            lingering: AtomicUsize::new(0),
            may_linger: (connections / LINGERING_SHARE).max(1),
            unfinished: AtomicUsize::new(0),
            body_rate: patience
                .body_rate
                .map(|rate| (rate.saturating_mul(JUDGED.as_secs()), ticks(JUDGED, patience.tick()))),
            open: Mutex::default(),
            joined: Notify::new(),
            left: Notify::new(),
            emptied: Notify::new(),
        })
    }

    /// Adds a connection.
    pub(crate) fn join(self: &Arc<Self>) -> (Arc<Watch>, Entry) {
        let watch = Arc::new(Watch {
            sweep: Arc::clone(self),
            state: AtomicU8::new(Phase::Head as u8),
            since: AtomicU32::new(self.now.load(Ordering::Relaxed)),
            granted: AtomicU32::new(0),
            answering: AtomicBool::new(false),
            waits_on_client: AtomicBool::new(false),
            uploading: AtomicBool::new(false),
            ambiguous_head: AtomicU32::new(0),
            fault: AtomicU8::new(Fault::None as u8),
            requests: AtomicU32::new(0),
            lingers: AtomicBool::new(false),
            blocked: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            unfinished: AtomicUsize::new(0),
            paced: AtomicBool::new(false),
            came: AtomicU64::new(0),
            waited: AtomicU32::new(0),
            lingers_since: AtomicU32::new(0),
            waker: Mutex::new(None),
            has_leftover: AtomicBool::new(false),
            leftover: Mutex::new(None),
        });
        let (index, first) = {
            let mut open = lock(&self.open);
            let first = open.is_empty();
            (open.insert(Arc::clone(&watch)), first)
        };
        if first {
            self.joined.notify_one();
        }
        (watch, Entry { sweep: Arc::clone(self), index, seat: None })
    }

    /// The present tick.
    pub(crate) fn tick_now(&self) -> u32 {
        self.now.load(Ordering::Relaxed)
    }

    /// True if this much time has passed since a tick.
    pub(crate) fn is_past(&self, tick: u32, time: Duration) -> bool {
        self.tick_now().wrapping_sub(tick) >= ticks(time, self.tick)
    }

    /// Gives up the oldest unfinished heads until the others are within their bound.
    #[cold]
    fn give_up_heads(&self) {
        let open = lock(&self.open);
        while self.unfinished.load(Ordering::Relaxed) > UNFINISHED {
            let counted =
                open.iter().rev().map(|(_, watch)| watch).filter(|watch| watch.unfinished.load(Ordering::Relaxed) > 0);
            let age = |watch: &&Arc<Watch>| self.tick_now().wrapping_sub(watch.since.load(Ordering::Relaxed));
            let Some(oldest) = counted.max_by_key(age) else { return };
            oldest.give_back_head();
            oldest.hurry(Phase::Head, Hurry::Bytes);
        }
    }

    /// How many connections are open.
    pub(crate) fn len(&self) -> usize {
        lock(&self.open).len()
    }

    /// Forgets who has left so far.
    pub(crate) fn forget_left(&self) {
        let _ = self.left.notified().now_or_never();
    }

    /// Returns once a connection has left since the last call.
    pub(crate) async fn one_left(&self) {
        self.left.notified().await;
    }

    /// Asks every connection to end after what it is doing.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Ends every connection that is still open.
    pub(crate) fn abort(&self) {
        self.aborting.store(true, Ordering::Relaxed);
        for (_, watch) in &*lock(&self.open) {
            watch.wake();
        }
    }

    /// Returns once no connection is open.
    pub(crate) async fn emptied(&self) {
        loop {
            let emptied = self.emptied.notified();
            if lock(&self.open).is_empty() {
                return;
            }
            emptied.await;
        }
    }

    /// Sweeps for ever.
    pub(crate) async fn run(&self) {
        loop {
            while lock(&self.open).is_empty() {
                self.joined.notified().await;
            }
            tokio::time::sleep(self.tick).await;
            self.sweep();
        }
    }

    pub(crate) fn sweep(&self) {
        let now = self.now.load(Ordering::Relaxed).wrapping_add(1);
        self.now.store(now, Ordering::Relaxed);
        let draining = self.draining.load(Ordering::Relaxed);
        for (_, watch) in &*lock(&self.open) {
            let phase = watch.phase();
            let mut limit = match watch.granted.load(Ordering::Relaxed) {
                granted if granted > 0 && phase == Phase::Download => granted,
                _ => self.limits[phase as usize],
            };
            if draining && phase == Phase::Idle {
                limit = limit.min(DRAIN_TICKS);
            }
            let silent = now.wrapping_sub(watch.since.load(Ordering::Relaxed)) > limit;
            let has_body = matches!(phase, Phase::Upload | Phase::Deciding | Phase::Linger);
            if silent || has_body && watch.trickles() {
                watch.hurry(phase, Hurry::Time);
            }
        }
    }
}

/// Nothing that runs under these locks can leave what they guard half-changed, so a panic elsewhere doesn't spoil it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
