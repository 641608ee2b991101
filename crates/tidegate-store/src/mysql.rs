//! State in MySQL 8 or MariaDB 10.6 and later.

use std::cmp::Reverse;
use std::iter;
use std::sync::Arc;

use sqlx::error::DatabaseError;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlDatabaseError};
use sqlx::{AssertSqlSafe, Error, Row as _};
use tidegate_core::{Batch, Limits, Outcomes, Time};

use crate::rows::sql::{Dialect, Found, Sql, Written};
use crate::rows::{Engine, GROUP_ROWS, RowKey, RowsOptions, SCHEMA};
use crate::{Remote, StoreError, Waiting};

/// A store in MySQL 8, or MariaDB 10.6 or later: two tables, `…meta` and `…state`, made when it is first asked.
///
/// It goes by the clock of the server, read when a decision's rows are locked. A node that freezes in the middle of a
/// decision keeps others from its rows for five seconds with MariaDB, for a minute with MySQL.
pub struct MySql(Engine<Sql<Words>>);

impl MySql {
    /// A store for these limits. It connects when it is first asked; that nobody answers is told then.
    ///
    /// # Errors
    /// [`StoreError::Failed`] if an option can't be used.
    pub fn new(limits: Arc<Limits>, options: &RowsOptions) -> Result<Self, StoreError> {
        let connections = options.checked(&["mysql", "mariadb"])?;
        let server: MySqlConnectOptions =
            options.url.parse().map_err(|_| StoreError::Failed("not the URL of a MySQL database".into()))?;
        Ok(Self(Sql::engine(Words::new(&options.prefix), server, limits, options, connections)))
    }
}

impl Remote for MySql {
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

/// The server's clock in microseconds. It stands still within a statement, and knows no time zones.
const CLOCK: &str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";

/// The statements, with the names of the tables.
struct Words {
    version: Arc<str>,
    make: Arc<str>,
    lock: Listed,
    read: Listed,
    write: Listed,
    remove: Listed,
    expired: Arc<str>,
    clean: Listed,
    keep: Arc<str>,
    kept: Arc<str>,
}

impl Words {
    fn new(prefix: &str) -> Self {
        Self {
            version: format!("SELECT value FROM {prefix}meta WHERE name = 'schema'").into(),
            make: format!(
                "CREATE TABLE IF NOT EXISTS {prefix}meta (
                     name VARBINARY(32) NOT NULL PRIMARY KEY, value VARBINARY(255) NOT NULL) ENGINE = InnoDB;
                 CREATE TABLE IF NOT EXISTS {prefix}state (
                     id BINARY(24) NOT NULL PRIMARY KEY, state MEDIUMBLOB NOT NULL, expires_at BIGINT NOT NULL,
                     KEY expires_at (expires_at)) ENGINE = InnoDB;
                 INSERT IGNORE INTO {prefix}meta VALUES ('schema', '{SCHEMA}')"
            )
            .into(),
            // A row that exists is locked as one that is made: first a look and then an insertion would leave locks on
            // the gap between, over which two that want to insert there block each other.
            lock: Listed::new(
                |list| {
                    format!("INSERT INTO {prefix}state VALUES {list} ON DUPLICATE KEY UPDATE expires_at = expires_at")
                },
                "(?, '', 0)",
            ),
            read: Listed::new(
                |list| {
                    format!(
                        "SELECT clock.micros, found.id, found.state FROM (SELECT {CLOCK} AS micros) AS clock
                     LEFT JOIN {prefix}state AS found ON found.id IN ({list})"
                    )
                },
                "?",
            ),
            // MariaDB has no other word for a row that is inserted.
            write: Listed::new(
                |list| {
                    format!(
                        "INSERT INTO {prefix}state VALUES {list}
                     ON DUPLICATE KEY UPDATE state = VALUES(state), expires_at = VALUES(expires_at)"
                    )
                },
                "(?, ?, ?)",
            ),
            remove: Listed::new(|list| format!("DELETE FROM {prefix}state WHERE id IN ({list})"), "?"),
            expired: format!(
                "SELECT id FROM {prefix}state WHERE expires_at <= COALESCE(?, {CLOCK}) ORDER BY expires_at LIMIT ?"
            )
            .into(),
            clean: Listed::new(
                |list| format!("DELETE FROM {prefix}state WHERE id IN ({list}) AND expires_at <= COALESCE(?, {CLOCK})"),
                "?",
            ),
            keep: format!("INSERT IGNORE INTO {prefix}meta VALUES ('seed', ?)").into(),
            kept: format!("SELECT value FROM {prefix}meta WHERE name = 'seed'").into(),
        }
    }
}

/// A statement over a list, for 1, 2, 4 … [`GROUP_ROWS`] items: so few that each connection keeps all of them prepared.
struct Listed(Vec<Arc<str>>);

impl Listed {
    fn new(statement: impl Fn(&str) -> String, item: &str) -> Self {
        let sizes = iter::successors(Some(1), |size| Some(size * 2)).take_while(|size| *size <= GROUP_ROWS);
        Self(sizes.map(|size| statement(&vec![item; size].join(", ")).into()).collect())
    }

    /// The statement for a list, and the list with its last item repeated until it fits, which changes nothing.
    fn fit<'a, T>(&self, items: &'a [T]) -> (AssertSqlSafe<Arc<str>>, impl Iterator<Item = &'a T>) {
        let size = items.len().next_power_of_two();
        let words = &self.0[size.ilog2() as usize];
        (safe(words), items.iter().chain(iter::repeat_n(items.last(), size - items.len()).flatten()))
    }
}

/// A statement of ours: the only part that isn't literal is a prefix that was checked.
fn safe(words: &Arc<str>) -> AssertSqlSafe<Arc<str>> {
    AssertSqlSafe(Arc::clone(words))
}

/// The server's number of an error.
fn number(error: &dyn DatabaseError) -> u16 {
    error.try_downcast_ref::<MySqlDatabaseError>().map_or(0, MySqlDatabaseError::number)
}

impl Dialect for Words {
    type Connection = MySqlConnection;

    const BEGIN: &str = "START TRANSACTION";

    async fn run(&self, on: &mut MySqlConnection, words: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(words).execute(on).await.map(drop)
    }

    async fn greet(&self, on: &mut MySqlConnection) -> Result<(), Error> {
        const UNKNOWN_VARIABLE: u16 = 1193;
        let all = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; \
            SET SESSION innodb_lock_wait_timeout = 2, wait_timeout = 60";
        sqlx::raw_sql(all).execute(&mut *on).await?;
        match sqlx::raw_sql("SET SESSION idle_transaction_timeout = 5").execute(on).await {
            // MySQL ends a transaction that lies still only with its connection.
            Err(Error::Database(error)) if number(&*error) == UNKNOWN_VARIABLE => Ok(()),
            set => set.map(drop),
        }
    }

    async fn schema(&self, on: &mut MySqlConnection) -> Result<Vec<u8>, Error> {
        const NO_SUCH_TABLE: u16 = 1146;
        // Tried first: making what exists asks for rights that whoever only uses it may not have.
        match sqlx::query_scalar(safe(&self.version)).fetch_optional(&mut *on).await {
            Ok(Some(version)) => return Ok(version),
            // Another node is making them.
            Ok(None) => {}
            Err(Error::Database(error)) if number(&*error) == NO_SUCH_TABLE => {}
            Err(error) => return Err(error),
        }
        sqlx::raw_sql(safe(&self.make)).execute(&mut *on).await?;
        sqlx::query_scalar(safe(&self.version)).fetch_one(on).await
    }

    async fn lock(&self, on: &mut MySqlConnection, keys: &[RowKey]) -> Result<(), Error> {
        let (words, keys) = self.lock.fit(keys);
        let query = keys.fold(sqlx::query(words), |query, key| query.bind(key.as_bytes()));
        query.execute(on).await.map(drop)
    }

    async fn read(&self, on: &mut MySqlConnection, keys: &[RowKey]) -> Result<Found, Error> {
        // Whoever only asks for the time is told it beside any row.
        let any = [RowKey::default()];
        let (words, keys) = self.read.fit(if keys.is_empty() { &any } else { keys });
        let query = keys.fold(sqlx::query(words), |query, key| query.bind(key.as_bytes()));
        let rows = query.fetch_all(on).await?;
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

    async fn write(&self, on: &mut MySqlConnection, rows: &[Written]) -> Result<(), Error> {
        // The last is repeated: the one of the fewest bytes.
        let mut rows: Vec<&Written> = rows.iter().collect();
        rows.sort_unstable_by_key(|(_, state, _)| Reverse(state.len()));
        let (words, rows) = self.write.fit(&rows);
        let query = rows.fold(sqlx::query(words), |query, (key, state, expires_at)| {
            query.bind(key.as_bytes()).bind(state.as_slice()).bind(*expires_at)
        });
        query.execute(on).await.map(drop)
    }

    async fn remove(&self, on: &mut MySqlConnection, keys: &[RowKey]) -> Result<(), Error> {
        let (words, keys) = self.remove.fit(keys);
        let query = keys.fold(sqlx::query(words), |query, key| query.bind(key.as_bytes()));
        query.execute(on).await.map(drop)
    }

    async fn clean(&self, on: &mut MySqlConnection, at: Option<i64>, most: usize) -> Result<u64, Error> {
        let most = i64::try_from(most).unwrap_or(i64::MAX);
        let expired = sqlx::query_scalar(safe(&self.expired)).bind(at).bind(most);
        let mut expired: Vec<Vec<u8>> = expired.fetch_all(&mut *on).await?;
        // In the order in which decisions lock them.
        expired.sort_unstable();
        for some in expired.chunks(GROUP_ROWS) {
            let (words, ids) = self.clean.fit(some);
            let query = ids.fold(sqlx::query(words), |query, id| query.bind(id.as_slice()));
            query.bind(at).execute(&mut *on).await?;
        }
        Ok(expired.len() as u64)
    }

    async fn seed(&self, on: &mut MySqlConnection, proposal: &[u8]) -> Result<Vec<u8>, Error> {
        sqlx::query(safe(&self.keep)).bind(proposal).execute(&mut *on).await?;
        sqlx::query_scalar(safe(&self.kept)).fetch_one(on).await
    }

    fn is_conflict(&self, error: &dyn DatabaseError) -> bool {
        const DUPLICATE_KEY: u16 = 1062;
        const LOCK_WAIT_TIMEOUT: u16 = 1205;
        const DEADLOCK: u16 = 1213;
        [DUPLICATE_KEY, LOCK_WAIT_TIMEOUT, DEADLOCK].contains(&number(error))
    }

    fn is_farewell(&self, error: &dyn DatabaseError) -> bool {
        const SHUTDOWN: u16 = 1053;
        const KILLED: u16 = 1927;
        const IDLE_TOO_LONG: u16 = 4031;
        [SHUTDOWN, KILLED, IDLE_TOO_LONG].contains(&number(error))
    }
}
