//! PostgreSQL keeps what every store promises.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod rows;

use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tidegate_core::{Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Rate, Span, Time, Verb};
use tidegate_store::{DatabaseOptions, Postgres, RemoteStore as _, StoreError};
use tidegate_testkit::servers::database::DatabaseServer;
use tidegate_testkit::servers::postgres::postgres;

struct Pg;

impl rows::Kind for Pg {
    type Store = Postgres;

    const HALF_TAKEN: bool = false;
    const NOWHERE: &str = "postgres://tidegate:secret@127.0.0.1:1/postgres";
    const RESTARTS: &[fn(&DatabaseServer)] = &[rows::stop_and_start, rows::kill_and_start];

    fn server() -> Option<DatabaseServer> {
        postgres()
    }

    async fn rows(server: &DatabaseServer, prefix: &str) -> u64 {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let count = AssertSqlSafe(format!("SELECT count(*) FROM {prefix}state"));
        let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap();
        rows.try_into().unwrap()
    }

    async fn forget(server: &DatabaseServer, prefix: &str) {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let drop = AssertSqlSafe(format!("DROP TABLE {prefix}state, {prefix}meta"));
        sqlx::query(drop).execute(&mut connection).await.unwrap();
    }

    async fn make_later(server: &DatabaseServer, prefix: &str) {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let later = AssertSqlSafe(format!("UPDATE {prefix}meta SET value = '2' WHERE name = 'schema'"));
        sqlx::query(later).execute(&mut connection).await.unwrap();
    }

    async fn add_junk_nodes(server: &DatabaseServer, prefix: &str) {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let insert = AssertSqlSafe(format!(
            "INSERT INTO {prefix}state SELECT decode('746964656e6f6465' || lpad(to_hex(id), 32, '0'), 'hex'), 'junk', \
             9223372036854775807 FROM generate_series(1, 1500) AS id"
        ));
        sqlx::query(insert).execute(&mut connection).await.unwrap();
    }

    async fn junk_nodes(server: &DatabaseServer, prefix: &str) -> u64 {
        let mut connection = PgConnection::connect(server.url()).await.unwrap();
        let count = AssertSqlSafe(format!("SELECT count(*) FROM {prefix}state WHERE state = 'junk'"));
        let rows: i64 = sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap();
        rows.try_into().unwrap()
    }

    fn open(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<Postgres, StoreError> {
        Postgres::new(limits, options)
    }
}

suite!(Pg);

/// The plans of a connection outlive the moment when they are made, while the table may be empty.
#[tokio::test]
async fn rows_are_found_by_index() {
    let Some(server) = postgres() else { return };
    let rate = Rate::new(1_000, Span::from_secs(1), 1_000).unwrap();
    let limits = Arc::new(Limits::with_limit(Limit::new(LimitKind::Rate(rate))));
    let store = Postgres::new(limits, &DatabaseOptions::new(server.url())).unwrap();
    for wave in 0..60 {
        // Together, so that a statement is about many rows.
        let asked = (0..500_u64).map(|key| {
            let key = wave % 4 * 500 + key;
            let op = Op::new(LimitId::FIRST, Verb::Take, Key::new(key, key), 1);
            store.apply(&Batch::with_op(1, op), Time::ZERO)
        });
        futures_util::future::try_join_all(asked).await.unwrap();
    }
    // A process of the server tells what it counted when its connection is closed.
    drop(store);
    let mut connection = PgConnection::connect(server.url()).await.unwrap();
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidegate'";
    while sqlx::query_scalar::<_, i64>(open).fetch_one(&mut connection).await.unwrap() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let counts = "SELECT idx_scan, seq_scan FROM pg_stat_user_tables WHERE relname = 'tidegate_state'";
    let (by_index, whole): (i64, i64) = sqlx::query_as(counts).fetch_one(&mut connection).await.unwrap();
    assert!(whole < 5 && by_index > 40, "{whole} times all of it, {by_index} times by the index");
}
