//! The file store against memory alone.

use crate::keys::Draw;
use crate::options::Options;
use crate::rows::Row;
use crate::subjects::{Terms, stores};
use crate::work::{Answer, Work};

/// Measures every row that the options ask for, and hands each over as it is done.
pub(super) fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    for threads in [1, 2] {
        let name = format!("stores/file/T{threads}");
        if options.wants(&name) {
            let subjects = vec![stores::file(Terms::ROOMY_KEYED), stores::memory(Terms::ROOMY_KEYED)];
            // Long enough for the file to be written meanwhile.
            let steps = 500_000;
            let (keys, draw, answer) = (10_000, Draw::Uniform, Answer::Allow);
            done(Work { name, subjects, keys, draw, threads, answer, steps }.measure(options));
        }
    }
}
