//! Properties that must hold for any input: for the tests of this folder, and for the targets in `fuzz/`.

use std::sync::Arc;

use tidegate_core::quota::FixedPeriods;
use tidegate_core::state::Usage;
use tidegate_core::{
    Batch, Key, KeyState, Limit, LimitId, LimitKind, Limits, Op, Quota, Rate, ReservationRules, Span, Time, Verb,
    Window, batch,
};
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

/// Any state can be used under a limit with reservations, at any time.
pub fn a_decoded_state_gives_reservations(bytes: &[u8]) {
    let Some(state) = KeyState::decode(bytes) else { return };
    let fixed = || Arc::new(FixedPeriods(Span::from_secs(3)));
    let kinds = [
        Rate::new(10, Span::from_secs(1), 5).map(LimitKind::Rate),
        Window::new(6, Span::from_secs(2), 8).map(LimitKind::Window),
        Quota::new(6, fixed()).map(LimitKind::Quota),
    ];
    let rules = [
        ReservationRules::new(Span::from_secs(5), 500, Span::from_millis(700)),
        ReservationRules::spread(Span::from_secs(5)),
    ];
    let last_at = match state.usage() {
        Usage::Reserved(reserved) => reserved.queue.last_at,
        _ => Time::ZERO,
    };
    for kind in kinds.into_iter().flatten() {
        for rules in rules.into_iter().flatten() {
            let limit = Limit::new(kind.clone()).with_reservations(rules);
            let limits = Limits::new(vec![limit.clone()]).expect("a valid limit");
            let mut states = [state.clone()];
            for now in [Time::from_secs(1_000_000_000), last_at, last_at + Span::from_secs(2), Time::ZERO] {
                let mut batch = Batch::with_op(0, Op::new(LimitId::FIRST, Verb::Take, Key::new(1, 1), 2));
                batch.set_caller(7, Time::ZERO);
                let outcomes = batch::execute(&batch, &limits, states.as_mut_slice(), now);
                let reserved_at = outcomes.list()[0].reserved_at;
                assert!(reserved_at == Time::ZERO || rules.is_kept(), "{outcomes:?}");
                let _ = states[0].idle_at(&limit);
            }
        }
    }
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
