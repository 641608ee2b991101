//! The chain of an error's causes.

use std::error::Error;

/// The largest number of errors that are read in a chain, so that a chain with a cycle ends.
const MAX_CAUSES: usize = 16;

/// Returns an error and its causes, from the outermost inwards, at most 16.
pub fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source()).take(MAX_CAUSES)
}
