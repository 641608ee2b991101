//! Where Tidegate's state lives: one trait, operations as data, and its backends.
//!
//! # What every store promises
//! - A [`Batch`] is atomic: no other batch sees half of it, and when one of its limits refuses, none is charged.
//! - It is decided by the store's own time where the store has one, else by the `now` that comes with it.
//! - The answers are those of [`tidegate_core::batch::execute`], operation by operation.
//! - A state that has become idle ([`tidegate_core::KeyState::idle_at`]) is forgotten without being asked for.
//! - Keys are hashes. A store never holds what they were made of.
#![deny(unsafe_code)]

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
use tidegate_core::{Batch, Key, Limits, Outcomes, Time};

/// Where state lives.
pub trait Store: Send + Sync + 'static {
    /// What answers later, where the store has to be waited for.
    type Future: Future<Output = Result<Outcomes, StoreError>> + Send;

    /// The limits that batches are judged by.
    fn limits(&self) -> &Arc<Limits>;

    /// Carries out a batch at `now`, atomically.
    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future>;

    /// Carries out a batch whose answer nobody waits for, such as giving back a permit when a caller goes away.
    fn submit(&self, batch: &Batch, now: Time);

    /// Says what this node thinks of a topic, and hears how many of the nodes that share the store think so. `None` where
    /// the store is this process' own. What a node said counts for ten seconds.
    fn vote(&self, topic: Key, yes: bool, now: Time) -> Option<impl Future<Output = Option<Votes>> + Send + 'static> {
        let _ = (topic, yes, now);
        None::<std::future::Ready<Option<Votes>>>
    }

    /// Housekeeping, to be called about once a second: forgets a share of what is idle, and says what still counted
    /// but had to go since the last call.
    fn maintain(&self, _now: Time) -> Losses {
        Losses::default()
    }
}

/// How many nodes say yes, of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Votes {
    /// Nodes that say yes, this one included.
    pub yes: usize,
    /// Nodes in all.
    pub nodes: usize,
}

impl Votes {
    /// Whether more than half of the nodes say yes.
    pub fn has_majority(&self) -> bool {
        self.yes * 2 > self.nodes
    }
}

/// Losses of a full store: what it had to let go although it still counted, and what it couldn't take in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Entries that had used part of their limit.
    pub evicted_used: u64,
    /// Entries whose limit was full.
    pub evicted_exhausted: u64,
    /// Blocks that weren't imposed, because those in force filled all that blocks may fill.
    pub refused_blocks: u64,
    /// Answers that told a new key to share its parent's limit.
    pub forced_shares: u64,
}

impl Losses {
    /// Entries that went.
    pub fn evicted(&self) -> u64 {
        self.evicted_used + self.evicted_exhausted
    }

    /// Whether anything was lost.
    pub fn has_any(&self) -> bool {
        *self != Self::default()
    }

    /// These losses and others.
    #[must_use]
    pub fn plus(&self, other: Self) -> Self {
        Self {
            evicted_used: self.evicted_used + other.evicted_used,
            evicted_exhausted: self.evicted_exhausted + other.evicted_exhausted,
            refused_blocks: self.refused_blocks + other.refused_blocks,
            forced_shares: self.forced_shares + other.forced_shares,
        }
    }

    /// What was lost since `before`, an earlier count of the same store.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            evicted_used: self.evicted_used - before.evicted_used,
            evicted_exhausted: self.evicted_exhausted - before.evicted_exhausted,
            refused_blocks: self.refused_blocks - before.refused_blocks,
            forced_shares: self.forced_shares - before.forced_shares,
        }
    }
}

/// A store that answers in place, always.
pub trait ImmediateStore: Store<Future = Never> {
    /// Carries out a batch at `now`, atomically and in place.
    #[inline]
    fn apply_now(&self, batch: &Batch, now: Time) -> Outcomes {
        let StoreResponse::Ready(outcomes) = self.apply(batch, now);
        outcomes
    }
}

impl<S: Store<Future = Never>> ImmediateStore for S {}

/// The future of a store that answers in place. It has no value.
#[derive(Clone, Copy, Debug)]
pub enum Never {}

impl Future for Never {
    type Output = Result<Outcomes, StoreError>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        match *self {}
    }
}

/// A store's answer: at hand, or to be waited for.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "boxing the common answer would allocate on every decision")]
pub enum StoreResponse<F> {
    /// At hand.
    Ready(Outcomes),
    /// To be waited for.
    Pending(F),
}

/// What broke in a store. A refusal is never an error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StoreError {
    /// The store did not answer in time.
    #[error("the store did not answer within {0:?}")]
    Timeout(std::time::Duration),
    /// The store can't be reached, and the limit lets nothing through without it.
    #[error("the store can't be reached")]
    Unavailable,
    /// The store can't be written, and lets nothing change until it can.
    #[error("the store can't be written, and nothing is admitted until it can")]
    Unwritable,
    /// The store can't be reached or answered with an error.
    #[error("the store failed: {0}")]
    Failed(String),
}
