//! Who asks, and when.

use super::*;

#[test]
fn one_asks_until_it_is_answered_or_gone() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let tickets: Vec<Ticket> = (0..3).map(|_| enqueue(&mut lanes, Lane::User, at(0))).collect();
    assert_eq!(ask(&mut lanes, at(0)), tickets[0]);
    let webhook = enqueue(&mut lanes, Lane::Webhook, at(0));
    assert_eq!(lanes.poll(at(0)), Turn::Sleep(Time::NEVER));
    // Who asks is cancelled; the answer to it comes later, and changes nothing.
    assert!(lanes.cancel(tickets[0]));
    assert_eq!(ask(&mut lanes, at(0)), webhook);
    lanes.not_until(tickets[0], at(9_000), Scope::Provider, at(0));
    assert_eq!(lanes.poll(at(0)), Turn::Sleep(Time::NEVER));
    assert_eq!(lanes.granted(tickets[0], at(0)), None);
    assert_eq!(lanes.granted(webhook, at(0)), Some(Lane::Webhook));
    assert_eq!(drain(&mut lanes, at(0)), tickets[1..]);
    assert_eq!((lanes.in_flight(Lane::Webhook), lanes.in_flight(Lane::User)), (1, 0));
}

#[test]
fn a_refusal_holds_for_all_that_would_meet_it_and_no_longer() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let costs = [10, 10, 50, 9];
    let tickets = costs.map(|cost| lanes.enqueue(Lane::User, cost, Time::NEVER, at(0)).unwrap());
    assert_eq!(ask(&mut lanes, at(0)), tickets[0]);
    lanes.not_until(tickets[0], at(100), Scope::Provider, at(0));
    assert_eq!(lanes.poll(at(0)), Turn::Sleep(at(100)));
    for ticket in &tickets[..2] {
        lanes.cancel(*ticket);
        assert_eq!(lanes.poll(at(1)), Turn::Sleep(at(100)), "as dear, or dearer");
    }
    assert_eq!(lanes.poll(at(100) - MICRO), Turn::Sleep(at(100)));
    let mut later = lanes.clone();
    assert_eq!(ask(&mut later, at(100)), tickets[2], "at its exact moment");
    lanes.cancel(tickets[2]);
    assert_eq!(ask(&mut lanes, at(1)), tickets[3], "a cheaper one may fit before");
}

#[test]
fn a_poke_asks_again() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let user = enqueue(&mut lanes, Lane::User, at(0));
    let background = enqueue(&mut lanes, Lane::Background, at(0));
    for scope in [Scope::Provider, Scope::Lane] {
        assert_eq!(ask(&mut lanes, at(0)), user);
        lanes.not_until(user, at(100), scope, at(0));
        lanes.poke();
    }
    // Also if it comes between the question and the answer.
    for scope in [Scope::Provider, Scope::Lane] {
        assert_eq!(ask(&mut lanes, at(0)), user);
        lanes.poke();
        lanes.not_until(user, at(100), scope, at(0));
    }
    assert_eq!(ask(&mut lanes, at(0)), user);
    lanes.not_until(user, at(100), Scope::Lane, at(0));
    assert_eq!(ask(&mut lanes, at(0)), background, "an old poke is used up");
}

#[test]
fn a_lanes_own_ceiling_holds_nobody_else_back() {
    let mut lanes = Lanes::new(LanesSpec { floor: MAX_FLOOR, ..LanesSpec::default() });
    let background = enqueue(&mut lanes, Lane::Background, at(0));
    assert_eq!(ask(&mut lanes, at(0)), background);
    lanes.not_until(background, at(30_000), Scope::Lane, at(0));
    assert_eq!(lanes.poll(at(0)), Turn::Sleep(at(30_000)));
    let users: Vec<Ticket> = (0..50).map(|_| enqueue(&mut lanes, Lane::User, at(1))).collect();
    assert_eq!(drain(&mut lanes, at(1)), users, "and what is held back by its own earns no floor");
    let users: Vec<Ticket> = (0..2).map(|_| enqueue(&mut lanes, Lane::User, at(30_000))).collect();
    assert_eq!(drain(&mut lanes, at(30_000)), [users[0], users[1], background]);
}

#[test]
fn a_raised_calls_refusal_was_its_old_lanes() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let raised = enqueue(&mut lanes, Lane::Background, at(0));
    let background = enqueue(&mut lanes, Lane::Background, at(0));
    assert_eq!(ask(&mut lanes, at(0)), raised);
    lanes.raise(raised, Lane::User, at(0)).unwrap();
    lanes.not_until(raised, at(100), Scope::Lane, at(0));
    assert_eq!(ask(&mut lanes, at(0)), raised, "a user's call has no such ceiling");
    lanes.granted(raised, at(0));
    assert_eq!(ask(&mut lanes, at(0)), background);
}

#[test]
fn a_clock_that_steps_back_holds_nobody_back() {
    let year = Span::from_secs(365 * 86_400);
    for scope in [Scope::Provider, Scope::Lane] {
        let mut lanes = Lanes::new(LanesSpec::default());
        let user = enqueue(&mut lanes, Lane::User, at(0) + year);
        assert_eq!(ask(&mut lanes, at(0) + year), user);
        lanes.not_until(user, at(1_000) + year, scope, at(0) + year);
        assert!(matches!(lanes.poll(at(0) + year - Span::from_millis(100)), Turn::Sleep(_)), "only overtaken");
        assert_eq!(ask(&mut lanes, at(0)), user);
    }
    // The window that the background has to wait for counts from the present.
    let mut lanes = Lanes::new(LanesSpec { floor: 0, ..LanesSpec::default() });
    let background = enqueue(&mut lanes, Lane::Background, at(0) + year);
    for user in 0..=60 {
        enqueue(&mut lanes, Lane::User, at(user * 1_000));
        let granted = ask(&mut lanes, at(user * 1_000));
        lanes.granted(granted, at(user * 1_000));
        assert_eq!(granted == background, user == 60);
    }
}
