//! recloser by its defaults: a failure rate of one half over a hundred calls.

use super::{Subject, unkeyed};
use crate::keys::Sequence;
use crate::measure::Worker;
use recloser::Recloser;

/// A closed breaker around a call that succeeds at once.
pub fn breaker() -> Box<dyn Subject> {
    Box::new(Breaker(Recloser::default()))
}

struct Breaker(Recloser);

impl Breaker {
    fn call(&self) -> bool {
        self.0.call(|| Ok::<_, ()>(())).is_ok()
    }
}

impl Subject for Breaker {
    fn name(&self) -> &'static str {
        "recloser"
    }

    fn touch(&self, _: &String) -> bool {
        self.call()
    }

    fn worker<'a>(&'a self, _: &'a Sequence, _: usize) -> Box<dyn Worker + 'a> {
        unkeyed(|| self.call())
    }
}
