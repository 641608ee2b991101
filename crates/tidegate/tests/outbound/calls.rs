//! The course of calls: queueing, replies, errors and cancellation.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::outbound::{Attempt, AttemptOutcome, CallErrorKind, CallOptions, Outbound, Provider, Upstream, Urgency};
use tidegate::policy::KeySeed;
use tidegate::store::{Memory, Store, StoreError, StoreResponse};
use tidegate::{Clock as _, Span, Time};
use tidegate_core::call::AttemptReport;
use tidegate_core::{Batch, Lane, Limits, Outcomes};
use tokio::task::JoinSet;

use crate::common::{Answers, FAILED, GOOD, Log, THROTTLED, UNSENT, options, policy, provider, spawn, starts, within};

#[tokio::test(start_paused = true)]
async fn a_call_within_its_limits_starts_immediately() {
    let (api, log) = (provider("limit = \"10 per 10s\""), Log::default());
    let done = api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
    assert_eq!((done.value, done.stats.attempts, done.stats.waited), (1, 1, Span::ZERO));
}

#[tokio::test(start_paused = true)]
async fn queued_calls_start_at_the_rate_in_order() {
    let (api, log) = (provider("limit = \"10 per 1s\"\nadaptive = \"off\"\ntimeout = \"60s\""), Log::default());
    let mut calls = JoinSet::new();
    for name in 0..200 {
        let (api, mut upstream) = (api.clone(), Answers::of(&api, &[GOOD], &log, name));
        calls.spawn(async move { api.call(CallOptions::default(), &mut upstream).await.map(|done| done.value) });
    }
    while let Some(done) = calls.join_next().await {
        assert_eq!(done.unwrap().unwrap(), 1);
    }
    let starts = starts(&log);
    assert_eq!(starts.iter().filter(|(at, _)| *at < 1000).count(), 10);
    assert!(starts.windows(11).all(|eleven| eleven[10].0 - eleven[0].0 >= 1000), "{starts:?}");
    assert!(starts.iter().map(|(_, name)| *name).eq(0..200), "{starts:?}");
    assert!(starts[199].0 < 20_000, "{starts:?}");
}

#[tokio::test(start_paused = true)]
async fn urgent_calls_start_first_and_may_be_raised() {
    let (api, log) = (provider("limit = \"1 per 1s\"\ntimeout = \"60s\""), Log::default());
    let lifted = Urgency::default();
    let mut calls = JoinSet::new();
    for (name, lane) in
        [(0, Lane::User), (1, Lane::Background), (2, Lane::Background), (3, Lane::User), (4, Lane::Webhook)]
    {
        let mut options = options(lane);
        options.urgency = (name == 2).then(|| lifted.clone());
        let (api, mut upstream) = (api.clone(), Answers::of(&api, &[GOOD], &log, name));
        calls.spawn(async move { api.call(options, &mut upstream).await.map(drop) });
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    api.raise(&lifted, Lane::Webhook);
    while let Some(done) = calls.join_next().await {
        done.unwrap().unwrap();
    }
    assert!(starts(&log).iter().map(|(_, name)| *name).eq([0, 2, 4, 3, 1]), "{:?}", starts(&log));
}

/// A call that can't be sent in time fails at once, also behind calls that can.
#[tokio::test(start_paused = true)]
async fn calls_behind_others_fail_at_once() {
    let (api, log) = (provider("limit = \"2 per 60s\"\nadaptive = \"off\""), Log::default());
    let began = api.clock().now();
    let call = |seconds| spawn(&api, within(Duration::from_secs(seconds)), Answers::of(&api, &[GOOD], &log, 0));
    let mut waiting = Vec::new();
    for seconds in [10, 10, 100, 100] {
        waiting.push(call(seconds));
        tokio::task::yield_now().await;
    }
    for (seconds, rounds) in [(10, 1), (100, 2)] {
        let error = call(seconds).await.unwrap().unwrap_err();
        let CallErrorKind::RateLimited { earliest, .. } = error.kind else { panic!("{error}") };
        assert!(earliest.unwrap() >= began + Span::from_secs(60).times(rounds), "{error}");
        assert!(api.clock().now().since(began) < Span::from_secs(1));
    }
    for call in waiting {
        call.await.unwrap().unwrap();
    }
}

/// A future that was polled once and isn't polled again must not block other calls.
#[tokio::test(start_paused = true)]
async fn an_unpolled_call_blocks_no_other_call() {
    let (api, log) = (provider("limit = \"1 per 1s\"\nadaptive = \"off\"\ntimeout = \"60s\""), Log::default());
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
    let mut upstream = Answers::of(&api, &[GOOD], &log, 1);
    let mut idle = Box::pin(api.call(CallOptions::default(), &mut upstream));
    assert!(idle.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 2)).await.unwrap();
    let starts = starts(&log);
    assert!(starts[1].0 <= 2_510, "{starts:?}");
    // The call was granted its turn meanwhile, and starts as soon as it is polled.
    assert!(matches!(idle.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(_))));
}

#[tokio::test(start_paused = true)]
async fn a_call_dropped_while_waiting_frees_its_slot() {
    let (api, log) = (provider("limit = \"1 per 1s\"\ntimeout = \"60s\""), Log::default());
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
    for name in 1..100 {
        let mut upstream = Answers::of(&api, &[GOOD], &log, name);
        let mut call = pin!(api.call(CallOptions::default(), &mut upstream));
        assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert_eq!(
        api.inspect(|state, _| Lane::ALL.map(|lane| (state.lanes.waiting(lane), state.lanes.in_flight(lane)))),
        [(0, 0); 3]
    );
    let began = api.clock().now();
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 100)).await.unwrap();
    assert!(api.clock().now().since(began) <= Span::from_millis(1_010));
    assert_eq!(log.lock().unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_streaming_reply_stays_in_flight_until_dropped() {
    let (api, log) = (provider("sequential = true\ntimeout = \"60s\""), Log::default());
    let streaming = AttemptReport { is_streaming: true, ..GOOD };
    let done = api.call(CallOptions::default(), &mut Answers::of(&api, &[streaming], &log, 0)).await.unwrap();
    let next = {
        let (api, log) = (api.clone(), Arc::clone(&log));
        tokio::spawn(async move {
            api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 1)).await.map(drop)
        })
    };
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(log.lock().unwrap().len(), 1);
    drop(done.in_flight_guard);
    next.await.unwrap().unwrap();
    assert_eq!(starts(&log), [(0, 0), (5000, 1)]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_retried_and_the_last_is_returned() {
    let settings = "retry = { max_attempts = 3, base = \"500ms\", cap = \"8s\", jitter = \"none\" }\ntimeout = \"60s\"";
    let (api, log) = (provider(settings), Log::default());
    let error = api.call(CallOptions::default(), &mut Answers::of(&api, &[FAILED], &log, 0)).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::RetriesExhausted { attempts: 3, .. }), "{error}");
    assert_eq!(error.last_reply, Some(3));
    assert_eq!(starts(&log), [(0, 0), (500, 0), (1500, 0)]);
    assert_eq!(error.stats.attempts, 3);
    assert_eq!(error.stats.waited, Span::from_millis(1500));
}

#[tokio::test(start_paused = true)]
async fn an_open_breaker_states_failures_and_reset_time() {
    let settings = "breaker = { failures = 5, open = \"5m\" }\nretry = { max_attempts = 1 }";
    let (api, log) = (provider(settings), Log::default());
    for name in 0..5 {
        api.call(CallOptions::default(), &mut Answers::of(&api, &[FAILED], &log, name)).await.unwrap_err();
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    let error = api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 5)).await.unwrap_err();
    assert_eq!(error.status(), 503);
    assert_eq!(error.retry_after(), Some(Span::from_secs(240)));
    assert_eq!(
        serde_json::to_value(error.to_body()).unwrap(),
        serde_json::json!({
            "error": "ProviderUnavailableError", "message": "Circuit breaker is open for api", "provider": "api",
            "state": "open", "failureCount": 5, "resetIn": 240_000,
        })
    );
    assert_eq!(log.lock().unwrap().len(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_throttled_credential_is_replaced_immediately() {
    let (api, log) = (provider("auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]"), Log::default());
    let done = api.call(CallOptions::default(), &mut Answers::of(&api, &[THROTTLED, GOOD], &log, 0)).await.unwrap();
    assert_eq!((done.stats.attempts, done.stats.credential), (2, 1));
    let used: Vec<_> = log.lock().unwrap().iter().map(|(_, _, credential)| *credential).collect();
    assert_eq!(used, [0, 1]);
    assert_eq!(starts(&log), [(0, 0), (0, 0)]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_beyond_the_deadline_fails_immediately() {
    let (api, log) = (provider("limit = \"1 per 1h\""), Log::default());
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
    let began = api.clock().now();
    let error = api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 1)).await.unwrap_err();
    assert!(
        matches!(&error.kind, CallErrorKind::RateLimited { limit, earliest: Some(_) } if limit == "api"),
        "{error:?}"
    );
    assert_eq!(error.retry_after().map(Span::as_secs_ceil), Some(3600));
    assert_eq!((error.status(), api.clock().now()), (429, began));
}

#[tokio::test(start_paused = true)]
async fn a_late_cost_report_refunds_no_other_call() {
    let (api, log) = (provider("cost_limit = \"100 per 60s\"\ncost = { reserve = 1 }"), Log::default());
    let costing = |cost| CallOptions { cost, ..within(Duration::from_secs(1)) };
    let answers = || Answers::of(&api, &[GOOD], &log, 0);
    let slow = api.call(costing(60), &mut answers()).await.unwrap();
    tokio::time::advance(Duration::from_secs(61)).await;
    api.call(costing(100), &mut answers()).await.unwrap();
    slow.in_flight_guard.correct_cost(10);
    let error = api.call(costing(50), &mut answers()).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::RateLimited { .. }), "{error:?}");
    // A correction that is reported in time is available to other calls.
    tokio::time::advance(Duration::from_secs(60)).await;
    api.call(costing(100), &mut answers()).await.unwrap().in_flight_guard.correct_cost(50);
    api.call(costing(50), &mut answers()).await.unwrap();
}

/// A call may begin in one period of a quota and end in the next.
#[tokio::test(start_paused = true)]
async fn an_earlier_periods_charge_is_never_refunded_later() {
    let (api, log) = (provider("cost_limit = \"100 per calendar day\"\ncost = { reserve = 1 }"), Log::default());
    let costing = |cost| CallOptions { cost, ..within(Duration::from_secs(1)) };
    let answers = || Answers::of(&api, &[GOOD], &log, 0);
    let slow = api.call(costing(60), &mut answers()).await.unwrap();
    tokio::time::advance(Duration::from_secs(86_400)).await;
    api.call(costing(100), &mut answers()).await.unwrap();
    slow.in_flight_guard.correct_cost(10);
    let error = api.call(costing(50), &mut answers()).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::QuotaSpent { .. }), "{error:?}");
    tokio::time::advance(Duration::from_secs(86_400)).await;
    api.call(costing(100), &mut answers()).await.unwrap().in_flight_guard.correct_cost(50);
    api.call(costing(50), &mut answers()).await.unwrap();
}

/// A panic of one caller's upstream must leave the others a working provider.
#[tokio::test(start_paused = true)]
async fn a_panicking_upstream_ends_only_its_call() {
    struct Panics;
    impl Upstream for Panics {
        type Reply = ();
        async fn send(&mut self, _attempt: Attempt) -> AttemptOutcome<()> {
            panic!("on purpose");
        }
    }
    let (api, log) = (provider("sequential = true"), Log::default());
    let broken = api.clone();
    tokio::spawn(async move { broken.call(CallOptions::default(), &mut Panics).await.map(drop) }).await.unwrap_err();
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
    assert_eq!(api.inspect(|state, _| state.lanes.in_flight(Lane::User)), 0);
}

/// A store that answers asynchronously.
struct Remote {
    memory: Arc<Memory>,
    clock: TokioClock,
    fails: Arc<AtomicU32>,
}

impl Store for Remote {
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Outcomes, StoreError>> + Send>>;

    fn limits(&self) -> &Arc<Limits> {
        self.memory.limits()
    }

    fn apply(&self, batch: &Batch, _now: Time) -> StoreResponse<Self::Future> {
        let (memory, batch, clock, fails) =
            (Arc::clone(&self.memory), batch.clone(), self.clock, Arc::clone(&self.fails));
        StoreResponse::Pending(Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            if fails.load(Ordering::Relaxed) > 0 {
                fails.fetch_sub(1, Ordering::Relaxed);
                return Err(StoreError::Failed("away".to_owned()));
            }
            let StoreResponse::Ready(outcomes) = memory.apply(&batch, clock.now());
            Ok(outcomes)
        }))
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.memory.submit(batch, now);
    }
}

fn remote(settings: &str) -> (Provider<Remote, TokioClock>, Arc<AtomicU32>) {
    let (policy, clock, fails) = (policy(settings), TokioClock::default(), Arc::<AtomicU32>::default());
    let plan = policy.outbound().unwrap();
    let memory = Arc::new(Memory::new(Arc::clone(plan.limits()), 1 << 20));
    let store = Remote { memory, clock, fails: Arc::clone(&fails) };
    let outbound = Outbound::with_store(plan.clone(), store, clock, &KeySeed::new([7; 16]));
    (outbound.provider("api").unwrap().clone(), fails)
}

#[tokio::test(start_paused = true)]
async fn calls_wait_for_a_remote_store() {
    let (api, _) = remote("limit = \"10 per 1s\"\nadaptive = \"off\"\ntimeout = \"60s\"");
    let log = Log::default();
    let mut calls = JoinSet::new();
    for name in 0..30 {
        let (api, mut upstream) =
            (api.clone(), Answers::of(&api, &[GOOD], &log, name).after(Duration::from_millis(20)));
        calls.spawn(async move { api.call(CallOptions::default(), &mut upstream).await.map(drop) });
    }
    while let Some(done) = calls.join_next().await {
        done.unwrap().unwrap();
    }
    let starts = starts(&log);
    assert!(starts.windows(11).all(|eleven| eleven[10].0 - eleven[0].0 >= 1000), "{starts:?}");
    assert!(starts.iter().map(|(_, name)| *name).eq(0..30), "{starts:?}");
}

#[tokio::test(start_paused = true)]
async fn a_store_error_fails_only_one_call() {
    let (api, fails) = remote("limit = \"10 per 1s\"");
    let log = Log::default();
    fails.store(1, Ordering::Relaxed);
    let error = api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Store(_)), "{error}");
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn grants_to_cancelled_calls_are_returned() {
    let (api, _) = remote("limit = \"1 per 1h\"");
    let log = Log::default();
    let mut upstream = Answers::of(&api, &[GOOD], &log, 0);
    tokio::time::timeout(Duration::from_millis(2), api.call(CallOptions::default(), &mut upstream)).await.unwrap_err();
    tokio::time::sleep(Duration::from_millis(10)).await;
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 1)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn unsent_requests_cost_nothing() {
    let (api, log) =
        (provider("limit = \"1 per calendar day\"\nretry = { max_attempts = 1 }\nbreaker = \"off\""), Log::default());
    for _ in 0..10 {
        let failed = api.call(CallOptions::default(), &mut Answers::of(&api, &[UNSENT], &log, 0)).await.unwrap_err();
        assert!(matches!(failed.kind, CallErrorKind::RetriesExhausted { .. }), "{failed}");
    }
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
    let spent = api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap_err();
    assert!(matches!(spent.kind, CallErrorKind::QuotaSpent { .. }), "{spent}");
}

#[tokio::test(start_paused = true)]
async fn an_unused_grant_passes_to_the_next_call() {
    let (api, log) = (provider("limit = \"1 per 10s\"\ntimeout = \"60s\""), Log::default());
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
    let mut gone = Box::pin(async { api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 1)).await });
    assert!(futures_util::poll!(&mut gone).is_pending());
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(api.inspect(|state, _| state.lanes.in_flight(Lane::User)), 1, "it has been granted its turn");
    drop(gone);
    let began = api.clock().now();
    api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 2)).await.unwrap();
    assert_eq!(api.clock().now(), began);
}

/// A reply may state that its call cost less than was reserved for it.
#[tokio::test(start_paused = true)]
async fn a_refunded_cost_admits_a_waiting_call() {
    let (api, log) =
        (provider("cost = { reserve = 1 }\ncost_limit = \"100 per 60s\"\nadaptive = \"off\""), Log::default());
    let costing = |cost| CallOptions { cost, ..within(Duration::from_secs(10)) };
    let streaming = AttemptReport { is_streaming: true, ..GOOD };
    let first = api.call(costing(90), &mut Answers::of(&api, &[streaming], &log, 0)).await.unwrap();
    let second = spawn(&api, costing(90), Answers::of(&api, &[GOOD], &log, 1));
    tokio::time::sleep(Duration::from_secs(2)).await;
    first.in_flight_guard.correct_cost(10);
    second.await.unwrap().unwrap();
    assert_eq!(starts(&log), [(0, 0), (2000, 1)]);

    let began = api.clock().now();
    let refused = api.call(costing(90), &mut Answers::of(&api, &[GOOD], &log, 2)).await.unwrap_err();
    assert_eq!(api.clock().now(), began, "nothing is under way that could make room");
    let earliest = refused.retry_after().map(Span::as_secs_ceil);
    assert!(
        matches!(refused.kind, CallErrorKind::RateLimited { .. }) && earliest == Some(60),
        "{refused} {earliest:?}"
    );
    tokio::time::sleep(Duration::from_secs(61)).await;
    let third = api.call(costing(90), &mut Answers::of(&api, &[streaming], &log, 3)).await.unwrap();
    let refused = api.call(costing(90), &mut Answers::of(&api, &[GOOD], &log, 4)).await.unwrap_err();
    let earliest = refused.retry_after().map(Span::as_secs_ceil);
    assert!(
        matches!(refused.kind, CallErrorKind::RateLimited { .. }) && earliest == Some(50),
        "{refused} {earliest:?}"
    );
    drop(third);

    let (api, log) = (provider("cost = { reserve = 1 }\ncost_limit = \"100 per calendar day\""), Log::default());
    let refused = api.call(costing(101), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap_err();
    assert!(matches!(refused.kind, CallErrorKind::QuotaSpent { resets_at: None, .. }), "{refused}");
    assert_eq!(refused.retry_after(), None);
}

/// Answers its n-th request after its number of milliseconds, with n.
#[derive(Clone, Copy)]
struct Twins([u64; 2]);

impl Upstream for Twins {
    type Reply = u32;

    async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<u32> {
        tokio::time::sleep(Duration::from_millis(self.0[attempt.number as usize - 1])).await;
        AttemptOutcome { value: attempt.number, report: GOOD }
    }

    fn clone_for_hedge(&self) -> Option<Self> {
        Some(*self)
    }
}

#[tokio::test(start_paused = true)]
async fn hedges_wait_for_a_remote_store() {
    // The limit, the delays of both requests, the number and the time of the reply, and the rest of the limit.
    for (limit, takes, number, millis, left) in [
        ("3 per 1h", [5_000, 50], 2, 5 + 1_000 + 5 + 50, 1),
        ("1 per 1h", [5_000, 50], 1, 5 + 5_000, 0),
        ("2 per 1h", [1_002, 50], 1, 5 + 1_002, 1),
    ] {
        let (api, _) = remote(&format!("limit = \"{limit}\"\nhedge_after = \"1s\""));
        let (began, log) = (api.clock().now(), Log::default());
        let done = api.call(CallOptions::default(), &mut Twins(takes)).await.unwrap();
        assert_eq!((done.value, done.stats.attempts), (number, number), "{limit}");
        assert_eq!(api.clock().now().since(began), Span::from_millis(millis), "{limit}");
        assert_eq!(api.inspect(|state, _| state.budget.remaining()), if number == 2 { 2 } else { 3 }, "{limit}");
        drop(done);
        tokio::time::sleep(Duration::from_millis(10)).await;
        let mut more = 0;
        while api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.is_ok() {
            more += 1;
        }
        assert_eq!(more, left, "{limit}");
        assert_eq!(
            api.inspect(|state, _| (state.lanes.in_flight(Lane::User), state.lanes.waiting(Lane::User))),
            (0, 0)
        );
    }
}

/// Calls of another runtime must not depend on the timer of a runtime that has ended.
#[test]
fn calls_continue_when_another_runtime_ends() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let (api, log) = (provider("limit = \"1 per 1s\"\ntimeout = \"60s\""), Log::default());
    let call = |options, number| {
        let mut upstream = Answers::of(&api, &[GOOD], &log, number);
        let api = api.clone();
        async move { api.call(options, &mut upstream).await.map(drop) }
    };
    let mut starts_the_timer = Box::pin(call(CallOptions::default(), 1));
    first.block_on(async {
        call(CallOptions::default(), 0).await.unwrap();
        std::future::poll_fn(|context| Poll::Ready(starts_the_timer.as_mut().poll(context).is_pending())).await
    });
    let waiting = [2, 3].map(|number| second.spawn(call(CallOptions::default(), number)));
    second.block_on(tokio::task::yield_now());
    drop(starts_the_timer);
    assert_eq!(api.inspect(|state, _| state.lanes.waiting(Lane::User)), 2);
    drop(first);
    let in_time = second.block_on(async {
        let both = async {
            for call in waiting {
                call.await.unwrap().unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(30), both).await
    });
    in_time.expect("neither is forgotten");
}

#[test]
fn a_provider_survives_its_runtime() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let first = runtime();
    let api = first.block_on(async {
        let (api, log) = (provider("limit = \"1 per 1s\"\ntimeout = \"60s\""), Log::default());
        api.call(CallOptions::default(), &mut Answers::of(&api, &[GOOD], &log, 0)).await.unwrap();
        let waits = api.clone();
        tokio::spawn(async move {
            waits.call(CallOptions::default(), &mut Answers::of(&waits, &[GOOD], &log, 1)).await.map(drop)
        });
        tokio::task::yield_now().await;
        assert_eq!(api.inspect(|state, _| state.lanes.waiting(Lane::User)), 1);
        api
    });
    drop(first);
    assert_eq!(api.inspect(|state, _| state.lanes.waiting(Lane::User)), 0);
    drop(api);
}
