//! Sequences of operations against the model.

use std::sync::Arc;

use tidegate_core::Verb;
use tidegate_testkit::fixtures::TestLimiter;
use tidegate_testkit::model::Model;
use tidegate_testkit::property;
use tidegate_testkit::random::RandomSource;
use tidegate_testkit::traffic::{PlanContents, TrafficGenerator};

fn agrees_with_the_model(random: RandomSource) -> Result<(), String> {
    let mut world = TrafficGenerator::new(random, PlanContents::All);
    let desk = TestLimiter::with_shared_limits(Arc::clone(world.limits()));
    let mut model = Model::new(Arc::clone(world.limits()));
    while !world.random().is_exhausted() {
        let now = world.advance_clock();
        let batch = world.next_batch();
        let before = desk.store().snapshot(now);
        let (decision, outcomes) = desk.decide(&batch, now);
        model.check(&batch, &outcomes).map_err(|mismatch| format!("{mismatch}\n  under {:?}", world.limits()))?;
        if batch.ops().iter().all(|op| op.verb == Verb::Peek) && desk.store().snapshot(now) != before {
            return Err(format!("looking changed something: {batch:?}"));
        }
        if outcomes.now() != now || decision.now != now {
            return Err("the store went by another time".into());
        }
        world.record_outcomes(&outcomes);
    }
    Ok(())
}

#[test]
fn random_operations_agree_with_the_model() {
    property::fuzz(3_000, agrees_with_the_model);
}
