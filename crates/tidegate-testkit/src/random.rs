//! Where random tests draw from: a seeded generator, or a tape of words that a shrinking test runner can shorten.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// A source of choices. The same seed or tape makes the same choices on every machine of one word size.
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
    /// Endless choices from a seed.
    pub fn from_seed(seed: u64) -> Self {
        Self { source: WordSource::Seeded(Box::new(SmallRng::seed_from_u64(seed))) }
    }

    /// Choices from a tape; past its end every draw is 0, which is always the first choice.
    pub fn from_words(words: Vec<u64>) -> Self {
        Self { source: WordSource::Recorded { words, position: 0 } }
    }

    /// Whether a tape is used up; a seed never is.
    pub fn is_exhausted(&self) -> bool {
        matches!(&self.source, WordSource::Recorded { words, position } if *position >= words.len())
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        match &mut self.source {
            WordSource::Seeded(rng) => rng.next_u64(),
            WordSource::Recorded { words, position: at } => {
                let word = words.get(*at).copied().unwrap_or(0);
                *at += 1;
                word
            }
        }
    }

    /// A number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(end)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low).saturating_add(1))
    }

    /// True `percent` times in a hundred.
    pub fn chance(&mut self, percent: u64) -> bool {
        // Turned round, so that the zeros past a tape's end say no.
        self.below(100) >= 100 - percent.min(100)
    }

    /// Up to `most` of these pieces, one behind the other.
    ///
    /// # Panics
    /// If there is none.
    pub fn concat_random(&mut self, pieces: &[&[u8]], most: u64) -> Vec<u8> {
        let count = self.between(0, most);
        (0..count).flat_map(|_| self.pick(pieces)).copied().collect()
    }

    /// One of the choices.
    ///
    /// # Panics
    /// If there is none.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// The seed of a run: `TIDEGATE_SEED` where it is set to a number, a new one each time where `TIDEGATE_FULL` is set,
/// else always the same. Tests print it when they fail.
pub fn run_seed() -> u64 {
    let given = std::env::var("TIDEGATE_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| if is_full_run() { fresh_seed() } else { 0x7469_6465 })
}

/// Whether `TIDEGATE_FULL` asks for the long counts.
pub fn is_full_run() -> bool {
    std::env::var_os("TIDEGATE_FULL").is_some_and(|value| value == "1")
}

/// `quick`, or `thorough` where `TIDEGATE_FULL` asks for it.
pub fn case_count(quick: u32, thorough: u32) -> u32 {
    if is_full_run() { thorough } else { quick }
}

fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}
