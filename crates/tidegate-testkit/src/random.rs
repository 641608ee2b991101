//! The source of random choices in tests: a seeded generator, or recorded words that a test runner can shrink.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A source of random choices. The same seed or words make the same choices on every machine of one word size.
#[derive(Clone, Debug)]
pub struct RandomSource {
    source: WordSource,
}

#[derive(Clone, Debug)]
enum WordSource {
    Seeded(Box<SmallRng>),
    Recorded { words: Vec<u64>, position: usize },
}

impl RandomSource {
    /// Returns a source of endless choices from a seed.
    pub fn from_seed(seed: u64) -> Self {
        Self { source: WordSource::Seeded(Box::new(SmallRng::seed_from_u64(seed))) }
    }

    /// Returns a source of choices from recorded words. After the last one every word is 0, which is always the first
    /// choice.
    pub fn from_words(words: Vec<u64>) -> Self {
        Self { source: WordSource::Recorded { words, position: 0 } }
    }

    /// Returns true if the recorded words are used up; a seed never is.
    pub fn is_exhausted(&self) -> bool {
        matches!(&self.source, WordSource::Recorded { words, position } if *position >= words.len())
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        match &mut self.source {
            WordSource::Seeded(rng) => rng.next_u64(),
            WordSource::Recorded { words, position } => {
                let word = words.get(*position).copied().unwrap_or(0);
                *position += 1;
                word
            }
        }
    }

    /// Returns a number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// Returns true with a probability of `percent` in a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        // Inverted, so that the zeros after the recorded words give false.
        self.below(100) >= 100 - percent.min(100)
    }

    /// Returns up to `most` of these pieces, concatenated.
    ///
    /// # Panics
    /// If there are no pieces.
    pub fn concat_random(&mut self, pieces: &[&[u8]], most: u64) -> Vec<u8> {
        let count = self.between(0, most);
        (0..count).flat_map(|_| self.pick(pieces)).copied().collect()
    }

    /// Returns one of the choices.
    ///
    /// # Panics
    /// If there are no choices.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// Returns the seed of a run: `TIDEGATE_SEED` if it is a number, a new one each time if `TIDEGATE_FULL=1`, else always
/// the same. Tests print it when they fail.
pub fn run_seed() -> u64 {
    let given = std::env::var("TIDEGATE_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| if is_full_run() { fresh_seed() } else { 0x7469_6465 })
}

/// Returns true if `TIDEGATE_FULL=1` asks for the long counts.
pub fn is_full_run() -> bool {
    std::env::var_os("TIDEGATE_FULL").is_some_and(|value| value == "1")
}

/// Returns `quick`, or `thorough` if `TIDEGATE_FULL=1`.
pub fn case_count(quick: u32, thorough: u32) -> u32 {
    if is_full_run() { thorough } else { quick }
}

fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}
