//! Fixtures: a limiter with a few limits and a [`ReferenceStore`], and helpers for keys, times and limits.

use std::sync::Arc;

use tidegate_core::decision::decide;
use tidegate_core::{
    Batch, Decision, Key, Limit, LimitId, LimitKind, Limits, Op, Outcomes, Penalty, PenaltyMode, PenaltySpec, Span,
    Time, Verb, Window,
};
use tidegate_store::ImmediateStore;

use crate::reference::ReferenceStore;

/// A limiter for tests: limits with a reference store.
#[derive(Debug)]
pub struct TestLimiter {
    limits: Arc<Limits>,
    store: ReferenceStore,
}

impl TestLimiter {
    /// Creates a limiter without any calls.
    ///
    /// # Panics
    /// With more limits than a plan holds, which is 4095.
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Self {
        let limits = Limits::new(limits.into_iter().collect()).expect("a plan of at most 4095 limits");
        Self::with_shared_limits(Arc::new(limits))
    }

    /// Creates a limiter for shared limits.
    pub fn with_shared_limits(limits: Arc<Limits>) -> Self {
        let store = ReferenceStore::new(Arc::clone(&limits));
        Self { limits, store }
    }

    /// Returns another limiter with the same history.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self { limits: Arc::clone(&self.limits), store: self.store.fork() }
    }

    /// Returns the store.
    pub fn store(&self) -> &ReferenceStore {
        &self.store
    }

    /// Carries out a batch and returns the decision and the outcome of each limit.
    pub fn decide(&self, batch: &Batch, now: Time) -> (Decision, Outcomes) {
        let outcomes = self.store.apply_now(batch, now);
        (decide(batch, &self.limits, &outcomes), outcomes)
    }

    /// Makes a call of cost 1 by one client under every limit.
    pub fn call(&self, client: u64, now: Time) -> Decision {
        self.take(client, 1, now)
    }

    /// Makes a call of any cost by one client under every limit.
    pub fn take(&self, client: u64, cost: u64, now: Time) -> Decision {
        let every: Vec<_> = self.limits.iter().map(|(limit, _)| (limit, client)).collect();
        self.apply(Verb::Take, &every, cost, now)
    }

    /// Returns the decision about a call of cost 1, without making it.
    pub fn peek(&self, client: u64, now: Time) -> Decision {
        let every: Vec<_> = self.limits.iter().map(|(limit, _)| (limit, client)).collect();
        self.apply(Verb::Peek, &every, 1, now)
    }

    /// Applies one operation under some limits, each with its own client.
    ///
    /// # Panics
    /// With more than eight limits.
    pub fn apply(&self, verb: Verb, places: &[(LimitId, u64)], cost: u64, now: Time) -> Decision {
        let mut batch = Batch::new(0).with_charged_at(now);
        for &(limit, client) in places {
            batch.push(Op::new(limit, verb, client_key(client), cost)).expect("at most eight limits");
        }
        self.decide(&batch, now).0
    }
}

/// Returns a client's key.
pub fn client_key(client: u64) -> Key {
    Key::new(client, client.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Returns the id of the limit at this index of a plan.
///
/// # Panics
/// Past the 4095th limit.
pub fn limit_id(index: usize) -> LimitId {
    LimitId::from_index(index).expect("a plan of at most 4095 limits")
}

/// Returns the time this many milliseconds after a test's start.
pub fn test_time(millis: u64) -> Time {
    Time::from_secs(1_700_000_000) + Span::from_millis(millis)
}

/// Returns a window of `limit` per `secs`, exact up to 64 entries.
///
/// # Panics
/// If such a window is invalid.
pub fn window_limit(limit: u64, secs: u64) -> Limit {
    Limit::new(LimitKind::Window(Window::new(limit, Span::from_secs(secs), 64).expect("a window")))
}

/// Returns a penalty with blocks of `base` seconds that double up to `cap` seconds.
///
/// # Panics
/// If such a penalty is invalid.
pub fn doubling_penalty(base: u64, cap: u64, mode: PenaltyMode, window: Span) -> Penalty {
    let (base, cap) = (Span::from_secs(base), Span::from_secs(cap));
    Penalty::new(PenaltySpec { base, cap, mode, ..PenaltySpec::default() }, window).expect("a penalty")
}
