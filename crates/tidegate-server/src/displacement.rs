//! Displacement at the caps: a new connection takes the place of one without a request in progress, and a new HTTP/2 stream
//! that of one that waits for its client.

use std::collections::HashMap;
use std::sync::Arc;

use slab::Slab;

use crate::watchdog::{ConnectionPhase, ConnectionWatch, EndReason, OpenStream, Watchdog};

/// The number of candidates that one scan finds, so that not every new connection or stream costs a scan.
const MAX_CANDIDATES: usize = 32;

/// The number of ticks in which a connection can send its request or read its response before it may be displaced.
const PROTECTED_TICKS: u32 = 2;

/// The kinds of connections that may be displaced. The last kind is displaced first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CandidateKind {
    /// The response is sent, and the rest of the request is read and discarded.
    Lingering,
    /// A head has begun to arrive.
    ReceivingHead,
    /// The client has sent nothing since the connection was accepted, or since its last response.
    Silent,
}

/// The state of a connection without a request in progress.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CandidateState {
    kind: CandidateKind,
    phase: ConnectionPhase,
    since: u32,
}

/// The next connections to displace. The last element goes first.
#[derive(Default)]
pub(crate) struct DisplacementQueue(Vec<(Arc<ConnectionWatch>, CandidateState)>);

impl DisplacementQueue {
    /// Ends the connection that has been idle longest between requests, or silent since it was accepted. If there is
    /// none, ends the oldest that is sending its head, and then the oldest that has its response. Returns false if all
    /// have a request in progress.
    pub(crate) fn displace_one(&mut self, watchdog: &Watchdog) -> bool {
        let is_current = |watch: &ConnectionWatch, state| CandidateState::of(watch) == Some(state);
        if !self.0.iter().any(|(watch, state)| is_current(watch, *state)) {
            self.0 = oldest_candidates(watchdog);
        }
        while let Some((watch, state)) = self.0.pop() {
            if is_current(&watch, state) {
                watch.end_phase(state.phase, EndReason::Displaced);
                return true;
            }
        }
        false
    }
}

impl CandidateState {
    /// Returns the state of a connection that may be displaced.
    fn of(watch: &ConnectionWatch) -> Option<Self> {
        let phase = watch.phase();
        let kind = match phase {
            ConnectionPhase::Idle => CandidateKind::Silent,
            ConnectionPhase::Head if watch.head.has_begun.get() => CandidateKind::ReceivingHead,
            ConnectionPhase::Head => CandidateKind::Silent,
            ConnectionPhase::Linger => CandidateKind::Lingering,
            _ => return None,
        };
        (!watch.must_end_phase()).then(|| Self { kind, phase, since: watch.phase_started(phase) })
    }
}

/// Ends streams that wait for their client, the oldest first, of the connection that has most of them. Returns false if none
/// has two more of them than the connection of the new stream, so that equals don't displace each other.
#[cold]
pub(crate) fn displace_streams(streams: &Slab<OpenStream>, newcomer: &Arc<ConnectionWatch>) -> bool {
    let mut waiting: HashMap<*const ConnectionWatch, Vec<(&OpenStream, ConnectionPhase)>> = HashMap::new();
    for (_, stream) in streams {
        let phase = stream.watch.phase();
        let waits_for_client = matches!(
            phase,
            ConnectionPhase::Upload | ConnectionPhase::Download | ConnectionPhase::Idle | ConnectionPhase::Linger
        );
        if waits_for_client && !stream.watch.must_end_phase() {
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

fn oldest_candidates(watchdog: &Watchdog) -> Vec<(Arc<ConnectionWatch>, CandidateState)> {
    let now = watchdog.current_tick();
    let open = watchdog.connections.lock();
    let mut found: Vec<_> = open
        .iter()
        .filter_map(|(_, watch)| {
            let state = CandidateState::of(watch)?;
            let (age, is_idle) = (now.wrapping_sub(state.since), state.phase == ConnectionPhase::Idle);
            // The connection with the largest rank is displaced first.
            let rank = (state.kind, age, is_idle);
            (is_idle || age >= PROTECTED_TICKS).then_some((rank, watch, state))
        })
        .collect();
    if found.len() > MAX_CANDIDATES {
        let rest = found.len() - MAX_CANDIDATES;
        found.select_nth_unstable_by_key(rest, |candidate| candidate.0);
        found.drain(..rest);
    }
    found.sort_unstable_by_key(|candidate| candidate.0);
    found.into_iter().map(|(_, watch, state)| (Arc::clone(watch), state)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::watchdog::tests::uniform_timeouts;

    fn new_watchdog() -> Arc<Watchdog> {
        Watchdog::new(&uniform_timeouts(Duration::from_secs(1)), None, 8)
    }

    #[test]
    fn idle_connections_are_displaced_first_busy_never() {
        let watchdog = new_watchdog();
        let (answered, _a) = watchdog.add_connection();
        answered.start_linger(true);
        let (begun, _b) = watchdog.add_connection();
        begun.note_received(1);
        let (silent, _c) = watchdog.add_connection();
        let (busy, _d) = watchdog.add_connection();
        busy.enter(ConnectionPhase::AwaitResponse);
        watchdog.sweep_once();
        answered.touch();
        let (older, _e) = watchdog.add_connection();
        older.enter(ConnectionPhase::Idle);
        let (later, _f) = watchdog.add_connection();
        later.note_received(1);
        watchdog.sweep_once();
        answered.touch();
        let (newer, _g) = watchdog.add_connection();
        newer.enter(ConnectionPhase::Idle);
        let mut displaced = DisplacementQueue::default();
        for next in [&silent, &older, &newer, &begun, &answered] {
            assert!(displaced.displace_one(&watchdog));
            assert!(next.must_end_phase());
        }
        assert!(!displaced.displace_one(&watchdog), "a head has some time in peace");
        assert!(!busy.must_end_phase() && !later.must_end_phase());
        watchdog.sweep_once();
        assert!(displaced.displace_one(&watchdog) && later.is_ended_for(EndReason::Displaced));
        assert!(!displaced.displace_one(&watchdog) && !busy.must_end_phase());
    }

    #[test]
    fn a_candidate_with_a_new_request_is_skipped() {
        let watchdog = new_watchdog();
        let entered: Vec<_> = (0..3).map(|_| watchdog.add_connection()).collect();
        entered.iter().for_each(|(watch, _)| watch.enter(ConnectionPhase::Idle));
        let mut displaced = DisplacementQueue::default();
        assert!(displaced.displace_one(&watchdog));
        let left: Vec<_> = entered.iter().filter(|(watch, _)| !watch.must_end_phase()).collect();
        left[0].0.enter(ConnectionPhase::Head);
        left[0].0.note_received(1);
        assert!(displaced.displace_one(&watchdog));
        assert!(!left[0].0.must_end_phase() && left[1].0.must_end_phase());
        assert!(!displaced.displace_one(&watchdog));
    }
}
