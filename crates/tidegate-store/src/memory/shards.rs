//! The shards of a memory store, and how they apply a batch.

use std::sync::Arc;

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use tidegate_core::batch::{self, BatchStates, MAX_OPS, Op, OpContext, Outcome, execute_into};
use tidegate_core::{Admission, Batch, Clock, Key, KeyState, LimitKind, Limits, Outcomes, Time, Verb};

use super::shard::{self, Shard, ShardCapacity, ShardContext};
use super::table::{Table, TableLocation};
use super::{Memory, MemoryStats};
use crate::Losses;
use crate::spin_lock::{SpinLock, SpinLockGuard};

/// Notes of the entries that change, written while their shard is locked.
pub(crate) trait ChangeTracker: Default + Send + 'static {
    /// Notes that the entry of this tag changed or was removed, in a shard of `entries` entries.
    fn mark_changed(&mut self, tag: u64, entries: usize) -> ChangeFlags;
}

/// No notes.
#[derive(Debug, Default)]
pub(crate) struct NoTracker;

impl ChangeTracker for NoTracker {
    #[inline]
    fn mark_changed(&mut self, _: u64, _: usize) -> ChangeFlags {
        ChangeFlags::default()
    }
}

/// The changes that a batch made, if they are noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangeFlags {
    /// True if any entry changed.
    pub any_changed: bool,
    /// True if any entry changed that wasn't noted already.
    pub newly_dirty: bool,
    /// True if any was reset.
    pub any_reset: bool,
}

impl ChangeFlags {
    #[inline]
    fn merge(&mut self, other: Self) {
        self.any_changed |= other.any_changed;
        self.newly_dirty |= other.newly_dirty;
        self.any_reset |= other.any_reset;
    }
}

/// Shards under a fixed number of bytes, each with its notes: a handle that decides by its own limits. Several handles
/// may share the shards.
pub(crate) struct Shards<N> {
    limits: Arc<Limits>,
    shards: Arc<[CacheAlignedShard<N>]>,
    /// One for each shard.
    table_locations: Arc<[TableLocation]>,
    shift: u32,
    shard_capacity: ShardCapacity,
    pub(super) max_bytes: usize,
    /// The losses that [`Shards::maintain`] has reported.
    reported_losses: Arc<Mutex<Losses>>,
}

/// A shard on cache lines of its own.
#[repr(align(128))]
struct CacheAlignedShard<N>(SpinLock<TrackedShard<N>>);

/// The shard comes first, so that its table shares a cache line with the lock.
#[repr(C)]
pub(super) struct TrackedShard<N> {
    pub shard: Shard,
    pub tracker: N,
}

impl<N: ChangeTracker> Shards<N> {
    /// Two to the power of `bits` shards, within `max_bytes` in total.
    pub(crate) fn new(limits: Arc<Limits>, max_bytes: usize, bits: u32) -> Self {
        let shard_capacity = shard_capacity(&limits, max_bytes >> bits);
        let table_locations: Arc<[TableLocation]> = (0..1_usize << bits).map(|_| TableLocation::default()).collect();
        let new_shard =
            |index| TrackedShard { shard: Shard::new(Arc::clone(&table_locations), index), tracker: N::default() };
        let shards = (0..1_usize << bits).map(|index| CacheAlignedShard(SpinLock::new(new_shard(index)))).collect();
        let (shift, reported_losses) = (63 - bits, Arc::default());
        Self { limits, shards, table_locations, shift, shard_capacity, max_bytes, reported_losses }
    }

    /// A handle to the same shards that decides by these limits, with the ids of [`Store::with_limits`].
    ///
    /// [`Store::with_limits`]: crate::Store::with_limits
    pub(crate) fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Self {
        let needed_capacity = shard_capacity(&limits, self.max_bytes / self.shards.len());
        // Plain rates left no room for states. Otherwise the shards keep their room for states, even if all limits are
        // plain rates now: earlier handles may need it.
        let must_shrink_tables = needed_capacity.home_count < self.shard_capacity.home_count;
        let shard_capacity = if must_shrink_tables { needed_capacity } else { self.shard_capacity };
        let handle = Self {
            limits,
            shards: Arc::clone(&self.shards),
            table_locations: Arc::clone(&self.table_locations),
            shift: self.shift,
            shard_capacity,
            max_bytes: self.max_bytes,
            reported_losses: Arc::clone(&self.reported_losses),
        };
        if must_shrink_tables {
            let shard_context = handle.shard_context();
            handle.shards.iter().for_each(|shard| shard.0.lock().shard.shrink_table_to_capacity(now, &shard_context));
        }
        handle
    }

    pub(crate) fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    /// Returns the store's contents and losses. Visits every shard.
    pub(crate) fn stats(&self) -> MemoryStats {
        let mut stats = MemoryStats { max_bytes: self.max_bytes, ..MemoryStats::default() };
        for shard in &*self.shards {
            shard.0.lock().shard.add_to_stats(&mut stats);
        }
        stats
    }

    /// [`Store::maintain`](crate::Store::maintain).
    pub(crate) fn maintain(&self, now: Time) -> Losses {
        let shard_context = self.shard_context();
        let mut stats = MemoryStats::default();
        // Held throughout, so that two concurrent calls don't report the same losses.
        let mut reported_losses = self.reported_losses.lock();
        for shard in &*self.shards {
            let shard = &mut shard.0.lock().shard;
            shard.sweep_share(now, &shard_context);
            shard.add_to_stats(&mut stats);
        }
        let new_losses = stats.losses.since(&reported_losses);
        *reported_losses = stats.losses;
        new_losses
    }

    /// [`Store::apply`](crate::Store::apply), immediately. Adds the changes to `flags`. The outcomes are written to
    /// their place, because they are large and would be copied.
    pub(crate) fn apply(&self, batch: &Batch, now: Time, flags: &mut ChangeFlags, outcomes: &mut Outcomes) {
        let mut locked = LockedShards::new(self);
        locked.lock_all(batch);
        execute_into(batch, &self.limits, &mut locked, now, outcomes);
        flags.merge(locked.flags);
    }

    /// The outcomes of a batch that changes nothing. `None` if it would change something; it isn't applied then.
    #[cfg(feature = "file")]
    pub(crate) fn apply_if_unchanged(&self, batch: &Batch, now: Time) -> Option<Outcomes> {
        let mut locked = LockedShards::new(self);
        locked.lock_all(batch);
        let mut dry_run = DryRunShards { locked, would_change: false };
        let outcomes = batch::execute(batch, &self.limits, &mut dry_run, now);
        (!dry_run.would_change).then_some(outcomes)
    }

    pub(super) fn shard_context(&self) -> ShardContext<'_> {
        ShardContext { limits: &self.limits, capacity: self.shard_capacity }
    }

    #[cfg(any(feature = "file", test))]
    pub(crate) fn len(&self) -> usize {
        self.shards.len()
    }

    #[inline]
    pub(super) fn lock_shard(&self, shard: usize) -> SpinLockGuard<'_, TrackedShard<N>> {
        self.shards[shard].0.lock()
    }

    #[inline]
    fn shard_index(&self, key: Key) -> usize {
        // In two steps, since a shift by 64, which a single shard needs, isn't defined.
        (key.lo() >> 1 >> self.shift) as usize
    }
}

/// The division of a shard's bytes for states under these limits.
fn shard_capacity(limits: &Limits, shard_bytes: usize) -> ShardCapacity {
    let is_all_plain_rates =
        limits.iter().all(|(_, limit)| matches!(limit.kind(), LimitKind::Rate(_)) && limit.penalty().is_none());
    // A state takes about four times its slot; a third for the table leaves half of it to keys seen once.
    let table_bytes = if is_all_plain_rates { shard_bytes } else { shard_bytes / 3 };
    ShardCapacity {
        home_count: Table::home_count_within(table_bytes),
        state_bytes: shard_bytes - table_bytes,
        blocked_bytes: shard_bytes / 2,
    }
}

/// Operations on single keys.
impl Memory {
    /// Returns a copy of a key's state under a limit, or `None` if there is none.
    pub fn clone_state(&self, op: &Op) -> Option<KeyState> {
        self.0.lock_shard(self.0.shard_index(op.key)).shard.clone_state(op)
    }

    /// Fetches the slots of a batch's keys into the processor's cache. For callers that apply the batch soon and
    /// prepare others until then. It has no effect on any outcome.
    #[inline]
    pub fn prefetch(&self, batch: &Batch) {
        for op in batch.ops() {
            self.0.table_locations[self.0.shard_index(op.key)].prefetch(shard::tag(op));
        }
    }

    /// [`Memory::prefetch`] of the states that those slots refer to, once the slots are in the cache.
    #[inline]
    pub fn prefetch_states(&self, batch: &Batch) {
        for op in batch.ops() {
            self.0.lock_shard(self.0.shard_index(op.key)).shard.prefetch_state(op);
        }
    }

    /// Takes `op.cost` of one limit for `holder`, without a batch.
    #[inline]
    pub fn take(&self, op: &Op, holder: u64, now: Time) -> Outcome {
        let Some(limit) = self.0.limits.get(op.limit) else { return Outcome::without_limit(Admission::Admitted, now) };
        let mut locked = LockedShards::new(&self.0);
        locked.lock(self.0.shard_index(op.key));
        batch::execute_take(op, limit, holder, &mut locked, now)
    }

    /// [`Memory::take`] for callers that need only the wait: returns the time at which the call has room, and the
    /// present time. If they are the same, the cost was taken. For limits without permits, since there is no holder.
    /// For a plain rate that is in use, the clock is read only roughly.
    #[inline]
    pub fn take_with_clock(&self, op: &Op, clock: &impl Clock) -> (Time, Time) {
        let shards = &self.0;
        match shards.limits.get(op.limit) {
            Some(limit)
                if limit.penalty().is_none()
                    && limit.reservations().is_none()
                    && let LimitKind::Rate(rate) = limit.kind() =>
            {
                let index = shards.shard_index(op.key);
                shards.table_locations[index].prefetch(shard::tag(op));
                let taken = shards.lock_shard(index).shard.take_with_clock(op, rate, clock, &shards.shard_context());
                taken.unwrap_or_else(|| self.take_at_exact_time(op, clock))
            }
            _ => self.take_at_exact_time(op, clock),
        }
    }

    fn take_at_exact_time(&self, op: &Op, clock: &impl Clock) -> (Time, Time) {
        let now = clock.now();
        (self.take(op, 0, now).retry_at, now)
    }
}

/// The shards that a batch has locked.
struct LockedShards<'a, N> {
    store: &'a Shards<N>,
    shard_context: ShardContext<'a>,
    shards: ArrayVec<(usize, SpinLockGuard<'a, TrackedShard<N>>), MAX_OPS>,
    /// The position of each operation's entry when it was evaluated.
    slot_hints: [usize; MAX_OPS],
    flags: ChangeFlags,
}

impl<'a, N: ChangeTracker> LockedShards<'a, N> {
    #[inline]
    fn new(store: &'a Shards<N>) -> Self {
        let (shard_context, slot_hints) = (store.shard_context(), [usize::MAX; MAX_OPS]);
        Self { store, shard_context, shards: ArrayVec::new(), slot_hints, flags: ChangeFlags::default() }
    }

    #[inline]
    fn lock(&mut self, shard: usize) {
        self.shards.push((shard, self.store.shards[shard].0.lock()));
    }

    /// Locks the shards of all of a batch's keys.
    #[inline]
    fn lock_all(&mut self, batch: &Batch) {
        let store = self.store;
        let Some(first) = batch.ops().first().map(|op| store.shard_index(op.key)) else { return };
        if batch.ops().iter().all(|op| store.shard_index(op.key) == first) {
            self.lock(first);
            return;
        }
        let mut shard_indexes: ArrayVec<usize, MAX_OPS> =
            batch.ops().iter().map(|op| store.shard_index(op.key)).collect();
        // Always in the same order, so that two batches never wait for each other.
        shard_indexes.sort_unstable();
        for (at, shard) in shard_indexes.iter().enumerate() {
            if at == 0 || shard_indexes[at - 1] != *shard {
                self.lock(*shard);
            }
        }
    }

    #[inline]
    fn tracked_shard(&mut self, op: &Op) -> &mut TrackedShard<N> {
        let index = self.store.shard_index(op.key);
        let locked = self.shards.iter_mut().find(|(shard, _)| *shard == index);
        &mut locked.expect("invariant: every operation's shard was locked").1
    }

    /// Runs `change` on the operation's shard, and notes the entry if `change` returns true.
    #[inline]
    fn change_and_track(&mut self, op: &Op, change: impl FnOnce(&mut Shard) -> bool) {
        let TrackedShard { shard, tracker: notes } = self.tracked_shard(op);
        if change(shard) {
            let flags = notes.mark_changed(shard::tag(op), shard.len());
            self.flags.merge(flags);
        }
    }
}

impl<N: ChangeTracker> BatchStates for LockedShards<'_, N> {
    #[inline]
    fn evaluate(&mut self, index: usize, context: &OpContext<'_>) -> Outcome {
        let shard_context = self.shard_context;
        let mut hint = usize::MAX;
        let outcome = self.tracked_shard(context.op).shard.evaluate(context, &shard_context, &mut hint);
        self.slot_hints[index] = hint;
        outcome
    }

    #[inline]
    fn charge(&mut self, index: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        let (shard_context, hint) = (self.shard_context, self.slot_hints[index]);
        self.change_and_track(context.op, |shard| shard.charge(context, outcome, &shard_context, hint));
    }

    fn strike(&mut self, _: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        let shard_context = self.shard_context;
        self.change_and_track(context.op, |shard| shard.strike(context, outcome, &shard_context));
    }

    fn modify(
        &mut self,
        _: usize,
        context: &OpContext<'_>,
        creates_state: bool,
        change: &mut dyn FnMut(&mut KeyState),
    ) {
        let shard_context = self.shard_context;
        self.change_and_track(context.op, |shard| {
            let &OpContext { op, now, .. } = context;
            let is_restore = matches!(op.verb, Verb::RestorePenalty { .. });
            if is_restore && !shard.reserve_block(op, now, &shard_context) || !creates_state && !shard.has_entry(op) {
                return false;
            }
            shard.update_or_insert(op, now, &shard_context, change);
            true
        });
    }

    fn reset(&mut self, _: usize, op: &Op) {
        // Noted even if there was no entry, because the file may still have one.
        self.change_and_track(op, |shard| {
            shard.remove_key(op);
            true
        });
        self.flags.any_reset = true;
    }
}

/// The shards that a batch has locked, while nothing may change.
#[cfg(feature = "file")]
struct DryRunShards<'a, N> {
    locked: LockedShards<'a, N>,
    would_change: bool,
}

#[cfg(feature = "file")]
impl<N: ChangeTracker> BatchStates for DryRunShards<'_, N> {
    fn evaluate(&mut self, index: usize, context: &OpContext<'_>) -> Outcome {
        self.locked.evaluate(index, context)
    }

    fn charge(&mut self, _: usize, context: &OpContext<'_>, _: &mut Outcome) {
        // A credential that was never throttled has no state, and neither has a pace without a reported call.
        let is_not_stored = matches!(context.limit.kind(), LimitKind::Cooldown(_) | LimitKind::Pace(_))
            && self.locked.tracked_shard(context.op).shard.clone_state(context.op).is_none();
        self.would_change |= !is_not_stored;
    }

    fn strike(&mut self, _: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        let limit = context.limit;
        self.would_change |=
            limit.reservations().is_some() || limit.penalty().is_some() && !outcome.retry_at.is_never();
    }

    fn modify(&mut self, _: usize, _: &OpContext<'_>, _: bool, _: &mut dyn FnMut(&mut KeyState)) {
        self.would_change = true;
    }

    fn reset(&mut self, _: usize, _: &Op) {
        self.would_change = true;
    }
}
