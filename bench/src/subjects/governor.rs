//! governor, by its default constructors: with DashMap and its quanta clock.

use super::{LimitTerms, Subject, keyed_worker as keyed_loop, unkeyed_worker};
use crate::keys::KeySequence;
use crate::measure::Worker;
use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use std::num::NonZeroU32;

/// Returns one limit without a key.
pub fn direct(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(GovernorDirect(RateLimiter::direct(quota(terms))))
}

/// Returns a limit per `String`.
pub fn keyed(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(GovernorKeyed(RateLimiter::keyed(quota(terms))))
}

/// Returns a limit per `u64`, which shows its memory if its user hashes keys.
pub fn keyed_by_number(terms: LimitTerms) -> Box<dyn Subject> {
    Box::new(GovernorKeyedByNumber(RateLimiter::keyed(quota(terms))))
}

fn quota(terms: LimitTerms) -> Quota {
    let burst = NonZeroU32::new(terms.burst).expect("terms have a burst");
    Quota::with_period(terms.interval).expect("terms have an interval").allow_burst(burst)
}

struct GovernorDirect(RateLimiter<NotKeyed, InMemoryState, DefaultClock>);

impl Subject for GovernorDirect {
    fn name(&self) -> &'static str {
        "governor"
    }

    fn decide_once(&self, _: &String) -> bool {
        self.0.check().is_ok()
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        unkeyed_worker(|| self.0.check().is_ok())
    }
}

struct GovernorKeyed(RateLimiter<String, DefaultKeyedStateStore<String>, DefaultClock>);

impl Subject for GovernorKeyed {
    fn name(&self) -> &'static str {
        "governor"
    }

    fn decide_once(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        keyed_loop(sequence, |key| self.0.check_key(key).is_ok())
    }
}

struct GovernorKeyedByNumber(RateLimiter<u64, DefaultKeyedStateStore<u64>, DefaultClock>);

impl GovernorKeyedByNumber {
    fn decide(&self, key: &str) -> bool {
        let number = u64::from_str_radix(key, 16).expect("keys are hexadecimal");
        self.0.check_key(&number).is_ok()
    }
}

impl Subject for GovernorKeyedByNumber {
    fn name(&self) -> &'static str {
        "governor (u64 keys)"
    }

    fn decide_once(&self, key: &String) -> bool {
        self.decide(key)
    }

    fn worker<'a>(&'a self, sequence: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        keyed_loop(sequence, |key| self.decide(key))
    }
}
