//! Windows for a service that counts each call at some time between its start and its end.
#![expect(clippy::unwrap_used, reason = "a test")]

use tidegate_core::{Batch, Limit, LimitKind, Op, PenaltyMode, Span, Time, Verb, Window};
use tidegate_testkit::fixtures::{self, TestLimiter, client_key, limit_id};
use tidegate_testkit::property;
use tidegate_testkit::random::case_count;

const LEAD: Span = Span::from_millis(500);

fn at(secs: u64) -> Time {
    fixtures::test_time(secs * 1000)
}

fn limiter(limit: u64, window: Span) -> TestLimiter {
    let window = Window::new(limit, window, limit.max(1) as u32).unwrap().with_lead(LEAD);
    TestLimiter::new([Limit::new(LimitKind::Window(window))])
}

fn ask(verb: Verb, cost: u64) -> Batch {
    let mut batch = Batch::new(0).with_lead(LEAD);
    batch.push(Op::new(limit_id(0), verb, client_key(0), cost)).unwrap();
    batch
}

/// The time at which a refused call may be repeated. `None` if it is admitted.
fn take(limiter: &TestLimiter, now: Time) -> Option<Time> {
    let (decision, outcomes) = limiter.decide(&ask(Verb::Take, 1), now);
    (!decision.allowed).then(|| outcomes.list()[0].retry_at)
}

fn tell(limiter: &TestLimiter, verb: Verb, cost: u64, started: Time, now: Time) {
    let mut batch = Batch::new(0).with_counted_at(started + LEAD);
    batch.push(Op::new(limit_id(0), verb, client_key(0), cost)).unwrap();
    limiter.decide(&batch, now);
}

fn used(limiter: &TestLimiter, now: Time) -> u64 {
    limiter.decide(&ask(Verb::Peek, 1), now).1.list()[0].used
}

#[test]
fn calls_count_from_their_reply_or_lead() {
    let limiter = limiter(1, Span::from_secs(10));
    assert_eq!(take(&limiter, at(0)), None);
    assert_eq!(take(&limiter, at(1)), Some(at(10) + LEAD));
    tell(&limiter, Verb::Settle, 1, at(0), at(0) + Span::from_millis(80));
    assert_eq!(take(&limiter, at(1)), Some(at(10) + Span::from_millis(80)));
    // A call can't end twice, and a reply after the lead changes nothing.
    tell(&limiter, Verb::Settle, 1, at(0), at(2));
    assert_eq!(take(&limiter, at(3)), Some(at(10) + Span::from_millis(80)));
}

#[test]
fn an_unsent_call_refunds_its_own_entry() {
    let limiter = limiter(2, Span::from_secs(10));
    assert_eq!((take(&limiter, at(0)), take(&limiter, at(4))), (None, None));
    tell(&limiter, Verb::Refund, 1, at(4), at(4));
    assert_eq!((used(&limiter, at(4)), take(&limiter, at(5))), (1, None));
    assert_eq!(
        take(&limiter, at(6)),
        Some(at(10) + LEAD),
        "the older one still counts, and is the first to free its slot"
    );
}

/// A charge that has left the window can't be refunded from another call's charge.
#[test]
fn an_expired_call_refunds_nothing() {
    let limiter = limiter(1, Span::from_secs(10));
    assert_eq!((take(&limiter, at(0)), take(&limiter, at(11))), (None, None));
    tell(&limiter, Verb::Refund, 1, at(0), at(12));
    assert_eq!((used(&limiter, at(12)), take(&limiter, at(13))), (1, Some(at(21) + LEAD)));
}

/// An end with a cost of 0 or with extreme values neither counts nor fails.
#[test]
fn zero_and_maximal_costs_are_handled() {
    let limiter = limiter(2, Span::from_secs(10));
    assert_eq!(take(&limiter, at(0)), None);
    tell(&limiter, Verb::Settle, 0, at(0), at(0));
    tell(&limiter, Verb::Refund, 1, at(0), at(0));
    assert!(limiter.store().is_empty(), "an end of nothing leaves nothing behind");
    for second in [0, 1, 2] {
        tell(&limiter, Verb::Debit, u64::MAX, at(0), at(second));
    }
    assert_eq!(used(&limiter, at(2)), 3 * tidegate_core::MAX_COST, "the most that a call costs, thrice");
    tell(&limiter, Verb::Refund, u64::MAX, at(2), at(3));
    assert_eq!((used(&limiter, at(3)), take(&limiter, at(3))), (0, None));
}

/// A debit during a block fills a window that had room. A caller that returns at the announced time still passes.
#[test]
fn a_debit_during_a_block_keeps_the_parole() {
    for (debit_at, passes) in [(1, true), (2, false)] {
        let penalty = fixtures::doubling_penalty(2, 8, PenaltyMode::Parole, Span::from_secs(60));
        let limiter = TestLimiter::new([fixtures::window_limit(1, 60).with_penalty(penalty)]);
        assert!(limiter.call(1, at(0)).allowed && !limiter.call(1, at(0)).allowed);
        let one = |verb, cost, now| limiter.apply(verb, &[(limit_id(0), 1)], cost, now).allowed;
        one(Verb::Refund, 1, at(1));
        one(Verb::Debit, 1, at(debit_at));
        assert_eq!(one(Verb::Take, 1, at(2)), passes, "after the block there was room to come back for");
    }
}

#[test]
fn debits_charge_beyond_the_limit() {
    let limiter = limiter(10, Span::from_secs(10));
    assert_eq!(take(&limiter, at(0)), None);
    tell(&limiter, Verb::Debit, 14, at(0), at(1));
    assert_eq!(used(&limiter, at(1)), 15);
    assert_eq!(take(&limiter, at(2)), Some(at(11)));
}

/// For every transit time within the lead, a service that counts arrivals exactly never counts too many. At saturation,
/// little of the limit stays unused.
#[test]
fn arrivals_within_the_lead_never_exceed_limits() {
    property::check(case_count(300, 5_000), 300, |mut random| {
        let limit = random.between(1, 50);
        let window = Span::from_millis(random.between(600, 20_000));
        let limiter = limiter(limit, window);
        let longest = random.between(1, LEAD.as_micros());
        let mut now = at(0);
        let mut arrivals: Vec<Time> = Vec::new();
        let mut replies: Vec<(Time, Time)> = Vec::new();
        while !random.is_exhausted() {
            replies.sort();
            match take(&limiter, now) {
                None => {
                    let there = Span::from_micros(random.below(longest));
                    arrivals.push(now + there);
                    if random.chance(90) {
                        replies.push((now + there + Span::from_micros(random.below(longest - there.as_micros())), now));
                    }
                }
                Some(retry_at) => {
                    let reply = replies.first().copied().filter(|(reply, _)| *reply <= retry_at);
                    match reply {
                        Some((reply, started)) => {
                            replies.remove(0);
                            now = now.max(reply);
                            tell(&limiter, Verb::Settle, 1, started, reply.max(now));
                        }
                        None => now = retry_at,
                    }
                }
            }
        }
        arrivals.sort();
        for (first, last) in arrivals.iter().zip(arrivals.iter().skip(limit as usize)) {
            if last.since(*first) < window {
                return Err(format!("{} calls within {:?}", limit + 1, last.since(*first)));
            }
        }
        Ok(())
    });
}
