//! The adaptive limit against a small queueing model: workers, a queue, and clients that always have another call.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tidegate_core::{AdaptiveLimit, AdaptiveLimitError, AdaptiveLimitSpec, Class, Span, Time};
use tidegate_testkit::fixtures::test_time;
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

/// A provider with some workers and one queue before them, and clients that always have `demand` calls.
struct World {
    inflight: AdaptiveLimit,
    workers: BinaryHeap<Reverse<Time>>,
    service: Service,
    demand: u32,
    now: Time,
    in_flight: u32,
    replies: BinaryHeap<Reverse<(Time, Time, u32)>>,
}

#[derive(Clone)]
enum Service {
    Always(Span),
    /// Exponentially distributed with this mean.
    Random(Span, RandomSource),
    /// A base time, and an additional time for each call in flight.
    Slower(Span, Span),
}

impl Service {
    fn draw(&mut self, in_flight: u32) -> Span {
        match self {
            Self::Always(span) => *span,
            Self::Slower(base, more) => *base + more.times(u64::from(in_flight)),
            Self::Random(mean, random) => {
                let uniform = (random.below(1 << 53) + 1) as f64 / (1_u64 << 53) as f64;
                Span::from_micros((mean.as_micros() as f64 * -uniform.ln()) as u64)
            }
        }
    }
}

/// The observations of a run.
#[derive(Debug)]
struct Seen {
    replies: u32,
    longest: Span,
    caps: Vec<u32>,
}

impl Seen {
    fn lowest(&self) -> u32 {
        *self.caps.iter().min().expect("a reply")
    }

    fn highest(&self) -> u32 {
        *self.caps.iter().max().expect("a reply")
    }
}

impl World {
    fn new(spec: AdaptiveLimitSpec, workers: usize, service: Service, demand: u32) -> Self {
        Self {
            inflight: AdaptiveLimit::new(spec).expect("a spec that makes sense"),
            workers: (0..workers).map(|_| Reverse(test_time(0))).collect(),
            service,
            demand,
            now: test_time(0),
            in_flight: 0,
            replies: BinaryHeap::new(),
        }
    }

    /// Simulates `secs` seconds. `class` returns the class of a call by its duration.
    fn run_as(&mut self, secs: u64, mut class: impl FnMut(Span) -> Class) -> Seen {
        let end = self.now + Span::from_secs(secs);
        let mut seen = Seen { replies: 0, longest: Span::ZERO, caps: Vec::new() };
        loop {
            while self.in_flight < self.inflight.limit().min(self.demand) {
                let Reverse(free) = self.workers.pop().expect("a worker");
                self.in_flight += 1;
                let reply = self.now.max(free) + self.service.draw(self.in_flight);
                self.workers.push(Reverse(reply));
                self.replies.push(Reverse((reply, self.now, self.in_flight)));
            }
            let Some(&Reverse((reply, sent, in_flight))) = self.replies.peek() else { panic!("nothing in flight") };
            if reply > end {
                self.now = end;
                return seen;
            }
            self.replies.pop();
            self.now = reply;
            self.in_flight -= 1;
            let round_trip = reply.since(sent);
            self.inflight.sample(round_trip, in_flight, class(round_trip), reply);
            seen.replies += 1;
            seen.longest = seen.longest.max(round_trip);
            seen.caps.push(self.inflight.limit());
        }
    }

    fn run(&mut self, secs: u64) -> Seen {
        self.run_as(secs, |_| Class::Success)
    }
}

const FIFTY: Span = Span::from_millis(50);

#[test]
fn the_limit_finds_twenty_workers() {
    for initial in [4, 20, 100, 1_000] {
        let spec = AdaptiveLimitSpec { initial, ..AdaptiveLimitSpec::default() };
        let mut world = World::new(spec, 20, Service::Always(FIFTY), u32::MAX);
        world.run(240);
        let seen = world.run(600);
        // While it drains, the limit is half of itself, for some tenths of a second every ten seconds.
        let mut caps = seen.caps.clone();
        caps.sort_unstable();
        assert!((15..=60).contains(&caps[caps.len() / 20]) && seen.highest() <= 60, "from {initial}: {caps:?}");
        assert!(seen.replies >= 400 * 600 * 9 / 10, "from {initial}: {} replies", seen.replies);
        assert!(seen.longest <= FIFTY.times(2), "from {initial}: {}", seen.longest);
    }
}

#[test]
fn the_limit_finds_workers_despite_random_latencies() {
    for (workers, millis) in [(1, 50), (5, 50), (20, 2), (20, 50), (20, 500), (200, 100)] {
        for seed in 0..case_count(1, 20) {
            let service = Service::Random(Span::from_millis(millis), RandomSource::from_seed(u64::from(seed)));
            let mut world = World::new(AdaptiveLimitSpec::default(), workers, service, u32::MAX);
            // Measurements happen by time, twice a minute, however few replies there are. One worker behind the first
            // limit of 20 has a queue that takes six measurements to remove.
            world.run(240.max(millis * 2));
            let seen = world.run(millis * 3);
            let share = f64::from(seen.replies) / (workers as f64 * 3_000.0);
            assert!(share >= 0.9, "{workers} × {millis} ms, seed {seed}: {share}");
            // The mean of 32 random times sometimes deviates by a fifth, and so does the value that it is compared
            // with. A queue that delays each call by at most 5 ms has no effect, so that many calls are allowed. The last
            // raise, by a third, may begin just below what has an effect.
            let unnoticed = workers as u32 * 5 / millis.clamp(1, 5) as u32;
            let most = unnoticed * 5 / 2 + 8;
            assert!(seen.highest() <= most, "{workers} × {millis} ms, seed {seed}: {}", seen.highest());
        }
    }
}

/// Each call slows all others down, but more calls still give more throughput, up to a point. 1 s plus 10 ms per call
/// in flight gives 40 per second with 67 calls, 50 with 100, 60 with 150, and 67 with 200. A reply then takes three
/// times as long.
#[test]
fn a_provider_slowing_under_load_is_used_well() {
    let service = Service::Slower(Span::from_secs(1), Span::from_millis(10));
    for initial in [4, 20, 400] {
        let spec = AdaptiveLimitSpec { initial, ..AdaptiveLimitSpec::default() };
        let mut world = World::new(spec, 2_000, service.clone(), u32::MAX);
        world.run(300);
        let seen = world.run(300);
        assert!(seen.replies >= 45 * 300, "from {initial}: {} replies", seen.replies);
        assert!(seen.highest() <= 200, "from {initial}: {}", seen.highest());
    }
    let mut world = World::new(AdaptiveLimitSpec::default(), 2_000, service, u32::MAX);
    world.run(10);
    let seen = world.run(10);
    assert!((100..=160).contains(&seen.highest()), "the start is quick: {}", seen.highest());
}

/// A provider that is 1.5 times as slow is late for any limit. Lowering the limit doesn't help, and must end before the
/// minimum.
#[test]
fn slight_slowness_never_shrinks_to_the_minimum() {
    let mut world = World::new(AdaptiveLimitSpec::default(), 20, Service::Always(FIFTY), u32::MAX);
    world.run(120);
    world.service = Service::Always(Span::from_millis(75));
    let seen = world.run(240);
    assert!(seen.lowest() > 4, "{}", seen.lowest());
    assert!((15..=60).contains(&world.inflight.limit()), "{}", world.inflight.limit());
}

#[test]
fn slowness_shrinks_the_limit_until_learned() {
    let mut world = World::new(AdaptiveLimitSpec::default(), 20, Service::Always(FIFTY), u32::MAX);
    world.run(125);
    let before = world.inflight.limit();
    world.service = Service::Always(FIFTY.times(10));
    let seen = world.run(20);
    assert!(seen.lowest() <= before / 2, "{before} to {}", seen.lowest());
    assert!(seen.highest() <= before, "{before} to {}", seen.highest());
    world.run(220);
    let seen = world.run(240);
    assert!(seen.replies >= 40 * 240 * 9 / 10, "{} replies", seen.replies);
    assert!((15..=60).contains(&seen.highest()), "{}", seen.highest());
    world.service = Service::Always(FIFTY);
    world.run(120);
    let seen = world.run(120);
    assert!(seen.replies >= 400 * 120 * 9 / 10, "{} replies", seen.replies);
    assert!(seen.longest <= FIFTY.times(2), "{}", seen.longest);
}

#[test]
fn much_shorter_round_trips_count_at_once() {
    for (round_trip, expected) in [(90, 100), (76, 100), (75, 75), (40, 40)] {
        let mut world = World::new(AdaptiveLimitSpec::default(), 20, Service::Always(FIFTY.times(2)), u32::MAX);
        world.run(60);
        let inflight = &mut world.inflight;
        for turn in 0..200 {
            let round_trip = if turn < 100 { 100 } else { round_trip };
            let now = world.now + Span::from_millis(10 * turn);
            inflight.sample(Span::from_millis(round_trip), inflight.limit(), Class::Success, now);
        }
        assert_eq!(inflight.unloaded_round_trip(), Some(Span::from_millis(expected)), "{round_trip} ms");
    }
}

#[test]
fn without_queueing_the_limit_grows_until_unused() {
    let mut world = World::new(AdaptiveLimitSpec::default(), 2_000, Service::Always(FIFTY), 300);
    world.run(20);
    assert!((300..=700).contains(&world.inflight.limit()), "{}", world.inflight.limit());
    let before = world.inflight.limit();
    let seen = world.run(60);
    assert_eq!((seen.lowest(), seen.highest()), (before, before), "nothing binds any more");
    world.demand = u32::MAX;
    assert_eq!(world.run(10).highest(), 1_000, "up to the largest");
}

#[test]
fn one_slow_reply_changes_nothing() {
    let mut calm = World::new(AdaptiveLimitSpec::default(), 20, Service::Always(FIFTY), 15);
    calm.run(120);
    let mut inflight = calm.inflight.clone();
    let before = inflight.limit();
    for turn in 0..10_000_u64 {
        let round_trip = if turn % 32 == 7 { Span::from_secs(60) } else { FIFTY };
        // It was sent when the previous call was answered, long enough ago for each to be sent since.
        let now = calm.now + Span::from_secs(70 * (turn + 1));
        inflight.sample(round_trip, before, Class::Success, now);
        assert!(inflight.limit() >= before / 2, "not below a drain's half");
        if turn % 320 == 319 {
            inflight.sample(FIFTY, before, Class::Cancelled, now);
        }
    }
    assert!(inflight.limit() >= before, "{before} to {}", inflight.limit());
}

#[test]
fn only_frequent_failures_lower_the_limit() {
    for class in [Class::Throttled, Class::Transient] {
        for (every, lowers) in [(1, true), (2, true), (4, false), (12, false), (33, false)] {
            let spec = AdaptiveLimitSpec { max: 10_000, ..AdaptiveLimitSpec::default() };
            let mut world = World::new(spec, 20_000, Service::Always(FIFTY), 200);
            world.run(5);
            world.demand = u32::MAX;
            let before = world.inflight.limit();
            let mut calls = 0;
            let seen = world.run_as(5, |_| {
                calls += 1;
                if calls % every == 0 { class } else { Class::Success }
            });
            let (lowest, grows) = (seen.lowest(), seen.highest() > before * 2);
            assert_eq!(lowest < before / 2, lowers, "{class:?}, one in {every}: {before} to {lowest}");
            assert_eq!(grows, every > 8, "{class:?}, one in {every}: {before} to {}", seen.highest());
        }
    }
    let mut world = World::new(AdaptiveLimitSpec::default(), 20, Service::Always(FIFTY), u32::MAX);
    world.run_as(30, |_| Class::Transient);
    assert!([2, 4].contains(&world.inflight.limit()), "the smallest, or a drain's half of it");
    world.run(65);
    assert!(world.inflight.limit() >= 15, "{}", world.inflight.limit());
    for class in [Class::Cancelled, Class::Auth] {
        let mut world = World::new(AdaptiveLimitSpec::default(), 20, Service::Always(FIFTY), u32::MAX);
        let seen = world.run_as(30, |_| class);
        assert_eq!((seen.lowest(), seen.highest(), world.inflight.unloaded_round_trip()), (20, 20, None), "{class:?}");
    }
}

/// Late replies to calls that were sent under another limit say nothing about this one.
#[test]
fn replies_right_after_an_adjustment_are_ignored() {
    let mut inflight = AdaptiveLimit::new(AdaptiveLimitSpec::default()).unwrap();
    for _ in 0..32 {
        inflight.sample(FIFTY, 1, Class::Success, test_time(1_000));
    }
    for millis in [0, 1, 50, 99] {
        for _ in 0..100 {
            inflight.sample(FIFTY, 20, Class::Transient, test_time(1_000 + millis));
        }
    }
    assert_eq!(inflight.limit(), 20);
    for _ in 0..32 {
        inflight.sample(FIFTY, 20, Class::Transient, test_time(1_100));
    }
    assert_eq!(inflight.limit(), 12, "twice as long as usual: 20 ÷ 2, and a fifth more");
}

/// If only calls sent since the last evaluation counted, slow calls would never count.
#[test]
fn timed_out_calls_count_regardless_of_duration() {
    let mut inflight = AdaptiveLimit::new(AdaptiveLimitSpec::default()).unwrap();
    for turn in 0..3_000 {
        let (round_trip, class) =
            if turn % 2 == 0 { (FIFTY, Class::Success) } else { (Span::from_secs(30), Class::Transient) };
        inflight.sample(round_trip, inflight.limit(), class, test_time(40_000 + turn * 10));
    }
    assert_eq!(inflight.limit(), 4);
}

#[test]
fn very_short_queues_do_not_lower_the_limit() {
    for (workers, micros, demand) in [(20, 1_000, 80), (2, 50, 100), (1, 20, 200)] {
        let mut world =
            World::new(AdaptiveLimitSpec::default(), workers, Service::Always(Span::from_micros(micros)), demand);
        world.run(1);
        let seen = world.run(1);
        assert!(seen.lowest() >= demand, "{workers} × {micros} µs: {:?}", world.inflight);
        // A share of failures still counts as soon as the limit has an effect.
        world.demand = u32::MAX;
        let mut turn = 0;
        world.run_as(2, |_| {
            turn += 1;
            if turn % 2 == 0 { Class::Success } else { Class::Throttled }
        });
        assert!([2, 4].contains(&world.inflight.limit()), "{workers} × {micros} µs: {:?}", world.inflight);
    }
    // A longer queue has an effect.
    let mut world = World::new(AdaptiveLimitSpec::default(), 20, Service::Always(Span::from_millis(1)), 400);
    world.run(60);
    let seen = world.run(60);
    assert!(seen.highest() <= 20 * 5 * 3 / 2 && seen.replies >= 20_000 * 60 * 9 / 10, "{seen:?}");
}

#[test]
fn adjustments_continue_after_a_clock_step_back() {
    let spec = AdaptiveLimitSpec { min: 4, max: 40, initial: 40 };
    let mut inflight = AdaptiveLimit::new(spec).unwrap();
    let mut lessons = |start: Time| {
        let mut lessons = 0;
        for turn in 0..12_000 {
            let before = inflight.limit();
            inflight.sample(FIFTY, before, Class::Success, start + Span::from_millis(turn * 10));
            lessons += u32::from(inflight.limit() < before);
        }
        lessons
    };
    let ahead = test_time(0) + Span::from_secs(365 * 86_400);
    // Two minutes each. Later, the round trip without load must be measured at once.
    assert_eq!((lessons(ahead), lessons(test_time(0))), (11, 12));
}

/// Clients with replies at different times, of which one starts in the middle of an interval.
#[test]
fn all_limits_drain_at_the_same_moments() {
    for (starts_at, every) in [(0, 10), (3_333, 13), (7_100, 17)] {
        let mut inflight = AdaptiveLimit::new(AdaptiveLimitSpec::default()).unwrap();
        inflight.resume((40, FIFTY), test_time(starts_at));
        let mut drains = 0;
        for turn in 0..60_000 / every {
            let (before, now) = (inflight.limit(), test_time(starts_at + turn * every));
            inflight.sample(FIFTY, before, Class::Success, now);
            if inflight.limit() < before {
                assert!(now.as_micros() % 10_000_000 < every * 1000, "{starts_at}: at {now:?}");
                drains += 1;
            }
        }
        assert!((5..=6).contains(&drains), "{starts_at}: {drains}");
    }
}

/// A limit without any effect isn't halved, however old the measurement is.
#[test]
fn a_limit_that_is_not_reached_is_not_drained() {
    let mut inflight = AdaptiveLimit::new(AdaptiveLimitSpec::default()).unwrap();
    inflight.resume((40, FIFTY), test_time(0));
    for turn in 0..12_000 {
        inflight.sample(FIFTY, 5, Class::Success, test_time(turn * 10));
        assert_eq!(inflight.limit(), 40);
    }
}

#[test]
fn invalid_specs_are_rejected() {
    let spec = |min, initial, max| AdaptiveLimit::new(AdaptiveLimitSpec { min, initial, max }).err();
    assert_eq!(spec(0, 1, 2), Some(AdaptiveLimitError::ZeroMin));
    assert_eq!(spec(2, 1, 3), Some(AdaptiveLimitError::OutOfOrder));
    assert_eq!(spec(2, 4, 3), Some(AdaptiveLimitError::OutOfOrder));
    assert_eq!(spec(3, 3, 3), None);
    assert_eq!(spec(1, 1, u32::MAX), None);
}

/// For all inputs and clocks, the limit stays within its bounds, and a recovered provider gets its limit back.
#[test]
fn the_limit_keeps_its_bounds_and_recovers() {
    property::check(case_count(100, 4_000), 2_000, |mut random| {
        let min = random.between(1, 8) as u32;
        let max = min + random.pick(&[0, 1, 5, 100, 10_000]);
        let initial = random.between(u64::from(min), u64::from(max)) as u32;
        let spec = AdaptiveLimitSpec { min, max, initial };
        let mut inflight = AdaptiveLimit::new(spec).map_err(|error| error.to_string())?;
        let mut now = test_time(0);
        let classes = [Class::Success, Class::Transient, Class::Throttled, Class::Cancelled, Class::Permanent];
        while !random.is_exhausted() {
            let round_trip = match random.below(16) {
                0 => Span::ZERO,
                1 => Span::MAX,
                2 => Span::from_micros(1),
                _ => Span::from_micros(random.below(1_000_000)),
            };
            now = match random.below(32) {
                0 => now - Span::from_micros(random.below(1 << 40)),
                1 => now + Span::from_micros(random.below(1 << 40)),
                _ => now + Span::from_micros(random.below(100_000)),
            };
            let class = if random.chance(70) { Class::Success } else { random.pick(&classes) };
            let in_flight = if random.chance(2) { u32::MAX } else { random.between(0, u64::from(max)) as u32 };
            inflight.sample(round_trip, in_flight, class, now);
            if !((min / 2).max(1)..=max).contains(&inflight.limit()) {
                return Err(format!("{} is not within {spec:?}", inflight.limit()));
            }
        }
        // A window takes more than a second: the round trip without load is measured again within some tens of windows.
        for _ in 0..20_000 {
            now = now + FIFTY;
            inflight.sample(FIFTY, inflight.limit(), Class::Success, now);
        }
        if inflight.limit() < max / 2 { Err(format!("{} of {max}", inflight.limit())) } else { Ok(()) }
    });
}
