//! Reports about a limit that can't have room earlier.

use super::*;

/// Lanes in which a user's call of cost 2 was refused at 0, because a limit is spent for 60 s.
fn told(scope: RefusalScope) -> Lanes {
    let mut lanes = Lanes::new(LanesSpec::default());
    lanes.enqueue(Lane::User, 2, Time::NEVER, test_time(0)).expect("room");
    let ticket = ask(&mut lanes, test_time(0));
    lanes.refuse_until(ticket, test_time(60_000), Some(limit_id(0)), scope, test_time(0));
    lanes
}

#[test]
fn spent_quotas_hold_equal_or_lower_calls() {
    let spent = Some((limit_id(0), test_time(60_000)));
    let lanes = told(RefusalScope::Provider);
    let all = |lanes: &Lanes, cost, now| Lane::ALL.map(|lane| lanes.spent_limit(lane, cost, now));
    assert_eq!(all(&lanes, 2, test_time(10)), [spent, spent, None], "the highest lane may have reserves");
    assert_eq!(all(&lanes, 1, test_time(10)), [None; 3], "there may be room for less");
    assert_eq!(all(&lanes, 3, test_time(60_000) - MICRO), [spent, spent, None]);
    assert_eq!(all(&lanes, 3, test_time(60_000)), [None; 3]);
    assert_eq!(all(&lanes, 3, test_time(0) - Span::from_secs(1)), [None; 3], "told by a clock that has stepped back");
    assert_eq!(all(&told(RefusalScope::Lane), 2, test_time(10)), [None, spent, None], "a lane's own limit");
}

#[test]
fn uncertain_waits_are_not_reported_as_spent() {
    let mut lanes = told(RefusalScope::Provider);
    lanes.clear_refusals();
    assert_eq!(lanes.spent_limit(Lane::User, 2, test_time(1)), None, "something was given back");
    let ticket = ask(&mut lanes, test_time(1));
    lanes.refuse_until(ticket, test_time(60_000), None, RefusalScope::Provider, test_time(1));
    assert_eq!(lanes.spent_limit(Lane::User, 2, test_time(1)), None, "a window's slot may come free with a reply");
    let mut lanes = told(RefusalScope::Provider);
    assert_eq!(lanes.poll(test_time(59_999)), QueueStep::Sleep(test_time(60_000)));
    let ticket = ask(&mut lanes, test_time(60_000));
    lanes.clear_refusals();
    lanes.refuse_until(ticket, test_time(90_000), Some(limit_id(0)), RefusalScope::Provider, test_time(60_000));
    assert_eq!(lanes.spent_limit(Lane::User, 2, test_time(60_001)), None, "out of date when it was told");
}
