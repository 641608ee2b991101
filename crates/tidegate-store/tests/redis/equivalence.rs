//! It answers as a store of whole states does, field by field and call by call.

use std::sync::Arc;
use std::time::Duration;

use tidegate_core::pacer::{MAX_SHARED_STEP, PacerGrowth, PacerMode};
use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Batch, Concurrency, Cooldown, Key, Limit, LimitId, LimitKind, Limits, Op, Outcomes, PacerSpec, Penalty,
    PenaltySpec, Quota, Rate, SharedPacerRules, Span, Time, Verb, Window,
};
use tidegate_store::{DirectStore, ImmediateStore as _, TimeSource};
use tidegate_testkit::conformance::Backend as _;
use tidegate_testkit::random::{self, RandomSource};
use tidegate_testkit::reference::ReferenceStore;
use tidegate_testkit::servers::RedisServer;
use tidegate_testkit::traffic::{PlanContents, TrafficGenerator};

use crate::common::Stores;

/// Two stores that are asked the same.
struct Pair<'a> {
    stores: &'a Stores,
    redis: DirectStore,
    reference: ReferenceStore,
}

impl<'a> Pair<'a> {
    fn open(stores: &'a Stores, limits: &Arc<Limits>) -> Self {
        Self { stores, redis: stores.open(Arc::clone(limits)), reference: ReferenceStore::new(Arc::clone(limits)) }
    }

    fn ask(&self, batch: &Batch, now: Time) -> Outcomes {
        self.compare(batch, now, false).unwrap()
    }

    /// The outcome of both stores. With `may_remember`, `None` if they differ over a key that the reference has
    /// dropped. The reference drops an idle state at any access; the other store keeps it until the next write or its
    /// expiry, and uses it again after a clock step back.
    fn compare(&self, batch: &Batch, now: Time, may_remember: bool) -> Option<Outcomes> {
        let known = self.reference.snapshot(now);
        let is_forgotten = batch.ops().iter().any(|op| !known.contains_key(&(op.limit, op.key)));
        let found = self.stores.runtime.block_on(self.redis.0.apply(batch, now)).unwrap();
        let expected = self.reference.apply_now(batch, now);
        if may_remember && is_forgotten && found.list() != expected.list() {
            return None;
        }
        assert_eq!(found.now(), expected.now());
        assert_eq!(found.list(), expected.list(), "{batch:?}\n under {:?}", self.reference_limits());
        Some(found)
    }

    fn reference_limits(&self) -> &Limits {
        self.redis.0.limits()
    }
}

fn worlds(wanted: PlanContents, mut clock: impl FnMut(&mut TrafficGenerator, &mut RandomSource) -> Time) {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Caller);
    let mut seeds = RandomSource::from_seed(random::run_seed());
    let worlds = random::case_count(40, 400);
    let mut differing = 0;
    for _ in 0..worlds {
        let seed = seeds.next_u64();
        println!("world {seed}");
        let mut world = TrafficGenerator::new(RandomSource::from_seed(seed), wanted);
        let mut random = RandomSource::from_seed(seed ^ 1);
        let pair = Pair::open(&stores, world.limits());
        for _ in 0..250 {
            let now = clock(&mut world, &mut random);
            let Some(outcomes) = pair.compare(&world.next_batch(), now, wanted == PlanContents::RealTime) else {
                differing += 1;
                break;
            };
            world.record_outcomes(&outcomes);
        }
    }
    assert!(differing <= worlds / 10, "{differing} of {worlds} worlds");
}

#[test]
fn redis_agrees_with_the_reference_store() {
    worlds(PlanContents::All, |world, _| world.advance_clock());
}

/// The clock now and then steps back: by less than a call may be overtaken by, by seconds, and for good by a month.
/// Limits last for hours: when a state that is idle is forgotten, and comes to life again with the past, is each
/// store's own affair.
#[test]
fn redis_agrees_when_clocks_step_back() {
    const MINUTE: u64 = 60_000_000;
    let (mut start, mut now) = (Time::ZERO, Time::ZERO);
    worlds(PlanContents::RealTime, |world, random| {
        if start != world.now() {
            start = world.now();
            // Far from the end of any period of a quota, which are one to three hours long.
            now = Time::from_micros(start.as_micros() / (360 * MINUTE) * 360 * MINUTE + 30 * MINUTE);
        }
        now = now + Span::from_micros(random.below(1_000_000));
        if random.below(100) == 0 {
            now = now - Span::from_secs(30 * 86_400);
        }
        now - match random.below(20) {
            0 => Span::from_micros(random.below(100_001)),
            1 => Span::from_micros(random.below(20_000_000)),
            _ => Span::ZERO,
        }
    });
}

/// A penalty that is brought back by a clock that was set back changes the state as a whole, of whatever kind: it
/// answers alike afterwards.
#[test]
fn restored_penalties_agree_with_the_reference_store() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Caller);
    let hour = Span::from_secs(3_600);
    let kinds = [
        LimitKind::Window(Window::new(6, hour, 64).unwrap()),
        LimitKind::Window(Window::new(145, hour, 1).unwrap()),
        LimitKind::Rate(Rate::new(6, hour, 6).unwrap()),
        LimitKind::Quota(Quota::new(6, Arc::new(FixedPeriods(hour))).unwrap()),
        LimitKind::Concurrency(Concurrency::new(6, hour).unwrap()),
        LimitKind::Cooldown(Cooldown::default()),
        LimitKind::Pace(SharedPacerRules::new(PacerSpec::default()).unwrap()),
    ];
    let penalty = Penalty::new(PenaltySpec::default(), hour).unwrap();
    let limits = kinds.map(|kind| Limit::new(kind).with_penalty(penalty));
    let pair = Pair::open(&stores, &Arc::new(Limits::new(limits.to_vec()).unwrap()));
    let (now, second) = (Time::from_secs(1_700_000_000), Span::from_secs(1));
    for (limit, plan) in pair.redis.0.limits().iter() {
        for (back, key) in [0, 1, 5, 40 * 86_400].into_iter().zip(1..) {
            let key = Key::new(key, key);
            let ask = |verb, cost, now| pair.ask(&one(limit, verb, key, cost), now);
            match plan.kind() {
                LimitKind::Cooldown(_) => ask(Verb::Throttle { generation: 0 }, 0, now),
                LimitKind::Pace(_) => ask(Verb::Pace { failed: true, draw: 0 }, 0, now),
                _ => ask(Verb::Take, 2, now),
            };
            ask(Verb::Take, 1, now + second);
            ask(Verb::RestorePenalty { strikes: 1, parole: 0 }, 500_000, now - second.times(back));
            for after in [0, 1, 2] {
                ask(Verb::Peek, 1, now + second.times(after));
            }
            ask(Verb::Take, 1, now + second.times(4));
        }
    }
}

/// Logs of thousands of slots, which are neither read nor written as a whole: charged ahead, settled, refunded,
/// overdrawn, merged, and left to expire.
#[test]
fn long_logs_agree_with_the_reference_store() {
    const LEAD: Span = Span::from_millis(500);
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Caller);
    let windows = [(600, 4_096), (5_000, 300), (90, 64), (300, 300)].map(|(limit, entries)| {
        let length = Span::from_secs(10);
        let window = Window::new(limit, length, entries).unwrap().with_lead(LEAD);
        let spec = PenaltySpec { base: Span::from_millis(20), cap: Span::from_millis(80), ..PenaltySpec::default() };
        Limit::new(LimitKind::Window(window)).with_penalty(Penalty::new(spec, length).unwrap())
    });
    let limits = Arc::new(Limits::new(windows.to_vec()).unwrap());
    let mut random = RandomSource::from_seed(random::run_seed());
    let key = Key::new(1, random.next_u64());
    for (limit, plan) in limits.iter() {
        let capacity = plan.kind().capacity();
        let pair = Pair::open(&stores, &limits);
        let mut now = Time::from_secs(1_700_000_000);
        let mut sent = Vec::new();
        for _ in 0..random::case_count(4_000, 20_000) {
            now = now + Span::from_micros(random.below(if capacity > 1_000 { 4_000 } else { 12_000 }));
            let now = match random.below(400) {
                0 => now - Span::from_micros(random.below(90_000)),
                1 => now - Span::from_micros(random.below(2_000_000)),
                _ => now,
            };
            let (verb, cost, at) = match (random.below(10), sent.pop()) {
                (0..=1, Some((cost, at))) => (Verb::Settle, cost, at),
                (2, Some((cost, at))) => (Verb::Refund, cost, at),
                (3, _) => (
                    random.pick(&[Verb::Peek, Verb::Refund, Verb::Debit, Verb::Debit]),
                    random.between(1, 4),
                    Time::ZERO,
                ),
                _ => (Verb::Take, random.pick(&[1, 1, 1, 2, 7, capacity / 40]), Time::ZERO),
            };
            let outcomes = pair.ask(&one(limit, verb, key, cost).with_lead(LEAD).with_counted_at(at), now);
            if verb == Verb::Take && !outcomes.list()[0].admission.refuses() {
                sent.insert(random.below(sent.len() as u64 + 1) as usize, (cost, outcomes.now() + LEAD));
                sent.truncate(400);
            }
        }
        // All of it has expired.
        pair.ask(&one(limit, Verb::Peek, key, capacity), now + Span::from_secs(3_600));
    }
}

/// Intervals up to the longest that can be shared, by factors and shares that leave something to be rounded.
#[test]
fn shared_paces_agree_with_the_reference_store() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Caller);
    let mut random = RandomSource::from_seed(random::run_seed());
    let key = Key::new(1, random.next_u64());
    let mut longest = 0;
    for _ in 0..random::case_count(60, 600) {
        let up = random.between(1_001, 3_000) as u32;
        let most = MAX_SHARED_STEP.as_nanos() as u64 / 1_000 * 1_000 / u64::from(up) * 1_000;
        let initial = most >> random.below(50);
        let spec = PacerSpec {
            initial: Duration::from_nanos(initial.max(1)),
            max: Duration::from_nanos(most),
            growth: PacerGrowth::Exponential { up, down: random.between(1, 999) as u16 },
            randomization: random.between(0, 1_000) as u16,
            max_randomization: Duration::from_nanos(random.pick(&[u64::MAX, 1 << 40, 1 << 20])),
            successes: random.between(1, 2) as u32,
            mode: random.pick(&[PacerMode::Steady, PacerMode::Classic]),
        };
        let limits = Arc::new(Limits::with_limit(Limit::new(LimitKind::Pace(SharedPacerRules::new(spec).unwrap()))));
        let pair = Pair::open(&stores, &limits);
        let now = Time::from_secs(1_700_000_000);
        for _ in 0..100 {
            let (failed, draw) = (random.chance(60), random.next_u64() as u32);
            let outcomes = pair.ask(&one(LimitId::FIRST, Verb::Pace { failed, draw }, key, 0), now);
            longest = longest.max(outcomes.list()[0].used);
        }
    }
    assert!(longest > 1 << 50, "{longest}");
}

fn one(limit: LimitId, verb: Verb, key: Key, cost: u64) -> Batch {
    let mut batch = Batch::new(9);
    batch.push(Op::new(limit, verb, key, cost)).unwrap();
    batch
}
