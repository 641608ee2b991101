//! Worlds on a virtual clock: how long an hour takes.

use crate::options::Options;
use crate::rows::{Row, Unit};
use crate::subjects::OURS;
use std::hint;
use std::time::Instant;
use tidegate_sim::Scenario;

/// A thousand clients that call every two seconds a service which fails now and then, for an hour.
const HOUR: &str = r#"
duration = "1h"

[service]
latency = { exponential = "50ms" }
workers = 100
failures = ["1% until 20m", "100% until 21m", "1%"]

[network]
delay = { lognormal = "10ms", sigma = 0.3 }
loss = "0.1%"

[load.clients]
clients = 1000
rate = "0.5/s"

[outbound]
listen = "off"
[outbound.provider.api]
limit = "5/s burst 10"
breaker = { open = "10s" }
"#;

/// Measures every row that the options ask for, and hands each over as it is done.
///
/// # Panics
/// If the scenario can't be read.
pub fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    const NAME: &str = "simulate/hour";
    if !options.wants(NAME) || !options.wants_subject(OURS) {
        return;
    }
    let scenario = Scenario::read("the benchmark's", HOUR.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"));
    let mut row = Row::new(NAME, Unit::Nanoseconds);
    let rounds = if options.quick { 1 } else { 3 };
    let round = |seed: u64| {
        let begin = Instant::now();
        hint::black_box(scenario.run(seed, &mut |_| {}));
        begin.elapsed().as_nanos() as f64
    };
    row.push(OURS, (1..=rounds).map(round).collect());
    done(row);
}
