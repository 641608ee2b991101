//! A run: one world, from its start to its end, by events on a virtual clock.

mod event;
mod gate;
mod machine;
mod node;
mod plain;

use std::sync::Arc;

use rand::RngExt;
use slab::Slab;
use tidegate_core::call::Reply;
use tidegate_core::concurrency::Concurrency;
use tidegate_core::retry::Reach;
use tidegate_core::{Class, Span, Time};
use tidegate_policy::KeySeed;
use tidegate_store::{Immediate, Memory, Store};

use crate::agenda::Agenda;
use crate::delay::Delay;
use crate::random::{Stream, Streams};
use crate::service::{Answer, Asks, Finished, JobId, Service, Taken};
use crate::setup::{ClientSpec, Setup, Stretch};
use crate::tally::{End, Tally};
use event::{CallId, Ended, Event, Live, Mind, Question, Request, ended_by};
use gate::{Caller, Gate};
pub(crate) use gate::{Undecidable, action_of};
use machine::{Effect, Hall};
use node::{Node, Ways};
use plain::{Plain, Tried};

/// Hashes keys alike in every run: what is simulated has no strangers who could choose keys that collide.
pub(crate) fn key_seed() -> KeySeed {
    KeySeed::new([0; 16])
}

/// The bytes of each store of limits.
const STORE_BYTES: usize = 1 << 20;
/// How long a store that can't be reached is waited for.
const STORE_TIMEOUT: Span = Span::from_secs(1);

/// Less than this isn't waited for, as in production.
const SHORTEST: Span = Span::from_micros(100);

/// A world under way.
pub(crate) struct World<'s> {
    setup: &'s Setup,
    agenda: Agenda<Event>,
    end: Time,
    service: Service<'s, Request>,
    gate: Option<Gate<'s>>,
    nodes: Vec<Node<'s>>,
    calls: Slab<Live>,
    numbers: u64,
    shared: Option<(Arc<Memory>, Delay, Stream)>,
    tally: Tally,
    effects: Vec<Effect>,
}

impl<'s> World<'s> {
    pub(crate) fn new(setup: &'s Setup, seed: u64, trial: u32) -> Self {
        let began = setup.starts_at;
        let mut streams = Streams::new(seed, trial);
        let service = Service::new(&setup.service, began, streams.next());
        let store_rng = streams.next();
        let outbound = setup.policy.as_ref().and_then(|policy| policy.outbound());
        let shared = outbound.filter(|_| setup.store.shared).map(|plan| {
            let store = Arc::new(Memory::reproducible(Arc::clone(plan.limits()), Memory::MAX_BYTES));
            (store, setup.store.latency.unwrap_or(Delay::NONE), store_rng)
        });
        let at_once = setup.store.latency.is_none() && setup.store.outages.is_empty();
        let mut nodes = Vec::new();
        for (index, load) in setup.loads.iter().enumerate() {
            for number in 0..load.clients {
                let mut node = Node::new(index, load, number, began, &mut streams);
                let rng = streams.next();
                node.ways = match &setup.client {
                    ClientSpec::Plain(spec) => Ways::Plain(Plain::new(spec, rng)),
                    ClientSpec::Tidegate { provider } => {
                        let plan = outbound.expect("invariant: reading finds the provider in the policy");
                        let own = || Arc::new(Memory::reproducible(Arc::clone(plan.limits()), STORE_BYTES));
                        let store = match &shared {
                            Some((store, ..)) => Some(Arc::clone(store)).filter(|_| at_once),
                            None => Some(own()),
                        };
                        let provider = &plan.providers()[*provider];
                        Ways::Machine(Box::new(Hall::new(plan, provider, store, &key_seed(), rng)))
                    }
                };
                nodes.push(node);
            }
        }
        let plan = setup.policy.as_ref().map(|policy| &**policy.plan()).filter(|_| setup.gate);
        let gate = plan.map(|plan| Gate::new(plan, &setup.loads, key_seed()));
        let mut world = Self {
            setup,
            agenda: Agenda::new(began),
            end: began + setup.duration,
            service,
            gate,
            nodes,
            calls: Slab::new(),
            numbers: 0,
            shared,
            tally: Tally::new(setup),
            effects: Vec::new(),
        };
        for node in 0..world.nodes.len() {
            world.call_next(node);
        }
        world
    }

    /// Lets the world go on until this many more events have happened; whether there is more to come.
    pub(crate) fn run(&mut self, events: u64) -> bool {
        for _ in 0..events {
            let Some(event) = self.agenda.next(self.end) else { return false };
            self.happens(event);
        }
        true
    }

    /// How much of its time is over, as a share.
    pub(crate) fn progress(&self) -> f64 {
        let elapsed = self.agenda.now().since(self.setup.starts_at);
        elapsed.as_micros() as f64 / self.setup.duration.as_micros().max(1) as f64
    }

    pub(crate) fn into_tally(self) -> Tally {
        self.tally
    }

    fn happens(&mut self, event: Event) {
        let now = self.agenda.now();
        match event {
            Event::Calls(node) => {
                self.begin(node);
                if !self.nodes[node].is_serial() {
                    self.call_next(node);
                }
            }
            Event::Arrives(request, asks) => self.arrives(request, asks),
            Event::Served(job) => {
                if let Some(Finished { request, answer, next }) = self.service.finish(job, now) {
                    self.release(request);
                    self.answer(request, answer);
                    self.works_on(next);
                }
            }
            Event::Replied(request, Answer::Row { version }) => {
                if self.is_awaited(request) {
                    self.transmit(request, Asks::Write { version });
                }
            }
            Event::Replied(request, answer) => {
                if self.is_awaited(request) {
                    self.ended(request.call, ended_by(answer));
                }
            }
            Event::TimesOut(request) => {
                if self.is_awaited(request) {
                    self.times_out(request);
                }
            }
            Event::Again(call) => {
                let Some(live) = self.calls.get(call.index).filter(|live| live.number == call.number) else { return };
                match live.mind {
                    Mind::Plain(_) => self.try_plain(call),
                    Mind::Machine(place) => {
                        let node = live.node;
                        self.machine(node, |hall, now, effects| hall.start(place, now, effects));
                    }
                }
            }
            Event::Wakes(node, at) => {
                if self.nodes[node].rings_at == at {
                    self.nodes[node].rings_at = Time::NEVER;
                    self.machine(node, Hall::wake);
                }
            }
            Event::Renews => {
                if let Some(gate) = &mut self.gate {
                    gate.renews = false;
                    gate.renew(|node| &self.nodes[node].name, now);
                }
                self.renew_later();
            }
            Event::StoreHears(question) => self.store_hears(question),
            Event::StoreAnswers(question, outcomes) => {
                let Question { node, asker, batch } = *question;
                self.machine(node, |hall, now, effects| {
                    hall.answered(asker, &batch, outcomes.as_deref(), now, effects);
                });
            }
            Event::StoreIsTold(batch) => {
                if let Some((store, ..)) = &self.shared {
                    store.tell(&batch, now);
                }
            }
        }
    }

    /// Enters when a client calls next, if it does.
    fn call_next(&mut self, node: usize) {
        let now = self.agenda.now();
        if let Some(at) = self.nodes[node].next_call(self.setup, now, self.end) {
            self.agenda.at(at, Event::Calls(node));
        }
    }

    fn begin(&mut self, node: usize) {
        let now = self.agenda.now();
        self.numbers += 1;
        self.tally.began(self.nodes[node].load, now);
        let mind = match &self.nodes[node].ways {
            Ways::Machine(_) => Mind::Machine(usize::MAX),
            Ways::Plain(_) | Ways::None => Mind::Plain(Tried::default()),
        };
        let live = Live {
            number: self.numbers,
            node,
            begun_at: now,
            attempt: 0,
            patience: Span::MAX,
            enough: Span::ZERO,
            job: None,
            mind,
        };
        let id = CallId { index: self.calls.insert(live), number: self.numbers };
        if let Ways::Plain(plain) = &self.nodes[node].ways {
            let pause = plain.pause();
            return if pause.is_zero() { self.try_plain(id) } else { self.agenda.at(now + pause, Event::Again(id)) };
        }
        let lane = self.setup.loads[self.nodes[node].load].lane;
        let calls = &mut self.calls;
        let (now, nodes, effects) = (self.nodes[node].clock.shows(now), &mut self.nodes, &mut self.effects);
        if let Ways::Machine(hall) = &mut nodes[node].ways {
            let place = hall.begin(id, lane, now, effects);
            calls[id.index].mind = Mind::Machine(place);
        }
        self.settle(node);
    }

    /// Lets a client's machine make its step, and does what comes of it.
    fn machine(&mut self, node: usize, step: impl FnOnce(&mut Hall<'s>, Time, &mut Vec<Effect>)) {
        let now = self.nodes[node].clock.shows(self.agenda.now());
        if let Ways::Machine(hall) = &mut self.nodes[node].ways {
            step(hall, now, &mut self.effects);
        }
        self.settle(node);
    }

    fn settle(&mut self, node: usize) {
        let now = self.agenda.now();
        if let Ways::Machine(hall) = &self.nodes[node].ways {
            let (wakes_at, waiting) = (hall.wakes_at, hall.waiting());
            let rings_at = self.nodes[node].clock.rings(wakes_at, now).max(now + SHORTEST);
            if rings_at < self.nodes[node].rings_at {
                self.nodes[node].rings_at = rings_at;
                self.agenda.at(rings_at, Event::Wakes(node, rings_at));
            }
            if waiting > 0 {
                self.tally.note(now, |bucket| bucket.waiting = bucket.waiting.max(waiting));
            }
        }
        let mut effects = std::mem::take(&mut self.effects);
        for effect in effects.drain(..) {
            match effect {
                Effect::Send { id, patience, enough } => self.send(id, patience, enough),
                Effect::Again { id, at } => {
                    let at = self.nodes[node].clock.rings(at, now);
                    self.agenda.at(at, Event::Again(id));
                }
                Effect::Ends { id, end } => self.over(id, end),
                Effect::Ask { place, ticket, batch } => {
                    let question = Question { node, asker: (place, ticket), batch };
                    match self.store_way(now) {
                        Some(way) => self.agenda.at(now + way, Event::StoreHears(Box::new(question))),
                        None => self.agenda.at(now + STORE_TIMEOUT, Event::StoreAnswers(Box::new(question), None)),
                    }
                }
                Effect::Tell { batch } => {
                    if let Some(way) = self.store_way(now) {
                        self.agenda.at(now + way, Event::StoreIsTold(batch));
                    }
                }
            }
        }
        // What was allocated serves the next.
        self.effects = effects;
    }

    /// How long a message to or from the shared store takes; `None` if it is lost.
    fn store_way(&mut self, now: Time) -> Option<Span> {
        let (_, latency, rng) = self.shared.as_mut()?;
        let away = Stretch::any_holds(&self.setup.store.outages, now.since(self.setup.starts_at));
        (!away).then(|| latency.sample(rng))
    }

    /// By its own clock, which is right.
    fn store_hears(&mut self, question: Box<Question>) {
        let now = self.agenda.now();
        let Some((store, ..)) = &self.shared else { return };
        let outcomes = store.apply_now(&question.batch, now);
        let way = self.store_way(now);
        match way {
            Some(way) => self.agenda.at(now + way, Event::StoreAnswers(question, Some(Box::new(outcomes)))),
            None => self.agenda.at(now + STORE_TIMEOUT, Event::StoreAnswers(question, None)),
        }
    }

    fn try_plain(&mut self, id: CallId) {
        let node = self.calls[id.index].node;
        let Ways::Plain(plain) = &mut self.nodes[node].ways else { return };
        let Mind::Plain(tried) = &mut self.calls[id.index].mind else { return };
        if plain.sends(tried) {
            let patience = plain.patience().unwrap_or(Span::MAX);
            self.send(id, patience, Span::ZERO);
        } else {
            self.over(id, End::Declined);
        }
    }

    /// Sends a request: another attempt of a call.
    fn send(&mut self, id: CallId, patience: Span, enough: Span) {
        let now = self.agenda.now();
        let live = &mut self.calls[id.index];
        live.attempt += 1;
        (live.patience, live.enough, live.job) = (patience, enough, None);
        let request = Request { call: id, attempt: live.attempt, node: live.node };
        self.tally.note(now, |bucket| bucket.attempts += 1);
        if patience < Span::MAX {
            self.agenda.at(now + patience, Event::TimesOut(request));
        }
        self.transmit(request, if self.setup.service.versioned { Asks::Read } else { Asks::Work });
    }

    fn transmit(&mut self, request: Request, asks: Asks) {
        if let Some(way) = self.way(request.node) {
            self.agenda.at(self.agenda.now() + way, Event::Arrives(request, asks));
        }
    }

    fn answer(&mut self, request: Request, answer: Answer) {
        if let Some(way) = self.way(request.node) {
            self.agenda.at(self.agenda.now() + way, Event::Replied(request, answer));
        }
    }

    /// How long a message takes between a client and the service; `None` if it is lost.
    fn way(&mut self, node: usize) -> Option<Span> {
        let elapsed = self.agenda.now().since(self.setup.starts_at);
        let network = &self.setup.network;
        let rng = &mut self.nodes[node].network_rng;
        let way = network.delay.sample(rng);
        let lost = rng.random::<f64>() < network.loss.at(elapsed);
        let cut = Stretch::any_holds(&network.partitions, elapsed);
        (!lost && !cut).then_some(way)
    }

    fn arrives(&mut self, request: Request, asks: Asks) {
        let now = self.agenda.now();
        self.tally.arrived(now);
        if let Some(gate) = &mut self.gate
            && let Err(retry_after) = gate.check(caller(&self.nodes, request), now)
        {
            self.tally.note(now, |bucket| bucket.throttled += 1);
            return self.answer(request, Answer::Throttled { retry_after });
        }
        if !self.is_awaited(request) {
            self.release(request);
        }
        self.renew_later();
        match self.service.arrive(request, asks, now) {
            Taken::Answered(answer) => {
                if answer != Answer::Refused {
                    self.tally.note(now, |bucket| bucket.throttled += 1);
                }
                self.release(request);
                self.answer(request, answer);
            }
            Taken::Started(job, length) => {
                self.taken_on(request, job);
                self.works_on(Some((job, length)));
            }
            Taken::Queued(job) => self.taken_on(request, job),
        }
    }

    fn taken_on(&mut self, request: Request, job: JobId) {
        let (waiting, working) = (self.service.waiting(), self.service.working());
        self.tally.note(self.agenda.now(), |bucket| {
            bucket.admitted += 1;
            (bucket.queue, bucket.working) = (bucket.queue.max(waiting), bucket.working.max(working));
        });
        if self.is_awaited(request) {
            self.calls[request.call.index].job = Some(job);
        }
    }

    fn works_on(&mut self, started: Option<(JobId, Span)>) {
        if let Some((job, length)) = started {
            self.agenda.at(self.agenda.now() + length, Event::Served(job));
        }
    }

    /// Gives back what a request holds at the gate, if it still does.
    fn release(&mut self, request: Request) {
        if let Some(gate) = &mut self.gate {
            gate.release(caller(&self.nodes, request), self.agenda.now());
        }
    }

    /// Sees to it that permits outlive their lease for as long as they are held.
    fn renew_later(&mut self) {
        if let Some(gate) = self.gate.as_mut().filter(|gate| gate.holds() && !gate.renews) {
            gate.renews = true;
            self.agenda.at(self.agenda.now() + Concurrency::RENEW, Event::Renews);
        }
    }

    /// Whether a reply to it would still be taken.
    fn is_awaited(&self, request: Request) -> bool {
        let live = self.calls.get(request.call.index).filter(|live| live.number == request.call.number);
        live.is_some_and(|live| live.attempt == request.attempt && live.patience > Span::ZERO)
    }

    fn times_out(&mut self, request: Request) {
        // The gate learns that its client is gone, whether or not the service behind it does.
        self.release(request);
        let live = &self.calls[request.call.index];
        let (job, patience, enough) = (live.job, live.patience, live.enough);
        if let Some(job) = job {
            let next = self.service.abandon(job);
            self.works_on(next);
        }
        let class = if patience < enough { Class::Cancelled } else { Class::Transient };
        self.ended(request.call, Ended { class, reach: Reach::Unknown, retry_after: None });
    }

    /// An attempt has ended.
    fn ended(&mut self, id: CallId, ended: Ended) {
        let live = &mut self.calls[id.index];
        // Nothing that belongs to it is awaited any more.
        live.patience = Span::ZERO;
        let node = live.node;
        match &mut live.mind {
            Mind::Machine(place) => {
                let (place, reply) = (
                    *place,
                    Reply { repeatable: true, retry_after: ended.retry_after, ..Reply::of(ended.class, ended.reach) },
                );
                self.machine(node, |hall, now, effects| hall.replied(place, &reply, now, effects));
            }
            Mind::Plain(tried) => {
                let Ways::Plain(plain) = &mut self.nodes[node].ways else { return };
                plain.ended(ended.class);
                if ended.class == Class::Success {
                    return self.over(id, End::Succeeded);
                }
                match plain.again(tried, ended.retry_after) {
                    Some(wait) => self.agenda.at(self.agenda.now() + wait, Event::Again(id)),
                    None => {
                        let refused = ended.class == Class::Throttled;
                        self.over(id, if refused { End::Refused } else { End::Failed });
                    }
                }
            }
        }
    }

    fn over(&mut self, id: CallId, end: End) {
        let live = self.calls.remove(id.index);
        let node = live.node;
        self.tally.ended(self.nodes[node].load, live.begun_at, end, self.agenda.now());
        if self.nodes[node].is_serial() {
            self.call_next(node);
        }
    }
}

fn caller<'c>(nodes: &'c [Node<'_>], request: Request) -> Caller<'c> {
    let node = &nodes[request.node];
    // Distinct for each attempt of each call for longer than any run lasts.
    let holder = (request.call.number << 20) | u64::from(request.attempt);
    Caller { load: node.load, name: &node.name, node: request.node, holder }
}
