//! The order of the calls.

use super::*;

#[test]
fn first_come_first_served_within_a_lane() {
    for lane in Lane::ALL {
        let mut lanes = Lanes::new(LanesSpec::default());
        // Slots are reused in another order; calls keep theirs.
        for _ in 0..3 {
            let tickets: Vec<Ticket> = (0..100).map(|_| enqueue(&mut lanes, lane, test_time(0))).collect();
            assert_eq!(drain(&mut lanes, test_time(0)), tickets);
        }
    }
}

#[test]
fn a_webhook_overtakes_five_background_calls() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let background: Vec<Ticket> = (0..5).map(|_| enqueue(&mut lanes, Lane::Background, test_time(0))).collect();
    // This also holds while the first background call waits for the provider.
    let first = ask(&mut lanes, test_time(0));
    assert_eq!(first, background[0]);
    lanes.refuse(first, refusal(test_time(900), RefusalScope::Provider), test_time(0));
    let QueueStep::Sleep(wake_at) = lanes.poll(test_time(1)) else { panic!("the first was told to wait") };
    assert_eq!(wake_at, test_time(900));
    let user = enqueue(&mut lanes, Lane::User, test_time(2));
    let webhook = enqueue(&mut lanes, Lane::Webhook, test_time(2));
    assert_eq!(ask(&mut lanes, test_time(2)), webhook);
    assert_eq!(lanes.grant(webhook, test_time(2)), Some(Lane::Webhook));
    assert_eq!(ask(&mut lanes, test_time(2)), user);
    lanes.grant(user, test_time(2));
    assert_eq!(lanes.poll(test_time(2)), QueueStep::Sleep(test_time(900)));
    assert_eq!(drain(&mut lanes, test_time(900)), background);
}

#[test]
fn a_raised_call_is_ordered_by_arrival() {
    let mut lanes = Lanes::new(waiting(3));
    let raised = enqueue(&mut lanes, Lane::Background, test_time(0));
    let early = enqueue(&mut lanes, Lane::User, test_time(0));
    let late = enqueue(&mut lanes, Lane::Background, test_time(0));
    let last = enqueue(&mut lanes, Lane::User, test_time(0));
    assert_eq!(lanes.raise(early, Lane::Background, test_time(0)), Ok(false), "never down");
    assert_eq!(lanes.raise(raised, Lane::User, test_time(0)), Ok(true));
    assert_eq!(lanes.raise(raised, Lane::User, test_time(0)), Ok(false));
    assert_eq!(lanes.raise(late, Lane::User, test_time(0)), Err(QueueFullError { lane: Lane::User }));
    assert_eq!((lanes.waiting(Lane::Background), lanes.waiting(Lane::User)), (1, 3));
    assert_eq!(drain(&mut lanes, test_time(0)), [raised, early, last, late]);
    assert_eq!(lanes.raise(raised, Lane::Webhook, test_time(0)), Ok(false), "it has left");
}

#[test]
fn sequential_calls_are_granted_in_order() {
    let mut lanes = Lanes::new(LanesSpec { max_in_flight: 1, ..LanesSpec::default() });
    let tickets: Vec<Ticket> = (0..10).map(|_| enqueue(&mut lanes, Lane::default(), test_time(0))).collect();
    for ticket in tickets {
        assert_eq!(ask(&mut lanes, test_time(0)), ticket);
        let lane = lanes.grant(ticket, test_time(0)).unwrap();
        assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(Time::NEVER), "while it is in flight nobody asks");
        lanes.record_end(lane);
    }
}

#[test]
fn cancelling_half_of_many_keeps_the_order() {
    let mut lanes = Lanes::new(waiting(20_000));
    let tickets: Vec<Ticket> = (0..20_000).map(|_| enqueue(&mut lanes, Lane::User, test_time(0))).collect();
    assert_eq!(lanes.enqueue(Lane::User, 1, Time::NEVER, test_time(0)), Err(QueueFullError { lane: Lane::User }));
    assert_eq!(ask(&mut lanes, test_time(0)), tickets[0]);
    lanes.refuse(tickets[0], refusal(test_time(500), RefusalScope::Provider), test_time(0));
    let (gone, mut left): (Vec<_>, Vec<_>) = tickets.iter().enumerate().partition(|(place, _)| place % 2 == 0);
    for &(_, &ticket) in &gone {
        assert!(lanes.cancel(ticket) && !lanes.cancel(ticket));
    }
    assert_eq!(
        lanes.poll(test_time(1)),
        QueueStep::Sleep(test_time(500)),
        "the survivors cost as much as who was told to wait"
    );
    assert_eq!(lanes.waiting(Lane::User), 10_000);
    let late: Vec<Ticket> = (0..10_000).map(|_| enqueue(&mut lanes, Lane::User, test_time(1))).collect();
    assert!(lanes.enqueue(Lane::User, 1, Time::NEVER, test_time(1)).is_err());
    assert!(late.iter().all(|ticket| ticket.index() < 20_000), "slots are used again");
    for (_, &stale) in gone {
        assert!(!lanes.cancel(stale) && lanes.grant(stale, test_time(1)).is_none(), "a stale ticket does nothing");
        assert_eq!(lanes.raise(stale, Lane::Webhook, test_time(1)), Ok(false));
    }
    left.extend(late.iter().enumerate());
    assert!(drain(&mut lanes, test_time(500)).iter().eq(left.into_iter().map(|(_, ticket)| ticket)));
    assert_eq!((lanes.waiting(Lane::User), lanes.in_flight(Lane::User)), (0, 0));
}
