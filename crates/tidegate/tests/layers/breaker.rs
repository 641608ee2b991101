use std::panic::AssertUnwindSafe;
use std::task::Poll;
use std::time::Duration;

use tidegate::Span;
use tidegate::layers::{BreakerLayer, CircuitError, Classifier};
use tidegate_core::breaker::{BreakerState, SlowCalls};
use tidegate_core::{BreakerError, BreakerSpec};
use tower::{Layer, Service, ServiceExt};

use super::common::{Failed, Script, TokioClock, by_number, failed, ok, slow};

fn layer(clock: TokioClock) -> BreakerLayer<impl Classifier<u16, Failed>, TokioClock> {
    BreakerLayer::with_clock(BreakerSpec::default(), by_number, clock).unwrap()
}

async fn advance(seconds: u64) {
    tokio::time::advance(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn five_failures_open_and_two_successes_close() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(503)]);
    let layer = layer(clock);
    let mut service = layer.layer(script.clone());
    for _ in 0..5 {
        assert_eq!(service.ready().await.unwrap().call("a").await, Ok(503));
    }
    advance(60).await;
    let Err(CircuitError::Open(refusal)) = service.ready().await.unwrap().call("a").await else { panic!("open") };
    assert_eq!((refusal.state, refusal.failures), (BreakerState::Open, 5));
    assert_eq!(refusal.reset_in, Span::from_secs(240));
    assert_eq!(CircuitError::<Failed>::Open(refusal).to_string(), "Circuit breaker is open");
    assert_eq!(script.times().len(), 5, "a refused call doesn't reach the service");

    // After the stated wait, one call is admitted at a time.
    tokio::time::advance(refusal.reset_in.as_duration()).await;
    script.rewrite([slow(ok(200), 1), ok(200)]);
    let mut other = service.clone();
    let (probe, refused) = tokio::join!(async { service.ready().await.unwrap().call("probe").await }, async {
        other.ready().await.unwrap().call("late").await
    });
    assert_eq!(probe, Ok(200));
    assert!(matches!(refused, Err(CircuitError::Open(refusal)) if refusal.state == BreakerState::HalfOpen));
    assert_eq!(refused.unwrap_err().to_string(), "Circuit breaker is half-open");
    assert_eq!(layer.inspect(|breaker, now| breaker.state(now)), BreakerState::HalfOpen);
    assert_eq!(service.ready().await.unwrap().call("second").await, Ok(200));
    assert_eq!(layer.inspect(|breaker, now| breaker.state(now)), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_failed_probe_reopens_and_reset_closes() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [failed(500)]);
    let layer = layer(clock);
    let mut service = layer.layer(script.clone());
    for _ in 0..5 {
        assert_eq!(service.ready().await.unwrap().call("a").await, Err(CircuitError::Inner(Failed(500))));
    }
    advance(300).await;
    assert_eq!(service.ready().await.unwrap().call("a").await, Err(CircuitError::Inner(Failed(500))));
    let Err(CircuitError::Open(refusal)) = service.ready().await.unwrap().call("a").await else { panic!("open") };
    assert_eq!(refusal.reset_in, Span::from_secs(300));
    layer.reset();
    assert_eq!(service.ready().await.unwrap().call("a").await, Err(CircuitError::Inner(Failed(500))));
}

#[tokio::test(start_paused = true)]
async fn client_errors_and_throttling_never_open_it() {
    let clock = TokioClock::default();
    for status in [404, 429, 401] {
        let script = Script::new(clock, [ok(status)]);
        let mut service = layer(clock).layer(script);
        for _ in 0..50 {
            assert_eq!(service.ready().await.unwrap().call("a").await, Ok(status));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn services_of_one_layer_share_the_breaker() {
    let clock = TokioClock::default();
    let (down, up) = (Script::new(clock, [failed(503)]), Script::new(clock, [ok(200)]));
    let layer = layer(clock);
    for _ in 0..5 {
        let _ = layer.layer(down.clone()).oneshot("a").await;
    }
    assert!(matches!(layer.clone().layer(up.clone()).oneshot("a").await, Err(CircuitError::Open(_))));
    assert_eq!(up.times().len(), 0);
}

/// A layer with a breaker that has just become half-open, and its service's script.
async fn half_open(clock: TokioClock) -> (BreakerLayer<impl Classifier<u16, Failed>, TokioClock>, Script) {
    let script = Script::new(clock, [failed(503)]);
    let layer = layer(clock);
    for _ in 0..5 {
        let _ = layer.layer(script.clone()).oneshot("a").await;
    }
    advance(300).await;
    script.rewrite([ok(200)]);
    (layer, script)
}

#[tokio::test(start_paused = true)]
async fn a_dropped_probe_is_released() {
    let clock = TokioClock::default();
    let (layer, script) = half_open(clock).await;
    script.rewrite([slow(ok(200), 3_600)]);
    let mut service = layer.layer(script.clone());
    for polled in [true, false] {
        let mut probe = Box::pin(service.ready().await.unwrap().call("probe"));
        if polled {
            assert!(tokio::time::timeout(Duration::ZERO, probe.as_mut()).await.is_err());
        }
        assert!(matches!(service.clone().oneshot("late").await, Err(CircuitError::Open(_))), "it is out");
        drop(probe);
        assert!(layer.inspect(|breaker, now| breaker.peek(now)).is_ok(), "it is back");
    }
    assert_eq!(script.under_way(), 0);
    script.rewrite([ok(200)]);
    for _ in 0..2 {
        assert_eq!(service.ready().await.unwrap().call("probe").await, Ok(200));
    }
    assert_eq!(layer.inspect(|breaker, now| breaker.state(now)), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_panicking_probe_is_released() {
    let clock = TokioClock::default();
    let (layer, _) = half_open(clock).await;
    let at_call = tower::service_fn(|_: &str| -> std::future::Ready<Result<u16, Failed>> { panic!("at the call") });
    let in_future = tower::service_fn(|_: &str| async { panic!("in the future") });
    let mut service = layer.layer(at_call);
    let caught = std::panic::catch_unwind(AssertUnwindSafe(|| drop(service.call("probe"))));
    assert!(caught.is_err());
    assert!(layer.inspect(|breaker, now| breaker.peek(now)).is_ok());
    let mut service = layer.layer(in_future);
    assert!(tokio::spawn(service.call("probe")).await.is_err_and(|error| error.is_panic()));
    assert!(layer.inspect(|breaker, now| breaker.peek(now)).is_ok());
}

#[tokio::test(start_paused = true)]
async fn readiness_holds_no_probe() {
    let clock = TokioClock::default();
    let (layer, script) = half_open(clock).await;
    let mut idle = layer.layer(script.clone());
    ServiceExt::<&str>::ready(&mut idle).await.unwrap();
    assert_eq!(layer.layer(script.clone()).oneshot("probe").await, Ok(200));
    assert_eq!(idle.call("probe").await, Ok(200));
}

#[tokio::test(start_paused = true)]
async fn an_open_breaker_refuses_despite_unready_inner_service() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [slow(ok(200), 3_600)]);
    let layer = layer(clock);
    let limit = tower::limit::ConcurrencyLimit::new(script.clone(), 1);
    let mut busy = limit.clone();
    let hung = ServiceExt::<&str>::ready(&mut busy).await.unwrap().call("hung");
    let mut service = layer.layer(limit);
    assert!(ready_now(&mut service).await.is_pending(), "closed, it waits for the service inside");

    for _ in 0..5 {
        let _ = layer.layer(Script::new(clock, [failed(503)])).oneshot("a").await;
    }
    assert!(ready_now(&mut service).await.is_ready());
    // The open time ends between ready and call. The inner service wasn't made ready, and would panic if called.
    advance(300).await;
    assert!(matches!(service.call("a").await, Err(CircuitError::Open(_))));
    assert!(ready_now(&mut service).await.is_pending(), "half-open, it waits again");
    drop(hung);
    script.rewrite([ok(200)]);
    assert_eq!(service.ready().await.unwrap().call("a").await, Ok(200));
}

async fn ready_now<S: Service<&'static str>>(service: &mut S) -> Poll<()> {
    std::future::poll_fn(|context| Poll::Ready(service.poll_ready(context).map(|_| ()))).await
}

#[tokio::test(start_paused = true)]
async fn slow_calls_are_timed_from_call_to_reply() {
    let clock = TokioClock::default();
    let slow_calls = Some(SlowCalls { threshold: Span::from_secs(1), rate: 500 });
    let spec = BreakerSpec { failures: None, slow_calls, min_calls: 4, ..BreakerSpec::default() };
    let layer = BreakerLayer::with_clock(spec, by_number, clock).unwrap();
    let script = Script::new(clock, [ok(200), ok(200), slow(ok(200), 2), slow(ok(200), 2)]);
    let mut service = layer.layer(script);
    for _ in 0..4 {
        assert_eq!(service.ready().await.unwrap().call("a").await, Ok(200));
    }
    assert!(matches!(service.ready().await.unwrap().call("a").await, Err(CircuitError::Open(_))));
}

#[test]
fn a_breaker_that_never_opens_is_rejected() {
    let spec = BreakerSpec { failures: None, ..BreakerSpec::default() };
    let refused = BreakerLayer::new(spec, by_number);
    assert_eq!(refused.err(), Some(BreakerError::NeverOpens));
}
