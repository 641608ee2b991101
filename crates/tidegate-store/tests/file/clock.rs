//! A clock that is set while no process runs.

use std::sync::Arc;

use tidegate_core::batch::Outcome;
use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Admission, Key, Limit, LimitKind, Limits, Penalty, PenaltySpec, Quota, Rate, Span, Time, Verb, Window,
};
use tidegate_store::{FileStore, FlushMode, Store};
use tidegate_testkit::fixtures;

use crate::common::{Place, one};

const MINUTE: Span = Span::from_secs(60);
const HOUR: Span = Span::from_secs(3_600);
const DAY: Span = Span::from_secs(86_400);

const QUOTA: usize = 0;
const BLOCK: usize = 1;
const WINDOW: usize = 2;
const RATE: usize = 3;

/// Five a day by the calendar, five a minute with a penalty, five in any day, and five a second with a penalty.
fn limits() -> Arc<Limits> {
    let penalty = |window| {
        let base = HOUR;
        Penalty::new(PenaltySpec { base, cap: HOUR.times(4), ..PenaltySpec::default() }, window).unwrap()
    };
    let second = Span::from_secs(1);
    let limits = vec![
        Limit::new(LimitKind::Quota(Quota::new(5, Arc::new(FixedPeriods(DAY))).unwrap())),
        Limit::new(LimitKind::Window(Window::new(5, MINUTE, 64).unwrap())).with_penalty(penalty(MINUTE)),
        Limit::new(LimitKind::Window(Window::new(5, DAY, 64).unwrap())),
        Limit::new(LimitKind::Rate(Rate::new(5, second, 5).unwrap())).with_penalty(penalty(second)),
    ];
    Arc::new(Limits::new(limits).unwrap())
}

/// Noon of a day.
fn noon() -> Time {
    Time::from_secs(20_000 * 86_400 + 43_200)
}

/// A file that several processes have one after the other.
struct Host {
    place: Place,
    limits: Arc<Limits>,
}

impl Host {
    fn new() -> Self {
        Self { place: Place::quick(), limits: limits() }
    }

    fn start(&self, now: Time) -> FileStore {
        self.place.store(&self.limits, FlushMode::default(), now)
    }

    /// A process that runs for some seconds and makes so many calls of each kind on one key.
    fn run(&self, now: Time, key: Key, calls: usize) {
        let store = self.start(now);
        (0..self.limits.len()).for_each(|limit| take(&store, limit, key, now, calls));
        for at in [now, now + Span::from_secs(3)] {
            store.maintain(at);
            store.journal().flush().unwrap();
        }
    }

    fn peek(&self, limit: usize, key: Key, now: Time) -> Outcome {
        one(&self.start(now), Verb::Peek, limit, key, now)
    }

    fn admissions(&self, key: Key, now: Time) -> [Admission; 4] {
        [QUOTA, BLOCK, WINDOW, RATE].map(|limit| self.peek(limit, key, now).admission)
    }

    fn rows(&self, now: Time) -> u64 {
        let store = self.start(now);
        for _ in 0..20 {
            store.maintain(now);
            store.journal().flush().unwrap();
        }
        store.journal().health().row_count
    }
}

fn take(store: &impl Store, limit: usize, key: Key, now: Time, times: usize) {
    for _ in 0..times {
        one(store, Verb::Take, limit, key, now);
    }
}

const FULL: [Admission; 4] = [Admission::Refused, Admission::Blocked, Admission::Refused, Admission::Blocked];
const ROOM: [Admission; 4] = [Admission::Admitted; 4];

#[test]
fn a_corrected_fast_clock_loses_no_state() {
    // Not at all, a little, and until it is refused; in one process that is a day ahead, and in several, one after the
    // other.
    for (calls, ahead) in [(0, 1), (1, 1), (8, 1), (0, 3), (1, 3), (8, 3)] {
        let host = Host::new();
        let (key, start) = (fixtures::client_key(1), noon());
        host.run(start, key, 8);
        let block = host.peek(BLOCK, key, start + MINUTE).block_until;
        for restart in 0..ahead {
            let now = start + DAY.times(1) + HOUR.times(2) + MINUTE.times(restart * 5);
            if calls == 0 || restart == 0 {
                assert_eq!(host.admissions(key, now), ROOM, "{calls} calls, restart {restart} of {ahead}");
            }
            host.run(now, key, calls);
        }
        let now = start + MINUTE.times(10);
        assert_eq!(host.admissions(key, now), FULL, "{calls} calls in {ahead} processes ahead");
        let told = host.peek(BLOCK, key, now);
        assert!(told.block_until >= block, "{calls} calls in {ahead} processes ahead: {told:?}, not {block:?}");
        // And after a process that has it in memory and writes it again.
        host.run(now, key, 1);
        assert_eq!(host.admissions(key, now + MINUTE), FULL);
        assert_eq!(host.admissions(key, start + DAY.times(20)), ROOM);
    }
}

#[test]
fn no_day_is_granted_its_quota_twice() {
    let host = Host::new();
    let (key, start) = (fixtures::client_key(1), noon());
    let used = |now| host.peek(QUOTA, key, now).used;
    host.run(start, key, 3);
    host.run(start + DAY, key, 2);
    assert_eq!(used(start + HOUR), 3, "the day's own count");
    host.run(start + HOUR, key, 1);
    assert_eq!(used(start + HOUR), 4);
    assert_eq!(used(start + DAY), 2, "what was used of the next day counts on it");
    assert_eq!(used(start + HOUR.times(2)), 4);
    // Midnight passes in a process that doesn't use it.
    let store = host.start(start + HOUR);
    for _ in 0..3 {
        store.maintain(start + DAY);
        store.journal().flush().unwrap();
    }
    drop(store);
    assert_eq!(used(start + DAY), 2);
    // And in one that does.
    let store = host.start(start + DAY);
    take(&store, QUOTA, key, start + DAY, 1);
    store.journal().flush().unwrap();
    take(&store, QUOTA, key, start + DAY.times(2), 5);
    drop(store);
    assert_eq!((used(start + DAY.times(2)), used(start + DAY)), (5, 3));
}

/// A block on a quota outlives its period, and is no reason to forget the next one.
#[test]
fn a_penalised_quota_continues_in_its_period() {
    let quota = Quota::new(5, Arc::new(FixedPeriods(DAY))).unwrap();
    let penalty = Penalty::new(PenaltySpec::default(), DAY).unwrap();
    let host = Host {
        place: Place::quick(),
        limits: Arc::new(Limits::with_limit(Limit::new(LimitKind::Quota(quota)).with_penalty(penalty))),
    };
    let (key, midnight) = (fixtures::client_key(1), noon() + HOUR.times(12));
    host.run(midnight - HOUR, key, 7);
    host.run(midnight + HOUR, key, 2);
    let found = host.peek(QUOTA, key, midnight + HOUR.times(2));
    assert_eq!((found.used, found.strikes), (2, 1));
    assert_eq!(host.peek(QUOTA, key, midnight - Span::from_secs(60)).used, 5);
}

/// The end of a period in a process doesn't make it forgotten either, whether the key is used again or not.
#[test]
fn a_finished_period_remains_for_clocks_set_back() {
    for calls in [0, 1] {
        let host = Host::new();
        let (key, start) = (fixtures::client_key(1), noon());
        let store = host.start(start);
        take(&store, QUOTA, key, start, 5);
        store.journal().flush().unwrap();
        take(&store, QUOTA, key, start + DAY, calls);
        for _ in 0..100 {
            store.maintain(start + DAY);
            store.journal().flush().unwrap();
        }
        drop(store);
        assert_eq!(host.peek(QUOTA, key, start + HOUR).admission, Admission::Refused, "{calls} calls the next day");
    }
}

#[test]
fn a_reset_persists_despite_clock_changes() {
    let (key, start) = (fixtures::client_key(1), noon());
    for (ahead, reset_at) in [(false, HOUR), (true, DAY), (true, HOUR)] {
        let host = Host::new();
        host.run(start, key, 8);
        if ahead {
            host.run(start + DAY, key, 1);
        }
        let store = host.start(start + reset_at);
        (0..4).for_each(|limit| {
            one(&store, Verb::Reset, limit, key, start + reset_at);
        });
        drop(store);
        assert_eq!(host.admissions(key, start + DAY), ROOM, "{ahead} {reset_at:?}");
        assert_eq!(host.admissions(key, start + MINUTE), ROOM, "{ahead} {reset_at:?}");
        let peeks = [QUOTA, BLOCK, WINDOW].map(|limit| host.peek(limit, key, start + MINUTE).used);
        assert_eq!(peeks, [0; 3], "{ahead} {reset_at:?}");
    }
}

#[test]
fn rows_are_kept_seven_days_after_expiry() {
    let host = Host::new();
    let start = noon();
    let store = host.start(start);
    for client in 0..100 {
        (0..4).for_each(|limit| take(&store, limit, fixtures::client_key(client), start, 8));
    }
    drop(store);
    assert_eq!(host.rows(start), 400);
    assert_eq!(host.rows(start + DAY.times(6)), 400);
    assert_eq!(host.admissions(fixtures::client_key(7), start + MINUTE), FULL);
    assert_eq!(host.rows(start + DAY.times(12)), 0);
}
