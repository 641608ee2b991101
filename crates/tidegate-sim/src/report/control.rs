//! A report of the suite `control`: each strategy compared with the oracle.

use tidegate_core::Span;
use tidegate_report::table::align_rows;

use super::table::{case_title, format_seconds};
use super::{Report, Run};

/// The strategy that the others are compared with.
const ORACLE: &str = "oracle";
/// The share of the best goodput, and the multiple of the oracle's 99th percentile, that count as as good.
const GOODPUT_TOLERANCE: f64 = 0.95;
const DELAY_TOLERANCE: f64 = 1.5;
/// The share of the oracle's throughput at which a strategy has settled after a change, and the time for which it
/// counts.
const SETTLED_SHARE: f64 = 0.95;
const SETTLED_WINDOW: f64 = 1.0;

const COLUMNS: [&str; 6] = ["goodput", "median", "p99", "wasted", "settled", "fairness"];

/// The figures of one strategy in one world. Those of the oracle are 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ControlFigures {
    /// The goodput, as a share of the oracle's.
    pub goodput: f64,
    /// The median delay over the oracle's; `None` if nothing succeeded.
    pub p50_delay: Option<f64>,
    /// The 99th percentile of delays over the oracle's.
    pub p99_delay: Option<f64>,
    /// The share of attempts that were refused, timed out or failed.
    pub wasted_share: f64,
    /// The time from the last change of the world until the throughput of a second is at least 95 % of the oracle's
    /// later one, in seconds; `None` if that never happens, or nothing changes.
    pub settled: Option<f64>,
    /// The fairness between clients by their successful calls, from 0 to 1.
    pub fairness: Option<f64>,
}

impl ControlFigures {
    fn of(run: &Run, oracle: &Run) -> Self {
        let ratio = |own: Option<f64>, best: Option<f64>| Some(own? / best?);
        let (own, best) = (&run.summary, &oracle.summary);
        Self {
            goodput: own.goodput / best.goodput,
            p50_delay: ratio(own.measured_p50_delay, best.measured_p50_delay),
            p99_delay: ratio(own.measured_p99_delay, best.measured_p99_delay),
            wasted_share: own.wasted_share,
            settled: settled(run, oracle),
            fairness: own.fairness,
        }
    }

    fn cells(&self) -> [String; COLUMNS.len()] {
        let optional = |value: Option<f64>, format: fn(f64) -> String| value.map_or("–".to_owned(), format);
        let multiple = |value| format!("{value:.2} ×");
        [
            format!("{:.1} %", self.goodput * 100.0),
            optional(self.p50_delay, multiple),
            optional(self.p99_delay, multiple),
            format!("{:.1} %", self.wasted_share * 100.0),
            optional(self.settled, |secs| format!("{secs:.1} s")),
            optional(self.fairness, |fairness| format!("{fairness:.3}")),
        ]
    }
}

/// Returns the calls that succeeded per second, in a second from each bucket after the last change on, with the time
/// from the change.
fn throughputs_after_change(run: &Run) -> impl Iterator<Item = (f64, f64)> {
    let width = run.first_trial.bucket_width.as_secs_f64();
    let change = run.changed_at.map_or(f64::MAX, Span::as_secs_f64);
    let length = (SETTLED_WINDOW / width).ceil().max(1.0);
    let windows = run.first_trial.buckets.windows(length as usize).enumerate();
    windows.filter_map(move |(index, buckets)| {
        let succeeded: u64 = buckets.iter().map(|bucket| bucket.succeeded).sum();
        let after = index as f64 * width - change;
        (after >= 0.0).then_some((after, succeeded as f64 / (length * width)))
    })
}

fn settled(run: &Run, oracle: &Run) -> Option<f64> {
    let (count, sum) =
        throughputs_after_change(oracle).fold((0.0, 0.0), |(count, sum), (_, rate)| (count + 1.0, sum + rate));
    throughputs_after_change(run).find(|(_, rate)| *rate >= SETTLED_SHARE * sum / count).map(|(after, _)| after)
}

impl Report {
    /// Returns the figures of each strategy in each world that has an oracle, with its runs.
    pub fn control_figures(&self) -> impl Iterator<Item = (&[Run], Vec<ControlFigures>)> {
        self.runs_by_case().filter_map(|runs| {
            let oracle = runs.iter().find(|run| run.strategy == ORACLE)?;
            Some((runs, runs.iter().map(|run| ControlFigures::of(run, oracle)).collect()))
        })
    }

    /// Returns a table that compares all strategies with the oracle, world by world, and a summary of those of the kind
    /// `tidegate`.
    pub fn control_table(&self) -> String {
        let worlds: Vec<_> = self.control_figures().collect();
        let mut rows = Vec::new();
        for (runs, figures) in &worlds {
            let titles = std::iter::once(case_title(runs)).chain(COLUMNS);
            rows.push(titles.map(str::to_owned).collect::<Vec<_>>());
            let strategies = runs.iter().zip(figures);
            rows.extend(strategies.map(|(run, own)| [vec![run.strategy.clone()], own.cells().to_vec()].concat()));
        }
        let mut text = format!("{}\n{}\n", self.title, self.about);
        let mut lines = align_rows(&rows, 1).into_iter();
        for (runs, _) in &worlds {
            text.push('\n');
            text.extend(lines.by_ref().take(runs.len() + 1).map(|line| format!("{line}\n")));
            let oracle = runs.iter().find(|run| run.strategy == ORACLE).map(|run| run.summary).unwrap_or_default();
            let (median, p99) = (format_seconds(oracle.measured_p50_delay), format_seconds(oracle.measured_p99_delay));
            text.push_str(&format!("  the oracle: {:.1}/s, median {median}, p99 {p99}\n", oracle.goodput));
        }
        format!("{text}\n{}seed {}\n", summary(&worlds), self.seed)
    }
}

/// Returns the number of worlds in which strategies of the kind `tidegate` are as good as the best, and the others.
fn summary(worlds: &[(&[Run], Vec<ControlFigures>)]) -> String {
    let (mut slow, mut late) = (Vec::new(), Vec::new());
    for (runs, figures) in worlds {
        let strategies = || runs.iter().zip(figures);
        let rivals = strategies().filter(|(run, _)| run.strategy != ORACLE).map(|(_, own)| own.goodput);
        let best = rivals.fold(0.0, f64::max);
        for (_, own) in strategies().filter(|(run, _)| run.uses_tidegate) {
            if own.goodput < GOODPUT_TOLERANCE * best {
                slow.push(case_title(runs));
            }
            if own.p99_delay.is_none_or(|delay| delay > DELAY_TOLERANCE) {
                late.push(case_title(runs));
            }
        }
    }
    let line = |claim: &str, missed: &[&str]| {
        let missing = if missed.is_empty() { String::new() } else { format!("; not: {}", missed.join(", ")) };
        format!("tidegate: {claim} in {} of {} worlds{missing}\n", worlds.len() - missed.len(), worlds.len())
    };
    let goodput = line("goodput within 5 % of the best", &slow);
    format!("{goodput}{}", line("p99 within 1.5 times the oracle's", &late))
}
