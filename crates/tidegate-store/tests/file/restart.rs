use std::sync::Arc;
use std::time::Duration;

use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Admission, Batch, Concurrency, Cooldown, Key, Limit, LimitKind, Limits, Op, Penalty, PenaltySpec, Quota, Rate,
    Span, Time, Verb, Window,
};
use tidegate_store::{FileError, FileStore, FlushMode, Journal, Memory, Store};
use tidegate_testkit::model::Model;
use tidegate_testkit::random::{self, RandomSource};
use tidegate_testkit::traffic::{PlanContents, TrafficGenerator};
use tidegate_testkit::{fixtures, property};

use crate::common::{Place, ask, one};

const MINUTE: Span = Span::from_secs(60);
const DAY: Span = Span::from_secs(86_400);
/// So late that only a closing writes.
const SELDOM: FlushMode = FlushMode::Within(Duration::from_secs(1 << 22));

fn take(store: &impl Store, limit: usize, key: Key, now: Time, times: usize) {
    (0..times).for_each(|_| {
        one(store, Verb::Take, limit, key, now);
    });
}

fn window(limit: u64) -> LimitKind {
    LimitKind::Window(Window::new(limit, MINUTE, 64).unwrap())
}

/// One limit of every kind; windows and rates with a penalty and without.
fn every_kind() -> Arc<Limits> {
    let penalty = || Penalty::new(PenaltySpec::default(), MINUTE).unwrap();
    let quota = Quota::new(5, Arc::new(FixedPeriods(DAY))).unwrap();
    let limits = vec![
        Limit::new(window(5)),
        Limit::new(window(5)).with_penalty(penalty()),
        Limit::new(LimitKind::Window(Window::new(100, MINUTE, 4).unwrap())),
        Limit::new(LimitKind::Rate(Rate::new(5, MINUTE, 5).unwrap())),
        Limit::new(LimitKind::Rate(Rate::new(5, MINUTE, 5).unwrap())).with_penalty(penalty()),
        Limit::new(LimitKind::Quota(quota)),
        Limit::new(LimitKind::Concurrency(Concurrency::new(5, MINUTE).unwrap())),
        Limit::new(LimitKind::Cooldown(Cooldown::default())),
    ];
    Arc::new(Limits::new(limits).unwrap())
}

/// Closed and opened again in the middle, it gives the answers of one that never was.
#[test]
fn a_restart_changes_no_outcome() {
    let mut seeds = RandomSource::from_seed(random::run_seed());
    for _ in 0..random::case_count(30, 1_000) {
        let seed = seeds.next_u64();
        let place = Place::quick();
        let mut world = TrafficGenerator::new(RandomSource::from_seed(seed), PlanContents::All);
        let limits = Arc::clone(world.limits());
        let mut model = Model::new(Arc::clone(&limits));
        let mut store = Some(place.store(&limits, SELDOM, world.now()));
        for index in 0..300 {
            let now = world.advance_clock();
            if world.random().chance(8) {
                drop(store.take());
                store = Some(place.store(&limits, SELDOM, now));
            }
            let batch = world.next_batch();
            let outcomes = ask(store.as_ref().unwrap(), &batch, now);
            if let Err(mismatch) = model.check(&batch, &outcomes) {
                panic!("batch {index} of world {seed}: {mismatch}\n  in {batch:?}\n  under {limits:?}");
            }
            world.record_outcomes(&outcomes);
        }
    }
}

/// Strikes of a quota's earlier period are gone with a reset, whether they were written before or not, and whether the
/// key is used again before the next writing or not.
#[test]
fn a_reset_survives_restarts_into_later_periods() {
    let spec = PenaltySpec { base: MINUTE, forgive_after: Some(DAY.times(3)), ..PenaltySpec::default() };
    let quota = LimitKind::Quota(Quota::new(1, Arc::new(FixedPeriods(DAY))).unwrap());
    let limits = Arc::new(Limits::with_limit(Limit::new(quota).with_penalty(Penalty::new(spec, DAY).unwrap())));
    for case in 0..16 {
        let [restarts_before, writes_between, is_in_next_period, is_used] = [1, 2, 4, 8].map(|bit| case & bit > 0);
        let what = format!("{restarts_before} {writes_between} {is_in_next_period} {is_used}");
        let place = Place::quick();
        let mut now = fixtures::test_time(0);
        let mut store = place.store(&limits, SELDOM, now);
        take(&store, 0, fixtures::client_key(1), now, 2);
        store.journal().flush().unwrap();
        now = now + DAY;
        if restarts_before {
            drop(store);
            store = place.store(&limits, SELDOM, now);
        }
        assert_eq!(one(&store, Verb::Take, 0, fixtures::client_key(1), now).strikes, 1, "{what}");
        if writes_between {
            store.journal().flush().unwrap();
        }
        if is_in_next_period {
            now = now + DAY;
        }
        one(&store, Verb::Reset, 0, fixtures::client_key(1), now);
        let used = if is_used { 1 } else { 0 };
        take(&store, 0, fixtures::client_key(1), now, used);
        for restart in 0..2 {
            drop(store);
            store = place.store(&limits, SELDOM, now);
            let found = one(&store, Verb::Peek, 0, fixtures::client_key(1), now);
            assert_eq!((found.strikes, found.used), (0, used as u64), "{what}, restart {restart}");
        }
    }
}

/// A refund is kept over a restart, too, where nothing of its quota is used then.
#[test]
fn a_refund_survives_restarts() {
    let penalty = Penalty::new(PenaltySpec::default(), DAY).unwrap();
    let quota = || Limit::new(LimitKind::Quota(Quota::new(5, Arc::new(FixedPeriods(DAY))).unwrap()));
    let limits = Arc::new(Limits::new(vec![quota(), quota().with_penalty(penalty)]).unwrap());
    let place = Place::quick();
    for (limit, calls) in [(0, 1), (0, 3), (1, 1), (1, 3)] {
        let (key, now) = (fixtures::client_key(calls as u64), fixtures::test_time(0));
        let store = place.store(&limits, SELDOM, now);
        take(&store, limit, key, now, calls);
        for left in (0..calls as u64).rev() {
            store.journal().flush().unwrap();
            ask(
                &store,
                &Batch::with_op(7, Op::new(fixtures::limit_id(limit), Verb::Refund, key, 1)).with_charged_at(now),
                now,
            );
            assert_eq!(one(&store, Verb::Peek, limit, key, now).used, left);
        }
        drop(store);
        let store = place.store(&limits, SELDOM, now);
        assert_eq!(one(&store, Verb::Peek, limit, key, now).used, 0, "limit {limit}, {calls} calls");
    }
}

/// The ladder of penalties, step by step as memory climbs it, with a restart before each step.
#[test]
fn penalties_survive_restarts_at_every_step() {
    let penalty = Penalty::new(PenaltySpec::default(), MINUTE).unwrap();
    let limits = Arc::new(Limits::with_limit(Limit::new(window(5)).with_penalty(penalty)));
    let memory = Memory::new(Arc::clone(&limits), Memory::DEFAULT_MAX_BYTES);
    let place = Place::quick();
    let (mut now, mut blocks) = (fixtures::test_time(0), Vec::new());
    for step in 0..40 {
        let store = place.store(&limits, FlushMode::default(), now);
        let found = one(&store, Verb::Take, 0, fixtures::client_key(1), now);
        assert_eq!(found, one(&memory, Verb::Take, 0, fixtures::client_key(1), now), "step {step}");
        if found.admission == Admission::Refused {
            blocks.push(found.block.as_secs_ceil());
        }
        now = found.retry_at.max(now + Span::from_millis(10));
    }
    assert_eq!(blocks[..5], [2, 4, 8, 16, 32]);
}

#[test]
fn every_kind_of_state_survives_restarts() {
    let limits = every_kind();
    let place = Place::quick();
    let at = fixtures::test_time(0);
    let keys: Vec<Key> = (0..50).map(fixtures::client_key).collect();
    let peek = |store: &FileStore| {
        let places = (0..limits.len()).flat_map(|limit| keys.iter().map(move |key| (limit, *key)));
        places.map(|(limit, key)| one(store, Verb::Peek, limit, key, at)).collect::<Vec<_>>()
    };
    let store = place.store(&limits, FlushMode::default(), at);
    for (index, key) in keys.iter().enumerate() {
        for limit in 0..limits.len() {
            take(&store, limit, *key, at, index % 8 + 1);
        }
        one(&store, Verb::Throttle { generation: 0 }, 7, *key, at);
    }
    let before = peek(&store);
    assert!(before.iter().any(|outcome| outcome.admission == Admission::Blocked));
    drop(store);
    assert_eq!(peek(&place.store(&limits, FlushMode::default(), at)), before);
}

/// Limits are found by their tags, wherever they stand in the plan; another plan's are left alone.
#[test]
fn plans_sharing_a_file_use_limit_tags() {
    let tagged = |tags: &[u64]| {
        let limits = tags.iter().map(|tag| Limit::new(window(5)).with_tag(*tag)).collect();
        Arc::new(Limits::new(limits).unwrap())
    };
    let place = Place::quick();
    let at = fixtures::test_time(0);
    let key = fixtures::client_key(3);
    let journal = place.journal(FlushMode::default());
    let open = |limits: &Arc<Limits>, journal: &Arc<Journal>| FileStore::new(Arc::clone(limits), 1 << 20, journal, at);
    {
        let inbound = open(&tagged(&[70, 80]), &journal).unwrap();
        let outbound = open(&tagged(&[90]), &journal).unwrap();
        assert!(matches!(open(&tagged(&[60, 90]), &journal), Err(FileError::TagInUse { tag: 90, .. })));
        assert!(matches!(open(&tagged(&[60, 60]), &journal), Err(FileError::TagInUse { tag: 60, .. })));
        take(&inbound, 0, key, at, 1);
        take(&inbound, 1, key, at, 2);
        take(&outbound, 0, key, at, 4);
    }
    {
        let alone = open(&tagged(&[11]), &journal).unwrap();
        one(&alone, Verb::Take, 0, key, at);
        journal.flush().unwrap();
    }
    drop(journal);
    let journal = place.journal(FlushMode::default());
    let turned = open(&tagged(&[90, 80, 70, 60]), &journal).unwrap();
    let used: Vec<_> = (0..4).map(|limit| one(&turned, Verb::Peek, limit, key, at).used).collect();
    assert_eq!(used, [4, 2, 1, 0]);
}

/// A policy that means another kind of limit by a name finds nothing under it.
#[test]
fn a_limit_of_changed_kind_starts_empty() {
    let place = Place::quick();
    let at = fixtures::test_time(0);
    let penalty = Penalty::new(PenaltySpec::default(), MINUTE).unwrap();
    let limits = |limit| Arc::new(Limits::with_limit(limit));
    let plans = [
        limits(Limit::new(window(1)).with_penalty(penalty)),
        limits(Limit::new(LimitKind::Rate(Rate::new(1, MINUTE, 1).unwrap()))),
        limits(Limit::new(LimitKind::Quota(Quota::new(1, Arc::new(FixedPeriods(DAY))).unwrap()))),
        limits(Limit::new(LimitKind::Concurrency(Concurrency::new(1, MINUTE).unwrap()))),
    ];
    for plan in &plans {
        let store = place.store(plan, FlushMode::default(), at);
        assert_eq!(one(&store, Verb::Take, 0, fixtures::client_key(1), at).admission, Admission::Admitted, "{plan:?}");
        one(&store, Verb::Take, 0, fixtures::client_key(1), at);
    }
}

/// Once everything has expired, nothing is left: of limits in the plan, but for a quota's last period, which stays for
/// a week, and of those that no plan has any more.
#[test]
fn expired_state_is_removed_from_the_file() {
    let limits = every_kind();
    let place = Place::new();
    let at = fixtures::test_time(0);
    let fill = |store: &FileStore| {
        for client in 0..300 {
            (0..8).for_each(|limit| take(store, limit, fixtures::client_key(client), at, 1));
        }
        store.journal().flush().unwrap();
        store.journal().health().row_count
    };
    let empties = |store: &FileStore, later: Time| {
        let journal = store.journal();
        for _ in 0..50 {
            store.maintain(later);
            journal.flush().unwrap();
        }
        journal.health().row_count
    };
    let store = place.store(&limits, FlushMode::default(), at);
    assert_eq!(fill(&store), 2_100, "a cool-down that never was is not kept");
    assert_eq!(empties(&store, at + Span::from_secs(11)), 2_100);
    assert_eq!(empties(&store, at + Span::from_secs(59)), 1_500, "one call of a rate is forgotten after 12 s");
    assert_eq!(empties(&store, at + DAY.times(2)), 300);
    assert_eq!(empties(&store, at + DAY.times(9)), 0);
    fill(&store);
    drop(store);
    let none = Arc::new(Limits::with_limit(Limit::new(window(1)).with_tag(99)));
    let store = place.store(&none, FlushMode::default(), at);
    assert_eq!(empties(&store, at + DAY.times(6)), 2_100, "another policy may come back");
    assert_eq!(empties(&store, at + DAY.times(9)), 0);
}

/// The writer does that by itself, without further calls.
#[test]
fn the_writer_removes_expired_rows_by_itself() {
    let limits = every_kind();
    let place = Place::new();
    let store = place.store(&limits, FlushMode::default(), fixtures::test_time(0));
    (0..100).for_each(|client| take(&store, 0, fixtures::client_key(client), fixtures::test_time(0), 1));
    store.journal().flush().unwrap();
    assert_eq!(store.journal().health().row_count, 100);
    store.maintain(fixtures::test_time(61_000));
    let mut tries = 0;
    while store.journal().health().row_count > 0 {
        tries += 1;
        assert!(tries < 200, "rows are left after 10 s");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A reset key stays reset, and an entry evicted from memory is removed from the file too.
#[test]
fn resets_and_evictions_reach_the_file() {
    let limits = Arc::new(Limits::with_limit(Limit::new(window(5))));
    let place = Place::new();
    let at = fixtures::test_time(0);
    let store = FileStore::new(Arc::clone(&limits), 1 << 20, &place.journal(FlushMode::default()), at).unwrap();
    let mut random = RandomSource::from_seed(random::run_seed());
    for _ in 0..100_000 {
        one(&store, Verb::Take, 0, Key::new(1, random.next_u64()), at);
    }
    for _ in 0..1_000 {
        store.journal().flush().unwrap();
    }
    let entries = store.stats().entries as u64;
    assert!(entries < 50_000, "the memory is full");
    assert_eq!(store.journal().health().row_count, entries);
    one(&store, Verb::Take, 0, fixtures::client_key(1), at);
    store.journal().flush().unwrap();
    one(&store, Verb::Reset, 0, fixtures::client_key(1), at);
    drop(store);
    let store = FileStore::new(limits, 1 << 20, &place.journal(FlushMode::default()), at).unwrap();
    assert_eq!(one(&store, Verb::Peek, 0, fixtures::client_key(1), at).used, 0);
}

/// Keys lie where another machine, or another bound, finds them; what doesn't fit goes, and is counted.
#[test]
fn the_memory_bound_may_change() {
    let limits = Arc::new(Limits::with_limit(Limit::new(window(5))));
    let place = Place::quick();
    let at = fixtures::test_time(0);
    let mut random = RandomSource::from_seed(random::run_seed());
    let keys: Vec<_> = (0..30_000).map(|_| Key::new(1, random.next_u64())).collect();
    let open = |max_bytes| FileStore::new(Arc::clone(&limits), max_bytes, &place.journal(SELDOM), at).unwrap();
    let used = |store: &FileStore| keys.iter().filter(|key| one(store, Verb::Peek, 0, **key, at).used == 2).count();
    let store = open(64 << 20);
    keys.iter().for_each(|key| take(&store, 0, *key, at, 2));
    drop(store);
    let store = open(1 << 30);
    assert_eq!((used(&store), store.maintain(at).evicted()), (30_000, 0));
    drop(store);
    let store = open(1 << 20);
    let left = used(&store);
    assert!((1_000..29_000).contains(&left), "{left}");
    assert_eq!(store.maintain(at).evicted(), 30_000 - left as u64);
}

/// A file that was large once is small again when it is opened.
#[test]
fn an_emptied_file_is_compacted_when_opened() {
    let limits = Arc::new(Limits::with_limit(Limit::new(window(5))));
    let place = Place::quick();
    let mut random = RandomSource::from_seed(random::run_seed());
    let size = || std::fs::metadata(place.path()).unwrap().len();
    let store = FileStore::new(Arc::clone(&limits), 64 << 20, &place.journal(SELDOM), fixtures::test_time(0)).unwrap();
    (0..150_000).for_each(|_| take(&store, 0, Key::new(1, random.next_u64()), fixtures::test_time(0), 1));
    drop(store);
    let full = size();
    // What ended while no process watched stays for a week.
    let store = place.store(&limits, SELDOM, fixtures::test_time(60_000) + DAY.times(8));
    while store.journal().health().row_count > 0 {
        store.journal().flush().unwrap();
    }
    drop(store);
    drop(place.journal(SELDOM));
    assert!(full > 4 << 20 && size() < 2 << 20, "{full} bytes, then {}", size());
}

/// A clock that is behind after a restart neither locks out nor mints.
#[test]
fn a_slow_clock_locks_out_no_client() {
    let limits = Arc::new(Limits::with_limit(Limit::new(window(3))));
    let place = Place::quick();
    let late = fixtures::test_time(0) + DAY.times(365);
    let store = place.store(&limits, FlushMode::default(), late);
    take(&store, 0, fixtures::client_key(1), late, 4);
    drop(store);
    let store = place.store(&limits, FlushMode::default(), fixtures::test_time(0));
    let refused = one(&store, Verb::Take, 0, fixtures::client_key(1), fixtures::test_time(0));
    assert_eq!(refused.admission, Admission::Refused);
    assert!(refused.retry_at <= fixtures::test_time(60_000), "{refused:?}");
}

/// Keys of any bytes are hashes before they come here: those that differ in a bit that is kept are others.
#[test]
fn extreme_keys_are_kept_separate() {
    let limits = every_kind();
    let place = Place::quick();
    let at = fixtures::test_time(0);
    let mut keys: Vec<u64> = (0..64).filter(|bit| !(52..56).contains(bit)).map(|bit| 1 << bit).collect();
    keys.extend([0, u64::MAX, 0x2727_2727_2727_2727, 0x7b7d_7b7d_7b7d_7b7d]);
    let store = place.store(&limits, FlushMode::default(), at);
    for (index, lo) in keys.iter().enumerate() {
        take(&store, 0, Key::new(0, *lo), at, index % 3 + 1);
    }
    drop(store);
    let store = place.store(&limits, FlushMode::default(), at);
    for (index, lo) in keys.iter().enumerate() {
        assert_eq!(one(&store, Verb::Peek, 0, Key::new(0, *lo), at).used, index as u64 % 3 + 1, "{lo:x}");
    }
}

/// The file keeps what its keys are hashed under.
#[test]
fn the_hash_seed_is_kept() {
    let place = Place::quick();
    assert_eq!(place.journal(SELDOM).get_or_insert_seed([1; 16]).unwrap(), [1; 16]);
    assert_eq!(place.journal(SELDOM).get_or_insert_seed([2; 16]).unwrap(), [1; 16]);
}

/// After each flush of random traffic, the file equals the memory, whatever plan wrote it.
#[test]
fn a_flush_writes_the_whole_memory_state() {
    property::check(random::case_count(20, 400), 300, |random| {
        let mut world = TrafficGenerator::new(random, PlanContents::All);
        let place = Place::quick();
        let limits = Arc::clone(world.limits());
        let store = place.store(&limits, SELDOM, world.now());
        while !world.random().is_exhausted() {
            let now = world.advance_clock();
            let batch = world.next_batch();
            world.record_outcomes(&ask(&store, &batch, now));
            if world.random().chance(5) {
                store.journal().flush().map_err(|error| error.to_string())?;
            }
        }
        store.maintain(world.now());
        store.journal().flush().map_err(|error| error.to_string())?;
        let copy = Place::quick();
        std::fs::copy(place.path(), copy.path()).map_err(|error| error.to_string())?;
        let other = copy.store(&limits, SELDOM, world.now());
        let now = world.now();
        for _ in 0..20 {
            let batch = world.take_batch();
            let (expected, found) = (ask(&store, &batch, now), ask(&other, &batch, now));
            if expected.list() != found.list() {
                return Err(format!("{batch:?}: {:?}, the copy {:?}", expected.list(), found.list()));
            }
        }
        Ok(())
    });
}
