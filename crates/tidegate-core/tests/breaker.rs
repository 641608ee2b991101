//! The circuit breaker from the view of its callers.

use tidegate_core::breaker::{BreakerPermit, BreakerState, RampStep, SlowCalls};
use tidegate_core::{
    Backoff, Breaker, BreakerError, BreakerRefusal, BreakerSpec, Class, Growth, Jitter, Span, Time, breaker,
};
use tidegate_testkit::fixtures::test_time;

const QUICK: Span = Span::from_millis(10);

fn secs(secs: u64) -> Span {
    Span::from_secs(secs)
}

fn new(spec: BreakerSpec) -> Breaker {
    Breaker::new(spec).expect("a spec that makes sense")
}

fn rng() -> rand::rngs::SmallRng {
    rand::SeedableRng::seed_from_u64(5)
}

fn report(breaker: &mut Breaker, permit: BreakerPermit, class: Class, now: Time) {
    breaker.report(permit, class, Span::ZERO, now, &mut rng());
}

/// Makes a call that is admitted and immediately answered.
fn call(breaker: &mut Breaker, class: Class, now: Time) {
    let permit = breaker.take(now).expect("let through");
    report(breaker, permit, class, now);
}

/// A breaker that five failures at 0 s have opened.
fn opened(spec: BreakerSpec) -> Breaker {
    let mut breaker = new(spec);
    for _ in 0..5 {
        call(&mut breaker, Class::Transient, test_time(0));
    }
    assert_eq!(breaker.state(test_time(0)), BreakerState::Open);
    breaker
}

fn everything(breaker: &Breaker) -> String {
    format!("{breaker:?}")
}

#[test]
fn five_failures_open_the_breaker_five_minutes() {
    let mut breaker = new(BreakerSpec::default());
    for failures in 0..5 {
        assert_eq!((breaker.state(test_time(0)), breaker.failures()), (BreakerState::Closed, failures));
        call(&mut breaker, Class::from_status(503), test_time(0));
    }
    let told = BreakerRefusal { state: BreakerState::Open, failures: 5, reset_in: secs(240) };
    assert_eq!(breaker.peek(test_time(60_000)), Err(told));
    assert_eq!(breaker.take(test_time(60_000)).unwrap_err(), told);
    let just_before = test_time(300_000) - Span::from_micros(1);
    assert_eq!(breaker.take(just_before).unwrap_err().reset_in, Span::from_micros(1));

    assert_eq!((breaker.peek(test_time(300_000)), breaker.state(test_time(300_000))), (Ok(()), BreakerState::HalfOpen));
    let probe = breaker.take(test_time(300_000)).unwrap();
    let told = BreakerRefusal { state: BreakerState::HalfOpen, failures: 5, reset_in: secs(5) };
    for _ in 0..3 {
        assert_eq!(breaker.peek(test_time(300_000)), Err(told));
        assert_eq!(breaker.take(test_time(300_000)).unwrap_err(), told);
    }
    report(&mut breaker, probe, Class::Success, test_time(301_000));
    assert_eq!(breaker.state(test_time(301_000)), BreakerState::HalfOpen);
    call(&mut breaker, Class::Success, test_time(301_000));
    assert_eq!((breaker.state(test_time(301_000)), breaker.failures()), (BreakerState::Closed, 0));
    call(&mut breaker, Class::Transient, test_time(302_000));
    assert_eq!(breaker.state(test_time(302_000)), BreakerState::Closed, "it counts anew");
}

#[test]
fn one_failed_probe_reopens_the_breaker() {
    for successes_before in [0, 1] {
        let mut breaker = opened(BreakerSpec::default());
        for _ in 0..successes_before {
            call(&mut breaker, Class::Success, test_time(300_000));
        }
        call(&mut breaker, Class::Transient, test_time(310_000));
        assert_eq!(breaker.take(test_time(310_000)).unwrap_err().reset_in, secs(300));
        call(&mut breaker, Class::Success, test_time(610_000));
        assert_eq!(breaker.state(test_time(610_000)), BreakerState::HalfOpen, "successes are counted anew");
        call(&mut breaker, Class::Success, test_time(610_000));
        assert_eq!(breaker.state(test_time(610_000)), BreakerState::Closed);
    }
}

#[test]
fn failures_beside_unfinished_calls_open_nothing() {
    let mut breaker = new(BreakerSpec::default());
    for failures in 1..=200 {
        let permit = breaker.take(test_time(0)).expect("let through");
        breaker.report_beside(permit, (Class::Transient, Span::ZERO), failures == 200, test_time(0), &mut rng());
        let expected = if failures == 200 { BreakerState::Open } else { BreakerState::Closed };
        assert_eq!((breaker.state(test_time(0)), breaker.failures()), (expected, failures));
    }
}

#[test]
fn replies_of_a_working_provider_reset_failures() {
    for class in [Class::Success, Class::Permanent, Class::Auth] {
        let mut breaker = new(BreakerSpec::default());
        for _ in 0..50 {
            call(&mut breaker, class, test_time(0));
            assert_eq!((breaker.state(test_time(0)), breaker.failures()), (BreakerState::Closed, 0), "{class:?}");
        }
        for _ in 0..10 {
            for _ in 0..4 {
                call(&mut breaker, Class::Transient, test_time(0));
            }
            call(&mut breaker, class, test_time(0));
        }
        assert_eq!(breaker.state(test_time(0)), BreakerState::Closed, "{class:?}");
        let mut breaker = opened(BreakerSpec::default());
        call(&mut breaker, class, test_time(300_000));
        call(&mut breaker, class, test_time(300_000));
        assert_eq!(breaker.state(test_time(300_000)), BreakerState::Closed, "{class:?} counts toward closing");
    }
}

#[test]
fn throttled_and_cancelled_calls_change_nothing() {
    for class in [Class::Throttled, Class::Cancelled] {
        let mut breaker = new(BreakerSpec::default());
        for _ in 0..4 {
            call(&mut breaker, Class::Transient, test_time(0));
        }
        for _ in 0..50 {
            call(&mut breaker, class, test_time(0));
            assert_eq!((breaker.state(test_time(0)), breaker.failures()), (BreakerState::Closed, 4), "{class:?}");
        }
        call(&mut breaker, Class::Transient, test_time(0));
        assert_eq!(breaker.state(test_time(0)), BreakerState::Open);
        for _ in 0..50 {
            call(&mut breaker, class, test_time(300_000));
            assert_eq!(
                breaker.state(test_time(300_000)),
                BreakerState::HalfOpen,
                "{class:?} returns the probe and no more"
            );
        }
    }
}

#[test]
fn replies_of_an_older_generation_change_nothing() {
    let mut breaker = new(BreakerSpec::default());
    let mut early: Vec<BreakerPermit> = (0..60).map(|_| breaker.take(test_time(0)).unwrap()).collect();
    for _ in 0..5 {
        report(&mut breaker, early.pop().unwrap(), Class::Transient, test_time(0));
    }
    let stray = |breaker: &mut Breaker, early: &mut Vec<BreakerPermit>, now: Time| {
        let before = everything(breaker);
        for class in [Class::Transient, Class::Success, Class::Throttled, Class::Permanent, Class::Cancelled] {
            report(breaker, early.pop().unwrap(), class, now);
        }
        breaker.give_back(early.pop().unwrap());
        assert_eq!(everything(breaker), before);
    };
    stray(&mut breaker, &mut early, test_time(100_000));
    assert_eq!(breaker.take(test_time(100_000)).unwrap_err().reset_in, secs(200), "the open time isn't moved");
    stray(&mut breaker, &mut early, test_time(300_000));
    let probe = breaker.take(test_time(300_000)).unwrap();
    assert!(early[0].generation() < probe.generation());
    stray(&mut breaker, &mut early, test_time(300_000));
    assert!(breaker.take(test_time(300_000)).is_err(), "the probe is still out");
    report(&mut breaker, probe, Class::Success, test_time(300_000));
    call(&mut breaker, Class::Success, test_time(300_000));
    stray(&mut breaker, &mut early, test_time(300_000));
    assert_eq!((breaker.state(test_time(300_000)), breaker.failures()), (BreakerState::Closed, 0));
}

#[test]
fn late_probes_of_earlier_openings_are_ignored() {
    let mut breaker = opened(BreakerSpec { probes: 2, ..BreakerSpec::default() });
    let slow = breaker.take(test_time(300_000)).unwrap();
    call(&mut breaker, Class::Transient, test_time(300_000));
    let before = everything(&breaker);
    report(&mut breaker, slow, Class::Success, test_time(301_000));
    assert_eq!(everything(&breaker), before);
}

#[test]
fn cancelled_hung_and_dropped_probes_are_released() {
    let mut breaker = opened(BreakerSpec::default());
    call(&mut breaker, Class::Cancelled, test_time(300_000));
    let unsent = breaker.take(test_time(300_000)).unwrap();
    breaker.give_back(unsent);
    let never_polled = breaker.take(test_time(300_000)).unwrap();
    drop(never_polled);
    assert_eq!(breaker.take(test_time(302_000)).unwrap_err().reset_in, secs(3));
    assert!(breaker.peek(test_time(305_000) - Span::from_micros(1)).is_err());
    assert_eq!(breaker.peek(test_time(305_000)), Ok(()));
    let hung = breaker.take(test_time(330_000)).unwrap();
    let next = breaker.take(test_time(360_000)).unwrap();
    report(&mut breaker, hung, Class::Success, test_time(361_000));
    assert!(breaker.take(test_time(361_000)).is_err(), "the hung probe's reply returns nobody else's place");
    report(&mut breaker, next, Class::Success, test_time(362_000));
    assert_eq!(breaker.state(test_time(362_000)), BreakerState::Closed, "but it counts");

    let mut breaker = opened(BreakerSpec::default());
    let hung = breaker.take(test_time(300_000)).unwrap();
    report(&mut breaker, hung, Class::Transient, test_time(390_000));
    assert_eq!(
        breaker.state(test_time(390_000)),
        BreakerState::Open,
        "a time-out longer than the lease is a failure too"
    );
}

#[test]
fn several_probes_may_run_concurrently() {
    let mut breaker = opened(BreakerSpec { probes: 3, successes: 3, ..BreakerSpec::default() });
    let probes = [0, 1_000, 2_000].map(|after| breaker.take(test_time(300_000 + after)).unwrap());
    assert_eq!(breaker.take(test_time(303_000)).unwrap_err().reset_in, secs(2), "the first lease's end");
    assert!(breaker.take(test_time(305_000)).is_ok());
    assert!(breaker.take(test_time(305_000)).is_err());
    for probe in probes {
        report(&mut breaker, probe, Class::Success, test_time(330_500));
    }
    assert_eq!(breaker.state(test_time(330_500)), BreakerState::Closed);
}

#[test]
fn open_times_grow_until_fully_closed() {
    let grown = Backoff::exponential(secs(300), secs(1_000)).with_jitter(Jitter::None);
    for ramp in [Vec::new(), Breaker::DEFAULT_RAMP.to_vec()] {
        let mut breaker = opened(BreakerSpec { open: grown, ramp: ramp.clone(), ..BreakerSpec::default() });
        let mut now = test_time(0);
        for length in [300, 600, 1_000, 1_000] {
            assert_eq!(breaker.take(now).unwrap_err().reset_in, secs(length));
            now = now + secs(length);
            call(&mut breaker, Class::Transient, now);
        }
        now = now + secs(1_000);
        call(&mut breaker, Class::Success, now);
        call(&mut breaker, Class::Success, now);
        if !ramp.is_empty() {
            let mut unfinished = breaker.clone();
            let half = now + secs(89);
            for _ in 0..5 {
                let permit = (0..10).find_map(|_| unfinished.take(half).ok()).unwrap();
                report(&mut unfinished, permit, Class::Transient, half);
            }
            assert_eq!(unfinished.take(half).unwrap_err().reset_in, secs(1_000), "it wasn't fully closed");
            now = now + secs(90);
        }
        for _ in 0..5 {
            call(&mut breaker, Class::Transient, now);
        }
        assert_eq!(breaker.take(now).unwrap_err().reset_in, secs(300), "{} steps", ramp.len());
    }
}

#[test]
fn open_times_may_be_jittered() {
    let open = Backoff::exponential(secs(100), secs(100)).with_jitter(Jitter::Equal);
    let mut lengths: Vec<Span> = (0..100)
        .map(|seed| {
            let mut rng: rand::rngs::SmallRng = rand::SeedableRng::seed_from_u64(seed);
            let mut breaker = new(BreakerSpec { failures: Some(1), open, ..BreakerSpec::default() });
            let permit = breaker.take(test_time(0)).unwrap();
            breaker.report(permit, Class::Transient, Span::ZERO, test_time(0), &mut rng);
            breaker.take(test_time(0)).unwrap_err().reset_in
        })
        .collect();
    assert!(lengths.iter().all(|&length| secs(50) <= length && length <= secs(100)));
    lengths.sort_unstable();
    lengths.dedup();
    assert!(lengths.len() > 90, "{}", lengths.len());
}

#[test]
fn each_ramp_step_admits_its_share() {
    let mut breaker = opened(BreakerSpec { ramp: Breaker::DEFAULT_RAMP.to_vec(), ..BreakerSpec::default() });
    call(&mut breaker, Class::Success, test_time(300_000));
    call(&mut breaker, Class::Success, test_time(300_000));
    let start = 300_000;
    assert_eq!(breaker.state(test_time(start)), BreakerState::Ramping);
    for (step, share) in [(0, 100), (1, 250), (2, 500), (3, 1_000)] {
        for part in [0, 7_000, 29_999] {
            let now = test_time(start + step * 30_000 + part);
            let mut passed = 0;
            for offered in 1..=333 {
                assert_eq!(breaker.peek(now), Ok(()), "a peek isn't counted");
                match breaker.take(now) {
                    Ok(permit) => {
                        passed += 1;
                        report(&mut breaker, permit, Class::Success, now);
                    }
                    Err(told) => {
                        assert_eq!(
                            (told.state, told.reset_in),
                            (BreakerState::Ramping, test_time(start + 90_000).since(now))
                        );
                    }
                }
                let fair = f64::from(offered * share) / 1_000.0;
                assert!((f64::from(passed) - fair).abs() <= 1.0, "{passed} of {offered} in step {step}");
            }
        }
    }
    assert_eq!(breaker.state(test_time(start + 90_000)), BreakerState::Closed);
}

#[test]
fn a_ramp_admits_first_calls_and_counts_failures() {
    let mut breaker = opened(BreakerSpec { ramp: Breaker::DEFAULT_RAMP.to_vec(), ..BreakerSpec::default() });
    call(&mut breaker, Class::Success, test_time(300_000));
    call(&mut breaker, Class::Success, test_time(300_000));
    for failures in 1..=5 {
        assert_eq!(breaker.state(test_time(300_000)), BreakerState::Ramping);
        call(&mut breaker, Class::Transient, test_time(300_000));
        assert_eq!(breaker.failures(), failures);
        if failures < 5 {
            for _ in 0..9 {
                assert!(breaker.take(test_time(300_000)).is_err());
            }
        }
    }
    assert_eq!(breaker.take(test_time(300_000)).unwrap_err().reset_in, secs(300));
}

fn by_rate(rate: u16) -> BreakerSpec {
    BreakerSpec { failures: None, failure_rate: Some(rate), window: secs(100), ..BreakerSpec::default() }
}

#[test]
fn a_failure_rate_requires_the_minimum_calls() {
    let mut breaker = new(by_rate(500));
    for turn in 0..9 {
        call(&mut breaker, if turn < 5 { Class::Transient } else { Class::Success }, test_time(turn * 1_000));
        assert_eq!(breaker.state(test_time(9_000)), BreakerState::Closed, "call {turn}");
    }
    for class in [Class::Throttled, Class::Cancelled] {
        call(&mut breaker, class, test_time(9_000));
        assert_eq!(breaker.state(test_time(9_000)), BreakerState::Closed, "{class:?} is no call of the window");
    }
    call(&mut breaker, Class::Success, test_time(9_000));
    let told = breaker.take(test_time(9_000)).unwrap_err();
    assert_eq!((told.state, told.failures), (BreakerState::Open, 5), "five of ten, and the last a success");

    let mut below = new(by_rate(501));
    for turn in 0..100 {
        call(&mut below, if turn % 2 == 1 { Class::Transient } else { Class::Success }, test_time(0));
    }
    assert_eq!(below.state(test_time(0)), BreakerState::Closed, "a half is below 501 thousandths");
}

#[test]
fn the_window_expires_calls_by_exact_tenths() {
    let full = || {
        let mut breaker = new(by_rate(500));
        for _ in 0..6 {
            call(&mut breaker, Class::Transient, test_time(0));
        }
        breaker
    };
    let grid = Time::from_secs(test_time(0).as_micros() / 10_000_000 * 10);
    let after = |moment: Time| {
        let mut breaker = full();
        for _ in 0..4 {
            call(&mut breaker, Class::Success, moment);
        }
        breaker.state(moment)
    };
    assert_eq!(after(grid + secs(100) - Span::from_micros(1)), BreakerState::Open, "six of ten");
    assert_eq!(after(grid + secs(100)), BreakerState::Closed, "the failures' tenth is gone");
}

#[test]
fn slow_calls_open_the_breaker_and_fail_probes() {
    let slow = SlowCalls { threshold: secs(2), rate: 500 };
    let spec = BreakerSpec { failures: None, slow_calls: Some(slow), ..BreakerSpec::default() };
    let mut breaker = new(spec);
    let slowly = |breaker: &mut Breaker, elapsed, now| {
        let permit = breaker.take(now).unwrap();
        breaker.report(permit, Class::Success, elapsed, now, &mut rng());
    };
    for _ in 0..20 {
        slowly(&mut breaker, secs(2), test_time(0));
    }
    assert_eq!(breaker.state(test_time(0)), BreakerState::Closed, "no slower than the threshold");
    for turn in 0..20 {
        assert_eq!(breaker.state(test_time(0)), BreakerState::Closed, "{turn} slow ones");
        slowly(&mut breaker, secs(2) + Span::from_micros(1), test_time(0));
    }
    assert_eq!(breaker.state(test_time(0)), BreakerState::Open);
    slowly(&mut breaker, QUICK, test_time(300_000));
    slowly(&mut breaker, secs(3), test_time(300_000));
    assert_eq!(breaker.state(test_time(300_000)), BreakerState::Open);
    slowly(&mut breaker, QUICK, test_time(600_000));
    slowly(&mut breaker, QUICK, test_time(600_000));
    assert_eq!(breaker.state(test_time(600_000)), BreakerState::Closed);
    slowly(&mut breaker, secs(3), test_time(600_000));
    assert_eq!(breaker.state(test_time(600_000)), BreakerState::Closed, "the window is empty after an opening");
}

#[test]
fn a_reset_closes_the_breaker_fully() {
    let open = Backoff::exponential(secs(300), secs(1_000)).with_jitter(Jitter::None);
    let mut breaker = opened(BreakerSpec { open, ramp: Breaker::DEFAULT_RAMP.to_vec(), ..BreakerSpec::default() });
    let generation = breaker.generation();
    breaker.reset();
    assert_eq!((breaker.state(test_time(0)), breaker.failures()), (BreakerState::Closed, 0));
    assert!(breaker.generation() > generation);
    for _ in 0..5 {
        call(&mut breaker, Class::Transient, test_time(0));
    }
    assert_eq!(breaker.take(test_time(0)).unwrap_err().reset_in, secs(300), "growth starts anew");
}

#[test]
fn clock_steps_back_neither_block_nor_admit_extra() {
    for back in [1, 10, 299, 300, 301, 100_000_000] {
        let mut breaker = new(BreakerSpec::default());
        let ahead = test_time(0) + secs(back);
        for _ in 0..5 {
            call(&mut breaker, Class::Transient, ahead);
        }
        // A driver that calls `take` only after a successful peek.
        let attempt = |breaker: &mut Breaker, now| breaker.peek(now).and_then(|()| breaker.take(now));
        let told = attempt(&mut breaker, test_time(0)).unwrap_err();
        assert!(told.reset_in <= secs(300) && told.reset_in > Span::ZERO, "{back}: {told:?}");
        let due = test_time(0) + told.reset_in;
        assert!(attempt(&mut breaker, due - Span::from_micros(1)).is_err(), "{back}");
        let probe = attempt(&mut breaker, due).unwrap();
        assert!(attempt(&mut breaker, due).is_err(), "{back}");
        drop(probe);
        let earlier = due - secs(back);
        let told = attempt(&mut breaker, earlier).unwrap_err();
        assert!(told.reset_in <= secs(5) + secs(back).min(Span::from_millis(100)), "{back}: {told:?}");
        assert!(attempt(&mut breaker, earlier + told.reset_in).is_ok(), "{back}");
    }
}

/// After a step back, one of two probes is within the lag of an overtaken call, and the other isn't.
#[test]
fn a_peeks_wait_never_exceeds_the_takes() {
    let mut breaker = opened(BreakerSpec { probes: 2, ..BreakerSpec::default() });
    let probes = [breaker.take(test_time(300_000)).unwrap(), breaker.take(test_time(300_080)).unwrap()];
    let overtaken =
        BreakerRefusal { state: BreakerState::HalfOpen, failures: 5, reset_in: secs(5) + Span::from_millis(20) };
    assert_eq!(breaker.peek(test_time(299_980)), Err(overtaken), "both were overtaken");
    assert_eq!(breaker.clone().take(test_time(299_980)).unwrap_err(), overtaken);
    assert_eq!(breaker.peek(test_time(299_950)), Ok(()), "it can't know");
    assert_eq!(breaker.take(test_time(299_950)).unwrap_err(), BreakerRefusal { reset_in: secs(5), ..overtaken });
    drop(probes);
}

#[test]
fn a_clock_step_back_lengthens_no_ramp() {
    let mut breaker = opened(BreakerSpec { ramp: Breaker::DEFAULT_RAMP.to_vec(), ..BreakerSpec::default() });
    call(&mut breaker, Class::Success, test_time(100_000_000));
    call(&mut breaker, Class::Success, test_time(100_000_000));
    drop(breaker.take(test_time(0)));
    let passed = (0..100).filter(|_| breaker.take(test_time(0)).is_ok()).count();
    assert_eq!(passed, 10, "the ramp begins anew");
    assert!((0..10).all(|_| breaker.take(test_time(90_000)).is_ok()));
}

/// Calls that were sent before a failure came back fail for the same reason.
#[test]
fn failures_of_one_burst_count_once() {
    let mut breaker = Breaker::new(BreakerSpec::default()).unwrap();
    let fail = |breaker: &mut Breaker, permit, elapsed, now| {
        breaker.report(permit, Class::Transient, Span::from_millis(elapsed), now, &mut rng());
    };
    for burst in 1..=5_u64 {
        let permits: Vec<_> = (0..100).map(|_| breaker.take(test_time(burst * 1_000)).unwrap()).collect();
        for (late, permit) in permits.into_iter().enumerate() {
            fail(&mut breaker, permit, 10 + late as u64, test_time(burst * 1_000 + 10 + late as u64));
        }
        assert_eq!(breaker.failures(), burst as u32);
    }
    assert_eq!(breaker.state(test_time(6_000)), BreakerState::Open);
    // If the clock has stepped back since, every failure counts.
    let mut breaker = Breaker::new(BreakerSpec::default()).unwrap();
    for failures in 1..=3 {
        let permit = breaker.take(test_time(0)).unwrap();
        fail(&mut breaker, permit, 10, test_time(if failures == 1 { 100_000 } else { 10 * failures }));
    }
    assert_eq!(breaker.failures(), 3);
}

#[test]
fn invalid_specs_are_rejected() {
    let default = BreakerSpec::default;
    let zero = |setting| Some(BreakerError::Zero { setting });
    let constant = |base, cap| Backoff { growth: Growth::Constant, base, cap, jitter: Jitter::None };
    let step = RampStep { share: 100, length: QUICK };
    for (spec, error) in [
        (default(), None),
        (BreakerSpec { failures: None, ..default() }, Some(BreakerError::NeverOpens)),
        (BreakerSpec { failures: Some(0), ..default() }, zero("failures")),
        (BreakerSpec { window: Span::ZERO, ..default() }, zero("window")),
        (BreakerSpec { min_calls: 0, ..default() }, zero("min_calls")),
        (BreakerSpec { open: constant(Span::ZERO, QUICK), ..default() }, zero("open")),
        (BreakerSpec { open: constant(QUICK, Span::ZERO), ..default() }, zero("open")),
        (BreakerSpec { probes: 0, ..default() }, zero("probes")),
        (BreakerSpec { probe_lease: Span::ZERO, ..default() }, zero("probe_lease")),
        (BreakerSpec { successes: 0, ..default() }, zero("successes")),
        (
            BreakerSpec { slow_calls: Some(SlowCalls { threshold: Span::ZERO, rate: 1 }), ..default() },
            zero("slow_calls.threshold"),
        ),
        (
            BreakerSpec { slow_calls: Some(SlowCalls { threshold: QUICK, rate: 0 }), ..default() },
            Some(BreakerError::InvalidRate { found: 0 }),
        ),
        (BreakerSpec { failure_rate: Some(1_000), ..default() }, None),
        (BreakerSpec { failure_rate: Some(1_001), ..default() }, Some(BreakerError::InvalidRate { found: 1_001 })),
        (BreakerSpec { failure_rate: Some(0), ..default() }, Some(BreakerError::InvalidRate { found: 0 })),
        (BreakerSpec { probes: 16, ..default() }, None),
        (BreakerSpec { probes: 17, ..default() }, Some(BreakerError::TooManyProbes { found: 17 })),
        (BreakerSpec { ramp: vec![step; 8], ..default() }, None),
        (BreakerSpec { ramp: vec![step; 9], ..default() }, Some(BreakerError::TooManySteps { found: 9 })),
        (BreakerSpec { ramp: vec![RampStep { length: Span::ZERO, ..step }], ..default() }, zero("ramp.length")),
        (
            BreakerSpec { ramp: vec![RampStep { share: 0, ..step }], ..default() },
            Some(BreakerError::InvalidRate { found: 0 }),
        ),
    ] {
        assert_eq!(Breaker::new(spec.clone()).err(), error, "{spec:?}");
    }
    assert_eq!(new(BreakerSpec { probes: 16, failures: Some(1), ..default() }).spec().probes, 16);
}

/// Every collection at its bound: sixteen probes are in flight, and the seventeenth is refused.
#[test]
fn probes_are_bounded_at_sixteen() {
    let mut breaker = opened(BreakerSpec { probes: 16, ..BreakerSpec::default() });
    for _ in 0..breaker::MAX_PROBES {
        drop(breaker.take(test_time(300_000)).unwrap());
    }
    assert!(breaker.take(test_time(300_000)).is_err());
    for _ in 0..breaker::MAX_PROBES {
        drop(breaker.take(test_time(330_000)).unwrap());
    }
    assert!(breaker.take(test_time(330_000)).is_err());
}
