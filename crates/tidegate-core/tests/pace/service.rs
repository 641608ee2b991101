//! A service with a hidden capacity, workers that always have another call for it, and their own clock.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use tidegate_core::{Span, Time};
use tidegate_testkit::fixtures::test_time;
use tidegate_testkit::random::RandomSource;

/// The calls per second in each stretch of time.
pub(crate) const CAPACITY: [u64; 4] = [50, 90, 200, 100];

/// The distance of the service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Distance {
    /// The number of workers that share the pace: more than it needs.
    pub(crate) workers: usize,
    /// The shortest and the longest time from a request's arrival to its reply, in microseconds.
    pub(crate) replies: (u64, u64),
    /// The time for which the service keeps a capacity, in seconds.
    pub(crate) stretch: u64,
    /// The wait that a refusal asks for. All workers keep it.
    pub(crate) asked_wait: Span,
}

pub(crate) const NEAR: Distance =
    Distance { workers: 32, replies: (20_000, 200_000), stretch: 100, asked_wait: Span::ZERO };
/// A service that asks for a second, although it has room earlier.
pub(crate) const ASKING: Distance = Distance { stretch: 1_000, asked_wait: Span::from_secs(1), ..NEAR };
pub(crate) const FAR: Distance = Distance { workers: 600, replies: (1_500_000, 2_500_000), stretch: 1_000, ..NEAR };

/// The controller of the calls: the pace under test, or a rival.
pub(crate) trait Governor {
    /// The time at which the next call of any worker may be sent.
    fn next_at(&self, now: Time) -> Time;
    fn sent(&mut self, now: Time);
    /// Records the end of a call. Returns the time for which its own worker sleeps.
    fn ended(&mut self, sent_at: Time, throttled: bool, now: Time) -> Span;
    /// Records that no worker will send a call for a time.
    fn record_wait(&mut self, _wait: Span, _now: Time) {}
}

/// The algorithm of the service's limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limiter {
    /// No trailing second contains more calls than its capacity.
    Window,
    /// The distance between two calls is at least the average one.
    Spaced,
    /// A bucket with calls for half a second, full at first.
    Bucket,
}

pub(crate) const LIMITERS: [Limiter; 3] = [Limiter::Window, Limiter::Spaced, Limiter::Bucket];

struct Service {
    limiter: Limiter,
    stretch: u64,
    /// The times of the calls admitted within the last second, and of the last call.
    admitted: VecDeque<Time>,
    /// Millionths of a call.
    tokens: u64,
    filled_at: Time,
}

impl Service {
    fn capacity(&self, now: Time) -> u64 {
        let stretch = now.since(test_time(0)).as_micros() / (self.stretch * 1_000_000);
        CAPACITY[(stretch as usize).min(CAPACITY.len() - 1)]
    }

    fn admits(&mut self, now: Time) -> bool {
        let capacity = self.capacity(now);
        while self.admitted.len() > 1 && self.admitted[0] + Span::from_secs(1) <= now {
            self.admitted.pop_front();
        }
        let admits = match self.limiter {
            Limiter::Window => {
                let within = self.admitted.iter().filter(|at| **at + Span::from_secs(1) > now).count();
                (within as u64) < capacity
            }
            Limiter::Spaced => {
                let gap = Span::from_micros(1_000_000 / capacity);
                self.admitted.back().is_none_or(|last| *last + gap <= now)
            }
            Limiter::Bucket => {
                let earned = now.since(self.filled_at).as_micros() * capacity;
                (self.tokens, self.filled_at) = ((self.tokens + earned).min(capacity * 500_000), now);
                self.tokens >= 1_000_000
            }
        };
        if admits {
            self.admitted.push_back(now);
            self.tokens = self.tokens.saturating_sub(1_000_000);
        }
        admits
    }
}

/// The result of a run, in thousandths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Score {
    /// The accepted share of the calls that the service could accept.
    pub(crate) goodput: u64,
    /// The refused share of all calls that were sent.
    pub(crate) throttled: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Arrives(Time),
    Replies(Time, bool),
    Wants,
}

/// Lets the workers call in all stretches. The transit time to the service varies by up to 50 µs.
pub(crate) fn run(governor: &mut dyn Governor, limiter: Limiter, distance: Distance, seed: u64) -> Score {
    let Distance { workers, replies: (quickest, slowest), stretch, asked_wait } = distance;
    let mut random = RandomSource::from_seed(seed);
    let tokens = CAPACITY[0] * 500_000;
    let mut service = Service { limiter, stretch, admitted: VecDeque::new(), tokens, filled_at: test_time(0) };
    let end = test_time(stretch * CAPACITY.len() as u64 * 1_000);
    let mut happenings = BinaryHeap::new();
    let mut number = 0_u64;
    let mut push = |happenings: &mut BinaryHeap<_>, at: Time, what: Happening| {
        number += 1;
        happenings.push(Reverse((at, number, what)));
    };
    for _ in 0..workers {
        push(&mut happenings, test_time(0), Happening::Wants);
    }
    // The number of workers that wait for the governor, and the time at which it is asked again.
    let (mut waiting, mut asks_at) = (0_usize, Time::NEVER);
    let (mut taken, mut refused, mut closed_until) = (0_u64, 0_u64, Time::ZERO);
    loop {
        let next = happenings.peek().map_or(Time::NEVER, |Reverse((at, _, _))| *at);
        let now = next.min(asks_at);
        if now >= end {
            break;
        }
        if next <= now
            && let Some(Reverse((_, _, what))) = happenings.pop()
        {
            match what {
                Happening::Wants => waiting += 1,
                Happening::Arrives(sent_at) => {
                    let admits = service.admits(now);
                    (taken, refused) = (taken + u64::from(admits), refused + u64::from(!admits));
                    let reply = now + Span::from_micros(random.between(quickest, slowest));
                    push(&mut happenings, reply, Happening::Replies(sent_at, admits));
                }
                Happening::Replies(sent_at, admitted) => {
                    let sleeps = governor.ended(sent_at, !admitted, now);
                    if !admitted && !asked_wait.is_zero() {
                        closed_until = now + asked_wait;
                        governor.record_wait(asked_wait, now);
                    }
                    push(&mut happenings, now + sleeps, Happening::Wants);
                }
            }
        }
        asks_at = Time::NEVER;
        while waiting > 0 {
            let go_at = governor.next_at(now).max(closed_until);
            if go_at > now {
                asks_at = go_at;
                break;
            }
            governor.sent(now);
            waiting -= 1;
            let arrival = now + Span::from_micros(2_000 + random.below(50));
            push(&mut happenings, arrival, Happening::Arrives(now));
        }
    }
    let could = CAPACITY.iter().sum::<u64>() * stretch;
    Score { goodput: taken * 1_000 / could, throttled: refused * 1_000 / (taken + refused).max(1) }
}
