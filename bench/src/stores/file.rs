//! Measures the file store against memory alone.

use crate::keys::KeyDistribution;
use crate::options::Options;
use crate::rows::BenchRow;
use crate::subjects::{LimitTerms, stores};
use crate::work::{ExpectedAnswer, TimedWork};

/// Measures every row that the options select, and passes each to `on_row` when it is done.
pub(super) fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    for threads in [1, 2] {
        let name = format!("stores/file/T{threads}");
        if options.wants(&name) {
            let subjects = vec![stores::file(LimitTerms::LARGE_KEYED), stores::memory(LimitTerms::LARGE_KEYED)];
            // Enough decisions that the file is written meanwhile.
            let steps = 500_000;
            let (keys, draw, answer) = (10_000, KeyDistribution::Uniform, ExpectedAnswer::Allow);
            on_row(
                TimedWork { name, subjects, keys, key_distribution: draw, threads, answer, steps_per_chunk: steps }
                    .measure(options),
            );
        }
    }
}
