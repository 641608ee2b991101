//! Measures stores with state that outlives the process. A file behind memory is compared with memory alone. Servers
//! are measured in decisions per second of 64 tasks, against the least that a program could ask of the same server
//! through the same client.

mod databases;
mod file;
mod redis;

use crate::options::Options;
use crate::rows::BenchRow;

/// The number of tasks that ask a server at once.
pub(crate) const TASKS: usize = 64;

/// Measures every row that the options select, and passes each to `on_row` when it is done.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    file::measure(options, on_row);
    redis::measure(options, on_row);
    databases::measure(options, on_row);
}
