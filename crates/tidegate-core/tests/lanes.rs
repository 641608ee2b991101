//! Lanes: order, bounds, floors, and agreement with a naive model over random operations.

use std::collections::{HashMap, HashSet};

use tidegate_core::lanes::{MAX_FLOOR, MAX_WAITING};
use tidegate_core::{
    Kind, Lane, LaneSpec, Lanes, LanesSpec, Limit, LimitId, MAX_COST, QueueFull, Rate, Scope, Span, Ticket, Time, Turn,
};
use tidegate_testkit::desk::{Desk, at, id, window};
use tidegate_testkit::dice::{self, Dice, count};
use tidegate_testkit::property;

const BACKGROUND: usize = Lane::Background as usize;
const MICRO: Span = Span::from_micros(1);

fn waiting(max_waiting: u32) -> LanesSpec {
    LanesSpec { lanes: [LaneSpec { max_waiting, ..LaneSpec::default() }; 3], ..LanesSpec::default() }
}

fn enqueue(lanes: &mut Lanes, lane: Lane, now: Time) -> Ticket {
    lanes.enqueue(lane, 1, Time::NEVER, now).expect("room in the queue")
}

fn ask(lanes: &mut Lanes, now: Time) -> Ticket {
    match lanes.poll(now) {
        Turn::Ask(ticket) => ticket,
        other => panic!("nobody is to ask: {other:?}"),
    }
}

/// Grants whoever asks at `now` until nobody does: the order of the calls.
fn drain(lanes: &mut Lanes, now: Time) -> Vec<Ticket> {
    let mut order = Vec::new();
    while let Turn::Ask(ticket) = lanes.poll(now) {
        let lane = lanes.granted(ticket, now).expect("a call that waits");
        lanes.ended(lane);
        order.push(ticket);
    }
    order
}

mod order {
    use super::*;

    #[test]
    fn first_come_first_served_within_a_lane() {
        for lane in Lane::ALL {
            let mut lanes = Lanes::new(LanesSpec::default());
            // Slots are used again in another order; calls keep theirs.
            for _ in 0..3 {
                let tickets: Vec<Ticket> = (0..100).map(|_| enqueue(&mut lanes, lane, at(0))).collect();
                assert_eq!(drain(&mut lanes, at(0)), tickets);
            }
        }
    }

    #[test]
    fn a_webhook_goes_before_five_background_calls() {
        let mut lanes = Lanes::new(LanesSpec::default());
        let background: Vec<Ticket> = (0..5).map(|_| enqueue(&mut lanes, Lane::Background, at(0))).collect();
        // Even while the background's first waits for the provider.
        let first = ask(&mut lanes, at(0));
        assert_eq!(first, background[0]);
        lanes.not_until(first, at(900), Scope::Provider, at(0));
        let Turn::Sleep(wake_at) = lanes.poll(at(1)) else { panic!("the first was told to wait") };
        assert_eq!(wake_at, at(900));
        let user = enqueue(&mut lanes, Lane::User, at(2));
        let webhook = enqueue(&mut lanes, Lane::Webhook, at(2));
        assert_eq!(ask(&mut lanes, at(2)), webhook);
        assert_eq!(lanes.granted(webhook, at(2)), Some(Lane::Webhook));
        assert_eq!(ask(&mut lanes, at(2)), user);
        lanes.granted(user, at(2));
        assert_eq!(lanes.poll(at(2)), Turn::Sleep(at(900)));
        assert_eq!(drain(&mut lanes, at(900)), background);
    }

    #[test]
    fn a_raised_call_stands_by_its_arrival() {
        let mut lanes = Lanes::new(waiting(3));
        let raised = enqueue(&mut lanes, Lane::Background, at(0));
        let early = enqueue(&mut lanes, Lane::User, at(0));
        let late = enqueue(&mut lanes, Lane::Background, at(0));
        let last = enqueue(&mut lanes, Lane::User, at(0));
        assert_eq!(lanes.raise(early, Lane::Background, at(0)), Ok(false), "never down");
        assert_eq!(lanes.raise(raised, Lane::User, at(0)), Ok(true));
        assert_eq!(lanes.raise(raised, Lane::User, at(0)), Ok(false));
        assert_eq!(lanes.raise(late, Lane::User, at(0)), Err(QueueFull { lane: Lane::User }));
        assert_eq!((lanes.waiting(Lane::Background), lanes.waiting(Lane::User)), (1, 3));
        assert_eq!(drain(&mut lanes, at(0)), [raised, early, last, late]);
        assert_eq!(lanes.raise(raised, Lane::Webhook, at(0)), Ok(false), "it has left");
    }

    #[test]
    fn one_call_at_a_time_is_one_of_one_lane() {
        let mut lanes = Lanes::new(LanesSpec { max_in_flight: 1, ..LanesSpec::default() });
        let tickets: Vec<Ticket> = (0..10).map(|_| enqueue(&mut lanes, Lane::default(), at(0))).collect();
        for ticket in tickets {
            assert_eq!(ask(&mut lanes, at(0)), ticket);
            let lane = lanes.granted(ticket, at(0)).unwrap();
            assert_eq!(lanes.poll(at(0)), Turn::Sleep(Time::NEVER), "while it is in flight nobody asks");
            lanes.ended(lane);
        }
    }

    #[test]
    fn half_of_twenty_thousand_cancelled() {
        let mut lanes = Lanes::new(waiting(20_000));
        let tickets: Vec<Ticket> = (0..20_000).map(|_| enqueue(&mut lanes, Lane::User, at(0))).collect();
        assert_eq!(lanes.enqueue(Lane::User, 1, Time::NEVER, at(0)), Err(QueueFull { lane: Lane::User }));
        assert_eq!(ask(&mut lanes, at(0)), tickets[0]);
        lanes.not_until(tickets[0], at(500), Scope::Provider, at(0));
        let (gone, mut left): (Vec<_>, Vec<_>) = tickets.iter().enumerate().partition(|(place, _)| place % 2 == 0);
        for &(_, &ticket) in &gone {
            assert!(lanes.cancel(ticket) && !lanes.cancel(ticket));
        }
        assert_eq!(lanes.poll(at(1)), Turn::Sleep(at(500)), "the survivors cost as much as who was told to wait");
        assert_eq!(lanes.waiting(Lane::User), 10_000);
        let late: Vec<Ticket> = (0..10_000).map(|_| enqueue(&mut lanes, Lane::User, at(1))).collect();
        assert!(lanes.enqueue(Lane::User, 1, Time::NEVER, at(1)).is_err());
        assert!(late.iter().all(|ticket| ticket.index() < 20_000), "slots are used again");
        for (_, &stale) in gone {
            assert!(!lanes.cancel(stale) && lanes.granted(stale, at(1)).is_none(), "a stale ticket does nothing");
            assert_eq!(lanes.raise(stale, Lane::Webhook, at(1)), Ok(false));
        }
        left.extend(late.iter().enumerate());
        assert!(drain(&mut lanes, at(500)).iter().eq(left.into_iter().map(|(_, ticket)| ticket)));
        assert_eq!((lanes.waiting(Lane::User), lanes.in_flight(Lane::User)), (0, 0));
    }
}

mod asking {
    use super::*;

    #[test]
    fn one_asks_until_it_is_answered_or_gone() {
        let mut lanes = Lanes::new(LanesSpec::default());
        let tickets: Vec<Ticket> = (0..3).map(|_| enqueue(&mut lanes, Lane::User, at(0))).collect();
        assert_eq!(ask(&mut lanes, at(0)), tickets[0]);
        let webhook = enqueue(&mut lanes, Lane::Webhook, at(0));
        assert_eq!(lanes.poll(at(0)), Turn::Sleep(Time::NEVER));
        // Who asks is cancelled; the answer to it comes later, and changes nothing.
        assert!(lanes.cancel(tickets[0]));
        assert_eq!(ask(&mut lanes, at(0)), webhook);
        lanes.not_until(tickets[0], at(9_000), Scope::Provider, at(0));
        assert_eq!(lanes.poll(at(0)), Turn::Sleep(Time::NEVER));
        assert_eq!(lanes.granted(tickets[0], at(0)), None);
        assert_eq!(lanes.granted(webhook, at(0)), Some(Lane::Webhook));
        assert_eq!(drain(&mut lanes, at(0)), tickets[1..]);
        assert_eq!((lanes.in_flight(Lane::Webhook), lanes.in_flight(Lane::User)), (1, 0));
    }

    #[test]
    fn a_refusal_holds_for_all_that_would_meet_it_and_no_longer() {
        let mut lanes = Lanes::new(LanesSpec::default());
        let costs = [10, 10, 50, 9];
        let tickets = costs.map(|cost| lanes.enqueue(Lane::User, cost, Time::NEVER, at(0)).unwrap());
        assert_eq!(ask(&mut lanes, at(0)), tickets[0]);
        lanes.not_until(tickets[0], at(100), Scope::Provider, at(0));
        assert_eq!(lanes.poll(at(0)), Turn::Sleep(at(100)));
        for ticket in &tickets[..2] {
            lanes.cancel(*ticket);
            assert_eq!(lanes.poll(at(1)), Turn::Sleep(at(100)), "as dear, or dearer");
        }
        assert_eq!(lanes.poll(at(100) - MICRO), Turn::Sleep(at(100)));
        let mut later = lanes.clone();
        assert_eq!(ask(&mut later, at(100)), tickets[2], "at its exact moment");
        lanes.cancel(tickets[2]);
        assert_eq!(ask(&mut lanes, at(1)), tickets[3], "a cheaper one may fit before");
    }

    #[test]
    fn a_poke_asks_again() {
        let mut lanes = Lanes::new(LanesSpec::default());
        let user = enqueue(&mut lanes, Lane::User, at(0));
        let background = enqueue(&mut lanes, Lane::Background, at(0));
        for scope in [Scope::Provider, Scope::Lane] {
            assert_eq!(ask(&mut lanes, at(0)), user);
            lanes.not_until(user, at(100), scope, at(0));
            lanes.poke();
        }
        // Also if it comes between the question and the answer.
        for scope in [Scope::Provider, Scope::Lane] {
            assert_eq!(ask(&mut lanes, at(0)), user);
            lanes.poke();
            lanes.not_until(user, at(100), scope, at(0));
        }
        assert_eq!(ask(&mut lanes, at(0)), user);
        lanes.not_until(user, at(100), Scope::Lane, at(0));
        assert_eq!(ask(&mut lanes, at(0)), background, "an old poke is used up");
    }

    #[test]
    fn a_lanes_own_ceiling_holds_nobody_else_back() {
        let mut lanes = Lanes::new(LanesSpec { floor: MAX_FLOOR, ..LanesSpec::default() });
        let background = enqueue(&mut lanes, Lane::Background, at(0));
        assert_eq!(ask(&mut lanes, at(0)), background);
        lanes.not_until(background, at(30_000), Scope::Lane, at(0));
        assert_eq!(lanes.poll(at(0)), Turn::Sleep(at(30_000)));
        let users: Vec<Ticket> = (0..50).map(|_| enqueue(&mut lanes, Lane::User, at(1))).collect();
        assert_eq!(drain(&mut lanes, at(1)), users, "and what is held back by its own earns no floor");
        let users: Vec<Ticket> = (0..2).map(|_| enqueue(&mut lanes, Lane::User, at(30_000))).collect();
        assert_eq!(drain(&mut lanes, at(30_000)), [users[0], users[1], background]);
    }

    #[test]
    fn a_raised_calls_refusal_was_its_old_lanes() {
        let mut lanes = Lanes::new(LanesSpec::default());
        let raised = enqueue(&mut lanes, Lane::Background, at(0));
        let background = enqueue(&mut lanes, Lane::Background, at(0));
        assert_eq!(ask(&mut lanes, at(0)), raised);
        lanes.raise(raised, Lane::User, at(0)).unwrap();
        lanes.not_until(raised, at(100), Scope::Lane, at(0));
        assert_eq!(ask(&mut lanes, at(0)), raised, "a user's call has no such ceiling");
        lanes.granted(raised, at(0));
        assert_eq!(ask(&mut lanes, at(0)), background);
    }

    #[test]
    fn a_clock_that_steps_back_holds_nobody_back() {
        let year = Span::from_secs(365 * 86_400);
        for scope in [Scope::Provider, Scope::Lane] {
            let mut lanes = Lanes::new(LanesSpec::default());
            let user = enqueue(&mut lanes, Lane::User, at(0) + year);
            assert_eq!(ask(&mut lanes, at(0) + year), user);
            lanes.not_until(user, at(1_000) + year, scope, at(0) + year);
            assert!(matches!(lanes.poll(at(0) + year - Span::from_millis(100)), Turn::Sleep(_)), "only overtaken");
            assert_eq!(ask(&mut lanes, at(0)), user);
        }
        // The window that the background has to wait for counts from the present.
        let mut lanes = Lanes::new(LanesSpec { floor: 0, ..LanesSpec::default() });
        let background = enqueue(&mut lanes, Lane::Background, at(0) + year);
        for user in 0..=60 {
            enqueue(&mut lanes, Lane::User, at(user * 1_000));
            let granted = ask(&mut lanes, at(user * 1_000));
            lanes.granted(granted, at(user * 1_000));
            assert_eq!(granted == background, user == 60);
        }
    }
}

mod bounds {
    use super::*;

    #[test]
    fn a_full_lane_refuses_and_the_others_take() {
        let mut lanes = Lanes::new(waiting(2));
        for lane in Lane::ALL {
            let first = enqueue(&mut lanes, lane, at(0));
            enqueue(&mut lanes, lane, at(0));
            assert_eq!(lanes.enqueue(lane, 1, Time::NEVER, at(0)), Err(QueueFull { lane }));
            assert!(lanes.cancel(first));
            enqueue(&mut lanes, lane, at(0));
            assert_eq!(lanes.waiting(lane), 2);
        }
        assert_eq!(QueueFull { lane: Lane::Background }.to_string(), "the queue of the background lane is full");
    }

    #[test]
    fn no_lane_is_longer_than_the_longest() {
        let mut lanes = Lanes::new(waiting(u32::MAX));
        let room = (0..).take_while(|_| lanes.enqueue(Lane::User, 1, Time::NEVER, at(0)).is_ok()).count();
        assert_eq!(room, MAX_WAITING as usize);
    }

    #[test]
    fn a_call_leaves_at_its_deadline() {
        let mut lanes = Lanes::new(LanesSpec { max_in_flight: 1, ..LanesSpec::default() });
        let in_flight = enqueue(&mut lanes, Lane::User, at(0));
        assert_eq!(drain(&mut lanes, at(0)), [in_flight]);
        let running = enqueue(&mut lanes, Lane::User, at(0));
        let asked = ask(&mut lanes, at(0));
        assert_eq!((asked, lanes.granted(asked, at(0))), (running, Some(Lane::User)));
        // Everybody waits for the one in flight; deadlines pass all the same, whatever the lane and order of arrival.
        let deadlines = [(Lane::User, 70), (Lane::Webhook, 50), (Lane::Background, 60), (Lane::User, 50)];
        let tickets = deadlines.map(|(lane, millis)| lanes.enqueue(lane, 1, at(millis), at(0)).unwrap());
        assert_eq!(lanes.poll(at(0)), Turn::Sleep(at(50)));
        assert_eq!(lanes.poll(at(50) - MICRO), Turn::Sleep(at(50)));
        let expired = HashSet::from([lanes.poll(at(50)), lanes.poll(at(50))]);
        assert_eq!(expired, HashSet::from([tickets[1], tickets[3]].map(Turn::Expired)));
        assert_eq!(lanes.poll(at(50)), Turn::Sleep(at(60)));
        assert!(!lanes.cancel(tickets[1]));
        lanes.ended(Lane::User);
        // Also the one that asks: what it is granted then is to be given back.
        assert_eq!(ask(&mut lanes, at(55)), tickets[0]);
        assert_eq!(lanes.poll(at(99)), Turn::Expired(tickets[2]));
        assert_eq!(lanes.poll(at(99)), Turn::Expired(tickets[0]));
        assert_eq!(lanes.granted(tickets[0], at(99)), None);
        assert_eq!(lanes.poll(at(99)), Turn::Sleep(Time::NEVER));
    }

    #[test]
    fn calls_in_flight_are_capped_by_lane_and_in_all() {
        let mut spec = LanesSpec { max_in_flight: 3, ..LanesSpec::default() };
        spec.lanes[BACKGROUND].max_in_flight = 2;
        let mut lanes = Lanes::new(spec);
        for _ in 0..10 {
            enqueue(&mut lanes, Lane::Background, at(0));
        }
        let start = |lanes: &mut Lanes| -> Vec<Lane> {
            let mut started = Vec::new();
            while let Turn::Ask(ticket) = lanes.poll(at(0)) {
                started.extend(lanes.granted(ticket, at(0)));
            }
            started
        };
        assert_eq!(start(&mut lanes), [Lane::Background; 2]);
        for _ in 0..10 {
            enqueue(&mut lanes, Lane::User, at(0));
        }
        assert_eq!(start(&mut lanes), [Lane::User], "the background's cap holds nobody else back");
        lanes.ended(Lane::Background);
        assert_eq!(start(&mut lanes), [Lane::User]);
        lanes.set_max_in_flight(6);
        assert_eq!(start(&mut lanes), [Lane::User; 3]);
        lanes.set_max_in_flight(5);
        lanes.ended(Lane::User);
        assert_eq!(start(&mut lanes), []);
        assert_eq!((lanes.in_flight(Lane::Background), lanes.in_flight(Lane::User)), (1, 4));
        lanes.set_max_in_flight(0);
        for lane in [Lane::Background, Lane::User, Lane::User, Lane::User, Lane::User] {
            lanes.ended(lane);
        }
        assert_eq!(start(&mut lanes), []);
        lanes.ended(Lane::User);
        lanes.set_max_in_flight(1);
        assert_eq!(start(&mut lanes), [Lane::User], "one end too many gives nobody a second place");
    }

    #[test]
    fn a_paused_lane_waits_alone() {
        let mut lanes = Lanes::new(LanesSpec::default());
        lanes.pause(Lane::Background, at(5_000));
        let background = enqueue(&mut lanes, Lane::Background, at(0));
        assert_eq!(lanes.poll(at(0)), Turn::Sleep(at(5_000)));
        let user = enqueue(&mut lanes, Lane::User, at(0));
        assert_eq!(drain(&mut lanes, at(0)), [user]);
        assert_eq!(lanes.poll(at(5_000) - MICRO), Turn::Sleep(at(5_000)));
        let mut resumed = lanes.clone();
        assert_eq!(ask(&mut lanes, at(5_000)), background);
        resumed.pause(Lane::Background, at(0));
        assert_eq!(ask(&mut resumed, at(1)), background);
    }
}

mod fairness {
    use super::*;

    struct Grant {
        at: Time,
        lane: Lane,
        cost: u64,
        /// Since when its lane had waited for a grant.
        waited: Span,
    }

    /// Lanes in front of a limit, on a clock of their own.
    struct Provider {
        lanes: Lanes,
        desk: Desk,
        now: Time,
        costs: HashMap<Ticket, (Lane, u64)>,
        granted: Vec<Grant>,
        waits_since: [Time; 3],
    }

    impl Provider {
        fn new(limit: Limit, spec: LanesSpec) -> Self {
            Self {
                lanes: Lanes::new(spec),
                desk: Desk::new([limit]),
                now: at(0),
                costs: HashMap::new(),
                granted: Vec::new(),
                waits_since: [at(0); 3],
            }
        }

        /// Lets a call wait for up to ten seconds, unless the queue is full.
        fn call(&mut self, lane: Lane, cost: u64) -> Option<Ticket> {
            if self.lanes.waiting(lane) == 0 {
                self.waits_since[lane as usize] = self.now;
            }
            let ticket = self.lanes.enqueue(lane, cost, self.now + Span::from_secs(10), self.now).ok()?;
            self.costs.insert(ticket, (lane, cost));
            Some(ticket)
        }

        /// Lets time pass as far as `until`, and as much happen as may.
        fn run(&mut self, until: Time) {
            loop {
                match self.lanes.poll(self.now) {
                    Turn::Ask(ticket) => self.ask(ticket),
                    Turn::Expired(ticket) => {
                        self.costs.remove(&ticket).expect("a call that waits");
                    }
                    Turn::Sleep(wake_at) if wake_at < until => self.now = wake_at,
                    Turn::Sleep(_) => break,
                }
            }
            self.now = until;
        }

        fn ask(&mut self, ticket: Ticket) {
            let (lane, cost) = self.costs[&ticket];
            let decision = self.desk.take(1, cost, self.now);
            if decision.allowed {
                self.costs.remove(&ticket);
                assert_eq!(self.lanes.granted(ticket, self.now), Some(lane));
                self.lanes.ended(lane);
                let since = std::mem::replace(&mut self.waits_since[lane as usize], self.now);
                self.granted.push(Grant { at: self.now, lane, cost, waited: self.now.since(since) });
            } else {
                let wait = decision.retry_after.expect("a cost below the limit");
                self.lanes.not_until(ticket, self.now + wait, Scope::Provider, self.now);
            }
        }

        fn cost(&self, lanes: &[Lane]) -> u64 {
            self.granted.iter().filter(|grant| lanes.contains(&grant.lane)).map(|grant| grant.cost).sum()
        }

        /// A lane's part of all that was granted, in permille.
        fn share(&self, lane: Lane) -> u64 {
            self.cost(&[lane]) * 1_000 / self.cost(&Lane::ALL)
        }

        fn longest_wait(&self, lane: Lane) -> Span {
            self.granted.iter().filter(|grant| grant.lane == lane).map(|grant| grant.waited).max().expect("a grant")
        }
    }

    fn rate(count: u64, burst: u64) -> Limit {
        Limit::new(Kind::Rate(Rate::new(count, Span::from_secs(1), burst).expect("a rate")))
    }

    const FLOOR_ALONE: LanesSpec = LanesSpec {
        lanes: [LaneSpec { max_waiting: 50, max_in_flight: u32::MAX }; 3],
        max_in_flight: u32::MAX,
        floor: 100,
        window: Span::MAX,
    };

    #[test]
    fn users_at_twice_the_limit_leave_the_background_its_floor() {
        let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
        for slot in 0..20_000 {
            provider.call(Lane::User, 1);
            provider.call(Lane::Background, 1);
            provider.run(at((slot + 1) * 50));
        }
        assert_eq!(provider.granted.len(), 10_000, "all of the limit is used");
        assert!(provider.cost(&[Lane::Background]).abs_diff(1_000) <= 1);
        assert!(provider.longest_wait(Lane::Background) <= Span::from_millis(1_100), "ten others, then its own");
    }

    #[test]
    fn both_lower_lanes_have_their_floor_under_webhooks() {
        for floor in [50, 100, MAX_FLOOR, u16::MAX] {
            let mut provider = Provider::new(rate(10, 1), LanesSpec { floor, ..FLOOR_ALONE });
            for slot in 0..20_000 {
                for lane in Lane::ALL {
                    provider.call(lane, 1);
                }
                provider.run(at((slot + 1) * 50));
            }
            let floor = u64::from(floor.min(MAX_FLOOR));
            for lane in [Lane::Background, Lane::User] {
                let share = provider.share(lane);
                assert!(share.abs_diff(floor) <= 1, "{lane:?} has {share} of {floor}");
            }
            assert!(provider.share(Lane::Webhook) >= 333);
        }
    }

    /// Calls of language models cost thousands of units, and no two the same.
    #[test]
    fn floors_count_cost_and_not_calls() {
        let mut dice = Dice::seeded(5);
        let mut provider = Provider::new(rate(1_000, 5_000), FLOOR_ALONE);
        for slot in 0..20_000 {
            provider.call(Lane::User, dice.between(1, 5_000));
            if dice.percent(50) {
                provider.call(Lane::Background, dice.between(1, 1_000));
            }
            provider.run(at((slot + 1) * 500));
        }
        let share = provider.share(Lane::Background);
        assert!((99..=101).contains(&share), "{share}");
        // Its dearest call takes ten times its cost, its turn comes after a user's, and then the limit must refill.
        let longest = provider.longest_wait(Lane::Background);
        assert!(longest <= Span::from_secs(10 + 5 + 1), "{longest}");
    }

    #[test]
    fn a_window_of_a_few_reaches_every_lane() {
        const MINUTE: Span = Span::from_secs(60);
        for (limit, lanes) in [(5, &Lane::ALL[..]), (3, &Lane::ALL[..]), (2, &Lane::ALL[1..])] {
            let spec = LanesSpec { window: MINUTE, ..FLOOR_ALONE };
            let mut provider = Provider::new(window(limit, 60), spec);
            for second in 0..3_600 {
                for &lane in lanes {
                    provider.call(lane, 1);
                }
                provider.run(at((second + 1) * 1_000));
            }
            assert_eq!(provider.granted.len() as u64, limit * 60);
            for &lane in lanes {
                assert!(provider.longest_wait(lane) <= MINUTE, "{lane:?} waited {}", provider.longest_wait(lane));
            }
            let top = provider.cost(&[Lane::Webhook]) * lanes.len() as u64;
            assert!(top >= limit * 60, "the highest lane never has less than its part");
        }
    }

    /// With less than a call a window for each lane, they take turns: three windows and no more.
    #[test]
    fn a_window_of_one_goes_round() {
        let spec = LanesSpec { window: Span::from_secs(60), floor: 0, ..FLOOR_ALONE };
        let mut provider = Provider::new(window(1, 60), spec);
        for second in 0..3_600 {
            for lane in Lane::ALL {
                provider.call(lane, 1);
            }
            provider.run(at((second + 1) * 1_000));
        }
        for lane in Lane::ALL {
            assert!((19..=21).contains(&provider.cost(&[lane])));
            assert!(provider.longest_wait(lane) <= Span::from_secs(180));
        }
    }

    #[test]
    fn the_background_takes_everything_when_the_others_idle() {
        let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
        for slot in 0..1_000 {
            provider.call(Lane::Background, 1);
            provider.run(at((slot + 1) * 50));
        }
        assert_eq!(provider.granted.len(), 500);
        assert_eq!(provider.share(Lane::Background), 1_000);
        // It has saved nothing by that: the next user goes at once.
        provider.call(Lane::User, 1);
        provider.run(provider.now + Span::from_millis(100));
        assert_eq!(provider.granted.last().map(|grant| grant.lane), Some(Lane::User));
    }

    #[test]
    fn a_floor_is_not_saved_while_nobody_waits() {
        let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
        for round in 0..100 {
            // Nine users' calls earn a background call nine tenths; then it is withdrawn.
            let background = provider.call(Lane::Background, 1).expect("room");
            for _ in 0..10 {
                provider.call(Lane::User, 1);
            }
            provider.run(at(round * 1_000 + 850));
            assert_eq!(provider.granted.len() as u64, round * 10 + 9);
            assert!(provider.lanes.cancel(background));
            provider.run(at(round * 1_000 + 1_000));
        }
        assert_eq!(provider.share(Lane::Background), 0);
    }

    #[test]
    fn grants_follow_the_limit_exactly() {
        let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
        for slot in 0..100 {
            provider.call(Lane::User, 1);
            provider.run(at((slot + 1) * 50));
        }
        assert!(provider.granted.iter().enumerate().all(|(place, grant)| grant.at == at(place as u64 * 100)));
    }
}

/// What is told of a limit that can't have room earlier.
mod spent {
    use super::*;

    /// Lanes where a user's call of cost 2 was told at 0 that a limit is spent for 60 s.
    fn told(scope: Scope) -> Lanes {
        let mut lanes = Lanes::new(LanesSpec::default());
        lanes.enqueue(Lane::User, 2, Time::NEVER, at(0)).expect("room");
        let ticket = ask(&mut lanes, at(0));
        lanes.spent_until(ticket, id(0), at(60_000), scope, at(0));
        lanes
    }

    #[test]
    fn it_holds_who_is_as_costly_and_no_more_urgent_until_its_moment() {
        let spent = Some((id(0), at(60_000)));
        let lanes = told(Scope::Provider);
        let all = |lanes: &Lanes, cost, now| Lane::ALL.map(|lane| lanes.spent(lane, cost, now));
        assert_eq!(all(&lanes, 2, at(10)), [spent, spent, None], "the highest lane may have reserves");
        assert_eq!(all(&lanes, 1, at(10)), [None; 3], "there may be room for less");
        assert_eq!(all(&lanes, 3, at(60_000) - MICRO), [spent, spent, None]);
        assert_eq!(all(&lanes, 3, at(60_000)), [None; 3]);
        assert_eq!(all(&lanes, 3, at(0) - Span::from_secs(1)), [None; 3], "told by a clock that has stepped back");
        assert_eq!(all(&told(Scope::Lane), 2, at(10)), [None, spent, None], "a lane's own limit");
    }

    #[test]
    fn whatever_may_come_earlier_is_not_said() {
        let mut lanes = told(Scope::Provider);
        lanes.poke();
        assert_eq!(lanes.spent(Lane::User, 2, at(1)), None, "something was given back");
        let ticket = ask(&mut lanes, at(1));
        lanes.not_until(ticket, at(60_000), Scope::Provider, at(1));
        assert_eq!(lanes.spent(Lane::User, 2, at(1)), None, "a window's slot may come free with a reply");
        let mut lanes = told(Scope::Provider);
        assert_eq!(lanes.poll(at(59_999)), Turn::Sleep(at(60_000)));
        let ticket = ask(&mut lanes, at(60_000));
        lanes.poke();
        lanes.spent_until(ticket, id(0), at(90_000), Scope::Provider, at(60_000));
        assert_eq!(lanes.spent(Lane::User, 2, at(60_001)), None, "out of date when it was told");
    }
}

mod model {
    use super::*;

    #[derive(Clone, Copy, Debug)]
    struct Call {
        ticket: Ticket,
        arrival: u64,
        lane: Lane,
        cost: u64,
        deadline: Time,
    }

    #[derive(Clone, Copy, Debug)]
    struct Told {
        scope: Scope,
        until: Time,
        spent: Option<LimitId>,
        call: Call,
    }

    /// The same rules over a plain list, looked through from end to end.
    #[derive(Debug)]
    struct Naive {
        spec: LanesSpec,
        calls: Vec<Call>,
        told: Vec<Told>,
        in_flight: [u32; 3],
        credit: [u64; 3],
        due_at: [Time; 3],
        paused: [Time; 3],
        asking: Option<Ticket>,
        poked: bool,
    }

    impl Naive {
        fn new(spec: LanesSpec) -> Self {
            Self {
                spec,
                calls: Vec::new(),
                told: Vec::new(),
                in_flight: [0; 3],
                credit: [0; 3],
                due_at: [Time::ZERO; 3],
                paused: [Time::ZERO; 3],
                asking: None,
                poked: false,
            }
        }

        fn waiting(&self, lane: Lane) -> usize {
            self.calls.iter().filter(|call| call.lane == lane).count()
        }

        fn head(&self, lane: Lane) -> Option<Call> {
            self.calls.iter().filter(|call| call.lane == lane).min_by_key(|call| call.arrival).copied()
        }

        fn full(&self, lane: Lane) -> bool {
            self.waiting(lane) >= self.spec.lanes[lane as usize].max_waiting as usize
        }

        fn join(&mut self, lane: Lane, now: Time) {
            if self.waiting(lane) == 0 {
                self.credit[lane as usize] = 0;
                if self.due_at[lane as usize] <= now {
                    self.due_at[lane as usize] = now + self.spec.window;
                }
            }
        }

        fn leave(&mut self, ticket: Ticket) -> Option<Call> {
            let place = self.calls.iter().position(|call| call.ticket == ticket)?;
            self.asking = self.asking.filter(|&asking| asking != ticket);
            Some(self.calls.remove(place))
        }

        fn held_back(&self, call: Call, by: Scope, now: Time) -> bool {
            self.told.iter().any(|told| {
                let applies = match by {
                    Scope::Lane => told.call.lane == call.lane,
                    Scope::Provider => told.call.lane >= call.lane,
                };
                told.scope == by && applies && call.cost >= told.call.cost && told.until > now
            })
        }

        fn ready(&self, now: Time) -> Vec<Call> {
            let heads = Lane::ALL.into_iter().filter_map(|lane| self.head(lane));
            let ready = heads.filter(|&call| {
                let lane = call.lane as usize;
                self.in_flight[lane] < self.spec.lanes[lane].max_in_flight
                    && self.paused[lane] <= now
                    && !self.held_back(call, Scope::Lane, now)
            });
            ready.collect()
        }

        /// Who is to ask at `now`, if nothing happens before.
        fn to_ask(&self, now: Time) -> Option<Ticket> {
            let in_flight: u64 = self.in_flight.iter().map(|&count| u64::from(count)).sum();
            if self.asking.is_some() || in_flight >= u64::from(self.spec.max_in_flight) {
                return None;
            }
            let mut ready = self.ready(now);
            ready.sort_by_key(|call| {
                let lane = call.lane as usize;
                if self.credit[lane] >= call.cost.max(1) * 1_000 {
                    (0, Time::ZERO, lane)
                } else if self.due_at[lane] <= now {
                    (1, self.due_at[lane], 2 - lane)
                } else {
                    (2, Time::ZERO, 2 - lane)
                }
            });
            ready.first().filter(|&&call| !self.held_back(call, Scope::Provider, now)).map(|call| call.ticket)
        }

        fn next_deadline(&self) -> Option<Time> {
            self.calls.iter().map(|call| call.deadline).min()
        }

        fn granted(&mut self, ticket: Ticket, now: Time) -> Option<Lane> {
            let call = self.leave(ticket)?;
            for ready in self.ready(now) {
                self.credit[ready.lane as usize] += call.cost.max(1) * u64::from(self.spec.floor);
            }
            let lane = call.lane as usize;
            self.credit[lane] = self.credit[lane].saturating_sub(call.cost.max(1) * 1_000);
            self.due_at[lane] = now + self.spec.window;
            self.in_flight[lane] += 1;
            Some(call.lane)
        }

        /// What is known to hold a call that arrives at `now`.
        fn spent(&self, lane: Lane, cost: u64, now: Time) -> Option<(LimitId, Time)> {
            let arriving =
                Call { ticket: self.told.first()?.call.ticket, arrival: 0, lane, cost, deadline: Time::NEVER };
            let mut latest: Option<(LimitId, Time)> = None;
            for told in &self.told {
                let alone = Self { told: vec![*told], ..Self::new(self.spec) };
                let holds = alone.held_back(arriving, told.scope, now);
                if let (true, Some(limit)) = (holds, told.spent)
                    && latest.is_none_or(|(_, until)| until < told.until)
                {
                    latest = Some((limit, told.until));
                }
            }
            latest
        }

        fn not_until(&mut self, ticket: Ticket, until: Time, spent: Option<LimitId>, scope: Scope) {
            if self.asking != Some(ticket) {
                return;
            }
            self.asking = None;
            let call = *self.calls.iter().find(|call| call.ticket == ticket).expect("a call that asks waits");
            if !self.poked {
                // The latest word of a kind counts.
                self.told.retain(|told| told.scope != scope || scope == Scope::Lane && told.call.lane != call.lane);
                self.told.push(Told { scope, until, spent, call });
            }
        }

        /// Every moment at which something could change by time alone.
        fn moments(&self) -> Vec<Time> {
            let told = self.told.iter().map(|told| told.until);
            let deadlines = self.calls.iter().map(|call| call.deadline);
            told.chain(deadlines).chain(self.due_at).chain(self.paused).collect()
        }
    }

    struct Pair {
        lanes: Lanes,
        naive: Naive,
        arrivals: u64,
        /// Tickets that were given out, live and stale; the latest hundred.
        tickets: Vec<Ticket>,
        now: Time,
    }

    impl Pair {
        fn new(dice: &mut Dice) -> Self {
            let lane = |dice: &mut Dice| LaneSpec {
                max_waiting: dice.pick(&[3, 20, 100]),
                max_in_flight: dice.pick(&[1, 2, 5, u32::MAX]),
            };
            let spec = LanesSpec {
                lanes: [lane(dice), lane(dice), lane(dice)],
                max_in_flight: dice.pick(&[1, 3, 8, u32::MAX]),
                floor: dice.pick(&[0, 50, 100, MAX_FLOOR]),
                window: Span::from_millis(dice.pick(&[10, 1_000, 60_000, u64::MAX])),
            };
            Self { lanes: Lanes::new(spec), naive: Naive::new(spec), arrivals: 0, tickets: Vec::new(), now: at(0) }
        }

        fn any_ticket(&self, dice: &mut Dice) -> Option<Ticket> {
            (!self.tickets.is_empty()).then(|| self.tickets[dice.below(self.tickets.len() as u64) as usize])
        }

        fn step(&mut self, dice: &mut Dice) -> Result<(), String> {
            let now = self.now;
            let lane = dice.pick(&Lane::ALL);
            match dice.below(20) {
                0..=6 => self.enqueue(lane, dice)?,
                7..=10 => self.answer(dice)?,
                11..=12 => {
                    let Some(ticket) = self.any_ticket(dice) else { return Ok(()) };
                    same("cancel", self.lanes.cancel(ticket), self.naive.leave(ticket).is_some())?;
                }
                13 => {
                    let Some(ticket) = self.any_ticket(dice) else { return Ok(()) };
                    self.raise(ticket, lane)?;
                }
                14 => {
                    self.lanes.poke();
                    self.naive.told.clear();
                    self.naive.poked = true;
                }
                15 => {
                    let until = now + Span::from_micros(dice.below(300_000));
                    self.lanes.pause(lane, until);
                    self.naive.paused[lane as usize] = until;
                }
                16 => {
                    let most = dice.pick(&[0, 1, 2, 10, u32::MAX]);
                    self.lanes.set_max_in_flight(most);
                    self.naive.spec.max_in_flight = most;
                }
                17 => {
                    self.lanes.ended(lane);
                    self.naive.in_flight[lane as usize] = self.naive.in_flight[lane as usize].saturating_sub(1);
                }
                _ => self.now = now + Span::from_micros(dice.below(200_000)),
            }
            self.settle(dice)
        }

        fn enqueue(&mut self, lane: Lane, dice: &mut Dice) -> Result<(), String> {
            let cost = dice.pick(&[1, 1, 1, 0, 2, 10, 1_000, MAX_COST, u64::MAX]);
            let deadline =
                if dice.percent(40) { self.now + Span::from_micros(dice.below(900_000)) } else { Time::NEVER };
            let full = self.naive.full(lane);
            match self.lanes.enqueue(lane, cost, deadline, self.now) {
                Ok(_) if full => return Err(format!("{lane:?} took one too many")),
                Err(_) if !full => return Err(format!("{lane:?} has room")),
                Err(_) => {}
                Ok(ticket) => {
                    let slot_taken = self.naive.calls.iter().any(|call| call.ticket.index() == ticket.index());
                    if slot_taken || self.tickets.contains(&ticket) {
                        return Err(format!("{ticket:?} was given twice"));
                    }
                    self.naive.join(lane, self.now);
                    let (arrival, cost) = (self.arrivals, cost.min(MAX_COST));
                    self.naive.calls.push(Call { ticket, arrival, lane, cost, deadline });
                    self.arrivals += 1;
                    self.tickets.push(ticket);
                    if self.tickets.len() > 200 {
                        self.tickets.drain(..100);
                    }
                }
            }
            Ok(())
        }

        fn raise(&mut self, ticket: Ticket, lane: Lane) -> Result<(), String> {
            let place = self.naive.calls.iter().position(|call| call.ticket == ticket && call.lane < lane);
            let expected = match place {
                None => Ok(false),
                Some(_) if self.naive.full(lane) => Err(QueueFull { lane }),
                Some(place) => {
                    self.naive.join(lane, self.now);
                    self.naive.calls[place].lane = lane;
                    self.naive.poked |= self.naive.asking == Some(ticket);
                    Ok(true)
                }
            };
            same("raise", self.lanes.raise(ticket, lane, self.now), expected)
        }

        /// Answers who asks, or somebody who doesn't.
        fn answer(&mut self, dice: &mut Dice) -> Result<(), String> {
            let asking = self.naive.asking.filter(|_| !dice.percent(10));
            let Some(ticket) = asking.or_else(|| self.any_ticket(dice)) else { return Ok(()) };
            // Only who asks is ever granted anything; an answer that comes too late finds its ticket stale.
            let stale = !self.naive.calls.iter().any(|call| call.ticket == ticket);
            if dice.percent(60) && (asking.is_some() || stale) {
                return same("granted", self.lanes.granted(ticket, self.now), self.naive.granted(ticket, self.now));
            }
            let until = self.now + Span::from_micros(dice.below(400_000));
            let scope = dice.pick(&[Scope::Provider, Scope::Lane]);
            // Limits of a lane and of all, so that it shows which was told.
            let limit = id(if scope == Scope::Lane { 1 + self.naive.calls.len() % 3 } else { 0 });
            let spent = dice.percent(40).then_some(limit);
            match spent {
                Some(limit) => self.lanes.spent_until(ticket, limit, until, scope, self.now),
                None => self.lanes.not_until(ticket, until, scope, self.now),
            }
            self.naive.not_until(ticket, until, spent, scope);
            Ok(())
        }

        /// Polls until it says to sleep, and sometimes sleeps.
        fn settle(&mut self, dice: &mut Dice) -> Result<(), String> {
            let sleep_until = loop {
                match self.lanes.poll(self.now) {
                    Turn::Expired(ticket) => {
                        let earliest = self.naive.next_deadline().filter(|&deadline| deadline <= self.now);
                        let call = self.naive.leave(ticket).ok_or("expired a call that doesn't wait")?;
                        same("expired", Some(call.deadline), earliest)?;
                    }
                    Turn::Ask(ticket) => {
                        same("deadline", None, self.naive.next_deadline().filter(|&deadline| deadline <= self.now))?;
                        same("ask", Some(ticket), self.naive.to_ask(self.now))?;
                        (self.naive.asking, self.naive.poked) = (Some(ticket), false);
                    }
                    Turn::Sleep(until) => break until,
                }
            };
            let acts = |moment: Time| {
                self.naive.next_deadline().is_some_and(|deadline| deadline <= moment)
                    || self.naive.to_ask(moment).is_some()
            };
            if acts(self.now) {
                return Err(format!("sleeps until {sleep_until:?}, but there is something to do: {:?}", self.naive));
            }
            let moments = self.naive.moments();
            if let Some(missed) =
                moments.iter().find(|&&moment| self.now < moment && moment < sleep_until && acts(moment))
            {
                return Err(format!("sleeps until {sleep_until:?} past {missed:?}: {:?}", self.naive));
            }
            if !(sleep_until.is_never() || sleep_until > self.now && moments.contains(&sleep_until)) {
                return Err(format!("wakes at {sleep_until:?} for nothing: {:?}", self.naive));
            }
            for lane in Lane::ALL {
                for cost in [0, 1, 2, 999, u64::MAX] {
                    let (found, expected) =
                        (self.lanes.spent(lane, cost, self.now), self.naive.spent(lane, cost, self.now));
                    same("until when it is spent", found.map(|told| told.1), expected.map(|told| told.1))?;
                    let both =
                        self.naive.told.iter().filter(|told| Some(told.until) == expected.map(|told| told.1)).count();
                    same("what is spent", both > 1 || found == expected, true)?;
                }
                same("waiting", self.lanes.waiting(lane), self.naive.waiting(lane))?;
                same("in flight", self.lanes.in_flight(lane), self.naive.in_flight[lane as usize])?;
            }
            if dice.percent(20) && !sleep_until.is_never() {
                self.now = sleep_until;
            }
            Ok(())
        }

        /// All calls go, and all room is there again.
        fn clear_out(mut self) -> Result<(), String> {
            let room: u32 = self.naive.spec.lanes.iter().map(|lane| lane.max_waiting).sum();
            for call in std::mem::take(&mut self.naive.calls) {
                same("cancel", self.lanes.cancel(call.ticket), true)?;
            }
            let mut indexes = HashSet::new();
            for lane in Lane::ALL {
                while let Ok(ticket) = self.lanes.enqueue(lane, 1, Time::NEVER, self.now) {
                    indexes.insert(ticket.index());
                }
            }
            same("slots", indexes.len(), room as usize)?;
            same("all below their number", indexes.iter().all(|&index| index < room as usize), true)
        }
    }

    fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, expected: T) -> Result<(), String> {
        if found == expected { Ok(()) } else { Err(format!("{what}: {found:?}, expected {expected:?}")) }
    }

    #[test]
    fn operations_agree_with_the_model() {
        property::check(count(400, 6_000), 2_000, |mut dice| {
            let mut pair = Pair::new(&mut dice);
            while !dice.exhausted() {
                pair.step(&mut dice)?;
            }
            pair.clear_out()
        });
    }

    #[test]
    fn a_long_run_leaks_nothing() {
        let seed = dice::seed();
        let mut dice = Dice::seeded(seed);
        let mut pair = Pair::new(&mut dice);
        for step in 0..count(30_000, 1_000_000) {
            if let Err(mismatch) = pair.step(&mut dice) {
                panic!("{mismatch} at step {step}\n  repeat with TIDEGATE_SEED={seed}");
            }
        }
        pair.clear_out().expect("room for everybody");
    }
}
