//! Sequences of operations against the model.

use std::sync::Arc;

use tidegate_core::Verb;
use tidegate_testkit::desk::Desk;
use tidegate_testkit::dice::Dice;
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
fn operations_agree_with_the_model() {
    property::fuzz(3_000, agrees_with_the_model);
}
