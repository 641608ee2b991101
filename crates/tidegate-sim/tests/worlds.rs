//! Scenarios with known results.

use tidegate_sim::{Report, RunSummary, Scenario};

fn report(text: &str) -> Report {
    let scenario = Scenario::read("s.toml", text.as_bytes()).unwrap_or_else(|errors| panic!("{errors}"));
    scenario.run(scenario.seed, &mut |_| {})
}

fn numbers(text: &str) -> RunSummary {
    report(text).runs[0].summary
}

/// A fleet over a shared store never exceeds a provider's window that the policy knows, although the network delays
/// some requests more than others. Hardly any of the window stays unused.
#[test]
fn a_fleet_never_exceeds_an_exact_providers_window() {
    let text = r#"
        duration = "5m"
        [service]
        latency = "20ms"
        limit = "40 per 10s"
        [network]
        delay = { uniform = ["1ms", "200ms"] }
        [store]
        shared = true
        latency = { exponential = "2ms" }
        [load.nodes]
        clients = 3
        rate = "3/s"
        [outbound]
        listen = "off"
        [outbound.provider.api]
        limit = "40 per 10s"
        breaker = "off"
    "#;
    let found = numbers(text);
    assert_eq!((found.throttled, found.attempts_per_call <= 1.0), (0.0, true), "{found:?}");
    // 40 in 10 s, and up to 0.2 s more by which a slot may come free late.
    assert!(found.succeeded > 0.95 * 1200.0 && found.succeeded <= 1240.0, "{found:?}");
    let unlimited = numbers(&text.replace(
        "[outbound.provider.api]\n        limit = \"40 per 10s\"",
        "[outbound.provider.api]\n        limit = \"unlimited\"",
    ));
    assert!(unlimited.throttled > 50.0, "the provider does refuse who doesn't know: {unlimited:?}");
}

/// M/M/1: the mean time in the system is 1 ÷ (μ − λ).
#[test]
fn queue_delays_match_the_mm1_theory() {
    let found = numbers(
        r#"
        duration = "2h"
        [service]
        latency = { exponential = "100ms" }
        workers = 1
        queue = 100000
        [load.all]
        rate = "8/s"
        "#,
    );
    assert!((found.mean_delay.unwrap() - 0.5).abs() < 0.05, "{found:?}");
    assert!((found.offered / (8.0 * 7200.0) - 1.0).abs() < 0.02, "{found:?}");
    // The time in the system is exponential itself.
    let (p50, p99) = (found.p50_delay.unwrap(), found.p99_delay.unwrap());
    assert!((p50 - 0.5 * 2_f64.ln()).abs() < 0.04 && (p99 - 0.5 * 100_f64.ln()).abs() < 0.35, "{found:?}");
}

#[test]
fn losing_half_the_messages_quarters_the_replies() {
    let found = numbers(
        "duration = \"10m\"\n[network]\nloss = \"50%\"\n[load.all]\nrate = \"20/s\"\n[client]\ntimeout = \"1s\"\n",
    );
    assert!((found.success_share - 0.25).abs() < 0.02, "{found:?}");
}

#[test]
fn outage_failures_are_never_counted_as_served() {
    let text = "duration = \"1m\"\n[service]\nlatency = \"1ms\"\noutages = \"20s to 40s\"\n[load.all]\nrate = \"10/s\"\narrivals = \"even\"\n";
    let report = report(text);
    let run = &report.runs[0];
    let total = run.first_trial.total;
    assert_eq!((total.failed, total.admitted, total.throttled), (200, 399, 0), "{total:?}");
    assert_eq!(run.recovered(), Some(true));
}

/// A serial client has one call at a time, and pauses as configured.
#[test]
fn serial_clients_never_overlap_their_calls() {
    let found = numbers(
        "duration = \"100s\"\n[service]\nlatency = \"300ms\"\n[load.all]\nclients = 5\nthink = \"200ms\"\ncalls = 50\n",
    );
    assert_eq!((found.offered, found.succeeded), (250.0, 250.0));
    assert!((found.elapsed - 25.0).abs() < 1e-6, "{found:?}");
}

/// A clock that is set back holds calls for at most the longest lead, a minute. A window can't distinguish its own
/// early counts from those of a clock that has since been set back. A clock that is set forward admits one window too
/// many.
#[test]
fn clock_steps_have_a_bounded_effect() {
    let text = r#"
        duration = "10m"
        [service]
        latency = "10ms"
        limit = "20 per 10s"
        retry_after = "none"
        [load.all]
        rate = "1.5/s"
        drift = 0.0002
        clock_steps = ["at 2m back 1h", "at 4m ahead 2h", "at 6m back 1h"]
        [strategy.tidegate]
        client = "tidegate"
        [outbound]
        listen = "off"
        [outbound.provider.api]
        limit = "20 per 10s"
        breaker = "off"
    "#;
    let found = numbers(text);
    let of_two_minutes = 2.0 * 60.0 * 1.5;
    assert!(found.declined <= of_two_minutes * 1.15 && found.success_share > 0.75, "{found:?}");
    assert!(found.throttled <= 20.0, "one window for the step ahead: {found:?}");
}

/// Only the calls fail that the shared store doesn't answer.
#[test]
fn a_store_outage_fails_calls_then_recovers() {
    let text = r#"
        duration = "1m"
        [service]
        latency = "10ms"
        [store]
        shared = true
        latency = "1ms"
        outages = "20s to 30s"
        [load.all]
        clients = 2
        rate = "5/s"
        [outbound]
        listen = "off"
        [outbound.provider.api]
        limit = "100/s"
    "#;
    let report = report(text);
    let run = &report.runs[0];
    let total = run.first_trial.total;
    assert!((10..=120).contains(&total.failed), "{total:?}");
    assert_eq!(run.recovered(), Some(true));
}

/// The gate refuses what the policy refuses: so many in each window, with a true wait.
#[test]
fn a_gate_admits_what_its_policy_allows() {
    let text = r#"
        duration = "10m"
        [service]
        latency = "5ms"
        [load.all]
        clients = 3
        rate = "2/s"
        [strategy.patient]
        attempts = 3
        honours_retry_after = true
        [inbound.action.default]
        limit = "10 per 60s"
    "#;
    let found = numbers(text);
    assert!((found.succeeded - 300.0).abs() <= 3.0, "ten a minute of each: {found:?}");
}

/// The adaptive pace works in a simulation too.
#[test]
fn adaptive_pace_finds_the_providers_rate() {
    let text = r#"
        duration = "5m"
        [service]
        latency = "20ms"
        limit = "50/s burst 10"
        retry_after = "none"
        [load.all]
        clients = 1
        rate = "80/s"
        [strategy.tidegate]
        client = "tidegate"
        [outbound]
        listen = "off"
        [outbound.provider.api]
        limit = "unlimited"
        breaker = "off"
        pace = "adaptive"
    "#;
    let found = numbers(text);
    assert!(found.throttled < 0.02 * found.attempts, "{found:?}");
    assert!(found.succeeded > 0.9 * 50.0 * 300.0, "{found:?}");
}

/// A provider with room for three calls per token fails none, and its room is nearly always in use.
#[test]
fn credentials_use_all_their_in_flight_slots() {
    let text = r#"
        duration = "5m"
        [service]
        latency = "1s"
        workers = 6
        queue = 0
        [load.all]
        rate = "10/s"
        [outbound]
        listen = "off"
        [outbound.provider.api]
        base_url = "https://api.test"
        auth = "bearer"
        credentials = ["env:A", "env:B"]
        credential_limit = "3 in flight"
        adaptive = "off"
        breaker = "off"
    "#;
    let found = numbers(text);
    assert!(found.attempts - found.succeeded <= 6.0, "only what is under way at the end isn't done: {found:?}");
    assert!((1_750.0..=1_800.0).contains(&found.succeeded), "six a second: {found:?}");
    let overrun = numbers(&text.replace("3 in flight", "4 in flight"));
    assert!(overrun.attempts - overrun.succeeded > 100.0, "the service does fail one more: {overrun:?}");
}

/// Permits are released when a client goes away, and renewed for long calls, as in production.
#[test]
fn permits_are_held_for_the_calls_duration() {
    let text = r#"
        duration = "10m"
        [service]
        latency = "100s"
        [load.all]
        rate = "0.1/s"
        arrivals = "even"
        [inbound.action.default]
        limit = "1 in flight"
    "#;
    let found = numbers(text);
    // Six of 100 s each, and at most 10 s between them.
    assert!((5.0..=6.0).contains(&(found.offered - found.throttled)), "{found:?}");
    for notices in ["false", "true"] {
        let impatient = format!("{text}\n[client]\ntimeout = \"1s\"")
            .replace("[load.all]", &format!("notices_timeouts = {notices}\n[load.all]"));
        let found = numbers(&impatient);
        assert!(found.offered > 50.0 && found.throttled == 0.0, "{found:?}");
    }
}

/// A change of rate takes effect at its time, and not only after the next call.
#[test]
fn even_arrivals_follow_their_rate() {
    for (rate, calls) in [
        ("[\"0.01/s until 10s\", \"10/s until 20s\", \"0/s\"]", 100),
        ("[\"0/s to 20/s until 10s\", \"0/s until 30s\", \"20/s to 0/s until 40s\", \"0/s\"]", 200),
    ] {
        let text = format!("duration = \"1m\"\n[load.all]\nrate = {rate}\narrivals = \"even\"\n");
        let found = numbers(&text);
        assert!((found.offered - f64::from(calls)).abs() <= 1.0, "{rate}: {found:?}");
    }
}

#[test]
fn long_delays_are_reported_accurately() {
    let text = "duration = \"2d\"\n[service]\nlatency = \"3h\"\n[load.all]\nclients = 3\ncalls = 5\n";
    let found = numbers(text);
    assert!(
        [found.p50_delay, found.p99_delay].into_iter().all(|delay| (delay.unwrap() / 10_800.0 - 1.0).abs() < 0.001),
        "{found:?}"
    );
}

/// Workers of 100 ms a request: 20 a second, 40, and then 10.
#[test]
fn workers_come_and_go_over_time() {
    let text = r#"
        duration = "30s"
        [service]
        latency = "100ms"
        workers = ["2 until 10s", "4 until 20s", "1"]
        queue = 10000
        [load.all]
        rate = "100/s"
    "#;
    let report = report(text);
    let run = &report.runs[0];
    assert!((run.summary.succeeded - 700.0).abs() <= 5.0, "{:?}", run.summary);
    assert_eq!((run.first_trial.total.working, run.changed_at.map(|at| at.as_secs_f64())), (4, Some(20.0)));
}

#[test]
fn paused_workers_make_no_progress() {
    let text = r#"
        duration = "10s"
        [service]
        latency = "100ms"
        workers = 1
        queue = 10000
        pauses = { every = "1s", for = "250ms" }
        [load.all]
        trace = ["0s"]
        each = 1000
    "#;
    // 7.5 a second; the one at the pause of each period goes on after it.
    assert_eq!(numbers(text).succeeded, 75.0);
    let one = numbers(&text.replace("0s\"]", "700ms\"]").replace("1000", "1"));
    assert!((one.mean_delay.unwrap() - 0.35).abs() < 1e-6, "{one:?}");
}
