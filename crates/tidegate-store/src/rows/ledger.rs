//! The rows of a group, loaded, decided over, and what has to be written back.

use tidegate_core::batch::{BatchStates, OpContext, execute};
use tidegate_core::{KeyState, LimitId, Limits, Op, Outcome, Outcomes, Span, Time};

use super::{Call, Group, RowKey};
use crate::StoreError;

/// Rows tell their expiry to this. In steps, a busy row's mostly stays as it is, and so does the index over it.
const EXPIRY_STEP: Span = Span::from_secs(1);

/// The rows of a group, in key order.
pub(crate) struct Ledger<'a> {
    limits: &'a Limits,
    keys: &'a [(RowKey, LimitId)],
    states: Vec<KeyState>,
    /// What was loaded of each row: its bytes, none if there is no row.
    loaded: Vec<Vec<u8>>,
    /// Rows whose bytes nobody here can read.
    unreadable: Vec<RowKey>,
    /// The earliest moment that anything was decided at; none if nothing was.
    earliest: Option<Time>,
}

/// What has to become of a row.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// It stays as it was loaded.
    Keep,
    /// There was none, and there needn't be one.
    Absent,
    /// It is to hold these bytes, and may be removed from that moment on, in microseconds.
    Write(Vec<u8>, i64),
    /// It is as good as none.
    Remove,
}

impl<'a> Ledger<'a> {
    /// Takes in what was found of a group's rows.
    pub(crate) fn new(
        limits: &'a Limits,
        group: &'a Group,
        found: impl IntoIterator<Item = (RowKey, Vec<u8>)>,
    ) -> Self {
        let keys = group.keys();
        let mut ledger = Self {
            limits,
            keys,
            states: vec![KeyState::default(); keys.len()],
            loaded: vec![Vec::new(); keys.len()],
            unreadable: Vec::new(),
            earliest: None,
        };
        for (key, bytes) in found {
            let Some(index) = place(keys, &key) else { continue };
            // A row of no bytes was made only to be locked.
            if bytes.is_empty() {
                continue;
            }
            match KeyState::decode(&bytes) {
                Some(state) => ledger.states[index] = state,
                None => ledger.unreadable.push(key),
            }
            ledger.loaded[index] = bytes;
        }
        ledger
    }

    /// Decides one batch after the other, each at its moment.
    pub(crate) fn settle(&mut self, group: &Group, at: impl Fn(&Call) -> Time) -> Vec<Result<Outcomes, StoreError>> {
        group.calls().iter().map(|call| self.decide(call, at(call))).collect()
    }

    fn decide(&mut self, call: &Call, now: Time) -> Result<Outcomes, StoreError> {
        if call.keys().iter().any(|(key, _)| self.unreadable.contains(key)) {
            return Err(StoreError::Failed("a row is none of this program's, or of a later version's".into()));
        }
        self.earliest = Some(self.earliest.map_or(now, |earliest| earliest.min(now)));
        let mut cells = Places { keys: self.keys, limits: self.limits, states: &mut self.states };
        Ok(execute(call.batch(), self.limits, &mut cells, now))
    }

    /// What has to become of each row, in key order. Whether it is idle is told by the earliest decision's moment.
    pub(crate) fn changes(&self) -> Vec<Change> {
        (0..self.keys.len()).map(|index| self.change(index)).collect()
    }

    fn change(&self, index: usize) -> Change {
        let ((key, limit), state, loaded) = (self.keys[index], &self.states[index], &self.loaded[index]);
        let Some(earliest) = self.earliest.filter(|_| !self.unreadable.contains(&key)) else { return Change::Keep };
        let idle_at = self.limits.get(limit).map_or(Time::NEVER, |limit| state.idle_at(limit));
        if idle_at <= earliest {
            return if loaded.is_empty() { Change::Absent } else { Change::Remove };
        }
        let mut bytes = Vec::new();
        state.encode(&mut bytes);
        if bytes == *loaded { Change::Keep } else { Change::Write(bytes, expires_at(idle_at)) }
    }
}

fn expires_at(idle_at: Time) -> i64 {
    let micros = idle_at.as_micros().next_multiple_of(EXPIRY_STEP.as_micros());
    i64::try_from(micros).unwrap_or(i64::MAX)
}

fn place(keys: &[(RowKey, LimitId)], key: &RowKey) -> Option<usize> {
    keys.binary_search_by_key(key, |(key, _)| *key).ok()
}

/// A group's states as the cells of one batch: its operations find theirs by key, two on one key the same.
struct Places<'a> {
    keys: &'a [(RowKey, LimitId)],
    limits: &'a Limits,
    states: &'a mut [KeyState],
}

impl Places<'_> {
    fn of(&self, op: &Op) -> usize {
        place(self.keys, &RowKey::new(self.limits.tag(op.limit), op.key))
            .expect("invariant: a group has the rows of all its batches")
    }
}

impl BatchStates for Places<'_> {
    fn evaluate(&mut self, _: usize, ask: &OpContext<'_>) -> Outcome {
        let index = self.of(ask.op);
        self.states.evaluate(index, ask)
    }

    fn charge(&mut self, _: usize, ask: &OpContext<'_>, outcome: &mut Outcome) {
        let index = self.of(ask.op);
        self.states.charge(index, ask, outcome);
    }

    fn strike(&mut self, _: usize, ask: &OpContext<'_>, outcome: &mut Outcome) {
        let index = self.of(ask.op);
        self.states.strike(index, ask, outcome);
    }

    fn modify(&mut self, _: usize, ask: &OpContext<'_>, make: bool, change: &mut dyn FnMut(&mut KeyState)) {
        let index = self.of(ask.op);
        self.states.modify(index, ask, make, change);
    }

    fn reset(&mut self, _: usize, op: &Op) {
        let index = self.of(op);
        self.states.reset(index, op);
    }
}
