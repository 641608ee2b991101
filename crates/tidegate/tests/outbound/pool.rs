//! Several credentials, and the cool-down of one after a throttled reply.

use std::time::Duration;

use tidegate::clock::TokioClock;
use tidegate::outbound::{CallError, CallErrorKind, CallOptions, Provider};
use tidegate::store::Memory;
use tidegate::{Clock as _, Span};
use tidegate_core::call::AttemptReport;
use tidegate_core::retry::UnreplayableReason;
use tidegate_core::{Lane, Verdict};
use tokio::task::yield_now;
use tokio::time::sleep;

use crate::common::{
    Answers, FAILED, FORBIDDEN, GOOD, Log, MISSING, THROTTLED, UNAUTHORIZED, options, provider, spawn, starts,
    throttled_for, with_verdict, within,
};

type Api = Provider<Memory, TokioClock>;

const POOL: &str = "auth = \"bearer\"\nadaptive = \"off\"\nbreaker = \"off\"\n\
                    retry = { max_attempts = 1, max_token_retries = 0, max_retry_after = \"10m\" }\n\
                    cooldown = { base = \"1s\", cap = \"8s\" }\ntimeout = \"1h\"\n";

/// The setting of a pool with these credentials, a letter each.
fn credentials(names: &str) -> String {
    let sources: Vec<_> = names.chars().map(|name| format!("\"env:{name}\"")).collect();
    format!("credentials = [{}]\n", sources.join(", "))
}

fn pool(names: &str) -> Api {
    provider(&format!("{POOL}{}", credentials(names)))
}

async fn call(api: &Api, options: CallOptions, reply: AttemptReport, log: &Log) -> Result<usize, CallError<u32>> {
    let mut upstream = Answers::of(api, &[reply], log, 0);
    api.call(options, &mut upstream).await.map(|done| done.stats.credential)
}

/// The credentials of this many calls, as letters.
async fn used(api: &Api, calls: usize) -> String {
    let mut letters = String::new();
    for _ in 0..calls {
        let credential = call(api, CallOptions::default(), GOOD, &Log::default()).await.unwrap();
        letters.push(char::from(b'A' + u8::try_from(credential).unwrap()));
    }
    letters
}

#[tokio::test(start_paused = true)]
async fn credentials_are_used_in_rotation() {
    assert_eq!(used(&pool("ABC"), 6).await, "ABCABC");
}

#[tokio::test(start_paused = true)]
async fn cool_downs_double_up_to_the_cap() {
    let (api, log) = (pool("A"), Log::default());
    for _ in 0..5 {
        call(&api, CallOptions::default(), THROTTLED, &log).await.unwrap_err();
    }
    call(&api, CallOptions::default(), GOOD, &log).await.unwrap();
    call(&api, CallOptions::default(), THROTTLED, &log).await.unwrap_err();
    call(&api, CallOptions::default(), GOOD, &log).await.unwrap();
    let sent: Vec<_> = log.lock().unwrap().iter().map(|(at, ..)| *at).collect();
    let waits: Vec<_> = sent.windows(2).map(|two| two[1].since(two[0]).as_micros() / 1000).collect();
    assert_eq!(waits[..5], [1000, 2000, 4000, 8000, 8000]);
    assert_eq!(waits[6], 1000, "a success starts over: {waits:?}");
}

/// Each credential has a reservation of its own. None of the calls at once comes by one, and later each comes at the instant.
#[tokio::test(start_paused = true)]
async fn reservations_of_a_pool_are_no_misses() {
    let settings = "auth = \"bearer\"\nadaptive = \"off\"\ncooldown = { base = \"10s\", cap = \"1m\" }\n\
                    retry = { max_attempts = 9, base = \"5s\", jitter = \"none\" }\n";
    let (api, log) = (provider(&format!("{settings}{}", credentials("ABCDEF"))), Log::default());
    let retry_after = Some(Span::from_millis(100));
    let reserved = with_verdict(Verdict { wait: retry_after, has_reservation: true, ..THROTTLED.verdict });
    let replies = [vec![reserved; 12], vec![GOOD]].concat();
    api.call(CallOptions::default(), &mut Answers::of(&api, &replies, &log, 0)).await.unwrap();
    let times: Vec<_> = starts(&log).into_iter().map(|(at, _)| at).collect();
    assert_eq!(times, [0, 0, 0, 0, 0, 0, 100, 200, 300, 400, 500, 600, 700]);
}

#[tokio::test(start_paused = true)]
async fn a_cooling_credential_rejoins_at_its_exact_time() {
    let api = pool("ABC");
    assert_eq!(used(&api, 1).await, "A");
    call(&api, CallOptions::default(), THROTTLED, &Log::default()).await.unwrap_err();
    sleep(Duration::from_millis(900)).await;
    assert_eq!(used(&api, 4).await, "CACA", "B cools down");
    sleep(Duration::from_millis(100)).await;
    assert_eq!(used(&api, 3).await, "BCA", "and is back");
}

#[tokio::test(start_paused = true)]
async fn when_all_cool_down_calls_fail_immediately() {
    let (api, log) = (pool("AB"), Log::default());
    call(&api, CallOptions::default(), throttled_for(3), &log).await.unwrap_err();
    call(&api, CallOptions::default(), throttled_for(5), &log).await.unwrap_err();
    let began = api.clock().now();
    for _ in 0..3 {
        let error = call(&api, within(Duration::from_secs(1)), GOOD, &log).await.unwrap_err();
        assert!(
            matches!(error.kind, CallErrorKind::CredentialsCooling { earliest: Some(at) } if at == began + Span::from_secs(3))
        );
        assert_eq!((error.retry_after(), error.status()), (Some(Span::from_secs(3)), 429));
    }
    assert_eq!((api.clock().now(), log.lock().unwrap().len()), (began, 2));
    assert_eq!(call(&api, within(Duration::from_secs(4)), GOOD, &log).await.unwrap(), 0, "A is the first to be back");
    assert_eq!(api.clock().now().since(began), Span::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn spent_quotas_are_reported_with_their_reset() {
    let settings = "credential_limit = \"1 per calendar day\"\nauth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]";
    let (api, log) = (provider(settings), Log::default());
    for credential in 0..2 {
        assert_eq!(call(&api, CallOptions::default(), GOOD, &log).await.unwrap(), credential);
    }
    let day = 86_400_000_000;
    let midnight = (api.clock().now().as_micros() / day + 1) * day;
    // The first call gets this from the store, the next one before it queues.
    for _ in 0..2 {
        let error = call(&api, CallOptions::default(), GOOD, &log).await.unwrap_err();
        let CallErrorKind::QuotaSpent { limit, resets_at } = &error.kind else { panic!("{error:?}") };
        assert_eq!(
            (limit.as_str(), resets_at.map(tidegate::Time::as_micros), error.status()),
            ("api.credential", Some(midnight), 429)
        );
    }
    // If the first credential to return is only cooling down, the error says so.
    tokio::time::advance(Duration::from_micros(midnight - api.clock().now().as_micros())).await;
    assert_eq!(call(&api, CallOptions::default(), GOOD, &log).await.unwrap(), 0);
    call(&api, CallOptions::default(), throttled_for(3_600), &log).await.unwrap_err();
    let error = call(&api, CallOptions::default(), GOOD, &log).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::CredentialsCooling { .. }), "{error:?}");
    assert_eq!(error.retry_after(), Some(Span::from_secs(3_600)));
    assert_eq!(log.lock().unwrap().len(), 4);
}

/// The state of each credential, and the time until it is usable.
async fn states(api: &Api) -> Vec<(&'static str, u64)> {
    api.report().await.credentials.iter().map(|credential| (credential.state, credential.usable_in)).collect()
}

#[tokio::test(start_paused = true)]
async fn credentials_that_are_full_by_our_own_limits_say_so() {
    let settings = format!("{POOL}{}credential_limit = \"1 per 60s\"", credentials("AB"));
    let (api, log) = (provider(&settings), Log::default());
    let began = api.clock().now();
    assert_eq!(call(&api, CallOptions::default(), GOOD, &log).await.unwrap(), 0);
    sleep(Duration::from_secs(10)).await;
    assert_eq!(call(&api, CallOptions::default(), GOOD, &log).await.unwrap(), 1);
    for _ in 0..2 {
        let error = call(&api, within(Duration::from_secs(1)), GOOD, &log).await.unwrap_err();
        assert!(
            matches!(&error.kind, CallErrorKind::RateLimited { limit, earliest: Some(at) }
                if limit == "api.credential" && *at == began + Span::from_secs(60)),
            "{error:?}"
        );
    }
    assert_eq!(states(&api).await, [("full", 50), ("full", 60)]);
    let counts = api.local_report().credential_states;
    assert_eq!((counts.usable, counts.full, counts.cooling, counts.throttled), (0, 2, 0, 0));
    // The reason of the credential that is free first counts.
    sleep(Duration::from_secs(50)).await;
    call(&api, CallOptions::default(), throttled_for(5), &log).await.unwrap_err();
    assert_eq!(states(&api).await, [("cooling", 5), ("full", 10)]);
    sleep(Duration::from_secs(10)).await;
    call(&api, CallOptions::default(), throttled_for(300), &log).await.unwrap_err();
    let error = call(&api, within(Duration::from_secs(1)), GOOD, &log).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::RateLimited { .. }), "{error:?}");
    assert_eq!(
        (states(&api).await, error.retry_after()),
        (vec![("full", 50), ("cooling", 300)], Some(Span::from_secs(50)))
    );
}

#[tokio::test(start_paused = true)]
async fn limits_on_calls_in_flight_are_reported() {
    let pair = "auth = \"bearer\"\ncredentials = [\"env:A\", \"env:B\"]\nbackground = { in_flight = 3 }";
    let settings = format!("limit = [\"100 per 60s\", \"8 in flight\"]\ncredential_limit = \"5 in flight\"\n{pair}");
    let (api, log) = (provider(&settings), Log::default());
    let slow = Answers::of(&api, &[GOOD], &log, 0).after(Duration::from_secs(1));
    for lane in [Lane::User, Lane::Background, Lane::User] {
        drop(spawn(&api, options(lane), slow.clone()));
    }
    sleep(Duration::from_millis(10)).await;
    let report = api.report().await;
    let usage = report.limits.iter().map(|it| (it.name.as_str(), it.credential, it.used, it.limit, it.remaining));
    let expected = [
        ("api", None, 3, 100, 97),
        ("api.in_flight", None, 3, 8, 5),
        ("api.background.in_flight", None, 1, 3, 2),
        ("api.credential.in_flight", Some(0), 2, 5, 3),
        ("api.credential.in_flight", Some(1), 1, 5, 4),
    ];
    assert_eq!(usage.collect::<Vec<_>>(), expected);
    assert_eq!(report.limits[1].words, "at most 8 at the same time");
    let sequential = provider("sequential = true").report().await.limits;
    assert_eq!((sequential.len(), sequential[0].limit), (1, 1), "{sequential:?}");
}

#[tokio::test(start_paused = true)]
async fn concurrent_throttles_count_as_one_step() {
    let (api, log) = (pool("A"), Log::default());
    let upstream = |index: u64| Answers::of(&api, &[THROTTLED], &log, 0).after(Duration::from_millis(100 + index));
    let calls: Vec<_> = (0..10).map(|index| spawn(&api, CallOptions::default(), upstream(index))).collect();
    for call in calls {
        call.await.unwrap().unwrap_err();
    }
    let began = log.lock().unwrap()[0].0;
    call(&api, CallOptions::default(), THROTTLED, &log).await.unwrap_err();
    call(&api, CallOptions::default(), GOOD, &log).await.unwrap();
    let later: Vec<_> = log.lock().unwrap()[10..].iter().map(|(at, ..)| at.since(began).as_micros() / 1000).collect();
    assert_eq!(later, [1_100, 3_100], "one step after the first of the ten, and the second after that");
}

#[tokio::test(start_paused = true)]
async fn an_earlier_calls_success_ends_no_cool_down() {
    let (api, log) = (pool("A"), Log::default());
    let slow = spawn(&api, CallOptions::default(), Answers::of(&api, &[GOOD], &log, 0).after(Duration::from_secs(2)));
    tokio::task::yield_now().await;
    call(&api, CallOptions::default(), throttled_for(10), &log).await.unwrap_err();
    slow.await.unwrap().unwrap();
    let error = call(&api, within(Duration::from_secs(1)), GOOD, &log).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(Span::from_secs(8)), "{error:?}");
    // The success doesn't reset the step either: the next cool-down is a second one.
    call(&api, CallOptions::default(), THROTTLED, &log).await.unwrap_err();
    let closed_at = api.clock().now();
    call(&api, CallOptions::default(), GOOD, &log).await.unwrap();
    assert_eq!(api.clock().now().since(closed_at), Span::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn not_found_replies_do_not_affect_credentials() {
    let (api, log) = (pool("ABC"), Log::default());
    for expected in [0, 1, 2, 0, 1, 2] {
        assert_eq!(call(&api, CallOptions::default(), MISSING, &log).await.unwrap(), expected);
    }
    let sent = log.lock().unwrap();
    assert_eq!(sent[0].0, sent[5].0, "and nobody waits");
}

#[tokio::test(start_paused = true)]
async fn the_last_good_credential_is_never_excluded() {
    let (api, log) = (pool("AB"), Log::default());
    for _ in 0..4 {
        call(&api, CallOptions::default(), FORBIDDEN, &log).await.unwrap();
    }
    let asked: Vec<_> = log.lock().unwrap().iter().map(|(_, _, credential)| *credential).collect();
    assert_eq!(asked, [0, 1, 1, 1], "one is left out, the other is asked again and again");
    assert_eq!(used(&api, 2).await, "BB");
    sleep(Duration::from_secs(300)).await;
    assert_eq!(used(&api, 2).await, "AB");
}

#[tokio::test(start_paused = true)]
async fn a_credential_with_failed_login_is_excluded() {
    let login = "login = { path = \"/login\", body = '{\"key\":\"{credential}\"}', pointer = \"/token\" }";
    let (api, log) = (switching_pool("AB", login), Log::default());
    let mut upstream = Answers::of(&api, &[UNAUTHORIZED, GOOD], &log, 0);
    upstream.logs_in = false;
    assert_eq!(api.call(CallOptions::default(), &mut upstream).await.unwrap().stats.credential, 1);
    assert_eq!(used(&api, 4).await, "BBBB");
}

/// A pool with token retries.
fn switching_pool(names: &str, settings: &str) -> Api {
    let pool = POOL.replace("max_token_retries = 0", "max_token_retries = 5");
    provider(&format!("{pool}{}{settings}", credentials(names)))
}

/// A rejected credential is left out only if another one is accepted for the same request.
#[tokio::test(start_paused = true)]
async fn a_rejected_credential_is_replaced_once_each() {
    let once = AttemptReport { unreplayable_reason: Some(UnreplayableReason::OneShotBody), ..UNAUTHORIZED };
    let stops = with_verdict(Verdict { asks_not_to_retry: true, ..UNAUTHORIZED.verdict });
    for (names, replies, sent, left) in [
        ("A", &[UNAUTHORIZED][..], &[0][..], "AAAA"),
        ("AB", &[UNAUTHORIZED, GOOD], &[0, 1], "BBBB"),
        ("ABC", &[UNAUTHORIZED, UNAUTHORIZED, GOOD], &[0, 1, 2], "CCCC"),
        ("ABC", &[UNAUTHORIZED], &[0, 1, 2], "ABCA"),
        ("ABC", &[UNAUTHORIZED, MISSING], &[0, 1], "CABC"),
        ("ABC", &[FORBIDDEN], &[0], "BCBC"),
        ("ABC", &[once], &[0], "BCAB"),
        ("ABC", &[stops], &[0, 1, 2], "ABCA"),
        ("ABCDEFGH", &[UNAUTHORIZED], &[0, 1, 2, 3, 4], "FGHA"),
    ] {
        let (api, log) = (switching_pool(names, ""), Log::default());
        api.call(CallOptions::default(), &mut Answers::of(&api, replies, &log, 0)).await.unwrap();
        let asked: Vec<_> = log.lock().unwrap().iter().map(|(_, _, credential)| *credential).collect();
        assert_eq!((&*asked, &*used(&api, 4).await), (sent, left), "{names}, {} replies", replies.len());
        sleep(Duration::from_secs(300)).await;
        let mut again: Vec<char> = used(&api, names.len()).await.chars().collect();
        again.sort_unstable();
        assert_eq!(again, names.chars().collect::<Vec<_>>());
    }
}

/// The other credential is taken between the rejection and the call's next turn. The call gets the rejection, and no other
/// call waits for it.
#[tokio::test(start_paused = true)]
async fn a_rejected_call_holds_up_no_other() {
    for (limit, other) in [("1 in flight", [GOOD, GOOD]), ("5 in flight", [throttled_for(60), GOOD])] {
        let (api, log) =
            (switching_pool("AB", &format!("credential_limit = \"{limit}\"\nlimit = \"1 per 1s\"")), Log::default());
        // It takes A, and has its 401 while the limit lets no call pass.
        let rejected = Answers::of(&api, &[UNAUTHORIZED, UNAUTHORIZED], &log, 1).after(Duration::from_millis(10));
        let rejected = spawn(&api, CallOptions::default(), rejected);
        // It is queued before the other goes on, and takes B for a minute.
        let taker =
            Answers::of(&api, &other, &log, 2).after(Duration::from_secs(if limit == "1 in flight" { 60 } else { 0 }));
        sleep(Duration::from_millis(1)).await;
        let taker = spawn(&api, CallOptions::default(), taker);
        assert_eq!(rejected.await.unwrap().unwrap(), 2, "{limit}");
        for _ in 0..3 {
            let began = api.clock().now();
            call(&api, CallOptions::default(), GOOD, &log).await.unwrap();
            assert!(api.clock().now().since(began) < Span::from_secs(10), "{limit}: not until B is free");
        }
        drop(taker);
    }
}

/// Round robin may come back to a rejected credential while other calls take their turns.
#[tokio::test(start_paused = true)]
async fn concurrent_calls_never_repeat_a_rejected_credential() {
    let (api, log) = (switching_pool("ABCD", "balance = \"random\""), Log::default());
    let calls = (0..40).map(|name| {
        let answers = Answers::of(&api, &[UNAUTHORIZED], &log, name).after(Duration::from_millis(u64::from(name % 7)));
        spawn(&api, CallOptions::default(), answers)
    });
    let calls: Vec<_> = calls.collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), 4);
    }
    let mut sent: Vec<_> = log.lock().unwrap().iter().map(|(_, name, credential)| (*name, *credential)).collect();
    sent.sort_unstable();
    sent.dedup();
    assert_eq!(sent.len(), 160, "each call asks each credential once");
}

/// A pool of credentials, with a limit on the concurrent calls of each.
fn busy_pool(names: &str, each: u32) -> Api {
    provider(&format!("{POOL}{}credential_limit = \"{each} in flight\"", credentials(names)))
}

fn in_flight(api: &Api, credentials: usize) -> Vec<u32> {
    api.inspect(|state, _| (0..credentials).map(|credential| state.pool.in_flight(credential)).collect())
}

/// Starts a call that takes this long.
fn slow(api: &Api, log: &Log, name: u32, millis: u64) -> tokio::task::JoinHandle<Result<u32, CallError<u32>>> {
    let upstream = Answers::of(api, &[GOOD], log, name).after(Duration::from_millis(millis));
    spawn(api, CallOptions::default(), upstream)
}

#[tokio::test(start_paused = true)]
async fn busy_credentials_are_skipped_in_arrival_order() {
    let (api, log) = (busy_pool("ABC", 2), Log::default());
    let began = api.clock().now();
    let mut calls = vec![slow(&api, &log, 0, 10_000)];
    for name in 1..20 {
        yield_now().await;
        calls.push(slow(&api, &log, name, 100));
    }
    // More urgent than all waiting calls, which don't delay it.
    let urgent = Answers::of(&api, &[GOOD], &log, 20).after(Duration::from_millis(100));
    sleep(Duration::from_millis(50)).await;
    assert_eq!(in_flight(&api, 3), [2, 2, 2]);
    calls.push(spawn(&api, options(Lane::Webhook), urgent));
    for call in calls {
        call.await.unwrap().unwrap();
    }
    let log = log.lock().unwrap();
    let sent: Vec<_> = log.iter().map(|(at, name, _)| (at.since(began).as_micros() / 100_000, *name)).collect();
    // Six calls start at first. Then one of A's two permits is in use all the time.
    let mut expected: Vec<_> = (0..6).map(|name| (0, name)).collect();
    expected.push((1, 20));
    expected.extend((6..20).map(|name| ((u64::from(name) - 6 + 1) / 5 + 1, name)));
    assert_eq!(sent, expected);
    let with = |credential: usize| log.iter().filter(|sent| sent.2 == credential).count();
    assert_eq!(with(0) + with(1) + with(2), 21);
    assert!(with(0) < with(1) && with(0) < with(2), "A is passed over while it is busy");
    assert_eq!(in_flight(&api, 3), [0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn with_all_credentials_busy_the_deadline_passes() {
    let (api, log) = (busy_pool("AB", 1), Log::default());
    let calls = [slow(&api, &log, 0, 10_000), slow(&api, &log, 1, 10_000)];
    yield_now().await;
    let began = api.clock().now();
    let error = call(&api, within(Duration::from_secs(3)), GOOD, &log).await.unwrap_err();
    assert!(matches!(error.kind, CallErrorKind::DeadlineExceeded), "{error:?}");
    assert_eq!(api.clock().now().since(began), Span::from_secs(3), "a call might have ended");
    assert_eq!(log.lock().unwrap().len(), 2);
    for call in calls {
        call.await.unwrap().unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_call_frees_its_credential_when_it_is_likely_over() {
    let (api, log) = (busy_pool("AB", 1), Log::default());
    let streaming = AttemptReport { is_streaming: true, ..GOOD };
    let mut upstream = Answers::of(&api, &[streaming], &log, 0);
    let done = api.call(CallOptions::default(), &mut upstream).await.unwrap();
    let sent = slow(&api, &log, 1, 60_000);
    yield_now().await;
    let waits = slow(&api, &log, 2, 1);
    let next = [slow(&api, &log, 3, 1_000), slow(&api, &log, 4, 1_000)];
    sleep(Duration::from_millis(100)).await;
    assert_eq!((log.lock().unwrap().len(), in_flight(&api, 2)), (2, vec![1, 1]));
    // A waiting call, a sent call, and a call with a reply that is being read.
    waits.abort();
    sent.abort();
    sleep(Duration::from_millis(100)).await;
    drop(done.in_flight_guard);
    for call in next {
        call.await.unwrap().unwrap();
    }
    assert_eq!(starts(&log), [(0, 0), (0, 1), (100, 3), (200, 4)], "replies take no time, as far as is known");
    assert_eq!(in_flight(&api, 2), [0, 0]);
    let (api, log) = (busy_pool("A", 1), Log::default());
    let sent = slow(&api, &log, 0, 60_000);
    yield_now().await;
    sent.abort();
    sleep(Duration::from_millis(29_900)).await;
    assert_eq!(in_flight(&api, 1), [1], "no reply was seen, and the provider may work on the request");
    sleep(Duration::from_millis(200)).await;
    assert_eq!(in_flight(&api, 1), [0]);
}

#[tokio::test(start_paused = true)]
async fn each_attempt_takes_its_own_permit() {
    let retries = "retry = { max_attempts = 3, max_token_retries = 5, base = \"1s\", cap = \"1s\", jitter = \"none\" }";
    let settings =
        POOL.replace("retry = { max_attempts = 1, max_token_retries = 0, max_retry_after = \"10m\" }", retries);
    assert!(settings.contains(retries));
    let (api, log) = (
        provider(&format!("{settings}credentials = [\"env:A\", \"env:B\"]\ncredential_limit = \"1 in flight\"")),
        Log::default(),
    );
    // A throttled call continues with the other credential at once. If that is busy, it waits.
    let mut upstream = Answers::of(&api, &[throttled_for(20), FAILED, GOOD], &log, 0).after(Duration::from_millis(100));
    let done = api.call(CallOptions::default(), &mut upstream).await.unwrap();
    assert_eq!(done.stats.attempts, 3);
    drop(done);
    let sent: Vec<_> = log.lock().unwrap().iter().map(|(_, _, credential)| *credential).collect();
    assert_eq!((sent, starts(&log).last()), (vec![0, 1, 1], Some(&(1_200, 0))));
    assert_eq!(in_flight(&api, 2), [0, 0]);
    // A cools down and B is busy: the call on B ends first, and nothing is sent before.
    let busy = slow(&api, &log, 1, 2_000);
    yield_now().await;
    assert_eq!(call(&api, within(Duration::from_secs(5)), GOOD, &log).await.unwrap(), 1);
    assert_eq!(starts(&log)[4].0 - starts(&log)[3].0, 2_000);
    busy.await.unwrap().unwrap();
    assert_eq!(in_flight(&api, 2), [0, 0]);
}
