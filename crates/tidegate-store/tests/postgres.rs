//! PostgreSQL keeps what every store promises.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod rows;

use std::sync::Arc;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tidegate_core::Limits;
use tidegate_store::{Postgres, RowsOptions, StoreError};
use tidegate_testkit::servers::database::Database;
use tidegate_testkit::servers::postgres::postgres;

struct Pg;

impl rows::Kind for Pg {
    type Store = Postgres;

    const HALF_TAKEN: bool = false;
    const NOWHERE: &str = "postgres://tidegate:secret@127.0.0.1:1/postgres";
    const RESTARTS: &[fn(&Database)] = &[rows::stop_and_start, rows::kill_and_start];

    fn server() -> Option<Database> {
        postgres()
    }

    async fn rows(server: &Database, prefix: &str) -> u64 {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let count = AssertSqlSafe(format!("SELECT count(*) FROM {prefix}state"));
        let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap();
        rows.try_into().unwrap()
    }

    async fn forget(server: &Database, prefix: &str) {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let drop = AssertSqlSafe(format!("DROP TABLE {prefix}state, {prefix}meta"));
        sqlx::query(drop).execute(&mut connection).await.unwrap();
    }

    async fn make_later(server: &Database, prefix: &str) {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let later = AssertSqlSafe(format!("UPDATE {prefix}meta SET value = '2' WHERE name = 'schema'"));
        sqlx::query(later).execute(&mut connection).await.unwrap();
    }

    fn open(limits: Arc<Limits>, options: &RowsOptions) -> Result<Postgres, StoreError> {
        Postgres::new(limits, options)
    }
}

suite!(Pg);
