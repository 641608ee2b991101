//! Reservations: the limit holds whatever callers do, and every kept reservation is honoured.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;
use tidegate_core::quota::FixedPeriods;
use tidegate_core::rate::ArrivalTime;
use tidegate_core::reservation::{FORFEIT_HORIZONS, LATENESS, MAX_RECORDS};
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

    fn records(&self) -> usize {
        match self.states[0].usage() {
            Usage::Reserved(reserved) => reserved.queue.reservations.len() + reserved.queue.forfeits.len(),
            _ => 0,
        }
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
        let mut forfeited: BTreeMap<u64, Time> = BTreeMap::new();
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
                // It isn't barred if it got in before.
                if is_admitted && given.get(&caller).is_some_and(|(at, _)| *at > now) {
                    forfeited.remove(&caller);
                }
                continue;
            }
            if is_admitted {
                let used = given.remove(&caller).map(|(at, _)| at);
                prop_assert_eq!(used, Some(outcome.reserved_at), "admitted without a reservation");
                forfeited.remove(&caller);
                continue;
            }
            prop_assert!(outcome.retry_at == outcome.reserved_at && outcome.retry_at > now, "{outcome:?}");
            prop_assert!(outcome.retry_at.since(now) <= rules.horizon());
            let new_at = outcome.reserved_at;
            if given.get(&caller).is_some_and(|&(at, _)| at == new_at) {
                continue;
            }
            given.insert(caller, (new_at, cost));
            let until = forfeited.remove(&caller).unwrap_or(Time::ZERO);
            // Each reservation keeps the end that it had by its rules, or that of the one before.
            let longest = rules_in_turn[0].grace().max(rules_in_turn[1].grace());
            let is_just_late = until + longest + LATENESS > now + rules.forfeit_time();
            prop_assert!(until <= now || is_just_late, "a reservation after a forfeit: {outcome:?}");
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
            forfeited.insert(caller, new_at + rules.horizon().times(FORFEIT_HORIZONS));
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
    // Too late: it has become another's, and there is no new one.
    let late = shared.call(2, 1, at(1000), at(1500));
    assert_eq!((late.admission, late.reserved_at), (Admission::Admitted, Time::ZERO));
    assert_eq!(shared.call(3, 1, Time::ZERO, at(2500)).reserved_at, at(2500));
    let again = shared.call(2, 1, Time::ZERO, at(2501));
    assert_eq!((again.admission, again.reserved_at), (Admission::Refused, Time::ZERO));
}

/// While a store was away, a node of its fleet may have told the caller an instant that the store doesn't know.
#[test]
fn a_caller_told_another_instant_isnt_barred() {
    for (told, again, found) in [
        (at(700), 1000, at(1000)),
        (at(1400), 1400, at(1000)),
        (at(2600), 2600, at(4000)),
        (at(1500), 2600, Time::ZERO),
        (at(2601), 2600, Time::ZERO),
        (Time::NEVER, 2600, Time::ZERO),
    ] {
        let mut shared = Shared::new(rate(1, 1), rules(1000, 500));
        shared.call(1, 1, Time::ZERO, at(0));
        assert_eq!(shared.call(2, 1, Time::ZERO, at(0)).reserved_at, at(1000));
        assert_eq!(shared.call(3, 1, Time::ZERO, at(0)).reserved_at, at(2500));
        assert_eq!(shared.call(2, 1, told, at(again)).reserved_at, found, "told {told:?}, came at {again}");
    }
}

/// A client that knows only whole seconds of waiting may come after its grace.
#[test]
fn a_caller_within_a_second_isnt_barred() {
    let mut shared = Shared::new(rate(1, 1), rules(1000, 500));
    shared.call(1, 1, Time::ZERO, at(0));
    assert_eq!(shared.call(2, 1, Time::ZERO, at(100)).reserved_at, at(1000));
    assert_eq!(shared.call(1, 1, Time::ZERO, at(100)).reserved_at, at(2500));
    let late = shared.call(2, 1, Time::ZERO, at(2499));
    assert_eq!((late.admission, late.reserved_at), (Admission::Refused, at(4000)));
    assert_eq!(shared.records(), 2);
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

/// A caller that gets in early keeps its reservation, and isn't barred if it doesn't use it.
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
    // The fourth caller is barred, the fifth isn't.
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

/// Callers that reserve and never come cost others at most the share, for one horizon in eleven.
#[test]
fn forfeits_bound_the_cost_of_absent_callers() {
    for share in [500_u16, 1000] {
        let rules = rules(share, 900);
        let mut shared = Shared::new(rate(10, 10), rules);
        // As many as the share of one horizon has reservations for. They come back as often as they can.
        let absent = 10 * 30 * u64::from(share) / 1000;
        let cycle_secs = 30 * FORFEIT_HORIZONS;
        let mut admitted = Vec::new();
        for step in 0..cycle_secs * 10 {
            let now = at(step * 100);
            // The honest caller has no reservation, and takes what is free.
            while shared.call(0, 1, Time::ZERO, now).admission == Admission::Admitted {
                admitted.push(now);
            }
            for caller in (1..=absent).filter(|_| step % 25 == 0) {
                assert_eq!(shared.call(caller, 1, Time::NEVER, now).admission, Admission::Refused);
            }
        }
        let fair = (cycle_secs * 10) as f64;
        let lost = 1.0 - admitted.len() as f64 / fair;
        let bound = f64::from(share) / 1000.0 / 11.0;
        assert!(lost <= bound + 0.01, "share {share}: {lost:.3} of the calls, at most {bound:.3}");
        for horizon in 1..FORFEIT_HORIZONS {
            let start = at(horizon * 30_000 + 2_000);
            let served = admitted.iter().filter(|at| at.since(start) < Span::from_secs(28) && **at >= start).count();
            assert!(served >= 278, "share {share}, horizon {horizon}: {served}");
        }
    }
}
