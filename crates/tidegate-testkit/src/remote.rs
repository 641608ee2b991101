//! A remote store that misbehaves when told to, for what stands in front of stores.

use parking_lot::Mutex;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate_core::{Batch, Clock, Limits, Outcomes, Time, Verb};
use tidegate_store::{Immediate as _, Remote, Reset, Store as _, StoreError, Waiting};
use tokio::sync::broadcast;

use crate::reference::ReferenceStore;

/// How a remote store behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoteBehaviour {
    /// It answers.
    #[default]
    Normal,
    /// It answers after this time.
    SlowExecution(Duration),
    /// It carries out what it is asked at once, and answers after this time.
    SlowReply(Duration),
    /// It carries out what it is asked, and its answer is lost.
    LostReply,
    /// It answers, but to penalties that come back: those it carries out, and its answer is lost.
    LostPenaltyReply,
    /// It never answers, and carries out nothing.
    Unresponsive,
    /// It answers with an error, as one that is full does.
    Failing,
}

/// A store behind a network of its own; clones are connections to the same one.
#[derive(Clone)]
pub struct FlakyRemote(Arc<FlakyRemoteInner>);

struct FlakyRemoteInner {
    store: ReferenceStore,
    clock: Box<dyn Clock>,
    behaviour: Mutex<RemoteBehaviour>,
    request_count: AtomicU64,
    seed: Mutex<Option<[u8; 16]>>,
    resets: Option<broadcast::Sender<Option<Reset>>>,
}

impl FlakyRemote {
    /// A store that goes by this clock, and tells of resets or doesn't.
    pub fn new(limits: Arc<Limits>, clock: impl Clock, tells_resets: bool) -> Self {
        let resets = tells_resets.then(|| broadcast::Sender::new(1024));
        let near = ReferenceStore::new(limits);
        let (mood, seed) = (Mutex::default(), Mutex::default());
        Self(Arc::new(FlakyRemoteInner {
            store: near,
            clock: Box::new(clock),
            behaviour: mood,
            request_count: AtomicU64::new(0),
            seed,
            resets,
        }))
    }

    /// What it holds.
    pub fn store(&self) -> &ReferenceStore {
        &self.0.store
    }

    /// How often it was asked.
    pub fn request_count(&self) -> u64 {
        self.0.request_count.load(Ordering::SeqCst)
    }

    /// Behaves like this from now on.
    pub fn set_behaviour(&self, mood: RemoteBehaviour) {
        *self.0.behaviour.lock() = mood;
    }

    /// Loses the secret that keys are hashed under.
    pub fn forget_seed(&self) {
        *self.0.seed.lock() = None;
    }

    fn behaviour(&self) -> RemoteBehaviour {
        *self.0.behaviour.lock()
    }

    fn apply(&self, batch: &Batch) -> Outcomes {
        let outcomes = self.0.store.apply_now(batch, self.0.clock.now());
        if let Some(resets) = &self.0.resets {
            for op in batch.ops().iter().filter(|op| op.verb == Verb::Reset) {
                // Nobody has to be listening.
                let _ = resets.send(Some(Reset { tag: self.limits().tag(op.limit), key: op.key }));
            }
        }
        outcomes
    }
}

impl Remote for FlakyRemote {
    fn limits(&self) -> &Arc<Limits> {
        self.0.store.limits()
    }

    fn ask(&self, batch: &Batch, _: Time) -> Waiting<Outcomes> {
        self.0.request_count.fetch_add(1, Ordering::SeqCst);
        let (store, batch, mood) = (self.clone(), batch.clone(), self.behaviour());
        Box::pin(async move {
            match mood {
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

    fn seed(&self, proposal: [u8; 16]) -> Waiting<[u8; 16]> {
        let store = self.clone();
        Box::pin(async move {
            let mut seed = store.0.seed.lock();
            Ok(*seed.get_or_insert(proposal))
        })
    }

    fn resets(&self) -> Option<broadcast::Receiver<Option<Reset>>> {
        self.0.resets.as_ref().map(broadcast::Sender::subscribe)
    }
}
