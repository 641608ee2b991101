//! One run of a simulated world, from start to end, by events on a virtual clock.

mod event;
mod gate;
mod network;
mod node;
mod plain_client;
mod tidegate_client;

use std::sync::Arc;

use slab::Slab;
use tidegate_core::call::AttemptReport;
use tidegate_core::concurrency::Concurrency;
use tidegate_core::retry::Delivery;
use tidegate_core::{Class, Span, Time};
use tidegate_policy::KeySeed;
use tidegate_store::{ImmediateStore, Memory, Store};

use crate::delay::Delay;
use crate::event_queue::EventQueue;
use crate::random::{RngStreams, SimRng};
use crate::service::{ArrivalOutcome, FinishedJob, JobId, RequestKind, ServiceReply, SimService};
use crate::setup::{ClientSpec, Setup, TimeRange};
use crate::stats::{CallOutcome, RunStats};
use event::{AttemptResult, CallId, CallState, ClientCall, SharedStoreRequest, SimEvent, SimRequest, attempt_result};
pub(crate) use gate::load_action;
use gate::{CallIdentity, SimGate};
use node::{ClientState, SimNode};
use plain_client::{PlainClient, RetryState};
use tidegate_client::{Effect, TidegateClient};

/// Returns a fixed seed, so that keys hash alike in every run. A simulation has no attacker that chooses colliding
/// keys.
pub(crate) fn key_seed() -> KeySeed {
    KeySeed::new([0; 16])
}

/// The size of each client's own store of limits, in bytes.
const STORE_BYTES: usize = 1 << 20;
/// The timeout of a request to a store that can't be reached.
const STORE_TIMEOUT: Span = Span::from_secs(1);

/// The shortest timer, as in production.
const MIN_TIMER_DELAY: Span = Span::from_micros(100);

/// A simulated world during its run.
pub(crate) struct Simulation<'s> {
    setup: &'s Setup,
    events: EventQueue<SimEvent>,
    end: Time,
    service: SimService<'s, SimRequest>,
    gate: Option<SimGate<'s>>,
    nodes: Vec<SimNode<'s>>,
    calls: Slab<CallState>,
    last_call_sequence: u64,
    shared_store: Option<(Arc<Memory>, Delay, SimRng)>,
    stats: RunStats,
    effects: Vec<Effect>,
}

impl<'s> Simulation<'s> {
    pub(crate) fn new(setup: &'s Setup, seed: u64, trial: u32) -> Self {
        let began = setup.starts_at;
        let mut streams = RngStreams::new(seed, trial);
        let service = SimService::new(&setup.service, began, streams.next_rng());
        let store_rng = streams.next_rng();
        let outbound = setup.policy.as_ref().and_then(|policy| policy.outbound());
        let shared = outbound.filter(|_| setup.store.shared).map(|plan| {
            let store = Arc::new(Memory::reproducible(Arc::clone(plan.limits()), Memory::DEFAULT_MAX_BYTES));
            (store, setup.store.latency.unwrap_or(Delay::NONE), store_rng)
        });
        let is_store_immediate = setup.store.latency.is_none() && setup.store.outages.is_empty();
        let mut nodes = Vec::new();
        for (index, load) in setup.loads.iter().enumerate() {
            for number in 0..load.clients {
                let mut node = SimNode::new(index, load, number, began, &mut streams);
                let rng = streams.next_rng();
                node.client = match &setup.client {
                    ClientSpec::Plain(spec) => ClientState::Plain(PlainClient::new(spec, rng)),
                    ClientSpec::Tidegate { provider } => {
                        let plan = outbound.expect("invariant: reading finds the provider in the policy");
                        let own = || Arc::new(Memory::reproducible(Arc::clone(plan.limits()), STORE_BYTES));
                        let store = match &shared {
                            Some((store, ..)) => Some(Arc::clone(store)).filter(|_| is_store_immediate),
                            None => Some(own()),
                        };
                        let provider = &plan.providers()[*provider];
                        ClientState::Tidegate(Box::new(TidegateClient::new(plan, provider, store, &key_seed(), rng)))
                    }
                };
                nodes.push(node);
            }
        }
        let plan = setup.policy.as_ref().map(|policy| &**policy.plan()).filter(|_| setup.gate);
        let gate = plan.map(|plan| SimGate::new(plan, &setup.loads, key_seed()));
        let mut world = Self {
            setup,
            events: EventQueue::new(began),
            end: began + setup.duration,
            service,
            gate,
            nodes,
            calls: Slab::new(),
            last_call_sequence: 0,
            shared_store: shared,
            stats: RunStats::new(setup),
            effects: Vec::new(),
        };
        for node in 0..world.nodes.len() {
            world.schedule_next_call(node);
        }
        world
    }

    /// Handles up to this many further events. Returns true if more may follow.
    pub(crate) fn run(&mut self, events: u64) -> bool {
        for _ in 0..events {
            let Some(event) = self.events.pop_until(self.end) else { return false };
            self.handle_event(event);
        }
        true
    }

    /// Returns the share of its duration that has passed.
    pub(crate) fn progress(&self) -> f64 {
        let elapsed = self.events.now().since(self.setup.starts_at);
        elapsed.as_micros() as f64 / self.setup.duration.as_micros().max(1) as f64
    }

    pub(crate) fn into_stats(self) -> RunStats {
        self.stats
    }

    fn handle_event(&mut self, event: SimEvent) {
        let now = self.events.now();
        match event {
            SimEvent::ClientCalls(node) => {
                self.start_call(node);
                if !self.nodes[node].is_serial() {
                    self.schedule_next_call(node);
                }
            }
            SimEvent::RequestArrives(request, asks) => self.handle_arrival(request, asks),
            SimEvent::JobFinishes(job) => {
                if let Some(FinishedJob { request, reply: answer, next_job: next }) = self.service.finish(job, now) {
                    self.release_permit(request);
                    self.send_reply(request, answer);
                    self.schedule_job_end(next);
                }
            }
            SimEvent::ReplyArrives(request, ServiceReply::Row { version }) => {
                if self.is_reply_awaited(request) {
                    self.send_to_service(request, RequestKind::Write { version });
                }
            }
            SimEvent::ReplyArrives(request, answer) => {
                if self.is_reply_awaited(request) {
                    self.handle_attempt_end(request.call, attempt_result(answer));
                }
            }
            SimEvent::AttemptTimesOut(request) => {
                if self.is_reply_awaited(request) {
                    self.handle_timeout(request);
                }
            }
            SimEvent::CallResumes(call) => {
                let Some(live) = self.calls.get(call.index).filter(|live| live.sequence == call.sequence) else {
                    return;
                };
                match live.client_call {
                    ClientCall::Plain(_) => self.start_plain_attempt(call),
                    ClientCall::Tidegate(place) => {
                        let node = live.node;
                        self.with_tidegate_client(node, |hall, now, effects| hall.enqueue(place, now, effects));
                    }
                }
            }
            SimEvent::ClientWakes(node, at) => {
                if self.nodes[node].timer_fires_at == at {
                    self.nodes[node].timer_fires_at = Time::NEVER;
                    self.with_tidegate_client(node, TidegateClient::handle_timer);
                }
            }
            SimEvent::GateRenewsPermits => {
                if let Some(gate) = &mut self.gate {
                    gate.is_renewal_scheduled = false;
                    gate.renew(|node| &self.nodes[node].name, now);
                }
                self.schedule_renewal();
            }
            SimEvent::StoreRequestArrives(question) => self.handle_store_request(question),
            SimEvent::StoreReplyArrives(question, outcomes) => {
                let SharedStoreRequest { node, waiting_call: asker, batch } = *question;
                self.with_tidegate_client(node, |hall, now, effects| {
                    hall.handle_store_reply(asker, &batch, outcomes.as_deref(), now, effects);
                });
            }
            SimEvent::StoreNotificationArrives(batch) => {
                if let Some((store, ..)) = &self.shared_store {
                    store.submit(&batch, now);
                }
            }
        }
    }

    /// Schedules a client's next call, if there is one.
    fn schedule_next_call(&mut self, node: usize) {
        let now = self.events.now();
        if let Some(at) = self.nodes[node].next_call_at(self.setup, now, self.end) {
            self.events.schedule(at, SimEvent::ClientCalls(node));
        }
    }

    fn start_call(&mut self, node: usize) {
        let now = self.events.now();
        self.last_call_sequence += 1;
        self.stats.record_start(self.nodes[node].load, now);
        let mind = match &self.nodes[node].client {
            ClientState::Tidegate(_) => ClientCall::Tidegate(usize::MAX),
            ClientState::Plain(_) | ClientState::None => ClientCall::Plain(RetryState::default()),
        };
        let live = CallState {
            sequence: self.last_call_sequence,
            node,
            started_at: now,
            attempt: 0,
            reply_timeout: Span::MAX,
            conclusive_after: Span::ZERO,
            job: None,
            client_call: mind,
        };
        let id = CallId { index: self.calls.insert(live), sequence: self.last_call_sequence };
        if let ClientState::Plain(plain) = &self.nodes[node].client {
            let pause = plain.pace_delay();
            return if pause.is_zero() {
                self.start_plain_attempt(id)
            } else {
                self.events.schedule(now + pause, SimEvent::CallResumes(id))
            };
        }
        let lane = self.setup.loads[self.nodes[node].load].lane;
        let calls = &mut self.calls;
        let (now, nodes, effects) = (self.nodes[node].clock.reading_at(now), &mut self.nodes, &mut self.effects);
        if let ClientState::Tidegate(hall) = &mut nodes[node].client {
            let place = hall.begin(id, lane, now, effects);
            calls[id.index].client_call = ClientCall::Tidegate(place);
        }
        self.apply_effects(node);
    }

    /// Runs one step of a client's state machine and applies its effects.
    fn with_tidegate_client(
        &mut self,
        node: usize,
        step: impl FnOnce(&mut TidegateClient<'s>, Time, &mut Vec<Effect>),
    ) {
        let now = self.nodes[node].clock.reading_at(self.events.now());
        if let ClientState::Tidegate(hall) = &mut self.nodes[node].client {
            step(hall, now, &mut self.effects);
        }
        self.apply_effects(node);
    }

    fn apply_effects(&mut self, node: usize) {
        let now = self.events.now();
        if let ClientState::Tidegate(hall) = &self.nodes[node].client {
            let (wakes_at, waiting) = (hall.wake_at, hall.waiting_calls());
            let rings_at = self.nodes[node].clock.timer_fires_at(wakes_at, now).max(now + MIN_TIMER_DELAY);
            if rings_at < self.nodes[node].timer_fires_at {
                self.nodes[node].timer_fires_at = rings_at;
                self.events.schedule(rings_at, SimEvent::ClientWakes(node, rings_at));
            }
            if waiting > 0 {
                self.stats.record(now, |bucket| bucket.waiting = bucket.waiting.max(waiting));
            }
        }
        let mut effects = std::mem::take(&mut self.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Send { id, reply_timeout: patience, conclusive_after: enough } => {
                    self.send_attempt(id, patience, enough)
                }
                Effect::Resume { id, at } => {
                    let at = self.nodes[node].clock.timer_fires_at(at, now);
                    self.events.schedule(at, SimEvent::CallResumes(id));
                }
                Effect::Finish { id, outcome: end } => self.finish_call(id, end),
                Effect::AskStore { slot: place, ticket, batch } => {
                    let question = SharedStoreRequest { node, waiting_call: (place, ticket), batch };
                    match self.store_delay(now) {
                        Some(way) => self.events.schedule(now + way, SimEvent::StoreRequestArrives(Box::new(question))),
                        None => self
                            .events
                            .schedule(now + STORE_TIMEOUT, SimEvent::StoreReplyArrives(Box::new(question), None)),
                    }
                }
                Effect::NotifyStore { batch } => {
                    if let Some(way) = self.store_delay(now) {
                        self.events.schedule(now + way, SimEvent::StoreNotificationArrives(batch));
                    }
                }
            }
        }
        // Kept to reuse its allocation.
        self.effects = effects;
    }

    /// Returns the delay of a message to or from the shared store; `None` if it is lost.
    fn store_delay(&mut self, now: Time) -> Option<Span> {
        let (_, latency, rng) = self.shared_store.as_mut()?;
        let is_unreachable = TimeRange::any_contains(&self.setup.store.outages, now.since(self.setup.starts_at));
        (!is_unreachable).then(|| latency.sample(rng))
    }

    /// Answers a store request by the store's own clock, which is right.
    fn handle_store_request(&mut self, question: Box<SharedStoreRequest>) {
        let now = self.events.now();
        let Some((store, ..)) = &self.shared_store else { return };
        let outcomes = store.apply_now(&question.batch, now);
        let way = self.store_delay(now);
        match way {
            Some(way) => {
                self.events.schedule(now + way, SimEvent::StoreReplyArrives(question, Some(Box::new(outcomes))))
            }
            None => self.events.schedule(now + STORE_TIMEOUT, SimEvent::StoreReplyArrives(question, None)),
        }
    }

    fn start_plain_attempt(&mut self, id: CallId) {
        let node = self.calls[id.index].node;
        let ClientState::Plain(plain) = &mut self.nodes[node].client else { return };
        let ClientCall::Plain(tried) = &mut self.calls[id.index].client_call else { return };
        if plain.try_start_attempt(tried) {
            let patience = plain.reply_timeout().unwrap_or(Span::MAX);
            self.send_attempt(id, patience, Span::ZERO);
        } else {
            self.finish_call(id, CallOutcome::Declined);
        }
    }

    /// Sends a request for the next attempt of a call.
    fn send_attempt(&mut self, id: CallId, patience: Span, enough: Span) {
        let now = self.events.now();
        let live = &mut self.calls[id.index];
        live.attempt += 1;
        (live.reply_timeout, live.conclusive_after, live.job) = (patience, enough, None);
        let request = SimRequest { call: id, attempt: live.attempt, node: live.node };
        self.stats.record(now, |bucket| bucket.attempts += 1);
        if patience < Span::MAX {
            self.events.schedule(now + patience, SimEvent::AttemptTimesOut(request));
        }
        self.send_to_service(request, if self.setup.service.versioned { RequestKind::Read } else { RequestKind::Work });
    }

    fn handle_arrival(&mut self, request: SimRequest, asks: RequestKind) {
        let now = self.events.now();
        self.stats.record_arrival(now);
        if let Some(gate) = &mut self.gate
            && let Err(retry_after) = gate.check(call_identity(&self.nodes, request), now)
        {
            self.stats.record(now, |bucket| bucket.throttled += 1);
            return self.send_reply(request, ServiceReply::Throttled { retry_after });
        }
        if !self.is_reply_awaited(request) {
            self.release_permit(request);
        }
        self.schedule_renewal();
        match self.service.submit(request, asks, now) {
            ArrivalOutcome::Replied(answer) => {
                if answer != ServiceReply::ConnectionRefused {
                    self.stats.record(now, |bucket| bucket.throttled += 1);
                }
                self.release_permit(request);
                self.send_reply(request, answer);
            }
            ArrivalOutcome::Started(job, length) => {
                self.record_accepted(request, job);
                self.schedule_job_end(Some((job, length)));
            }
            ArrivalOutcome::Queued(job) => self.record_accepted(request, job),
        }
    }

    fn record_accepted(&mut self, request: SimRequest, job: JobId) {
        let (waiting, working) = (self.service.queued_requests(), self.service.busy_workers());
        self.stats.record(self.events.now(), |bucket| {
            bucket.admitted += 1;
            (bucket.queue, bucket.working) = (bucket.queue.max(waiting), bucket.working.max(working));
        });
        if self.is_reply_awaited(request) {
            self.calls[request.call.index].job = Some(job);
        }
    }

    fn schedule_job_end(&mut self, started: Option<(JobId, Span)>) {
        if let Some((job, length)) = started {
            self.events.schedule(self.events.now() + length, SimEvent::JobFinishes(job));
        }
    }

    /// Releases the permit of a request at the gate, if it still holds one.
    fn release_permit(&mut self, request: SimRequest) {
        if let Some(gate) = &mut self.gate {
            gate.release(call_identity(&self.nodes, request), self.events.now());
        }
    }

    /// Schedules the next renewal, so that permits outlive their lease while they are held.
    fn schedule_renewal(&mut self) {
        if let Some(gate) = self.gate.as_mut().filter(|gate| gate.has_permits() && !gate.is_renewal_scheduled) {
            gate.is_renewal_scheduled = true;
            self.events.schedule(self.events.now() + Concurrency::RENEW_INTERVAL, SimEvent::GateRenewsPermits);
        }
    }

    /// Returns true if the client still waits for a reply to this request.
    fn is_reply_awaited(&self, request: SimRequest) -> bool {
        let live = self.calls.get(request.call.index).filter(|live| live.sequence == request.call.sequence);
        live.is_some_and(|live| live.attempt == request.attempt && live.reply_timeout > Span::ZERO)
    }

    fn handle_timeout(&mut self, request: SimRequest) {
        // The gate sees that its client is gone, even if the service behind it doesn't.
        self.release_permit(request);
        let live = &self.calls[request.call.index];
        let (job, patience, enough) = (live.job, live.reply_timeout, live.conclusive_after);
        if let Some(job) = job {
            let next = self.service.cancel(job);
            self.schedule_job_end(next);
        }
        let class = if patience < enough { Class::Cancelled } else { Class::Transient };
        self.handle_attempt_end(request.call, AttemptResult { class, reach: Delivery::Unknown, retry_after: None });
    }

    /// Handles the end of an attempt.
    fn handle_attempt_end(&mut self, id: CallId, ended: AttemptResult) {
        let live = &mut self.calls[id.index];
        // Later replies and timeouts of this attempt are ignored.
        live.reply_timeout = Span::ZERO;
        let node = live.node;
        match &mut live.client_call {
            ClientCall::Tidegate(place) => {
                let (place, reply) = (
                    *place,
                    AttemptReport {
                        is_repeatable: true,
                        retry_after: ended.retry_after,
                        ..AttemptReport::new(ended.class, ended.reach)
                    },
                );
                self.with_tidegate_client(node, |hall, now, effects| hall.handle_reply(place, &reply, now, effects));
            }
            ClientCall::Plain(tried) => {
                let ClientState::Plain(plain) = &mut self.nodes[node].client else { return };
                plain.end_attempt(ended.class);
                if ended.class == Class::Success {
                    return self.finish_call(id, CallOutcome::Succeeded);
                }
                match plain.next_retry_delay(tried, ended.retry_after) {
                    Some(wait) => self.events.schedule(self.events.now() + wait, SimEvent::CallResumes(id)),
                    None => {
                        let refused = ended.class == Class::Throttled;
                        self.finish_call(id, if refused { CallOutcome::Refused } else { CallOutcome::Failed });
                    }
                }
            }
        }
    }

    fn finish_call(&mut self, id: CallId, end: CallOutcome) {
        let live = self.calls.remove(id.index);
        let node = live.node;
        self.stats.record_end(self.nodes[node].load, live.started_at, end, self.events.now());
        if self.nodes[node].is_serial() {
            self.schedule_next_call(node);
        }
    }
}

fn call_identity<'c>(nodes: &'c [SimNode<'_>], request: SimRequest) -> CallIdentity<'c> {
    let node = &nodes[request.node];
    // Unique for each attempt of each call, for longer than any run lasts.
    let holder = (request.call.sequence << 20) | u64::from(request.attempt);
    CallIdentity { load: node.load, name: &node.name, node: request.node, holder }
}
