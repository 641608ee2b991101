//! The results of a batch.

use arrayvec::ArrayVec;

use super::{Batch, MAX_OPS, Verb};
use crate::state::LimitStatus;
use crate::{Limit, Limits, Span, Time};

/// The result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// There was room, or the operation can't be refused.
    Admitted,
    /// The limit is full, but the parole of a block that has ended lets this call pass.
    Parole,
    /// The limit has no room, or, for a renewal, the holder has no permits.
    Refused,
    /// A block is in force.
    Blocked,
    /// The store is full of keys that it must keep. The caller must repeat the request under a shared key.
    NoRoom,
}

impl Admission {
    /// True if this operation refuses the call.
    pub fn refuses(self) -> bool {
        matches!(self, Self::Refused | Self::Blocked | Self::NoRoom)
    }
}

/// The outcome of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The result.
    pub admission: Admission,
    /// The capacity of the limit.
    pub limit: u64,
    /// The used amount after the decision. More than the limit if a parole exceeded it.
    pub used: u64,
    /// The remaining amount after the decision. 0 while a block is in force.
    pub remaining: u64,
    /// The time at which this limit would admit the call: now if it does, [`Time::NEVER`] if it never will.
    pub retry_at: Time,
    /// The time at which the full limit is available again.
    pub reset_at: Time,
    /// The whole length of the block in force. Zero if there is none.
    pub block: Span,
    /// The end of the block.
    pub block_until: Time,
    /// The number of strikes.
    pub strikes: u8,
    /// The generation of a cool-down, which tells current calls from older ones. 0 for other limits.
    pub generation: u32,
    /// The instant of the caller's reservation: the one that it has on refusal, the one that admitted it otherwise. The
    /// epoch means none.
    pub reserved_at: Time,
}

impl Outcome {
    /// The outcome at `now` without any penalty.
    #[inline]
    pub fn from_status(status: LimitStatus, now: Time) -> Self {
        Self {
            admission: if status.retry_at <= now { Admission::Admitted } else { Admission::Refused },
            limit: status.limit,
            used: status.used,
            remaining: status.remaining,
            retry_at: status.retry_at,
            reset_at: status.reset_at,
            block: Span::ZERO,
            block_until: Time::ZERO,
            strikes: 0,
            generation: 0,
            reserved_at: Time::ZERO,
        }
    }

    /// An outcome without a limit's data, for operations that give back, renew or delete, or for a pace without wait.
    pub fn without_limit(admission: Admission, now: Time) -> Self {
        let status = LimitStatus { limit: 0, used: 0, remaining: 0, retry_at: now, reset_at: now };
        Self { admission, ..Self::from_status(status, now) }
    }

    /// Adds a `cost` that was just charged.
    #[inline]
    pub fn record_charge(&mut self, cost: u64) {
        self.used = self.used.saturating_add(cost);
        self.remaining = self.remaining.saturating_sub(cost);
    }
}

/// The outcomes of a batch, in the order of its operations.
#[derive(Clone, Debug)]
pub struct Outcomes {
    pub(super) now: Time,
    pub(super) list: ArrayVec<Outcome, MAX_OPS>,
}

impl Outcomes {
    /// The outcomes of a store that decided elsewhere. Those beyond [`MAX_OPS`] are dropped.
    pub fn new(now: Time, list: impl IntoIterator<Item = Outcome>) -> Self {
        Self { now, list: list.into_iter().take(MAX_OPS).collect() }
    }

    /// The time of the decision, by the store's clock.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The outcomes.
    pub fn list(&self) -> &[Outcome] {
        &self.list
    }

    /// The outcomes, to be changed.
    pub fn list_mut(&mut self) -> &mut [Outcome] {
        &mut self.list
    }

    /// True if any limit refuses, in shadow or not.
    pub fn refuses(&self) -> bool {
        self.list.iter().any(|outcome| outcome.admission.refuses())
    }
}

/// The refusals of a call, so far or in other parts of its batch ([`execute_part`](super::execute_part)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusalSummary {
    /// An enforced limit refuses.
    pub enforced_refused: bool,
    /// An enforced limit has a block in force.
    pub enforced_blocked: bool,
    /// Any limit refuses, in shadow or not.
    pub any_refused: bool,
    /// Any limit has a block in force, in shadow or not.
    pub any_blocked: bool,
    /// More than one enforced limit refuses.
    pub several_refused: bool,
}

impl RefusalSummary {
    /// Adds the outcomes of a part's takes.
    pub fn add_part(&mut self, batch: &Batch, limits: &Limits, outcomes: &Outcomes) {
        for (op, outcome) in batch.ops.iter().zip(&outcomes.list).filter(|(op, _)| op.verb == Verb::Take) {
            self.add(outcome.admission, limits.get(op.limit).is_none_or(Limit::is_shadow));
        }
    }

    /// Adds the admission of a limit, in shadow or not.
    #[inline]
    pub fn add(&mut self, admission: Admission, shadow: bool) {
        let (refuses, blocks) = (admission.refuses(), admission == Admission::Blocked);
        self.any_refused |= refuses;
        self.any_blocked |= blocks;
        if !shadow {
            self.several_refused |= refuses && self.enforced_refused;
            self.enforced_refused |= refuses;
            self.enforced_blocked |= blocks;
        }
    }

    /// True if a take with this outcome was charged to the limit.
    pub fn is_charged(&self, limit: &Limit, outcome: &Outcome) -> bool {
        is_always_charged(limit, outcome) || self.must_refund_if_refused(limit, outcome)
    }

    /// True if it was charged as part of an admitted call. It must be refunded if the call is refused after all.
    pub fn must_refund_if_refused(&self, limit: &Limit, outcome: &Outcome) -> bool {
        !outcome.admission.refuses() && !self.has_refusal_for(limit) && !is_always_charged(limit, outcome)
    }

    /// True if a take under this limit must not be charged.
    #[inline]
    pub fn has_refusal_for(&self, limit: &Limit) -> bool {
        if limit.is_shadow() { self.any_refused } else { self.enforced_refused }
    }

    /// True if a refused caller may get a reservation of this limit: no other limit refuses it, which could keep it from
    /// returning in time.
    #[inline]
    pub fn allows_reservation(&self, limit: &Limit) -> bool {
        !limit.is_shadow() && !self.several_refused
    }

    /// True if a take changes nothing under this limit, because a block is in force.
    #[inline]
    pub fn has_block_for(&self, limit: &Limit) -> bool {
        if limit.is_shadow() { self.any_blocked } else { self.enforced_blocked }
    }
}

/// True if a take is charged to a limit even if other limits refuse it.
#[inline]
pub(super) fn is_always_charged(limit: &Limit, outcome: &Outcome) -> bool {
    limit.counts_refused() && outcome.admission == Admission::Admitted
}
