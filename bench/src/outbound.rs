//! Measures outbound calls: the breaker, the whole code path, and the lanes in which calls wait.

use crate::keys::KeyDistribution;
use crate::lanes;
use crate::measure::read_field;
use crate::memory_use::run_weigh;
use crate::options::Options;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::outbound::{ClockUse, LimitChoice, breaker, breaker_layer, calls};
use crate::subjects::{OURS, Subject, failsafe, recloser, tower_resilience};
use crate::work::{ExpectedAnswer, TimedWork};

/// The child process's names of the subjects that make calls, and the table's.
const CALLERS: [(&str, &str); 3] =
    [(OURS, OURS), ("tidegate-rate", "tidegate (rate)"), ("tower-resilience", "tower-resilience")];

/// The number of calls for which allocations are counted.
const COUNTED_CALLS: u32 = 100_000;

/// Measures every row that the options select, and passes each to `on_row` when it is done.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    for threads in [1, 2] {
        let mut offer = |name: &str, steps: usize, subjects: &dyn Fn() -> Vec<Box<dyn Subject>>| {
            let name = format!("outbound/{name}/T{threads}");
            if options.wants(&name) {
                let (subjects, draw, answer) = (subjects(), KeyDistribution::SingleKey, ExpectedAnswer::Allow);
                on_row(
                    TimedWork {
                        name,
                        subjects,
                        keys: 1,
                        key_distribution: draw,
                        threads,
                        answer,
                        steps_per_chunk: steps,
                    }
                    .measure(options),
                );
            }
        };
        offer("breaker", 50_000, &|| {
            vec![
                breaker(ClockUse::GivenTime),
                breaker(ClockUse::ReadsClock),
                recloser::breaker(),
                failsafe::breaker(),
                tower_resilience::breaker(),
            ]
        });
        offer("breaker-layer", 20_000, &|| vec![breaker_layer(), tower_resilience::breaker()]);
        offer("call", 5_000, &|| {
            let ours = [LimitChoice::Window, LimitChoice::Rate, LimitChoice::Scoped].map(calls);
            ours.into_iter().chain([tower_resilience::breaker_and_limiter()]).collect()
        });
    }
    if options.wants("outbound/call/allocations") {
        on_row(allocations(options));
    }
    lanes::measure(options, on_row);
}

fn allocations(options: &Options) -> BenchRow {
    let mut row = BenchRow::new("outbound/call/allocations", FigureUnit::Allocations);
    for (child, shown) in CALLERS.iter().filter(|(_, shown)| options.wants_subject(shown)) {
        match run_weigh("calls", child, COUNTED_CALLS) {
            Ok(listing) => {
                row.push(shown, vec![read_field(&listing, "allocations ") as f64 / f64::from(COUNTED_CALLS)])
            }
            Err(failure) => row.skipped.push(format!("{shown}: {failure}")),
        }
    }
    row
}
