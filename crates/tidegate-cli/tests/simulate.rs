//! `tidegate simulate` on the command line.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn simulate(directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.current_dir(directory).arg("simulate").args(arguments).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn shipped_scenarios_produce_every_report_format() {
    let directory = tempfile::tempdir().unwrap();
    let run = |seed: &str, page: &str, forms: &[&str]| {
        simulate(directory.path(), &[&["retries", "--seed", seed, "--out", page], forms].concat())
    };
    let first = run("5", "one.html", &["--out", "r.svg", "--out", "r.png", "--out", "r.json"]);
    assert_eq!(first.status.code(), Some(0), "{}", err(&first));
    assert!(out(&first).contains("three retries") && out(&first).contains("seed 5"), "{}", out(&first));
    assert_eq!(err(&first), "", "no progress bar where nobody looks");
    let read = |name: &str| fs::read(directory.path().join(name)).unwrap();
    assert!(read("r.svg").starts_with(b"<svg") && read("r.png").starts_with(b"\x89PNG"));
    assert!(read("one.html").starts_with(b"<!doctype html>"));
    let json: serde_json::Value = serde_json::from_slice(&read("r.json")).unwrap();
    assert_eq!((&json["seed"], json["runs"].as_array().unwrap().len()), (&5.into(), 6));
    assert_eq!(out(&run("5", "two.html", &[])), out(&first));
    assert!(read("one.html") == read("two.html"));
    assert_ne!(out(&run("6", "three.html", &[])), out(&first));
}

#[test]
fn check_fails_if_goodput_stays_low() {
    let directory = tempfile::tempdir().unwrap();
    let good = simulate(directory.path(), &["partition", "--check"]);
    assert_eq!(good.status.code(), Some(0), "{}", err(&good));
    assert!(err(&good).contains("tidegate: recovered"), "{}", err(&good));

    let scenario = "\
        [service]\nlatency = \"100ms\"\nworkers = 10\nqueue = 400\noutages = \"20s to 30s\"\n\
        [load.all]\nrate = \"80/s\"\n[client]\ntimeout = \"2s\"\nattempts = ATTEMPTS\n";
    let mut codes = Vec::new();
    // Refused connections are retried at once, and queue for longer than any client waits.
    for attempts in ["1", "40"] {
        let text = scenario
            .replace("ATTEMPTS", attempts)
            .replace("outages", "failures = [\"0% until 20s\", \"100% until 30s\", \"0%\"]\n#");
        fs::write(directory.path().join("s.toml"), text).unwrap();
        let output = simulate(directory.path(), &["s.toml", "--check"]);
        codes.push((output.status.code(), err(&output)));
    }
    assert_eq!((codes[0].0, codes[1].0), (Some(0), Some(1)), "{codes:?}");
    assert!(codes[1].1.contains("did not recover"), "{codes:?}");

    let dead = "[service]\nfailures = \"100%\"\noutages = \"20s to 30s\"\n[load.all]\nrate = \"10/s\"\n";
    fs::write(directory.path().join("s.toml"), dead).unwrap();
    let dead = simulate(directory.path(), &["s.toml", "--check"]);
    assert_eq!(dead.status.code(), Some(2), "{}", err(&dead));
    assert!(err(&dead).contains("can't tell: no call succeeded before"), "{}", err(&dead));

    let still = simulate(directory.path(), &["retries", "--check"]);
    assert_eq!(still.status.code(), Some(2), "{}", err(&still));
}

#[test]
fn wrong_arguments_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let unknown = simulate(directory.path(), &["colapse"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(err(&unknown).contains("did you mean \"collapse\"?"), "{}", err(&unknown));

    let suite = simulate(directory.path(), &["--suite", "contrl"]);
    assert_eq!(suite.status.code(), Some(2));
    assert!(err(&suite).contains("'control'"), "{}", err(&suite));

    let form = simulate(directory.path(), &["retries", "--out", "report.pdf"]);
    assert_eq!(form.status.code(), Some(2));
    assert!(err(&form).contains(".html, .svg, .png or .json"), "{}", err(&form));

    fs::write(directory.path().join("s.toml"), "[load.all]\nrte = \"5/s\"\n").unwrap();
    let broken = simulate(directory.path(), &["s.toml"]);
    assert_eq!(broken.status.code(), Some(2));
    assert!(
        err(&broken).contains("--> s.toml:2:1") && err(&broken).contains("did you mean `rate`?"),
        "{}",
        err(&broken)
    );

    let nowhere = simulate(directory.path(), &["retries", "--out", "no/such/report.json"]);
    assert_eq!(nowhere.status.code(), Some(1), "{}", err(&nowhere));
}

#[test]
fn every_shipped_scenario_is_listed() {
    let listed = out(&simulate(Path::new("."), &["--list"]));
    for shipped in &tidegate_sim::shipped::ALL {
        assert!(listed.lines().any(|line| line.starts_with(shipped.name)), "{listed}");
    }
    let suite = simulate(Path::new("."), &["control"]);
    assert!(err(&suite).contains("`--suite control`"), "{}", err(&suite));
}
