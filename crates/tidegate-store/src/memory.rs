//! The memory store: shards of sorted tables under a fixed number of bytes.
//!
//! A key's entry is 16 bytes where it is a plain rate or a window that saw one call; other states take a cell of
//! their own beside the table. A shard is small, so growing one is over in microseconds and never stops the others;
//! idle entries are taken out a few at a time by later insertions and by [`Store::tend`]. At the bound the idle go
//! first, then the least used, then full limits, blocked keys last; and once blocked keys fill half of it, keys that
//! are new are answered [`Verdict::NoRoom`](tidegate_core::Verdict::NoRoom) and have to share.

mod lock;
mod shard;
mod table;

use std::future::Ready;
use std::sync::{Arc, Mutex, PoisonError};

use arrayvec::ArrayVec;
use tidegate_core::batch::{self, Ask, Cells, MAX_OPS, Op, Outcome, settle};
use tidegate_core::{Batch, Clock, Key, Kind, Limits, Outcomes, State, Time, Verdict};

use crate::{Answer, Immediate, Losses, Store, StoreError};
use lock::{Lock, LockGuard};
use shard::{About, Room, Shard};
use table::{Outlook, Table};

/// The bytes of one shard: few enough that copying all of them takes a fraction of a millisecond, and enough that a
/// thousand keys lie close together.
const SHARD_BYTES: usize = 1 << 20;
/// A tag leaves out the twelve bits of a key that choose its shard.
const MAX_SHARD_BITS: u32 = 12;
/// Shards for each processor at the least, so that threads seldom meet.
const SHARDS_PER_PROCESSOR: usize = 16;

/// State in this process' memory, within a fixed number of bytes.
pub struct Memory {
    limits: Arc<Limits>,
    shards: Box<[Padded]>,
    /// One for each shard.
    outlooks: Arc<[Outlook]>,
    shift: u32,
    room: Room,
    max_bytes: usize,
    /// The losses that [`Store::tend`] has told.
    told: Mutex<Losses>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").field("max_bytes", &self.max_bytes).finish_non_exhaustive()
    }
}

/// A shard on cache lines of its own.
#[repr(align(128))]
struct Padded(Lock<Shard>);

/// What a memory store holds, and what it has had to let go since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// Entries: one for each key under each limit.
    pub entries: usize,
    /// Bytes in use.
    pub bytes: usize,
    /// The configured most.
    pub max_bytes: usize,
    /// What it has had to let go.
    pub losses: Losses,
}

impl Memory {
    /// The bound when nothing else is said: 64 MiB.
    pub const MAX_BYTES: usize = 64 << 20;

    /// A store for these limits within `max_bytes`. Less than 1 MiB counts as 1 MiB.
    ///
    /// Beyond the bound comes one fixed cost: the shards themselves, 272 bytes for each MiB or for a sixteenth of a
    /// processor, whichever are more.
    pub fn new(limits: Arc<Limits>, max_bytes: usize) -> Self {
        let max_bytes = max_bytes.max(1 << 20);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let shards = (max_bytes / SHARD_BYTES).max(processors * SHARDS_PER_PROCESSOR);
        let bits = shards.ilog2().min(MAX_SHARD_BITS);
        let bytes = max_bytes >> bits;
        let plain = limits.iter().all(|(_, limit)| matches!(limit.kind(), Kind::Rate(_)) && limit.penalty().is_none());
        // A state takes about four times its slot; a third for the table leaves half of it to keys seen once.
        let table = if plain { bytes } else { bytes / 3 };
        let room = Room { homes: Table::homes_in(table), states: bytes - table, blocked: bytes / 2 };
        let outlooks: Arc<[Outlook]> = (0..1_usize << bits).map(|_| Outlook::default()).collect();
        let shard = |index| Padded(Lock::new(Shard::new(Arc::clone(&outlooks), index)));
        let shards = (0..1_usize << bits).map(shard).collect();
        Self { limits, shards, outlooks, shift: 64 - bits, room, max_bytes, told: Mutex::default() }
    }

    /// What the store holds and has had to let go. Visits every shard.
    pub fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats { max_bytes: self.max_bytes, ..MemoryStats::default() };
        for shard in &self.shards {
            shard.0.lock().count(&mut stats);
        }
        stats
    }

    /// A copy of what is remembered of a key under a limit, if anything is.
    pub fn state(&self, op: &Op) -> Option<State> {
        self.shards[self.shard(op.key)].0.lock().copy(op)
    }

    /// Takes `op.cost` of one limit for `holder`, without the batch around it.
    #[inline]
    pub fn take(&self, op: &Op, holder: u64, now: Time) -> Outcome {
        let Some(limit) = self.limits.get(op.limit) else { return Outcome::plain(Verdict::Admitted, now) };
        let mut held = Held::new(self);
        held.lock(self.shard(op.key));
        batch::take(op, limit, holder, &mut held, now)
    }

    /// [`Memory::take`] where only the wait is asked for: when the call has room, and the present moment. They are the
    /// same if that is at once and the cost was taken. For limits without permits, since nobody holds them. A plain rate that is in use reads the clock only roughly.
    #[inline]
    pub fn turn(&self, op: &Op, clock: &impl Clock) -> (Time, Time) {
        match self.limits.get(op.limit) {
            Some(limit)
                if limit.penalty().is_none()
                    && let Kind::Rate(rate) = limit.kind() =>
            {
                let index = self.shard(op.key);
                self.outlooks[index].fetch(shard::tag(op));
                self.shards[index].0.lock().turn(op, rate, clock, &self.about())
            }
            _ => {
                let now = clock.now();
                (self.take(op, 0, now).retry_at, now)
            }
        }
    }

    fn about(&self) -> About<'_> {
        About { limits: &self.limits, room: self.room }
    }

    #[inline]
    fn shard(&self, key: Key) -> usize {
        (key.lo() >> self.shift) as usize
    }
}

impl Store for Memory {
    type Later = Ready<Result<Outcomes, StoreError>>;

    fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    fn apply(&self, batch: &Batch, now: Time) -> Answer<Self::Later> {
        Answer::Ready(self.apply_now(batch, now))
    }

    fn tell(&self, batch: &Batch, now: Time) {
        self.apply_now(batch, now);
    }

    fn tend(&self, now: Time) -> Losses {
        let about = self.about();
        let mut stats = MemoryStats::default();
        // Held throughout, so that two who tend at once don't count the same losses.
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        for shard in &self.shards {
            let mut shard = shard.0.lock();
            shard.sweep_share(now, &about);
            shard.count(&mut stats);
        }
        let news = stats.losses.since(&told);
        *told = stats.losses;
        news
    }
}

impl Immediate for Memory {
    fn apply_now(&self, batch: &Batch, now: Time) -> Outcomes {
        let mut held = Held::new(self);
        let first = batch.ops().first().map(|op| self.shard(op.key));
        if let Some(first) = first {
            if batch.ops().iter().all(|op| self.shard(op.key) == first) {
                held.lock(first);
            } else {
                let mut wanted: ArrayVec<usize, MAX_OPS> = batch.ops().iter().map(|op| self.shard(op.key)).collect();
                // Always in the same order, so that two batches never wait for each other.
                wanted.sort_unstable();
                for (at, shard) in wanted.iter().enumerate() {
                    if at == 0 || wanted[at - 1] != *shard {
                        held.lock(*shard);
                    }
                }
            }
        }
        settle(batch, &self.limits, &mut held, now)
    }
}

/// The shards that a batch has locked.
struct Held<'a> {
    store: &'a Memory,
    about: About<'a>,
    shards: ArrayVec<(usize, LockGuard<'a, Shard>), MAX_OPS>,
    /// Where each operation's entry stood when it was judged.
    hints: [usize; MAX_OPS],
}

impl<'a> Held<'a> {
    #[inline]
    fn new(store: &'a Memory) -> Self {
        Self { store, about: store.about(), shards: ArrayVec::new(), hints: [usize::MAX; MAX_OPS] }
    }

    #[inline]
    fn lock(&mut self, shard: usize) {
        self.shards.push((shard, self.store.shards[shard].0.lock()));
    }

    #[inline]
    fn shard(&mut self, op: &Op) -> &mut Shard {
        let wanted = self.store.shard(op.key);
        let held = self.shards.iter_mut().find(|(shard, _)| *shard == wanted);
        &mut held.expect("invariant: every operation's shard was locked").1
    }
}

impl Cells for Held<'_> {
    #[inline]
    fn judge(&mut self, index: usize, ask: &Ask<'_>) -> Outcome {
        let about = self.about;
        let mut hint = usize::MAX;
        let outcome = self.shard(ask.op).judge(ask, &about, &mut hint);
        self.hints[index] = hint;
        outcome
    }

    #[inline]
    fn charge(&mut self, index: usize, ask: &Ask<'_>, outcome: &mut Outcome) {
        let (about, hint) = (self.about, self.hints[index]);
        self.shard(ask.op).charge(ask, outcome, &about, hint);
    }

    fn strike(&mut self, _: usize, ask: &Ask<'_>, outcome: &mut Outcome) {
        let about = self.about;
        self.shard(ask.op).strike(ask, outcome, &about);
    }

    fn alter(&mut self, _: usize, ask: &Ask<'_>, make: bool, change: &mut dyn FnMut(&mut State)) {
        let about = self.about;
        let shard = self.shard(ask.op);
        if make {
            shard.alter(ask.op, ask.now, &about, change);
        } else {
            shard.alter_existing(ask.op, ask.now, &about, change);
        }
    }

    fn forget(&mut self, _: usize, op: &Op) {
        self.shard(op).forget(op);
    }
}
