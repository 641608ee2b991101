//! The queue of batches for a store with rows, and the groups in which they are executed.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::future::Future;
use std::sync::Arc;

use arrayvec::ArrayVec;
use parking_lot::Mutex;
use tidegate_core::backoff::{Backoff, BackoffState};
use tidegate_core::batch::MAX_OPS;
use tidegate_core::{Batch, LimitId, Limits, Outcomes, Span, Time, Verb};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::{GROUP_TIMEOUT, GroupError, RowKey};
use crate::{RemoteFuture, StoreError};

/// The maximum number of waiting batches. Further ones fail at once.
const MAX_WAITING_BATCHES: usize = 4096;
/// The maximum number of rows of one group.
pub(crate) const MAX_GROUP_ROWS: usize = 256;
/// The maximum number of batches of one group.
const MAX_GROUP_BATCHES: usize = 256;
/// The maximum number of attempts of a group in conflict with other nodes: with the waits between, about a second.
const MAX_TRIES: u32 = 32;
const CONFLICT_BACKOFF: Backoff = Backoff::exponential(Span::from_millis(2), Span::from_millis(64));

/// The result of each batch of a group, in order.
pub(crate) type BatchResults = Vec<Result<Outcomes, StoreError>>;

/// The executor of groups on one kind of server: it locks, loads and writes rows.
pub(crate) trait GroupDriver: Send + Sync + 'static {
    /// True if a group may only have batches over the same rows.
    const REQUIRES_SAME_ROWS: bool;

    /// Executes all batches of a group as if one after the other, and returns the result of each.
    ///
    /// # Errors
    /// A [`GroupError`] for all batches.
    fn execute(
        &self,
        limits: &Limits,
        group: &BatchGroup,
    ) -> impl Future<Output = Result<BatchResults, GroupError>> + Send;
}

/// A batch that a caller waits for.
pub(crate) struct QueuedBatch {
    pub(crate) batch: Batch,
    limits: Arc<Limits>,
    /// The time that the caller passed.
    pub(crate) now: Time,
    /// The rows of its operations.
    pub(crate) keys: ArrayVec<(RowKey, LimitId), MAX_OPS>,
    is_read_only: bool,
    result_sender: oneshot::Sender<Result<Outcomes, StoreError>>,
}

impl QueuedBatch {
    /// True if no caller waits for its result and it returns nothing to a limit, such as a permit.
    fn is_abandoned(&self) -> bool {
        self.result_sender.is_closed() && self.batch.ops().iter().all(|op| matches!(op.verb, Verb::Take | Verb::Peek))
    }
}

/// Batches that are executed together, under the same limits.
#[expect(clippy::vec_box, reason = "a call is half a kilobyte, and goes from list to list")]
pub(crate) struct BatchGroup {
    pub(crate) batches: Vec<Box<QueuedBatch>>,
    limits: Arc<Limits>,
    /// The rows of all its batches, each once, in key order.
    pub(crate) keys: Vec<RowKey>,
    /// The limit of each row.
    pub(crate) limit_ids: Vec<LimitId>,
    /// True if no batch of it changes a row.
    pub(crate) is_read_only: bool,
}

fn send_error_to_all(batches: impl IntoIterator<Item = Box<QueuedBatch>>, error: &StoreError) {
    for queued in batches {
        let _ = queued.result_sender.send(Err(error.clone()));
    }
}

/// The executor of batches of a store with rows: a handle that decides by its own limits.
pub(crate) struct GroupExecutor<D> {
    pub(crate) limits: Arc<Limits>,
    shared: Arc<SharedExecutor<D>>,
}

/// The queue of a store with rows, and the tasks that execute its groups.
struct SharedExecutor<D> {
    driver: Arc<D>,
    max_workers: usize,
    queue: Mutex<ExecutorQueue>,
}

#[derive(Default)]
struct ExecutorQueue {
    waiting: VecDeque<Box<QueuedBatch>>,
    /// The rows of running groups that change rows. A batch over one of them waits here, and not in the server.
    busy_rows: HashSet<RowKey>,
    /// The number of tasks that execute groups until the queue is empty.
    workers: usize,
}

impl<D: GroupDriver> GroupExecutor<D> {
    /// An executor without tasks; the first batch starts one.
    pub(crate) fn new(driver: D, limits: Arc<Limits>, max_workers: usize) -> Self {
        let shared = SharedExecutor { driver: Arc::new(driver), max_workers, queue: Mutex::default() };
        Self { limits, shared: Arc::new(shared) }
    }

    /// A handle to the same queue that decides by these limits.
    pub(crate) fn with_limits(&self, limits: Arc<Limits>) -> Self {
        Self { limits, shared: Arc::clone(&self.shared) }
    }

    pub(crate) fn driver(&self) -> Arc<D> {
        Arc::clone(&self.shared.driver)
    }

    /// Executes a batch together with others. It is queued at the first poll.
    pub(crate) fn apply(&self, batch: &Batch, now: Time) -> RemoteFuture<Outcomes> {
        let (shared, limits, batch) = (Arc::clone(&self.shared), Arc::clone(&self.limits), batch.clone());
        Box::pin(async move {
            let (sender, answer) = oneshot::channel();
            shared.enqueue(batch, limits, now, sender)?;
            answer.await.unwrap_or_else(|_| Err(StoreError::Failed("its task ended before an answer".into())))
        })
    }
}

impl<D: GroupDriver> SharedExecutor<D> {
    fn enqueue(
        self: &Arc<Self>,
        batch: Batch,
        limits: Arc<Limits>,
        now: Time,
        result_sender: oneshot::Sender<Result<Outcomes, StoreError>>,
    ) -> Result<(), StoreError> {
        let runtime = Handle::try_current().map_err(|_| StoreError::Failed("asked outside a tokio runtime".into()))?;
        let known_ops = batch.ops().iter().filter(|op| limits.get(op.limit).is_some());
        let keys: ArrayVec<_, MAX_OPS> =
            known_ops.map(|op| (RowKey::new(limits.tag(op.limit), op.key), op.limit)).collect();
        // A batch without rows changes nothing.
        let is_read_only = keys.is_empty() || batch.ops().iter().all(|op| op.verb == Verb::Peek);
        let queued = Box::new(QueuedBatch { batch, limits, now, keys, is_read_only, result_sender });
        let mut queue = self.queue.lock();
        if queue.waiting.len() >= MAX_WAITING_BATCHES {
            return Err(StoreError::Failed(format!("{MAX_WAITING_BATCHES} calls wait for it already")));
        }
        // The worker with a busy row checks the queue again after its group.
        let has_busy_rows = || queued.keys.iter().any(|(key, _)| queue.busy_rows.contains(key));
        let needs_worker = queue.workers < self.max_workers && (is_read_only || !has_busy_rows());
        queue.waiting.push_back(queued);
        if needs_worker {
            queue.workers += 1;
            let worker = GroupWorker { executor: Arc::clone(self), is_running: true, busy_rows: Vec::new() };
            drop(queue);
            runtime.spawn(worker.run());
        }
        Ok(())
    }
}

impl ExecutorQueue {
    /// Takes the first batch with free rows, and later ones that fit. Batches that change a row keep their order.
    fn next_group(&mut self, same_rows: bool) -> Option<BatchGroup> {
        let mut batches: Vec<Box<QueuedBatch>> = Vec::new();
        let mut keys = BTreeMap::new();
        let mut skipped = Vec::new();
        let mut reserved_rows = HashSet::new();
        while let Some(queued) = self.waiting.pop_front() {
            if queued.is_abandoned() {
                continue;
            }
            let new_rows = queued.keys.iter().filter(|(key, _)| !keys.contains_key(key)).count();
            let fits = batches.first().is_none_or(|first| {
                let is_compatible = first.is_read_only == queued.is_read_only && (new_rows == 0 || !same_rows);
                let has_same_limits = Arc::ptr_eq(&first.limits, &queued.limits);
                is_compatible && has_same_limits && keys.len() + new_rows <= MAX_GROUP_ROWS
            });
            let is_free = queued.is_read_only
                || !queued.keys.iter().any(|(key, _)| self.busy_rows.contains(key) || reserved_rows.contains(key));
            if fits && is_free {
                keys.extend(queued.keys.iter().copied());
                batches.push(queued);
                if batches.len() == MAX_GROUP_BATCHES {
                    break;
                }
            } else {
                if !queued.is_read_only {
                    reserved_rows.extend(queued.keys.iter().map(|(key, _)| *key));
                }
                skipped.push(queued);
            }
        }
        for queued in skipped.into_iter().rev() {
            self.waiting.push_front(queued);
        }
        let first = batches.first()?;
        let (is_read_only, limits) = (first.is_read_only, Arc::clone(&first.limits));
        if !is_read_only {
            self.busy_rows.extend(keys.keys());
        }
        let (keys, limit_ids) = keys.into_iter().unzip();
        Some(BatchGroup { batches, limits, keys, limit_ids, is_read_only })
    }
}

/// A task that executes groups, and the rows of its group.
struct GroupWorker<D: GroupDriver> {
    executor: Arc<SharedExecutor<D>>,
    is_running: bool,
    busy_rows: Vec<RowKey>,
}

impl<D: GroupDriver> GroupWorker<D> {
    async fn run(mut self) {
        while let Some(group) = self.next_group() {
            self.execute(group).await;
        }
    }

    fn next_group(&mut self) -> Option<BatchGroup> {
        let mut queue = self.executor.queue.lock();
        for row in self.busy_rows.drain(..) {
            queue.busy_rows.remove(&row);
        }
        let Some(group) = queue.next_group(D::REQUIRES_SAME_ROWS) else {
            // Under the same lock, so that the next batch sees that a worker is needed.
            queue.workers -= 1;
            self.is_running = false;
            return None;
        };
        if !group.is_read_only {
            self.busy_rows.extend(&group.keys);
        }
        Some(group)
    }

    async fn execute(&self, group: BatchGroup) {
        let SharedExecutor { driver, queue, .. } = &*self.executor;
        let mut backoff = BackoffState::default();
        let mut tries_left = MAX_TRIES;
        let error = loop {
            let attempt = tokio::time::timeout(GROUP_TIMEOUT, driver.execute(&group.limits, &group));
            tries_left -= 1;
            match attempt.await {
                Ok(Ok(answers)) => {
                    for (queued, answer) in group.batches.into_iter().zip(answers) {
                        let _ = queued.result_sender.send(answer);
                    }
                    return;
                }
                Err(_) => return send_error_to_all(group.batches, &StoreError::Timeout(GROUP_TIMEOUT)),
                Ok(Err(GroupError::Conflict(_)))
                    if tries_left > 0 && !group.batches.iter().all(|queued| queued.is_abandoned()) =>
                {
                    let wait = backoff.next(&CONFLICT_BACKOFF, &mut rand::rng());
                    tokio::time::sleep(wait.as_duration()).await;
                }
                Ok(Err(GroupError::ConnectionLost(_))) if tries_left > 0 => {}
                Ok(Err(error)) => break error,
            }
        };
        let is_unreachable = matches!(error, GroupError::Unreachable(_));
        let error = StoreError::from(error);
        send_error_to_all(group.batches, &error);
        if is_unreachable {
            let waiting = std::mem::take(&mut queue.lock().waiting);
            send_error_to_all(waiting, &error);
        }
    }
}

impl<D: GroupDriver> Drop for GroupWorker<D> {
    fn drop(&mut self) {
        if !self.is_running {
            return;
        }
        let mut queue = self.executor.queue.lock();
        queue.workers -= 1;
        for row in &self.busy_rows {
            queue.busy_rows.remove(row);
        }
    }
}

#[cfg(test)]
mod tests;
