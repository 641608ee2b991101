//! A batch: one request to a store. Its operations are data, and the store admits all of them or none.

mod execute;
mod outcome;

use arrayvec::ArrayVec;
use thiserror::Error;

pub use self::execute::{BatchStates, clamp_now, execute, execute_into, execute_part, execute_take};
pub use self::outcome::{Admission, Outcome, Outcomes, RefusalSummary};

use crate::caller_rate::SplitNanos;
use crate::{Limit, LimitId, LimitKind, Limits, Span, Time};

/// The maximum number of operations in one batch.
pub const MAX_OPS: usize = 8;

/// A key: 128 bits of a keyed hash of its parts. Stores keep this, never the parts themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    hi: u64,
    lo: u64,
}

impl Key {
    /// A key of two halves. `lo` alone must already be well distributed.
    pub const fn new(hi: u64, lo: u64) -> Self {
        Self { hi, lo }
    }

    /// The upper half.
    pub const fn hi(self) -> u64 {
        self.hi
    }

    /// The lower half.
    pub const fn lo(self) -> u64 {
        self.lo
    }
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Charges the cost if all limits of the batch have room. If this limit has none, adds a strike.
    Take,
    /// Returns the outcome of a `Take`, and changes nothing.
    Peek,
    /// Gives back a cost that was charged at [`BatchContext::charged_at`] and counted at [`BatchContext::counted_at`].
    Refund,
    /// Gives back the permits of the batch's holder.
    Release,
    /// Extends the lease of the permits of the batch's holder. The cost is their number, if a store has lost them.
    Renew,
    /// Deletes the state of the key under this limit: usage, block and strikes.
    Reset,
    /// Charges the cost, up to 2^40, even if there is no room. For calls that cost more than was charged at first, or
    /// that were admitted elsewhere. With permits, the batch's holder has this many from now on, unless it has some
    /// already; then its lease is extended. With a pace, callers wait for at least the cost, in nanoseconds. A cool-down is
    /// closed for at least the cost, in microseconds, without a step of its backoff.
    Debit,
    /// Tells a window that a call charged ahead ([`Batch::with_lead`]) has ended: its charge counts as made now.
    Settle,
    /// Closes a cool-down after a throttled reply to a call of this generation, for at least the cost in microseconds.
    Throttle {
        /// The generation with which the call was admitted ([`Outcome::generation`]).
        generation: u32,
    },
    /// Tells a cool-down that a call of this generation succeeded.
    Success {
        /// The generation with which the call was admitted.
        generation: u32,
    },
    /// Closes a cool-down because a credential was rejected, for the cost in microseconds. 0 means permanently.
    Disable,
    /// Restores the parts of a penalty that a store has lost: a block of at least the cost in microseconds, where 0
    /// means that it is over, and a minimum number of strikes.
    RestorePenalty {
        /// The number of strikes.
        strikes: u8,
        /// The largest cost that may pass a full limit once, if the block leaves a parole.
        parole: u32,
    },
    /// Charges a rate by the terms of this call ([`CallerRate`](crate::CallerRate)), if it has room by them. The cost is
    /// in nanoseconds of the arrival time.
    TakeByTerms {
        /// True to give the cost back.
        gives_back: bool,
        /// The distance of the arrival time ahead of now after a whole burst.
        tolerance: SplitNanos,
    },
    /// Reports a call to a pace and returns the wait
    /// ([`PaceStep::from_outcome`](crate::pacer::PaceStep::from_outcome)).
    Pace {
        /// True if the call failed, false if it succeeded.
        failed: bool,
        /// 32 random bits, for jitter.
        draw: u32,
    },
}

impl Verb {
    fn creates_state(self, limit: &Limit) -> bool {
        let kind = limit.kind();
        match self {
            Self::Debit => true,
            Self::RestorePenalty { .. } => limit.penalty().is_some(),
            Self::Throttle { .. } | Self::Disable => matches!(kind, LimitKind::Cooldown(_)),
            Self::TakeByTerms { .. } => matches!(kind, LimitKind::Rate(_)),
            Self::Pace { failed, .. } => failed && matches!(kind, LimitKind::Pace(_)),
            _ => false,
        }
    }
}

/// The clients that share a key because a full store had no room for the caller's own, from few to all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShareLevel {
    /// No other client: the key is the caller's own.
    #[default]
    Own,
    /// The clients of one /24 of IPv4 or one /48 of IPv6.
    SmallNetwork,
    /// The clients of one /16 of IPv4 or one /32 of IPv6.
    LargeNetwork,
    /// All clients.
    All,
}

impl ShareLevel {
    /// Returns the next wider level. The widest is [`All`](Self::All).
    #[must_use]
    pub fn wider(self) -> Self {
        match self {
            Self::Own => Self::SmallNetwork,
            Self::SmallNetwork => Self::LargeNetwork,
            Self::LargeNetwork | Self::All => Self::All,
        }
    }

    /// True if a refused call adds a strike. Under a key of many networks, this would block uninvolved clients.
    pub fn allows_strikes(self) -> bool {
        self <= Self::SmallNetwork
    }
}

/// One operation on one key under one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// The limit.
    pub limit: LimitId,
    /// The kind of the operation.
    pub verb: Verb,
    /// The key that is charged.
    pub key: Key,
    /// The cost: 1 for an ordinary call, at most 2^40.
    pub cost: u64,
    /// True if even a full store must make room for this key.
    pub must_fit: bool,
    /// The clients that share the key.
    pub share_level: ShareLevel,
}

impl Op {
    /// A `Take`, `Peek` or other operation of `cost`. Its key may be shared if the store is full.
    pub const fn new(limit: LimitId, verb: Verb, key: Key, cost: u64) -> Self {
        Self { limit, verb, key, cost, must_fit: false, share_level: ShareLevel::Own }
    }
}

/// The values that all operations of a batch share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchContext {
    /// The id of the holder of the permits that are taken, given back or renewed.
    pub holder: u64,
    /// The time between a take and the later time at which windows count it.
    pub lead: Span,
    /// The time at which a window counted the charge that is settled or refunded. The epoch means unknown.
    pub counted_at: Time,
    /// The time at which the refunded cost was charged. The epoch means unknown.
    pub charged_at: Time,
    /// A hash that identifies the caller among those that share a limit's key. 0 means unknown: it gets no reservation.
    pub caller: u64,
    /// The instant of the reservation that the caller presents. If the caller's reservation is another one, that counts.
    /// The epoch means that it presents none. [`Time::NEVER`] means one that isn't the caller's, which admits nothing.
    pub reservation: Time,
    /// The limit and key that gave it. To others, the caller presents none. `None` means any.
    pub reservation_of: Option<(LimitId, Key)>,
    /// A hash of the part that all keys of the batch share, for a store that keeps such keys on one of several servers.
    /// 0 means that they share nothing, or that it is unknown.
    pub affinity: u64,
}

/// One operation with everything that its decision depends on.
#[derive(Clone, Copy, Debug)]
pub struct OpContext<'a> {
    /// The operation.
    pub op: &'a Op,
    /// The limit that it names.
    pub limit: &'a Limit,
    /// The values that it shares with the rest of its batch.
    pub batch: BatchContext,
    /// The time of the decision.
    pub now: Time,
}

impl OpContext<'_> {
    /// The instant of the reservation that the caller presents to this limit; see [`BatchContext::reservation`].
    pub fn presented(&self) -> Time {
        self.batch.presented_to(self.op)
    }
}

impl BatchContext {
    /// The instant of the reservation that the caller presents to the limit of this operation.
    pub fn presented_to(&self, op: &Op) -> Time {
        match self.reservation_of {
            Some(giver) if giver != (op.limit, op.key) => Time::ZERO,
            _ => self.reservation,
        }
    }
}

/// Operations that a store executes together, atomically.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(crate) context: BatchContext,
    ops: ArrayVec<Op, MAX_OPS>,
}

/// The error for a batch that already holds [`MAX_OPS`] operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("one decision asks at most {MAX_OPS} limits")]
pub struct BatchFullError;

impl Batch {
    /// An empty batch. The id names the holder of the permits that it takes, gives back or renews.
    pub fn new(id: u64) -> Self {
        Self { context: BatchContext { holder: id, ..BatchContext::default() }, ops: ArrayVec::new() }
    }

    /// A batch of a single operation.
    pub fn with_op(id: u64, op: Op) -> Self {
        Self::new(id).with_ops([op])
    }

    /// Makes windows count takes `lead` after now, or after a shorter lead of their own
    /// ([`Window::with_lead`](crate::Window::with_lead)). For calls that another service counts between their start and
    /// their end ([`Verb::Settle`]). No call is counted before an earlier call.
    #[must_use]
    pub fn with_lead(mut self, lead: Span) -> Self {
        self.context.lead = lead;
        self
    }

    /// Sets [`BatchContext::counted_at`]: the time of the decision plus the lead.
    #[must_use]
    pub fn with_counted_at(mut self, at: Time) -> Self {
        self.context.counted_at = at;
        self
    }

    /// Sets [`BatchContext::charged_at`] to the time at which the store admitted the call, by its clock
    /// ([`Outcomes::now`]). A quota refunds nothing that was charged in an earlier period or at an unknown time.
    /// [`Time::NEVER`] means the present, whatever the store's clock says.
    #[must_use]
    pub fn with_charged_at(mut self, at: Time) -> Self {
        self.context.charged_at = at;
        self
    }

    /// Sets [`BatchContext::caller`] and [`BatchContext::reservation`].
    pub fn set_caller(&mut self, caller: u64, reservation: Time) {
        (self.context.caller, self.context.reservation) = (caller, reservation);
    }

    /// Sets [`BatchContext::reservation`] to the one that the limit of this operation has given to the caller.
    pub fn present_reservation(&mut self, at: Time, giver: &Op) {
        (self.context.reservation, self.context.reservation_of) = (at, Some((giver.limit, giver.key)));
    }

    /// Sets [`BatchContext::affinity`]. All callers that use one of the keys must set the same value.
    pub fn set_affinity(&mut self, affinity: u64) {
        self.context.affinity = affinity;
    }

    /// A batch with the same shared values and other operations.
    ///
    /// # Panics
    /// If there are more than [`MAX_OPS`].
    #[must_use]
    pub fn with_ops(&self, ops: impl IntoIterator<Item = Op>) -> Self {
        Self { context: self.context, ops: ops.into_iter().collect() }
    }

    /// Returns the batch that gives back the permits this one may have been granted. `None` if it asks for none.
    pub fn to_release(&self, limits: &Limits) -> Option<Self> {
        let in_flight = |op: &&Op| limits.get(op.limit).is_some_and(|limit| limit.kind().has_permits());
        let takes = self.ops.iter().filter(|op| op.verb == Verb::Take).filter(in_flight);
        let release = self.with_ops(takes.map(|op| Op { verb: Verb::Release, ..*op }));
        (!release.ops.is_empty()).then_some(release)
    }

    /// Removes operations with the same limit and key as an earlier one, because a batch must not have any. They occur
    /// if a call counts under several keys that share one key in a full store.
    pub fn dedup(&mut self) {
        let mut kept = ArrayVec::<(LimitId, Key), MAX_OPS>::new();
        self.ops.retain(|op| {
            let is_first = !kept.contains(&(op.limit, op.key));
            if is_first {
                kept.push((op.limit, op.key));
            }
            is_first
        });
    }

    /// Empties the batch for reuse with the same affinity.
    pub(crate) fn clear(&mut self) {
        self.context = BatchContext { affinity: self.context.affinity, ..BatchContext::default() };
        self.ops.clear();
    }

    pub(crate) fn set_charged(&mut self, charged_at: Time, counted_at: Time) {
        self.context.charged_at = charged_at;
        self.context.counted_at = counted_at;
    }

    /// Adds an operation.
    ///
    /// # Errors
    /// [`BatchFullError`] if it already holds [`MAX_OPS`].
    pub fn push(&mut self, op: Op) -> Result<(), BatchFullError> {
        self.ops.try_push(op).map_err(|_| BatchFullError)
    }

    /// The id of the holder of this batch's permits.
    pub fn holder(&self) -> u64 {
        self.context.holder
    }

    /// The values that the operations share.
    pub fn context(&self) -> BatchContext {
        self.context
    }

    /// The operations in order.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The operations in order, mutable.
    pub fn ops_mut(&mut self) -> &mut [Op] {
        &mut self.ops
    }
}
