//! The permit of a call in flight.

use tidegate_core::concurrency::Concurrency;
use tidegate_core::{Batch, Clock, Span};
use tidegate_store::Store;

use crate::Gate;

/// Holds the permit of a call in flight and gives it back when dropped. A call that runs longer than the permit's
/// lease must [renew](Hold::renew) it.
#[derive(Debug)]
#[must_use = "dropping it gives the permit back"]
pub struct Hold<S: Store, C: Clock> {
    gate: Gate<S, C>,
    /// Under the caller's own keys and under those that it shares where the store had no room for them.
    release: [Batch; 2],
    renew: [Batch; 2],
}

impl<S: Store, C: Clock> Hold<S, C> {
    /// How often to renew: 10 s, a third of the lease.
    pub const RENEW_EVERY: Span = Concurrency::RENEW;

    pub(crate) fn new(gate: Gate<S, C>, release: [Batch; 2], renew: [Batch; 2]) -> Self {
        Self { gate, release, renew }
    }

    /// Lengthens the lease.
    pub fn renew(&self) {
        self.renew.iter().for_each(|batch| self.gate.tell(batch));
    }
}

impl<S: Store, C: Clock> Drop for Hold<S, C> {
    fn drop(&mut self) {
        self.release.iter().for_each(|batch| self.gate.tell(batch));
    }
}
