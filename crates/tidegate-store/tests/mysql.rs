//! MariaDB keeps what every store promises.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod rows;

use std::sync::Arc;

use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection};
use tidegate_core::Limits;
use tidegate_store::{DatabaseOptions, MySql, StoreError};
use tidegate_testkit::servers::database::DatabaseServer;
use tidegate_testkit::servers::mariadb::mariadb;

struct MariaDb;

impl rows::Kind for MariaDb {
    type Store = MySql;

    const HALF_TAKEN: bool = false;
    const NOWHERE: &str = "mysql://tidegate:secret@127.0.0.1:1/tidegate";
    const RESTARTS: &[fn(&DatabaseServer)] = &[rows::stop_and_start, rows::kill_and_start];

    fn server() -> Option<DatabaseServer> {
        mariadb()
    }

    async fn rows(server: &DatabaseServer, prefix: &str) -> u64 {
        let mut connection = MySqlConnection::connect(server.url()).await.unwrap();
        let count = AssertSqlSafe(format!("SELECT count(*) FROM {prefix}state"));
        let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap();
        rows.try_into().unwrap()
    }

    async fn forget(server: &DatabaseServer, prefix: &str) {
        let mut connection = MySqlConnection::connect(server.url()).await.unwrap();
        let drop = AssertSqlSafe(format!("DROP TABLE {prefix}state, {prefix}meta"));
        sqlx::query(drop).execute(&mut connection).await.unwrap();
    }

    async fn make_later(server: &DatabaseServer, prefix: &str) {
        let mut connection = MySqlConnection::connect(server.url()).await.unwrap();
        let later = AssertSqlSafe(format!("UPDATE {prefix}meta SET value = '2' WHERE name = 'schema'"));
        sqlx::query(later).execute(&mut connection).await.unwrap();
    }

    async fn add_junk_nodes(server: &DatabaseServer, prefix: &str) {
        let mut connection = MySqlConnection::connect(server.url()).await.unwrap();
        let rows = (1..=1500).map(|id| format!("(X'746964656e6f6465{id:032x}', 'junk', 9223372036854775807)"));
        let rows = rows.collect::<Vec<_>>().join(", ");
        let insert = AssertSqlSafe(format!("INSERT INTO {prefix}state VALUES {rows}"));
        sqlx::query(insert).execute(&mut connection).await.unwrap();
    }

    async fn junk_nodes(server: &DatabaseServer, prefix: &str) -> u64 {
        let mut connection = MySqlConnection::connect(server.url()).await.unwrap();
        let count = AssertSqlSafe(format!("SELECT count(*) FROM {prefix}state WHERE state = 'junk'"));
        let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap();
        rows.try_into().unwrap()
    }

    fn open(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<MySql, StoreError> {
        MySql::new(limits, options)
    }
}

suite!(MariaDb);
