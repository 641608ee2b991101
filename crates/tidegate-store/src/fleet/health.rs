//! Whether a part of the store can be reached.
//!
//! The first answer that fails to come makes a link *suspect*: from then on its callers go on without the store, and a
//! look at it, at once, says whether it was a hiccup or the store is *down*. So nobody waits twice for a store that is
//! gone, and the log isn't told of a single slow answer. What a node did alone stays in its mind when the link is up
//! again: an outage that follows soon, or a store that stalls time and again, grants nobody a new share.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tidegate_core::{Key, Outcomes};
use tokio::sync::Notify;

use super::local_fallback::LocalFallback;
use crate::StoreError;

const STATE_UP: u8 = 0;
const STATE_SUSPECT: u8 = 1;
const STATE_DOWN: u8 = 2;

/// The way to one part of the store.
#[derive(Default)]
pub(super) struct PartitionHealth {
    state: AtomicU8,
    /// Wakes those who wait for an answer that won't come.
    stopped_being_up: Notify,
    /// Wakes who looks after it.
    pub(super) task_wakeup: Notify,
    /// What the node goes on with; there from when the link is first suspect until it is up and nothing in it counts.
    fallback: RwLock<Option<Arc<LocalFallback>>>,
    /// What couldn't be asked last.
    failed_key: Mutex<Option<RoutingKey>>,
}

/// Where a store keeps something.
#[derive(Clone, Copy)]
pub(super) struct RoutingKey {
    /// What the keys of its batch have in common.
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

    /// The same, made if there is none.
    pub(super) fn fallback_or_insert(&self, new_fallback: impl FnOnce() -> LocalFallback) -> Arc<LocalFallback> {
        self.fallback().unwrap_or_else(|| {
            let mut fallback = self.fallback.write();
            Arc::clone(fallback.get_or_insert_with(|| Arc::new(new_fallback())))
        })
    }

    pub(super) fn failed_key(&self) -> Option<RoutingKey> {
        *self.failed_key.lock()
    }

    /// Waits for an answer: at most so long, and no longer than others get theirs.
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

    /// An answer failed to come.
    pub(super) fn mark_suspect(&self, new_fallback: impl FnOnce() -> LocalFallback, routing_key: RoutingKey) {
        let mut fallback = self.fallback.write();
        if self.is_up() {
            let new = new_fallback();
            // Of another number of nodes, a share is another; else what is there goes on counting.
            if fallback.as_ref().is_none_or(|local| local.node_count() != new.node_count()) {
                *fallback = Some(Arc::new(new));
            }
            *self.failed_key.lock() = Some(routing_key);
            self.state.store(STATE_SUSPECT, Ordering::Release);
            self.stopped_being_up.notify_waiters();
            self.task_wakeup.notify_one();
        }
    }

    /// It isn't there when looked at either. True if that is news.
    pub(super) fn mark_down(&self) -> bool {
        self.state.swap(STATE_DOWN, Ordering::AcqRel) != STATE_DOWN
    }

    /// The store answers. True if the link had been down.
    pub(super) fn mark_up(&self) -> bool {
        let _local = self.fallback.write();
        self.state.swap(STATE_UP, Ordering::AcqRel) == STATE_DOWN
    }

    /// Lets go of what the node went on with, once none of it counts any more.
    pub(super) fn drop_unused_fallback(&self) {
        let mut fallback = self.fallback.write();
        if self.is_up() && fallback.as_ref().is_some_and(|local| local.is_empty()) {
            *fallback = None;
        }
    }
}
