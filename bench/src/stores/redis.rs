//! Measures Redis: a decision of Tidegate, exact or from slices that are taken in one trip, and the smallest script
//! that does one GCRA.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use redis::aio::MultiplexedConnection;
use tidegate::clock::SystemClock;
use tidegate_core::{
    Batch, Clock as _, Key, LeaseSpec, Limit, LimitId, LimitKind, Limits, Op, Outcomes, Penalty, PenaltySpec, Rate,
    Sharing, Span, Time, Verb, Window,
};
use tidegate_store::{
    Fleet, FleetOptions, Redis, RedisOptions, RemoteStore as _, Store as _, StoreResponse, fleet_limits,
};
use tidegate_testkit::servers::RedisServer;

use super::TASKS;
use crate::keys::{KeyDistribution, KeySequence};
use crate::measure::{MedianRange, run_on_core};
use crate::options::Options;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;

/// The name of the baseline, which bounds the rate from above.
pub(crate) const BASELINE: &str = "smallest GCRA script";

/// The number of keys in the server.
const KEYS: u32 = 10_000;
/// The number of decisions of a task in a chunk: about a tenth of a second for all tasks.
const CALLS_PER_CHUNK: usize = 150;
/// The limit from which slices are taken, the number of keys of a chunk, and the calls of a task. A chunk spends 96 %
/// of the limit.
const LEASED_LIMIT: u64 = 10_000;
const LEASED_KEYS: usize = 8;
const LEASED_CALLS: usize = 1_200;
/// The number of chunks of each subject in a round, taken in turns. The round's figure is their median.
const CHUNKS: usize = 5;

/// A script that takes a cost of 1, in whole microseconds. Its arguments are the step and the burst.
const SMALLEST_SCRIPT: &str = "\
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local wait = tat + ARGV[1] - now - ARGV[2]
if wait > 0 then return wait end
redis.call('SET', KEYS[1], tat + ARGV[1], 'PX', math.ceil((tat + ARGV[1] - now) / 1000))
return 0";

/// A subject that can be asked for a key.
trait AsyncSubject: Clone + Send + Sync + 'static {
    fn decide(&mut self, key: u32) -> impl Future<Output = bool> + Send;
}

#[derive(Clone)]
struct SmallestScript {
    connection: MultiplexedConnection,
    hash: Arc<str>,
}

impl AsyncSubject for SmallestScript {
    async fn decide(&mut self, key: u32) -> bool {
        let mut command = redis::cmd("EVALSHA");
        command.arg(&*self.hash).arg(1).arg(format!("gcra:{key:016x}")).arg(1_000_000).arg(10_000_000_000_000_u64);
        matches!(self.connection.send_packed_command(&command).await, Ok(redis::Value::Int(0)))
    }
}

#[derive(Clone)]
struct TidegateRedis {
    store: Arc<Redis>,
    ids: Arc<[LimitId]>,
    /// The largest cost. Each call has a cost from 1 to this, by its key.
    max_cost: u32,
}

impl AsyncSubject for TidegateRedis {
    async fn decide(&mut self, key: u32) -> bool {
        let batch = batch(&self.ids, key, 1 + key % self.max_cost);
        admits(self.store.apply(&batch, Time::from_secs(1_700_000_000)).await.as_ref().ok())
    }
}

fn batch(limits: &[LimitId], key: u32, cost: u32) -> Batch {
    let mut batch = Batch::new(1);
    let (key, cost) = (Key::new(0, u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15)), u64::from(cost));
    batch.set_affinity(key.lo() | 1);
    for limit in limits {
        batch.push(Op::new(*limit, Verb::Take, key, cost)).expect("two limits");
    }
    batch
}

fn admits(outcomes: Option<&Outcomes>) -> bool {
    outcomes.is_some_and(|outcomes| !outcomes.refuses())
}

/// A node that takes slices.
#[derive(Clone)]
struct LeasedFleet {
    fleet: Fleet,
    id: LimitId,
    clock: SystemClock,
}

impl AsyncSubject for LeasedFleet {
    async fn decide(&mut self, key: u32) -> bool {
        match self.fleet.apply(&batch(&[self.id], key, 1), self.clock.now()) {
            StoreResponse::Ready(outcomes) => admits(Some(&outcomes)),
            StoreResponse::Pending(later) => admits(later.await.as_ref().ok()),
        }
    }
}

impl LeasedFleet {
    fn new(url: &str) -> Self {
        let max_age = Span::from_millis(250);
        let window = Window::new(LEASED_LIMIT, Span::from_secs(60), 64).expect("a window").with_lead(max_age);
        let sharing = Sharing { lease: Some(LeaseSpec { permille: 100, max_age }), ..Sharing::default() };
        let limits = Limits::new(vec![Limit::new(LimitKind::Window(window)).with_sharing(sharing)]).expect("one limit");
        let id = limits.iter().map(|(id, _)| id).next().expect("one limit");
        let limits = Arc::new(fleet_limits(&limits).expect("two limits"));
        let redis = Redis::new(RedisOptions::new(url), limits).expect("a URL");
        let clock = SystemClock::new();
        Self { fleet: Fleet::start(Box::new(redis), clock.clone(), FleetOptions::new(1)), id, clock }
    }
}

impl TidegateRedis {
    fn new(url: &str, limits: Vec<Limit>, costs: u32) -> Self {
        let limits = Arc::new(Limits::new(limits).expect("a few limits"));
        let ids = limits.iter().map(|(id, _)| id).collect();
        Self { store: Arc::new(Redis::new(RedisOptions::new(url), limits).expect("a URL")), ids, max_cost: costs }
    }
}

fn rate() -> Limit {
    Limit::new(LimitKind::Rate(Rate::new(1, Span::from_secs(1), 10_000_000).expect("a rate")))
}

fn window() -> Limit {
    let length = Span::from_secs(60);
    let window = Window::new(1 << 30, length, 64).expect("a window");
    Limit::new(LimitKind::Window(window))
        .with_penalty(Penalty::new(PenaltySpec::default(), length).expect("the default penalty"))
}

/// Measures every row that the options select, and passes each to `on_row` when it is done.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    for (name, limits, costs) in [
        ("stores/redis/rate", vec![rate()], 1),
        ("stores/redis/costs", vec![rate()], 100),
        ("stores/redis/two-limits-and-penalty", vec![rate(), window()], 1),
    ] {
        if options.wants(name) {
            let [row, _] =
                measure_rows(name, CALLS_PER_CHUNK, random_keys, |url| TidegateRedis::new(url, limits, costs), options);
            on_row(row);
        }
    }
    let name = "stores/redis/leases";
    if options.wants(name) {
        measure_rows(name, LEASED_CALLS, rotating_keys, LeasedFleet::new, options).into_iter().for_each(on_row);
    }
}

/// Returns randomly drawn keys, which repeat.
fn random_keys(task: usize, chunk: usize) -> Vec<u32> {
    let drawn = KeySequence::new(KeyDistribution::Uniform, KEYS, task as u64).indexes;
    drawn.iter().copied().cycle().skip(chunk * CALLS_PER_CHUNK).take(CALLS_PER_CHUNK).collect()
}

/// Returns new keys in every chunk. All tasks cycle over the same ones.
fn rotating_keys(task: usize, chunk: usize) -> Vec<u32> {
    (0..LEASED_CALLS).map(|call| (chunk * LEASED_KEYS + (task + call) % LEASED_KEYS) as u32).collect()
}

/// Returns the row of decisions per second, and that of requests to the server per hundred decisions.
fn measure_rows<A: AsyncSubject>(
    name: &str,
    calls: usize,
    keys: fn(usize, usize) -> Vec<u32>,
    ours: impl FnOnce(&str) -> A + Send,
    options: &Options,
) -> [BenchRow; 2] {
    let mut rows =
        [BenchRow::new(name, FigureUnit::Requests), BenchRow::new(format!("{name}/trips"), FigureUnit::Percent)];
    let play_all = async |server: RedisServer| {
        let ours = ours(&server.url());
        let smallest = load_smallest_script(&server.url()).await?;
        let (mut of_ours, mut of_smallest, mut trips) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..options.rounds() {
            let (mut chunks_of_ours, mut chunks_of_smallest) = (Vec::new(), Vec::new());
            let mut asked = 0;
            for chunk in 0..CHUNKS {
                let number = round * CHUNKS + chunk;
                let keys: Vec<_> = (0..TASKS).map(|task| keys(task, number)).collect();
                for turn in 0..2 {
                    let is_ours = (number + turn).is_multiple_of(2);
                    if is_ours && options.wants_subject(OURS) {
                        let before = server.script_count();
                        chunks_of_ours.push(measure_rate(&ours, keys.clone()).await?);
                        asked += server.script_count() - before;
                    } else if !is_ours && options.wants_subject(BASELINE) {
                        // The usual number of calls, because more would take twenty times as long.
                        let keys = keys.iter().map(|keys| keys[..CALLS_PER_CHUNK].to_vec()).collect();
                        chunks_of_smallest.push(measure_rate(&smallest, keys).await?);
                    }
                }
            }
            if options.wants_subject(OURS) {
                trips.push(asked as f64 * 100.0 / (CHUNKS * TASKS * calls) as f64);
            }
            of_ours.extend(MedianRange::of_figures(&chunks_of_ours).map(|spread| spread.median));
            of_smallest.extend(MedianRange::of_figures(&chunks_of_smallest).map(|spread| spread.median));
        }
        Ok::<_, String>((of_ours, of_smallest, trips))
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let server = run_on_core(0, RedisServer::start).ok_or_else(|| "redis-server: is not installed".to_owned());
    // The server has the other core.
    match server.and_then(|server| run_on_core(1, || runtime.block_on(play_all(server)))) {
        Ok((of_ours, of_smallest, trips)) => {
            rows[0].push(OURS, of_ours);
            rows[0].push(BASELINE, of_smallest);
            rows[1].push(OURS, trips);
            rows
        }
        Err(reason) => {
            rows.iter_mut().for_each(|row| row.skipped.push(reason.clone()));
            rows
        }
    }
}

async fn load_smallest_script(url: &str) -> Result<SmallestScript, String> {
    let connect = async {
        let mut connection = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
        let script = redis::Script::new(SMALLEST_SCRIPT);
        script.load_async(&mut connection).await?;
        Ok::<_, redis::RedisError>(SmallestScript { connection, hash: script.get_hash().into() })
    };
    connect.await.map_err(|error| error.to_string())
}

/// Returns the decisions per second of all tasks together, each with its keys.
async fn measure_rate(subject: &impl AsyncSubject, keys: Vec<Vec<u32>>) -> Result<f64, String> {
    let count: usize = keys.iter().map(Vec::len).sum();
    let begin = Instant::now();
    let tasks: Vec<_> = keys
        .into_iter()
        .map(|keys| {
            let mut subject = subject.clone();
            tokio::spawn(async move {
                for key in keys {
                    if !subject.decide(key).await {
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
    Ok(count as f64 / begin.elapsed().as_secs_f64())
}
