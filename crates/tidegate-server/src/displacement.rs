//! Displacement at the connection cap: a new connection takes the place of one without a request in progress.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::watchdog::{ConnectionPhase, ConnectionWatch, EndReason, Watchdog};

/// The number of candidates that one scan of all connections finds, so that not every new connection costs a scan.
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

/// A connection as it was when it had no request in progress.
struct Candidate {
    watch: Arc<ConnectionWatch>,
    kind: CandidateKind,
    phase: ConnectionPhase,
    since: u32,
}

/// The next connections to displace. The last element goes first.
#[derive(Default)]
pub(crate) struct DisplacementQueue(Vec<Candidate>);

impl DisplacementQueue {
    /// Ends the connection that has been idle longest between requests, or silent since it was accepted. If there is
    /// none, ends the oldest that is sending its head, and then the oldest that has its response. Returns false if all
    /// have a request in progress.
    pub(crate) fn displace_one(&mut self, watchdog: &Watchdog) -> bool {
        if !self.0.iter().any(Candidate::is_current) {
            self.0 = oldest_candidates(watchdog);
        }
        while let Some(candidate) = self.0.pop() {
            if candidate.is_current() {
                candidate.watch.end_phase(candidate.phase, EndReason::Displaced);
                return true;
            }
        }
        false
    }
}

impl Candidate {
    fn is_current(&self) -> bool {
        candidate_kind(&self.watch) == Some((self.kind, self.phase))
            && self.watch.phase_started(self.phase) == self.since
    }
}

/// The kind and phase of a connection that may be displaced.
fn candidate_kind(watch: &ConnectionWatch) -> Option<(CandidateKind, ConnectionPhase)> {
    let phase = watch.phase();
    let kind = match phase {
        ConnectionPhase::Idle => CandidateKind::Silent,
        ConnectionPhase::Head if watch.has_sent() => CandidateKind::ReceivingHead,
        ConnectionPhase::Head => CandidateKind::Silent,
        ConnectionPhase::Linger => CandidateKind::Lingering,
        _ => return None,
    };
    (!watch.must_end_phase()).then_some((kind, phase))
}

fn oldest_candidates(watchdog: &Watchdog) -> Vec<Candidate> {
    let now = watchdog.current_tick.load(Ordering::Relaxed);
    let open = watchdog.connections.lock();
    let mut found: Vec<_> = open
        .iter()
        .filter_map(|(index, watch)| {
            let (kind, phase) = candidate_kind(watch)?;
            let since = watch.phase_started(phase);
            let age = now.wrapping_sub(since);
            // The connection with the largest rank is displaced first.
            let rank = (kind, age, phase == ConnectionPhase::Idle);
            (phase == ConnectionPhase::Idle || age >= PROTECTED_TICKS).then_some((rank, index, phase, since))
        })
        .collect();
    if found.len() > MAX_CANDIDATES {
        let rest = found.len() - MAX_CANDIDATES;
        found.select_nth_unstable_by_key(rest, |candidate| candidate.0);
        found.drain(..rest);
    }
    found.sort_unstable_by_key(|candidate| candidate.0);
    let candidate = |((kind, ..), index, phase, since): ((CandidateKind, u32, bool), usize, _, _)| {
        open.get(index).map(|watch| Candidate { watch: Arc::clone(watch), kind, phase, since })
    };
    found.into_iter().filter_map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::watchdog::PhaseTimeouts;

    fn sweep() -> Arc<Watchdog> {
        Watchdog::new(PhaseTimeouts::uniform(Duration::from_secs(1)), 8)
    }

    #[test]
    fn idle_connections_are_displaced_first_busy_never() {
        let sweep = sweep();
        let (answered, _a) = sweep.add_connection();
        answered.start_linger(true);
        let (begun, _b) = sweep.add_connection();
        begun.note_received(1);
        let (silent, _c) = sweep.add_connection();
        let (busy, _d) = sweep.add_connection();
        busy.enter(ConnectionPhase::AwaitResponse);
        sweep.sweep_once();
        answered.touch();
        let (older, _e) = sweep.add_connection();
        older.enter(ConnectionPhase::Idle);
        let (later, _f) = sweep.add_connection();
        later.note_received(1);
        sweep.sweep_once();
        answered.touch();
        let (newer, _g) = sweep.add_connection();
        newer.enter(ConnectionPhase::Idle);
        let mut displaced = DisplacementQueue::default();
        for next in [&silent, &older, &newer, &begun, &answered] {
            assert!(displaced.displace_one(&sweep));
            assert!(next.must_end_phase());
        }
        assert!(!displaced.displace_one(&sweep), "a head has some time in peace");
        assert!(!busy.must_end_phase() && !later.must_end_phase());
        sweep.sweep_once();
        assert!(displaced.displace_one(&sweep) && later.is_ended_for(EndReason::Displaced));
        assert!(!displaced.displace_one(&sweep) && !busy.must_end_phase());
    }

    #[test]
    fn a_candidate_with_a_new_request_is_skipped() {
        let sweep = sweep();
        let entered: Vec<_> = (0..3).map(|_| sweep.add_connection()).collect();
        entered.iter().for_each(|(watch, _)| watch.enter(ConnectionPhase::Idle));
        let mut displaced = DisplacementQueue::default();
        assert!(displaced.displace_one(&sweep));
        let left: Vec<_> = entered.iter().filter(|(watch, _)| !watch.must_end_phase()).collect();
        left[0].0.enter(ConnectionPhase::Head);
        left[0].0.note_received(1);
        assert!(displaced.displace_one(&sweep));
        assert!(!left[0].0.must_end_phase() && left[1].0.must_end_phase());
        assert!(!displaced.displace_one(&sweep));
    }
}
