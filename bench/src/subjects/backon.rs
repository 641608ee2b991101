//! backon's exponential back-off with jitter, asked for the delays of one call after the other.

use super::{Subject, unkeyed_worker};
use crate::keys::KeySequence;
use crate::measure::Worker;
use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use std::time::Duration;

/// The number of delays of one call, after which the next call begins with the shortest one.
pub const TRIES_PER_CALL: u32 = 10;

/// Returns a back-off of base 1 s, factor 2 and cap one hour. Ten delays don't reach the cap.
pub fn backoff() -> Box<dyn Subject> {
    Box::new(BackonSubject(
        ExponentialBuilder::new()
            .with_min_delay(Duration::from_secs(1))
            .with_max_delay(Duration::from_secs(3600))
            .with_factor(2.0)
            .without_max_times()
            .with_jitter(),
    ))
}

struct BackonSubject(ExponentialBuilder);

struct BackonDelays<'a> {
    builder: &'a ExponentialBuilder,
    seed: u64,
    tries: u32,
    current: ExponentialBackoff,
}

impl BackonDelays<'_> {
    fn next(&mut self) -> Option<Duration> {
        if self.tries == TRIES_PER_CALL {
            self.tries = 0;
            self.seed = self.seed.wrapping_add(1);
            self.current = self.builder.with_jitter_seed(self.seed).build();
        }
        self.tries += 1;
        self.current.next()
    }
}

impl Subject for BackonSubject {
    fn name(&self) -> &'static str {
        "backon"
    }

    fn decide_once(&self, _: &String) -> bool {
        self.0.build().next().is_some()
    }

    fn worker<'a>(&'a self, _: &'a KeySequence, _: usize) -> Box<dyn Worker + 'a> {
        let mut delays = BackonDelays { builder: &self.0, seed: 1, tries: 0, current: self.0.build() };
        unkeyed_worker(move || std::hint::black_box(delays.next()).is_some())
    }
}
