//! The inbound gate before the service: the policy's plan, a store, and the decisions of both.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use tidegate_core::decision::decide;
use tidegate_core::{Batch, Span, Time, Verb};
use tidegate_policy::{ActionId, KeySeed, Plan, Query, QueryError};
use tidegate_store::{ImmediateStore, Memory, Store};

use crate::setup::LoadSpec;

/// The action of calls that name none, if the policy has it.
const DEFAULT_ACTION: &str = "default";

/// Returns the name under which the policy knows a client.
pub(crate) fn client_name(load: &LoadSpec, number: u32) -> String {
    format!("{}-{number}", load.name)
}

/// Returns the query of a call; `name` is its client's name.
pub(crate) fn client_query<'q>(load: &'q LoadSpec, name: &'q str, node: usize) -> Query<'q> {
    let ip = Ipv4Addr::from_bits((10 << 24) | (node as u32 & 0x00ff_ffff));
    Query { action: load.action.as_deref(), ip: Some(ip.into()), key: Some(name), ..Query::default() }
}

/// Returns the action of a load's calls, or an error if the plan can't decide about them.
pub(crate) fn load_action(plan: &Plan, load: &LoadSpec, seed: &KeySeed) -> Result<Option<ActionId>, QueryError> {
    let action = match load.action.as_deref() {
        Some(name) => Some(plan.find_action(name)?),
        None => plan.find_action(DEFAULT_ACTION).ok(),
    };
    plan.ops(action, &client_query(load, &client_name(load, 0), 0), seed, Verb::Peek, 0)?;
    Ok(action)
}

#[derive(Debug)]
pub(super) struct SimGate<'s> {
    plan: &'s Plan,
    store: Memory,
    seed: KeySeed,
    loads: &'s [LoadSpec],
    /// The action of each load.
    actions: Vec<Option<ActionId>>,
    /// The load and node of each holder of a permit for a call in flight.
    permit_holders: BTreeMap<u64, (usize, usize)>,
    /// True if the next renewal is scheduled.
    pub(super) is_renewal_scheduled: bool,
}

/// The caller of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallIdentity<'c> {
    pub(super) load: usize,
    pub(super) name: &'c str,
    pub(super) node: usize,
    /// The identity under which its permit is held.
    pub(super) holder: u64,
}

impl<'s> SimGate<'s> {
    pub(super) fn new(plan: &'s Plan, loads: &'s [LoadSpec], seed: KeySeed) -> Self {
        let store = Memory::reproducible(std::sync::Arc::clone(plan.limits()), Memory::DEFAULT_MAX_BYTES);
        let actions = loads.iter().map(|load| load_action(plan, load, &seed).ok().flatten()).collect();
        Self { plan, store, seed, loads, actions, permit_holders: BTreeMap::new(), is_renewal_scheduled: false }
    }

    /// Decides about a call and counts it.
    ///
    /// # Errors
    /// The call is refused; the value is its `Retry-After`, if there is one.
    pub(super) fn check(&mut self, caller: CallIdentity<'_>, now: Time) -> Result<(), Option<Span>> {
        let query = client_query(&self.loads[caller.load], caller.name, caller.node);
        let decision = match self.plan.decide_by_list(query.ip, || now) {
            Some(decision) => decision,
            None => {
                let Some(batch) = self.build_batch(caller, Verb::Take) else { return Ok(()) };
                decide(&batch, self.plan.limits(), &self.store.apply_now(&batch, now))
            }
        };
        if !decision.allowed {
            return Err(decision.retry_after);
        }
        if self.build_batch(caller, Verb::Release).is_some_and(|batch| !batch.ops().is_empty()) {
            self.permit_holders.insert(caller.holder, (caller.load, caller.node));
        }
        Ok(())
    }

    /// Releases the permit of a call that has ended.
    pub(super) fn release(&mut self, caller: CallIdentity<'_>, now: Time) {
        if self.permit_holders.remove(&caller.holder).is_some() {
            self.apply_verb(caller, Verb::Release, now);
        }
    }

    /// Returns true if there are permits, which need renewal.
    pub(super) fn has_permits(&self) -> bool {
        !self.permit_holders.is_empty()
    }

    /// Renews all permits. `name` gives the name of a node.
    pub(super) fn renew<'n>(&self, name: impl Fn(usize) -> &'n str, now: Time) {
        for (&holder, &(load, node)) in &self.permit_holders {
            self.apply_verb(CallIdentity { load, name: name(node), node, holder }, Verb::Renew, now);
        }
    }

    fn apply_verb(&self, caller: CallIdentity<'_>, verb: Verb, now: Time) {
        if let Some(batch) = self.build_batch(caller, verb) {
            self.store.submit(&batch, now);
        }
    }

    /// Returns the operations of a call; `None` if the plan can't decide. The reader of the scenario excludes that.
    fn build_batch(&self, caller: CallIdentity<'_>, verb: Verb) -> Option<Batch> {
        let query = client_query(&self.loads[caller.load], caller.name, caller.node);
        self.plan.ops(self.actions[caller.load], &query, &self.seed, verb, caller.holder).ok()
    }
}
