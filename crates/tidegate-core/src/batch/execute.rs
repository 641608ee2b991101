//! The execution of a batch on the states of a store.

use arrayvec::ArrayVec;

use super::outcome::is_always_charged;
use super::{Admission, Batch, BatchContext, MAX_OPS, Op, OpContext, Outcome, Outcomes, RefusalSummary, Verb};
use crate::{KeyState, Limit, Limits, Span, Time};

/// The states of a store for the operations of one batch, addressed by the index of the operation.
///
/// The methods correspond to those of [`KeyState`]. A store may answer from a shorter form of the state.
pub trait BatchStates {
    /// [`KeyState::evaluate`], or [`KeyState::peek`] for a `Peek`, which changes nothing.
    fn evaluate(&mut self, index: usize, context: &OpContext<'_>) -> Outcome;
    /// [`KeyState::charge`].
    fn charge(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome);
    /// [`KeyState::strike`].
    fn strike(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome);
    /// Runs `change` on the whole state. If there is none, runs it on a new one if `create` is true.
    fn modify(&mut self, index: usize, context: &OpContext<'_>, create: bool, change: &mut dyn FnMut(&mut KeyState));
    /// Deletes the state.
    fn reset(&mut self, index: usize, op: &Op);
}

/// Executes a batch. First every limit is evaluated. If none refuses, all are charged. Otherwise those that refuse add
/// their strikes. An operation with a limit that the plan doesn't have is admitted.
///
/// - While any block is in force, only limits that count all calls are charged, and nothing else changes.
/// - A limit in shadow doesn't affect the others: it neither refuses the call nor prevents their strikes. It is itself
///   treated as if it were enforced.
/// - A limit that counts all calls is charged whenever it has room itself. A parole is not room.
/// - If the store has no room for a key, nothing changes. The caller must repeat the batch under another key.
#[inline]
pub fn execute(batch: &Batch, limits: &Limits, states: &mut (impl BatchStates + ?Sized), now: Time) -> Outcomes {
    execute_part(batch, limits, states, now, RefusalSummary::default())
}

/// Executes a batch like [`execute`], into outcomes whose place is known. They are large, and returning them would copy
/// them.
#[inline]
pub fn execute_into(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    outcomes: &mut Outcomes,
) {
    execute_part_into(batch, limits, states, now, RefusalSummary::default(), outcomes);
}

/// Executes a part of a batch like [`execute`]. Refusals in the other parts count as if they were in this one.
#[inline]
pub fn execute_part(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    other_parts: RefusalSummary,
) -> Outcomes {
    let mut outcomes = Outcomes::new(now, []);
    execute_part_into(batch, limits, states, now, other_parts, &mut outcomes);
    outcomes
}

#[inline]
fn execute_part_into(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    other_parts: RefusalSummary,
    outcomes: &mut Outcomes,
) {
    let now = clamp_now(now);
    outcomes.now = now;
    outcomes.list.clear();
    if let Some(refusals) = evaluate_ops(batch, limits, states, now, &mut outcomes.list, other_parts) {
        apply_ops(batch, limits, states, now, &mut outcomes.list, refusals);
    }
}

/// The first half: evaluates the operations and collects the refusals. `None` if the store has no room for a key.
#[inline]
fn evaluate_ops(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    outcomes: &mut ArrayVec<Outcome, MAX_OPS>,
    mut refusals: RefusalSummary,
) -> Option<RefusalSummary> {
    let mut has_room = true;
    for (index, op) in batch.ops.iter().enumerate() {
        let outcome = match limits.get(op.limit) {
            Some(limit) if matches!(op.verb, Verb::Take | Verb::Peek) => {
                let outcome = states.evaluate(index, &OpContext { op, limit, batch: batch.context, now });
                if op.verb == Verb::Take {
                    refusals.add(outcome.admission, limit.is_shadow());
                    has_room &= outcome.admission != Admission::NoRoom;
                }
                outcome
            }
            _ => Outcome::without_limit(Admission::Admitted, now),
        };
        outcomes.push(outcome);
    }
    has_room.then_some(refusals)
}

/// The second half: charges, strikes and the other operations.
#[inline]
fn apply_ops(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    outcomes: &mut [Outcome],
    refusals: RefusalSummary,
) {
    for (index, (op, outcome)) in batch.ops.iter().zip(outcomes).enumerate() {
        let Some(limit) = limits.get(op.limit) else { continue };
        let context = OpContext { op, limit, batch: batch.context, now };
        match op.verb {
            Verb::Peek => {}
            Verb::Take if outcome.admission.refuses() => {
                let may_change = limit.reservations().is_none() || refusals.allows_reservation(limit);
                if may_change && !refusals.has_block_for(limit) {
                    states.strike(index, &context, outcome);
                }
            }
            Verb::Take => {
                if !refusals.has_refusal_for(limit) || is_always_charged(limit, outcome) {
                    states.charge(index, &context, outcome);
                }
            }
            Verb::Reset => states.reset(index, op),
            _ => {
                // Without state, giving back succeeds, but there are no permits to release or renew.
                let mut done = !matches!(op.verb, Verb::Release | Verb::Renew);
                states.modify(index, &context, op.verb.creates_state(limit), &mut |state| {
                    done = state.apply(&context, outcome)
                });
                outcome.admission = if done { Admission::Admitted } else { Admission::Refused };
            }
        }
    }
}

/// Limits the time of a decision to before [`Time::NEVER`], the time at which a limit of 0 has room.
#[inline]
pub fn clamp_now(now: Time) -> Time {
    now.min(Time::NEVER - Span::from_micros(1))
}

/// [`execute`] for a batch with a single `Take` under an enforced limit.
#[inline]
pub fn execute_take(
    op: &Op,
    limit: &Limit,
    holder: u64,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
) -> Outcome {
    let context =
        OpContext { op, limit, batch: BatchContext { holder, ..BatchContext::default() }, now: clamp_now(now) };
    let mut outcome = states.evaluate(0, &context);
    match outcome.admission {
        Admission::Admitted | Admission::Parole => states.charge(0, &context, &mut outcome),
        Admission::Refused => states.strike(0, &context, &mut outcome),
        Admission::Blocked | Admission::NoRoom => {}
    }
    outcome
}

/// Whole states, one for each operation, for stores that load the rows of a batch and write them back.
impl BatchStates for [KeyState] {
    fn evaluate(&mut self, index: usize, context: &OpContext<'_>) -> Outcome {
        match context.op.verb {
            Verb::Peek => self[index].peek(context),
            _ => self[index].evaluate(context),
        }
    }

    fn charge(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        self[index].charge(context, outcome);
    }

    fn strike(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        self[index].strike(context, outcome);
    }

    fn modify(&mut self, index: usize, _: &OpContext<'_>, _: bool, change: &mut dyn FnMut(&mut KeyState)) {
        change(&mut self[index]);
    }

    fn reset(&mut self, index: usize, _: &Op) {
        self[index] = KeyState::default();
    }
}
