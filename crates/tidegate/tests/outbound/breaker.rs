//! The opening of a provider's breaker, and its recovery.

use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::outbound::{CallError, CallErrorKind, CallOptions, Provider};
use tidegate::store::Memory;
use tidegate::{Clock as _, Span};
use tidegate_core::breaker::BreakerState;
use tidegate_core::call::AttemptReport;
use tokio::time::sleep;

use crate::common::{Answers, FAILED, GOOD, Log, MISSING, provider, spawn, within};

type Api = Provider<Memory, TokioClock>;

/// Five failures open the breaker for five minutes. Retries and the adaptive limit are off, so that they don't
/// interfere.
const FIVE: &str = "breaker = { failures = 5, open = \"5m\", successes = 2 }\nretry = { max_attempts = 1 }\n\
                    adaptive = \"off\"\ntimeout = \"10m\"\n";

async fn call(api: &Api, reply: AttemptReport, log: &Log) -> Result<u32, CallError<u32>> {
    api.call(CallOptions::default(), &mut Answers::of(api, &[reply], log, 0)).await.map(|done| done.value)
}

/// A provider with a breaker that has just opened.
async fn broken(settings: &str) -> Api {
    let api = provider(settings);
    for _ in 0..5 {
        let error = call(&api, FAILED, &Log::default()).await.unwrap_err();
        assert!(matches!(error.kind, CallErrorKind::RetriesExhausted { .. }), "{error:?}");
    }
    api
}

fn refusal(error: &CallError<u32>) -> (BreakerState, u32, Span) {
    match error.kind {
        CallErrorKind::Unavailable { state, failures, reset_in } => (state, failures, reset_in),
        _ => panic!("{error:?}"),
    }
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

#[tokio::test(start_paused = true)]
async fn after_the_open_time_one_probe_passes() {
    let (api, log) = (broken(FIVE).await, Log::default());
    let opened_at = api.clock().now();
    sleep(secs(60)).await;
    let refused = refusal(&call(&api, GOOD, &log).await.unwrap_err());
    assert_eq!(refused, (BreakerState::Open, 5, Span::from_secs(240)));
    sleep(secs(240) - Duration::from_millis(1)).await;
    let refused = refusal(&call(&api, GOOD, &log).await.unwrap_err());
    assert_eq!(refused, (BreakerState::Open, 5, Span::from_millis(1)), "a moment too early");
    sleep(Duration::from_millis(1)).await;
    let upstream = Answers::of(&api, &[GOOD], &log, 0).after(secs(1));
    let calls: Vec<_> = (0..20).map(|_| spawn(&api, CallOptions::default(), upstream.clone())).collect();
    let mut passed = 0;
    for call in calls {
        match call.await.unwrap() {
            Ok(_) => passed += 1,
            Err(error) => assert_eq!(refusal(&error).0, BreakerState::HalfOpen),
        }
    }
    assert_eq!(passed, 1);
    let sent: Vec<_> = log.lock().unwrap().iter().map(|(at, ..)| at.since(opened_at)).collect();
    assert_eq!(sent, [Span::from_secs(300)]);
}

#[tokio::test(start_paused = true)]
async fn two_successful_probes_close_one_failed_reopens() {
    let (api, log) = (broken(FIVE).await, Log::default());
    sleep(secs(300)).await;
    call(&api, GOOD, &log).await.unwrap();
    assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::HalfOpen);
    call(&api, FAILED, &log).await.unwrap_err();
    let refused = refusal(&call(&api, GOOD, &log).await.unwrap_err());
    assert_eq!((refused.0, refused.2), (BreakerState::Open, Span::from_secs(300)));
    sleep(secs(300)).await;
    for _ in 0..2 {
        call(&api, GOOD, &log).await.unwrap();
    }
    assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::Closed);
    let upstream = Answers::of(&api, &[GOOD], &log, 0).after(secs(1));
    let calls: Vec<_> = (0..20).map(|_| spawn(&api, CallOptions::default(), upstream.clone())).collect();
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn not_found_replies_are_no_failures() {
    let (api, log) = (provider(FIVE), Log::default());
    for _ in 0..50 {
        call(&api, MISSING, &log).await.unwrap();
    }
    assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::Closed);
    for reply in [FAILED, FAILED, FAILED, FAILED, MISSING, FAILED, FAILED, FAILED, FAILED] {
        let _ = call(&api, reply, &log).await;
    }
    call(&api, GOOD, &log).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn late_replies_from_before_opening_change_nothing() {
    let (api, log) = (provider(FIVE), Log::default());
    let late = |reply, after| {
        let upstream = Answers::of(&api, &[reply], &log, 0).after(secs(after));
        spawn(&api, CallOptions::default(), upstream)
    };
    let mut calls: Vec<_> = (10..20).map(|after| late(FAILED, after)).collect();
    calls.extend((310..320).map(|after| late(GOOD, after)));
    tokio::task::yield_now().await;
    // Beside others in flight, failures in a row don't open it at once. A provider that has never answered has a second.
    for failures in 1..=20 {
        assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::Closed, "{failures}");
        call(&api, FAILED, &log).await.unwrap_err();
    }
    sleep(secs(1)).await;
    call(&api, FAILED, &log).await.unwrap_err();
    // Ten failures while it is open neither count nor extend the open time.
    sleep(secs(60)).await;
    assert_eq!(refusal(&call(&api, GOOD, &log).await.unwrap_err()), (BreakerState::Open, 21, Span::from_secs(240)));
    // Ten successes of calls from before the opening don't close it while it is half-open.
    sleep(secs(265)).await;
    assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::HalfOpen);
    call(&api, GOOD, &log).await.unwrap();
    call(&api, FAILED, &log).await.unwrap_err();
    assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::Open);
    for call in calls {
        let _ = call.await.unwrap();
    }
}

/// A provider that answers ten calls at a time within 100 ms, and refuses further ones at once.
#[tokio::test(start_paused = true)]
async fn failures_between_good_replies_open_nothing() {
    let (api, log) = (provider(FIVE), Log::default());
    for burst in 0..20 {
        let good = |_| {
            let upstream = Answers::of(&api, &[GOOD], &log, 0).after(Duration::from_millis(100));
            spawn(&api, CallOptions::default(), upstream)
        };
        let calls: Vec<_> = (0..10).map(good).collect();
        tokio::task::yield_now().await;
        for _ in 0..50 {
            call(&api, FAILED, &log).await.unwrap_err();
            assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::Closed, "{burst}");
            sleep(Duration::from_millis(1)).await;
        }
        for call in calls {
            call.await.unwrap().unwrap();
        }
    }
}

/// Calls that were sent before the first of them failed are one failure: the fifth time opens the breaker.
#[tokio::test(start_paused = true)]
async fn calls_that_hang_together_are_one_failure() {
    let (api, log) = (provider(FIVE), Log::default());
    call(&api, GOOD, &log).await.unwrap();
    for burst in 1..=5 {
        let hang = |_| spawn(&api, CallOptions::default(), Answers::of(&api, &[FAILED], &log, 0).after(secs(5)));
        for call in (0..10).map(hang).collect::<Vec<_>>() {
            call.await.unwrap().unwrap_err();
        }
        let (state, failures) = api.inspect(|state, now| (state.breaker.state(now), state.breaker.failures()));
        assert_eq!((state == BreakerState::Open, failures), (burst == 5, burst));
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_probe_is_released_immediately() {
    let (api, log) = (broken(FIVE).await, Log::default());
    sleep(secs(300)).await;
    let mut upstream = Answers::of(&api, &[GOOD], &log, 0).after(secs(5));
    tokio::time::timeout(secs(1), api.call(CallOptions::default(), &mut upstream)).await.unwrap_err();
    call(&api, GOOD, &log).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hanging_probe_is_released_after_its_lease() {
    let (api, log) = (broken(FIVE).await, Log::default());
    sleep(secs(300)).await;
    let hangs = spawn(&api, CallOptions::default(), Answers::of(&api, &[GOOD], &log, 0).after(secs(3600)));
    sleep(Duration::from_millis(900)).await;
    assert_eq!(refusal(&call(&api, GOOD, &log).await.unwrap_err()).0, BreakerState::HalfOpen);
    sleep(Duration::from_millis(100)).await;
    call(&api, GOOD, &log).await.unwrap();
    // The end of the hanging call belongs to an older generation and changes nothing.
    hangs.abort();
    let _ = hangs.await;
    assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::HalfOpen);
    call(&api, GOOD, &log).await.unwrap();
    assert_eq!(api.inspect(|state, now| state.breaker.state(now)), BreakerState::Closed);
}

/// A future that gets its turn, but isn't polled, holds the probe for no longer than the lease.
#[tokio::test(start_paused = true)]
async fn an_unpolled_probe_is_released_after_its_lease() {
    let (api, log) = (broken(&format!("{FIVE}limit = \"5 per 301s\"")).await, Log::default());
    sleep(secs(300)).await;
    let mut upstream = Answers::of(&api, &[GOOD], &log, 1);
    let mut idle = pin!(api.call(CallOptions::default(), &mut upstream));
    assert!(
        idle.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(),
        "the window is full for 1 s more"
    );
    sleep(Duration::from_millis(1_500)).await;
    let refused = call(&api, GOOD, &log).await.unwrap_err();
    assert_eq!(refusal(&refused).0, BreakerState::HalfOpen, "it was granted the probe, and isn't polled");
    sleep(secs(30)).await;
    call(&api, GOOD, &log).await.unwrap();
    assert_eq!(log.lock().unwrap().len(), 1);
    tokio::time::timeout(secs(1), idle).await.unwrap().unwrap();
    assert_eq!(log.lock().unwrap().len(), 2);
}

/// A queued call that the breaker refuses at its turn gets that error, and has spent nothing.
#[tokio::test(start_paused = true)]
async fn opening_refuses_queued_calls_at_no_charge() {
    let once = FIVE.replace("failures = 5", "failures = 1");
    let (api, log) = (provider(&format!("{once}limit = \"6 per 10s\"\n")), Log::default());
    let mut failing = Vec::new();
    for _ in 0..5 {
        failing.push(spawn(&api, CallOptions::default(), Answers::of(&api, &[FAILED], &log, 0).after(secs(5))));
    }
    tokio::task::yield_now().await;
    call(&api, GOOD, &log).await.unwrap();
    let waits = spawn(&api, within(secs(60)), Answers::of(&api, &[GOOD], &log, 0));
    for call in failing {
        call.await.unwrap().unwrap_err();
    }
    assert_eq!(refusal(&waits.await.unwrap().unwrap_err()).0, BreakerState::Open);
    assert_eq!(log.lock().unwrap().len(), 6);
}
