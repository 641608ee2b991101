//! The execution of a group in SQL: one transaction, with each server's own statements.

use std::future::Future;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::{AssertSqlSafe, Connection, Error};
use tidegate_core::{Limits, Time};

use super::loaded_rows::RowChange;
use super::pool::{ConnectionPool, PooledConnection};
use super::{
    BatchGroup, BatchResults, CLEAN_TIMEOUT, DatabaseOptions, DecisionClock, GROUP_TIMEOUT, GroupDriver, GroupError,
    GroupExecutor, LoadedRows, MAX_CLEAN_ROWS, MAX_CLEAN_STEPS, RowKey, check_schema, with_timeout,
};
use crate::StoreError;

/// The bytes of states after which a statement is full. A server accepts 16 MiB or more by default, and one state has
/// up to a third of a mebibyte.
const MAX_STATEMENT_BYTES: usize = 1 << 20;

/// A statement whose only variable part is a validated prefix.
pub(crate) fn trusted_sql(statement: &Arc<str>) -> AssertSqlSafe<Arc<str>> {
    AssertSqlSafe(Arc::clone(statement))
}

/// The statements of one kind of server.
pub(crate) trait SqlDialect: Send + Sync + 'static {
    type Connection: Connection;

    /// The statement that begins a transaction in which each statement sees what was committed before it.
    const BEGIN: &str;

    /// Runs a statement without parameters.
    fn run_statement(
        &self,
        connection: &mut Self::Connection,
        statement: &'static str,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Prepares a new connection.
    fn init_connection(&self, connection: &mut Self::Connection) -> impl Future<Output = Result<(), Error>> + Send;

    /// Creates the tables if they don't exist, and returns their version.
    fn ensure_schema(&self, connection: &mut Self::Connection) -> impl Future<Output = Result<Vec<u8>, Error>> + Send;

    /// Locks rows in the order given, which is key order. Inserts missing rows, without bytes.
    fn lock_rows(
        &self,
        connection: &mut Self::Connection,
        keys: &[RowKey],
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Returns the server's time in microseconds since the epoch, read when the statement begins or later, and those of
    /// the rows that exist.
    fn read_rows(
        &self,
        connection: &mut Self::Connection,
        keys: &[RowKey],
    ) -> impl Future<Output = Result<ReadRows, Error>> + Send;

    /// Writes rows that are locked.
    fn write_rows(
        &self,
        connection: &mut Self::Connection,
        rows: &[RowWrite],
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Removes rows.
    fn remove_rows(
        &self,
        connection: &mut Self::Connection,
        keys: &[RowKey],
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Removes up to `max_rows` rows that have expired by `cutoff_micros`, or by the server's clock if it is `None`.
    /// Returns their number.
    fn remove_expired(
        &self,
        connection: &mut Self::Connection,
        cutoff_micros: Option<i64>,
        max_rows: usize,
    ) -> impl Future<Output = Result<u64, Error>> + Send;

    /// Returns the stored seed. If there is none, stores this one.
    fn get_or_insert_seed(
        &self,
        connection: &mut Self::Connection,
        proposal: &[u8],
    ) -> impl Future<Output = Result<Vec<u8>, Error>> + Send;

    /// True if the error is a conflict with another transaction.
    fn is_conflict(&self, error: &dyn DatabaseError) -> bool;

    /// True if the error says that the server is closing the connection.
    fn is_connection_closing(&self, error: &dyn DatabaseError) -> bool;
}

/// The server's time in microseconds, and rows with their bytes.
pub(crate) type ReadRows = (i64, Vec<(RowKey, Vec<u8>)>);

/// A row, its bytes, and its expiry in microseconds.
pub(crate) type RowWrite = (RowKey, Vec<u8>, i64);

/// The driver of a store in SQL.
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
        let sql = Self {
            dialect,
            pool: ConnectionPool::new(connect_options, connections),
            clock: DecisionClock::new(options.time_source),
        };
        GroupExecutor::new(sql, limits, connections)
    }

    async fn connection(&self) -> Result<PooledConnection<'_, D::Connection>, GroupError> {
        let (mut connection, is_new) = self.pool.acquire().await?;
        if is_new {
            self.dialect
                .init_connection(&mut connection)
                .await
                .map_err(|error| GroupError::Unreachable(error_message(&error)))?;
            // The server may have lost its tables.
            let version =
                self.dialect.ensure_schema(&mut connection).await.map_err(|error| self.classify_error(&error))?;
            check_schema(&version)?;
        }
        Ok(connection)
    }

    /// Classifies an error of a statement before the commit.
    fn classify_error(&self, error: &Error) -> GroupError {
        match error {
            Error::Database(database) if self.dialect.is_conflict(&**database) => {
                GroupError::Conflict(error_message(error))
            }
            Error::Database(database) if self.dialect.is_connection_closing(&**database) => {
                GroupError::ConnectionLost(error_message(error))
            }
            Error::Io(_) => GroupError::ConnectionLost(error_message(error)),
            _ => GroupError::Failed(error_message(error)),
        }
    }

    /// Classifies an error of a commit. Unless the server itself refused it, it may have been executed.
    fn classify_commit_error(&self, error: &Error) -> GroupError {
        match self.classify_error(error) {
            GroupError::ConnectionLost(what) => GroupError::Failed(what),
            fault => fault,
        }
    }

    async fn execute_read_only(
        &self,
        connection: &mut D::Connection,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        let keys: Vec<RowKey> = group.keys().iter().map(|(key, _)| *key).collect();
        let (server_micros, found) =
            self.dialect.read_rows(connection, &keys).await.map_err(|error| self.classify_error(&error))?;
        Ok(self.execute_group(&mut LoadedRows::new(limits, group, found), group, server_micros))
    }

    fn execute_group(&self, ledger: &mut LoadedRows<'_>, group: &BatchGroup, server_micros: i64) -> BatchResults {
        let server_time = Time::from_micros(u64::try_from(server_micros).unwrap_or(0));
        ledger.execute_all(group, |queued| self.clock.decision_time(queued.now(), server_time))
    }

    async fn execute_in_transaction(
        &self,
        connection: &mut D::Connection,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<BatchResults, GroupError> {
        self.dialect.run_statement(connection, D::BEGIN).await.map_err(|error| self.classify_error(&error))?;
        let done = self.execute_and_write(connection, limits, group).await;
        let (answers, is_changed) = match done {
            Ok(done) => done,
            Err(fault) => {
                if matches!(fault, GroupError::Conflict(_)) {
                    self.dialect
                        .run_statement(connection, "ROLLBACK")
                        .await
                        .map_err(|error| self.classify_error(&error))?;
                }
                return Err(fault);
            }
        };
        // Without a change, a commit would wait for the disk only to release locks.
        let end = if is_changed { "COMMIT" } else { "ROLLBACK" };
        self.dialect.run_statement(connection, end).await.map_err(|error| self.classify_commit_error(&error))?;
        Ok(answers)
    }

    /// The steps between begin and end of a transaction. Returns the results, and true if anything changed.
    async fn execute_and_write(
        &self,
        connection: &mut D::Connection,
        limits: &Limits,
        group: &BatchGroup,
    ) -> Result<(BatchResults, bool), GroupError> {
        let keys: Vec<RowKey> = group.keys().iter().map(|(key, _)| *key).collect();
        self.dialect.lock_rows(connection, &keys).await.map_err(|error| self.classify_error(&error))?;
        let (clock, found) =
            self.dialect.read_rows(connection, &keys).await.map_err(|error| self.classify_error(&error))?;
        let mut ledger = LoadedRows::new(limits, group, found);
        let answers = self.execute_group(&mut ledger, group, clock);
        let (mut writes, mut removes, mut changed) = (Vec::new(), Vec::new(), false);
        for (key, change) in keys.iter().zip(ledger.changes()) {
            changed |= matches!(change, RowChange::Write(..) | RowChange::Remove);
            match change {
                RowChange::Write(bytes, expires_at) => writes.push((*key, bytes, expires_at)),
                // A row that was inserted only to be locked must not stay.
                RowChange::Remove | RowChange::StayAbsent => removes.push(*key),
                RowChange::Keep => {}
            }
        }
        if !changed {
            return Ok((answers, false));
        }
        for chunk in statement_chunks(&writes) {
            self.dialect.write_rows(connection, chunk).await.map_err(|error| self.classify_error(&error))?;
        }
        if !removes.is_empty() {
            self.dialect.remove_rows(connection, &removes).await.map_err(|error| self.classify_error(&error))?;
        }
        Ok((answers, true))
    }

    /// Returns the stored seed. If there is none, stores this one.
    pub(crate) async fn get_or_insert_seed(&self, proposal: [u8; 16]) -> Result<[u8; 16], StoreError> {
        let seed = async {
            let mut connection = self.connection().await?;
            let stored = self
                .dialect
                .get_or_insert_seed(&mut connection, &proposal)
                .await
                .map_err(|error| self.classify_error(&error));
            let kept = connection.release_after(stored)?;
            kept.try_into().map_err(|_| GroupError::Failed("the seed in it isn't 16 bytes long".into()))
        };
        with_timeout(GROUP_TIMEOUT, seed).await
    }

    /// Removes a bounded number of expired rows.
    pub(crate) async fn remove_expired(&self) -> Result<(), StoreError> {
        let clean = async {
            let cutoff_micros = self.clock.expiry_cutoff_micros();
            for _ in 0..MAX_CLEAN_STEPS {
                let mut connection = self.connection().await?;
                let found = self
                    .dialect
                    .remove_expired(&mut connection, cutoff_micros, MAX_CLEAN_ROWS)
                    .await
                    .map_err(|error| self.classify_error(&error));
                if connection.release_after(found)? < MAX_CLEAN_ROWS as u64 {
                    break;
                }
            }
            Ok(())
        };
        with_timeout(CLEAN_TIMEOUT, clean).await
    }
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
        let result = match group.is_read_only() {
            true => self.execute_read_only(&mut connection, limits, group).await,
            false => self.execute_in_transaction(&mut connection, limits, group).await,
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
