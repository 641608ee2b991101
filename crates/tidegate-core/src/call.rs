//! One outbound call, from its start to its end.
//!
//! ```text
//! start ── breaker ── queue ── turn ── ask ── decided ── breaker ── send ── replied ── finish
//!   ▲                   ▲               │ refused │                              │
//!   │                   └───────────────┴─────────┘                              │
//!   └────────────────────────────── sleep (retry) ◄──────────────────────────────┘
//! ```
//!
//! The breaker is looked at early, so that nobody queues in vain, and taken late, so that no probe is held while
//! waiting. What changes for all calls of a provider in this process is on its [`Desk`]; what a store must change is a
//! [`Batch`]. A driver does what a [`Step`] says and reports back; it judges nothing itself.

mod desk;
mod hedge;
mod remainder;
mod rules;
mod step;

pub use desk::{Desk, Orders};
use rand_core::Rng;
pub use remainder::Remainder;
pub use rules::{Ceiling, LaneRules, MAX_LEAD, Measure, Rules};
pub use step::{Failure, Reply, Step};

use crate::breaker::BreakerPermit;
use crate::lanes::{Lane, Scope, Ticket};
use crate::retry::{Attempt, Reach, Tries};
use crate::{Batch, Class, LimitId, LimitKind, Limits, MAX_COST, Op, Outcome, Outcomes, Pool, Span, Time, Verb};

/// How long a credential that isn't accepted is left out.
pub const DISABLED: Span = Span::from_secs(300);

/// How long a credential that was refused isn't asked for at the least.
const ASKED_AGAIN: Span = Span::from_millis(1);

/// Where a call stands.
#[derive(Debug)]
enum Stage {
    Idle,
    Queued(Ticket),
    /// The store was asked for this credential.
    Asking(Ticket, usize),
    Sent(Sent),
    /// Its last reply is there, to a request with this credential, and still to be read.
    Streaming(Lane, usize),
}

/// A request that is under way.
#[derive(Debug)]
struct Sent {
    credential: usize,
    at: Time,
    charged_at: Time,
    counted_at: Time,
    lane: Lane,
    permit: BreakerPermit,
    generation: u32,
    /// How many were under way when it was sent, itself included.
    in_flight: u32,
}

/// One call to a provider.
#[derive(Debug)]
pub struct Call {
    lane: Lane,
    /// The lane by whose rules it is tried again.
    began_in: Lane,
    /// The lane whose limits it was last charged for.
    charged: Lane,
    cost: u64,
    deadline: Time,
    began_at: Time,
    queued_at: Time,
    /// How it fails at its deadline, if it waits for what may come before although nothing says so.
    hopes: Option<Failure>,
    tries: Tries,
    stage: Stage,
    requests: u32,
    /// When its last request was charged, and when windows counted it, as far as its end has told.
    charged_at: Time,
    counted_at: Time,
    renewed: bool,
    /// Whether it holds a retry of the budget that wasn't sent yet.
    retries: bool,
    /// Whether it is a second request beside another, which waits for nothing.
    hedges: bool,
}

impl Call {
    /// A call of `cost` that begins `now` and must have its reply by `deadline`, or within its lane's time-out.
    pub fn new(rules: &Rules, lane: Lane, cost: u64, deadline: Option<Time>, now: Time) -> Self {
        let rules = &rules.lane_rules[lane as usize];
        let deadline = deadline.unwrap_or(now + rules.timeout);
        Self {
            lane,
            began_in: lane,
            charged: lane,
            cost: cost.min(MAX_COST),
            deadline,
            began_at: now,
            queued_at: now,
            hopes: None,
            tries: Tries::new(deadline),
            stage: Stage::Idle,
            requests: 0,
            charged_at: Time::ZERO,
            counted_at: Time::ZERO,
            renewed: false,
            retries: false,
            hedges: false,
        }
    }

    /// By when it must have its reply.
    pub fn deadline(&self) -> Time {
        self.deadline
    }

    /// How urgent it is.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// How many requests were sent, hedges not counted.
    pub fn requests(&self) -> u32 {
        self.requests
    }

    /// Since when it is under way.
    pub fn began_at(&self) -> Time {
        self.began_at
    }

    /// Its place in the queue, while it is queued or asks.
    pub fn ticket(&self) -> Option<Ticket> {
        match self.stage {
            Stage::Queued(ticket) | Stage::Asking(ticket, _) => Some(ticket),
            Stage::Idle | Stage::Sent(_) | Stage::Streaming(..) => None,
        }
    }

    /// Enters the queue, at first or for another attempt.
    pub fn start(&mut self, desk: &mut Desk, now: Time) -> Step {
        desk.orders.begin();
        if let Err(refusal) = desk.breaker.peek(now) {
            return self.fail(Failure::Unavailable(refusal), desk);
        }
        if now >= self.deadline {
            return self.fail(Failure::DeadlineExceeded, desk);
        }
        let until = desk.lanes.paused_until(self.lane);
        if until >= self.deadline {
            return self.fail(Failure::Resting { until }, desk);
        }
        if let Some(failure) = self.in_vain(desk, now) {
            return self.fail(failure, desk);
        }
        match desk.lanes.enqueue(self.lane, self.cost, self.deadline, now) {
            Ok(ticket) => {
                (self.stage, self.queued_at, self.hopes) = (Stage::Queued(ticket), now, None);
                Step::Queue
            }
            Err(full) => self.fail(Failure::QueueFull(full), desk),
        }
    }

    /// Why it would wait in vain, if that is certain: what its turn would tell it, told before it queues. Only moments
    /// that can't come earlier count: the end of a closing, or of the period of a quota that counts calls.
    fn in_vain(&self, desk: &mut Desk, now: Time) -> Option<Failure> {
        let too_late = |until: &Time| *until >= self.deadline;
        let closed = desk.pool.all_closed_until(now).filter(too_late);
        closed.map(|earliest| no_credential(&desk.pool, earliest)).or_else(|| {
            let (limit, resets_at) = desk.lanes.spent(self.lane, self.cost, now)?;
            too_late(&resets_at).then_some(Failure::QuotaSpent { limit, resets_at })
        })
    }

    /// The lanes have named it: asks for the first credential that isn't known to be cooling or busy.
    pub fn turn(&mut self, rules: &Rules, desk: &mut Desk, now: Time, rng: &mut impl Rng) -> Step {
        desk.orders.begin();
        let Stage::Queued(ticket) = self.stage else { return Step::Queue };
        if let Err(refusal) = desk.breaker.peek(now) {
            return self.fail(Failure::Unavailable(refusal), desk);
        }
        if self.comes_too_late(desk, now) {
            return self.fail(Failure::DeadlineExceeded, desk);
        }
        if let Some(earliest) = desk.pace.as_ref().map(|pace| pace.next_at(now)).filter(|next_at| *next_at > now) {
            self.hopes = None;
            return self.wait(earliest, Scope::Provider, Failure::Paced { earliest }, None, desk, now);
        }
        match desk.next_credential(self.cost, now, rng) {
            Some(credential) => {
                (self.stage, self.charged) = (Stage::Asking(ticket, credential), self.lane);
                self.fill(&mut desk.orders.ask, rules, credential, Verb::Take);
                desk.orders.ask.set_lead(desk.lead);
                Step::Ask
            }
            None => {
                let earliest = desk.pool.earliest();
                let failure = no_credential(&desk.pool, earliest);
                // Nobody knows when the first of its calls ends.
                self.hopes = desk.pool.is_busy().then_some(Failure::DeadlineExceeded);
                self.wait(earliest, Scope::Provider, failure, None, desk, now)
            }
        }
    }

    /// Whether it has waited for so long that its reply would hardly come in time, while others wait whose could: where
    /// more is asked for than a provider grants, all its capacity would go to calls that time out. Half of its time is
    /// enough for any call.
    fn comes_too_late(&self, desk: &Desk, now: Time) -> bool {
        if now <= self.queued_at {
            return false;
        }
        let needed = desk.transit.ample().min(Span::from_micros(self.deadline.since(self.began_at).as_micros() / 2));
        now + needed > self.deadline && Lane::ALL.iter().map(|lane| desk.lanes.waiting(*lane)).sum::<usize>() > 1
    }

    /// The lanes say that its deadline has passed, and it has left them.
    pub fn expired(&mut self, desk: &mut Desk) -> Step {
        desk.orders.begin();
        self.stage = Stage::Idle;
        self.fail(self.hopes.unwrap_or(Failure::DeadlineExceeded), desk)
    }

    /// The store has answered what [`Orders::ask`] said after the call's last step.
    pub fn decided(
        &mut self,
        rules: &Rules,
        limits: &Limits,
        desk: &mut Desk,
        outcomes: &Outcomes,
        now: Time,
        rng: &mut impl Rng,
    ) -> Step {
        desk.orders.begin();
        let Stage::Asking(ticket, credential) = self.stage else { return Step::Queue };
        let refused =
            desk.orders.ask.ops().iter().zip(outcomes.list()).filter(|(_, outcome)| outcome.verdict.refuses());
        // What concerns the credential alone is another's chance; everything else concerns this call whoever it asks for.
        let is_shared = |op: &Op| op.key == rules.key;
        let Some((op, outcome)) = refused.max_by_key(|(op, outcome)| (is_shared(op), outcome.retry_at)) else {
            return self.granted(ticket, credential, rules, desk, outcomes, now);
        };
        let kind = |op: &Op| limits.get(op.limit).map(crate::Limit::kind);
        let certain = |op: &Op, outcome: &Outcome| match kind(op) {
            Some(LimitKind::Cooldown(cooldown)) => cooldown.is_closing(outcome.retry_at, outcomes.now()),
            Some(LimitKind::Quota(_)) => rules.measure(op.limit) == Some(Measure::Calls),
            _ => false,
        };
        let until = outcome.retry_at + desk.apart(rules, kind(op));
        if !is_shared(op) {
            // At least a little, so that a store whose clock is behind isn't asked again and again.
            let until = until.max(now + ASKED_AGAIN);
            if certain(op, outcome) {
                desk.pool.closed_until(credential, until, now);
            } else {
                desk.pool.not_before(credential, until, now);
            }
            if let Some(LimitKind::Quota(_)) = kind(op) {
                desk.pool.spent_until(credential, op.limit, until);
            }
            self.stage = Stage::Queued(ticket);
            return self.turn(rules, desk, now, rng);
        }
        let own = rules.lane_ceilings[self.charged as usize].iter().any(|ceiling| ceiling.limit == op.limit);
        let failure = match kind(op) {
            Some(LimitKind::Quota(_)) => Failure::QuotaSpent { limit: op.limit, resets_at: until },
            _ => Failure::RateLimited { limit: op.limit, earliest: until },
        };
        self.stage = Stage::Queued(ticket);
        let spent = certain(op, outcome).then_some(op.limit);
        // A call under way may cost less than was reserved for it.
        let hopes = rules.measure(op.limit) == Some(Measure::Cost) && !until.is_never() && desk.in_flight() > 0;
        let hoped_for = Failure::RateLimited { limit: op.limit, earliest: until };
        self.hopes = (hopes && until >= self.deadline).then_some(hoped_for);
        self.wait(until, if own { Scope::Lane } else { Scope::Provider }, failure, spent, desk, now)
    }

    /// The store gave no answer: it broke.
    pub fn undecided(&mut self, desk: &mut Desk) {
        self.leave(desk);
    }

    fn granted(
        &mut self,
        ticket: Ticket,
        credential: usize,
        rules: &Rules,
        desk: &mut Desk,
        outcomes: &Outcomes,
        now: Time,
    ) -> Step {
        let charged_at = outcomes.now();
        let counted_at = charged_at + desk.lead;
        let Some(lane) = desk.lanes.granted(ticket, now) else {
            self.stage = Stage::Idle;
            self.correct(rules, desk, credential, Verb::Refund, charged_at, counted_at);
            return self.fail(Failure::DeadlineExceeded, desk);
        };
        let permit = match desk.breaker.take(now) {
            Ok(permit) => permit,
            Err(refusal) => {
                desk.lanes.ended(lane);
                desk.lanes.poke();
                self.stage = Stage::Idle;
                self.correct(rules, desk, credential, Verb::Refund, charged_at, counted_at);
                return self.fail(Failure::Unavailable(refusal), desk);
            }
        };
        desk.pool.used(credential);
        if let Some(allowances) = desk.allowances.get_mut(credential) {
            allowances.sent(self.cost);
        }
        desk.transit.granted(now);
        if let Some(pace) = &mut desk.pace {
            pace.sent(now);
        }
        if self.requests == 0 {
            desk.budget.record_first_try();
        }
        self.retries = false;
        self.requests += 1;
        let generation = outcomes.list().first().map_or(0, |outcome| outcome.generation);
        self.stage = Stage::Sent(Sent {
            credential,
            at: now,
            charged_at,
            counted_at,
            lane,
            permit,
            generation,
            in_flight: desk.in_flight(),
        });
        Step::Send { credential }
    }

    /// The attempt has ended.
    pub fn replied(&mut self, rules: &Rules, desk: &mut Desk, reply: &Reply, now: Time, rng: &mut impl Rng) -> Step {
        desk.orders.begin();
        let Some(sent) = self.take_sent() else { return Step::Finish(Ok(())) };
        let credential = sent.credential;
        self.settle(rules, desk, sent, reply, now, rng);
        if self.renews(rules, reply) {
            self.renewed = true;
            return Step::Renew { credential };
        }
        if reply.class == Class::Cancelled && now >= self.deadline {
            return Step::Finish(Err(Failure::DeadlineExceeded));
        }
        if matches!(reply.class, Class::Success | Class::Permanent | Class::Auth | Class::Cancelled) {
            return Step::Finish(Ok(()));
        }
        let attempt = Attempt {
            class: reply.class,
            repeatable: reply.repeatable,
            unreplayable: reply.unreplayable,
            stop: reply.stop,
            retry_after: reply.retry_after,
            other_credential: desk.pool.next(now, rng).is_some_and(|other| other != credential),
        };
        let retry = &rules.lane_rules[self.began_in as usize].retry;
        match self.tries.after(retry, &attempt, Some(&desk.budget), now, rng) {
            Ok(at) => {
                self.retries = reply.class == Class::Transient;
                // Nobody reads on.
                self.ended(desk);
                Step::Sleep(at)
            }
            Err(why) => Step::Finish(Err(Failure::GaveUp(why))),
        }
    }

    /// Whether the reply asks for another login, and the request can be sent again after it.
    fn renews(&self, rules: &Rules, reply: &Reply) -> bool {
        reply.class == Class::Auth && rules.renews && !self.renewed && reply.unreplayable.is_none()
    }

    /// The login that [`Step::Renew`] asked for has failed.
    pub fn not_renewed(&mut self, rules: &Rules, desk: &mut Desk, credential: usize, now: Time) {
        desk.orders.begin();
        disable(rules, desk, credential, now);
    }

    /// Nobody reads its last reply on.
    fn ended(&mut self, desk: &mut Desk) {
        if let Stage::Streaming(lane, credential) = self.stage {
            desk.ended(lane, credential);
            self.stage = Stage::Idle;
        }
    }

    /// Somebody more urgent waits for it too: it moves up to their lane, unless it is sent already.
    pub fn raise(&mut self, lane: Lane, desk: &mut Desk, now: Time) {
        match self.stage {
            Stage::Idle => self.lane = self.lane.max(lane),
            Stage::Queued(ticket) | Stage::Asking(ticket, _) => {
                if desk.lanes.raise(ticket, lane, now) == Ok(true) {
                    self.lane = lane;
                }
            }
            Stage::Sent(_) | Stage::Streaming(..) => {}
        }
    }

    /// Nobody waits for it any more. If its request was sent, which `reach` tells of one that may be sent, it stays
    /// charged; otherwise all that it holds goes back.
    pub fn abandoned(&mut self, rules: &Rules, desk: &mut Desk, reach: Reach, now: Time, rng: &mut impl Rng) {
        desk.orders.begin();
        self.leave(desk);
        self.ended(desk);
        if let Some(sent) = self.take_sent() {
            self.settle(rules, desk, sent, &Reply::of(Class::Cancelled, reach), now, rng);
        }
    }

    /// What the store must give back when an answer arrives for a call that was abandoned while it asked.
    pub fn unwanted(rules: &Rules, batch: &Batch, outcomes: &Outcomes) -> Option<Batch> {
        if outcomes.refuses() {
            return None;
        }
        let charged_at = outcomes.now();
        let mut refund = Batch::new(0).with_charged_at(charged_at).with_counted_at(charged_at + batch.context().lead);
        for op in batch.ops().iter().filter(|op| op.limit != rules.cooldown) {
            push(&mut refund, Op::new(op.limit, Verb::Refund, op.key, op.cost));
        }
        Some(refund)
    }

    fn take_sent(&mut self) -> Option<Sent> {
        match core::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Sent(sent) => Some(sent),
            other => {
                self.stage = other;
                None
            }
        }
    }

    /// Tells everybody how an attempt ended.
    fn settle(&mut self, rules: &Rules, desk: &mut Desk, sent: Sent, reply: &Reply, now: Time, rng: &mut impl Rng) {
        let elapsed = now.since(sent.at);
        desk.breaker.report(sent.permit, reply.class, elapsed, now, rng);
        // What was told about a rate was told before this was known.
        if desk.transit.ended(sent.at, elapsed, reply.reach) && !rules.jitter.is_zero() {
            desk.lanes.poke();
        }
        if let Some(allowances) = desk.allowances.get_mut(sent.credential) {
            allowances.ended(self.cost, sent.at, reply.reach == Reach::Answered, reply.rests);
            desk.lanes.poke();
        }
        let is_alone = rules.credential_keys.len() == 1;
        if let Some(pace) = &mut desk.pace {
            // How long it asks to be left alone is kept by the credential's cool-down.
            pace.ended(sent.at, reply.class, reply.rests.calls.filter(|_| is_alone), now, rng);
            desk.lanes.poke();
        }
        if let Some(inflight) = &mut desk.inflight {
            inflight.sample(elapsed, sent.in_flight, reply.class, now);
            desk.bound(rules);
        }
        if reply.streams && !self.renews(rules, reply) {
            self.stage = Stage::Streaming(sent.lane, sent.credential);
        } else {
            desk.ended(sent.lane, sent.credential);
        }
        let correction = match reply.reach {
            Reach::Unsent => Some(Verb::Refund),
            Reach::Answered if sent.counted_at > now && rules.lead > Span::ZERO => Some(Verb::Settle),
            Reach::Answered | Reach::Unknown => None,
        };
        (self.charged_at, self.counted_at) = (sent.charged_at, sent.counted_at);
        if let Some(verb) = correction {
            self.correct(rules, desk, sent.credential, verb, sent.charged_at, sent.counted_at);
            if desk.orders.tell().is_some() {
                desk.lanes.poke();
                if verb == Verb::Settle {
                    self.counted_at = now;
                }
            }
        }
        let cooldown = |verb, cost| Op::new(rules.cooldown, verb, rules.credential_keys[sent.credential], cost);
        let generation = sent.generation;
        match reply.class {
            // To close at each throttle that a pace risks would cost more than the pace finds.
            Class::Throttled if desk.pace.is_some() && is_alone && reply.retry_after.is_none() => {}
            Class::Throttled => {
                desk.widen(sent.at, now);
                let asked = reply.retry_after.unwrap_or(Span::ZERO).min(Span::from_micros(MAX_COST));
                push(&mut desk.orders.tell, cooldown(Verb::Throttle { generation }, asked.as_micros()));
                // The store knows the cool-down better; until it says so, what was asked for is known.
                if asked.is_zero() {
                    desk.pool.not_before(sent.credential, now + Span::from_micros(1), now);
                } else {
                    desk.pool.closed_until(sent.credential, now + asked, now);
                }
            }
            Class::Success if generation > 0 => push(&mut desk.orders.tell, cooldown(Verb::Success { generation }, 0)),
            Class::Auth if !rules.renews || self.renewed => disable(rules, desk, sent.credential, now),
            _ => {}
        }
        if let Some(until) = reply.spent_until.filter(|until| *until > now) {
            desk.pool.not_before(sent.credential, until, now);
        }
    }

    /// Keeps its place in the queue until a moment, or fails now if that is too late, as it always is for a hedge. `spent`
    /// is the limit that can't have room before, if it is certain.
    fn wait(
        &mut self,
        until: Time,
        scope: Scope,
        failure: Failure,
        spent: Option<LimitId>,
        desk: &mut Desk,
        now: Time,
    ) -> Step {
        let Some(ticket) = self.ticket() else { return Step::Queue };
        if self.hedges || until >= self.deadline && self.hopes.is_none() {
            return self.fail(failure, desk);
        }
        match spent {
            Some(limit) => desk.lanes.spent_until(ticket, limit, until, scope, now),
            None => desk.lanes.not_until(ticket, until, scope, now),
        }
        Step::Queue
    }

    fn fail(&mut self, failure: Failure, desk: &mut Desk) -> Step {
        self.leave(desk);
        Step::Finish(Err(failure))
    }

    /// Gives back its place in the queue, and the retry that it won't be sent for.
    fn leave(&mut self, desk: &mut Desk) {
        if let Some(ticket) = self.ticket() {
            desk.lanes.cancel(ticket);
            self.stage = Stage::Idle;
        }
        if core::mem::take(&mut self.retries) {
            desk.budget.give_back();
        }
    }

    /// Has the store put right what it charged an attempt, and counted at a moment.
    fn correct(
        &self,
        rules: &Rules,
        desk: &mut Desk,
        credential: usize,
        verb: Verb,
        charged_at: Time,
        counted_at: Time,
    ) {
        self.fill(&mut desk.orders.tell, rules, credential, verb);
        desk.orders.tell.set_charged(charged_at, counted_at);
    }

    /// Makes a batch the operations of an attempt with this credential. The cool-down comes first.
    fn fill(&self, batch: &mut Batch, rules: &Rules, credential: usize, verb: Verb) {
        let cost = |ceiling: &Ceiling| if ceiling.measure == Measure::Calls { 1 } else { self.cost };
        let own_key = rules.credential_keys[credential];
        batch.clear();
        if verb == Verb::Take {
            push(batch, Op::new(rules.cooldown, verb, own_key, 1));
        }
        let concerns = |ceiling: &&Ceiling| verb != Verb::Settle || ceiling.settles;
        for ceiling in rules.credential_ceilings.iter().filter(concerns) {
            push(batch, Op::new(ceiling.limit, verb, own_key, cost(ceiling)));
        }
        for ceiling in rules.ceilings.iter().chain(&rules.lane_ceilings[self.charged as usize]).filter(concerns) {
            push(batch, Op::new(ceiling.limit, verb, rules.key, cost(ceiling)));
        }
    }
}

/// Leaves out a credential that the provider doesn't accept, unless no other is good: it may be this request alone that
/// none is accepted for.
fn disable(rules: &Rules, desk: &mut Desk, credential: usize, now: Time) {
    if desk.pool.has_another(credential, now) {
        let key = rules.credential_keys[credential];
        push(&mut desk.orders.tell, Op::new(rules.cooldown, Verb::Disable, key, DISABLED.as_micros()));
        desk.pool.not_before(credential, now + DISABLED, now);
    }
}

/// Why nobody can be sent: no credential is good before this moment.
fn no_credential(pool: &Pool, earliest: Time) -> Failure {
    match pool.quota_that_ends(earliest) {
        Some(limit) => Failure::QuotaSpent { limit, resets_at: earliest },
        None => Failure::Cooling { earliest },
    }
}

fn push(batch: &mut Batch, mut op: Op) {
    op.must_fit = true;
    batch.push(op).expect("invariant: a provider's limits and its cool-down fit into one batch");
}
