//! The order of calls: lanes, reserved shares, caps and hours.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Empty, Full};
use tidegate::clock::TokioClock;
use tidegate::outbound::cache::{Cache, CacheStatus};
use tidegate::outbound::{
    Attempt, AttemptOutcome, CallError, CallErrorKind, CallOptions, CallStats, Outbound, Provider, Upstream,
};
use tidegate::policy::{Policy, PolicySources};
use tidegate::store::Memory;
use tidegate::{Clock as _, Span, Time};
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::Delivery;
use tidegate_core::{Class, DurationHistogram, Lane};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::common::{Answers, GOOD, Log, options, policy, provider, spawn, starts, with_class};

type Api = Provider<Memory, TokioClock>;

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Counts its concurrent requests.
#[derive(Clone, Default)]
struct Counted {
    now: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
    takes: Duration,
}

impl Counted {
    fn taking(takes: Duration) -> Self {
        Self { takes, ..Self::default() }
    }

    fn most(&self) -> u32 {
        self.most.load(Ordering::Relaxed)
    }
}

impl Upstream for Counted {
    type Reply = ();

    async fn send(&mut self, _attempt: Attempt) -> AttemptOutcome<()> {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(now, Ordering::Relaxed);
        sleep(self.takes).await;
        self.now.fetch_sub(1, Ordering::Relaxed);
        AttemptOutcome { value: (), report: GOOD }
    }
}

#[tokio::test(start_paused = true)]
async fn musicbrainz_calls_are_sequential_once_per_second() {
    let text = "[outbound.provider.mb]\npreset = \"musicbrainz\"\nuser_agent = \"App/1 ( me@example.com )\"\n";
    let policy = Policy::load(PolicySources::new().file("test.toml", text)).unwrap();
    let outbound = Outbound::in_memory(&policy, TokioClock::default()).unwrap();
    let (api, log) = (outbound.provider("mb").unwrap(), Log::default());
    let lanes = [Lane::Background, Lane::User, Lane::Webhook, Lane::Background, Lane::Webhook];
    let mut calls = Vec::new();
    for (name, lane) in (0..).zip(lanes) {
        calls.push(spawn(
            api,
            options(lane),
            Answers::of(api, &[GOOD], &log, name).after(Duration::from_millis(1_300)),
        ));
        tokio::task::yield_now().await;
    }
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let slow = starts(&log);
    assert!(slow.iter().map(|(_, name)| *name).eq(0..5), "{slow:?}");
    assert!(slow.windows(2).all(|two| two[1].0 - two[0].0 >= 1_300), "one at a time: {slow:?}");
    let log = Log::default();
    let quick = |name| spawn(api, CallOptions::default(), Answers::of(api, &[GOOD], &log, name));
    for call in (0..5).map(quick).collect::<Vec<_>>() {
        call.await.unwrap().unwrap();
    }
    let quick = starts(&log);
    assert!(quick.windows(2).all(|two| two[1].0 - two[0].0 >= 1_000), "a second apart: {quick:?}");
    assert!(quick[4].0 < 4_200, "and not much more: {quick:?}");
}

/// User traffic at twice the limit, without end.
async fn flood(api: &Api, calls: &mut JoinSet<()>) {
    for _ in 0..20 {
        let (api, mut upstream) = (api.clone(), Answers::of(api, &[GOOD], &Log::default(), 0));
        calls.spawn(async move {
            let _ = api.call(options(Lane::User), &mut upstream).await;
        });
    }
    sleep(secs(1)).await;
    while calls.try_join_next().is_some() {}
}

#[tokio::test(start_paused = true)]
async fn background_keeps_its_share_during_a_flood() {
    let settings = "limit = \"10 per 1s\"\nadaptive = \"off\"\nlead = \"1ms\"\nbackground = { timeout = \"1h\" }\n\
                    user = { timeout = \"5s\" }";
    let (api, log) = (provider(settings), Log::default());
    let mut users = JoinSet::new();
    flood(&api, &mut users).await;
    let began = api.clock().now();
    let mut calls = Vec::new();
    for name in 0..60 {
        calls.push(spawn(&api, options(Lane::Background), Answers::of(&api, &[GOOD], &log, name)));
    }
    for _ in 0..30 {
        flood(&api, &mut users).await;
    }
    let during: Vec<_> = log.lock().unwrap().iter().map(|(at, ..)| at.since(began)).collect();
    assert!((28..=34).contains(&during.len()), "a tenth of 10/s for 30 s: {}", during.len());
    let longest = during.windows(2).map(|two| two[1].as_micros() - two[0].as_micros()).max().unwrap();
    assert!(longest <= 2_000_000, "a bounded wait: {longest} µs");
    users.shutdown().await;
    let alone_at = api.clock().now();
    let left = u64::try_from(60 - during.len()).unwrap();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let took = api.clock().now().since(alone_at).as_micros();
    assert!(took <= left * 100_000 + 1_000_000, "{left} calls at 10/s took {took} µs");
    assert!(log.lock().unwrap().iter().map(|(_, name, _)| *name).eq(0..60), "in order");
}

#[tokio::test(start_paused = true)]
async fn a_webhook_overtakes_waiting_background_calls() {
    let (api, log) = (provider("limit = \"1 per 1s\"\nadaptive = \"off\"\ntimeout = \"60s\""), Log::default());
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 9)).await.unwrap();
    let mut calls = Vec::new();
    for name in 0..5 {
        calls.push(spawn(&api, options(Lane::Background), Answers::of(&api, &[GOOD], &log, name)));
    }
    tokio::task::yield_now().await;
    calls.push(spawn(&api, options(Lane::Webhook), Answers::of(&api, &[GOOD], &log, 5)));
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert!(starts(&log).iter().map(|(_, name)| *name).eq([9, 5, 0, 1, 2, 3, 4]), "{:?}", starts(&log));
}

#[tokio::test(start_paused = true)]
async fn a_lanes_in_flight_cap_blocks_only_it() {
    let settings = "adaptive = \"off\"\ntimeout = \"1h\"\nbackground = { in_flight = 2 }\nwebhook = { in_flight = 3 }";
    let api = provider(settings);
    let counted = [(); 3].map(|()| Counted::taking(secs(1)));
    let mut calls = JoinSet::new();
    for (lane, upstream) in Lane::ALL.into_iter().zip(&counted) {
        for _ in 0..24 {
            let (api, mut upstream) = (api.clone(), upstream.clone());
            calls.spawn(async move { api.call(options(lane), &mut upstream).await.map(drop) });
        }
    }
    let began = api.clock().now();
    while let Some(done) = calls.join_next().await {
        done.unwrap().unwrap();
    }
    assert_eq!(counted.each_ref().map(Counted::most), [2, 24, 3]);
    let took = api.clock().now().since(began);
    assert_eq!(took, Span::from_secs(12), "24 background calls, two at a time");
}

#[tokio::test(start_paused = true)]
async fn only_background_pauses_outside_its_hours() {
    // 2026-01-01 00:00 UTC is 01:00 in Berlin.
    let settings = "adaptive = \"off\"\n\
                    background = { hours = \"22:00-06:00 in Europe/Berlin\", timeout = \"24h\" }";
    let midnight = Time::from_secs(1_767_225_600);
    let hour = |hour: u64| midnight + Span::from_secs(hour * 3600);
    let outbound = Outbound::in_memory(&policy(settings), TokioClock::at(midnight)).unwrap();
    let (api, log) = (outbound.provider("api").unwrap(), Log::default());
    let upstream = Answers::of(api, &[GOOD], &log, 0);
    api.call(options(Lane::Background), &mut upstream.clone()).await.unwrap();
    assert_eq!(api.clock().now(), midnight, "within its hours it goes at once");
    sleep(secs(5 * 3600)).await;

    let hasty = CallOptions { timeout: Some(secs(3600)), ..options(Lane::Background) };
    let error = api.call(hasty, &mut upstream.clone()).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::LanePaused { until } if until == hour(21)), "{error:?}");
    assert_eq!((api.clock().now(), error.retry_after()), (hour(5), Some(Span::from_secs(16 * 3600))), "told at once");

    let waits = spawn(api, options(Lane::Background), upstream.clone());
    api.call(options(Lane::User), &mut upstream.clone()).await.unwrap();
    api.call(options(Lane::Webhook), &mut upstream.clone()).await.unwrap();
    assert_eq!(api.clock().now(), hour(5), "nobody else waits");
    waits.await.unwrap().unwrap();
    assert_eq!(api.clock().now(), hour(21), "22:00 in Berlin");
}

/// A call that still waits when the hours end waits for the next hours.
#[tokio::test(start_paused = true)]
async fn waiting_background_calls_resume_in_the_next_hours() {
    let settings = "limit = \"1 per 10m\"\nadaptive = \"off\"\n\
                    background = { hours = \"22:00-06:00 in Europe/Berlin\", timeout = \"48h\" }";
    let six = Time::from_secs(1_767_225_600 + 5 * 3600);
    let outbound = Outbound::in_memory(&policy(settings), TokioClock::at(six - Span::from_secs(300))).unwrap();
    let (api, log) = (outbound.provider("api").unwrap(), Log::default());
    let upstream = Answers::of(api, &[GOOD], &log, 0);
    api.call(options(Lane::Background), &mut upstream.clone()).await.unwrap();
    let waits = spawn(api, options(Lane::Background), upstream.clone());
    waits.await.unwrap().unwrap();
    assert_eq!(api.clock().now(), six + Span::from_secs(16 * 3600), "its turn came at 06:05, and it rested by then");
}

/// Answers with HTTP responses.
struct Page(Answers);

impl Upstream for Page {
    type Reply = Response<Full<Bytes>>;

    async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<Self::Reply> {
        let ended = self.0.send(attempt).await;
        AttemptOutcome { value: Response::new(Full::from("page")), report: ended.report }
    }
}

/// A background call that others wait for is as urgent as the most urgent of them.
#[tokio::test(start_paused = true)]
async fn an_urgent_follower_raises_the_background_leader() {
    let settings = "limit = \"1 per 1s\"\nadaptive = \"off\"\ncache = { ttl = \"1h\" }\nbackground = { timeout = \"1h\" }\n\
                    user = { timeout = \"1h\" }";
    let outbound = Outbound::in_memory(&policy(settings), TokioClock::default()).unwrap();
    let (api, cache, log) = (outbound.provider("api").unwrap(), Cache::for_outbound(&outbound), Log::default());
    let get = |name: u32, lane, path: &str| {
        let (api, cache, log) = (api.clone(), cache.clone(), Arc::clone(&log));
        let request = Request::get(path).body(Empty::<Bytes>::new()).unwrap();
        tokio::spawn(async move {
            let send = async |options: CallOptions, _: Request<Empty<Bytes>>| {
                let mut page = Page(Answers::of(&api, &[GOOD], &log, name));
                let done = api.call(options, &mut page).await;
                done.map(|done| done.value)
                    .map_err(|error: CallError<_>| CallError { last_reply: None::<()>, ..plain(error) })
            };
            let reply = cache.call(&api, options(lane), request, send).await.unwrap();
            let by = *reply.extensions().get::<CacheStatus>().unwrap();
            let stats = reply.extensions().get::<CallStats>().copied();
            let Ok::<_, Infallible>(body) = reply.into_body().collect().await.map_err(|_| unreachable!());
            assert_eq!(body.to_bytes(), "page");
            (by, api.clock().now(), stats)
        })
    };
    let began = api.clock().now();
    get(9, Lane::User, "/first").await.unwrap();
    let mut users = Vec::new();
    let background = get(0, Lane::Background, "/shared");
    tokio::task::yield_now().await;
    for name in 1..=10 {
        users.push(get(name, Lane::User, &format!("/{name}")));
        tokio::task::yield_now().await;
    }
    sleep(Duration::from_millis(100)).await;
    let joined = api.clock().now();
    let (by, at, stats) = get(10, Lane::Webhook, "/shared").await.unwrap();
    let waited = CallStats { attempts: 0, waited: at.since(joined), credential: 0 };
    assert_eq!((by, stats), (CacheStatus::Coalesced, Some(waited)));
    let waits = api.inspect(|state, _| state.stats.waits.each_ref().map(DurationHistogram::count));
    assert_eq!(waits, [1, 1, 0], "the sent call keeps its own lane");
    assert!(at.since(began) <= Span::from_millis(1_500), "the next slot is its own: {}", at.since(began));
    assert_eq!(background.await.unwrap().0, CacheStatus::Miss);
    for user in users {
        assert_eq!(user.await.unwrap().0, CacheStatus::Miss);
    }
    let order: Vec<_> = starts(&log).iter().map(|(_, name)| *name).collect();
    assert_eq!(order, [9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
}

fn plain<T>(error: CallError<T>) -> CallError {
    let CallError { provider, kind: why, stats: happened, failed_at: at, .. } = error;
    CallError { provider, kind: why, last_reply: None, stats: happened, failed_at: at }
}

/// Answers after a delay. If the time runs out before, it reports the timeout as a client does.
struct Slow(Duration);

impl Upstream for Slow {
    /// True if it answered in time.
    type Reply = bool;

    async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<bool> {
        let in_time = attempt.time_left > self.0;
        sleep(self.0.min(attempt.time_left)).await;
        let class = if attempt.time_left < attempt.conclusive_after { Class::Cancelled } else { Class::Transient };
        let reply = if in_time { GOOD } else { AttemptReport { delivery: Delivery::Unknown, ..with_class(class) } };
        AttemptOutcome { value: in_time, report: reply }
    }
}

/// A request sent just before its deadline fails, and would take the turn of a call that could succeed.
#[tokio::test(start_paused = true)]
async fn double_the_load_uses_the_full_limit() {
    let api = provider("limit = \"10/s\"\ntimeout = \"5s\"");
    let mut calls = JoinSet::new();
    for _ in 0..20 * 60 {
        let api = api.clone();
        calls.spawn(async move {
            let began = api.clock().now();
            let done = api.call(CallOptions::default(), &mut Slow(Duration::from_millis(300))).await;
            let took = api.clock().now().since(began);
            assert!(took <= Span::from_millis(5_001), "{took}");
            done.is_ok_and(|done| done.value)
        });
        sleep(Duration::from_millis(50)).await;
    }
    let mut good = 0;
    while let Some(done) = calls.join_next().await {
        good += usize::from(done.unwrap());
    }
    assert!(good >= 570, "{good} of 600");
    assert!(api.inspect(|state, now| state.breaker.peek(now).is_ok()));
}

/// A caller with a very short timeout shows nothing about the provider.
#[tokio::test(start_paused = true)]
async fn short_timeouts_are_no_provider_failure() {
    let api = provider("breaker = { failures = 5, open = \"5m\" }");
    for _ in 0..20 {
        let hasty = CallOptions { timeout: Some(Duration::from_millis(1)), ..CallOptions::default() };
        let error = api.call(hasty, &mut Slow(Duration::from_millis(50))).await.unwrap_err();
        assert!(matches!(error.kind, CallErrorKind::DeadlineExceeded), "{error}");
    }
    api.call(CallOptions::default(), &mut Slow(Duration::from_millis(50))).await.unwrap();
    let hung = CallOptions { timeout: Some(Duration::from_secs(6)), ..CallOptions::default() };
    for _ in 0..5 {
        api.call(hung.clone(), &mut Slow(Duration::from_secs(60))).await.unwrap_err();
    }
    assert!(api.inspect(|state, now| state.breaker.peek(now).is_err()), "a provider that hangs is not well");
}
