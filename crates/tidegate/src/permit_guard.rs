//! The permit of a call in flight.

use tidegate_core::concurrency::Concurrency;
use tidegate_core::{Batch, Clock, Span, Verb};
use tidegate_store::Store;

use crate::Gate;

/// Holds the permit of a call in flight and gives it back when dropped. A call that runs longer than the permit's
/// lease must [renew](PermitGuard::renew) it.
#[derive(Debug)]
#[must_use = "dropping it gives the permit back"]
pub struct PermitGuard<S: Store, C: Clock> {
    gate: Gate<S, C>,
    /// The renewal under the caller's own keys.
    own_keys: Batch,
    /// The same under the shared keys, if the store had no room for the caller's own.
    shared_keys: Vec<Batch>,
}

impl<S: Store, C: Clock> PermitGuard<S, C> {
    /// The interval between renewals: 10 s, a third of the lease.
    pub const RENEW_INTERVAL: Span = Concurrency::RENEW_INTERVAL;

    pub(crate) fn new(gate: Gate<S, C>, own: Batch, shared: Vec<Batch>) -> Self {
        Self { gate, own_keys: own, shared_keys: shared }
    }

    /// Renews the lease.
    pub fn renew(&self) {
        self.shared_keys.iter().chain([&self.own_keys]).for_each(|batch| self.gate.submit(batch));
    }
}

impl<S: Store, C: Clock> Drop for PermitGuard<S, C> {
    fn drop(&mut self) {
        self.gate.end_hold(&self.own_keys);
        for batch in self.shared_keys.iter_mut().chain([&mut self.own_keys]) {
            batch.ops_mut().iter_mut().for_each(|op| op.verb = Verb::Release);
            self.gate.submit(batch);
        }
    }
}
