//! State in PostgreSQL 12 or later.

use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{AssertSqlSafe, Error, Row as _};
use tidegate_core::{Batch, Limits, Outcomes, Time};

use crate::rows::sql::{Dialect, Found, Sql, Written};
use crate::rows::{Engine, RowKey, RowsOptions, SCHEMA};
use crate::{Remote, StoreError, Waiting};

/// A store in PostgreSQL 12 or later: two tables, `…meta` and `…state`, made when it is first asked.
///
/// It goes by the clock of the server, read when a decision's rows are locked. A node that freezes in the middle of a
/// decision keeps others from its rows for five seconds.
pub struct Postgres(Engine<Sql<Words>>);

impl Postgres {
    /// A store for these limits. It connects when it is first asked; that nobody answers is told then.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if an option can't be used.
    pub fn new(limits: Arc<Limits>, options: &RowsOptions) -> Result<Self, StoreError> {
        let connections = options.checked(&["postgres", "postgresql"])?;
        let server: PgConnectOptions =
            options.url.parse().map_err(|_| StoreError::Failed("not the URL of a PostgreSQL database".into()))?;
        let server = server.application_name("tidegate");
        Ok(Self(Sql::engine(Words::new(&options.prefix), server, limits, options, connections)))
    }
}

impl Remote for Postgres {
    fn limits(&self) -> &Arc<Limits> {
        self.0.limits()
    }

    fn ask(&self, batch: &Batch, now: Time) -> Waiting<Outcomes> {
        self.0.ask(batch, now)
    }

    fn seed(&self, proposal: [u8; 16]) -> Waiting<[u8; 16]> {
        let sql = self.0.driver();
        Box::pin(async move { sql.seed(proposal).await })
    }

    fn tend(&self) -> Waiting<()> {
        let sql = self.0.driver();
        Box::pin(async move { sql.clean().await })
    }
}

/// The statements, with the names of the tables.
struct Words {
    version: Arc<str>,
    make: Arc<str>,
    lock: Arc<str>,
    read: Arc<str>,
    write: Arc<str>,
    remove: Arc<str>,
    clean: Arc<str>,
    keep: Arc<str>,
    kept: Arc<str>,
}

impl Words {
    fn new(prefix: &str) -> Self {
        Self {
            version: format!("SELECT value FROM {prefix}meta WHERE name = 'schema'").into(),
            // Two nodes that make one table at the same time would fail each other without a lock. An expiry that stays
            // within its step leaves the index alone, and then room in the page lets the row stay there.
            make: format!(
                "BEGIN; SELECT pg_advisory_xact_lock(hashtext('{prefix}meta'));
                 CREATE TABLE IF NOT EXISTS {prefix}meta (name text PRIMARY KEY, value bytea NOT NULL);
                 CREATE TABLE IF NOT EXISTS {prefix}state (key bytea PRIMARY KEY, state bytea NOT NULL,
                     expires_at bigint NOT NULL) WITH (fillfactor = 70);
                 CREATE INDEX IF NOT EXISTS {prefix}state_expires_at ON {prefix}state (expires_at);
                 INSERT INTO {prefix}meta VALUES ('schema', '{SCHEMA}') ON CONFLICT DO NOTHING;
                 COMMIT"
            )
            .into(),
            // A row in conflict is locked before its condition is looked at, so this locks what exists and makes what
            // doesn't, in one order.
            lock: format!(
                "INSERT INTO {prefix}state AS old SELECT key, ''::bytea, 0 FROM unnest($1::bytea[]) AS new (key) ORDER BY key
                 ON CONFLICT (key) DO UPDATE SET state = old.state WHERE false"
            )
            .into(),
            read: format!(
                "SELECT clock.micros, rows.key, rows.state
                 FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS micros) AS clock
                 LEFT JOIN {prefix}state AS rows ON rows.key = ANY($1)"
            )
            .into(),
            write: format!(
                "INSERT INTO {prefix}state SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bigint[])
                 ON CONFLICT (key) DO UPDATE SET state = excluded.state, expires_at = excluded.expires_at"
            )
            .into(),
            remove: format!("DELETE FROM {prefix}state WHERE key = ANY($1)").into(),
            clean: format!(
                "DELETE FROM {prefix}state WHERE key IN (
                     SELECT key FROM {prefix}state
                     WHERE expires_at <= coalesce($1, (extract(epoch FROM now()) * 1000000)::bigint)
                     ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED)"
            )
            .into(),
            keep: format!("INSERT INTO {prefix}meta VALUES ('seed', $1) ON CONFLICT DO NOTHING").into(),
            kept: format!("SELECT value FROM {prefix}meta WHERE name = 'seed'").into(),
        }
    }
}

/// A statement of ours: the only part that isn't literal is a prefix that was checked.
fn safe(words: &Arc<str>) -> AssertSqlSafe<Arc<str>> {
    AssertSqlSafe(Arc::clone(words))
}

fn bytes(keys: &[RowKey]) -> Vec<&[u8]> {
    keys.iter().map(RowKey::as_bytes).collect()
}

impl Dialect for Words {
    type Connection = PgConnection;

    // A plan is kept per connection and made for a table that may be empty then, where reading all of it looks cheapest.
    const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL enable_seqscan = off; \
        SET LOCAL idle_in_transaction_session_timeout = '5s'; SET LOCAL lock_timeout = '2s'";

    async fn run(&self, on: &mut PgConnection, words: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(words).execute(on).await.map(drop)
    }

    async fn greet(&self, _: &mut PgConnection) -> Result<(), Error> {
        Ok(())
    }

    async fn schema(&self, on: &mut PgConnection) -> Result<Vec<u8>, Error> {
        const UNDEFINED_TABLE: &str = "42P01";
        let version = sqlx::query_scalar(safe(&self.version)).fetch_one(&mut *on).await;
        match version {
            // Tried first: making what exists asks for rights that whoever only uses it may not have.
            Err(Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => {
                sqlx::raw_sql(safe(&self.make)).execute(&mut *on).await?;
                sqlx::query_scalar(safe(&self.version)).fetch_one(on).await
            }
            version => version,
        }
    }

    async fn lock(&self, on: &mut PgConnection, keys: &[RowKey]) -> Result<(), Error> {
        sqlx::query(safe(&self.lock)).bind(bytes(keys)).execute(on).await.map(drop)
    }

    async fn read(&self, on: &mut PgConnection, keys: &[RowKey]) -> Result<Found, Error> {
        let rows = sqlx::query(safe(&self.read)).bind(bytes(keys)).fetch_all(on).await?;
        let mut found = Vec::with_capacity(rows.len());
        let mut clock = 0;
        for row in rows {
            clock = row.try_get(0)?;
            let key = row.try_get::<Option<&[u8]>, _>(1)?.and_then(RowKey::read);
            if let (Some(key), Some(state)) = (key, row.try_get(2)?) {
                found.push((key, state));
            }
        }
        Ok((clock, found))
    }

    async fn write(&self, on: &mut PgConnection, rows: &[Written]) -> Result<(), Error> {
        let keys: Vec<&[u8]> = rows.iter().map(|(key, ..)| key.as_bytes()).collect();
        let states: Vec<&[u8]> = rows.iter().map(|(_, state, _)| state.as_slice()).collect();
        let expiries: Vec<i64> = rows.iter().map(|(.., expires_at)| *expires_at).collect();
        let query = sqlx::query(safe(&self.write)).bind(keys).bind(states).bind(expiries);
        query.execute(on).await.map(drop)
    }

    async fn remove(&self, on: &mut PgConnection, keys: &[RowKey]) -> Result<(), Error> {
        sqlx::query(safe(&self.remove)).bind(bytes(keys)).execute(on).await.map(drop)
    }

    async fn clean(&self, on: &mut PgConnection, at: Option<i64>, most: usize) -> Result<u64, Error> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let done = sqlx::query(safe(&self.clean)).bind(at).bind(most).execute(on).await?;
        Ok(done.rows_affected())
    }

    async fn seed(&self, on: &mut PgConnection, proposal: &[u8]) -> Result<Vec<u8>, Error> {
        sqlx::query(safe(&self.keep)).bind(proposal).execute(&mut *on).await?;
        sqlx::query_scalar(safe(&self.kept)).fetch_one(on).await
    }

    fn is_farewell(&self, error: &dyn DatabaseError) -> bool {
        const OPERATOR_INTERVENTION: &str = "57P";
        error.code().is_some_and(|code| code.starts_with(OPERATOR_INTERVENTION))
    }

    fn is_conflict(&self, error: &dyn DatabaseError) -> bool {
        const SERIALIZATION_FAILURE: &str = "40001";
        const DEADLOCK_DETECTED: &str = "40P01";
        const LOCK_NOT_AVAILABLE: &str = "55P03";
        const UNIQUE_VIOLATION: &str = "23505";
        error.code().is_some_and(|code| {
            [SERIALIZATION_FAILURE, DEADLOCK_DETECTED, LOCK_NOT_AVAILABLE, UNIQUE_VIOLATION].contains(&&*code)
        })
    }
}
