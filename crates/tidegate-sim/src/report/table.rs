//! A report as a table of text and numbers.

use std::borrow::Cow;

use tidegate_policy::{printable, printable_lines};
use tidegate_report::table::{align_rows, format_count};

use super::{Report, Run, runs_by_case};
use crate::stats::LoadCounts;

/// One column: its title, and the content of its cells.
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) meaning: &'static str,
    format: fn(&Run) -> String,
}

impl Column {
    pub(super) fn cell(&self, run: &Run) -> String {
        (self.format)(run)
    }
}

/// The columns with numbers.
pub(super) const COLUMNS: [Column; 10] = [
    Column { title: "calls", meaning: "calls that began", format: |run| format_count(run.summary.offered) },
    Column {
        title: "succeeded",
        meaning: "share of ended calls that succeeded",
        format: |run| format!("{:.1} %", run.summary.success_share * 100.0),
    },
    Column {
        title: "goodput",
        meaning: "calls that succeeded each second, over the stretch that is measured",
        format: |run| format!("{:.1}/s", run.summary.goodput),
    },
    Column { title: "attempts", meaning: "attempts that were sent", format: |run| format_count(run.summary.attempts) },
    Column {
        title: "load",
        meaning: "attempts for each call",
        format: |run| format!("{:.2}", run.summary.attempts_per_call),
    },
    Column {
        title: "throttled",
        meaning: "requests that were refused for a limit or a full queue",
        format: |run| format_count(run.summary.throttled),
    },
    Column {
        title: "busiest",
        meaning: "most requests that came within 100 ms",
        format: |run| format_count(run.summary.busiest),
    },
    Column {
        title: "median",
        meaning: "delay that half of the successful calls kept",
        format: |run| format_seconds(run.summary.p50_delay),
    },
    Column {
        title: "p99",
        meaning: "delay that 99 % of them kept",
        format: |run| format_seconds(run.summary.p99_delay),
    },
    Column {
        title: "end",
        meaning: "when the last call ended",
        format: |run| format_seconds(Some(run.summary.elapsed).filter(|secs| *secs > 0.0)),
    },
];

/// Returns the whole report for a terminal.
pub(super) fn text_table(report: &Report) -> String {
    let mut text = String::new();
    for line in [&report.title, &report.about].into_iter().filter(|line| !line.is_empty()) {
        text.push_str(&printable_lines(line));
        text.push('\n');
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    for runs in runs_by_case(report) {
        let titles = COLUMNS.iter().map(|column| column.title.to_owned());
        rows.push(runs.first().map(first_column_title).into_iter().map(Cow::into_owned).chain(titles).collect());
        rows.extend(runs.iter().map(|run| {
            let cells = COLUMNS.iter().map(|column| column.cell(run));
            std::iter::once(printable(&run.strategy).into_owned()).chain(cells).collect()
        }));
    }
    let mut lines = align_rows(&rows, 1).into_iter();
    for runs in runs_by_case(report) {
        text.push_str(&format!("\n{}\n", lines.next().unwrap_or_default()));
        for run in runs {
            text.push_str(&format!("{}\n", lines.next().unwrap_or_default()));
            for line in load_lines(run) {
                text.push_str(&format!("  {line}\n"));
            }
        }
    }
    let trials = report.runs.iter().map(|run| run.trials).max().unwrap_or(1);
    text.push_str(&match trials {
        1 => format!("\nseed {}\n", report.seed),
        trials => format!("\nseed {}; means over {trials} trials\n", report.seed),
    });
    text
}

fn first_column_title(run: &Run) -> Cow<'_, str> {
    if run.case.is_empty() { Cow::Borrowed("strategy") } else { printable(&run.case) }
}

/// Returns the counts of each load in the first trial, if there are several loads.
pub(super) fn load_lines(run: &Run) -> Vec<String> {
    let several = run.loads.len() > 1;
    let seen = run.loads.iter().zip(run.first_trial.loads()).filter(|_| several);
    let line = |(name, seen): (&String, &LoadCounts)| {
        let share = seen.succeeded as f64 / seen.offered.max(1) as f64 * 100.0;
        format!(
            "{}: {} of {} calls succeeded, {share:.1} %",
            printable(name),
            format_count(seen.succeeded as f64),
            format_count(seen.offered as f64)
        )
    };
    seen.map(line).collect()
}

/// Formats a time in seconds for a reader; a dash for `None`.
fn format_seconds(secs: Option<f64>) -> String {
    let Some(secs) = secs else { return "–".to_owned() };
    match secs {
        secs if secs < 0.01 => format!("{:.2} ms", secs * 1e3),
        secs if secs < 1.0 => format!("{:.0} ms", secs * 1e3),
        secs if secs < 120.0 => format!("{secs:.2} s"),
        secs if secs < 7200.0 => format!("{:.1} min", secs / 60.0),
        secs => format!("{:.1} h", secs / 3600.0),
    }
}
