//! Whether a part of the store can be reached.
//!
//! The first answer that fails to come makes a link *suspect*: from then on its callers go on without the store, and the
//! next call of the roll, at once, says whether it was a hiccup or the store is *down*. So nobody waits twice for a
//! store that is gone, and the log isn't told of a single slow answer.

use std::future::Future;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tidegate_core::{Batch, Outcomes};
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
    /// Wakes who calls the roll.
    pub(super) poked: Notify,
    /// What the node goes on with; there from the moment that the link is suspect until it is up.
    local: RwLock<Option<Arc<Local>>>,
    /// What its keys have in common, of the batch that failed.
    affinity: AtomicU64,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.state.load(Ordering::Acquire) == UP
    }

    pub(super) fn local(&self) -> Option<Arc<Local>> {
        self.local.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the batch's keys have in common that made it suspect.
    pub(super) fn affinity(&self) -> u64 {
        self.affinity.load(Ordering::Relaxed)
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
    pub(super) fn suspect(&self, local: impl FnOnce() -> Local, batch: &Batch) {
        let mut held = self.local.write().unwrap_or_else(PoisonError::into_inner);
        if self.is_up() {
            *held = Some(Arc::new(local()));
            self.affinity.store(batch.terms().affinity, Ordering::Relaxed);
            self.state.store(SUSPECT, Ordering::Release);
            self.fell.notify_waiters();
            self.poked.notify_one();
        }
    }

    /// The roll wasn't answered either. True if that is news.
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
