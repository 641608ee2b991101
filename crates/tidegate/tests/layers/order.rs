use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::{Request, Response};
use tidegate::layers::{
    BreakerLayer, CircuitError, InnerClassifier, LimitLayer, LimitServiceError, RetryLayer, StatusClassifier,
    WaitRefusal,
};
use tidegate::{Backoff, Jitter, Span};
use tidegate_core::breaker::BreakerState;
use tidegate_core::{BreakerSpec, Budget, BudgetSpec, Retry};
use tower::timeout::TimeoutLayer;
use tower::{Service, ServiceBuilder, ServiceExt};

use super::common::{Failed, Passed as _, Script, TokioClock, by_number, failed, ok};

fn retry(max_attempts: u32) -> Retry {
    let backoff = Backoff::exponential(Span::from_millis(100), Span::from_secs(1)).with_jitter(Jitter::None);
    Retry { max_attempts, backoff, ..Retry::default() }
}

#[tokio::test(start_paused = true)]
async fn an_inner_breaker_counts_attempts_and_ends_retries() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [failed(503)]);
    let breaker = BreakerLayer::with_clock(BreakerSpec::default(), by_number, clock).unwrap();
    let mut service = ServiceBuilder::new()
        .layer(RetryLayer::with_clock(retry(9), None, InnerClassifier(by_number), clock))
        .layer(breaker.clone())
        .service(script.clone());
    let outcome = service.ready().await.unwrap().call("a").await;
    assert!(matches!(outcome, Err(CircuitError::Open(refusal)) if refusal.failures == 5), "{outcome:?}");
    assert_eq!(script.times(), [0, 100, 300, 700, 1_500], "five attempts open it");
    assert_eq!(clock.millis(), 2_500, "and the sixth, which it refuses, isn't retried");
    assert_eq!(breaker.inspect(|breaker, now| breaker.state(now)), BreakerState::Open);
}

#[tokio::test(start_paused = true)]
async fn an_outer_breaker_counts_one_failure_per_call() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [failed(503)]);
    let breaker = BreakerLayer::with_clock(BreakerSpec::default(), by_number, clock).unwrap();
    let mut service = ServiceBuilder::new()
        .layer(breaker.clone())
        .layer(RetryLayer::with_clock(retry(3), None, by_number, clock))
        .service(script.clone());
    assert_eq!(service.ready().await.unwrap().call("a").await, Err(CircuitError::Inner(Failed(503))));
    assert_eq!((script.times().len(), breaker.inspect(|breaker, _| breaker.failures())), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn retry_breaker_and_limit_layers_work_together() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [failed(503), ok(200)]);
    let budget = Arc::new(Budget::new(BudgetSpec { ratio: 0, min: 1, reserve: 1 }));
    let breaker = BreakerLayer::with_clock(BreakerSpec::default(), InnerClassifier(by_number), clock).unwrap();
    let limit = LimitLayer::with_clock("1/s", clock).unwrap();
    let stack = |max_wait| {
        ServiceBuilder::new()
            .layer(RetryLayer::with_clock(
                retry(3),
                Some(Arc::clone(&budget)),
                InnerClassifier(InnerClassifier(by_number)),
                clock,
            ))
            .layer(breaker.clone())
            .layer(limit.clone().max_wait(Duration::from_secs(max_wait)))
            .service(script.clone())
    };
    assert_eq!(stack(10).oneshot("a").await, Ok(200));
    let times = script.times();
    assert!(times[0] == 0 && times[1].abs_diff(1_000) <= 2, "the retry waits for its turn too: {times:?}");
    assert_eq!(budget.remaining(), 0);

    let refused = stack(0).oneshot("b").await;
    let Err(CircuitError::Inner(LimitServiceError::Refused(WaitRefusal::TooLong { wait }))) = refused else {
        panic!("{refused:?}")
    };
    assert!(wait <= Span::from_secs(1));
    assert_eq!(script.times().len(), 2, "a refused turn isn't retried");
    assert_eq!(breaker.inspect(|breaker, _| breaker.failures()), 0, "and is no failure of the service's");
}

/// Through layers of this crate, and through tower's own, which box errors.
#[tokio::test(start_paused = true)]
async fn the_status_classifier_recognises_refusals_behind_layers() {
    let clock = TokioClock::default();
    let calls = Arc::new(AtomicUsize::new(0));
    let service = {
        let calls = Arc::clone(&calls);
        tower::service_fn(move |_: Request<()>| {
            calls.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Ok::<_, std::io::Error>(Response::new(())))
        })
    };
    let limit = LimitLayer::with_clock("1 per 1h", clock).unwrap().max_wait(Duration::ZERO);
    let breaker = BreakerLayer::with_clock(BreakerSpec::default(), StatusClassifier, clock).unwrap();
    let mut bare = ServiceBuilder::new()
        .layer(RetryLayer::with_clock(retry(3), None, StatusClassifier, clock))
        .layer(breaker.clone())
        .layer(limit.clone())
        .service(service.clone());
    assert!(bare.ready().await.unwrap().call(Request::new(())).await.is_ok());
    let refused = bare.ready().await.unwrap().call(Request::new(())).await;
    assert!(matches!(refused, Err(CircuitError::Inner(LimitServiceError::Refused(_)))), "{refused:?}");

    let mut boxed = ServiceBuilder::new()
        .layer(RetryLayer::with_clock(retry(3), None, InnerClassifier(StatusClassifier), clock))
        .layer(TimeoutLayer::new(Duration::from_secs(1)))
        .layer(breaker.clone())
        .layer(limit)
        .service(service);
    let refused = boxed.ready().await.unwrap().call(Request::new(())).await.unwrap_err();
    assert_eq!(refused.to_string(), "the limit has no room for 1h");
    assert_eq!(clock.millis(), 0, "no refusal was retried");
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert_eq!(breaker.inspect(|breaker, _| breaker.failures()), 0);
}
