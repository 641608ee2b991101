use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response};
use tidegate::layers::{Classification, RepeatIdempotent, RetryLayer, StatusClassifier};
use tidegate::{Backoff, Jitter, Span};
use tidegate_core::{Budget, BudgetSpec, Class, Retry};
use tower::{Layer, Service, ServiceExt};

use super::common::{Failed, Passed as _, Script, TokioClock, by_number, failed, ok, slow};

fn retry(max_attempts: u32) -> Retry {
    let backoff = Backoff::exponential(Span::from_millis(500), Span::from_secs(8)).with_jitter(Jitter::None);
    Retry { max_attempts, backoff, ..Retry::default() }
}

#[tokio::test(start_paused = true)]
async fn three_failed_attempts_wait_twice() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [failed(500), ok(503), failed(502), ok(200)]);
    let mut service = RetryLayer::with_clock(retry(3), None, by_number, clock).layer(script.clone());
    assert_eq!(service.call("a").await, Err(Failed(502)));
    assert_eq!(script.times(), [0, 500, 1_500]);
    assert_eq!(clock.millis(), 1_500, "there is no sleep after the last");
}

#[tokio::test(start_paused = true)]
async fn a_non_retryable_reply_ends_the_call() {
    let clock = TokioClock::default();
    for status in [200, 404, 401, 501] {
        let script = Script::new(clock, [ok(status), failed(418)]);
        let mut service = RetryLayer::with_clock(retry(3), None, by_number, clock).layer(script.clone());
        assert_eq!(service.call("a").await, Ok(status));
        assert_eq!(script.times().len(), 1);
    }
    let script = Script::new(clock, [failed(503), ok(200)]);
    let mut service = RetryLayer::with_clock(retry(3), None, by_number, clock).layer(script.clone());
    assert_eq!(service.call("body").await, Ok(200));
    assert!(script.calls().iter().all(|(_, request)| *request == "body"), "the same request each time");
}

#[tokio::test(start_paused = true)]
async fn the_services_stated_wait_is_a_minimum() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(429), ok(200)]);
    let classifier = |outcome: Result<&u16, &Failed>| Classification {
        retry_after: Some(Span::from_secs(7)),
        ..by_number(outcome).into()
    };
    let mut service = RetryLayer::with_clock(retry(3), None, classifier, clock).layer(script.clone());
    assert_eq!(service.call("a").await, Ok(200));
    assert_eq!(script.times(), [0, 7_000]);

    let script = Script::new(clock, [ok(429), ok(200)]);
    let day = |outcome: Result<&u16, &Failed>| Classification {
        retry_after: Some(Span::from_secs(86_400)),
        ..by_number(outcome).into()
    };
    let mut service = RetryLayer::with_clock(retry(3), None, day, clock).layer(script.clone());
    assert_eq!(service.call("a").await, Ok(429), "longer than calls wait: fails at once");
    assert_eq!(script.times(), [7_000]);
}

#[tokio::test(start_paused = true)]
async fn no_attempt_starts_at_or_after_the_deadline() {
    for (timeout, attempts) in [(500, 1), (501, 2), (1_500, 2), (1_501, 3)] {
        let clock = TokioClock::default();
        let script = Script::new(clock, [failed(503)]);
        let layer = RetryLayer::with_clock(retry(9), None, by_number, clock).timeout(Duration::from_millis(timeout));
        let mut service = layer.layer(script.clone());
        assert_eq!(service.call("a").await, Err(Failed(503)));
        assert_eq!(script.times(), [0, 500, 1_500][..attempts], "{timeout} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn the_shared_budget_grows_by_first_attempts() {
    let clock = TokioClock::default();
    let budget = Arc::new(Budget::new(BudgetSpec { ratio: 500, min: 1, reserve: 10 }));
    let script = Script::new(clock, [failed(503)]);
    let layer = RetryLayer::with_clock(retry(2), Some(Arc::clone(&budget)), by_number, clock);
    let (mut one, mut other) = (layer.layer(script.clone()), layer.layer(script.clone()));
    let mut sent = Vec::new();
    for _ in 0..3 {
        for service in [&mut one, &mut other] {
            let before = script.times().len();
            assert_eq!(service.call("a").await, Err(Failed(503)));
            sent.push(script.times().len() - before);
        }
    }
    // 1 + 0.5 a call: the budget before each decision is 1.5, 1.0, 0.5, 1.0, 0.5, 1.0.
    assert_eq!(sent, [2, 2, 1, 2, 1, 2]);
    assert_eq!(budget.remaining(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_throttled_call_spends_no_budget() {
    let clock = TokioClock::default();
    let budget = Arc::new(Budget::new(BudgetSpec { ratio: 0, min: 0, reserve: 0 }));
    let script = Script::new(clock, [ok(429), ok(200)]);
    let mut service = RetryLayer::with_clock(retry(3), Some(budget), by_number, clock).layer(script);
    assert_eq!(service.call("a").await, Ok(200));
}

#[tokio::test(start_paused = true)]
async fn an_unsent_retry_returns_its_budget() {
    let clock = TokioClock::default();
    let budget = Arc::new(Budget::new(BudgetSpec { ratio: 0, min: 1, reserve: 2 }));
    let script = Script::new(clock, [failed(503), slow(ok(200), 60)]);
    let of_outage = |outcome: Result<&u16, &Failed>| match outcome {
        Err(Failed(529)) => Class::Unavailable,
        outcome => by_number(outcome),
    };
    let mut service =
        RetryLayer::with_clock(retry(3), Some(Arc::clone(&budget)), of_outage, clock).layer(script.clone());
    let within = |millis, call| tokio::time::timeout(Duration::from_millis(millis), call);

    assert!(within(100, service.call("a")).await.is_err());
    assert_eq!((script.times().len(), budget.remaining()), (1, 1), "dropped while it slept");

    script.rewrite([failed(529)]);
    assert!(within(100, service.call("a")).await.is_err());
    assert_eq!((script.times().len(), budget.remaining()), (2, 1), "after an outage without a wait, too");

    script.rewrite([failed(429)]);
    assert!(within(100, service.call("a")).await.is_err());
    assert_eq!((script.times().len(), budget.remaining()), (3, 1), "what wasn't taken doesn't go back");

    script.rewrite([failed(503), slow(ok(200), 60)]);
    assert!(within(1_000, service.call("b")).await.is_err());
    assert_eq!((script.times().len(), budget.remaining()), (5, 0), "dropped when it was sent");
}

#[tokio::test(start_paused = true)]
async fn only_idempotent_http_requests_are_retried() {
    let clock = TokioClock::default();
    let sends = async |request: Request<&'static str>, was_sent: bool| {
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let service = tower::service_fn(move |request: Request<&'static str>| {
            assert_eq!(*request.body(), "body");
            counted.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(Response::builder().status(503).body(()).unwrap()) }
        });
        let classifier =
            move |_: Result<&Response<()>, &Infallible>| Classification { was_sent, ..Class::Transient.into() };
        let layer = RetryLayer::with_clock(retry(3), None, classifier, clock).repeat_policy(RepeatIdempotent);
        let reply = layer.layer(service).call(request).await.unwrap();
        assert_eq!(reply.status(), 503);
        sent.load(Ordering::SeqCst)
    };
    assert_eq!(sends(Request::get("/").body("body").unwrap(), true).await, 3);
    assert_eq!(sends(Request::put("/").body("body").unwrap(), true).await, 3);
    assert_eq!(sends(Request::post("/").body("body").unwrap(), true).await, 1);
    assert_eq!(sends(Request::patch("/").body("body").unwrap(), true).await, 1);
    assert_eq!(sends(Request::post("/").header("Idempotency-Key", "7").body("body").unwrap(), true).await, 3);
    assert_eq!(sends(Request::post("/").body("body").unwrap(), false).await, 3, "nothing of it was sent");
}

#[tokio::test(start_paused = true)]
async fn the_http_status_decides_about_retries() {
    let clock = TokioClock::default();
    for (status, sends) in [(200, 1), (404, 1), (501, 1), (429, 3), (408, 3), (529, 3)] {
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&sent);
        let service = tower::service_fn(move |_: Request<()>| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move { Ok::<_, Infallible>(Response::builder().status(status).body(()).unwrap()) }
        });
        let layer = RetryLayer::with_clock(retry(3), None, StatusClassifier, clock).repeat_policy(RepeatIdempotent);
        assert_eq!(layer.layer(service).call(Request::new(())).await.unwrap().status(), status);
        assert_eq!(sent.load(Ordering::SeqCst), sends, "{status}");
    }
}

/// Sends a POST through a layer that classifies by status. It is answered with this status and these headers once, and
/// then with 200. Returns the last status and the times of the attempts, in milliseconds.
async fn answered_once(status: u16, headers: &[(&'static str, &'static str)]) -> (u16, Vec<u64>) {
    let clock = TokioClock::default();
    let (first, times) = (Arc::new(headers.to_vec()), Arc::new(Mutex::new(Vec::new())));
    let sent = Arc::clone(&times);
    let service = tower::service_fn(move |_: Request<()>| {
        let mut sent = sent.lock().unwrap();
        sent.push(clock.millis());
        let reply = match sent.len() {
            1 => first
                .iter()
                .fold(Response::builder().status(status), |reply, (name, value)| reply.header(*name, *value)),
            _ => Response::builder(),
        };
        std::future::ready(Ok::<_, Infallible>(reply.body(()).unwrap()))
    });
    let layer = RetryLayer::with_clock(retry(2), None, StatusClassifier, clock).repeat_policy(RepeatIdempotent);
    let reply = layer.layer(service).call(Request::post("/").body(()).unwrap()).await.unwrap();
    let times = times.lock().unwrap().clone();
    (reply.status().as_u16(), times)
}

#[tokio::test(start_paused = true)]
async fn retries_wait_as_the_reply_headers_ask() {
    for (headers, wait) in [
        (&[("retry-after", "7")][..], 7_000),
        (&[("retry-after", "Thu, 01 Jan 2026 00:00:20 GMT")], 20_000),
        // The server's clock is an hour ahead, and the date refers to that clock.
        (&[("date", "Thu, 01 Jan 2026 01:00:00 GMT"), ("retry-after", "Thu, 01 Jan 2026 01:00:20 GMT")], 20_000),
        (&[("retry-after-ms", "1500"), ("retry-after", "2")], 1_500),
        (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "9")], 9_000),
        (&[("retry-after", "0")], 500),
        (&[("retry-after", "-1")], 500),
        (&[("retry-after", "soon")], 500),
        (&[("retry-after", "1e999")], 500),
        (&[("retry-after", "7"), ("retry-after", "8")], 8_000),
        (&[], 500),
    ] {
        assert_eq!(answered_once(429, headers).await, (200, vec![0, wait]), "{headers:?}");
    }
    let secondary = answered_once(403, &[("retry-after", "7")]).await;
    assert_eq!(secondary, (200, vec![0, 7_000]), "a 403 that says when to come back is throttled");
    for (status, headers) in
        [(429, [("retry-after", "86400")]), (429, [("grpc-retry-pushback-ms", "-1")]), (503, [("retry-after", "7")])]
    {
        assert_eq!(answered_once(status, &headers).await, (status, vec![0]), "{headers:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn non_cloneable_requests_are_sent_once() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [failed(503), ok(200)]);
    let once = |_: &&'static str| None;
    let layer = RetryLayer::with_clock(retry(3), None, by_number, clock).repeat_policy(once);
    assert_eq!(layer.layer(script.clone()).call("a").await, Err(Failed(503)));
    assert_eq!(script.times(), [0]);
}

#[tokio::test(start_paused = true)]
async fn each_attempt_uses_a_ready_service() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [failed(503), failed(503), ok(200)]);
    // Panics if it is called without having been made ready.
    let strict = tower::limit::ConcurrencyLimit::new(script.clone(), 1);
    let mut service = RetryLayer::with_clock(retry(3), None, by_number, clock).layer(strict);
    for _ in 0..3 {
        script.rewrite([failed(503), failed(503), ok(200)]);
        let ready: &mut _ = ServiceExt::<&str>::ready(&mut service).await.unwrap();
        assert_eq!(ready.call("a").await, Ok(200));
    }
    assert_eq!(script.times().len(), 9);
}

#[tokio::test(start_paused = true)]
async fn full_jitter_spreads_the_retries() {
    let clock = TokioClock::default();
    let mut first_waits = Vec::new();
    for _ in 0..20 {
        let script = Script::new(clock, [failed(503), ok(200)]);
        let mut service = RetryLayer::with_clock(Retry::default(), None, by_number, clock).layer(script.clone());
        assert_eq!(service.call("a").await, Ok(200));
        first_waits.push(script.times()[1] - script.times()[0]);
    }
    assert!(first_waits.iter().all(|wait| *wait <= 501), "{first_waits:?}");
    first_waits.sort_unstable();
    first_waits.dedup();
    assert!(first_waits.len() > 10, "{first_waits:?}");
}
