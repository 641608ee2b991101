//! Resets of keys, here and in the store.

use std::sync::Arc;

use tidegate_core::{Batch, Key, LimitId, OnOutage, Outcomes, Time, Verb};

use super::FleetNode;
use super::health::PartitionHealth;
use crate::{RemoteFuture, StoreError};

impl FleetNode {
    /// Resets keys, here and in the store. A reset during an outage is sent later, even if other changes are not.
    #[cold]
    pub(super) fn reset(self: &Arc<Self>, batch: &Batch, now: Time) -> RemoteFuture<Outcomes> {
        let (node, batch) = (Arc::clone(self), batch.clone());
        Box::pin(async move {
            let forget =
                || batch.ops().iter().filter(|op| op.verb == Verb::Reset).for_each(|op| node.forget(op.limit, op.key));
            // With `deny`, a reset that fails changes nothing. One that succeeds is applied here again, because a call
            // in flight may have seen the block.
            if node.on_outage(&batch) != OnOutage::Deny {
                forget();
            }
            let (mut decided_at, mut list) = (now, Vec::with_capacity(batch.ops().len()));
            for (part, op_count) in node.reset_log.batches_with_log_entries(&batch) {
                match node.apply_and_record(&part, now).await {
                    Ok(outcomes) => {
                        decided_at = outcomes.now();
                        list.extend(outcomes.list().iter().take(op_count));
                    }
                    Err(_) if node.on_outage(&batch) == OnOutage::Deny => return Err(StoreError::Unavailable),
                    Err(_) => return Ok(node.apply_locally(&batch, node.state.clock.now())),
                }
            }
            forget();
            Ok(Outcomes::new(decided_at, list))
        })
    }

    /// Forgets this node's state of a key that was reset.
    pub(super) fn forget(&self, limit: LimitId, key: Key) {
        let now = self.state.clock.now();
        self.state.blocks.forget(limit, key, now);
        self.leases.forget(limit, key);
        self.state
            .partitions
            .iter()
            .filter_map(PartitionHealth::fallback)
            .for_each(|local| local.forget(limit, key, now));
    }
}
