//! State in MySQL 8 or MariaDB 10.6 and later.

use std::cmp::Reverse;
use std::iter;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlDatabaseError};
use sqlx::{AssertSqlSafe, Error};
use tidegate_core::Limits;

use crate::StoreError;
use crate::rows::sql::{ReadRow, RowWrite, SqlDialect, SqlDriver};
use crate::rows::{
    DatabaseOptions, GroupError, GroupExecutor, MAX_CLEAN_ROWS, MAX_GROUP_ROWS, RowKey, SCHEMA_VERSION,
    impl_remote_store,
};

/// A store in MySQL 8, or MariaDB 10.6 or later: two tables, `…meta` and `…state`, created at the first request.
///
/// The time of a decision is the server's, read when the decision's rows are locked. A node that freezes during a
/// decision locks its rows for five seconds with MariaDB, for a minute with MySQL.
pub struct MySql(GroupExecutor<SqlDriver<MySqlDialect>>);

impl MySql {
    /// A store for these limits. It connects at the first request, which fails if no server answers.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if an option can't be used.
    pub fn new(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<Self, StoreError> {
        let connections = options.validate(&["mysql", "mariadb"])?;
        let connect_options: MySqlConnectOptions =
            options.url.parse().map_err(|_| StoreError::Failed("not the URL of a MySQL database".into()))?;
        let prefix = &options.prefix;
        let dialect = MySqlDialect { meta: format!("{prefix}meta"), state: format!("{prefix}state") };
        Ok(Self(SqlDriver::new_executor(dialect, connect_options, limits, options, connections)))
    }
}

impl_remote_store!(MySql);

/// The server's clock in microseconds. It is the same throughout a statement, and in UTC.
const SERVER_MICROS_SQL: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// The names of the tables. They are the only variable parts of statements: a validated prefix begins them.
struct MySqlDialect {
    meta: String,
    state: String,
}

impl MySqlDialect {
    async fn select_meta(&self, connection: &mut MySqlConnection, name: &str) -> Result<Vec<u8>, Error> {
        let statement = format!("SELECT value FROM {} WHERE name = ?", self.meta);
        sqlx::query_scalar(AssertSqlSafe(statement)).bind(name.as_bytes()).fetch_one(connection).await
    }
}

/// The placeholders of a list for a statement, and the list with its last item repeated to 1, 2, 4 … items, which
/// changes nothing. So there are few statements, and each connection keeps all of them prepared.
fn padded_list<'a, T>(items: &'a [T], placeholder: &str) -> (String, impl Iterator<Item = &'a T>) {
    let size = items.len().next_power_of_two();
    let padding = iter::repeat_n(items.last(), size - items.len()).flatten();
    (vec![placeholder; size].join(", "), items.iter().chain(padding))
}

async fn execute_with_keys<'a>(
    connection: &mut MySqlConnection,
    statement: String,
    keys: impl Iterator<Item = &'a RowKey>,
) -> Result<(), Error> {
    let query = keys.fold(sqlx::query(AssertSqlSafe(statement)), |query, key| query.bind(key.as_bytes()));
    query.execute(connection).await.map(drop)
}

fn error_number(error: &dyn DatabaseError) -> u16 {
    error.try_downcast_ref::<MySqlDatabaseError>().map_or(0, MySqlDatabaseError::number)
}

impl SqlDialect for MySqlDialect {
    type Connection = MySqlConnection;

    const BEGIN: &str = "START TRANSACTION";

    async fn run_statement(&self, connection: &mut MySqlConnection, statement: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(statement).execute(connection).await.map(drop)
    }

    async fn init_connection(&self, connection: &mut MySqlConnection) -> Result<(), Error> {
        const UNKNOWN_VARIABLE: u16 = 1193;
        let session_settings = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
            SET SESSION innodb_lock_wait_timeout = 2, wait_timeout = 60";
        sqlx::raw_sql(session_settings).execute(&mut *connection).await?;
        match sqlx::raw_sql("SET SESSION idle_transaction_timeout = 5").execute(connection).await {
            // MySQL ends an idle transaction only with its connection.
            Err(Error::Database(error)) if error_number(&*error) == UNKNOWN_VARIABLE => Ok(()),
            set => set.map(drop),
        }
    }

    async fn ensure_schema(&self, connection: &mut MySqlConnection) -> Result<Vec<u8>, Error> {
        const NO_SUCH_TABLE: u16 = 1146;
        // Read first: creating tables needs rights that a user of existing tables may not have.
        match self.select_meta(&mut *connection, "schema").await {
            // Another node is creating the tables.
            Err(Error::RowNotFound) => {}
            Err(Error::Database(error)) if error_number(&*error) == NO_SUCH_TABLE => {}
            version => return version,
        }
        let Self { meta, state } = self;
        let create_tables = format!(
            "CREATE TABLE IF NOT EXISTS {meta} (
                 name VARBINARY(32) NOT NULL PRIMARY KEY, value VARBINARY(255) NOT NULL) ENGINE = InnoDB;
             CREATE TABLE IF NOT EXISTS {state} (
                 id BINARY(24) NOT NULL PRIMARY KEY, state MEDIUMBLOB NOT NULL, expires_at BIGINT NOT NULL,
                 KEY expires_at (expires_at)) ENGINE = InnoDB;
             INSERT IGNORE INTO {meta} VALUES ('schema', '{SCHEMA_VERSION}')"
        );
        sqlx::raw_sql(AssertSqlSafe(create_tables)).execute(&mut *connection).await?;
        self.select_meta(connection, "schema").await
    }

    async fn lock_rows(&self, connection: &mut MySqlConnection, keys: &[RowKey]) -> Result<(), Error> {
        let (list, keys) = padded_list(keys, "(?, '', 0)");
        // One statement locks existing and inserted rows. A read before the insertion would lock gaps, and two
        // transactions that insert into the same gap would block each other.
        let statement =
            format!("INSERT INTO {} VALUES {list} ON DUPLICATE KEY UPDATE expires_at = expires_at", self.state);
        execute_with_keys(connection, statement, keys).await
    }

    async fn read_rows(&self, connection: &mut MySqlConnection, keys: &[RowKey]) -> Result<Vec<ReadRow>, Error> {
        // Without keys, any row will do: the time comes with it.
        let any = [RowKey::default()];
        let (list, keys) = padded_list(if keys.is_empty() { &any } else { keys }, "?");
        let statement = format!(
            "SELECT clock.micros, found.id, found.state FROM (SELECT {SERVER_MICROS_SQL} AS micros) AS clock
             LEFT JOIN {} AS found ON found.id IN ({list})",
            self.state
        );
        let query = sqlx::query_as(AssertSqlSafe(statement));
        keys.fold(query, |query, key| query.bind(key.as_bytes())).fetch_all(connection).await
    }

    async fn read_range(
        &self,
        connection: &mut MySqlConnection,
        first: &RowKey,
        last: &RowKey,
        limit: usize,
        limit_bytes: usize,
    ) -> Result<Vec<(Vec<u8>, Vec<u8>)>, Error> {
        let statement = format!(
            "SELECT id, SUBSTRING(state, 1, {limit_bytes}) FROM {} WHERE id BETWEEN ? AND ? ORDER BY id LIMIT {limit}",
            self.state
        );
        let query = sqlx::query_as(AssertSqlSafe(statement)).bind(first.as_bytes()).bind(last.as_bytes());
        query.fetch_all(connection).await
    }

    async fn write_rows(&self, connection: &mut MySqlConnection, rows: &[RowWrite]) -> Result<(), Error> {
        // The last row is repeated, so it is the one with the fewest bytes.
        let mut rows: Vec<&RowWrite> = rows.iter().collect();
        rows.sort_unstable_by_key(|(_, state, _)| Reverse(state.len()));
        let (list, rows) = padded_list(&rows, "(?, ?, ?)");
        // MariaDB knows the inserted row only as `VALUES`.
        let statement = format!(
            "INSERT INTO {} VALUES {list}
             ON DUPLICATE KEY UPDATE state = VALUES(state), expires_at = VALUES(expires_at)",
            self.state
        );
        let query = rows.fold(sqlx::query(AssertSqlSafe(statement)), |query, (key, state, expires_at)| {
            query.bind(key.as_bytes()).bind(state.as_slice()).bind(*expires_at)
        });
        query.execute(connection).await.map(drop)
    }

    async fn remove_rows(&self, connection: &mut MySqlConnection, keys: &[RowKey]) -> Result<(), Error> {
        let (list, keys) = padded_list(keys, "?");
        execute_with_keys(connection, format!("DELETE FROM {} WHERE id IN ({list})", self.state), keys).await
    }

    async fn remove_expired(&self, connection: &mut MySqlConnection, cutoff: Option<i64>) -> Result<u64, Error> {
        let state = &self.state;
        let is_expired = format!("expires_at <= COALESCE(?, {SERVER_MICROS_SQL})");
        let statement = format!("SELECT id FROM {state} WHERE {is_expired} ORDER BY expires_at LIMIT ?");
        let expired = sqlx::query_scalar(AssertSqlSafe(statement)).bind(cutoff).bind(MAX_CLEAN_ROWS);
        let mut expired: Vec<Vec<u8>> = expired.fetch_all(&mut *connection).await?;
        // In the order in which decisions lock rows.
        expired.sort_unstable();
        for chunk in expired.chunks(MAX_GROUP_ROWS) {
            let (list, ids) = padded_list(chunk, "?");
            let statement = format!("DELETE FROM {state} WHERE id IN ({list}) AND {is_expired}");
            let query = ids.fold(sqlx::query(AssertSqlSafe(statement)), |query, id| query.bind(id.as_slice()));
            query.bind(cutoff).execute(&mut *connection).await?;
        }
        Ok(expired.len() as u64)
    }

    async fn get_or_insert_seed(&self, connection: &mut MySqlConnection, proposal: &[u8]) -> Result<Vec<u8>, Error> {
        let statement = format!("INSERT IGNORE INTO {} VALUES ('seed', ?)", self.meta);
        sqlx::query(AssertSqlSafe(statement)).bind(proposal).execute(&mut *connection).await?;
        self.select_meta(connection, "seed").await
    }

    fn error_kind(&self, error: &dyn DatabaseError) -> fn(String) -> GroupError {
        const DUPLICATE_KEY: u16 = 1062;
        const LOCK_WAIT_TIMEOUT: u16 = 1205;
        const DEADLOCK: u16 = 1213;
        const SHUTDOWN: u16 = 1053;
        const KILLED: u16 = 1927;
        const IDLE_TOO_LONG: u16 = 4031;
        match error_number(error) {
            DUPLICATE_KEY | LOCK_WAIT_TIMEOUT | DEADLOCK => GroupError::Conflict,
            SHUTDOWN | KILLED | IDLE_TOO_LONG => GroupError::ConnectionLost,
            _ => GroupError::Failed,
        }
    }
}
