//! Identical calls at the same time.

use tidegate_core::breaker::BreakerState;
use tokio::task::JoinSet;

use super::super::super::{CallError, CallErrorKind, CallStats};
use super::super::single_flight::{MAX_FLIGHTS, MAX_MEMBERS};
use super::CacheStatus::{Coalesced, Hit, Miss, Stale};
use super::*;

const LATENCY: Duration = Duration::from_millis(500);

/// Starts this many identical calls at once.
fn start(count: usize, cache: &Cache<Paused>, api: &Arc<Api>, options: &CallOptions) -> JoinSet<Result<Got, Failed>> {
    let mut calls = JoinSet::new();
    for _ in 0..count {
        let (cache, api, options) = (cache.clone(), Arc::clone(api), options.clone());
        calls.spawn(async move { call_with(&cache, &api, options, get("/")).await });
    }
    calls
}

async fn at_once(count: usize, cache: &Cache<Paused>, api: &Arc<Api>) -> Vec<Result<Got, Failed>> {
    let all = start(count, cache, api, &CallOptions::default()).join_all().await;
    assert!(is_at_rest(cache));
    all
}

fn count(all: &[Result<Got, Failed>], by: CacheStatus) -> usize {
    all.iter().filter(|got| got.as_ref().is_ok_and(|got| got.by == by)).count()
}

#[tokio::test(start_paused = true)]
async fn identical_calls_are_coalesced() {
    for headers in [&[("cache-control", "max-age=60")][..], &[("cache-control", "max-age=0, must-revalidate")], &[]] {
        let (cache, api) = (cache(), Arc::new(Api::with(headers).slow(LATENCY)));
        let all = at_once(100, &cache, &api).await;
        assert_eq!(api.calls(), 1, "{headers:?}");
        assert_eq!((count(&all, Miss), count(&all, Coalesced)), (1, 99));
        assert!(all.iter().all(|got| got.as_ref().unwrap().body == "reply 1"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn identical_calls_on_several_threads_are_coalesced() {
    for _ in 0..20 {
        let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "max-age=60")])));
        let all = at_once(100, &cache, &api).await;
        assert_eq!(api.calls(), 1);
        assert_eq!((count(&all, Miss), count(&all, Coalesced) + count(&all, Hit)), (1, 99));
    }
}

#[tokio::test(start_paused = true)]
async fn uncacheable_replies_are_fetched_by_each_caller() {
    for headers in [&[("cache-control", "no-store")], &[("cache-control", "no-cache")], &[("vary", "*")]] {
        let (cache, api) = (cache(), Arc::new(Api::with(headers).slow(LATENCY)));
        let all = at_once(10, &cache, &api).await;
        assert_eq!((api.calls(), count(&all, Miss)), (10, 10), "{headers:?}");
        let mut bodies: Vec<_> = all.into_iter().map(|got| got.unwrap().body).collect();
        bodies.sort();
        bodies.dedup();
        assert_eq!(bodies.len(), 10);
    }
    let large = Api::new(|_, _| Ok(reply(200, &[("cache-control", "max-age=60")], vec![b'x'; 2 << 20])));
    let (cache, api) = (cache(), Arc::new(large.slow(LATENCY)));
    let all = at_once(10, &cache, &api).await;
    assert_eq!((api.calls(), count(&all, Miss)), (10, 10));
    assert!(all.iter().all(|got| got.as_ref().unwrap().body.len() == 2 << 20));
}

#[tokio::test(start_paused = true)]
async fn a_follower_replaces_a_cancelled_leader() {
    let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "max-age=60")]).slow(LATENCY)));
    let callers = (0..20).map(|index: usize| {
        let (cache, api) = (cache.clone(), Arc::clone(&api));
        let asked = request("GET", "/", &[("x-request-id", &index.to_string())]);
        tokio::spawn(async move { call(&cache, &api, asked).await })
    });
    let callers: Vec<_> = callers.collect();
    for calls in 1..=5 {
        sleep(Duration::from_millis(1)).await;
        assert_eq!(api.calls(), calls, "one leads, and no more");
        let leader: usize = api.saw("x-request-id").unwrap().parse().unwrap();
        callers[leader].abort();
    }
    let mut all = Vec::new();
    for caller in callers {
        all.extend(caller.await.ok());
    }
    assert_eq!((all.len(), api.calls(), count(&all, Miss), count(&all, Coalesced)), (15, 6, 1, 14));
    assert!(is_at_rest(&cache));
}

#[tokio::test(start_paused = true)]
async fn an_unpolled_follower_delays_no_other_caller() {
    let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "max-age=60")]).slow(LATENCY)));
    let mut leader = start(1, &cache, &api, &CallOptions::default());
    sleep(Duration::from_millis(1)).await;
    let mut idle = Box::pin(call(&cache, &api, get("/")));
    assert!(now(idle.as_mut()).await.is_none());
    let others = start(5, &cache, &api, &CallOptions::default());
    sleep(Duration::from_millis(1)).await;
    leader.shutdown().await;
    let all = others.join_all().await;
    assert_eq!((count(&all, Miss), count(&all, Coalesced)), (1, 4));
    assert_eq!(idle.await.unwrap().by, Coalesced);
    assert_eq!(api.calls(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_checks_the_cache_again() {
    let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "max-age=60")])));
    let key = flight_to(&cache, &api, "/");
    let leader = cache.0.single_flight.join(key, None);
    let others = start(5, &cache, &api, &CallOptions::default());
    sleep(Duration::from_millis(1)).await;
    call(&cache, &api, request("GET", "/", &[("cache-control", "no-cache")])).await.unwrap();
    drop(leader);
    assert_eq!((count(&others.join_all().await, Hit), api.calls()), (5, 1));
}

#[tokio::test(start_paused = true)]
async fn the_leaders_deadline_fails_only_the_leader() {
    let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "max-age=60")]).slow(LATENCY)));
    let hasty = CallOptions { timeout: Some(Duration::from_millis(100)), ..CallOptions::default() };
    let leader = start(1, &cache, &api, &hasty);
    sleep(Duration::from_millis(1)).await;
    let others = start(5, &cache, &api, &CallOptions::default());
    assert_eq!(leader.join_all().await[0].as_ref().unwrap_err(), &Failed::Late);
    let all = others.join_all().await;
    assert_eq!((api.calls(), count(&all, Miss), count(&all, Coalesced)), (2, 1, 4));
}

#[tokio::test(start_paused = true)]
async fn a_follower_keeps_its_own_deadline() {
    let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "max-age=60")]).slow(5 * LATENCY)));
    let leader = start(1, &cache, &api, &CallOptions::default());
    sleep(Duration::from_millis(1)).await;
    let began = cache.0.clock.now();
    let hasty = CallOptions { timeout: Some(LATENCY), ..CallOptions::default() };
    assert_eq!(call_with(&cache, &api, hasty, get("/")).await.unwrap_err(), Failed::Late);
    assert_eq!(cache.0.clock.now().since(began), Span::from_duration(LATENCY));
    assert_eq!(api.seen.lock()[1].0.timeout, Some(Duration::ZERO), "the call says itself that it is late");
    assert_eq!(count(&leader.join_all().await, Miss), 1);
}

#[tokio::test(start_paused = true)]
async fn a_followers_wait_reduces_its_own_timeout() {
    let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "no-store")]).slow(LATENCY)));
    start(2, &cache, &api, &CallOptions::default()).join_all().await;
    let seen = api.seen.lock();
    assert_eq!(seen[0].0.timeout, Some(Duration::from_secs(10)));
    assert_eq!(seen[1].0.timeout, Some(Duration::from_millis(9500)));
}

#[tokio::test(start_paused = true)]
async fn an_urgent_follower_raises_the_leaders_lane() {
    let (cache, api) = (cache(), Arc::new(Api::with(&[("cache-control", "max-age=60")]).slow(LATENCY)));
    let lane = |lane| CallOptions { lane, ..CallOptions::default() };
    let leader = start(1, &cache, &api, &lane(Lane::Background));
    sleep(Duration::from_millis(1)).await;
    assert!(api.raised.lock().is_empty());
    let other = start(1, &cache, &api, &lane(Lane::Webhook));
    sleep(Duration::from_millis(1)).await;
    let (urgency, raised) = api.raised.lock()[0].clone();
    let sent = api.seen.lock()[0].0.clone();
    assert_eq!((sent.lane, raised), (Lane::Background, Lane::Webhook));
    assert!(Arc::ptr_eq(&sent.urgency.unwrap().0, &urgency.0), "it is the leader's call that is lifted");
    assert_eq!(count(&leader.join_all().await, Miss) + count(&other.join_all().await, Coalesced), 2);
}

#[tokio::test(start_paused = true)]
async fn followers_share_a_stale_reply_during_outages() {
    let api = Api::new(|number, _| match number {
        1 => Ok(reply(200, &[("cache-control", "max-age=60")], "reply 1")),
        _ => Err(Failed::Outage),
    });
    let api = Arc::new(api.ruled(|rules| rules.stale = Duration::from_secs(60)).slow(LATENCY));
    let cache = cache();
    call(&cache, &api, get("/")).await.unwrap();
    advance(61).await;
    let all = at_once(20, &cache, &api).await;
    assert_eq!((api.calls(), count(&all, Stale)), (2, 20));
}

#[tokio::test(start_paused = true)]
async fn followers_share_a_reply_revalidated_by_304() {
    let api = Api::new(|_, request| {
        let headers = [("cache-control", "max-age=60"), ("etag", "\"v\"")];
        let asked_after = request.headers.contains_key(header::IF_NONE_MATCH);
        Ok(if asked_after { reply(304, &headers, "") } else { reply(200, &headers, "reply 1") })
    });
    let (cache, api) = (cache(), Arc::new(api.slow(LATENCY)));
    call(&cache, &api, get("/")).await.unwrap();
    advance(61).await;
    let all = at_once(20, &cache, &api).await;
    assert_eq!((api.calls(), count(&all, Hit), count(&all, Coalesced)), (2, 1, 19));
    assert!(all.iter().all(|got| got.as_ref().unwrap().body == "reply 1"));
}

#[tokio::test(start_paused = true)]
async fn failures_are_not_shared() {
    let (cache, api) = (cache(), Arc::new(Api::new(|_, _| Ok(reply(500, &[], "down"))).slow(LATENCY)));
    let all = at_once(5, &cache, &api).await;
    assert_eq!((api.calls(), count(&all, Miss)), (5, 5));
    let api = Arc::new(Api::new(|_, _| Err(Failed::Otherwise)).slow(LATENCY));
    let all = at_once(5, &cache, &api).await;
    assert!(api.calls() == 5 && all.iter().all(|got| *got.as_ref().unwrap_err() == Failed::Otherwise));
}

#[test]
fn errors_distinguish_outages_from_own_refusals() {
    let error = |why| {
        let happened = CallStats { attempts: 1, waited: Span::ZERO, credential: 0 };
        CallError::<()> {
            provider: "tmdb".to_owned(),
            kind: why,
            last_reply: None,
            stats: happened,
            failed_at: Time::ZERO,
        }
    };
    let faults = |why: CallErrorKind| (error(why.clone()).is_outage(), error(why).is_call_specific());
    let open = CallErrorKind::Unavailable { state: BreakerState::Open, failures: 5, reset_in: Span::from_secs(300) };
    assert_eq!(faults(open), (true, false));
    assert_eq!(faults(CallErrorKind::RetriesExhausted { attempts: 3, earliest: None }), (true, false));
    assert_eq!(faults(CallErrorKind::CredentialsCooling { earliest: None }), (true, true));
    let spent = CallErrorKind::QuotaSpent { limit: "tmdb".to_owned(), resets_at: None };
    assert_eq!(faults(spent), (true, true));
    assert_eq!(faults(CallErrorKind::DeadlineExceeded), (false, true));
    assert_eq!(faults(CallErrorKind::QueueFull { lane: Lane::User }), (false, true));
    assert_eq!(faults(CallErrorKind::Final), (false, false));
}

#[tokio::test(start_paused = true)]
async fn flights_and_their_followers_are_bounded() {
    let cache = cache();
    let api = Api::with(&[]);
    let key = |path: &str| flight_to(&cache, &api, path);
    let flights = &cache.0.single_flight;
    let members: Vec<_> = (0..MAX_MEMBERS).map(|_| flights.join(key("/"), None)).collect();
    let leads = |member: &Option<FlightMember>| member.as_ref().map(|member| member.is_leader);
    assert_eq!(leads(&members[0]), Some(true));
    assert!(members[1..].iter().all(|member| leads(member) == Some(false)));
    assert!(flights.join(key("/"), None).is_none());
    let others: Vec<_> = (1..MAX_FLIGHTS).map(|index| flights.join(key(&format!("/{index}")), None)).collect();
    assert!(others.iter().all(|member| leads(member) == Some(true)));
    assert!(flights.join(key("/one/more"), None).is_none());
    assert_eq!(call(&cache, &api, get("/one/more")).await.unwrap().by, Miss, "it goes for itself");
    drop((members, others));
    assert!(is_at_rest(&cache));
}

/// The output of a future that is ready without waiting.
async fn now<T>(mut future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
    std::future::poll_fn(|context| {
        Poll::Ready(match future.as_mut().poll(context) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        })
    })
    .await
}
