//! An error and what caused it.

use std::error::Error;

/// The most errors of a chain that are looked at, so that one which leads back to itself ends.
const MAX_CAUSES: usize = 16;

/// An error and its causes, from the outermost in, 16 at most.
pub fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source()).take(MAX_CAUSES)
}
