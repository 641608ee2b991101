//! Reservations: the limit holds whatever callers do, and every kept reservation is honoured.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use tidegate_core::quota::FixedPeriods;
use tidegate_core::rate::ArrivalTime;
use tidegate_core::reservation::{FORFEIT_HORIZONS, Forfeit, MAX_RECORDS, ReservationQueue};
use tidegate_core::state::Usage;
use tidegate_core::{
    Admission, Batch, Key, KeyState, Limit, LimitId, LimitKind, Limits, Op, Outcome, Quota, Rate, ReservationRules,
    Span, Time, Verb, Window, batch, decision,
};

const START: Time = Time::from_secs(1_000_000_000);

fn at(millis: u64) -> Time {
    START + Span::from_millis(millis)
}

/// A limit with reservations, and the state of its only key.
struct Shared {
    limits: Limits,
    states: [KeyState; 1],
}

impl Shared {
    fn new(kind: LimitKind, rules: ReservationRules) -> Self {
        let limits = Limits::new(vec![Limit::new(kind).with_reservations(rules)]).unwrap();
        Self { limits, states: [KeyState::default()] }
    }

    fn call(&mut self, caller: u64, cost: u64, presented: Time, now: Time) -> Outcome {
        let mut batch = Batch::with_op(0, Op::new(LimitId::FIRST, Verb::Take, Key::new(1, 1), cost));
        batch.set_caller(caller, presented);
        let outcomes = batch::execute(&batch, &self.limits, self.states.as_mut_slice(), now);
        // Every store may write the state and read it again.
        let mut bytes = Vec::new();
        self.states[0].encode(&mut bytes);
        self.states[0] = KeyState::decode(&bytes).unwrap();
        outcomes.list()[0]
    }

    fn set_rules(&mut self, rules: ReservationRules) {
        let kind = self.limit().kind().clone();
        self.limits = Limits::new(vec![Limit::new(kind).with_reservations(rules)]).unwrap();
    }

    fn queue(&self) -> ReservationQueue {
        match self.states[0].usage() {
            Usage::Reserved(reserved) => reserved.queue.clone(),
            _ => ReservationQueue::default(),
        }
    }

    fn records(&self) -> usize {
        let queue = self.queue();
        queue.reservations.len() + queue.forfeits.len()
    }

    fn limit(&self) -> &Limit {
        self.limits.get(LimitId::FIRST).unwrap()
    }
}

fn rate(count: u64, burst: u64) -> LimitKind {
    LimitKind::Rate(Rate::new(count, Span::from_secs(1), burst).unwrap())
}

fn rules(share: u16, grace_millis: u64) -> ReservationRules {
    ReservationRules::new(Span::from_secs(30), share, Span::from_millis(grace_millis)).unwrap()
}

/// Returns an error if these admitted calls, in the order of their times, exceed the limit.
fn check_limit(kind: &LimitKind, admitted: &[(Time, u64)]) -> Result<(), String> {
    let mut arrival = ArrivalTime::default();
    for (index, &(now, cost)) in admitted.iter().enumerate() {
        let before = |start: Time| admitted[..=index].iter().filter(move |(at, _)| *at >= start).map(|(_, cost)| cost);
        let fits = match kind {
            LimitKind::Rate(rate) => {
                let fits = rate.retry_at(arrival, cost, now) <= now;
                arrival = rate.charge(arrival, cost, now);
                fits
            }
            LimitKind::Window(window) => {
                let start = Time::ZERO + now.since(Time::ZERO + window.window()) + Span::from_micros(1);
                before(start).sum::<u64>() <= window.limit()
            }
            LimitKind::Quota(quota) => before(quota.period(now).start).sum::<u64>() <= quota.limit(),
            _ => false,
        };
        if !fits {
            return Err(format!("call {index} of {cost} at {now:?} exceeds the limit"));
        }
    }
    Ok(())
}

fn any_kind() -> impl Strategy<Value = LimitKind> {
    let period = prop_oneof![Just(1_000_u64), Just(3_000), Just(10_000)];
    prop_oneof![
        (prop_oneof![1_u64..200, 1_u64..5], 1_u64..40).prop_map(|(count, burst)| rate(count, burst)),
        (1_u64..60, period.clone(), prop_oneof![Just(8_u32), Just(64)]).prop_map(|(limit, millis, entries)| {
            LimitKind::Window(Window::new(limit, Span::from_millis(millis), entries).unwrap())
        }),
        (1_u64..60, period).prop_map(|(limit, millis)| {
            LimitKind::Quota(Quota::new(limit, Arc::new(FixedPeriods(Span::from_millis(millis)))).unwrap())
        }),
    ]
}

/// A part of the capacity in thousandths, often a small one.
fn any_part() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), 0_u64..100, 0_u64..1000]
}

/// The behaviour of a caller that has a reservation.
#[derive(Clone, Copy, Debug)]
enum Habit {
    /// It returns this share of the grace after its instant, in thousandths.
    Returns(u64),
    /// It returns half of the wait too early, and then at its instant.
    ComesEarly,
    Forgets,
}

fn any_habit() -> impl Strategy<Value = Habit> {
    let part = prop_oneof![0_u64..1000, Just(999)];
    prop_oneof![4 => part.prop_map(Habit::Returns), 1 => Just(Habit::ComesEarly), 1 => Just(Habit::Forgets)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn the_limit_holds_and_reservations_are_honoured(
        kind in any_kind(),
        share in prop_oneof![Just(1000_u16), Just(500), 1_u16..1000],
        grace in prop_oneof![Just(1_000_u64), 1_u64..2_000, 1_u64..10_000],
        other in (1_u16..=1000, 1_u64..2_000),
        habits in prop::collection::vec(any_habit(), 1..40),
        steps in prop::collection::vec((0_usize..80, 0_u64..400_000, any_part()), 1..200),
    ) {
        // The rules change while reservations are out, or stay as they are.
        let rules_in_turn = [rules(share, grace), if other.1 % 2 == 0 { rules(other.0, other.1) } else { rules(share, grace) }];
        let mut shared = Shared::new(kind.clone(), rules_in_turn[0]);
        let mut admitted: Vec<(Time, u64)> = Vec::new();
        // The reservations that callers have.
        let mut given: BTreeMap<u64, (Time, u64)> = BTreeMap::new();
        // Calls by their time: the caller, the cost, and true if it has a reservation then.
        let mut agenda: BTreeMap<(Time, usize), (u64, u64, Time)> = BTreeMap::new();
        let mut now = START;
        for (number, (caller, gap, part)) in steps.into_iter().enumerate() {
            let cost = 1 + kind.capacity() * part / 1000;
            now = now + Span::from_micros(gap / (1 + number as u64 % 7));
            agenda.insert((now, number), (caller as u64 + 1, cost, Time::ZERO));
        }
        let mut order = 1_000;
        while let Some(((now, _), (caller, cost, reserved_at))) = agenda.pop_first() {
            let rules = rules_in_turn[order / 16 % 2];
            shared.set_rules(rules);
            let presented = if order % 2 == 0 { reserved_at } else { Time::ZERO };
            let outcome = shared.call(caller, cost, presented, now);
            let is_admitted = outcome.admission == Admission::Admitted;
            prop_assert!(shared.records() <= MAX_RECORDS);
            if is_admitted {
                admitted.push((now, cost));
            }
            // Another call of the caller may have used it.
            let is_given = given.get(&caller).is_some_and(|&(at, most)| at == reserved_at && cost <= most);
            let had_reservation = reserved_at > Time::ZERO && now >= reserved_at && is_given;
            prop_assert!(is_admitted || !had_reservation, "refused at {now:?}: {outcome:?}, reserved {reserved_at:?}");
            if outcome.reserved_at == Time::ZERO {
                continue;
            }
            if is_admitted {
                let used = given.remove(&caller).map(|(at, _)| at);
                prop_assert_eq!(used, Some(outcome.reserved_at), "admitted without a reservation");
                continue;
            }
            prop_assert!(outcome.retry_at == outcome.reserved_at && outcome.retry_at > now, "{outcome:?}");
            prop_assert!(outcome.retry_at.since(now) <= rules.horizon());
            let new_at = outcome.reserved_at;
            if given.get(&caller).is_some_and(|&(at, _)| at == new_at) {
                continue;
            }
            given.insert(caller, (new_at, cost));
            order += 1;
            // A caller that has lost its reservation doesn't keep another one.
            let habit = if reserved_at == Time::ZERO { habits[caller as usize % habits.len()] } else { Habit::Forgets };
            match habit {
                Habit::Returns(part) => {
                    let late = Span::from_micros(rules.grace().as_micros() * part / 1000);
                    agenda.insert((new_at + late, order), (caller, cost, new_at));
                }
                Habit::ComesEarly => {
                    let half = Span::from_micros(new_at.since(now).as_micros() / 2);
                    agenda.insert((now + half, order), (caller, cost, new_at));
                    order += 1;
                    agenda.insert((new_at, order), (caller, cost, new_at));
                }
                Habit::Forgets => {}
            }
        }
        if let Err(error) = check_limit(&kind, &admitted) {
            prop_assert!(false, "{error}: {admitted:?}");
        }
        let idle_at = shared.states[0].idle_at(shared.limit());
        let horizon = rules_in_turn[0].horizon();
        let spacing = |rules: &ReservationRules| match &kind {
            LimitKind::Rate(rate) => rules.spacing(rate, rate.burst()),
            _ => Span::ZERO,
        };
        let spacing = spacing(&rules_in_turn[0]).max(spacing(&rules_in_turn[1]));
        let latest = now + horizon.times(FORFEIT_HORIZONS + 2) + Span::from_secs(12);
        prop_assert!(idle_at <= latest.max(now + horizon + spacing), "{idle_at:?}");
    }
}

/// The least distance from the ends of a grace at which a caller returns though the clock is changed.
const CLOCK_STEP: Span = Span::from_millis(200);

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn clock_steps_lose_no_reservation(
        kind in any_kind(),
        share in 1_u16..=1000,
        grace in 500_u64..2_000,
        steps in prop::collection::vec((0_u64..40, 0_u64..400_000, any_part(), 0_u64..1000, 0_u64..3), 1..200),
    ) {
        let rules = rules(share, grace);
        let mut shared = Shared::new(kind.clone(), rules);
        let mut agenda: BTreeMap<(Time, usize), (u64, u64, Time)> = BTreeMap::new();
        let mut now = START;
        for (number, &(caller, gap, part, ..)) in steps.iter().enumerate() {
            now = now + Span::from_micros(gap);
            agenda.insert((now, number), (caller + 1, 1 + kind.capacity() * part / 1000, Time::ZERO));
        }
        let mut given: BTreeMap<u64, (Time, u64)> = BTreeMap::new();
        let mut order = 1_000;
        while let Some(((now, _), (caller, cost, reserved_at))) = agenda.pop_first() {
            let &(.., part, step) = &steps[order % steps.len()];
            // The clock is wrong by a step backwards, not at all, or by one forwards.
            let clock = Time::ZERO + now.since(Time::ZERO + CLOCK_STEP) + CLOCK_STEP.times(step);
            let outcome = shared.call(caller, cost, reserved_at, clock);
            let is_admitted = outcome.admission == Admission::Admitted;
            if reserved_at > Time::ZERO {
                let is_given = given.get(&caller).is_some_and(|&(at, most)| at == reserved_at && cost <= most);
                prop_assert!(is_admitted || !is_given, "refused at {clock:?}: {outcome:?}");
                prop_assert!(is_given || outcome.reserved_at != reserved_at || !is_admitted, "admitted twice");
            }
            if is_admitted {
                given.retain(|&of, _| of != caller || outcome.reserved_at == Time::ZERO);
            } else if outcome.reserved_at > Time::ZERO
                && given.get(&caller).is_none_or(|(at, _)| *at != outcome.reserved_at)
            {
                given.insert(caller, (outcome.reserved_at, cost));
                order += 1;
                let late = Span::from_micros((rules.grace().as_micros() - 2 * CLOCK_STEP.as_micros()) * part / 1000);
                agenda.insert((outcome.reserved_at + CLOCK_STEP + late, order), (caller, cost, outcome.reserved_at));
            }
        }
    }
}

/// All callers come at once and return at their instants. Returns the last time, and the largest number of calls.
fn herd(kind: LimitKind, rules: ReservationRules, callers: u64) -> (Span, u64) {
    let mut shared = Shared::new(kind.clone(), rules);
    let mut agenda: BTreeMap<(Time, u64), u64> = (1..=callers).map(|caller| ((START, caller), 0)).collect();
    let (mut most, mut admitted) = (0, Vec::new());
    while let Some(((now, caller), calls)) = agenda.pop_first() {
        let outcome = shared.call(caller, 1, Time::ZERO, now);
        most = most.max(calls + 1);
        if outcome.admission == Admission::Admitted {
            admitted.push((now, 1));
        } else {
            agenda.insert((outcome.retry_at, caller), calls + 1);
        }
    }
    check_limit(&kind, &admitted).unwrap();
    (admitted.last().unwrap().0.since(START), most)
}

#[test]
fn a_herd_is_served_in_two_calls_each() {
    assert_eq!(herd(rate(10, 10), rules(1000, 900), 100), (Span::from_secs(9), 2));
    assert_eq!(herd(rate(10, 10), rules(500, 1000), 100), (Span::from_millis(17_900), 2));
    assert_eq!(herd(rate(100, 100), rules(1000, 990), 1000), (Span::from_secs(9), 2));
    assert_eq!(herd(rate(100, 100), rules(500, 1000), 1000), (Span::from_millis(17_990), 2));
    let spread = ReservationRules::spread(Span::from_secs(30)).unwrap();
    assert_eq!(herd(rate(10, 10), spread, 100), (Span::from_secs(9), 2));
}

#[test]
fn a_late_caller_forfeits_its_reservation() {
    let mut shared = Shared::new(rate(1, 1), rules(1000, 500));
    assert_eq!(shared.call(1, 1, Time::ZERO, at(0)).admission, Admission::Admitted);
    let first = shared.call(2, 1, Time::ZERO, at(0));
    assert_eq!((first.admission, first.reserved_at), (Admission::Refused, at(1000)));
    // Asked again, it is told the same.
    assert_eq!(shared.call(2, 1, Time::ZERO, at(100)).reserved_at, at(1000));
    // It isn't another caller's, and that one gets the next.
    let second = shared.call(3, 1, Time::ZERO, at(1000));
    assert_eq!((second.admission, second.reserved_at), (Admission::Refused, at(2500)));
    // Too late: it has become another's. An admitted call ends the forfeit.
    shared.call(0, 1, Time::ZERO, at(1500));
    assert_eq!(shared.queue().forfeits.len(), 1);
    assert_eq!(shared.call(3, 1, Time::ZERO, at(2500)).reserved_at, at(2500));
    assert_eq!(shared.call(2, 1, at(1000), at(3500)).admission, Admission::Admitted);
    assert_eq!(shared.queue().forfeits, []);
}

/// While a store was away, a node of its fleet may have told the caller an instant that the store doesn't know.
#[test]
fn a_caller_told_another_instant_isnt_behind() {
    for (told, again, found, is_behind) in [
        (at(700), 1000, at(1000), false),
        (at(1400), 1400, at(1000), false),
        (at(2600), 2600, at(4000), false),
        (at(1500), 2600, at(4000), true),
        (at(2601), 2600, at(4000), true),
        (Time::NEVER, 2600, at(4000), true),
    ] {
        let mut shared = Shared::new(rate(1, 1), rules(1000, 500));
        shared.call(1, 1, Time::ZERO, at(0));
        assert_eq!(shared.call(2, 1, Time::ZERO, at(0)).reserved_at, at(1000));
        assert_eq!(shared.call(3, 1, Time::ZERO, at(0)).reserved_at, at(2500));
        assert_eq!(shared.call(2, 1, told, at(again)).reserved_at, found, "told {told:?}, came at {again}");
        let opens_at = shared.queue().opens_to_forfeiters_at;
        assert_eq!(opens_at > Time::ZERO, is_behind, "told {told:?}, came at {again}");
    }
}

/// A client that knows only whole seconds of waiting may come after its grace, but not each time.
#[test]
fn a_caller_is_excused_as_late_once() {
    let mut shared = Shared::new(rate(1, 1), rules(1000, 500));
    shared.call(1, 1, Time::ZERO, at(0));
    assert_eq!(shared.call(2, 1, Time::ZERO, at(100)).reserved_at, at(1000));
    assert_eq!(shared.call(1, 1, Time::ZERO, at(100)).reserved_at, at(2500));
    let late = shared.call(2, 1, Time::ZERO, at(2499));
    assert_eq!((late.admission, late.reserved_at), (Admission::Refused, at(4000)));
    let queue = shared.queue();
    assert_eq!((queue.forfeits[0].was_late, queue.opens_to_forfeiters_at), (true, Time::ZERO));
    // The next time it is behind: 33 seconds of the rate are for those without a forfeit.
    shared.call(5, 1, Time::ZERO, at(4499));
    assert_eq!(shared.call(2, 1, Time::ZERO, at(4600)).reserved_at, at(7000));
    let queue = shared.queue();
    assert_eq!((queue.forfeits.len(), queue.opens_to_forfeiters_at), (2, at(4600 + 33_000)));
}

/// A caller that is behind gets the next instant, but only one of them in the spacing of 33.
#[test]
fn callers_with_a_forfeit_are_behind_others() {
    let mut shared = Shared::new(rate(1, 1), rules(1000, 500));
    shared.call(1, 1, Time::ZERO, at(0));
    for (caller, found) in [(2, 1000), (3, 2500), (4, 4000)] {
        assert_eq!(shared.call(caller, 1, Time::ZERO, at(0)).reserved_at, at(found));
    }
    // The second and the third caller didn't come. Others are served before them.
    assert_eq!(shared.call(5, 1, Time::ZERO, at(3900)).reserved_at, at(5500));
    assert_eq!(shared.call(2, 1, Time::ZERO, at(4001)).reserved_at, at(7000));
    assert_eq!(shared.call(3, 1, Time::ZERO, at(4001)).reserved_at, Time::ZERO);
    assert_eq!(shared.call(6, 1, Time::ZERO, at(4001)).reserved_at, at(8500));
    // It comes, and is as others.
    assert_eq!(shared.call(2, 1, Time::ZERO, at(7000)).reserved_at, at(7000));
    assert_eq!(shared.call(2, 1, Time::ZERO, at(7001)).reserved_at, at(10_000));
    assert_eq!(shared.call(3, 1, Time::ZERO, at(7001)).reserved_at, Time::ZERO);
}

/// A state that was stored before forfeits had costs: any admitted call ends them.
#[test]
fn states_without_costs_of_forfeits_are_read() {
    // The version and form, two times, no reservation, a forfeit that ended at 7 µs of the ninth caller, and no usage.
    let state = KeyState::decode(&[0x18, 5, 3, 0, 1, 7, 9, 0x10]).unwrap();
    let Usage::Reserved(reserved) = state.usage() else { panic!("no reservations") };
    let forfeit = Forfeit { ended_at: Time::from_micros(7), caller: 9, cost: 0, was_late: false };
    assert_eq!((&*reserved.queue.forfeits, reserved.queue.last_at), (&[forfeit][..], Time::from_micros(5)));
    let mut bytes = Vec::new();
    state.encode(&mut bytes);
    assert_eq!(bytes, [0x19, 5, 3, 0, 1, 7, 9, 0, 0, 0, 0, 0, 0x10]);
}

/// A cheaper call isn't the one that was forfeited.
#[test]
fn a_cheap_call_ends_no_forfeit() {
    let mut shared = Shared::new(rate(10, 10), rules(1000, 400));
    shared.call(1, 10, Time::ZERO, at(0));
    assert_eq!(shared.call(2, 5, Time::ZERO, at(0)).reserved_at, at(500));
    for (cost, forfeits) in [(1, 1), (0, 1), (4, 1), (5, 0)] {
        assert_eq!(shared.call(2, cost, Time::ZERO, at(5000)).admission, Admission::Admitted);
        assert_eq!(shared.queue().forfeits.len(), forfeits, "{cost}");
    }
}

/// Clients behind one address are one caller, and one of them didn't come. Others want more than the limit.
#[test]
fn a_neighbours_forfeit_doesnt_starve_an_address() {
    let served = |has_forfeit: bool| {
        let mut shared = Shared::new(rate(10, 10), rules(1000, 900));
        let mut due: BTreeMap<(Time, u64), ()> = (1..=100).map(|caller| ((START, caller), ())).collect();
        if has_forfeit {
            due.remove(&(START, 50));
            assert_eq!((1..=10).filter(|_| shared.call(0, 1, Time::ZERO, START).admission.refuses()).count(), 0);
            assert!(shared.call(50, 1, Time::ZERO, START).reserved_at > START);
        }
        due.insert((at(8_000), 50), ());
        let mut served = 0;
        while let Some(((now, caller), ())) = due.pop_first().filter(|((now, _), ())| *now < at(48_000)) {
            let outcome = shared.call(caller, 1, Time::ZERO, now);
            let is_admitted = outcome.admission == Admission::Admitted;
            served += u32::from(is_admitted && caller == 50 && now >= at(8_000));
            let again = if is_admitted || outcome.reserved_at == Time::ZERO {
                now + Span::from_millis(100)
            } else {
                outcome.retry_at
            };
            due.insert((again, caller), ());
        }
        served
    };
    let (usual, after_forfeit) = (served(false), served(true));
    assert!(usual >= 4 && after_forfeit + 1 >= usual, "{after_forfeit} served, {usual} without a forfeit");
}

/// The token of one limit doesn't excuse a caller from a forfeit of another limit.
#[test]
fn a_token_counts_for_its_own_limit_alone() {
    let shared = || Limit::new(rate(1, 1)).with_reservations(rules(1000, 500));
    let limits = Limits::new(vec![shared(), shared()]).unwrap();
    let ops = [0, 1].map(|index| Op::new(LimitId::from_index(index).unwrap(), Verb::Take, Key::new(1, 1), 1));
    for (giver, is_behind) in [(Some(1), true), (Some(0), false), (None, true)] {
        let mut states = [KeyState::default(), KeyState::default()];
        let mut call = |caller: u64, index: usize, giver: Option<(Time, usize)>, now: Time| {
            let mut batch = Batch::with_op(0, ops[index]);
            batch.set_caller(caller, Time::ZERO);
            if let Some((at, giver)) = giver {
                batch.present_reservation(at, &ops[giver]);
            }
            batch::execute(&batch, &limits, &mut states[index..=index], now).list()[0]
        };
        call(1, 0, None, at(0));
        assert_eq!(call(2, 0, None, at(0)).reserved_at, at(1000));
        assert_eq!(call(3, 0, None, at(0)).reserved_at, at(2500));
        // A reservation of the other limit, later than the end of the forfeit.
        assert_eq!(call(2, 0, giver.map(|giver| (at(2000), giver)), at(2600)).reserved_at, at(4000));
        let Usage::Reserved(reserved) = states[0].usage() else { panic!("no reservations") };
        assert_eq!(reserved.queue.opens_to_forfeiters_at > Time::ZERO, is_behind, "{giver:?}");
    }
}

/// A reservation that is honoured isn't unknown if another limit refuses the call.
#[test]
fn another_limit_leaves_a_reservation_known() {
    let own = Limit::new(LimitKind::Window(Window::new(2, Span::from_secs(60), 8).unwrap()));
    let limits = Limits::new(vec![Limit::new(rate(1, 1)).with_reservations(rules(1000, 500)), own]).unwrap();
    let mut states = [KeyState::default(), KeyState::default()];
    let mut call = |caller: u64, own_cost: u64, presented: Time, now: Time| {
        let mut batch = Batch::with_op(0, Op::new(LimitId::FIRST, Verb::Take, Key::new(1, 1), 1));
        batch.push(Op::new(LimitId::from_index(1).unwrap(), Verb::Take, Key::new(1, 1), own_cost)).unwrap();
        batch.set_caller(caller, presented);
        let outcomes = batch::execute(&batch, &limits, states.as_mut_slice(), now);
        decision::decide(&batch, &limits, &outcomes)
    };
    assert!(call(1, 2, Time::ZERO, at(0)).allowed);
    assert_eq!(call(2, 0, Time::ZERO, at(0)).reservation.map(|given| given.at), Some(at(1000)));
    let (kept, wrong) = (call(2, 1, at(1000), at(1000)), call(2, 1, at(1001), at(1000)));
    assert_eq!([kept.allowed, kept.is_reservation_unknown], [false, false]);
    assert_eq!([wrong.allowed, wrong.is_reservation_unknown], [false, true]);
}

/// Small reservations between large ones don't hide these.
#[test]
fn reservations_of_different_costs_keep_the_rate() {
    let kind = rate(1, 10);
    let mut shared = Shared::new(kind.clone(), rules(1000, 5000));
    assert_eq!(shared.call(1, 10, Time::ZERO, at(0)).admission, Admission::Admitted);
    let calls = [(2, 6), (3, 1), (4, 10)];
    let [first, second, third] = calls.map(|(caller, cost)| shared.call(caller, cost, Time::ZERO, at(0)).reserved_at);
    assert_eq!((first, second, third), (at(6000), at(7000), at(18_000)));
    let mut admitted = vec![(at(0), 10)];
    for ((caller, cost), now) in calls.into_iter().zip([at(10_998), at(11_998), third]) {
        assert_eq!(shared.call(caller, cost, Time::ZERO, now).admission, Admission::Admitted);
        admitted.push((now, cost));
    }
    check_limit(&kind, &admitted).unwrap();
}

/// A caller that gets in early keeps its reservation, and doesn't forfeit it.
#[test]
fn an_early_admission_excuses_from_returning() {
    let window = LimitKind::Window(Window::new(2, Span::from_secs(1), 8).unwrap());
    let mut shared = Shared::new(window, rules(500, 500));
    shared.call(1, 1, Time::ZERO, at(0));
    assert_eq!(shared.call(2, 2, Time::ZERO, at(100)).reserved_at, Time::ZERO);
    shared.call(3, 1, Time::ZERO, at(600));
    assert_eq!(shared.call(4, 1, Time::ZERO, at(700)).reserved_at, at(1000));
    assert_eq!(shared.call(5, 1, Time::ZERO, at(700)).reserved_at, at(2500));
    let early = shared.call(5, 1, at(2500), at(1650));
    assert_eq!((early.admission, early.reserved_at, shared.records()), (Admission::Admitted, Time::ZERO, 2));
    // The fourth caller has forfeited, the fifth hasn't.
    shared.call(6, 1, Time::ZERO, at(9000));
    assert_eq!(shared.records(), 1);
}

#[test]
fn foreign_reservations_admit_nothing() {
    let mut shared = Shared::new(rate(1, 1), rules(1000, 500));
    shared.call(1, 1, Time::ZERO, at(0));
    assert_eq!(shared.call(2, 1, Time::ZERO, at(0)).reserved_at, at(1000));
    assert_eq!(shared.call(2, 1, Time::NEVER, at(1000)).admission, Admission::Refused);
    assert_eq!(shared.call(3, 1, at(1000), at(1000)).admission, Admission::Refused);
    assert_eq!(shared.call(2, 2, at(1000), at(1000)).admission, Admission::Refused);
    assert_eq!(shared.call(2, 1, at(1000), at(1000)).admission, Admission::Admitted);
    assert_eq!(shared.call(2, 1, at(1000), at(1000)).admission, Admission::Refused);
}

/// Callers that keep the whole burst occupied, by a long grace or a short burst, leave others a part of the rate.
#[test]
fn occupied_bursts_leave_others_their_part() {
    for (count, burst, grace, late) in [
        (10, 2, 250, None),
        (10, 10, 2000, None),
        (10, 2, 250, Some(240)),
        (10, 2, 250, Some(1000)),
        (100, 10, 250, Some(900)),
    ] {
        let rules = ReservationRules::new(Span::from_secs(4), 500, Span::from_millis(grace)).unwrap();
        let mut shared = Shared::new(rate(count, burst), rules);
        let mut due: BTreeMap<(Time, u64), u64> = (1..=300).map(|caller| ((START, caller), caller)).collect();
        let mut honest = 0;
        for step in 0..4000 {
            let now = at(step * 5);
            honest += u64::from(shared.call(0, 1, Time::ZERO, now).admission == Admission::Admitted);
            while let Some(((_, caller), _)) =
                due.first_key_value().filter(|((due_at, _), _)| *due_at <= now).map(|(k, v)| (*k, *v))
            {
                due.retain(|(_, of), _| *of != caller);
                let reserved_at = shared.call(caller, 1, Time::NEVER, now).reserved_at;
                let returns_at = match late {
                    Some(millis) if reserved_at > now => reserved_at + Span::from_millis(millis),
                    _ => now + Span::from_secs(1),
                };
                due.insert((returns_at, caller), caller);
            }
        }
        assert!(honest >= 20 * count * 7 / 10, "{count}/s burst {burst}, grace {grace} ms, {late:?}: {honest}");
    }
}

/// A caller that asks again and again takes one reservation at a time from those that return as told.
#[test]
fn an_eager_caller_leaves_reservations_to_others() {
    let rules = ReservationRules::new(Span::from_secs(3), 500, Span::from_millis(900)).unwrap();
    let mut shared = Shared::new(rate(10, 10), rules);
    let mut due: BTreeMap<u64, Time> = (1..=20).map(|caller| (caller, START)).collect();
    let (mut served, mut without) = (0, 0);
    for step in 0..4000 {
        let now = at(step * 5);
        shared.call(99, 1, Time::ZERO, now);
        for (caller, due_at) in &mut due {
            if *due_at > now {
                continue;
            }
            let outcome = shared.call(*caller, 1, Time::ZERO, now);
            served += u32::from(outcome.admission == Admission::Admitted);
            without += u32::from(outcome.admission == Admission::Refused && outcome.reserved_at == Time::ZERO);
            *due_at = outcome.retry_at.max(now + Span::from_millis(5));
        }
    }
    assert!(served >= 90 && without <= served / 2, "{served} served, {without} refused without a reservation");
}

/// Callers that reserve and never come cost others less than the share in one horizon of eleven, however they ask again.
#[test]
fn forfeits_bound_the_cost_of_absent_callers() {
    let window = LimitKind::Window(Window::new(36, Span::from_secs(2), 64).unwrap());
    let quota = LimitKind::Quota(Quota::new(36, Arc::new(FixedPeriods(Span::from_secs(2)))).unwrap());
    for (kind, per_second) in [(rate(10, 10), 10), (window, 18), (quota, 18)] {
        for share in [500_u16, 1000] {
            // As many as the share of one horizon has reservations for.
            let absent = per_second * 4 * u64::from(share) / 1000;
            for asks in [Asks::Often, Asks::JustLate] {
                let served = |absent| served_beside_absent_callers(&kind, share, absent, asks);
                let (calm, attacked) = (served(0), served(absent));
                let lost = 1.0 - f64::from(attacked) / f64::from(calm);
                let bound = f64::from(share) / 1000.0 / 11.0;
                assert!(lost <= bound, "{kind:?}, share {share}, {asks:?}: {lost:.4} of the calls, at most {bound:.4}");
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Asks {
    /// Every 2.5 s.
    Often,
    /// 0.3 s after each grace.
    JustLate,
}

/// The calls of others in three forfeit times of 132 s.
fn served_beside_absent_callers(kind: &LimitKind, share: u16, absent: u64, asks: Asks) -> u32 {
    let rules = ReservationRules::new(Span::from_secs(4), share, Span::from_millis(900)).unwrap();
    let mut shared = Shared::new(kind.clone(), rules);
    let mut due: BTreeMap<(Time, u64), ()> = (1..=absent).map(|caller| ((START, caller), ())).collect();
    let mut served = 0;
    for step in 0..3 * 4 * FORFEIT_HORIZONS * 10 {
        let now = at(step * 100);
        // The honest caller has no reservation, and takes what is free.
        while shared.call(0, 1, Time::ZERO, now).admission == Admission::Admitted {
            served += 1;
        }
        while let Some((&(due_at, caller), ())) = due.first_key_value().filter(|((due_at, _), ())| *due_at <= now) {
            due.remove(&(due_at, caller));
            let found = shared.call(caller, 1, Time::NEVER, now);
            assert!(found.admission.refuses());
            let again = match asks {
                Asks::JustLate if found.reserved_at > now => found.reserved_at + Span::from_millis(1200),
                _ => now + Span::from_millis(2500),
            };
            due.insert((again, caller), ());
        }
    }
    served
}
