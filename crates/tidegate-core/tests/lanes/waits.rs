//! Calls that refusals show to wait until their deadline or longer.

use super::*;

fn spent(until: Time, scope: RefusalScope) -> Refusal {
    Refusal { until, closed_until: until, reason: WaitReason::Quota(limit_id(0)), scope }
}

/// Lanes in which a user's call of cost 2 was refused at 0, because a limit is spent for 60 s.
fn told(scope: RefusalScope) -> Lanes {
    let mut lanes = Lanes::new(LanesSpec::default());
    lanes.enqueue(Lane::User, 2, Time::NEVER, test_time(0)).expect("room");
    let ticket = ask(&mut lanes, test_time(0));
    lanes.refuse(ticket, spent(test_time(60_000), scope), test_time(0));
    lanes
}

/// Lanes in which a user's call waits for a limit that admits two calls from 60 s on, at the earliest from 59.5 s on,
/// and two more every 10 s.
fn limited() -> Lanes {
    let mut lanes = told(RefusalScope::Provider);
    lanes.clear_refusals();
    let first = ask(&mut lanes, test_time(0));
    let reason = WaitReason::Limit { limit: limit_id(0), calls: 2, every: Span::from_secs(10) };
    let told = Refusal { reason, closed_until: test_time(59_500), ..spent(test_time(60_000), RefusalScope::Provider) };
    lanes.refuse(first, told, test_time(0));
    lanes
}

/// The refusal of a user's call of cost 2 with a deadline at 60 s.
fn refused_at(lanes: &Lanes, now: Time) -> Option<Refusal> {
    lanes.refused_past(test_time(60_000), Lane::User, 2, now)
}

#[test]
fn spent_quotas_hold_equal_or_lower_calls() {
    let told_then = Some(spent(test_time(60_000), RefusalScope::Provider));
    let lanes = told(RefusalScope::Provider);
    let deadline = test_time(60_000);
    let all = |cost, now| Lane::ALL.map(|lane| lanes.refused_behind(deadline, lane, cost, now));
    assert_eq!(all(2, test_time(10)), [told_then, told_then, None], "the highest lane may have reserves");
    assert_eq!(all(1, test_time(10)), [None; 3], "there may be room for less");
    assert_eq!(all(3, test_time(60_000) - MICRO), [told_then, told_then, None]);
    assert_eq!(all(3, test_time(60_000)), [None; 3]);
    assert_eq!(all(3, test_time(0) - Span::from_secs(1)), [None; 3], "told by a clock that has stepped back");
    assert_eq!(lanes.refused_behind(deadline + MICRO, Lane::User, 2, test_time(10)), None, "it can be sent in time");
    let lanes = told(RefusalScope::Lane);
    let own = Lane::ALL.map(|lane| lanes.refused_behind(deadline, lane, 2, test_time(10)).is_some());
    assert_eq!(own, [false, true, false], "a lane's own limit");
}

#[test]
fn uncertain_waits_are_not_reported() {
    let mut lanes = told(RefusalScope::Provider);
    lanes.clear_refusals();
    assert_eq!(refused_at(&lanes, test_time(1)), None, "something was given back");
    let ticket = ask(&mut lanes, test_time(1));
    lanes.refuse(ticket, refusal(test_time(60_000), RefusalScope::Provider), test_time(1));
    assert_eq!(refused_at(&lanes, test_time(1)), None, "something may be given back");
    let mut lanes = told(RefusalScope::Provider);
    assert_eq!(lanes.poll(test_time(59_999)), QueueStep::Sleep(test_time(60_000)));
    let ticket = ask(&mut lanes, test_time(60_000));
    lanes.clear_refusals();
    lanes.refuse(ticket, spent(test_time(90_000), RefusalScope::Provider), test_time(60_000));
    assert_eq!(refused_at(&lanes, test_time(60_001)), None, "out of date when it was told");
}

#[test]
fn calls_that_cannot_be_sent_in_time_expire() {
    let mut lanes = Lanes::new(LanesSpec::default());
    let mut enqueue = |deadline| lanes.enqueue(Lane::User, 1, test_time(deadline), test_time(0)).expect("room");
    let (first, short, _) = (enqueue(90_000), enqueue(60_000), enqueue(60_001));
    assert_eq!(ask(&mut lanes, test_time(0)), first);
    lanes.refuse(first, spent(test_time(60_000), RefusalScope::Provider), test_time(0));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Expired(short));
    assert_eq!(lanes.poll(test_time(0)), QueueStep::Sleep(test_time(60_000)));
}

#[test]
fn calls_ahead_lengthen_the_wait() {
    let mut lanes = limited();
    assert_eq!(lanes.refused_past(test_time(59_501), Lane::User, 2, test_time(0)), None, "it may end earlier");
    let mut refused_until = |deadline| {
        let refusal = lanes.refused_behind(test_time(deadline), Lane::User, 2, test_time(0));
        enqueue(&mut lanes, Lane::User, test_time(0));
        refusal.map(|refusal| refusal.until)
    };
    let waits = [59_500, 59_500, 69_501, 69_500, 79_500].map(&mut refused_until);
    let expected = [Some(60_000), Some(70_000), None, Some(80_000), Some(80_000)];
    assert_eq!(waits, expected.map(|until| until.map(test_time)));
}

#[test]
fn calls_that_expire_first_lengthen_no_wait() {
    let mut lanes = limited();
    let mut enqueue = |deadline| lanes.enqueue(Lane::User, 2, test_time(deadline), test_time(0)).expect("room");
    for deadline in [65_000, 65_000, 69_500, 69_501, 90_000] {
        enqueue(deadline);
    }
    let refused = |lanes: &Lanes| lanes.refused_behind(test_time(79_500), Lane::User, 2, test_time(0));
    assert_eq!(refused(&lanes).map(|refusal| refusal.until), Some(test_time(80_000)), "two at 60 s and two at 70 s");
    lanes.pause(Lane::User, test_time(70_000));
    assert_eq!(refused(&lanes), None, "two that wait are sent after the pause");
}

/// An unknown time stays unknown, however many calls are ahead.
#[test]
fn unknown_waits_refuse_no_call_behind() {
    let mut lanes = limited();
    lanes.clear_refusals();
    let first = ask(&mut lanes, test_time(0));
    let reason = WaitReason::Limit { limit: limit_id(0), calls: 1, every: Span::from_secs(u64::MAX) };
    lanes.refuse(first, Refusal { reason, ..refusal(test_time(60_000), RefusalScope::Provider) }, test_time(0));
    assert_eq!(lanes.refused_behind(test_time(1_000), Lane::User, 2, test_time(0)), None);
}
