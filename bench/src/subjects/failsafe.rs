//! failsafe with its policy of consecutive failures: the one that costs least.

use super::{Subject, unkeyed};
use crate::keys::Sequence;
use crate::measure::Worker;
use failsafe::backoff::{Constant, constant};
use failsafe::failure_policy::{ConsecutiveFailures, consecutive_failures};
use failsafe::{CircuitBreaker, Config, StateMachine};
use std::time::Duration;

/// A closed breaker around a call that succeeds at once.
pub fn breaker() -> Box<dyn Subject> {
    let policy = consecutive_failures(5, constant(Duration::from_secs(300)));
    Box::new(Breaker(Config::new().failure_policy(policy).build()))
}

struct Breaker(StateMachine<ConsecutiveFailures<Constant>, ()>);

impl Breaker {
    fn call(&self) -> bool {
        self.0.call(|| Ok::<_, ()>(())).is_ok()
    }
}

impl Subject for Breaker {
    fn name(&self) -> &'static str {
        "failsafe"
    }

    fn touch(&self, _: &String) -> bool {
        self.call()
    }

    fn worker<'a>(&'a self, _: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        unkeyed(|| self.call())
    }
}
