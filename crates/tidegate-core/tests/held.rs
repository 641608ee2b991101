//! Calls that arrive while their provider is known to be unavailable until after their deadline.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tidegate_core::call::{
    AttemptReport, Call, CallFailure, CallProgress, CallRules, LaneRules, MAX_LEAD, Measure, NextStep, ProviderLimit,
    ProviderState,
};
use tidegate_core::lanes::QueueStep;
use tidegate_core::quota::FixedPeriods;
use tidegate_core::retry::Delivery;
use tidegate_core::{
    Balance, Batch, Breaker, BreakerSpec, BudgetSpec, Class, Cooldown, CredentialPool, Key, Lane, LanesSpec, Limit,
    LimitId, LimitKind, Limits, Op, Outcomes, Quota, Retry, Span, Time, Verb, Verdict, Window,
};
use tidegate_testkit::fixtures::{TestLimiter as Store, limit_id, test_time};

const DAY: Span = Span::from_secs(86_400);
const SHARED: Key = Key::new(1, 0x9e37_79b9_7f4a_7c15);

/// The calls of a provider that the limit counts.
#[derive(Clone, Copy)]
enum Of {
    All,
    Background,
    Credential,
}

/// A provider with one limit and a cool-down.
struct Provider {
    rules: CallRules,
    limits: Arc<Limits>,
    store: Store,
    state: ProviderState,
    rng: SmallRng,
}

impl Provider {
    fn new(kind: LimitKind, of: Of, measure: Measure, credentials: u64) -> Self {
        let cooldown = Cooldown { cap: Span::from_secs(8), ..Cooldown::default() };
        let settles = kind.settles();
        let limits = Arc::new(Limits::new(vec![Limit::new(kind), Limit::new(LimitKind::Cooldown(cooldown))]).unwrap());
        let ceilings = || [ProviderLimit { by_scope: false, limit: LimitId::FIRST, measure, settles }].into();
        let mut rules = CallRules {
            provider_limits: Box::default(),
            lane_limits: Default::default(),
            credential_limits: Box::default(),
            max_in_flight_per_credential: u32::MAX,
            cooldown: limit_id(1),
            key: SHARED,
            credential_keys: (2..2 + credentials).map(|key| Key::new(key, SHARED.lo().wrapping_mul(key))).collect(),
            can_renew_login: false,
            tracks_remaining: false,
            lead: Span::from_millis(500),
            jitter: Span::ZERO,
            lanes: LanesSpec::default(),
            lane_rules: [LaneRules { timeout: DAY.times(30), retry: Retry::default() }; 3],
            budget: BudgetSpec::default(),
        };
        match of {
            Of::All => rules.provider_limits = ceilings(),
            Of::Background => rules.lane_limits[Lane::Background as usize] = ceilings(),
            Of::Credential => rules.credential_limits = ceilings(),
        }
        let pool = CredentialPool::new(Balance::RoundRobin, credentials as usize).unwrap();
        let breaker = Breaker::new(BreakerSpec::default()).unwrap();
        Self {
            state: ProviderState::new(&rules, pool, breaker, None),
            rules,
            store: Store::with_shared_limits(Arc::clone(&limits)),
            limits,
            rng: SmallRng::seed_from_u64(7),
        }
    }

    /// Makes a call that arrives at `now`, and returns its failure. `None` if it queues.
    fn arrive(&mut self, lane: Lane, cost: u64, timeout: Span, now: Time) -> (Call, Option<CallFailure>) {
        let mut call = Call::new(&self.rules, lane, cost, Some(now + timeout), now);
        match call.start(&mut self.state, now) {
            Ok(()) => (call, None),
            Err(failure) => (call, Some(failure)),
        }
    }

    /// The failure of a user's call. `None` if it queues; it is then cancelled immediately.
    fn meets(&mut self, cost: u64, timeout: Span, now: Time) -> Option<CallFailure> {
        let (mut call, failure) = self.arrive(Lane::User, cost, timeout, now);
        call.cancel(&self.rules, &mut self.state, Delivery::Unknown, now, &mut self.rng);
        failure
    }

    fn ask(&self, batch: &Batch, now: Time) -> Outcomes {
        self.store.decide(batch, now).1
    }

    /// Handles the turn of the lanes' next call, including its requests to the store, up to the next step.
    fn turn(&mut self, call: &mut Call, now: Time) -> CallProgress {
        let QueueStep::AskStore(ticket) = self.state.lanes.poll(now) else { panic!("nobody's turn") };
        assert_eq!(call.ticket(), Some(ticket));
        let mut next = call.handle_turn(&self.rules, &mut self.state, now, &mut self.rng);
        while next == CallProgress::AskStore {
            let outcomes = self.ask(self.state.store_requests.reservation(), now);
            let Self { rules, limits, state, rng, .. } = self;
            next = call.handle_outcomes(rules, limits, state, &outcomes, now, rng);
        }
        next
    }

    /// Makes a call that is sent and immediately answered like this.
    fn call(&mut self, cost: u64, class: Class, retry_after: Option<Span>, now: Time) -> NextStep {
        let (mut call, failure) = self.arrive(Lane::User, cost, DAY, now);
        assert_eq!(failure, None);
        let sent = self.turn(&mut call, now);
        assert!(matches!(sent, CallProgress::Send { .. }), "{sent:?}");
        let reply =
            AttemptReport::from_verdict(Verdict { wait: retry_after, ..Verdict::new(class) }, Delivery::Answered);
        let step = call.handle_reply(&self.rules, &mut self.state, &reply, now, &mut self.rng);
        if let Some(batch) = self.state.store_requests.updates() {
            self.ask(batch, now);
        }
        step
    }

    /// Makes a call with a long timeout that takes its turn and must wait.
    fn patient(&mut self, lane: Lane, cost: u64, now: Time) -> Call {
        let (mut call, failure) = self.arrive(lane, cost, DAY.times(9), now);
        assert_eq!(failure, None);
        assert!(matches!(self.turn(&mut call, now), CallProgress::Wait));
        call
    }
}

fn quota(limit: u64) -> LimitKind {
    LimitKind::Quota(Quota::new(limit, Arc::new(FixedPeriods(DAY))).unwrap())
}

fn midnight(now: Time) -> Time {
    Time::from_micros(now.as_micros().next_multiple_of(DAY.as_micros()))
}

#[test]
fn new_calls_meet_a_quota_spent_this_period() {
    let mut provider = Provider::new(quota(2), Of::All, Measure::Calls, 1);
    for _ in 0..2 {
        provider.call(1, Class::Success, None, test_time(0));
    }
    assert_eq!(provider.meets(1, DAY.times(2), test_time(1)), None, "nobody has been told yet");
    let _head = provider.patient(Lane::User, 1, test_time(1));
    let resets_at = midnight(test_time(0));
    let spent = Some(CallFailure::QuotaSpent { limit: limit_id(0), resets_at });
    assert_eq!(provider.meets(1, resets_at.since(test_time(2)), test_time(2)), spent, "its deadline is midnight");
    assert_eq!(provider.meets(1, resets_at.since(test_time(2)) + Span::from_micros(1), test_time(2)), None);
    assert_eq!(provider.state.lanes.waiting(Lane::User), 1, "who can't succeed doesn't queue");
    // The first call in the queue gets the same answer at its turn.
    let (mut next, failure) = provider.arrive(Lane::Webhook, 1, Span::from_secs(10), test_time(3));
    assert_eq!(failure, None, "a more urgent one may have reserves");
    assert!(matches!(provider.turn(&mut next, test_time(3)), CallProgress::Fail(failure) if Some(failure) == spent));
    assert_eq!(provider.meets(1, Span::from_secs(10), resets_at), None);
}

/// After the limit is reset, no call fails that would succeed.
#[test]
fn a_reset_admits_calls_again() {
    let mut provider = Provider::new(quota(2), Of::All, Measure::Calls, 1);
    for _ in 0..2 {
        provider.call(1, Class::Success, None, test_time(0));
    }
    let mut head = provider.patient(Lane::User, 1, test_time(1));
    assert!(provider.meets(1, Span::from_secs(9), test_time(2)).is_some());
    let mut reset = Batch::new(0);
    reset.push(Op::new(limit_id(0), Verb::Reset, SHARED, 1)).unwrap();
    provider.ask(&reset, test_time(3));
    provider.state.lanes.clear_refusals();
    let (mut late, failure) = provider.arrive(Lane::User, 1, Span::from_secs(9), test_time(3));
    assert_eq!(failure, None);
    assert!(matches!(provider.turn(&mut head, test_time(3)), CallProgress::Send { .. }));
    assert!(matches!(provider.turn(&mut late, test_time(3)), CallProgress::Send { .. }));
}

#[test]
fn a_lanes_quota_holds_only_that_lane() {
    let mut provider = Provider::new(quota(0), Of::Background, Measure::Calls, 1);
    // A quota of 0 never has room. The call learns that at its turn, and no other call is held.
    let (mut call, _) = provider.arrive(Lane::Background, 1, DAY, test_time(0));
    assert!(matches!(provider.turn(&mut call, test_time(0)), CallProgress::Fail(CallFailure::QuotaSpent { .. })));
    let mut provider = Provider::new(quota(1), Of::Background, Measure::Calls, 1);
    let (mut first, _) = provider.arrive(Lane::Background, 1, DAY, test_time(0));
    assert!(matches!(provider.turn(&mut first, test_time(0)), CallProgress::Send { .. }));
    let _waits = provider.patient(Lane::Background, 1, test_time(1));
    let (_, failure) = provider.arrive(Lane::Background, 1, Span::from_secs(60), test_time(2));
    assert_eq!(failure, Some(CallFailure::QuotaSpent { limit: limit_id(0), resets_at: midnight(test_time(0)) }));
    assert_eq!(provider.meets(1, Span::from_secs(60), test_time(2)), None);
}

/// A provider of one call per minute, whose call at 0 counts until half a second later.
fn one_per_minute() -> Provider {
    let window = Window::new(1, Span::from_secs(60), 1).unwrap().with_lead(MAX_LEAD);
    let mut provider = Provider::new(LimitKind::Window(window), Of::All, Measure::Calls, 1);
    let (mut first, _) = provider.arrive(Lane::User, 1, DAY, test_time(0));
    assert!(matches!(provider.turn(&mut first, test_time(0)), CallProgress::Send { .. }));
    provider
}

/// A reply may free a window's slot earlier, by up to the lead.
#[test]
fn calls_behind_others_fail_if_too_late() {
    let mut provider = one_per_minute();
    let _head = provider.patient(Lane::User, 1, test_time(0));
    let mut meets = |lane, timeout| {
        let (mut call, failure) = provider.arrive(lane, 1, timeout, test_time(0));
        call.cancel(&provider.rules, &mut provider.state, Delivery::Unknown, test_time(0), &mut provider.rng);
        failure
    };
    let limited = |at| Some(CallFailure::RateLimited { limit: limit_id(0), earliest: test_time(at) });
    let (minute, micro) = (Span::from_secs(60), Span::from_micros(1));
    assert_eq!(meets(Lane::Background, minute), limited(60_500), "no call of its lane is before it");
    assert_eq!(meets(Lane::Background, minute + micro), None);
    assert_eq!(meets(Lane::User, minute.times(2)), limited(120_500), "one call is before it");
    assert_eq!(meets(Lane::User, minute.times(2) + micro), None);
    assert_eq!(meets(Lane::Webhook, minute), None, "it goes first, and may have reserves");
}

#[test]
fn calls_that_expire_first_delay_no_call() {
    let mut provider = one_per_minute();
    let mut waiting = [(); 10].map(|()| provider.arrive(Lane::User, 1, Span::from_secs(70), test_time(0)).0);
    assert_eq!(provider.turn(&mut waiting[0], test_time(0)), CallProgress::Wait);
    assert_eq!(provider.meets(1, Span::from_secs(70), test_time(55_000)), None, "only one is sent before it");
    let limited = CallFailure::RateLimited { limit: limit_id(0), earliest: test_time(120_500) };
    assert_eq!(provider.meets(1, Span::from_secs(65), test_time(55_000)), Some(limited));
}

/// A call may cost less than was reserved. Calls that wait for that may be granted earlier than announced.
#[test]
fn uncertain_waits_fail_no_new_call() {
    let mut provider = Provider::new(quota(5), Of::All, Measure::Cost, 1);
    let (mut first, _) = provider.arrive(Lane::User, 5, DAY, test_time(0));
    assert!(matches!(provider.turn(&mut first, test_time(0)), CallProgress::Send { .. }));
    let _head = provider.patient(Lane::User, 5, test_time(0));
    assert_eq!(provider.meets(5, Span::from_secs(60), test_time(1)), None);
}

#[test]
fn new_calls_fail_during_a_requested_pause() {
    let mut provider = Provider::new(quota(9), Of::All, Measure::Calls, 1);
    let asked = Some(Span::from_secs(600));
    provider.call(1, Class::Throttled, asked, test_time(0));
    let cooling = Some(CallFailure::CredentialsCooling { earliest: test_time(600_000) });
    assert_eq!(provider.meets(1, Span::from_secs(600), test_time(0)), cooling);
    assert_eq!(provider.meets(1, Span::from_secs(600), test_time(1)), None, "it opens before the deadline");
    assert_eq!(provider.meets(1, Span::from_secs(1), test_time(599_000)), cooling);
    assert_eq!(provider.meets(1, Span::from_secs(1), test_time(600_000)), None);

    let mut provider = Provider::new(quota(9), Of::All, Measure::Calls, 2);
    provider.call(1, Class::Throttled, asked, test_time(0));
    assert_eq!(provider.meets(1, Span::from_secs(1), test_time(1)), None, "another credential is good");
    provider.call(1, Class::Throttled, Some(Span::from_secs(300)), test_time(1));
    assert_eq!(
        provider.meets(1, Span::from_secs(1), test_time(2)),
        Some(CallFailure::CredentialsCooling { earliest: test_time(300_001) })
    );
}

/// Another process closed the gate. The first call that asks learns it from the store.
#[test]
fn new_calls_fail_during_a_shared_pause() {
    let mut provider = Provider::new(quota(9), Of::All, Measure::Calls, 1);
    let throttle = |provider: &Provider, generation, wait: Span, now| {
        let mut batch = Batch::new(0);
        let key = provider.rules.credential_keys[0];
        batch.push(Op::new(limit_id(1), Verb::Throttle { generation }, key, wait.as_micros())).unwrap();
        provider.ask(&batch, now);
    };
    throttle(&provider, 0, Span::from_secs(30), test_time(0));
    let _head = provider.patient(Lane::User, 1, test_time(0));
    assert_eq!(
        provider.meets(1, Span::from_secs(10), test_time(1)),
        Some(CallFailure::CredentialsCooling { earliest: test_time(30_000) })
    );

    // After the closing, a success ends the slots early. So a call that can't wait for its slot still queues.
    let mut provider = Provider::new(quota(9), Of::All, Measure::Calls, 1);
    throttle(&provider, 0, Span::from_secs(30), test_time(0));
    let (mut first, _) = provider.arrive(Lane::User, 1, DAY, test_time(30_000));
    assert!(matches!(provider.turn(&mut first, test_time(30_000)), CallProgress::Send { .. }));
    let _head = provider.patient(Lane::User, 1, test_time(30_000));
    assert_eq!(provider.meets(1, Span::from_millis(50), test_time(30_000)), None);
}

#[test]
fn spent_credential_quotas_are_reported_with_reset() {
    let mut provider = Provider::new(quota(1), Of::Credential, Measure::Calls, 2);
    for _ in 0..2 {
        provider.call(1, Class::Success, None, test_time(0));
    }
    let spent = CallFailure::QuotaSpent { limit: limit_id(0), resets_at: midnight(test_time(0)) };
    let _head = provider.patient(Lane::User, 1, test_time(1));
    assert_eq!(provider.meets(1, Span::from_secs(10), test_time(2)), Some(spent));
}

/// If a shared limit and the credential refuse, the wait is the shared limit's, because another credential may be
/// available then.
#[test]
fn a_cooling_credential_never_lengthens_shared_limit_waits() {
    let window = Window::new(1, Span::from_secs(1), 1).unwrap();
    let mut provider = Provider::new(LimitKind::Window(window), Of::All, Measure::Calls, 2);
    let mut elsewhere = Batch::new(0);
    let key = provider.rules.credential_keys[0];
    elsewhere.push(Op::new(limit_id(0), Verb::Take, SHARED, 1)).unwrap();
    elsewhere.push(Op::new(limit_id(1), Verb::Throttle { generation: 0 }, key, 600_000_000)).unwrap();
    provider.ask(&elsewhere, test_time(0));
    let mut call = provider.patient(Lane::User, 1, test_time(0));
    assert_eq!(provider.state.lanes.poll(test_time(0)), QueueStep::Sleep(test_time(1_000)));
    assert!(matches!(provider.turn(&mut call, test_time(1_000)), CallProgress::Send { credential: 1 }));
}

/// A provider of two credentials that accept one call each, with both calls in flight.
fn busy() -> (Provider, [Call; 2]) {
    let mut provider = Provider::new(quota(99), Of::All, Measure::Calls, 2);
    provider.state.pool = provider.state.pool.clone().with_max_in_flight(1);
    let sent = [0, 1].map(|credential| {
        let (mut call, _) = provider.arrive(Lane::User, 1, DAY, test_time(0));
        assert_eq!(provider.turn(&mut call, test_time(0)), CallProgress::Send { credential });
        call
    });
    (provider, sent)
}

impl Provider {
    fn reply(&mut self, call: &mut Call, class: Class, retry_after: Option<Span>, now: Time) {
        let reply =
            AttemptReport::from_verdict(Verdict { wait: retry_after, ..Verdict::new(class) }, Delivery::Answered);
        call.handle_reply(&self.rules, &mut self.state, &reply, now, &mut self.rng);
        if let Some(batch) = self.state.store_requests.updates() {
            self.ask(batch, now);
        }
    }
}

/// The end of a call is unknown in advance, so no call fails because it would wait too long for that.
#[test]
fn the_first_ending_call_admits_the_next() {
    let (mut provider, [mut first, _second]) = busy();
    let (mut short, failure) = provider.arrive(Lane::User, 1, Span::from_secs(1), test_time(1));
    assert_eq!(failure, None);
    assert_eq!(provider.turn(&mut short, test_time(1)), CallProgress::Wait);
    let (mut long, failure) = provider.arrive(Lane::Background, 1, DAY, test_time(2));
    assert_eq!(
        (failure, provider.state.lanes.poll(test_time(2))),
        (None, QueueStep::Sleep(test_time(1_001))),
        "nobody asks in vain"
    );
    assert_eq!(provider.state.lanes.poll(test_time(1_001)), QueueStep::Expired(short.ticket().unwrap()));
    assert_eq!(short.handle_expiry(&mut provider.state, test_time(1_001)), CallFailure::DeadlineExceeded);
    provider.reply(&mut first, Class::Success, None, test_time(2_000));
    assert_eq!(provider.turn(&mut long, test_time(2_000)), CallProgress::Send { credential: 0 });
}

#[test]
fn hedges_use_only_a_free_credential() {
    let (mut provider, [mut first, second]) = busy();
    let mut hedge = second.new_hedge(&provider.state).unwrap();
    assert_eq!(hedge.start(&mut provider.state, test_time(1)), Ok(()));
    assert!(matches!(provider.turn(&mut hedge, test_time(1)), CallProgress::Fail(_)));
    provider.reply(&mut first, Class::Success, None, test_time(2));
    let mut hedge = second.new_hedge(&provider.state).unwrap();
    assert_eq!(hedge.start(&mut provider.state, test_time(2)), Ok(()));
    assert_eq!(provider.turn(&mut hedge, test_time(2)), CallProgress::Send { credential: 0 });
    assert_eq!([0, 1].map(|credential| provider.state.pool.in_flight(credential)), [1, 1]);
}

/// One credential cools down and the other is busy. The first that becomes available is used.
#[test]
fn waiting_calls_take_the_first_available_credential() {
    for (timeout, ends_at) in [(DAY, 9_000), (DAY, 2_000), (Span::from_secs(5), 2_000)] {
        let (mut provider, [mut first, mut second]) = busy();
        provider.reply(&mut first, Class::Throttled, Some(Span::from_secs(6)), test_time(0));
        let (mut call, failure) = provider.arrive(Lane::User, 1, timeout, test_time(0));
        assert_eq!(failure, None, "a call may end before the deadline");
        assert_eq!(provider.turn(&mut call, test_time(0)), CallProgress::Wait);
        let deadline = if timeout == DAY { test_time(6_000) } else { test_time(5_000) };
        assert_eq!(provider.state.lanes.poll(test_time(0)), QueueStep::Sleep(deadline));
        if ends_at < 6_000 {
            provider.reply(&mut second, Class::Success, None, test_time(ends_at));
            assert_eq!(provider.turn(&mut call, test_time(ends_at)), CallProgress::Send { credential: 1 });
        } else {
            assert_eq!(provider.turn(&mut call, test_time(6_000)), CallProgress::Send { credential: 0 });
        }
    }
    // As soon as the busy one cools down too, the wait has a known end again.
    let (mut provider, [mut first, mut second]) = busy();
    provider.reply(&mut first, Class::Throttled, Some(Span::from_secs(6)), test_time(0));
    let (mut call, _) = provider.arrive(Lane::User, 1, Span::from_secs(5), test_time(0));
    assert_eq!(provider.turn(&mut call, test_time(0)), CallProgress::Wait);
    provider.reply(&mut second, Class::Throttled, Some(Span::from_secs(7)), test_time(1));
    assert_eq!(
        provider.turn(&mut call, test_time(1)),
        CallProgress::Fail(CallFailure::CredentialsCooling { earliest: test_time(6_000) })
    );
}

/// A call waited for an unknown time. The quota that another call meets is a known reason for it, too.
#[test]
fn calls_that_expire_early_name_the_refusal() {
    let (mut provider, [mut first, _second]) = busy();
    let (mut short, _) = provider.arrive(Lane::User, 1, Span::from_secs(60), test_time(1));
    assert_eq!(provider.turn(&mut short, test_time(1)), CallProgress::Wait);
    let mut elsewhere = Batch::new(0);
    elsewhere.push(Op::new(limit_id(0), Verb::Take, SHARED, 97)).unwrap();
    provider.ask(&elsewhere, test_time(1));
    provider.reply(&mut first, Class::Success, None, test_time(2));
    let _urgent = provider.patient(Lane::Webhook, 1, test_time(2));
    assert_eq!(provider.state.lanes.poll(test_time(2)), QueueStep::Expired(short.ticket().unwrap()));
    let spent = CallFailure::QuotaSpent { limit: limit_id(0), resets_at: midnight(test_time(2)) };
    assert_eq!(short.handle_expiry(&mut provider.state, test_time(2)), spent);
}
