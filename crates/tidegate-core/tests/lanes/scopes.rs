//! Scopes: the parts of a provider's API that are closed on their own.

use super::*;

const SEARCH: ScopedLane = Lane::User.with_scope(1);
const UPLOAD: ScopedLane = Lane::User.with_scope(2);

fn enqueue_in(lanes: &mut Lanes, place: ScopedLane) -> Ticket {
    lanes.enqueue(place, 1, Time::NEVER, test_time(0)).expect("room in the queue")
}

/// Refuses the call that asks at 0 because its scope is closed, and returns it.
fn close(lanes: &mut Lanes, until: Time) -> Ticket {
    let ticket = ask(lanes, test_time(0));
    lanes.refuse(ticket, refusal(until, RefusalScope::Part), test_time(0));
    ticket
}

#[test]
fn a_held_scope_does_not_hold_back_others() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let search = enqueue_in(&mut lanes, SEARCH);
    let next_search = enqueue_in(&mut lanes, SEARCH);
    let plain = enqueue(&mut lanes, Lane::User, test_time(0));
    let upload = enqueue_in(&mut lanes, UPLOAD);
    assert_eq!(close(&mut lanes, test_time(500)), search);
    assert_eq!(drain(&mut lanes, test_time(0)), [plain, upload]);
    assert_eq!(lanes.poll(test_time(500) - MICRO), QueueStep::Sleep(test_time(500)));
    assert_eq!(drain(&mut lanes, test_time(500)), [search, next_search], "at its exact moment");
}

#[test]
fn open_scopes_keep_the_order_of_arrival() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let places = [SEARCH, Lane::User.into(), UPLOAD, SEARCH, SEARCH, UPLOAD, Lane::User.into()];
    let tickets = places.map(|place| enqueue_in(&mut lanes, place));
    assert_eq!(drain(&mut lanes, test_time(0)), tickets);
}

#[test]
fn order_within_a_scope_stays() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let first = enqueue_in(&mut lanes, SEARCH);
    let raised = enqueue_in(&mut lanes, Lane::Background.with_scope(1));
    let arrival = lanes.arrival(first).unwrap();
    let last = enqueue_in(&mut lanes, SEARCH);
    assert_eq!(ask(&mut lanes, test_time(0)), first);
    lanes.grant(first, test_time(0));
    assert_eq!(close(&mut lanes, test_time(500)), last);
    // Earlier calls of a held scope wait with it, too.
    let again = lanes.enqueue_again(arrival, SEARCH, 1, Time::NEVER, test_time(0));
    assert_eq!(lanes.raise(raised, Lane::User, test_time(0)), Ok(true));
    let plain = enqueue(&mut lanes, Lane::User, test_time(0));
    assert_eq!(drain(&mut lanes, test_time(0)), [plain]);
    assert_eq!(drain(&mut lanes, test_time(500)), [again, raised, last]);
}

#[test]
fn calls_of_any_cost_wait_for_their_scope() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let first = lanes.enqueue(SEARCH, 10, Time::NEVER, test_time(0)).unwrap();
    close(&mut lanes, test_time(500));
    let cheap = lanes.enqueue(SEARCH, 0, Time::NEVER, test_time(0)).unwrap();
    lanes.cancel(first);
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(500)));
    assert_eq!(drain(&mut lanes, test_time(500)), [cheap]);
}

#[test]
fn scopes_are_held_in_one_lane() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let user = enqueue_in(&mut lanes, SEARCH);
    close(&mut lanes, test_time(500));
    let webhook = enqueue_in(&mut lanes, Lane::Webhook.with_scope(1));
    let background = enqueue_in(&mut lanes, Lane::Background.with_scope(1));
    assert_eq!(drain(&mut lanes, test_time(0)), [webhook, background]);
    assert_eq!(drain(&mut lanes, test_time(500)), [user]);
}

#[test]
fn a_lane_of_held_calls_is_not_ready() {
    let mut lanes = Lanes::new(LanesSpec { floor: MAX_FLOOR, ..LanesSpec::default() });
    let background = enqueue_in(&mut lanes, Lane::Background.with_scope(1));
    assert_eq!(close(&mut lanes, test_time(30_000)), background);
    let users: Vec<Ticket> = (0..50).map(|_| enqueue(&mut lanes, Lane::User, test_time(1))).collect();
    assert_eq!(drain(&mut lanes, test_time(1)), users, "it earns no floor");
    let users: Vec<Ticket> = (0..2).map(|_| enqueue(&mut lanes, Lane::User, test_time(30_000))).collect();
    // The grant of the first comes when the scope opens, so the lane is ready again.
    assert_eq!(drain(&mut lanes, test_time(30_000)), [users[0], users[1], background]);
}

/// A call that arrives beside held ones finds a lane that has waited, as long as the held ones have.
#[test]
fn held_calls_keep_their_lane_waiting() {
    let mut lanes = Lanes::new(LanesSpec { floor: 0, ..LanesSpec::default() });
    enqueue_in(&mut lanes, Lane::Background.with_scope(1));
    close(&mut lanes, Time::NEVER);
    let background = enqueue(&mut lanes, Lane::Background, test_time(60_000));
    enqueue(&mut lanes, Lane::User, test_time(60_000));
    assert_eq!(ask(&mut lanes, test_time(60_000)), background, "the lane is overdue");
}

#[test]
fn a_grant_sees_that_a_scope_has_opened() {
    let mut lanes = Lanes::new(LanesSpec { floor: MAX_FLOOR, window: Span::MAX, ..LanesSpec::default() });
    let background = enqueue_in(&mut lanes, Lane::Background.with_scope(1));
    close(&mut lanes, test_time(10));
    let users: Vec<Ticket> = (0..9).map(|_| enqueue(&mut lanes, Lane::User, test_time(0))).collect();
    for &user in &users[..4] {
        // Its question was under way when the scope opened.
        assert_eq!(ask(&mut lanes, test_time(9)), user);
        lanes.grant(user, test_time(10));
    }
    assert_eq!(ask(&mut lanes, test_time(10)), background, "with the floor of four grants");
}

#[test]
fn clearing_a_scope_opens_only_that_scope() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let [search, upload] = [SEARCH, UPLOAD].map(|place| enqueue_in(&mut lanes, place));
    for _ in 0..2 {
        close(&mut lanes, test_time(500));
    }
    lanes.clear_refusals();
    lanes.clear_scope_refusals(0);
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(500)), "other refusals were cleared");
    lanes.clear_scope_refusals(UPLOAD.scope);
    assert_eq!(ask(&mut lanes, test_time(0)), upload);
    // This also holds if it comes between the question and the answer.
    lanes.clear_scope_refusals(UPLOAD.scope);
    lanes.refuse(upload, refusal(test_time(500), RefusalScope::Part), test_time(0));
    assert_eq!(ask(&mut lanes, test_time(0)), upload);
    lanes.clear_scope_refusals(SEARCH.scope);
    lanes.refuse(upload, refusal(test_time(500), RefusalScope::Part), test_time(0));
    assert_eq!(ask(&mut lanes, test_time(0)), search, "another scope's answer is not outdated");
    lanes.clear_scope_refusals(SEARCH.scope);
    lanes.refuse(search, refusal(test_time(700), RefusalScope::Lane), test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(500)), "a lane's refusal is not outdated");
    lanes.clear_all_refusals();
    assert_eq!(drain(&mut lanes, test_time(0)), [search, upload]);
}

#[test]
fn a_scope_without_waiting_calls_is_forgotten() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let first = enqueue_in(&mut lanes, SEARCH);
    close(&mut lanes, test_time(500));
    assert!(lanes.refused_past(test_time(400), SEARCH, 1, test_time(0)).is_none(), "its end is unknown");
    lanes.cancel(first);
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(Time::NEVER));
    let second = enqueue_in(&mut lanes, SEARCH);
    assert_eq!(ask(&mut lanes, test_time(0)), second);
}

#[test]
fn calls_that_wait_for_a_scope_past_their_deadlines_are_refused() {
    let mut lanes = Lanes::new(LanesSpec::default());
    enqueue_in(&mut lanes, SEARCH);
    let short = lanes.enqueue(SEARCH, 1, test_time(60_000), test_time(0)).unwrap();
    let first = ask(&mut lanes, test_time(0));
    let reason = WaitReason::Limit { limit: limit_id(0), calls: 1, every: Span::from_secs(10) };
    let until = test_time(60_000);
    lanes.refuse(first, Refusal { until, closed_until: until, reason, scope: RefusalScope::Part }, test_time(0));
    let refused = |place: ScopedLane, deadline| {
        let deadline = test_time(deadline);
        let alone = lanes.refused_past(deadline, place, 1, test_time(1));
        let behind = lanes.refused_behind(deadline, place, 1, test_time(1));
        [alone, behind].map(|refusal| refusal.map(|refusal| refusal.until))
    };
    assert_eq!(refused(SEARCH, 60_000), [Some(until), Some(test_time(70_000))], "one goes before");
    assert_eq!(refused(SEARCH, 70_000), [None, Some(test_time(70_000))]);
    assert_eq!(refused(SEARCH, 70_001), [None; 2]);
    for place in [UPLOAD, Lane::User.into(), Lane::Background.with_scope(1)] {
        assert_eq!(refused(place, 60_000), [None; 2]);
    }
    let earlier = test_time(0) - MAX_CLOCK_LAG - MICRO;
    assert_eq!(lanes.refused_past(until, SEARCH, 1, earlier), None, "told by a clock that has stepped back");
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Expired(short));
}

/// Others go past them, so they lengthen no wait for a limit that all share.
#[test]
fn held_calls_are_not_ahead_of_others() {
    let mut lanes = Lanes::new(LanesSpec::default());
    for place in [SEARCH, SEARCH, SEARCH, UPLOAD, UPLOAD] {
        enqueue_in(&mut lanes, place);
    }
    close(&mut lanes, Time::NEVER);
    let upload = ask(&mut lanes, test_time(0));
    let reason = WaitReason::Limit { limit: limit_id(0), calls: 1, every: Span::from_secs(10) };
    let until = test_time(60_000);
    lanes.refuse(upload, Refusal { until, closed_until: until, reason, scope: RefusalScope::Provider }, test_time(0));
    let refused = lanes.refused_behind(until, Lane::User, 1, test_time(0));
    assert_eq!(refused.map(|refusal| refusal.until), Some(test_time(80_000)), "only two are ahead");
    assert_eq!(lanes.refused_behind(test_time(80_001), Lane::User, 1, test_time(0)), None);
}

#[test]
fn a_call_without_a_scope_waits_with_its_lane() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let plain = enqueue(&mut lanes, Lane::User, test_time(0));
    let search = enqueue_in(&mut lanes, SEARCH);
    let background = enqueue(&mut lanes, Lane::Background, test_time(0));
    assert_eq!(close(&mut lanes, test_time(500)), plain);
    assert_eq!(drain(&mut lanes, test_time(0)), [background]);
    assert_eq!(drain(&mut lanes, test_time(500)), [plain, search]);
}

#[test]
fn a_clock_step_back_opens_held_scopes() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let search = enqueue_in(&mut lanes, SEARCH);
    close(&mut lanes, test_time(500));
    assert_eq!(lanes.poll(test_time(0) - MAX_CLOCK_LAG), QueueStep::Sleep(test_time(500)), "only overtaken");
    let earlier = test_time(0) - MAX_CLOCK_LAG - MICRO;
    assert_eq!(ask(&mut lanes, earlier), search);
    lanes.refuse(search, refusal(test_time(500), RefusalScope::Part), earlier);
    assert_eq!(lanes.poll(earlier), QueueStep::Sleep(test_time(500)), "told at the new time");
}

/// A lane of four calls that gives its places to new ones: `held` calls of two closed scopes, and others.
fn full_lane(held: usize) -> (Lanes, [Ticket; 4]) {
    let mut lanes = Lanes::new(displacing(4));
    let places = [UPLOAD, SEARCH, SEARCH, SEARCH];
    let tickets = std::array::from_fn(|place| {
        enqueue_in(&mut lanes, if place < held { places[place] } else { Lane::User.into() })
    });
    let closed = [500, 400].into_iter().take(held.min(2));
    closed.for_each(|until| assert!(tickets.contains(&close(&mut lanes, test_time(until)))));
    (lanes, tickets)
}

#[test]
fn held_calls_take_at_most_half_of_a_lane_from_others() {
    let displaced = |held: usize| {
        let (mut lanes, tickets) = full_lane(held);
        assert!(lanes.make_room(Lane::User, Time::NEVER));
        enqueue(&mut lanes, Lane::User, test_time(0));
        let QueueStep::Displaced(ticket) = lanes.poll(test_time(0)) else { panic!("a call has lost its place") };
        tickets.iter().position(|&other| other == ticket)
    };
    assert_eq!(displaced(0), Some(1), "the second");
    assert_eq!(displaced(1), Some(2), "the second of three others");
    assert_eq!([2, 3, 4].map(displaced), [Some(0); 3], "of the scope that opens last");
}

#[test]
fn a_lane_that_has_no_held_call_to_displace_takes_another() {
    let (mut lanes, [upload, .., third, _]) = full_lane(2);
    lanes.join(upload);
    assert!(lanes.make_room(Lane::User, Time::NEVER));
    assert!(!lanes.make_room(Lane::User, Time::NEVER), "the driver doesn't know of the first yet");
    let QueueStep::Displaced(ticket) = lanes.poll(test_time(0)) else { panic!("a call has lost its place") };
    assert!(ticket != third && !lanes.cancel(ticket), "the turn is the third's");
}

#[test]
fn each_of_many_scopes_opens_at_its_time() {
    const COUNT: u64 = 10_000;
    let mut lanes = Lanes::new(waiting(10_000));
    let tickets: Vec<Ticket> = (1..=COUNT).map(|scope| enqueue_in(&mut lanes, Lane::User.with_scope(scope))).collect();
    // Multiplication by a prime mixes the order.
    let opens_after = |place: u64| 1 + place * 7_919 % COUNT;
    for place in 0..COUNT {
        assert_eq!(close(&mut lanes, test_time(opens_after(place))), tickets[place as usize]);
    }
    let mut order: Vec<u64> = (0..COUNT).collect();
    order.sort_by_key(|place| opens_after(*place));
    let mut now = test_time(0);
    for place in order {
        let wake_at = test_time(opens_after(place));
        assert_eq!(lanes.poll(now), QueueStep::Sleep(wake_at));
        now = wake_at;
        assert_eq!(ask(&mut lanes, now), tickets[place as usize]);
        lanes.grant(tickets[place as usize], now);
    }
    assert_eq!(lanes.poll(now), QueueStep::Sleep(Time::NEVER));
}
