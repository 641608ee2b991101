//! Calls to others: the breaker, the whole machine, and the lanes in which calls wait.

use crate::keys::Draw;
use crate::lanes;
use crate::measure::field;
use crate::options::Options;
use crate::rows::{Row, Unit};
use crate::subjects::outbound::{Limit, Told, breaker, breaker_layer, calls};
use crate::subjects::{OURS, Subject, failsafe, recloser, tower_resilience};
use crate::weight::weigh;
use crate::work::{Answer, Work};

/// Names of the child process's subjects that make calls, and the table's.
const CALLERS: [(&str, &str); 3] =
    [(OURS, OURS), ("tidegate-rate", "tidegate (rate)"), ("tower-resilience", "tower-resilience")];

/// Calls whose allocations are counted.
const COUNTED: u32 = 100_000;

/// Measures every row that the options ask for, and hands each over as it is done.
pub fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    for threads in [1, 2] {
        let mut offer = |name: &str, steps: usize, subjects: &dyn Fn() -> Vec<Box<dyn Subject>>| {
            let name = format!("outbound/{name}/T{threads}");
            if options.wants(&name) {
                let (subjects, draw, answer) = (subjects(), Draw::Hot, Answer::Allow);
                done(Work { name, subjects, keys: 1, draw, threads, answer, steps }.measure(options));
            }
        };
        offer("breaker", 50_000, &|| {
            vec![
                breaker(Told::AtHand),
                breaker(Told::Read),
                recloser::breaker(),
                failsafe::breaker(),
                tower_resilience::breaker(),
            ]
        });
        offer("breaker-layer", 20_000, &|| vec![breaker_layer(), tower_resilience::breaker()]);
        offer("call", 5_000, &|| {
            vec![calls(Limit::Window), calls(Limit::Rate), tower_resilience::breaker_and_limiter()]
        });
    }
    if options.wants("outbound/call/allocations") {
        done(allocations(options));
    }
    lanes::measure(options, done);
}

fn allocations(options: &Options) -> Row {
    let mut row = Row::new("outbound/call/allocations", Unit::Allocations);
    for (child, shown) in CALLERS.iter().filter(|(_, shown)| options.wants_subject(shown)) {
        match weigh("calls", child, COUNTED) {
            Ok(listing) => row.push(shown, vec![field(&listing, "allocations ") as f64 / f64::from(COUNTED)]),
            Err(failure) => row.skipped.push(format!("{shown}: {failure}")),
        }
    }
    row
}
