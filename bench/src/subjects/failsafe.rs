//! failsafe with its policy of consecutive failures, the cheapest one.

use super::{Subject, unkeyed_worker};
use crate::keys::KeySequence;
use crate::measure::Worker;
use failsafe::backoff::{Constant, constant};
use failsafe::failure_policy::{ConsecutiveFailures, consecutive_failures};
use failsafe::{CircuitBreaker, Config, StateMachine};
use std::time::Duration;

/// Returns a closed breaker around a call that succeeds at once.
pub fn breaker() -> Box<dyn Subject> {
    let policy = consecutive_failures(5, constant(Duration::from_secs(300)));
    Box::new(FailsafeBreaker(Config::new().failure_policy(policy).build()))
}

struct FailsafeBreaker(StateMachine<ConsecutiveFailures<Constant>, ()>);

impl FailsafeBreaker {
    fn call(&self) -> bool {
        self.0.call(|| Ok::<_, ()>(())).is_ok()
    }
}

impl Subject for FailsafeBreaker {
    fn name(&self) -> &'static str {
        "failsafe"
    }

    fn decide_once(&self, _: &String) -> bool {
        self.call()
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        unkeyed_worker(|| self.call())
    }
}
