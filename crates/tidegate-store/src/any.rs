//! A store of the kind that a policy names.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::{Batch, Key, Limits, Outcomes, Time};

#[cfg(feature = "file")]
use crate::FileStore;
#[cfg(feature = "remote")]
use crate::Fleet;
use crate::{
    AnnouncedNode, Announcement, ImmediateStore as _, Losses, Memory, Store, StoreError, StoreResponse, Votes,
};

type VoteFuture = Pin<Box<dyn Future<Output = Option<Votes>> + Send>>;
type NodesFuture = Pin<Box<dyn Future<Output = Result<Vec<AnnouncedNode>, StoreError>> + Send>>;

/// One of the stores, chosen when the program starts.
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyStore {
    /// This process's memory.
    Memory(Memory),
    /// This process's memory, and a file.
    #[cfg(feature = "file")]
    File(FileStore),
    /// A store that several nodes share.
    #[cfg(feature = "remote")]
    Fleet(Fleet),
}

impl Store for AnyStore {
    type Future = Pin<Box<dyn Future<Output = Result<Outcomes, StoreError>> + Send>>;

    fn limits(&self) -> &Arc<Limits> {
        match self {
            Self::Memory(memory) => memory.limits(),
            #[cfg(feature = "file")]
            Self::File(file) => file.limits(),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.limits(),
        }
    }

    #[inline]
    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        match self {
            Self::Memory(memory) => StoreResponse::Ready(memory.apply_now(batch, now)),
            #[cfg(feature = "file")]
            Self::File(file) => file.apply(batch, now),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.apply(batch, now),
        }
    }

    fn submit(&self, batch: &Batch, now: Time) {
        match self {
            Self::Memory(memory) => memory.submit(batch, now),
            #[cfg(feature = "file")]
            Self::File(file) => file.submit(batch, now),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.submit(batch, now),
        }
    }

    fn known_block(&self, batch: &Batch, now: Time) -> Option<Time> {
        match self {
            Self::Memory(memory) => memory.known_block(batch, now),
            #[cfg(feature = "file")]
            Self::File(file) => file.known_block(batch, now),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.known_block(batch, now),
        }
    }

    #[cfg_attr(not(feature = "remote"), expect(unused_variables, reason = "there is nobody else"))]
    fn vote(&self, topic: Key, yes: bool, now: Time) -> Option<impl Future<Output = Option<Votes>> + Send + 'static> {
        match self {
            Self::Memory(_) => None::<VoteFuture>,
            #[cfg(feature = "file")]
            Self::File(_) => None,
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.vote(topic, yes, now).map(|votes| Box::pin(votes) as VoteFuture),
        }
    }

    #[cfg_attr(not(feature = "remote"), expect(unused_variables, reason = "there is nobody else"))]
    fn announce(
        &self,
        announcement: Announcement,
        now: Time,
    ) -> Option<impl Future<Output = Result<Vec<AnnouncedNode>, StoreError>> + Send + 'static> {
        match self {
            Self::Memory(_) => None::<NodesFuture>,
            #[cfg(feature = "file")]
            Self::File(_) => None,
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.announce(announcement, now).map(|nodes| Box::pin(nodes) as NodesFuture),
        }
    }

    async fn inspect(&self, batch: &Batch, now: Time) -> Result<Outcomes, StoreError> {
        match self {
            Self::Memory(memory) => memory.inspect(batch, now).await,
            #[cfg(feature = "file")]
            Self::File(file) => file.inspect(batch, now).await,
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.inspect(batch, now).await,
        }
    }

    fn fallback_count(&self) -> u64 {
        match self {
            Self::Memory(memory) => memory.fallback_count(),
            #[cfg(feature = "file")]
            Self::File(file) => file.fallback_count(),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.fallback_count(),
        }
    }

    fn outage(&self) -> Option<&str> {
        match self {
            Self::Memory(memory) => memory.outage(),
            #[cfg(feature = "file")]
            Self::File(file) => file.outage(),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.outage(),
        }
    }

    fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Result<Option<Self>, StoreError> {
        Ok(match self {
            Self::Memory(memory) => memory.with_limits(limits, now)?.map(Self::Memory),
            #[cfg(feature = "file")]
            Self::File(file) => file.with_limits(limits, now)?.map(Self::File),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.with_limits(limits, now)?.map(Self::Fleet),
        })
    }

    fn maintain(&self, now: Time) -> Losses {
        match self {
            Self::Memory(memory) => memory.maintain(now),
            #[cfg(feature = "file")]
            Self::File(file) => file.maintain(now),
            #[cfg(feature = "remote")]
            Self::Fleet(fleet) => fleet.maintain(now),
        }
    }
}
