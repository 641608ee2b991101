//! A store of one's own behind a gate: it wraps the memory store and counts its batches and operations.
//!
//! `cargo run -p tidegate-examples --example custom_store` makes four calls with two limits, and prints:
//!
//! ```text
//! call 1: allowed, 2 left
//! …
//! call 4: refused, retry after 60 s
//! 4 batches with 8 operations
//! ```

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tidegate::policy::{ActionSpec, Policy, Query};
use tidegate::store::{Batch, Limits, Losses, Memory, Never, Store, StoreResponse};
use tidegate::{Gate, Time};

struct CountingStore {
    memory: Memory,
    batches: AtomicUsize,
    operations: AtomicUsize,
}

impl CountingStore {
    fn new(limits: Arc<Limits>) -> Self {
        Self { memory: Memory::new(limits, Memory::DEFAULT_MAX_BYTES), batches: 0.into(), operations: 0.into() }
    }

    fn count(&self, batch: &Batch) {
        self.batches.fetch_add(1, Ordering::Relaxed);
        self.operations.fetch_add(batch.ops().len(), Ordering::Relaxed);
    }
}

impl Store for CountingStore {
    /// This store answers immediately. A store that asks another machine has a future here.
    type Future = Never;

    fn limits(&self) -> &Arc<Limits> {
        self.memory.limits()
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Never> {
        self.count(batch);
        self.memory.apply(batch, now)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.count(batch);
        self.memory.submit(batch, now);
    }

    fn outage(&self) -> Option<&str> {
        self.memory.outage()
    }

    fn maintain(&self, now: Time) -> Losses {
        self.memory.maintain(now)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().global("100 per 60s").action("login", ActionSpec::new("3 per 60s")).build()?;
    let store = CountingStore::new(Arc::clone(policy.plan().limits()));
    // Nodes that share a store must hash keys under the same seed; `Gate::from_parts` takes one.
    let gate = Gate::with_store(&policy, store);

    let query = Query { action: Some("login"), ip: Some("203.0.113.7".parse()?), ..Query::default() };
    for number in 1..=4 {
        let decision = gate.check_now(&query)?;
        match decision.retry_after {
            None => println!("call {number}: allowed, {} left", decision.remaining.unwrap_or_default()),
            Some(wait) => println!("call {number}: refused, retry after {} s", wait.as_secs_ceil()),
        }
    }
    let CountingStore { batches, operations, .. } = gate.store();
    println!("{} batches with {} operations", batches.load(Ordering::Relaxed), operations.load(Ordering::Relaxed));
    Ok(())
}
