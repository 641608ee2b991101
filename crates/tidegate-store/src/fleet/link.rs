//! Whether a part of the store can be reached.
//!
//! The first answer that fails to come makes a link *suspect*: from then on its callers go on without the store, and a
//! look at it, at once, says whether it was a hiccup or the store is *down*. So nobody waits twice for a store that is
//! gone, and the log isn't told of a single slow answer.

use std::future::Future;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

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
    /// What the node goes on with; there from the moment that the link is suspect until it is up.
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
        self.local.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn failed(&self) -> Option<Place> {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner)
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
    pub(super) fn suspect(&self, local: impl FnOnce() -> Local, place: Place) {
        let mut held = self.local.write().unwrap_or_else(PoisonError::into_inner);
        if self.is_up() {
            *held = Some(Arc::new(local()));
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(place);
            self.state.store(SUSPECT, Ordering::Release);
            self.fell.notify_waiters();
            self.poked.notify_one();
        }
    }

    /// It isn't there when looked at either. True if that is news.
    pub(super) fn fall(&self, local: impl FnOnce() -> Local) -> bool {
        let mut held = self.local.write().unwrap_or_else(PoisonError::into_inner);
        if self.is_up() {
            *held = Some(Arc::new(local()));
        }
        let before = self.state.swap(DOWN, Ordering::AcqRel);
        self.fell.notify_waiters();
        before != DOWN
    }

    /// The store answers: what the node went on with meanwhile, and whether the link had been down.
    pub(super) fn rise(&self) -> (Option<Arc<Local>>, bool) {
        let mut held = self.local.write().unwrap_or_else(PoisonError::into_inner);
        let before = self.state.swap(UP, Ordering::AcqRel);
        (held.take(), before == DOWN)
    }
}
