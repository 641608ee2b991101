//! A provider with calls that do as they are told, and a plain count of everything.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tidegate_core::breaker::BreakerState;
use tidegate_core::call::{
    AttemptReport, Call, CallFailure, CallProgress, CallRules, InFlight, LaneRules, MAX_LEAD, Measure, NextStep,
    ProviderLimit, ProviderState,
};
use tidegate_core::lanes::{LaneSpec, QueueStep};
use tidegate_core::quota::FixedPeriods;
use tidegate_core::retry::Delivery;
use tidegate_core::{
    AdaptiveLimit, AdaptiveLimitSpec, Backoff, Balance, Batch, Breaker, BreakerSpec, BudgetSpec, Class, Cooldown,
    CredentialPool, Key, Lane, LanesSpec, Limit, LimitId, LimitKind, Limits, MAX_LIMIT, Op, Outcomes, Quota, Retry,
    Span, Ticket, Time, Verb, Verdict, Window,
};
use tidegate_testkit::fixtures::{TestLimiter as Store, limit_id, test_time};
use tidegate_testkit::random::RandomSource;

const SHARED: Key = Key::new(1, 0x9e37_79b9_7f4a_7c15);
/// The indexes of the limits: the first paces, and two count for the test and never refuse.
const PACE: usize = 0;
const CALLS: usize = 1;
const COSTS: usize = 2;
const COOLDOWN: usize = 3;
const WINDOW: Span = Span::from_secs(1);

/// The stage of a call, as its driver knows it.
pub(crate) enum Stage {
    Queued(Ticket),
    /// The store was asked, and its answer is still on its way.
    Asking(Ticket, Box<(Batch, Outcomes)>),
    Sent(usize),
    Streaming(usize, InFlight),
    Renewing,
    /// It waits for its retry. The flag is true if the retry was taken from the budget.
    Sleeping(Time, bool),
}

pub(crate) struct Known {
    call: Call,
    /// Its lane, as far as it is known. For a call in flight, the lane of its slot.
    lane: Lane,
    cost: u64,
    pub(crate) stage: Stage,
    /// True if it waits for its turn to retry, and the retry was taken from the budget.
    retries: bool,
    tried: bool,
    /// True if another caller waits for it too.
    joined: bool,
    /// For a second request: the call beside which it was sent.
    beside: Option<usize>,
}

impl Known {
    fn new(call: Call, lane: Lane, cost: u64) -> Self {
        let stage = Stage::Renewing;
        Self { call, lane, cost, stage, retries: false, tried: false, joined: false, beside: None }
    }
}

/// A provider, its driver, and a plain count of everything.
pub(crate) struct World {
    rules: CallRules,
    limits: Arc<Limits>,
    store: Store,
    pub(crate) state: ProviderState,
    rng: SmallRng,
    pub(crate) now: Time,
    pub(crate) calls: BTreeMap<usize, Known>,
    /// The calls that don't only wait in the queue.
    pub(crate) busy: BTreeSet<usize>,
    /// The calls by their index in the queue.
    places: HashMap<usize, usize>,
    /// Answers to calls that have left since.
    pub(crate) abandoned: Vec<(Batch, Outcomes)>,
    pub(crate) arrived: usize,
    /// The first requests, in their order.
    pub(crate) sent: Vec<usize>,
    /// The charged amounts: calls, and their costs.
    charged: (u64, u64),
    /// The budget in thousandths of a retry.
    budget: u64,
    pub(crate) finished: Vec<(usize, Result<(), CallFailure>)>,
    /// The number of calls that lost their places to others.
    pub(crate) displaced: usize,
}

impl World {
    pub(crate) fn new(
        pace: u64,
        max_waiting: u32,
        failures: u32,
        inflight: bool,
        renews: bool,
        credential_in_flight: u32,
    ) -> Self {
        let cooldown = Cooldown { base: Span::from_millis(50), ..Cooldown::default() };
        let forever = || Arc::new(FixedPeriods(Span::MAX));
        let kinds = [
            LimitKind::Window(Window::new(pace, WINDOW, pace as u32).unwrap().with_lead(MAX_LEAD)),
            LimitKind::Quota(Quota::new(MAX_LIMIT, forever()).unwrap()),
            LimitKind::Quota(Quota::new(MAX_LIMIT, forever()).unwrap()),
            LimitKind::Cooldown(cooldown),
        ];
        let limits = Arc::new(Limits::new(kinds.map(Limit::new).into()).unwrap());
        let ceiling =
            |place, measure| ProviderLimit { limit: limit_id(place), measure, by_scope: false, settles: place == PACE };
        let backoff = Backoff::exponential(Span::from_millis(20), Span::from_millis(200));
        let retry = Retry { max_attempts: 4, backoff, ..Retry::default() };
        let rules = CallRules {
            provider_limits: [(PACE, Measure::Calls), (CALLS, Measure::Calls), (COSTS, Measure::Cost)]
                .map(|(place, measure)| ceiling(place, measure))
                .into(),
            lane_limits: Default::default(),
            credential_limits: Box::default(),
            max_in_flight_per_credential: credential_in_flight,
            cooldown: limit_id(COOLDOWN),
            key: SHARED,
            credential_keys: (2..5).map(|key| Key::new(key, SHARED.lo().wrapping_mul(key))).collect(),
            can_renew_login: renews,
            tracks_remaining: false,
            lead: Span::from_millis(30),
            jitter: Span::ZERO,
            lanes: LanesSpec {
                lanes: Lane::ALL.map(|lane| LaneSpec {
                    max_waiting,
                    displaces: lane != Lane::Background,
                    max_in_flight: u32::MAX,
                }),
                max_in_flight: 60,
                ..LanesSpec::default()
            },
            lane_rules: [LaneRules { timeout: Span::from_secs(100_000), retry }; 3],
            budget: BudgetSpec::default(),
        };
        let breaker = BreakerSpec {
            failures: Some(failures),
            open: Backoff { jitter: tidegate_core::Jitter::None, ..Backoff::exponential(WINDOW, WINDOW) },
            probe_lease: Span::from_secs(86_400),
            ..BreakerSpec::default()
        };
        let inflight = inflight.then(|| AdaptiveLimit::new(AdaptiveLimitSpec::default()).unwrap());
        let pool = CredentialPool::new(Balance::LeastRecentlyUsed, 3).unwrap();
        Self {
            state: ProviderState::new(&rules, pool, Breaker::new(breaker).unwrap(), inflight),
            budget: u64::from(rules.budget.min) * 1_000,
            rules,
            store: Store::with_shared_limits(Arc::clone(&limits)),
            limits,
            rng: SmallRng::seed_from_u64(7),
            now: test_time(0),
            calls: BTreeMap::new(),
            busy: BTreeSet::new(),
            places: HashMap::new(),
            abandoned: Vec::new(),
            arrived: 0,
            sent: Vec::new(),
            charged: (0, 0),
            finished: Vec::new(),
            displaced: 0,
        }
    }

    fn take(&mut self, id: usize) -> Known {
        self.busy.remove(&id);
        self.calls.remove(&id).expect("a call that isn't over")
    }

    fn keep(&mut self, id: usize, known: Known) {
        if let Stage::Queued(ticket) | Stage::Asking(ticket, _) = &known.stage {
            self.places.insert(ticket.index(), id);
        }
        if !matches!(known.stage, Stage::Queued(_)) {
            self.busy.insert(id);
        }
        self.calls.insert(id, known);
    }

    fn tell(&self, batch: Option<&Batch>) {
        if let Some(batch) = batch {
            self.store.decide(batch, self.now);
        }
    }

    pub(crate) fn arrive(&mut self, lane: Lane, cost: u64, timeout: Option<Span>) -> usize {
        let call = Call::new(&self.rules, lane, cost, timeout.map(|timeout| self.now + timeout), self.now);
        let id = self.arrived;
        self.arrived += 1;
        self.start(id, Known::new(call, lane, cost));
        id
    }

    /// Sends a second request beside one in flight, if it may go immediately.
    fn hedge(&mut self, first: usize) {
        let known = &self.calls[&first];
        let Some(call) = known.call.new_hedge(&self.state) else { return };
        self.budget -= 1_000;
        let (lane, cost, beside) = (known.lane, known.cost, Some(first));
        let id = self.arrived;
        self.arrived += 1;
        let displaced = self.displaced;
        self.start(id, Known { retries: true, tried: true, beside, ..Known::new(call, lane, cost) });
        self.pump();
        assert_eq!(self.displaced, displaced, "a hedge takes no place of others");
        if let Some(known) = self.calls.get_mut(&id)
            && known.call.cancel_queued_hedge(&mut self.state)
        {
            self.take(id);
            self.earn(1_000);
        }
    }

    /// One of two requests has failed. Either of the two calls may continue with the other request.
    fn hedge_lost(&mut self, mut hedge: Known, reply: &AttemptReport, swaps: bool) {
        let first = hedge.beside.and_then(|id| self.calls.get_mut(&id));
        if let Some(first) = first.filter(|first| swaps && matches!(first.stage, Stage::Sent(_))) {
            first.call.swap_request(&mut hedge.call);
            std::mem::swap(&mut first.stage, &mut hedge.stage);
        }
        hedge.call.hedge_lost(&self.rules, &mut self.state, reply, self.now, &mut self.rng);
        self.tell(self.state.store_requests.updates());
    }

    /// Adds the call to the queue, at first or again.
    fn start(&mut self, id: usize, mut known: Known) {
        let progress = match known.call.start(&mut self.state, self.now) {
            Ok(()) => CallProgress::Wait,
            Err(failure) => CallProgress::Fail(failure),
        };
        self.advance(id, known, progress);
    }

    /// Handles the result of a call's turn or of the store's answer.
    fn advance(&mut self, id: usize, mut known: Known, progress: CallProgress) {
        self.tell(self.state.store_requests.updates());
        known.stage = match progress {
            CallProgress::Wait => Stage::Queued(known.call.ticket().expect("a call that queues")),
            CallProgress::AskStore => {
                let batch = self.state.store_requests.reservation().clone();
                let outcomes = self.store.decide(&batch, self.now).1;
                Stage::Asking(known.call.ticket().expect("a call that asks"), Box::new((batch, outcomes)))
            }
            CallProgress::Send { credential } => {
                if !std::mem::replace(&mut known.tried, true) {
                    self.sent.push(id);
                    self.earn(200);
                }
                known.retries = false;
                self.charged.0 += 1;
                self.charged.1 += known.cost;
                Stage::Sent(credential)
            }
            CallProgress::Fail(failure) => return self.finish(id, &known, Err(failure)),
        };
        self.keep(id, known);
    }

    /// Handles the next step after a reply.
    fn go_on(&mut self, id: usize, mut known: Known, next: NextStep) {
        self.tell(self.state.store_requests.updates());
        known.stage = match next {
            NextStep::RenewLogin { .. } => Stage::Renewing,
            NextStep::RetryAt(until) => Stage::Sleeping(until, false),
            NextStep::Done => return self.finish(id, &known, Ok(())),
            NextStep::Failed(failure) => return self.finish(id, &known, Err(failure)),
        };
        self.keep(id, known);
    }

    fn finish(&mut self, id: usize, known: &Known, result: Result<(), CallFailure>) {
        self.finished.push((id, result));
        // A call that failed before its retry was sent gives it back.
        if known.retries {
            self.earn(1_000);
        }
    }

    fn earn(&mut self, thousandths: u64) {
        let most = u64::from(self.rules.budget.reserve.max(self.rules.budget.min)) * 1_000;
        self.budget = (self.budget + thousandths).min(most);
    }

    /// Lets the lanes select calls until they sleep, and returns the time until which they do.
    pub(crate) fn pump(&mut self) -> Time {
        loop {
            let step = self.state.poll(self.now);
            let ticket = match step {
                QueueStep::AskStore(ticket) | QueueStep::Expired(ticket) | QueueStep::Displaced(ticket) => ticket,
                QueueStep::Sleep(until) => return until,
            };
            let id = self.places[&ticket.index()];
            let mut known = self.take(id);
            if let QueueStep::Displaced(_) = step {
                assert!(!known.joined, "a joined call keeps its place");
                self.displaced += 1;
            }
            if !matches!(step, QueueStep::AskStore(_)) {
                self.cancel_waiting(&mut known);
            }
            let progress = known.call.handle_step(step, &self.rules, &mut self.state, self.now, &mut self.rng);
            self.advance(id, known, progress);
        }
    }

    /// Keeps an answer that is still on its way to a call that has left.
    fn cancel_waiting(&mut self, known: &mut Known) {
        if let Stage::Asking(_, answer) = std::mem::replace(&mut known.stage, Stage::Renewing) {
            self.abandoned.push(*answer);
        }
    }

    pub(crate) fn answer(&mut self, id: usize, broken: bool) {
        let mut known = self.take(id);
        if broken {
            // The request was lost together with its answer. Cancelled, its charge is refunded.
            self.cancel_waiting(&mut known);
            known.call.handle_store_error(&mut self.state);
            self.state.store_requests = tidegate_core::call::StoreRequests::default();
            return self.advance(id, known, CallProgress::Fail(CallFailure::DeadlineExceeded));
        }
        let Stage::Asking(_, answer) = &known.stage else { panic!("nothing was asked") };
        let (_, outcomes) = &**answer;
        let Self { rules, limits, state, now, rng, .. } = self;
        let progress = known.call.handle_outcomes(rules, limits, state, outcomes, *now, rng);
        self.advance(id, known, progress);
    }

    pub(crate) fn answer_abandoned(&mut self, place: usize) {
        let (batch, outcomes) = &self.abandoned.swap_remove(place);
        self.tell(Call::refund_after_cancel(&self.rules, batch, outcomes).as_ref());
        self.state.lanes.clear_refusals();
    }

    pub(crate) fn reply(
        &mut self,
        id: usize,
        class: Class,
        retry_after: Option<Span>,
        streams: bool,
        cost: Option<u64>,
    ) {
        let mut known = self.take(id);
        let Stage::Sent(credential) = known.stage else { panic!("nothing was sent") };
        let reply = AttemptReport {
            is_repeatable: true,
            is_streaming: streams,
            ..AttemptReport::from_verdict(Verdict { wait: retry_after, ..Verdict::new(class) }, Delivery::Answered)
        };
        if known.beside.is_some() {
            return self.hedge_lost(known, &reply, streams);
        }
        let next = known.call.handle_reply(&self.rules, &mut self.state, &reply, self.now, &mut self.rng);
        let goes_on = !matches!(next, NextStep::Done | NextStep::Failed(_));
        let from_budget = class == Class::Transient && matches!(next, NextStep::RetryAt(_));
        if from_budget {
            self.budget -= 1_000;
        }
        if !goes_on {
            let remainder = known.call.take_in_flight(credential);
            if let Some(cost) = cost {
                self.tell(self.state.store_requests.updates());
                remainder.correct_cost(&self.rules, &mut self.state, cost);
                self.charged.1 = self.charged.1 + cost - known.cost;
            }
            assert_eq!(remainder.is_in_flight(), streams);
            if streams {
                self.tell(self.state.store_requests.updates());
                known.stage = Stage::Streaming(credential, remainder);
                return self.keep(id, known);
            }
        }
        self.go_on(id, known, next);
        if let Some(Known { stage: Stage::Sleeping(_, budgeted), .. }) = self.calls.get_mut(&id) {
            *budgeted = from_budget;
        }
    }

    fn end(&mut self, id: usize) {
        let Stage::Streaming(_, mut remainder) = self.take(id).stage else { panic!("no reply is being read") };
        remainder.end(&self.rules, &mut self.state);
        self.finished.push((id, Ok(())));
    }

    pub(crate) fn wake(&mut self, id: usize) {
        let mut known = self.take(id);
        if let Stage::Sleeping(_, budgeted) = known.stage {
            known.retries = budgeted;
        }
        self.start(id, known);
    }

    fn renewed(&mut self, id: usize, good: bool) {
        let known = self.take(id);
        match good {
            true => self.start(id, known),
            false => self.finished.push((id, Ok(()))),
        }
    }

    /// Ends a call because its caller cancels it.
    pub(crate) fn abandon(&mut self, id: usize) {
        let mut known = self.take(id);
        if let Stage::Streaming(_, remainder) = &mut known.stage {
            remainder.end(&self.rules, &mut self.state);
        }
        let retries = known.retries || matches!(known.stage, Stage::Sleeping(_, true));
        self.cancel_waiting(&mut known);
        known.call.cancel(&self.rules, &mut self.state, Delivery::Unknown, self.now, &mut self.rng);
        self.tell(self.state.store_requests.updates());
        if retries {
            self.earn(1_000);
        }
    }

    fn raise(&mut self, id: usize, lane: Lane) {
        let full = self.waiting(lane) >= self.rules.lanes.lanes[lane as usize].max_waiting as usize;
        let known = self.calls.get_mut(&id).expect("a call");
        if known.beside.is_some() {
            return;
        }
        known.call.raise(lane, &mut self.state, self.now);
        known.joined = true;
        let (before, raised) = (known.lane, known.call.lane());
        match known.stage {
            Stage::Queued(_) | Stage::Asking(..) => {
                // A full lane may make room for it, or not.
                assert!(raised == before.max(lane) || full && raised == before);
                known.lane = raised;
                self.pump();
            }
            Stage::Sleeping(..) => known.lane = raised,
            Stage::Sent(_) | Stage::Streaming(..) | Stage::Renewing => {}
        }
    }

    fn waiting(&self, lane: Lane) -> usize {
        let waits = |known: &&Known| known.lane == lane && matches!(known.stage, Stage::Queued(_) | Stage::Asking(..));
        self.calls.values().filter(waits).count()
    }

    fn used(&self) -> (u64, u64) {
        let mut batch = Batch::new(0);
        for place in [CALLS, COSTS] {
            batch.push(Op::new(limit_id(place), Verb::Peek, SHARED, 1)).unwrap();
        }
        let outcomes = self.store.decide(&batch, self.now).1;
        (outcomes.list()[0].used, outcomes.list()[1].used)
    }

    /// Compares everything with the plain count.
    pub(crate) fn check(&self) -> Result<(), String> {
        for lane in Lane::ALL {
            same("waiting", self.state.lanes.waiting(lane), self.waiting(lane))?;
            let flies =
                |known: &&Known| known.lane == lane && matches!(known.stage, Stage::Sent(_) | Stage::Streaming(..));
            let abandoned = self.state.abandoned().filter(|(of, _)| *of == lane).count();
            let in_flight = self.calls.values().filter(flies).count() + abandoned;
            same("in flight", self.state.lanes.in_flight(lane) as usize, in_flight)?;
        }
        for credential in 0..self.rules.credential_keys.len() {
            let sent = |known: &&Known| matches!(known.stage, Stage::Sent(with) | Stage::Streaming(with, _) if with == credential);
            let abandoned = self.state.abandoned().filter(|(_, with)| *with == credential).count();
            let in_flight = (self.calls.values().filter(sent).count() + abandoned) as u32;
            same("in flight with a credential", self.state.pool.in_flight(credential), in_flight)?;
            same("more than its permits", in_flight > self.rules.max_in_flight_per_credential, false)?;
        }
        same("left of the budget", self.state.budget.remaining(), self.budget / 1_000)?;
        let asked = self.calls.values().filter_map(|known| match &known.stage {
            Stage::Asking(_, answer) => Some(&**answer),
            _ => None,
        });
        let (mut calls, mut costs) = self.charged;
        for (batch, _) in asked.chain(&self.abandoned).filter(|(_, outcomes)| !outcomes.refuses()) {
            calls += charged(batch, CALLS);
            costs += charged(batch, COSTS);
        }
        same("charged", self.used(), (calls, costs))?;
        let sent = self.calls.values().any(|known| matches!(known.stage, Stage::Sent(_)));
        if !sent && self.state.breaker.state(self.now) == BreakerState::HalfOpen {
            same("a probe that nobody holds", self.state.breaker.peek(self.now), Ok(()))?;
        }
        Ok(())
    }

    /// A random call in a matching stage.
    pub(crate) fn any(&self, random: &mut RandomSource, which: impl Fn(&Stage) -> bool) -> Option<usize> {
        let fitting: Vec<usize> =
            self.calls.iter().filter(|(_, known)| which(&known.stage)).map(|(&id, _)| id).collect();
        (!fitting.is_empty()).then(|| random.pick(&fitting))
    }

    /// Simulates one random event.
    pub(crate) fn happen(&mut self, random: &mut RandomSource) {
        match random.below(34) {
            0..=7 if self.calls.len() < 60 => {
                let timeout = random.chance(50).then(|| Span::from_micros(random.below(3_000_000)));
                let (lane, cost) = (random.pick(&Lane::ALL), random.pick(&[1, 1, 5, 100]));
                self.arrive(lane, cost, timeout);
            }
            8..=13 => {
                if let Some(id) = self.any(random, |stage| matches!(stage, Stage::Asking(..))) {
                    self.answer(id, random.chance(4));
                }
            }
            14..=20 => {
                if let Some(id) = self.any(random, |stage| matches!(stage, Stage::Sent(_))) {
                    let class = match random.below(12) {
                        0..=5 => Class::Success,
                        6..=7 => Class::Transient,
                        8 => Class::Throttled,
                        9 => Class::Auth,
                        10 => Class::Permanent,
                        _ => Class::Cancelled,
                    };
                    let retry_after = random.chance(30).then(|| Span::from_micros(random.below(500_000)));
                    let cost = (class == Class::Success).then(|| random.below(200));
                    self.reply(id, class, retry_after, random.chance(30), cost);
                }
            }
            21 => {
                if let Some(id) = self.any(random, |stage| matches!(stage, Stage::Streaming(..))) {
                    self.end(id);
                }
            }
            22 => {
                if let Some(id) = self.any(random, |stage| matches!(stage, Stage::Renewing)) {
                    self.renewed(id, random.chance(70));
                }
            }
            23 => {
                if let Some(id) = self.any(random, |_| true) {
                    self.abandon(id);
                }
            }
            24 => {
                if let Some(id) = self.any(random, |stage| !matches!(stage, Stage::Renewing)) {
                    self.raise(id, random.pick(&Lane::ALL));
                }
            }
            25..=26 if !self.abandoned.is_empty() => {
                let place = random.below(self.abandoned.len() as u64) as usize;
                self.answer_abandoned(place);
            }
            27..=29 => {
                let now = self.now;
                if let Some(id) = self.any(random, |stage| matches!(stage, Stage::Sleeping(until, _) if *until <= now))
                {
                    self.wake(id);
                }
            }
            30 => self.now = self.now + Span::from_micros(random.below(300_000)),
            31..=32 => {
                if let Some(id) = self.any(random, |stage| matches!(stage, Stage::Sent(_))) {
                    self.hedge(id);
                }
            }
            _ => self.now = self.now + Span::from_micros(random.below(10_000)),
        }
        self.pump();
    }

    /// Cancels all calls, and checks that everything is free again.
    pub(crate) fn clear_out(mut self) -> Result<(), String> {
        while let Some(&id) = self.calls.keys().next() {
            self.abandon(id);
        }
        while !self.abandoned.is_empty() {
            self.answer_abandoned(0);
        }
        self.check()?;
        // The provider may work on what was abandoned.
        self.now = self.now + Span::from_secs(30);
        self.state.poll(self.now);
        same("in flight after all ends", self.state.abandoned().len(), 0)?;
        self.check()?;
        same("somebody's turn", self.state.lanes.poll(self.now), QueueStep::Sleep(Time::NEVER))?;
        self.now = self.now + MAX_LEAD + WINDOW;
        let refused = self.state.lanes.refused_past(self.now, Lane::Background, u64::MAX, self.now);
        same("refused by nobody", refused, None)?;
        let mut pace = Batch::new(0);
        pace.push(Op::new(LimitId::FIRST, Verb::Peek, SHARED, 1)).unwrap();
        same("used of the window", self.store.decide(&pace, self.now).1.list()[0].used, 0)?;
        // Three shared limits, and a cool-down of each credential.
        same("states in the store", self.store.store().len() <= 6, true)?;
        for lane in Lane::ALL {
            let room = self.rules.lanes.lanes[lane as usize].max_waiting;
            let entered = (0..=room).filter(|_| self.state.lanes.enqueue(lane, 1, Time::NEVER, self.now).is_ok());
            same("room in the queue", entered.count(), room as usize)?;
        }
        Ok(())
    }
}

fn charged(batch: &Batch, place: usize) -> u64 {
    batch.ops().iter().filter(|op| op.limit == limit_id(place)).map(|op| op.cost).sum()
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), String> {
    if found == expected { Ok(()) } else { Err(format!("{what}: {found:?}, expected {expected:?}")) }
}
