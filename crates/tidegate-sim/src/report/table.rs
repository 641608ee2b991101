//! A report as a table of words and numbers.

use std::borrow::Cow;

use tidegate_policy::{printable, printable_lines};

use super::{Report, Run};
use crate::tally::PerLoad;

/// One column: its head, and what stands in it.
pub(super) struct Column {
    pub(super) head: &'static str,
    pub(super) meaning: &'static str,
    cell: fn(&Run) -> String,
}

impl Column {
    pub(super) fn cell(&self, run: &Run) -> String {
        (self.cell)(run)
    }
}

/// The columns with numbers.
pub(super) const COLUMNS: [Column; 10] = [
    Column { head: "calls", meaning: "calls that began", cell: |run| count(run.numbers.offered) },
    Column {
        head: "succeeded",
        meaning: "share of ended calls that succeeded",
        cell: |run| format!("{:.1} %", run.numbers.success * 100.0),
    },
    Column {
        head: "goodput",
        meaning: "calls that succeeded each second, over the stretch that is measured",
        cell: |run| format!("{:.1}/s", run.numbers.goodput),
    },
    Column { head: "attempts", meaning: "attempts that were sent", cell: |run| count(run.numbers.attempts) },
    Column { head: "load", meaning: "attempts for each call", cell: |run| format!("{:.2}", run.numbers.load) },
    Column {
        head: "throttled",
        meaning: "requests that were refused for a limit or a full queue",
        cell: |run| count(run.numbers.throttled),
    },
    Column {
        head: "busiest",
        meaning: "most requests that came within 100 ms",
        cell: |run| count(run.numbers.busiest),
    },
    Column {
        head: "median",
        meaning: "delay that half of the successful calls kept",
        cell: |run| time(run.numbers.p50),
    },
    Column { head: "p99", meaning: "delay that 99 % of them kept", cell: |run| time(run.numbers.p99) },
    Column {
        head: "end",
        meaning: "when the last call ended",
        cell: |run| time(Some(run.numbers.elapsed).filter(|secs| *secs > 0.0)),
    },
];

/// The whole report, for a terminal.
pub(super) fn table(report: &Report) -> String {
    let mut text = String::new();
    for line in [&report.title, &report.about].into_iter().filter(|line| !line.is_empty()) {
        text.push_str(&printable_lines(line));
        text.push('\n');
    }
    let rows: Vec<[String; COLUMNS.len()]> =
        report.runs.iter().map(|run| std::array::from_fn(|index| COLUMNS[index].cell(run))).collect();
    let widths: [usize; COLUMNS.len()] = std::array::from_fn(|index| {
        let cells = rows.iter().map(|row| row[index].chars().count());
        cells.chain([COLUMNS[index].head.len()]).max().unwrap_or(0)
    });
    let names = report.runs.iter().flat_map(|run| [head(run), printable(&run.strategy)]);
    let names = names.map(|name| name.chars().count()).max().unwrap_or(0);
    let mut case = None;
    for (run, row) in report.runs.iter().zip(&rows) {
        if case != Some(&run.case) {
            case = Some(&run.case);
            text.push_str(&format!("\n{:names$}", head(run)));
            for (column, width) in COLUMNS.iter().zip(widths) {
                text.push_str(&format!("  {:>width$}", column.head));
            }
            text.push('\n');
        }
        text.push_str(&format!("{:names$}", printable(&run.strategy)));
        for (cell, width) in row.iter().zip(widths) {
            text.push_str(&format!("  {cell:>width$}"));
        }
        text.push('\n');
        for line in loads(run) {
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

fn head(run: &Run) -> Cow<'_, str> {
    if run.case.is_empty() { Cow::Borrowed("strategy") } else { printable(&run.case) }
}

/// What became of each load's calls in the first trial, where there are several.
pub(super) fn loads(run: &Run) -> Vec<String> {
    let several = run.loads.len() > 1;
    let seen = run.loads.iter().zip(run.tally.loads()).filter(|_| several);
    let line = |(name, seen): (&String, &PerLoad)| {
        let share = seen.succeeded as f64 / seen.offered.max(1) as f64 * 100.0;
        format!(
            "{}: {} of {} calls succeeded, {share:.1} %",
            printable(name),
            count(seen.succeeded as f64),
            count(seen.offered as f64)
        )
    };
    seen.map(line).collect()
}

/// A whole number, in groups of three; of a mean, the nearest.
pub(super) fn count(number: f64) -> String {
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
fn time(secs: Option<f64>) -> String {
    let Some(secs) = secs else { return "–".to_owned() };
    match secs {
        secs if secs < 0.01 => format!("{:.2} ms", secs * 1e3),
        secs if secs < 1.0 => format!("{:.0} ms", secs * 1e3),
        secs if secs < 120.0 => format!("{secs:.2} s"),
        secs if secs < 7200.0 => format!("{:.1} min", secs / 60.0),
        secs => format!("{:.1} h", secs / 3600.0),
    }
}
