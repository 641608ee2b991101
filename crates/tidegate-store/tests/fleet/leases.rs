//! Slices of limits.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tidegate_testkit::random::{RandomSource, case_count};

use super::*;

const LEASE: Span = Span::from_millis(250);

pub(crate) fn leased(limit: u64, secs: u64, permille: u16, max_age: Span) -> Limit {
    let window = Window::new(limit, Span::from_secs(secs), 4096).unwrap().with_lead(max_age);
    let lease = Some(LeaseSpec { permille, max_age });
    Limit::new(LimitKind::Window(window)).with_sharing(Sharing { on_outage: OnOutage::Local, lease })
}

/// The most that any trailing window of the admitted calls holds.
fn densest(calls: &[Time], window: Span) -> usize {
    let mut calls = calls.to_vec();
    calls.sort_unstable();
    let behind = |at: usize| calls[..=at].iter().rev().take_while(|call| calls[at].since(**call) < window).count();
    (0..calls.len()).map(behind).max().unwrap_or(0)
}

#[tokio::test(start_paused = true)]
async fn leases_never_admit_beyond_the_limit() {
    for round in 0..case_count(20, 200) {
        let mut random = RandomSource::from_seed(u64::from(round));
        let clock = Virtual::new();
        let (limit, secs) = (random.between(20, 2_000), random.between(1, 3));
        let max_age = Span::from_millis(random.between(20, 400));
        let store = remote([leased(limit, secs, random.between(20, 500) as u16, max_age)], clock, true);
        let skews = [0, 1, 30].map(Span::from_secs);
        let nodes = skews.map(|skew| Caller::new(&store, clock.ahead(skew), skew.as_micros()));
        settled().await;
        let mut calls = Vec::new();
        for _ in 0..10_000 {
            let node = random.pick(&[0, 0, 1, 2]);
            if nodes[node].take().await {
                calls.push(clock.now());
            }
            if random.chance(20) {
                sleep(Duration::from_micros(random.below(2_000_000 * secs / limit))).await;
            }
        }
        let most = densest(&calls, Span::from_secs(secs));
        assert!(most <= limit as usize, "round {round}: {most} of {limit} in {secs} s");
        assert!(calls.len() >= limit as usize / 2, "round {round}: only {} admitted", calls.len());
    }
}

#[tokio::test(start_paused = true)]
async fn leases_save_round_trips_and_return_remainders() {
    let clock = Virtual::new();
    let store = remote([leased(10_000, 60, 100, Span::from_millis(250))], clock, true);
    let nodes = [1, 2].map(|node| Caller::new(&store, clock, node));
    settled().await;
    let asked = store.request_count();
    let mut admitted = 0;
    for _ in 0..20_000 {
        for node in &nodes {
            admitted += u64::from(node.take().await);
        }
    }
    assert_eq!(admitted, 10_000);
    let asks = store.request_count() - asked;
    assert!(asks <= 500, "{asks} asks for 10,000 admitted calls");
    // One call takes a slice; the rest of it comes back when its lease has ended.
    sleep(Duration::from_secs(61)).await;
    assert!(nodes[0].take().await);
    let held = nodes[1].one(Verb::Peek, &[0], KEY).await.used;
    assert_eq!(held, 1_000);
    sleep(Duration::from_millis(350)).await;
    let held = nodes[1].one(Verb::Peek, &[0], KEY).await.used;
    assert_eq!(held, 1);
}

#[tokio::test(start_paused = true)]
async fn leases_of_a_rate_keep_its_bound() {
    let clock = Virtual::new();
    let rate = Rate::new(1_000, Span::from_secs(1), 500).unwrap();
    let lease = Some(LeaseSpec { permille: 200, max_age: Span::from_millis(250) });
    let limit = Limit::new(LimitKind::Rate(rate)).with_sharing(Sharing { on_outage: OnOutage::Local, lease });
    let store = remote([limit], clock, true);
    let nodes = [1, 2].map(|node| Caller::new(&store, clock, node));
    settled().await;
    let mut random = RandomSource::from_seed(5);
    let mut calls = Vec::new();
    for _ in 0..20_000 {
        if nodes[random.below(2) as usize].take().await {
            calls.push(clock.now());
        }
        if random.chance(30) {
            sleep(Duration::from_micros(random.below(3_000))).await;
        }
    }
    for millis in [1, 50, 200, 1_000] {
        let (most, bound) = (densest(&calls, Span::from_millis(millis)), rate.max_in(Span::from_millis(millis)));
        assert!(most as u64 <= bound, "{most} in {millis} ms, bound {bound}");
    }
    assert!(calls.len() > 3_000, "{}", calls.len());
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_caller_leaves_no_lease_unrequested() {
    let clock = Virtual::new();
    let store = remote([leased(1_000, 60, 100, Span::from_millis(250))], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    store.set_behaviour(RemoteBehaviour::SlowExecution(Duration::from_millis(10)));
    let gone = batch(Verb::Take, &[0], KEY);
    assert!(tokio::time::timeout(Duration::from_millis(5), node.ask(&gone)).await.is_err());
    let before = Instant::now();
    assert!(node.take().await);
    assert!(Instant::now() - before <= Duration::from_millis(11), "{:?}", Instant::now() - before);
}

/// Leases end, and what is left of them has gone back.
async fn given_back() {
    sleep(Duration::from_millis(350)).await;
}

#[tokio::test(start_paused = true)]
async fn lease_remainders_admit_nothing_in_later_periods() {
    let clock = Virtual::new();
    let quota = Quota::new(100, Arc::new(FixedPeriods(Span::from_millis(60_013)))).unwrap();
    let lease = Some(LeaseSpec { permille: 500, max_age: LEASE });
    let limit = Limit::new(LimitKind::Quota(quota.clone())).with_sharing(Sharing { on_outage: OnOutage::Local, lease });
    let store = remote([limit], clock, true);
    let nodes = [1, 2].map(|node| Caller::new(&store, clock, node));
    let ends = quota.period(clock.now()).end;
    sleep(ends.since(clock.now()).as_duration() - Duration::from_millis(100)).await;
    assert!(nodes[0].take().await);
    sleep(Duration::from_millis(101)).await;
    // The other's slice is there before the first one's rest comes back.
    let mut admitted = u64::from(nodes[1].take().await);
    let held = nodes[1].one(Verb::Peek, &[0], KEY).await.used;
    assert_eq!(held, 50);
    for _ in 0..100 {
        sleep(Duration::from_millis(100)).await;
        for node in nodes.iter().cycle().take(4) {
            admitted += u64::from(node.take().await);
        }
    }
    assert_eq!(admitted, 100);
}

#[tokio::test(start_paused = true)]
async fn refused_calls_are_counted_once() {
    let clock = Virtual::new();
    let limits = [leased(1_000, 60, 100, LEASE).with_count_mode(CountMode::All), leased(100, 60, 500, LEASE)];
    let store = remote(limits, clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    for _ in 0..300 {
        node.one(Verb::Take, &[0, 1], KEY).await;
    }
    given_back().await;
    assert_eq!(node.one(Verb::Peek, &[0], KEY).await.used, 300);
    assert_eq!(node.one(Verb::Peek, &[1], KEY).await.used, 100);
}

#[tokio::test(start_paused = true)]
async fn an_unpolled_request_delays_no_other_call() {
    let clock = Virtual::new();
    let store = remote([leased(1_000, 60, 100, LEASE)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    for _ in 0..3 {
        let errand = node.fleet.apply(&batch(Verb::Take, &[0], KEY), clock.now());
        assert!(matches!(errand, StoreResponse::Pending(_)));
        drop(errand);
        let before = Instant::now();
        assert!(node.take().await);
        assert_eq!(Instant::now(), before);
        given_back().await;
    }
    assert_eq!(node.one(Verb::Peek, &[0], KEY).await.used, 3);
}

fn poll<T>(call: &mut Pin<Box<impl Future<Output = T>>>) -> Poll<T> {
    call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

#[tokio::test(start_paused = true)]
async fn a_lease_found_after_waiting_is_spent() {
    let clock = Virtual::new();
    let store = remote([leased(1_000, 60, 100, LEASE)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    let take = batch(Verb::Take, &[0], KEY);
    store.set_behaviour(RemoteBehaviour::Unresponsive);
    let mut errand = Box::pin(node.ask(&take));
    assert!(poll(&mut errand).is_pending());
    store.set_behaviour(RemoteBehaviour::Normal);
    let mut waits = Box::pin(node.ask(&take));
    // The timeout of a wait is 50 ms.
    for _ in 0..8 {
        assert!(poll(&mut waits).is_pending());
        sleep(Duration::from_millis(50)).await;
    }
    drop(errand);
    assert!(node.take().await);
    assert!(poll(&mut waits).is_ready());
    given_back().await;
    assert_eq!(node.one(Verb::Peek, &[0], KEY).await.used, 2);
}

#[tokio::test(start_paused = true)]
async fn a_known_refusal_applies_per_cost() {
    let clock = Virtual::new();
    let store = remote([leased(100, 60, 500, LEASE)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    for _ in 0..10 {
        assert!(node.take().await);
    }
    sleep(Duration::from_secs(10)).await;
    for _ in 0..80 {
        assert!(node.take().await);
    }
    given_back().await;
    let (refused, _) = node.cost(20).await;
    assert_eq!((refused.admission, refused.remaining), (Admission::Refused, 10));
    for _ in 0..10 {
        assert!(node.take().await, "there is room for it");
    }
    let (short, now) = node.cost(1).await;
    assert_eq!(short.admission, Admission::Refused);
    let (long, _) = node.cost(20).await;
    assert_eq!(long.admission, Admission::Refused);
    assert!(long.retry_at.since(short.retry_at) > Span::from_secs(9), "{:?} {:?}", short.retry_at, long.retry_at);
    let asked = store.request_count();
    assert_eq!(node.cost(1).await.0.retry_at, short.retry_at);
    assert_eq!(store.request_count(), asked, "told without asking");
    sleep(long.retry_at.since(now).as_duration()).await;
    assert!(!node.cost(20).await.0.admission.refuses());
}
