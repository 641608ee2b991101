//! A report as a table of words and numbers.

use std::borrow::Cow;

use tidegate_policy::{printable, printable_lines};

use super::{Report, Run};
use crate::stats::LoadCounts;

/// One column: its head, and what stands in it.
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

/// The whole report, for a terminal.
pub(super) fn text_table(report: &Report) -> String {
    let mut text = String::new();
    for line in [&report.title, &report.about].into_iter().filter(|line| !line.is_empty()) {
        text.push_str(&printable_lines(line));
        text.push('\n');
    }
    let rows: Vec<[String; COLUMNS.len()]> =
        report.runs.iter().map(|run| std::array::from_fn(|index| COLUMNS[index].cell(run))).collect();
    let widths: [usize; COLUMNS.len()] = std::array::from_fn(|index| {
        let cells = rows.iter().map(|row| row[index].chars().count());
        cells.chain([COLUMNS[index].title.len()]).max().unwrap_or(0)
    });
    let names = report.runs.iter().flat_map(|run| [first_column_title(run), printable(&run.strategy)]);
    let names = names.map(|name| name.chars().count()).max().unwrap_or(0);
    let mut case = None;
    for (run, row) in report.runs.iter().zip(&rows) {
        if case != Some(&run.case) {
            case = Some(&run.case);
            text.push_str(&format!("\n{:names$}", first_column_title(run)));
            for (column, width) in COLUMNS.iter().zip(widths) {
                text.push_str(&format!("  {:>width$}", column.title));
            }
            text.push('\n');
        }
        text.push_str(&format!("{:names$}", printable(&run.strategy)));
        for (cell, width) in row.iter().zip(widths) {
            text.push_str(&format!("  {cell:>width$}"));
        }
        text.push('\n');
        for line in load_lines(run) {
            text.push_str(&format!("  {line}\n"));
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

/// What became of each load's calls in the first trial, where there are several.
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

/// A whole number, in groups of three; of a mean, the nearest.
pub(super) fn format_count(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut grouped = String::with_capacity(digits.len() * 2);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A time in seconds, for people; a dash where there is none.
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
