//! A flood of keys against a memory store: it stays within its bound, keeps blocked keys, and counts evictions. In a
//! file of its own, so that no other test's memory is measured.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_core::decision::move_to_shared_keys;
use tidegate_core::{
    Admission, Batch, Concurrency, Key, Limit, LimitId, LimitKind, Limits, Op, Outcome, Penalty, PenaltySpec, Rate,
    ShareLevel, Span, Time, Verb, Window,
};
use tidegate_store::{ImmediateStore, Memory, Store};
use tidegate_testkit::random::{self, RandomSource};

const MIB: usize = 1 << 20;
/// The growth of a process beyond the store's own bytes: the fixed part of shards, and the allocator's reserve.
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
    let limits = Limits::new(vec![Limit::new(LimitKind::Window(window)).with_penalty(ban)]).expect("a plan");
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

fn take(store: &Memory, number: u64, now: Time) -> Admission {
    ask(store, op(Verb::Take, key(number), false), now).admission
}

fn peek(store: &Memory, number: u64, now: Time) -> Admission {
    ask(store, op(Verb::Peek, key(number), false), now).admission
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
fn a_million_junk_keys_evict_no_block() {
    let _alone = alone();
    let before = resident();
    let store = store(5, 64 * MIB);
    for client in 0..100 {
        for call in 0..6 {
            assert_eq!(take(&store, client, at(0)) == Admission::Admitted, call < 5);
        }
        assert_eq!(peek(&store, client, at(0)), Admission::Blocked);
    }
    for junk in 0..KEYS {
        let calls = [1, 1, 2, 5][junk as usize % 4];
        for _ in 0..calls {
            assert_eq!(take(&store, 1_000 + junk, at(junk)), Admission::Admitted);
        }
        if junk % 100_000 == 0 {
            check_bytes(&store, before);
        }
    }
    check_bytes(&store, before);
    for client in 0..100 {
        assert_eq!(take(&store, client, at(KEYS)), Admission::Blocked, "client {client}");
    }
    let stats = store.stats();
    assert_eq!((stats.losses.refused_blocks, stats.losses.forced_shares), (0, 0));
    let lost = (0..KEYS).filter(|junk| ask(&store, op(Verb::Peek, key(1_000 + junk), false), at(KEYS)).used == 0);
    assert_eq!(lost.count() as u64, stats.losses.evicted(), "every live entry that went was counted");
}

#[test]
fn a_million_blocked_keys_stay_within_memory() {
    let _alone = alone();
    let before = resident();
    let store = store(1, 64 * MIB);
    let (mut blocked, mut shared, mut wider) = (Vec::new(), 0, 0);
    for client in 0..KEYS {
        if take(&store, client, at(client)) == Admission::NoRoom {
            // As a gate does.
            shared += 1;
            let (share, outcome) = call(&store, client, at(client));
            assert!(share > ShareLevel::Own && outcome.admission != Admission::NoRoom);
            wider += 1 + u64::from(share > ShareLevel::SmallNetwork);
        } else {
            assert_eq!(take(&store, client, at(client)), Admission::Refused, "the ban begins");
            blocked.push(client);
        }
        if client % 100_000 == 0 {
            check_bytes(&store, before);
        }
    }
    check_bytes(&store, before);
    let stats = store.stats();
    assert!(shared > 0 && blocked.len() > 10_000, "{} blocked, {stats:?}", blocked.len());
    assert_eq!(stats.losses.forced_shares, shared + wider, "every new key that had to share was counted");
    let kept = blocked.iter().filter(|&&client| peek(&store, client, at(KEYS)) == Admission::Blocked).count();
    assert_eq!(blocked.len(), kept, "blocked keys stay");
    assert_eq!(stats.losses.refused_blocks, 0, "whoever has a key of its own, or its network has, is blocked");
    let told = store.maintain(at(KEYS));
    assert_eq!((told.evicted(), told.forced_shares), (0, stats.losses.forced_shares), "what happened is told");
    assert!(!store.maintain(at(KEYS)).has_any(), "once");
}

/// Logs of calls at different moments take memory of their own, which counts towards the half that blocks may fill.
#[test]
fn blocks_with_long_logs_are_kept() {
    let _alone = alone();
    for limit in [6, 60] {
        let store = store(limit, 8 * MIB);
        let clients = 400_000 / limit;
        let blocked: Vec<u64> = (0..clients)
            .filter(|client| {
                let calls = (0..=limit).map(|call| take(&store, *client, at(client * (limit + 1) + call)));
                calls.collect::<Vec<_>>().last() == Some(&Admission::Refused)
            })
            .collect();
        let stats = store.stats();
        assert_eq!(stats.losses.refused_blocks, 0, "limit {limit}: {stats:?}");
        assert!(stats.losses.forced_shares > 0, "limit {limit}: {stats:?}");
        let now = at(clients * (limit + 1));
        assert!(blocked.iter().all(|client| peek(&store, *client, now) == Admission::Blocked), "limit {limit}");
        check_bytes(&store, None);
    }
}

#[test]
fn must_fit_calls_count_without_evicting_blocks() {
    let _alone = alone();
    let store = store(1, MIB);
    let mut blocked = Vec::new();
    for client in 0..100_000 {
        let first = ask(&store, op(Verb::Take, key(client), true), at(client));
        assert_eq!(first.admission, Admission::Admitted, "client {client}");
        let second = ask(&store, op(Verb::Take, key(client), true), at(client));
        assert_eq!(second.admission, Admission::Refused);
        if second.block_until > at(client) {
            blocked.push(client);
        }
    }
    check_bytes(&store, None);
    let stats = store.stats();
    assert_eq!(
        (stats.losses.forced_shares, stats.losses.refused_blocks),
        (0, 100_000 - blocked.len() as u64),
        "{stats:?}"
    );
    assert!(blocked.len() > 3_000, "{} blocked", blocked.len());
    assert!(blocked.iter().all(|&client| peek(&store, client, at(100_000)) == Admission::Blocked));
}

/// A network's number beside those of clients and of other kinds of network.
fn network(kind: u64, number: u64) -> Key {
    key(kind << 40 | number)
}

/// A call as a gate asks about it, under keys that more and more clients share where the store has no room: a client's
/// address is its number, 256 of them are one network, and 65,536 a larger one.
fn call(store: &Memory, client: u64, now: Time) -> (ShareLevel, Outcome) {
    let mut batch = Batch::with_op(0, op(Verb::Take, key(client), false));
    loop {
        let outcomes = store.apply_now(&batch, now);
        let shared = |_: LimitId, share| match share {
            ShareLevel::Own | ShareLevel::SmallNetwork => (ShareLevel::SmallNetwork, network(1, client >> 8)),
            ShareLevel::LargeNetwork => (ShareLevel::LargeNetwork, network(2, client >> 16)),
            ShareLevel::All => (ShareLevel::All, network(3, 0)),
        };
        if !move_to_shared_keys(&mut batch, &outcomes, shared) {
            return (batch.ops()[0].share_level, outcomes.list()[0]);
        }
    }
}

/// Networks of which one client each makes six calls of five that are allowed. No block goes for another's.
#[test]
fn blocks_survive_a_flood_of_networks() {
    let _alone = alone();
    for (bytes, networks, per_network) in [(MIB, 8_000, 256), (MIB, 20_000, 65_536), (4 * MIB, 33_000, 256)] {
        let store = store(5, bytes);
        let victims = 1_u64 << 36;
        for victim in 0..200 {
            (0..6).for_each(|_| _ = call(&store, victims + victim, at(0)));
        }
        for number in 0..networks {
            for _ in 0..6 {
                call(&store, number * per_network, at(number));
            }
        }
        let now = at(networks);
        let left = (0..200).filter(|victim| peek(&store, victims + victim, now) == Admission::Blocked).count();
        assert_eq!(left, 200, "{bytes} bytes, {networks} networks: {:?}", store.stats());
        check_bytes(&store, None);
    }
}

/// Clients with few calls have small states; clients with many have logs with memory of their own. The small states
/// fill the store first, nearly to its bound. Then logs replace them, a few at a time.
#[test]
fn blocks_survive_states_of_other_sizes() {
    let _alone = alone();
    let hour = Span::from_secs(3600);
    let ban = Penalty::ban(hour + hour, hour).unwrap();
    let window = |limit| LimitKind::Window(Window::new(limit, hour, 64).unwrap());
    let limits =
        Arc::new(Limits::new(vec![Limit::new(window(5)).with_penalty(ban), Limit::new(window(1_000))]).unwrap());
    let many = LimitId::from_index(1).unwrap();
    for bytes in (MIB..MIB + MIB / 4).step_by(MIB / 256) {
        let store = Memory::reproducible(Arc::clone(&limits), bytes);
        for client in 0..200 {
            (0..6).for_each(|_| _ = take(&store, client, at(0)));
        }
        for client in 1_000..12_000 {
            (0..2).for_each(|_| _ = take(&store, client, at(client)));
        }
        let before = store.stats().entries;
        for call in 0..4_000 {
            ask(&store, Op::new(many, Verb::Take, key(1_000_000 + call / 40), 1), at(20_000 + call));
        }
        let left = (0..200).filter(|client| peek(&store, *client, at(30_000)) == Admission::Blocked).count();
        let stats = store.stats();
        assert_eq!(left, 200, "{bytes} bytes: {stats:?}");
        assert!(
            stats.entries > before / 2 && stats.bytes <= bytes,
            "{bytes} bytes, {before} entries before: {stats:?}"
        );
    }
}

/// Floods of any kind, also by known clients: a block that was told is told until it ends, while its kind had room it
/// was imposed, and a key that many networks share never blocks.
#[test]
fn blocks_survive_any_flood() {
    let _alone = alone();
    let seed = random::run_seed();
    for round in 0..random::case_count(6, 60) {
        let mut random = RandomSource::from_seed(seed.wrapping_add(round.into()));
        let bytes = random.pick(&[MIB, MIB, 3 * MIB]);
        let limit = random.pick(&[1, 2, 5, 9, 40]);
        let length = Span::from_secs(random.pick(&[1, 60, 7200]));
        let hour = Span::from_secs(3600);
        let window = Limit::new(LimitKind::Window(Window::new(limit, hour, 64).unwrap()));
        let limits = Limits::new(vec![window.with_penalty(Penalty::ban(length, hour).unwrap())]).unwrap();
        let store = Memory::reproducible(Arc::new(limits), bytes);
        let reach = random.pick(&[1 << 12, 1 << 20, 1 << 34]);
        let step = random.pick(&[1, 40, 4_000]);
        let (mut now, mut told) = (0, Vec::new());
        for _ in 0..random.pick(&[20_000, 60_000]) {
            let client = random.below(reach);
            for _ in 0..random.between(1, limit + 2) {
                now += random.below(step);
                let (share, outcome) = call(&store, client, at(now));
                if outcome.block_until > at(now) {
                    assert!(share.allows_strikes(), "seed {seed}, round {round}: {share:?} blocks");
                    told.push((
                        if share == ShareLevel::Own { key(client) } else { network(1, client >> 8) },
                        outcome.block_until,
                    ));
                }
            }
            if random.below(5_000) == 0 {
                told.retain(|(_, until)| *until > at(now));
                for (key, until) in &told {
                    let found = ask(&store, op(Verb::Peek, *key, true), at(now));
                    assert!(
                        found.block_until >= *until,
                        "seed {seed}, round {round}: a block was lost: {:?}",
                        store.stats()
                    );
                }
            }
        }
        let stats = store.stats();
        assert!(stats.bytes <= stats.max_bytes, "seed {seed}, round {round}: {stats:?}");
        let live: std::collections::HashSet<_> =
            told.iter().filter(|(_, until)| *until > at(now)).map(|(key, _)| *key).collect();
        // A block takes some 120 bytes, and up to a thousand more for its log.
        if stats.losses.forced_shares + stats.losses.refused_blocks > 0 {
            assert!(
                live.len() > 300 || length <= Span::from_secs(60),
                "seed {seed}, round {round}: {} live, {stats:?}",
                live.len()
            );
        }
    }
}

#[test]
fn refusal_by_a_full_store_changes_nothing() {
    let _alone = alone();
    let hour = Span::from_secs(3600);
    let ban = Penalty::ban(hour, hour).unwrap();
    let window = |limit| LimitKind::Window(Window::new(limit, hour, 64).unwrap());
    let limits = vec![Limit::new(window(1)).with_penalty(ban), Limit::new(window(100))];
    let store = Memory::new(Arc::new(Limits::new(limits).unwrap()), MIB);
    let mut client = 0;
    while take(&store, client, at(0)) != Admission::NoRoom {
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
    assert_eq!(outcomes.list()[1].admission, Admission::NoRoom);
    assert_eq!(store.stats().entries, entries);
    let look = ask(&store, Op { verb: Verb::Peek, ..other }, at(0));
    assert_eq!((look.remaining, look.used), (100, 0));
    assert_eq!(peek(&store, 0, at(0)), Admission::Blocked, "a key that is known is answered as ever");
}

/// The idle go first, then the least used, then the full; blocks last.
#[test]
fn idle_states_are_evicted_first_blocks_last() {
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
    while store.stats().losses.evicted_used < 3_000 {
        for _ in 0..2 {
            take(&store, next, now(1));
        }
        next += 1;
    }
    let stats = store.stats();
    assert_eq!(stats.losses.refused_blocks, 0);
    assert!(stats.losses.evicted_exhausted * 20 <= stats.losses.evicted_used, "{stats:?}");
    assert!(known(full) >= 450 && known(banned) == 300);
    check_bytes(&store, None);
}

#[test]
fn idle_memory_is_released() {
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
        store.maintain(later);
    }
    let stats = store.stats();
    assert!(stats.entries == 0 && stats.bytes < MIB / 8, "{stats:?}");
    assert_eq!(stats.losses.evicted(), 0);
}

/// Operations of every kind on more keys than fit, all at the bound: nothing breaks, and the bound holds.
#[test]
fn random_traffic_stays_within_the_memory_bound() {
    let _alone = alone();
    let hour = Span::from_secs(3600);
    let penalty = Penalty::new(PenaltySpec::default(), hour).unwrap();
    let limits = vec![
        Limit::new(LimitKind::Window(Window::new(3, hour, 64).unwrap())).with_penalty(penalty),
        Limit::new(LimitKind::Window(Window::new(500, hour, 64).unwrap())),
        Limit::new(LimitKind::Rate(Rate::new(5, Span::from_secs(1), 5).unwrap())),
        Limit::new(LimitKind::Concurrency(Concurrency::new(40, Concurrency::DEFAULT_LEASE).unwrap())),
    ];
    let store = Memory::new(Arc::new(Limits::new(limits).unwrap()), MIB);
    let mut random = RandomSource::from_seed(random::run_seed());
    let verbs = [Verb::Take, Verb::Take, Verb::Take, Verb::Take, Verb::Peek, Verb::Refund, Verb::Release, Verb::Reset];
    let mut now = at(0);
    for round in 0..random::case_count(200_000, 4_000_000) {
        now = now + Span::from_micros(random.below(20_000));
        let mut batch = Batch::new(random.below(50));
        for index in 0..4 {
            // Half of the traffic is a few clients that would fit, the other half a flood.
            let client = if random.chance(50) { random.below(200) } else { random.below(1 << 30) };
            let limit = LimitId::from_index(index).unwrap();
            let plain = Op::new(limit, random.pick(&verbs), key(client), random.between(1, 3));
            batch.push(Op { must_fit: random.chance(10), ..plain }).unwrap();
        }
        let outcomes = store.apply_now(&batch, now);
        for (op, outcome) in batch.ops().iter().zip(outcomes.list()) {
            assert!(!(op.must_fit && outcome.admission == Admission::NoRoom), "{op:?}");
        }
        if round % 1_000 == 0 {
            check_bytes(&store, None);
        }
    }
    check_bytes(&store, None);
}
