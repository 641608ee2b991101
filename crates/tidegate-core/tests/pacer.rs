//! Responsive backoff: its documented examples exactly, and properties that hold for all random numbers.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tidegate_core::pacer::{MAX_INTERVAL, MAX_SHARED_STEP, PacerGrowth, PacerMetrics, PacerMode, PacerState};
use tidegate_core::{LocalPacer, PacerError, PacerSpec, SharedPacerRules, Span, Time};

const fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn plain(initial: u64, up: u32, down: u16, successes: u32) -> PacerSpec {
    PacerSpec {
        initial: micros(initial),
        growth: PacerGrowth::Exponential { up, down },
        randomization: 0,
        successes,
        mode: PacerMode::Classic,
        ..PacerSpec::default()
    }
}

/// Reports failures (`F`) and successes (`S`) to a pacer. Returns it and the waits that it asked for, 0 for none.
fn run(spec: PacerSpec, outcomes: &str, rng: &mut SmallRng) -> (LocalPacer, Vec<Duration>) {
    let mut pacer = LocalPacer::new(spec).unwrap();
    let waits = outcomes.chars().map(|outcome| match outcome {
        'F' => pacer.failed(rng),
        _ => pacer.succeeded(rng).unwrap_or_default(),
    });
    let waits = waits.collect();
    (pacer, waits)
}

fn random(seed: u64) -> SmallRng {
    SmallRng::seed_from_u64(seed)
}

#[test]
fn worked_examples_give_their_metrics() {
    let long = format!("{}{}", "F".repeat(5), "S".repeat(30));
    let metrics = |invocations, up, down, slept, total| PacerMetrics {
        calls: invocations,
        steps_up: up,
        steps_down: down,
        waits: slept,
        total_wait: total,
    };
    let short = PacerSpec { max: micros(150), ..plain(100, 2_000, 500, 1) };
    let rows = [
        (plain(10, 1_100, 900, 10), "SFSFF", metrics(5, 3, 0, 4, Duration::from_nanos(43_100)), 12_100),
        (plain(1, 2_000, 500, 5), long.as_str(), metrics(35, 5, 5, 30, micros(170)), 0),
        (short, "FFSS", metrics(4, 2, 1, 3, micros(250)), 0),
    ];
    for (spec, outcomes, expected, interval) in rows {
        let (pacer, _) = run(spec, outcomes, &mut random(1));
        assert_eq!((pacer.metrics(), pacer.interval()), (expected, Duration::from_nanos(interval)), "{outcomes}");
    }
}

#[test]
fn the_published_example_rises_and_steps_down() {
    let spec = PacerSpec { mode: PacerMode::Classic, ..plain(1_000, 1_500, 600, 5) };
    let (mut pacer, waits) = run(spec, &"F".repeat(15), &mut random(1));
    let near = |wait: Duration, micros: u64| wait.as_nanos().abs_diff(u128::from(micros) * 1_000) < 1_000;
    assert!(near(waits[14], 291_929), "{:?}", waits[14]);
    let last = (0..5).filter_map(|_| pacer.succeeded(&mut random(1))).last().unwrap();
    assert!(near(last, 175_157), "{last:?}");
}

#[test]
fn linear_growth_adds_the_initial_wait() {
    let spec = PacerSpec { initial: Duration::from_secs(1), growth: PacerGrowth::Linear, ..plain(1, 0, 0, 1) };
    for mode in [PacerMode::Classic, PacerMode::Steady] {
        let (_, waits) = run(PacerSpec { mode, max: Duration::from_secs(4), ..spec }, "FFFFFSSSSS", &mut random(1));
        assert_eq!(waits.iter().map(Duration::as_secs).collect::<Vec<_>>(), [1, 2, 3, 4, 4, 3, 2, 1, 0, 0]);
    }
}

#[test]
fn only_steady_mode_restarts_counting_on_failure() {
    let down =
        |mode| run(PacerSpec { mode, ..plain(100, 2_000, 500, 3) }, "FSSFS", &mut random(1)).0.metrics().steps_down;
    assert_eq!((down(PacerMode::Classic), down(PacerMode::Steady)), (1, 0));
}

#[test]
fn randomization_is_uniform_within_its_bounds() {
    let second = |max_randomization| PacerSpec {
        initial: Duration::from_secs(1),
        randomization: 200,
        max_randomization,
        ..plain(1, 2_000, 500, 1)
    };
    for mode in [PacerMode::Classic, PacerMode::Steady] {
        for (bound, spread) in [(Duration::from_secs(120), 400), (Duration::from_millis(50), 50)] {
            let spec = PacerSpec { mode, ..second(bound) };
            let mut rng = random(7);
            let drawn: Vec<u128> = (0..20_000).map(|_| run(spec, "FF", &mut rng).1[1].as_micros()).collect();
            let low = 2_000_000 - spread * 1_000;
            let mut tenths = [0_u32; 10];
            for wait in drawn {
                assert!((low..=low + spread * 2_000).contains(&wait), "{mode:?}: {wait}");
                tenths[(((wait - low) * 10 / (spread * 2_000)) as usize).min(9)] += 1;
            }
            // 2,000 in each tenth, with a standard deviation of 42.
            assert!(tenths.iter().all(|count| (1_750..2_250).contains(count)), "{mode:?}: {tenths:?}");
        }
    }
}

#[test]
fn steady_pacers_at_the_longest_wait_still_differ() {
    let waits = |mode| -> BTreeSet<u64> {
        let ends = (0..1_000).map(|seed| {
            let (pacer, _) = run(PacerSpec { mode, ..PacerSpec::default() }, &"F".repeat(60), &mut random(seed));
            assert!(pacer.interval() <= Duration::from_secs(900));
            pacer.interval().as_secs()
        });
        ends.collect()
    };
    let steady = waits(PacerMode::Steady);
    assert!(steady.len() > 60 && *steady.last().unwrap() > 800, "{} seconds: {steady:?}", steady.len());
}

#[test]
fn invalid_specs_are_rejected() {
    let spec = PacerSpec::default();
    let growth = |up, down| PacerSpec { growth: PacerGrowth::Exponential { up, down }, ..spec };
    let rows = [
        (PacerSpec { initial: Duration::ZERO, ..spec }, "initial must not be 0"),
        (PacerSpec { successes: 0, ..spec }, "successes must not be 0"),
        (
            PacerSpec { max: Duration::from_millis(499), ..spec },
            "the longest wait lies between the initial one and 292 years, so it can't be 499ms",
        ),
        (growth(1_000, 900), "a failure multiplies by more than 1000 thousandths, not 1000"),
        (growth(1_500, 1_000), "a down step multiplies by 1 to 999 thousandths, not 1000"),
        (growth(1_500, 0), "a down step multiplies by 1 to 999 thousandths, not 0"),
        (PacerSpec { randomization: 1_001, ..spec }, "a share is up to 1000 thousandths, not 1001"),
    ];
    for (spec, message) in rows {
        assert_eq!(LocalPacer::new(spec).unwrap_err().to_string(), message);
    }
    let beyond = PacerSpec { max: MAX_INTERVAL + Duration::from_nanos(1), ..spec };
    assert!(matches!(LocalPacer::new(beyond), Err(PacerError::InvalidMax { .. })));
    assert!(LocalPacer::new(spec).is_ok());
}

#[test]
fn shared_pacers_must_fit_the_stores_range() {
    let spec = PacerSpec { max: MAX_SHARED_STEP, growth: PacerGrowth::Linear, ..PacerSpec::default() };
    let beyond = SharedPacerRules::new(spec).unwrap_err();
    assert_eq!(
        beyond.to_string(),
        "a failure at the longest wait would make 2251800.313685248s of it before it is cut, and stores that are shared \
         count up to 2251799.813685248s: a shorter longest wait or a smaller factor is needed"
    );
    assert!(SharedPacerRules::new(PacerSpec { max: MAX_SHARED_STEP - spec.initial, ..spec }).is_ok());
    let steep = PacerSpec { growth: PacerGrowth::Exponential { up: u32::MAX, down: 500 }, ..PacerSpec::default() };
    assert!(matches!(SharedPacerRules::new(steep), Err(PacerError::SharedStepTooLarge { .. })));
    let zero = PacerSpec { successes: 0, ..PacerSpec::default() };
    assert_eq!(SharedPacerRules::new(zero).unwrap_err(), PacerError::Zero { setting: "successes" });
}

#[test]
fn an_idle_shared_pace_is_forgotten() {
    let pacer = SharedPacerRules::new(PacerSpec::default()).unwrap();
    let (start, longest) = (Time::from_secs(1_700_000_000), Span::from_secs(3_600 + 900));
    let mut tempo = PacerState::default();
    assert_eq!(pacer.record_call(&mut tempo, false, 0, start).after, 0);
    assert_eq!(tempo, PacerState::default(), "nothing to remember");
    pacer.record_call(&mut tempo, true, 0, start);
    assert_eq!((tempo.wait(), pacer.idle_at(&tempo)), (Duration::from_millis(500), start + longest));
    pacer.record_call(&mut tempo, false, 0, start + longest - Span::from_micros(1));
    let idle_at = pacer.idle_at(&tempo);
    assert!(idle_at > start + longest.times(2) - Span::from_secs(1) && tempo.interval > 0);
    assert_eq!(pacer.record_call(&mut tempo, true, 0, idle_at).before, 0);
    // A report of a clock that was a year ahead doesn't keep it for longer.
    pacer.record_call(&mut tempo, true, 0, start + Span::from_secs(365 * 86_400));
    pacer.refresh(&mut tempo, start);
    assert_eq!(pacer.idle_at(&tempo), start + longest);
}

#[test]
fn a_remote_pace_raises_the_shared_interval() {
    let pacer = SharedPacerRules::new(PacerSpec { max: Duration::from_secs(8), ..PacerSpec::default() }).unwrap();
    let (now, mut tempo) = (Time::from_secs(1_700_000_000), PacerState::default());
    let mut at_least = |nanos| {
        pacer.raise_to(&mut tempo, nanos, now);
        tempo.interval / 1_000_000
    };
    let told = [0, 1, 2_000_000_000, 1_000_000_000, u64::MAX].map(&mut at_least);
    assert_eq!(told, [0, 500, 2_000, 2_000, 8_000]);
    // A wait of another pacer's settings may be outside the bounds of these.
    let wider = SharedPacerRules::new(PacerSpec { max: Duration::from_secs(60), ..PacerSpec::default() }).unwrap();
    let mut tempo = PacerState::default();
    wider.raise_to(&mut tempo, 60_000_000_000, now);
    pacer.refresh(&mut tempo, now);
    assert_eq!(tempo.wait(), Duration::from_secs(8));
}

fn any_spec() -> impl Strategy<Value = PacerSpec> {
    let growth = prop_oneof![
        Just(PacerGrowth::Linear),
        (1_001_u32..20_000, 1_u16..1_000).prop_map(|(up, down)| PacerGrowth::Exponential { up, down }),
        Just(PacerGrowth::Exponential { up: u32::MAX, down: 999 }),
    ];
    let nanos = prop_oneof![1..1_000_u64, 1..10_000_000_000_u64, Just(i64::MAX as u64)];
    (nanos.clone(), nanos.clone(), nanos, growth, 0_u16..=1_000, 1_u32..6).prop_map(
        |(one, other, max_randomization, growth, randomization, successes)| PacerSpec {
            initial: Duration::from_nanos(one.min(other)),
            max: Duration::from_nanos(one.max(other)),
            growth,
            randomization,
            max_randomization: Duration::from_nanos(max_randomization),
            successes,
            mode: PacerMode::Steady,
        },
    )
}

/// A generator of one word with 32 random bits. The other bits are 0.
#[derive(Clone, Copy)]
struct Word(u32);

impl rand::TryRng for Word {
    type Error = std::convert::Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Self::Error> {
        Ok(self.0)
    }

    fn try_next_u64(&mut self) -> Result<u64, Self::Error> {
        Ok(u64::from(self.0) << 32)
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Self::Error> {
        bytes.fill(0);
        Ok(())
    }
}

proptest! {
    #[test]
    fn a_shared_pacer_steps_like_a_local_pacer(spec in any_spec(), classic: bool, seed: u64, outcomes in "[FS]{1,200}") {
        let spec = PacerSpec { mode: if classic { PacerMode::Classic } else { PacerMode::Steady }, ..spec };
        let Ok(shared) = SharedPacerRules::new(spec) else { return Ok(()) };
        let (mut own, mut rng) = (LocalPacer::new(spec).unwrap(), random(seed));
        let (mut tempo, mut metrics, now) = (PacerState::default(), PacerMetrics::default(), Time::from_secs(1_700_000_000));
        for outcome in outcomes.chars() {
            let (failed, draw) = (outcome == 'F', Rng::next_u32(&mut rng));
            let step = shared.record_call(&mut tempo, failed, draw, now);
            let wait = if failed { Some(own.failed(&mut Word(draw))) } else { own.succeeded(&mut Word(draw)) };
            prop_assert_eq!(Duration::from_nanos(step.after), own.interval());
            prop_assert_eq!(shared.state_after(step, now), tempo);
            let paused = (failed || step.before > 0).then(|| Duration::from_nanos(step.after));
            prop_assert_eq!(paused, wait);
            metrics.record(failed, !failed && shared.is_down(step), paused);
            prop_assert_eq!(metrics, own.metrics());
        }
        prop_assert_eq!(shared.spec(), spec);
    }

    #[test]
    fn steady_mode_never_steps_in_wrong_direction(spec in any_spec(), seed: u64, outcomes in "[FS]{1,200}") {
        let (mut pacer, mut rng) = (LocalPacer::new(spec).unwrap(), random(seed));
        // Above this wait, jitter has no room below the longest.
        let (max, share) = (spec.max.as_nanos(), u128::from(spec.randomization));
        let summit = max - (max * share / (1_000 + share)).min(spec.max_randomization.as_nanos());
        for outcome in outcomes.chars() {
            let before = pacer.interval();
            if outcome == 'F' {
                let after = pacer.failed(&mut rng);
                prop_assert_eq!(after > before, before.as_nanos() < summit);
                prop_assert!(after >= before);
            } else {
                let steps = pacer.metrics().steps_down;
                let wait = pacer.succeeded(&mut rng);
                prop_assert_eq!(wait.is_none(), before.is_zero());
                let after = wait.unwrap_or_default();
                prop_assert_eq!(after < before, pacer.metrics().steps_down > steps);
                prop_assert!(after <= before);
            }
            prop_assert!(pacer.interval().is_zero() || (spec.initial..=spec.max).contains(&pacer.interval()));
        }
    }

    #[test]
    fn classic_mode_keeps_bounds_and_totals(spec in any_spec(), seed: u64, outcomes in "[FS]{1,200}") {
        let (pacer, waits) = run(PacerSpec { mode: PacerMode::Classic, ..spec }, &outcomes, &mut random(seed));
        for wait in &waits {
            prop_assert!(wait.is_zero() || (spec.initial..=spec.max).contains(wait));
        }
        let metrics = pacer.metrics();
        prop_assert_eq!(metrics.calls, outcomes.len() as u64);
        prop_assert_eq!(metrics.steps_up, outcomes.matches('F').count() as u64);
        prop_assert_eq!(metrics.total_wait, waits.iter().fold(Duration::ZERO, |sum, wait| sum.saturating_add(*wait)));
        prop_assert!(metrics.steps_up <= metrics.waits && metrics.waits <= metrics.calls);
    }
}
