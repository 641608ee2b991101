//! What a node does beside its decisions: calls the roll, looks after what is down, tells the store what needs no answer,
//! hears of resets, gives back what leases left.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::{Batch, LimitId, Outcomes, Time};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

use super::link::Link;
use super::{Node, ROLL, share};
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
/// How long after the store's return what was used meanwhile is looked for again, for decisions that were under way.
const STRAGGLERS: Duration = Duration::from_millis(100);

pub(super) fn start(
    node: &Arc<Node>,
    told: mpsc::Receiver<(Batch, Time)>,
    resets: Option<broadcast::Receiver<Reset>>,
) -> JoinSet<()> {
    let mut chores = JoinSet::new();
    chores.spawn(roll(Arc::clone(node)));
    for part in 0..node.links.len() {
        chores.spawn(look(Arc::clone(node), part));
    }
    chores.spawn(tell(Arc::clone(node), told));
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
                Ok(outcomes) => node.count(&outcomes),
                Err(why) => {
                    fall(&node, home, &why);
                    home.poked.notify_one();
                }
            }
        }
        sleep(ROLL_EVERY).await;
    }
}

/// Looks at a part that is suspect until it is back.
async fn look(node: Arc<Node>, part: usize) {
    let link = &node.links[part];
    loop {
        link.poked.notified().await;
        while !link.is_up() {
            let batch = node.look(link);
            let is_roll = batch.ops().iter().any(|op| op.key == ROLL);
            match ask(&node, batch).await {
                Ok(outcomes) => {
                    if is_roll {
                        node.count(&outcomes);
                    }
                    rejoin(&node, link);
                }
                Err(why) => {
                    fall(&node, link, &why);
                    sleep(LOOK_EVERY).await;
                }
            }
        }
    }
}

/// Asks the store, whether its link is up or not, and says why there is no answer.
async fn ask(node: &Node, batch: Batch) -> Result<Outcomes, String> {
    let patience = (node.options.timeout * PATIENCE.0).max(PATIENCE.1);
    match timeout(patience, node.remote.ask(&batch, node.clock.now())).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {patience:?}")),
    }
}

fn fall(node: &Node, link: &Link, error: &str) {
    if link.fall(|| node.local()) && node.down.fetch_add(1, Ordering::Relaxed) == 0 {
        let what = if node.links.len() > 1 { "a part of the store" } else { "the store" };
        tracing::warn!(error, "{what} is down: each limit goes on as its on_outage says");
    }
}

/// Goes back to the store, and tells it what was used meanwhile.
fn rejoin(node: &Arc<Node>, link: &Link) {
    let (local, was_down) = link.rise();
    node.blocks.clear();
    if was_down && node.down.fetch_sub(1, Ordering::Relaxed) == 1 {
        tracing::warn!("the store is back");
    }
    let Some(local) = local else { return };
    let node = Arc::clone(node);
    tokio::spawn(async move {
        if let Some(seed) = node.options.seed
            && let Ok(kept) = node.remote.seed(seed).await
            && kept != seed
        {
            tracing::error!(
                "the store came back with another secret than this node hashes keys under: they don't count together \
                 until this node is started again; store.hash_key keeps that from happening"
            );
        }
        merge(&node, &local).await;
        sleep(STRAGGLERS).await;
        merge(&node, &local).await;
    });
}

async fn merge(node: &Arc<Node>, local: &share::Local) {
    let now = node.clock.now();
    let mut asked = JoinSet::new();
    for share::Used { tells, peek, met } in local.used(now) {
        node.blocks.learn(&peek, &met, now);
        let node = Arc::clone(node);
        if asked.len() >= AT_ONCE {
            asked.join_next().await;
        }
        asked.spawn(async move {
            for batch in tells {
                node.ask_or_keep(&batch, now).await;
            }
        });
    }
    while asked.join_next().await.is_some() {}
}

/// Tells the store what needs no answer.
async fn tell(node: Arc<Node>, mut told: mpsc::Receiver<(Batch, Time)>) {
    let mut asked = JoinSet::new();
    while let Some((batch, now)) = told.recv().await {
        if asked.len() >= AT_ONCE {
            asked.join_next().await;
        }
        let node = Arc::clone(&node);
        asked.spawn(async move { node.ask_or_keep(&batch, now).await });
        while asked.try_join_next().is_some() {}
    }
}

async fn hear(node: Arc<Node>, mut resets: broadcast::Receiver<Reset>) {
    loop {
        match resets.recv().await {
            Ok(Reset { tag, key }) => {
                let limits = node.remote.limits();
                let named = |id: &LimitId| limits.tag(*id) == tag;
                if let Some(limit) = limits.iter().map(|(id, _)| id).find(named) {
                    node.forget(limit, key);
                }
            }
            Err(RecvError::Lagged(_)) => node.blocks.clear(),
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
