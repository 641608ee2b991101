//! Tidegate's stores, asked by batches of one operation.

use super::{LimitTerms, OURS, Subject, unkeyed_worker};
use crate::keys::KeySequence;
use crate::measure::Worker;
use std::hint::black_box;
use std::sync::Arc;
use tempfile::TempDir;
use tidegate::clock::SystemClock;
use tidegate::store::{Memory, Store};
use tidegate::{Clock, Span};
use tidegate_core::{Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Rate, Verb};
use tidegate_store::{FileStore, FlushMode, Journal, StoreResponse};

/// Returns the store in memory.
pub fn memory(terms: LimitTerms) -> Box<dyn Subject> {
    let store = Memory::new(limits(terms), Memory::DEFAULT_MAX_BYTES);
    Box::new(StoreSubject { name: "memory store", store, clock: SystemClock::new(), _folder: None })
}

/// Returns the store in memory with a file that is written every 100 ms.
pub fn file(terms: LimitTerms) -> Box<dyn Subject> {
    let folder = tempfile::tempdir().expect("there is room for a file");
    let journal = Journal::open(&folder.path().join("state"), FlushMode::default()).expect("the file is new");
    let clock = SystemClock::new();
    let store =
        FileStore::new(limits(terms), Memory::DEFAULT_MAX_BYTES, &journal, clock.now()).expect("the file is new");
    Box::new(StoreSubject { name: OURS, store, clock, _folder: Some(folder) })
}

fn limits(terms: LimitTerms) -> Arc<Limits> {
    let rate = Rate::new(1, Span::from_duration(terms.interval), terms.burst.into()).expect("the terms are a rate");
    Arc::new(Limits::with_limit(Limit::new(LimitKind::Rate(rate))))
}

struct StoreSubject<S> {
    name: &'static str,
    store: S,
    clock: SystemClock,
    _folder: Option<TempDir>,
}

impl<S: Store> StoreSubject<S> {
    fn decide(&self, key: Key) -> bool {
        let mut batch = Batch::new(0);
        let asked = batch.push(Op::new(LimitId::FIRST, Verb::Take, black_box(key), 1));
        match self.store.apply(&batch, self.clock.now()) {
            StoreResponse::Ready(outcomes) => asked.is_ok() && !outcomes.list()[0].admission.refuses(),
            StoreResponse::Pending(later) => {
                super::spin_until_ready(later).is_ok_and(|outcomes| !outcomes.list()[0].admission.refuses())
            }
        }
    }
}

impl<S: Store> Subject for StoreSubject<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn decide_once(&self, key: &String) -> bool {
        self.decide(key_from_text(key))
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let keys: Vec<Key> = sequence.keys.iter().map(|key| key_from_text(key)).collect();
        let mut at = 0;
        unkeyed_worker(move || {
            at = if at + 1 == keys.len() { 0 } else { at + 1 };
            self.decide(keys[at])
        })
    }
}

/// Returns the key of a text. The benchmark's texts are hashes already.
fn key_from_text(key: &str) -> Key {
    Key::new(0, u64::from_str_radix(key, 16).expect("keys are hexadecimal"))
}
