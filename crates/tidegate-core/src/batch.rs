//! A batch: one request to a store. Its operations are data, and the store admits all of them or none.

use arrayvec::ArrayVec;
use core::fmt;

use crate::state::LimitStatus;
use crate::{KeyState, Limit, LimitId, LimitKind, Limits, Span, Time};

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
    /// Gives back a charged cost. [`BatchContext::charged_at`] is the time at which the call was admitted.
    /// [`BatchContext::counted_at`] is the time at which windows counted it, if that is known.
    Refund,
    /// Gives back the permits that the holder of the batch has.
    Release,
    /// Extends the lease of the permits that the holder of the batch has. The cost is their number, for a store that
    /// has lost them.
    Renew,
    /// Deletes the state of the key under this limit: usage, block and strikes.
    Reset,
    /// Charges the cost, up to 2^40, even if there is no room. For calls that cost more than they were charged at
    /// first, or that were admitted elsewhere. With permits, the holder of the batch has this many from now on, unless
    /// it has them already; then its lease is extended. With a pace, callers wait for at least the cost, in
    /// nanoseconds.
    Debit,
    /// Tells a window that a call that was charged ahead ([`Batch::with_lead`]) has ended: its charge counts as made
    /// now.
    Settle,
    /// Closes a cool-down after a throttled reply to a call of this generation. The cost is the wait that the reply
    /// asked for, in microseconds. 0 means that it asked for none.
    Throttle {
        /// The generation with which the call was admitted ([`Outcome::generation`]).
        generation: u32,
    },
    /// Tells a cool-down that a call of this generation succeeded.
    Success {
        /// The generation with which the call was admitted.
        generation: u32,
    },
    /// Closes a cool-down because a credential was rejected. The cost is the duration in microseconds; 0 means
    /// permanently.
    Disable,
    /// Restores the parts of a penalty that a store has lost: a block that lasts for at least the cost, in
    /// microseconds, and a minimum number of strikes. A cost of 0 means that the block is over.
    RestorePenalty {
        /// The number of strikes.
        strikes: u8,
        /// The largest cost that may pass a full limit once, if the block leaves a parole.
        parole: u32,
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
    /// True if this operation creates state for a key that has none under this limit.
    fn creates_state(self, limit: &Limit) -> bool {
        let kind = limit.kind();
        match self {
            Self::Debit => !matches!(kind, LimitKind::Cooldown(_)),
            Self::RestorePenalty { .. } => limit.penalty().is_some(),
            Self::Throttle { .. } | Self::Disable => matches!(kind, LimitKind::Cooldown(_)),
            Self::Pace { failed, .. } => failed && matches!(kind, LimitKind::Pace(_)),
            _ => false,
        }
    }
}

/// The clients that share a key because a full store had no room for the caller's own, in ascending order.
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

    /// True if a refused call adds a strike. Under a key of many networks it doesn't, because uninvolved clients would
    /// be blocked.
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
    /// A hash of the part that all keys of the batch share. A store that is divided over several servers uses it to
    /// keep these keys on one server. 0 means that they share nothing, or that it is unknown.
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

/// Operations that a store executes together, atomically.
#[derive(Clone, Debug)]
pub struct Batch {
    context: BatchContext,
    ops: ArrayVec<Op, MAX_OPS>,
}

/// The error for a batch that already holds [`MAX_OPS`] operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchFullError;

impl fmt::Display for BatchFullError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one decision asks at most {MAX_OPS} limits")
    }
}

impl core::error::Error for BatchFullError {}

impl Batch {
    /// An empty batch. The id names the holder of the permits that it takes, gives back or renews.
    pub fn new(id: u64) -> Self {
        Self { context: BatchContext { holder: id, ..BatchContext::default() }, ops: ArrayVec::new() }
    }

    /// A batch of a single operation.
    pub fn with_op(id: u64, op: Op) -> Self {
        Self::new(id).with_ops([op])
    }

    /// Makes windows count takes `lead` after now, for calls that another service counts at some time between their
    /// start and their end. Until [`Verb::Settle`] reports the end, the latest time is assumed. A window with a shorter
    /// lead of its own ([`Window::with_lead`](crate::Window::with_lead)) uses that. No call is counted before an
    /// earlier call.
    #[must_use]
    pub fn with_lead(mut self, lead: Span) -> Self {
        self.context.lead = lead;
        self
    }

    /// Sets the time at which windows counted the charge that is settled or refunded: the time of the decision plus the
    /// lead.
    #[must_use]
    pub fn with_counted_at(mut self, at: Time) -> Self {
        self.context.counted_at = at;
        self
    }

    /// Sets the time at which the store admitted the refunded call, by the store's clock ([`Outcomes::now`]). A quota
    /// refunds nothing that was charged in an earlier period or at an unknown time. Otherwise the present period would
    /// allow one call too many. [`Time::NEVER`] means the present, whatever the store's clock says.
    #[must_use]
    pub fn with_charged_at(mut self, at: Time) -> Self {
        self.context.charged_at = at;
        self
    }

    /// Sets the hash of the part that all keys share. All callers that use one of these keys must set the same value.
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
        let ops = self.ops.clone();
        let is_first = |op: &Op| ops.iter().position(|other| (other.limit, other.key) == (op.limit, op.key));
        let mut index = 0;
        self.ops.retain(|op| {
            index += 1;
            is_first(op) == Some(index - 1)
        });
    }

    /// Empties the batch for reuse with the same affinity.
    pub(crate) fn clear(&mut self) {
        self.context = BatchContext { affinity: self.context.affinity, ..BatchContext::default() };
        self.ops.clear();
    }

    pub(crate) fn set_lead(&mut self, lead: Span) {
        self.context.lead = lead;
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

/// The result of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
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

impl Verdict {
    /// True if this operation refuses the call.
    pub fn refuses(self) -> bool {
        matches!(self, Self::Refused | Self::Blocked | Self::NoRoom)
    }
}

/// The outcome of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The result.
    pub verdict: Verdict,
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
    /// The generation of a cool-down, which separates replies to current calls from those to older ones. 0 for other
    /// limits.
    pub generation: u32,
}

impl Outcome {
    /// The outcome at `now` without any penalty.
    #[inline]
    pub fn from_status(status: LimitStatus, now: Time) -> Self {
        Self {
            verdict: if status.retry_at <= now { Verdict::Admitted } else { Verdict::Refused },
            limit: status.limit,
            used: status.used,
            remaining: status.remaining,
            retry_at: status.retry_at,
            reset_at: status.reset_at,
            block: Span::ZERO,
            block_until: Time::ZERO,
            strikes: 0,
            generation: 0,
        }
    }

    /// An outcome without data of a limit, for operations that give back, renew or delete. For a pace without state it
    /// means that no caller has to wait.
    pub fn without_limit(verdict: Verdict, now: Time) -> Self {
        Self::from_status(LimitStatus { limit: 0, used: 0, remaining: 0, retry_at: now, reset_at: now }, now)
            .with_verdict(verdict)
    }

    /// Adds a `cost` that was just charged.
    #[inline]
    pub fn record_charge(&mut self, cost: u64) {
        self.used = self.used.saturating_add(cost);
        self.remaining = self.remaining.saturating_sub(cost);
    }

    fn with_verdict(mut self, verdict: Verdict) -> Self {
        self.verdict = verdict;
        self
    }
}

/// The outcomes of a batch, in the order of its operations.
#[derive(Clone, Debug)]
pub struct Outcomes {
    now: Time,
    list: ArrayVec<Outcome, MAX_OPS>,
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

    /// True if any limit refuses, in shadow or not.
    pub fn refuses(&self) -> bool {
        self.list.iter().any(|outcome| outcome.verdict.refuses())
    }
}

/// The refusals of a call.
#[derive(Clone, Copy, Default)]
struct VerdictFlags {
    refused: bool,
    blocked: bool,
    no_room: bool,
}

impl VerdictFlags {
    fn add(&mut self, verdict: Verdict) {
        self.refused |= verdict.refuses();
        self.blocked |= verdict == Verdict::Blocked;
        self.no_room |= verdict == Verdict::NoRoom;
    }
}

/// The refusals of a call in other parts of its batch, for a store that executes it in parts ([`execute_part`]).
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
}

impl RefusalSummary {
    /// Adds the outcomes of a part's takes.
    pub fn add_part(&mut self, batch: &Batch, limits: &Limits, outcomes: &Outcomes) {
        for (op, outcome) in batch.ops.iter().zip(&outcomes.list).filter(|(op, _)| op.verb == Verb::Take) {
            let (refuses, blocks) = (outcome.verdict.refuses(), outcome.verdict == Verdict::Blocked);
            self.any_refused |= refuses;
            self.any_blocked |= blocks;
            if limits.get(op.limit).is_some_and(|limit| !limit.is_shadow()) {
                self.enforced_refused |= refuses;
                self.enforced_blocked |= blocks;
            }
        }
    }

    /// True if a take with this outcome was charged to the limit.
    pub fn is_charged(&self, limit: &Limit, outcome: &Outcome) -> bool {
        is_always_charged(limit, outcome) || self.must_refund_if_refused(limit, outcome)
    }

    /// True if it was charged as part of an admitted call. It must be refunded if the call is refused after all.
    pub fn must_refund_if_refused(&self, limit: &Limit, outcome: &Outcome) -> bool {
        !outcome.verdict.refuses() && !self.has_refusal_for(limit) && !is_always_charged(limit, outcome)
    }

    /// True if a take under this limit must not be charged.
    pub fn has_refusal_for(&self, limit: &Limit) -> bool {
        if limit.is_shadow() { self.any_refused } else { self.enforced_refused }
    }
}

/// True if a take is charged to a limit even if other limits refuse it.
#[inline]
fn is_always_charged(limit: &Limit, outcome: &Outcome) -> bool {
    limit.counts_refused() && outcome.verdict == Verdict::Admitted
}

/// The states of a store for the operations of one batch, addressed by the index of the operation.
///
/// The methods correspond to those of [`KeyState`]. A store that keeps whole states forwards to them. A store that
/// keeps some states in a shorter form may answer from that form.
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

/// Executes a batch. First every limit is evaluated. If none refuses, all are charged; otherwise those that refuse add
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

/// Executes a part of a batch like [`execute`]. Refusals in the other parts count as if they were in this one.
#[inline]
pub fn execute_part(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    other_parts: RefusalSummary,
) -> Outcomes {
    let now = clamp_now(now);
    let mut outcomes = Outcomes { now, list: ArrayVec::new() };
    let (mut enforced, mut including_shadow) = evaluate_ops(batch, limits, states, now, &mut outcomes.list);
    enforced.refused |= other_parts.enforced_refused;
    enforced.blocked |= other_parts.enforced_blocked;
    including_shadow.refused |= other_parts.any_refused;
    including_shadow.blocked |= other_parts.any_blocked;
    if !including_shadow.no_room {
        apply_ops(batch, limits, states, now, &mut outcomes.list, (enforced, including_shadow));
    }
    outcomes
}

/// The first half: evaluates the operations and collects the refusals of enforced limits and of all limits.
#[inline]
fn evaluate_ops(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    outcomes: &mut ArrayVec<Outcome, MAX_OPS>,
) -> (VerdictFlags, VerdictFlags) {
    let (mut enforced, mut including_shadow) = (VerdictFlags::default(), VerdictFlags::default());
    for (index, op) in batch.ops.iter().enumerate() {
        let outcome = match limits.get(op.limit) {
            Some(limit) if matches!(op.verb, Verb::Take | Verb::Peek) => {
                let outcome = states.evaluate(index, &OpContext { op, limit, batch: batch.context, now });
                if op.verb == Verb::Take {
                    including_shadow.add(outcome.verdict);
                    if !limit.is_shadow() {
                        enforced.add(outcome.verdict);
                    }
                }
                outcome
            }
            _ => Outcome::without_limit(Verdict::Admitted, now),
        };
        outcomes.push(outcome);
    }
    (enforced, including_shadow)
}

/// The second half: charges, strikes and the other operations.
#[inline]
fn apply_ops(
    batch: &Batch,
    limits: &Limits,
    states: &mut (impl BatchStates + ?Sized),
    now: Time,
    outcomes: &mut [Outcome],
    (enforced, including_shadow): (VerdictFlags, VerdictFlags),
) {
    for (index, (op, outcome)) in batch.ops.iter().zip(outcomes).enumerate() {
        let Some(limit) = limits.get(op.limit) else { continue };
        let context = OpContext { op, limit, batch: batch.context, now };
        let flags = if limit.is_shadow() { including_shadow } else { enforced };
        match op.verb {
            Verb::Peek => {}
            Verb::Take if outcome.verdict.refuses() => {
                if !flags.blocked {
                    states.strike(index, &context, outcome);
                }
            }
            Verb::Take => {
                if !flags.refused || is_always_charged(limit, outcome) {
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
                outcome.verdict = if done { Verdict::Admitted } else { Verdict::Refused };
            }
        }
    }
}

/// Limits the time of a decision to before [`Time::NEVER`]. So even a broken clock never reaches the time at which a
/// limit of 0 has room.
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
    match outcome.verdict {
        Verdict::Admitted | Verdict::Parole => states.charge(0, &context, &mut outcome),
        Verdict::Refused => states.strike(0, &context, &mut outcome),
        Verdict::Blocked | Verdict::NoRoom => {}
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
