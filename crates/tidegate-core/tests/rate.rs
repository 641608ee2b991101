//! `rate` never exceeds its documented bound, in any window and after any idle time.

use tidegate_core::rate::ArrivalTime;
use tidegate_core::{Limit, LimitKind, MAX_LIMIT, Rate, Span, Time};
use tidegate_testkit::fixtures::{TestLimiter, test_time};
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

const TEN_YEARS: Span = Span::from_secs(10 * 365 * 86_400);

fn any_rate(random: &mut RandomSource) -> Option<Rate> {
    let number = random.pick(&[1, 2, 3, 7, 10, 1_000, 999_983, MAX_LIMIT]);
    let per = random.pick(&[1, 7, 1_000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000]);
    let burst = random.pick(&[1, 2, 5, 20, 1_000, 1 << 20]);
    // At most ten years to refill: time ends in 2112, and arrivals saturate there.
    let refill = u128::from(per) * u128::from(burst) / u128::from(number);
    Rate::new(number, Span::from_micros(per), burst).ok().filter(|_| refill < u128::from(TEN_YEARS.as_micros()))
}

fn check_bound(rate: &Rate, admitted: &[(Time, u64)]) -> Result<(), String> {
    for (first, &(start, _)) in admitted.iter().enumerate() {
        let mut held = 0_u64;
        for &(end, cost) in &admitted[first..] {
            held += cost;
            // Closed at both ends: the shortest window that contains both calls.
            let length = end.since(start);
            if held > rate.max_in(length) {
                return Err(format!("{held} in {length}, bound {} of {rate:?}", rate.max_in(length)));
            }
        }
    }
    Ok(())
}

#[test]
fn admissions_never_exceed_the_stated_bound() {
    property::check(case_count(600, 10_000), 600, |mut random| {
        let Some(rate) = any_rate(&mut random) else { return Ok(()) };
        let limiter = TestLimiter::new([Limit::new(LimitKind::Rate(rate))]);
        let mut admitted = Vec::new();
        let mut now = test_time(0);
        while !random.is_exhausted() && now < test_time(0) + TEN_YEARS {
            let cost = match random.below(4) {
                0..=1 => 1,
                2 => random.between(1, rate.burst()),
                _ => rate.burst(),
            };
            let decision = limiter.take(1, cost, now);
            if decision.allowed {
                admitted.push((now, cost));
            }
            now = now
                + match (decision.retry_after, random.below(8)) {
                    (Some(wait), 0..=4) => wait,
                    (None, 0..=3) => Span::ZERO,
                    (_, 5) => Span::from_micros(random.below(rate.per().as_micros() * 2)),
                    (_, 6) => rate.per().times(random.between(1, 1_000)),
                    _ => Span::from_micros(random.below(1_000)),
                };
        }
        check_bound(&rate, &admitted)
    });
}

/// Threads read the clock and reach the state in different orders, up to a tenth of a second apart.
#[test]
fn overtaken_calls_never_exceed_the_bound() {
    property::check(case_count(600, 10_000), 600, |mut random| {
        let Some(rate) = any_rate(&mut random) else { return Ok(()) };
        let limiter = TestLimiter::new([Limit::new(LimitKind::Rate(rate))]);
        let mut admitted = Vec::new();
        let mut latest = test_time(0);
        while !random.is_exhausted() && latest < test_time(0) + TEN_YEARS {
            let read_at = latest - Span::from_micros(random.pick(&[0, 0, 1, 5_000, 99_999, 100_000]));
            let cost = random.pick(&[1, 1, rate.burst()]);
            let decision = limiter.take(1, cost, read_at);
            if decision.allowed {
                admitted.push((read_at, cost));
            }
            latest = latest
                + match (decision.retry_after, random.below(4)) {
                    (Some(wait), 0) => wait,
                    (_, 1) => Span::from_micros(random.below(100_000)),
                    _ => Span::ZERO,
                };
        }
        admitted.sort_by_key(|&(moment, _)| moment);
        check_bound(&rate, &admitted)
    });
}

#[test]
fn an_idle_key_gets_only_its_burst() {
    let rate = Rate::new(10, Span::from_secs(1), 20).unwrap();
    let limiter = TestLimiter::new([Limit::new(LimitKind::Rate(rate))]);
    for start in [test_time(0), test_time(0) + Span::from_secs(86_400 * 365)] {
        let burst = (0..100).filter(|_| limiter.call(1, start).allowed).count();
        assert_eq!(burst, 20);
        let steady = (1..=1_000_u64).filter(|&step| limiter.call(1, start + Span::from_millis(step)).allowed).count();
        assert_eq!(steady, 10);
    }
}

#[test]
fn spacing_is_even_and_waits_are_exact() {
    for (number, per, spacing) in
        [(10, 1_000_000, 100_000), (3, 1_000_000, 333_334), (1, 7, 7), (1_000_000, 1_000_000, 1)]
    {
        let rate = Rate::new(number, Span::from_micros(per), 1).unwrap();
        let limiter = TestLimiter::new([Limit::new(LimitKind::Rate(rate))]);
        let mut now = test_time(0);
        for _ in 0..100 {
            assert!(limiter.call(1, now).allowed);
            let wait = limiter.call(1, now).retry_after.unwrap();
            assert!(wait.as_micros() <= spacing && wait.as_micros() + 1 >= spacing, "{wait} at {number} per {per} us");
            assert!(!limiter.call(1, now + wait - Span::from_micros(1)).allowed);
            now = now + wait;
        }
    }
}

#[test]
fn refunds_never_exceed_the_bound() {
    property::check(case_count(300, 5_000), 400, |mut random| {
        let Some(rate) = any_rate(&mut random) else { return Ok(()) };
        let limiter = TestLimiter::new([Limit::new(LimitKind::Rate(rate))]);
        let mut kept = Vec::new();
        let mut now = test_time(0);
        while !random.is_exhausted() && now < test_time(0) + TEN_YEARS {
            let cost = random.between(1, rate.burst());
            let decision = limiter.take(1, cost, now);
            if decision.allowed {
                if random.chance(30) {
                    let place = [(tidegate_testkit::fixtures::limit_id(0), 1)];
                    limiter.apply(tidegate_core::Verb::Refund, &place, cost, now);
                } else {
                    kept.push((now, cost));
                }
            }
            now = now + decision.retry_after.unwrap_or(Span::from_micros(random.below(rate.per().as_micros())));
        }
        check_bound(&rate, &kept)
    });
}

/// A call that is admitted with two times around the current time would be admitted at any time between them.
#[test]
fn approximate_time_admits_what_exact_time_does() {
    property::check(case_count(20_000, 400_000), 12, |mut random| {
        let Some(rate) = any_rate(&mut random) else { return Ok(()) };
        let refill = rate.per().as_micros().saturating_mul(rate.burst()) / rate.count();
        let earliest = test_time(0);
        let latest = earliest + Span::from_micros(random.below(52_001));
        let start = earliest - Span::from_micros(random.below(1_000));
        let used = random.below(rate.burst() + 1);
        let arrival =
            rate.charge(ArrivalTime::default(), used, start + Span::from_micros(random.below(refill / 2 + 2)));
        let cost = random.pick(&[0, 1, 2, rate.burst(), rate.burst() + 1, MAX_LIMIT, u64::MAX]);
        let Some(ahead) = rate.take_between(arrival, cost, (earliest, latest)) else { return Ok(()) };
        let between = earliest + Span::from_micros(random.below(latest.since(earliest).as_micros() + 1));
        for now in [earliest, between, latest] {
            let (retry_at, charged) = (rate.retry_at(arrival, cost, now), rate.charge(arrival, cost, now));
            if retry_at != now || charged != ahead {
                return Err(format!("{rate:?}: {arrival:?} at {now:?}: {retry_at:?}, {charged:?}, but {ahead:?}"));
            }
        }
        Ok(())
    });
}
