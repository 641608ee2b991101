//! Sequences of operations against the model, for as many seconds as `TIDEGATE_FUZZ_SECONDS` says (5 by default).

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate_core::Verb;
use tidegate_testkit::desk::Desk;
use tidegate_testkit::dice::{self, Dice};
use tidegate_testkit::model::Model;
use tidegate_testkit::property;
use tidegate_testkit::world::{Wanted, World};

fn agrees_with_the_model(dice: Dice) -> Result<(), String> {
    let mut world = World::new(dice, Wanted::All);
    let desk = Desk::over(Arc::clone(world.limits()));
    let mut model = Model::new(Arc::clone(world.limits()));
    while !world.dice().exhausted() {
        let now = world.pass_time();
        let batch = world.batch();
        let before = desk.store().snapshot(now);
        let (decision, outcomes) = desk.ask(&batch, now);
        model.check(&batch, &outcomes).map_err(|mismatch| format!("{mismatch}\n  under {:?}", world.limits()))?;
        if batch.ops().iter().all(|op| op.verb == Verb::Peek) && desk.store().snapshot(now) != before {
            return Err(format!("looking changed something: {batch:?}"));
        }
        if outcomes.now() != now || decision.now != now {
            return Err("the store went by another time".into());
        }
        world.heard(&outcomes);
    }
    Ok(())
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the bound is one of real time")]
fn operations_agree_with_the_model() {
    let seconds = std::env::var("TIDEGATE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let (start, bound) = (Instant::now(), Duration::from_secs(seconds));
    let mut seed = dice::seed();
    while start.elapsed() < bound {
        property::check_from(seed, 20, 3_000, agrees_with_the_model);
        seed = seed.wrapping_add(1);
    }
}
