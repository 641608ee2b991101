//! Tests of the breaker and its shared form against a simple model, with clocks that step back, and in threads.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tidegate_core::breaker::{BreakerPermit, BreakerState, ExclusiveAccess, RampStep, SlowCalls};
use tidegate_core::{Backoff, Breaker, BreakerRefusal, BreakerSpec, Class, Jitter, SharedBreaker, Span, Time};
use tidegate_testkit::fixtures::test_time;
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

/// The maximum lag of `now` for an overtaken call.
const OVERTAKEN: Span = Span::from_millis(100);
const CLASSES: [Class; 9] = Class::ALL;

/// A breaker that keeps all calls and counts them again each time.
struct Model {
    spec: BreakerSpec,
    phase: Phase,
    generation: u64,
    failures: u32,
    failed_at: Time,
    openings: u32,
    /// Calls as (tenth, failed, slow).
    log: Vec<(u64, bool, bool)>,
    newest: u64,
    probes: u64,
}

enum Phase {
    Closed,
    Ramping { ends: Time, offered: u64, passed: u64 },
    Open { until: Time, length: Span },
    HalfOpen { successes: u32, out: Vec<(u64, Time)> },
}

/// The data of a call of the model: its generation, and its number if it is a probe.
#[derive(Clone, Copy)]
struct Held {
    generation: u64,
    probe: Option<u64>,
}

fn brought_back(end: Time, length: Span, now: Time) -> Time {
    if end > now + length + OVERTAKEN { now + length } else { end }
}

impl Model {
    fn new(spec: BreakerSpec) -> Self {
        Self {
            spec,
            phase: Phase::Closed,
            generation: 0,
            failures: 0,
            failed_at: Time::ZERO,
            openings: 0,
            log: Vec::new(),
            newest: 0,
            probes: 0,
        }
    }

    fn ramp_length(&self) -> Span {
        self.spec.ramp.iter().fold(Span::ZERO, |sum, step| sum + step.length)
    }

    fn share(&self, ends: Time, now: Time) -> u64 {
        let mut end = ends - self.ramp_length();
        for step in &self.spec.ramp {
            end = end + step.length;
            if now < end {
                return u64::from(step.share);
            }
        }
        1_000
    }

    fn pass_time(&mut self, now: Time) {
        let ramp_length = self.ramp_length();
        match &mut self.phase {
            Phase::Ramping { ends, .. } => {
                *ends = brought_back(*ends, ramp_length, now);
                if *ends <= now {
                    self.phase = Phase::Closed;
                    self.openings = 0;
                }
            }
            Phase::Open { until, length } => {
                *until = brought_back(*until, *length, now);
                if *until <= now {
                    self.phase = Phase::HalfOpen { successes: 0, out: Vec::new() };
                }
            }
            Phase::HalfOpen { out, .. } => {
                for (_, end) in out.iter_mut() {
                    *end = brought_back(*end, self.spec.probe_lease, now);
                }
                out.retain(|(_, end)| *end > now);
            }
            Phase::Closed => {}
        }
    }

    fn take(&mut self, now: Time) -> Result<Held, BreakerRefusal> {
        self.pass_time(now);
        let held = Held { generation: self.generation, probe: None };
        let refusal = |state, end: Time| BreakerRefusal { state, failures: self.failures, reset_in: end.since(now) };
        let share = if let Phase::Ramping { ends, .. } = self.phase { self.share(ends, now) } else { 0 };
        match &mut self.phase {
            Phase::Closed => Ok(held),
            Phase::Open { until, .. } => Err(refusal(BreakerState::Open, *until)),
            Phase::Ramping { ends, offered, passed } => {
                *offered += share;
                if *offered / 1_000 == *passed {
                    return Err(refusal(BreakerState::Ramping, *ends));
                }
                *passed += 1;
                Ok(held)
            }
            Phase::HalfOpen { out, .. } => {
                if out.len() == self.spec.probes as usize {
                    let first = out.iter().map(|(_, end)| *end).min().expect("all of them");
                    return Err(refusal(BreakerState::HalfOpen, first));
                }
                self.probes += 1;
                out.push((self.probes, now + self.spec.probe_lease));
                Ok(Held { probe: Some(self.probes), ..held })
            }
        }
    }

    fn give_back(&mut self, held: Held) {
        if let Phase::HalfOpen { out, .. } = &mut self.phase {
            out.retain(|(number, _)| Some(*number) != held.probe);
        }
    }

    fn report(&mut self, held: Held, class: Class, elapsed: Span, now: Time) {
        if held.generation != self.generation {
            return;
        }
        self.give_back(held);
        if [Class::Throttled, Class::Quota, Class::Cancelled].contains(&class) {
            return;
        }
        self.pass_time(now);
        let failed = [Class::Transient, Class::Unavailable, Class::Unknown].contains(&class);
        let slow = self.spec.slow_calls.is_some_and(|slow| slow.threshold < elapsed);
        let in_burst = self.failures > 0 && now - elapsed < self.failed_at && self.failed_at <= now + OVERTAKEN;
        if !failed {
            self.failures = 0;
        } else if !in_burst {
            (self.failures, self.failed_at) = (self.failures + 1, now);
        }
        match &mut self.phase {
            Phase::HalfOpen { successes, .. } => {
                if failed || slow {
                    self.open(now);
                } else {
                    *successes += 1;
                    if *successes == self.spec.successes {
                        self.close(now);
                    }
                }
            }
            _ => {
                self.record(failed, slow, now);
                let calls = self.log.len() as u64;
                let above = |count: usize, rate: u16| count as u64 * 1_000 >= u64::from(rate) * calls;
                let failures = self.log.iter().filter(|call| call.1).count();
                let slow = self.log.iter().filter(|call| call.2).count();
                let by_rate = calls >= u64::from(self.spec.min_calls)
                    && (self.spec.failure_rate.is_some_and(|rate| above(failures, rate))
                        || self.spec.slow_calls.is_some_and(|calls| above(slow, calls.rate)));
                if by_rate || self.spec.failures.is_some_and(|most| self.failures >= most) {
                    self.open(now);
                }
            }
        }
    }

    fn record(&mut self, failed: bool, slow: bool, now: Time) {
        if self.spec.failure_rate.is_none() && self.spec.slow_calls.is_none() {
            return;
        }
        let tenth = self.spec.window.as_micros() / 10;
        let present = now.as_micros() / tenth;
        if present < self.newest && self.newest * tenth > (now + OVERTAKEN).as_micros() {
            let back = self.newest - present;
            self.log.iter_mut().for_each(|call| call.0 -= back);
            self.newest = present;
        }
        self.newest = self.newest.max(present);
        self.log.push((self.newest, failed, slow));
        self.log.retain(|call| call.0 + 10 > self.newest);
    }

    fn open(&mut self, now: Time) {
        let in_window = self.log.iter().filter(|call| call.1).count() as u32;
        self.failures = self.failures.max(in_window);
        self.log.clear();
        self.generation += 1;
        self.openings += 1;
        let length = self.spec.open.base_wait(self.openings);
        self.phase = Phase::Open { until: now + length, length };
    }

    fn close(&mut self, now: Time) {
        self.generation += 1;
        self.failures = 0;
        let length = self.ramp_length();
        self.phase = match self.spec.ramp.first() {
            Some(first) => Phase::Ramping { ends: now + length, offered: u64::from(1_000 - first.share), passed: 0 },
            None => {
                self.openings = 0;
                Phase::Closed
            }
        };
    }

    fn probes_out(&self) -> usize {
        if let Phase::HalfOpen { out, .. } = &self.phase { out.len() } else { 0 }
    }
}

struct Guarded {
    breaker: Mutex<Breaker>,
    locked: Arc<AtomicU32>,
}

impl ExclusiveAccess<Breaker> for Guarded {
    fn with<R>(&self, work: impl FnOnce(&mut Breaker) -> R) -> R {
        self.locked.fetch_add(1, Ordering::Relaxed);
        work(&mut self.breaker.lock().expect("no panic"))
    }
}

/// A shared breaker, and a counter of its lock acquisitions.
fn shared(breaker: Breaker) -> (SharedBreaker<Guarded>, Arc<AtomicU32>) {
    let locked = Arc::new(AtomicU32::new(0));
    (SharedBreaker::new(Guarded { breaker: Mutex::new(breaker), locked: Arc::clone(&locked) }), locked)
}

fn any_spec(random: &mut RandomSource) -> BreakerSpec {
    let rate = |random: &mut RandomSource| random.pick(&[1, 100, 500, 667, 1_000]);
    let modes = random.between(1, 7);
    let steps = random.below(4);
    let growth = Backoff::exponential(Span::from_secs(10), Span::from_secs(35)).with_jitter(Jitter::None);
    let flat = Backoff { cap: growth.base, ..growth };
    BreakerSpec {
        failures: (modes & 1 > 0).then(|| random.between(1, 6) as u32),
        failure_rate: (modes & 2 > 0).then(|| rate(random)),
        slow_calls: (modes & 4 > 0).then(|| SlowCalls { threshold: Span::from_millis(500), rate: rate(random) }),
        window: Span::from_secs(10),
        min_calls: random.between(1, 8) as u32,
        open: random.pick(&[growth, flat]),
        probes: random.between(1, 3) as u32,
        probe_lease: Span::from_secs(5),
        successes: random.between(1, 3) as u32,
        ramp: (0..steps)
            .map(|_| RampStep {
                share: random.pick(&[1, 100, 333, 999, 1_000]),
                length: Span::from_millis(random.between(1, 4_000)),
            })
            .collect(),
    }
}

fn pass_time(random: &mut RandomSource, now: Time, told: &mut Option<Time>) -> Time {
    match random.below(40) {
        0..=15 => now,
        16..=23 => now + Span::from_micros(random.below(1_500_000)),
        24..=31 => told.take().unwrap_or(now),
        32..=34 => told.take().unwrap_or(now) - Span::from_micros(1),
        35 => now + Span::from_micros(random.below(60_000_000)),
        36 => now - Span::from_micros(random.below(100_000)),
        37 => now - Span::from_micros(random.below(20_000_000)),
        38 => now - Span::from_micros(random.below(1 << 40)),
        _ => now + Span::from_micros(1_000_000 - now.as_micros() % 1_000_000),
    }
}

#[test]
fn the_breaker_agrees_with_the_model() {
    property::check(case_count(3_000, 60_000), 600, |mut random| {
        let spec = any_spec(&mut random);
        let mut breaker = Breaker::new(spec.clone()).map_err(|error| error.to_string())?;
        let (shared, _) = shared(breaker.clone());
        let mut model = Model::new(spec.clone());
        let mut rng = SmallRng::seed_from_u64(1);
        let mut out: Vec<(BreakerPermit, BreakerPermit, Held)> = Vec::new();
        let mut now = test_time(0);
        let mut told = None;
        let fair = random.pick(&[10, 50, 90]);
        while !random.is_exhausted() {
            now = pass_time(&mut random, now, &mut told);
            let before = format!("{breaker:?}");
            if random.chance(50) || out.is_empty() {
                let peeked = breaker.peek(now);
                if shared.peek(now) != peeked || format!("{breaker:?}") != before {
                    return Err(format!("a peek of {peeked:?} changed something"));
                }
                let result = breaker.take(now);
                let (theirs, expected) = (shared.take(now), model.take(now));
                match (result, theirs, expected) {
                    (Ok(permit), Ok(theirs), Ok(held)) => {
                        if peeked.is_err() {
                            return Err(format!("taken where a peek said {peeked:?}"));
                        }
                        if format!("{permit:?}") != format!("{theirs:?}") || permit.generation() != held.generation {
                            return Err(format!("{permit:?}, shared {theirs:?}"));
                        }
                        out.push((permit, theirs, held));
                    }
                    (Err(refusal), Err(theirs), Err(expected)) => {
                        if refusal != expected || refusal != theirs {
                            return Err(format!("{refusal:?}, shared {theirs:?}, expected {expected:?}"));
                        }
                        if peeked.is_err() && peeked != Err(refusal) {
                            return Err(format!("{peeked:?} peeked, {refusal:?} told"));
                        }
                        check_wait(&breaker, &refusal, now)?;
                        told = Some(now + refusal.reset_in);
                    }
                    (result, theirs, expected) => {
                        return Err(format!("{result:?}, shared {theirs:?}, expected {:?}", expected.err()));
                    }
                }
            } else {
                let (permit, theirs, held) = out.swap_remove(random.below(out.len() as u64) as usize);
                let stale = permit.generation() < breaker.generation();
                if random.chance(10) {
                    if held.generation == model.generation {
                        model.give_back(held);
                    }
                    breaker.give_back(permit);
                    shared.give_back(theirs);
                } else if random.chance(95) {
                    let class = if random.chance(fair) { Class::Success } else { random.pick(&CLASSES) };
                    let elapsed = Span::from_millis(random.pick(&[10, 500, 501, 60_000]));
                    breaker.report(permit, class, elapsed, now, &mut rng);
                    shared.report(theirs, class, elapsed, now, &mut rng);
                    model.report(held, class, elapsed, now);
                }
                if stale && format!("{breaker:?}") != before {
                    return Err("the report of an older generation changed something".into());
                }
            }
            if shared.with(|theirs| format!("{theirs:?}")) != format!("{breaker:?}") {
                return Err(format!("the shared form differs from {breaker:?}"));
            }
            if (breaker.generation(), breaker.failures()) != (model.generation, model.failures) {
                return Err(format!("{breaker:?} against generation {}, {}", model.generation, model.failures));
            }
            if model.probes_out() > spec.probes as usize {
                return Err(format!("{} probes out", model.probes_out()));
            }
        }
        Ok(())
    });
}

/// Checks that the wait of a refusal is within its bound and exact: a call passes then, and not a microsecond earlier.
fn check_wait(breaker: &Breaker, refusal: &BreakerRefusal, now: Time) -> Result<(), String> {
    let spec = breaker.spec();
    let longest = match refusal.state {
        BreakerState::Open => spec.open.cap,
        BreakerState::HalfOpen => spec.probe_lease,
        BreakerState::Ramping => spec.ramp.iter().fold(Span::ZERO, |sum, step| sum + step.length),
        BreakerState::Closed => return Err("refused by a closed breaker".into()),
    };
    if refusal.reset_in > longest + OVERTAKEN {
        return Err(format!("{refusal:?} is longer than {longest}"));
    }
    let due = now + refusal.reset_in;
    if breaker.clone().take(due).is_err() {
        return Err(format!("{refusal:?} is too short"));
    }
    let early = due - Span::from_micros(1);
    if refusal.state != BreakerState::Ramping && (early < now || breaker.clone().take(early).is_ok()) {
        return Err(format!("{refusal:?} is too long"));
    }
    Ok(())
}

fn answer(breaker: &SharedBreaker<Guarded>, class: Class) {
    let permit = breaker.take(test_time(0)).expect("closed");
    breaker.report(permit, class, Span::ZERO, test_time(0), &mut SmallRng::seed_from_u64(1));
}

#[test]
fn a_clean_breaker_takes_no_lock() {
    let (breaker, locked) = shared(Breaker::new(BreakerSpec::default()).unwrap());
    let locks = || locked.swap(0, Ordering::Relaxed);
    let at_start = locks();
    assert_eq!(at_start, 1, "to see what it is given");
    for class in CLASSES.into_iter().filter(|class| !class.is_failure()) {
        answer(&breaker, class);
        assert_eq!(breaker.peek(test_time(0)), Ok(()));
        breaker.give_back(breaker.take(test_time(0)).unwrap());
    }
    assert_eq!(locks(), 0);
    answer(&breaker, Class::Transient);
    assert_eq!(locks(), 1);
    answer(&breaker, Class::Success);
    assert_eq!(locks(), 2, "a failure is remembered, until the success");
    answer(&breaker, Class::Success);
    assert_eq!(locks(), 0);

    let spec = BreakerSpec { failure_rate: Some(500), ..BreakerSpec::default() };
    let (rated, locked) = shared(Breaker::new(spec).unwrap());
    answer(&rated, Class::Success);
    assert_eq!(locked.load(Ordering::Relaxed), 3, "every call counts");
}

/// A thread that learns of the opening finds the breaker open, and one of many threads gets the probe.
#[test]
fn threads_agree_on_opening_and_single_probe() {
    const THREADS: usize = 4;
    for _ in 0..case_count(300, 10_000) {
        let spec = BreakerSpec { failures: Some(THREADS as u32), ..BreakerSpec::default() };
        let (breaker, _) = shared(Breaker::new(spec).unwrap());
        let barrier = Barrier::new(THREADS);
        let work = || {
            for _ in 0..50 {
                answer(&breaker, Class::Success);
            }
            let permit = breaker.take(test_time(0)).expect("closed");
            barrier.wait();
            breaker.report(permit, Class::Transient, Span::ZERO, test_time(0), &mut SmallRng::seed_from_u64(1));
            barrier.wait();
            assert_eq!(breaker.take(test_time(0)).expect_err("open").failures, THREADS as u32);
            barrier.wait();
            let probe = breaker.take(test_time(300_000));
            barrier.wait();
            probe.is_ok()
        };
        let probes = thread::scope(|scope| {
            let works = [(); THREADS].map(|()| scope.spawn(work));
            works.map(|work| work.join().unwrap()).into_iter().filter(|&passed| passed).count()
        });
        assert_eq!(probes, 1);
    }
}
