//! The inbound gate before the service: the policy's plan, a store, and the decisions of both.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use tidegate_core::decision::decide;
use tidegate_core::{Batch, Span, Time, Verb};
use tidegate_policy::{ActionId, KeySeed, Plan, Query, QueryError};
use tidegate_store::{ImmediateStore, Memory, Store};

use super::event::SimRequest;
use crate::setup::LoadSpec;

/// The action of calls that name none, if the policy has it.
const DEFAULT_ACTION: &str = "default";

/// A client as the gate knows it.
#[derive(Debug)]
struct GateClient<'s> {
    load: &'s LoadSpec,
    action: Option<ActionId>,
    /// Its `key`.
    name: String,
    ip: IpAddr,
}

impl<'s> GateClient<'s> {
    /// Creates the client of this number in its load, and of the index `node` among all.
    fn new(load: &'s LoadSpec, action: Option<ActionId>, number: u32, node: u32) -> Self {
        let ip = Ipv4Addr::from_bits((10 << 24) | (node & 0x00ff_ffff)).into();
        Self { load, action, name: format!("{}-{number}", load.name), ip }
    }

    fn build_batch(&self, plan: &Plan, seed: &KeySeed, verb: Verb, holder: u64) -> Result<Batch, QueryError> {
        let action = self.load.action.as_deref();
        let query = Query { action, ip: Some(self.ip), key: Some(&self.name), ..Query::default() };
        Ok(plan.ops(self.action, &query, seed, verb, holder)?)
    }
}

fn find_action(plan: &Plan, load: &LoadSpec) -> Result<Option<ActionId>, QueryError> {
    Ok(match load.action.as_deref() {
        Some(name) => Some(plan.find_action(name)?),
        None => plan.find_action(DEFAULT_ACTION).ok(),
    })
}

/// Checks that the plan can decide about a load's calls.
pub(crate) fn check_load(plan: &Plan, load: &LoadSpec) -> Result<(), QueryError> {
    let client = GateClient::new(load, find_action(plan, load)?, 0, 0);
    client.build_batch(plan, &super::key_seed(), Verb::Peek, 0).map(drop)
}

#[derive(Debug)]
pub(super) struct SimGate<'s> {
    plan: &'s Plan,
    store: Memory,
    seed: KeySeed,
    clients: Vec<GateClient<'s>>,
    /// The client of each holder of a permit for a call in flight.
    permit_holders: BTreeMap<u64, usize>,
    pub(super) is_renewal_scheduled: bool,
}

impl<'s> SimGate<'s> {
    pub(super) fn new(plan: &'s Plan, loads: &'s [LoadSpec]) -> Self {
        let store = Memory::reproducible(Arc::clone(plan.limits()), Memory::DEFAULT_MAX_BYTES);
        let clients = loads.iter().flat_map(|load| {
            let action = find_action(plan, load).ok().flatten();
            (0..load.clients).map(move |number| (load, action, number))
        });
        let clients =
            (0..).zip(clients).map(|(node, (load, action, number))| GateClient::new(load, action, number, node));
        Self {
            plan,
            store,
            seed: super::key_seed(),
            clients: clients.collect(),
            permit_holders: BTreeMap::new(),
            is_renewal_scheduled: false,
        }
    }

    /// Decides about a request and counts it.
    ///
    /// # Errors
    /// The request is refused; the value is its `Retry-After`, if there is one.
    pub(super) fn check(&mut self, request: SimRequest, now: Time) -> Result<(), Option<Span>> {
        let (node, holder) = (request.node, request.permit_holder());
        let decision = match self.plan.decide_by_list(Some(self.clients[node].ip), || now) {
            Some(decision) => decision,
            None => {
                let Some(batch) = self.build_batch(node, holder, Verb::Take) else { return Ok(()) };
                decide(&batch, self.plan.limits(), &self.store.apply_now(&batch, now))
            }
        };
        if !decision.allowed {
            return Err(decision.retry_after);
        }
        if decision.permit.is_some() {
            self.permit_holders.insert(holder, node);
        }
        Ok(())
    }

    /// Releases the permit of a request that has ended, if it still holds one.
    pub(super) fn release(&mut self, request: SimRequest, now: Time) {
        if let Some(node) = self.permit_holders.remove(&request.permit_holder()) {
            self.apply_verb(node, request.permit_holder(), Verb::Release, now);
        }
    }

    pub(super) fn has_permits(&self) -> bool {
        !self.permit_holders.is_empty()
    }

    pub(super) fn renew(&self, now: Time) {
        for (&holder, &node) in &self.permit_holders {
            self.apply_verb(node, holder, Verb::Renew, now);
        }
    }

    fn apply_verb(&self, node: usize, holder: u64, verb: Verb, now: Time) {
        if let Some(batch) = self.build_batch(node, holder, verb) {
            self.store.submit(&batch, now);
        }
    }

    /// Returns the operations of a request; `None` if the plan can't decide. The reader of the scenario excludes that.
    fn build_batch(&self, node: usize, holder: u64, verb: Verb) -> Option<Batch> {
        self.clients[node].build_batch(self.plan, &self.seed, verb, holder).ok()
    }
}
