//! Measures databases: a decision of Tidegate, and one bare upsert by the same driver, over the same number of
//! connections.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use sqlx::{Executor as _, MySqlPool, PgPool};
use tidegate_core::{Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Rate, Span, Time, Verb};
use tidegate_store::{DatabaseOptions, MongoDb, MySql, Postgres, RemoteStore};
use tidegate_testkit::servers::{database::DatabaseServer, mariadb::mariadb, mongo::mongo, postgres::postgres};
use tokio::runtime::{Builder, Runtime};

use super::TASKS;
use crate::options::Options;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;

/// The name of the baseline, which bounds the rate from above.
const BASELINE: &str = "bare upsert";
/// The number of keys in the server.
const KEYS: u64 = 10_000;
/// The number of connections of each subject: the store's default.
const CONNECTIONS: u32 = 8;

/// A function that asks for one key. Its result is true if the call was counted.
type DecideFn = Arc<dyn Fn(u64) -> Pin<Box<dyn Future<Output = bool> + Send>> + Send + Sync>;

/// Measures every row that the options select.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    type ConnectSubjects = fn(&Runtime, &DatabaseServer) -> Result<[(&'static str, DecideFn); 2], String>;
    type StartDatabase = fn() -> Option<DatabaseServer>;
    let servers: [(&str, StartDatabase, ConnectSubjects); 3] = [
        ("stores/mariadb", mariadb, |runtime, server| runtime.block_on(on_mariadb(server.url()))),
        ("stores/postgres", postgres, |runtime, server| runtime.block_on(on_postgres(server.url()))),
        ("stores/mongodb", mongo, |runtime, server| runtime.block_on(on_mongodb(server.url()))),
    ];
    for (name, start, subjects) in servers {
        if !options.wants(name) {
            continue;
        }
        let mut row = BenchRow::new(name, FigureUnit::Requests);
        match start() {
            Some(server) => {
                if let Err(failure) = run(options, &server, subjects, &mut row) {
                    row.skipped.push(failure);
                }
            }
            None => row.skipped.push("the server isn't installed".to_owned()),
        }
        on_row(row);
    }
}

fn run(
    options: &Options,
    server: &DatabaseServer,
    subjects: impl Fn(&Runtime, &DatabaseServer) -> Result<[(&'static str, DecideFn); 2], String>,
    row: &mut BenchRow,
) -> Result<(), String> {
    let runtime =
        Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(|error| error.to_string())?;
    let subjects = subjects(&runtime, server)?;
    let subjects: Vec<_> = subjects.into_iter().filter(|(name, _)| options.wants_subject(name)).collect();
    let (rounds, time) = if options.quick { (3, Duration::from_secs(1)) } else { (9, Duration::from_secs(2)) };
    let mut figures = vec![Vec::new(); subjects.len()];
    // The first round creates the rows, and isn't counted.
    for round in 0..=rounds {
        for place in 0..subjects.len() {
            let place = (place + round) % subjects.len();
            let rate = runtime.block_on(measure_rate(&subjects[place].1, time, round as u64))?;
            if round > 0 {
                figures[place].push(rate);
            }
        }
    }
    for ((name, _), figures) in subjects.iter().zip(figures) {
        row.push(name, figures);
    }
    Ok(())
}

/// Returns the decisions per second of all tasks.
async fn measure_rate(ask: &DecideFn, time: Duration, round: u64) -> Result<f64, String> {
    let start = Instant::now();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let ask = Arc::clone(ask);
            let mut keys = SmallRng::seed_from_u64(round << 8 | task as u64);
            tokio::spawn(async move {
                let mut counted = 0_u64;
                while start.elapsed() < time {
                    if !ask(keys.random_range(0..KEYS)).await {
                        return None;
                    }
                    counted += 1;
                }
                Some(counted)
            })
        })
        .collect();
    let mut counted = 0;
    for task in tasks {
        let of_task = task.await.map_err(|error| error.to_string())?;
        counted += of_task.ok_or("a decision failed, or was refused")?;
    }
    Ok(counted as f64 / start.elapsed().as_secs_f64())
}

/// Returns a rate that is never reached. Every decision changes its row.
fn limits() -> Result<Arc<Limits>, String> {
    let rate = Rate::new(1_000_000, Span::from_secs(1), 1_000_000_000).map_err(|error| error.to_string())?;
    Ok(Arc::new(Limits::with_limit(Limit::new(LimitKind::Rate(rate)))))
}

fn decide_with_store(store: impl RemoteStore) -> DecideFn {
    let store = Arc::new(store);
    Arc::new(move |key| {
        let store = Arc::clone(&store);
        Box::pin(async move {
            let mut batch = Batch::new(0);
            let op = Op::new(LimitId::FIRST, Verb::Take, Key::new(key, hash_key(key)), 1);
            if batch.push(op).is_err() {
                return false;
            }
            let asked = store.apply(&batch, Time::ZERO).await;
            asked.is_ok_and(|outcomes| !outcomes.list()[0].admission.refuses())
        })
    })
}

fn hash_key(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn key_bytes(key: u64) -> Vec<u8> {
    [0, key, hash_key(key)].iter().flat_map(|word| word.to_be_bytes()).collect()
}

async fn on_mariadb(url: &str) -> Result<[(&'static str, DecideFn); 2], String> {
    let store = MySql::new(limits()?, &DatabaseOptions::new(url)).map_err(|error| error.to_string())?;
    let pool = sqlx::mysql::MySqlPoolOptions::new().max_connections(CONNECTIONS).test_before_acquire(false);
    let pool: MySqlPool = pool.connect(url).await.map_err(|error| error.to_string())?;
    let make = "CREATE TABLE bare (id BINARY(24) NOT NULL PRIMARY KEY, used BIGINT NOT NULL)";
    pool.execute(make).await.map_err(|error| error.to_string())?;
    let bare: DecideFn = Arc::new(move |key| {
        let pool = pool.clone();
        Box::pin(async move {
            let upsert = sqlx::query("INSERT INTO bare VALUES (?, 1) ON DUPLICATE KEY UPDATE used = used + 1");
            upsert.bind(key_bytes(key)).execute(&pool).await.is_ok()
        })
    });
    Ok([(OURS, decide_with_store(store)), (BASELINE, bare)])
}

async fn on_postgres(url: &str) -> Result<[(&'static str, DecideFn); 2], String> {
    let store = Postgres::new(limits()?, &DatabaseOptions::new(url)).map_err(|error| error.to_string())?;
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(CONNECTIONS).test_before_acquire(false);
    let pool: PgPool = pool.connect(url).await.map_err(|error| error.to_string())?;
    let make = "CREATE TABLE bare (id bytea PRIMARY KEY, used bigint NOT NULL)";
    pool.execute(make).await.map_err(|error| error.to_string())?;
    let bare: DecideFn = Arc::new(move |key| {
        let pool = pool.clone();
        Box::pin(async move {
            let words = "INSERT INTO bare VALUES ($1, 1) ON CONFLICT (id) DO UPDATE SET used = bare.used + 1";
            sqlx::query(words).bind(key_bytes(key)).execute(&pool).await.is_ok()
        })
    });
    Ok([(OURS, decide_with_store(store)), (BASELINE, bare)])
}

async fn on_mongodb(url: &str) -> Result<[(&'static str, DecideFn); 2], String> {
    use mongodb::bson::{Binary, Document, doc, spec::BinarySubtype};
    let store = MongoDb::new(limits()?, &DatabaseOptions::new(url)).map_err(|error| error.to_string())?;
    let mut options = mongodb::options::ClientOptions::parse(url).await.map_err(|error| error.to_string())?;
    options.max_pool_size = Some(CONNECTIONS);
    let client = mongodb::Client::with_options(options).map_err(|error| error.to_string())?;
    let bare = client.database("bare").collection::<Document>("bare");
    let bare: DecideFn = Arc::new(move |key| {
        let bare = bare.clone();
        Box::pin(async move {
            let id = Binary { subtype: BinarySubtype::Generic, bytes: key_bytes(key) };
            bare.update_one(doc! { "_id": id }, doc! { "$inc": { "used": 1_i64 } }).upsert(true).await.is_ok()
        })
    });
    Ok([(OURS, decide_with_store(store)), (BASELINE, bare)])
}
