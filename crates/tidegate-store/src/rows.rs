//! Stores that keep rows: one for each key under a limit, its state as bytes that only this program reads.
//!
//! Batches that wait at the same time are executed together. The [executor](GroupExecutor) forms groups of them. A
//! [driver](GroupDriver) locks and loads all rows of a group at once. [`LoadedRows`] decides one batch after the other,
//! and all changes are written back at once.

mod executor;
pub(crate) mod loaded_rows;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod pool;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod sql;

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::{Key, Time};

#[cfg(feature = "mysql")]
pub(crate) use executor::MAX_GROUP_ROWS;
pub(crate) use executor::{BatchGroup, BatchResults, GroupDriver, GroupExecutor, QueuedBatch};
pub(crate) use loaded_rows::LoadedRows;

use crate::{StoreError, TimeSource};

/// Implements [`RemoteStore`](crate::RemoteStore) for a type whose only field is a [`GroupExecutor`].
macro_rules! impl_remote_store {
    ($store:ty) => {
        impl crate::RemoteStore for $store {
            fn limits(&self) -> &std::sync::Arc<tidegate_core::Limits> {
                &self.0.limits
            }

            fn apply(
                &self,
                batch: &tidegate_core::Batch,
                now: tidegate_core::Time,
            ) -> crate::RemoteFuture<tidegate_core::Outcomes> {
                self.0.apply(batch, now)
            }

            fn get_or_insert_seed(&self, proposal: [u8; 16]) -> crate::RemoteFuture<[u8; 16]> {
                let driver = self.0.driver();
                Box::pin(async move { driver.get_or_insert_seed(proposal).await })
            }

            fn announce(
                &self,
                announcement: crate::Announcement,
                now: tidegate_core::Time,
            ) -> crate::RemoteFuture<Vec<crate::AnnouncedNode>> {
                let driver = self.0.driver();
                Box::pin(async move { driver.announce(&announcement, now).await })
            }

            fn maintain(&self) -> crate::RemoteFuture<()> {
                let driver = self.0.driver();
                Box::pin(async move { driver.remove_expired().await })
            }

            fn with_limits(
                &self,
                limits: std::sync::Arc<tidegate_core::Limits>,
            ) -> Option<Box<dyn crate::RemoteStore>> {
                Some(Box::new(Self(self.0.with_limits(limits))))
            }
        }
    };
}
pub(crate) use impl_remote_store;

/// The maximum time for connecting, TLS and log-in included.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The maximum time of a group; then its connection is closed, which releases the rows of abandoned groups.
pub(crate) const GROUP_TIMEOUT: Duration = Duration::from_secs(2);
/// The version of the tables or collections that this program creates and reads.
pub(crate) const SCHEMA_VERSION: u32 = 1;
/// The number of expired rows that one step removes.
pub(crate) const MAX_CLEAN_ROWS: i64 = 1000;
/// The maximum number of steps of one clean-up.
pub(crate) const MAX_CLEAN_STEPS: usize = 10;
/// The maximum time of a clean-up. No caller waits for it, and a busy server needs longer for it than for a decision.
pub(crate) const CLEAN_TIMEOUT: Duration = Duration::from_secs(10);

/// The options of a store with rows.
#[derive(Clone)]
pub struct DatabaseOptions {
    /// The server and the database, such as `postgres://user:password@host/database`, with the driver's parameters
    /// (`sslmode`, `ssl-mode`, `tls`). A password in it is never shown.
    pub url: String,
    /// The beginning of the names of tables or collections: 1 to 32 of `a` to `z`, `0` to `9` and `_`, no digit first.
    /// Default `tidegate_`.
    pub prefix: String,
    /// The maximum number of connections, and so of groups of batches that are executed at once: 1 to 256. Default 8.
    pub connections: u32,
    /// The source of decisions' time. Default the server's clock.
    pub time_source: TimeSource,
}

impl DatabaseOptions {
    /// The largest value of `connections`.
    pub const MAX_CONNECTIONS: u32 = 256;

    /// The defaults for the server at this URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), prefix: "tidegate_".into(), connections: 8, time_source: TimeSource::Store }
    }

    /// Returns the number of connections if all options are in their ranges and the URL has one of these schemes.
    pub(crate) fn validate(&self, schemes: &[&str]) -> Result<usize, StoreError> {
        let invalid = |what: String| Err(StoreError::Failed(what));
        if !schemes.iter().any(|scheme| self.url.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://"))) {
            return invalid(format!("the store's URL doesn't begin with {}://", schemes.join(":// or ")));
        }
        let has_valid_chars = self.prefix.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
        let begins_with_digit = self.prefix.starts_with(|first: char| first.is_ascii_digit());
        if !has_valid_chars || !(1..=32).contains(&self.prefix.len()) || begins_with_digit {
            return invalid("a table prefix is 1 to 32 of a-z, 0-9 and _, and begins with no digit".into());
        }
        if !(1..=Self::MAX_CONNECTIONS).contains(&self.connections) {
            return invalid("a store keeps 1 to 256 connections".into());
        }
        Ok(self.connections as usize)
    }
}

impl fmt::Debug for DatabaseOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseOptions")
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("time_source", &self.time_source)
            .finish_non_exhaustive()
    }
}

/// The name of a row: its limit's tag, then its key. Rows are locked in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RowKey([u8; Self::LEN]);

impl RowKey {
    pub(crate) const LEN: usize = 24;

    pub(crate) fn new(tag: u64, key: Key) -> Self {
        let mut bytes = [0; Self::LEN];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip([tag, key.hi(), key.lo()]) {
            chunk.copy_from_slice(&word.to_be_bytes());
        }
        Self(bytes)
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The reason why a group could not be executed.
#[derive(Debug)]
pub(crate) enum GroupError {
    /// Another node was faster. Nothing was changed, and a retry may succeed.
    Conflict(String),
    /// The connection was lost before anything was committed. A new one may succeed.
    ConnectionLost(String),
    /// The server can't be reached, so other groups needn't try.
    Unreachable(String),
    /// The group failed, or its result is unknown.
    Failed(String),
}

impl GroupError {
    /// The same error at the end of a transaction or of a write that stands alone: it may have been executed.
    pub(crate) fn of_commit(self) -> Self {
        match self {
            Self::ConnectionLost(what) => Self::Failed(what),
            error => error,
        }
    }
}

impl From<GroupError> for StoreError {
    fn from(error: GroupError) -> Self {
        use GroupError::{Conflict, ConnectionLost, Failed, Unreachable};
        let (Conflict(what) | ConnectionLost(what) | Unreachable(what) | Failed(what)) = error;
        Self::Failed(what)
    }
}

/// The latest time that callers passed, if theirs is the time of decisions; `None` if it is the server's.
#[derive(Debug)]
pub(crate) struct DecisionClock(Option<AtomicU64>);

impl DecisionClock {
    pub(crate) fn new(source: TimeSource) -> Self {
        Self((source == TimeSource::Caller).then(AtomicU64::default))
    }

    /// Returns the time of a decision: the caller's or the server's.
    pub(crate) fn decision_time(&self, caller_time: Time, server_time: Time) -> Time {
        let Some(latest_caller_time) = &self.0 else { return server_time };
        latest_caller_time.fetch_max(caller_time.as_micros(), Ordering::Relaxed);
        caller_time
    }

    /// The time up to which rows have expired, in microseconds. `None` if the server's clock decides.
    pub(crate) fn expiry_cutoff_micros(&self) -> Option<i64> {
        let latest_caller_time = self.0.as_ref()?.load(Ordering::Relaxed);
        Some(i64::try_from(latest_caller_time).unwrap_or(i64::MAX))
    }
}

/// Bounds the time of work without a caller that bounds it.
pub(crate) async fn with_timeout<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, GroupError>>,
) -> Result<T, StoreError> {
    Ok(tokio::time::timeout(limit, work).await.map_err(|_| StoreError::Timeout(limit))??)
}

pub(crate) fn seed_from_bytes(stored: Vec<u8>) -> Result<[u8; 16], GroupError> {
    stored.try_into().map_err(|_| GroupError::Failed("the seed in it isn't 16 bytes long".into()))
}

/// Checks that the tables or collections have the version that this program knows.
pub(crate) fn check_schema(version: &[u8]) -> Result<(), GroupError> {
    match std::str::from_utf8(version).ok().and_then(|text| text.parse::<u32>().ok()) {
        Some(SCHEMA_VERSION) => Ok(()),
        Some(version) if version > SCHEMA_VERSION => Err(GroupError::Failed(format!(
            "what it keeps is of version {version}; this program knows those up to {SCHEMA_VERSION}"
        ))),
        _ => Err(GroupError::Failed("what it keeps is of no version that this program knows".into())),
    }
}
