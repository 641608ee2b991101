//! Room for a new connection at the cap: those without a request under way make it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::watch::{Hurry, Phase, Sweep, Watch, lock};

/// The number of candidates that one look over all connections finds, so that not every new connection costs a look.
const FOUND: usize = 32;

/// The ticks that a connection has in peace to send its request, or to take its answer.
const NEW: u32 = 2;

/// The connections that may go, those of the last kind first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Its answer is out, and what it still sends is read away.
    Answered,
    /// A head has begun to arrive.
    Begun,
    /// It has sent nothing since it came, or since its last answer.
    Quiet,
}

/// A connection as it was when it had no request under way.
struct Candidate {
    watch: Arc<Watch>,
    kind: Kind,
    phase: Phase,
    since: u32,
}

/// The connections that go next, the first of them last.
#[derive(Default)]
pub(crate) struct Displaced(Vec<Candidate>);

impl Displaced {
    /// Ends the connection that has been longest between requests, or silent since it came; if there is none, the oldest
    /// that is sending its head; at last the oldest that has its answer. False if all have a request under way.
    pub(crate) fn one(&mut self, sweep: &Sweep) -> bool {
        if !self.0.iter().any(Candidate::is_current) {
            self.0 = oldest(sweep);
        }
        while let Some(candidate) = self.0.pop() {
            if candidate.is_current() {
                candidate.watch.hurry(candidate.phase, Hurry::Place);
                return true;
            }
        }
        false
    }
}

impl Candidate {
    fn is_current(&self) -> bool {
        kind(&self.watch) == Some((self.kind, self.phase)) && self.watch.since(self.phase) == self.since
    }
}

/// The kind of a connection that may go, with its phase.
fn kind(watch: &Watch) -> Option<(Kind, Phase)> {
    let phase = watch.phase();
    let kind = match phase {
        Phase::Idle => Kind::Quiet,
        Phase::Head if watch.was_heard() => Kind::Begun,
        Phase::Head => Kind::Quiet,
        Phase::Linger => Kind::Answered,
        _ => return None,
    };
    (!watch.is_overdue()).then_some((kind, phase))
}

fn oldest(sweep: &Sweep) -> Vec<Candidate> {
    let now = sweep.now.load(Ordering::Relaxed);
    let open = lock(&sweep.open);
    let mut found: Vec<_> = open
        .iter()
        .filter_map(|(index, watch)| {
            let (kind, phase) = kind(watch)?;
            let since = watch.since(phase);
            let age = now.wrapping_sub(since);
            // The one to go has the largest rank.
            let rank = (kind, age, phase == Phase::Idle);
            (phase == Phase::Idle || age >= NEW).then_some((rank, index, phase, since))
        })
        .collect();
    if found.len() > FOUND {
        let rest = found.len() - FOUND;
        found.select_nth_unstable_by_key(rest, |candidate| candidate.0);
        found.drain(..rest);
    }
    found.sort_unstable_by_key(|candidate| candidate.0);
    let candidate = |((kind, ..), index, phase, since): ((Kind, u32, bool), usize, _, _)| {
        open.get(index).map(|watch| Candidate { watch: Arc::clone(watch), kind, phase, since })
    };
    found.into_iter().filter_map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::watch::Patience;

    fn sweep() -> Arc<Sweep> {
        Sweep::new(Patience::of_each(Duration::from_secs(1)), 8)
    }

    #[test]
    fn the_quiet_go_first_then_unfinished_heads_then_the_answered_each_by_age_and_never_a_busy_one() {
        let sweep = sweep();
        let (answered, _a) = sweep.join();
        answered.begin_lingering(true);
        let (begun, _b) = sweep.join();
        begun.hear(1);
        let (silent, _c) = sweep.join();
        let (busy, _d) = sweep.join();
        busy.enter(Phase::Await);
        sweep.sweep();
        answered.touch();
        let (older, _e) = sweep.join();
        older.enter(Phase::Idle);
        let (later, _f) = sweep.join();
        later.hear(1);
        sweep.sweep();
        answered.touch();
        let (newer, _g) = sweep.join();
        newer.enter(Phase::Idle);
        let mut displaced = Displaced::default();
        for next in [&silent, &older, &newer, &begun, &answered] {
            assert!(displaced.one(&sweep));
            assert!(next.is_overdue());
        }
        assert!(!displaced.one(&sweep), "a head has some time in peace");
        assert!(!busy.is_overdue() && !later.is_overdue());
        sweep.sweep();
        assert!(displaced.one(&sweep) && later.is_hurried(Hurry::Place));
        assert!(!displaced.one(&sweep) && !busy.is_overdue());
    }

    #[test]
    fn a_candidate_that_got_a_request_is_passed_over() {
        let sweep = sweep();
        let entered: Vec<_> = (0..3).map(|_| sweep.join()).collect();
        entered.iter().for_each(|(watch, _)| watch.enter(Phase::Idle));
        let mut displaced = Displaced::default();
        assert!(displaced.one(&sweep));
        let left: Vec<_> = entered.iter().filter(|(watch, _)| !watch.is_overdue()).collect();
        left[0].0.enter(Phase::Head);
        left[0].0.hear(1);
        assert!(displaced.one(&sweep));
        assert!(!left[0].0.is_overdue() && left[1].0.is_overdue());
        assert!(!displaced.one(&sweep));
    }
}
