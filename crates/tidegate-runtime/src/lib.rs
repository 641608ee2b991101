//! The parts of the machine that Tidegate depends on, such as clocks, timers and random numbers, and the means to watch
//! it: counters of many threads, the latest events, and a limit on log lines.

pub mod clock;
pub mod counters;
pub mod event_log;
pub mod file_watcher;
pub mod log_throttle;
#[cfg(feature = "tokio")]
pub mod precise_timer;
pub mod random;
