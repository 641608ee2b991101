//! Property tests on random sequences of words.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::num::u64::ANY;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

use crate::random::{self, RandomSource};

/// Tests a property on `cases` sequences of up to `words` words, and shrinks the first that fails.
///
/// # Panics
/// If the property fails or panics. The message has the reason, the shortest sequence that fails, and the seed of the run.
pub fn check(cases: u32, words: usize, property: impl Fn(RandomSource) -> Result<(), String>) {
    check_with_seed(random::run_seed(), cases, words, property);
}

/// Does the same as [`check`] with a given seed.
///
/// # Panics
/// The same as [`check`].
pub fn check_with_seed(seed: u64, cases: u32, words: usize, property: impl Fn(RandomSource) -> Result<(), String>) {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 4_000, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let found = runner.run(&vec(ANY, 1..=words.max(1)), |words| {
        catch_panic(|| property(RandomSource::from_words(words))).map_err(TestCaseError::fail)
    });
    match found {
        Ok(()) => {}
        Err(TestError::Fail(reason, words)) => {
            panic!("{reason}\n  with RandomSource::from_words(vec!{words:?})\n  repeat with TIDEGATE_SEED={seed}")
        }
        Err(TestError::Abort(reason)) => panic!("gave up: {reason}"),
    }
}

/// The number of sequences between two checks of the time.
const CASES_PER_SEED: u32 = 20;

/// Tests a property on new sequences of up to `words` words, for `TIDEGATE_FUZZ_SECONDS` seconds; 5 by default.
///
/// # Panics
/// The same as [`check`].
#[expect(clippy::disallowed_methods, reason = "the bound is one of real time")]
pub fn fuzz(words: usize, property: impl Fn(RandomSource) -> Result<(), String>) {
    let seconds = std::env::var("TIDEGATE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(5);
    let (start, bound) = (Instant::now(), Duration::from_secs(seconds));
    let mut seed = random::run_seed();
    while start.elapsed() < bound {
        check_with_seed(seed, CASES_PER_SEED, words, &property);
        seed = seed.wrapping_add(1);
    }
}

/// Tests a property on 100,000 cheap inputs, or on ten million if `TIDEGATE_FULL=1`.
///
/// # Panics
/// If the property panics. The seed of its input is printed.
pub fn fuzz_cheaply(property: impl Fn(&mut RandomSource)) {
    struct Case(u64);
    impl Drop for Case {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("repeat with TIDEGATE_SEED={}", self.0);
            }
        }
    }
    let first = random::run_seed();
    for case in 0..random::case_count(100_000, 10_000_000) {
        let case = Case(first.wrapping_add(case.into()));
        property(&mut RandomSource::from_seed(case.0));
    }
}

thread_local! {
    static PANIC_OUTPUT_OFF: Cell<bool> = const { Cell::new(false) };
}

/// Turns a panic into an error without output, because shrinking runs a property thousands of times and only the last
/// run matters.
fn catch_panic(property: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default_hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !PANIC_OUTPUT_OFF.get() {
                default_hook(info);
            }
        }));
    });
    PANIC_OUTPUT_OFF.set(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(property));
    PANIC_OUTPUT_OFF.set(false);
    outcome.unwrap_or_else(|panic| Err(format!("panicked: {}", panic_message(panic.as_ref()))))
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason_of(property: impl Fn(RandomSource) -> Result<(), String>) -> String {
        let found = panic::catch_unwind(AssertUnwindSafe(|| {
            catch_panic(|| {
                check_with_seed(9, 50, 20, &property);
                Ok(())
            })
        }));
        found.expect("turned into an error").expect_err("the property is false")
    }

    #[test]
    fn a_false_property_is_shrunk_and_reported() {
        let reason = reason_of(|mut random| if random.next_u64() > 1_000 { Err("too large".into()) } else { Ok(()) });
        assert!(reason.contains("too large") && reason.contains("vec![1001]"), "{reason}");
        assert!(reason.contains("TIDEGATE_SEED=9"), "{reason}");
    }

    #[test]
    fn a_panic_is_a_failure() {
        let reason = reason_of(|mut random| {
            assert!(random.next_u64() < 5, "five or more");
            Ok(())
        });
        assert!(reason.contains("panicked: five or more") && reason.contains("vec![5]"), "{reason}");
    }
}
