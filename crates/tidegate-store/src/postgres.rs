//! State in PostgreSQL 12 or later.

use std::sync::Arc;

use sqlx::Error;
use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use tidegate_core::Limits;

use crate::StoreError;
use crate::rows::sql::{ReadRow, RowWrite, SqlDialect, SqlDriver, trusted_sql};
use crate::rows::{
    DatabaseOptions, GroupError, GroupExecutor, MAX_CLEAN_ROWS, RowKey, SCHEMA_VERSION, impl_remote_store,
};

/// A store in PostgreSQL 12 or later: two tables, `…meta` and `…state`, created at the first request.
///
/// The time of a decision is the server's, read when the decision's rows are locked. A node that freezes during a
/// decision locks its rows for five seconds.
pub struct Postgres(Arc<GroupExecutor<SqlDriver<PostgresDialect>>>);

impl Postgres {
    /// A store for these limits. It connects at the first request, which fails if no server answers.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if an option can't be used.
    pub fn new(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<Self, StoreError> {
        let connections = options.validate(&["postgres", "postgresql"])?;
        let connect_options: PgConnectOptions =
            options.url.parse().map_err(|_| StoreError::Failed("not the URL of a PostgreSQL database".into()))?;
        let connect_options = connect_options.application_name("tidegate");
        let dialect = PostgresDialect::new(&options.prefix);
        Ok(Self(SqlDriver::new_executor(dialect, connect_options, limits, options, connections)))
    }
}

impl_remote_store!(Postgres);

/// The statements, with the names of the tables.
struct PostgresDialect {
    select_version: Arc<str>,
    create_tables: Arc<str>,
    lock_rows: Arc<str>,
    read_rows: Arc<str>,
    write_rows: Arc<str>,
    remove_rows: Arc<str>,
    remove_expired: Arc<str>,
    insert_seed: Arc<str>,
    select_seed: Arc<str>,
}

impl PostgresDialect {
    fn new(prefix: &str) -> Self {
        Self {
            select_version: format!("SELECT value FROM {prefix}meta WHERE name = 'schema'").into(),
            // Without a lock, two nodes that create a table at the same time would fail each other. An expiry that
            // stays within its step doesn't change the index, and then free room in the page lets the row stay there.
            create_tables: format!(
                "BEGIN; SELECT pg_advisory_xact_lock(hashtext('{prefix}meta'));
                 CREATE TABLE IF NOT EXISTS {prefix}meta (name text PRIMARY KEY, value bytea NOT NULL);
                 CREATE TABLE IF NOT EXISTS {prefix}state (key bytea PRIMARY KEY, state bytea NOT NULL,
                     expires_at bigint NOT NULL) WITH (fillfactor = 70);
                 CREATE INDEX IF NOT EXISTS {prefix}state_expires_at ON {prefix}state (expires_at);
                 INSERT INTO {prefix}meta VALUES ('schema', '{SCHEMA_VERSION}') ON CONFLICT DO NOTHING;
                 COMMIT"
            )
            .into(),
            // A row in conflict is locked before its condition is evaluated: old and new rows in one order.
            lock_rows: format!(
                "INSERT INTO {prefix}state AS old SELECT key, ''::bytea, 0 FROM unnest($1::bytea[]) AS new (key) ORDER BY key
                 ON CONFLICT (key) DO UPDATE SET state = old.state WHERE false"
            )
            .into(),
            read_rows: format!(
                "SELECT clock.micros, rows.key, rows.state
                 FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS micros) AS clock
                 LEFT JOIN {prefix}state AS rows ON rows.key = ANY($1)"
            )
            .into(),
            write_rows: format!(
                "INSERT INTO {prefix}state SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[])
                 ON CONFLICT (key) DO UPDATE SET state = excluded.state, expires_at = excluded.expires_at"
            )
            .into(),
            remove_rows: format!("DELETE FROM {prefix}state WHERE key = ANY($1)").into(),
            remove_expired: format!(
                "DELETE FROM {prefix}state WHERE key IN (
                     SELECT key FROM {prefix}state
                     WHERE expires_at <= coalesce($1, (extract(epoch FROM now()) * 1000000)::bigint)
                     ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED)"
            )
            .into(),
            insert_seed: format!("INSERT INTO {prefix}meta VALUES ('seed', $1) ON CONFLICT DO NOTHING").into(),
            select_seed: format!("SELECT value FROM {prefix}meta WHERE name = 'seed'").into(),
        }
    }
}

fn key_bytes(keys: &[RowKey]) -> Vec<&[u8]> {
    keys.iter().map(RowKey::as_bytes).collect()
}

impl SqlDialect for PostgresDialect {
    type Connection = PgConnection;

    // A connection keeps its query plans. A plan that was made for an empty table would scan the whole table.
    const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL enable_seqscan = off; \
        SET LOCAL idle_in_transaction_session_timeout = '5s'; SET LOCAL lock_timeout = '2s'";

    async fn run_statement(&self, connection: &mut PgConnection, statement: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(statement).execute(connection).await.map(drop)
    }

    async fn ensure_schema(&self, connection: &mut PgConnection) -> Result<Vec<u8>, Error> {
        const UNDEFINED_TABLE: &str = "42P01";
        let version = sqlx::query_scalar(trusted_sql(&self.select_version)).fetch_one(&mut *connection).await;
        match version {
            // Read first: creating tables needs rights that a user of existing tables may not have.
            Err(Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => {
                sqlx::raw_sql(trusted_sql(&self.create_tables)).execute(&mut *connection).await?;
                sqlx::query_scalar(trusted_sql(&self.select_version)).fetch_one(connection).await
            }
            version => version,
        }
    }

    async fn lock_rows(&self, connection: &mut PgConnection, keys: &[RowKey]) -> Result<(), Error> {
        sqlx::query(trusted_sql(&self.lock_rows)).bind(key_bytes(keys)).execute(connection).await.map(drop)
    }

    async fn read_rows(&self, connection: &mut PgConnection, keys: &[RowKey]) -> Result<Vec<ReadRow>, Error> {
        sqlx::query_as(trusted_sql(&self.read_rows)).bind(key_bytes(keys)).fetch_all(connection).await
    }

    async fn write_rows(&self, connection: &mut PgConnection, rows: &[RowWrite]) -> Result<(), Error> {
        let keys: Vec<&[u8]> = rows.iter().map(|(key, ..)| key.as_bytes()).collect();
        let states: Vec<&[u8]> = rows.iter().map(|(_, state, _)| state.as_slice()).collect();
        let expiries: Vec<i64> = rows.iter().map(|(.., expires_at)| *expires_at).collect();
        let query = sqlx::query(trusted_sql(&self.write_rows)).bind(keys).bind(states).bind(expiries);
        query.execute(connection).await.map(drop)
    }

    async fn remove_rows(&self, connection: &mut PgConnection, keys: &[RowKey]) -> Result<(), Error> {
        sqlx::query(trusted_sql(&self.remove_rows)).bind(key_bytes(keys)).execute(connection).await.map(drop)
    }

    async fn remove_expired(&self, connection: &mut PgConnection, cutoff: Option<i64>) -> Result<u64, Error> {
        let query = sqlx::query(trusted_sql(&self.remove_expired)).bind(cutoff).bind(MAX_CLEAN_ROWS);
        Ok(query.execute(connection).await?.rows_affected())
    }

    async fn get_or_insert_seed(&self, connection: &mut PgConnection, proposal: &[u8]) -> Result<Vec<u8>, Error> {
        sqlx::query(trusted_sql(&self.insert_seed)).bind(proposal).execute(&mut *connection).await?;
        sqlx::query_scalar(trusted_sql(&self.select_seed)).fetch_one(connection).await
    }

    fn error_kind(&self, error: &dyn DatabaseError) -> fn(String) -> GroupError {
        const SERIALIZATION_FAILURE: &str = "40001";
        const DEADLOCK_DETECTED: &str = "40P01";
        const LOCK_NOT_AVAILABLE: &str = "55P03";
        const UNIQUE_VIOLATION: &str = "23505";
        const OPERATOR_INTERVENTION: &str = "57P";
        match error.code().as_deref() {
            Some(SERIALIZATION_FAILURE | DEADLOCK_DETECTED | LOCK_NOT_AVAILABLE | UNIQUE_VIOLATION) => {
                GroupError::Conflict
            }
            Some(code) if code.starts_with(OPERATOR_INTERVENTION) => GroupError::ConnectionLost,
            _ => GroupError::Failed,
        }
    }
}
