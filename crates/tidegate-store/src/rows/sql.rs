//! How stores in SQL carry out a group: as one transaction, whatever the server calls its steps.

use std::future::Future;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::{Connection, Error};
use tidegate_core::{Limits, Outcomes, Time};

use super::loaded_rows::RowChange;
use super::pool::{ConnectionPool, PooledConnection};
use super::{
    BatchGroup, CLEAN_TIMEOUT, DatabaseOptions, DecisionClock, GROUP_TIMEOUT, GroupDriver, GroupError, GroupExecutor,
    LoadedRows, MAX_CLEAN_ROWS, MAX_CLEAN_STEPS, RowKey, check_schema, with_timeout,
};
use crate::StoreError;

/// The bytes of states after which a statement takes no more. A server's bound is 16 MiB or more unless it was lowered,
/// and one state has up to a third of a mebibyte.
const MAX_STATEMENT_BYTES: usize = 1 << 20;

/// One server's words for the steps.
pub(crate) trait SqlDialect: Send + Sync + 'static {
    type Connection: Connection;

    /// What begins a transaction in which every statement sees what was committed before it.
    const BEGIN: &str;

    /// Runs words without parameters.
    fn run_statement(
        &self,
        connection: &mut Self::Connection,
        statement: &'static str,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// Sets a new connection up.
    fn init_connection(&self, connection: &mut Self::Connection) -> impl Future<Output = Result<(), Error>> + Send;

    /// Makes the tables, if they aren't there, and tells their version.
    fn ensure_schema(&self, connection: &mut Self::Connection) -> impl Future<Output = Result<Vec<u8>, Error>> + Send;

    /// Locks rows, which come in key order, in that order; those that don't exist are made, with no bytes.
    fn lock_rows(
        &self,
        connection: &mut Self::Connection,
        keys: &[RowKey],
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// The server's clock, in microseconds since the epoch, read when the statement begins or later, and what is there
    /// of these rows.
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

    /// Removes up to so many rows that have expired at a moment, by the server's clock unless one is told, and says how
    /// many it found.
    fn remove_expired(
        &self,
        connection: &mut Self::Connection,
        cutoff_micros: Option<i64>,
        max_rows: usize,
    ) -> impl Future<Output = Result<u64, Error>> + Send;

    /// Keeps a seed where there is none, and tells the one that is kept.
    fn get_or_insert_seed(
        &self,
        connection: &mut Self::Connection,
        proposal: &[u8],
    ) -> impl Future<Output = Result<Vec<u8>, Error>> + Send;

    /// Whether an error only says that another transaction was in the way.
    fn is_conflict(&self, error: &dyn DatabaseError) -> bool;

    /// Whether an error says that the server is closing the connection.
    fn is_connection_closing(&self, error: &dyn DatabaseError) -> bool;
}

/// The server's clock, and rows with their bytes.
pub(crate) type ReadRows = (i64, Vec<(RowKey, Vec<u8>)>);

/// A row, its bytes, and when it expires.
pub(crate) type RowWrite = (RowKey, Vec<u8>, i64);

/// A store in SQL.
pub(crate) struct SqlDriver<D: SqlDialect> {
    dialect: D,
    pool: ConnectionPool<D::Connection>,
    clock: DecisionClock,
}

impl<D: SqlDialect> SqlDriver<D> {
    /// A store that connects when it is first asked.
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
            // A server may come back without its tables.
            let version =
                self.dialect.ensure_schema(&mut connection).await.map_err(|error| self.classify_error(&error))?;
            check_schema(&version)?;
        }
        Ok(connection)
    }

    /// An error before anything was changed for good.
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

    /// An error of a commit: unless the server itself says no, it may have been carried out.
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
        // Where nothing changed, a commit would wait for the disk for the sake of locks alone.
        let end = if is_changed { "COMMIT" } else { "ROLLBACK" };
        self.dialect.run_statement(connection, end).await.map_err(|error| self.classify_commit_error(&error))?;
        Ok(answers)
    }

    /// What happens between a transaction's begin and end, and whether it changed anything.
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
                // What was made only to be locked would stay.
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

    /// The seed in the store, or this one, which is kept then.
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

    /// Removes expired rows, a bounded number of them.
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

/// The rows in parts that one statement bears.
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

type BatchResults = Vec<Result<Outcomes, StoreError>>;

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

/// What an error says, without what the statement was given.
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
