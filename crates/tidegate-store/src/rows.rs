//! Stores that keep rows: one for each key under a limit, its state as bytes that only this program reads.
//!
//! Callers that wait at the same time are carried out together: the [queue](GroupExecutor) forms groups of them, a
//! [driver](GroupDriver) locks and loads the rows of a whole group at once, a [ledger](LoadedRows) decides one batch after the
//! other, and what changed is written back at once.

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
pub(crate) use executor::{BatchGroup, GroupDriver, GroupExecutor, QueuedBatch};
pub(crate) use loaded_rows::LoadedRows;

use crate::{StoreError, TimeSource};

/// How long connecting may take, TLS and log-in included.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a group may take before its connection is given up. Callers wait for less; this frees what they left.
pub(crate) const GROUP_TIMEOUT: Duration = Duration::from_secs(2);
/// The version of the tables or collections that this program makes and reads.
pub(crate) const SCHEMA_VERSION: u32 = 1;
/// Expired rows that are removed in one step.
pub(crate) const MAX_CLEAN_ROWS: usize = 1000;
/// Steps of one call to `clean`.
pub(crate) const MAX_CLEAN_STEPS: usize = 10;
/// How long these may take: nobody waits for them, and a server that is busy needs longer for them than for a decision.
pub(crate) const CLEAN_TIMEOUT: Duration = Duration::from_secs(10);

/// Where a store with rows is, and how it is used.
#[derive(Clone)]
pub struct DatabaseOptions {
    /// The server and the database, such as `postgres://user:password@host/database`, and how to connect, in the words
    /// of the driver (`sslmode`, `ssl-mode`, `tls`). A password in it is never shown.
    pub url: String,
    /// What the names of our tables or collections begin with: 1 to 32 of `a` to `z`, `0` to `9` and `_`, no digit
    /// first. `tidegate_` unless said.
    pub prefix: String,
    /// The most connections, and so the most groups of callers that are carried out at once: 1 to 256. 8 unless said.
    pub connections: u32,
    /// Whose time is decided by.
    pub time_source: TimeSource,
}

impl DatabaseOptions {
    /// The most connections that can be asked for.
    pub const MAX_CONNECTIONS: u32 = 256;

    /// The defaults for the server at this URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), prefix: "tidegate_".into(), connections: 8, time_source: TimeSource::Store }
    }

    /// The most connections, if all options are in their ranges and the URL begins with one of these.
    pub(crate) fn validate(&self, schemes: &[&str]) -> Result<usize, StoreError> {
        let invalid = |what: &str| Err(StoreError::Failed(what.into()));
        if !schemes.iter().any(|scheme| self.url.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://"))) {
            return Err(StoreError::Failed(format!(
                "the store's URL doesn't begin with {}://",
                schemes.join(":// or ")
            )));
        }
        let has_valid_chars = self.prefix.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
        if !has_valid_chars
            || !(1..=32).contains(&self.prefix.len())
            || self.prefix.starts_with(|first: char| first.is_ascii_digit())
        {
            return invalid("a table prefix is 1 to 32 of a-z, 0-9 and _, and begins with no digit");
        }
        match usize::try_from(self.connections) {
            Ok(connections) if (1..=Self::MAX_CONNECTIONS).contains(&self.connections) => Ok(connections),
            _ => invalid("a store keeps 1 to 256 connections"),
        }
    }
}

impl fmt::Debug for DatabaseOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowsOptions")
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("time", &self.time_source)
            .finish_non_exhaustive()
    }
}

/// A row's name: its limit's tag and its key, in the order in which rows are locked.
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

/// Why a group could not be carried out.
#[derive(Debug)]
pub(crate) enum GroupError {
    /// Another node was quicker; nothing was changed, and it is worth another try.
    Conflict(String),
    /// The connection was lost before anything was changed for good; a new one may do.
    ConnectionLost(String),
    /// Nobody can be reached: what else is waiting needn't try.
    Unreachable(String),
    /// It failed, or nobody knows what came of it.
    Failed(String),
}

impl From<GroupError> for StoreError {
    fn from(fault: GroupError) -> Self {
        match fault {
            GroupError::Conflict(what)
            | GroupError::ConnectionLost(what)
            | GroupError::Unreachable(what)
            | GroupError::Failed(what) => Self::Failed(what),
        }
    }
}

/// Whose time decisions are made by, and the latest that callers told.
#[derive(Debug)]
pub(crate) struct DecisionClock {
    time_source: TimeSource,
    latest_caller_time: AtomicU64,
}

impl DecisionClock {
    pub(crate) fn new(source: TimeSource) -> Self {
        Self { time_source: source, latest_caller_time: AtomicU64::new(0) }
    }

    /// The moment at which a call is decided that came with `told`, when the server's clock says `server`.
    pub(crate) fn decision_time(&self, caller_time: Time, server_time: Time) -> Time {
        match self.time_source {
            TimeSource::Store => server_time,
            TimeSource::Caller => {
                self.latest_caller_time.fetch_max(caller_time.as_micros(), Ordering::Relaxed);
                caller_time
            }
        }
    }

    /// The moment up to which rows have expired, in microseconds; `None` if the server's clock tells.
    pub(crate) fn expiry_cutoff_micros(&self) -> Option<i64> {
        match self.time_source {
            TimeSource::Store => None,
            TimeSource::Caller => {
                Some(i64::try_from(self.latest_caller_time.load(Ordering::Relaxed)).unwrap_or(i64::MAX))
            }
        }
    }
}

/// Bounds what no caller need bound.
pub(crate) async fn with_timeout<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, GroupError>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(limit, work).await {
        Ok(result) => result.map_err(StoreError::from),
        Err(_) => Err(StoreError::Timeout(limit)),
    }
}

/// Whether the tables or collections are of the version that this program knows.
pub(crate) fn check_schema(version: &[u8]) -> Result<(), GroupError> {
    match std::str::from_utf8(version).ok().and_then(|text| text.parse::<u32>().ok()) {
        Some(SCHEMA_VERSION) => Ok(()),
        Some(version) if version > SCHEMA_VERSION => Err(GroupError::Failed(format!(
            "what it keeps is of version {version}; this program knows those up to {SCHEMA_VERSION}"
        ))),
        _ => Err(GroupError::Failed("what it keeps is of no version that this program knows".into())),
    }
}
