//! Clocks, processor cores and medians.

use std::hint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The cost of `Instant::now`, in nanoseconds, on the machine on which the absolute targets were set.
const REFERENCE_CLOCK_NS: f64 = 24.0;

/// The largest number of repeats of a chunk if its thread lost its core.
const MAX_REPEATS: usize = 4;

/// A loop that can be timed. It asks one subject, and counts the admitted decisions.
pub trait Worker: Send {
    /// Makes `steps` decisions and returns the number of admitted ones.
    fn run(&mut self, steps: usize) -> usize;
}

/// The median and the range of some figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MedianRange {
    /// The median; of an even number of figures, the mean of the two in the middle.
    pub median: f64,
    /// The smallest figure.
    pub min: f64,
    /// The largest figure.
    pub max: f64,
}

impl MedianRange {
    /// Returns the median and the range of these figures; `None` if there are none.
    pub fn of_figures(figures: &[f64]) -> Option<Self> {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let half = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 };
        Some(Self { median, min, max })
    }
}

/// Binds the calling thread to the core at index `core` of those that it may use, or to the last if there are fewer.
///
/// # Panics
///
/// If the system refuses, because figures of unbound threads aren't comparable.
pub fn pin_to_core(core: usize) {
    let cores = core_affinity::get_core_ids().unwrap_or_default();
    let chosen = cores.get(core).or(cores.last()).copied();
    let bound = chosen.is_some_and(core_affinity::set_for_current);
    assert!(bound, "cannot bind a thread to core {core}");
}

/// Runs the work in a new thread that is bound to that core, along with all programs that the work starts. The calling
/// thread isn't bound.
///
/// # Panics
///
/// If the work panics, or the system refuses.
pub fn run_on_core<T: Send>(core: usize, work: impl FnOnce() -> T + Send) -> T {
    let bound = move || {
        pin_to_core(core);
        work()
    };
    thread::scope(|scope| scope.spawn(bound).join()).expect("the work does not panic")
}

/// Returns the number of times that the calling thread lost its core to another thread, since it began.
pub fn preemptions() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    read_field(&status, "nonvoluntary_ctxt_switches:")
}

/// Returns the number after `name` in a file of /proc; 0 if it is missing.
pub fn read_field(listing: &str, name: &str) -> u64 {
    listing
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

/// Returns the resident memory of this process in bytes.
pub fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    read_field(&status, "VmRSS:") * 1024
}

/// Returns the cost of a clock read here, divided by its cost on the reference machine of the targets. Absolute targets
/// are multiplied by it.
pub fn clock_scale() -> f64 {
    const READS: u32 = 20_000;
    let costs: Vec<f64> = (0..21)
        .map(|_| {
            let begin = Instant::now();
            for _ in 0..READS {
                hint::black_box(Instant::now());
            }
            begin.elapsed().as_nanos() as f64 / f64::from(READS)
        })
        .collect();
    MedianRange::of_figures(&costs).map_or(1.0, |costs| costs.median / REFERENCE_CLOCK_NS)
}

/// The result of one chunk.
#[derive(Clone, Copy, Debug)]
pub struct ChunkResult {
    /// Nanoseconds per decision, the mean over the threads.
    pub ns_per_decision: f64,
    /// The number of admitted decisions of all threads.
    pub admitted: usize,
    /// The number of timed decisions of all threads.
    pub steps: usize,
}

/// Times `steps` decisions on each of the workers. Each worker has its own core, and all start together.
pub fn measure_chunk(workers: &mut [Box<dyn Worker + '_>], steps: usize) -> ChunkResult {
    let mut measured = measure_chunk_once(workers, steps);
    for _ in 0..MAX_REPEATS {
        if measured.1 == 0 {
            break;
        }
        measured = measure_chunk_once(workers, steps);
    }
    measured.0
}

fn measure_chunk_once(workers: &mut [Box<dyn Worker + '_>], steps: usize) -> (ChunkResult, u64) {
    let threads = workers.len();
    let ready = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let results: Vec<(Duration, usize, u64)> = thread::scope(|scope| {
        let handles: Vec<_> = workers
            .iter_mut()
            .enumerate()
            .map(|(place, worker)| {
                let (ready, done) = (&ready, &done);
                scope.spawn(move || {
                    // A single thread uses the last core, because the first one serves most of a machine's interrupts.
                    pin_to_core(if threads == 1 { usize::MAX } else { place });
                    worker.run(steps / 8);
                    let before = preemptions();
                    ready.fetch_add(1, Ordering::SeqCst);
                    while ready.load(Ordering::SeqCst) < threads {
                        hint::spin_loop();
                    }
                    let begin = Instant::now();
                    let admitted = worker.run(steps);
                    let taken = begin.elapsed();
                    done.fetch_add(1, Ordering::SeqCst);
                    // The slower thread must finish under the same load from its neighbours as at its start.
                    while done.load(Ordering::SeqCst) < threads {
                        worker.run(64);
                    }
                    (taken, admitted, preemptions() - before)
                })
            })
            .collect();
        handles.into_iter().map(|handle| handle.join().expect("a worker does not panic")).collect()
    });
    let total: f64 = results.iter().map(|(taken, ..)| taken.as_nanos() as f64).sum();
    let chunk = ChunkResult {
        ns_per_decision: total / threads as f64 / steps as f64,
        admitted: results.iter().map(|(_, admitted, _)| admitted).sum(),
        steps: steps * threads,
    };
    (chunk, results.iter().map(|(.., lost)| lost).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_handles_odd_even_and_none() {
        let spread = |figures: &[f64]| MedianRange::of_figures(figures).map(|s| (s.min, s.median, s.max));
        assert_eq!(spread(&[3.0, 1.0, 2.0]), Some((1.0, 2.0, 3.0)));
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]), Some((1.0, 2.5, 4.0)));
        assert_eq!(spread(&[]), None);
    }

    #[test]
    fn proc_fields_are_parsed() {
        assert_eq!(read_field("VmPeak:\t 1 kB\nVmRSS:\t  42 kB\n", "VmRSS:"), 42);
        assert_eq!(read_field("", "VmRSS:"), 0);
        assert!(resident_bytes() > 0);
    }

    #[test]
    fn a_chunk_counts_the_admitted_steps() {
        struct EverySecond(usize);
        impl Worker for EverySecond {
            fn run(&mut self, steps: usize) -> usize {
                (0..steps)
                    .filter(|_| {
                        self.0 += 1;
                        self.0.is_multiple_of(2)
                    })
                    .count()
            }
        }
        let mut workers: Vec<Box<dyn Worker>> = vec![Box::new(EverySecond(0)), Box::new(EverySecond(0))];
        let chunk = measure_chunk(&mut workers, 8_000);
        assert_eq!((chunk.admitted, chunk.steps), (8_000, 16_000));
        assert!(chunk.ns_per_decision > 0.0);
    }
}
