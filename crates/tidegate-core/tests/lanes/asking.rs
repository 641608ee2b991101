//! The calls that ask the store, and the times at which they do.

use super::*;

#[test]
fn only_one_call_asks_at_a_time() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let tickets: Vec<Ticket> = (0..3).map(|_| enqueue(&mut lanes, Lane::User, test_time(0))).collect();
    assert_eq!(ask(&mut lanes, test_time(0)), tickets[0]);
    let webhook = enqueue(&mut lanes, Lane::Webhook, test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(Time::NEVER));
    // The asking call is cancelled. Its answer comes later and changes nothing.
    assert!(lanes.cancel(tickets[0]));
    assert_eq!(ask(&mut lanes, test_time(0)), webhook);
    lanes.refuse(tickets[0], refusal(test_time(9_000), RefusalScope::Provider), test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(Time::NEVER));
    assert_eq!(lanes.grant(tickets[0], test_time(0)), None);
    assert_eq!(lanes.grant(webhook, test_time(0)), Some(Lane::Webhook));
    assert_eq!(drain(&mut lanes, test_time(0)), tickets[1..]);
    assert_eq!((lanes.in_flight(Lane::Webhook), lanes.in_flight(Lane::User)), (1, 0));
}

#[test]
fn a_refusal_holds_equal_or_costlier_calls_only() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let costs = [10, 10, 50, 9];
    let tickets = costs.map(|cost| lanes.enqueue(Lane::User, cost, Time::NEVER, test_time(0)).unwrap());
    assert_eq!(ask(&mut lanes, test_time(0)), tickets[0]);
    lanes.refuse(tickets[0], refusal(test_time(100), RefusalScope::Provider), test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(100)));
    for ticket in &tickets[..2] {
        lanes.cancel(*ticket);
        assert_eq!(lanes.poll(test_time(1)), QueueStep::Sleep(test_time(100)), "as dear, or dearer");
    }
    assert_eq!(lanes.poll(test_time(100) - MICRO), QueueStep::Sleep(test_time(100)));
    let mut later = lanes.clone();
    assert_eq!(ask(&mut later, test_time(100)), tickets[2], "at its exact moment");
    lanes.cancel(tickets[2]);
    assert_eq!(ask(&mut lanes, test_time(1)), tickets[3], "a cheaper one may fit before");
}

#[test]
fn a_poke_makes_calls_ask_again() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let user = enqueue(&mut lanes, Lane::User, test_time(0));
    let background = enqueue(&mut lanes, Lane::Background, test_time(0));
    for scope in [RefusalScope::Provider, RefusalScope::Lane] {
        assert_eq!(ask(&mut lanes, test_time(0)), user);
        lanes.refuse(user, refusal(test_time(100), scope), test_time(0));
        lanes.clear_refusals();
    }
    // This also holds if it comes between the question and the answer.
    for scope in [RefusalScope::Provider, RefusalScope::Lane] {
        assert_eq!(ask(&mut lanes, test_time(0)), user);
        lanes.clear_refusals();
        lanes.refuse(user, refusal(test_time(100), scope), test_time(0));
    }
    assert_eq!(ask(&mut lanes, test_time(0)), user);
    lanes.refuse(user, refusal(test_time(100), RefusalScope::Lane), test_time(0));
    assert_eq!(ask(&mut lanes, test_time(0)), background, "an old poke is used up");
}

#[test]
fn a_lanes_ceiling_blocks_only_that_lane() {
    let mut lanes = Lanes::new(LanesSpec { floor: MAX_FLOOR, ..LanesSpec::default() });
    let background = enqueue(&mut lanes, Lane::Background, test_time(0));
    assert_eq!(ask(&mut lanes, test_time(0)), background);
    lanes.refuse(background, refusal(test_time(30_000), RefusalScope::Lane), test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(30_000)));
    let users: Vec<Ticket> = (0..50).map(|_| enqueue(&mut lanes, Lane::User, test_time(1))).collect();
    assert_eq!(drain(&mut lanes, test_time(1)), users, "and what is held back by its own earns no floor");
    let users: Vec<Ticket> = (0..2).map(|_| enqueue(&mut lanes, Lane::User, test_time(30_000))).collect();
    assert_eq!(drain(&mut lanes, test_time(30_000)), [users[0], users[1], background]);
}

#[test]
fn a_raised_call_ignores_its_old_lanes_refusal() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let raised = enqueue(&mut lanes, Lane::Background, test_time(0));
    let background = enqueue(&mut lanes, Lane::Background, test_time(0));
    assert_eq!(ask(&mut lanes, test_time(0)), raised);
    lanes.raise(raised, Lane::User, test_time(0)).unwrap();
    lanes.refuse(raised, refusal(test_time(100), RefusalScope::Lane), test_time(0));
    assert_eq!(ask(&mut lanes, test_time(0)), raised, "a user's call has no such ceiling");
    lanes.grant(raised, test_time(0));
    assert_eq!(ask(&mut lanes, test_time(0)), background);
}

#[test]
fn a_clock_step_back_delays_no_call() {
    let year = Span::from_secs(365 * 86_400);
    for scope in [RefusalScope::Provider, RefusalScope::Lane] {
        let mut lanes = Lanes::new(LanesSpec::default());
        let user = enqueue(&mut lanes, Lane::User, test_time(0) + year);
        assert_eq!(ask(&mut lanes, test_time(0) + year), user);
        lanes.refuse(user, refusal(test_time(1_000) + year, scope), test_time(0) + year);
        assert!(
            matches!(lanes.poll(test_time(0) + year - Span::from_millis(100)), QueueStep::Sleep(_)),
            "only overtaken"
        );
        assert_eq!(ask(&mut lanes, test_time(0)), user);
    }
    // The window that the background lane has to wait for starts now.
    let mut lanes = Lanes::new(LanesSpec { floor: 0, ..LanesSpec::default() });
    let background = enqueue(&mut lanes, Lane::Background, test_time(0) + year);
    for user in 0..=60 {
        enqueue(&mut lanes, Lane::User, test_time(user * 1_000));
        let granted = ask(&mut lanes, test_time(user * 1_000));
        lanes.grant(granted, test_time(user * 1_000));
        assert_eq!(granted == background, user == 60);
    }
}
