//! The measured subjects: one file per library, each used as its own documentation recommends.

pub mod backon;
pub mod failsafe;
pub mod governor;
pub mod limitador;
pub mod outbound;
pub mod recloser;
pub mod stores;
pub mod throttlecrab;
pub mod tidegate;
pub mod tower_resilience;

use crate::keys::KeySequence;
use crate::measure::Worker;
use std::future::{Future, poll_fn};
use std::hint::{black_box, spin_loop};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The name of Tidegate's own subject in every row.
pub const OURS: &str = "tidegate";

/// A limit that every library can express: `burst` calls at once, then one per `interval`.
#[derive(Clone, Copy, Debug)]
pub struct LimitTerms {
    /// The time after which one more call is admitted.
    pub interval: Duration,
    /// The number of calls admitted at once.
    pub burst: u32,
}

impl LimitTerms {
    /// Returns the same rate as a count per whole number of seconds.
    fn count_and_seconds(self) -> (u32, u32) {
        let nanos = u32::try_from(self.interval.as_nanos());
        match nanos {
            Ok(nanos) if nanos < 1_000_000_000 => (1_000_000_000 / nanos, 1),
            _ => (1, u32::try_from(self.interval.as_secs()).expect("terms are short")),
        }
    }

    /// A limit for all calls, which no run of this benchmark uses up.
    pub const LARGE: Self = Self { interval: Duration::from_secs(1), burst: 1_000_000_000 };
    /// A limit per key, which no run uses up. It is slow enough that no key's state lapses during a run: a limiter that
    /// may drop a key between two calls would be timed on an empty store.
    pub const LARGE_KEYED: Self = Self { interval: Duration::from_secs(10), burst: 100_000_000 };
    /// A limit that is fully restored before the next call, as for a client that calls seldom.
    pub const FAST_REFILL: Self = Self { interval: Duration::from_nanos(1), burst: 1_000_000 };
    /// The same for each of a thousand keys.
    pub const FAST_REFILL_KEYED: Self = Self { interval: Duration::from_micros(1), burst: 1_000_000 };
    /// A limit of two calls, then refusals for longer than any run. The burst isn't 1, because throttlecrab drops a key
    /// of burst 1 at once, and admits every call.
    pub const TIGHT: Self = Self { interval: Duration::from_secs(3600), burst: 2 };
}

/// Returns the keyed limiter of a library, by the name that [`crate::memory_use`] gives its child process.
pub fn keyed_by_name(name: &str, terms: LimitTerms) -> Option<Box<dyn Subject>> {
    match name {
        OURS => Some(tidegate::keyed(terms)),
        "tidegate-window" => Some(tidegate::windowed(terms)),
        "governor" => Some(governor::keyed(terms)),
        "governor-u64" => Some(governor::keyed_by_number(terms)),
        "throttlecrab" => Some(throttlecrab::keyed(terms)),
        "limitador" => Some(limitador::prebuilt(terms)),
        _ => None,
    }
}

/// Returns the subject that makes whole outbound calls, by the name that [`crate::outbound`] gives its child process.
pub fn caller_by_name(name: &str) -> Option<Box<dyn Subject>> {
    match name {
        OURS => Some(outbound::calls(outbound::LimitChoice::Window)),
        "tidegate-rate" => Some(outbound::calls(outbound::LimitChoice::Rate)),
        "tower-resilience" => Some(tower_resilience::breaker_and_limiter()),
        _ => None,
    }
}

/// Returns the value of a future that needs no wake-up: it is ready, or another thread is about to release a lock.
pub fn spin_until_ready<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
            return value;
        }
        spin_loop();
    }
}

/// Calls a tower service that is ready, or will be as soon as another thread releases a lock. Returns true if the call
/// succeeds.
pub fn call_once<S: tower::Service<()>>(service: &mut S) -> bool {
    let ready = spin_until_ready(poll_fn(|context| service.poll_ready(context)));
    ready.is_ok() && spin_until_ready(service.call(())).is_ok()
}

/// A limiter under measurement.
pub trait Subject: Sync {
    /// Returns its name in the table.
    fn name(&self) -> &'static str;

    /// Makes one decision outside every timed loop, to fill the store. Returns true if it admits.
    #[expect(clippy::ptr_arg, reason = "governor, keyed by `String`, asks for one")]
    fn decide_once(&self, key: &String) -> bool;

    /// Returns a loop over the sequence for one of `threads` threads.
    fn worker<'a>(&'a self, sequence: &'a KeySequence, threads: usize) -> Box<dyn Worker + 'a>;
}

/// Returns a loop that asks with the sequence's keys in order, again and again.
pub fn keyed_worker<'a>(
    sequence: &'a KeySequence,
    decide: impl FnMut(&String) -> bool + Send + 'a,
) -> Box<dyn Worker + 'a> {
    Box::new(KeyedWorker { keys: &sequence.keys, position: 0, decide })
}

/// Returns a loop that asks without a key.
pub fn unkeyed_worker<'a>(decide: impl FnMut() -> bool + Send + 'a) -> Box<dyn Worker + 'a> {
    Box::new(UnkeyedWorker(decide))
}

struct KeyedWorker<'a, F> {
    keys: &'a [String],
    position: usize,
    decide: F,
}

impl<F: FnMut(&String) -> bool + Send> Worker for KeyedWorker<'_, F> {
    fn run(&mut self, steps: usize) -> usize {
        let mut admitted = 0;
        for part in RingRanges::new(&mut self.position, self.keys.len(), steps) {
            for key in &self.keys[part] {
                admitted += usize::from(black_box((self.decide)(black_box(key))));
            }
        }
        admitted
    }
}

struct UnkeyedWorker<F>(F);

impl<F: FnMut() -> bool + Send> Worker for UnkeyedWorker<F> {
    fn run(&mut self, steps: usize) -> usize {
        (0..steps).map(|_| usize::from(black_box((self.0)()))).sum()
    }
}

/// The next `steps` places of a ring, as ranges that don't wrap, so that the timed loop has no wrap to test for.
struct RingRanges<'a> {
    at: &'a mut usize,
    len: usize,
    left: usize,
}

impl<'a> RingRanges<'a> {
    fn new(at: &'a mut usize, len: usize, steps: usize) -> Self {
        Self { at, len, left: steps }
    }
}

impl Iterator for RingRanges<'_> {
    type Item = std::ops::Range<usize>;

    fn next(&mut self) -> Option<Self::Item> {
        let from = *self.at;
        let taken = self.left.min(self.len - from);
        if taken == 0 {
            return None;
        }
        self.left -= taken;
        *self.at = (from + taken) % self.len;
        Some(from..from + taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::KeyDistribution;
    use crate::subjects::tidegate::StateFill;

    #[test]
    fn ring_ranges_wrap_around() {
        let mut at = 3;
        let parts: Vec<_> = RingRanges::new(&mut at, 5, 9).collect();
        assert_eq!(parts, [3..5, 0..5, 0..2]);
        assert_eq!(at, 2);
    }

    #[test]
    fn breakers_and_whole_calls_admit_calls() {
        let sequence = KeySequence::new(KeyDistribution::SingleKey, 1, 1);
        let subjects = [
            outbound::breaker(outbound::ClockUse::GivenTime),
            outbound::breaker(outbound::ClockUse::ReadsClock),
            recloser::breaker(),
            failsafe::breaker(),
            tower_resilience::breaker(),
            outbound::breaker_layer(),
            outbound::calls(outbound::LimitChoice::Window),
            outbound::calls(outbound::LimitChoice::Rate),
            tower_resilience::breaker_and_limiter(),
        ];
        for subject in subjects {
            assert!(subject.decide_once(&crate::keys::key_text(0)), "{}", subject.name());
            assert_eq!(subject.worker(&sequence, 1).run(1_000), 1_000, "{}", subject.name());
        }
    }

    #[test]
    fn subjects_admit_under_wide_limits_refuse_under_tight() {
        let sequence = KeySequence::new(KeyDistribution::Uniform, 100, 1);
        let subjects = |terms| -> Vec<Box<dyn Subject>> {
            vec![
                tidegate::keyed(terms),
                tidegate::windowed(terms),
                governor::keyed(terms),
                throttlecrab::keyed(terms),
                limitador::prebuilt(terms),
                limitador::whole(terms),
            ]
        };
        for filling in [StateFill::Typical, StateFill::FullLogs, StateFill::Rates] {
            let subject = tidegate::inbound(filling, 100);
            assert_eq!(subject.worker(&sequence, 1).run(40_000), 40_000, "{filling:?}");
        }
        assert_eq!(LimitTerms::FAST_REFILL_KEYED.count_and_seconds(), (1_000_000, 1));
        assert_eq!(LimitTerms::TIGHT.count_and_seconds(), (1, 3600));
        for subject in subjects(LimitTerms::LARGE_KEYED) {
            assert_eq!(subject.worker(&sequence, 1).run(40_000), 40_000, "{}", subject.name());
        }
        for subject in subjects(LimitTerms::TIGHT) {
            for key in (0..100).chain(0..100) {
                assert!(subject.decide_once(&crate::keys::key_text(key)), "{}", subject.name());
            }
            assert_eq!(subject.worker(&sequence, 2).run(40_000), 0, "{}", subject.name());
        }
    }
}
