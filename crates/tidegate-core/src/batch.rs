//! One question to a store: operations as data, decided all or nothing.

use arrayvec::ArrayVec;
use core::fmt;

use crate::state::LimitStatus;
use crate::{KeyState, Limit, LimitId, LimitKind, Limits, Span, Time};

/// The most operations that one batch holds.
pub const MAX_OPS: usize = 8;

/// A key: 128 bits of a keyed hash over its parts. Stores keep this, never the parts themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    hi: u64,
    lo: u64,
}

impl Key {
    /// A key of two halves; `lo` alone must already be well spread.
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

/// What an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Charges the cost if all limits of the batch have room; takes a strike if this one has none.
    Take,
    /// Answers what a `Take` would meet, and changes nothing.
    Peek,
    /// Gives back a cost that was charged: of a call that was admitted at [`BatchContext::charged_at`], and that windows counted
    /// at [`BatchContext::counted_at`], if that is known.
    Refund,
    /// Gives back the permits that the batch's id holds.
    Release,
    /// Lengthens the lease of the permits that the batch's id holds. The cost is how many they are, for a store that has
    /// lost them.
    Renew,
    /// Forgets the key under this limit: usage, block and strikes.
    Reset,
    /// Charges the cost, up to 2^40, whether there is room or not: what a call turned out to cost beyond what it was
    /// taken for, or what was let through elsewhere. Of permits, the batch's id holds as many from now on, unless it
    /// does already; that lengthens its lease. Of a pace, callers wait for the cost, in nanoseconds, at the least.
    Debit,
    /// Tells a window that a call which was charged ahead ([`Batch::with_lead`]) has ended: what it was charged counts as
    /// made now.
    Settle,
    /// Closes a cool-down for a throttled reply to a call of this generation. The cost is the wait that was asked for,
    /// in microseconds; 0 is none.
    Throttle {
        /// The generation that the call was let through with ([`Outcome::generation`]).
        generation: u32,
    },
    /// Tells a cool-down that a call of this generation succeeded.
    Success {
        /// The generation that the call was let through with.
        generation: u32,
    },
    /// Closes a cool-down for a credential that isn't accepted, for a cost of so many microseconds; 0 is for good.
    Disable,
    /// Brings back what a store doesn't know of a penalty: a block that lasts for the cost, in microseconds, at the least, and
    /// strikes, as many at the least. 0 is a block that is over.
    RestorePenalty {
        /// Strikes that count.
        strikes: u8,
        /// The largest cost that may pass a full limit once, where the block leaves a parole.
        parole: u32,
    },
    /// Tells a pace of a call, and is told how long to wait ([`PaceStep::from_outcome`](crate::pacer::PaceStep::from_outcome)).
    Pace {
        /// Whether the call failed; else it succeeded.
        failed: bool,
        /// 32 random bits, for jitter.
        draw: u32,
    },
}

impl Verb {
    /// True if under this limit it concerns a key that nothing is remembered of, too.
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

/// The clients that share a key because a full store had no room for the caller's own, from none to all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum ShareLevel {
    /// None: the key is the caller's own.
    #[default]
    Own,
    /// Those of one /24 of IPv4 or one /48 of IPv6.
    SmallNetwork,
    /// Those of one /16 of IPv4 or one /32 of IPv6.
    LargeNetwork,
    /// All.
    All,
}

impl ShareLevel {
    /// The next wider one.
    #[must_use]
    pub fn wider(self) -> Self {
        match self {
            Self::Own => Self::SmallNetwork,
            Self::SmallNetwork => Self::LargeNetwork,
            Self::LargeNetwork | Self::All => Self::All,
        }
    }

    /// True if a refused call takes a strike. Under a key of many networks it takes none: strangers would be blocked for it.
    pub fn allows_strikes(self) -> bool {
        self <= Self::SmallNetwork
    }
}

/// One operation on one key under one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    /// Under which limit.
    pub limit: LimitId,
    /// What to do.
    pub verb: Verb,
    /// On whose account.
    pub key: Key,
    /// How much; 1 for an ordinary call, at most 2^40.
    pub cost: u64,
    /// Whether a store that is full must find room for this key all the same.
    pub must_fit: bool,
    /// The clients that share the key.
    pub share_level: ShareLevel,
}

impl Op {
    /// A `Take`, `Peek` or other operation of `cost` on a key that may have to share when the store is full.
    pub const fn new(limit: LimitId, verb: Verb, key: Key, cost: u64) -> Self {
        Self { limit, verb, key, cost, must_fit: false, share_level: ShareLevel::Own }
    }
}

/// What the operations of a batch have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchContext {
    /// Who holds the permits that are taken, given back or renewed.
    pub holder: u64,
    /// How far ahead of the present a window counts what is taken.
    pub lead: Span,
    /// The moment that a window counted what is settled or refunded at; the epoch if nobody knows.
    pub counted_at: Time,
    /// The moment at which what is refunded was charged; the epoch if nobody knows.
    pub charged_at: Time,
    /// A hash of what all keys of the batch have in common, by which a store that is divided over several servers finds
    /// them in one place; 0 if they have nothing in common, or nobody said.
    pub affinity: u64,
}

/// One operation, and all that it is judged by.
#[derive(Clone, Copy, Debug)]
pub struct OpContext<'a> {
    /// The operation.
    pub op: &'a Op,
    /// The limit that it names.
    pub limit: &'a Limit,
    /// What it has in common with the rest of its batch.
    pub batch: BatchContext,
    /// The moment of the decision.
    pub now: Time,
}

/// Operations that a store carries out together, atomically.
#[derive(Clone, Debug)]
pub struct Batch {
    context: BatchContext,
    ops: ArrayVec<Op, MAX_OPS>,
}

/// A batch already holds [`MAX_OPS`] operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchFullError;

impl fmt::Display for BatchFullError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one decision asks at most {MAX_OPS} limits")
    }
}

impl core::error::Error for BatchFullError {}

impl Batch {
    /// An empty batch. The id names the holder of any permits it takes, or gives back, or renews.
    pub fn new(id: u64) -> Self {
        Self { context: BatchContext { holder: id, ..BatchContext::default() }, ops: ArrayVec::new() }
    }

    /// A batch of a single operation.
    pub fn with_op(id: u64, op: Op) -> Self {
        Self::new(id).with_ops([op])
    }

    /// Has windows count what is taken up to `lead` from now: for calls that somebody else counts at a moment between
    /// their start and their end. Until [`Verb::Settle`] says when that was, the latest is assumed. Windows whose limit
    /// doesn't expect so much ([`Window::with_lead`](crate::Window::with_lead)) take what they expect. No call is counted
    /// before one that was taken earlier.
    #[must_use]
    pub fn with_lead(mut self, lead: Span) -> Self {
        self.context.lead = lead;
        self
    }

    /// Says at which moment windows counted what is settled or refunded: the decision's plus the lead.
    #[must_use]
    pub fn with_counted_at(mut self, at: Time) -> Self {
        self.context.counted_at = at;
        self
    }

    /// Says when the store admitted the call that is refunded, by its own time ([`Outcomes::now`]). A quota gives nothing
    /// back of what an earlier period was charged, nor where nobody knows: that would be one call more than the present
    /// period allows. [`Time::NEVER`] says that it was just now, whatever the store's time is.
    #[must_use]
    pub fn with_charged_at(mut self, at: Time) -> Self {
        self.context.charged_at = at;
        self
    }

    /// Says what all its keys have in common. Whoever asks for one of the keys must say the same.
    pub fn set_affinity(&mut self, affinity: u64) {
        self.context.affinity = affinity;
    }

    /// A batch of some of its operations, or of others in their place, that have the same in common.
    ///
    /// # Panics
    /// Of more than [`MAX_OPS`].
    #[must_use]
    pub fn with_ops(&self, ops: impl IntoIterator<Item = Op>) -> Self {
        Self { context: self.context, ops: ops.into_iter().collect() }
    }

    /// What gives back the permits that it may have been granted, if it asks for any.
    pub fn to_release(&self, limits: &Limits) -> Option<Self> {
        let in_flight = |op: &&Op| limits.get(op.limit).is_some_and(|limit| limit.kind().has_permits());
        let takes = self.ops.iter().filter(|op| op.verb == Verb::Take).filter(in_flight);
        let release = self.with_ops(takes.map(|op| Op { verb: Verb::Release, ..*op }));
        (!release.ops.is_empty()).then_some(release)
    }

    /// Drops operations that name the same limit and key as one before them, which no batch may do. A call that counts
    /// under several keys comes to that where the store has no room for them, and they share one.
    pub fn dedup(&mut self) {
        let ops = self.ops.clone();
        let is_first = |op: &Op| ops.iter().position(|other| (other.limit, other.key) == (op.limit, op.key));
        let mut index = 0;
        self.ops.retain(|op| {
            index += 1;
            is_first(op) == Some(index - 1)
        });
    }

    /// Empties it, for reuse by whoever has the same in common.
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
    /// [`BatchFullError`] at the ninth.
    pub fn push(&mut self, op: Op) -> Result<(), BatchFullError> {
        self.ops.try_push(op).map_err(|_| BatchFullError)
    }

    /// Who holds the permits of this batch.
    pub fn holder(&self) -> u64 {
        self.context.holder
    }

    /// What the operations have in common.
    pub fn context(&self) -> BatchContext {
        self.context
    }

    /// The operations in order.
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The operations in order, to be changed.
    pub fn ops_mut(&mut self) -> &mut [Op] {
        &mut self.ops
    }
}

/// What came of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There was room, or there was nothing to refuse.
    Admitted,
    /// The limit is full, but a served block's parole lets this call pass.
    Parole,
    /// The limit has no room, or (renewing) nothing is held.
    Refused,
    /// A block lives.
    Blocked,
    /// The store is full of keys that it must keep; ask again under a key that is shared.
    NoRoom,
}

impl Verdict {
    /// Whether this operation stands against the call.
    pub fn refuses(self) -> bool {
        matches!(self, Self::Refused | Self::Blocked | Self::NoRoom)
    }
}

/// The answer to one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What came of it.
    pub verdict: Verdict,
    /// The limit's capacity.
    pub limit: u64,
    /// What is used of it after the decision; more than the limit where a parole overdrew it.
    pub used: u64,
    /// What is left of it after the decision; 0 while a block lives.
    pub remaining: u64,
    /// When this limit would admit the call: now if it does, [`Time::NEVER`] if it never will.
    pub retry_at: Time,
    /// When the limit is whole again.
    pub reset_at: Time,
    /// The whole length of the block in force; zero if none is.
    pub block: Span,
    /// When it ends.
    pub block_until: Time,
    /// Strikes that count.
    pub strikes: u8,
    /// The generation of a cool-down, by which a reply is told from one to an older call; 0 of other limits.
    pub generation: u32,
}

impl Outcome {
    /// The outcome of a look at `now` where no penalty has a say.
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

    /// An answer that says nothing about a limit: of an operation that gave back, or renewed, or forgot. Of a pace that
    /// isn't remembered it says that nobody has to wait.
    pub fn without_limit(verdict: Verdict, now: Time) -> Self {
        Self::from_status(LimitStatus { limit: 0, used: 0, remaining: 0, retry_at: now, reset_at: now }, now)
            .with_verdict(verdict)
    }

    /// Counts `cost` that was just charged.
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

/// The answers to a batch, in the order of its operations.
#[derive(Clone, Debug)]
pub struct Outcomes {
    now: Time,
    list: ArrayVec<Outcome, MAX_OPS>,
}

impl Outcomes {
    /// The answers of a store that decided elsewhere. Past [`MAX_OPS`] they are left out.
    pub fn new(now: Time, list: impl IntoIterator<Item = Outcome>) -> Self {
        Self { now, list: list.into_iter().take(MAX_OPS).collect() }
    }

    /// When the store decided, by its own time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The answers.
    pub fn list(&self) -> &[Outcome] {
        &self.list
    }

    /// Whether any limit refuses, in shadow or not.
    pub fn refuses(&self) -> bool {
        self.list.iter().any(|outcome| outcome.verdict.refuses())
    }
}

/// What stands against a call.
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

/// What stands against a call in other parts of its batch, where a store carries it out in parts ([`execute_part`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusalSummary {
    /// An enforced limit refuses.
    pub enforced_refused: bool,
    /// An enforced limit is under a block.
    pub enforced_blocked: bool,
    /// Any limit refuses, in shadow or not.
    pub any_refused: bool,
    /// Any limit is under a block, in shadow or not.
    pub any_blocked: bool,
}

impl RefusalSummary {
    /// Adds what the takes of a part came to.
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

    /// True if a take that a limit answered like this was charged to it.
    pub fn is_charged(&self, limit: &Limit, outcome: &Outcome) -> bool {
        is_always_charged(limit, outcome) || self.must_refund_if_refused(limit, outcome)
    }

    /// True if it was charged as that of a call that is admitted: it is to be given back if the call is refused after all.
    pub fn must_refund_if_refused(&self, limit: &Limit, outcome: &Outcome) -> bool {
        !outcome.verdict.refuses() && !self.has_refusal_for(limit) && !is_always_charged(limit, outcome)
    }

    /// Whether a take under this limit isn't to be charged.
    pub fn has_refusal_for(&self, limit: &Limit) -> bool {
        if limit.is_shadow() { self.any_refused } else { self.enforced_refused }
    }
}

/// True if a take is charged to a limit even where others refuse it.
#[inline]
fn is_always_charged(limit: &Limit, outcome: &Outcome) -> bool {
    limit.counts_refused() && outcome.verdict == Verdict::Admitted
}

/// A store's cells for the operations of one batch, addressed by the operation's place in it.
///
/// The methods mirror [`KeyState`]'s; a store that keeps whole states forwards to them, and one that keeps some states
/// in a shorter form may answer from that.
pub trait BatchStates {
    /// [`KeyState::evaluate`], or for a `Peek` [`KeyState::peek`], which changes nothing.
    fn evaluate(&mut self, index: usize, context: &OpContext<'_>) -> Outcome;
    /// [`KeyState::charge`].
    fn charge(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome);
    /// [`KeyState::strike`].
    fn strike(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome);
    /// Runs `change` on the whole state, if there is one, or on a new one if there has to be one.
    fn modify(&mut self, index: usize, context: &OpContext<'_>, create: bool, change: &mut dyn FnMut(&mut KeyState));
    /// Forgets the state.
    fn reset(&mut self, index: usize, op: &Op);
}

/// Carries out a batch: first every limit is judged, then, if none refuses, all are charged; otherwise those that
/// refuse take their strikes. An operation that names a limit the plan doesn't have admits.
///
/// - While any block lives, nothing changes but the count of limits that count all calls.
/// - A limit in shadow neither stops the others nor keeps them from striking; it takes part itself as if it were
///   enforced.
/// - A limit that counts all calls is charged whenever it has room itself, which a parole is not.
/// - Where the store has no room for a key, nothing changes at all: the batch is to be asked again under another key.
#[inline]
pub fn execute(batch: &Batch, limits: &Limits, states: &mut (impl BatchStates + ?Sized), now: Time) -> Outcomes {
    execute_part(batch, limits, states, now, RefusalSummary::default())
}

/// [`execute`] for a part of a batch: what stands against the call elsewhere counts as if it stood here.
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

/// The first half: what stands against the call, among enforced limits and among all.
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

/// The second half: charges, strikes, and what is told.
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
                // What isn't remembered can be given back, but not be held.
                let mut done = !matches!(op.verb, Verb::Release | Verb::Renew);
                states.modify(index, &context, op.verb.creates_state(limit), &mut |state| {
                    done = state.apply(&context, outcome)
                });
                outcome.verdict = if done { Verdict::Admitted } else { Verdict::Refused };
            }
        }
    }
}

/// The last moment at which anything is decided lies before [`Time::NEVER`], so that even a clock gone mad never
/// reaches the moment when a limit of 0 has room.
#[inline]
pub fn clamp_now(now: Time) -> Time {
    now.min(Time::NEVER - Span::from_micros(1))
}

/// [`execute`] for a batch of nothing but one `Take`, of a limit that is enforced.
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

/// Whole states, one for each operation, as cells: for stores that load a batch's rows and write them back.
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
