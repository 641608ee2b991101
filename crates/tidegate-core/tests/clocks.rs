//! Clocks that step back, jump, drift and stand still: nobody is locked out for longer than the limit itself could,
//! and nothing is minted that true time doesn't cover.

use std::sync::Arc;

use tidegate_core::batch::settle;
use tidegate_core::quota::Every;
use tidegate_core::{
    Batch, Concurrency, Kind, Limit, Limits, Op, PenaltyMode, Quota, Rate, Span, State, Time, Verb, Window,
};
use tidegate_testkit::clock::{Reading, Trouble, readings};
use tidegate_testkit::desk::{Desk, at, doubling, id, key, window};
use tidegate_testkit::dice::{Dice, count};
use tidegate_testkit::property;

const YEAR: Span = Span::from_secs(365 * 86_400);
const MINUTE: Span = Span::from_secs(60);

/// A limit of every kind with the longest that a full one may take to have room again, whatever the clock did: a
/// coarse window its cell more, a rate the second burst that paroles may overdraw, a quota the period that is left.
fn every_kind(limit: u64) -> [(Limit, Span); 5] {
    [
        (window(limit, 60), MINUTE),
        (Limit::new(Kind::Window(Window::new(limit, MINUTE, 1).expect("a window"))), MINUTE + MINUTE),
        (Limit::new(Kind::Rate(Rate::new(limit, MINUTE, limit).expect("a rate"))), MINUTE + MINUTE),
        (Limit::new(Kind::Quota(Quota::new(limit, Arc::new(Every(MINUTE))).expect("a quota"))), MINUTE + MINUTE),
        (Limit::new(Kind::Concurrency(Concurrency::new(limit, MINUTE).expect("permits"))), MINUTE),
    ]
}

fn take(desk: &Desk, holder: u64, now: Time) -> bool {
    let mut batch = Batch::new(holder);
    batch.push(Op::new(id(0), Verb::Take, key(1), 1)).expect("room for one");
    desk.ask(&batch, now).0.allowed
}

/// The clock was wrong by 10 s, a minute or a year, a client used what it had, and the clock was put right: it is
/// refused at first, and free again once the limit's own length has passed.
#[test]
fn a_step_back_neither_mints_nor_locks_out() {
    for ahead in [Span::from_secs(10), MINUTE, YEAR, YEAR.times(50)] {
        for limit in [1, 2, 5] {
            for (kind, (plan, longest)) in every_kind(limit).into_iter().enumerate() {
                for step in [Span::from_secs(1), Span::from_secs(7), longest] {
                    let desk = Desk::new([plan.clone()]);
                    for holder in 0..limit {
                        assert!(take(&desk, holder, at(0) + ahead));
                    }
                    assert!(!take(&desk, 99, at(0) + ahead));
                    assert!(!take(&desk, 99, at(0)), "kind {kind}, limit {limit}, {ahead} ahead: minted");
                    let mut now = at(0);
                    while !take(&desk, 99, now) {
                        now = now + step;
                        assert!(now <= at(0) + longest + step, "kind {kind}, limit {limit}, {ahead} ahead: locked out");
                    }
                }
            }
        }
    }
}

#[test]
fn a_step_back_never_lengthens_a_block() {
    for ahead in [Span::from_secs(10), YEAR] {
        for mode in [PenaltyMode::Parole, PenaltyMode::Strict] {
            let desk = Desk::new([window(1, 60).with_penalty(doubling(2, 64, mode, MINUTE))]);
            assert!(desk.call(1, at(0) + ahead).allowed);
            assert!(desk.call(1, at(0) + ahead).blocked);
            let told = desk.call(1, at(0));
            assert!(told.blocked && told.retry_after <= Some(MINUTE), "{told:?}");
            let wait = told.retry_after.unwrap();
            assert!(!desk.fork().call(1, at(0) + wait - Span::from_micros(1)).allowed);
            assert!(desk.call(1, at(0) + wait).allowed);
        }
    }
}

/// A look leaves a state as it is to the last bit, though the clock it is asked by has jumped or stepped back.
#[test]
fn a_look_by_a_wrong_clock_changes_nothing() {
    for (plan, _) in every_kind(2) {
        let plan = plan.with_penalty(doubling(2, 64, PenaltyMode::Parole, MINUTE));
        let limits = Limits::new(vec![plan]).unwrap();
        let ask = |cells: &mut [State], verb, holder, now| {
            let mut batch = Batch::new(holder);
            batch.push(Op::new(id(0), verb, key(1), 1)).unwrap();
            settle(&batch, &limits, cells, now)
        };
        let mut cells = [State::default()];
        for holder in 0..3 {
            ask(&mut cells, Verb::Take, holder, at(0));
        }
        let before = format!("{cells:?}");
        for now in [at(0), at(0) - Span::from_secs(10), at(0) - YEAR, at(0) + YEAR, Time::ZERO, Time::NEVER] {
            ask(&mut cells, Verb::Peek, 9, now);
            assert_eq!(format!("{cells:?}"), before, "{now:?}");
        }
    }
}

/// Two threads read the clock and reach the state in the other order: the later reading's block stands as it is.
#[test]
fn an_overtaken_call_shortens_no_block_and_no_lease() {
    let desk = Desk::new([window(1, 60).with_penalty(doubling(2, 64, PenaltyMode::Parole, MINUTE))]);
    assert!(desk.call(1, at(50)).allowed);
    assert!(desk.call(1, at(50)).blocked);
    for millis in 0..50 {
        assert!(!desk.call(1, at(millis)).allowed);
    }
    assert!(!desk.call(1, at(2_049)).allowed);
    assert!(desk.call(1, at(2_050)).allowed);

    let permit = Desk::new([Limit::new(Kind::Concurrency(Concurrency::new(1, MINUTE).unwrap()))]);
    assert!(take(&permit, 1, at(50)));
    assert!(!take(&permit, 2, at(0)));
    assert!(!take(&permit, 2, at(60_049)));
    assert!(take(&permit, 2, at(60_050)));
}

fn admitted(desk: &Desk, readings: &[Reading]) -> Vec<Reading> {
    let calls = readings.iter().enumerate();
    calls.filter(|(holder, reading)| take(desk, *holder as u64, reading.shown)).map(|(_, reading)| *reading).collect()
}

fn most_within(moments: &[Time], length: Span) -> u64 {
    let held = |&end: &Time| moments.iter().filter(|&&start| start <= end && end.since(start) < length).count();
    moments.iter().map(held).max().unwrap_or(0) as u64
}

/// A clock that only ever goes back or stands still mints nothing: true time is never behind it, so no true window
/// of a strict limit holds more than the limit.
#[test]
fn clocks_that_lose_time_mint_nothing() {
    property::check(count(600, 10_000), 3, |mut dice| {
        let trouble = dice.pick(&[Trouble::None, Trouble::StepsBack]);
        let limit = dice.between(1, 8);
        let length = Span::from_millis(dice.between(10_000, 60_000));
        let mut dice = Dice::seeded(dice.word());
        let readings = readings(trouble, at(0), Span::from_secs(3), 400, &mut dice);
        let plan = Window::new(limit, length, 64).map_err(|error| error.to_string())?;
        let desk = Desk::new([Limit::new(Kind::Window(plan))]);
        let moments: Vec<Time> = admitted(&desk, &readings).iter().map(|reading| reading.truth).collect();
        let held = most_within(&moments, length);
        if held > limit { Err(format!("{held} in a true {length}, limit {limit}, {trouble:?}")) } else { Ok(()) }
    });
}

/// Whatever the clock does, a client that goes on calling is admitted again within the limit's length and what the
/// clock itself lost.
#[test]
fn no_trouble_locks_out() {
    property::check(count(300, 5_000), 3, |mut dice| {
        let trouble = dice.pick(&Trouble::ALL);
        let kinds = every_kind(3);
        let (plan, longest) = kinds[dice.below(kinds.len() as u64) as usize].clone();
        let readings = readings(trouble, at(0), Span::from_secs(1), 600, &mut Dice::seeded(dice.word()));
        let desk = Desk::new([plan.clone()]);
        let mut refused_since: Option<Reading> = None;
        let mut shown_passed = Span::ZERO;
        let mut last = readings[0];
        for (holder, &reading) in readings.iter().enumerate() {
            let passed = take(&desk, holder as u64, reading.shown);
            // A jump ahead is no time that a client waited.
            shown_passed = shown_passed + reading.shown.since(last.shown).min(Span::from_secs(1));
            if reading.shown < last.shown {
                // A step back starts the wait anew, at most.
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

/// A quota's period is granted once, though the clock crosses its boundary back and forth.
#[test]
fn no_period_is_granted_twice() {
    property::check(count(400, 5_000), 200, |mut dice| {
        let quota = Quota::new(5, Arc::new(Every(Span::from_secs(3600)))).map_err(|error| error.to_string())?;
        let desk = Desk::new([Limit::new(Kind::Quota(quota))]);
        let boundary = Time::from_secs(1_700_000_000 / 3600 * 3600 + 7200);
        let mut latest = boundary - Span::from_secs(600);
        let mut passed = 0;
        while !dice.exhausted() {
            latest = latest + Span::from_micros(dice.below(100_000_000));
            let shown = latest - Span::from_micros(dice.below(1_200_000_000));
            passed += u64::from(desk.call(1, shown).allowed);
        }
        let periods = 1 + latest.since(boundary - Span::from_secs(3600)).as_micros() / 3_600_000_000;
        if passed > periods * 5 { Err(format!("{passed} in {periods} periods")) } else { Ok(()) }
    });
}

/// What doesn't charge a quota leaves it as full as it was, though the clock that it was asked by had jumped into a
/// later period: back in its own it grants nothing more, and the next period is free.
#[test]
fn a_jump_ahead_and_back_empties_no_quota() {
    let quota = Limit::new(Kind::Quota(Quota::new(2, Arc::new(Every(MINUTE))).unwrap()));
    let limits = Limits::new(vec![quota, window(0, 60)]).unwrap();
    let ask = |cells: &mut [State; 2], verb, cost, limits_asked: usize, now| {
        let mut batch = Batch::new(0);
        (0..limits_asked).for_each(|limit| batch.push(Op::new(id(limit), verb, key(1), cost)).unwrap());
        !settle(&batch, &limits, &mut cells[..limits_asked], now).refuses()
    };
    let begins = Time::from_secs(1_700_000_040);
    for ahead in [MINUTE, MINUTE + MINUTE, YEAR] {
        for (what, verb, cost, limits_asked) in [
            ("a look", Verb::Peek, 1, 1),
            ("a call that never fits", Verb::Take, 3, 1),
            ("a call that another limit refuses", Verb::Take, 1, 2),
            ("a refund", Verb::Refund, 2, 1),
        ] {
            let mut cells = [State::default(), State::default()];
            assert!(ask(&mut cells, Verb::Take, 2, 1, begins));
            ask(&mut cells, verb, cost, limits_asked, begins + ahead);
            assert!(!ask(&mut cells, Verb::Take, 1, 1, begins), "{what}, {ahead} ahead: granted twice");
            assert!(ask(&mut cells, Verb::Take, 2, 1, begins + MINUTE), "{what}, {ahead} ahead: locked out");
            assert!(!ask(&mut cells, Verb::Take, 1, 1, begins + MINUTE));
        }
    }
}
