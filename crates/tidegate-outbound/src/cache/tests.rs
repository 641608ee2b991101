//! A scripted provider and its use by the cache's tests.

mod bodies;
mod freshness;
mod sharing;
mod together;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, header};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;
use tidegate_core::{Lane, Time};
use tidegate_policy::Secret;
use tidegate_policy::outbound::CacheRules;
use tokio::time::{Instant, Sleep, sleep};

use super::super::Urgency;
use super::single_flight::FlightMember;
use super::*;

const MIB: u64 = 1 << 20;

/// Follows tokio's clock, which tests pause.
#[derive(Clone)]
struct Paused(Instant);

impl Paused {
    #[expect(clippy::disallowed_methods, reason = "the runtime's clock stands still, and goes on as the test says")]
    fn new() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Paused {
    #[expect(clippy::disallowed_methods, reason = "the runtime's clock stands still, and goes on as the test says")]
    fn now(&self) -> Time {
        Time::from_secs(1_767_225_600) + Span::from_duration(Instant::now() - self.0)
    }
}

/// A piece of a scripted body.
enum Piece {
    Data(Bytes),
    Pause(Duration),
    Trailers,
    Break,
}

#[derive(Default)]
struct Script {
    pieces: VecDeque<Piece>,
    pausing: Option<Pin<Box<Sleep>>>,
    has_broken: bool,
}

impl Script {
    fn of(pieces: impl IntoIterator<Item = Piece>) -> Self {
        Self { pieces: pieces.into_iter().collect(), ..Self::default() }
    }

    fn text(text: impl Into<Bytes>) -> Self {
        Self::of([Piece::Data(text.into())])
    }
}

impl Body for Script {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        loop {
            if let Some(pausing) = &mut self.pausing {
                std::task::ready!(pausing.as_mut().poll(context));
                self.pausing = None;
            }
            return Poll::Ready(match self.pieces.pop_front() {
                None => None,
                Some(Piece::Data(bytes)) => Some(Ok(Frame::data(bytes))),
                Some(Piece::Trailers) => Some(Ok(Frame::trailers(HeaderMap::new()))),
                Some(Piece::Break) => {
                    self.has_broken = true;
                    Some(Err("broken"))
                }
                Some(Piece::Pause(time)) => {
                    self.pausing = Some(Box::pin(sleep(time)));
                    continue;
                }
            });
        }
    }

    /// Nothing follows an error.
    fn size_hint(&self) -> SizeHint {
        if self.has_broken { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failed {
    Outage,
    Late,
    Otherwise,
}

impl CacheCallError for Failed {
    fn is_outage(&self) -> bool {
        *self == Self::Outage
    }

    fn is_call_specific(&self) -> bool {
        *self == Self::Late
    }
}

type Reply = Result<Response<Script>, Failed>;
/// Returns the provider's reply to its n-th request, from 1.
type Answers = Box<dyn Fn(usize, &Parts) -> Reply + Send + Sync>;

/// A scripted provider that records its requests.
struct Api {
    name: &'static str,
    rules: Option<CacheRules>,
    credentials: usize,
    secret: Mutex<Option<&'static str>>,
    injects: Option<HeaderName>,
    latency: Duration,
    answers: Answers,
    calls: AtomicUsize,
    seen: Mutex<Vec<(CallOptions, Parts)>>,
    raised: Mutex<Vec<(Urgency, Lane)>>,
}

impl Api {
    fn new(answers: impl Fn(usize, &Parts) -> Reply + Send + Sync + 'static) -> Self {
        Self {
            name: "tmdb",
            rules: Some(CacheRules::default()),
            credentials: 1,
            secret: Mutex::default(),
            injects: None,
            latency: Duration::ZERO,
            answers: Box::new(answers),
            calls: AtomicUsize::new(0),
            seen: Mutex::default(),
            raised: Mutex::default(),
        }
    }

    /// A provider that answers each request with these headers and the number of the request.
    fn with(headers: &'static [(&'static str, &'static str)]) -> Self {
        Self::new(move |number, _| Ok(reply(200, headers, format!("reply {number}"))))
    }

    fn ruled(mut self, change: impl FnOnce(&mut CacheRules)) -> Self {
        change(self.rules.as_mut().unwrap());
        self
    }

    fn slow(mut self, latency: Duration) -> Self {
        self.latency = latency;
        self
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// A header of the last request that it received.
    fn saw(&self, name: &str) -> Option<String> {
        let seen = self.seen.lock();
        Some(seen.last()?.1.headers.get(name)?.to_str().unwrap().to_owned())
    }

    async fn answer(&self, options: CallOptions, request: Request<Full<Bytes>>) -> Reply {
        let number = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        let (parts, _) = request.into_parts();
        let timeout = options.timeout;
        self.seen.lock().push((options, parts.clone()));
        if tokio::time::timeout(timeout.unwrap_or(Duration::MAX), sleep(self.latency)).await.is_err() {
            return Err(Failed::Late);
        }
        (self.answers)(number, &parts)
    }
}

impl Origin for Api {
    fn name(&self) -> &str {
        self.name
    }

    fn rules(&self) -> Option<&CacheRules> {
        self.rules.as_ref()
    }

    fn credential_count(&self) -> usize {
        self.credentials
    }

    async fn secret(&self) -> Option<Arc<Secret>> {
        self.secret.lock().map(|secret| Arc::new(Secret::new(secret)))
    }

    fn injected_header(&self) -> Option<HeaderName> {
        self.injects.clone()
    }

    fn timeout(&self, _lane: Lane) -> Duration {
        Duration::from_secs(10)
    }

    fn raise(&self, urgency: &Urgency, lane: Lane) {
        self.raised.lock().push((urgency.clone(), lane));
    }
}

fn reply(status: u16, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Response<Script> {
    let mut reply = Response::builder().status(status);
    for (name, value) in headers {
        reply = reply.header(*name, *value);
    }
    reply.body(Script::text(body)).unwrap()
}

fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::default()).unwrap()
}

fn get(path: &str) -> Request<Full<Bytes>> {
    request("GET", path, &[])
}

/// A reply as its caller reads it.
#[derive(Debug)]
struct Got {
    status: u16,
    headers: HeaderMap,
    body: String,
    by: CacheStatus,
}

impl Got {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

fn cache() -> Cache<Paused> {
    Cache::new(8 * MIB, Paused::new())
}

async fn call(cache: &Cache<Paused>, api: &Api, request: Request<Full<Bytes>>) -> Result<Got, Failed> {
    call_with(cache, api, CallOptions::default(), request).await
}

async fn call_with(
    cache: &Cache<Paused>,
    api: &Api,
    options: CallOptions,
    request: Request<Full<Bytes>>,
) -> Result<Got, Failed> {
    let reply = cache.call(api, options, request, |options, request| api.answer(options, request)).await?;
    let (parts, body) = reply.into_parts();
    let body = body.collect().await.expect("the body is whole").to_bytes();
    Ok(Got {
        status: parts.status.as_u16(),
        body: String::from_utf8(body.into()).unwrap(),
        by: *parts.extensions.get().unwrap(),
        headers: parts.headers,
    })
}

/// The result of the next call of each of these.
async fn call_all(cache: &Cache<Paused>, api: &Api, requests: Vec<Request<Full<Bytes>>>) -> Vec<(CacheStatus, String)> {
    let mut replies = Vec::new();
    for request in requests {
        let got = call(cache, api, request).await.unwrap();
        replies.push((got.by, got.body));
    }
    replies
}

/// The key of the flight that calls to this path join while none of its replies is stored.
fn flight_to(cache: &Cache<Paused>, api: &Api, path: &str) -> CacheKey {
    let (keys, (parts, _)) = (&cache.0.key_factory, get(path).into_parts());
    keys.request_key(keys.base_key(api, &parts), &parts)
}

async fn advance(secs: u64) {
    tokio::time::advance(Duration::from_secs(secs)).await;
}

/// True if calls have given back everything that they hold.
fn is_at_rest(cache: &Cache<Paused>) -> bool {
    cache.0.single_flight.0.lock().is_empty() && cache.0.buffer_capacity.reserved.load(Ordering::Relaxed) == 0
}

/// Polls all of these until all are done.
async fn for_each_at_once(futures: impl Iterator<Item = impl Future<Output = ()>>) {
    let mut futures: Vec<_> = futures.map(|future| Some(Box::pin(future))).collect();
    std::future::poll_fn(|context| {
        for slot in &mut futures {
            if let Some(future) = slot
                && future.as_mut().poll(context).is_ready()
            {
                *slot = None;
            }
        }
        if futures.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}
