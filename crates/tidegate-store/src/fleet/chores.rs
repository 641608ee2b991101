//! What a node does beside its decisions: calls the roll, tells the store what needs no answer, hears of resets, gives
//! back what leases left.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tidegate_core::{Batch, LimitId, Time};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

use super::{Node, share};
use crate::Reset;

/// How often the roll is called while the store answers, and while it doesn't.
const ROLL_EVERY: Duration = Duration::from_secs(2);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How much longer than a decision a roll call waits for its answer, and how long at the least: what is slow isn't gone.
const PATIENCE: (u32, Duration) = (4, Duration::from_millis(200));
/// How many batches are told at once.
const AT_ONCE: usize = 64;
/// How often leases are looked over.
const SWEEP_EVERY: Duration = Duration::from_millis(50);
/// How often the store is asked to forget what has expired.
const CLEAN_EVERY: Duration = Duration::from_secs(1);
/// How long after the store's return what was used meanwhile is looked for again, for decisions that were under way.
const STRAGGLERS: Duration = Duration::from_millis(100);

pub(super) fn start(
    node: &Arc<Node>,
    told: mpsc::Receiver<(Batch, Time)>,
    resets: Option<broadcast::Receiver<Reset>>,
) -> JoinSet<()> {
    let mut chores = JoinSet::new();
    for part in 0..node.links.len() {
        chores.spawn(roll(Arc::clone(node), part));
    }
    chores.spawn(tell(Arc::clone(node), told));
    chores.spawn(clean(Arc::clone(node)));
    if let Some(resets) = resets {
        chores.spawn(hear(Arc::clone(node), resets));
    }
    if node.leases.any() {
        chores.spawn(sweep(Arc::clone(node)));
    }
    chores
}

/// Calls the roll over one link: finds out how many nodes there are, and whether the store is there.
async fn roll(node: Arc<Node>, part: usize) {
    let link = &node.links[part];
    let patience = (node.options.timeout * PATIENCE.0).max(PATIENCE.1);
    loop {
        // The whole store has one roll; other parts are only looked after once they have failed.
        if part == 0 || !link.is_up() {
            let batch = node.roll_call(link.affinity());
            match timeout(patience, node.remote.ask(&batch, node.clock.now())).await {
                Ok(Ok(outcomes)) => {
                    if let Some(outcome) = outcomes.list().first().filter(|_| part == 0) {
                        node.size.store(usize::try_from(outcome.used).unwrap_or(1).max(1), Ordering::Relaxed);
                    }
                    if !link.is_up() {
                        rejoin(&node, part);
                    }
                }
                failed => {
                    if link.fall(|| node.local()) && node.down.fetch_add(1, Ordering::Relaxed) == 0 {
                        let error = failed.map_or_else(
                            |_| format!("no answer within {patience:?}"),
                            |answer| answer.map_or_else(|error| error.to_string(), |_| String::new()),
                        );
                        tracing::warn!(error, "the store is down: each limit goes on as its on_outage says");
                    }
                }
            }
        }
        let wait = if link.is_up() { ROLL_EVERY } else { LOOK_EVERY };
        tokio::select! {
            () = sleep(wait) => {}
            () = link.poked.notified() => {}
        }
    }
}

/// Goes back to the store, and tells it what was used meanwhile.
fn rejoin(node: &Arc<Node>, part: usize) {
    let (local, was_down) = node.links[part].rise();
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
                // Should it fail again, what was used is lost with the store.
                let _ = node.ask(&batch, now).await;
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
        asked.spawn(async move {
            if node.ask(&batch, now).await.is_err()
                && let Some(local) = node.link(&batch).local()
            {
                local.apply(&batch, node.clock.now());
            }
        });
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

async fn clean(node: Arc<Node>) {
    loop {
        sleep(CLEAN_EVERY).await;
        if node.links.iter().any(|link| link.is_up()) {
            // What isn't removed now is removed later.
            let _ = node.remote.clean().await;
        }
    }
}
