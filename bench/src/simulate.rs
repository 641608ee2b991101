//! Measures the simulation of an hour on a virtual clock, and the replay of an access log.

use crate::options::Options;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::{OURS, tidegate};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use std::fmt::Write as _;
use std::hint;
use std::time::Instant;
use tidegate_replay::{FieldNames, LogReplay};
use tidegate_sim::{Scenario, shipped};

/// An hour with a thousand clients that call a service every two seconds. The service fails now and then.
const HOUR_SCENARIO: &str = r#"
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

/// The default policy of `tidegate`: a limit for all calls of a client, and a log-in with a penalty.
const POLICY: &str = r#"
[inbound.global]
limit = "1000 per 1h"

[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "5 per 60s"
penalty = { base = "2s", cap = "1h" }
"#;
/// Enough lines that the tables outgrow the processor's cache.
const LINES: u32 = 2_000_000;

/// Measures every row that the options select, and passes each to `on_row` when it is done.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    measure_hour(options, on_row);
    measure_replay(options, on_row);
    measure_control(options, on_row);
}

/// Counts the worlds of the suite `control` in which a strategy's goodput is within 5 % of the best, and those in which
/// its 99th percentile of delays is within 1.5 times the oracle's.
fn measure_control(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let names = ["simulate/control/goodput", "simulate/control/p99"];
    if !names.iter().any(|name| options.wants(name)) {
        return;
    }
    let mut suite = Scenario::read("control", shipped::SUITES[0].text.as_bytes()).expect("the suite is valid");
    if options.quick {
        suite.setups.iter_mut().for_each(|setup| setup.trials = 1);
    }
    let report = suite.run(suite.seed, &mut |_| {});
    let mut counts: Vec<(String, [f64; 2])> = Vec::new();
    for (runs, figures) in report.control_figures() {
        let rivals = || runs.iter().zip(&figures).filter(|(run, _)| run.strategy != "oracle");
        let best = rivals().map(|(_, figures)| figures.goodput).fold(0.0, f64::max);
        for (index, (run, figures)) in rivals().enumerate() {
            let subject = if run.uses_tidegate { OURS } else { &run.strategy };
            if counts.len() <= index {
                counts.push((subject.to_owned(), [0.0; 2]));
            }
            let is_good = [figures.goodput >= 0.95 * best, figures.p99_delay.is_some_and(|delay| delay <= 1.5)];
            counts[index].1.iter_mut().zip(is_good).filter(|(_, good)| *good).for_each(|(count, _)| *count += 1.0);
        }
    }
    // The own one is first, as in all rows.
    counts.sort_by_key(|(subject, _)| subject != OURS);
    for (measure, name) in names.into_iter().enumerate() {
        let mut row = BenchRow::new(name, FigureUnit::Count);
        counts.iter().for_each(|(subject, counts)| row.push(subject, vec![counts[measure]]));
        on_row(row);
    }
}

fn measure_replay(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    const NAME: &str = "simulate/replay";
    if !options.wants(NAME) || !options.wants_subject(OURS) {
        return;
    }
    let (lines, rounds) = if options.quick { (LINES / 10, 1) } else { (LINES, 3) };
    let log = access_log(lines);
    let policy = tidegate::load_policy(POLICY);
    let round = |_| {
        let mut replay = LogReplay::new("the benchmark's", &policy, FieldNames::default());
        let begin = Instant::now();
        replay.read("the benchmark's", log.as_bytes(), None).expect("a log in memory can be read");
        hint::black_box(replay.findings());
        f64::from(lines) / begin.elapsed().as_secs_f64()
    };
    let mut row = BenchRow::new(NAME, FigureUnit::Requests);
    row.push(OURS, (0..rounds).map(round).collect());
    on_row(row);
}

/// Returns an access log in the combined format, with a thousand requests per second by a hundred thousand clients. A
/// few of them call often, and one call in fifty is a log-in.
fn access_log(lines: u32) -> String {
    const PATHS: [&str; 4] = ["/", "/search/shoes?q=red+boots", "/img/logo.png", "/product/4711"];
    let mut random = SmallRng::seed_from_u64(1);
    let mut log = String::with_capacity(lines as usize * 128);
    for line in 0..lines {
        let client = (random.random::<f64>().powi(4) * 100_000.0) as u32;
        let (second, [_, a, b, c]) = (line / 1000, (client * 7).to_be_bytes());
        let (method, path) = match random.random_range(0..50) {
            0 => ("POST", "/login"),
            number => ("GET", PATHS[number % PATHS.len()]),
        };
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let written = writeln!(
            log,
            "11.{a}.{b}.{c} - - [21/Nov/2026:{hour:02}:{minute:02}:{second:02} +0000] \"{method} {path} HTTP/1.1\" 200 \
             4711 \"-\" \"Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0\""
        );
        written.expect("a string takes all that is written to it");
    }
    log
}

fn measure_hour(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    const NAME: &str = "simulate/hour";
    if !options.wants(NAME) || !options.wants_subject(OURS) {
        return;
    }
    let scenario =
        Scenario::read("the benchmark's", HOUR_SCENARIO.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"));
    let mut row = BenchRow::new(NAME, FigureUnit::Nanoseconds);
    let rounds = if options.quick { 1 } else { 3 };
    let round = |seed: u64| {
        let begin = Instant::now();
        hint::black_box(scenario.run(seed, &mut |_| {}));
        begin.elapsed().as_nanos() as f64
    };
    row.push(OURS, (1..=rounds).map(round).collect());
    on_row(row);
}
