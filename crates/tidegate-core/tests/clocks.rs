//! Clocks that step back, jump, drift and stand still: no client is locked out for longer than the limit itself allows,
//! and no additional calls are admitted in true time.

use std::sync::Arc;

use tidegate_core::batch::execute;
use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Batch, Concurrency, KeyState, Limit, LimitKind, Limits, Op, PenaltyMode, Quota, Rate, Span, Time, Verb, Window,
};
use tidegate_testkit::clock::{ClockFault, ClockReading, readings};
use tidegate_testkit::fixtures::{TestLimiter, client_key, doubling_penalty, limit_id, test_time, window_limit};
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

const YEAR: Span = Span::from_secs(365 * 86_400);
const MINUTE: Span = Span::from_secs(60);

/// A limit of every kind, with the longest time in which a full one must have room again, whatever the clock did. A
/// coarse window needs one cell more, a rate the second burst of paroles, a quota the rest of its period.
fn every_kind(limit: u64) -> [(Limit, Span); 5] {
    [
        (window_limit(limit, 60), MINUTE),
        (Limit::new(LimitKind::Window(Window::new(limit, MINUTE, 1).expect("a window"))), MINUTE + MINUTE),
        (Limit::new(LimitKind::Rate(Rate::new(limit, MINUTE, limit).expect("a rate"))), MINUTE + MINUTE),
        (
            Limit::new(LimitKind::Quota(Quota::new(limit, Arc::new(FixedPeriods(MINUTE))).expect("a quota"))),
            MINUTE + MINUTE,
        ),
        (Limit::new(LimitKind::Concurrency(Concurrency::new(limit, MINUTE).expect("permits"))), MINUTE),
    ]
}

fn take(limiter: &TestLimiter, holder: u64, now: Time) -> bool {
    let mut batch = Batch::new(holder);
    batch.push(Op::new(limit_id(0), Verb::Take, client_key(1), 1)).expect("room for one");
    limiter.decide(&batch, now).0.allowed
}

/// The clock is wrong by 10 s, a minute or a year, a client uses its limit, and the clock is corrected. The client is
/// refused at first, and admitted again after the limit's own length.
#[test]
fn clock_steps_back_neither_block_nor_admit_extra() {
    for ahead in [Span::from_secs(10), MINUTE, YEAR, YEAR.times(50)] {
        for limit in [1, 2, 5] {
            for (kind, (plan, longest)) in every_kind(limit).into_iter().enumerate() {
                for step in [Span::from_secs(1), Span::from_secs(7), longest] {
                    let limiter = TestLimiter::new([plan.clone()]);
                    for holder in 0..limit {
                        assert!(take(&limiter, holder, test_time(0) + ahead));
                    }
                    assert!(!take(&limiter, 99, test_time(0) + ahead));
                    assert!(!take(&limiter, 99, test_time(0)), "kind {kind}, limit {limit}, {ahead} ahead: minted");
                    let mut now = test_time(0);
                    while !take(&limiter, 99, now) {
                        now = now + step;
                        assert!(
                            now <= test_time(0) + longest + step,
                            "kind {kind}, limit {limit}, {ahead} ahead: locked out"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_clock_step_back_never_lengthens_blocks() {
    for ahead in [Span::from_secs(10), YEAR] {
        for mode in [PenaltyMode::Parole, PenaltyMode::Strict] {
            let limiter = TestLimiter::new([window_limit(1, 60).with_penalty(doubling_penalty(2, 64, mode, MINUTE))]);
            assert!(limiter.call(1, test_time(0) + ahead).allowed);
            assert!(limiter.call(1, test_time(0) + ahead).blocked);
            let told = limiter.call(1, test_time(0));
            assert!(told.blocked && told.retry_after <= Some(MINUTE), "{told:?}");
            let wait = told.retry_after.unwrap();
            assert!(!limiter.fork().call(1, test_time(0) + wait - Span::from_micros(1)).allowed);
            assert!(limiter.call(1, test_time(0) + wait).allowed);
        }
    }
}

/// A peek doesn't change any bit of a state, even if the clock has jumped or stepped back.
#[test]
fn a_peek_by_a_wrong_clock_changes_nothing() {
    for (plan, _) in every_kind(2) {
        let plan = plan.with_penalty(doubling_penalty(2, 64, PenaltyMode::Parole, MINUTE));
        let limits = Limits::new(vec![plan]).unwrap();
        let ask = |cells: &mut [KeyState], verb, holder, now| {
            let mut batch = Batch::new(holder);
            batch.push(Op::new(limit_id(0), verb, client_key(1), 1)).unwrap();
            execute(&batch, &limits, cells, now)
        };
        let mut cells = [KeyState::default()];
        for holder in 0..3 {
            ask(&mut cells, Verb::Take, holder, test_time(0));
        }
        let before = format!("{cells:?}");
        for now in [
            test_time(0),
            test_time(0) - Span::from_secs(10),
            test_time(0) - YEAR,
            test_time(0) + YEAR,
            Time::ZERO,
            Time::NEVER,
        ] {
            ask(&mut cells, Verb::Peek, 9, now);
            assert_eq!(format!("{cells:?}"), before, "{now:?}");
        }
    }
}

/// Two threads read the clock and reach the state in the opposite order. The block of the later time doesn't change.
#[test]
fn an_overtaken_call_shortens_no_block_or_lease() {
    let limiter =
        TestLimiter::new([window_limit(1, 60).with_penalty(doubling_penalty(2, 64, PenaltyMode::Parole, MINUTE))]);
    assert!(limiter.call(1, test_time(50)).allowed);
    assert!(limiter.call(1, test_time(50)).blocked);
    for millis in 0..50 {
        assert!(!limiter.call(1, test_time(millis)).allowed);
    }
    assert!(!limiter.call(1, test_time(2_049)).allowed);
    assert!(limiter.call(1, test_time(2_050)).allowed);

    let permit = TestLimiter::new([Limit::new(LimitKind::Concurrency(Concurrency::new(1, MINUTE).unwrap()))]);
    assert!(take(&permit, 1, test_time(50)));
    assert!(!take(&permit, 2, test_time(0)));
    assert!(!take(&permit, 2, test_time(60_049)));
    assert!(take(&permit, 2, test_time(60_050)));
}

fn admitted(limiter: &TestLimiter, readings: &[ClockReading]) -> Vec<ClockReading> {
    let calls = readings.iter().enumerate();
    calls
        .filter(|(holder, reading)| take(limiter, *holder as u64, reading.shown_time))
        .map(|(_, reading)| *reading)
        .collect()
}

fn most_within(moments: &[Time], length: Span) -> u64 {
    let held = |&end: &Time| moments.iter().filter(|&&start| start <= end && end.since(start) < length).count();
    moments.iter().map(held).max().unwrap_or(0) as u64
}

/// A clock that only goes back or stands still admits no additional calls: it never gains on true time. So no true
/// window of a strict limit contains more than the limit.
#[test]
fn clocks_losing_time_never_exceed_strict_limits() {
    property::check(case_count(600, 10_000), 3, |mut random| {
        let trouble = random.pick(&[ClockFault::None, ClockFault::StepsBack]);
        let limit = random.between(1, 8);
        let length = Span::from_millis(random.between(10_000, 60_000));
        let mut random = RandomSource::from_seed(random.next_u64());
        let readings = readings(trouble, test_time(0), Span::from_secs(3), 400, &mut random);
        let plan = Window::new(limit, length, 64).map_err(|error| error.to_string())?;
        let limiter = TestLimiter::new([Limit::new(LimitKind::Window(plan))]);
        let moments: Vec<Time> = admitted(&limiter, &readings).iter().map(|reading| reading.true_time).collect();
        let held = most_within(&moments, length);
        if held > limit { Err(format!("{held} in a true {length}, limit {limit}, {trouble:?}")) } else { Ok(()) }
    });
}

/// Whatever the clock does, a client that continues to call is admitted again within the limit's length plus the time
/// that the clock lost.
#[test]
fn no_clock_fault_locks_out_a_client() {
    property::check(case_count(300, 5_000), 3, |mut random| {
        let trouble = random.pick(&ClockFault::ALL);
        let kinds = every_kind(3);
        let (plan, longest) = kinds[random.below(kinds.len() as u64) as usize].clone();
        let readings =
            readings(trouble, test_time(0), Span::from_secs(1), 600, &mut RandomSource::from_seed(random.next_u64()));
        let limiter = TestLimiter::new([plan.clone()]);
        let mut refused_since: Option<ClockReading> = None;
        let mut shown_passed = Span::ZERO;
        let mut last = readings[0];
        for (holder, &reading) in readings.iter().enumerate() {
            let passed = take(&limiter, holder as u64, reading.shown_time);
            // A jump ahead doesn't count as waiting time of a client.
            shown_passed = shown_passed + reading.shown_time.since(last.shown_time).min(Span::from_secs(1));
            if reading.shown_time < last.shown_time {
                // A step back restarts the wait at most.
                (refused_since, shown_passed) = (None, Span::ZERO);
            }
            last = reading;
            if passed {
                (refused_since, shown_passed) = (None, Span::ZERO);
            } else if refused_since.is_none() {
                (refused_since, shown_passed) = (Some(reading), Span::ZERO);
            } else if shown_passed > longest + Span::from_secs(2) {
                return Err(format!("refused for {shown_passed} on a clock in {trouble:?} by {plan:?}"));
            }
        }
        Ok(())
    });
}

/// A quota's period is granted once, even if the clock crosses its boundary back and forth.
#[test]
fn no_quota_period_is_granted_twice() {
    property::check(case_count(400, 5_000), 200, |mut random| {
        let quota = Quota::new(5, Arc::new(FixedPeriods(Span::from_secs(3600)))).map_err(|error| error.to_string())?;
        let limiter = TestLimiter::new([Limit::new(LimitKind::Quota(quota))]);
        let boundary = Time::from_secs(1_700_000_000 / 3600 * 3600 + 7200);
        let mut latest = boundary - Span::from_secs(600);
        let mut passed = 0;
        while !random.is_exhausted() {
            latest = latest + Span::from_micros(random.below(100_000_000));
            let shown = latest - Span::from_micros(random.below(1_200_000_000));
            passed += u64::from(limiter.call(1, shown).allowed);
        }
        let periods = 1 + latest.since(boundary - Span::from_secs(3600)).as_micros() / 3_600_000_000;
        if passed > periods * 5 { Err(format!("{passed} in {periods} periods")) } else { Ok(()) }
    });
}

/// An operation without a charge leaves a quota as full as it was, even if the clock jumped into a later period. Back
/// in its own period it grants nothing more, and the next period is free.
#[test]
fn a_temporary_clock_jump_clears_no_quota() {
    let quota = Limit::new(LimitKind::Quota(Quota::new(2, Arc::new(FixedPeriods(MINUTE))).unwrap()));
    let limits = Limits::new(vec![quota, window_limit(0, 60)]).unwrap();
    let ask = |cells: &mut [KeyState; 2], verb, cost, limits_asked: usize, now| {
        let mut batch = Batch::new(0);
        (0..limits_asked).for_each(|limit| batch.push(Op::new(limit_id(limit), verb, client_key(1), cost)).unwrap());
        !execute(&batch, &limits, &mut cells[..limits_asked], now).refuses()
    };
    let begins = Time::from_secs(1_700_000_040);
    for ahead in [MINUTE, MINUTE + MINUTE, YEAR] {
        for (what, verb, cost, limits_asked) in [
            ("a look", Verb::Peek, 1, 1),
            ("a call that never fits", Verb::Take, 3, 1),
            ("a call that another limit refuses", Verb::Take, 1, 2),
            ("a refund", Verb::Refund, 2, 1),
        ] {
            let mut cells = [KeyState::default(), KeyState::default()];
            assert!(ask(&mut cells, Verb::Take, 2, 1, begins));
            ask(&mut cells, verb, cost, limits_asked, begins + ahead);
            assert!(!ask(&mut cells, Verb::Take, 1, 1, begins), "{what}, {ahead} ahead: granted twice");
            assert!(ask(&mut cells, Verb::Take, 2, 1, begins + MINUTE), "{what}, {ahead} ahead: locked out");
            assert!(!ask(&mut cells, Verb::Take, 1, 1, begins + MINUTE));
        }
    }
}
