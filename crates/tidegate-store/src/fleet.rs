//! Many nodes over one remote store, and their decisions while it can't be reached.
//!
//! A decision costs one round trip, or none where a node may answer by itself. A key under a block is refused until the
//! block ends (`block_cache`), and a block that the store has lost is restored (`penalty_restore`). A slice of a limit
//! that was taken at once is spent here (`leases`). While the store can't be reached (`health`), each limit follows its
//! [`OnOutage`]. With `local`, the node goes on with its share of the limit (`local_fallback`), and tells the store its
//! admissions once it is back.

mod block_cache;
mod health;
mod leases;
mod local_fallback;
mod penalty_restore;
mod resets;
mod tasks;

use std::future::{Future, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use tidegate_core::batch::{Outcome, RefusalSummary};
use tidegate_core::{
    Batch, Clock, Concurrency, Key, Limit, LimitError, LimitId, LimitKind, Limits, OnOutage, Op, Outcomes, ShareLevel,
    Span, Time, Verb,
};
use tokio::sync::mpsc;

use crate::{
    AnnouncedNode, Announcement, Losses, RemoteFuture, RemoteStore, Store, StoreError, StoreResponse, Votes,
    latest_block,
};
use block_cache::BlockCache;
use health::{PartitionHealth, RoutingKey};
use leases::{LeaseSweeper, Leases, SpendResult};
use local_fallback::retake_permits_batch;
use penalty_restore::ResetLog;
use tasks::{FleetTasks, QueuedSubmit};

/// The number of batches that wait to be sent to the store. Further ones are dropped, counted and logged.
const SUBMIT_QUEUE_CAPACITY: usize = 4096;
/// The maximum time for an inspection. No decision waits for it.
const INSPECTION_TIMEOUT: Duration = Duration::from_secs(1);

/// The settings of a node of a fleet.
#[derive(Clone)]
#[non_exhaustive]
pub struct FleetOptions {
    /// The time that a decision waits for the store. Default 50 ms.
    pub timeout: Duration,
    /// The number of nodes assumed to share the store until it reports the number. Default 1.
    pub nodes: u32,
    /// The most memory that counts may take while the store can't be reached, in bytes. Default 64 MiB.
    pub max_bytes: usize,
    /// The identity of this node among the others: a random number.
    pub node_id: u64,
    /// The secret under which keys are hashed, if the store keeps it. It is stored again if the store loses it.
    pub seed: Option<[u8; 16]>,
    /// The store's name in the log and in [`Store::outage`], without secrets. Default `shared`.
    pub name: String,
}

impl FleetOptions {
    /// The defaults, for a node of this number.
    pub fn new(node_id: u64) -> Self {
        let (timeout, max_bytes) = (Duration::from_millis(50), crate::Memory::DEFAULT_MAX_BYTES);
        Self { timeout, nodes: 1, max_bytes, node_id, seed: None, name: "shared".into() }
    }
}

/// The limits of a plan, and up to two more, for opening the [`RemoteStore`] of a [`Fleet`]. One counts the nodes that
/// share a store. The other exists where keys can be blocked: under it the store keeps the times of resets.
///
/// # Errors
/// The plan and the additional limits are more than 4095 together: at 4094 limits of the plan, or 4095 if none blocks.
pub fn fleet_limits(limits: &Limits) -> Result<Limits, LimitError> {
    /// The same in every plan: nodes with different limits are one fleet too.
    const TAG: u64 = 0x7469_6465_6761_7465;
    let heartbeat_limit = Limit::new(LimitKind::Concurrency(Concurrency::new(4096, NODE_LEASE)?)).with_tag(TAG);
    let reset_log_limit = penalty_restore::reset_log_limit(limits.iter().map(|(_, limit)| limit))?;
    Limits::new(limits.iter().map(|(_, limit)| limit.clone()).chain(reset_log_limit).chain([heartbeat_limit]).collect())
}

/// The least number of failures within a second that is logged. Each made a partition suspect.
const LATE_WARNING_THRESHOLD: u64 = 3;
/// The time for which a node is counted after its last message.
const NODE_LEASE: Span = Span::from_secs(10);
/// The key under which the nodes are counted.
const HEARTBEAT_KEY: Key = Key::new(0x726f_6c6c, 0x7469_6465_6761_7465);

/// One node's view of a store that many nodes share. Clones, and handles with other limits, are the same node.
#[derive(Clone)]
pub struct Fleet {
    node: Arc<FleetNode>,
    /// Ends with the last clone of a handle.
    _lease_sweeper: Option<Arc<LeaseSweeper>>,
    /// End with the last handle.
    tasks: Arc<FleetTasks>,
}

/// A node with the limits of one handle.
struct FleetNode {
    remote: Box<dyn RemoteStore>,
    heartbeat_limit: Option<LimitId>,
    reset_log: ResetLog,
    leases: Arc<Leases>,
    state: Arc<NodeState>,
}

/// The state that all handles and tasks of a node share.
struct NodeState {
    clock: Box<dyn Clock>,
    options: FleetOptions,
    partitions: Box<[PartitionHealth]>,
    blocks: BlockCache,
    /// The latest limits, for local counts.
    latest_limits: RwLock<Arc<Limits>>,
    submit_sender: mpsc::Sender<QueuedSubmit>,
    dropped_count: AtomicU64,
    /// The number of failures that made a partition suspect, since it was last logged.
    late_count: AtomicU64,
    /// The number of decisions that were made without the store.
    fallback_count: AtomicU64,
    /// The number of nodes that the store last reported. Until `node_count_reliable_at`, its reports may be too low.
    node_count: AtomicUsize,
    node_count_reliable_at: AtomicU64,
    /// True if the store was found to have another secret, so that it is logged once.
    has_other_seed: AtomicBool,
    /// The number of partitions that are down, so that it is logged once.
    down_count: AtomicUsize,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").field("nodes", &self.node_count()).field("is_up", &self.is_up()).finish_non_exhaustive()
    }
}

impl Fleet {
    /// Starts a node over a remote store that has the limits of [`fleet_limits`]. Needs a tokio runtime with time, in
    /// which the node's tasks run for as long as it lives.
    pub fn start(remote: Box<dyn RemoteStore>, clock: impl Clock, options: FleetOptions) -> Self {
        let limits = Arc::clone(remote.limits());
        let (submit_sender, submit_receiver) = mpsc::channel(SUBMIT_QUEUE_CAPACITY);
        let partition_count = remote.partition_count().max(1);
        let reset_receiver = remote.subscribe_to_resets();
        let node_count_reliable_at = AtomicU64::new((clock.now() + NODE_LEASE).as_micros());
        let state = Arc::new(NodeState {
            partitions: (0..partition_count).map(|_| PartitionHealth::default()).collect(),
            node_count: AtomicUsize::new(options.nodes.max(1) as usize),
            blocks: BlockCache::new(reset_receiver.is_some()),
            latest_limits: RwLock::new(limits),
            clock: Box::new(clock),
            options,
            submit_sender,
            dropped_count: AtomicU64::new(0),
            late_count: AtomicU64::new(0),
            fallback_count: AtomicU64::new(0),
            node_count_reliable_at,
            has_other_seed: AtomicBool::new(false),
            down_count: AtomicUsize::new(0),
        });
        let node = FleetNode::new(remote, state);
        let tasks = FleetTasks::start(&node, submit_receiver, reset_receiver);
        Self::with_node(node, Arc::new(tasks))
    }

    fn with_node(node: Arc<FleetNode>, tasks: Arc<FleetTasks>) -> Self {
        let sweeper = node.leases.has_leases.then(|| Arc::new(LeaseSweeper::start(&node)));
        Self { node, _lease_sweeper: sweeper, tasks }
    }

    /// Returns the number of nodes that share the store, as it last reported.
    pub fn node_count(&self) -> usize {
        self.node.state.node_count.load(Ordering::Relaxed)
    }

    /// Returns true if all parts of the store can be reached.
    pub fn is_up(&self) -> bool {
        self.node.state.partitions.iter().all(PartitionHealth::is_up)
    }
}

impl Store for Fleet {
    type Future = RemoteFuture<Outcomes>;

    fn limits(&self) -> &Arc<Limits> {
        self.node.remote.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        let node = &self.node;
        if batch.ops().iter().any(|op| op.verb == Verb::Reset) {
            return StoreResponse::Pending(node.reset(batch, now));
        }
        // A key that is shared because this node's memory had no room stays in that memory.
        let is_up =
            node.batch_partition(batch).is_up() && batch.ops().iter().all(|op| op.share_level == ShareLevel::Own);
        if let Some(outcomes) = node.state.blocks.refusal_from_cache(node.remote.limits(), batch, is_up, now) {
            return StoreResponse::Ready(outcomes);
        }
        let spend_result = node.spend_slice(batch, now);
        if let SpendResult::Decided(outcomes) = spend_result {
            return StoreResponse::Ready(outcomes);
        }
        if !is_up {
            return match node.decide_without_store(batch, now) {
                Ok(outcomes) => StoreResponse::Ready(outcomes),
                Err(error) => StoreResponse::Pending(Box::pin(ready(Err(error)))),
            };
        }
        let (node, batch) = (Arc::clone(node), batch.clone());
        StoreResponse::Pending(Box::pin(async move {
            match spend_result {
                SpendResult::NotLeased => node.apply_or_fall_back(&batch, now).await,
                spent => leases::decide_with_slice(&node, &batch, spent).await,
            }
        }))
    }

    fn known_block(&self, batch: &Batch, now: Time) -> Option<Time> {
        let is_up = self.node.batch_partition(batch).is_up();
        let outcomes = self.node.state.blocks.refusal_from_cache(self.limits(), batch, is_up, now)?;
        let until = latest_block(batch, self.limits(), &outcomes)?;
        Some(now + until.since(outcomes.now()))
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.node.submit(batch, now);
    }

    async fn inspect(&self, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        if !self.node.batch_partition(batch).is_up() {
            return Err(StoreError::Unavailable);
        }
        let answer = tokio::time::timeout(INSPECTION_TIMEOUT, self.node.remote.apply(batch, now)).await;
        let outcomes = answer.unwrap_or(Err(StoreError::Timeout(INSPECTION_TIMEOUT)))?;
        Ok(self.node.record(batch, outcomes, now).await)
    }

    fn fallback_count(&self) -> u64 {
        self.node.state.fallback_count.load(Ordering::Relaxed)
    }

    fn vote(&self, topic: Key, yes: bool, now: Time) -> Option<impl Future<Output = Option<Votes>> + Send + 'static> {
        let node = Arc::clone(&self.node);
        let batch = |verb| node.node_list_batch(verb, topic, topic.lo().max(1));
        if !yes {
            self.node.submit(&batch(Verb::Release), now);
        }
        let batch = batch(if yes { Verb::Take } else { Verb::Peek });
        Some(async move {
            let outcomes = node.apply_and_record(&batch, now).await.ok()?;
            let yes = usize::try_from(outcomes.list().first()?.used).ok()?;
            Some(Votes { yes, nodes: node.state.node_count.load(Ordering::Relaxed) })
        })
    }

    fn announce(
        &self,
        announcement: Announcement,
        now: Time,
    ) -> Option<impl Future<Output = Result<Vec<AnnouncedNode>, StoreError>> + Send + 'static> {
        Some(self.node.remote.announce(announcement, now))
    }

    fn outage(&self) -> Option<&str> {
        (self.node.state.down_count.load(Ordering::Relaxed) > 0).then_some(&self.node.state.options.name)
    }

    /// These limits are those of the plan, to which the ones of [`fleet_limits`] are added. The node keeps its tasks, its
    /// blocks and its counts of an outage. Slices of limits are given back with the last clone of their handle. Needs
    /// the runtime that [`Fleet::start`] needs.
    fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Result<Option<Self>, StoreError> {
        let limits = fleet_limits(&limits).map_err(|error| StoreError::Failed(error.to_string()))?;
        let limits = Arc::new(limits);
        let Some(remote) = self.node.remote.with_limits(Arc::clone(&limits)) else { return Ok(None) };
        let state = &self.node.state;
        // Before the existing counts are changed, so that none with earlier limits are made afterwards.
        *state.latest_limits.write() = Arc::clone(&limits);
        state.partitions.iter().for_each(|partition| partition.change_limits(&limits, now));
        // The waits in cached answers are those of earlier limits.
        state.blocks.expire_trust();
        let node = FleetNode::new(remote, Arc::clone(state));
        self.tasks.latest.send_replace(Arc::clone(&node));
        Ok(Some(Self::with_node(node, Arc::clone(&self.tasks))))
    }

    fn maintain(&self, now: Time) -> Losses {
        let untold = self.node.state.dropped_count.swap(0, Ordering::Relaxed);
        if untold > 0 {
            tracing::warn!(untold, "the store is too slow: refunds and other reports were dropped");
        }
        let late = self.node.state.late_count.swap(0, Ordering::Relaxed);
        if late >= LATE_WARNING_THRESHOLD {
            tracing::warn!(late, "answers of the store repeatedly come too late: decisions are made without it");
        }
        self.node.state.partitions.iter().fold(Losses::default(), |losses, partition| {
            let local = partition.fallback().map(|local| local.memory.maintain(now));
            partition.drop_unused_fallback();
            losses.plus(local.unwrap_or_default())
        })
    }
}

impl FleetNode {
    fn new(remote: Box<dyn RemoteStore>, state: Arc<NodeState>) -> Arc<Self> {
        let limits = remote.limits();
        let heartbeat_limit = limits.iter().map(|(id, _)| id).last();
        let (reset_log, leases) = (ResetLog::new(Arc::clone(limits)), Arc::new(Leases::new(Arc::clone(limits))));
        Arc::new(Self { remote, heartbeat_limit, reset_log, leases, state })
    }

    /// Spends from a local slice, and gives back the rest of a slice that isn't enough.
    fn spend_slice(self: &Arc<Self>, batch: &Batch, now: Time) -> SpendResult {
        let (spend_result, unspent) = self.leases.spend_or_request(batch, now);
        if let Some(unspent) = unspent {
            self.submit(&unspent, now);
        }
        spend_result
    }

    /// The partitions that hold a batch's keys, one for each key.
    fn partitions_of(&self, batch: &Batch) -> impl Iterator<Item = (&PartitionHealth, RoutingKey)> {
        let affinity = batch.context().affinity;
        let routing_keys = batch.ops().iter().map(move |op| RoutingKey { affinity, key: op.key });
        routing_keys.map(move |routing_key| (self.partition_of_key(affinity, routing_key.key), routing_key))
    }

    fn partition_of_key(&self, affinity: u64, key: Key) -> &PartitionHealth {
        self.state.partitions.get(self.remote.partition(affinity, key)).unwrap_or(&self.state.partitions[0])
    }

    /// The partition on which a batch depends: one that isn't up, if there is any.
    fn batch_partition(&self, batch: &Batch) -> &PartitionHealth {
        let mut partitions = self.partitions_of(batch).map(|(partition, _)| partition);
        let first = partitions.next().unwrap_or(&self.state.partitions[0]);
        if first.is_up() { partitions.find(|partition| !partition.is_up()).unwrap_or(first) } else { first }
    }

    /// Asks the store, and decides without it if it doesn't answer.
    async fn apply_or_fall_back(self: &Arc<Self>, batch: &Batch, sent_at: Time) -> Result<Outcomes, StoreError> {
        if let Ok(outcomes) = self.apply_and_record(batch, sent_at).await {
            return Ok(outcomes);
        }
        let now = self.state.clock.now();
        let outcomes = self
            .state
            .blocks
            .refusal_from_cache(self.remote.limits(), batch, false, now)
            .map_or_else(|| self.decide_without_store(batch, now), Ok);
        // The store may have granted a permit that no call holds. A call admitted here releases it at its end.
        if outcomes.as_ref().map_or(true, Outcomes::refuses)
            && let Some(release) = batch.to_release(self.remote.limits())
        {
            self.submit(&release, now);
        }
        outcomes
    }

    /// Asks the store while its partition is up.
    async fn apply_and_record(self: &Arc<Self>, batch: &Batch, sent_at: Time) -> Result<Outcomes, StoreError> {
        let outcomes = self.apply_remote(batch, sent_at).await?;
        Ok(self.record(batch, outcomes, sent_at).await)
    }

    /// Takes note of an answer of the store. One without a known block counts only after a reset of the key.
    async fn record(self: &Arc<Self>, batch: &Batch, outcomes: Outcomes, sent_at: Time) -> Outcomes {
        match self.state.blocks.update_from_store(self.remote.limits(), batch, &outcomes, sent_at) {
            true => Box::pin(self.recheck_outcomes(batch, outcomes)).await,
            false => outcomes,
        }
    }

    /// The outcomes in place of an answer that lacks a block. The charges of that answer are given back.
    async fn recheck_outcomes(self: &Arc<Self>, batch: &Batch, outcomes: Outcomes) -> Outcomes {
        for op in batch.ops() {
            self.recheck_block(op.limit, op.key).await;
        }
        let now = self.state.clock.now();
        let Some(blocked) = self.state.blocks.refusal_from_cache(self.remote.limits(), batch, false, now) else {
            return outcomes;
        };
        let limits = self.remote.limits();
        if let Some(release) = batch.to_release(limits) {
            self.submit(&release, now);
        }
        let mut refusals = RefusalSummary::default();
        refusals.add_part(batch, limits, &outcomes);
        let refund_of = |(op, outcome): (&Op, &Outcome)| {
            let limit = limits.get(op.limit).filter(|limit| !limit.kind().has_permits())?;
            let is_charged = op.verb == Verb::Take && refusals.must_refund_if_refused(limit, outcome);
            is_charged.then_some(Op { verb: Verb::Refund, ..*op })
        };
        let (charged_at, lead) = (outcomes.now(), batch.context().lead);
        let refund = batch.with_ops(batch.ops().iter().zip(outcomes.list()).filter_map(refund_of));
        if !refund.ops().is_empty() {
            self.submit(&refund.with_charged_at(charged_at).with_counted_at(charged_at + lead), now);
        }
        blocked
    }

    /// Asks the store for as long as its partition is up. Blocks in the answer aren't cached.
    async fn apply_remote(&self, batch: &Batch, sent_at: Time) -> Result<Outcomes, StoreError> {
        let partition = self.batch_partition(batch);
        let outcomes = partition.wait_for_response(self.remote.apply(batch, sent_at), self.state.options.timeout).await;
        // `Unavailable`: the partition went down because another request failed, or isn't up.
        if matches!(outcomes, Err(ref error) if !matches!(error, StoreError::Unavailable)) {
            self.state.late_count.fetch_add(1, Ordering::Relaxed);
            // The checks of each partition find out which one failed.
            self.partitions_of(batch)
                .for_each(|(partition, routing_key)| partition.mark_suspect(|| self.new_fallback(), routing_key));
        }
        outcomes
    }

    /// The state with which a node decides while a part of the store is gone.
    fn new_fallback(&self) -> local_fallback::LocalFallback {
        let bytes = self.state.options.max_bytes / self.state.partitions.len();
        local_fallback::LocalFallback::new(
            &self.state.latest_limits.read(),
            self.state.node_count.load(Ordering::Relaxed),
            bytes,
        )
    }

    fn decide_without_store(&self, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        let on_outage = self.on_outage(batch);
        if on_outage != OnOutage::Deny && batch.ops().iter().any(|op| op.verb == Verb::Take) {
            self.state.fallback_count.fetch_add(1, Ordering::Relaxed);
        }
        match on_outage {
            OnOutage::Deny => Err(StoreError::Unavailable),
            OnOutage::Allow => Ok(local_fallback::uncounted_outcomes(batch, self.remote.limits(), now)),
            OnOutage::Local => Ok(self.apply_locally(batch, now)),
        }
    }

    fn on_outage(&self, batch: &Batch) -> OnOutage {
        let first = batch.ops().first().and_then(|op| self.remote.limits().get(op.limit));
        first.map_or(OnOutage::Local, |limit| limit.sharing().on_outage)
    }

    /// Sends the store a batch. If the store doesn't answer, the batch is kept here until it is back.
    async fn submit_or_keep(self: Arc<Self>, batch: Batch, sent_at: Time) {
        // The store may have lost a permit of a call that still runs.
        let is_lost_permit = |(op, outcome): (&Op, &Outcome)| op.verb == Verb::Renew && outcome.admission.refuses();
        let is_stored = match self.apply_and_record(&batch, sent_at).await {
            Err(_) => false,
            Ok(outcomes) => {
                !batch.ops().iter().zip(outcomes.list()).any(is_lost_permit)
                    || self.apply_and_record(&retake_permits_batch(&batch), sent_at).await.is_ok()
            }
        };
        if !is_stored {
            self.apply_locally(&batch, self.state.clock.now());
        }
    }

    /// Applies a batch to this node's share. If the store is up, the changes are sent to it soon.
    fn apply_locally(&self, batch: &Batch, now: Time) -> Outcomes {
        let partition = self.batch_partition(batch);
        let outcomes = partition.fallback_or_insert(|| self.new_fallback()).apply(batch, now);
        self.state.blocks.add_local_blocks(self.remote.limits(), batch, &outcomes, now);
        if partition.is_up() {
            partition.task_wakeup.notify_one();
        }
        outcomes
    }

    fn submit(self: &Arc<Self>, batch: &Batch, now: Time) {
        let partition = self.batch_partition(batch);
        if !partition.is_up() {
            self.apply_locally(batch, now);
        } else if self.state.submit_sender.try_send((Arc::clone(self), batch.clone(), now)).is_err() {
            self.state.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn node_list_batch(&self, verb: Verb, list: Key, affinity: u64) -> Batch {
        let op = self.heartbeat_limit.map(|limit| Op::new(limit, verb, list, 1));
        new_batch(self.state.options.node_id, affinity, op)
    }
}

fn new_batch(holder: u64, affinity: u64, ops: impl IntoIterator<Item = Op>) -> Batch {
    let mut batch = Batch::new(holder).with_ops(ops);
    batch.set_affinity(affinity);
    batch
}
