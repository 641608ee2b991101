//! Room for a new connection at the cap: those that do nothing go first.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::watch::{Phase, Sweep, Watch, lock};

/// The number of candidates that one look over all connections finds, so that not every new connection costs a look.
const FOUND: usize = 32;

/// The ticks for which a new connection may be silent in peace: its first request may be on its way.
const NEW: u32 = 2;

/// A connection as it was when it did nothing.
struct Candidate {
    watch: Arc<Watch>,
    phase: Phase,
    since: u32,
}

/// The connections that go next, the first of them last.
#[derive(Default)]
pub(crate) struct Displaced(Vec<Candidate>);

impl Displaced {
    /// Ends the connection that has been longest between requests, or silent since it came. False if all are busy.
    pub(crate) fn one(&mut self, sweep: &Sweep) -> bool {
        if !self.0.iter().any(Candidate::is_current) {
            self.0 = idlest(sweep);
        }
        while let Some(candidate) = self.0.pop() {
            if candidate.is_current() {
                candidate.watch.hurry();
                return true;
            }
        }
        false
    }
}

impl Candidate {
    fn is_current(&self) -> bool {
        let watch = &self.watch;
        does_nothing(watch) == Some(self.phase)
            && watch.since.load(Ordering::Relaxed) == self.since
            && !watch.is_overdue()
    }
}

fn does_nothing(watch: &Watch) -> Option<Phase> {
    match watch.phase() {
        Phase::Idle => Some(Phase::Idle),
        Phase::Head if !watch.was_heard() => Some(Phase::Head),
        _ => None,
    }
}

fn idlest(sweep: &Sweep) -> Vec<Candidate> {
    let now = sweep.now.load(Ordering::Relaxed);
    let open = lock(&sweep.open);
    let mut found: Vec<_> = open
        .iter()
        .filter_map(|(index, watch)| {
            let phase = does_nothing(watch).filter(|_| !watch.is_overdue())?;
            let since = watch.since.load(Ordering::Relaxed);
            let age = now.wrapping_sub(since);
            // The one to go has the largest rank.
            (phase == Phase::Idle || age >= NEW).then_some(((age, phase == Phase::Idle), index, phase, since))
        })
        .collect();
    if found.len() > FOUND {
        let rest = found.len() - FOUND;
        found.select_nth_unstable_by_key(rest, |candidate| candidate.0);
        found.drain(..rest);
    }
    found.sort_unstable_by_key(|candidate| candidate.0);
    let candidate = |(_, index, phase, since): (_, usize, _, _)| {
        open.get(index).map(|watch| Candidate { watch: Arc::clone(watch), phase, since })
    };
    found.into_iter().filter_map(candidate).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::watch::Patience;

    #[test]
    fn the_longest_idle_or_silent_goes_first_and_never_a_busy_one() {
        let second = Duration::from_secs(1);
        let patience =
            Patience { idle: second, head: second, body: second, response: second, tunnel: second, body_rate: None };
        let sweep = Sweep::new(patience, 8);
        let (silent, _a) = sweep.join();
        let (busy, _b) = sweep.join();
        busy.enter(Phase::Await);
        sweep.sweep();
        let (older, _c) = sweep.join();
        older.enter(Phase::Idle);
        let (begun, _d) = sweep.join();
        begun.hear(1);
        sweep.sweep();
        let (newer, _e) = sweep.join();
        newer.enter(Phase::Idle);
        let mut displaced = Displaced::default();
        for next in [&silent, &older, &newer] {
            assert!(displaced.one(&sweep));
            assert!(next.is_overdue());
        }
        assert!(!displaced.one(&sweep));
        assert!(!busy.is_overdue() && !begun.is_overdue());
    }

    #[test]
    fn a_candidate_that_got_a_request_is_passed_over() {
        let second = Duration::from_secs(1);
        let patience =
            Patience { idle: second, head: second, body: second, response: second, tunnel: second, body_rate: None };
        let sweep = Sweep::new(patience, 8);
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
