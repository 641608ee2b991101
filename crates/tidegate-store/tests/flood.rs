//! A flood of keys against a memory store: it stays within its bound, keeps whom it has blocked, and counts what it
//! lets go. A file of its own, so that no other test's memory is measured.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_core::{
    Batch, Concurrency, Key, Kind, Limit, LimitId, Limits, Op, Outcome, Penalty, PenaltySpec, Rate, Span, Time, Verb,
    Verdict, Window,
};
use tidegate_store::{Immediate, Memory, Store};
use tidegate_testkit::dice::{self, Dice};

const MIB: usize = 1 << 20;
/// What a process may grow by beyond the store's own bytes: the shards' fixed part and what the allocator keeps.
const SLACK: usize = 16 * MIB;
const KEYS: u64 = 1_000_000;

/// One at a time: each measures the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn at(micros: u64) -> Time {
    Time::from_secs(1_700_000_000) + Span::from_micros(micros)
}

/// Keys as a keyed hash would spread them.
fn key(number: u64) -> Key {
    let mut word = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    Key::new(number, word ^ word >> 31)
}

/// `limit` an hour, and a ban of two hours.
fn store(limit: u64, bytes: usize) -> Memory {
    let hour = Span::from_secs(3600);
    let window = Window::new(limit, hour, 64).expect("a window");
    let ban = Penalty::ban(hour + hour, hour).expect("a ban");
    let limits = Limits::new(vec![Limit::new(Kind::Window(window)).with_penalty(ban)]).expect("a plan");
    Memory::new(Arc::new(limits), bytes)
}

fn op(verb: Verb, key: Key, must_fit: bool) -> Op {
    Op { must_fit, ..Op::new(LimitId::from_index(0).expect("the first limit"), verb, key, 1) }
}

fn ask(store: &Memory, op: Op, now: Time) -> Outcome {
    let mut batch = Batch::new(0);
    batch.push(op).expect("room for one");
    store.apply_now(&batch, now).list()[0]
}

fn take(store: &Memory, number: u64, now: Time) -> Verdict {
    ask(store, op(Verb::Take, key(number), false), now).verdict
}

fn peek(store: &Memory, number: u64, now: Time) -> Verdict {
    ask(store, op(Verb::Peek, key(number), false), now).verdict
}

/// Bytes of this process in memory, where the system tells.
fn resident() -> Option<usize> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    Some(pages.split(' ').nth(1)?.parse::<usize>().ok()? * 4096)
}

fn check_bytes(store: &Memory, before: Option<usize>) {
    let stats = store.stats();
    assert!(stats.bytes <= stats.max_bytes, "{stats:?}");
    if let (Some(before), Some(after)) = (before, resident()) {
        let grown = after.saturating_sub(before);
        assert!(grown <= stats.max_bytes + SLACK, "the process grew by {grown} bytes; {stats:?}");
    }
}

#[test]
fn a_million_junk_keys() {
    let _alone = alone();
    let before = resident();
    let store = store(5, 64 * MIB);
    for client in 0..100 {
        for call in 0..6 {
            assert_eq!(take(&store, client, at(0)) == Verdict::Admitted, call < 5);
        }
        assert_eq!(peek(&store, client, at(0)), Verdict::Blocked);
    }
    for junk in 0..KEYS {
        let calls = [1, 1, 2, 5][junk as usize % 4];
        for _ in 0..calls {
            assert_eq!(take(&store, 1_000 + junk, at(junk)), Verdict::Admitted);
        }
        if junk % 100_000 == 0 {
            check_bytes(&store, before);
        }
    }
    check_bytes(&store, before);
    for client in 0..100 {
        assert_eq!(take(&store, client, at(KEYS)), Verdict::Blocked, "client {client}");
    }
    let stats = store.stats();
    assert_eq!((stats.losses.blocked, stats.losses.shared), (0, 0));
    let lost = (0..KEYS).filter(|junk| ask(&store, op(Verb::Peek, key(1_000 + junk), false), at(KEYS)).used == 0);
    assert_eq!(lost.count() as u64, stats.losses.evicted(), "every live entry that went was counted");
}

#[test]
fn a_million_blocked_keys() {
    let _alone = alone();
    let before = resident();
    let store = store(1, 64 * MIB);
    let (mut blocked, mut shared) = (Vec::new(), 0);
    for client in 0..KEYS {
        if take(&store, client, at(client)) == Verdict::NoRoom {
            // As the caller does: the key of the parent prefix, which must fit.
            shared += 1;
            let parent = ask(&store, op(Verb::Take, key((1 << 40) | (client % 256)), true), at(client));
            assert_ne!(parent.verdict, Verdict::NoRoom);
        } else {
            assert_eq!(take(&store, client, at(client)), Verdict::Refused, "the ban begins");
            blocked.push(client);
        }
        if client % 100_000 == 0 {
            check_bytes(&store, before);
        }
    }
    check_bytes(&store, before);
    let stats = store.stats();
    assert!(shared > 0 && blocked.len() > 10_000, "{} blocked, {stats:?}", blocked.len());
    assert_eq!(stats.losses.shared, shared, "every new key that had to share was counted");
    let kept = blocked.iter().filter(|&&client| peek(&store, client, at(KEYS)) == Verdict::Blocked).count();
    let evicted = store.stats().losses.blocked;
    assert_eq!((blocked.len() - kept) as u64, evicted, "every block that went was counted");
    assert_eq!(evicted, 0, "blocked keys stay while they fill at most half of the store");
    let told = store.tend(at(KEYS));
    assert_eq!((told.evicted(), told.shared), (0, stats.losses.shared), "what happened is told");
    assert!(!store.tend(at(KEYS)).any(), "once");
}

/// Logs of calls at different moments take memory of their own, which counts towards the half that blocks may fill.
#[test]
fn blocks_with_long_logs_are_kept_too() {
    let _alone = alone();
    for limit in [6, 60] {
        let store = store(limit, 8 * MIB);
        let clients = 400_000 / limit;
        let blocked: Vec<u64> = (0..clients)
            .filter(|client| {
                let calls = (0..=limit).map(|call| take(&store, *client, at(client * (limit + 1) + call)));
                calls.collect::<Vec<_>>().last() == Some(&Verdict::Refused)
            })
            .collect();
        let stats = store.stats();
        assert_eq!(stats.losses.blocked, 0, "limit {limit}: {stats:?}");
        assert!(stats.losses.shared > 0, "limit {limit}: {stats:?}");
        let now = at(clients * (limit + 1));
        assert!(blocked.iter().all(|client| peek(&store, *client, now) == Verdict::Blocked), "limit {limit}");
        check_bytes(&store, None);
    }
}

#[test]
fn what_must_fit_fits_though_everything_is_blocked() {
    let _alone = alone();
    let store = store(1, MIB);
    for client in 0..100_000 {
        let first = ask(&store, op(Verb::Take, key(client), true), at(client));
        assert_eq!(first.verdict, Verdict::Admitted, "client {client}");
        assert_eq!(ask(&store, op(Verb::Take, key(client), true), at(client)).verdict, Verdict::Refused);
    }
    check_bytes(&store, None);
    let stats = store.stats();
    assert_eq!(stats.losses.shared, 0);
    assert_eq!(stats.entries as u64 + stats.losses.blocked, 100_000, "{stats:?}");
    assert_eq!(peek(&store, 99_999, at(100_000)), Verdict::Blocked, "the newest is there");
}

#[test]
fn no_room_changes_nothing() {
    let _alone = alone();
    let hour = Span::from_secs(3600);
    let ban = Penalty::ban(hour, hour).unwrap();
    let window = |limit| Kind::Window(Window::new(limit, hour, 64).unwrap());
    let limits = vec![Limit::new(window(1)).with_penalty(ban), Limit::new(window(100))];
    let store = Memory::new(Arc::new(Limits::new(limits).unwrap()), MIB);
    let mut client = 0;
    while take(&store, client, at(0)) != Verdict::NoRoom {
        take(&store, client, at(0));
        client += 1;
        assert!(client < KEYS, "never full");
    }
    let beside = LimitId::from_index(1).unwrap();
    let other = Op { must_fit: true, ..Op::new(beside, Verb::Take, key(1 << 40), 1) };
    let mut both = Batch::new(0);
    both.push(other).unwrap();
    both.push(op(Verb::Take, key(client), false)).unwrap();
    let entries = store.stats().entries;
    let outcomes = store.apply_now(&both, at(0));
    assert_eq!(outcomes.list()[1].verdict, Verdict::NoRoom);
    assert_eq!(store.stats().entries, entries);
    let look = ask(&store, Op { verb: Verb::Peek, ..other }, at(0));
    assert_eq!((look.remaining, look.used), (100, 0));
    assert_eq!(peek(&store, 0, at(0)), Verdict::Blocked, "a key that is known is answered as ever");
}

/// The idle go first, then the least used, then the full; blocks last.
#[test]
fn eviction_in_order() {
    let _alone = alone();
    let store = store(5, MIB);
    let (idle, used, full, banned) = (0..2_000, 10_000..11_000, 20_000..20_500, 30_000..30_300);
    for client in idle.clone() {
        take(&store, client, at(0));
        take(&store, client, at(0));
    }
    let now = |micros: u64| at(3_600_000_000 + micros);
    for (clients, calls) in [(used.clone(), 2), (full.clone(), 5), (banned.clone(), 6)] {
        for client in clients {
            for _ in 0..calls {
                take(&store, client, now(0));
            }
        }
    }
    let known = |clients: std::ops::Range<u64>| {
        let used = |client| ask(&store, op(Verb::Peek, key(client), false), now(0)).used;
        clients.filter(|&client| used(client) > 0).count()
    };
    assert_eq!((known(used.clone()), known(full.clone()), known(banned.clone())), (1_000, 500, 300));
    assert_eq!(store.stats().losses.evicted(), 0, "two thousand idle entries were enough");
    let mut next = 100_000;
    while store.stats().losses.used < 3_000 {
        for _ in 0..2 {
            take(&store, next, now(1));
        }
        next += 1;
    }
    let stats = store.stats();
    assert_eq!(stats.losses.blocked, 0);
    assert!(stats.losses.full * 20 <= stats.losses.used, "{stats:?}");
    assert!(known(full) >= 450 && known(banned) == 300);
    check_bytes(&store, None);
}

#[test]
fn what_is_idle_is_given_back() {
    let _alone = alone();
    let store = store(5, 8 * MIB);
    for client in 0..50_000 {
        for _ in 0..3 {
            take(&store, client, at(client));
        }
    }
    assert!(store.stats().bytes > 2 * MIB);
    let later = at(0) + Span::from_secs(86_400);
    for _ in 0..1_000 {
        store.tend(later);
    }
    let stats = store.stats();
    assert!(stats.entries == 0 && stats.bytes < MIB / 8, "{stats:?}");
    assert_eq!(stats.losses.evicted(), 0);
}

/// Operations of every kind on more keys than fit, all at the bound: nothing breaks, and the bound holds.
#[test]
fn any_traffic_at_the_bound() {
    let _alone = alone();
    let hour = Span::from_secs(3600);
    let penalty = Penalty::new(PenaltySpec::default(), hour).unwrap();
    let limits = vec![
        Limit::new(Kind::Window(Window::new(3, hour, 64).unwrap())).with_penalty(penalty),
        Limit::new(Kind::Window(Window::new(500, hour, 64).unwrap())),
        Limit::new(Kind::Rate(Rate::new(5, Span::from_secs(1), 5).unwrap())),
        Limit::new(Kind::Concurrency(Concurrency::new(40, Concurrency::LEASE).unwrap())),
    ];
    let store = Memory::new(Arc::new(Limits::new(limits).unwrap()), MIB);
    let mut dice = Dice::seeded(dice::seed());
    let verbs = [Verb::Take, Verb::Take, Verb::Take, Verb::Take, Verb::Peek, Verb::Refund, Verb::Release, Verb::Reset];
    let mut now = at(0);
    for round in 0..dice::count(200_000, 4_000_000) {
        now = now + Span::from_micros(dice.below(20_000));
        let mut batch = Batch::new(dice.below(50));
        for index in 0..4 {
            // Half of the traffic is a few clients that would fit, the other half a flood.
            let client = if dice.percent(50) { dice.below(200) } else { dice.below(1 << 30) };
            let limit = LimitId::from_index(index).unwrap();
            let plain = Op::new(limit, dice.pick(&verbs), key(client), dice.between(1, 3));
            batch.push(Op { must_fit: dice.percent(10), ..plain }).unwrap();
        }
        let outcomes = store.apply_now(&batch, now);
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            assert!(!(op.must_fit && outcome.verdict == Verdict::NoRoom), "{op:?}");
        }
        if round % 1_000 == 0 {
            check_bytes(&store, None);
        }
    }
    check_bytes(&store, None);
}
