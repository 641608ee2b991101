//! The timeouts of connections: one clock tick for all connections of a listener instead of a timer each.
//!
//! Each connection notes its phase and the tick of its last progress, in two plain stores. Each tick, one sweeper task
//! checks all connections and wakes those that have been silent for longer than their phase allows. So a request costs
//! no timer and an idle process has nothing to do. A timeout is never early, and at most one tick late. A tick is an
//! eighth of the shortest timeout, at most a second.

mod connection_watch;
mod phase;

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
use std::time::Duration;

use parking_lot::Mutex;
use slab::Slab;
use tidegate_policy::InboundTimeouts;
use tokio::sync::{Notify, Semaphore};

pub(crate) use self::connection_watch::{ConnectionWatch, Flag};
use self::phase::{BODY_RATE_PERIOD, MAX_HEAD_BYTES, phase_timeout, tick_of, ticks};
pub(crate) use self::phase::{ConnectionPhase, EndReason};
use crate::client_limit::ClientSlot;
use crate::displacement::{awaits_client, displace_streams};

/// A connection's entry in its listener's list. Dropping it removes the entry.
pub(crate) struct ConnectionEntry {
    watchdog: Arc<Watchdog>,
    index: usize,
    /// The connection's slot under its client's limit.
    pub(crate) client_slot: Option<ClientSlot>,
}

impl ConnectionEntry {
    /// Notes the client of a connection whose first bytes name it.
    pub(crate) fn set_client(&mut self, client_slot: Option<ClientSlot>) {
        if let Some(open) = self.watchdog.connections.lock().get_mut(self.index) {
            open.client = client_slot.as_ref().map(ClientSlot::client);
        }
        self.client_slot = client_slot;
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        let left = {
            let mut open = self.watchdog.connections.lock();
            if let Some(connection) = open.try_remove(self.index) {
                connection.watch.finish_head();
            }
            open.len()
        };
        self.watchdog.connection_left.notify_one();
        if left == 0 {
            self.watchdog.all_left.notify_waiters();
        }
    }
}

/// The entry of an HTTP/2 stream in its listener's list. Dropping it removes the entry.
pub(crate) struct StreamEntry {
    watchdog: Arc<Watchdog>,
    index: usize,
    /// The stream's slot under its client's limit.
    pub(crate) client_slot: Option<ClientSlot>,
}

impl Drop for StreamEntry {
    fn drop(&mut self) {
        self.watchdog.streams.lock().try_remove(self.index);
    }
}

/// An open connection of a listener.
#[derive(Debug)]
pub(crate) struct OpenConnection {
    pub(crate) watch: Arc<ConnectionWatch>,
    /// The number in the order of acceptance.
    pub(crate) number: u64,
    /// The address by which its client is counted, if it is.
    pub(crate) client: Option<IpAddr>,
}

/// A stream of an HTTP/2 connection.
#[derive(Debug)]
pub(crate) struct OpenStream {
    pub(crate) watch: Arc<ConnectionWatch>,
    pub(crate) connection: Arc<ConnectionWatch>,
}

impl OpenStream {
    /// Ends a stream that has stayed in this phase for too long, or that gives up its place.
    pub(crate) fn end_phase(&self, phase: ConnectionPhase, why: EndReason) {
        match self.watch.response.is_queued.get() {
            // The library keeps what the client doesn't read until the connection ends.
            true => self.connection.end_phase(ConnectionPhase::Streams, why),
            false => self.watch.end_phase(phase, why),
        }
    }
}

/// All connections of one listener.
#[derive(Debug)]
pub(crate) struct Watchdog {
    current_tick: AtomicU32,
    is_draining: Flag,
    is_aborting: Flag,
    timeout_ticks: [u32; ConnectionPhase::ALL.len()],
    pub(crate) tick: Duration,
    /// The slots of connections that may linger for long.
    linger_slots: Arc<Semaphore>,
    /// The bytes of unfinished heads.
    head_bytes: AtomicUsize,
    /// The minimum bytes of a body per number of ticks.
    body_rate: Option<(u64, u32)>,
    pub(crate) connections: Mutex<Slab<OpenConnection>>,
    /// The number of connections so far.
    accepted: AtomicU64,
    /// The requests of HTTP/2 connections.
    streams: Mutex<Slab<OpenStream>>,
    /// The maximum number of connections, and of streams.
    pub(crate) max_connections: usize,
    /// True if requests are forwarded. Then none that has begun is displaced.
    pub(crate) forwards: bool,
    not_empty: Notify,
    /// True while a new connection waits for a place.
    pub(crate) is_full: Flag,
    /// Notified when a connection leaves.
    pub(crate) connection_left: Notify,
    all_left: Notify,
}

/// One in this number of connections may linger for long at the same time.
const LINGER_DIVISOR: usize = 8;

/// The ticks that an idle connection is kept while the server drains, so that a request already sent still gets its
/// response.
const DRAIN_TICKS: u32 = 2;

impl Watchdog {
    /// Returns the watchdog of a listener with this maximum number of connections. `body_rate` is the minimum bytes per
    /// second of a request's body; `None` if there is no such limit.
    pub(crate) fn new(
        timeouts: &InboundTimeouts,
        body_rate: Option<u64>,
        connections: usize,
        forwards: bool,
    ) -> Arc<Self> {
        let tick = tick_of(timeouts);
        let body_rate =
            body_rate.map(|rate| (rate.saturating_mul(BODY_RATE_PERIOD.as_secs()), ticks(BODY_RATE_PERIOD, tick)));
        Arc::new(Self {
            current_tick: AtomicU32::new(0),
            is_draining: Flag::default(),
            is_aborting: Flag::default(),
            timeout_ticks: ConnectionPhase::ALL
                .map(|phase| phase_timeout(timeouts, phase).map_or(u32::MAX, |timeout| ticks(timeout, tick))),
            tick,
            linger_slots: Arc::new(Semaphore::new((connections / LINGER_DIVISOR).max(1))),
            head_bytes: AtomicUsize::new(0),
            body_rate,
            connections: Mutex::default(),
            accepted: AtomicU64::new(0),
            streams: Mutex::default(),
            max_connections: connections,
            forwards,
            not_empty: Notify::new(),
            is_full: Flag::default(),
            connection_left: Notify::new(),
            all_left: Notify::new(),
        })
    }

    pub(crate) fn add_connection(
        self: &Arc<Self>,
        client_slot: Option<ClientSlot>,
    ) -> (Arc<ConnectionWatch>, ConnectionEntry) {
        let watch = Arc::new(ConnectionWatch::new(Arc::clone(self), false));
        let connection = OpenConnection {
            watch: Arc::clone(&watch),
            number: self.accepted.fetch_add(1, Relaxed),
            client: client_slot.as_ref().map(ClientSlot::client),
        };
        let (index, first) = {
            let mut open = self.connections.lock();
            let first = open.is_empty();
            (open.insert(connection), first)
        };
        if first {
            self.not_empty.notify_one();
        }
        (watch, ConnectionEntry { watchdog: Arc::clone(self), index, client_slot })
    }

    /// Adds a request of an HTTP/2 connection. Returns true if all streams together are within the listener's cap, which
    /// is that of connections, because over HTTP/1.1 each of them has one request at most; or if another connection with more
    /// streams gives up some.
    pub(crate) fn add_stream(
        self: &Arc<Self>,
        connection: &Arc<ConnectionWatch>,
    ) -> (Arc<ConnectionWatch>, StreamEntry, bool) {
        let watch = Arc::new(ConnectionWatch::new(Arc::clone(self), true));
        let mut streams = self.streams.lock();
        let index = streams.insert(OpenStream { watch: Arc::clone(&watch), connection: Arc::clone(connection) });
        let has_capacity = streams.len() <= self.max_connections || displace_streams(&streams, connection);
        (watch, StreamEntry { watchdog: Arc::clone(self), index, client_slot: None }, has_capacity)
    }

    /// The HTTP/2 connections of which each stream waits for the client.
    pub(crate) fn stalled_connections(&self) -> HashSet<*const ConnectionWatch> {
        let streams = self.streams.lock();
        let mut stalled: HashSet<_> = streams.iter().map(|(_, stream)| Arc::as_ptr(&stream.connection)).collect();
        for (_, stream) in streams.iter().filter(|(_, stream)| !awaits_client(&stream.watch)) {
            stalled.remove(&Arc::as_ptr(&stream.connection));
        }
        stalled
    }

    /// True if this is one of them.
    pub(crate) fn is_stalled(&self, connection: &Arc<ConnectionWatch>) -> bool {
        let streams = self.streams.lock();
        let own = streams.iter().filter(|(_, stream)| Arc::ptr_eq(&stream.connection, connection));
        let mut stalled = own.map(|(_, stream)| awaits_client(&stream.watch));
        // Without a stream, its next one is about to open.
        stalled.next() == Some(true) && stalled.all(|it| it)
    }

    pub(crate) fn current_tick(&self) -> u32 {
        self.current_tick.load(Relaxed)
    }

    /// Returns the time since a tick.
    pub(crate) fn time_since(&self, tick: u32) -> Duration {
        self.tick * self.current_tick().wrapping_sub(tick)
    }

    /// Returns true if this much time has passed since a tick.
    pub(crate) fn has_elapsed(&self, tick: u32, time: Duration) -> bool {
        self.current_tick().wrapping_sub(tick) >= ticks(time, self.tick)
    }

    /// Ends the oldest unfinished heads until the total is within its limit.
    #[cold]
    fn end_oldest_heads(&self) {
        let open = self.connections.lock();
        while self.head_bytes.load(Relaxed) > MAX_HEAD_BYTES {
            let watches = open.iter().rev().map(|(_, connection)| &connection.watch);
            let counted = watches.filter(|watch| watch.head.counted_bytes.load(Relaxed) > 0);
            let age =
                |watch: &&Arc<ConnectionWatch>| self.current_tick().wrapping_sub(watch.last_progress.load(Relaxed));
            let Some(oldest) = counted.max_by_key(age) else { return };
            oldest.release_head_bytes();
            oldest.end_phase(ConnectionPhase::Head, EndReason::HeadBytes);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.connections.lock().len()
    }

    /// Makes every connection end after its current request.
    pub(crate) fn drain(&self) {
        self.is_draining.set(true);
    }

    /// Ends every connection that is still open.
    pub(crate) fn abort(&self) {
        self.is_aborting.set(true);
        for (_, connection) in &*self.connections.lock() {
            connection.watch.wake();
        }
        for (_, stream) in &*self.streams.lock() {
            stream.watch.wake();
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
        let now = self.current_tick().wrapping_add(1);
        self.current_tick.store(now, Relaxed);
        for (_, OpenConnection { watch, .. }) in &*self.connections.lock() {
            if let Some(phase) = self.overdue_phase(watch, now) {
                watch.end_phase(phase, EndReason::Timeout);
            }
        }
        for (_, stream) in &*self.streams.lock() {
            if let Some(phase) = self.overdue_phase(&stream.watch, now) {
                stream.end_phase(phase, EndReason::Timeout);
            }
        }
    }

    /// Returns the phase of a connection or a stream, if it lasts too long.
    fn overdue_phase(&self, watch: &ConnectionWatch, now: u32) -> Option<ConnectionPhase> {
        let phase = watch.phase();
        let mut limit = match watch.response.timeout_ticks.load(Relaxed) {
            granted if granted > 0 && phase == ConnectionPhase::Download => granted,
            _ => self.timeout_ticks[phase as usize],
        };
        if self.is_draining.get() && phase == ConnectionPhase::Idle {
            limit = limit.min(DRAIN_TICKS);
        }
        let silent = now.wrapping_sub(watch.last_progress.load(Relaxed)) > limit;
        let has_body = matches!(phase, ConnectionPhase::Upload | ConnectionPhase::Deciding | ConnectionPhase::Linger);
        (silent || has_body && watch.is_below_min_rate()).then_some(phase)
    }
}

#[cfg(test)]
pub(crate) mod tests;
