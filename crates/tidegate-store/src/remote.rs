//! What a store beyond this process is asked, and how one stands alone.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::{Batch, Key, Limits, Outcomes, Time};

use crate::{Store, StoreError, StoreResponse};

/// What comes from a store after a round trip.
pub type RemoteFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// A key that was reset: under which limit, by its [tag](Limits::tag), and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyReset {
    /// The limit's tag.
    pub tag: u64,
    /// The key.
    pub key: Key,
}

/// Whose time a store decides by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeSource {
    /// The store's own, so that nodes whose clocks differ still count together.
    #[default]
    Store,
    /// That which comes with each batch: for tests. What has to expire in the store itself then stays for an hour at
    /// least, by its own time.
    Caller,
}

/// A store beyond this process, asked over a network.
///
/// Who asks bounds the wait; a batch whose answer was lost counts as carried out. Dropping a future that was polled takes
/// nothing back. Every method may be called before the store was ever reached, and fails then.
pub trait RemoteStore: Send + Sync + 'static {
    /// The limits that batches are judged by.
    fn limits(&self) -> &Arc<Limits>;

    /// Carries out a batch as [`Store::apply`] promises. An empty batch asks for the time and whether anybody is there.
    fn apply(&self, batch: &Batch, now: Time) -> RemoteFuture<Outcomes>;

    /// The bytes that all nodes hash their keys under: those in the store, or if there are none this proposal, which is
    /// then kept there for good.
    fn get_or_insert_seed(&self, proposal: [u8; 16]) -> RemoteFuture<[u8; 16]>;

    /// How many parts of it can fail by themselves, such as a cluster's masters, at the most. At least 1.
    fn partition_count(&self) -> usize {
        1
    }

    /// Which part holds a key's state, below [`RemoteStore::partition_count`], under batches of this
    /// [affinity](tidegate_core::batch::BatchContext::affinity). It may be another from one moment to the next.
    fn partition(&self, affinity: u64, key: Key) -> usize {
        let _ = (affinity, key);
        0
    }

    /// What is told of resets by any node, this one included, where the store can tell; `None` says that some may have been
    /// missed. It may tell some late, or twice, or lose them while it can't be reached.
    fn subscribe_to_resets(&self) -> Option<tokio::sync::broadcast::Receiver<Option<KeyReset>>> {
        None
    }

    /// Removes some of what has expired, in a bounded number of steps, where the store doesn't by itself, and finds out
    /// which part holds what. Called about once a second by one node or by all.
    fn maintain(&self) -> RemoteFuture<()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A remote store alone: every decision is a round trip, and an outage an error.
#[derive(Debug)]
pub struct DirectStore<R>(pub R);

impl<R: RemoteStore> Store for DirectStore<R> {
    type Future = RemoteFuture<Outcomes>;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        StoreResponse::Pending(self.0.apply(batch, now))
    }

    /// Asked from a task of its own; outside a tokio runtime it is lost, and so is what the store fails to do.
    fn submit(&self, batch: &Batch, now: Time) {
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(self.0.apply(batch, now));
        }
    }
}
