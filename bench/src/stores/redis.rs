//! Redis: a decision of ours, and the smallest script that does one GCRA.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use redis::aio::MultiplexedConnection;
use tidegate_core::{
    Batch, Key, Kind, Limit, LimitId, Limits, Op, Penalty, PenaltySpec, Rate, Span, Time, Verb, Window,
};
use tidegate_store::{Redis, RedisOptions, Remote as _};
use tidegate_testkit::servers::RedisServer;

use super::TASKS;
use crate::keys::{Draw, Sequence};
use crate::measure::{Spread, pin};
use crate::options::Options;
use crate::rows::{Row, Unit};
use crate::subjects::OURS;

/// The ceiling's name.
pub(crate) const CEILING: &str = "smallest GCRA script";

/// Keys in the server.
const KEYS: u32 = 10_000;
/// Decisions of a task in a chunk: about a tenth of a second's worth for all.
const CALLS: usize = 150;
/// Chunks of each subject in a round, taken in turns; the round's figure is their median.
const CHUNKS: usize = 5;

/// One take of a cost of 1, in whole microseconds: step and burst are the arguments.
const SMALLEST: &str = "\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local wait = tat + ARGV[1] - now - ARGV[2]
if wait > 0 then return wait end
redis.call('SET', KEYS[1], tat + ARGV[1], 'PX', math.ceil((tat + ARGV[1] - now) / 1000))
return 0";

/// Whoever can be asked for a key.
trait Ask: Clone + Send + 'static {
    fn ask(&mut self, key: u32) -> impl Future<Output = bool> + Send;
}

#[derive(Clone)]
struct Smallest {
    connection: MultiplexedConnection,
    hash: Arc<str>,
}

impl Ask for Smallest {
    async fn ask(&mut self, key: u32) -> bool {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&*self.hash).arg(1).arg(format!("gcra:{key:016x}")).arg(1_000_000).arg(10_000_000_000_000_u64);
        matches!(self.connection.send_packed_command(&command).await, Ok(redis::Value::Int(0)))
    }
}

#[derive(Clone)]
struct Ours {
    store: Arc<Redis>,
    ids: Arc<[LimitId]>,
}

impl Ask for Ours {
    async fn ask(&mut self, key: u32) -> bool {
        let mut batch = Batch::new(1);
        let key = Key::new(0, u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        batch.set_affinity(key.lo() | 1);
        for limit in self.ids.iter() {
            batch.push(Op::new(*limit, Verb::Take, key, 1)).expect("two limits");
        }
        let outcomes = self.store.ask(&batch, Time::from_secs(1_700_000_000)).await;
        outcomes.is_ok_and(|outcomes| outcomes.list().iter().all(|outcome| !outcome.verdict.refuses()))
    }
}

impl Ours {
    fn new(url: &str, limits: Vec<Limit>) -> Self {
        let limits = Arc::new(Limits::new(limits).expect("a few limits"));
        let ids = limits.iter().map(|(id, _)| id).collect();
        Self { store: Arc::new(Redis::new(RedisOptions::new(url), limits).expect("a URL")), ids }
    }
}

fn rate() -> Limit {
    Limit::new(Kind::Rate(Rate::new(1, Span::from_secs(1), 10_000_000).expect("a rate")))
}

fn window() -> Limit {
    let length = Span::from_secs(60);
    let window = Window::new(1 << 30, length, 64).expect("a window");
    Limit::new(Kind::Window(window))
        .with_penalty(Penalty::new(PenaltySpec::default(), length).expect("the default penalty"))
}

/// Measures every row that the options ask for, and hands each over as it is done.
pub(super) fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    for (name, limits) in
        [("stores/redis/rate", vec![rate()]), ("stores/redis/two-limits-and-penalty", vec![rate(), window()])]
    {
        if options.wants(name) {
            done(row(name, limits, options));
        }
    }
}

fn row(name: &str, limits: Vec<Limit>, options: &Options) -> Row {
    let mut row = Row::new(name, Unit::Requests);
    let Some(server) = RedisServer::start() else {
        row.skipped.push("redis-server: is not installed".into());
        return row;
    };
    // The server has the other core.
    pin(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let played = runtime.block_on(async {
        let ours = Ours::new(&server.url(), limits);
        let smallest = smallest(&server.url()).await?;
        let (mut of_ours, mut of_smallest) = (Vec::new(), Vec::new());
        let keys: Vec<Arc<[u32]>> =
            (0..TASKS as u64).map(|task| Sequence::new(Draw::Uniform, KEYS, task).indexes.into()).collect();
        for round in 0..options.rounds() {
            let (mut chunks_of_ours, mut chunks_of_smallest) = (Vec::new(), Vec::new());
            for chunk in 0..CHUNKS {
                let from = (round * CHUNKS + chunk) * CALLS;
                for turn in 0..2 {
                    let is_ours = (round + chunk + turn) % 2 == 0;
                    if is_ours && options.wants_subject(OURS) {
                        chunks_of_ours.push(play(&ours, &keys, from).await?);
                    } else if !is_ours && options.wants_subject(CEILING) {
                        chunks_of_smallest.push(play(&smallest, &keys, from).await?);
                    }
                }
            }
            of_ours.extend(Spread::of(&chunks_of_ours).map(|spread| spread.median));
            of_smallest.extend(Spread::of(&chunks_of_smallest).map(|spread| spread.median));
        }
        Ok::<_, String>((of_ours, of_smallest))
    });
    match played {
        Ok((ours, smallest)) => {
            row.push(OURS, ours);
            row.push(CEILING, smallest);
        }
        Err(reason) => row.skipped.push(reason),
    }
    row
}

async fn smallest(url: &str) -> Result<Smallest, String> {
    let connect = async {
        let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
        let script = redis::Script::new(SMALLEST);
        script.load_async(&mut connection).await?;
        Ok::<_, redis::RedisError>(Smallest { connection, hash: script.get_hash().into() })
    };
    connect.await.map_err(|error| error.to_string())
}

/// Decisions a second of all tasks together.
async fn play(subject: &impl Ask, keys: &[Arc<[u32]>], from: usize) -> Result<f64, String> {
    let begin = Instant::now();
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let mut subject = subject.clone();
            let keys = Arc::clone(&keys[task]);
            tokio::spawn(async move {
                for place in from..from + CALLS {
                    if !subject.ask(keys[place % keys.len()]).await {
                        return false;
                    }
                }
                true
            })
        })
        .collect();
    for task in tasks {
        if !task.await.is_ok_and(|admitted| admitted) {
            return Err("answers a call otherwise".into());
        }
    }
    Ok((TASKS * CALLS) as f64 / begin.elapsed().as_secs_f64())
}
