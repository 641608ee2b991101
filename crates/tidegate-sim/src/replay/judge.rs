//! A policy and its memory store, on a log's own clock.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::HeaderMap;
use tidegate_core::admit::{decide, share};
use tidegate_core::{Batch, Decision, LimitId, Reason, Time, Verb};
use tidegate_policy::{ActionId, Actions, Forwarding, KeyError, KeyPart, KeySeed, Plan, Policy, Query, canonical};
use tidegate_store::{Immediate, Memory};

use super::client::{Client, Fate, KeyFate, label};
use super::heaviest::Heaviest;
use super::meter::Meter;
use super::request::Request;
use super::timeline::Timeline;
use crate::world::Undecidable;

/// The most clients that are told apart: 35 MB in a table of 2^20 slots.
const MAX_CLIENTS: usize = (1 << 20) / 8 * 7;
/// How many calls are counted together.
const TOGETHER: usize = 128;
/// The most refused keys that are told apart, for limits that don't count by the client alone: a MB, their words included.
const MAX_KEYS: usize = 4096;

/// Requests and refusals of an action, or of none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Requests that were decided about.
    pub requests: u64,
    /// Those that were refused.
    pub refused: u64,
}

/// What a limit refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusals {
    /// Because it was full.
    pub full: u64,
    /// Because its block lived.
    pub blocked: u64,
    /// What it would have refused in shadow.
    pub shadow: u64,
}

pub(super) struct Judge {
    pub(super) name: String,
    pub(super) plan: Arc<Plan>,
    forwarding: Forwarding,
    store: Memory,
    seed: KeySeed,
    holder: u64,
    /// Room for the requests that are decided about together; it is written in place, since it is too large to move about.
    turns: Box<[Turn]>,
    /// How many of them are prepared.
    prepared: usize,
    pub(super) meter: Meter,
    pub(super) total: Count,
    pub(super) by_list: u64,
    pub(super) shadow: u64,
    pub(super) undecided: u64,
    pub(super) first_undecided: Option<Undecidable>,
    /// By action, and last those that match none.
    pub(super) actions: Vec<Count>,
    pub(super) limits: Vec<Refusals>,
    pub(super) clients: Heaviest<Client, Fate>,
    /// What the clients met of late, and isn't counted yet.
    met: Vec<Met>,
    pub(super) keys: Heaviest<(LimitId, u64), KeyFate>,
    pub(super) timeline: Timeline,
    /// Whether any request told its host.
    pub(super) saw_host: bool,
}

/// What a client met.
#[derive(Clone, Copy, Debug)]
struct Met {
    client: Client,
    allowed: bool,
    limit: Option<LimitId>,
    at: Time,
}

/// A request on its way to be decided about.
#[derive(Debug)]
struct Turn {
    actions: Actions,
    client: Option<IpAddr>,
    /// What a list has decided already.
    listed: Result<Option<Decision>, Undecidable>,
    /// What the store is asked otherwise.
    batch: Batch,
}

/// What was decided about a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged {
    pub(super) actions: Actions,
    pub(super) client: Option<Client>,
    pub(super) decision: Decision,
}

impl Judge {
    pub(super) fn new(name: String, policy: &Policy) -> Self {
        let plan = Arc::clone(policy.plan());
        let (actions, limits) = (plan.actions().len(), plan.limits().len());
        let max_bytes = usize::try_from(policy.store().max_bytes).unwrap_or(usize::MAX);
        Self {
            name,
            forwarding: policy.inbound().forwarding.clone(),
            store: Memory::reproducible(Arc::new(plan.limits().clone()), max_bytes),
            // The same log gives the same report.
            seed: KeySeed::new([0x7d; 16]),
            holder: 0,
            turns: (0..super::TOGETHER).map(|_| Turn::default()).collect(),
            prepared: 0,
            meter: Meter::new(&plan),
            total: Count::default(),
            by_list: 0,
            shadow: 0,
            undecided: 0,
            first_undecided: None,
            actions: vec![Count::default(); actions + 1],
            limits: vec![Refusals::default(); limits],
            clients: Heaviest::new(MAX_CLIENTS),
            met: Vec::with_capacity(TOGETHER),
            keys: Heaviest::new(MAX_KEYS),
            timeline: Timeline::default(),
            saw_host: false,
            plan,
        }
    }

    /// The headers that it looks at.
    pub(super) fn headers(&self) -> impl Iterator<Item = http::HeaderName> + '_ {
        let parts = self.plan.limits().iter().flat_map(|(id, _)| self.plan.key_parts(id));
        let counted = parts.filter_map(|part| match part {
            KeyPart::Header(name) => Some(name.clone()),
            KeyPart::Cookie(_) => Some(http::header::COOKIE),
            _ => None,
        });
        let hops = (!self.forwarding.trusted.is_empty())
            .then(|| http::HeaderName::from_static(self.forwarding.header.as_str()));
        counted.chain(hops)
    }

    /// Forgets the requests that were decided about, before others are prepared.
    pub(super) fn begin(&mut self) {
        self.prepared = 0;
    }

    /// Prepares the decision about a request at `now`, one of at most [`TOGETHER`](super::TOGETHER), and has what it needs of memory on its way.
    #[inline]
    pub(super) fn prepare(&mut self, request: &Request<'_>, headers: &HeaderMap, now: Time) {
        self.holder += 1;
        let client = request.peer.map(|peer| self.client(peer, headers));
        let query = query(request, client, headers);
        self.saw_host |= query.host.is_some();
        let turn = &mut self.turns[self.prepared];
        self.prepared += 1;
        turn.client = client;
        turn.batch = Batch::new(self.holder);
        turn.listed = turn.ask(&self.plan, &query, &self.seed, now);
        if matches!(turn.listed, Ok(None)) {
            self.store.fetch(&turn.batch);
        }
    }

    /// Once all are prepared: has what those need that has come to many calls.
    pub(super) fn fetch(&self) {
        for turn in &self.turns[..self.prepared] {
            self.store.fetch_states(&turn.batch);
        }
    }

    /// Decides about a request as a gate does whose clock shows `now`, and counts what comes of it. `None` if the policy
    /// can't decide. It is the one that was prepared at this place.
    #[inline]
    pub(super) fn judge(
        &mut self,
        place: usize,
        request: &Request<'_>,
        headers: &HeaderMap,
        now: Time,
    ) -> Option<Judged> {
        let turn = &mut self.turns[place];
        let (actions, client) = (turn.actions, turn.client);
        let decision = match std::mem::replace(&mut turn.listed, Ok(None)) {
            Ok(Some(decision)) => decision,
            Ok(None) => self.decide(place, &query(request, client, headers), now),
            Err(error) => {
                self.undecided += 1;
                self.first_undecided.get_or_insert(error);
                return None;
            }
        };
        let judged = Judged { actions, client: client.map(Client::from), decision };
        self.count(&judged, now);
        Some(judged)
    }

    fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if self.forwarding.trusted.is_empty() { canonical(peer) } else { self.forwarding.client(peer, headers) }
    }

    #[inline]
    fn decide(&mut self, place: usize, query: &Query<'_>, now: Time) -> Decision {
        let plan = &*self.plan;
        let batch = &mut self.turns[place].batch;
        let outcomes = loop {
            let outcomes = self.store.apply_now(batch, now);
            if !share(batch, &outcomes, |limit, share| plan.shared_key(limit, share, query.ip, &self.seed)) {
                break outcomes;
            }
        };
        self.meter.count(batch, plan.limits(), &outcomes, &self.store);
        let decision = decide(batch, plan.limits(), &outcomes);
        if decision.permit.is_some() {
            // How long the call took isn't known, so it takes no time.
            for op in batch.ops_mut() {
                op.verb = Verb::Release;
            }
            self.store.apply_now(batch, now);
        }
        if let Some(limit) = decision.bound_by
            && !decision.allowed
        {
            let parts = plan.key_parts(limit);
            if parts != [KeyPart::ClientIp]
                && let Some(op) = batch.ops().iter().find(|op| op.limit == limit)
            {
                let hash = op.key.lo();
                let new = || KeyFate { label: label(plan, parts, query, hash), refused: 0 };
                self.keys.entry((limit, hash), new).refused += 1;
            }
        }
        decision
    }

    #[inline]
    fn count(&mut self, judged: &Judged, now: Time) {
        let Judged { actions, client, decision } = judged;
        let unmatched = self.actions.len() - 1;
        let interval = self.timeline.at(now);
        if let Some(client) = *client {
            if self.met.len() == TOGETHER {
                settle(&mut self.clients, &mut self.met);
            }
            self.met.push(Met { client, allowed: decision.allowed, limit: decision.bound_by, at: now });
        }
        // A request that meets several counts for each.
        let unnamed = actions.first().is_none().then_some(unmatched);
        for action in unnamed.into_iter().chain(actions.iter().map(ActionId::index)) {
            self.actions[action].requests += 1;
            if !decision.allowed {
                self.actions[action].refused += 1;
            }
        }
        self.total.requests += 1;
        if decision.allowed {
            interval.admitted += 1;
            if decision.shadow {
                self.shadow += 1;
                if let Some(limit) = decision.bound_by {
                    self.limits[limit.index()].shadow += 1;
                }
            }
            return;
        }
        self.total.refused += 1;
        let refusals = decision.bound_by.map(|limit| &mut self.limits[limit.index()]);
        match (refusals, decision.reason) {
            (Some(refusals), Reason::Penalty) => {
                refusals.blocked += 1;
                interval.by_block += 1;
            }
            (Some(refusals), _) => {
                refusals.full += 1;
                interval.by_limit += 1;
            }
            (None, _) => {
                self.by_list += 1;
                interval.by_list += 1;
            }
        }
    }

    /// Counts what is only noted.
    pub(super) fn settle(&mut self) {
        settle(&mut self.clients, &mut self.met);
        self.meter.settle();
    }

    /// What the store had to let go although it still counted: decisions that a gate with more memory might have made
    /// otherwise.
    pub(super) fn losses(&self) -> u64 {
        let losses = self.store.stats().losses;
        losses.evicted() + losses.shared
    }
}

impl Default for Turn {
    fn default() -> Self {
        Self { actions: Actions::NONE, client: None, listed: Ok(None), batch: Batch::new(0) }
    }
}

impl Turn {
    /// Finds the actions, and what a list says or the store is to be asked.
    #[inline]
    fn ask(
        &mut self,
        plan: &Plan,
        query: &Query<'_>,
        seed: &KeySeed,
        now: Time,
    ) -> Result<Option<Decision>, Undecidable> {
        self.actions = match query.action {
            Some(name) => plan.find(name)?.into(),
            None => plan.matching(query).map_err(KeyError::from)?,
        };
        if let Some(decision) = plan.by_list(query.ip, || now) {
            return Ok(Some(decision));
        }
        plan.fill(&mut self.batch, self.actions, query, seed, Verb::Take)?;
        Ok(None)
    }
}

/// What a request asks of the policy.
fn query<'q>(request: &'q Request<'_>, client: Option<IpAddr>, headers: &'q HeaderMap) -> Query<'q> {
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

/// Counts what clients met, one after the other: what is far off in memory is then waited for together.
fn settle(clients: &mut Heaviest<Client, Fate>, met: &mut Vec<Met>) {
    for Met { client, allowed, limit, at } in met.drain(..) {
        let fate = clients.entry(client, Fate::default);
        if allowed {
            fate.admitted = fate.admitted.saturating_add(1);
        } else {
            fate.refuse(limit, at);
        }
    }
}
