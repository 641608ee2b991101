//! `tidegate simulate`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate::clock::SystemClock;
use tidegate_core::{Clock as _, Span};
use tidegate_sim::{Report, Scenario, shipped};

use crate::policy::{
    ReportFormat, display_name, file_failure, invalid_document, invalid_input, is_stdin, print, print_error,
    read_input, report_writer,
};
use crate::{CliOutcome, CommandResult};

/// The time after which a run shows its progress.
const PROGRESS_DELAY: Span = Span::from_millis(700);
/// The progress bar's steps.
const PROGRESS_STEPS: u64 = 1000;

/// The names of the built-in scenarios, for the command's help.
pub(crate) fn help() -> String {
    let names: Vec<&str> = shipped::ALL.iter().map(|shipped| shipped.name).collect();
    format!("Scenarios that come with Tidegate: {}.", names.join(", "))
}

/// `tidegate simulate --list`.
pub(crate) fn list() -> CommandResult {
    let mut text = String::new();
    let width = shipped::ALL.iter().map(|shipped| shipped.name.len()).max().unwrap_or(0);
    for shipped in &shipped::ALL {
        let scenario = Scenario::read(shipped.name, shipped.text.as_bytes()).map_err(invalid_document)?;
        let _ = writeln!(text, "{:width$}  {}\n{:width$}  {}", shipped.name, scenario.title, "", scenario.about);
    }
    Ok(print(&text))
}

/// `tidegate simulate SCENARIO`.
pub(crate) fn run(scenario: &Path, seed: Option<u64>, out: &[PathBuf], check: bool) -> CommandResult {
    let write_report = report_writer(out, &FORMATS, FORMATS_HINT)?;
    let scenario = load_scenario(scenario)?;
    let report = with_progress(&scenario, seed.unwrap_or(scenario.seed));
    write_report(&report)?;
    match (print(&report.table()), check) {
        (CliOutcome::Done, true) => check_recovery(&report),
        (outcome, _) => Ok(outcome),
    }
}

/// The names of the suites.
pub(crate) fn suites() -> PossibleValuesParser {
    PossibleValuesParser::new(shipped::SUITES.map(|suite| suite.name))
}

/// `tidegate simulate --suite NAME`.
pub(crate) fn run_suite(name: &str, seed: Option<u64>, out: &[PathBuf]) -> CommandResult {
    let write_report = report_writer(out, &FORMATS, FORMATS_HINT)?;
    let suite = shipped::SUITES.iter().find(|suite| suite.name == name);
    let text = suite.map_or("", |suite| suite.text);
    let scenario = Scenario::read(name, text.as_bytes()).map_err(invalid_document)?;
    let report = with_progress(&scenario, seed.unwrap_or(scenario.seed));
    write_report(&report)?;
    Ok(print(&report.control_table()))
}

/// A file takes precedence over a built-in scenario of the same name.
fn load_scenario(scenario: &Path) -> Result<Scenario, CliOutcome> {
    let is_input = is_stdin(scenario);
    let name = display_name(scenario);
    let body = match read_input(scenario) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_input => match shipped::find(&name) {
            Ok(shipped) => shipped.text.as_bytes().to_vec(),
            Err(unknown) => return Err(invalid_input(unknown)),
        },
        Err(error) => return Err(file_failure("read", scenario, error)),
    };
    Scenario::read(&name, &body).map_err(invalid_document)
}

fn with_progress(scenario: &Scenario, seed: u64) -> Report {
    let (clock, mut bar) = (SystemClock::new(), None);
    let began = clock.now();
    let report = scenario.run(seed, &mut |share| {
        if bar.is_none() && clock.now() > began + PROGRESS_DELAY {
            let made = ProgressBar::with_draw_target(Some(PROGRESS_STEPS), ProgressDrawTarget::stderr());
            if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} %  {eta} left") {
                made.set_style(style);
            }
            bar = Some(made);
        }
        if let Some(bar) = &bar {
            bar.set_position((share * PROGRESS_STEPS as f64) as u64);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    report
}

/// Prints for each strategy if goodput has recovered.
fn check_recovery(report: &Report) -> CommandResult {
    let (mut text, mut good, mut known, mut dead) = (String::new(), true, false, false);
    for run in report.checked_runs() {
        let case = if run.case.is_empty() { String::new() } else { format!("{}, ", run.case) };
        let of = if run.trials > 1 { " in the worst trial" } else { "" };
        let words = match (run.recovered(), run.worst_trial) {
            (Some(recovered), Some((before, after))) => format!(
                "{}: {:.1} % of calls succeeded before, {:.1} % after{of}",
                if recovered { "recovered" } else { "did not recover" },
                before * 100.0,
                after * 100.0
            ),
            (None, Some(_)) => {
                dead = true;
                format!("can't tell: no call succeeded before{of}")
            }
            (_, None) => "nothing to recover from, or too little time after it".to_owned(),
        };
        known |= run.recovered().is_some();
        good &= run.recovered() != Some(false);
        let _ = writeln!(text, "{case}{}: {words}", run.strategy);
    }
    print_error(&text);
    match (good, dead, known) {
        (false, ..) => Err(CliOutcome::Failed),
        (true, true, _) => {
            Err(invalid_input("--check compares with what succeeds before the disturbance, and nothing does"))
        }
        (true, false, true) => Ok(CliOutcome::Done),
        (true, false, false) => {
            Err(invalid_input("--check needs a disturbance, and at least `check.within` after and some time before it"))
        }
    }
}

const FORMATS_HINT: &str = "a report ends with .html, .svg, .png or .json";
const FORMATS: [ReportFormat<Report>; 4] = [
    ("html", |report| Ok(report.html()?.into_bytes())),
    ("svg", |report| Ok(report.svg()?.into_bytes())),
    ("png", |report| Ok(report.png()?)),
    ("json", |report| Ok(report.json().into_bytes())),
];
