//! The permits of requests in flight: renewed while the requests run, returned when they end.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use slab::Slab;
use tidegate::PermitGuard;
use tidegate::store::Store;
use tidegate_core::Clock;
use tokio::sync::Notify;

/// The renewal interval: a third of a lease.
const RENEW_INTERVAL: Duration = Duration::from_secs(10);

/// Renews the permits of all requests in one task. Their number is bounded by the cap on connections, each of which has
/// one request in flight.
#[derive(Default)]
pub(crate) struct PermitRenewer {
    /// The permits. Each is held by the function that renews it.
    permits: Mutex<Slab<Box<dyn Fn() + Send>>>,
    not_empty: Notify,
}

impl PermitRenewer {
    /// Keeps the permit renewed until the returned handle is dropped.
    pub(crate) fn add<S: Store, C: Clock>(self: &Arc<Self>, permit: PermitGuard<S, C>) -> PermitHandle {
        let mut held = self.permits.lock();
        let index = held.insert(Box::new(move || permit.renew()));
        if held.len() == 1 {
            self.not_empty.notify_one();
        }
        PermitHandle { renewer: Arc::clone(self), index }
    }

    /// Renews all permits; never returns. The first renewal of a permit is at most ten seconds after it was acquired.
    pub(crate) async fn run(&self) {
        loop {
            while self.permits.lock().is_empty() {
                self.not_empty.notified().await;
            }
            tokio::time::sleep(RENEW_INTERVAL).await;
            for (_, renew) in &*self.permits.lock() {
                renew();
            }
        }
    }
}

/// A request's permit under limits on calls in flight. Dropping it returns the permit, whatever the request's result.
pub(crate) struct PermitHandle {
    renewer: Arc<PermitRenewer>,
    index: usize,
}

impl Drop for PermitHandle {
    fn drop(&mut self) {
        let permit = self.renewer.permits.lock().try_remove(self.index);
        // Released without the lock.
        drop(permit);
    }
}
