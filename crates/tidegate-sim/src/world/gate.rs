//! The inbound gate before the service: the policy's plan, a store, and the judgement of both.

use std::net::Ipv4Addr;

use tidegate_core::admit::decide;
use tidegate_core::{Batch, Span, Time, Verb};
use tidegate_policy::{ActionId, KeyError, KeySeed, Plan, Query};
use tidegate_store::{Immediate, Memory, Store};

use crate::setup::Load;

/// The action of calls that don't say one, if the policy has it.
const DEFAULT: &str = "default";

/// The name under which the policy knows a client.
pub(crate) fn name_of(load: &Load, number: u32) -> String {
    format!("{}-{number}", load.name)
}

/// The query of a call; `name` is its client's.
pub(crate) fn query<'q>(load: &'q Load, name: &'q str, node: usize) -> Query<'q> {
    let ip = Ipv4Addr::from_bits((10 << 24) | (node as u32 & 0x00ff_ffff));
    Query { action: load.action.as_deref(), ip: Some(ip.into()), key: Some(name), ..Query::default() }
}

/// Whether the plan can decide about a load's calls, and by which action.
pub(crate) fn action_of(plan: &Plan, load: &Load, seed: &KeySeed) -> Result<Option<ActionId>, Undecidable> {
    let action = match load.action.as_deref() {
        Some(name) => Some(plan.find(name)?),
        None => plan.find(DEFAULT).ok(),
    };
    plan.ops(action, &query(load, &name_of(load, 0), 0), seed, Verb::Peek, 0)?;
    Ok(action)
}

/// Why the plan can't decide about a call; a running gate answers it with 503.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Undecidable {
    #[error(transparent)]
    Action(#[from] tidegate_policy::UnknownAction),
    #[error(transparent)]
    Key(#[from] KeyError),
}

#[derive(Debug)]
pub(super) struct Gate<'s> {
    plan: &'s Plan,
    store: Memory,
    seed: KeySeed,
    loads: &'s [Load],
    /// The action of each load.
    actions: Vec<Option<ActionId>>,
}

/// Whose call it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller<'c> {
    pub(super) load: usize,
    pub(super) name: &'c str,
    pub(super) node: usize,
    /// Under which its permit is held.
    pub(super) holder: u64,
}

impl<'s> Gate<'s> {
    pub(super) fn new(plan: &'s Plan, loads: &'s [Load], seed: KeySeed) -> Self {
        let store = Memory::new(std::sync::Arc::new(plan.limits().clone()), Memory::MAX_BYTES);
        let actions = loads.iter().map(|load| action_of(plan, load, &seed).ok().flatten()).collect();
        Self { plan, store, seed, loads, actions }
    }

    /// Decides about a call and counts it.
    ///
    /// # Errors
    /// It is refused, and may come back after this.
    pub(super) fn check(&self, caller: Caller<'_>, now: Time) -> Result<(), Option<Span>> {
        let query = query(&self.loads[caller.load], caller.name, caller.node);
        let decision = match self.plan.by_list(query.ip, || now) {
            Some(decision) => decision,
            None => {
                let Some(batch) = self.batch(caller, Verb::Take) else { return Ok(()) };
                decide(&batch, self.plan.limits(), &self.store.apply_now(&batch, now))
            }
        };
        if decision.allowed { Ok(()) } else { Err(decision.retry_after) }
    }

    /// A call that was let through has ended.
    pub(super) fn release(&self, caller: Caller<'_>, now: Time) {
        if let Some(batch) = self.batch(caller, Verb::Release).filter(|batch| !batch.ops().is_empty()) {
            self.store.tell(&batch, now);
        }
    }

    /// `None` where the plan can't say, which reading the scenario has ruled out.
    fn batch(&self, caller: Caller<'_>, verb: Verb) -> Option<Batch> {
        let query = query(&self.loads[caller.load], caller.name, caller.node);
        self.plan.ops(self.actions[caller.load], &query, &self.seed, verb, caller.holder).ok()
    }
}
