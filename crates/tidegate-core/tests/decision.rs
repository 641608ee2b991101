//! Several limits in one decision: all or nothing, global limits with limits of an action, shadow, and exact waits.

use std::sync::Arc;

use tidegate_core::{
    Batch, Concurrency, CountMode, Limit, LimitKind, PenaltyMode, Quota, Rate, Reason, Span, Verb, quota::FixedPeriods,
};
use tidegate_testkit::fixtures::{TestLimiter, doubling_penalty, limit_id, test_time, window_limit};
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};
use tidegate_testkit::traffic::{PlanContents, TrafficGenerator};

const HOUR: Span = Span::from_secs(3600);

#[test]
fn one_refusing_limit_leaves_others_unchanged() {
    let kinds = || {
        [
            LimitKind::Quota(Quota::new(100, Arc::new(FixedPeriods(HOUR))).unwrap()),
            LimitKind::Rate(Rate::new(1, HOUR, 100).unwrap()),
            LimitKind::Concurrency(Concurrency::new(100, HOUR).unwrap()),
        ]
    };
    for place in 0..3 {
        let mut limits: Vec<Limit> = kinds().map(Limit::new).to_vec();
        limits[place] = window_limit(2, 60).with_penalty(doubling_penalty(2, 8, PenaltyMode::Parole, HOUR));
        let limiter = TestLimiter::new(limits);
        assert!(limiter.call(1, test_time(0)).allowed && limiter.call(1, test_time(1)).allowed);
        let others = |now| {
            let mut all = limiter.store().snapshot(now);
            all.retain(|(limit, _), _| *limit != limit_id(place));
            all
        };
        let before = others(test_time(2));
        let refused = limiter.call(1, test_time(2));
        assert_eq!((refused.allowed, refused.bound_by), (false, Some(limit_id(place))));
        assert_eq!(others(test_time(2)), before);
        limiter.call(1, test_time(3));
        assert_eq!(others(test_time(3)), before);
    }
}

/// For every plan: if a limit refuses, the others don't change, bit for bit.
#[test]
fn refused_calls_leave_admitting_limits_unchanged() {
    property::check(case_count(400, 8_000), 1_500, |random| {
        let mut world = TrafficGenerator::new(random, PlanContents::Simple);
        let limiter = TestLimiter::with_shared_limits(Arc::clone(world.limits()));
        while !world.random().is_exhausted() {
            let now = world.advance_clock();
            let call = world.take_batch();
            let before = limiter.store().snapshot(now);
            let (decision, outcomes) = limiter.decide(&call, now);
            let after = limiter.store().snapshot(now);
            for (op, outcome) in call.ops().iter().zip(outcomes.list()) {
                let place = (op.limit, op.key);
                if !decision.allowed && !outcome.admission.refuses() && before.get(&place) != after.get(&place) {
                    return Err(format!("{op:?}: {:?} became {:?}", before.get(&place), after.get(&place)));
                }
            }
            let elsewhere = |place: &_| !call.ops().iter().any(|op| (op.limit, op.key) == *place);
            for place in before.keys().chain(after.keys()).filter(|place| elsewhere(place)) {
                if before.get(place) != after.get(place) {
                    return Err(format!("{place:?} wasn't asked but changed"));
                }
            }
            world.record_outcomes(&outcomes);
        }
        Ok(())
    });
}

/// For every plan: a caller that waits as announced is admitted, if no other call came, and a microsecond earlier is
/// not. A limit that counts refused calls too may have been filled by the refused call itself.
#[test]
fn every_stated_wait_is_exact() {
    for wanted in [PlanContents::Simple, PlanContents::All] {
        property::check(case_count(600, 12_000), 1_500, |random| {
            let mut world = TrafficGenerator::new(random, wanted);
            let limits = Arc::clone(world.limits());
            let limiter = TestLimiter::with_shared_limits(Arc::clone(&limits));
            let mut holder = 1_000;
            while !world.random().is_exhausted() {
                let now = world.advance_clock();
                let asked = if wanted == PlanContents::All { world.next_batch() } else { world.take_batch() };
                // A holder of its own, because a held permit admits even a call that could never get it again.
                let mut call = Batch::new(holder);
                holder += 1;
                for &op in asked.ops() {
                    call.push(op).map_err(|full| full.to_string())?;
                }
                // A call of a client beyond its share says itself how long it is refused.
                if call.ops().iter().any(|op| op.verb != Verb::Take || Concurrency::is_refused_cost(op.cost)) {
                    limiter.decide(&call, now);
                    continue;
                }
                let (decision, outcomes) = limiter.decide(&call, now);
                world.record_outcomes(&outcomes);
                let Some(wait) = decision.retry_after.filter(|_| !decision.allowed) else { continue };
                let (back, again) = limiter.fork().decide(&call, now + wait);
                let filled_itself =
                    call.ops().iter().zip(outcomes.list()).zip(again.list()).any(|((op, then), now)| {
                        let all = limits.get(op.limit).is_some_and(|limit| limit.count_mode() == CountMode::All);
                        all && !then.admission.refuses() && now.admission.refuses()
                    });
                if !back.allowed && !filled_itself {
                    return Err(format!(
                        "told {wait} by {decision:?}\n  then {back:?}\n  in {call:?}\n  under {limits:?}"
                    ));
                }
                if limiter.fork().decide(&call, now + wait - Span::from_micros(1)).0.allowed {
                    return Err(format!("told {wait}, but a microsecond less would do: {decision:?} in {call:?}"));
                }
            }
            Ok(())
        });
    }
}

/// The answer of a peek equals the answer of the following take.
#[test]
fn a_peek_predicts_the_following_take() {
    property::check(case_count(200, 4_000), 1_000, |random| {
        let mut world = TrafficGenerator::new(random, PlanContents::All);
        let limiter = TestLimiter::with_shared_limits(Arc::clone(world.limits()));
        while !world.random().is_exhausted() {
            let now = world.advance_clock();
            let call = world.take_batch();
            let mut look = call.clone();
            for op in look.ops_mut() {
                op.verb = Verb::Peek;
            }
            let before = limiter.store().snapshot(now);
            let told = limiter.decide(&look, now).1;
            if limiter.store().snapshot(now) != before {
                return Err(format!("looking changed something: {look:?}"));
            }
            let met = limiter.decide(&call, now).1;
            for (told, met) in told.list().iter().zip(met.list()) {
                if told.admission != met.admission || told.limit != met.limit {
                    return Err(format!("{told:?}, but {met:?}"));
                }
            }
            world.record_outcomes(&met);
        }
        Ok(())
    });
}

/// Action `login` (limit 0), action `otp` (limit 1) and the global limit (limit 2).
fn two_actions_and_global(count: CountMode) -> TestLimiter {
    let penalty = doubling_penalty(2, 3600, PenaltyMode::Parole, HOUR);
    let action = || window_limit(700, 3600).with_penalty(penalty);
    TestLimiter::new([action(), action(), window_limit(1000, 3600).with_penalty(penalty).with_count_mode(count)])
}

#[test]
fn the_global_limit_refuses_the_1001st_call() {
    let limiter = two_actions_and_global(CountMode::Admitted);
    let ask = |action: usize, now| limiter.apply(Verb::Take, &[(limit_id(action), 1), (limit_id(2), 1)], 1, now);
    for call in 0..1000_u64 {
        assert!(ask((call % 2) as usize, test_time(call)).allowed, "call {call}");
    }
    let left = |limit: usize, now| limiter.apply(Verb::Peek, &[(limit_id(limit), 1)], 1, now).remaining;
    let refused = ask(0, test_time(1000));
    assert_eq!((refused.allowed, refused.bound_by, refused.limit), (false, Some(limit_id(2)), Some(1000)));
    assert_eq!((left(0, test_time(1000)), left(1, test_time(1000))), (Some(200), Some(200)));
    assert_eq!(refused.retry_after, Some(Span::from_secs(2)));
}

#[test]
fn refused_calls_count_globally_only_if_configured() {
    for (count, left) in [(CountMode::Admitted, 300), (CountMode::All, 250)] {
        let limiter = two_actions_and_global(count);
        let ask = |now| limiter.apply(Verb::Take, &[(limit_id(0), 1), (limit_id(2), 1)], 1, now);
        for _ in 0..700 {
            assert!(ask(test_time(0)).allowed);
        }
        for _ in 0..50 {
            let refused = ask(test_time(0));
            assert_eq!((refused.allowed, refused.bound_by), (false, Some(limit_id(0))));
        }
        assert_eq!(limiter.apply(Verb::Peek, &[(limit_id(2), 1)], 1, test_time(0)).remaining, Some(left), "{count:?}");
    }
}

#[test]
fn own_refusals_never_count() {
    for kind in [
        window_limit(2, 60).kind().clone(),
        LimitKind::Rate(Rate::new(2, HOUR, 2).unwrap()),
        LimitKind::Quota(Quota::new(2, Arc::new(FixedPeriods(HOUR))).unwrap()),
    ] {
        let limiter = TestLimiter::new([Limit::new(kind).with_count_mode(CountMode::All)]);
        assert!(limiter.call(1, test_time(0)).allowed && limiter.call(1, test_time(0)).allowed);
        let first = limiter.call(1, test_time(1));
        for _ in 0..50 {
            let refused = limiter.call(1, test_time(1));
            assert_eq!((refused.allowed, refused.retry_after), (false, first.retry_after));
        }
        assert!(limiter.call(1, test_time(1) + first.retry_after.unwrap()).allowed);
    }
}

#[test]
fn shadow_limits_decide_and_admit() {
    let watched = window_limit(1, 60).with_penalty(doubling_penalty(2, 8, PenaltyMode::Parole, HOUR)).with_shadow(true);
    let limiter = TestLimiter::new([watched, window_limit(3, 60)]);
    let first = limiter.call(1, test_time(0));
    assert!(first.allowed && !first.shadow);
    let second = limiter.call(1, test_time(0));
    assert!(second.allowed && second.shadow && second.blocked);
    assert_eq!(
        (second.bound_by, second.retry_after, second.reason),
        (Some(limit_id(0)), Some(Span::from_secs(2)), Reason::Penalty)
    );
    assert!(limiter.call(1, test_time(1)).shadow, "its block lives");
    let fourth = limiter.call(1, test_time(1));
    assert_eq!((fourth.allowed, fourth.shadow, fourth.bound_by), (false, false, Some(limit_id(1))));
}

/// A decision names the limit with the longest wait or, on admission, the one with the least remaining.
#[test]
fn the_binding_limit_is_named() {
    let limiter = TestLimiter::new([window_limit(5, 10), window_limit(3, 60), window_limit(3, 20)]);
    let decision = limiter.call(1, test_time(0));
    assert_eq!((decision.bound_by, decision.remaining, decision.limit), (Some(limit_id(1)), Some(2), Some(3)));
    assert_eq!(decision.reset_after, Span::from_secs(60));
    for _ in 0..2 {
        limiter.call(1, test_time(1_000));
    }
    let refused = limiter.call(1, test_time(2_000));
    assert_eq!((refused.bound_by, refused.retry_after), (Some(limit_id(1)), Some(Span::from_secs(58))));
    assert_eq!(refused.reset_after, Span::from_secs(59));
    assert_eq!((refused.blocked, refused.backoff, refused.next_allowed_at), (false, None, None));
}

/// A thousand blocked clients, each with its own blocks, and one global limit.
#[test]
fn blocked_clients_are_admitted_at_the_stated_time() {
    let penalty = doubling_penalty(2, 3600, PenaltyMode::Parole, HOUR);
    let limiter = TestLimiter::new([window_limit(1, 3600).with_penalty(penalty), window_limit(100_000, 3600)]);
    let ask = |client: u64, now| limiter.apply(Verb::Take, &[(limit_id(0), client), (limit_id(1), 0)], 1, now);
    let mut random = RandomSource::from_seed(5);
    let mut waiting = Vec::new();
    for client in 1..=1000_u64 {
        let start = test_time(0) + Span::from_micros(random.below(5_000_000));
        assert!(ask(client, start).allowed);
        let refused = ask(client, start);
        assert!(refused.blocked);
        waiting.push((client, start, refused.retry_after.unwrap()));
    }
    for round in 0..6 {
        let early = limiter.fork();
        let too_early = waiting.iter().filter(|(client, since, wait)| {
            let places = [(limit_id(0), *client), (limit_id(1), 0)];
            early.apply(Verb::Take, &places, 1, *since + *wait - Span::from_millis(1)).allowed
        });
        assert_eq!(too_early.count(), 0, "round {round}");
        for (client, since, wait) in &mut waiting {
            let now = *since + Span::from_secs(wait.as_secs_ceil());
            let back = ask(*client, now);
            assert!(back.allowed, "round {round}: client {client} was told {wait}");
            let refused = ask(*client, now + Span::from_micros(random.below(900_000)));
            (*since, *wait) = (refused.now, refused.retry_after.unwrap());
        }
        // The store expects calls in the order of time.
        waiting.sort_by_key(|(_, since, wait)| *since + *wait);
    }
}

/// A limit that the plan doesn't have refuses no call.
#[test]
fn an_unknown_limit_admits() {
    let limiter = TestLimiter::new([window_limit(1, 60)]);
    let decision = limiter.apply(Verb::Take, &[(limit_id(7), 1)], 1, test_time(0));
    assert_eq!((decision.allowed, decision.reason), (true, Reason::Unlimited));
    assert!(limiter.apply(Verb::Take, &[(limit_id(7), 1), (limit_id(0), 1)], 1, test_time(0)).allowed);
    assert!(!limiter.apply(Verb::Take, &[(limit_id(7), 1), (limit_id(0), 1)], 1, test_time(0)).allowed);
}
