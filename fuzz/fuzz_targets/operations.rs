//! Sequences of operations against the naive model: the body of `crates/tidegate-core/tests/fuzz.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::core;
use tidegate_testkit::random::RandomSource;

fuzz_target!(|bytes: &[u8]| {
    let words = bytes.chunks(8).map(|chunk| chunk.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))).collect();
    if let Err(difference) = core::operations_agree_with_the_model(RandomSource::from_words(words)) {
        panic!("{difference}");
    }
});
