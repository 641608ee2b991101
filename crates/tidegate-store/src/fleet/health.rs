//! The state of the connection to one part of the store.
//!
//! The first answer that fails to come makes a partition *suspect*: from then on its callers go on without the store. A
//! check at once shows if it was a short delay or the store is *down*. So no caller waits twice for a store that is
//! gone, and a single slow answer isn't logged. The node keeps its local counts when the partition is up again. So an
//! outage soon afterwards, or a store that stalls repeatedly, grants no caller a new share.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tidegate_core::{Key, Limits, Outcomes, Time};
use tokio::sync::Notify;

use super::local_fallback::LocalFallback;
use crate::StoreError;

const STATE_UP: u8 = 0;
const STATE_SUSPECT: u8 = 1;
const STATE_DOWN: u8 = 2;

/// One part of the store and its health.
#[derive(Default)]
pub(super) struct PartitionHealth {
    state: AtomicU8,
    /// Wakes the callers that wait for an answer.
    stopped_being_up: Notify,
    /// Wakes the task that checks the partition.
    pub(super) task_wakeup: Notify,
    /// The local counts. They exist from the first suspicion until the partition is up and none of them is live.
    fallback: RwLock<Option<Arc<LocalFallback>>>,
    /// The routing key of the last request that failed.
    pub(super) failed_key: Mutex<Option<RoutingKey>>,
}

/// The values by which a store that is divided finds a key.
#[derive(Clone, Copy)]
pub(super) struct RoutingKey {
    /// The common affinity of the keys of its batch.
    pub(super) affinity: u64,
    pub(super) key: Key,
}

impl PartitionHealth {
    pub(super) fn is_up(&self) -> bool {
        self.state.load(Ordering::Acquire) == STATE_UP
    }

    pub(super) fn fallback(&self) -> Option<Arc<LocalFallback>> {
        self.fallback.read().clone()
    }

    /// The local counts, created if there are none.
    pub(super) fn fallback_or_insert(&self, new_fallback: impl FnOnce() -> LocalFallback) -> Arc<LocalFallback> {
        self.fallback().unwrap_or_else(|| {
            let mut fallback = self.fallback.write();
            Arc::clone(fallback.get_or_insert_with(|| Arc::new(new_fallback())))
        })
    }

    /// Waits for an answer: until `timeout` at most, and not after the partition goes down.
    pub(super) async fn wait_for_response(
        &self,
        response: impl Future<Output = Result<Outcomes, StoreError>>,
        timeout: Duration,
    ) -> Result<Outcomes, StoreError> {
        let stopped_being_up = self.stopped_being_up.notified();
        if !self.is_up() {
            return Err(StoreError::Unavailable);
        }
        tokio::select! {
            biased;
            answer = response => answer,
            () = stopped_being_up => Err(StoreError::Unavailable),
            () = tokio::time::sleep(timeout) => Err(StoreError::Timeout(timeout)),
        }
    }

    /// Makes the partition suspect after a request failed.
    pub(super) fn mark_suspect(&self, new_fallback: impl FnOnce() -> LocalFallback, routing_key: RoutingKey) {
        let mut fallback = self.fallback.write();
        if self.is_up() {
            let new = new_fallback();
            // With another number of nodes, shares differ. Otherwise the existing counts go on.
            if fallback.as_ref().is_none_or(|local| local.node_count != new.node_count) {
                *fallback = Some(Arc::new(new));
            }
            *self.failed_key.lock() = Some(routing_key);
            self.state.store(STATE_SUSPECT, Ordering::Release);
            self.stopped_being_up.notify_waiters();
            self.task_wakeup.notify_one();
        }
    }

    /// Notes that the check failed too. Returns true if the partition wasn't down before.
    pub(super) fn mark_down(&self) -> bool {
        self.state.swap(STATE_DOWN, Ordering::AcqRel) != STATE_DOWN
    }

    /// Notes that the store answers. Returns true if the partition was down.
    pub(super) fn mark_up(&self) -> bool {
        let _local = self.fallback.write();
        self.state.swap(STATE_UP, Ordering::AcqRel) == STATE_DOWN
    }

    /// Makes the local counts, if there are any, go on under shares of these limits.
    pub(super) fn change_limits(&self, limits: &Limits, now: Time) {
        let mut fallback = self.fallback.write();
        if let Some(local) = &*fallback {
            *fallback = Some(Arc::new(local.with_limits(limits, now)));
        }
    }

    /// Drops the local counts, once the partition is up and none of them is live.
    pub(super) fn drop_unused_fallback(&self) {
        let mut fallback = self.fallback.write();
        if self.is_up() && fallback.as_ref().is_some_and(|local| local.memory.stats().entries == 0) {
            *fallback = None;
        }
    }
}
