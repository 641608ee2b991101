//! The loaded rows of a group, the decisions over them, and the changes to write back.

use tidegate_core::batch::{BatchStates, OpContext, execute};
use tidegate_core::{KeyState, Limits, Op, Outcome, Outcomes, Span, Time};

use super::{BatchGroup, BatchResults, DecisionClock, QueuedBatch, RowKey};
use crate::StoreError;

/// The resolution of rows' expiry. In steps, a busy row's expiry and its index entry rarely change.
const EXPIRY_STEP: Span = Span::from_secs(1);

/// The rows of a group, in key order.
pub(crate) struct LoadedRows<'a> {
    limits: &'a Limits,
    group: &'a BatchGroup,
    states: Vec<KeyState>,
    /// The loaded bytes of each row; empty if there is no row.
    loaded_bytes: Vec<Vec<u8>>,
    /// Rows with bytes that this program can't read.
    unreadable: Vec<RowKey>,
    /// The time of the earliest decision; `None` before the first.
    earliest_decision: Option<Time>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RowChange {
    Keep,
    /// No row existed, and none is needed.
    StayAbsent,
    /// The row gets these bytes. From this time on, in microseconds, it may be removed.
    Write(Vec<u8>, i64),
    /// The row is idle and is removed.
    Remove,
}

impl RowChange {
    /// True if the row's state changes.
    pub(crate) fn is_change(&self) -> bool {
        matches!(self, Self::Write(..) | Self::Remove)
    }
}

impl<'a> LoadedRows<'a> {
    /// Decides the batches of a group one after the other, over the rows that were found.
    pub(crate) fn execute(
        limits: &'a Limits,
        group: &'a BatchGroup,
        stored: impl IntoIterator<Item = (RowKey, Vec<u8>)>,
        clock: &DecisionClock,
        server_time: Time,
    ) -> (BatchResults, Self) {
        let mut rows = Self {
            limits,
            group,
            states: vec![KeyState::default(); group.keys.len()],
            loaded_bytes: vec![Vec::new(); group.keys.len()],
            unreadable: Vec::new(),
            earliest_decision: None,
        };
        for (key, bytes) in stored {
            let Ok(index) = group.keys.binary_search(&key) else { continue };
            // A row without bytes was inserted only to be locked.
            if bytes.is_empty() {
                continue;
            }
            match KeyState::decode(&bytes) {
                Some(state) => rows.states[index] = state,
                None => rows.unreadable.push(key),
            }
            rows.loaded_bytes[index] = bytes;
        }
        let mut execute =
            |queued: &QueuedBatch| rows.execute_batch(queued, clock.decision_time(queued.now, server_time));
        let results = group.batches.iter().map(|queued| execute(queued)).collect();
        (results, rows)
    }

    fn execute_batch(&mut self, queued: &QueuedBatch, now: Time) -> Result<Outcomes, StoreError> {
        if queued.keys.iter().any(|(key, _)| self.unreadable.contains(key)) {
            return Err(StoreError::Failed("a row is none of this program's, or of a later version's".into()));
        }
        self.earliest_decision = Some(self.earliest_decision.map_or(now, |earliest| earliest.min(now)));
        Ok(execute(&queued.batch, self.limits, self, now))
    }

    /// The state of an operation, as those of a batch of one.
    fn state_of(&mut self, op: &Op) -> &mut [KeyState] {
        let key = RowKey::new(self.limits.tag(op.limit), op.key);
        let index = self.group.keys.binary_search(&key).expect("invariant: a group has the rows of all its batches");
        &mut self.states[index..=index]
    }

    /// The change of each row, in key order. A row is removed if it was idle at the time of the earliest decision.
    pub(crate) fn changes(&self) -> Vec<RowChange> {
        (0..self.states.len()).map(|index| self.row_change(index)).collect()
    }

    fn row_change(&self, index: usize) -> RowChange {
        let (key, state, loaded) = (&self.group.keys[index], &self.states[index], &self.loaded_bytes[index]);
        let Some(earliest) = self.earliest_decision.filter(|_| !self.unreadable.contains(key)) else {
            return RowChange::Keep;
        };
        let idle_at = self.limits.get(self.group.limit_ids[index]).map_or(Time::NEVER, |limit| state.idle_at(limit));
        if idle_at <= earliest {
            return if loaded.is_empty() { RowChange::StayAbsent } else { RowChange::Remove };
        }
        let mut bytes = Vec::new();
        state.encode(&mut bytes);
        if bytes == *loaded {
            return RowChange::Keep;
        }
        let expires_at = idle_at.as_micros().next_multiple_of(EXPIRY_STEP.as_micros());
        RowChange::Write(bytes, i64::try_from(expires_at).unwrap_or(i64::MAX))
    }
}

/// The states of a group as those of one batch. Operations find their state by key; two on one key share it.
impl BatchStates for LoadedRows<'_> {
    fn evaluate(&mut self, _: usize, context: &OpContext<'_>) -> Outcome {
        self.state_of(context.op).evaluate(0, context)
    }

    fn charge(&mut self, _: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        self.state_of(context.op).charge(0, context, outcome);
    }

    fn strike(&mut self, _: usize, context: &OpContext<'_>, outcome: &mut Outcome) {
        self.state_of(context.op).strike(0, context, outcome);
    }

    fn modify(&mut self, _: usize, context: &OpContext<'_>, make: bool, change: &mut dyn FnMut(&mut KeyState)) {
        self.state_of(context.op).modify(0, context, make, change);
    }

    fn reset(&mut self, _: usize, op: &Op) {
        self.state_of(op).reset(0, op);
    }
}
