//! Permits of requests in flight: renewed while they run, given back when they end.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use slab::Slab;
use tidegate::Hold;
use tidegate::core::Clock;
use tidegate::store::Store;
use tokio::sync::Notify;

use crate::watch::lock;

/// Something held for as long as it lives, if it is renewed in time.
trait Renew: Send {
    fn renew(&self);
}

impl<S: Store, C: Clock + Send + Sync + 'static> Renew for Hold<S, C> {
    fn renew(&self) {
        Hold::renew(self);
    }
}

/// How often to renew: a third of a lease.
const RENEW_EVERY: Duration = Duration::from_secs(10);

/// Keeps permits alive: one task for all. Bounded by the cap on connections, each of which has one request in flight.
#[derive(Default)]
pub(crate) struct Keeper {
    held: Mutex<Slab<Box<dyn Renew>>>,
    filled: Notify,
}

impl Keeper {
    /// Holds on until the returned permit is dropped.
    pub(crate) fn keep<S: Store, C: Clock + Send + Sync + 'static>(self: &Arc<Self>, hold: Hold<S, C>) -> Permit {
        let mut held = lock(&self.held);
        let index = held.insert(Box::new(hold));
        if held.len() == 1 {
            self.filled.notify_one();
        }
        Permit { keeper: Arc::clone(self), index }
    }

    /// Renews for ever. A permit is renewed for the first time at most ten seconds after it was taken.
    pub(crate) async fn run(&self) {
        loop {
            while lock(&self.held).is_empty() {
                self.filled.notified().await;
            }
            tokio::time::sleep(RENEW_EVERY).await;
            for (_, hold) in &*lock(&self.held) {
                hold.renew();
            }
        }
    }
}

/// A request's part in limits on calls in flight. Dropping it gives the part back, whatever became of the request.
pub(crate) struct Permit {
    keeper: Arc<Keeper>,
    index: usize,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let hold = lock(&self.keeper.held).try_remove(self.index);
        drop(hold);
    }
}
