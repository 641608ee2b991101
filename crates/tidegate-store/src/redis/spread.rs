//! Batches whose keys lie in several slots of a cluster.

use tidegate_core::{Batch, Outcomes, Time};

use super::Shared;
use super::keys::Keys;
use crate::StoreError;

/// Whether no slot is sure to hold all keys of the batch.
pub(super) fn is_spread(batch: &Batch) -> bool {
    let affinity = batch.terms().affinity;
    let mut places = batch.ops().iter().map(|op| Keys::place(affinity, op.key));
    places.next().is_some_and(|first| places.any(|place| place != first))
}

impl Shared {
    pub(super) async fn ask_in_parts(&self, _: &Batch, _: Time) -> Result<Outcomes, StoreError> {
        todo!()
    }
}
