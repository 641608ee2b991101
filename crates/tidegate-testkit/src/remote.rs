//! A remote store that misbehaves on demand, to test the code in front of stores.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tidegate_core::{Batch, Clock, Limits, Outcomes, Time, Verb};
use tidegate_store::{
    AnnouncedNode, Announcement, ImmediateStore as _, KeyReset, RemoteFuture, RemoteStore, Store as _, StoreError,
};
use tokio::sync::broadcast;

use crate::reference::ReferenceStore;

/// The behaviour of a remote store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoteBehaviour {
    /// It replies.
    #[default]
    Normal,
    /// It carries out a batch and replies after this time.
    SlowExecution(Duration),
    /// It carries out a batch at once, and replies after this time.
    SlowReply(Duration),
    /// It carries out a batch, and its reply is lost.
    LostReply,
    /// It replies, but not to batches that restore a penalty. Those it carries out, and its reply is lost.
    LostPenaltyReply,
    /// It never replies, and carries out nothing.
    Unresponsive,
    /// It replies with an error, as a full store does.
    Failing,
}

/// A store behind its own network. Clones are connections to the same store.
#[derive(Clone)]
pub struct FlakyRemote {
    store: Arc<ReferenceStore>,
    inner: Arc<FlakyRemoteInner>,
}

struct FlakyRemoteInner {
    clock: Box<dyn Clock>,
    behaviour: Mutex<RemoteBehaviour>,
    request_count: AtomicU64,
    seed: Mutex<Option<[u8; 16]>>,
    /// The announcement of each node, and its time.
    announcements: Mutex<BTreeMap<u64, (Time, Announcement)>>,
    resets: Option<broadcast::Sender<Option<KeyReset>>>,
}

impl FlakyRemote {
    /// Creates a store with this clock. It sends notifications of resets if `tells_resets` is true.
    pub fn new(limits: Arc<Limits>, clock: impl Clock, tells_resets: bool) -> Self {
        let resets = tells_resets.then(|| broadcast::Sender::new(1024));
        let inner = FlakyRemoteInner {
            clock: Box::new(clock),
            behaviour: Mutex::default(),
            request_count: AtomicU64::new(0),
            seed: Mutex::default(),
            announcements: Mutex::default(),
            resets,
        };
        Self { store: Arc::new(ReferenceStore::new(limits)), inner: Arc::new(inner) }
    }

    /// Returns the store behind the network.
    pub fn store(&self) -> &ReferenceStore {
        &self.store
    }

    /// Returns the number of requests.
    pub fn request_count(&self) -> u64 {
        self.inner.request_count.load(Ordering::SeqCst)
    }

    /// Sets the behaviour from now on.
    pub fn set_behaviour(&self, behaviour: RemoteBehaviour) {
        *self.inner.behaviour.lock() = behaviour;
    }

    /// Loses the secret under which keys are hashed.
    pub fn forget_seed(&self) {
        *self.inner.seed.lock() = None;
    }

    fn apply(&self, batch: &Batch) -> Outcomes {
        let outcomes = self.store.apply_now(batch, self.inner.clock.now());
        if let Some(resets) = &self.inner.resets {
            for op in batch.ops().iter().filter(|op| op.verb == Verb::Reset) {
                // There may be no listener.
                let _ = resets.send(Some(KeyReset { tag: self.limits().tag(op.limit), key: op.key }));
            }
        }
        outcomes
    }
}

impl RemoteStore for FlakyRemote {
    fn limits(&self) -> &Arc<Limits> {
        self.store.limits()
    }

    fn apply(&self, batch: &Batch, _: Time) -> RemoteFuture<Outcomes> {
        self.inner.request_count.fetch_add(1, Ordering::SeqCst);
        let (store, batch, behaviour) = (self.clone(), batch.clone(), *self.inner.behaviour.lock());
        Box::pin(async move {
            match behaviour {
                RemoteBehaviour::Normal => {}
                RemoteBehaviour::SlowExecution(delay) => tokio::time::sleep(delay).await,
                RemoteBehaviour::SlowReply(delay) => {
                    let outcomes = store.apply(&batch);
                    tokio::time::sleep(delay).await;
                    return Ok(outcomes);
                }
                RemoteBehaviour::LostPenaltyReply
                    if !batch.ops().iter().any(|op| matches!(op.verb, Verb::RestorePenalty { .. })) => {}
                RemoteBehaviour::LostReply | RemoteBehaviour::LostPenaltyReply => {
                    store.apply(&batch);
                    return pending().await;
                }
                RemoteBehaviour::Unresponsive => return pending().await,
                RemoteBehaviour::Failing => return Err(StoreError::Failed("OOM command not allowed".to_owned())),
            }
            Ok(store.apply(&batch))
        })
    }

    fn get_or_insert_seed(&self, proposal: [u8; 16]) -> RemoteFuture<[u8; 16]> {
        let store = self.clone();
        Box::pin(async move {
            let mut seed = store.inner.seed.lock();
            Ok(*seed.get_or_insert(proposal))
        })
    }

    fn announce(&self, announcement: Announcement, _: Time) -> RemoteFuture<Vec<AnnouncedNode>> {
        let (store, behaviour) = (self.clone(), *self.inner.behaviour.lock());
        Box::pin(async move {
            if behaviour != RemoteBehaviour::Normal {
                return Err(StoreError::Failed("OOM command not allowed".to_owned()));
            }
            let now = store.inner.clock.now();
            let mut announcements = store.inner.announcements.lock();
            announcements.insert(announcement.node_id(), (now, announcement));
            announcements.retain(|_, (at, announcement)| now.since(*at) < announcement.kept_for());
            let nodes = announcements.iter().map(|(node_id, (at, announcement))| AnnouncedNode {
                node_id: *node_id,
                age: now.since(*at),
                record: announcement.record().to_vec(),
            });
            Ok(nodes.collect())
        })
    }

    fn with_limits(&self, limits: Arc<Limits>) -> Option<Box<dyn RemoteStore>> {
        let store = self.store.with_limits(limits, Time::ZERO).ok()??;
        Some(Box::new(Self { store: Arc::new(store), inner: Arc::clone(&self.inner) }))
    }

    fn subscribe_to_resets(&self) -> Option<broadcast::Receiver<Option<KeyReset>>> {
        self.inner.resets.as_ref().map(broadcast::Sender::subscribe)
    }
}
