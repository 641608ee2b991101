//! One run of a simulated world, from start to end, by events on a virtual clock.

mod admission;
mod controllers;
mod event;
mod gate;
mod node;
mod plain_client;
mod tidegate_client;

use std::sync::Arc;

use rand::RngExt;
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
use crate::service::{ArrivalOutcome, FinishedJob, RequestKind, ServiceReply, SimService};
use crate::setup::{ClientSpec, Setup, TimeRange};
use crate::stats::{CallOutcome, RunStats};
use admission::Admission;
use controllers::AttemptResult;
use event::{CallId, CallState, ClientCall, SharedStoreRequest, SimEvent, SimRequest, attempt_report};
use gate::SimGate;
pub(crate) use gate::check_load;
use node::{ClientState, SimNode};
use plain_client::{PlainClient, RetryState};
use tidegate_client::{Effect, TidegateClient};

/// Returns a fixed seed, so that keys hash alike in every run. No attacker chooses colliding keys here.
fn key_seed() -> KeySeed {
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
    /// The controller of each client, or one for all, or none.
    admissions: Vec<Admission<'s>>,
    calls: Slab<CallState>,
    last_call_sequence: u64,
    shared_store: Option<(Arc<Memory>, Delay, SimRng)>,
    pub(crate) stats: RunStats,
}

impl<'s> Simulation<'s> {
    pub(crate) fn new(setup: &'s Setup, seed: u64, trial: u32) -> Self {
        let start = setup.starts_at;
        let mut streams = RngStreams::new(seed, trial);
        let service = SimService::new(&setup.service, start, streams.next_rng());
        let store_rng = streams.next_rng();
        let outbound = setup.policy.as_ref().and_then(|policy| policy.outbound());
        let shared_store = outbound.filter(|_| setup.store.shared).map(|plan| {
            let store = Arc::new(Memory::reproducible(Arc::clone(plan.limits()), Memory::DEFAULT_MAX_BYTES));
            (store, setup.store.latency.unwrap_or(Delay::NONE), store_rng)
        });
        let is_store_immediate = setup.store.latency.is_none() && setup.store.outages.is_empty();
        let new_client = |rng| match &setup.client {
            ClientSpec::Plain(spec) => ClientState::Plain(PlainClient::new(spec, rng)),
            ClientSpec::Tidegate { provider } => {
                let plan = outbound.expect("invariant: reading finds the provider in the policy");
                let store = match &shared_store {
                    Some((store, ..)) => Some(Arc::clone(store)).filter(|_| is_store_immediate),
                    None => Some(Arc::new(Memory::reproducible(Arc::clone(plan.limits()), STORE_BYTES))),
                };
                let provider = &plan.providers()[*provider];
                ClientState::Tidegate(Box::new(TidegateClient::new(plan, provider, store, &key_seed(), rng)))
            }
        };
        let loads = setup.loads.iter().enumerate().flat_map(|load| (0..load.1.clients).map(move |_| load));
        let nodes: Vec<_> = loads.map(|load| SimNode::new(load, start, &mut streams, new_client)).collect();
        let admissions = admission::admissions(setup, nodes.len(), &mut streams);
        let plan = setup.policy.as_ref().map(|policy| &**policy.plan()).filter(|_| setup.gate);
        let mut simulation = Self {
            setup,
            events: EventQueue::new(start),
            end: start + setup.duration,
            service,
            gate: plan.map(|plan| SimGate::new(plan, &setup.loads)),
            nodes,
            admissions,
            calls: Slab::new(),
            last_call_sequence: 0,
            shared_store,
            stats: RunStats::new(setup),
        };
        let changes = setup.service.workers.iter().flat_map(|workers| &workers.0);
        for segment in changes.filter(|segment| segment.end < setup.duration) {
            simulation.events.schedule(start + segment.end, SimEvent::WorkersChange);
        }
        for node in 0..simulation.nodes.len() {
            simulation.schedule_next_call(node);
        }
        simulation
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
        let elapsed = self.events.now.since(self.setup.starts_at);
        elapsed.as_micros() as f64 / self.setup.duration.as_micros().max(1) as f64
    }

    fn handle_event(&mut self, event: SimEvent) {
        let now = self.events.now;
        match event {
            SimEvent::ClientCalls(node) => {
                self.start_call(node);
                if !self.nodes[node].is_serial {
                    self.schedule_next_call(node);
                }
            }
            SimEvent::RequestArrives(request, kind) => self.handle_arrival(request, kind),
            SimEvent::JobFinishes(job) => {
                if let Some(FinishedJob { request, reply }) = self.service.finish(job, now) {
                    self.release_permit(request);
                    self.send(request.node, SimEvent::ReplyArrives(request, reply));
                    self.start_waiting_jobs();
                }
            }
            SimEvent::ReplyArrives(request, reply) if self.is_reply_awaited(request) => match reply {
                ServiceReply::Row { version } => {
                    self.send(request.node, SimEvent::RequestArrives(request, RequestKind::Write { version }));
                }
                reply => self.handle_attempt_end(request.call, &attempt_report(reply)),
            },
            SimEvent::AttemptTimesOut(request) if self.is_reply_awaited(request) => self.handle_timeout(request),
            SimEvent::ReplyArrives(..) | SimEvent::AttemptTimesOut(_) => {}
            SimEvent::CallResumes(id) => {
                let Some(call) = self.call(id) else { return };
                match call.client_call {
                    ClientCall::Plain(_) => self.start_plain_attempt(id),
                    ClientCall::Tidegate(slot) => {
                        let node = call.node;
                        self.with_tidegate_client(node, |client, now| client.enqueue(slot, now));
                    }
                }
            }
            SimEvent::CallExpires(id) => self.expire_call(id),
            SimEvent::AdmissionWakes(index, at) => self.wake_admission(index, at),
            SimEvent::WorkersChange => {
                self.start_waiting_jobs();
                // The oracle knows of it.
                (0..self.admissions.len()).for_each(|index| self.poll_admission(index));
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
                    gate.renew(now);
                }
                self.schedule_renewal();
            }
            SimEvent::StoreRequestArrives(request) => self.handle_store_request(request),
            SimEvent::StoreReplyArrives(request, outcomes) => {
                let SharedStoreRequest { node, waiting_call, batch } = *request;
                self.with_tidegate_client(node, |client, now| {
                    client.handle_store_reply(waiting_call, &batch, outcomes.as_deref(), now);
                });
            }
            SimEvent::StoreNotificationArrives(batch) => {
                if let Some((store, ..)) = &self.shared_store {
                    store.submit(&batch, now);
                }
            }
        }
    }

    fn schedule_next_call(&mut self, node: usize) {
        let now = self.events.now;
        if let Some(at) = self.nodes[node].next_call_at(self.setup, now, self.end) {
            self.events.schedule(at, SimEvent::ClientCalls(node));
        }
    }

    fn start_call(&mut self, node: usize) {
        let now = self.events.now;
        let load = self.nodes[node].load;
        self.stats.record_start(load, now);
        self.last_call_sequence += 1;
        let sequence = self.last_call_sequence;
        let client_call = match &self.nodes[node].client {
            ClientState::Plain(_) => ClientCall::Plain(RetryState::default()),
            ClientState::Tidegate(client) => ClientCall::Tidegate(client.next_slot()),
        };
        let index = self.calls.insert(CallState {
            sequence,
            node,
            started_at: now,
            attempt: 0,
            reply_timeout: Span::MAX,
            conclusive_after: Span::ZERO,
            job: None,
            client_call,
        });
        let id = CallId { index, sequence };
        match &self.nodes[node].client {
            ClientState::Plain(client) if client.pace_delay().is_zero() => self.start_plain_attempt(id),
            ClientState::Plain(client) => {
                self.events.schedule_after(client.pace_delay(), SimEvent::CallResumes(id));
            }
            ClientState::Tidegate(_) => {
                let lane = self.setup.loads[load].lane;
                self.with_tidegate_client(node, |client, now| client.begin(id, lane, now));
            }
        }
    }

    /// Runs one step of a client's state machine by its clock, and applies its effects.
    fn with_tidegate_client(&mut self, node: usize, step: impl FnOnce(&mut TidegateClient<'s>, Time)) {
        let now = self.events.now;
        let SimNode { client, clock, timer_fires_at, .. } = &mut self.nodes[node];
        let ClientState::Tidegate(client) = client else { return };
        step(client, clock.reading_at(now));
        let fires_at = clock.timer_fires_at(client.wake_at, now).max(now + MIN_TIMER_DELAY);
        if fires_at < *timer_fires_at {
            *timer_fires_at = fires_at;
            self.events.schedule(fires_at, SimEvent::ClientWakes(node, fires_at));
        }
        let waiting = client.waiting_calls();
        let mut effects = std::mem::take(&mut client.effects);
        if waiting > 0 {
            self.stats.record(now, |bucket| bucket.waiting = bucket.waiting.max(waiting));
        }
        for effect in effects.drain(..) {
            self.apply_effect(node, effect);
        }
        // Kept to reuse its allocation.
        if let ClientState::Tidegate(client) = &mut self.nodes[node].client {
            client.effects = effects;
        }
    }

    fn apply_effect(&mut self, node: usize, effect: Effect) {
        match effect {
            Effect::Send { id, reply_timeout, conclusive_after } => {
                self.send_attempt(id, reply_timeout, conclusive_after);
            }
            Effect::Resume { id, at } => {
                let at = self.nodes[node].clock.timer_fires_at(at, self.events.now);
                self.events.schedule(at, SimEvent::CallResumes(id));
            }
            Effect::Finish { id, outcome } => self.finish_call(id, outcome),
            Effect::AskStore { slot, ticket, batch } => {
                let request = SharedStoreRequest { node, waiting_call: (slot, ticket), batch };
                self.send_store_message(Box::new(request), SimEvent::StoreRequestArrives);
            }
            Effect::NotifyStore { batch } => {
                if let Some(delay) = self.store_delay() {
                    self.events.schedule_after(delay, SimEvent::StoreNotificationArrives(batch));
                }
            }
        }
    }

    /// Returns the delay of a message to or from the shared store; `None` if it is lost.
    fn store_delay(&mut self) -> Option<Span> {
        let (_, latency, rng) = self.shared_store.as_mut()?;
        let elapsed = self.events.now.since(self.setup.starts_at);
        (!TimeRange::any_contains(&self.setup.store.outages, elapsed)).then(|| latency.sample(rng))
    }

    /// Sends a request to the shared store, or its reply. If the message is lost, the request times out.
    fn send_store_message(
        &mut self,
        request: Box<SharedStoreRequest>,
        arrival: impl FnOnce(Box<SharedStoreRequest>) -> SimEvent,
    ) {
        match self.store_delay() {
            Some(delay) => self.events.schedule_after(delay, arrival(request)),
            None => self.events.schedule_after(STORE_TIMEOUT, SimEvent::StoreReplyArrives(request, None)),
        }
    }

    /// Answers a store request by the store's own clock, which is right.
    fn handle_store_request(&mut self, request: Box<SharedStoreRequest>) {
        let Some((store, ..)) = &self.shared_store else { return };
        let outcomes = Box::new(store.apply_now(&request.batch, self.events.now));
        self.send_store_message(request, |request| SimEvent::StoreReplyArrives(request, Some(outcomes)));
    }

    fn send_attempt(&mut self, id: CallId, reply_timeout: Span, conclusive_after: Span) {
        let call = &mut self.calls[id.index];
        call.attempt += 1;
        (call.reply_timeout, call.conclusive_after, call.job) = (reply_timeout, conclusive_after, None);
        let request = SimRequest { call: id, attempt: call.attempt, node: call.node };
        self.stats.record(self.events.now, |bucket| bucket.attempts += 1);
        if reply_timeout < Span::MAX {
            self.events.schedule_after(reply_timeout, SimEvent::AttemptTimesOut(request));
        }
        let kind = if self.setup.service.versioned { RequestKind::Read } else { RequestKind::Work };
        self.send(request.node, SimEvent::RequestArrives(request, kind));
    }

    fn handle_arrival(&mut self, request: SimRequest, kind: RequestKind) {
        let now = self.events.now;
        self.stats.record_arrival(now);
        if let Some(gate) = &mut self.gate
            && let Err(retry_after) = gate.check(request, now)
        {
            self.stats.record(now, |bucket| bucket.throttled += 1);
            let reply = ServiceReply::Throttled { retry_after };
            return self.send(request.node, SimEvent::ReplyArrives(request, reply));
        }
        if !self.is_reply_awaited(request) {
            self.release_permit(request);
        }
        self.schedule_renewal();
        match self.service.submit(request, kind, now) {
            ArrivalOutcome::Rejected(reply) => {
                if reply != ServiceReply::ConnectionRefused {
                    self.stats.record(now, |bucket| bucket.throttled += 1);
                }
                self.release_permit(request);
                self.send(request.node, SimEvent::ReplyArrives(request, reply));
            }
            ArrivalOutcome::Accepted(job, duration) => {
                let (waiting, working) = (self.service.queued_requests(), self.service.busy_workers);
                self.stats.record(now, |bucket| {
                    bucket.admitted += 1;
                    (bucket.queue, bucket.working) = (bucket.queue.max(waiting), bucket.working.max(working));
                });
                if self.is_reply_awaited(request) {
                    self.calls[request.call.index].job = Some(job);
                }
                if let Some(duration) = duration {
                    self.events.schedule_after(duration, SimEvent::JobFinishes(job));
                }
            }
        }
    }

    fn start_waiting_jobs(&mut self) {
        while let Some((job, duration)) = self.service.start_next(self.events.now) {
            self.events.schedule_after(duration, SimEvent::JobFinishes(job));
        }
    }

    /// Releases the permit of a request at the gate, if it still holds one.
    fn release_permit(&mut self, request: SimRequest) {
        if let Some(gate) = &mut self.gate {
            gate.release(request, self.events.now);
        }
    }

    /// Schedules the next renewal, so that permits outlive their lease while they are held.
    fn schedule_renewal(&mut self) {
        if let Some(gate) = self.gate.as_mut().filter(|gate| gate.has_permits() && !gate.is_renewal_scheduled) {
            gate.is_renewal_scheduled = true;
            self.events.schedule_after(Concurrency::RENEW_INTERVAL, SimEvent::GateRenewsPermits);
        }
    }

    /// Sends a message between a client and the service. It arrives after the network's delay, unless it is lost.
    fn send(&mut self, node: usize, arrival: SimEvent) {
        let elapsed = self.events.now.since(self.setup.starts_at);
        let network = &self.setup.network;
        let rng = &mut self.nodes[node].network_rng;
        let delay = network.delay.sample(rng);
        let is_lost = rng.random::<f64>() < network.loss.value_at(elapsed);
        if !is_lost && !TimeRange::any_contains(&network.partitions, elapsed) {
            self.events.schedule_after(delay, arrival);
        }
    }

    /// Returns a call; `None` if it has ended.
    fn call(&self, id: CallId) -> Option<&CallState> {
        self.calls.get(id.index).filter(|call| call.sequence == id.sequence)
    }

    /// Returns true if the client still waits for a reply to this request.
    fn is_reply_awaited(&self, request: SimRequest) -> bool {
        self.call(request.call).is_some_and(|call| call.attempt == request.attempt && call.reply_timeout > Span::ZERO)
    }

    fn handle_timeout(&mut self, request: SimRequest) {
        // The gate sees that its client is gone, even if the service behind it doesn't.
        self.release_permit(request);
        let call = &self.calls[request.call.index];
        let class = if call.reply_timeout < call.conclusive_after { Class::Cancelled } else { Class::Transient };
        if let Some(job) = call.job {
            self.service.cancel(job);
            self.start_waiting_jobs();
        }
        let report = AttemptReport::new(class, Delivery::Unknown);
        let report = AttemptReport { is_repeatable: true, is_abandoned: true, ..report };
        self.handle_attempt_end(request.call, &report);
    }

    fn handle_attempt_end(&mut self, id: CallId, report: &AttemptReport) {
        let now = self.events.now;
        self.stats.record_attempt_end(report.verdict.class == Class::Success, now);
        let admission = self.admission_of(self.calls[id.index].node);
        let call = &mut self.calls[id.index];
        // Later replies and timeouts of this attempt are ignored.
        call.reply_timeout = Span::ZERO;
        let node = call.node;
        match &mut call.client_call {
            ClientCall::Tidegate(slot) => {
                let slot = *slot;
                self.with_tidegate_client(node, |client, now| client.handle_reply(slot, report, now));
            }
            ClientCall::Plain(retry) => {
                let ClientState::Plain(client) = &mut self.nodes[node].client else { return };
                let time_left = client.time_left(now.since(call.started_at));
                let admitted = retry.admitted;
                match client.end_attempt(retry, report, time_left) {
                    Some(wait) => self.events.schedule_after(wait, SimEvent::CallResumes(id)),
                    None => self.finish_call(id, CallOutcome::of_last_reply(report.verdict.class)),
                }
                if let Some(index) = admission {
                    self.admissions[index].record_end(admitted, AttemptResult::of(report), now);
                    self.poll_admission(index);
                }
            }
        }
    }

    fn finish_call(&mut self, id: CallId, outcome: CallOutcome) {
        let CallState { node, started_at, .. } = self.calls.remove(id.index);
        self.stats.record_end((node, self.nodes[node].load), started_at, outcome, self.events.now);
        if self.nodes[node].is_serial {
            self.schedule_next_call(node);
        }
    }
}
