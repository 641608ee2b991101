//! governor, by its default constructors: DashMap, its quanta clock.

use super::{Subject, Terms, keyed as keyed_loop, unkeyed};
use crate::keys::Sequence;
use crate::measure::Worker;
use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use std::num::NonZeroU32;

/// One limit, no key.
pub fn direct(terms: Terms) -> Box<dyn Subject> {
    Box::new(Direct(RateLimiter::direct(quota(terms))))
}

/// A limit for each `String`.
pub fn keyed(terms: Terms) -> Box<dyn Subject> {
    Box::new(ByText(RateLimiter::keyed(quota(terms))))
}

/// A limit for each `u64`: what it weighs when its user hashes.
pub fn keyed_by_number(terms: Terms) -> Box<dyn Subject> {
    Box::new(ByNumber(RateLimiter::keyed(quota(terms))))
}

fn quota(terms: Terms) -> Quota {
    let burst = NonZeroU32::new(terms.burst).expect("terms have a burst");
    Quota::with_period(terms.every).expect("terms have an interval").allow_burst(burst)
}

struct Direct(RateLimiter<NotKeyed, InMemoryState, DefaultClock>);

impl Subject for Direct {
    fn name(&self) -> &'static str {
        "governor"
    }

    fn touch(&self, _: &String) -> bool {
        self.0.check().is_ok()
    }

    fn worker<'a>(&'a self, _: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        unkeyed(|| self.0.check().is_ok())
    }
}

struct ByText(RateLimiter<String, DefaultKeyedStateStore<String>, DefaultClock>);

impl Subject for ByText {
    fn name(&self) -> &'static str {
        "governor"
    }

    fn touch(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }

    fn worker<'a>(&'a self, sequence: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        keyed_loop(sequence, |key| self.0.check_key(key).is_ok())
    }
}

struct ByNumber(RateLimiter<u64, DefaultKeyedStateStore<u64>, DefaultClock>);

impl ByNumber {
    fn decide(&self, key: &str) -> bool {
        let number = u64::from_str_radix(key, 16).expect("keys are hexadecimal");
        self.0.check_key(&number).is_ok()
    }
}

impl Subject for ByNumber {
    fn name(&self) -> &'static str {
        "governor (u64 keys)"
    }

    fn touch(&self, key: &String) -> bool {
        self.decide(key)
    }

    fn worker<'a>(&'a self, sequence: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        keyed_loop(sequence, |key| self.decide(key))
    }
}
