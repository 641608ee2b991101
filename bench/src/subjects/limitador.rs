//! limitador, in memory: at its best, with every counter built beforehand, and as its users meet it, with a context made
//! from each request.

use super::{Parts, Subject, Terms};
use crate::keys::{Sequence, name};
use crate::measure::Worker;
use limitador::RateLimiter;
use limitador::counter::Counter;
use limitador::limit::{Context, Limit, Namespace};
use limitador::storage::in_memory::InMemoryStorage;
use limitador::storage::{Authorization, CounterStorage};
use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;

/// Counters that it keeps at most: more than any row has.
const CACHE: u64 = 2_000_000;

/// A limit for each text, asked with counters that were built before the clock ran. `touch` builds its own.
pub fn prebuilt(terms: Terms) -> Box<dyn Subject> {
    Box::new(Prebuilt { storage: InMemoryStorage::new(CACHE), limit: Arc::new(limit(terms)) })
}

/// A limit for each text, asked as a server does: a context of the request's method, path and key, the limit's
/// conditions evaluated over it, the counter resolved from it.
pub fn whole(terms: Terms) -> Box<dyn Subject> {
    let limiter = RateLimiter::new(CACHE);
    limiter.add_limit(limit(terms));
    Box::new(Whole { limiter, namespace: Namespace::from("bench") })
}

fn limit(terms: Terms) -> Limit {
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

struct Prebuilt {
    storage: InMemoryStorage,
    limit: Arc<Limit>,
}

impl Prebuilt {
    fn counter(&self, key: &str) -> Vec<Counter> {
        let counter = Counter::new(Arc::clone(&self.limit), &context(key));
        vec![counter.expect("the variable resolves").expect("the context has the variable")]
    }

    fn decide(&self, counters: &mut Vec<Counter>) -> bool {
        let answer = self.storage.check_and_update(counters, 1);
        matches!(answer.expect("memory does not fail"), Authorization::Ok)
    }
}

impl Subject for Prebuilt {
    fn name(&self) -> &'static str {
        "limitador (prebuilt)"
    }

    fn touch(&self, key: &String) -> bool {
        self.decide(&mut self.counter(key))
    }

    fn worker<'a>(&'a self, sequence: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        let keys = sequence.indexes.iter().max().map_or(0, |most| most + 1);
        Box::new(Asking {
            of: self,
            counters: (0..keys).map(|index| self.counter(&name(index))).collect(),
            order: &sequence.indexes,
            at: 0,
        })
    }
}

struct Asking<'a> {
    of: &'a Prebuilt,
    counters: Vec<Vec<Counter>>,
    order: &'a [u32],
    at: usize,
}

impl Worker for Asking<'_> {
    fn run(&mut self, steps: usize) -> usize {
        let mut admitted = 0;
        for part in Parts::new(&mut self.at, self.order.len(), steps) {
            for index in &self.order[part] {
                let counters = black_box(&mut self.counters[*index as usize]);
                admitted += usize::from(black_box(self.of.decide(counters)));
            }
        }
        admitted
    }
}

struct Whole {
    limiter: RateLimiter,
    namespace: Namespace,
}

impl Whole {
    fn decide(&self, key: &str) -> bool {
        let answer = self.limiter.check_rate_limited_and_update(&self.namespace, &context(key), 1);
        !answer.expect("memory does not fail").limited
    }
}

impl Subject for Whole {
    fn name(&self) -> &'static str {
        "limitador (one limit)"
    }

    fn touch(&self, key: &String) -> bool {
        self.decide(key)
    }

    fn worker<'a>(&'a self, sequence: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        super::keyed(sequence, |key| self.decide(key))
    }
}
