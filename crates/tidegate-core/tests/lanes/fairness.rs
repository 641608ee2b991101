//! The share of each lane.

use super::*;

struct Grant {
    at: Time,
    lane: Lane,
    cost: u64,
    /// The time for which its lane had waited for a grant.
    waited: Span,
}

/// Lanes in front of a limit, with a clock of their own.
struct Provider {
    lanes: Lanes,
    limiter: TestLimiter,
    now: Time,
    costs: HashMap<Ticket, (Lane, u64)>,
    granted: Vec<Grant>,
    waits_since: [Time; 3],
}

impl Provider {
    fn new(limit: Limit, spec: LanesSpec) -> Self {
        Self {
            lanes: Lanes::new(spec),
            limiter: TestLimiter::new([limit]),
            now: test_time(0),
            costs: HashMap::new(),
            granted: Vec::new(),
            waits_since: [test_time(0); 3],
        }
    }

    /// Adds a call that waits for up to ten seconds, unless the queue is full.
    fn call(&mut self, lane: Lane, cost: u64) -> Option<Ticket> {
        if self.lanes.waiting(lane) == 0 {
            self.waits_since[lane as usize] = self.now;
        }
        let ticket = self.lanes.enqueue(lane, cost, self.now + Span::from_secs(10), self.now).ok()?;
        self.costs.insert(ticket, (lane, cost));
        Some(ticket)
    }

    /// Runs until `until` and handles every event before.
    fn run(&mut self, until: Time) {
        loop {
            match self.lanes.poll(self.now) {
                QueueStep::AskStore(ticket) => self.ask(ticket),
                QueueStep::Expired(ticket) => {
                    self.costs.remove(&ticket).expect("a call that waits");
                }
                QueueStep::Displaced(_) => unreachable!("these lanes displace no call"),
                QueueStep::Sleep(wake_at) if wake_at < until => self.now = wake_at,
                QueueStep::Sleep(_) => break,
            }
        }
        self.now = until;
    }

    fn ask(&mut self, ticket: Ticket) {
        let (lane, cost) = self.costs[&ticket];
        let decision = self.limiter.take(1, cost, self.now);
        if decision.allowed {
            self.costs.remove(&ticket);
            assert_eq!(self.lanes.grant(ticket, self.now), Some(lane));
            self.lanes.record_end(lane);
            let since = std::mem::replace(&mut self.waits_since[lane as usize], self.now);
            self.granted.push(Grant { at: self.now, lane, cost, waited: self.now.since(since) });
        } else {
            let wait = decision.retry_after.expect("a cost below the limit");
            self.lanes.refuse(ticket, refusal(self.now + wait, RefusalScope::Provider), self.now);
        }
    }

    fn cost(&self, lanes: &[Lane]) -> u64 {
        self.granted.iter().filter(|grant| lanes.contains(&grant.lane)).map(|grant| grant.cost).sum()
    }

    /// A lane's share of the granted cost, in permille.
    fn share(&self, lane: Lane) -> u64 {
        self.cost(&[lane]) * 1_000 / self.cost(&Lane::ALL)
    }

    fn longest_wait(&self, lane: Lane) -> Span {
        self.granted.iter().filter(|grant| grant.lane == lane).map(|grant| grant.waited).max().expect("a grant")
    }
}

fn rate(count: u64, burst: u64) -> Limit {
    Limit::new(LimitKind::Rate(Rate::new(count, Span::from_secs(1), burst).expect("a rate")))
}

const FLOOR_ALONE: LanesSpec = LanesSpec {
    lanes: [LaneSpec { max_waiting: 50, displaces: false, max_in_flight: u32::MAX }; 3],
    max_in_flight: u32::MAX,
    floor: 100,
    window: Span::MAX,
};

#[test]
fn background_keeps_its_floor_under_user_overload() {
    let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
    for slot in 0..20_000 {
        provider.call(Lane::User, 1);
        provider.call(Lane::Background, 1);
        provider.run(test_time((slot + 1) * 50));
    }
    assert_eq!(provider.granted.len(), 10_000, "all of the limit is used");
    assert!(provider.cost(&[Lane::Background]).abs_diff(1_000) <= 1);
    assert!(provider.longest_wait(Lane::Background) <= Span::from_millis(1_100), "ten others, then its own");
}

#[test]
fn both_lower_lanes_keep_floors_under_webhooks() {
    for floor in [50, 100, MAX_FLOOR, u16::MAX] {
        let mut provider = Provider::new(rate(10, 1), LanesSpec { floor, ..FLOOR_ALONE });
        for slot in 0..20_000 {
            for lane in Lane::ALL {
                provider.call(lane, 1);
            }
            provider.run(test_time((slot + 1) * 50));
        }
        let floor = u64::from(floor.min(MAX_FLOOR));
        for lane in [Lane::Background, Lane::User] {
            let share = provider.share(lane);
            assert!(share.abs_diff(floor) <= 1, "{lane:?} has {share} of {floor}");
        }
        assert!(provider.share(Lane::Webhook) >= 333);
    }
}

/// Calls of language models cost thousands of units, each a different number.
#[test]
fn floors_count_cost_and_not_calls() {
    let mut random = RandomSource::from_seed(5);
    let mut provider = Provider::new(rate(1_000, 5_000), FLOOR_ALONE);
    for slot in 0..20_000 {
        provider.call(Lane::User, random.between(1, 5_000));
        if random.chance(50) {
            provider.call(Lane::Background, random.between(1, 1_000));
        }
        provider.run(test_time((slot + 1) * 500));
    }
    let share = provider.share(Lane::Background);
    assert!((99..=101).contains(&share), "{share}");
    // The dearest call needs ten times its cost to be granted. Its turn comes after a user's call, and then the limit
    // must refill.
    let longest = provider.longest_wait(Lane::Background);
    assert!(longest <= Span::from_secs(10 + 5 + 1), "{longest}");
}

#[test]
fn a_small_window_serves_every_lane() {
    const MINUTE: Span = Span::from_secs(60);
    for (limit, lanes) in [(5, &Lane::ALL[..]), (3, &Lane::ALL[..]), (2, &Lane::ALL[1..])] {
        let spec = LanesSpec { window: MINUTE, ..FLOOR_ALONE };
        let mut provider = Provider::new(window_limit(limit, 60), spec);
        for second in 0..3_600 {
            for &lane in lanes {
                provider.call(lane, 1);
            }
            provider.run(test_time((second + 1) * 1_000));
        }
        assert_eq!(provider.granted.len() as u64, limit * 60);
        for &lane in lanes {
            assert!(provider.longest_wait(lane) <= MINUTE, "{lane:?} waited {}", provider.longest_wait(lane));
        }
        let top = provider.cost(&[Lane::Webhook]) * lanes.len() as u64;
        assert!(top >= limit * 60, "the highest lane never has less than its part");
    }
}

/// With less than one call per window for each lane, the lanes take turns, so that each waits at most three windows.
#[test]
fn a_window_of_one_rotates_between_lanes() {
    let spec = LanesSpec { window: Span::from_secs(60), floor: 0, ..FLOOR_ALONE };
    let mut provider = Provider::new(window_limit(1, 60), spec);
    for second in 0..3_600 {
        for lane in Lane::ALL {
            provider.call(lane, 1);
        }
        provider.run(test_time((second + 1) * 1_000));
    }
    for lane in Lane::ALL {
        assert!((19..=21).contains(&provider.cost(&[lane])));
        assert!(provider.longest_wait(lane) <= Span::from_secs(180));
    }
}

#[test]
fn background_uses_everything_when_others_idle() {
    let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
    for slot in 0..1_000 {
        provider.call(Lane::Background, 1);
        provider.run(test_time((slot + 1) * 50));
    }
    assert_eq!(provider.granted.len(), 500);
    assert_eq!(provider.share(Lane::Background), 1_000);
    // The background lane has gained no credit by that: the next user's call goes immediately.
    provider.call(Lane::User, 1);
    provider.run(provider.now + Span::from_millis(100));
    assert_eq!(provider.granted.last().map(|grant| grant.lane), Some(Lane::User));
}

#[test]
fn an_unused_floor_is_not_saved() {
    let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
    for round in 0..100 {
        // Nine calls of users earn a background call nine tenths of its cost. Then it is cancelled.
        let background = provider.call(Lane::Background, 1).expect("room");
        for _ in 0..10 {
            provider.call(Lane::User, 1);
        }
        provider.run(test_time(round * 1_000 + 850));
        assert_eq!(provider.granted.len() as u64, round * 10 + 9);
        assert!(provider.lanes.cancel(background));
        provider.run(test_time(round * 1_000 + 1_000));
    }
    assert_eq!(provider.share(Lane::Background), 0);
}

#[test]
fn grants_follow_the_limit_exactly() {
    let mut provider = Provider::new(rate(10, 1), FLOOR_ALONE);
    for slot in 0..100 {
        provider.call(Lane::User, 1);
        provider.run(test_time((slot + 1) * 50));
    }
    assert!(provider.granted.iter().enumerate().all(|(place, grant)| grant.at == test_time(place as u64 * 100)));
}
