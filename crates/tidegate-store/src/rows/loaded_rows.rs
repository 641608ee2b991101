//! The rows of a group, loaded, decided over, and what has to be written back.

use tidegate_core::batch::{BatchStates, OpContext, execute};
use tidegate_core::{KeyState, LimitId, Limits, Op, Outcome, Outcomes, Span, Time};

use super::{BatchGroup, QueuedBatch, RowKey};
use crate::StoreError;

/// Rows tell their expiry to this. In steps, a busy row's mostly stays as it is, and so does the index over it.
const EXPIRY_STEP: Span = Span::from_secs(1);

/// The rows of a group, in key order.
pub(crate) struct LoadedRows<'a> {
    limits: &'a Limits,
    keys: &'a [(RowKey, LimitId)],
    states: Vec<KeyState>,
    /// What was loaded of each row: its bytes, none if there is no row.
    loaded_bytes: Vec<Vec<u8>>,
    /// Rows whose bytes nobody here can read.
    unreadable: Vec<RowKey>,
    /// The earliest moment that anything was decided at; none if nothing was.
    earliest_decision: Option<Time>,
}

/// What has to become of a row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RowChange {
    /// It stays as it was loaded.
    Keep,
    /// There was none, and there needn't be one.
    StayAbsent,
    /// It is to hold these bytes, and may be removed from that moment on, in microseconds.
    Write(Vec<u8>, i64),
    /// It is as good as none.
    Remove,
}

impl<'a> LoadedRows<'a> {
    /// Takes in what was found of a group's rows.
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
            // A row of no bytes was made only to be locked.
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

    /// Decides one batch after the other, each at its moment.
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

    /// What has to become of each row, in key order. Whether it is idle is told by the earliest decision's moment.
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

/// A group's states as the cells of one batch: its operations find theirs by key, two on one key the same.
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
