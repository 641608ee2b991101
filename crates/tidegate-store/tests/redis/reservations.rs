//! A decision costs the server hardly more because many callers wait for their instants.

use std::collections::BTreeSet;
use std::sync::Arc;

use tidegate_core::quota::FixedPeriods;
use tidegate_core::{
    Batch, Key, Limit, LimitId, LimitKind, Limits, Op, Outcome, Quota, Rate, ReservationRules, Span, Time, Verb, Window,
};
use tidegate_store::{Redis, RemoteStore as _, TimeSource};
use tidegate_testkit::servers::RedisServer;

use crate::common::Stores;

const START: Time = Time::from_secs(1_700_000_000);

/// A limit of which callers have reservations, or a plain one.
struct Crowd<'a> {
    stores: &'a Stores,
    store: Arc<Redis>,
    limit: LimitId,
    key: u64,
    step: Span,
    now: Time,
    next_caller: u64,
    due: BTreeSet<(Time, u64)>,
}

impl Crowd<'_> {
    fn call(&self, caller: u64) -> Outcome {
        let mut batch = Batch::with_op(1, Op::new(self.limit, Verb::Take, Key::new(1, self.key), 1));
        batch.set_caller(caller, Time::ZERO);
        self.stores.runtime.block_on(self.store.apply(&batch, self.now)).unwrap().list()[0]
    }

    fn join(&mut self) {
        let caller = self.next_caller;
        self.next_caller += 1;
        let at = self.call(caller).reserved_at;
        if at > self.now {
            self.due.insert((at, caller));
        }
    }

    /// Fills the limit, and lets so many callers wait.
    fn fill(&mut self, callers: usize) {
        for _ in 0..10_000 {
            if self.due.len() == callers || callers == 0 && self.call(0).admission.refuses() {
                return;
            }
            if callers > 0 {
                self.join();
            }
        }
        panic!("{} wait", self.due.len());
    }

    /// The next caller returns, another one comes, and one is refused that has no reservation.
    fn step(&mut self) {
        self.now = self.now + self.step;
        let due = self.due.first().copied().filter(|(at, _)| *at <= self.now);
        let caller = due.map_or(0, |(_, caller)| caller);
        assert!(due.is_none() || !self.call(caller).admission.refuses());
        if let Some(due) = due {
            self.due.remove(&due);
            self.join();
        } else {
            self.call(0);
            self.call(0);
        }
        self.call(0);
    }
}

/// The microseconds that a script takes on the server, over these steps.
fn script_time(server: &RedisServer, crowd: &mut Crowd<'_>) -> f64 {
    server.command(&["CONFIG", "RESETSTAT"]);
    for _ in 0..600 {
        crowd.step();
    }
    let stats = server.command(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
    let value = |name| line.split([':', ',']).find_map(|field| field.strip_prefix(name)?.trim().parse::<f64>().ok());
    value("usec=").unwrap() / value("calls=").unwrap()
}

#[test]
fn a_thousand_waiting_callers_cost_little() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Caller);
    let second = Span::from_secs(1);
    let rules = |share, grace| ReservationRules::new(Span::from_secs(30), share, Span::from_millis(grace)).unwrap();
    let quota = Quota::new(4_000, Arc::new(FixedPeriods(second))).unwrap();
    for (name, kind, rules, step) in [
        ("rate", LimitKind::Rate(Rate::new(1000, second, 100).unwrap()), rules(1000, 90), 500),
        ("window", LimitKind::Window(Window::new(400, second, 64).unwrap()), rules(500, 900), 2_000),
        ("quota", LimitKind::Quota(quota), rules(500, 900), 700),
    ] {
        let limits = vec![Limit::new(kind.clone()), Limit::new(kind).with_reservations(rules)];
        let limits = Arc::new(Limits::new(limits).unwrap());
        let store = Arc::new(stores.under(name, &limits));
        let mut crowds = [(0, 0), (1, 1), (1, 1000)].map(|(limit, callers)| {
            let limit = LimitId::from_index(limit).unwrap();
            let (store, due) = (Arc::clone(&store), BTreeSet::new());
            let mut crowd = Crowd {
                stores: &stores,
                store,
                limit,
                key: callers as u64,
                step: Span::from_micros(step),
                now: START,
                next_caller: 1,
                due,
            };
            crowd.fill(callers);
            crowd
        });
        let mut least = [f64::MAX; 3];
        for _ in 0..3 {
            for (crowd, least) in crowds.iter_mut().zip(&mut least) {
                *least = least.min(script_time(&server, crowd));
            }
        }
        let waiting = crowds.each_ref().map(|crowd| crowd.due.len());
        let [plain, one, many] = least;
        println!(
            "{name}: {plain:.1} µs without reservations, {one:.1} µs with {}, {many:.1} µs with {}",
            waiting[1], waiting[2]
        );
        assert!(waiting[2] > 500, "{name}: {waiting:?}");
        // About as much in quiet; other tests run at the same time.
        assert!(many <= 3.0 * one, "{name}: {one:.1} µs with one waiting caller, {many:.1} µs with {}", waiting[2]);
    }
}

/// A key of the queue that holds something else, or a hash of something else, is written anew.
#[test]
fn a_queue_of_another_program_is_replaced() {
    let Some(server) = RedisServer::start() else { return };
    let stores = Stores::new(server.url(), TimeSource::Caller);
    let rules = ReservationRules::new(Span::from_secs(30), 1000, Span::from_millis(500)).unwrap();
    let rate = Rate::new(1, Span::from_secs(1), 1).unwrap();
    let limits = Arc::new(Limits::new(vec![Limit::new(LimitKind::Rate(rate)).with_reservations(rules)]).unwrap());
    let store = Arc::new(stores.under("g", &limits));
    let (limit, step) = (LimitId::FIRST, Span::ZERO);
    let mut crowd =
        Crowd { stores: &stores, store, limit, key: 1, step, now: START, next_caller: 1, due: BTreeSet::new() };
    crowd.fill(1);
    let queue = server.command(&["EVAL", "return redis.call('KEYS', '*q')[1]", "0"]);
    for foreign in [&["SET", &queue, "x"][..], &["HSET", &queue, "q", "x"], &["LPUSH", &queue, "x"]] {
        server.command(&["DEL", &queue]);
        server.command(foreign);
        let given = crowd.call(2).reserved_at;
        assert_eq!(given, START + Span::from_secs(1), "{foreign:?}");
        assert_eq!(crowd.call(2).reserved_at, given, "{foreign:?}");
        assert_eq!(crowd.call(3).reserved_at, given + Span::from_millis(1500), "{foreign:?}");
    }
}
