//! A remote store that misbehaves when told to, for what stands in front of stores.

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tidegate_core::{Batch, Clock, Limits, Outcomes, Time, Verb};
use tidegate_store::{Immediate as _, Remote, Reset, Store as _, StoreError, Waiting};
use tokio::sync::broadcast;

use crate::reference::ReferenceStore;

/// How a remote store behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mood {
    /// It answers.
    #[default]
    Well,
    /// It answers after this time.
    Slow(Duration),
    /// It carries out what it is asked at once, and answers after this time.
    Late(Duration),
    /// It carries out what it is asked, and its answer is lost.
    Mute,
    /// It answers, but to penalties that come back: those it carries out, and its answer is lost.
    MuteToPenalties,
    /// It never answers, and carries out nothing.
    Frozen,
    /// It answers with an error, as one that is full does.
    Failing,
}

/// A store behind a network of its own; clones are connections to the same one.
#[derive(Clone)]
pub struct FlakyRemote(Arc<Parts>);

struct Parts {
    near: ReferenceStore,
    clock: Box<dyn Clock>,
    mood: Mutex<Mood>,
    asks: AtomicU64,
    seed: Mutex<Option<[u8; 16]>>,
    resets: Option<broadcast::Sender<Option<Reset>>>,
}

impl FlakyRemote {
    /// A store that goes by this clock, and tells of resets or doesn't.
    pub fn new(limits: Arc<Limits>, clock: impl Clock, tells_resets: bool) -> Self {
        let resets = tells_resets.then(|| broadcast::Sender::new(1024));
        let near = ReferenceStore::new(limits);
        let (mood, seed) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Parts { near, clock: Box::new(clock), mood, asks: AtomicU64::new(0), seed, resets }))
    }

    /// What it holds.
    pub fn near(&self) -> &ReferenceStore {
        &self.0.near
    }

    /// How often it was asked.
    pub fn asks(&self) -> u64 {
        self.0.asks.load(Ordering::SeqCst)
    }

    /// Behaves like this from now on.
    pub fn set_mood(&self, mood: Mood) {
        *self.0.mood.lock().unwrap_or_else(PoisonError::into_inner) = mood;
    }

    /// Loses the secret that keys are hashed under.
    pub fn forget_seed(&self) {
        *self.0.seed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn mood(&self) -> Mood {
        *self.0.mood.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry_out(&self, batch: &Batch) -> Outcomes {
        let outcomes = self.0.near.apply_now(batch, self.0.clock.now());
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
        self.0.near.limits()
    }

    fn ask(&self, batch: &Batch, _: Time) -> Waiting<Outcomes> {
        self.0.asks.fetch_add(1, Ordering::SeqCst);
        let (store, batch, mood) = (self.clone(), batch.clone(), self.mood());
        Box::pin(async move {
            match mood {
                Mood::Well => {}
                Mood::Slow(delay) => tokio::time::sleep(delay).await,
                Mood::Late(delay) => {
                    let outcomes = store.carry_out(&batch);
                    tokio::time::sleep(delay).await;
                    return Ok(outcomes);
                }
                Mood::MuteToPenalties if !batch.ops().iter().any(|op| matches!(op.verb, Verb::Penalise { .. })) => {}
                Mood::Mute | Mood::MuteToPenalties => {
                    store.carry_out(&batch);
                    return pending().await;
                }
                Mood::Frozen => return pending().await,
                Mood::Failing => return Err(StoreError::Failed("OOM command not allowed".to_owned())),
            }
            Ok(store.carry_out(&batch))
        })
    }

    fn seed(&self, proposal: [u8; 16]) -> Waiting<[u8; 16]> {
        let store = self.clone();
        Box::pin(async move {
            let mut seed = store.0.seed.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(*seed.get_or_insert(proposal))
        })
    }

    fn resets(&self) -> Option<broadcast::Receiver<Option<Reset>>> {
        self.0.resets.as_ref().map(broadcast::Sender::subscribe)
    }
}
