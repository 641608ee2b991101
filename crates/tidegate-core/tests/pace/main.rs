//! A comparison of ways to find a service's pace.
#![expect(clippy::unwrap_used, reason = "a test")]

mod rivals;
mod service;

use std::time::Duration;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tidegate_core::pacer::PacerMode;
use tidegate_core::{
    AdaptiveRate, AdaptiveRateError, AdaptiveRateSpec, Class, LocalPacer, Pace, PacerSpec, RemainingAmount, Span, Time,
};
use tidegate_testkit::fixtures::test_time;
use tidegate_testkit::random::case_count;

use rivals::{Aimd, Cubic, Paced, Shared};
use service::{ASKING, Distance, FAR, Governor, LIMITERS, Limiter, NEAR, Score, run};

const NAMES: [&str; 6] = ["adaptive", "classic", "steady", "steady, spaced", "AIMD", "CUBIC"];

fn fresh() -> AdaptiveRate {
    AdaptiveRate::new(AdaptiveRateSpec::default()).unwrap()
}

/// A pace that starts with this time between two calls, in milliseconds.
fn starting_at(initial: u64) -> AdaptiveRate {
    AdaptiveRate::new(AdaptiveRateSpec { initial: Span::from_millis(initial), ..AdaptiveRateSpec::default() }).unwrap()
}

fn governor(name: &str, seed: u64) -> Box<dyn Governor> {
    let rng = SmallRng::seed_from_u64(seed);
    // Settings for a service of about this speed. With the defaults, 32 workers that all fail at first would continue
    // only after a quarter of an hour.
    let (initial, max) = (Duration::from_millis(10), Duration::from_secs(2));
    let pacer = |mode| LocalPacer::new(PacerSpec { mode, initial, max, ..PacerSpec::default() }).unwrap();
    match name {
        "adaptive" => Box::new(Paced { pace: Pace::from(fresh()), rng }),
        "classic" => Box::new(Shared { pacer: pacer(PacerMode::Classic), rng }),
        "steady" => Box::new(Shared { pacer: pacer(PacerMode::Steady), rng }),
        "steady, spaced" => Box::new(Paced { pace: Pace::from(pacer(PacerMode::Steady)), rng }),
        "AIMD" => Box::new(Aimd::new(test_time(0))),
        _ => Box::new(Cubic::new(test_time(0))),
    }
}

/// The worst values of several runs.
fn worst(name: &str, limiter: Limiter, distance: Distance, seeds: u32) -> Score {
    let scores = (1..=u64::from(seeds)).map(|seed| run(&mut *governor(name, seed), limiter, distance, seed));
    let worst = scores.fold(Score { goodput: u64::MAX, throttled: 0 }, |worst, score| Score {
        goodput: worst.goodput.min(score.goodput),
        throttled: worst.throttled.max(score.throttled),
    });
    let percent = |thousandths: u64| format!("{}.{} %", thousandths / 10, thousandths % 10);
    let (goodput, throttled) = (percent(worst.goodput), percent(worst.throttled));
    println!("{name:16} {:8} {goodput:>10} {throttled:>10}", format!("{limiter:?}"));
    worst
}

#[test]
fn adaptive_pace_finds_and_follows_hidden_capacity() {
    println!("{:16} {:8} {:>10} {:>10} (worst of the seeds)", "pace", "limiter", "goodput", "throttled");
    let mut found = Vec::new();
    for name in NAMES {
        for limiter in LIMITERS {
            let worst = worst(name, limiter, NEAR, case_count(4, 16));
            if name == "adaptive" {
                found.push((limiter, worst));
            }
        }
    }
    for (limiter, score) in found {
        assert!(score.goodput >= 950 && score.throttled < 20, "{limiter:?}: {score:?}");
    }
}

/// Hundreds of calls are in flight when the first of them is throttled.
#[test]
fn adaptive_pace_limits_throttling_at_long_latencies() {
    for limiter in LIMITERS {
        let score = worst("adaptive", limiter, FAR, case_count(2, 8));
        assert!(score.goodput >= 940 && score.throttled < 20, "{limiter:?}: {score:?}");
    }
}

/// Each throttle then costs a second, so that an excess of one in a hundred would cost most of the time.
#[test]
fn adaptive_pace_saves_throttles_that_ask_for_waits() {
    for (wait, least) in [(1, 910), (10, 600)] {
        for limiter in LIMITERS {
            let distance = Distance { asked_wait: Span::from_secs(wait), ..ASKING };
            let score = worst("adaptive", limiter, distance, case_count(4, 16));
            assert!(score.goodput >= least && score.throttled < 5, "{limiter:?}, {wait} s: {score:?}");
        }
    }
}

/// Sends calls one after the other as soon as they may go until `until`, each answered 10 ms later. Returns the number
/// of sent calls.
fn drive(
    adaptive: &mut AdaptiveRate,
    from: Time,
    until: Time,
    mut reply: impl FnMut(&mut AdaptiveRate, Time, Time),
) -> u32 {
    let (mut now, mut sent) = (from, 0);
    loop {
        now = now.max(adaptive.next_at(now));
        if now >= until {
            return sent;
        }
        adaptive.sent(now);
        sent += 1;
        reply(adaptive, now, now + Span::from_millis(10));
        now = now + Span::from_millis(10);
    }
}

/// A worker that sends calls to a service of 60 calls in any second, which asks for `wait` when it throttles. The worker
/// has another call `gap` after each reply. Returns the accepted calls per second.
fn serve(adaptive: &mut AdaptiveRate, (from, until): (u64, u64), wait: Span, gap: Span) -> u64 {
    let (mut now, mut accepted) = (test_time(from * 1_000), Vec::new());
    while now < test_time(until * 1_000) {
        now = now.max(adaptive.next_at(now));
        adaptive.sent(now);
        let (sent_at, reply_at) = (now, now + Span::from_millis(10));
        now = reply_at + gap;
        if accepted.iter().rev().take_while(|at| sent_at.since(**at) < Span::from_secs(1)).count() < 60 {
            accepted.push(sent_at);
            adaptive.succeeded(sent_at, None, reply_at);
        } else {
            adaptive.throttled(sent_at, None, reply_at);
            if !wait.is_zero() {
                adaptive.record_wait(wait, reply_at);
                now = now.max(reply_at + wait);
            }
        }
    }
    accepted.len() as u64 / (until - from)
}

const SECOND: Span = Span::from_secs(1);

#[test]
fn a_throttle_of_first_calls_forgets_no_rate() {
    let mut adaptive = starting_at(20);
    for call in 0..5 {
        adaptive.sent(test_time(20 * call));
    }
    adaptive.throttled(test_time(80), None, test_time(90));
    adaptive.record_wait(SECOND, test_time(90));
    serve(&mut adaptive, (2, 12), SECOND, Span::ZERO);
    let rate = serve(&mut adaptive, (12, 22), SECOND, Span::ZERO);
    assert!(rate >= 40, "{rate}");
}

#[test]
fn an_outage_without_waits_forgives_their_cost() {
    let spec = AdaptiveRateSpec { slowest: SECOND, ..AdaptiveRateSpec::default() };
    let mut adaptive = AdaptiveRate::new(spec).unwrap();
    serve(&mut adaptive, (0, 120), SECOND, Span::ZERO);
    drive(&mut adaptive, test_time(120_000), test_time(720_000), |adaptive, sent_at, now| {
        adaptive.throttled(sent_at, None, now);
    });
    serve(&mut adaptive, (720, 780), SECOND, Span::ZERO);
    let rate = serve(&mut adaptive, (780, 800), SECOND, Span::ZERO);
    assert!(rate >= 45, "{rate}");
}

#[test]
fn a_throttle_of_rare_calls_forgets_no_rate() {
    for (gap, wait) in [(800, 0), (800, 1), (800, 10), (80, 0), (80, 1), (80, 10)] {
        let (gap, wait) = (Span::from_millis(gap), Span::from_secs(wait));
        let mut adaptive = fresh();
        serve(&mut adaptive, (0, 300), SECOND, Span::ZERO);
        serve(&mut adaptive, (300, 400), SECOND, gap);
        adaptive.sent(test_time(400_000));
        adaptive.throttled(test_time(400_000), None, test_time(400_010));
        adaptive.record_wait(wait, test_time(400_010));
        let rates = [(411, 421), (421, 441)].map(|range| serve(&mut adaptive, range, SECOND, Span::ZERO));
        assert!(rates[0] >= 25 && rates[1] >= 50, "{gap}, {wait}: {rates:?}");
    }
}

#[test]
fn a_rate_far_too_high_is_found_in_spite_of_waits() {
    for wait in [1, 10] {
        let mut adaptive = starting_at(1);
        let rates = [(0, 300), (300, 600)].map(|range| serve(&mut adaptive, range, Span::from_secs(wait), Span::ZERO));
        assert!(rates[1] >= 40, "{wait} s: {rates:?}");
    }
}

#[test]
fn callers_that_overtake_each_other_prove_their_rate() {
    let mut adaptive = starting_at(1);
    for call in 0..1_000 {
        adaptive.sent(test_time(2 * call));
    }
    adaptive.sent(test_time(1_998) - Span::from_micros(1));
    adaptive.throttled(test_time(1_998), None, test_time(2_010));
    assert!(adaptive.interval() < Span::from_millis(3), "{}", adaptive.interval());
}

/// Calls of an earlier interval at the same rate count, too.
#[test]
fn a_throttle_counts_at_the_rate_of_its_call() {
    let mut adaptive = fresh();
    for (sent_at, counts) in [(0, false), (2_000, true)] {
        drive(&mut adaptive, test_time(0), test_time(2_500), |adaptive, sent_at, now| {
            adaptive.succeeded(sent_at, None, now);
        });
        let before = adaptive.interval();
        adaptive.throttled(test_time(sent_at), None, test_time(2_500));
        assert_eq!(adaptive.interval() > before, counts, "sent at {sent_at} ms");
    }
}

#[test]
fn total_throttling_slows_to_the_longest_interval() {
    let mut adaptive = fresh();
    drive(&mut adaptive, test_time(0), test_time(600_000), |adaptive, sent_at, now| {
        adaptive.throttled(sent_at, None, now)
    });
    let slowest = AdaptiveRateSpec::default().slowest;
    assert!((slowest - Span::from_millis(5)..=slowest).contains(&adaptive.interval()), "{:?}", adaptive.interval());
    let sent = drive(&mut adaptive, test_time(600_000), test_time(4_200_000), |adaptive, sent_at, now| {
        adaptive.throttled(sent_at, None, now);
    });
    assert!((58..=61).contains(&sent), "{sent} in an hour");
}

#[test]
fn concurrent_throttles_count_as_one() {
    let mut adaptive = fresh();
    for _ in 0..10 {
        adaptive.sent(test_time(0));
    }
    adaptive.throttled(test_time(0), None, test_time(20));
    let after_one = adaptive.interval();
    assert!(after_one > AdaptiveRateSpec::default().initial);
    for _ in 0..9 {
        adaptive.throttled(test_time(0), None, test_time(30));
    }
    assert_eq!(adaptive.interval(), after_one);
}

#[test]
fn an_unused_rate_is_not_raised() {
    let mut adaptive = fresh();
    for call in 0..200 {
        adaptive.sent(test_time(call * 1_000));
        adaptive.succeeded(test_time(call * 1_000), None, test_time(call * 1_000 + 10));
    }
    assert_eq!(adaptive.interval(), AdaptiveRateSpec::default().initial, "one a second is sent, and ten may be");
}

#[test]
fn stated_allowances_bound_and_raise_the_rate() {
    let mut adaptive = fresh();
    let mut left = 600_u64;
    let sent = drive(&mut adaptive, test_time(0), test_time(60_000), |adaptive, sent_at, now| {
        left = left.checked_sub(1).expect("never more than there is");
        adaptive.succeeded(
            sent_at,
            Some(RemainingAmount { amount: left, limit: Some(600), resets_at: test_time(60_000) }),
            now,
        );
    });
    assert!(sent >= 590, "{sent} of 600 in a minute");
    adaptive.throttled(
        test_time(59_999),
        Some(RemainingAmount { amount: 0, limit: None, resets_at: test_time(70_000) }),
        test_time(60_000),
    );
    adaptive.succeeded(
        test_time(59_998),
        Some(RemainingAmount { amount: 5, limit: None, resets_at: test_time(70_000) }),
        test_time(60_001),
    );
    assert_eq!(adaptive.next_at(test_time(60_001)), test_time(70_000));

    let (mut promised, mut silent) = (fresh(), fresh());
    for adaptive in [&mut promised, &mut silent] {
        adaptive.sent(test_time(0));
        adaptive.throttled(test_time(0), None, test_time(10));
    }
    let rest = Some(RemainingAmount { amount: 60_000, limit: None, resets_at: test_time(60_000) });
    drive(&mut promised, test_time(500), test_time(10_000), |adaptive, sent_at, now| {
        adaptive.succeeded(sent_at, rest, now)
    });
    drive(&mut silent, test_time(500), test_time(10_000), |adaptive, sent_at, now| {
        adaptive.succeeded(sent_at, None, now)
    });
    assert!(promised.interval().as_micros() * 2 < silent.interval().as_micros(), "{promised:?} {silent:?}");
}

#[test]
fn long_scarce_allowances_use_the_slowest_rate() {
    let mut adaptive = fresh();
    adaptive.sent(test_time(0));
    let rest = RemainingAmount { amount: 999, limit: Some(1_000), resets_at: test_time(30 * 86_400_000) };
    adaptive.succeeded(test_time(0), Some(rest), test_time(10));
    // Rates are whole numbers of millionths.
    let (slowest, waits) = (AdaptiveRateSpec::default().slowest, adaptive.next_at(test_time(10)).since(test_time(0)));
    assert!((slowest - Span::from_millis(5)..=slowest).contains(&waits), "{waits:?}");
}

#[test]
fn a_clock_step_back_delays_no_call() {
    let rng = &mut SmallRng::seed_from_u64(1);
    let pacer = LocalPacer::new(PacerSpec::default()).unwrap();
    for mut pace in [Pace::from(fresh()), Pace::from(pacer)] {
        pace.sent(test_time(3_600_000));
        pace.ended(test_time(3_600_000), Class::Throttled, None, test_time(3_600_010), rng);
        let wait = Span::from_duration(pace.interval());
        assert!(pace.next_at(test_time(0)) <= test_time(0));
        pace.sent(test_time(1_000));
        pace.ended(test_time(1_000), Class::Throttled, None, test_time(1_010), rng);
        assert!(Span::from_duration(pace.interval()) > wait, "it goes on learning");
    }
}

#[test]
fn only_throttled_replies_change_the_pace() {
    let rng = &mut SmallRng::seed_from_u64(1);
    let mut pace = Pace::from(LocalPacer::new(PacerSpec::default()).unwrap());
    for class in [Class::Transient, Class::Auth, Class::Cancelled, Class::Success, Class::Permanent] {
        pace.ended(test_time(0), class, None, test_time(10), rng);
        assert!(pace.interval().is_zero(), "{class:?}");
    }
    pace.ended(test_time(0), Class::Throttled, None, test_time(10), rng);
    pace.ended(test_time(0), Class::Throttled, None, test_time(11), rng);
    assert_eq!(pace.interval(), PacerSpec::default().initial, "both were sent before the step");
    pace.sent(test_time(20));
    assert_eq!(pace.next_at(test_time(21)), test_time(520));
}

#[test]
fn earlier_calls_successes_undo_no_step() {
    let rng = &mut SmallRng::seed_from_u64(1);
    let mut pace = Pace::from(LocalPacer::new(PacerSpec::default()).unwrap());
    let initial = PacerSpec::default().initial;
    for _ in 0..50 {
        pace.sent(test_time(0));
    }
    for call in 0..50 {
        let class = if call < 20 { Class::Throttled } else { Class::Success };
        pace.ended(test_time(0), class, None, test_time(10 + call), rng);
    }
    assert_eq!(pace.interval(), initial, "thirty that were sent before it");
    for call in 0..10 {
        assert_eq!(pace.interval(), initial, "{call} that were sent after it");
        pace.ended(test_time(100), Class::Success, None, test_time(200), rng);
    }
    assert!(pace.interval().is_zero());
    pace.ended(test_time(3_600_000), Class::Throttled, None, test_time(3_600_010), rng);
    for _ in 0..10 {
        pace.ended(test_time(0), Class::Success, None, test_time(10), rng);
    }
    assert!(pace.interval().is_zero(), "the clock has stepped back by an hour");
}

#[test]
fn invalid_specs_are_rejected() {
    let spec = AdaptiveRateSpec::default();
    let refused = |spec| AdaptiveRate::new(spec).unwrap_err();
    assert_eq!(refused(AdaptiveRateSpec { fastest: Span::ZERO, ..spec }), AdaptiveRateError::ZeroFastest);
    assert_eq!(refused(AdaptiveRateSpec { slowest: Span::from_secs(3_601), ..spec }), AdaptiveRateError::TooSlow);
    assert_eq!(refused(AdaptiveRateSpec { initial: Span::from_secs(61), ..spec }), AdaptiveRateError::OutOfOrder);
    assert_eq!(refused(AdaptiveRateSpec { fastest: Span::from_secs(1), ..spec }), AdaptiveRateError::OutOfOrder);
}
