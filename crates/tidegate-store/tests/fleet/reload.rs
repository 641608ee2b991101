//! Limits that change while a node is in use.

use super::leases::leased;
use super::*;

impl Caller {
    /// The same node with other limits.
    fn reload(&self, limits: impl IntoIterator<Item = Limit>) -> Self {
        let limits = Arc::new(Limits::new(limits.into_iter().collect()).unwrap());
        let fleet = self.fleet.with_limits(limits, self.clock.now()).unwrap().unwrap();
        Self { fleet, clock: self.clock }
    }

    async fn admitted(&self, limit: usize, calls: usize) -> usize {
        let mut admitted = 0;
        for _ in 0..calls {
            admitted += usize::from(!self.one(Verb::Take, &[limit], KEY).await.admission.refuses());
        }
        admitted
    }
}

#[tokio::test(start_paused = true)]
async fn usage_counts_under_new_limits() {
    let clock = Virtual::new();
    let store = remote([window(5, 60)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert_eq!(node.admitted(0, 4).await, 4);
    let smaller = node.reload([window(3, 60)]);
    assert_eq!(smaller.admitted(0, 1).await, 0);
    let larger = smaller.reload([window(10, 60), window(2, 60)]);
    assert_eq!((larger.admitted(0, 9).await, larger.admitted(1, 9).await), (6, 2));
    assert_eq!(node.one(Verb::Peek, &[0], KEY).await.used, 10);
}

#[tokio::test(start_paused = true)]
async fn a_reload_keeps_heartbeats_and_votes() {
    let clock = Virtual::new();
    let store = remote([blocking()], clock, true);
    let nodes = [1, 2].map(|node| Caller::new(&store, clock, node));
    settled().await;
    let nodes = nodes.map(|node| node.reload([window(5, 60), blocking(), window(5, 60)]));
    sleep(Duration::from_secs(15)).await;
    assert_eq!(nodes.each_ref().map(|node| node.fleet.node_count()), [2; 2]);
    for (node, yes) in nodes.iter().zip([1, 2]) {
        let votes = node.fleet.vote(Key::new(1, 2), true, clock.now()).unwrap().await.unwrap();
        assert_eq!((votes.yes, votes.nodes), (yes, 2));
    }
}

#[tokio::test(start_paused = true)]
async fn local_counts_continue_under_new_limits() {
    let clock = Virtual::new();
    let store = remote([window(5, 600)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    store.set_behaviour(RemoteBehaviour::Unresponsive);
    assert_eq!(node.admitted(0, 4).await, 4);
    assert!(node.fleet.outage().is_none());
    sleep(Duration::from_secs(2)).await;
    let reloaded = node.reload([window(6, 600), window(1, 600)]);
    drop(node);
    assert!(reloaded.fleet.outage().is_some());
    assert_eq!((reloaded.admitted(0, 9).await, reloaded.admitted(1, 9).await), (2, 1));
    store.set_behaviour(RemoteBehaviour::Normal);
    sleep(Duration::from_secs(2)).await;
    assert!(reloaded.fleet.outage().is_none());
    let used = [0, 1].map(|limit| batch(Verb::Peek, &[limit], KEY));
    let used =
        [reloaded.ask(&used[0]).await.unwrap().list()[0].used, reloaded.ask(&used[1]).await.unwrap().list()[0].used];
    assert_eq!(used, [6, 1], "the store knows the calls of the outage");
}

/// A call that began before the change may be the one that finds the store gone.
#[tokio::test(start_paused = true)]
async fn an_old_handle_keeps_new_limits_in_outages() {
    let clock = Virtual::new();
    let store = remote([window(5, 600)], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    let reloaded = node.reload([window(5, 600), window(1, 600)]);
    store.set_behaviour(RemoteBehaviour::Unresponsive);
    assert_eq!(node.admitted(0, 1).await, 1);
    assert_eq!((reloaded.admitted(0, 9).await, reloaded.admitted(1, 9).await), (4, 1));
}

#[tokio::test(start_paused = true)]
async fn slices_return_with_their_handle() {
    let clock = Virtual::new();
    let day = Span::from_secs(86_400);
    let slices_of = |limit| [leased(limit, 86_400, 200, day)];
    let store = remote(slices_of(100), clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert_eq!(node.admitted(0, 3).await, 3);
    let reloaded = node.reload(slices_of(10));
    assert_eq!(reloaded.one(Verb::Peek, &[0], KEY).await.used, 20, "the slice is charged while the handle lives");
    drop(node);
    settled().await;
    assert_eq!(reloaded.one(Verb::Peek, &[0], KEY).await.used, 3);
    assert_eq!(reloaded.admitted(0, 20).await, 7);
}

#[tokio::test(start_paused = true)]
async fn a_cached_block_follows_the_new_penalty() {
    let clock = Virtual::new();
    let store = remote([blocking()], clock, true);
    let node = Caller::new(&store, clock, 1);
    settled().await;
    assert!(node.take().await && !node.take().await);
    let same = node.reload([blocking(), window(5, 60)]);
    assert_eq!(same.one(Verb::Take, &[0], KEY).await.admission, Admission::Blocked);
    let without_penalty = same.reload([window(9, 60), window(5, 60)]);
    assert!(without_penalty.take().await);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_node_ends_after_reloads() {
    let clock = Virtual::new();
    let store = remote([leased(1_000, 60, 100, Span::from_millis(250))], clock, true);
    let mut node = Caller::new(&store, clock, 1);
    settled().await;
    for limit in 1..200 {
        node = node.reload([leased(limit, 60, 100, Span::from_millis(250)), blocking()]);
        node.take().await;
    }
    drop(node);
    settled().await;
    let asked = store.request_count();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(store.request_count(), asked, "no task is left");
}
