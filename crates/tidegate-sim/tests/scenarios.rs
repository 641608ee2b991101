//! The numbers of every shipped scenario.
#![expect(clippy::unwrap_used, reason = "a test")]

use tidegate_sim::stats::CallOutcome;
use tidegate_sim::{Report, Run, Scenario, shipped};

fn report(name: &str) -> Report {
    let shipped = shipped::find(name).unwrap();
    let scenario = Scenario::read(name, shipped.text.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"));
    scenario.run(scenario.seed, &mut |_| {})
}

fn run<'r>(report: &'r Report, case: &str, strategy: &str) -> &'r Run {
    report.run(case, strategy).unwrap_or_else(|| panic!("no {strategy} of {case}"))
}

#[track_caller]
fn about(what: &str, found: f64, expected: f64, tolerance: f64) {
    let off = (found - expected).abs() / expected.max(f64::MIN_POSITIVE);
    assert!(off <= tolerance, "{what}: {found:.2}, expected {expected}, off by {:.1} %", off * 100.0);
}

/// Brooker 2015, by his program over 100 trials: milliseconds until the last client has written, and attempts.
#[test]
fn contention_matches_the_published_figures() {
    let report = report("contention");
    let published = [
        ("10 clients", "exponential", 3456.0, 51.0),
        ("10 clients", "decorrelated", 437.0, 38.0),
        ("10 clients", "equal", 767.0, 43.0),
        ("10 clients", "full", 448.0, 38.0),
        ("10 clients", "none", 383.0, 51.0),
        ("100 clients", "exponential", 63_719.0, 1852.0),
        ("100 clients", "decorrelated", 4231.0, 1002.0),
        ("100 clients", "equal", 6190.0, 809.0),
        ("100 clients", "full", 4731.0, 797.0),
        ("100 clients", "none", 2023.0, 2422.0),
    ];
    for (case, strategy, millis, calls) in published {
        let run = run(&report, case, strategy);
        assert_eq!((run.trials, run.summary.success_share), (100, 1.0));
        about(&format!("{case}, {strategy}: ms"), run.summary.elapsed * 1e3, millis, 0.1);
        about(&format!("{case}, {strategy}: calls"), run.summary.attempts, calls, 0.1);
    }
}

/// Brooker 2022: percentage of calls that succeed, and requests per call.
#[test]
fn retries_match_the_published_figures() {
    let report = report("retries");
    let published = [
        ("p = 0.5", "no retries", 49.8, 1.0),
        ("p = 0.5", "three retries", 93.5, 1.89),
        ("p = 0.5", "token bucket", 56.7, 1.14),
        ("p = 1", "no retries", 0.0, 1.0),
        ("p = 1", "three retries", 0.0, 4.0),
        ("p = 1", "token bucket", 0.0, 1.14),
    ];
    for (case, strategy, success, load) in published {
        let numbers = run(&report, case, strategy).summary;
        about(&format!("{case}, {strategy}: load"), numbers.attempts_per_call, load, 0.05);
        if success == 0.0 {
            assert_eq!(numbers.succeeded, 0.0);
        } else {
            about(&format!("{case}, {strategy}: success"), numbers.success_share * 100.0, success, 0.05);
        }
    }
}

/// Brooker 2022: calls that succeed per second, by his program with its own numbers.
#[test]
fn tidegate_matches_the_best_methods_against_collapse() {
    let report = report("collapse");
    let goodput = |case, strategy| run(&report, case, strategy).summary.goodput;
    let plain = ["no backoff", "backoff, full jitter", "10 % retry budget", "120 in flight"];
    // Each run stays at 0 or, in about one of four cases, comes back to 40. So ten runs of his program give about this
    // value, with a large spread.
    let down = goodput("spike", plain[0]);
    assert!((4.0..16.0).contains(&down), "spike, no backoff: {down:.1}");
    about("spike, backoff", goodput("spike", plain[1]), 45.0, 0.05);
    assert!(goodput("ramp", plain[0]) < 0.5 && goodput("ramp", plain[1]) < 0.5);
    about("ramp, budget", goodput("ramp", plain[2]), 29.0, 0.1);
    about("ramp, cap", goodput("ramp", plain[3]), 46.0, 0.05);
    for case in ["spike", "ramp"] {
        let best = plain.iter().map(|strategy| goodput(case, strategy)).fold(0.0, f64::max);
        let ours = run(&report, case, "tidegate").summary;
        assert!(ours.goodput >= 0.99 * best, "{case}: ours {:.1}, the best other {best:.1}", ours.goodput);
        assert!(ours.success_share > 0.99, "{case}: {:.3} of the calls succeed", ours.success_share);
        // A strategy that lets calls fail has shorter delays, because it counts those that succeed.
        let others = plain.iter().map(|strategy| run(&report, case, strategy).summary);
        let delays = others.filter(|other| other.success_share >= 0.9).filter_map(|other| other.p50_delay);
        let shortest = delays.fold(f64::MAX, f64::min);
        assert!(ours.p50_delay.unwrap() <= 1.5 * shortest, "{case}: {:?}, others {shortest:.2}", ours.p50_delay);
    }
    let recovered = |strategy| run(&report, "spike", strategy).recovered();
    assert_eq!((recovered("no backoff"), recovered("tidegate")), (Some(false), Some(true)));
}

/// The calls begin at 1 s, so that the least possible time is 9 s after that, or 18 s at half of the limit.
#[test]
fn reserved_callers_return_once_and_in_turn() {
    let report = report("returns");
    for case in ["100 clients at 10/s", "1,000 clients at 100/s"] {
        let summary = |strategy| run(&report, case, strategy).summary;
        for (strategy, least) in
            [("reserved, whole limit", 9.0), ("reserved, half of the limit", 18.0), ("told in turn", 9.0)]
        {
            let found = summary(strategy);
            // A tenth has room at once, and each of the others makes two requests.
            assert!((found.attempts_per_call - 1.9).abs() < 1e-9, "{case}, {strategy}: {}", found.attempts_per_call);
            assert!(found.elapsed - 1.0 <= least * 1.02, "{case}, {strategy}: {:.2}", found.elapsed);
            assert_eq!(found.success_share, 1.0, "{case}, {strategy}");
        }
        assert!(summary("Retry-After").attempts_per_call > 40.0 && summary("full jitter").elapsed > 20.0, "{case}");
    }
}

/// They take a share for one horizon of 10 s in the 120 s that are measured, although they come again after 40 s.
#[test]
fn absentees_cost_a_share_of_one_horizon() {
    let report = report("absentees");
    for (strategy, share) in [("reserved, half of the limit", 0.5), ("reserved, whole limit", 1.0)] {
        let goodput = |case| run(&report, case, strategy).summary.goodput;
        let lost = 1.0 - goodput("600 absentees") / goodput("without them");
        assert!((0.5 * share / 12.0..=1.05 * share / 12.0).contains(&lost), "{strategy}: {lost:.4}");
    }
}

/// 1 ms·1.5^14, and 0.6 of it after five successes, computed by hand.
#[test]
fn the_pacer_finds_and_follows_the_services_capacity() {
    let report = report("responsive");
    let run = run(&report, "", "pacer");
    let waits: Vec<(f64, bool)> = (run.first_trial.samples.iter())
        .map(|point| (point.delay.as_micros() as f64 / 1e3, point.outcome == CallOutcome::Succeeded))
        .collect();
    // The first call has none before it, and the second doesn't wait.
    assert_eq!(waits[..2], [(0.0, true), (0.0, false)]);
    let steps = waits[2..].chunk_by(|one, other| one.0 == other.0).map(|step| (step[0].0, step[0].1, step.len()));
    let steps: Vec<(f64, bool, usize)> = steps.collect();
    for (index, step) in steps[..14].iter().enumerate() {
        about("a wait that is too short", step.0, 1.5_f64.powi(index as i32), 0.002);
        assert_eq!((step.1, step.2), (false, 1), "{step:?}");
    }
    let peak = waits.iter().map(|(wait, _)| *wait).fold(0.0, f64::max);
    assert_eq!((steps[14], steps[15]), ((peak, true, 5), (steps[15].0, true, 5)));
    assert!((peak - 291.929).abs() < 0.002 && (steps[15].0 - 175.157).abs() < 0.002, "{:?}", &steps[14..16]);
    // From then on it goes up and down around 60 ms: five successes, then one or two that come too early.
    let saw = steps.iter().skip_while(|(_, succeeded, _)| !succeeded).skip_while(|(_, succeeded, _)| *succeeded);
    let saw: Vec<&(f64, bool, usize)> = saw.collect();
    assert!(saw.len() > 30, "{steps:?}");
    assert!(
        saw.iter().all(|(wait, succeeded, _)| (36.0..90.0).contains(wait) && *succeeded == (*wait >= 60.0)),
        "{saw:?}"
    );
    let teeth = saw[..saw.len() - 1].iter().filter(|(_, succeeded, _)| *succeeded);
    assert!(teeth.clone().count() > 10 && teeth.clone().all(|(.., calls)| *calls == 5), "{saw:?}");
    let picture = report.svg().unwrap_or_else(|error| panic!("{error}"));
    assert!(picture.contains("pacer: delay of each call"));
}

#[test]
fn tidegate_lanes_prevent_a_thundering_herd() {
    let report = report("herd");
    let numbers = |strategy| run(&report, "", strategy).summary;
    assert!(numbers("no backoff").success_share < 0.2);
    for strategy in ["exponential", "full jitter", "tidegate"] {
        assert_eq!(numbers(strategy).success_share, 1.0, "{strategy}");
    }
    assert!(numbers("full jitter").elapsed * 2.0 < numbers("exponential").elapsed);
    let ours = numbers("tidegate");
    assert_eq!((ours.attempts_per_call, ours.throttled), (1.0, 0.0));
    assert!(ours.busiest <= 25.0, "{}", ours.busiest);
    // 1,000 calls at 100 a second, from the tenth second on.
    assert!(ours.elapsed <= 21.0, "{}", ours.elapsed);
}

#[test]
fn only_tidegate_recovers_after_a_partition() {
    let report = report("partition");
    let of = |strategy| run(&report, "", strategy);
    for strategy in ["no backoff", "full jitter"] {
        assert_eq!(of(strategy).recovered(), Some(false), "{strategy}");
        assert!(of(strategy).summary.attempts_per_call > 2.5);
    }
    let ours = of("tidegate");
    assert_eq!(ours.recovered(), Some(true));
    assert!(ours.summary.attempts_per_call < 1.0, "an open breaker sends nothing: {}", ours.summary.attempts_per_call);
}

#[test]
fn a_noisy_client_is_held_to_its_limit() {
    let report = report("noisy-neighbour");
    let quiet = |strategy| {
        let seen = run(&report, "", strategy).first_trial.loads[0];
        seen.succeeded as f64 / seen.offered as f64
    };
    assert!(quiet("no gate") < 0.7, "{}", quiet("no gate"));
    assert!(quiet("a gate by tenant") > 0.995, "{}", quiet("a gate by tenant"));
    let noisy = run(&report, "", "a gate by tenant").first_trial.loads[1];
    // 20 a second with a burst of 40, over 40 s, and 5 a second for the rest.
    assert!((900..=960).contains(&noisy.succeeded), "{noisy:?}");
}

#[test]
fn a_spent_quota_is_not_called_until_midnight() {
    let report = report("quota-midnight");
    let numbers = |strategy| run(&report, "", strategy).summary;
    assert!(numbers("full jitter").throttled > 13_000.0, "three for each call that comes too late");
    let honours = numbers("as Retry-After says");
    assert!(honours.busiest > 100.0, "all that waited come at midnight: {}", honours.busiest);
    let ours = numbers("tidegate");
    assert_eq!((ours.throttled, ours.attempts), (0.0, ours.succeeded));
    about("ours got what the quota allows", ours.succeeded, numbers("full jitter").succeeded, 0.001);
}

#[test]
fn the_documented_scenario_behaves_as_described() {
    let text = include_str!("../../../docs/simulate.md");
    let example = text.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let scenario = Scenario::read("docs/simulate.md", example.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"));
    let report = scenario.run(scenario.seed, &mut |_| {});
    assert_eq!(run(&report, "", "tidegate").recovered(), Some(true));
    for shipped in &shipped::ALL {
        assert!(text.contains(&format!("| `{}` |", shipped.name)), "{}", shipped.name);
    }
}

#[test]
fn shipped_scenarios_state_their_purpose_and_source() {
    for shipped in &shipped::ALL {
        let scenario = Scenario::read(shipped.name, shipped.text.as_bytes()).unwrap();
        assert!(!scenario.title.is_empty() && !scenario.about.is_empty(), "{}", shipped.name);
        assert!(shipped.text.starts_with("# Source"), "{}", shipped.name);
    }
}
