use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use tidegate_core::batch::Outcome;
use tidegate_core::{Batch, Key, Limits, Op, Outcomes, Time, Verb};
use tidegate_store::{FileStore, FlushMode, Journal, Store, StoreResponse};
use tidegate_testkit::conformance::block_on;
use tidegate_testkit::fixtures;

/// A folder for a store, which goes with it.
pub(crate) struct Place {
    _folder: TempDir,
    path: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.redb");
        Self { _folder: folder, path }
    }

    /// One in memory, where there is such a thing, for tests that are about answers and not about the disk.
    pub(crate) fn quick() -> Self {
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        let path = folder.path().join("state.redb");
        Self { _folder: folder, path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn journal(&self, flush: FlushMode) -> Arc<Journal> {
        Journal::open(&self.path, flush).unwrap()
    }

    pub(crate) fn store(&self, limits: &Arc<Limits>, flush: FlushMode, now: Time) -> FileStore {
        FileStore::new(Arc::clone(limits), 8 << 20, &self.journal(flush), now).unwrap()
    }
}

pub(crate) fn ask(store: &impl Store, batch: &Batch, now: Time) -> Outcomes {
    match store.apply(batch, now) {
        StoreResponse::Ready(outcomes) => outcomes,
        StoreResponse::Pending(later) => block_on(later).unwrap(),
    }
}

/// One operation of cost 1.
pub(crate) fn one(store: &impl Store, verb: Verb, limit: usize, key: Key, now: Time) -> Outcome {
    let mut batch = Batch::new(7);
    batch.push(Op::new(fixtures::limit_id(limit), verb, key, 1)).unwrap();
    ask(store, &batch, now).list()[0]
}
