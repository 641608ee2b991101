//! Outbound calls against a simulated provider, in virtual time.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tidegate_core::breaker::BreakerState;
use tidegate_core::call::{
    AttemptReport, Call, CallFailure, CallProgress, CallRules, LaneRules, Measure, NextStep, ProviderLimit,
    ProviderState,
};
use tidegate_core::lanes::{LaneSpec, QueueStep};
use tidegate_core::retry::{Delivery, NoRetryReason, Retry};
use tidegate_core::{
    Backoff, Balance, Breaker, BreakerSpec, BudgetSpec, Class, Cooldown, CredentialPool, Growth, Jitter, Key, Lane,
    LanesSpec, Limit, LimitId, LimitKind, Limits, Rate, Span, Time, Verdict, Window,
};
use tidegate_testkit::fixtures::TestLimiter as Store;
use tidegate_testkit::random::case_count;

const START: Time = Time::from_secs(1_700_000_000);
const LEAD: Span = Span::from_millis(500);

fn ms(millis: u64) -> Time {
    START + Span::from_millis(millis)
}

/// The reaction of the provider to a request that arrives now.
type Service = Box<dyn FnMut(Time) -> (Class, Option<Span>)>;
/// The transit times of a request and of its reply.
type Transit = Box<dyn FnMut(&mut SmallRng) -> (Span, Span)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Arrives(usize),
    Replies(usize),
    Starts(usize),
    Leaves(usize),
    /// A caller makes a call.
    Comes,
    Wakes,
}

/// The rules of one provider, its state, its store and its calls.
struct World {
    rules: CallRules,
    limits: Arc<Limits>,
    store: Store,
    state: ProviderState,
    calls: Vec<Call>,
    tickets: BTreeMap<usize, usize>,
    happenings: BinaryHeap<Reverse<(Time, u64, Happening)>>,
    count: u64,
    answers: BTreeMap<usize, (Class, Option<Span>)>,
    sent: Vec<(Time, usize)>,
    finished: BTreeMap<usize, Result<(), CallFailure>>,
    /// The finished calls for which `more` hasn't been called yet.
    over: Vec<usize>,
    service: Service,
    transit: Transit,
    /// One of this many calls is cancelled a millisecond after its request was sent.
    leavers: Option<usize>,
    rng: SmallRng,
    now: Time,
    wakes_at: Time,
}

impl World {
    fn new(kind: LimitKind, lanes: LanesSpec, credentials: usize) -> Self {
        let cooldown = Cooldown { cap: Span::from_secs(8), ..Cooldown::default() };
        let settles = kind.settles();
        let limits = Limits::new(vec![Limit::new(kind), Limit::new(LimitKind::Cooldown(cooldown))]).unwrap();
        let limits = Arc::new(limits);
        let backoff = Backoff::exponential(Span::from_secs(1), Span::from_secs(30)).with_jitter(Jitter::None);
        let retry = Retry { max_attempts: 7, backoff, max_retry_after: Span::from_secs(3600), ..Retry::default() };
        let key = |number: u64| Key::new(1, number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let rules = CallRules {
            provider_limits: [ProviderLimit {
                by_scope: false,
                limit: LimitId::FIRST,
                measure: Measure::Calls,
                settles,
            }]
            .into(),
            lane_limits: Default::default(),
            credential_limits: Box::default(),
            max_in_flight_per_credential: u32::MAX,
            cooldown: LimitId::from_index(1).unwrap(),
            key: key(1),
            credential_keys: (0..credentials as u64).map(|number| key(2 + number)).collect(),
            can_renew_login: false,
            tracks_remaining: false,
            lead: LEAD,
            jitter: Span::ZERO,
            lanes,
            lane_rules: [LaneRules { timeout: Span::from_secs(86_400), retry }; 3],
            budget: BudgetSpec::default(),
        };
        let pool = CredentialPool::new(Balance::RoundRobin, credentials).unwrap();
        let breaker = Breaker::new(BreakerSpec::default()).unwrap();
        Self {
            state: ProviderState::new(&rules, pool, breaker, None),
            rules,
            store: Store::with_shared_limits(Arc::clone(&limits)),
            limits,
            calls: Vec::new(),
            tickets: BTreeMap::new(),
            happenings: BinaryHeap::new(),
            count: 0,
            answers: BTreeMap::new(),
            sent: Vec::new(),
            finished: BTreeMap::new(),
            over: Vec::new(),
            service: Box::new(|_| (Class::Success, None)),
            transit: Box::new(|_| (Span::from_millis(1), Span::from_millis(1))),
            leavers: None,
            rng: SmallRng::seed_from_u64(7),
            now: START,
            wakes_at: START,
        }
    }

    fn at(&mut self, at: Time, happening: Happening) {
        self.count += 1;
        self.happenings.push(Reverse((at, self.count, happening)));
    }

    fn call(&mut self, lane: Lane) -> usize {
        let id = self.calls.len();
        self.calls.push(Call::new(&self.rules, lane, 1, None, self.now));
        self.start(id);
        id
    }

    fn tell(&mut self) {
        if let Some(batch) = self.state.store_requests.updates() {
            self.store.decide(batch, self.now);
        }
    }

    fn start(&mut self, id: usize) {
        let progress = match self.calls[id].start(&mut self.state, self.now) {
            Ok(()) => CallProgress::Wait,
            Err(failure) => CallProgress::Fail(failure),
        };
        self.advance(id, progress);
    }

    fn advance(&mut self, id: usize, mut progress: CallProgress) {
        loop {
            self.tell();
            let (call, now) = (&mut self.calls[id], self.now);
            match progress {
                CallProgress::Wait => {
                    self.tickets.insert(call.ticket().unwrap().index(), id);
                    return;
                }
                CallProgress::AskStore => {
                    let (_, outcomes) = self.store.decide(self.state.store_requests.reservation(), now);
                    let World { rules, limits, state, rng, .. } = self;
                    progress = self.calls[id].handle_outcomes(rules, limits, state, &outcomes, now, rng);
                }
                CallProgress::Send { .. } => {
                    self.sent.push((now, id));
                    if self.leavers.is_some_and(|leavers| id.is_multiple_of(leavers)) {
                        self.at(now + Span::from_millis(1), Happening::Leaves(id));
                    }
                    let (there, _) = (self.transit)(&mut self.rng);
                    return self.at(now + there, Happening::Arrives(id));
                }
                CallProgress::Fail(failure) => return self.finish(id, Err(failure)),
            }
        }
    }

    fn finish(&mut self, id: usize, result: Result<(), CallFailure>) {
        self.tell();
        self.finished.insert(id, result);
        self.over.push(id);
    }

    /// Starts all calls that have their turn.
    fn drive(&mut self) {
        loop {
            match self.state.poll(self.now) {
                QueueStep::AskStore(ticket) => {
                    let id = self.tickets[&ticket.index()];
                    let progress = self.calls[id].handle_turn(&self.rules, &mut self.state, self.now, &mut self.rng);
                    self.advance(id, progress);
                }
                QueueStep::Displaced(_) => unreachable!("these lanes displace no call"),
                QueueStep::Expired(ticket) => {
                    let id = self.tickets[&ticket.index()];
                    let failure = self.calls[id].handle_expiry(&mut self.state, self.now);
                    self.finish(id, Err(failure));
                }
                QueueStep::Sleep(at) => {
                    let is_set = self.now < self.wakes_at && self.wakes_at <= at;
                    if !at.is_never() && !is_set {
                        self.wakes_at = at;
                        self.at(at, Happening::Wakes);
                    }
                    return;
                }
            }
        }
    }

    /// Runs until `until` and calls `more` for each finished call.
    fn run(&mut self, until: Time, mut more: impl FnMut(&mut Self, usize)) {
        self.drive();
        while let Some(Reverse((at, ..))) = self.happenings.peek()
            && *at <= until
        {
            let Some(Reverse((at, _, happening))) = self.happenings.pop() else { return };
            self.now = self.now.max(at);
            match happening {
                Happening::Arrives(id) => {
                    let answer = (self.service)(self.now);
                    self.answers.insert(id, answer);
                    let (_, back) = (self.transit)(&mut self.rng);
                    self.at(self.now + back, Happening::Replies(id));
                }
                Happening::Replies(id) if self.finished.contains_key(&id) => {}
                Happening::Replies(id) => {
                    let (class, retry_after) = self.answers[&id];
                    let reply = AttemptReport {
                        is_repeatable: true,
                        ..AttemptReport::from_verdict(
                            Verdict { wait: retry_after, ..Verdict::new(class) },
                            Delivery::Answered,
                        )
                    };
                    let next =
                        self.calls[id].handle_reply(&self.rules, &mut self.state, &reply, self.now, &mut self.rng);
                    match next {
                        NextStep::Done => self.finish(id, Ok(())),
                        NextStep::Failed(failure) => self.finish(id, Err(failure)),
                        NextStep::RetryAt(at) => {
                            self.tell();
                            self.at(at, Happening::Starts(id));
                        }
                        NextStep::RenewLogin { .. } => unreachable!("no credential here renews"),
                    }
                }
                Happening::Starts(id) => self.start(id),
                Happening::Leaves(id) => {
                    let (rules, state) = (&self.rules, &mut self.state);
                    self.calls[id].cancel(rules, state, Delivery::Unknown, self.now, &mut self.rng);
                    self.finish(id, Ok(()));
                }
                Happening::Comes => {
                    self.call(Lane::User);
                }
                Happening::Wakes => {}
            }
            self.drive();
            while let Some(id) = self.over.pop() {
                more(self, id);
                self.drive();
            }
        }
        self.now = until;
    }

    fn most_in_any(&self, window: Span) -> usize {
        let ends = self
            .sent
            .iter()
            .map(|(end, _)| self.sent.iter().filter(|(at, _)| at <= end && *at + window > *end).count());
        ends.max().unwrap_or(0)
    }
}

fn window(limit: u64, secs: u64) -> LimitKind {
    let window = Window::new(limit, Span::from_secs(secs), limit as u32).unwrap();
    LimitKind::Window(window.with_lead(tidegate_core::call::MAX_LEAD))
}

/// A provider that counts arrivals in a trailing window exactly, and refuses each excess call.
fn exact(limit: usize, window: Span) -> Service {
    let mut arrivals: Vec<Time> = Vec::new();
    Box::new(move |now| {
        arrivals.retain(|at| *at + window > now);
        if arrivals.len() >= limit {
            return (Class::Throttled, None);
        }
        arrivals.push(now);
        (Class::Success, None)
    })
}

#[test]
fn at_most_ten_calls_start_per_second() {
    let mut world = World::new(window(10, 1), LanesSpec::default(), 1);
    for _ in 0..200 {
        world.call(Lane::User);
    }
    world.run(ms(60_000), |_, _| {});
    assert_eq!(world.sent.iter().filter(|(at, _)| *at < ms(1_000)).count(), 10);
    assert_eq!((world.most_in_any(Span::from_secs(1)), world.sent.len()), (10, 200));
    let order: Vec<usize> = world.sent.iter().map(|(_, id)| *id).collect();
    assert!(order.is_sorted(), "first come, first served");
    assert!(world.sent[199].0 < ms(21_000), "{:?}", world.sent[199]);
}

#[test]
fn a_webhook_overtakes_waiting_background_calls() {
    let mut world = World::new(window(1, 1), LanesSpec::default(), 1);
    for _ in 0..6 {
        world.call(Lane::Background);
    }
    world.run(ms(0), |_, _| {});
    let webhook = world.call(Lane::Webhook);
    world.run(ms(30_000), |_, _| {});
    let order: Vec<usize> = world.sent.iter().map(|(_, id)| *id).collect();
    assert_eq!(order, [0, webhook, 1, 2, 3, 4, 5]);
}

/// Twenty callers at saturation against a provider that counts exactly, with a transit time of 5 to 200 ms in each
/// direction.
fn saturate(limit: usize, secs: u64, minutes: u64, leavers: Option<usize>) -> (usize, usize) {
    let mut world = World::new(window(limit as u64, secs), LanesSpec::default(), 1);
    let mut count = exact(limit, Span::from_secs(secs));
    let throttled = std::rc::Rc::new(std::cell::Cell::new(0));
    let seen = std::rc::Rc::clone(&throttled);
    world.service = Box::new(move |now| {
        let answer = count(now);
        seen.set(seen.get() + usize::from(answer.0 == Class::Throttled));
        answer
    });
    world.transit = Box::new(|rng| {
        let mut one = || Span::from_micros(5_000 + rng.next_u64() % 195_001);
        (one(), one())
    });
    world.leavers = leavers;
    for _ in 0..limit * 2 {
        world.call(Lane::User);
    }
    world.run(ms(minutes * 60_000), |world, _| {
        world.call(Lane::User);
    });
    (throttled.get(), world.sent.len())
}

#[test]
fn an_exact_provider_is_used_fully_without_throttling() {
    let minutes = case_count(2, 10) as u64;
    let (throttled, sent) = saturate(40, 10, minutes, None);
    let ceiling = 40 * 6 * minutes as usize;
    assert_eq!(throttled, 0);
    assert!(sent * 100 >= ceiling * 97, "{sent} of {ceiling}");
    let (throttled, sent) = saturate(10, 1, minutes, None);
    let ceiling = 10 * 60 * minutes as usize;
    assert_eq!(throttled, 0);
    assert!(sent * 100 >= ceiling * 80, "{sent} of {ceiling}");
}

#[test]
fn sequential_calls_respect_the_rate() {
    let mut lanes = LanesSpec { max_in_flight: 1, ..LanesSpec::default() };
    lanes.lanes = [LaneSpec::default(); 3];
    let rate = LimitKind::Rate(Rate::new(1, Span::from_secs(1), 1).unwrap());
    let mut world = World::new(rate, lanes, 1);
    world.transit = Box::new(|_| (Span::from_millis(700), Span::from_millis(700)));
    for _ in 0..5 {
        world.call(Lane::User);
    }
    world.run(ms(60_000), |_, _| {});
    let starts: Vec<u64> = world.sent.iter().map(|(at, _)| at.since(START).as_micros() / 1000).collect();
    assert_eq!(starts, [0, 1400, 2800, 4200, 5600], "one in flight, in order");
    world.transit = Box::new(|_| (Span::from_millis(1), Span::from_millis(1)));
    let before = world.sent.len();
    for _ in 0..5 {
        world.call(Lane::User);
    }
    world.run(ms(120_000), |_, _| {});
    let later: Vec<Time> = world.sent[before..].iter().map(|(at, _)| *at).collect();
    assert!(later.windows(2).all(|pair| pair[1].since(pair[0]) >= Span::from_secs(1)), "{later:?}");
}

#[test]
fn one_retry_after_holds_all_with_staggered_release() {
    let mut world = World::new(window(1_000, 1), LanesSpec::default(), 1);
    world.service = Box::new(|now| {
        if now < ms(10_000) { (Class::Throttled, Some(Span::from_secs(600))) } else { (Class::Success, None) }
    });
    for _ in 0..30 {
        world.call(Lane::User);
    }
    world.run(ms(5_000), |_, _| {});
    assert_eq!(world.sent.len(), 30);
    world.run(ms(2_000_000), |_, _| {});
    let again: Vec<Time> = world.sent[30..].iter().map(|(at, _)| *at).collect();
    assert_eq!(again.len(), 30);
    assert!(again[0] >= ms(600_000), "{:?}", again[0].since(START));
    // Each has a slot of its own, although the first success shows that the credential is accepted.
    let slots: Vec<Span> = again.windows(2).map(|pair| pair[1].since(pair[0])).collect();
    let (first, later) = slots.split_at(20);
    assert!(first.iter().all(|slot| *slot >= Span::from_millis(100)), "{again:?}");
    assert!(later.iter().all(|slot| *slot >= Span::from_millis(50)), "{again:?}");
    assert!(world.finished.values().all(Result::is_ok), "{:?}", world.finished);
}

#[test]
fn six_throttled_replies_back_off_and_succeed() {
    let mut world = World::new(window(1_000, 1), LanesSpec::default(), 1);
    let mut refusals = 6;
    world.service = Box::new(move |_| {
        if refusals == 0 {
            return (Class::Success, None);
        }
        refusals -= 1;
        (Class::Throttled, Some(Span::ZERO))
    });
    world.transit = Box::new(|_| (Span::ZERO, Span::ZERO));
    world.call(Lane::User);
    world.run(ms(200_000), |_, _| {});
    let waits: Vec<u64> =
        world.sent.windows(2).map(|pair| pair[1].0.since(pair[0].0).as_micros() / 1_000_000).collect();
    assert_eq!(waits, [1, 2, 4, 8, 16, 30]);
    assert_eq!(world.finished[&0], Ok(()));
}

#[test]
fn calls_that_cannot_finish_fail_immediately() {
    let mut world = World::new(window(1, 60), LanesSpec::default(), 1);
    world.service = Box::new(|_| (Class::Throttled, Some(Span::from_secs(86_400))));
    world.call(Lane::User);
    world.run(ms(10), |_, _| {});
    let long = Span::from_secs(86_400);
    assert_eq!(
        world.finished[&0],
        Err(CallFailure::NotRetried(NoRetryReason::RetryAfterTooLong { retry_after: long }))
    );
    world.calls.push(Call::new(&world.rules, Lane::User, 1, Some(ms(30_000)), world.now));
    world.start(1);
    world.run(ms(20), |_, _| {});
    assert!(
        matches!(world.finished[&1], Err(CallFailure::CredentialsCooling { earliest }) if earliest >= ms(86_400_000))
    );
    assert_eq!(world.sent.len(), 1);
}

#[test]
fn another_credential_is_used_immediately() {
    let mut world = World::new(window(1_000, 1), LanesSpec::default(), 3);
    let mut refusals = 2;
    world.service = Box::new(move |_| {
        refusals -= 1;
        if refusals >= 0 { (Class::Throttled, Some(Span::from_secs(30))) } else { (Class::Success, None) }
    });
    world.transit = Box::new(|_| (Span::ZERO, Span::ZERO));
    world.call(Lane::User);
    world.run(ms(100), |_, _| {});
    assert_eq!((world.sent.len(), world.sent[2].0), (3, ms(0)));
    assert_eq!(world.finished[&0], Ok(()));
}

#[test]
fn an_outage_opens_the_breaker_for_waiters() {
    let mut world = World::new(window(5, 1), LanesSpec::default(), 1);
    world.service = Box::new(|_| (Class::Transient, None));
    for _ in 0..60 {
        world.call(Lane::User);
    }
    world.run(ms(60_000), |_, _| {});
    let refused = world.finished.values().filter(|result| matches!(result, Err(CallFailure::Unavailable(_)))).count();
    assert_eq!(world.finished.len(), 60);
    // Five bursts of five.
    assert!(refused >= 30 && world.sent.len() <= 30, "{refused} {}", world.sent.len());
    assert!(world.state.breaker.peek(world.now).is_err());
}

/// A world whose breaker is half-open, before a probe is sent.
fn recovering(reply_time: Span) -> World {
    let mut world = World::new(window(100, 1), LanesSpec::default(), 1);
    world.transit = Box::new(move |_| (reply_time, Span::ZERO));
    world.call(Lane::User);
    world.run(ms(0) + reply_time, |_, _| {});
    let open_until = world.now + Span::from_secs(300);
    world.state.breaker.trip(world.now, &mut world.rng);
    world.run(open_until, |_, _| {});
    world
}

#[test]
fn hanging_uploads_hold_probes_for_a_second() {
    let mut world = recovering(Span::from_millis(20));
    for _ in 0..2 {
        world.transit = Box::new(|_| (Span::from_secs(1_000), Span::ZERO));
        world.call(Lane::User);
        world.run(world.now, |_, _| {});
        world.transit = Box::new(|_| (Span::from_millis(20), Span::ZERO));
        let refused = world.call(Lane::User);
        let Err(CallFailure::Unavailable(refusal)) = world.finished[&refused] else { panic!("a probe is under way") };
        assert_eq!(refusal.reset_in, Span::from_secs(1));
        let probe = world.now + refusal.reset_in;
        world.run(probe, |_, _| {});
        let good = world.call(Lane::User);
        world.run(probe + Span::from_millis(20), |_, _| {});
        assert_eq!(world.finished[&good], Ok(()));
    }
    assert_eq!(world.state.breaker.state(world.now), BreakerState::Closed);
}

#[test]
fn a_slow_provider_closes_its_breaker() {
    let mut world = recovering(Span::from_secs(60));
    let (began, before) = (world.now, world.sent.len());
    while world.state.breaker.state(world.now) != BreakerState::Closed {
        world.call(Lane::User);
        world.run(world.now + Span::from_millis(500), |_, _| {});
    }
    assert!(world.now.since(began) <= Span::from_secs(66), "{:?}", world.now.since(began));
    assert!(world.sent.len() - before <= 14, "{} probes", world.sent.len() - before);
}

#[test]
fn cancelled_calls_leave_no_state_behind() {
    let mut world = World::new(window(2, 1), LanesSpec::default(), 1);
    for _ in 0..20 {
        world.call(Lane::User);
    }
    world.run(ms(0), |_, _| {});
    for id in 5..15 {
        let (call, state) = (&mut world.calls[id], &mut world.state);
        call.cancel(&world.rules, state, Delivery::Unknown, world.now, &mut world.rng);
        assert!(world.state.store_requests.updates().is_none());
    }
    assert_eq!(world.state.lanes.waiting(Lane::User), 8);
    world.run(ms(60_000), |_, _| {});
    let order: Vec<usize> = world.sent.iter().map(|(_, id)| *id).collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 15, 16, 17, 18, 19]);
    assert_eq!((world.state.lanes.waiting(Lane::User), world.state.lanes.in_flight(Lane::User)), (0, 0));
}

#[test]
fn cancelled_calls_cause_no_throttling() {
    let (throttled, sent) = saturate(40, 10, case_count(2, 10) as u64, Some(3));
    assert_eq!(throttled, 0);
    assert!(sent > 400, "{sent}");
}

/// A request that is cancelled immediately gives no information about the transit time.
#[test]
fn cancelled_calls_do_not_delay_others() {
    let mut world = World::new(LimitKind::Rate(Rate::new(10, Span::from_secs(1), 1).unwrap()), LanesSpec::default(), 1);
    world.rules.jitter = Span::from_micros(1_500);
    world.transit = Box::new(|_| (Span::from_millis(50), Span::from_millis(50)));
    world.leavers = Some(50);
    for _ in 0..101 {
        world.call(Lane::User);
    }
    world.run(ms(60_000), |_, _| {});
    assert_eq!(world.sent.len(), 101);
    assert!(world.sent[100].0 <= ms(10_400), "{:?}", world.sent[100]);
}

#[test]
fn unsent_calls_are_not_counted() {
    let mut world =
        World::new(LimitKind::Rate(Rate::new(1, Span::from_secs(3600), 1).unwrap()), LanesSpec::default(), 1);
    let first = world.call(Lane::User);
    world.drive();
    assert_eq!(world.sent.len(), 1);
    let (rules, state) = (&world.rules, &mut world.state);
    world.calls[first].cancel(rules, state, Delivery::Unsent, world.now, &mut world.rng);
    world.finish(first, Ok(()));
    world.call(Lane::User);
    world.drive();
    assert_eq!(world.sent.len(), 2);
}

/// A reply can't move a charge in a window with merged entries.
#[test]
fn only_exact_windows_are_settled_by_replies() {
    for (entries, told) in [(10, true), (9, false)] {
        let window = Window::new(10, Span::from_secs(1), entries).unwrap().with_lead(tidegate_core::call::MAX_LEAD);
        let mut world = World::new(LimitKind::Window(window), LanesSpec::default(), 1);
        let call = world.call(Lane::User);
        world.drive();
        assert_eq!(world.sent.len(), 1);
        let World { rules, state, calls, now, rng, .. } = &mut world;
        calls[call].handle_reply(rules, state, &AttemptReport::new(Class::Success, Delivery::Answered), *now, rng);
        assert_eq!(state.store_requests.updates().is_some(), told);
    }
}

/// A call that is raised while the store decides is charged in its old lane.
#[test]
fn a_call_raised_while_asking_refunds_its_charge() {
    let mut world = World::new(window(1_000, 1), LanesSpec::default(), 1);
    let ceiling = ProviderLimit { by_scope: false, limit: LimitId::FIRST, measure: Measure::Calls, settles: true };
    world.rules.provider_limits = Box::default();
    world.rules.lane_limits[Lane::Webhook as usize] = [ceiling].into();
    world.call(Lane::Background);
    let QueueStep::AskStore(_) = world.state.lanes.poll(world.now) else { panic!("it is its turn") };
    let World { rules, limits, state, calls, store, now, rng, .. } = &mut world;
    assert_eq!(calls[0].handle_turn(rules, state, *now, rng), CallProgress::AskStore);
    let (_, outcomes) = store.decide(state.store_requests.reservation(), *now);
    calls[0].raise(Lane::Webhook, state, *now);
    let sent = calls[0].handle_outcomes(rules, limits, state, &outcomes, *now, rng);
    assert!(matches!(sent, CallProgress::Send { .. }), "{sent:?}");
    calls[0].cancel(rules, state, Delivery::Unsent, *now, rng);
    let given_back = state.store_requests.updates().map_or(0, |batch| batch.ops().len());
    assert_eq!(given_back, 0, "a background call has no limit here");
}

#[test]
fn cancelled_requests_count_at_their_latest_arrival() {
    let mut world = World::new(window(1, 1), LanesSpec::default(), 1);
    world.transit = Box::new(|_| (Span::from_secs(1_000), Span::ZERO));
    world.call(Lane::User);
    world.run(ms(0), |_, _| {});
    world.calls[0].cancel(&world.rules, &mut world.state, Delivery::Unknown, world.now, &mut world.rng);
    if let Some(batch) = world.state.store_requests.updates() {
        world.store.decide(batch, world.now);
    }
    world.call(Lane::User);
    world.run(ms(10_000), |_, _| {});
    assert_eq!(world.sent[1].0, START + LEAD + Span::from_secs(1));
}

/// A provider of 100 calls per second fails for a minute under a thousand workers, and recovers.
#[test]
fn a_recovered_providers_rate_is_used_again() {
    let mut world =
        World::new(LimitKind::Rate(Rate::new(100, Span::from_secs(1), 1).unwrap()), LanesSpec::default(), 1);
    world.rules.jitter = Span::from_micros(150);
    let open = Backoff { growth: Growth::Constant, ..Backoff::exponential(Span::from_secs(2), Span::from_secs(2)) };
    let breaker = BreakerSpec { open: open.with_jitter(Jitter::None), ..BreakerSpec::default() };
    let pool = CredentialPool::new(Balance::RoundRobin, 1).unwrap();
    world.state = ProviderState::new(&world.rules, pool, Breaker::new(breaker).unwrap(), None);
    world.transit = Box::new(|_| (Span::from_millis(10), Span::from_millis(10)));
    world.service =
        Box::new(
            |now| {
                if ms(10_000) <= now && now < ms(70_000) { (Class::Transient, None) } else { (Class::Success, None) }
            },
        );
    for _ in 0..1_000 {
        world.call(Lane::User);
    }
    world.run(ms(100_000), |world, id| {
        let after = match world.finished[&id] {
            Err(CallFailure::Unavailable(refusal)) => refusal.reset_in.max(Span::from_secs(1)),
            Err(_) => Span::from_secs(1),
            Ok(()) => Span::ZERO,
        };
        world.at(world.now + after, Happening::Comes);
    });
    let sent = |from: u64, to: u64| {
        world.sent.iter().filter(|(at, _)| ms(from * 1_000) <= *at && *at < ms(to * 1_000)).count()
    };
    assert!(world.sent.windows(102).all(|some| some[101].0.since(some[0].0) >= Span::from_secs(1)));
    assert!(sent(0, 10) >= 950 && sent(12, 70) <= 58 * 3, "{} before, {} meanwhile", sent(0, 10), sent(12, 70));
    assert!(
        (75..100).all(|second| sent(second, second + 1) >= 95),
        "{:?}",
        (70..100).map(|s| sent(s, s + 1)).collect::<Vec<_>>()
    );
}
