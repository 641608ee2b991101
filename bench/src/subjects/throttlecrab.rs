//! throttlecrab, with its default store. It requires `&mut self`, so two threads need a mutex; one thread doesn't.

use super::{LimitTerms, RingRanges, Subject};
use crate::keys::KeySequence;
use crate::measure::Worker;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::SystemTime;
use throttlecrab::{PeriodicStore, RateLimiter};

/// Returns one limit for all calls. throttlecrab has no limiter without keys, so every call has the same key.
pub fn direct(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(ThrottlecrabSubject {
        single_key: vec![crate::keys::key_text(0); 4096],
        ..ThrottlecrabSubject::new(terms)
    })
}

/// Returns a limit per text.
pub fn keyed(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(ThrottlecrabSubject::new(terms))
}

struct ThrottlecrabSubject {
    limiter: Mutex<RateLimiter<PeriodicStore>>,
    terms: LimitTerms,
    /// The keys to use instead of the sequence's.
    single_key: Vec<String>,
}

impl ThrottlecrabSubject {
    fn new(terms: LimitTerms) -> Self {
        Self { limiter: Mutex::new(RateLimiter::new(PeriodicStore::new())), terms, single_key: Vec::new() }
    }

    fn decide(&self, limiter: &mut RateLimiter<PeriodicStore>, key: &str) -> bool {
        let (count, seconds) = self.terms.count_and_seconds();
        limiter
            .rate_limit(key, self.terms.burst.into(), count.into(), seconds.into(), 1, SystemTime::now())
            .expect("the terms are valid")
            .0
    }
}

impl Subject for ThrottlecrabSubject {
    fn name(&self) -> &'static str {
        "throttlecrab"
    }

    fn decide_once(&self, key: &String) -> bool {
        let key = self.single_key.first().unwrap_or(key);
        self.decide(&mut self.limiter.lock().expect("no thread panicked"), key)
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, threads: usize) -> Box<dyn Worker + 'a> {
        let keys = if self.single_key.is_empty() { &sequence.keys } else { &self.single_key };
        Box::new(ThrottlecrabWorker { subject: self, keys, position: 0, is_single_thread: threads == 1 })
    }
}

struct ThrottlecrabWorker<'a> {
    subject: &'a ThrottlecrabSubject,
    keys: &'a [String],
    position: usize,
    is_single_thread: bool,
}

impl Worker for ThrottlecrabWorker<'_> {
    fn run(&mut self, steps: usize) -> usize {
        let mut admitted = 0;
        let mut held_lock = self.is_single_thread.then(|| self.subject.limiter.lock().expect("no thread panicked"));
        for part in RingRanges::new(&mut self.position, self.keys.len(), steps) {
            for key in &self.keys[part] {
                let key = black_box(key);
                let allowed = match &mut held_lock {
                    Some(limiter) => self.subject.decide(limiter, key),
                    None => self.subject.decide(&mut self.subject.limiter.lock().expect("no thread panicked"), key),
                };
                admitted += usize::from(black_box(allowed));
            }
        }
        admitted
    }
}
