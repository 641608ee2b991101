//! A node's background tasks: heartbeats, checks of partitions, sending, and resets.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::{Batch, Key, LimitId, Outcomes, Span, Time, Verb};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::health::{PartitionHealth, RoutingKey};
use super::local_fallback::{LocalFallback, UnsyncedChange};
use super::{FleetNode, HEARTBEAT_KEY, NODE_LEASE, NodeState};
use crate::KeyReset;

/// The intervals of heartbeats, and of probes of a partition that is down.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
const PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// The factor by which the tasks here wait longer than a decision, and the least wait. A slow store isn't down.
const TASK_TIMEOUT: (u32, Duration) = (4, Duration::from_millis(200));
/// The number of batches that are sent at the same time.
const MAX_CONCURRENT_BATCHES: usize = 64;
/// The interval at which the store is asked to remove what has expired, and for similar upkeep.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// The time for which a part is suspect before it counts as down, which is logged.
const DOWN_AFTER: Span = Span::from_millis(500);
/// The time for which a part has to stay up. One that stalls earlier isn't checked at once.
const STABLE_AFTER: Span = Span::from_secs(1);

/// The handle with the latest limits.
type LatestNode = watch::Receiver<Arc<FleetNode>>;

fn current(latest: &LatestNode) -> Arc<FleetNode> {
    Arc::clone(&latest.borrow())
}

/// A batch without an answer, with the handle by whose limits it is sent.
pub(super) type QueuedSubmit = (Arc<FleetNode>, Batch, Time);

/// The tasks of a node, which end with this value.
pub(super) struct FleetTasks {
    /// The handle by whose limits they work.
    pub(super) latest: watch::Sender<Arc<FleetNode>>,
    _running: JoinSet<()>,
}

impl FleetTasks {
    pub(super) fn start(
        node: &Arc<FleetNode>,
        submit_receiver: mpsc::Receiver<QueuedSubmit>,
        reset_receiver: Option<broadcast::Receiver<Option<KeyReset>>>,
    ) -> Self {
        let latest = watch::Sender::new(Arc::clone(node));
        let mut tasks = JoinSet::new();
        let state = Arc::clone(&node.state);
        tasks.spawn(send_heartbeats(latest.subscribe()));
        for index in 0..state.partitions.len() {
            tasks.spawn(monitor_partition(latest.subscribe(), Arc::clone(&state), index));
        }
        tasks.spawn(run_submit_queue(submit_receiver));
        tasks.spawn(recheck_blocks(latest.subscribe(), state));
        tasks.spawn(maintain_store(latest.subscribe()));
        if let Some(resets) = reset_receiver {
            tasks.spawn(handle_resets(latest.subscribe(), resets));
        }
        Self { latest, _running: tasks }
    }
}

impl FleetNode {
    /// A batch that shows if a partition of the store takes writes.
    fn probe_batch(&self, partition: &PartitionHealth) -> Batch {
        match *partition.failed_key.lock() {
            // The key selects the failed part, and its heartbeat entry is kept there too.
            Some(RoutingKey { affinity, key }) if self.state.partitions.len() > 1 => {
                self.node_list_batch(Verb::Take, Key::new(HEARTBEAT_KEY.hi(), key.lo()), affinity)
            }
            _ => self.node_list_batch(Verb::Take, HEARTBEAT_KEY, 0),
        }
    }

    fn update_node_count(&self, outcomes: &Outcomes) {
        let nodes = outcomes.list().first().and_then(|outcome| usize::try_from(outcome.used).ok()).unwrap_or(1).max(1);
        if self.state.clock.now().as_micros() < self.state.node_count_reliable_at.load(Ordering::Relaxed) {
            self.state.node_count.fetch_max(nodes, Ordering::Relaxed);
        } else {
            self.state.node_count.store(nodes, Ordering::Relaxed);
        }
    }
}

/// Sends heartbeats: they count the nodes, and detect a failure of the store before a caller does.
async fn send_heartbeats(latest: LatestNode) {
    loop {
        let node = current(&latest);
        let partition = node.partition_of_key(0, HEARTBEAT_KEY);
        if partition.is_up() {
            match apply_with_timeout(&node, node.node_list_batch(Verb::Take, HEARTBEAT_KEY, 0)).await {
                Ok(outcomes) => {
                    node.update_node_count(&outcomes);
                    restore_seed(&node).await;
                }
                Err(_) => {
                    partition.mark_suspect(|| node.new_fallback(), RoutingKey { affinity: 0, key: HEARTBEAT_KEY })
                }
            }
        }
        sleep(HEARTBEAT_INTERVAL).await;
    }
}

/// Checks a suspect part until it is back, and then sends it the changes made meanwhile.
async fn monitor_partition(latest: LatestNode, state: Arc<NodeState>, index: usize) {
    let partition = &state.partitions[index];
    let mut up_since = None;
    loop {
        partition.task_wakeup.notified().await;
        let suspect_at = state.clock.now();
        if !partition.is_up() && up_since.is_some_and(|up_at| suspect_at.since(up_at) < STABLE_AFTER) {
            // A part that stalls repeatedly is checked only after a pause.
            sleep(PROBE_INTERVAL).await;
        }
        while !partition.is_up() {
            let node = current(&latest);
            let (batch, sent_at) = (node.probe_batch(partition), node.state.clock.now());
            let is_heartbeat = batch.ops().iter().any(|op| op.key == HEARTBEAT_KEY);
            let error = match apply_with_timeout(&node, batch).await {
                Ok(outcomes) => {
                    let now = node.state.clock.now();
                    let (elapsed, timeout) = (now.since(sent_at), Span::from_duration(node.state.options.timeout));
                    if elapsed <= timeout {
                        mark_up(&node, partition).await;
                        if is_heartbeat {
                            node.update_node_count(&outcomes);
                        }
                        up_since = Some(now);
                        break;
                    }
                    format!("it answers after {elapsed}, and a decision waits for {timeout} at the most")
                }
                Err(error) => error,
            };
            if node.state.clock.now().since(suspect_at) >= DOWN_AFTER {
                mark_down(&node, partition, &error);
            }
            sleep(PROBE_INTERVAL).await;
        }
        if let Some(local) = partition.fallback() {
            tokio::spawn(sync_local_changes(current(&latest), local));
        }
    }
}

/// Asks the store, whether its partition is up or not. The error is the reason why there is no answer.
async fn apply_with_timeout(node: &FleetNode, batch: Batch) -> Result<Outcomes, String> {
    let max_wait = task_timeout(node);
    match timeout(max_wait, node.remote.apply(&batch, node.state.clock.now())).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {max_wait:?}")),
    }
}

fn task_timeout(node: &FleetNode) -> Duration {
    (node.state.options.timeout * TASK_TIMEOUT.0).max(TASK_TIMEOUT.1)
}

/// Stores the secret under which keys are hashed again if the store lost it, before a new node makes another one.
async fn restore_seed(node: &FleetNode) {
    let Some(seed) = node.state.options.seed else { return };
    let Ok(Ok(stored_seed)) = timeout(task_timeout(node), node.remote.get_or_insert_seed(seed)).await else { return };
    let has_other_seed = stored_seed != seed;
    if !node.state.has_other_seed.swap(has_other_seed, Ordering::Relaxed) && has_other_seed {
        tracing::error!(
            "the store has another secret than this node hashes keys under: they don't count together until this node is \
             started again; store.hash_key keeps that from happening"
        );
    }
}

fn mark_down(node: &FleetNode, partition: &PartitionHealth, error: &str) {
    if partition.mark_down() && node.state.down_count.fetch_add(1, Ordering::Relaxed) == 0 {
        let what = if node.state.partitions.len() > 1 { "a part of the store" } else { "the store" };
        tracing::warn!(
            store = node.state.options.name,
            error,
            "{what} is down: each limit goes on as its on_outage says"
        );
    }
}

async fn mark_up(node: &FleetNode, partition: &PartitionHealth) {
    restore_seed(node).await;
    node.state.node_count_reliable_at.store((node.state.clock.now() + NODE_LEASE).as_micros(), Ordering::Relaxed);
    // Happens before any caller asks the store, which may have lost the blocks.
    node.state.blocks.mark_unconfirmed(|affinity, key| std::ptr::eq(node.partition_of_key(affinity, key), partition));
    let was_down = partition.mark_up();
    node.state.blocks.recheck_wakeup.notify_one();
    if was_down && node.state.down_count.fetch_sub(1, Ordering::Relaxed) == 1 {
        tracing::warn!(store = node.state.options.name, "the store is back");
    }
}

/// Sends the store the changes made without it.
async fn sync_local_changes(node: Arc<FleetNode>, fallback: Arc<LocalFallback>) {
    let mut running = JoinSet::new();
    let releases = std::mem::take(&mut *fallback.releases.lock());
    for batch in releases {
        spawn_when_free(&mut running, Arc::clone(&node).submit_or_keep(batch, node.state.clock.now())).await;
    }
    while running.join_next().await.is_some() {}
    let unsynced = std::mem::take(&mut *fallback.unsynced.lock());
    for (limit_and_key, change) in unsynced {
        let now = node.state.clock.now();
        let batches = fallback.sync_batches(limit_and_key, change, now);
        let (node, local) = (Arc::clone(&node), Arc::clone(&fallback));
        let sync = async move {
            for batch in batches {
                for (batch, _) in node.reset_log.batches_with_log_entries(&batch) {
                    if node.apply_and_record(&batch, now).await.is_err() {
                        local.restore_unsynced(limit_and_key, change);
                        return;
                    }
                }
            }
            let mut penalty = change.penalty;
            let has_strikes = penalty.strikes > 0 || penalty.unreported_strikes > 0;
            if has_strikes && node.restore_penalty(limit_and_key, &mut penalty).await.is_err() {
                local.restore_unsynced(limit_and_key, UnsyncedChange::of_penalty(penalty));
            }
        };
        spawn_when_free(&mut running, sync).await;
    }
    while running.join_next().await.is_some() {}
}

/// Spawns `task`, after waiting for room among the [`MAX_CONCURRENT_BATCHES`] tasks.
async fn spawn_when_free(running: &mut JoinSet<()>, task: impl Future<Output = ()> + Send + 'static) {
    if running.len() >= MAX_CONCURRENT_BATCHES {
        running.join_next().await;
    }
    running.spawn(task);
}

async fn run_submit_queue(mut submit_receiver: mpsc::Receiver<QueuedSubmit>) {
    let mut running = JoinSet::new();
    while let Some((node, batch, now)) = submit_receiver.recv().await {
        spawn_when_free(&mut running, node.submit_or_keep(batch, now)).await;
        while running.try_join_next().is_some() {}
    }
}

/// Asks the store if it still knows the blocks that it may have lost, and restores those that it lost.
async fn recheck_blocks(latest: LatestNode, state: Arc<NodeState>) {
    loop {
        state.blocks.recheck_wakeup.notified().await;
        let node = current(&latest);
        let mut running = JoinSet::new();
        for (limit, key) in node.state.blocks.unconfirmed_keys() {
            let node = Arc::clone(&node);
            spawn_when_free(&mut running, async move { node.recheck_block(limit, key).await }).await;
        }
        while running.join_next().await.is_some() {}
    }
}

async fn handle_resets(latest: LatestNode, mut reset_receiver: broadcast::Receiver<Option<KeyReset>>) {
    loop {
        let received = reset_receiver.recv().await;
        let node = current(&latest);
        match received {
            Ok(Some(KeyReset { tag, key })) => {
                let limits = node.remote.limits();
                let has_tag = |id: &LimitId| limits.tag(*id) == tag;
                if let Some(limit) = limits.iter().map(|(id, _)| id).find(has_tag) {
                    node.forget(limit, key);
                }
            }
            Ok(None) | Err(RecvError::Lagged(_)) => node.state.blocks.expire_trust(),
            Err(RecvError::Closed) => return,
        }
    }
}

async fn maintain_store(latest: LatestNode) {
    loop {
        let node = current(&latest);
        if node.state.partitions.iter().any(PartitionHealth::is_up) {
            // A failed run is made up for by the next one.
            let _ = node.remote.maintain().await;
        }
        sleep(MAINTENANCE_INTERVAL).await;
    }
}
