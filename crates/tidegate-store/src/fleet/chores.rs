//! What a node does beside its decisions: calls the roll, looks after what is down, tells the store what needs no answer,
//! hears of resets, gives back what leases left.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::{Batch, LimitId, Outcomes, Span, Time};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

use super::link::{Link, Place};
use super::returns::Returned;
use super::share::Local;
use super::{LEASE, Node, ROLL};
use crate::Reset;

/// How often the roll is called, and how often what is down is looked at.
const ROLL_EVERY: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How much longer than a decision these wait for an answer, and how long at the least: what is slow isn't gone.
const PATIENCE: (u32, Duration) = (4, Duration::from_millis(200));
/// How many batches are told at once.
const AT_ONCE: usize = 64;
/// How often leases are looked over.
const SWEEP_EVERY: Duration = Duration::from_millis(50);
/// How often the store is asked to forget what has expired, and the like.
const TEND_EVERY: Duration = Duration::from_secs(1);
/// How long a part is suspect before it counts as down, which the log is told.
const GONE: Span = Span::from_millis(500);
/// How long it stays up before it is looked at again at once when it stalls.
const STABLE: Span = Span::from_secs(1);

pub(super) fn start(
    node: &Arc<Node>,
    told: mpsc::Receiver<(Batch, Time)>,
    resets: Option<broadcast::Receiver<Option<Reset>>>,
) -> JoinSet<()> {
    let mut chores = JoinSet::new();
    chores.spawn(roll(Arc::clone(node)));
    for part in 0..node.links.len() {
        chores.spawn(look(Arc::clone(node), part));
    }
    chores.spawn(tell(Arc::clone(node), told));
    chores.spawn(settle_doubts(Arc::clone(node)));
    chores.spawn(tend(Arc::clone(node)));
    if let Some(resets) = resets {
        chores.spawn(hear(Arc::clone(node), resets));
    }
    if node.leases.any() {
        chores.spawn(sweep(Arc::clone(node)));
    }
    chores
}

/// Calls the roll: finds out how many nodes there are, and whether the store is there before a caller does.
async fn roll(node: Arc<Node>) {
    loop {
        let home = node.home();
        if home.is_up() {
            match ask(&node, node.roll_call()).await {
                Ok(outcomes) => {
                    node.count(&outcomes);
                    keep_seed(&node).await;
                }
                Err(_) => home.suspect(|| node.local(), Place { affinity: 0, key: ROLL }),
            }
        }
        sleep(ROLL_EVERY).await;
    }
}

/// Looks at a part that is suspect until it is back, and then tells it what was done meanwhile.
async fn look(node: Arc<Node>, part: usize) {
    let link = &node.links[part];
    let mut rose_at = None;
    loop {
        link.poked.notified().await;
        let suspect_at = node.clock.now();
        if !link.is_up() && rose_at.is_some_and(|rose_at| suspect_at.since(rose_at) < STABLE) {
            // What stalls time and again isn't asked in between.
            sleep(LOOK_EVERY).await;
        }
        while !link.is_up() {
            let (batch, asked_at) = (node.look(link), node.clock.now());
            let is_roll = batch.ops().iter().any(|op| op.key == ROLL);
            let why = match ask(&node, batch).await {
                Ok(outcomes) => {
                    let now = node.clock.now();
                    let (took, timeout) = (now.since(asked_at), Span::from_duration(node.options.timeout));
                    if took <= timeout {
                        rejoin(&node, link).await;
                        if is_roll {
                            node.count(&outcomes);
                        }
                        rose_at = Some(now);
                        break;
                    }
                    format!("it answers after {took}, and a decision waits for {timeout} at the most")
                }
                Err(why) => why,
            };
            if node.clock.now().since(suspect_at) >= GONE {
                fall(&node, link, &why);
            }
            sleep(LOOK_EVERY).await;
        }
        if let Some(local) = link.local() {
            tokio::spawn(merge(Arc::clone(&node), local));
        }
    }
}

/// Asks the store, whether its link is up or not, and says why there is no answer.
async fn ask(node: &Node, batch: Batch) -> Result<Outcomes, String> {
    let patience = patience(node);
    match timeout(patience, node.remote.ask(&batch, node.clock.now())).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {patience:?}")),
    }
}

fn patience(node: &Node) -> Duration {
    (node.options.timeout * PATIENCE.0).max(PATIENCE.1)
}

/// Tells a store that has lost its memory the secret that keys are hashed under, before a new node invents another.
async fn keep_seed(node: &Node) {
    let Some(seed) = node.options.seed else { return };
    let Ok(Ok(kept)) = timeout(patience(node), node.remote.seed(seed)).await else { return };
    let is_strange = kept != seed;
    let was_strange = node.strange.swap(is_strange, Ordering::Relaxed);
    if is_strange && !was_strange {
        tracing::error!(
            "the store has another secret than this node hashes keys under: they don't count together until this node is \
             started again; store.hash_key keeps that from happening"
        );
    }
}

fn fall(node: &Node, link: &Link, error: &str) {
    if link.fall() && node.down.fetch_add(1, Ordering::Relaxed) == 0 {
        let what = if node.links.len() > 1 { "a part of the store" } else { "the store" };
        tracing::warn!(error, "{what} is down: each limit goes on as its on_outage says");
    }
}

/// Goes back to the store.
async fn rejoin(node: &Node, link: &Link) {
    keep_seed(node).await;
    node.settled_at.store((node.clock.now() + LEASE).as_micros(), Ordering::Relaxed);
    // Before anybody asks a store that may have lost them.
    node.blocks.doubt(|affinity, key| std::ptr::eq(node.link_to(affinity, key), link));
    let was_down = link.rise();
    node.blocks.doubts.notify_one();
    if was_down && node.down.fetch_sub(1, Ordering::Relaxed) == 1 {
        tracing::warn!("the store is back");
    }
}

/// Tells the store what was done without it.
async fn merge(node: Arc<Node>, local: Arc<Local>) {
    let mut asked = JoinSet::new();
    for batch in local.take_released() {
        spawn_one(&mut asked, Arc::clone(&node).ask_or_keep(batch, node.clock.now())).await;
    }
    while asked.join_next().await.is_some() {}
    for (place, untold) in local.take_untold() {
        let now = node.clock.now();
        let news = local.news(place, untold, now);
        let (node, local) = (Arc::clone(&node), Arc::clone(&local));
        let told = async move {
            for batch in news {
                for (batch, _) in node.resets.noted(&batch) {
                    if node.ask(&batch, now).await.is_err() {
                        local.put_back(place, untold);
                        return;
                    }
                }
            }
            let Some(mut known) = untold.penalty(place) else { return };
            match node.bring_back(&mut known).await {
                Ok(Returned::Known) => node.blocks.confirm(place.0, place.1, node.clock.now()),
                Ok(Returned::Reset) => node.forget(place.0, place.1),
                Err(_) => local.put_back(place, untold.but_told(&known)),
            }
        };
        spawn_one(&mut asked, told).await;
    }
    while asked.join_next().await.is_some() {}
}

/// Spawns it when there is room among those that are asked at once.
async fn spawn_one(asked: &mut JoinSet<()>, one: impl Future<Output = ()> + Send + 'static) {
    if asked.len() >= AT_ONCE {
        asked.join_next().await;
    }
    asked.spawn(one);
}

/// Tells the store what needs no answer.
async fn tell(node: Arc<Node>, mut told: mpsc::Receiver<(Batch, Time)>) {
    let mut asked = JoinSet::new();
    while let Some((batch, now)) = told.recv().await {
        spawn_one(&mut asked, Arc::clone(&node).ask_or_keep(batch, now)).await;
        while asked.try_join_next().is_some() {}
    }
}

/// Asks the store whether it still knows the blocks that it may have lost, and tells it of those.
async fn settle_doubts(node: Arc<Node>) {
    loop {
        node.blocks.doubts.notified().await;
        let mut asked = JoinSet::new();
        for (limit, key) in node.blocks.doubted() {
            let node = Arc::clone(&node);
            spawn_one(&mut asked, async move { node.settle_doubt(limit, key).await }).await;
        }
        while asked.join_next().await.is_some() {}
    }
}

async fn hear(node: Arc<Node>, mut resets: broadcast::Receiver<Option<Reset>>) {
    loop {
        match resets.recv().await {
            Ok(Some(Reset { tag, key })) => {
                let limits = node.remote.limits();
                let named = |id: &LimitId| limits.tag(*id) == tag;
                if let Some(limit) = limits.iter().map(|(id, _)| id).find(named) {
                    node.forget(limit, key);
                }
            }
            Ok(None) | Err(RecvError::Lagged(_)) => node.blocks.disbelieve(),
            Err(RecvError::Closed) => return,
        }
    }
}

async fn sweep(node: Arc<Node>) {
    let mut ticks = interval(SWEEP_EVERY);
    loop {
        ticks.tick().await;
        let now = node.clock.now();
        for batch in node.leases.sweep(now) {
            node.tell(&batch, now);
        }
    }
}

async fn tend(node: Arc<Node>) {
    loop {
        if node.links.iter().any(Link::is_up) {
            // What isn't done now is done later.
            let _ = node.remote.tend().await;
        }
        sleep(TEND_EVERY).await;
    }
}
