//! Limits with reservations: their rules in a script's argument, and the script's answers in core's types.

use arrayvec::ArrayVec;
use tidegate_core::batch::{BatchStates, MAX_OPS, OpContext};
use tidegate_core::{Admission, KeyState, LimitKind, Op, Outcome, ReservationRules, Time};

use super::{ArgumentBuffer, BatchCodec, ResponseDecoder};

impl BatchCodec<'_> {
    pub(super) fn encode_reservation_rules(
        &self,
        op: &Op,
        kind: &LimitKind,
        rules: &ReservationRules,
        buffer: &mut ArgumentBuffer,
    ) {
        let context = self.batch.context();
        let (part, longest_spacing, burst_part) = match kind {
            LimitKind::Rate(rate) => {
                let spacing = |cost| rules.spacing(rate, cost).as_micros();
                (spacing(op.cost), spacing(rate.burst()), rules.part_of_burst(rate.burst()))
            }
            kind => (rules.part_of(kind.capacity()), 0, 0),
        };
        buffer.push_span(rules.horizon());
        buffer.push_number(part);
        buffer.push_number(longest_spacing);
        buffer.push_number(burst_part);
        buffer.push_span(rules.grace());
        buffer.push_number(u64::from(rules.is_kept()));
        buffer.push_bytes(&context.caller.to_le_bytes());
        buffer.push_number(context.presented_to(op).as_micros());
    }
}

impl ResponseDecoder<'_> {
    pub(super) fn reservation_answer(&mut self) -> Option<ReservationAnswer> {
        Some(ReservationAnswer {
            unreserved_fits: self.number()? == 1,
            is_admitted: self.number()? == 1,
            retry_at: self.time()?,
            reserved_at: self.time()?,
            held: self.number()?,
            reserved_until: self.time()?,
            assigned_at: self.time()?,
        })
    }
}

/// The script's answer about a limit with reservations.
#[derive(Clone, Copy)]
pub(super) struct ReservationAnswer {
    /// True if a call without a reservation has room.
    unreserved_fits: bool,
    is_admitted: bool,
    retry_at: Time,
    reserved_at: Time,
    /// The part that is kept for others.
    held: u64,
    reserved_until: Time,
    /// The instant that this call was given.
    assigned_at: Time,
}

/// The states that a script returned, and its answers about limits with reservations.
#[derive(Default)]
pub(super) struct DecodedStates {
    pub(super) plain: ArrayVec<KeyState, MAX_OPS>,
    pub(super) answers: ArrayVec<Option<ReservationAnswer>, MAX_OPS>,
}

impl BatchStates for DecodedStates {
    fn evaluate(&mut self, index: usize, context: &OpContext<'_>) -> Outcome {
        let Some(answer) = self.answers[index] else { return self.plain.evaluate(index, context) };
        let plain = context.limit.without_reservations();
        let mut outcome = self.plain.evaluate(index, &OpContext { limit: &plain, ..*context });
        outcome.used = outcome.used.saturating_add(answer.held);
        if answer.held > 0 {
            outcome.remaining = outcome.limit.saturating_sub(outcome.used);
        } else if !answer.unreserved_fits {
            outcome.remaining = outcome.remaining.min(context.op.cost.saturating_sub(1));
        }
        outcome.admission = if answer.is_admitted { Admission::Admitted } else { Admission::Refused };
        (outcome.retry_at, outcome.reserved_at) = (answer.retry_at, answer.reserved_at);
        outcome
    }

    fn charge(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        let Some(answer) = self.answers[index] else { return self.plain.charge(index, context, outcome) };
        let plain = context.limit.without_reservations();
        let before = *outcome;
        let is_counted = answer.reserved_at == Time::ZERO || matches!(plain.kind(), LimitKind::Quota(_));
        // A reservation counts as used before.
        let op = Op { cost: if is_counted { context.op.cost } else { 0 }, ..*context.op };
        self.plain.charge(index, &OpContext { op: &op, limit: &plain, ..*context }, outcome);
        if answer.reserved_at > Time::ZERO {
            (outcome.used, outcome.remaining) = (before.used, before.remaining);
        }
        outcome.reset_at = outcome.reset_at.max(answer.reserved_until).max(context.now);
    }

    fn strike(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        match self.answers[index] {
            Some(answer) if answer.assigned_at > Time::ZERO => {
                outcome.retry_at = answer.assigned_at;
                let is_kept = context.limit.reservations().is_some_and(|rules| rules.is_kept());
                outcome.reserved_at = if is_kept { answer.assigned_at } else { Time::ZERO };
                outcome.reset_at = outcome.reset_at.max(answer.assigned_at);
            }
            Some(_) => {}
            None => self.plain.strike(index, context, outcome),
        }
    }

    fn modify(&mut self, index: usize, context: &OpContext<'_>, create: bool, change: &mut dyn FnMut(&mut KeyState)) {
        self.plain.modify(index, context, create, change);
    }

    fn reset(&mut self, index: usize, op: &Op) {
        self.plain.reset(index, op);
    }
}
