//! Our stores, asked by batches of one operation.

use super::{OURS, Subject, Terms, unkeyed};
use crate::keys::Sequence;
use crate::measure::Worker;
use std::hint::black_box;
use std::sync::Arc;
use tempfile::TempDir;
use tidegate::core::{Batch, Key, Kind, Limit, LimitId, Limits, Op, Rate, Verb};
use tidegate::{Clock, Memory, Span, Store, SystemClock};
use tidegate_store::{Answer, FileStore, Flush, Journal};

/// In memory.
pub fn memory(terms: Terms) -> Box<dyn Subject> {
    let store = Memory::new(limits(terms), Memory::MAX_BYTES);
    Box::new(Asked { name: "memory store", store, clock: SystemClock::new(), _folder: None })
}

/// In memory, with a file that is written every 100 ms.
pub fn file(terms: Terms) -> Box<dyn Subject> {
    let folder = tempfile::tempdir().expect("there is room for a file");
    let journal = Journal::open(&folder.path().join("state"), Flush::default()).expect("the file is new");
    let clock = SystemClock::new();
    let store = FileStore::new(limits(terms), Memory::MAX_BYTES, &journal, clock.now()).expect("the file is new");
    Box::new(Asked { name: OURS, store, clock, _folder: Some(folder) })
}

fn limits(terms: Terms) -> Arc<Limits> {
    let rate = Rate::new(1, Span::from_duration(terms.every), terms.burst.into()).expect("the terms are a rate");
    Arc::new(Limits::of_one(Limit::new(Kind::Rate(rate))))
}

struct Asked<S> {
    name: &'static str,
    store: S,
    clock: SystemClock,
    _folder: Option<TempDir>,
}

impl<S: Store> Asked<S> {
    fn ask(&self, key: Key) -> bool {
        let mut batch = Batch::new(0);
        let asked = batch.push(Op::new(LimitId::FIRST, Verb::Take, black_box(key), 1));
        match self.store.apply(&batch, self.clock.now()) {
            Answer::Ready(outcomes) => asked.is_ok() && !outcomes.list()[0].verdict.refuses(),
            Answer::Later(later) => super::at_once(later).is_ok_and(|outcomes| !outcomes.list()[0].verdict.refuses()),
        }
    }
}

impl<S: Store> Subject for Asked<S> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn touch(&self, key: &String) -> bool {
        self.ask(hashed(key))
    }

    fn worker<'a>(&'a self, sequence: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        let keys: Vec<Key> = sequence.keys.iter().map(|key| hashed(key)).collect();
        let mut at = 0;
        unkeyed(move || {
            at = if at + 1 == keys.len() { 0 } else { at + 1 };
            self.ask(keys[at])
        })
    }
}

/// The benchmark's texts are hashes already.
fn hashed(key: &str) -> Key {
    Key::new(0, u64::from_str_radix(key, 16).expect("keys are hexadecimal"))
}
