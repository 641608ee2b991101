//! The shards of a memory store, and how a batch is carried out in them.

use std::sync::Arc;

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use tidegate_core::batch::{self, BatchStates, MAX_OPS, Op, OpContext, Outcome, execute};
use tidegate_core::{Batch, Clock, Key, KeyState, LimitKind, Limits, Outcomes, Time, Verb, Verdict};

use super::MemoryStats;
use super::shard::{self, About, Room, Shard};
use super::table::{Outlook, Table};
use crate::Losses;
use crate::lock::{Lock, LockGuard};

/// What is noted of entries that change, while their shard is locked.
pub(crate) trait Notes: Default + Send + 'static {
    /// Notes that the entry of this tag changed or went, in a shard of so many entries.
    fn note(&mut self, tag: u64, entries: usize) -> Change;
}

/// Nothing is noted.
#[derive(Debug, Default)]
pub(crate) struct Unnoted;

impl Notes for Unnoted {
    #[inline]
    fn note(&mut self, _: u64, _: usize) -> Change {
        Change::default()
    }
}

/// What became of the entries that a batch was about, where that is noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    /// Whether any changed.
    pub any: bool,
    /// Whether any changed that wasn't noted already.
    pub new: bool,
    /// True if any was reset.
    pub reset: bool,
}

impl Change {
    #[inline]
    fn add(&mut self, other: Self) {
        self.any |= other.any;
        self.new |= other.new;
        self.reset |= other.reset;
    }
}

/// Shards under a fixed number of bytes, each with its notes.
pub(crate) struct Shards<N> {
    limits: Arc<Limits>,
    shards: Box<[Padded<N>]>,
    /// One for each shard.
    outlooks: Arc<[Outlook]>,
    shift: u32,
    room: Room,
    max_bytes: usize,
    /// The losses that [`Shards::tend`] has told.
    told: Mutex<Losses>,
}

/// A shard on cache lines of its own.
#[repr(align(128))]
struct Padded<N>(Lock<Noting<N>>);

/// The shard comes first, so that its table shares a cache line with the lock.
#[repr(C)]
pub(super) struct Noting<N> {
    pub shard: Shard,
    pub notes: N,
}

impl<N: Notes> Shards<N> {
    /// Two to the power of `bits` shards, which together take `max_bytes`; less than 1 MiB counts as 1 MiB.
    pub(crate) fn new(limits: Arc<Limits>, max_bytes: usize, bits: u32) -> Self {
        let bytes = max_bytes >> bits;
        let plain =
            limits.iter().all(|(_, limit)| matches!(limit.kind(), LimitKind::Rate(_)) && limit.penalty().is_none());
        // A state takes about four times its slot; a third for the table leaves half of it to keys seen once.
        let table = if plain { bytes } else { bytes / 3 };
        let room = Room { homes: Table::homes_in(table), states: bytes - table, blocked: bytes / 2 };
        let outlooks: Arc<[Outlook]> = (0..1_usize << bits).map(|_| Outlook::default()).collect();
        let shard = |index| Noting { shard: Shard::new(Arc::clone(&outlooks), index), notes: N::default() };
        let shards = (0..1_usize << bits).map(|index| Padded(Lock::new(shard(index)))).collect();
        Self { limits, shards, outlooks, shift: 63 - bits, room, max_bytes, told: Mutex::default() }
    }

    pub(crate) fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    pub(crate) fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// What the store holds and has had to let go. Visits every shard.
    pub(crate) fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats { max_bytes: self.max_bytes, ..MemoryStats::default() };
        for shard in &self.shards {
            shard.0.lock().shard.count(&mut stats);
        }
        stats
    }

    /// A copy of what is remembered of a key under a limit.
    pub(crate) fn copy(&self, op: &Op) -> Option<KeyState> {
        self.shards[self.shard(op.key)].0.lock().shard.copy(op)
    }

    /// [`Memory::fetch`](crate::Memory::fetch).
    #[inline]
    pub(crate) fn fetch(&self, batch: &Batch) {
        for op in batch.ops() {
            self.outlooks[self.shard(op.key)].fetch(shard::tag(op));
        }
    }

    /// [`Memory::fetch_states`](crate::Memory::fetch_states).
    #[inline]
    pub(crate) fn fetch_states(&self, batch: &Batch) {
        for op in batch.ops() {
            self.shards[self.shard(op.key)].0.lock().shard.fetch_state(op);
        }
    }

    /// [`Store::tend`](crate::Store::tend).
    pub(crate) fn tend(&self, now: Time) -> Losses {
        let about = self.about();
        let mut stats = MemoryStats::default();
        // Held throughout, so that two who tend at once don't count the same losses.
        let mut told = self.told.lock();
        for shard in &self.shards {
            let shard = &mut shard.0.lock().shard;
            shard.sweep_share(now, &about);
            shard.count(&mut stats);
        }
        let news = stats.losses.since(&told);
        *told = stats.losses;
        news
    }

    /// [`Store::apply`](crate::Store::apply), in place. Adds what became of the entries to `change`, which is no part of what
    /// is returned because that is large, and would be copied.
    pub(crate) fn apply(&self, batch: &Batch, now: Time, change: &mut Change) -> Outcomes {
        let mut held = Held::new(self);
        held.lock_all(batch);
        let outcomes = execute(batch, &self.limits, &mut held, now);
        change.add(held.change);
        outcomes
    }

    /// The outcome of a batch that changes nothing; `None` of one that would, which is left undone.
    #[cfg(feature = "file")]
    pub(crate) fn apply_unchanged(&self, batch: &Batch, now: Time) -> Option<Outcomes> {
        let mut held = Held::new(self);
        held.lock_all(batch);
        let mut unchanged = Unchanged { held, would_change: false };
        let outcomes = execute(batch, &self.limits, &mut unchanged, now);
        (!unchanged.would_change).then_some(outcomes)
    }

    pub(super) fn about(&self) -> About<'_> {
        About { limits: &self.limits, room: self.room }
    }

    /// How many shards there are.
    #[cfg(any(feature = "file", test))]
    pub(crate) fn len(&self) -> usize {
        self.shards.len()
    }

    #[cfg(feature = "file")]
    pub(super) fn lock(&self, shard: usize) -> LockGuard<'_, Noting<N>> {
        self.shards[shard].0.lock()
    }

    #[inline]
    fn shard(&self, key: Key) -> usize {
        // In two steps, since no number is shifted by all of its 64 bits at once: that would be for a single shard.
        (key.lo() >> 1 >> self.shift) as usize
    }
}

/// Shorter ways in, for those who need no notes.
impl Shards<Unnoted> {
    /// [`Memory::take`](crate::Memory::take).
    #[inline]
    pub(crate) fn take(&self, op: &Op, holder: u64, now: Time) -> Outcome {
        let Some(limit) = self.limits.get(op.limit) else { return Outcome::without_limit(Verdict::Admitted, now) };
        let mut held = Held::new(self);
        held.lock(self.shard(op.key));
        batch::execute_take(op, limit, holder, &mut held, now)
    }

    /// [`Memory::turn`](crate::Memory::turn).
    #[inline]
    pub(crate) fn turn(&self, op: &Op, clock: &impl Clock) -> (Time, Time) {
        match self.limits.get(op.limit) {
            Some(limit)
                if limit.penalty().is_none()
                    && let LimitKind::Rate(rate) = limit.kind() =>
            {
                let index = self.shard(op.key);
                self.outlooks[index].fetch(shard::tag(op));
                self.shards[index].0.lock().shard.turn(op, rate, clock, &self.about())
            }
            _ => {
                let now = clock.now();
                (self.take(op, 0, now).retry_at, now)
            }
        }
    }
}

/// The shards that a batch has locked.
struct Held<'a, N> {
    store: &'a Shards<N>,
    about: About<'a>,
    shards: ArrayVec<(usize, LockGuard<'a, Noting<N>>), MAX_OPS>,
    /// Where each operation's entry stood when it was judged.
    hints: [usize; MAX_OPS],
    change: Change,
}

impl<'a, N: Notes> Held<'a, N> {
    #[inline]
    fn new(store: &'a Shards<N>) -> Self {
        let hints = [usize::MAX; MAX_OPS];
        Self { store, about: store.about(), shards: ArrayVec::new(), hints, change: Change::default() }
    }

    #[inline]
    fn lock(&mut self, shard: usize) {
        self.shards.push((shard, self.store.shards[shard].0.lock()));
    }

    /// Locks the shards of all of a batch's keys.
    #[inline]
    fn lock_all(&mut self, batch: &Batch) {
        let store = self.store;
        let Some(first) = batch.ops().first().map(|op| store.shard(op.key)) else { return };
        if batch.ops().iter().all(|op| store.shard(op.key) == first) {
            self.lock(first);
            return;
        }
        let mut wanted: ArrayVec<usize, MAX_OPS> = batch.ops().iter().map(|op| store.shard(op.key)).collect();
        // Always in the same order, so that two batches never wait for each other.
        wanted.sort_unstable();
        for (at, shard) in wanted.iter().enumerate() {
            if at == 0 || wanted[at - 1] != *shard {
                self.lock(*shard);
            }
        }
    }

    #[inline]
    fn shard(&mut self, op: &Op) -> &mut Noting<N> {
        let wanted = self.store.shard(op.key);
        let held = self.shards.iter_mut().find(|(shard, _)| *shard == wanted);
        &mut held.expect("invariant: every operation's shard was locked").1
    }

    /// Runs `change` on the operation's shard, and notes it if it says that it changed the entry.
    #[inline]
    fn changing(&mut self, op: &Op, change: impl FnOnce(&mut Shard) -> bool) {
        let Noting { shard, notes } = self.shard(op);
        if change(shard) {
            let change = notes.note(shard::tag(op), shard.len());
            self.change.add(change);
        }
    }
}

impl<N: Notes> BatchStates for Held<'_, N> {
    #[inline]
    fn evaluate(&mut self, index: usize, ask: &OpContext<'_>) -> Outcome {
        let about = self.about;
        let mut hint = usize::MAX;
        let outcome = self.shard(ask.op).shard.judge(ask, &about, &mut hint);
        self.hints[index] = hint;
        outcome
    }

    #[inline]
    fn charge(&mut self, index: usize, ask: &OpContext<'_>, outcome: &mut Outcome) {
        let (about, hint) = (self.about, self.hints[index]);
        self.changing(ask.op, |shard| shard.charge(ask, outcome, &about, hint));
    }

    fn strike(&mut self, _: usize, ask: &OpContext<'_>, outcome: &mut Outcome) {
        let about = self.about;
        self.changing(ask.op, |shard| shard.strike(ask, outcome, &about));
    }

    fn modify(&mut self, _: usize, ask: &OpContext<'_>, make: bool, change: &mut dyn FnMut(&mut KeyState)) {
        let about = self.about;
        self.changing(ask.op, |shard| {
            if matches!(ask.op.verb, Verb::RestorePenalty { .. }) && !shard.fits_block(ask.op, ask.now, &about) {
                return false;
            }
            if make {
                shard.alter(ask.op, ask.now, &about, change);
                return true;
            }
            shard.alter_existing(ask.op, ask.now, &about, change)
        });
    }

    fn reset(&mut self, _: usize, op: &Op) {
        // Noted even if there was none: what is kept elsewhere may still have it.
        self.changing(op, |shard| {
            shard.forget(op);
            true
        });
        self.change.reset = true;
    }
}

/// The shards that a batch has locked, where nothing may change.
#[cfg(feature = "file")]
struct Unchanged<'a, N> {
    held: Held<'a, N>,
    would_change: bool,
}

#[cfg(feature = "file")]
impl<N: Notes> BatchStates for Unchanged<'_, N> {
    fn evaluate(&mut self, index: usize, ask: &OpContext<'_>) -> Outcome {
        self.held.evaluate(index, ask)
    }

    fn charge(&mut self, _: usize, ask: &OpContext<'_>, _: &mut Outcome) {
        // A credential that was never throttled is nothing to remember, and neither is a pace that was told of no call.
        let is_nothing = matches!(ask.limit.kind(), LimitKind::Cooldown(_) | LimitKind::Pace(_))
            && self.held.shard(ask.op).shard.copy(ask.op).is_none();
        self.would_change |= !is_nothing;
    }

    fn strike(&mut self, _: usize, ask: &OpContext<'_>, outcome: &mut Outcome) {
        self.would_change |= ask.limit.penalty().is_some() && !outcome.retry_at.is_never();
    }

    fn modify(&mut self, _: usize, _: &OpContext<'_>, _: bool, _: &mut dyn FnMut(&mut KeyState)) {
        self.would_change = true;
    }

    fn reset(&mut self, _: usize, _: &Op) {
        self.would_change = true;
    }
}
