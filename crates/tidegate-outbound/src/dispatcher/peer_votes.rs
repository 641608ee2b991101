//! The votes of nodes on a provider's breaker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tidegate_core::breaker::BreakerState;
use tidegate_core::{Clock, Key};
use tidegate_store::Store;

use super::{ProviderInner, StepContext};

/// The votes of the nodes that share a provider.
#[derive(Default)]
pub(super) struct PeerVotes {
    /// True if, in the last exchange, more than half of them reported that the provider fails.
    pub(super) majority_failing: AtomicBool,
    /// The breaker's generation after it was last opened for such a majority; 0 before.
    pub(super) tripped_generation: AtomicU64,
}

impl<S: Store, C: Clock> ProviderInner<S, C> {
    /// Reports to the other nodes whether the provider fails for this node. Opens the breaker if it fails for more than
    /// half of the nodes. So a bad connection of one node doesn't stop the others.
    pub(crate) async fn run_vote_exchange(self: &Arc<Self>) {
        let (topic, reports_failure) = self.inspect(|state, now| {
            let is_open = matches!(state.breaker.state(now), BreakerState::Open | BreakerState::HalfOpen);
            let tripped_generation = self.peer_votes.tripped_generation.load(Ordering::Relaxed);
            let topic = Key::new(self.rules.key.hi(), !self.rules.key.lo());
            (topic, is_open && state.breaker.generation() != tripped_generation)
        });
        let Some(votes) = self.store.vote(topic, reports_failure, self.clock.now()) else { return };
        let Some(votes) = votes.await else { return };
        let had_majority = self.peer_votes.majority_failing.swap(votes.has_majority(), Ordering::Relaxed);
        // Only once per majority: old votes of others must not stop a node that has seen the provider recover.
        if votes.has_majority() && !had_majority {
            self.run_step(|StepContext { state, rng, .. }, now| {
                if state.breaker.trip(now, rng) {
                    self.peer_votes.tripped_generation.store(state.breaker.generation(), Ordering::Relaxed);
                }
            });
        }
    }
}
