//! The interface to a store outside this process, and a store that uses it without local state.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::{Batch, Key, Limits, Outcomes, Time};

use crate::{AnnouncedNode, Announcement, Store, StoreError, StoreResponse};

/// A reply of a store, after a round trip.
pub type RemoteFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// A key that was reset, under the limit of this [tag](Limits::tag).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyReset {
    /// The limit's tag.
    pub tag: u64,
    /// The key.
    pub key: Key,
}

/// The clock by which a store decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeSource {
    /// The store's own clock, so that nodes with different clocks count together. The default.
    #[default]
    Store,
    /// The time that comes with each batch: for tests. Entries that have to expire in the store itself then stay for an
    /// hour at least, by the store's clock.
    Caller,
}

/// A store outside this process, asked over a network.
///
/// The caller limits the wait; a batch without a received reply counts as applied. Dropping a future after it was
/// polled undoes nothing. Every method may be called before the store was ever reached, and fails then.
pub trait RemoteStore: Send + Sync + 'static {
    /// The limits that decide batches.
    fn limits(&self) -> &Arc<Limits>;

    /// Applies a batch with the guarantees of [`Store::apply`]. An empty batch asks for the time, or checks that the
    /// store answers.
    fn apply(&self, batch: &Batch, now: Time) -> RemoteFuture<Outcomes>;

    /// Returns the seed under which all nodes hash their keys: the one in the store, or else `proposal`, which is then
    /// stored for good.
    fn get_or_insert_seed(&self, proposal: [u8; 16]) -> RemoteFuture<[u8; 16]>;

    /// Keeps a node's announcement, and returns those of all nodes, as [`Store::announce`] does.
    fn announce(&self, announcement: Announcement, now: Time) -> RemoteFuture<Vec<AnnouncedNode>>;

    /// The most parts that can fail by themselves, such as a cluster's masters. At least 1.
    fn partition_count(&self) -> usize {
        1
    }

    /// The part that holds a key's state, below [`RemoteStore::partition_count`], in batches of this
    /// [affinity](tidegate_core::batch::BatchContext::affinity). It may change at any time.
    fn partition(&self, affinity: u64, key: Key) -> usize {
        let _ = (affinity, key);
        0
    }

    /// The resets by all nodes, this one included, or `None` if the store can't report them. A received `None` means
    /// that some may have been missed. A reset may come late or twice, or be lost while the store can't be reached.
    fn subscribe_to_resets(&self) -> Option<tokio::sync::broadcast::Receiver<Option<KeyReset>>> {
        None
    }

    /// Returns a handle to the same store that decides by these limits, with the ids of [`Store::with_limits`]. `None` if
    /// the store can't have other limits, which is the default.
    fn with_limits(&self, limits: Arc<Limits>) -> Option<Box<dyn RemoteStore>> {
        let _ = limits;
        None
    }

    /// Removes some expired entries, in a bounded number of steps, if the store doesn't do so itself. Also updates
    /// which part holds which keys. Called about once a second by one node or by all.
    fn maintain(&self) -> RemoteFuture<()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// A remote store without local state: every decision is a round trip, and an outage is an error.
pub struct DirectStore(pub Box<dyn RemoteStore>);

impl std::fmt::Debug for DirectStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectStore").finish_non_exhaustive()
    }
}

impl Store for DirectStore {
    type Future = RemoteFuture<Outcomes>;

    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        StoreResponse::Pending(self.0.apply(batch, now))
    }

    /// Asks in a task of its own. Outside a tokio runtime the batch is lost, and so is one that the store fails to
    /// apply.
    fn submit(&self, batch: &Batch, now: Time) {
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(self.0.apply(batch, now));
        }
    }

    fn announce(
        &self,
        announcement: Announcement,
        now: Time,
    ) -> Option<impl Future<Output = Result<Vec<AnnouncedNode>, StoreError>> + Send + 'static> {
        Some(self.0.announce(announcement, now))
    }

    fn with_limits(&self, limits: Arc<Limits>, _: Time) -> Result<Option<Self>, StoreError> {
        Ok(self.0.with_limits(limits).map(Self))
    }
}
