//! Services that count requests as providers do, behind a network with a delay, and the workers that call them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use jiff::Timestamp;
use tidegate::clock::TokioClock;
use tidegate::outbound::{CallStats, OutboundLayer, OutboundService, ReplayBody};
use tidegate::store::Memory;
use tidegate_testkit::random::RandomSource;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Layer as _, ServiceExt as _};

use crate::common::now;

/// The number of workers that call without a pause.
const WORKERS: usize = 20;
/// The time on the way to the provider, and that on the way back, in milliseconds.
const TRANSIT: (u64, u64) = (20, 60);
/// 2026-01-01 00:00:00 UTC, at which a [`TokioClock`] starts, and some seconds, by which the provider's clock is ahead.
const EPOCH: f64 = 1_767_225_600.0 + 7.0;
/// The header of the replies to requests that were carried out.
const DONE: HeaderName = HeaderName::from_static("x-carried-out");

/// A time of a provider: seconds since the test's start.
pub(crate) type Secs = f64;

/// A request as its provider sees it.
pub(crate) struct Seen {
    pub(crate) at: Secs,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: Bytes,
}

impl Seen {
    /// The body as JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// The time by the provider's clock, in seconds since 1970.
    pub(crate) fn epoch(&self) -> f64 {
        EPOCH + self.at
    }
}

/// A provider's decision and its reply.
pub(crate) struct Counted {
    /// The limit that counts the request.
    pub(crate) limit: String,
    /// The amount that it has used up of what is allowed. `None` if it was refused.
    pub(crate) used: Option<f64>,
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: String,
}

type Judge = dyn FnMut(&Seen) -> Counted + Send;

/// The requests that one limit has counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) asked: u64,
    pub(crate) refused: u64,
    pub(crate) used: f64,
}

/// A provider behind a network. It counts each request when it arrives.
#[derive(Clone)]
pub(crate) struct Provider {
    judge: Arc<Mutex<Judge>>,
    random: Arc<Mutex<RandomSource>>,
    tallies: Arc<Mutex<BTreeMap<String, Tally>>>,
    started_at: Instant,
}

impl Provider {
    pub(crate) fn new(seed: u64, judge: impl FnMut(&Seen) -> Counted + Send + 'static) -> Self {
        Self {
            judge: Arc::new(Mutex::new(judge)),
            random: Arc::new(Mutex::new(RandomSource::from_seed(seed))),
            tallies: Arc::default(),
            started_at: now(),
        }
    }

    async fn transit(&self) {
        let millis = self.random.lock().unwrap().between(TRANSIT.0, TRANSIT.1);
        tokio::time::sleep(Duration::from_millis(millis)).await;
    }

    fn judge(&self, parts: &http::request::Parts, body: Bytes) -> Response<Full<Bytes>> {
        let at = now().duration_since(self.started_at).as_secs_f64();
        let (method, path) = (parts.method.to_string(), parts.uri.path().to_owned());
        let seen = Seen { at, method, path, body };
        let counted = (self.judge.lock().unwrap())(&seen);
        let mut tallies = self.tallies.lock().unwrap();
        let tally = tallies.entry(counted.limit.clone()).or_default();
        tally.asked += 1;
        tally.refused += u64::from(counted.used.is_none());
        tally.used += counted.used.unwrap_or(0.0);
        let date = Timestamp::from_second(seen.epoch() as i64).unwrap().strftime("%a, %d %b %Y %H:%M:%S GMT");
        let mut reply = Response::builder().status(counted.status).header("date", date.to_string());
        for (name, value) in &counted.headers {
            reply = reply.header(*name, value);
        }
        if counted.used.is_some() {
            reply = reply.header(DONE, "1");
        }
        reply.body(Full::new(Bytes::from(counted.body))).unwrap()
    }
}

impl<B> tower::Service<Request<ReplayBody<B>>> for Provider
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: std::error::Error + Send + Sync,
{
    type Response = Response<Full<Bytes>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Response<Full<Bytes>>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReplayBody<B>>) -> Self::Future {
        let provider = self.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
            provider.transit().await;
            let reply = provider.judge(&parts, body);
            provider.transit().await;
            Ok(reply)
        })
    }
}

/// A window that begins with its first request and ends with all of its requests at once.
#[derive(Clone, Debug)]
pub(crate) struct FixedWindow {
    pub(crate) limit: u64,
    pub(crate) length: Secs,
    pub(crate) used: u64,
    pub(crate) ends: Secs,
}

impl FixedWindow {
    pub(crate) fn new(limit: u64, length: Secs) -> Self {
        Self { limit, length, used: 0, ends: 0.0 }
    }

    /// Begins a new window if the last one is over.
    pub(crate) fn refresh(&mut self, at: Secs) {
        if at >= self.ends {
            (self.used, self.ends) = (0, at + self.length);
        }
    }

    pub(crate) fn take(&mut self, at: Secs) -> bool {
        self.refresh(at);
        let is_free = self.used < self.limit;
        if is_free {
            self.used += 1;
        }
        is_free
    }

    pub(crate) fn remaining(&self) -> u64 {
        self.limit - self.used
    }
}

/// A window that looks back from each request.
#[derive(Debug)]
pub(crate) struct SlidingWindow {
    limit: usize,
    length: Secs,
    taken: VecDeque<Secs>,
}

impl SlidingWindow {
    pub(crate) fn new(limit: usize, length: Secs) -> Self {
        Self { limit, length, taken: VecDeque::new() }
    }

    /// Takes one, or tells the time until there is room.
    pub(crate) fn take(&mut self, at: Secs) -> Result<(), Secs> {
        while self.taken.front().is_some_and(|first| *first + self.length <= at) {
            self.taken.pop_front();
        }
        if self.taken.len() >= self.limit {
            return Err(self.taken[0] + self.length - at);
        }
        self.taken.push_back(at);
        Ok(())
    }
}

/// An amount that comes back at a rate.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    pub(crate) capacity: f64,
    pub(crate) per_second: f64,
    pub(crate) level: f64,
    pub(crate) at: Secs,
}

impl Bucket {
    pub(crate) fn new(capacity: f64, per_second: f64) -> Self {
        Self { capacity, per_second, level: capacity, at: 0.0 }
    }

    pub(crate) fn refresh(&mut self, at: Secs) {
        self.level = self.capacity.min(self.level + (at - self.at) * self.per_second);
        self.at = at;
    }

    pub(crate) fn take(&mut self, amount: f64, at: Secs) -> bool {
        self.refresh(at);
        // Sums of times aren't exact.
        let is_free = self.level + 1e-6 >= amount;
        self.level -= if is_free { amount } else { 0.0 };
        is_free
    }

    /// The time until this amount is there.
    pub(crate) fn until(&self, amount: f64) -> Secs {
        ((amount - self.level) / self.per_second).max(0.0)
    }

    /// The amount that a run of this length can use up.
    pub(crate) fn allowed(&self, length: Secs) -> f64 {
        self.capacity + self.per_second * length
    }
}

/// A call that ended: its worker, its wait and its result.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) worker: usize,
    pub(crate) waited: Duration,
    pub(crate) attempts: u32,
    /// The reason of a failure.
    pub(crate) failed: Option<String>,
}

/// The calls of a run.
pub(crate) struct Run {
    name: &'static str,
    seed: u64,
    length: Secs,
    tallies: BTreeMap<String, Tally>,
    pub(crate) calls: Vec<Ended>,
}

/// Lets the workers call for this time. The calls that are under way at its end are abandoned.
pub(crate) async fn run(
    name: &'static str,
    seed: u64,
    layer: OutboundLayer<Memory, TokioClock>,
    provider: Provider,
    length: Secs,
    request: impl Fn(usize, u64) -> Request<Full<Bytes>> + Send + Sync + 'static,
) -> Run {
    let service = layer.layer(provider.clone());
    let end = provider.started_at + Duration::from_secs_f64(length);
    let request = Arc::new(request);
    let calls = Arc::new(Mutex::new(Vec::new()));
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let (service, request, calls) = (service.clone(), Arc::clone(&request), Arc::clone(&calls));
        workers.spawn(async move {
            for number in 0.. {
                let asked = ask(&service, request(worker, number), worker);
                match tokio::time::timeout_at(end, asked).await {
                    Ok(ended) => calls.lock().unwrap().push(ended),
                    Err(_) => return,
                }
            }
        });
    }
    workers.join_all().await;
    let tallies = provider.tallies.lock().unwrap().clone();
    let calls = calls.lock().unwrap().clone();
    Run { name, seed, length, tallies, calls }
}

/// Makes one call.
pub(crate) async fn ask(
    service: &OutboundService<Provider, Memory, TokioClock>,
    request: Request<Full<Bytes>>,
    worker: usize,
) -> Ended {
    match service.clone().oneshot(request).await {
        Ok(reply) => {
            let stats = *reply.extensions().get::<CallStats>().unwrap();
            let is_done = reply.headers().contains_key(DONE);
            let (status, headers) = (reply.status(), reply.headers().clone());
            let body = reply.into_body().collect().await.unwrap().to_bytes();
            let failed = (!is_done).then(|| format!("{status} {headers:?} {body:?}"));
            Ended { worker, waited: stats.waited.as_duration(), attempts: stats.attempts, failed }
        }
        Err(error) => Ended { worker, waited: Duration::ZERO, attempts: 0, failed: Some(error.to_string()) },
    }
}

/// The bounds of a run, in per cent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) max_refused: f64,
    pub(crate) min_used: f64,
}

/// For limits and allowances that the provider tells.
pub(crate) const TOLD: Bounds = Bounds { max_refused: 1.0, min_used: 95.0 };
/// For limits that must be found by trials.
pub(crate) const BY_TRIALS: Bounds = Bounds { max_refused: 4.0, min_used: 90.0 };

impl Run {
    /// Checks each of these limits, given with the amount that it allows in the time of the run: the share of refused
    /// requests and the used share of the amount. No call may have failed.
    pub(crate) fn check(&self, bounds: Bounds, allowed: &[(&str, f64)]) {
        let mut is_good = true;
        for (limit, allowed) in allowed {
            let tally = self.tallies.get(*limit).copied().unwrap_or_default();
            let refused = tally.refused as f64 * 100.0 / tally.asked.max(1) as f64;
            let used = tally.used * 100.0 / allowed;
            println!(
                "| {} | {limit} | {} | {:.0} | {} ({refused:.2} %) | {used:.1} % | seed {} |",
                self.name, tally.asked, allowed, tally.refused, self.seed
            );
            is_good &= refused <= bounds.max_refused && used >= bounds.min_used;
        }
        let failed: Vec<&Ended> = self.calls.iter().filter(|call| call.failed.is_some()).collect();
        if !failed.is_empty() {
            println!("{} failed of {}, such as {:?}", failed.len(), self.calls.len(), failed[0]);
        }
        assert!(is_good && failed.is_empty(), "{self:?}");
    }

    /// The longest wait of the calls of these workers.
    pub(crate) fn longest_wait(&self, workers: impl Fn(usize) -> bool) -> Duration {
        let own = self.calls.iter().filter(|call| workers(call.worker));
        own.map(|call| call.waited).max().unwrap_or_default()
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failed: Vec<&Ended> = self.calls.iter().filter(|call| call.failed.is_some()).take(3).collect();
        f.debug_struct("Run")
            .field("name", &self.name)
            .field("seed", &self.seed)
            .field("length", &self.length)
            .field("tallies", &self.tallies)
            .field("calls", &self.calls.len())
            .field("failed", &failed)
            .finish()
    }
}

/// A request with JSON.
pub(crate) fn post_json(path: &str, kind: &str, body: String) -> Request<Full<Bytes>> {
    Request::post(path).header("content-type", kind).body(Full::new(Bytes::from(body))).unwrap()
}
