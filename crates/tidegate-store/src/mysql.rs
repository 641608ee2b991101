//! State in MySQL 8 or MariaDB 10.6 and later.

use std::cmp::Reverse;
use std::iter;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlDatabaseError};
use sqlx::{AssertSqlSafe, Error};
use tidegate_core::Limits;

use crate::StoreError;
use crate::rows::sql::{ReadRow, RowWrite, SqlDialect, SqlDriver, trusted_sql};
use crate::rows::{
    DatabaseOptions, GroupError, GroupExecutor, MAX_CLEAN_ROWS, MAX_GROUP_ROWS, RowKey, SCHEMA_VERSION,
    impl_remote_store,
};

/// A store in MySQL 8, or MariaDB 10.6 or later: two tables, `…meta` and `…state`, created at the first request.
///
/// The time of a decision is the server's, read when the decision's rows are locked. A node that freezes during a
/// decision locks its rows for five seconds with MariaDB, for a minute with MySQL.
pub struct MySql(Arc<GroupExecutor<SqlDriver<MySqlDialect>>>);

impl MySql {
    /// A store for these limits. It connects at the first request, which fails if no server answers.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if an option can't be used.
    pub fn new(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<Self, StoreError> {
        let connections = options.validate(&["mysql", "mariadb"])?;
        let connect_options: MySqlConnectOptions =
            options.url.parse().map_err(|_| StoreError::Failed("not the URL of a MySQL database".into()))?;
        let dialect = MySqlDialect::new(&options.prefix);
        Ok(Self(SqlDriver::new_executor(dialect, connect_options, limits, options, connections)))
    }
}

impl_remote_store!(MySql);

/// The server's clock in microseconds. It is the same throughout a statement, and in UTC.
const SERVER_MICROS_SQL: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// The statements, with the names of the tables.
struct MySqlDialect {
    select_version: Arc<str>,
    create_tables: Arc<str>,
    lock_rows: ListStatement,
    read_rows: ListStatement,
    write_rows: ListStatement,
    remove_rows: ListStatement,
    select_expired: Arc<str>,
    remove_expired: ListStatement,
    insert_seed: Arc<str>,
    select_seed: Arc<str>,
}

impl MySqlDialect {
    fn new(prefix: &str) -> Self {
        let is_expired = format!("expires_at <= COALESCE(?, {SERVER_MICROS_SQL})");
        Self {
            select_version: format!("SELECT value FROM {prefix}meta WHERE name = 'schema'").into(),
            create_tables: format!(
                "CREATE TABLE IF NOT EXISTS {prefix}meta (
                     name VARBINARY(32) NOT NULL PRIMARY KEY, value VARBINARY(255) NOT NULL) ENGINE = InnoDB;
                 CREATE TABLE IF NOT EXISTS {prefix}state (
                     id BINARY(24) NOT NULL PRIMARY KEY, state MEDIUMBLOB NOT NULL, expires_at BIGINT NOT NULL,
                     KEY expires_at (expires_at)) ENGINE = InnoDB;
                 INSERT IGNORE INTO {prefix}meta VALUES ('schema', '{SCHEMA_VERSION}')"
            )
            .into(),
            // One statement locks existing and inserted rows. A read before the insertion would lock gaps, and two
            // transactions that insert into the same gap would block each other.
            lock_rows: ListStatement::new(
                &format!("INSERT INTO {prefix}state VALUES LIST ON DUPLICATE KEY UPDATE expires_at = expires_at"),
                "(?, '', 0)",
            ),
            read_rows: ListStatement::new(
                &format!(
                    "SELECT clock.micros, found.id, found.state FROM (SELECT {SERVER_MICROS_SQL} AS micros) AS clock
                     LEFT JOIN {prefix}state AS found ON found.id IN (LIST)"
                ),
                "?",
            ),
            // MariaDB knows the inserted row only as `VALUES`.
            write_rows: ListStatement::new(
                &format!(
                    "INSERT INTO {prefix}state VALUES LIST
                     ON DUPLICATE KEY UPDATE state = VALUES(state), expires_at = VALUES(expires_at)"
                ),
                "(?, ?, ?)",
            ),
            remove_rows: ListStatement::new(&format!("DELETE FROM {prefix}state WHERE id IN (LIST)"), "?"),
            select_expired: format!("SELECT id FROM {prefix}state WHERE {is_expired} ORDER BY expires_at LIMIT ?")
                .into(),
            remove_expired: ListStatement::new(
                &format!("DELETE FROM {prefix}state WHERE id IN (LIST) AND {is_expired}"),
                "?",
            ),
            insert_seed: format!("INSERT IGNORE INTO {prefix}meta VALUES ('seed', ?)").into(),
            select_seed: format!("SELECT value FROM {prefix}meta WHERE name = 'seed'").into(),
        }
    }
}

/// A statement over a list, for 1, 2, 4 … [`MAX_GROUP_ROWS`] items: few enough for a connection to prepare all of them.
struct ListStatement(Vec<Arc<str>>);

impl ListStatement {
    /// A statement with `LIST` in the place of the items.
    fn new(statement: &str, item: &str) -> Self {
        let sizes = iter::successors(Some(1), |size| Some(size * 2)).take_while(|size| *size <= MAX_GROUP_ROWS);
        Self(sizes.map(|size| statement.replace("LIST", &vec![item; size].join(", ")).into()).collect())
    }

    /// The statement for a list, and the list with its last item repeated until it fits, which changes nothing.
    fn for_items<'a, T>(&self, items: &'a [T]) -> (AssertSqlSafe<Arc<str>>, impl Iterator<Item = &'a T>) {
        let size = items.len().next_power_of_two();
        let statement = &self.0[size.ilog2() as usize];
        (trusted_sql(statement), items.iter().chain(iter::repeat_n(items.last(), size - items.len()).flatten()))
    }

    /// Executes the statement for these keys.
    async fn execute(&self, connection: &mut MySqlConnection, keys: &[RowKey]) -> Result<(), Error> {
        let (statement, keys) = self.for_items(keys);
        let query = keys.fold(sqlx::query(statement), |query, key| query.bind(key.as_bytes()));
        query.execute(connection).await.map(drop)
    }
}

/// The server's error number.
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
        match sqlx::query_scalar(trusted_sql(&self.select_version)).fetch_optional(&mut *connection).await {
            Ok(Some(version)) => return Ok(version),
            // Another node is creating the tables.
            Ok(None) => {}
            Err(Error::Database(error)) if error_number(&*error) == NO_SUCH_TABLE => {}
            Err(error) => return Err(error),
        }
        sqlx::raw_sql(trusted_sql(&self.create_tables)).execute(&mut *connection).await?;
        sqlx::query_scalar(trusted_sql(&self.select_version)).fetch_one(connection).await
    }

    async fn lock_rows(&self, connection: &mut MySqlConnection, keys: &[RowKey]) -> Result<(), Error> {
        self.lock_rows.execute(connection, keys).await
    }

    async fn read_rows(&self, connection: &mut MySqlConnection, keys: &[RowKey]) -> Result<Vec<ReadRow>, Error> {
        // Without keys, any row will do: the time comes with it.
        let any = [RowKey::default()];
        let (statement, keys) = self.read_rows.for_items(if keys.is_empty() { &any } else { keys });
        let query = keys.fold(sqlx::query_as(statement), |query, key| query.bind(key.as_bytes()));
        query.fetch_all(connection).await
    }

    async fn write_rows(&self, connection: &mut MySqlConnection, rows: &[RowWrite]) -> Result<(), Error> {
        // The last row is repeated, so it is the one with the fewest bytes.
        let mut rows: Vec<&RowWrite> = rows.iter().collect();
        rows.sort_unstable_by_key(|(_, state, _)| Reverse(state.len()));
        let (statement, rows) = self.write_rows.for_items(&rows);
        let query = rows.fold(sqlx::query(statement), |query, (key, state, expires_at)| {
            query.bind(key.as_bytes()).bind(state.as_slice()).bind(*expires_at)
        });
        query.execute(connection).await.map(drop)
    }

    async fn remove_rows(&self, connection: &mut MySqlConnection, keys: &[RowKey]) -> Result<(), Error> {
        self.remove_rows.execute(connection, keys).await
    }

    async fn remove_expired(&self, connection: &mut MySqlConnection, cutoff: Option<i64>) -> Result<u64, Error> {
        let expired = sqlx::query_scalar(trusted_sql(&self.select_expired)).bind(cutoff).bind(MAX_CLEAN_ROWS);
        let mut expired: Vec<Vec<u8>> = expired.fetch_all(&mut *connection).await?;
        // In the order in which decisions lock rows.
        expired.sort_unstable();
        for chunk in expired.chunks(MAX_GROUP_ROWS) {
            let (statement, ids) = self.remove_expired.for_items(chunk);
            let query = ids.fold(sqlx::query(statement), |query, id| query.bind(id.as_slice()));
            query.bind(cutoff).execute(&mut *connection).await?;
        }
        Ok(expired.len() as u64)
    }

    async fn get_or_insert_seed(&self, connection: &mut MySqlConnection, proposal: &[u8]) -> Result<Vec<u8>, Error> {
        sqlx::query(trusted_sql(&self.insert_seed)).bind(proposal).execute(&mut *connection).await?;
        sqlx::query_scalar(trusted_sql(&self.select_seed)).fetch_one(connection).await
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
