//! A policy and its memory store, on a log's own clock.

use std::net::IpAddr;

use http::header::HeaderMap;
use tidegate_core::{Batch, Decision, LimitId, Reason, Time, Verb};
use tidegate_policy::{
    ActionId, Forwarding, KeyError, KeyPart, KeySeed, MatchedActions, Plan, Policy, Query, QueryError, canonical_ip,
};

use super::client::{ClientNetwork, ClientStats, key_label};
use super::findings::KeyFindings;
use super::meter::{MAX_PEAKS, Meter};
use super::request::LoggedRequest;
use super::timeline::Timeline;
use super::top_k::TopK;
use super::virtual_gate::VirtualGate;

/// The largest number of tracked clients: 35 MB in a hash table of 2^20 slots.
const MAX_CLIENTS: usize = (1 << 20) / 8 * 7;
/// The number of calls that are counted together.
const MAX_PENDING_UPDATES: usize = 128;
/// The largest number of tracked refused keys, for limits that don't count by the client alone: 1 MB, labels included.
const MAX_REFUSED_KEYS: usize = 4096;

/// The requests and refusals of an action, or of requests without an action.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestCounts {
    /// Requests that were decided about.
    pub requests: u64,
    /// Requests that were refused.
    pub refused: u64,
    /// Requests that were admitted, although a limit in shadow would have refused them.
    pub refused_in_shadow: u64,
}

impl RequestCounts {
    pub(super) fn record(&mut self, decision: &Decision) {
        self.requests += 1;
        if !decision.allowed {
            self.refused += 1;
        } else if decision.shadow {
            self.refused_in_shadow += 1;
        }
    }
}

/// The refusals of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LimitRefusals {
    /// Refusals because it was full.
    pub by_limit: u64,
    /// Refusals by its block.
    pub by_block: u64,
    /// Requests that it would have refused if it weren't in shadow.
    pub in_shadow: u64,
}

impl LimitRefusals {
    /// Counts a decision that this limit has determined.
    pub(super) fn record(&mut self, decision: &Decision) {
        match (decision.allowed, decision.reason) {
            (false, Reason::Penalty) => self.by_block += 1,
            (false, _) => self.by_limit += 1,
            (true, _) => self.in_shadow += u64::from(decision.shadow),
        }
    }
}

pub(super) struct PolicyEvaluator {
    pub(super) name: String,
    pub(super) gate: VirtualGate,
    forwarding: Forwarding,
    holder: u64,
    /// The requests that are decided about together. They are written in place, because they are too large to move.
    requests: Box<[PreparedRequest]>,
    /// The number of prepared requests.
    prepared: usize,
    pub(super) meter: Meter,
    pub(super) total: RequestCounts,
    pub(super) refused_by_deny_list: u64,
    pub(super) undecided: u64,
    pub(super) first_undecided: Option<QueryError>,
    /// The counts of each action, and last those of requests that match none.
    pub(super) actions: Vec<RequestCounts>,
    pub(super) limits: Vec<LimitRefusals>,
    pub(super) clients: TopK<ClientNetwork, ClientStats>,
    /// The updates of clients that aren't counted yet.
    pending_updates: Vec<ClientUpdate>,
    pub(super) refused_keys: TopK<(LimitId, u64), KeyFindings>,
    pub(super) timeline: Timeline,
    /// True if any request had a host.
    pub(super) has_seen_host: bool,
}

#[derive(Clone, Copy, Debug)]
struct ClientUpdate {
    client: ClientNetwork,
    allowed: bool,
    shadow: bool,
    limit: Option<LimitId>,
    at: Time,
}

#[derive(Debug)]
struct PreparedRequest {
    actions: MatchedActions,
    client: Option<IpAddr>,
    /// The decision of an allow or deny list, if there is one.
    list_decision: Result<Option<Decision>, QueryError>,
    /// The operations for the store, if no list decides.
    batch: Batch,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RequestDecision {
    pub(super) actions: MatchedActions,
    pub(super) client: Option<ClientNetwork>,
    pub(super) decision: Decision,
}

impl PolicyEvaluator {
    pub(super) fn new(name: String, policy: &Policy) -> Self {
        let plan = policy.plan();
        Self {
            name,
            gate: VirtualGate::new(policy),
            forwarding: policy.inbound().forwarding.clone(),
            holder: 0,
            requests: (0..super::BATCH_LINES).map(|_| PreparedRequest::new()).collect(),
            prepared: 0,
            meter: Meter::new(plan.limits(), MAX_PEAKS),
            total: RequestCounts::default(),
            refused_by_deny_list: 0,
            undecided: 0,
            first_undecided: None,
            actions: vec![RequestCounts::default(); plan.actions().len() + 1],
            limits: vec![LimitRefusals::default(); plan.limits().len()],
            clients: TopK::new(MAX_CLIENTS, ClientStats::calls),
            pending_updates: Vec::with_capacity(MAX_PENDING_UPDATES),
            refused_keys: TopK::new(MAX_REFUSED_KEYS, KeyFindings::all_refusals),
            timeline: Timeline::default(),
            has_seen_host: false,
        }
    }

    /// Returns the headers that the policy reads.
    pub(super) fn headers(&self) -> impl Iterator<Item = http::HeaderName> + '_ {
        let plan = &self.gate.plan;
        let parts = plan.limits().iter().flat_map(|(id, _)| plan.key_parts(id));
        let counted = parts.filter_map(|part| match part {
            KeyPart::Header(name) => Some(name.clone()),
            KeyPart::Cookie(_) => Some(http::header::COOKIE),
            _ => None,
        });
        let hops = (!self.forwarding.trusted.is_empty())
            .then(|| http::HeaderName::from_static(self.forwarding.header.as_str()));
        counted.chain(hops)
    }

    /// Returns true if any request was prepared.
    pub(super) fn has_requests(&self) -> bool {
        self.total.requests + self.undecided > 0
    }

    /// Drops the decided requests, before others are prepared.
    pub(super) fn clear_batch(&mut self) {
        self.prepared = 0;
    }

    /// Prepares the decision about a request at `now`, and prefetches its slots in the store. At most
    /// [`BATCH_LINES`](super::BATCH_LINES) requests may be prepared at once.
    #[inline]
    pub(super) fn prepare(&mut self, request: &LoggedRequest<'_>, headers: &HeaderMap, now: Time) {
        self.holder += 1;
        let client = request.peer.map(|peer| self.client(peer, headers));
        let query = request_query(request, client, headers);
        self.has_seen_host |= query.host.is_some();
        let prepared = &mut self.requests[self.prepared];
        self.prepared += 1;
        prepared.client = client;
        prepared.batch = Batch::new(self.holder);
        prepared.list_decision = prepared.resolve(&self.gate.plan, &query, &self.gate.seed, now);
        if matches!(prepared.list_decision, Ok(None)) {
            self.gate.store.prefetch(&prepared.batch);
        }
    }

    /// Prefetches the states of keys with many calls, once all requests are prepared.
    pub(super) fn prefetch_states(&self) {
        for prepared in &self.requests[..self.prepared] {
            self.gate.store.prefetch_states(&prepared.batch);
        }
    }

    /// Decides about the request that was prepared at `index`, as a gate does with a clock at `now`, and counts the
    /// decision. `None` if the policy can't decide.
    #[inline]
    pub(super) fn evaluate(
        &mut self,
        index: usize,
        request: &LoggedRequest<'_>,
        headers: &HeaderMap,
        now: Time,
    ) -> Option<RequestDecision> {
        let prepared = &mut self.requests[index];
        let (mut actions, client) = (prepared.actions, prepared.client);
        let decision = match std::mem::replace(&mut prepared.list_decision, Ok(None)) {
            Ok(Some(decision)) => decision,
            Ok(None) => self.decide(index, &request_query(request, client, headers), now),
            Err(error) => {
                actions = MatchedActions::NONE;
                match self.decide_uncountable(index, &request_query(request, client, headers), &error, now) {
                    Some(refusal) => refusal,
                    None => {
                        self.undecided += 1;
                        self.first_undecided.get_or_insert(error);
                        return None;
                    }
                }
            }
        };
        let decided = RequestDecision { actions, client: client.map(ClientNetwork::from), decision };
        self.record(&decided, now);
        Some(decided)
    }

    fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if self.forwarding.trusted.is_empty() { canonical_ip(peer) } else { self.forwarding.client_ip(peer, headers) }
    }

    #[inline]
    fn decide(&mut self, index: usize, query: &Query<'_>, now: Time) -> Decision {
        let (gate, batch) = (&self.gate, &mut self.requests[index].batch);
        let plan = &*gate.plan;
        let outcomes = gate.apply(batch, query.ip, now);
        self.meter.record(batch, plan.limits(), &outcomes, &gate.store);
        let decision = gate.decide(batch, &outcomes, now);
        if let Some(limit) = decision.bound_by
            && (!decision.allowed || decision.shadow)
        {
            let parts = plan.key_parts(limit);
            if parts != [KeyPart::ClientIp]
                && let Some(op) = batch.ops().iter().find(|op| op.limit == limit)
            {
                let hash = op.key.lo();
                let new = || KeyFindings { key: key_label(plan, parts, query, hash), refused: 0, refused_in_shadow: 0 };
                let key = self.refused_keys.entry((limit, hash), new);
                *if decision.allowed { &mut key.refused_in_shadow } else { &mut key.refused } += 1;
            }
        }
        decision
    }

    /// Counts a request under `inbound.global` alone, because its other limits can't count it. `None` unless it is
    /// refused.
    #[cold]
    fn decide_uncountable(
        &mut self,
        index: usize,
        query: &Query<'_>,
        error: &QueryError,
        now: Time,
    ) -> Option<Decision> {
        let QueryError::Key(KeyError::Uncountable(_)) = error else { return None };
        let (plan, batch) = (&self.gate.plan, &mut self.requests[index].batch);
        *batch = Batch::new(batch.holder());
        plan.fill(batch, MatchedActions::NONE, query, &self.gate.seed, Verb::Take).ok()?;
        let decision = self.decide(index, query, now);
        (!decision.allowed).then_some(decision)
    }

    #[inline]
    fn record(&mut self, decided: &RequestDecision, now: Time) {
        let RequestDecision { actions, client, decision } = decided;
        if let Some(client) = *client {
            if self.pending_updates.len() == MAX_PENDING_UPDATES {
                self.flush_clients();
            }
            let Decision { allowed, shadow, bound_by: limit, .. } = *decision;
            self.pending_updates.push(ClientUpdate { client, allowed, shadow, limit, at: now });
        }
        // A request that matches several actions counts for each.
        let unmatched = actions.first().is_none().then_some(self.actions.len() - 1);
        for action in unmatched.into_iter().chain(actions.iter().map(ActionId::index)) {
            self.actions[action].record(decision);
        }
        self.total.record(decision);
        self.timeline.interval_at(now).record(decision);
        match decision.bound_by {
            Some(limit) => self.limits[limit.index()].record(decision),
            None if !decision.allowed => self.refused_by_deny_list += 1,
            None => {}
        }
    }

    /// Counts the pending updates of clients and of the meter.
    pub(super) fn flush(&mut self) {
        self.flush_clients();
        self.meter.flush();
    }

    /// Counts the updates of clients one after the other, so that their cache misses overlap.
    fn flush_clients(&mut self) {
        for ClientUpdate { client, allowed, shadow, limit, at } in self.pending_updates.drain(..) {
            let stats = self.clients.entry(client, ClientStats::default);
            if allowed {
                stats.admitted = stats.admitted.saturating_add(1);
                stats.refused_in_shadow = stats.refused_in_shadow.saturating_add(shadow.into());
            } else {
                stats.record_refusal(limit, at);
            }
        }
    }
}

impl PreparedRequest {
    fn new() -> Self {
        Self { actions: MatchedActions::NONE, client: None, list_decision: Ok(None), batch: Batch::new(0) }
    }

    /// Finds the actions, and the decision of a list or the operations for the store.
    #[inline]
    fn resolve(
        &mut self,
        plan: &Plan,
        query: &Query<'_>,
        seed: &KeySeed,
        now: Time,
    ) -> Result<Option<Decision>, QueryError> {
        self.actions = match query.action {
            Some(name) => plan.find_action(name)?.into(),
            None => plan.matching_actions(query).unwrap_or_else(MatchedActions::from),
        };
        let decision = plan.decide_by_list(query.ip, || now);
        if decision.is_none() {
            plan.fill(&mut self.batch, self.actions, query, seed, Verb::Take)?;
        }
        Ok(decision)
    }
}

fn request_query<'q>(request: &'q LoggedRequest<'_>, client: Option<IpAddr>, headers: &'q HeaderMap) -> Query<'q> {
    Query {
        action: request.action.as_deref(),
        ip: client,
        key: request.user.as_deref(),
        method: Some(&request.method),
        path: Some(&request.path),
        host: request.host.as_deref(),
        headers: Some(headers),
        from_log: true,
        ..Query::default()
    }
}
