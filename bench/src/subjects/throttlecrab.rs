//! throttlecrab, with the store that it calls its default. It wants `&mut self`: two threads need a mutex, one does not.

use super::{Parts, Subject, Terms};
use crate::keys::Sequence;
use crate::measure::Worker;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::SystemTime;
use throttlecrab::{PeriodicStore, RateLimiter};

/// One limit for all calls: it has no limiter without keys, so every call has the same one.
pub fn direct(terms: Terms) -> Box<dyn Subject> {
    Box::new(Throttlecrab { same: vec![crate::keys::name(0); 4096], ..Throttlecrab::new(terms) })
}

/// A limit for each text.
pub fn keyed(terms: Terms) -> Box<dyn Subject> {
    Box::new(Throttlecrab::new(terms))
}

struct Throttlecrab {
    limiter: Mutex<RateLimiter<PeriodicStore>>,
    terms: Terms,
    /// Keys to ask with instead of the sequence's.
    same: Vec<String>,
}

impl Throttlecrab {
    fn new(terms: Terms) -> Self {
        Self { limiter: Mutex::new(RateLimiter::new(PeriodicStore::new())), terms, same: Vec::new() }
    }

    fn decide(&self, limiter: &mut RateLimiter<PeriodicStore>, key: &str) -> bool {
        let (count, seconds) = self.terms.count_and_seconds();
        limiter
            .rate_limit(key, self.terms.burst.into(), count.into(), seconds.into(), 1, SystemTime::now())
            .expect("the terms are valid")
            .0
    }
}

impl Subject for Throttlecrab {
    fn name(&self) -> &'static str {
        "throttlecrab"
    }

    fn touch(&self, key: &String) -> bool {
        let key = self.same.first().unwrap_or(key);
        self.decide(&mut self.limiter.lock().expect("no thread panicked"), key)
    }

    fn worker<'a>(&'a self, sequence: &'a Sequence, threads: usize) -> Box<dyn Worker + 'a> {
        let keys = if self.same.is_empty() { &sequence.keys } else { &self.same };
        Box::new(Asking { of: self, keys, at: 0, alone: threads == 1 })
    }
}

struct Asking<'a> {
    of: &'a Throttlecrab,
    keys: &'a [String],
    at: usize,
    alone: bool,
}

impl Worker for Asking<'_> {
    fn run(&mut self, steps: usize) -> usize {
        let mut admitted = 0;
        let mut whole = self.alone.then(|| self.of.limiter.lock().expect("no thread panicked"));
        for part in Parts::new(&mut self.at, self.keys.len(), steps) {
            for key in &self.keys[part] {
                let key = black_box(key);
                let allowed = match &mut whole {
                    Some(limiter) => self.of.decide(limiter, key),
                    None => self.of.decide(&mut self.of.limiter.lock().expect("no thread panicked"), key),
                };
                admitted += usize::from(black_box(allowed));
            }
        }
        admitted
    }
}
