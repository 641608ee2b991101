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

use super::share::Local;
use crate::StoreError;

const UP: u8 = 0;
const SUSPECT: u8 = 1;
const DOWN: u8 = 2;

/// The way to one part of the store.
#[derive(Default)]
pub(super) struct Link {
    state: AtomicU8,
    /// Wakes those who wait for an answer that won't come.
    fell: Notify,
    /// Wakes who looks after it.
    pub(super) poked: Notify,
    /// What the node goes on with; there from when the link is first suspect until it is up and nothing in it counts.
    local: RwLock<Option<Arc<Local>>>,
    /// What couldn't be asked last.
    failed: Mutex<Option<Place>>,
}

/// Where a store keeps something.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// What the keys of its batch have in common.
    pub(super) affinity: u64,
    pub(super) key: Key,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.state.load(Ordering::Acquire) == UP
    }

    pub(super) fn local(&self) -> Option<Arc<Local>> {
        self.local.read().clone()
    }

    /// The same, made if there is none.
    pub(super) fn local_or(&self, make: impl FnOnce() -> Local) -> Arc<Local> {
        self.local().unwrap_or_else(|| {
            let mut local = self.local.write();
            Arc::clone(local.get_or_insert_with(|| Arc::new(make())))
        })
    }

    pub(super) fn failed(&self) -> Option<Place> {
        *self.failed.lock()
    }

    /// Waits for an answer: at most so long, and no longer than others get theirs.
    pub(super) async fn wait(
        &self,
        answer: impl Future<Output = Result<Outcomes, StoreError>>,
        timeout: Duration,
    ) -> Result<Outcomes, StoreError> {
        let fell = self.fell.notified();
        if !self.is_up() {
            return Err(StoreError::Unavailable);
        }
        tokio::select! {
            biased;
            answer = answer => answer,
            () = fell => Err(StoreError::Unavailable),
            () = tokio::time::sleep(timeout) => Err(StoreError::Timeout(timeout)),
        }
    }

    /// An answer failed to come.
    pub(super) fn suspect(&self, make: impl FnOnce() -> Local, place: Place) {
        let mut local = self.local.write();
        if self.is_up() {
            let new = make();
            // Of another number of nodes, a share is another; else what is there goes on counting.
            if local.as_ref().is_none_or(|local| local.nodes() != new.nodes()) {
                *local = Some(Arc::new(new));
            }
            *self.failed.lock() = Some(place);
            self.state.store(SUSPECT, Ordering::Release);
            self.fell.notify_waiters();
            self.poked.notify_one();
        }
    }

    /// It isn't there when looked at either. True if that is news.
    pub(super) fn fall(&self) -> bool {
        self.state.swap(DOWN, Ordering::AcqRel) != DOWN
    }

    /// The store answers. True if the link had been down.
    pub(super) fn rise(&self) -> bool {
        let _local = self.local.write();
        self.state.swap(UP, Ordering::AcqRel) == DOWN
    }

    /// Lets go of what the node went on with, once none of it counts any more.
    pub(super) fn tidy(&self) {
        let mut local = self.local.write();
        if self.is_up() && local.as_ref().is_some_and(|local| local.is_empty()) {
            *local = None;
        }
    }
}
