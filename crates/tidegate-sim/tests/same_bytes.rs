//! Tests that the same seed gives the same bytes, and another seed gives others.
#![expect(clippy::unwrap_used, reason = "a test")]

use tidegate_sim::{Report, Scenario, shipped};

/// A scenario in which everything happens that can.
const BUSY: &str = r#"
title = "everything"
duration = "20s"
trials = 2

[service]
latency = { lognormal = "50ms", sigma = 1.0 }
latency_per_request = "1ms"
workers = 8
queue = 20
limit = ["200/s burst 50", "900 per 5s"]
retry_after = "3s"
failures = ["1% until 8s", "1% to 60% until 10s", "1%"]
outages = "12s to 13s"
notices_timeouts = true

[network]
delay = { uniform = ["1ms", "20ms"] }
loss = "1%"
partitions = "15s to 16s"

[load.open]
clients = 5
rate = "20/s"
lane = "background"
drift = 0.001
clock_steps = ["at 5s back 2s", "at 9s ahead 3s"]

[load.serial]
clients = 20
think = { exponential = "300ms" }

[load.even]
rate = "10/s"
arrivals = "even"
lane = "webhook"

[load.trace]
trace = ["1s", "1s", "7s"]
each = 40

[client]
attempts = 3
timeout = "1s"

[strategy.plain]
backoff = { jitter = "decorrelated", cap = "5s" }
budget = { ratio = 0.5 }
honours_retry_after = true

[strategy.tidegate]
client = "tidegate"

[store]
shared = true
latency = { exponential = "3ms" }
outages = "17s to 18s"

[inbound.action.default]
limit = ["40/s burst 40", "30 in flight"]

[outbound]
listen = "off"
[outbound.provider.api]
limit = ["150/s burst 20", "800 per 5s"]
attempt_timeout = "1s"
breaker = { open = "1s" }
"#;

fn all(report: &Report) -> [Vec<u8>; 5] {
    let text = [report.table(), report.json(), report.svg().unwrap(), report.html().unwrap()];
    let [table, json, svg, html] = text.map(String::into_bytes);
    [table, json, svg, html, report.png().unwrap()]
}

#[test]
fn one_seed_gives_identical_reports() {
    let scenario = Scenario::read("busy", BUSY.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"));
    let run = |seed| scenario.run(seed, &mut |_| {});
    let report = run(7);
    assert!(all(&report) == all(&run(7)));
    assert_ne!(report.json(), run(8).json());
    for run in &report.runs {
        let total = run.first_trial.total;
        assert!(total.succeeded > 500 && total.throttled > 0 && total.failed > 0, "{}: {total:?}", run.strategy);
    }
}

#[test]
fn shipped_scenarios_give_identical_reports() {
    for shipped::ShippedScenario { name, text } in shipped::ALL {
        let mut scenario = Scenario::read(name, text.as_bytes()).unwrap();
        // Some have a hundred trials.
        scenario.setups.iter_mut().for_each(|setup| setup.trials = setup.trials.min(2));
        let run = || scenario.run(scenario.seed, &mut |_| {}).json();
        assert_eq!(run(), run(), "{name}");
    }
}

#[test]
fn progress_rises_to_one_and_never_falls() {
    let scenario = Scenario::read("busy", BUSY.as_bytes()).unwrap();
    let mut shares = Vec::new();
    scenario.run(1, &mut |share| shares.push(share));
    assert!(shares.is_sorted() && shares.last() == Some(&1.0), "{shares:?}");
}

#[test]
fn html_reports_are_self_contained_with_text_elements() {
    let scenario = Scenario::read("busy", BUSY.as_bytes()).unwrap();
    let page = scenario.run(1, &mut |_| {}).html().unwrap();
    for word in ["<script", "<link", "@import", "url(", "src="] {
        assert!(!page.contains(word), "{word}");
    }
    let addresses: Vec<&str> = page.match_indices("http").map(|(at, _)| &page[at..(at + 40).min(page.len())]).collect();
    assert!(addresses.iter().all(|address| address.starts_with("http://www.w3.org/2000/svg")), "{addresses:?}");
    for words in ["calls per second", "delay (s)", "time (s)", "tidegate: delay of each call", "prefers-color-scheme"] {
        assert!(page.contains(words), "{words}");
    }
    assert!(page.contains("<text"));
}
