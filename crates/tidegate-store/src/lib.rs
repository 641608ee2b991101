//! The stores of Tidegate's state: one trait, operations as data, and its backends.
//!
//! # Guarantees of every store
//! - A [`Batch`] is atomic: no other batch sees half of it, and when one of its limits refuses, none is charged.
//! - It is decided by the store's own time where the store has one, else by the `now` that comes with it.
//! - The outcomes are those of [`tidegate_core::batch::execute`], operation by operation.
//! - A state that has become idle ([`tidegate_core::KeyState::idle_at`]) is forgotten without a request.
//! - Keys are hashes. A store never holds the values that were hashed.
#![deny(unsafe_code)]

mod announcement;
mod any;
#[cfg(feature = "file")]
mod file;
#[cfg(feature = "files")]
pub mod files;
#[cfg(feature = "remote")]
mod fleet;
mod memory;
#[cfg(feature = "mongodb")]
mod mongodb;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "rows")]
mod rows;
pub mod spin_lock;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

pub use announcement::{AnnouncedNode, Announcement};
pub use any::AnyStore;
#[cfg(feature = "file")]
pub use file::{FileError, FileHealth, FileStore, FlushMode, Journal, OnWriteFailure};
#[cfg(feature = "remote")]
pub use fleet::{Fleet, FleetOptions, fleet_limits};
pub use memory::{Memory, MemoryStats};
#[cfg(feature = "mongodb")]
pub use mongodb::MongoDb;
#[cfg(feature = "mysql")]
pub use mysql::MySql;
#[cfg(feature = "postgres")]
pub use postgres::Postgres;
#[cfg(feature = "redis")]
pub use redis::{Redis, RedisOptions, RedisUrlError};
#[cfg(feature = "remote")]
pub use remote::{DirectStore, KeyReset, RemoteFuture, RemoteStore, TimeSource};
#[cfg(feature = "rows")]
pub use rows::DatabaseOptions;
use tidegate_core::{Admission, Batch, Key, Limits, Op, Outcomes, Time};

/// A store of state.
///
/// A store that wraps another one passes every method on, also those with a default: without [`Store::maintain`], idle
/// entries stay; without [`Store::vote`], a node of a fleet decides by itself alone; without [`Store::known_block`],
/// calls of blocked clients may cost more; without [`Store::announce`], other nodes don't see it; without
/// [`Store::inspect`] and [`Store::fallback_count`], outages aren't seen.
pub trait Store: Send + Sync + 'static {
    /// The future of an answer that isn't immediate.
    type Future: Future<Output = Result<Outcomes, StoreError>> + Send;

    /// The limits that decide batches.
    fn limits(&self) -> &Arc<Limits>;

    /// Applies a batch at `now`, atomically.
    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future>;

    /// Applies a batch without an answer, such as the release of a permit when a caller is cancelled.
    fn submit(&self, batch: &Batch, now: Time);

    /// The latest end of the blocks that refuse a batch of peeks, as far as this process knows them without a question
    /// to another one. `None` if none is known, which is the default: every block is then found when a batch is
    /// applied.
    fn known_block(&self, batch: &Batch, now: Time) -> Option<Time> {
        let _ = (batch, now);
        None
    }

    /// Asks the store itself for the outcomes of a batch of peeks: no answer is one that this node remembers or makes
    /// without the store. For people who look at the state. Has no influence on decisions.
    ///
    /// # Errors
    /// The future: the store failed or can't be reached.
    fn inspect(&self, batch: &Batch, now: Time) -> impl Future<Output = Result<Outcomes, StoreError>> + Send {
        let response = self.apply(batch, now);
        async {
            match response {
                StoreResponse::Ready(outcomes) => Ok(outcomes),
                StoreResponse::Pending(later) => later.await,
            }
        }
    }

    /// The number of decisions that were made without the store, because it didn't answer.
    fn fallback_count(&self) -> u64 {
        0
    }

    /// Sends this node's vote on a topic, and returns the votes of the nodes that share the store. `None` if the store
    /// belongs to this process alone. The future returns `None` if the store fails. A vote counts for ten seconds.
    fn vote(&self, topic: Key, yes: bool, now: Time) -> Option<impl Future<Output = Option<Votes>> + Send + 'static> {
        let _ = (topic, yes, now);
        None::<std::future::Ready<Option<Votes>>>
    }

    /// Sends this node's announcement, and returns those of all nodes that share the store, at most
    /// [`AnnouncedNode::MAX_LISTED`]. `None` if the store belongs to this process alone, which is the default. Has no
    /// influence on decisions.
    ///
    /// # Errors
    /// The future: the store failed, or doesn't accept the announcement.
    fn announce(
        &self,
        announcement: Announcement,
        now: Time,
    ) -> Option<impl Future<Output = Result<Vec<AnnouncedNode>, StoreError>> + Send + 'static> {
        let _ = (announcement, now);
        None::<std::future::Ready<Result<Vec<AnnouncedNode>, StoreError>>>
    }

    /// The name of the store while it is away and decisions go on without it: its kind and its hosts, no secrets.
    fn outage(&self) -> Option<&str> {
        None
    }

    /// Returns a handle to the same state that decides by these limits. The earlier handle keeps working, for calls that
    /// began with it, and each sees what the other decides. `None` if the store can't have other limits, which is the
    /// default.
    ///
    /// State is found by [`LimitId`](tidegate_core::LimitId), so ids must be stable: at every id of the earlier limits,
    /// the new ones have the limit of the same name, even if no call uses it any longer. Further limits follow. Ids are
    /// never used again, also not those of a handle that was dropped. Everything else about a limit may change. What was
    /// used under it counts under the new terms. A live block lasts at most as long as one of the new penalty. If its
    /// kind changes, the usage starts anew, and a store that finds state by [tags](Limits::tag) forgets the penalty too.
    ///
    /// # Errors
    /// The store can't have these limits, or can't read the state of new ones. The earlier handle goes on.
    fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Result<Option<Self>, StoreError>
    where
        Self: Sized,
    {
        let _ = (limits, now);
        Ok(None)
    }

    /// Forgets a part of the idle entries, about once a second. Returns the losses since the last call.
    fn maintain(&self, _now: Time) -> Losses {
        Losses::default()
    }
}

/// The result of a vote among nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Votes {
    /// The number of nodes that vote yes, this one included.
    pub yes: usize,
    /// The number of all nodes.
    pub nodes: usize,
}

impl Votes {
    /// True if more than half of the nodes vote yes.
    pub fn has_majority(&self) -> bool {
        self.yes * 2 > self.nodes
    }
}

/// Losses of a full store: entries that it dropped although they still counted, and keys and blocks without room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Dropped entries that had used part of their limit.
    pub evicted_used: u64,
    /// Dropped entries that had used all of their limit.
    pub evicted_exhausted: u64,
    /// Blocks that weren't imposed, because live blocks filled all the room that blocks may take.
    pub refused_blocks: u64,
    /// Answers by which a new key shares its parent's limit.
    pub forced_shares: u64,
}

impl Losses {
    /// The names of the kinds of losses, in the order of [`counts`](Self::counts).
    pub const KINDS: [&str; 4] = ["used", "exhausted", "unblocked", "shared"];

    /// The number of losses of each kind.
    pub fn counts(&self) -> [u64; Self::KINDS.len()] {
        [self.evicted_used, self.evicted_exhausted, self.refused_blocks, self.forced_shares]
    }

    /// Returns the number of dropped entries.
    pub fn evicted(&self) -> u64 {
        self.evicted_used + self.evicted_exhausted
    }

    /// True if anything was lost.
    pub fn has_any(&self) -> bool {
        *self != Self::default()
    }

    /// Returns the sum of these losses and others.
    #[must_use]
    pub fn plus(&self, other: Self) -> Self {
        self.combine(&other, |one, other| one + other)
    }

    /// Returns the losses since `before`, an earlier count of the same store.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        self.combine(before, |now, before| now - before)
    }

    fn combine(&self, other: &Self, count: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            evicted_used: count(self.evicted_used, other.evicted_used),
            evicted_exhausted: count(self.evicted_exhausted, other.evicted_exhausted),
            refused_blocks: count(self.refused_blocks, other.refused_blocks),
            forced_shares: count(self.forced_shares, other.forced_shares),
        }
    }
}

/// The latest end of the blocks that refuse a batch with these outcomes.
fn latest_block(batch: &Batch, limits: &Limits, outcomes: &Outcomes) -> Option<Time> {
    let is_enforced = |op: &Op| limits.get(op.limit).is_some_and(|limit| !limit.is_shadow());
    let blocked = batch.ops().iter().zip(outcomes.list());
    let blocked = blocked.filter(|(op, outcome)| is_enforced(op) && outcome.admission == Admission::Blocked);
    blocked.map(|(_, outcome)| outcome.block_until).max()
}

/// A store that always answers immediately.
pub trait ImmediateStore: Store<Future = Never> {
    /// Applies a batch at `now`, atomically and without waiting.
    #[inline]
    fn apply_now(&self, batch: &Batch, now: Time) -> Outcomes {
        let StoreResponse::Ready(outcomes) = self.apply(batch, now);
        outcomes
    }
}

impl<S: Store<Future = Never>> ImmediateStore for S {}

/// The future of a store that answers immediately. It has no value.
#[derive(Clone, Copy, Debug)]
pub enum Never {}

impl Future for Never {
    type Output = Result<Outcomes, StoreError>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        match *self {}
    }
}

/// A store's answer: ready, or a future to wait for.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "boxing the common answer would allocate on every decision")]
pub enum StoreResponse<F> {
    /// The outcomes.
    Ready(Outcomes),
    /// The future of the outcomes.
    Pending(F),
}

impl<F> StoreResponse<F> {
    /// Returns an answer whose outcomes are written to their place: they are large, and would be copied into it.
    #[inline]
    fn write(write: impl FnOnce(&mut Outcomes)) -> Self {
        let mut response = Self::Ready(Outcomes::new(Time::ZERO, []));
        if let Self::Ready(outcomes) = &mut response {
            write(outcomes);
        }
        response
    }
}

/// An error of a store. A refusal is never an error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The store did not answer in time.
    #[error("the store did not answer within {0:?}")]
    Timeout(std::time::Duration),
    /// The store can't be reached, and the limit admits nothing without it.
    #[error("the store can't be reached")]
    Unavailable,
    /// The store can't be written, and accepts no change until it can.
    #[error("the store can't be written, and nothing is admitted until it can")]
    Unwritable,
    /// The store can't be reached or answered with an error.
    #[error("the store failed: {0}")]
    Failed(String),
}
