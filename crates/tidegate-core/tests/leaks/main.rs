//! Whatever happens to calls, they leave nothing behind: positions in the queue, slots in flight, charges of limits,
//! retries of the budget, and the breaker's probes are all given back.
#![expect(clippy::unwrap_used, reason = "a test")]

mod world;

use tidegate_core::{Class, Lane};
use tidegate_testkit::property;
use tidegate_testkit::random::{self, RandomSource, case_count};

use crate::world::{Stage, World};

fn any_world(random: &mut RandomSource) -> World {
    let (pace, max_waiting, failures) =
        (random.pick(&[5, 50, 1_000]), random.pick(&[4, 20, 100]), random.between(1, 4) as u32);
    World::new(pace, max_waiting, failures, random.chance(50), random.chance(50), random.pick(&[u32::MAX, 1, 4]))
}

#[test]
fn random_events_leak_nothing() {
    property::check(case_count(20, 400), 3_000, |mut random| {
        let mut world = any_world(&mut random);
        while !random.is_exhausted() {
            world.happen(&mut random);
            world.check()?;
        }
        world.clear_out()
    });
}

#[test]
fn a_long_run_leaks_nothing() {
    let seed = random::run_seed();
    let mut random = RandomSource::from_seed(seed);
    let mut world = World::new(50, 20, 2, true, true, 3);
    let steps = case_count(20_000, 1_000_000);
    for step in 0..steps {
        world.happen(&mut random);
        world.finished.clear();
        if let Err(leak) = world.check() {
            panic!("{leak} at step {step}\n  repeat with TIDEGATE_SEED={seed}");
        }
    }
    assert!(world.displaced > 0, "some calls lose their places");
    assert!(world.sent.len() > steps as usize / 40, "{} of {} calls were sent", world.sent.len(), world.arrived);
    world.clear_out().unwrap();
}

/// Of 20,000 calls that are queued, in flight or waiting for a retry, 10,000 are cancelled.
#[test]
fn cancelling_half_of_many_calls_leaks_nothing() {
    let seed = random::run_seed();
    let mut random = RandomSource::from_seed(seed);
    let mut world = World::new(1_000, 20_000, 5, false, false, 14);
    for _ in 0..20_000 {
        world.arrive(Lane::User, 2, None);
    }
    assert_eq!(world.state.lanes.waiting(Lane::User), 20_000);
    // Three credentials accept fewer calls than the provider, so calls wait for them. Some calls are asking or in
    // flight when the others are cancelled, and a few wait for a retry.
    for _ in 0..40 {
        world.pump();
        let asking = world.any(&mut random, |stage| matches!(stage, Stage::Asking(..)));
        world.answer(asking.expect("one at a time"), false);
    }
    world.pump();
    for id in 0..3 {
        world.reply(id, Class::Transient, None, false, None);
    }
    world.check().unwrap();
    let mut alive: Vec<usize> = world.calls.keys().copied().collect();
    for _ in 0..10_000 {
        world.abandon(alive.swap_remove(random.below(alive.len() as u64) as usize));
    }
    world.check().unwrap();
    let queued = world.state.lanes.waiting(Lane::User);
    assert_eq!(world.calls.len(), 10_000);
    assert!(queued > 9_900, "{queued}");
    while !world.abandoned.is_empty() {
        world.answer_abandoned(0);
    }
    let before = world.sent.len();
    while !world.calls.is_empty() {
        let wakes_at = world.pump();
        let (now, busy) = (world.now, Vec::from_iter(world.busy.iter().copied()));
        let mut next = wakes_at;
        for id in busy {
            match world.calls[&id].stage {
                Stage::Asking(..) => world.answer(id, false),
                Stage::Sent(_) => world.reply(id, Class::Success, None, false, None),
                Stage::Sleeping(until, _) if until <= now => world.wake(id),
                Stage::Sleeping(until, _) => {
                    next = next.min(until);
                    continue;
                }
                _ => panic!("nobody streams or logs in"),
            }
            next = now;
        }
        world.now = next;
        assert!(!next.is_never() || world.calls.is_empty(), "somebody waits for ever");
    }
    alive.sort_unstable();
    let waited: Vec<usize> = alive.into_iter().filter(|&id| id >= 40).collect();
    assert_eq!(world.sent[before..], waited, "first come, first served");
    assert!(world.finished.iter().all(|(_, result)| result.is_ok()), "{:?}", world.finished.first());
    assert_eq!(world.finished.len(), 10_000);
    world.check().unwrap();
    world.clear_out().unwrap();
}
