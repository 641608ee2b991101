//! Controllers of plain clients, and the suite that compares them.
#![expect(clippy::unwrap_used, reason = "a test")]

use tidegate_core::Span;
use tidegate_sim::setup::TimeRange;
use tidegate_sim::{Report, Scenario, shipped};

fn run(scenario: &Scenario) -> Report {
    scenario.run(scenario.seed, &mut |_| {})
}

fn report(text: &str) -> Report {
    run(&Scenario::read("s.toml", text.as_bytes()).unwrap_or_else(|errors| panic!("{errors}")))
}

/// The suite with one trial, and less of the worlds that don't change.
fn short_suite() -> Scenario {
    let mut suite = Scenario::read("control", shipped::SUITES[0].text.as_bytes()).unwrap();
    for setup in &mut suite.setups {
        setup.trials = 1;
        let end = Span::from_secs(40);
        if setup.disturbance_range().is_none() && setup.duration > end {
            (setup.duration, setup.measured_range) = (end, Some(TimeRange { from: Span::from_secs(20), until: end }));
        }
    }
    suite
}

/// One worker of 100 ms: the first of twenty calls is sent, nine wait and ten don't fit.
#[test]
fn waiting_calls_have_bound_and_deadline() {
    let report = report(
        r#"
        [service]
        latency = "100ms"
        workers = 1
        [load.all]
        trace = ["0s"]
        each = 20
        [client]
        control = "oracle"
        queue = 9
        deadline = "550ms"
        "#,
    );
    let run = &report.runs[0];
    // Two more are sent within the 275 ms that a call may wait.
    let total = run.first_trial.total;
    assert_eq!((total.succeeded, total.failed, total.declined, total.attempts), (3, 7, 10, 3), "{total:?}");
    assert_eq!((total.waiting, run.summary.elapsed), (9, 0.3));
    let median = run.summary.measured_p50_delay.unwrap();
    assert!(run.summary.wasted_share == 0.0 && (median - 0.2).abs() < 0.001, "{:?}", run.summary);
}

#[test]
fn the_oracle_keeps_workers_busy_without_queue() {
    let report = report(
        r#"
        duration = "1m"
        measure = "10s to 1m"
        [service]
        latency = { uniform = ["50ms", "150ms"] }
        workers = ["10 until 30s", "5"]
        [load.all]
        clients = 5
        rate = "40/s"
        [client]
        control = "oracle"
        queue = 4
        deadline = "1s"
        "#,
    );
    let run = &report.runs[0];
    assert_eq!((run.first_trial.total.queue, run.first_trial.total.working), (0, 10));
    assert!((run.summary.goodput / (20.0 * 100.0 + 30.0 * 50.0) * 50.0 - 1.0).abs() < 0.05, "{:?}", run.summary);
    assert!(run.summary.fairness.unwrap() > 0.99, "{:?}", run.summary);
}

#[test]
fn the_oracle_takes_each_slot_of_limits() {
    for (limit, goodput) in [("20 per 1s", 20.0), ("20/s burst 5", 20.0), ("[\"20 per 1s\", \"100 per 10s\"]", 10.0)] {
        let limit = if limit.starts_with('[') { limit.to_owned() } else { format!("{limit:?}") };
        let report = report(&format!(
            "duration = \"70s\"\nmeasure = \"10s to 70s\"\n[service]\nlimit = {limit}\n[load.all]\nclients = 3\nrate = \"10/s\"\n\
             [client]\ncontrol = \"oracle\"\ndeadline = \"2s\"\n"
        ));
        let found = report.runs[0].summary;
        assert_eq!((found.throttled, (found.goodput / goodput - 1.0).abs() < 0.02), (0.0, true), "{limit}: {found:?}");
    }
}

/// The oracle's goodput is the capacity, up to the noise of a single trial.
#[test]
fn the_oracle_is_never_beaten_and_tidegate_near() {
    let report = run(&short_suite());
    let worlds: Vec<_> = report.control_figures().collect();
    assert!(worlds.len() >= 10, "{}", worlds.len());
    let (mut near, mut late) = (0, 0);
    for (runs, figures) in &worlds {
        let rivals = || runs.iter().zip(figures).filter(|(run, _)| run.strategy != "oracle");
        let best = rivals().map(|(_, figures)| figures.goodput).fold(0.0, f64::max);
        for (run, figures) in runs.iter().zip(figures) {
            let fair = figures.fairness.is_none_or(|fairness| fairness <= 1.0 + 1e-9);
            assert!(figures.goodput <= 1.02 && fair, "{}, {}: {figures:?}", run.case, run.strategy);
            if run.uses_tidegate {
                assert!(figures.goodput >= 0.93 * best, "{}, {}: {figures:?}", run.case, run.strategy);
                near += u32::from(figures.goodput >= 0.95 * best);
                late += u32::from(figures.p99_delay.is_none_or(|delay| delay > 1.5));
            }
        }
    }
    let (table, count) = (report.control_table(), worlds.len() as u32);
    for (claim, number) in
        [("goodput within 5 % of the best", near), ("p99 within 1.5 times the oracle's", count - late)]
    {
        assert!(table.contains(&format!("tidegate: {claim} in {number} of {count} worlds")), "{table}");
    }
    assert!(near >= count - 2 && late <= 5, "{table}");
}

#[test]
fn one_seed_gives_identical_control_tables() {
    let mut suite = short_suite();
    suite.setups.retain(|setup| ["heavy tail", "limit by the second"].contains(&&*setup.case));
    assert_eq!(run(&suite).control_table(), run(&suite).control_table());
    assert_ne!(suite.run(2, &mut |_| {}).control_table(), suite.run(3, &mut |_| {}).control_table());
}
