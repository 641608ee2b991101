//! Displacement at the caps: a new connection takes the place of one without a request in progress, and a new HTTP/2 stream
//! that of one that waits for its client.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use slab::Slab;

use crate::watchdog::{ConnectionPhase, ConnectionWatch, EndReason, OpenStream, Watchdog};

/// The number of candidates that one scan finds, so that not every new connection or stream costs a scan.
const MAX_CANDIDATES: usize = 64;
/// Connections without a whole head lose their places to each other as soon as they have one in this number of the
/// listener's. The other places are left to those that have sent one.
const UNHEARD_DIVISOR: usize = 4;

/// The kinds of connections that may be displaced, in the order in which they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CandidateKind {
    /// No whole head has arrived since the connection was accepted, however many bytes have.
    Unheard,
    /// Between two requests.
    Idle,
    /// A further head has begun to arrive.
    NextHead,
    /// The response is sent, and the rest of the request is read and discarded.
    Lingering,
    /// The client doesn't send the rest of its request, or doesn't read its response.
    AwaitingClient,
}

/// The state of a connection that may be displaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CandidateState {
    kind: CandidateKind,
    phase: ConnectionPhase,
    since: u32,
}

/// The next connections to displace. The last element goes first.
pub(crate) struct DisplacementQueue {
    next: Vec<(Arc<ConnectionWatch>, CandidateState)>,
    /// True if a request that waits for its client isn't safe.
    ends_stalled_requests: bool,
}

impl DisplacementQueue {
    /// Returns the queue of a listener. A listener that forwards requests ends none that has begun.
    pub(crate) fn new(forwards: bool) -> Self {
        Self { next: Vec::new(), ends_stalled_requests: !forwards }
    }

    /// Ends one connection. The first choice is the oldest without a whole head, of a client with many of them, while such
    /// connections have more than their share of places. Then come the connection that has been idle longest between
    /// requests, the oldest that has its response, and those that don't take part in their own requests; and at last those
    /// without a whole head, within their share. Returns false if all have a request in progress.
    pub(crate) fn displace_one(&mut self, watchdog: &Watchdog) -> bool {
        let ends_stalled = self.ends_stalled_requests;
        let is_current = |watch: &ConnectionWatch, state| CandidateState::of(watch, ends_stalled) == Some(state);
        if !self.next.iter().any(|(watch, state)| is_current(watch, *state)) {
            self.next = self.find_candidates(watchdog);
        }
        while let Some((watch, state)) = self.next.pop() {
            if is_current(&watch, state) {
                watch.end_phase(state.phase, EndReason::Displaced);
                return true;
            }
        }
        false
    }

    /// True if the next displacement needs a scan.
    pub(crate) fn is_empty(&self) -> bool {
        self.next.is_empty()
    }

    fn find_candidates(&self, watchdog: &Watchdog) -> Vec<(Arc<ConnectionWatch>, CandidateState)> {
        let now = watchdog.current_tick();
        let stalled = if self.ends_stalled_requests { watchdog.stalled_connections() } else { HashSet::new() };
        let open = watchdog.connections.lock();
        let (mut unheard, mut others, mut of_clients) = (Vec::new(), Vec::new(), HashMap::<IpAddr, usize>::new());
        for (_, connection) in &*open {
            let Some(state) = CandidateState::of(&connection.watch, self.ends_stalled_requests) else { continue };
            if state.kind == CandidateKind::Unheard {
                if let Some(client) = connection.client {
                    *of_clients.entry(client).or_default() += 1;
                }
                unheard.push((connection, state));
            } else if state.phase != ConnectionPhase::Streams || stalled.contains(&Arc::as_ptr(&connection.watch)) {
                others.push((connection, state));
            }
        }
        unheard.sort_unstable_by_key(|(connection, _)| connection.number);
        // The number of its client's connections from this one on. Clients with similar numbers are equals.
        let weight = |client: Option<IpAddr>| {
            client.and_then(|client| of_clients.get_mut(&client)).map_or(0, |count| {
                *count -= 1;
                (*count + 1).ilog2()
            })
        };
        let weights: Vec<u32> = unheard.iter().map(|(connection, _)| connection.client).map(weight).collect();
        let mut unheard: Vec<_> = weights.into_iter().zip(unheard).collect();
        unheard.sort_by_key(|(weight, _)| Reverse(*weight));
        let mut unheard: Vec<_> = unheard.into_iter().map(|(_, candidate)| candidate).collect();
        others.sort_unstable_by_key(|(connection, state)| {
            (state.kind, Reverse(now.wrapping_sub(state.since)), connection.number)
        });
        let share = (watchdog.max_connections() / UNHEARD_DIVISOR).max(1);
        let within_share = unheard.split_off(unheard.len().saturating_sub(share));
        // So few that the order isn't much older than the connections. A list has one part, because new connections change
        // which part comes first.
        let (part, count) = match (unheard.is_empty(), others.is_empty()) {
            (false, _) => (unheard, 2 * share),
            (true, false) => (others, share),
            (true, true) => (within_share, share),
        };
        let found = part.into_iter().take(count.min(MAX_CANDIDATES));
        let mut found: Vec<_> = found.map(|(connection, state)| (Arc::clone(&connection.watch), state)).collect();
        found.reverse();
        found
    }
}

impl CandidateState {
    /// Returns the state of a connection that may be displaced. An HTTP/2 connection with streams may be if all of them wait
    /// for the client, which isn't checked here.
    fn of(watch: &ConnectionWatch, ends_stalled_requests: bool) -> Option<Self> {
        use CandidateKind::{AwaitingClient, Idle, Lingering, NextHead, Unheard};
        let phase = watch.phase();
        let kind = match phase {
            ConnectionPhase::Idle | ConnectionPhase::Head if !watch.head.is_heard.get() => Unheard,
            ConnectionPhase::Idle => Idle,
            ConnectionPhase::Head => NextHead,
            ConnectionPhase::Linger => Lingering,
            ConnectionPhase::Upload | ConnectionPhase::Streams if ends_stalled_requests => AwaitingClient,
            ConnectionPhase::Download if ends_stalled_requests && watch.response.is_unread.get() => AwaitingClient,
            _ => return None,
        };
        // The order of the others is that of their acceptance, because bytes that trickle in don't make a connection younger.
        let has_age = !matches!(kind, Unheard | AwaitingClient);
        let since = if has_age { watch.phase_started(phase) } else { 0 };
        (!watch.must_end_phase()).then_some(Self { kind, phase, since })
    }
}

/// The ticks without progress after which a stream waits for its client. They are at least one whole tick: any stream may be
/// between two pieces of its body.
const STALLED_TICKS: u32 = 2;

/// True if a stream in this phase waits for its client.
pub(crate) fn awaits_client(phase: ConnectionPhase) -> bool {
    use ConnectionPhase::{Download, Idle, Linger, Upload};
    matches!(phase, Upload | Download | Idle | Linger)
}

/// Ends streams that wait for their client, the oldest first, of the connection that has most of them. Returns false if none
/// has two more of them than the connection of the new stream, so that equals don't displace each other.
#[cold]
pub(crate) fn displace_streams(streams: &Slab<OpenStream>, newcomer: &Arc<ConnectionWatch>) -> bool {
    let mut waiting: HashMap<*const ConnectionWatch, Vec<(&OpenStream, ConnectionPhase)>> = HashMap::new();
    for (_, stream) in streams {
        let phase = stream.watch.phase();
        let is_stalled = awaits_client(phase) && stream.watch.ticks_in(phase) >= STALLED_TICKS;
        if is_stalled && !stream.watch.must_end_phase() {
            waiting.entry(Arc::as_ptr(&stream.connection)).or_default().push((stream, phase));
        }
    }
    let own = waiting.remove(&Arc::as_ptr(newcomer)).map_or(0, |own| own.len());
    let Some(mut most) = waiting.into_values().max_by_key(Vec::len).filter(|most| most.len() > own + 1) else {
        return false;
    };
    let count = ((most.len() - own) / 2).min(MAX_CANDIDATES);
    most.sort_by_key(|(stream, phase)| stream.watch.ticks_in(*phase));
    for (stream, phase) in most.iter().rev().take(count) {
        stream.end_phase(*phase, EndReason::Displaced);
    }
    true
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidegate_policy::Networks;

    use super::*;
    use crate::client_limit::ClientLimit;
    use crate::watchdog::ConnectionEntry;
    use crate::watchdog::tests::uniform_timeouts;

    fn new_watchdog() -> Arc<Watchdog> {
        Watchdog::new(&uniform_timeouts(Duration::from_secs(1)), None, 8)
    }

    fn new_connection(watchdog: &Arc<Watchdog>, phase: ConnectionPhase) -> (Arc<ConnectionWatch>, ConnectionEntry) {
        let (watch, entry) = watchdog.add_connection(None);
        watch.enter(phase);
        (watch, entry)
    }

    #[test]
    fn silent_connections_go_before_idle_ones_only_beyond_their_share() {
        let watchdog = new_watchdog();
        let (silent, _a) = watchdog.add_connection(None);
        let (trickling, _b) = watchdog.add_connection(None);
        trickling.note_received(1);
        let (lingering, _c) = new_connection(&watchdog, ConnectionPhase::Idle);
        lingering.start_linger(true);
        let (next_head, _d) = new_connection(&watchdog, ConnectionPhase::Idle);
        next_head.note_received(1);
        let (idle, _e) = new_connection(&watchdog, ConnectionPhase::Idle);
        watchdog.sweep_once();
        let (younger, _f) = new_connection(&watchdog, ConnectionPhase::Idle);
        let (busy, _g) = new_connection(&watchdog, ConnectionPhase::AwaitResponse);
        let (upload, _h) = new_connection(&watchdog, ConnectionPhase::Upload);
        let (unread, _i) = new_connection(&watchdog, ConnectionPhase::Download);
        unread.response.is_unread.set(true);
        let (download, _j) = new_connection(&watchdog, ConnectionPhase::Download);
        let newest: Vec<_> = (0..2).map(|_| watchdog.add_connection(None)).collect();
        trickling.note_received(1);
        let mut queue = DisplacementQueue::new(true);
        for next in [&silent, &trickling, &idle, &younger, &next_head, &lingering, &newest[0].0, &newest[1].0] {
            assert!(queue.displace_one(&watchdog));
            assert!(next.is_ended_for(EndReason::Displaced));
        }
        assert!(!queue.displace_one(&watchdog), "the others have a request in progress");
        let mut queue = DisplacementQueue::new(false);
        assert!(queue.displace_one(&watchdog) && upload.is_ended_for(EndReason::Displaced));
        assert!(queue.displace_one(&watchdog) && unread.is_ended_for(EndReason::Displaced));
        assert!(!queue.displace_one(&watchdog) && !busy.must_end_phase() && !download.must_end_phase());
    }

    #[test]
    fn of_silent_connections_those_of_the_largest_client_go_first() {
        let watchdog = new_watchdog();
        let clients = ClientLimit::new("inbound", 8, 64, Networks::default());
        let mut connect = |ip: &str| watchdog.add_connection(clients.acquire(ip.parse().unwrap()).unwrap());
        let opened =
            ["192.0.2.1", "2001:db8::1", "2001:db8::2", "192.0.2.2", "2001:db8::3", "2001:db8::4"].map(&mut connect);
        let mut queue = DisplacementQueue::new(true);
        // With one left, the client of the four is an equal of the others.
        for next in [1, 2, 4, 0] {
            assert!(queue.displace_one(&watchdog));
            assert!(opened[next].0.must_end_phase(), "{next}");
        }
    }

    #[test]
    fn http2_connections_are_displaced_if_all_their_streams_wait_for_the_client() {
        let watchdog = new_watchdog();
        let connections = [(); 2].map(|()| new_connection(&watchdog, ConnectionPhase::Streams));
        let streams = [0, 0, 1].map(|index| watchdog.add_stream(&connections[index].0));
        for (index, phase) in
            [ConnectionPhase::Upload, ConnectionPhase::AwaitResponse, ConnectionPhase::Upload].into_iter().enumerate()
        {
            streams[index].0.enter(phase);
        }
        assert!(!DisplacementQueue::new(true).displace_one(&watchdog));
        let mut queue = DisplacementQueue::new(false);
        assert!(queue.displace_one(&watchdog) && connections[1].0.must_end_phase());
        assert!(!queue.displace_one(&watchdog) && !connections[0].0.must_end_phase());
    }

    #[test]
    fn a_candidate_with_a_new_request_is_skipped() {
        let watchdog = new_watchdog();
        let entered: Vec<_> = (0..3).map(|_| watchdog.add_connection(None)).collect();
        entered.iter().for_each(|(watch, _)| watch.enter(ConnectionPhase::Idle));
        let mut displaced = DisplacementQueue::new(true);
        assert!(displaced.displace_one(&watchdog));
        let left: Vec<_> = entered.iter().filter(|(watch, _)| !watch.must_end_phase()).collect();
        left[0].0.enter(ConnectionPhase::Head);
        left[0].0.note_received(1);
        assert!(displaced.displace_one(&watchdog));
        assert!(!left[0].0.must_end_phase() && left[1].0.must_end_phase());
    }
}
