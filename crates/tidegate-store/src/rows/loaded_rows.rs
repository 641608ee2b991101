//! The loaded rows of a group, the decisions over them, and the changes to write back.

use tidegate_core::batch::{BatchStates, OpContext, execute};
use tidegate_core::{KeyState, LimitId, Limits, Op, Outcome, Outcomes, Span, Time};

use super::{BatchGroup, QueuedBatch, RowKey};
use crate::StoreError;

/// The resolution of rows' expiry. In steps, the expiry of a busy row mostly stays the same, and so does its index
/// entry.
const EXPIRY_STEP: Span = Span::from_secs(1);

/// The rows of a group, in key order.
pub(crate) struct LoadedRows<'a> {
    limits: &'a Limits,
    keys: &'a [(RowKey, LimitId)],
    states: Vec<KeyState>,
    /// The loaded bytes of each row; empty if there is no row.
    loaded_bytes: Vec<Vec<u8>>,
    /// Rows with bytes that this program can't read.
    unreadable: Vec<RowKey>,
    /// The time of the earliest decision; `None` before the first.
    earliest_decision: Option<Time>,
}

/// The change of a row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RowChange {
    /// No change.
    Keep,
    /// No row existed, and none is needed.
    StayAbsent,
    /// The row gets these bytes. From this time on, in microseconds, it may be removed.
    Write(Vec<u8>, i64),
    /// The row is idle and is removed.
    Remove,
}

impl<'a> LoadedRows<'a> {
    /// The rows of a group, from those that were found.
    pub(crate) fn new(
        limits: &'a Limits,
        group: &'a BatchGroup,
        stored: impl IntoIterator<Item = (RowKey, Vec<u8>)>,
    ) -> Self {
        let keys = group.keys();
        let mut ledger = Self {
            limits,
            keys,
            states: vec![KeyState::default(); keys.len()],
            loaded_bytes: vec![Vec::new(); keys.len()],
            unreadable: Vec::new(),
            earliest_decision: None,
        };
        for (key, bytes) in stored {
            let Some(index) = row_index(keys, &key) else { continue };
            // A row without bytes was inserted only to be locked.
            if bytes.is_empty() {
                continue;
            }
            match KeyState::decode(&bytes) {
                Some(state) => ledger.states[index] = state,
                None => ledger.unreadable.push(key),
            }
            ledger.loaded_bytes[index] = bytes;
        }
        ledger
    }

    /// Decides one batch after the other, each at its own time.
    pub(crate) fn execute_all(
        &mut self,
        group: &BatchGroup,
        decision_time: impl Fn(&QueuedBatch) -> Time,
    ) -> Vec<Result<Outcomes, StoreError>> {
        group.batches().iter().map(|queued| self.execute_batch(queued, decision_time(queued))).collect()
    }

    fn execute_batch(&mut self, queued: &QueuedBatch, now: Time) -> Result<Outcomes, StoreError> {
        if queued.keys().iter().any(|(key, _)| self.unreadable.contains(key)) {
            return Err(StoreError::Failed("a row is none of this program's, or of a later version's".into()));
        }
        self.earliest_decision = Some(self.earliest_decision.map_or(now, |earliest| earliest.min(now)));
        let mut batch_rows = BatchRows { keys: self.keys, limits: self.limits, states: &mut self.states };
        Ok(execute(queued.batch(), self.limits, &mut batch_rows, now))
    }

    /// The change of each row, in key order. A row is removed if it was idle at the time of the earliest decision.
    pub(crate) fn changes(&self) -> Vec<RowChange> {
        (0..self.keys.len()).map(|index| self.row_change(index)).collect()
    }

    fn row_change(&self, index: usize) -> RowChange {
        let ((key, limit), state, loaded) = (self.keys[index], &self.states[index], &self.loaded_bytes[index]);
        let Some(earliest) = self.earliest_decision.filter(|_| !self.unreadable.contains(&key)) else {
            return RowChange::Keep;
        };
        let idle_at = self.limits.get(limit).map_or(Time::NEVER, |limit| state.idle_at(limit));
        if idle_at <= earliest {
            return if loaded.is_empty() { RowChange::StayAbsent } else { RowChange::Remove };
        }
        let mut bytes = Vec::new();
        state.encode(&mut bytes);
        if bytes == *loaded { RowChange::Keep } else { RowChange::Write(bytes, expires_at(idle_at)) }
    }
}

fn expires_at(idle_at: Time) -> i64 {
    let micros = idle_at.as_micros().next_multiple_of(EXPIRY_STEP.as_micros());
    i64::try_from(micros).unwrap_or(i64::MAX)
}

fn row_index(keys: &[(RowKey, LimitId)], key: &RowKey) -> Option<usize> {
    keys.binary_search_by_key(key, |(key, _)| *key).ok()
}

/// The states of a group as those of one batch. Operations find their state by key; two on one key share it.
struct BatchRows<'a> {
    keys: &'a [(RowKey, LimitId)],
    limits: &'a Limits,
    states: &'a mut [KeyState],
}

impl BatchRows<'_> {
    fn index_of(&self, op: &Op) -> usize {
        row_index(self.keys, &RowKey::new(self.limits.tag(op.limit), op.key))
            .expect("invariant: a group has the rows of all its batches")
    }
}

impl BatchStates for BatchRows<'_> {
    fn evaluate(&mut self, _: usize, context: &OpContext<'_>) -> Outcome {
        let index = self.index_of(context.op);
        self.states.evaluate(index, context)
    }

    fn charge(&mut self, _: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        let index = self.index_of(context.op);
        self.states.charge(index, context, outcome);
    }

    fn strike(&mut self, _: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        let index = self.index_of(context.op);
        self.states.strike(index, context, outcome);
    }

    fn modify(&mut self, _: usize, context: &OpContext<'_>, make: bool, change: &mut dyn FnMut(&mut KeyState)) {
        let index = self.index_of(context.op);
        self.states.modify(index, context, make, change);
    }

    fn reset(&mut self, _: usize, op: &Op) {
        let index = self.index_of(op);
        self.states.reset(index, op);
    }
}
