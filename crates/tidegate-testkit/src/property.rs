//! Properties that hold whatever is drawn.

use proptest::collection::vec;
use proptest::num::u64::ANY;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::dice::{self, Dice};

/// Tries a property on `cases` tapes of up to `words` draws, and shortens the first that fails.
///
/// # Panics
/// If the property fails: with the reason, the shortest tape that fails, and the seed of the run.
pub fn check(cases: u32, words: usize, property: impl Fn(Dice) -> Result<(), String>) {
    check_from(dice::seed(), cases, words, property);
}

/// [`check`] from a seed of the caller's.
///
/// # Panics
/// As [`check`] does.
pub fn check_from(seed: u64, cases: u32, words: usize, property: impl Fn(Dice) -> Result<(), String>) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 4_000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let found = runner.run(&vec(ANY, 1..=words.max(1)), |tape| property(Dice::tape(tape)).map_err(TestCaseError::fail));
    match found {
        Ok(()) => {}
        Err(TestError::Fail(reason, tape)) => {
            panic!("{reason}\n  with Dice::tape(vec!{tape:?})\n  repeat with TIDEGATE_SEED={seed}")
        }
        Err(TestError::Abort(reason)) => panic!("gave up: {reason}"),
    }
}
