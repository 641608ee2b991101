//! The execution of a group in SQL: one transaction, with each server's own statements.

use std::future::Future;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::{Connection, Error};
use tidegate_core::{Key, Limits, Time};

use super::loaded_rows::RowChange;
use super::pool::{ConnectionPool, PooledConnection};
use super::{
    BatchGroup, BatchResults, CLEAN_TIMEOUT, DatabaseOptions, DecisionClock, GROUP_TIMEOUT, GroupDriver, GroupError,
    GroupExecutor, LoadedRows, MAX_CLEAN_ROWS, MAX_CLEAN_STEPS, RowKey, check_schema, seed_from_bytes, with_timeout,
};
use crate::announcement::stored::{self, StoredNodes};
use crate::{AnnouncedNode, Announcement, StoreError};

/// The bytes of states after which a statement is full. Servers accept 16 MiB or more; a state has up to ⅓ MiB.
const MAX_STATEMENT_BYTES: usize = 1 << 20;
/// The beginning of the names of the rows with nodes' announcements, where other rows have their limit's tag. A clean-up
/// removes them when they have expired, also one by a program that doesn't know them.
const ANNOUNCEMENT_TAG: u64 = 0x7469_6465_6e6f_6465;

/// The future of a statement's result.
pub(crate) trait SqlFuture<T>: Future<Output = Result<T, Error>> + Send {}

impl<T, F: Future<Output = Result<T, Error>> + Send> SqlFuture<T> for F {}

/// The statements of one kind of server.
pub(crate) trait SqlDialect: Send + Sync + 'static {
    type Connection: Connection;

    /// The statement that begins a transaction in which each statement sees what was committed before it.
    const BEGIN: &str;

    /// Runs a statement without parameters.
    fn run_statement(&self, connection: &mut Self::Connection, statement: &'static str) -> impl SqlFuture<()>;

    fn init_connection(&self, _: &mut Self::Connection) -> impl SqlFuture<()> {
        std::future::ready(Ok(()))
    }

    /// Creates the tables if they don't exist, and returns their version.
    fn ensure_schema(&self, connection: &mut Self::Connection) -> impl SqlFuture<Vec<u8>>;

    /// Locks rows in the order given, which is key order. Inserts missing rows, without bytes.
    fn lock_rows(&self, connection: &mut Self::Connection, keys: &[RowKey]) -> impl SqlFuture<()>;

    /// Reads rows. Returns at least one, even if none is found.
    fn read_rows(&self, connection: &mut Self::Connection, keys: &[RowKey]) -> impl SqlFuture<Vec<ReadRow>>;

    /// Reads at most `limit` rows from `first` to `last`, in key order, and at most `limit_bytes` of each state.
    fn read_range(
        &self,
        connection: &mut Self::Connection,
        first: &RowKey,
        last: &RowKey,
        limit: usize,
        limit_bytes: usize,
    ) -> impl SqlFuture<Vec<(Vec<u8>, Vec<u8>)>>;

    /// Writes rows that are locked, or that no other node writes.
    fn write_rows(&self, connection: &mut Self::Connection, rows: &[RowWrite]) -> impl SqlFuture<()>;

    fn remove_rows(&self, connection: &mut Self::Connection, keys: &[RowKey]) -> impl SqlFuture<()>;

    /// Removes up to [`MAX_CLEAN_ROWS`] rows expired by `cutoff`, or else by the server's clock. Returns their number.
    fn remove_expired(&self, connection: &mut Self::Connection, cutoff: Option<i64>) -> impl SqlFuture<u64>;

    /// Returns the stored seed. If there is none, stores this one.
    fn get_or_insert_seed(&self, connection: &mut Self::Connection, proposal: &[u8]) -> impl SqlFuture<Vec<u8>>;

    /// The kind of an error that the server reports.
    fn error_kind(&self, error: &dyn DatabaseError) -> fn(String) -> GroupError;
}

/// The server's time in microseconds, read when the statement begins or later; the key and the bytes of a found row.
pub(crate) type ReadRow = (i64, Option<Vec<u8>>, Option<Vec<u8>>);

/// A row, its bytes, and its expiry in microseconds.
pub(crate) type RowWrite = (RowKey, Vec<u8>, i64);

pub(crate) struct SqlDriver<D: SqlDialect> {
    dialect: D,
    pool: ConnectionPool<D::Connection>,
    clock: DecisionClock,
}

impl<D: SqlDialect> SqlDriver<D> {
    /// An executor that connects at the first request.
    pub(crate) fn new_executor(
        dialect: D,
        connect_options: <D::Connection as Connection>::Options,
        limits: Arc<Limits>,
        options: &DatabaseOptions,
        connections: usize,
    ) -> GroupExecutor<Self> {
        let pool = ConnectionPool::new(connect_options, connections);
        let driver = Self { dialect, pool, clock: DecisionClock::new(options.time_source) };
        GroupExecutor::new(driver, limits, connections)
    }

    async fn connection(&self) -> Result<PooledConnection<'_, D::Connection>, GroupError> {
        let (mut connection, is_new) = self.pool.acquire().await?;
        if is_new {
            let ready = self.dialect.init_connection(connection.get()).await;
            ready.map_err(|error| GroupError::Unreachable(error_message(&error)))?;
            // The server may have lost its tables.
            let version = self.dialect.ensure_schema(connection.get()).await;
            check_schema(&version.map_err(|error| self.classify_error(&error))?)?;
        }
        Ok(connection)
    }

    /// Classifies an error of a statement before the commit.
    fn classify_error(&self, error: &Error) -> GroupError {
        let kind = match error {
            Error::Database(error) => self.dialect.error_kind(&**error),
            Error::Io(_) => GroupError::ConnectionLost,
            _ => GroupError::Failed,
        };
        kind(error_message(error))
    }

    /// Reads the rows of a group, and decides its batches.
    async fn read_and_execute<'a>(
        &self,
        connection: &mut D::Connection,
        limits: &'a Limits,
        group: &'a BatchGroup,
    ) -> Result<(BatchResults, LoadedRows<'a>), Error> {
        let rows = self.dialect.read_rows(connection, &group.keys).await?;
        let server_time = server_time(&rows);
        let stored = rows.into_iter().filter_map(|(_, key, state)| Some((RowKey::from_bytes(&key?)?, state?)));
        Ok(LoadedRows::execute(limits, group, stored, &self.clock, server_time))
    }

    async fn execute_in_transaction(
        &self,
        connection: &mut D::Connection,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let classify = |error| self.classify_error(&error);
        self.dialect.run_statement(connection, D::BEGIN).await.map_err(classify)?;
        let executed = self.execute_and_write(connection, limits, group).await.map_err(classify);
        if let Err(GroupError::Conflict(_)) = executed {
            self.dialect.run_statement(connection, "ROLLBACK").await.map_err(classify)?;
        }
        let (results, is_changed) = executed?;
        // Without a change, a commit would wait for the disk only to release locks.
        let end = if is_changed { "COMMIT" } else { "ROLLBACK" };
        self.dialect.run_statement(connection, end).await.map_err(|error| self.classify_error(&error).of_commit())?;
        Ok(results)
    }

    /// The steps between begin and end of a transaction. Returns the results, and true if anything changed.
    async fn execute_and_write(
        &self,
        connection: &mut D::Connection,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<(BatchResults, bool), Error> {
        self.dialect.lock_rows(connection, &group.keys).await?;
        let (results, rows) = self.read_and_execute(connection, limits, group).await?;
        let changes = rows.changes();
        if !changes.iter().any(RowChange::is_change) {
            return Ok((results, false));
        }
        let (mut writes, mut removes) = (Vec::new(), Vec::new());
        for (key, change) in group.keys.iter().zip(changes) {
            match change {
                RowChange::Write(bytes, expires_at) => writes.push((*key, bytes, expires_at)),
                // A row that was inserted only to be locked must not stay.
                RowChange::Remove | RowChange::StayAbsent => removes.push(*key),
                RowChange::Keep => {}
            }
        }
        for chunk in statement_chunks(&writes) {
            self.dialect.write_rows(connection, chunk).await?;
        }
        if !removes.is_empty() {
            self.dialect.remove_rows(connection, &removes).await?;
        }
        Ok((results, true))
    }

    /// Returns the stored seed. If there is none, stores this one.
    pub(crate) async fn get_or_insert_seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], StoreError> {
        let seed = async {
            let mut connection = self.connection().await?;
            let stored = self.dialect.get_or_insert_seed(connection.get(), &proposal).await;
            seed_from_bytes(connection.release_after(stored.map_err(|error| self.classify_error(&error)))?)
        };
        with_timeout(GROUP_TIMEOUT, seed).await
    }

    /// Keeps a node's announcement as a row, and returns those of all nodes.
    pub(crate) async fn announce(
        &self,
        announcement: &Announcement,
        now: Time,
    ) -> Result<Vec<AnnouncedNode>, StoreError> {
        let announce = async {
            let mut connection = self.connection().await?;
            let nodes = self.write_and_read_announcements(connection.get(), announcement, now).await;
            connection.release_after(nodes.map_err(|error| self.classify_error(&error)))
        };
        with_timeout(GROUP_TIMEOUT, announce).await
    }

    async fn write_and_read_announcements(
        &self,
        connection: &mut D::Connection,
        announcement: &Announcement,
        now: Time,
    ) -> Result<Vec<AnnouncedNode>, Error> {
        let key = |node_id| RowKey::new(ANNOUNCEMENT_TAG, Key::new(0, node_id));
        let now = self.clock.decision_time(now, server_time(&self.dialect.read_rows(connection, &[]).await?));
        let expires_at = i64::try_from((now + announcement.kept_for()).as_micros()).unwrap_or(i64::MAX);
        let row = (key(announcement.node_id()), stored::encode(announcement, now), expires_at);
        self.dialect.write_rows(connection, &[row]).await?;
        let (first, last) = (key(0), key(u64::MAX));
        // With one byte more, a state that is too long is known from one that isn't.
        let (rows, bytes) = (stored::MAX_READ, stored::MAX_BYTES + 1);
        let found = self.dialect.read_range(connection, &first, &last, rows, bytes).await?;
        let found = found.into_iter().filter_map(|(name, bytes)| Some((RowKey::from_bytes(&name)?, bytes)));
        let nodes = StoredNodes::read(found, key, now);
        // Rows of other programs may never expire, and those that are read leave no room for others.
        if !nodes.removable.is_empty() {
            self.dialect.remove_rows(connection, &nodes.removable).await?;
        }
        Ok(nodes.listed)
    }

    /// Removes a bounded number of expired rows.
    pub(crate) async fn remove_expired(&self) -> Result<(), StoreError> {
        let clean = async {
            let cutoff_micros = self.clock.expiry_cutoff_micros();
            for _ in 0..MAX_CLEAN_STEPS {
                let mut connection = self.connection().await?;
                let removed = self.dialect.remove_expired(connection.get(), cutoff_micros).await;
                let removed = connection.release_after(removed.map_err(|error| self.classify_error(&error)))?;
                if removed < MAX_CLEAN_ROWS as u64 {
                    break;
                }
            }
            Ok(())
        };
        with_timeout(CLEAN_TIMEOUT, clean).await
    }
}

/// The server's time, which comes with each row.
fn server_time(rows: &[ReadRow]) -> Time {
    let micros = rows.last().map_or(0, |(micros, ..)| *micros);
    Time::from_micros(u64::try_from(micros).unwrap_or(0))
}

/// Splits rows into parts for one statement each.
fn statement_chunks(rows: &[RowWrite]) -> impl Iterator<Item = &[RowWrite]> {
    let mut size = 0;
    rows.chunk_by(move |(_, state, _), _| {
        size += state.len();
        let continues = size < MAX_STATEMENT_BYTES;
        if !continues {
            size = 0;
        }
        continues
    })
}

impl<D: SqlDialect> GroupDriver for SqlDriver<D> {
    const REQUIRES_SAME_ROWS: bool = false;

    async fn execute(&self, limits: &Limits, group: &BatchGroup) -> Result<BatchResults, GroupError> {
        let mut connection = self.connection().await?;
        let result = match group.is_read_only {
            true => {
                let executed = self.read_and_execute(connection.get(), limits, group).await;
                executed.map(|(results, _)| results).map_err(|error| self.classify_error(&error))
            }
            false => self.execute_in_transaction(connection.get(), limits, group).await,
        };
        connection.release_after(result)
    }
}

/// The text of an error, without the statement's parameters.
pub(crate) fn error_message(error: &Error) -> String {
    match error {
        Error::Database(error) => match error.code() {
            Some(code) => format!("{} ({code})", error.message()),
            None => error.message().to_owned(),
        },
        // Its text may quote the URL.
        Error::Configuration(_) => "the URL can't be used".into(),
        error => error.to_string(),
    }
}
