//! Stores that keep rows: one for each key under a limit, its state as bytes that only this program reads.
//!
//! Callers that wait at the same time are carried out together: the [queue](Engine) forms groups of them, a
//! [driver](Driver) locks and loads the rows of a whole group at once, a [ledger](Ledger) decides one batch after the
//! other, and what changed is written back at once.

pub(crate) mod ledger;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod lines;
mod queue;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) mod sql;

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::{Key, Time};

pub(crate) use ledger::Ledger;
#[cfg(feature = "mysql")]
pub(crate) use queue::GROUP_ROWS;
pub(crate) use queue::{Call, Driver, Engine, Group};

use crate::{StoreError, TimeSource};

/// How long connecting may take, TLS and log-in included.
pub(crate) const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// How long a group may take before its connection is given up. Callers wait for less; this frees what they left.
pub(crate) const GROUP_WITHIN: Duration = Duration::from_secs(2);
/// The version of the tables or collections that this program makes and reads.
pub(crate) const SCHEMA: u32 = 1;
/// Expired rows that are removed in one step.
pub(crate) const CLEAN_ROWS: usize = 1000;
/// Steps of one call to `clean`.
pub(crate) const CLEAN_STEPS: usize = 10;
/// How long these may take: nobody waits for them, and a server that is busy needs longer for them than for a decision.
pub(crate) const CLEAN_WITHIN: Duration = Duration::from_secs(10);

/// Where a store with rows is, and how it is used.
#[derive(Clone)]
pub struct RowsOptions {
    /// The server and the database, such as `postgres://user:password@host/database`, and how to connect, in the words
    /// of the driver (`sslmode`, `ssl-mode`, `tls`). A password in it is never shown.
    pub url: String,
    /// What the names of our tables or collections begin with: 1 to 32 of `a` to `z`, `0` to `9` and `_`, no digit
    /// first. `tidegate_` unless said.
    pub prefix: String,
    /// The most connections, and so the most groups of callers that are carried out at once: 1 to 256. 8 unless said.
    pub connections: u32,
    /// Whose time is decided by.
    pub time: TimeSource,
}

impl RowsOptions {
    /// The most connections that can be asked for.
    pub const MAX_CONNECTIONS: u32 = 256;

    /// The defaults for the server at this URL.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), prefix: "tidegate_".into(), connections: 8, time: TimeSource::Store }
    }

    /// The most connections, if all options are in their ranges and the URL begins with one of these.
    pub(crate) fn checked(&self, schemes: &[&str]) -> Result<usize, StoreError> {
        let wrong = |what: &str| Err(StoreError::Failed(what.into()));
        if !schemes.iter().any(|scheme| self.url.strip_prefix(scheme).is_some_and(|rest| rest.starts_with("://"))) {
            return Err(StoreError::Failed(format!(
                "the store's URL doesn't begin with {}://",
                schemes.join(":// or ")
            )));
        }
        let letters = self.prefix.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_'));
        if !letters
            || !(1..=32).contains(&self.prefix.len())
            || self.prefix.starts_with(|first: char| first.is_ascii_digit())
        {
            return wrong("a table prefix is 1 to 32 of a-z, 0-9 and _, and begins with no digit");
        }
        match usize::try_from(self.connections) {
            Ok(connections) if (1..=Self::MAX_CONNECTIONS).contains(&self.connections) => Ok(connections),
            _ => wrong("a store keeps 1 to 256 connections"),
        }
    }
}

impl fmt::Debug for RowsOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowsOptions")
            .field("prefix", &self.prefix)
            .field("connections", &self.connections)
            .field("time", &self.time)
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
        for (place, word) in bytes.chunks_exact_mut(8).zip([tag, key.hi(), key.lo()]) {
            place.copy_from_slice(&word.to_be_bytes());
        }
        Self(bytes)
    }

    pub(crate) fn read(bytes: &[u8]) -> Option<Self> {
        bytes.try_into().ok().map(Self)
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Why a group could not be carried out.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Another node was quicker; nothing was changed, and it is worth another try.
    Conflict(String),
    /// The connection was lost before anything was changed for good; a new one may do.
    Broken(String),
    /// Nobody can be reached: what else is waiting needn't try.
    Unreachable(String),
    /// It failed, or nobody knows what came of it.
    Failed(String),
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Conflict(what) | Fault::Broken(what) | Fault::Unreachable(what) | Fault::Failed(what) => {
                Self::Failed(what)
            }
        }
    }
}

/// Whose time decisions are made by, and the latest that callers told.
#[derive(Debug)]
pub(crate) struct Times {
    source: TimeSource,
    latest: AtomicU64,
}

impl Times {
    pub(crate) fn new(source: TimeSource) -> Self {
        Self { source, latest: AtomicU64::new(0) }
    }

    /// The moment at which a call is decided that came with `told`, when the server's clock says `server`.
    pub(crate) fn decide(&self, told: Time, server: Time) -> Time {
        match self.source {
            TimeSource::Store => server,
            TimeSource::Caller => {
                self.latest.fetch_max(told.as_micros(), Ordering::Relaxed);
                told
            }
        }
    }

    /// The moment up to which rows have expired, in microseconds; `None` if the server's clock tells.
    pub(crate) fn expired(&self) -> Option<i64> {
        match self.source {
            TimeSource::Store => None,
            TimeSource::Caller => Some(i64::try_from(self.latest.load(Ordering::Relaxed)).unwrap_or(i64::MAX)),
        }
    }
}

/// Bounds what no caller need bound.
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = Result<T, Fault>>) -> Result<T, StoreError> {
    match tokio::time::timeout(limit, work).await {
        Ok(done) => done.map_err(StoreError::from),
        Err(_) => Err(StoreError::Timeout(limit)),
    }
}

/// Whether the tables or collections are of the version that this program knows.
pub(crate) fn check_schema(version: &[u8]) -> Result<(), Fault> {
    match std::str::from_utf8(version).ok().and_then(|text| text.parse::<u32>().ok()) {
        Some(SCHEMA) => Ok(()),
        Some(version) if version > SCHEMA => Err(Fault::Failed(format!(
            "what it keeps is of version {version}; this program knows those up to {SCHEMA}"
        ))),
        _ => Err(Fault::Failed("what it keeps is of no version that this program knows".into())),
    }
}
