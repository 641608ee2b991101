use std::time::Duration;

use tidegate::clock::ManualClock;
use tidegate::layers::{LimitLayer, LimitServiceError, WaitRefusal};
use tidegate::{LimiterError, Span};
use tidegate_core::{LimitKind, Rate};
use tokio::task::JoinSet;
use tower::{Layer, Service, ServiceExt};

use super::common::{Failed, Passed as _, Script, TokioClock, failed, name, ok};

/// Sends this many calls at once, numbered in the order of their arrival, and waits for all of them.
async fn send<C: tidegate::Clock + Clone>(
    layer: &LimitLayer<C>,
    script: &Script,
    calls: usize,
) -> Vec<Result<u16, LimitServiceError<Failed>>> {
    let mut tasks = Vec::new();
    for number in 0..calls {
        tasks.push(tokio::spawn(layer.layer(script.clone()).oneshot(name(number))));
        tokio::task::yield_now().await;
    }
    let mut outcomes = Vec::new();
    for task in tasks {
        outcomes.push(task.await.unwrap());
    }
    outcomes
}

#[tokio::test(start_paused = true)]
async fn calls_start_at_the_rate_in_arrival_order() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(200)]);
    let layer = LimitLayer::with_clock("10/s", clock).unwrap();
    assert!(send(&layer, &script, 200).await.iter().all(Result::is_ok));
    for (number, (_, who)) in script.calls().into_iter().enumerate() {
        assert_eq!(who, number.to_string());
    }
    let times = script.times();
    assert_eq!(times[..10].iter().filter(|at| **at < 1_000).count(), 10, "ten in the first second");
    for (first, eleventh) in times.iter().zip(&times[10..]) {
        assert!(eleventh - first >= 1_000, "{first} {eleventh}");
    }
    assert!(*times.last().unwrap() <= 19_900 + 300, "timers are exact to a millisecond: {times:?}");
}

#[tokio::test(start_paused = true)]
async fn new_calls_do_not_overtake_waiting_calls() {
    let clock = ManualClock::default();
    let script = Script::new(TokioClock::default(), [ok(200)]);
    let layer = LimitLayer::with_clock("1/s", clock.clone()).unwrap();
    send(&layer, &script, 1).await;
    tokio::spawn(layer.layer(script.clone()).oneshot("waits"));
    tokio::task::yield_now().await;
    // The limit has capacity now, and the waiting call hasn't noticed yet.
    clock.advance(Span::from_secs(1));
    tokio::spawn(layer.layer(script.clone()).oneshot("comes"));
    tokio::task::yield_now().await;
    assert_eq!(script.times().len(), 1);
    tokio::time::sleep(Duration::from_millis(1_010)).await;
    clock.advance(Span::from_secs(1));
    tokio::time::sleep(Duration::from_millis(1_010)).await;
    let who: Vec<&str> = script.calls().into_iter().map(|(_, who)| who).collect();
    assert_eq!(who, ["0", "waits", "comes"]);
}

#[tokio::test(start_paused = true)]
async fn a_window_is_never_exceeded() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(200)]);
    let layer = LimitLayer::with_clock("100 per 10s", clock).unwrap();
    for _ in 0..100 {
        // The gate's windows would merge some of this many times.
        send(&layer, &script, 1).await;
        tokio::time::advance(Duration::from_millis(97)).await;
    }
    send(&layer, &script, 150).await;
    let times = script.times();
    assert_eq!(times.len(), 250);
    for (first, last) in times.iter().zip(&times[100..]) {
        assert!(last - first >= 10_000, "{first} {last}");
        assert!(last - first <= 10_010, "no slot is wasted: {first} {last}");
    }
}

#[tokio::test(start_paused = true)]
async fn too_long_waits_are_refused_with_exact_time() {
    let second = Duration::from_secs(1);
    for (quantity, wait) in [
        ("2 per 60s", [60_000, 60_000, 120_000]),
        ("1 per 30s burst 2", [30_000, 60_000, 90_000]),
        ("1 per 30s", [30_000, 60_000, 90_000]),
    ] {
        let clock = TokioClock::default();
        let script = Script::new(clock, [ok(200)]);
        let patient = LimitLayer::with_clock(quantity, clock).unwrap();
        let hasty = patient.clone().max_wait(second);
        while hasty.layer(script.clone()).oneshot("free").await.is_ok() {}
        let began = clock.millis();
        for (ahead, expected) in wait.into_iter().enumerate() {
            let refused = hasty.layer(script.clone()).oneshot("hasty").await;
            let expected = Span::from_millis(expected);
            assert_eq!(
                refused,
                Err(LimitServiceError::Refused(WaitRefusal::TooLong { wait: expected })),
                "{quantity}, {ahead} ahead"
            );
            tokio::spawn(patient.layer(script.clone()).oneshot("patient"));
            tokio::task::yield_now().await;
        }
        assert_eq!(clock.millis(), began, "nobody waited to be refused");
        tokio::time::sleep(Duration::from_millis(wait[2] + 100)).await;
        let went: Vec<u64> =
            script.calls().into_iter().filter(|(_, who)| *who == "patient").map(|(at, _)| at - began).collect();
        assert_eq!(went.len(), 3, "{quantity}");
        for (went, told) in went.into_iter().zip(wait) {
            assert!(went.abs_diff(told) <= 5, "{quantity}: told {told} ms, went after {went} ms");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_repeated_after_the_wait_passes() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(200)]);
    let mut service =
        LimitLayer::with_clock("2 per 60s", clock).unwrap().max_wait(Duration::ZERO).layer(script.clone());
    assert_eq!(service.call("a").await, Ok(200));
    tokio::time::advance(Duration::from_secs(13)).await;
    assert_eq!(service.call("b").await, Ok(200));
    let Err(LimitServiceError::Refused(WaitRefusal::TooLong { wait })) = service.call("c").await else {
        panic!("three in 60 s")
    };
    assert_eq!(wait, Span::from_secs(47));
    tokio::time::advance(wait.as_duration()).await;
    assert_eq!(service.call("c").await, Ok(200));
}

#[tokio::test(start_paused = true)]
async fn cancelled_waiters_let_others_advance() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(200)]);
    let layer = LimitLayer::with_clock("1/s", clock).unwrap();
    let mut tasks = JoinSet::new();
    let mut handles = Vec::new();
    for number in 0..9 {
        handles.push(tasks.spawn(layer.layer(script.clone()).oneshot(name(number))));
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    // The head, which sleeps, and some calls behind it.
    for leaving in [1, 2, 5, 7] {
        handles[leaving].abort();
    }
    while let Some(done) = tasks.join_next().await {
        assert!(done.is_err_and(|error| error.is_cancelled()) || script.times().len() <= 5);
    }
    let who: Vec<&str> = script.calls().into_iter().map(|(_, who)| who).collect();
    assert_eq!(who, ["0", "3", "4", "6", "8"]);
    for (at, second) in script.times().iter().zip(0..) {
        assert!(at.abs_diff(second * 1_000) <= 10, "{:?}", script.times());
    }
    assert_eq!(layer.max_wait(Duration::ZERO).layer(script).oneshot("last").await.ok(), None, "nobody is ahead");
}

#[tokio::test(start_paused = true)]
async fn an_unpolled_future_charges_nothing() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(200)]);
    let mut service = LimitLayer::with_clock("1/h", clock).unwrap().max_wait(Duration::ZERO).layer(script);
    let idle = service.ready().await.unwrap().call("idle");
    assert_eq!(service.ready().await.unwrap().call("busy").await, Ok(200));
    assert!(matches!(idle.await, Err(LimitServiceError::Refused(WaitRefusal::TooLong { .. }))));
}

#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded() {
    let clock = TokioClock::default();
    let script = Script::new(clock, [ok(200)]);
    let layer = LimitLayer::with_clock("1/s", clock).unwrap().max_waiting(3);
    let outcomes = send(&layer, &script, 8).await;
    let full = Err(LimitServiceError::Refused(WaitRefusal::QueueFull));
    assert_eq!(outcomes, [&[Ok(200); 4][..], &[full; 4]].concat(), "one went at once, three waited");
    assert_eq!(send(&layer, &script, 1).await, [Ok(200)], "there is room again");
}

#[tokio::test(start_paused = true)]
async fn the_inner_services_error_is_returned() {
    let clock = TokioClock::default();
    let mut service = LimitLayer::with_clock("1/s", clock).unwrap().layer(Script::new(clock, [failed(500)]));
    let error = service.call("a").await.unwrap_err();
    assert_eq!((error, error.to_string()), (LimitServiceError::Inner(Failed(500)), "failed like a 500".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn only_a_ready_service_is_called() {
    let clock = TokioClock::default();
    let strict = tower::limit::ConcurrencyLimit::new(Script::new(clock, [ok(200)]), 1);
    let mut service = LimitLayer::from_kind(LimitKind::Rate(Rate::new(5, Span::from_secs(1), 1).unwrap()), clock)
        .unwrap()
        .layer(strict);
    for _ in 0..5 {
        let ready: &mut _ = ServiceExt::<&str>::ready(&mut service).await.unwrap();
        assert_eq!(ready.call("a").await, Ok(200));
    }
    assert!(clock.millis() >= 800, "{}", clock.millis());
}

#[test]
fn unusable_limits_are_rejected() {
    assert!(matches!(LimitLayer::new("2 in flight"), Err(LimiterError::InFlight)));
    assert!(matches!(LimitLayer::new("unlimited"), Err(LimiterError::Unlimited)));
    assert!(matches!(LimitLayer::new("soon"), Err(LimiterError::Quantity(_))));
}
