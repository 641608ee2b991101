//! A store to hold others against: one map behind one lock, whole states, and core's own [`batch::settle`].

use std::collections::BTreeMap;
use std::future::Ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tidegate_core::state::Usage;
use tidegate_core::{Batch, Key, Kind, Limit, LimitId, Limits, Outcomes, State, Time, Verb, batch};
use tidegate_store::{Answer, Immediate, Store, StoreError};

/// States in a sorted map, one batch at a time. It grows with the keys it sees, and forgets a state that is idle when
/// a batch touches it.
#[derive(Debug)]
pub struct ReferenceStore {
    limits: Arc<Limits>,
    states: Mutex<BTreeMap<(LimitId, Key), State>>,
    encodes: bool,
}

impl ReferenceStore {
    /// An empty store.
    pub fn new(limits: Arc<Limits>) -> Self {
        Self { limits, states: Mutex::new(BTreeMap::new()), encodes: false }
    }

    /// An empty store that turns each state into bytes and back whenever it has changed, as stores with rows do.
    pub fn encoded(limits: Arc<Limits>) -> Self {
        Self { encodes: true, ..Self::new(limits) }
    }

    /// Another store that holds the same: to ask what would have happened.
    #[must_use]
    pub fn fork(&self) -> Self {
        Self { limits: Arc::clone(&self.limits), states: Mutex::new(self.states().clone()), encodes: self.encodes }
    }

    /// How many states it holds.
    pub fn len(&self) -> usize {
        self.states().len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.states().is_empty()
    }

    /// Every state that matters at `now`, written out without what has expired: equal before and after means that
    /// nothing changed.
    pub fn snapshot(&self, now: Time) -> BTreeMap<(LimitId, Key), String> {
        let states = self.states();
        let kept = states.iter().filter_map(|(&(limit, key), state)| {
            let plan = self.limits.get(limit)?;
            (state.idle_at(plan) > now).then(|| ((limit, key), written(plan, state, now)))
        });
        kept.collect()
    }

    fn states(&self) -> MutexGuard<'_, BTreeMap<(LimitId, Key), State>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn there_and_back(state: &State) -> State {
    let mut bytes = Vec::new();
    state.encode(&mut bytes);
    State::decode(&bytes).unwrap_or_default()
}

fn written(limit: &Limit, state: &State, now: Time) -> String {
    let usage = match (limit.kind(), state.usage()) {
        (Kind::Window(window), Usage::Window(log)) => {
            let slots: Vec<_> = log.iter().filter(|slot| slot.at + window.window() > now).collect();
            format!("{slots:?}")
        }
        (Kind::Rate(_), Usage::Rate(arrival)) if arrival.idle_at() > now => format!("{arrival:?}"),
        (Kind::Quota(quota), Usage::Quota(ledger)) => {
            let mut ledger = *ledger;
            quota.settle(&mut ledger, now);
            format!("{} of {:?}", ledger.used, ledger.period)
        }
        (Kind::Concurrency(concurrency), Usage::Concurrency(permits)) => {
            let mut permits = permits.clone();
            concurrency.settle(&mut permits, now);
            format!("{permits:?}")
        }
        (Kind::Cooldown(cooldown), Usage::Cooldown(gate)) => {
            let mut gate = *gate;
            cooldown.settle(&mut gate, now);
            format!("{gate:?}")
        }
        (Kind::Pace(pacer), Usage::Pace(tempo)) => {
            let mut tempo = *tempo;
            pacer.settle(&mut tempo, now);
            format!("{tempo:?}")
        }
        _ => String::new(),
    };
    let mut record = *state.record();
    if let Some(penalty) = limit.penalty() {
        penalty.settle(&mut record, now);
    }
    format!("{usage} {record:?}")
}

impl Store for ReferenceStore {
    type Later = Ready<Result<Outcomes, StoreError>>;

    fn limits(&self) -> &Arc<Limits> {
        &self.limits
    }

    fn apply(&self, batch: &Batch, now: Time) -> Answer<Self::Later> {
        Answer::Ready(self.apply_now(batch, now))
    }

    fn tell(&self, batch: &Batch, now: Time) {
        self.apply_now(batch, now);
    }
}

impl Immediate for ReferenceStore {
    fn apply_now(&self, batch: &Batch, now: Time) -> Outcomes {
        let mut states = self.states();
        let loaded = batch.ops().iter().map(|op| states.get(&(op.limit, op.key)).cloned().unwrap_or_default());
        let mut cells: Vec<State> = loaded.collect();
        let outcomes = batch::settle(batch, &self.limits, cells.as_mut_slice(), now);
        for (op, state) in batch.ops().iter().zip(cells).filter(|(op, _)| op.verb != Verb::Peek) {
            let idle = self.limits.get(op.limit).is_none_or(|limit| state.idle_at(limit) <= now);
            if idle {
                states.remove(&(op.limit, op.key));
            } else {
                let state = if self.encodes { there_and_back(&state) } else { state };
                states.insert((op.limit, op.key), state);
            }
        }
        outcomes
    }
}
