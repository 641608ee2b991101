//! `tidegate simulate`.

use std::fmt::Write as _;
use std::path::Path;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate::clock::SystemClock;
use tidegate_core::{Clock as _, Span};
use tidegate_sim::{Report, Scenario, shipped};

use crate::CliOutcome;
use crate::policy::{display_name, format_of, print, print_error, read_input};

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
pub(crate) fn list() -> CliOutcome {
    let mut text = String::new();
    let width = shipped::ALL.iter().map(|shipped| shipped.name.len()).max().unwrap_or(0);
    for shipped in &shipped::ALL {
        match Scenario::read(shipped.name, shipped.text.as_bytes()) {
            Ok(scenario) => {
                let _ =
                    writeln!(text, "{:width$}  {}\n{:width$}  {}", shipped.name, scenario.title, "", scenario.about);
            }
            Err(errors) => return report_invalid_input(&errors),
        }
    }
    print(&text)
}

/// `tidegate simulate SCENARIO`.
pub(crate) fn run(scenario: &Path, seed: Option<u64>, out: &[std::path::PathBuf], check: bool) -> CliOutcome {
    let mut forms = Vec::with_capacity(out.len());
    for file in out {
        let Some(form) = format_of(file, &ReportFormat::ALL) else {
            return report_invalid_input(&format!(
                "error: {}: a report ends with .html, .svg, .png or .json",
                display_name(file)
            ));
        };
        forms.push((file, form));
    }
    let read = match load_scenario(scenario) {
        Ok(read) => read,
        Err(outcome) => return outcome,
    };
    let report = with_progress(&read, seed.unwrap_or(read.seed));
    for (file, form) in forms {
        let written = form.render(&report).and_then(|bytes| Ok(std::fs::write(file, bytes)?));
        if let Err(error) = written {
            print_error(&format!("error: can't write {}: {error}\n", display_name(file)));
            return CliOutcome::Failed;
        }
    }
    match (print(&report.table()), check) {
        (CliOutcome::Done, true) => check_recovery(&report),
        (outcome, _) => outcome,
    }
}

fn report_invalid_input(what: &dyn std::fmt::Display) -> CliOutcome {
    print_error(&format!("{what}\n"));
    CliOutcome::InvalidInput
}

/// A file takes precedence over a built-in scenario of the same name.
fn load_scenario(scenario: &Path) -> Result<Scenario, CliOutcome> {
    let is_input = scenario.as_os_str() == "-";
    let name = display_name(scenario);
    let body = match read_input(scenario) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_input => match shipped::find(&name) {
            Ok(shipped) => shipped.text.as_bytes().to_vec(),
            Err(unknown) => return Err(report_invalid_input(&format!("error: {unknown}"))),
        },
        Err(error) => {
            print_error(&format!("error: can't read {name}: {error}\n"));
            return Err(CliOutcome::Failed);
        }
    };
    Scenario::read(&name, &body).map_err(|errors| report_invalid_input(&errors))
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
fn check_recovery(report: &Report) -> CliOutcome {
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
        (false, ..) => CliOutcome::Failed,
        (true, true, _) => {
            report_invalid_input(&"error: --check compares with what succeeds before the disturbance, and nothing does")
        }
        (true, false, true) => CliOutcome::Done,
        (true, false, false) => report_invalid_input(
            &"error: --check needs a disturbance, and at least `check.within` after and some time before it",
        ),
    }
}

/// The format of a report.
#[derive(Clone, Copy)]
enum ReportFormat {
    Html,
    Svg,
    Png,
    Json,
}

impl ReportFormat {
    const ALL: [(&str, Self); 4] = [("html", Self::Html), ("svg", Self::Svg), ("png", Self::Png), ("json", Self::Json)];

    fn render(self, report: &Report) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
        Ok(match self {
            Self::Html => report.html()?.into_bytes(),
            Self::Svg => report.svg()?.into_bytes(),
            Self::Png => report.png()?,
            Self::Json => report.json().into_bytes(),
        })
    }
}
