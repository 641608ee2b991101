//! One question to a store: operations as data, decided all or nothing.

use arrayvec::ArrayVec;
use core::fmt;

use crate::state::Look;
use crate::{Kind, Limit, LimitId, Limits, Span, State, Time};

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
    /// Gives back a cost that was charged: of a call that was admitted at [`Terms::charged_at`], and that windows counted
    /// at [`Terms::counted_at`], if that is known.
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
    /// Tells a window that a call which was charged ahead ([`Batch::ahead`]) has ended: what it was charged counts as
    /// made now.
    Settle,
    /// Closes a cool-down for a throttled reply to a call of this generation. The cost is the wait that was asked for,
    /// in microseconds; 0 is none.
    Throttle {
        /// The generation that the call was let through with ([`Outcome::generation`]).
        generation: u32,
    },
    /// Tells a cool-down that a call of this generation succeeded.
    Succeed {
        /// The generation that the call was let through with.
        generation: u32,
    },
    /// Closes a cool-down for a credential that isn't accepted, for a cost of so many microseconds; 0 is for good.
    Disable,
    /// Brings back what a store doesn't know of a penalty: a block that lasts for the cost, in microseconds, at the least, and
    /// strikes, as many at the least. 0 is a block that is over.
    Penalise {
        /// Strikes that count.
        strikes: u8,
        /// The largest cost that may pass a full limit once, where the block leaves a parole.
        parole: u32,
    },
    /// Tells a pace of a call, and is told how long to wait ([`Step::of`](crate::pacer::Step::of)).
    Pace {
        /// Whether the call failed; else it succeeded.
        failed: bool,
        /// 32 random bits, for jitter.
        draw: u32,
    },
}

impl Verb {
    /// True if under this limit it concerns a key that nothing is remembered of, too.
    fn makes(self, limit: &Limit) -> bool {
        let kind = limit.kind();
        match self {
            Self::Debit => !matches!(kind, Kind::Cooldown(_)),
            Self::Penalise { .. } => limit.penalty().is_some(),
            Self::Throttle { .. } | Self::Disable => matches!(kind, Kind::Cooldown(_)),
            Self::Pace { failed, .. } => failed && matches!(kind, Kind::Pace(_)),
            _ => false,
        }
    }
}

/// The clients that share a key because a full store had no room for the caller's own, from none to all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Share {
    /// None: the key is the caller's own.
    #[default]
    Own,
    /// Those of one /24 of IPv4 or one /48 of IPv6.
    Near,
    /// Those of one /16 of IPv4 or one /32 of IPv6.
    Wide,
    /// All.
    All,
}

impl Share {
    /// The next wider one.
    #[must_use]
    pub fn wider(self) -> Self {
        match self {
            Self::Own => Self::Near,
            Self::Near => Self::Wide,
            Self::Wide | Self::All => Self::All,
        }
    }

    /// True if a refused call takes a strike. Under a key of many networks it takes none: strangers would be blocked for it.
    pub fn takes_strikes(self) -> bool {
        self <= Self::Near
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
    pub share: Share,
}

impl Op {
    /// A `Take`, `Peek` or other operation of `cost` on a key that may have to share when the store is full.
    pub const fn new(limit: LimitId, verb: Verb, key: Key, cost: u64) -> Self {
        Self { limit, verb, key, cost, must_fit: false, share: Share::Own }
    }
}

/// What the operations of a batch have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
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
pub struct Ask<'a> {
    /// The operation.
    pub op: &'a Op,
    /// The limit that it names.
    pub limit: &'a Limit,
    /// What it has in common with the rest of its batch.
    pub terms: Terms,
    /// The moment of the decision.
    pub now: Time,
}

/// Operations that a store carries out together, atomically.
#[derive(Clone, Debug)]
pub struct Batch {
    terms: Terms,
    ops: ArrayVec<Op, MAX_OPS>,
}

/// A batch already holds [`MAX_OPS`] operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchFull;

impl fmt::Display for BatchFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one decision asks at most {MAX_OPS} limits")
    }
}

impl core::error::Error for BatchFull {}

impl Batch {
    /// An empty batch. The id names the holder of any permits it takes, or gives back, or renews.
    pub fn new(id: u64) -> Self {
        Self { terms: Terms { holder: id, ..Terms::default() }, ops: ArrayVec::new() }
    }

    /// A batch of a single operation.
    pub fn one(id: u64, op: Op) -> Self {
        Self::new(id).part([op])
    }

    /// Has windows count what is taken up to `lead` from now: for calls that somebody else counts at a moment between
    /// their start and their end. Until [`Verb::Settle`] says when that was, the latest is assumed. Windows whose limit
    /// doesn't expect so much ([`Window::with_lead`](crate::Window::with_lead)) take what they expect. No call is counted
    /// before one that was taken earlier.
    #[must_use]
    pub fn ahead(mut self, lead: Span) -> Self {
        self.terms.lead = lead;
        self
    }

    /// Says at which moment windows counted what is settled or refunded: the decision's plus the lead.
    #[must_use]
    pub fn counted_at(mut self, at: Time) -> Self {
        self.terms.counted_at = at;
        self
    }

    /// Says when the store admitted the call that is refunded, by its own time ([`Outcomes::now`]). A quota gives nothing
    /// back of what an earlier period was charged, nor where nobody knows: that would be one call more than the present
    /// period allows. [`Time::NEVER`] says that it was just now, whatever the store's time is.
    #[must_use]
    pub fn charged_at(mut self, at: Time) -> Self {
        self.terms.charged_at = at;
        self
    }

    /// Says what all its keys have in common. Whoever asks for one of the keys must say the same.
    pub fn set_affinity(&mut self, affinity: u64) {
        self.terms.affinity = affinity;
    }

    /// A batch of some of its operations, or of others in their place, that have the same in common.
    ///
    /// # Panics
    /// Of more than [`MAX_OPS`].
    #[must_use]
    pub fn part(&self, ops: impl IntoIterator<Item = Op>) -> Self {
        Self { terms: self.terms, ops: ops.into_iter().collect() }
    }

    /// What gives back the permits that it may have been granted, if it asks for any.
    pub fn release(&self, limits: &Limits) -> Option<Self> {
        let in_flight = |op: &&Op| matches!(limits.get(op.limit).map(Limit::kind), Some(Kind::Concurrency(_)));
        let takes = self.ops.iter().filter(|op| op.verb == Verb::Take).filter(in_flight);
        let release = self.part(takes.map(|op| Op { verb: Verb::Release, ..*op }));
        (!release.ops.is_empty()).then_some(release)
    }

    /// Drops operations that name the same limit and key as one before them, which no batch may do. A call that counts
    /// under several keys comes to that where the store has no room for them, and they share one.
    pub fn drop_repeated(&mut self) {
        let ops = self.ops.clone();
        let is_first = |op: &Op| ops.iter().position(|other| (other.limit, other.key) == (op.limit, op.key));
        let mut index = 0;
        self.ops.retain(|op| {
            index += 1;
            is_first(op) == Some(index - 1)
        });
    }

    /// Empties it, for reuse by whoever has the same in common.
    pub(crate) fn restart(&mut self) {
        self.terms = Terms { affinity: self.terms.affinity, ..Terms::default() };
        self.ops.clear();
    }

    pub(crate) fn set_lead(&mut self, lead: Span) {
        self.terms.lead = lead;
    }

    pub(crate) fn set_charged(&mut self, charged_at: Time, counted_at: Time) {
        self.terms.charged_at = charged_at;
        self.terms.counted_at = counted_at;
    }

    /// Adds an operation.
    ///
    /// # Errors
    /// [`BatchFull`] at the ninth.
    pub fn push(&mut self, op: Op) -> Result<(), BatchFull> {
        self.ops.try_push(op).map_err(|_| BatchFull)
    }

    /// Who holds the permits of this batch.
    pub fn id(&self) -> u64 {
        self.terms.holder
    }

    /// What the operations have in common.
    pub fn terms(&self) -> Terms {
        self.terms
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
    pub fn of(look: Look, now: Time) -> Self {
        Self {
            verdict: if look.retry_at <= now { Verdict::Admitted } else { Verdict::Refused },
            limit: look.limit,
            used: look.used,
            remaining: look.remaining,
            retry_at: look.retry_at,
            reset_at: look.reset_at,
            block: Span::ZERO,
            block_until: Time::ZERO,
            strikes: 0,
            generation: 0,
        }
    }

    /// An answer that says nothing about a limit: of an operation that gave back, or renewed, or forgot. Of a pace that
    /// isn't remembered it says that nobody has to wait.
    pub fn plain(verdict: Verdict, now: Time) -> Self {
        Self::of(Look { limit: 0, used: 0, remaining: 0, retry_at: now, reset_at: now }, now).with(verdict)
    }

    /// Counts `cost` that was just charged.
    #[inline]
    pub fn spend(&mut self, cost: u64) {
        self.used = self.used.saturating_add(cost);
        self.remaining = self.remaining.saturating_sub(cost);
    }

    fn with(mut self, verdict: Verdict) -> Self {
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
struct Tally {
    refused: bool,
    blocked: bool,
    no_room: bool,
}

impl Tally {
    fn add(&mut self, verdict: Verdict) {
        self.refused |= verdict.refuses();
        self.blocked |= verdict == Verdict::Blocked;
        self.no_room |= verdict == Verdict::NoRoom;
    }
}

/// What stands against a call in other parts of its batch, where a store carries it out in parts ([`settle_part`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Against {
    /// An enforced limit refuses.
    pub refused: bool,
    /// An enforced limit is under a block.
    pub blocked: bool,
    /// Any limit refuses, in shadow or not.
    pub watched_refused: bool,
    /// Any limit is under a block, in shadow or not.
    pub watched_blocked: bool,
}

impl Against {
    /// Adds what the takes of a part came to.
    pub fn add(&mut self, batch: &Batch, limits: &Limits, outcomes: &Outcomes) {
        for (op, outcome) in batch.ops.iter().zip(&outcomes.list).filter(|(op, _)| op.verb == Verb::Take) {
            let (refuses, blocks) = (outcome.verdict.refuses(), outcome.verdict == Verdict::Blocked);
            self.watched_refused |= refuses;
            self.watched_blocked |= blocks;
            if limits.get(op.limit).is_some_and(|limit| !limit.is_shadow()) {
                self.refused |= refuses;
                self.blocked |= blocks;
            }
        }
    }

    /// True if a take that a limit answered like this was charged to it.
    pub fn charges(&self, limit: &Limit, outcome: &Outcome) -> bool {
        counts_anyway(limit, outcome) || self.charges_admitted(limit, outcome)
    }

    /// True if it was charged as that of a call that is admitted: it is to be given back if the call is refused after all.
    pub fn charges_admitted(&self, limit: &Limit, outcome: &Outcome) -> bool {
        !outcome.verdict.refuses() && !self.refuses(limit) && !counts_anyway(limit, outcome)
    }

    /// Whether a take under this limit isn't to be charged.
    pub fn refuses(&self, limit: &Limit) -> bool {
        if limit.is_shadow() { self.watched_refused } else { self.refused }
    }
}

/// True if a take is charged to a limit even where others refuse it.
#[inline]
fn counts_anyway(limit: &Limit, outcome: &Outcome) -> bool {
    limit.counts_refused() && outcome.verdict == Verdict::Admitted
}

/// A store's cells for the operations of one batch, addressed by the operation's place in it.
///
/// The methods mirror [`State`]'s; a store that keeps whole states forwards to them, and one that keeps some states
/// in a shorter form may answer from that.
pub trait Cells {
    /// [`State::judge`], or for a `Peek` [`State::peek`], which changes nothing.
    fn judge(&mut self, index: usize, ask: &Ask<'_>) -> Outcome;
    /// [`State::charge`].
    fn charge(&mut self, index: usize, ask: &Ask<'_>, outcome: &mut Outcome);
    /// [`State::strike`].
    fn strike(&mut self, index: usize, ask: &Ask<'_>, outcome: &mut Outcome);
    /// Runs `change` on the whole state, if there is one, or on a new one if there has to be one.
    fn alter(&mut self, index: usize, ask: &Ask<'_>, make: bool, change: &mut dyn FnMut(&mut State));
    /// Forgets the state.
    fn forget(&mut self, index: usize, op: &Op);
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
pub fn settle(batch: &Batch, limits: &Limits, cells: &mut (impl Cells + ?Sized), now: Time) -> Outcomes {
    settle_part(batch, limits, cells, now, Against::default())
}

/// [`settle`] for a part of a batch: what stands against the call elsewhere counts as if it stood here.
#[inline]
pub fn settle_part(
    batch: &Batch,
    limits: &Limits,
    cells: &mut (impl Cells + ?Sized),
    now: Time,
    elsewhere: Against,
) -> Outcomes {
    let now = judgeable(now);
    let mut outcomes = Outcomes { now, list: ArrayVec::new() };
    let (mut enforced, mut watched) = judge(batch, limits, cells, now, &mut outcomes.list);
    enforced.refused |= elsewhere.refused;
    enforced.blocked |= elsewhere.blocked;
    watched.refused |= elsewhere.watched_refused;
    watched.blocked |= elsewhere.watched_blocked;
    if !watched.no_room {
        change(batch, limits, cells, now, &mut outcomes.list, (enforced, watched));
    }
    outcomes
}

/// The first half: what stands against the call, among enforced limits and among all.
#[inline]
fn judge(
    batch: &Batch,
    limits: &Limits,
    cells: &mut (impl Cells + ?Sized),
    now: Time,
    outcomes: &mut ArrayVec<Outcome, MAX_OPS>,
) -> (Tally, Tally) {
    let (mut enforced, mut watched) = (Tally::default(), Tally::default());
    for (index, op) in batch.ops.iter().enumerate() {
        let outcome = match limits.get(op.limit) {
            Some(limit) if matches!(op.verb, Verb::Take | Verb::Peek) => {
                let outcome = cells.judge(index, &Ask { op, limit, terms: batch.terms, now });
                if op.verb == Verb::Take {
                    watched.add(outcome.verdict);
                    if !limit.is_shadow() {
                        enforced.add(outcome.verdict);
                    }
                }
                outcome
            }
            _ => Outcome::plain(Verdict::Admitted, now),
        };
        outcomes.push(outcome);
    }
    (enforced, watched)
}

/// The second half: charges, strikes, and what is told.
#[inline]
fn change(
    batch: &Batch,
    limits: &Limits,
    cells: &mut (impl Cells + ?Sized),
    now: Time,
    outcomes: &mut [Outcome],
    (enforced, watched): (Tally, Tally),
) {
    for (index, (op, outcome)) in batch.ops.iter().zip(outcomes).enumerate() {
        let Some(limit) = limits.get(op.limit) else { continue };
        let ask = Ask { op, limit, terms: batch.terms, now };
        let tally = if limit.is_shadow() { watched } else { enforced };
        match op.verb {
            Verb::Peek => {}
            Verb::Take if outcome.verdict.refuses() => {
                if !tally.blocked {
                    cells.strike(index, &ask, outcome);
                }
            }
            Verb::Take => {
                if !tally.refused || counts_anyway(limit, outcome) {
                    cells.charge(index, &ask, outcome);
                }
            }
            Verb::Reset => cells.forget(index, op),
            _ => {
                // What isn't remembered can be given back, but not be held.
                let mut done = !matches!(op.verb, Verb::Release | Verb::Renew);
                cells.alter(index, &ask, op.verb.makes(limit), &mut |state| done = state.tell(&ask, outcome));
                outcome.verdict = if done { Verdict::Admitted } else { Verdict::Refused };
            }
        }
    }
}

/// The last moment at which anything is decided lies before [`Time::NEVER`], so that even a clock gone mad never
/// reaches the moment when a limit of 0 has room.
#[inline]
pub fn judgeable(now: Time) -> Time {
    now.min(Time::NEVER - Span::from_micros(1))
}

/// [`settle`] for a batch of nothing but one `Take`, of a limit that is enforced.
#[inline]
pub fn take(op: &Op, limit: &Limit, holder: u64, cells: &mut (impl Cells + ?Sized), now: Time) -> Outcome {
    let ask = Ask { op, limit, terms: Terms { holder, ..Terms::default() }, now: judgeable(now) };
    let mut outcome = cells.judge(0, &ask);
    match outcome.verdict {
        Verdict::Admitted | Verdict::Parole => cells.charge(0, &ask, &mut outcome),
        Verdict::Refused => cells.strike(0, &ask, &mut outcome),
        Verdict::Blocked | Verdict::NoRoom => {}
    }
    outcome
}

/// Whole states, one for each operation, as cells: for stores that load a batch's rows and write them back.
impl Cells for [State] {
    fn judge(&mut self, index: usize, ask: &Ask<'_>) -> Outcome {
        match ask.op.verb {
            Verb::Peek => self[index].peek(ask),
            _ => self[index].judge(ask),
        }
    }

    fn charge(&mut self, index: usize, ask: &Ask<'_>, outcome: &mut Outcome) {
        self[index].charge(ask, outcome);
    }

    fn strike(&mut self, index: usize, ask: &Ask<'_>, outcome: &mut Outcome) {
        self[index].strike(ask, outcome);
    }

    fn alter(&mut self, index: usize, _: &Ask<'_>, _: bool, change: &mut dyn FnMut(&mut State)) {
        change(&mut self[index]);
    }

    fn forget(&mut self, index: usize, _: &Op) {
        self[index] = State::default();
    }
}
