//! Hedges: second requests next to slow ones.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tidegate::clock::TokioClock;
use tidegate::outbound::{CallStats, OutboundLayer, ReplayBody};
use tidegate::store::Memory;
use tidegate_core::Lane;
use tower::{Layer as _, ServiceExt as _};

use crate::common::{Api, LOGIN, PAIR, answer, ask, get, layer, limited, now, post, status, text};

const HEDGED: &str = "hedge_after = \"1s\"\n";

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// A provider that answers the n-th request with n, after the n-th number of milliseconds.
fn answering(millis: &'static [u64]) -> Api {
    let takes = |number: usize| Duration::from_millis(millis[number.min(millis.len() - 1)]);
    Api::new(|number, _| answer(200, &[], &number.to_string())).taking_each(takes)
}

fn in_flight(layer: &OutboundLayer<Memory, TokioClock>) -> u32 {
    layer.provider().inspect(|state, _| state.lanes.in_flight(Lane::User))
}

fn budget(layer: &OutboundLayer<Memory, TokioClock>) -> u64 {
    layer.provider().inspect(|state, _| state.budget.remaining())
}

#[tokio::test(start_paused = true)]
async fn a_hedge_wins_if_the_first_is_slow() {
    let api = answering(&[10_000, 50]);
    let layer = layer(&format!("{HEDGED}{PAIR}"));
    let began = now();
    let response = ask(&layer.layer(api.clone()), get("/x?a=b")).await.unwrap();
    assert_eq!(now() - began, Duration::from_millis(1_050));
    let happened = *response.extensions().get::<CallStats>().unwrap();
    assert_eq!((happened.attempts, happened.credential), (2, 1), "with the other credential");
    assert_eq!((api.open(), in_flight(&layer)), (0, 1), "the slow one was let go, the other's body is still to come");
    assert_eq!(text(response).await, "1");
    assert_eq!(in_flight(&layer), 0);
    let arrived = api.arrived();
    assert_eq!(arrived[1].at - arrived[0].at, secs(1));
    assert_eq!(arrived[0].uri, arrived[1].uri);
}

#[tokio::test(start_paused = true)]
async fn the_first_request_wins_over_slower_hedges() {
    let api = answering(&[1_500, 600]);
    let layer = layer(&format!("{HEDGED}{PAIR}"));
    let response = ask(&layer.layer(api.clone()), get("/x")).await.unwrap();
    let happened = *response.extensions().get::<CallStats>().unwrap();
    assert_eq!((happened.attempts, happened.credential, api.count(), api.open()), (2, 0, 2, 0));
    assert_eq!((text(response).await.as_str(), in_flight(&layer)), ("0", 0));
    // A quick request has no hedge.
    let quick = answering(&[999]);
    let response = ask(&layer.layer(quick.clone()), get("/x")).await.unwrap();
    assert_eq!((response.extensions().get::<CallStats>().unwrap().attempts, quick.count()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn only_repeatable_requests_are_hedged() {
    for (key, sends) in [(None, 1), (Some("k1"), 2)] {
        let api = answering(&[5_000, 50]);
        let response = ask(&layer(HEDGED).layer(api.clone()), post("the body", key)).await.unwrap();
        assert_eq!((response.status(), api.count()), (StatusCode::OK, sends));
        assert!(api.arrived().iter().all(|request| request.body == "the body"), "{:?}", api.arrived());
    }
    let api = answering(&[5_000, 50]);
    let short = layer(&format!("{HEDGED}replay = \"4B\""));
    let response = ask(&short.layer(api.clone()), post("the body", Some("k1"))).await.unwrap();
    assert_eq!((response.status(), api.count()), (StatusCode::OK, 1), "longer than what is kept");
    let api = answering(&[5_000, 50]);
    ask(&layer("").layer(api.clone()), get("/x")).await.unwrap();
    assert_eq!(api.count(), 1, "nobody asked for it");
}

#[tokio::test(start_paused = true)]
async fn a_slow_login_causes_no_hedge() {
    let api = Api::new(|_, request| match request.uri.ends_with("/login") {
        true => answer(200, &[], r#"{"token":"t"}"#),
        false => status(200),
    });
    let api = api.taking_each(|number| secs(if number == 0 { 3 } else { 0 }));
    let response = ask(&layer(&format!("{HEDGED}{LOGIN}")).layer(api.clone()), get("/x")).await.unwrap();
    assert_eq!((response.extensions().get::<CallStats>().unwrap().attempts, api.count()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_spent_budget_sends_no_hedge() {
    let api = answering(&[5_000, 50, 5_000, 50]);
    let layer = layer(&format!("{HEDGED}budget = {{ ratio = 0.0, min = 1 }}"));
    for (attempts, sent) in [(2, 2), (1, 3)] {
        let response = ask(&layer.layer(api.clone()), get("/x")).await.unwrap();
        assert_eq!((response.extensions().get::<CallStats>().unwrap().attempts, api.count()), (attempts, sent));
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_limit_sends_no_hedge() {
    for (limit, settings) in [
        ("1 per 60s", ""),
        ("1/m", ""),
        ("1 per calendar day", ""),
        ("1 in flight", ""),
        ("1000/s", "sequential = true"),
        ("1000/s", "credential_limit = \"1 per 60s\"\ncredentials = [\"env:A\"]\nauth = \"bearer\""),
        ("1000/s", "user = { in_flight = 1 }"),
        ("1000/s", "credential_limit = \"1 in flight\"\ncredentials = [\"env:A\"]\nauth = \"bearer\""),
    ] {
        let api = answering(&[5_000, 50]);
        let layer = limited(limit, &format!("{HEDGED}{settings}"));
        let before = budget(&layer);
        let response = ask(&layer.layer(api.clone()), get("/x")).await.unwrap();
        let happened = *response.extensions().get::<CallStats>().unwrap();
        assert_eq!((happened.attempts, api.count()), (1, 1), "{limit} {settings}");
        assert_eq!((budget(&layer), layer.provider().inspect(|state, _| state.lanes.waiting(Lane::User))), (before, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_hedge_takes_no_waiting_calls_turn() {
    let api = answering(&[5_000, 5_000, 50]);
    let layer = limited("2 per 60s", HEDGED);
    let service = layer.layer(api.clone());
    let asked = [0, 500].map(|millis| {
        let service = &service;
        async move {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            ask(service, get("/x")).await.unwrap().extensions().get::<CallStats>().unwrap().attempts
        }
    });
    assert_eq!(join_all(asked).await, [1, 1], "both places of the window are taken by calls");
    assert_eq!(api.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_failed_request_waits_for_the_other() {
    // The delays of the replies in milliseconds, the failing one, and the number of the one that counts.
    for (millis, fails, counts) in [(&[2_000, 3_000][..], 0, "1"), (&[4_000, 500], 1, "0")] {
        let api = Api::new(move |number, _| match number {
            bad if bad == fails => status(503),
            number => answer(200, &[], &number.to_string()),
        });
        let api = api.taking_each(|number| Duration::from_millis(millis[number]));
        let layer = layer(&format!("{HEDGED}{PAIR}"));
        let began = now();
        let response = ask(&layer.layer(api.clone()), get("/x")).await.unwrap();
        assert_eq!(now() - began, secs(4));
        let happened = *response.extensions().get::<CallStats>().unwrap();
        assert_eq!((happened.attempts, happened.credential.to_string().as_str()), (2, counts));
        assert_eq!((text(response).await.as_str(), in_flight(&layer), api.open()), (counts, 0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn two_hedged_failures_are_one_attempt() {
    let api = Api::new(|_, _| status(503)).taking(secs(2));
    let layer = layer(&format!("{HEDGED}breaker = {{ failures = 2 }}\nretry = {{ max_attempts = 2, base = \"1ms\" }}"));
    let service = layer.layer(api.clone());
    let response = ask(&service, get("/x")).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.extensions().get::<CallStats>().unwrap().attempts, 4, "each attempt has one beside it");
    assert!(layer.provider().inspect(|state, now| state.breaker.peek(now).is_err()), "two attempts");
    drop(response);
    assert_eq!(in_flight(&layer), 0);
}

#[tokio::test(start_paused = true)]
async fn a_throttled_losers_credential_cools_down() {
    let api = Api::new(|_, request| match request.bearer() {
        "pl4nted-s3cr3t-a" => answer(429, &[("retry-after", "60")], ""),
        _ => status(200),
    });
    let api = api.taking_each(|number| secs([2, 3, 0][number]));
    let layer = layer(&format!("{HEDGED}{PAIR}"));
    let service = layer.layer(api.clone());
    for credential in [1, 1] {
        let response = ask(&service, get("/x")).await.unwrap();
        assert_eq!(response.extensions().get::<CallStats>().unwrap().credential, credential);
    }
    assert_eq!(api.count(), 3);
}

#[tokio::test(start_paused = true)]
async fn dropping_the_call_drops_both_requests() {
    let api = answering(&[5_000, 5_000]);
    let layer = layer(HEDGED);
    let service = layer.layer(api.clone());
    let before = api.open();
    tokio::time::timeout(secs(2), ask(&service, get("/x"))).await.unwrap_err();
    assert_eq!((api.count(), api.open(), in_flight(&layer)), (2, before, 0));
}

#[tokio::test(start_paused = true)]
async fn hedges_stay_within_the_budget() {
    let api = Api::new(|_, _| status(200)).taking(secs(3));
    let layer = layer(&format!("{HEDGED}budget = {{ ratio = 0.1, min = 3 }}"));
    let service = layer.layer(api.clone());
    for _ in 0..20 {
        join_all((0..10).map(|_| ask(&service, get("/x")))).await.into_iter().for_each(|reply| drop(reply.unwrap()));
    }
    let hedges = api.count() - 200;
    assert!((20..=23).contains(&hedges), "{hedges}");
}

/// Counts requests as they arrive in a trailing window, even if the caller doesn't wait for the reply.
#[derive(Clone)]
struct Exact(Arc<Counted>);

struct Counted {
    limit: usize,
    window: Duration,
    arrivals: Mutex<Vec<tokio::time::Instant>>,
    throttled: AtomicUsize,
    rng: Mutex<SmallRng>,
}

impl tower::Service<Request<ReplayBody<Full<Bytes>>>> for Exact {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<ReplayBody<Full<Bytes>>>) -> Self::Future {
        let counted = Arc::clone(&self.0);
        let (there, back) = {
            let mut rng = counted.rng.lock().unwrap();
            let mut way = || Duration::from_micros(rng.random_range(5_000..=200_000));
            let (there, back) = (way(), way());
            (there, back + if rng.random_bool(0.3) { secs(2) } else { Duration::ZERO })
        };
        let arrived = tokio::spawn(async move {
            tokio::time::sleep(there).await;
            let mut arrivals = counted.arrivals.lock().unwrap();
            let recent = arrivals.iter().rev().take_while(|at| now() - **at < counted.window).count();
            if recent >= counted.limit {
                counted.throttled.fetch_add(1, Ordering::Relaxed);
                return StatusCode::TOO_MANY_REQUESTS;
            }
            arrivals.push(now());
            StatusCode::OK
        });
        Box::pin(async move {
            let status = arrived.await.unwrap();
            tokio::time::sleep(back).await;
            Ok(Response::builder().status(status).body(Full::default()).unwrap())
        })
    }
}

#[tokio::test(start_paused = true)]
async fn hedges_never_exceed_an_exact_providers_window() {
    let api = Exact(Arc::new(Counted {
        limit: 40,
        window: secs(10),
        arrivals: Mutex::default(),
        throttled: AtomicUsize::new(0),
        rng: Mutex::new(SmallRng::seed_from_u64(7)),
    }));
    let layer = limited("40 per 10s", "hedge_after = \"250ms\"\nadaptive = \"off\"\ntimeout = \"60s\"");
    let service = layer.layer(api.clone());
    let began = now();
    let worker = |seed: u64| {
        let service = &service;
        async move {
            let (mut calls, mut attempts) = (0, 0);
            let mut rng = SmallRng::seed_from_u64(seed);
            while now() - began < secs(600) {
                let response = service.clone().oneshot(get("/x")).await.unwrap();
                assert_eq!(response.status(), StatusCode::OK);
                calls += 1;
                attempts += response.extensions().get::<CallStats>().unwrap().attempts as usize;
                tokio::time::sleep(Duration::from_millis(rng.random_range(0..2_000))).await;
            }
            (calls, attempts)
        }
    };
    let (calls, attempts) =
        join_all((0..7).map(worker)).await.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let hedges = attempts - calls;
    assert_eq!(api.0.throttled.load(Ordering::Relaxed), 0, "{calls} calls, {hedges} hedges");
    assert!(calls > 1_500 && hedges > calls / 20 && hedges <= calls / 5 + 3, "{calls} calls, {hedges} hedges");
}
