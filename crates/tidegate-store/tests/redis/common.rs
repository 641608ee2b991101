//! A server to ask, and stores on it.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tidegate_core::{Limits, Time};
use tidegate_store::{DirectStore, Redis, RedisOptions, TimeSource};
use tidegate_testkit::conformance::Backend;
use tokio::runtime::Runtime;

/// Stores on one server, each under a prefix of its own.
pub(crate) struct Stores {
    pub(crate) options: RedisOptions,
    pub(crate) runtime: Runtime,
    next: AtomicU32,
}

impl Stores {
    pub(crate) fn new(url: impl Into<String>, time: TimeSource) -> Self {
        let options = RedisOptions { time_source: time, ..RedisOptions::new(url) };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        Self { options, runtime, next: AtomicU32::new(0) }
    }

    /// A store that shares its state with all others under the prefix.
    pub(crate) fn under(&self, prefix: &str, limits: &Arc<Limits>) -> Redis {
        let options = RedisOptions { prefix: prefix.into(), ..self.options.clone() };
        Redis::new(options, Arc::clone(limits)).unwrap()
    }
}

impl Backend for Stores {
    type Store = DirectStore;

    fn open(&self, limits: Arc<Limits>) -> Self::Store {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        DirectStore(Box::new(self.under(&format!("{number}:"), &limits)))
    }

    fn set_now(&self, _: &Self::Store, _: Time) -> bool {
        self.options.time_source == TimeSource::Caller
    }

    fn wait<F: Future>(&self, answer: F) -> F::Output {
        self.runtime.block_on(answer)
    }
}
