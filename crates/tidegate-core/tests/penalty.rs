//! Strikes, blocks, paroles and forgiveness from the view of a client.

use tidegate_core::batch::{BatchContext, OpContext};
use tidegate_core::penalty::PenaltyRecord;
use tidegate_core::state::Usage;
use tidegate_core::{
    Admission, Key, KeyState, Limit, LimitId, LimitKind, Op, Penalty, PenaltyMode, PenaltySpec, Rate, Reason, Span,
    Time, Verb, Window,
};
use tidegate_testkit::fixtures::{TestLimiter, client_key, doubling_penalty, limit_id, test_time, window_limit};
use tidegate_testkit::property;
use tidegate_testkit::random::{RandomSource, case_count};

const MINUTE: Span = Span::from_secs(60);
const LADDER: [u64; 14] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600, 3600];

fn login(mode: PenaltyMode) -> Limit {
    window_limit(5, 60).with_penalty(doubling_penalty(2, 3600, mode, MINUTE))
}

fn secs(span: Option<Span>) -> Option<f64> {
    span.map(|span| span.as_micros() as f64 / 1e6)
}

#[test]
fn each_strike_doubles_the_block_up_to_cap() {
    let limiter = TestLimiter::new([login(PenaltyMode::Parole)]);
    for left in (0..5).rev() {
        let decision = limiter.call(1, test_time(0));
        assert!(decision.allowed && !decision.blocked);
        assert_eq!((decision.remaining, decision.limit, decision.reason), (Some(left), Some(5), Reason::Ok));
        assert_eq!((decision.retry_after, decision.backoff, decision.next_allowed_at), (None, None, None));
    }
    let mut now = test_time(0);
    for (round, block) in LADDER.into_iter().enumerate() {
        let refused = limiter.call(1, now);
        assert!(!refused.allowed && refused.blocked, "round {round}");
        assert_eq!(refused.retry_after, Some(Span::from_secs(block)), "round {round}");
        assert_eq!(refused.backoff, Some(Span::from_secs(block)));
        assert_eq!(refused.next_allowed_at, Some(now + Span::from_secs(block)));
        assert_eq!((refused.reason, refused.remaining), (Reason::Penalty, Some(0)));
        let end = now + Span::from_secs(block);
        for early in [now, now + Span::from_micros(1), end - Span::from_millis(1), end - Span::from_micros(1)] {
            let before = limiter.store().snapshot(early);
            let told = limiter.call(1, early);
            assert!(!told.allowed && told.blocked);
            assert_eq!(told.retry_after, Some(end.since(early)));
            assert_eq!(told.backoff, Some(Span::from_secs(block)));
            assert_eq!(limiter.store().snapshot(early), before, "a call during a block changed something");
        }
        now = end;
        let full = limiter.fork().peek(1, now).reason == Reason::Parole;
        // The first five calls count for a minute. The blocks of the first four rounds end within it.
        assert_eq!(full, round < 4, "round {round}");
        if full {
            let paroled = limiter.call(1, now);
            assert!(paroled.allowed && !paroled.blocked);
            assert_eq!((paroled.reason, paroled.remaining, paroled.retry_after), (Reason::Parole, Some(0), None));
        } else {
            let mut passed = 0;
            while limiter.fork().call(1, now).allowed {
                assert_eq!(limiter.call(1, now).reason, Reason::Ok, "the parole lapsed: the window had room");
                passed += 1;
            }
            assert!((1..=5).contains(&passed), "round {round}: {passed}");
        }
    }
}

#[test]
fn first_blocks_are_exact_to_the_millisecond() {
    let limiter = TestLimiter::new([login(PenaltyMode::Parole)]);
    for _ in 0..5 {
        limiter.call(1, test_time(0));
    }
    assert_eq!(secs(limiter.call(1, test_time(0)).retry_after), Some(2.0));
    assert_eq!(secs(limiter.call(1, test_time(1_999)).retry_after), Some(0.001));
    assert!(limiter.call(1, test_time(2_000)).allowed);
    assert_eq!(secs(limiter.call(1, test_time(2_000)).retry_after), Some(4.0));
    assert!(!limiter.call(1, test_time(5_999)).allowed);
    assert!(limiter.call(1, test_time(6_000)).allowed);
    assert_eq!(secs(limiter.call(1, test_time(6_001)).retry_after), Some(8.0));
    assert!(limiter.call(2, test_time(6_001)).allowed, "another client");
}

#[test]
fn window_counts_persist_through_blocks() {
    let limiter = TestLimiter::new([login(PenaltyMode::Parole)]);
    for second in 0..5 {
        limiter.call(1, test_time(second * 1000));
    }
    assert!(!limiter.call(1, test_time(5_000)).allowed);
    assert!(limiter.call(1, test_time(7_000)).allowed, "on parole");
    // Six calls at 0, 1, 2, 3, 4 and 7 s: the window has room again after two of them have left it.
    assert!(!limiter.fork().peek(1, test_time(60_999)).allowed);
    assert_eq!(limiter.fork().peek(1, test_time(61_000)).reason, Reason::Ok);
}

#[test]
fn a_parole_admits_no_larger_call() {
    let limiter = TestLimiter::new([login(PenaltyMode::Parole)]);
    assert!(limiter.take(1, 4, test_time(0)).allowed);
    assert_eq!(secs(limiter.take(1, 3, test_time(0)).retry_after), Some(2.0));
    let larger = limiter.fork();
    let refused = larger.take(1, 4, test_time(2_000));
    assert_eq!((refused.allowed, secs(refused.retry_after)), (false, Some(4.0)));
    let smaller = limiter.fork();
    assert_eq!(smaller.take(1, 1, test_time(2_000)).reason, Reason::Ok, "there is room for one");
    assert_eq!(smaller.take(1, 2, test_time(2_000)).reason, Reason::Parole, "kept: there was none for three");
    assert!(!smaller.take(1, 1, test_time(2_000)).allowed, "used up");
    let during = limiter.fork().take(1, 4, test_time(1_000));
    assert_eq!(secs(during.retry_after), Some(59.0), "a larger call can't come back on this parole");
}

#[test]
fn a_parole_is_kept_while_another_limit_refuses() {
    for all in [false, true] {
        let mut first = login(PenaltyMode::Parole);
        if all {
            first = first.with_count_mode(tidegate_core::CountMode::All);
        }
        let limiter = TestLimiter::new([first, window_limit(1, 10)]);
        for _ in 0..5 {
            limiter.apply(tidegate_core::Verb::Take, &[(limit_id(0), 1)], 1, test_time(0));
        }
        assert!(!limiter.apply(tidegate_core::Verb::Take, &[(limit_id(0), 1)], 1, test_time(0)).allowed);
        limiter.apply(tidegate_core::Verb::Take, &[(limit_id(1), 1)], 1, test_time(1_000));
        assert!(!limiter.call(1, test_time(3_000)).allowed, "the second limit is full");
        let later = limiter.call(1, test_time(11_000));
        assert_eq!((later.allowed, later.reason), (true, Reason::Parole), "count = all: {all}");
        assert!(!limiter.call(1, test_time(21_000)).allowed, "used up");
    }
}

#[test]
fn a_parole_remains_after_its_strikes_forgiveness() {
    let spec = PenaltySpec { forgive_after: Some(Span::from_secs(1)), ..PenaltySpec::default() };
    let limiter = TestLimiter::new([window_limit(1, 60).with_penalty(Penalty::new(spec, MINUTE).unwrap())]);
    assert!(limiter.call(1, test_time(0)).allowed);
    assert_eq!(secs(limiter.call(1, test_time(0)).retry_after), Some(2.0));
    let late = limiter.call(1, test_time(30_000));
    assert_eq!((late.allowed, late.reason), (true, Reason::Parole));
    assert_eq!(secs(limiter.call(1, test_time(30_000)).retry_after), Some(2.0), "the strike itself was forgiven");
}

#[test]
fn a_log_of_one_entry_supports_parole() {
    let window = Window::new(1, MINUTE, 1).unwrap();
    let limiter = TestLimiter::new([Limit::new(LimitKind::Window(window)).with_penalty(doubling_penalty(
        2,
        8,
        PenaltyMode::Parole,
        MINUTE,
    ))]);
    assert!(limiter.call(1, test_time(0)).allowed);
    let mut now = test_time(0);
    for _ in 0..20 {
        now = limiter.call(1, now).next_allowed_at.unwrap();
        assert!(limiter.call(1, now).allowed);
    }
}

#[test]
fn each_quiet_hour_removes_one_strike() {
    // Three strikes: 2, 4 and 8 s. Each hour without a refusal since the last block's end removes one.
    for (after_ms, next) in [
        (0, 16),
        (3_599_999, 16),
        (3_600_000, 8),
        (7_199_999, 8),
        (7_200_000, 4),
        (10_799_999, 4),
        (10_800_000, 2),
        (1_000_000_000, 2),
    ] {
        let limiter = TestLimiter::new([login(PenaltyMode::Parole)]);
        let mut now = test_time(0);
        for block in [2, 4, 8] {
            while limiter.fork().call(1, now).allowed {
                limiter.call(1, now);
            }
            assert_eq!(limiter.call(1, now).retry_after, Some(Span::from_secs(block)));
            now = now + Span::from_secs(block);
        }
        now = now + Span::from_millis(after_ms);
        while limiter.fork().call(1, now).allowed {
            limiter.call(1, now);
        }
        assert_eq!(limiter.call(1, now).retry_after, Some(Span::from_secs(next)), "{after_ms} ms after");
    }
}

#[test]
fn refusals_during_a_block_never_delay_forgiveness() {
    let quiet = TestLimiter::new([login(PenaltyMode::Parole)]);
    for _ in 0..6 {
        quiet.call(1, test_time(0));
    }
    let loud = quiet.fork();
    for millis in 0..2_000 {
        loud.call(1, test_time(millis));
    }
    let later = test_time(2_000 + 3_600_000);
    assert_eq!(quiet.store().snapshot(later), loud.store().snapshot(later));
    for limiter in [quiet, loud] {
        for _ in 0..5 {
            assert!(limiter.call(1, later).allowed);
        }
        assert_eq!(secs(limiter.call(1, later).retry_after), Some(2.0));
    }
}

#[test]
fn strict_mode_states_the_longer_wait() {
    let limiter = TestLimiter::new([login(PenaltyMode::Strict)]);
    for second in 0..5 {
        assert!(limiter.call(1, test_time(second * 1000)).allowed);
    }
    let refused = limiter.call(1, test_time(5_000));
    assert_eq!((secs(refused.retry_after), secs(refused.backoff)), (Some(55.0), Some(2.0)));
    assert_eq!(refused.next_allowed_at, Some(test_time(60_000)));
    let again = limiter.fork();
    let served = again.call(1, test_time(7_000));
    assert_eq!(
        (secs(served.retry_after), secs(served.backoff)),
        (Some(53.0), Some(4.0)),
        "nothing passes a full window"
    );
    assert!(!limiter.fork().call(1, test_time(59_999)).allowed);
    assert_eq!(limiter.call(1, test_time(60_000)).reason, Reason::Ok);
    let mut now = test_time(60_000);
    for strike in 0..8 {
        while limiter.fork().call(1, now).allowed {
            limiter.call(1, now);
        }
        let told = limiter.call(1, now);
        let block = Span::from_secs(LADDER[strike + 1]);
        assert_eq!(told.backoff, Some(block));
        assert!(told.retry_after >= Some(block));
        now = now + told.retry_after.unwrap();
    }
}

#[test]
fn a_ban_has_a_constant_length() {
    let ban = Penalty::ban(Span::from_secs(600), MINUTE).unwrap();
    let limiter = TestLimiter::new([window_limit(5, 60).with_penalty(ban)]);
    let mut now = test_time(0);
    for round in 0..5 {
        for call in 0..5 {
            assert!(limiter.call(1, now).allowed, "round {round}, call {call}");
        }
        assert_eq!(limiter.call(1, now).retry_after, Some(Span::from_secs(600)));
        assert!(!limiter.call(1, now + Span::from_micros(599_999_999)).allowed);
        now = now + Span::from_secs(600);
    }
}

/// The billionth strike. Strikes stop at the twelfth; from then on, a strike doesn't change the record.
#[test]
fn strikes_beyond_the_cap_change_nothing() {
    let limit = login(PenaltyMode::Parole);
    let penalty = *limit.penalty().unwrap();
    let mut record = PenaltyRecord::default();
    let mut now = test_time(0);
    let relative = |record: &PenaltyRecord, now: Time| (record.strikes, record.parole, record.blocked_until.since(now));
    for _ in 0..12 {
        penalty.strike(&mut record, 1, now);
        now = record.blocked_until;
    }
    let fixed = relative(&record, now);
    for _ in 0..case_count(100_000, 600_000) {
        penalty.strike(&mut record, 1, now);
        assert_eq!(relative(&record, now).2, Span::from_secs(3600));
        now = record.blocked_until;
        assert_eq!(relative(&record, now), fixed);
    }
    for strikes in [12, 13, u8::MAX] {
        let record = PenaltyRecord { blocked_until: test_time(0), parole: u64::MAX, strikes };
        let mut state = KeyState::new(Usage::None, record);
        let op = Op::new(LimitId::FIRST, Verb::Take, Key::default(), 1);
        let ask = OpContext { op: &op, limit: &limit, batch: BatchContext::default(), now: test_time(0) };
        let mut outcome = state.evaluate(&ask);
        outcome.admission = Admission::Refused;
        state.strike(&ask, &mut outcome);
        assert_eq!((outcome.block, outcome.strikes), (Span::from_secs(3600), 12));
    }
}

/// However a client abuses its paroles, no window contains more than log2(cap ÷ base) + ⌈W ÷ cap⌉ excess calls.
#[test]
fn parole_abuse_gains_a_bounded_excess() {
    property::check(case_count(1_000, 20_000), 400, |mut random| {
        let span = Span::from_millis(random.between(1_000, 100_000));
        let base = Span::from_millis(random.between(1, 4_000));
        let cap = base.times(random.pick(&[1, 2, 3, 8, 100, 1800]));
        let limit = random.between(1, 6);
        let spec = PenaltySpec { base, cap, ..PenaltySpec::default() };
        let window = Window::new(limit, span, 64).map_err(|error| error.to_string())?;
        let penalty = Penalty::new(spec, span).map_err(|error| error.to_string())?;
        let limiter = TestLimiter::new([Limit::new(LimitKind::Window(window)).with_penalty(penalty)]);
        let mut admitted: Vec<Time> = Vec::new();
        let mut now = test_time(0);
        while !random.is_exhausted() {
            let decision = limiter.call(1, now);
            if decision.allowed {
                admitted.push(now);
            }
            now = abuse(&mut random, now, decision.next_allowed_at, span);
        }
        for (last, &end) in admitted.iter().enumerate() {
            let held = admitted[..=last].iter().filter(|&&moment| end.since(moment) < span).count() as u64;
            let flat = span.as_micros().div_ceil(cap.as_micros());
            let grown = held.saturating_sub(limit + flat);
            let allowed = u32::try_from(grown).ok().and_then(|grown| base.as_micros().checked_shl(grown));
            if allowed.is_none_or(|allowed| allowed > cap.as_micros()) {
                return Err(format!("{held} calls in {span}, limit {limit}, base {base}, cap {cap}"));
            }
        }
        Ok(())
    });
}

fn abuse(random: &mut RandomSource, now: Time, told: Option<Time>, span: Span) -> Time {
    match (told, random.below(16)) {
        (Some(told), 0..=12) => told,
        (_, 13) => now + Span::from_micros(random.below(span.as_micros() * 2)),
        (_, 14) => now + Span::from_micros(random.below(1_000)),
        _ => now,
    }
}

#[test]
fn calls_during_a_block_change_no_state() {
    property::check(case_count(400, 8_000), 1_500, |random| {
        let mut world =
            tidegate_testkit::traffic::TrafficGenerator::new(random, tidegate_testkit::traffic::PlanContents::Simple);
        let limiter = TestLimiter::with_shared_limits(std::sync::Arc::clone(world.limits()));
        while !world.random().is_exhausted() {
            let now = world.advance_clock();
            let call = world.take_batch();
            let before = limiter.store().snapshot(now);
            let (decision, outcomes) = limiter.decide(&call, now);
            let blocked = outcomes.list().iter().any(|outcome| outcome.admission == Admission::Blocked);
            if blocked && (decision.allowed || limiter.store().snapshot(now) != before) {
                return Err(format!("a call during a block: {decision:?}"));
            }
            world.record_outcomes(&outcomes);
        }
        Ok(())
    });
}

#[test]
fn penalties_never_waive_a_quota_or_a_permit() {
    let hour = std::sync::Arc::new(tidegate_core::quota::FixedPeriods(Span::from_secs(3600)));
    let quota = LimitKind::Quota(tidegate_core::Quota::new(1, hour).unwrap());
    let permits = LimitKind::Concurrency(tidegate_core::Concurrency::new(1, MINUTE).unwrap());
    for kind in [quota, permits] {
        let limit = Limit::new(kind).with_penalty(doubling_penalty(2, 3600, PenaltyMode::Parole, MINUTE));
        let limiter = TestLimiter::new([limit]);
        let op = |cost| tidegate_core::Op::new(limit_id(0), tidegate_core::Verb::Take, client_key(1), cost);
        let ask = |holder, now| {
            let mut batch = tidegate_core::Batch::new(holder);
            batch.push(op(1)).unwrap();
            limiter.decide(&batch, now).0
        };
        assert!(ask(1, test_time(0)).allowed);
        let refused = ask(2, test_time(0));
        let wait = refused.retry_after.unwrap();
        assert!(wait > Span::from_secs(2), "{wait}: the longer of block and room");
        assert!(!ask(3, test_time(2_000)).allowed, "no parole");
        let told = ask(4, test_time(2_001)).retry_after.unwrap();
        assert!(ask(5, test_time(2_001) + told).allowed);
    }
}

/// The most calls that a client gets in the first `seconds` if it obeys every wait, by trying all ways to call at whole
/// seconds.
fn most_admitted(limiter: &TestLimiter, second: u64, seconds: u64, wait_until: u64) -> u64 {
    if second >= seconds {
        return 0;
    }
    let mut most = most_admitted(limiter, second + 1, seconds, wait_until);
    if second < wait_until {
        return most;
    }
    let now = test_time(second * 1_000);
    let limiter = limiter.fork();
    let mut admitted = 0;
    loop {
        let decision = limiter.call(1, now);
        if let Some(wait) = decision.retry_after {
            return most.max(admitted + most_admitted(&limiter, second + 1, seconds, second + wait.as_secs_ceil()));
        }
        admitted += 1;
        most = most.max(admitted + most_admitted(&limiter, second + 1, seconds, second));
    }
}

fn penalty(base: u64, factor: u32, cap: u64, forgive_after: u64, window: Span) -> Penalty {
    let (base, cap, forgive_after) = (Span::from_secs(base), Span::from_secs(cap), Span::from_secs(forgive_after));
    let spec = PenaltySpec { base, factor, cap, forgive_after: Some(forgive_after), ..PenaltySpec::default() };
    Penalty::new(spec, window).expect("a valid penalty")
}

#[test]
fn the_most_that_obedient_clients_get_is_known() {
    for (base, factor, cap, forgive_after, window) in [
        (1, 1, 1, 9, 7),
        (1, 2, 2, 9, 8),
        (1, 2, 4, 1, 9),
        (1, 2, 8, 1, 9),
        (1, 2, 8, 2, 10),
        (2, 2, 8, 1, 10),
        (1, 3, 9, 3, 11),
        (2, 2, 4, 1, 10),
        (3, 1, 3, 1, 10),
        (9, 1, 9, 1, 9),
        (1, 2, 4, 60, 10),
        (1, 4, 4, 2, 11),
        (1, 1, 5, 60, 7),
    ] {
        let span = Span::from_secs(window);
        let penalty = penalty(base, factor, cap, forgive_after, span);
        let limiter = TestLimiter::new([window_limit(2, window).with_penalty(penalty)]);
        let most = 2 + penalty.max_paroles(span);
        let name = format!("{base} s × {factor} up to {cap} s, forgiven after {forgive_after} s, in {window} s");
        assert_eq!(most_admitted(&limiter, 0, window, 0), most, "{name}");
    }
}

#[test]
fn rates_admit_obedient_clients_no_more() {
    for (per, burst, base, factor, cap, forgive_after, within) in [
        (3, 2, 1, 2, 4, 60, 9),
        (3, 1, 1, 1, 1, 60, 9),
        (2, 2, 1, 2, 8, 2, 8),
        (4, 1, 2, 2, 8, 1, 12),
        (1, 2, 4, 2, 8, 9, 6),
        (5, 2, 1, 2, 2, 1, 10),
        (6, 1, 1, 3, 9, 1, 12),
        (8, 1, 1, 2, 16, 4, 14),
    ] {
        let rate = Rate::new(1, Span::from_secs(per), burst).expect("a valid rate");
        let refill = Span::from_secs(per * burst);
        let penalty = penalty(base, factor, cap, forgive_after, refill);
        let limiter = TestLimiter::new([Limit::new(LimitKind::Rate(rate)).with_penalty(penalty)]);
        let within = Span::from_secs(within);
        let most = rate.max_in(within) + penalty.max_paroles(within + Span::from_micros(1));
        let name = format!("1 in {per} s, {burst} at once, {base} s × {factor} up to {cap} s, in {within:?}");
        let found = most_admitted(&limiter, 0, within.as_secs_ceil() + 1, 0);
        assert!(found <= most && found >= rate.max_in(within), "{name}: {found} of at most {most}");
    }
}
