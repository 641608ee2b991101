//! The number of waiting calls and the length of their waits.

use super::*;

#[test]
fn only_the_full_lane_refuses_calls() {
    let mut lanes = Lanes::new(waiting(2));
    for lane in Lane::ALL {
        let first = enqueue(&mut lanes, lane, test_time(0));
        enqueue(&mut lanes, lane, test_time(0));
        assert_eq!(lanes.enqueue(lane, 1, Time::NEVER, test_time(0)), Err(QueueFullError { lane }));
        assert!(lanes.cancel(first));
        enqueue(&mut lanes, lane, test_time(0));
        assert_eq!(lanes.waiting(lane), 2);
    }
    assert_eq!(QueueFullError { lane: Lane::Background }.to_string(), "the queue of the background lane is full");
}

#[test]
fn a_new_call_displaces_the_second() {
    let mut lanes = Lanes::new(displacing(3));
    let [asking, second, third] = std::array::from_fn(|_| enqueue(&mut lanes, Lane::User, test_time(0)));
    assert_eq!(ask(&mut lanes, test_time(0)), asking);
    lanes.make_room(Lane::User, Time::NEVER);
    let fourth = enqueue(&mut lanes, Lane::User, test_time(0));
    assert!(!lanes.cancel(second) && lanes.grant(second, test_time(0)).is_none(), "it has left");
    lanes.make_room(Lane::User, Time::NEVER);
    let fifth = lanes.enqueue(Lane::User, 1, Time::NEVER, test_time(0));
    assert_eq!(fifth, Err(QueueFullError { lane: Lane::User }), "the driver doesn't know yet of the second");
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Displaced(second));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(Time::NEVER));
    // A call that has its turn keeps its place, also once it is refused.
    lanes.refuse(asking, refusal(test_time(500), RefusalScope::Provider), test_time(0));
    lanes.make_room(Lane::User, Time::NEVER);
    let fifth = enqueue(&mut lanes, Lane::User, test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Displaced(third));
    assert_eq!(drain(&mut lanes, test_time(500)), [asking, fourth, fifth]);
}

/// They keep their places, and the place of one of too many calls would be none for a new one.
#[test]
fn calls_that_enter_again_displace_nothing() {
    let (mut lanes, now) = (Lanes::new(displacing(2)), test_time(0));
    let arrivals: [u64; 2] = std::array::from_fn(|_| {
        let ticket = enqueue(&mut lanes, Lane::User, now);
        assert_eq!(ask(&mut lanes, now), ticket);
        let arrival = lanes.arrival(ticket).unwrap();
        lanes.grant(ticket, now);
        arrival
    });
    let third = enqueue(&mut lanes, Lane::User, now);
    for arrival in arrivals {
        lanes.enqueue_again(arrival, Lane::User, 1, Time::NEVER, now);
    }
    for waiting in [3, 2] {
        assert!(!lanes.make_room(Lane::User, Time::NEVER));
        assert_eq!(lanes.waiting(Lane::User), waiting);
        lanes.cancel(third);
    }
}

#[test]
fn raised_calls_make_room() {
    let mut lanes = Lanes::new(LanesSpec { max_in_flight: 0, ..displacing(2) });
    let raised = enqueue(&mut lanes, Lane::Background, test_time(0));
    let [_, second] = std::array::from_fn(|_| enqueue(&mut lanes, Lane::User, test_time(0)));
    assert_eq!(lanes.raise(raised, Lane::User, test_time(0)), Ok(true));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Displaced(second));
    assert_eq!(lanes.waiting(Lane::User), 2);
}

#[test]
fn joined_and_more_patient_calls_keep_their_places() {
    let mut lanes = Lanes::new(LanesSpec { max_in_flight: 0, ..displacing(3) });
    let enqueue = |lanes: &mut Lanes, deadline| {
        lanes.make_room(Lane::User, test_time(deadline));
        lanes.enqueue(Lane::User, 1, test_time(deadline), test_time(0))
    };
    let [_, patient, last] = [100, 300, 400].map(|deadline| enqueue(&mut lanes, deadline).unwrap());
    assert!(enqueue(&mut lanes, 299).is_err(), "it might leave the place unused");
    assert!(enqueue(&mut lanes, 300).is_ok());
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Displaced(patient));
    lanes.join(last);
    assert!(enqueue(&mut lanes, 900).is_err(), "several callers would fail");
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(100)));
}

#[test]
fn no_lane_exceeds_the_maximum_length() {
    let mut lanes = Lanes::new(waiting(u32::MAX));
    let room = (0..).take_while(|_| lanes.enqueue(Lane::User, 1, Time::NEVER, test_time(0)).is_ok()).count();
    assert_eq!(room, MAX_WAITING as usize);
}

#[test]
fn a_waiting_call_expires_at_its_deadline() {
    let mut lanes = Lanes::new(LanesSpec { max_in_flight: 1, ..LanesSpec::default() });
    let in_flight = enqueue(&mut lanes, Lane::User, test_time(0));
    assert_eq!(drain(&mut lanes, test_time(0)), [in_flight]);
    let running = enqueue(&mut lanes, Lane::User, test_time(0));
    let asked = ask(&mut lanes, test_time(0));
    assert_eq!((asked, lanes.grant(asked, test_time(0))), (running, Some(Lane::User)));
    // All calls wait for the one in flight. Deadlines still pass, in any lane and any order of arrival.
    let deadlines = [(Lane::User, 70), (Lane::Webhook, 50), (Lane::Background, 60), (Lane::User, 50)];
    let tickets = deadlines.map(|(lane, millis)| lanes.enqueue(lane, 1, test_time(millis), test_time(0)).unwrap());
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(50)));
    assert_eq!(lanes.poll(test_time(50) - MICRO), QueueStep::Sleep(test_time(50)));
    let expired = HashSet::from([lanes.poll(test_time(50)), lanes.poll(test_time(50))]);
    assert_eq!(expired, HashSet::from([tickets[1], tickets[3]].map(QueueStep::Expired)));
    assert_eq!(lanes.poll(test_time(50)), QueueStep::Sleep(test_time(60)));
    assert!(!lanes.cancel(tickets[1]));
    lanes.record_end(Lane::User);
    // The asking call expires, too. Its later grant must be given back.
    assert_eq!(ask(&mut lanes, test_time(55)), tickets[0]);
    assert_eq!(lanes.poll(test_time(99)), QueueStep::Expired(tickets[2]));
    assert_eq!(lanes.poll(test_time(99)), QueueStep::Expired(tickets[0]));
    assert_eq!(lanes.grant(tickets[0], test_time(99)), None);
    assert_eq!(lanes.poll(test_time(99)), QueueStep::Sleep(Time::NEVER));
}

#[test]
fn lanes_and_total_cap_calls_in_flight() {
    let mut spec = LanesSpec { max_in_flight: 3, ..LanesSpec::default() };
    spec.lanes[BACKGROUND].max_in_flight = 2;
    let mut lanes = Lanes::new(spec);
    for _ in 0..10 {
        enqueue(&mut lanes, Lane::Background, test_time(0));
    }
    let start = |lanes: &mut Lanes| -> Vec<Lane> {
        let mut started = Vec::new();
        while let QueueStep::AskStore(ticket) = lanes.poll(test_time(0)) {
            started.extend(lanes.grant(ticket, test_time(0)));
        }
        started
    };
    assert_eq!(start(&mut lanes), [Lane::Background; 2]);
    for _ in 0..10 {
        enqueue(&mut lanes, Lane::User, test_time(0));
    }
    assert_eq!(start(&mut lanes), [Lane::User], "the background's cap holds nobody else back");
    lanes.record_end(Lane::Background);
    assert_eq!(start(&mut lanes), [Lane::User]);
    lanes.set_max_in_flight(6);
    assert_eq!(start(&mut lanes), [Lane::User; 3]);
    lanes.set_max_in_flight(5);
    lanes.record_end(Lane::User);
    assert_eq!(start(&mut lanes), []);
    assert_eq!((lanes.in_flight(Lane::Background), lanes.in_flight(Lane::User)), (1, 4));
    lanes.set_max_in_flight(0);
    for lane in [Lane::Background, Lane::User, Lane::User, Lane::User, Lane::User] {
        lanes.record_end(lane);
    }
    assert_eq!(start(&mut lanes), []);
    lanes.record_end(Lane::User);
    lanes.set_max_in_flight(1);
    assert_eq!(start(&mut lanes), [Lane::User], "one end too many gives nobody a second place");
}

#[test]
fn a_paused_lane_delays_no_other_lane() {
    let mut lanes = Lanes::new(LanesSpec::default());
    lanes.pause(Lane::Background, test_time(5_000));
    let background = enqueue(&mut lanes, Lane::Background, test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(5_000)));
    let user = enqueue(&mut lanes, Lane::User, test_time(0));
    assert_eq!(drain(&mut lanes, test_time(0)), [user]);
    assert_eq!(lanes.poll(test_time(5_000) - MICRO), QueueStep::Sleep(test_time(5_000)));
    let mut resumed = lanes.clone();
    assert_eq!(ask(&mut lanes, test_time(5_000)), background);
    resumed.pause(Lane::Background, test_time(0));
    assert_eq!(ask(&mut resumed, test_time(1)), background);
}
