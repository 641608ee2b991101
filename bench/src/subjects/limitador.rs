//! limitador, in memory. It is measured at its best, with every counter built beforehand, and in ordinary use, with a
//! context made from each request.

use super::{LimitTerms, RingRanges, Subject};
use crate::keys::{KeySequence, key_text};
use crate::measure::Worker;
use limitador::RateLimiter;
use limitador::counter::Counter;
use limitador::limit::{Context, Limit, Namespace};
use limitador::storage::in_memory::InMemoryStorage;
use limitador::storage::{Authorization, CounterStorage};
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;

/// The largest number of counters that it keeps: more than any row has.
const MAX_COUNTERS: u64 = 2_000_000;

/// Returns a limit per text, asked with counters that are built before timing. `decide_once` builds its counter itself.
pub fn prebuilt(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(LimitadorPrebuilt { storage: InMemoryStorage::new(MAX_COUNTERS), limit: Arc::new(limit(terms)) })
}

/// Returns a limit per text, asked as by a server: with a context of the request's method, path and key, over which the
/// limit's conditions are evaluated, and the counter resolved from it.
pub fn whole(terms: LimitTerms) -> Box<dyn Subject> {
    let limiter = RateLimiter::new(MAX_COUNTERS);
    limiter.add_limit(limit(terms));
    Box::new(LimitadorWhole { limiter, namespace: Namespace::from("bench") })
}

fn limit(terms: LimitTerms) -> Limit {
    let conditions =
        ["method == 'POST'", "path == '/login'"].map(|condition| condition.try_into().expect("the condition is valid"));
    let variables = ["client".try_into().expect("the variable is valid")];
    Limit::new("bench", u64::from(terms.burst), 3600, conditions, variables)
}

fn context(key: &str) -> Context<'static> {
    HashMap::from([
        ("method".to_owned(), "POST".to_owned()),
        ("path".to_owned(), "/login".to_owned()),
        ("client".to_owned(), key.to_owned()),
    ])
    .into()
}

struct LimitadorPrebuilt {
    storage: InMemoryStorage,
    limit: Arc<Limit>,
}

impl LimitadorPrebuilt {
    fn counter(&self, key: &str) -> Vec<Counter> {
        let counter = Counter::new(Arc::clone(&self.limit), &context(key));
        vec![counter.expect("the variable resolves").expect("the context has the variable")]
    }

    fn decide(&self, counters: &mut Vec<Counter>) -> bool {
        let answer = self.storage.check_and_update(counters, 1);
        matches!(answer.expect("memory does not fail"), Authorization::Ok)
    }
}

impl Subject for LimitadorPrebuilt {
    fn name(&self) -> &'static str {
        "limitador (prebuilt)"
    }

    fn decide_once(&self, key: &String) -> bool {
        self.decide(&mut self.counter(key))
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let keys = sequence.indexes.iter().max().map_or(0, |most| most + 1);
        Box::new(LimitadorWorker {
            subject: self,
            counters: (0..keys).map(|index| self.counter(&key_text(index))).collect(),
            order: &sequence.indexes,
            position: 0,
        })
    }
}

struct LimitadorWorker<'a> {
    subject: &'a LimitadorPrebuilt,
    counters: Vec<Vec<Counter>>,
    order: &'a [u32],
    position: usize,
}

impl Worker for LimitadorWorker<'_> {
    fn run(&mut self, steps: usize) -> usize {
        let mut admitted = 0;
        for part in RingRanges::new(&mut self.position, self.order.len(), steps) {
            for index in &self.order[part] {
                let counters = black_box(&mut self.counters[*index as usize]);
                admitted += usize::from(black_box(self.subject.decide(counters)));
            }
        }
        admitted
    }
}

struct LimitadorWhole {
    limiter: RateLimiter,
    namespace: Namespace,
}

impl LimitadorWhole {
    fn decide(&self, key: &str) -> bool {
        let answer = self.limiter.check_rate_limited_and_update(&self.namespace, &context(key), 1);
        !answer.expect("memory does not fail").limited
    }
}

impl Subject for LimitadorWhole {
    fn name(&self) -> &'static str {
        "limitador (one limit)"
    }

    fn decide_once(&self, key: &String) -> bool {
        self.decide(key)
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        super::keyed_worker(sequence, |key| self.decide(key))
    }
}
