//! Adaptive and responsive paces, as calls meet them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::outbound::{Attempt, AttemptOutcome, AttemptReport, CallErrorKind, CallOptions, Provider, Upstream};
use tidegate::store::Memory;
use tidegate::{Clock as _, Span, Time};
use tidegate_core::Lane;
use tokio::task::JoinSet;

use crate::common::{Answers, GOOD, Log, THROTTLED, options, provider, spawn, starts, throttled_for, within};

/// A server that accepts a fixed number of calls in any second, and answers after 10 ms. Records the time and result of
/// each.
#[derive(Clone)]
struct Hidden {
    capacity: usize,
    refusal: AttemptReport,
    taken: Arc<Mutex<VecDeque<Time>>>,
    asked: Arc<Mutex<Vec<(Time, bool)>>>,
    clock: TokioClock,
}

impl Upstream for Hidden {
    type Reply = ();

    async fn send(&mut self, _attempt: Attempt) -> AttemptOutcome<()> {
        let now = self.clock.now();
        let takes = {
            let mut taken = self.taken.lock().unwrap();
            while taken.front().is_some_and(|first| now.since(*first) >= Span::from_secs(1)) {
                taken.pop_front();
            }
            let takes = taken.len() < self.capacity;
            taken.extend(takes.then_some(now));
            takes
        };
        self.asked.lock().unwrap().push((now, takes));
        tokio::time::sleep(Duration::from_millis(10)).await;
        AttemptOutcome { value: (), report: if takes { GOOD } else { self.refusal } }
    }
}

/// Lets 32 workers call for two minutes. Returns two figures for the second minute: the accepted calls, in thousandths
/// of the server's capacity, and the throttled calls, in thousandths of all calls.
async fn worked(api: &Provider<Memory, TokioClock>, capacity: usize, refusal: AttemptReport) -> (usize, usize) {
    let (taken, asked, clock) = (Arc::default(), Arc::default(), *api.clock());
    let server = Hidden { capacity, refusal, taken, asked, clock };
    let began = clock.now();
    let mut workers = JoinSet::new();
    for _ in 0..32 {
        let (api, mut server) = (api.clone(), server.clone());
        workers.spawn(async move {
            while server.clock.now().since(began) < Span::from_secs(120) {
                let _ = api.call(CallOptions::default(), &mut server).await;
            }
        });
    }
    workers.join_all().await;
    let asked = server.asked.lock().unwrap();
    let second = asked.iter().filter(|(at, _)| (60..120).contains(&(at.since(began).as_micros() / 1_000_000)));
    let (all, took) = (second.clone().count(), second.filter(|(_, takes)| *takes).count());
    (took * 1_000 / (capacity * 60), (all - took) * 1_000 / all)
}

#[tokio::test(start_paused = true)]
async fn adaptive_pace_finds_an_unknown_limit() {
    let api = provider("limit = \"100/s\"\npace = \"adaptive\"\ntimeout = \"60s\"\nretry = { max_attempts = 1 }");
    let (goodput, throttled) = worked(&api, 50, THROTTLED).await;
    assert!(goodput >= 950 && throttled < 20, "{goodput} ‰ of what it takes, {throttled} ‰ throttled");
}

/// A cool-down of a second that came as often as one in a hundred calls would cost a third of the time.
#[tokio::test(start_paused = true)]
async fn adaptive_pace_saves_asked_waits() {
    let api = provider("limit = \"100/s\"\npace = \"adaptive\"\ntimeout = \"60s\"\nretry = { max_attempts = 1 }");
    let (goodput, throttled) = worked(&api, 50, throttled_for(1)).await;
    assert!(goodput >= 920 && throttled < 5, "{goodput} ‰ of what it takes, {throttled} ‰ throttled");
}

#[tokio::test(start_paused = true)]
async fn adaptive_pace_stays_below_the_limit() {
    let api = provider("limit = \"20/s\"\npace = \"adaptive\"\ntimeout = \"60s\"\nretry = { max_attempts = 1 }");
    let (goodput, throttled) = worked(&api, 50, THROTTLED).await;
    assert!((350..=400).contains(&goodput) && throttled == 0, "{goodput} ‰ of what it takes, {throttled} ‰ throttled");
}

#[tokio::test(start_paused = true)]
async fn one_throttled_reply_spaces_all_responsive_calls() {
    let (api, log) =
        (provider("pace = \"responsive\"\ntimeout = \"60s\"\nretry = { max_attempts = 1 }"), Log::default());
    spawn(&api, CallOptions::default(), Answers::of(&api, &[THROTTLED], &log, 0)).await.unwrap().unwrap_err();
    let calls = [(1, Lane::Background), (2, Lane::User), (3, Lane::User), (4, Lane::Webhook)];
    let mut tasks = Vec::new();
    for (name, lane) in calls {
        tasks.push(spawn(&api, options(lane), Answers::of(&api, &[GOOD], &log, name)));
        tokio::task::yield_now().await;
    }
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    // The first failure sets the interval to exactly half a second, and four successes don't change it. The most urgent
    // call goes first.
    assert_eq!(starts(&log), [(0, 0), (500, 4), (1_000, 2), (1_500, 3), (2_000, 1)]);
}

#[tokio::test(start_paused = true)]
async fn a_pace_wait_beyond_the_deadline_fails() {
    let settings = "pace = { by = \"responsive\", initial = \"30s\" }\nretry = { max_attempts = 1 }";
    let (api, log) = (provider(settings), Log::default());
    spawn(&api, CallOptions::default(), Answers::of(&api, &[THROTTLED], &log, 0)).await.unwrap().unwrap_err();
    let error = spawn(&api, within(Duration::from_secs(5)), Answers::of(&api, &[GOOD], &log, 1)).await.unwrap();
    let error = error.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::Paced { .. }), "{error:?}");
    assert_eq!((error.status(), error.retry_after()), (429, Some(Span::from_secs(30))));
    assert_eq!(error.to_body().error, "RateLimitedError");
    assert_eq!(error.to_body().message, "api: the provider's pace has no room before the deadline");
}

#[tokio::test(start_paused = true)]
async fn retry_after_pauses_calls_despite_the_pace() {
    let (api, log) = (provider("pace = \"adaptive\"\ntimeout = \"60s\"\nretry = { max_attempts = 1 }"), Log::default());
    spawn(&api, CallOptions::default(), Answers::of(&api, &[throttled_for(7)], &log, 0)).await.unwrap().unwrap_err();
    spawn(&api, CallOptions::default(), Answers::of(&api, &[GOOD], &log, 1)).await.unwrap().unwrap();
    assert!((7_000..8_000).contains(&starts(&log)[1].0), "{:?}", starts(&log));
}

#[tokio::test(start_paused = true)]
async fn a_throttled_credential_cools_down_beside_another() {
    let settings = "pace = \"adaptive\"\nauth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\ntimeout = \"60s\"";
    let (api, log) = (provider(settings), Log::default());
    spawn(&api, CallOptions::default(), Answers::of(&api, &[THROTTLED, GOOD], &log, 0)).await.unwrap().unwrap();
    for name in 1..4 {
        spawn(&api, CallOptions::default(), Answers::of(&api, &[GOOD], &log, name)).await.unwrap().unwrap();
    }
    let credentials: Vec<usize> = log.lock().unwrap().iter().map(|(_, _, credential)| *credential).collect();
    assert_eq!(credentials, [0, 1, 1, 1, 1], "{:?}", starts(&log));
}
