use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use tidegate_core::{Limits, Time};
use tidegate_store::{FileStore, Flush, Journal};

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

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn journal(&self, flush: Flush) -> Arc<Journal> {
        Journal::open(&self.path, flush).unwrap()
    }

    pub(crate) fn store(&self, limits: &Arc<Limits>, flush: Flush, now: Time) -> FileStore {
        FileStore::new(Arc::clone(limits), 8 << 20, &self.journal(flush), now).unwrap()
    }
}
