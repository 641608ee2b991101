use std::sync::Arc;

use tidegate_core::{Batch, Limits, Time};
use tidegate_store::{FileStore, FlushMode, Losses, Store, StoreError, StoreResponse};
use tidegate_testkit::conformance::{ConformanceOptions, check_conformance};
use tidegate_testkit::random;

use crate::common::Place;

/// A store with a file of its own.
struct Own {
    store: FileStore,
    place: Arc<Place>,
}

impl Own {
    fn new(limits: Arc<Limits>, flush: FlushMode) -> Self {
        let place = Place::quick();
        Self { store: place.store(&limits, flush, Time::ZERO), place: Arc::new(place) }
    }
}

impl Store for Own {
    type Future = <FileStore as Store>::Future;

    fn limits(&self) -> &Arc<Limits> {
        self.store.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        self.store.apply(batch, now)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.store.submit(batch, now);
    }

    fn with_limits(&self, limits: Arc<Limits>, now: Time) -> Result<Option<Self>, StoreError> {
        let store = self.store.with_limits(limits, now)?;
        Ok(store.map(|store| Self { store, place: Arc::clone(&self.place) }))
    }

    fn maintain(&self, now: Time) -> Losses {
        self.store.maintain(now)
    }
}

#[test]
fn the_file_store_conforms() {
    check_conformance(&|limits| Own::new(limits, FlushMode::default()), &ConformanceOptions::default()).unwrap();
}

#[test]
fn the_durable_file_store_conforms() {
    let effort = ConformanceOptions {
        batches: random::case_count(2_000, 20_000),
        calls_per_task: 1_000,
        ..ConformanceOptions::default()
    };
    check_conformance(&|limits| Own::new(limits, FlushMode::Always), &effort).unwrap();
}
