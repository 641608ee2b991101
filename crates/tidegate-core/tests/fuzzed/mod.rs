//! Properties that must hold for any input: for the tests of this folder, and for the targets in `fuzz/`.

use std::sync::Arc;

use tidegate_core::{KeyState, Verb};
use tidegate_testkit::fixtures::TestLimiter;
use tidegate_testkit::model::Model;
use tidegate_testkit::random::RandomSource;
use tidegate_testkit::traffic::{PlanContents, TrafficGenerator};

/// Any sequence of operations has the outcomes that the naive model expects.
///
/// # Errors
/// The first difference.
pub fn operations_agree_with_the_model(random: RandomSource) -> Result<(), String> {
    let mut world = TrafficGenerator::new(random, PlanContents::All);
    let limiter = TestLimiter::with_shared_limits(Arc::clone(world.limits()));
    let mut model = Model::new(Arc::clone(world.limits()));
    while !world.random().is_exhausted() {
        let now = world.advance_clock();
        let batch = world.next_batch();
        let before = limiter.store().snapshot(now);
        let (decision, outcomes) = limiter.decide(&batch, now);
        model.check(&batch, &outcomes).map_err(|mismatch| format!("{mismatch}\n  under {:?}", world.limits()))?;
        if batch.ops().iter().all(|op| op.verb == Verb::Peek) && limiter.store().snapshot(now) != before {
            return Err(format!("looking changed something: {batch:?}"));
        }
        if outcomes.now() != now || decision.now != now {
            return Err("the store went by another time".into());
        }
        world.record_outcomes(&outcomes);
    }
    Ok(())
}

/// Bytes that decode to a state are no shorter than the state's own encoding, which decodes to the same state.
///
/// # Panics
/// If that is false.
pub fn a_decoded_state_is_encoded_alike(bytes: &[u8]) {
    let Some(state) = KeyState::decode(bytes) else { return };
    let encode = |state: &KeyState| {
        let mut encoded = Vec::new();
        state.encode(&mut encoded);
        encoded
    };
    let once = encode(&state);
    assert!(once.len() <= bytes.len(), "{state:?} grew from {} to {} bytes", bytes.len(), once.len());
    let again = KeyState::decode(&once);
    assert_eq!(again.as_ref().map(encode).as_ref(), Some(&once), "{state:?} is {again:?} once encoded");
}
