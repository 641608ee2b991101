//! Backoff: the wait before a retry.
//!
//! Growth gives the n-th wait, jitter spreads it. Jitter is applied below the cap, so that a thousand clients at the
//! cap don't wake at the same time. Only Google's additive jitter is clamped last, so its waits accumulate at the cap.
//! Sources: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015 (full, equal, decorrelated);
//! Google Cloud, "Truncated exponential backoff" (additive).

use rand_core::Rng;

use crate::Span;

/// The growth of waits with the number of failures n, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// `base`, always.
    Constant,
    /// `base · n`.
    Linear,
    /// `base · factor^(n−1)`.
    Exponential {
        /// The factor between two waits: 2 doubles, 0 counts as 1.
        factor: u32,
    },
    /// `base · F(n)` of 1, 1, 2, 3, 5, 8 …
    Fibonacci,
}

/// The random spread of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jitter {
    /// No jitter.
    None,
    /// Random from 0 to the wait.
    Full,
    /// Random in the upper half of the wait.
    Equal,
    /// Random from the base to three times the previous wait, independent of the growth.
    Decorrelated,
    /// Adds a random span from 0 to this one, then clamps the sum to the cap.
    Additive(Span),
}

/// A backoff policy: growth, base, cap and jitter. No wait is longer than the cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// The growth of waits.
    pub growth: Growth,
    /// The first wait.
    pub base: Span,
    /// The longest wait. [`Span::MAX`] means practically no bound.
    pub cap: Span,
    /// The random spread of waits.
    pub jitter: Jitter,
}

impl Backoff {
    /// Doubles from `base` up to `cap`, with full jitter.
    pub const fn exponential(base: Span, cap: Span) -> Self {
        Self { growth: Growth::Exponential { factor: 2 }, base, cap, jitter: Jitter::Full }
    }

    /// Returns the same policy with another jitter.
    #[must_use]
    pub const fn with_jitter(mut self, jitter: Jitter) -> Self {
        self.jitter = jitter;
        self
    }

    /// The n-th wait before jitter. n counts from 1, and 0 counts as 1.
    pub fn base_wait(&self, n: u32) -> Span {
        let n = n.max(1);
        let times = match self.growth {
            Growth::Constant => 1,
            Growth::Linear => u64::from(n),
            Growth::Exponential { factor } => u64::from(factor.max(1)).saturating_pow(n - 1),
            Growth::Fibonacci => fibonacci(n),
        };
        self.base.times(times).min(self.cap)
    }

    /// The longest sum of the first n waits, jitter included.
    pub fn total_waits(&self, n: u32) -> Span {
        let longest = |n| match self.jitter {
            Jitter::None | Jitter::Full | Jitter::Equal => self.base_wait(n),
            Jitter::Decorrelated => self.base.times(3_u64.saturating_pow(n)).min(self.cap),
            Jitter::Additive(most) => (self.base_wait(n) + most).min(self.cap),
        };
        (1..=n).map(longest).fold(Span::ZERO, |sum, wait| sum + wait)
    }

    /// The n-th wait with jitter. Decorrelated jitter uses `before`, the previous wait, or the base for the first one.
    pub fn jittered_wait(&self, n: u32, before: Span, rng: &mut impl Rng) -> Span {
        let wait = self.base_wait(n);
        match self.jitter {
            Jitter::None => wait,
            Jitter::Full => random_span(Span::ZERO, wait, rng),
            Jitter::Equal => random_span(Span::from_micros(wait.as_micros().div_ceil(2)), wait, rng),
            Jitter::Decorrelated => {
                let low = self.base.min(self.cap);
                random_span(low, before.times(3).min(self.cap).max(low), rng)
            }
            Jitter::Additive(most) => (wait + random_span(Span::ZERO, most, rng)).min(self.cap),
        }
    }
}

/// The progress of one call through its waits. The default is the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct BackoffState {
    count: u32,
    previous: Span,
}

impl BackoffState {
    /// Returns the next wait.
    pub fn next(&mut self, backoff: &Backoff, rng: &mut impl Rng) -> Span {
        let before = if self.count == 0 { backoff.base } else { self.previous };
        self.count = self.count.saturating_add(1);
        self.previous = backoff.jittered_wait(self.count, before, rng);
        self.previous
    }
}

fn fibonacci(n: u32) -> u64 {
    let (mut this, mut next) = (0_u64, 1_u64);
    // The 94th number is the first that exceeds 64 bits.
    for _ in 0..n.min(94) {
        (this, next) = (next, this.saturating_add(next));
    }
    this
}

fn random_span(low: Span, high: Span, rng: &mut impl Rng) -> Span {
    Span::from_micros(scale_to_range(low.as_micros(), high.as_micros(), rng.next_u64()))
}

/// Maps a random word to a number from `low` to `high`, both included. In ranges below 2^52, the bias is below 2^−11.
pub(crate) fn scale_to_range(low: u64, high: u64, word: u64) -> u64 {
    let width = u128::from(high.saturating_sub(low)) + 1;
    low + ((u128::from(word) * width) >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::SmallRng;
    use std::vec::Vec;

    fn secs(backoff: Backoff, n: u32) -> Vec<u64> {
        (1..=n).map(|n| backoff.base_wait(n).as_secs_ceil()).collect()
    }

    #[test]
    fn each_growth_gives_its_sequence() {
        let base = Backoff {
            growth: Growth::Constant,
            base: Span::from_secs(1),
            cap: Span::from_secs(30),
            jitter: Jitter::None,
        };
        assert_eq!(secs(base, 3), [1, 1, 1]);
        assert_eq!(secs(Backoff { growth: Growth::Linear, ..base }, 4), [1, 2, 3, 4]);
        assert_eq!(secs(Backoff { growth: Growth::Exponential { factor: 2 }, ..base }, 7), [1, 2, 4, 8, 16, 30, 30]);
        assert_eq!(secs(Backoff { growth: Growth::Exponential { factor: 3 }, ..base }, 5), [1, 3, 9, 27, 30]);
        assert_eq!(secs(Backoff { growth: Growth::Fibonacci, ..base }, 9), [1, 1, 2, 3, 5, 8, 13, 21, 30]);
        for growth in [Growth::Linear, Growth::Exponential { factor: u32::MAX }, Growth::Fibonacci] {
            let wait = Backoff { growth, base: Span::MAX, cap: Span::MAX, jitter: Jitter::None }.base_wait(u32::MAX);
            assert_eq!(wait, Span::MAX);
        }
    }

    #[test]
    fn jitter_stays_in_its_range() {
        let mut rng = SmallRng::seed_from_u64(7);
        let base = Backoff::exponential(Span::from_secs(1), Span::from_secs(32));
        for n in 1..=200 {
            let wait = base.base_wait(n);
            assert!(base.jittered_wait(n, base.base, &mut rng) <= wait);
            let equal = base.with_jitter(Jitter::Equal).jittered_wait(n, base.base, &mut rng);
            assert!(equal >= Span::from_micros(wait.as_micros() / 2) && equal <= wait);
            let additive = base.with_jitter(Jitter::Additive(Span::from_secs(1))).jittered_wait(n, base.base, &mut rng);
            assert!(additive >= wait && additive <= (wait + Span::from_secs(1)).min(base.cap));
        }
        let (decorrelated, mut waits) = (base.with_jitter(Jitter::Decorrelated), BackoffState::default());
        let mut before = base.base;
        for _ in 0..10_000 {
            let wait = waits.next(&decorrelated, &mut rng);
            assert!(wait >= base.base && wait <= before.times(3).min(base.cap));
            before = wait;
        }
    }

    #[test]
    fn jitter_spreads_a_thousand_clients_at_the_cap() {
        let mut rng = SmallRng::seed_from_u64(1);
        for jitter in [Jitter::Full, Jitter::Equal, Jitter::Decorrelated] {
            let backoff = Backoff::exponential(Span::from_secs(1), Span::from_secs(32)).with_jitter(jitter);
            let mut buckets = [0; 321];
            for _ in 0..1000 {
                let mut waits = BackoffState::default();
                let wait = (0..20).fold(Span::ZERO, |_, _| waits.next(&backoff, &mut rng));
                buckets[(wait.as_micros() / 100_000) as usize] += 1;
            }
            assert!(buckets.iter().all(|&count| count <= 50), "{jitter:?}: {buckets:?}");
        }
    }
}
