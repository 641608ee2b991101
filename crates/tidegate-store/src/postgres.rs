//! State in PostgreSQL 12 or later.

use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, Error};
use tidegate_core::Limits;

use crate::StoreError;
use crate::rows::sql::{ReadRow, RowWrite, SqlDialect, SqlDriver};
use crate::rows::{
    DatabaseOptions, GroupError, GroupExecutor, MAX_CLEAN_ROWS, RowKey, SCHEMA_VERSION, impl_remote_store,
};

/// A store in PostgreSQL 12 or later: two tables, `…meta` and `…state`, created at the first request.
///
/// The time of a decision is the server's, read when the decision's rows are locked. A node that freezes during a
/// decision locks its rows for five seconds.
pub struct Postgres(GroupExecutor<SqlDriver<PostgresDialect>>);

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
        let prefix = &options.prefix;
        let dialect = PostgresDialect { meta: format!("{prefix}meta"), state: format!("{prefix}state") };
        Ok(Self(SqlDriver::new_executor(dialect, connect_options, limits, options, connections)))
    }
}

impl_remote_store!(Postgres);

/// The names of the tables. They are the only variable parts of statements: a validated prefix begins them.
struct PostgresDialect {
    meta: String,
    state: String,
}

impl PostgresDialect {
    async fn select_meta(&self, connection: &mut PgConnection, name: &str) -> Result<Vec<u8>, Error> {
        let statement = format!("SELECT value FROM {} WHERE name = $1", self.meta);
        sqlx::query_scalar(AssertSqlSafe(statement)).bind(name).fetch_one(connection).await
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
        // Read first: creating tables needs rights that a user of existing tables may not have.
        match self.select_meta(&mut *connection, "schema").await {
            Err(Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => {}
            version => return version,
        }
        let Self { meta, state } = self;
        // Without a lock, two nodes that create a table at the same time would fail each other. An expiry that stays
        // within its step doesn't change the index, and then free room in the page lets the row stay there.
        let create_tables = format!(
            "BEGIN; SELECT pg_advisory_xact_lock(hashtext('{meta}'));
             CREATE TABLE IF NOT EXISTS {meta} (name text PRIMARY KEY, value bytea NOT NULL);
             CREATE TABLE IF NOT EXISTS {state} (key bytea PRIMARY KEY, state bytea NOT NULL,
                 expires_at bigint NOT NULL) WITH (fillfactor = 70);
             CREATE INDEX IF NOT EXISTS {state}_expires_at ON {state} (expires_at);
             INSERT INTO {meta} VALUES ('schema', '{SCHEMA_VERSION}') ON CONFLICT DO NOTHING;
             COMMIT"
        );
        sqlx::raw_sql(AssertSqlSafe(create_tables)).execute(&mut *connection).await?;
        self.select_meta(connection, "schema").await
    }

    async fn lock_rows(&self, connection: &mut PgConnection, keys: &[RowKey]) -> Result<(), Error> {
        // A row in conflict is locked before its condition is evaluated: old and new rows in one order.
        let statement = format!(
            "INSERT INTO {} AS old SELECT key, ''::bytea, 0 FROM unnest($1::bytea[]) AS new (key) ORDER BY key
             ON CONFLICT (key) DO UPDATE SET state = old.state WHERE false",
            self.state
        );
        sqlx::query(AssertSqlSafe(statement)).bind(key_bytes(keys)).execute(connection).await.map(drop)
    }

    async fn read_rows(&self, connection: &mut PgConnection, keys: &[RowKey]) -> Result<Vec<ReadRow>, Error> {
        let statement = format!(
            "SELECT clock.micros, rows.key, rows.state
             FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS micros) AS clock
             LEFT JOIN {} AS rows ON rows.key = ANY($1)",
            self.state
        );
        sqlx::query_as(AssertSqlSafe(statement)).bind(key_bytes(keys)).fetch_all(connection).await
    }

    async fn read_range(
        &self,
        connection: &mut PgConnection,
        first: &RowKey,
        last: &RowKey,
        limit: usize,
        limit_bytes: usize,
    ) -> Result<Vec<(Vec<u8>, Vec<u8>)>, Error> {
        let statement = format!(
            "SELECT key, substring(state, 1, {limit_bytes}) FROM {}
             WHERE key BETWEEN $1 AND $2 AND length(key) = {} ORDER BY key LIMIT {limit}",
            self.state,
            RowKey::LEN
        );
        let query = sqlx::query_as(AssertSqlSafe(statement)).bind(first.as_bytes()).bind(last.as_bytes());
        // Planned each time: a plan that was made for an empty table would scan the whole table.
        query.persistent(false).fetch_all(connection).await
    }

    async fn write_rows(&self, connection: &mut PgConnection, rows: &[RowWrite]) -> Result<(), Error> {
        let statement = format!(
            "INSERT INTO {} SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[])
             ON CONFLICT (key) DO UPDATE SET state = excluded.state, expires_at = excluded.expires_at",
            self.state
        );
        let keys: Vec<&[u8]> = rows.iter().map(|(key, ..)| key.as_bytes()).collect();
        let states: Vec<&[u8]> = rows.iter().map(|(_, state, _)| state.as_slice()).collect();
        let expiries: Vec<i64> = rows.iter().map(|(.., expires_at)| *expires_at).collect();
        let query = sqlx::query(AssertSqlSafe(statement)).bind(keys).bind(states).bind(expiries);
        query.execute(connection).await.map(drop)
    }

    async fn remove_rows(&self, connection: &mut PgConnection, keys: &[RowKey]) -> Result<(), Error> {
        let statement = format!("DELETE FROM {} WHERE key = ANY($1)", self.state);
        sqlx::query(AssertSqlSafe(statement)).bind(key_bytes(keys)).execute(connection).await.map(drop)
    }

    async fn remove_expired(&self, connection: &mut PgConnection, cutoff: Option<i64>) -> Result<u64, Error> {
        let statement = format!(
            "DELETE FROM {0} WHERE key IN (
                 SELECT key FROM {0}
                 WHERE expires_at <= coalesce($1, (extract(epoch FROM now()) * 1000000)::bigint)
                 ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED)",
            self.state
        );
        let query = sqlx::query(AssertSqlSafe(statement)).bind(cutoff).bind(MAX_CLEAN_ROWS);
        Ok(query.execute(connection).await?.rows_affected())
    }

    async fn get_or_insert_seed(&self, connection: &mut PgConnection, proposal: &[u8]) -> Result<Vec<u8>, Error> {
        let statement = format!("INSERT INTO {} VALUES ('seed', $1) ON CONFLICT DO NOTHING", self.meta);
        sqlx::query(AssertSqlSafe(statement)).bind(proposal).execute(&mut *connection).await?;
        self.select_meta(connection, "seed").await
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
