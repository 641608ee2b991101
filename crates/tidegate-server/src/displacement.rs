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
/// Connections before their first request may take one in this number of the listener's places. If they have more, they are
/// displaced first, so that the other places are left to connections that have sent a request.
const BEFORE_FIRST_REQUEST_DIVISOR: usize = 4;
/// The ticks for which a connection or a stream must have waited for its client. They are at least one whole tick: any may
/// be between two pieces of its body.
const STALLED_TICKS: u32 = 2;

/// The kinds of connections that may be displaced, in the order in which they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CandidateKind {
    /// No whole head has arrived since the connection was accepted, however many bytes have.
    BeforeFirstRequest,
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
#[derive(Default)]
pub(crate) struct DisplacementQueue {
    next: Vec<(Arc<ConnectionWatch>, CandidateState)>,
}

impl DisplacementQueue {
    /// Ends one connection. The first choice is the oldest without a whole head, of a client with many of them, while such
    /// connections have more than their share of places. Then come the connection that has been idle longest between
    /// requests, the oldest that has its response, and those that don't take part in their own requests; and at last those
    /// without a whole head, within their share. Returns false if all have a request in progress.
    pub(crate) fn displace_one(&mut self, watchdog: &Watchdog) -> bool {
        for must_scan in [false, true] {
            if must_scan {
                self.next = find_candidates(watchdog);
            }
            while let Some((watch, state)) = self.next.pop() {
                // It may have been found long ago.
                let waits = state.phase != ConnectionPhase::Streams || watchdog.is_stalled(&watch);
                if waits && CandidateState::of(&watch) == Some(state) {
                    watch.end_phase(state.phase, EndReason::Displaced);
                    return true;
                }
            }
        }
        false
    }

    /// True if the next displacement needs a scan.
    pub(crate) fn is_empty(&self) -> bool {
        self.next.is_empty()
    }
}

fn find_candidates(watchdog: &Watchdog) -> Vec<(Arc<ConnectionWatch>, CandidateState)> {
    let now = watchdog.current_tick();
    let stalled = if watchdog.forwards { HashSet::new() } else { watchdog.stalled_connections() };
    let open = watchdog.connections.lock();
    let (mut before_first, mut others) = (Vec::new(), Vec::new());
    for (_, connection) in &*open {
        let Some(state) = CandidateState::of(&connection.watch) else { continue };
        if state.kind == CandidateKind::BeforeFirstRequest {
            before_first.push((0, connection, state));
        } else if state.phase != ConnectionPhase::Streams || stalled.contains(&Arc::as_ptr(&connection.watch)) {
            others.push((0, connection, state));
        }
    }
    // The weight grows with the number of its client's connections from this one on. Clients with similar numbers are equals.
    let mut of_clients = HashMap::<IpAddr, u32>::new();
    before_first.sort_unstable_by_key(|(_, connection, _)| Reverse(connection.number));
    for (weight, connection, _) in &mut before_first {
        if let Some(client) = connection.client {
            let count = of_clients.entry(client).or_default();
            *count += 1;
            *weight = count.ilog2();
        }
    }
    // A client of TLS needs a round trip between its first bytes and its first head.
    before_first.sort_unstable_by_key(|(weight, connection, _)| {
        (connection.watch.head.has_begun.get(), Reverse(*weight), connection.number)
    });
    others.sort_unstable_by_key(|(_, connection, state)| {
        (state.kind, Reverse(now.wrapping_sub(state.since)), connection.number)
    });
    let share = (watchdog.max_connections / BEFORE_FIRST_REQUEST_DIVISOR).max(1);
    let within_share = before_first.split_off(before_first.len().saturating_sub(share));
    // So few that the order isn't much older than the connections. A list has one part, because new connections change
    // which part comes first.
    let (part, count) = match (before_first.is_empty(), others.is_empty()) {
        (false, _) => (before_first, 2 * share),
        (true, false) => (others, share),
        (true, true) => (within_share, share),
    };
    let found = part.into_iter().take(count.min(MAX_CANDIDATES));
    let mut found: Vec<_> = found.map(|(_, connection, state)| (Arc::clone(&connection.watch), state)).collect();
    found.reverse();
    found
}

impl CandidateState {
    /// Returns the state of a connection that may be displaced. An HTTP/2 connection with streams may be if all of them wait
    /// for the client, which isn't checked here. A listener that forwards requests ends none that has begun.
    fn of(watch: &ConnectionWatch) -> Option<Self> {
        use CandidateKind::{AwaitingClient, BeforeFirstRequest, Idle, Lingering, NextHead};
        let ends_stalled_requests = !watch.watchdog.forwards;
        let phase = watch.phase();
        let kind = match phase {
            ConnectionPhase::Idle | ConnectionPhase::Head if !watch.head.has_had_request.get() => BeforeFirstRequest,
            ConnectionPhase::Idle => Idle,
            ConnectionPhase::Head => NextHead,
            ConnectionPhase::Linger => Lingering,
            ConnectionPhase::Streams if ends_stalled_requests => AwaitingClient,
            ConnectionPhase::Upload | ConnectionPhase::Download if ends_stalled_requests && awaits_client(watch) => {
                AwaitingClient
            }
            _ => return None,
        };
        // The order of the others is that of their acceptance, because bytes that trickle in don't make a connection younger.
        let has_age = !matches!(kind, BeforeFirstRequest | AwaitingClient);
        let since = if has_age { watch.phase_started(phase) } else { 0 };
        (!watch.must_end_phase()).then_some(Self { kind, phase, since })
    }
}

/// True if a stream, or the request of a connection, has waited for its client for some time.
pub(crate) fn awaits_client(watch: &ConnectionWatch) -> bool {
    let phase = watch.phase();
    let waits = match phase {
        ConnectionPhase::Upload | ConnectionPhase::Idle | ConnectionPhase::Linger => true,
        // Otherwise there is nothing to read yet.
        ConnectionPhase::Download => watch.response.is_unread.get(),
        _ => false,
    };
    waits && watch.ticks_in(phase) >= STALLED_TICKS
}

/// Ends streams that wait for their client, the oldest first, of the connection that has most of them. Returns false if none
/// has two more of them than the connection of the new stream, so that equals don't displace each other.
#[cold]
pub(crate) fn displace_streams(streams: &Slab<OpenStream>, newcomer: &Arc<ConnectionWatch>) -> bool {
    let mut waiting: HashMap<*const ConnectionWatch, Vec<(&OpenStream, ConnectionPhase)>> = HashMap::new();
    for (_, stream) in streams {
        if awaits_client(&stream.watch) && !stream.watch.must_end_phase() {
            let phase = stream.watch.phase();
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

    fn new_watchdog(forwards: bool) -> Arc<Watchdog> {
        Watchdog::new(&uniform_timeouts(Duration::from_secs(1)), None, 8, forwards)
    }

    fn new_connection(watchdog: &Arc<Watchdog>, phase: ConnectionPhase) -> (Arc<ConnectionWatch>, ConnectionEntry) {
        let (watch, entry) = watchdog.add_connection(None);
        watch.enter(phase);
        (watch, entry)
    }

    #[test]
    fn silent_connections_go_before_idle_ones_only_beyond_their_share() {
        let watchdog = new_watchdog(true);
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
        let (_busy, _g) = new_connection(&watchdog, ConnectionPhase::AwaitResponse);
        let (_upload, _h) = new_connection(&watchdog, ConnectionPhase::Upload);
        let newest: Vec<_> = (0..2).map(|_| watchdog.add_connection(None)).collect();
        trickling.note_received(1);
        let mut queue = DisplacementQueue::default();
        for next in [&silent, &newest[0].0, &idle, &younger, &next_head, &lingering, &newest[1].0, &trickling] {
            assert!(queue.displace_one(&watchdog));
            assert!(next.is_ended_for(EndReason::Displaced));
        }
        assert!(!queue.displace_one(&watchdog), "the others have a request in progress");
    }

    #[test]
    fn requests_that_wait_for_their_client_are_displaced() {
        let watchdog = new_watchdog(false);
        let (trickling, _a) = new_connection(&watchdog, ConnectionPhase::Upload);
        let (unread, _b) = new_connection(&watchdog, ConnectionPhase::Download);
        unread.response.is_unread.set(true);
        let (busy, _c) = new_connection(&watchdog, ConnectionPhase::AwaitResponse);
        let (events, _d) = new_connection(&watchdog, ConnectionPhase::Download);
        watchdog.sweep_once();
        let mut queue = DisplacementQueue::default();
        assert!(!queue.displace_one(&watchdog), "each may be between two pieces of its body");
        trickling.touch();
        watchdog.sweep_once();
        assert!(queue.displace_one(&watchdog) && trickling.is_ended_for(EndReason::Displaced));
        unread.enter(ConnectionPhase::Download);
        assert!(!queue.displace_one(&watchdog), "it has another request since it was found");
        (0..2).for_each(|_| watchdog.sweep_once());
        assert!(queue.displace_one(&watchdog) && unread.is_ended_for(EndReason::Displaced));
        assert!(!queue.displace_one(&watchdog) && !busy.must_end_phase() && !events.must_end_phase());
    }

    #[test]
    fn of_silent_connections_those_of_the_largest_client_go_first() {
        let watchdog = new_watchdog(true);
        let clients = ClientLimit::new(8, 64, Networks::default());
        let mut connect = |ip: &str| watchdog.add_connection(clients.acquire(ip.parse().unwrap()).unwrap());
        let opened =
            ["192.0.2.1", "2001:db8::1", "2001:db8::2", "192.0.2.2", "2001:db8::3", "2001:db8::4"].map(&mut connect);
        let mut queue = DisplacementQueue::default();
        // With one left, the client of the four is an equal of the others.
        for next in [1, 2, 4, 0] {
            assert!(queue.displace_one(&watchdog));
            assert!(opened[next].0.must_end_phase(), "{next}");
        }
    }

    #[test]
    fn http2_connections_whose_streams_all_wait_are_displaced() {
        for forwards in [true, false] {
            let watchdog = new_watchdog(forwards);
            let connections = [(); 3].map(|()| new_connection(&watchdog, ConnectionPhase::Streams));
            let streams = [0, 0, 1, 2].map(|index| watchdog.add_stream(&connections[index].0));
            streams[1].0.enter(ConnectionPhase::AwaitResponse);
            for index in [0, 2, 3] {
                streams[index].0.enter(ConnectionPhase::Upload);
            }
            let mut queue = DisplacementQueue::default();
            assert!(!queue.displace_one(&watchdog), "each may be between two pieces of its body");
            (0..2).for_each(|_| watchdog.sweep_once());
            assert_eq!(queue.displace_one(&watchdog), !forwards);
            assert_eq!(connections[1].0.must_end_phase(), !forwards);
            // The body of the next candidate comes, and its response waits for the service.
            streams[3].0.enter(ConnectionPhase::Download);
            (0..2).for_each(|_| watchdog.sweep_once());
            assert!(!queue.displace_one(&watchdog));
            assert!(!connections[0].0.must_end_phase() && !connections[2].0.must_end_phase());
        }
    }

    #[test]
    fn a_candidate_with_a_new_request_is_skipped() {
        let watchdog = new_watchdog(true);
        let entered: Vec<_> = (0..3).map(|_| watchdog.add_connection(None)).collect();
        entered.iter().for_each(|(watch, _)| watch.enter(ConnectionPhase::Idle));
        let mut displaced = DisplacementQueue::default();
        assert!(displaced.displace_one(&watchdog));
        let left: Vec<_> = entered.iter().filter(|(watch, _)| !watch.must_end_phase()).collect();
        left[0].0.enter(ConnectionPhase::Head);
        left[0].0.note_received(1);
        assert!(displaced.displace_one(&watchdog));
        assert!(!left[0].0.must_end_phase() && left[1].0.must_end_phase());
    }
}
