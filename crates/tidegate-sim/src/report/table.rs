//! A report as a table of text and numbers.

use tidegate_policy::{printable, printable_lines};
use tidegate_report::table::{align_rows, format_count};

use super::{Report, Run, RunSummary};
use crate::stats::LoadCounts;

/// A column: its title, its meaning, and the content of its cells.
pub(super) type Column = (&'static str, &'static str, fn(&RunSummary) -> String);

/// The columns with numbers.
pub(super) const COLUMNS: [Column; 10] = [
    ("calls", "calls that began", |run| format_count(run.offered)),
    ("succeeded", "share of ended calls that succeeded", |run| format!("{:.1} %", run.success_share * 100.0)),
    ("goodput", "calls that succeeded each second, over the stretch that is measured", |run| {
        format!("{:.1}/s", run.goodput)
    }),
    ("attempts", "attempts that were sent", |run| format_count(run.attempts)),
    ("load", "attempts for each call", |run| format!("{:.2}", run.attempts_per_call)),
    ("throttled", "requests that were refused for a limit or a full queue", |run| format_count(run.throttled)),
    ("busiest", "most requests that came within 100 ms", |run| format_count(run.busiest)),
    ("median", "delay that half of the successful calls kept", |run| format_seconds(run.p50_delay)),
    ("p99", "delay that 99 % of them kept", |run| format_seconds(run.p99_delay)),
    ("end", "when the last call ended", |run| format_seconds(Some(run.elapsed).filter(|secs| *secs > 0.0))),
];

impl Report {
    /// Returns a table for a terminal.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for line in [&self.title, &self.about].into_iter().filter(|line| !line.is_empty()) {
            text.push_str(&format!("{}\n", printable_lines(line)));
        }
        let mut rows: Vec<Vec<String>> = Vec::new();
        for runs in self.runs_by_case() {
            let titles = COLUMNS.iter().map(|(title, ..)| (*title).to_owned());
            rows.push(std::iter::once(printable(case_title(runs)).into_owned()).chain(titles).collect());
            rows.extend(runs.iter().map(|run| {
                let cells = COLUMNS.iter().map(|(.., cell)| cell(&run.summary));
                std::iter::once(printable(&run.strategy).into_owned()).chain(cells).collect()
            }));
        }
        let mut lines = align_rows(&rows, 1).into_iter();
        for runs in self.runs_by_case() {
            text.push_str(&format!("\n{}\n", lines.next().unwrap_or_default()));
            for (run, line) in runs.iter().zip(&mut lines) {
                text.push_str(&format!("{line}\n"));
                text.extend(load_lines(run).iter().map(|line| format!("  {line}\n")));
            }
        }
        let trials = self.runs.iter().map(|run| run.trials).max().unwrap_or(1);
        let means = if trials == 1 { String::new() } else { format!("; means over {trials} trials") };
        format!("{text}\nseed {}{means}\n", self.seed)
    }
}

/// Returns the title of the first column in the table of a case.
pub(super) fn case_title(runs: &[Run]) -> &str {
    runs.first().map(|run| run.case.as_str()).filter(|case| !case.is_empty()).unwrap_or("strategy")
}

/// Returns the counts of each load in the first trial, if there are several loads.
pub(super) fn load_lines(run: &Run) -> Vec<String> {
    if run.loads.len() < 2 {
        return Vec::new();
    }
    let line = |(name, counts): (&String, &LoadCounts)| {
        let (succeeded, offered) = (counts.succeeded as f64, counts.offered as f64);
        let share = succeeded / offered.max(1.0) * 100.0;
        let (succeeded, offered) = (format_count(succeeded), format_count(offered));
        format!("{}: {succeeded} of {offered} calls succeeded, {share:.1} %", printable(name))
    };
    run.loads.iter().zip(&run.first_trial.loads).map(line).collect()
}

/// Formats a time in seconds for a reader; a dash for `None`.
pub(super) fn format_seconds(secs: Option<f64>) -> String {
    let Some(secs) = secs else { return "–".to_owned() };
    match secs {
        secs if secs < 0.01 => format!("{:.2} ms", secs * 1e3),
        secs if secs < 1.0 => format!("{:.0} ms", secs * 1e3),
        secs if secs < 120.0 => format!("{secs:.2} s"),
        secs if secs < 7200.0 => format!("{:.1} min", secs / 60.0),
        secs => format!("{:.1} h", secs / 3600.0),
    }
}
