//! A store to compare others with: one map behind one lock, whole states, and core's own [`batch::execute`].

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tidegate_core::state::Usage;
use tidegate_core::{Batch, Key, KeyState, Limit, LimitId, LimitKind, Limits, Time, Verb, batch};
use tidegate_store::{ImmediateStore as _, Never, Store, StoreError, StoreResponse};

/// A store with a sorted map that handles one batch at a time. It grows with the number of keys. It drops an idle state
/// only when a batch touches it.
#[derive(Debug)]
pub struct ReferenceStore {
    limits: Arc<Limits>,
    states: Arc<Mutex<BTreeMap<(LimitId, Key), KeyState>>>,
    round_trips_states: bool,
}

impl ReferenceStore {
    /// Creates an empty store.
    pub fn new(limits: Arc<Limits>) -> Self {
        Self { limits, states: Arc::default(), round_trips_states: false }
    }

    /// Creates an empty store that encodes and decodes each state after a change, as stores with rows do.
    pub fn with_encoding(limits: Arc<Limits>) -> Self {
        Self { round_trips_states: true, ..Self::new(limits) }
    }

    /// Returns another store with the same states, to find out what would have happened.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self {
            limits: Arc::clone(&self.limits),
            states: Arc::new(Mutex::new(self.states.lock().clone())),
            round_trips_states: self.round_trips_states,
        }
    }

    /// Returns the number of states.
    pub fn len(&self) -> usize {
        self.states.lock().len()
    }

    /// Returns true if it has no states.
    pub fn is_empty(&self) -> bool {
        self.states.lock().is_empty()
    }

    /// Returns every state that isn't idle at `now` as text, without expired parts. Equal snapshots mean that nothing
    /// changed.
    pub fn snapshot(&self, now: Time) -> BTreeMap<(LimitId, Key), String> {
        let states = self.states.lock();
        let entries = states.iter().filter_map(|(&(limit, key), state)| {
            let plan = self.limits.get(limit)?;
            (state.idle_at(plan) > now).then(|| ((limit, key), state_text(plan, state, now)))
        });
        entries.collect()
    }
}

fn encode_and_decode(state: &KeyState) -> KeyState {
    let mut bytes = Vec::new();
    state.encode(&mut bytes);
    KeyState::decode(&bytes).unwrap_or_default()
}

fn state_text(limit: &Limit, state: &KeyState, now: Time) -> String {
    let usage = match (limit.kind(), state.usage()) {
        (LimitKind::Window(window), Usage::Window(log)) => {
            let slots: Vec<_> = log.iter().filter(|slot| slot.at + window.window() > now).collect();
            format!("{slots:?}")
        }
        (LimitKind::Rate(_), Usage::Rate(arrival)) if arrival.idle_at() > now => format!("{arrival:?}"),
        (LimitKind::Quota(quota), Usage::Quota(quota_usage)) => {
            let mut quota_usage = *quota_usage;
            quota.refresh(&mut quota_usage, now);
            format!("{} of {:?}", quota_usage.used, quota_usage.period)
        }
        (LimitKind::Concurrency(concurrency), Usage::Concurrency(permits)) => {
            let mut permits = permits.clone();
            concurrency.refresh(&mut permits, now);
            format!("{permits:?}")
        }
        (LimitKind::Cooldown(cooldown), Usage::Cooldown(gate)) => {
            let mut gate = *gate;
            cooldown.refresh(&mut gate, now);
            format!("{gate:?}")
        }
        (LimitKind::Pace(pacer), Usage::Pace(pacer_state)) => {
            let mut pacer_state = *pacer_state;
            pacer.refresh(&mut pacer_state, now);
            format!("{pacer_state:?}")
        }
        _ => String::new(),
    };
    let mut record = *state.penalty_record();
    if let Some(penalty) = limit.penalty() {
        penalty.refresh(&mut record, now);
    }
    format!("{usage} {record:?}")
}

impl Store for ReferenceStore {
    type Future = Never;

    fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    fn apply(&self, batch: &Batch, now: Time) -> StoreResponse<Self::Future> {
        let mut states = self.states.lock();
        let loaded = batch.ops().iter().map(|op| states.get(&(op.limit, op.key)).cloned().unwrap_or_default());
        let mut cells: Vec<KeyState> = loaded.collect();
        let outcomes = batch::execute(batch, &self.limits, cells.as_mut_slice(), now);
        for (op, state) in batch.ops().iter().zip(cells).filter(|(op, _)| op.verb != Verb::Peek) {
            let Some(limit) = self.limits.get(op.limit) else { continue };
            if state.idle_at(limit) <= now {
                states.remove(&(op.limit, op.key));
            } else {
                let state = if self.round_trips_states { encode_and_decode(&state) } else { state };
                states.insert((op.limit, op.key), state);
            }
        }
        StoreResponse::Ready(outcomes)
    }

    fn submit(&self, batch: &Batch, now: Time) {
        self.apply_now(batch, now);
    }

    fn with_limits(&self, limits: Arc<Limits>, _: Time) -> Result<Option<Self>, StoreError> {
        let states = Arc::clone(&self.states);
        Ok(Some(Self { limits, states, round_trips_states: self.round_trips_states }))
    }
}
