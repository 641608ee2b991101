//! Several limits in one decision: all or nothing, global beside action, shadow, and waits that are true.

use std::sync::Arc;

use tidegate_core::{
    Batch, Concurrency, Count, Kind, Limit, PenaltyMode, Quota, Rate, Reason, Span, Verb, quota::Every,
};
use tidegate_testkit::desk::{Desk, at, doubling, id, window};
use tidegate_testkit::dice::{Dice, count};
use tidegate_testkit::property;
use tidegate_testkit::world::{Wanted, World};

const HOUR: Span = Span::from_secs(3600);

#[test]
fn two_of_three_are_untouched() {
    let kinds = || {
        [
            Kind::Quota(Quota::new(100, Arc::new(Every(HOUR))).unwrap()),
            Kind::Rate(Rate::new(1, HOUR, 100).unwrap()),
            Kind::Concurrency(Concurrency::new(100, HOUR).unwrap()),
        ]
    };
    for place in 0..3 {
        let mut limits: Vec<Limit> = kinds().map(Limit::new).to_vec();
        limits[place] = window(2, 60).with_penalty(doubling(2, 8, PenaltyMode::Parole, HOUR));
        let desk = Desk::new(limits);
        assert!(desk.call(1, at(0)).allowed && desk.call(1, at(1)).allowed);
        let others = |now| {
            let mut all = desk.store().snapshot(now);
            all.retain(|(limit, _), _| *limit != id(place));
            all
        };
        let before = others(at(2));
        let refused = desk.call(1, at(2));
        assert_eq!((refused.allowed, refused.bound_by), (false, Some(id(place))));
        assert_eq!(others(at(2)), before);
        desk.call(1, at(3));
        assert_eq!(others(at(3)), before);
    }
}

/// Whatever the plan: when a limit refuses, those that don't are as they were, bit for bit.
#[test]
fn denied_means_untouched() {
    property::check(count(400, 8_000), 1_500, |dice| {
        let mut world = World::new(dice, Wanted::Plain);
        let desk = Desk::over(Arc::clone(world.limits()));
        while !world.dice().exhausted() {
            let now = world.pass_time();
            let call = world.call();
            let before = desk.store().snapshot(now);
            let (decision, outcomes) = desk.ask(&call, now);
            let after = desk.store().snapshot(now);
            for (op, outcome) in call.ops().iter().zip(outcomes.list()) {
                let place = (op.limit, op.key);
                if !decision.allowed && !outcome.verdict.refuses() && before.get(&place) != after.get(&place) {
                    return Err(format!("{op:?}: {:?} became {:?}", before.get(&place), after.get(&place)));
                }
            }
            let elsewhere = |place: &_| !call.ops().iter().any(|op| (op.limit, op.key) == *place);
            for place in before.keys().chain(after.keys()).filter(|place| elsewhere(place)) {
                if before.get(place) != after.get(place) {
                    return Err(format!("{place:?} wasn't asked but changed"));
                }
            }
            world.heard(&outcomes);
        }
        Ok(())
    });
}

/// Whatever the plan: who is told to wait and does is admitted, if nobody else came, and a microsecond sooner is not.
/// A limit that counts refused calls too may have been filled by the refused call itself.
#[test]
fn every_advertised_wait_is_true() {
    for wanted in [Wanted::Plain, Wanted::All] {
        property::check(count(600, 12_000), 1_500, |dice| {
            let mut world = World::new(dice, wanted);
            let limits = Arc::clone(world.limits());
            let desk = Desk::over(Arc::clone(&limits));
            let mut holder = 1_000;
            while !world.dice().exhausted() {
                let now = world.pass_time();
                let asked = if wanted == Wanted::All { world.batch() } else { world.call() };
                // A holder of its own: a permit that is held lets even a call pass that could never have it anew.
                let mut call = Batch::new(holder);
                holder += 1;
                for &op in asked.ops() {
                    call.push(op).map_err(|full| full.to_string())?;
                }
                if call.ops().iter().any(|op| op.verb != Verb::Take) {
                    desk.ask(&call, now);
                    continue;
                }
                let (decision, outcomes) = desk.ask(&call, now);
                world.heard(&outcomes);
                let Some(wait) = decision.retry_after.filter(|_| !decision.allowed) else { continue };
                let (back, again) = desk.fork().ask(&call, now + wait);
                let filled_itself =
                    call.ops().iter().zip(outcomes.list()).zip(again.list()).any(|((op, then), now)| {
                        let all = limits.get(op.limit).is_some_and(|limit| limit.count() == Count::All);
                        all && !then.verdict.refuses() && now.verdict.refuses()
                    });
                if !back.allowed && !filled_itself {
                    return Err(format!(
                        "told {wait} by {decision:?}\n  then {back:?}\n  in {call:?}\n  under {limits:?}"
                    ));
                }
                if desk.fork().ask(&call, now + wait - Span::from_micros(1)).0.allowed {
                    return Err(format!("told {wait}, but a microsecond less would do: {decision:?} in {call:?}"));
                }
            }
            Ok(())
        });
    }
}

/// What a peek tells is what a take then meets.
#[test]
fn a_peek_tells_what_a_take_meets() {
    property::check(count(200, 4_000), 1_000, |dice| {
        let mut world = World::new(dice, Wanted::All);
        let desk = Desk::over(Arc::clone(world.limits()));
        while !world.dice().exhausted() {
            let now = world.pass_time();
            let call = world.call();
            let mut look = call.clone();
            for op in look.ops_mut() {
                op.verb = Verb::Peek;
            }
            let before = desk.store().snapshot(now);
            let told = desk.ask(&look, now).1;
            if desk.store().snapshot(now) != before {
                return Err(format!("looking changed something: {look:?}"));
            }
            let met = desk.ask(&call, now).1;
            for (told, met) in told.list().iter().zip(met.list()) {
                if told.verdict != met.verdict || told.limit != met.limit {
                    return Err(format!("{told:?}, but {met:?}"));
                }
            }
            world.heard(&met);
        }
        Ok(())
    });
}

/// Action `login` (place 0), action `otp` (place 1) and global (place 2).
fn house(count: Count) -> Desk {
    let penalty = doubling(2, 3600, PenaltyMode::Parole, HOUR);
    let action = || window(700, 3600).with_penalty(penalty);
    Desk::new([action(), action(), window(1000, 3600).with_penalty(penalty).counting(count)])
}

#[test]
fn the_thousand_and_first_is_refused_by_global() {
    let desk = house(Count::Admitted);
    let ask = |action: usize, now| desk.under(Verb::Take, &[(id(action), 1), (id(2), 1)], 1, now);
    for call in 0..1000_u64 {
        assert!(ask((call % 2) as usize, at(call)).allowed, "call {call}");
    }
    let left = |limit: usize, now| desk.under(Verb::Peek, &[(id(limit), 1)], 1, now).remaining;
    let refused = ask(0, at(1000));
    assert_eq!((refused.allowed, refused.bound_by, refused.limit), (false, Some(id(2)), Some(1000)));
    assert_eq!((left(0, at(1000)), left(1, at(1000))), (Some(200), Some(200)));
    assert_eq!(refused.retry_after, Some(Span::from_secs(2)));
}

#[test]
fn what_an_action_refuses_counts_against_global_only_if_all_count() {
    for (count, left) in [(Count::Admitted, 300), (Count::All, 250)] {
        let desk = house(count);
        let ask = |now| desk.under(Verb::Take, &[(id(0), 1), (id(2), 1)], 1, now);
        for _ in 0..700 {
            assert!(ask(at(0)).allowed);
        }
        for _ in 0..50 {
            let refused = ask(at(0));
            assert_eq!((refused.allowed, refused.bound_by), (false, Some(id(0))));
        }
        assert_eq!(desk.under(Verb::Peek, &[(id(2), 1)], 1, at(0)).remaining, Some(left), "{count:?}");
    }
}

#[test]
fn shadow_decides_and_lets_pass() {
    let watched = window(1, 60).with_penalty(doubling(2, 8, PenaltyMode::Parole, HOUR)).in_shadow(true);
    let desk = Desk::new([watched, window(3, 60)]);
    let first = desk.call(1, at(0));
    assert!(first.allowed && !first.shadow);
    let second = desk.call(1, at(0));
    assert!(second.allowed && second.shadow && second.blocked);
    assert_eq!(
        (second.bound_by, second.retry_after, second.reason),
        (Some(id(0)), Some(Span::from_secs(2)), Reason::Penalty)
    );
    assert!(desk.call(1, at(1)).shadow, "its block lives");
    let fourth = desk.call(1, at(1));
    assert_eq!((fourth.allowed, fourth.shadow, fourth.bound_by), (false, false, Some(id(1))));
}

/// A decision names the limit with the longest wait, or on admission the one with the least left.
#[test]
fn the_binding_limit() {
    let desk = Desk::new([window(5, 10), window(3, 60), window(3, 20)]);
    let decision = desk.call(1, at(0));
    assert_eq!((decision.bound_by, decision.remaining, decision.limit), (Some(id(1)), Some(2), Some(3)));
    assert_eq!(decision.reset_after, Span::from_secs(60));
    for _ in 0..2 {
        desk.call(1, at(1_000));
    }
    let refused = desk.call(1, at(2_000));
    assert_eq!((refused.bound_by, refused.retry_after), (Some(id(1)), Some(Span::from_secs(58))));
    assert_eq!(refused.reset_after, Span::from_secs(59));
    assert_eq!((refused.blocked, refused.backoff, refused.next_allowed_at), (false, None, None));
}

/// A thousand blocked clients, each with blocks of its own and a global limit above them all.
#[test]
fn a_thousand_clients_return_when_they_were_told() {
    let penalty = doubling(2, 3600, PenaltyMode::Parole, HOUR);
    let desk = Desk::new([window(1, 3600).with_penalty(penalty), window(100_000, 3600)]);
    let ask = |client: u64, now| desk.under(Verb::Take, &[(id(0), client), (id(1), 0)], 1, now);
    let mut dice = Dice::seeded(5);
    let mut waiting = Vec::new();
    for client in 1..=1000_u64 {
        let start = at(0) + Span::from_micros(dice.below(5_000_000));
        assert!(ask(client, start).allowed);
        let refused = ask(client, start);
        assert!(refused.blocked);
        waiting.push((client, start, refused.retry_after.unwrap()));
    }
    for round in 0..6 {
        let early = desk.fork();
        let too_early = waiting.iter().filter(|(client, since, wait)| {
            let places = [(id(0), *client), (id(1), 0)];
            early.under(Verb::Take, &places, 1, *since + *wait - Span::from_millis(1)).allowed
        });
        assert_eq!(too_early.count(), 0, "round {round}");
        for (client, since, wait) in &mut waiting {
            let now = *since + Span::from_secs(wait.as_secs_ceil());
            let back = ask(*client, now);
            assert!(back.allowed, "round {round}: client {client} was told {wait}");
            let refused = ask(*client, now + Span::from_micros(dice.below(900_000)));
            (*since, *wait) = (refused.now, refused.retry_after.unwrap());
        }
        // The store takes its calls in order of time.
        waiting.sort_by_key(|(_, since, wait)| *since + *wait);
    }
}

/// A limit that the plan doesn't have stands in nobody's way.
#[test]
fn an_unknown_limit_admits() {
    let desk = Desk::new([window(1, 60)]);
    let decision = desk.under(Verb::Take, &[(id(7), 1)], 1, at(0));
    assert_eq!((decision.allowed, decision.reason), (true, Reason::Unlimited));
    assert!(desk.under(Verb::Take, &[(id(7), 1), (id(0), 1)], 1, at(0)).allowed);
    assert!(!desk.under(Verb::Take, &[(id(7), 1), (id(0), 1)], 1, at(0)).allowed);
}
