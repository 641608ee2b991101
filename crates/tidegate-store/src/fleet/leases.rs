//! Slices of limits, taken in one round trip and spent here.
//!
//! A slice is charged before any of it is spent, and counts until its lease has ended. A window records it at the end
//! of the lease ([`Batch::with_lead`]), so that no call counts before it is made. The lease runs by this node's clock,
//! from the time of the request. The rest is given back at its end. A crash loses a slice and never creates one.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use foldhash::fast::RandomState;
use parking_lot::{Mutex, MutexGuard};
use tidegate_core::batch::{MAX_OPS, Outcome};
use tidegate_core::{Admission, Batch, Key, LeaseSpec, LimitId, Limits, Op, Outcomes, Span, Time, Verb};
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;
use tokio::task::JoinSet;
use tokio::time::interval;

use super::{FleetNode, new_batch};
use crate::StoreError;

/// The number of locks, so that callers rarely contend.
const SHARD_COUNT: usize = 16;
/// The most slices under each lock. Calls for further keys ask the store.
const MAX_ENTRIES_PER_SHARD: usize = 4096;

/// The number of times that a call waits for a slice of another request, and finds it spent, before it asks itself.
const MAX_WAITS: usize = 8;

/// The interval at which leases are checked.
const SWEEP_INTERVAL: Duration = Duration::from_millis(50);

/// The keys of a slice.
type LeaseKeys = ArrayVec<(LimitId, Key), MAX_OPS>;
type LeaseShard = HashMap<LeaseKeys, LeaseEntry, RandomState>;

pub(super) struct Leases {
    limits: Arc<Limits>,
    /// True if any limit has leases.
    pub(super) has_leases: bool,
    shards: [Mutex<LeaseShard>; SHARD_COUNT],
}

enum LeaseEntry {
    Slice(LeaseSlice),
    /// A call of this cost was refused. Calls of the same cost are refused for a while, without asking the store.
    Refusal(u64, CachedOutcomes),
    /// A caller asks for a slice.
    Requested(Arc<Notify>),
}

/// An answer of the store, and the time for which it holds here.
#[derive(Clone)]
struct CachedOutcomes {
    sent_at: Time,
    valid_until: Time,
    outcomes: Outcomes,
}

struct LeaseSlice {
    units_left: u64,
    granted: CachedOutcomes,
    /// The time at which the store counts it.
    counted_at: Time,
    affinity: u64,
}

#[expect(clippy::large_enum_variant, reason = "boxing the common answer would allocate on every decision")]
pub(super) enum SpendResult {
    /// Decided here.
    Decided(Outcomes),
    /// Not for leases: the store decides.
    NotLeased,
    /// Another caller asks for a slice: wait for its result.
    Wait(OwnedNotified),
    /// The caller is to ask for a slice.
    Request(SliceRequest),
}

/// A request for a slice of at most this size. If it is dropped before it is settled, the next caller asks.
pub(super) struct SliceRequest {
    leases: Arc<Leases>,
    keys: LeaseKeys,
    finished: Arc<Notify>,
    size: u64,
    lease: Span,
}

impl Leases {
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        let has_leases = limits.iter().any(|(_, limit)| limit.sharing().lease.is_some());
        Self { limits, has_leases, shards: Default::default() }
    }

    fn lock_shard(&self, keys: &LeaseKeys) -> MutexGuard<'_, LeaseShard> {
        let first = keys.first().map_or(0, |(_, key)| key.lo());
        self.shards[first as usize % SHARD_COUNT].lock()
    }

    /// The size and the age of a slice. `None` unless all limits of the batch have leases and all costs are equal.
    fn slice_terms(&self, batch: &Batch) -> Option<(u64, Span)> {
        let cost = batch.ops().first()?.cost;
        let mut size_and_age = (u64::MAX, Span::MAX);
        for op in batch.ops() {
            let limit = self.limits.get(op.limit)?;
            let LeaseSpec { permille, max_age } = limit.sharing().lease?;
            // Refusals here aren't counted, and the refusal of a slice isn't the refusal of one call.
            let is_tracked = limit.counts_refused() || limit.penalty().is_some();
            let is_leasable = op.verb == Verb::Take && op.cost == cost && cost > 0 && !is_tracked;
            let age = limit.lease_age(max_age)?;
            if !is_leasable || limit.is_shadow() {
                return None;
            }
            let size = limit.kind().capacity().saturating_mul(u64::from(permille)) / 1000;
            size_and_age = (size_and_age.0.min(size), size_and_age.1.min(age));
        }
        (size_and_age.0 >= cost.saturating_mul(2) && !size_and_age.1.is_zero()).then_some(size_and_age)
    }

    /// Spends from the local slice. Also returns the refund of a slice that isn't enough.
    pub(super) fn spend_or_request(self: &Arc<Self>, batch: &Batch, now: Time) -> (SpendResult, Option<Batch>) {
        let Some((size, lease)) = self.has_leases.then(|| self.slice_terms(batch)).flatten() else {
            return (SpendResult::NotLeased, None);
        };
        let cost = batch.ops()[0].cost;
        let keys: LeaseKeys = batch.ops().iter().map(|op| (op.limit, op.key)).collect();
        let mut shard = self.lock_shard(&keys);
        let is_full = shard.len() >= MAX_ENTRIES_PER_SHARD;
        let mut refund = None;
        match shard.get_mut(&keys) {
            Some(LeaseEntry::Slice(slice)) if slice.granted.is_valid(now) && slice.units_left >= cost => {
                slice.units_left -= cost;
                return (SpendResult::Decided(slice.outcomes_at(now)), None);
            }
            Some(LeaseEntry::Slice(slice)) => refund = slice.take_refund(&keys),
            Some(LeaseEntry::Refusal(refused, cached)) if cached.is_valid(now) => match cost.cmp(refused) {
                Ordering::Equal => return (SpendResult::Decided(cached.outcomes_at(now)), None),
                // It has to wait longer, and the refusal doesn't say how long.
                Ordering::Greater => return (SpendResult::NotLeased, None),
                // The room that was too small for the other call may be enough.
                Ordering::Less => {}
            },
            Some(LeaseEntry::Refusal(..)) => {}
            // Created under the lock, so that the end of the request can't be missed.
            Some(LeaseEntry::Requested(finished)) => {
                return (SpendResult::Wait(Arc::clone(finished).notified_owned()), None);
            }
            None if is_full => return (SpendResult::NotLeased, None),
            None => {}
        }
        let finished = Arc::<Notify>::default();
        shard.insert(keys.clone(), LeaseEntry::Requested(Arc::clone(&finished)));
        (SpendResult::Request(SliceRequest { leases: Arc::clone(self), keys, finished, size, lease }), refund)
    }

    pub(super) fn forget(&self, limit: LimitId, key: Key) {
        if !self.has_leases {
            return;
        }
        for shard in &self.shards {
            for (_, entry) in shard.lock().extract_if(|keys, _| keys.contains(&(limit, key))) {
                if let LeaseEntry::Requested(finished) = entry {
                    finished.notify_waiters();
                }
            }
        }
    }

    /// Removes the slices of leases that have ended, or all slices, and returns their refunds.
    fn remove_slices(&self, only_expired_at: Option<Time>) -> Vec<Batch> {
        let mut refunds = Vec::new();
        let is_valid = |cached: &CachedOutcomes| only_expired_at.is_some_and(|now| cached.is_valid(now));
        for shard in &self.shards {
            shard.lock().retain(|keys, entry| match entry {
                LeaseEntry::Slice(slice) if !is_valid(&slice.granted) => {
                    refunds.extend(slice.take_refund(keys));
                    false
                }
                LeaseEntry::Refusal(_, cached) => is_valid(cached),
                LeaseEntry::Slice(_) | LeaseEntry::Requested(_) => true,
            });
        }
        refunds
    }
}

/// The task that gives back the slices of a handle when their leases end. Dropped, it gives back all.
pub(super) struct LeaseSweeper {
    node: Arc<FleetNode>,
    _task: JoinSet<()>,
}

impl LeaseSweeper {
    pub(super) fn start(node: &Arc<FleetNode>) -> Self {
        let mut task = JoinSet::new();
        task.spawn(sweep_leases(Arc::clone(node)));
        Self { node: Arc::clone(node), _task: task }
    }
}

impl Drop for LeaseSweeper {
    fn drop(&mut self) {
        let now = self.node.state.clock.now();
        self.node.leases.remove_slices(None).iter().for_each(|refund| self.node.submit(refund, now));
    }
}

async fn sweep_leases(node: Arc<FleetNode>) {
    let mut ticks = interval(SWEEP_INTERVAL);
    loop {
        ticks.tick().await;
        let now = node.state.clock.now();
        node.leases.remove_slices(Some(now)).iter().for_each(|refund| node.submit(refund, now));
    }
}

impl CachedOutcomes {
    fn is_valid(&self, now: Time) -> bool {
        self.sent_at <= now && now < self.valid_until
    }

    /// The store's time when this node's time is `now`.
    fn store_time(&self, now: Time) -> Time {
        self.outcomes.now() + now.since(self.sent_at)
    }

    fn outcomes_at(&self, now: Time) -> Outcomes {
        Outcomes::new(self.store_time(now), self.outcomes.list().iter().copied())
    }
}

impl LeaseSlice {
    fn outcomes_at(&self, now: Time) -> Outcomes {
        let store_now = self.granted.store_time(now);
        let list = self.granted.outcomes.list().iter().map(|outcome| Outcome {
            used: outcome.used.saturating_sub(self.units_left),
            remaining: outcome.remaining.saturating_add(self.units_left),
            retry_at: store_now,
            ..*outcome
        });
        Outcomes::new(store_now, list)
    }

    fn take_refund(&mut self, keys: &[(LimitId, Key)]) -> Option<Batch> {
        let units = std::mem::take(&mut self.units_left);
        if units == 0 {
            return None;
        }
        let ops = keys.iter().map(|&(limit, key)| Op::new(limit, Verb::Refund, key, units));
        let batch = new_batch(0, self.affinity, ops);
        Some(batch.with_charged_at(self.granted.outcomes.now()).with_counted_at(self.counted_at))
    }
}

impl SliceRequest {
    /// Settles the request with its result, unless the keys were reset meanwhile.
    fn finish(&self, entry: Option<LeaseEntry>) {
        let mut shard = self.leases.lock_shard(&self.keys);
        if let Some(LeaseEntry::Requested(finished)) = shard.get(&self.keys)
            && Arc::ptr_eq(finished, &self.finished)
        {
            match entry {
                Some(entry) => shard.insert(self.keys.clone(), entry),
                None => shard.remove(&self.keys),
            };
        }
        self.finished.notify_waiters();
    }
}

impl Drop for SliceRequest {
    fn drop(&mut self) {
        self.finish(None);
    }
}

/// Decides a batch for which no slice was ready.
pub(super) async fn decide_with_slice(
    node: &Arc<FleetNode>,
    batch: &Batch,
    mut spend_result: SpendResult,
) -> Result<Outcomes, StoreError> {
    for waits in 0.. {
        match spend_result {
            SpendResult::Decided(outcomes) => return Ok(outcomes),
            SpendResult::Request(request) => return request_slice(node, batch, request).await,
            SpendResult::Wait(finished) if waits < MAX_WAITS => {
                // The other caller is done within a few timeouts; its keys may have been reset meanwhile.
                let _ = tokio::time::timeout(node.state.options.timeout, finished).await;
                if !node.batch_partition(batch).is_up() {
                    return node.decide_without_store(batch, node.state.clock.now());
                }
            }
            SpendResult::NotLeased | SpendResult::Wait(_) => break,
        }
        spend_result = node.spend_slice(batch, node.state.clock.now());
    }
    node.apply_or_fall_back(batch, node.state.clock.now()).await
}

/// Asks for a slice and spends from it; near the end of a limit, for smaller ones, and at last for this call alone.
async fn request_slice(node: &Arc<FleetNode>, batch: &Batch, request: SliceRequest) -> Result<Outcomes, StoreError> {
    let (mut size, lease) = (request.size, request.lease);
    let cost = batch.ops()[0].cost;
    while size >= cost.saturating_mul(2) {
        let slice_batch = batch.with_ops(batch.ops().iter().map(|op| Op { cost: size, ..*op })).with_lead(lease);
        let sent_at = node.state.clock.now();
        let Ok(outcomes) = node.apply_and_record(&slice_batch, sent_at).await else { break };
        let refusals = outcomes.list().iter().filter(|outcome| outcome.admission.refuses());
        let Some(remaining_units) = refusals.map(|outcome| outcome.remaining).min() else {
            let decided_at = outcomes.now();
            // A quota's slice belongs to the period in which it was taken.
            let period_ends = batch.ops().iter().zip(outcomes.list()).filter_map(|(op, outcome)| {
                let kind = node.leases.limits.get(op.limit)?.kind();
                kind.has_periods().then(|| outcome.reset_at.since(decided_at))
            });
            let valid_until = sent_at + period_ends.min().unwrap_or(Span::MAX).min(lease);
            let affinity = batch.context().affinity;
            let granted = CachedOutcomes { sent_at, valid_until, outcomes };
            let slice = LeaseSlice { units_left: size - cost, granted, counted_at: decided_at + lease, affinity };
            let outcomes = slice.outcomes_at(sent_at);
            request.finish(Some(LeaseEntry::Slice(slice)));
            return Ok(outcomes);
        };
        size = (remaining_units / 2).min(size / 2);
    }
    let sent_at = node.state.clock.now();
    let outcomes = node.apply_or_fall_back(batch, sent_at).await?;
    let waits = outcomes.list().iter().filter(|outcome| outcome.admission == Admission::Refused);
    let wait = waits.map(|outcome| outcome.retry_at.since(outcomes.now())).max();
    // Refunds of other slices may make room earlier. That is found when this refusal ends.
    if let Some(wait) = wait.filter(|_| node.batch_partition(batch).is_up()) {
        let cached = CachedOutcomes { sent_at, valid_until: sent_at + wait.min(lease), outcomes: outcomes.clone() };
        request.finish(Some(LeaseEntry::Refusal(cost, cached)));
    }
    Ok(outcomes)
}
