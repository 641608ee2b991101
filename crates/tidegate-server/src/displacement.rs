//! Room for a new connection at the cap: those without a request under way make it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::watchdog::{ConnectionPhase, ConnectionWatch, EndReason, Watchdog};

/// The number of candidates that one look over all connections finds, so that not every new connection costs a look.
const MAX_CANDIDATES: usize = 32;

/// The ticks that a connection has in peace to send its request, or to take its answer.
const PROTECTED_TICKS: u32 = 2;

/// The connections that may go, those of the last kind first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CandidateKind {
    /// Its answer is out, and what it still sends is read away.
    Lingering,
    /// A head has begun to arrive.
    ReceivingHead,
    /// It has sent nothing since it came, or since its last answer.
    Silent,
}

/// A connection as it was when it had no request under way.
struct Candidate {
    watch: Arc<ConnectionWatch>,
    kind: CandidateKind,
    phase: ConnectionPhase,
    since: u32,
}

/// The connections that go next, the first of them last.
#[derive(Default)]
pub(crate) struct DisplacementQueue(Vec<Candidate>);

impl DisplacementQueue {
    /// Ends the connection that has been longest between requests, or silent since it came; if there is none, the oldest
    /// that is sending its head; at last the oldest that has its answer. False if all have a request under way.
    pub(crate) fn displace_one(&mut self, sweep: &Watchdog) -> bool {
        if !self.0.iter().any(Candidate::is_current) {
            self.0 = oldest_candidates(sweep);
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

/// The kind of a connection that may go, with its phase.
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

fn oldest_candidates(sweep: &Watchdog) -> Vec<Candidate> {
    let now = sweep.current_tick.load(Ordering::Relaxed);
    let open = sweep.connections.lock();
    let mut found: Vec<_> = open
        .iter()
        .filter_map(|(index, watch)| {
            let (kind, phase) = candidate_kind(watch)?;
            let since = watch.phase_started(phase);
            let age = now.wrapping_sub(since);
            // The one to go has the largest rank.
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
    fn the_quiet_go_first_then_unfinished_heads_then_the_answered_each_by_age_and_never_a_busy_one() {
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
    fn a_candidate_that_got_a_request_is_passed_over() {
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
