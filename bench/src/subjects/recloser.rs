//! recloser by its defaults: a failure rate of one half over a hundred calls.

use super::{Subject, unkeyed_worker};
use crate::keys::KeySequence;
use crate::measure::Worker;
use recloser::Recloser;

/// Returns a closed breaker around a call that succeeds at once.
pub fn breaker() -> Box<dyn Subject> {
    Box::new(RecloserBreaker(Recloser::default()))
}

struct RecloserBreaker(Recloser);

impl RecloserBreaker {
    fn call(&self) -> bool {
        self.0.call(|| Ok::<_, ()>(())).is_ok()
    }
}

impl Subject for RecloserBreaker {
    fn name(&self) -> &'static str {
        "recloser"
    }

    fn decide_once(&self, _: &String) -> bool {
        self.call()
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        unkeyed_worker(|| self.call())
    }
}
