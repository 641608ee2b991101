//! The permits of requests in flight: renewed while the requests run, returned when they end.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use slab::Slab;
use tidegate::store::Store;
use tidegate::{KeptPermit, PermitGuard};
use tidegate_core::Clock;
use tokio::sync::Notify;

use crate::upstream::UpstreamWork;

/// The renewal interval: a third of a lease.
const RENEW_INTERVAL: Duration = Duration::from_secs(10);

/// Renews the permits of all requests in one task. Their number is bounded by the cap on connections, each of which has
/// one request in flight, and by the maximum number of requests that are finished without their clients.
#[derive(Default)]
pub(crate) struct PermitRenewer {
    permits: Mutex<Slab<Box<dyn RequestPermit>>>,
    not_empty: Notify,
}

/// A permit of a request, from any gate.
pub(crate) trait RequestPermit: Send {
    fn renew(&self);
    /// Keeps the permit of an abandoned request until its work is likely over. `None` if there is no place for it.
    fn keep(self: Box<Self>) -> Option<Box<dyn AbandonedWork>>;
    /// Returns the permit of a request that caused no work.
    fn cancel(self: Box<Self>);
    /// Counts the request as one that its client has abandoned, although it goes on. Returns false if there is no place for
    /// it.
    fn count_abandoned(&self) -> bool;
}

impl<S: Store, C: Clock> RequestPermit for PermitGuard<S, C> {
    fn renew(&self) {
        Self::renew(self);
    }

    fn keep(self: Box<Self>) -> Option<Box<dyn AbandonedWork>> {
        Some(Box::new(Self::keep(*self)?))
    }

    fn cancel(self: Box<Self>) {
        Self::cancel(*self);
    }

    fn count_abandoned(&self) -> bool {
        Self::count_abandoned(self)
    }
}

/// The work for an abandoned request, while it is observed.
pub(crate) trait AbandonedWork: Send {
    /// Returns its permit, because it is over.
    fn end(self: Box<Self>);
}

impl<S: Store, C: Clock> AbandonedWork for KeptPermit<S, C> {
    fn end(self: Box<Self>) {
        Self::end(*self);
    }
}

impl PermitRenewer {
    /// Keeps the permit renewed until the returned handle is dropped.
    pub(crate) fn add<S: Store, C: Clock>(self: &Arc<Self>, permit: PermitGuard<S, C>) -> PermitHandle {
        let mut held = self.permits.lock();
        let index = held.insert(Box::new(permit));
        if held.len() == 1 {
            self.not_empty.notify_one();
        }
        PermitHandle { renewer: Arc::clone(self), index, work: Arc::default() }
    }

    /// Renews all permits; never returns. The first renewal of a permit is at most ten seconds after it was acquired.
    pub(crate) async fn run(&self) {
        loop {
            while self.permits.lock().is_empty() {
                self.not_empty.notified().await;
            }
            tokio::time::sleep(RENEW_INTERVAL).await;
            for (_, permit) in &*self.permits.lock() {
                permit.renew();
            }
        }
    }
}

/// A request's permit under limits on calls in flight. Dropping it returns the permit, unless the upstream may still work
/// on the request.
pub(crate) struct PermitHandle {
    renewer: Arc<PermitRenewer>,
    index: usize,
    pub(crate) work: Arc<UpstreamWork>,
}

impl PermitHandle {
    /// Counts the request as one that its client has abandoned, although it goes on. Returns false if there is no place for
    /// it.
    pub(crate) fn count_abandoned(&self) -> bool {
        self.renewer.permits.lock().get(self.index).is_some_and(|permit| permit.count_abandoned())
    }
}

impl Drop for PermitHandle {
    fn drop(&mut self) {
        let permit = self.renewer.permits.lock().try_remove(self.index);
        // Returned without the lock.
        if let Some(permit) = permit {
            self.work.end_request(permit);
        }
    }
}
