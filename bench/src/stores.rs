//! Stores whose state outlives the process: a file behind memory against memory alone, and servers, decisions a second of
//! 64 tasks, against the least that a program of its own could ask of the same server through the same client.

mod databases;
mod file;
mod redis;

use crate::options::Options;
use crate::rows::BenchRow;

/// Tasks that ask a server at once.
pub(crate) const TASKS: usize = 64;

/// Measures every row that the options ask for, and hands each over as it is done.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    file::measure(options, on_row);
    redis::measure(options, on_row);
    databases::measure(options, on_row);
}
