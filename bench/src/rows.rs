//! The rows of the table: the figures of one piece of work, Tidegate's beside those of the rivals.

use crate::measure::MedianRange;
use crate::subjects::OURS;
use crate::targets::{self, TargetBound};
use std::fmt::{self, Display, Formatter};

/// The unit of a row's figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FigureUnit {
    /// Nanoseconds.
    Nanoseconds,
    /// Bytes.
    Bytes,
    /// Mebibytes.
    Mebibytes,
    /// CPU seconds per 100,000 requests.
    CpuSeconds,
    /// Requests per second.
    Requests,
    /// A plain count.
    Count,
    /// Allocations per call.
    Allocations,
    /// One figure divided by another.
    Ratio,
    /// Per cent.
    Percent,
}

impl FigureUnit {
    fn format(self, figure: f64) -> String {
        match self {
            Self::Nanoseconds if figure >= 1e6 => format!("{:.2} ms", figure / 1e6),
            Self::Nanoseconds if figure >= 1e4 => format!("{:.1} µs", figure / 1e3),
            Self::Nanoseconds => format!("{figure:.1} ns"),
            Self::Bytes => format!("{figure:.1} B"),
            Self::Mebibytes => format!("{figure:.1} MiB"),
            Self::CpuSeconds => format!("{figure:.3} s"),
            Self::Requests => format!("{:.1}k/s", figure / 1e3),
            Self::Count => format!("{figure:.0}"),
            Self::Allocations => format!("{figure:.2}"),
            Self::Ratio => format!("{figure:.1} ×"),
            Self::Percent => format!("{figure:.2} %"),
        }
    }
}

/// The figures of one subject, one per round.
#[derive(Clone, Debug)]
pub struct SubjectFigures {
    /// The subject's name.
    pub subject: String,
    /// One figure per round, in the row's unit. All subjects of a row have the same rounds.
    pub rounds: Vec<f64>,
}

/// One piece of work, with its figures.
#[derive(Clone, Debug)]
pub struct BenchRow {
    /// The name, `part/work/…`, as `--filter` and the targets use it.
    pub name: String,
    /// The unit of the figures.
    pub unit: FigureUnit,
    /// The figures of every measured subject.
    pub figures: Vec<SubjectFigures>,
    /// The reasons for which figures are missing, if any are.
    pub skipped: Vec<String>,
}

/// The result of comparing a row with its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetResult {
    /// The row has no target.
    NoTarget,
    /// The target is reached.
    Reached,
    /// The target is missed, or could not be determined.
    Missed,
}

impl BenchRow {
    /// Creates a row without figures.
    pub fn new(name: impl Into<String>, unit: FigureUnit) -> Self {
        Self { name: name.into(), unit, figures: Vec::new(), skipped: Vec::new() }
    }

    /// Adds a subject's figures.
    pub fn push(&mut self, subject: &str, rounds: Vec<f64>) {
        self.figures.push(SubjectFigures { subject: subject.to_owned(), rounds });
    }

    fn rounds_of(&self, subject: &str) -> Option<&[f64]> {
        let of = self.figures.iter().find(|figures| figures.subject == subject)?;
        Some(&of.rounds)
    }

    /// Returns Tidegate's figures divided by a rival's, round by round; `None` if either was not measured.
    pub fn ratio(&self, rival: &str) -> Option<MedianRange> {
        let (ours, rivals) = (self.rounds_of(OURS)?, self.rounds_of(rival)?);
        let ratios: Vec<f64> = ours.iter().zip(rivals).map(|(ours, rival)| ours / rival).collect();
        MedianRange::of_figures(&ratios)
    }

    /// Returns the result of the row's target. `scale` is the cost of a clock read here, divided by that on the
    /// reference machine.
    pub fn target_result(&self, scale: f64) -> TargetResult {
        let median = || self.rounds_of(OURS).and_then(MedianRange::of_figures).map(|spread| spread.median);
        let is_reached = |bound| match bound {
            TargetBound::Ratio(rival, at_most) => self.ratio(rival).is_some_and(|ratio| ratio.median <= at_most),
            TargetBound::RatioAtLeast(rival, at_least) => {
                self.ratio(rival).is_some_and(|ratio| ratio.median >= at_least)
            }
            TargetBound::Nanoseconds(at_most) => median().is_some_and(|median| median <= at_most * scale),
            TargetBound::AtMost(at_most) => median().is_some_and(|median| median <= at_most),
            TargetBound::AtLeast(at_least) => median().is_some_and(|median| median >= at_least),
        };
        let reached: Vec<bool> = targets::bounds_of(&self.name).map(is_reached).collect();
        match &*reached {
            [] => TargetResult::NoTarget,
            reached if reached.iter().all(|reached| *reached) => TargetResult::Reached,
            _ => TargetResult::Missed,
        }
    }

    fn target_text(&self, scale: f64) -> String {
        let text = |bound| match bound {
            TargetBound::Ratio(rival, at_most) => format!("≤ {at_most} × {rival}"),
            TargetBound::RatioAtLeast(rival, at_least) => format!("≥ {at_least} × {rival}"),
            TargetBound::Nanoseconds(at_most) => {
                format!("≤ {}", FigureUnit::Nanoseconds.format(at_most * scale))
            }
            TargetBound::AtMost(at_most) => format!("≤ {}", self.unit.format(at_most)),
            TargetBound::AtLeast(at_least) => format!("≥ {}", self.unit.format(at_least)),
        };
        let texts: Vec<String> = targets::bounds_of(&self.name).map(text).collect();
        if texts.is_empty() { "–".to_owned() } else { texts.join(", ") }
    }
}

/// Rows as a table of text, which is valid Markdown as well.
pub struct BenchTable<'a> {
    /// The rows to show.
    pub rows: &'a [BenchRow],
    /// The `scale` of [`BenchRow::target_result`].
    pub clock_scale: f64,
}

const HEADERS: [&str; 6] = ["work", "subject", "median (min–max)", "ours / it", "reach", ""];

impl BenchTable<'_> {
    fn lines(&self) -> Vec<[String; 6]> {
        let mut lines = Vec::new();
        for row in self.rows {
            let mut name = row.name.clone();
            let mut reach = row.target_text(self.clock_scale);
            let mut admission = match row.target_result(self.clock_scale) {
                TargetResult::NoTarget => String::new(),
                TargetResult::Reached => "reached".to_owned(),
                TargetResult::Missed => "MISSED".to_owned(),
            };
            for figures in &row.figures {
                let Some(spread) = MedianRange::of_figures(&figures.rounds) else {
                    continue;
                };
                let figure = format!(
                    "{} ({}–{})",
                    row.unit.format(spread.median),
                    row.unit.format(spread.min),
                    row.unit.format(spread.max)
                );
                let ratio = row.ratio(&figures.subject).filter(|_| figures.subject != OURS);
                // 0 divided by 0, such as no allocations, has no ratio.
                let ratio = ratio.filter(|ratio| ratio.median.is_finite());
                let ratio = ratio.map_or_else(String::new, |ratio| {
                    format!("{:.2} ({:.2}–{:.2})", ratio.median, ratio.min, ratio.max)
                });
                lines.push([
                    std::mem::take(&mut name),
                    figures.subject.clone(),
                    figure,
                    ratio,
                    std::mem::take(&mut reach),
                    std::mem::take(&mut admission),
                ]);
            }
            for skipped in &row.skipped {
                lines.push([
                    std::mem::take(&mut name),
                    format!("skipped: {skipped}"),
                    String::new(),
                    String::new(),
                    std::mem::take(&mut reach),
                    std::mem::take(&mut admission),
                ]);
            }
        }
        lines
    }
}

impl Display for BenchTable<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let head = HEADERS.map(str::to_owned);
        let lines = self.lines();
        let widths: Vec<usize> = (0..HEADERS.len())
            .map(|column| {
                let all = std::iter::once(&head).chain(&lines);
                all.map(|line| line[column].chars().count()).max().unwrap_or(0)
            })
            .collect();
        let write = |f: &mut Formatter<'_>, line: &[String; 6]| {
            for (cell, width) in line.iter().zip(&widths) {
                write!(f, "| {cell:<width$} ")?;
            }
            writeln!(f, "|")
        };
        write(f, &head)?;
        for width in &widths {
            write!(f, "| {} ", "-".repeat((*width).max(3)))?;
        }
        writeln!(f, "|")?;
        lines.iter().try_for_each(|line| write(f, line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, ours: &[f64], governor: &[f64]) -> BenchRow {
        let mut row = BenchRow::new(name, FigureUnit::Nanoseconds);
        row.push(OURS, ours.to_vec());
        row.push("governor", governor.to_vec());
        row
    }

    #[test]
    fn ratios_are_computed_per_round() {
        let row = row("x", &[1.0, 20.0, 3.0], &[2.0, 10.0, 3.0]);
        let ratio = row.ratio("governor").expect("both were measured");
        assert_eq!((ratio.min, ratio.median, ratio.max), (0.5, 1.0, 2.0));
        assert_eq!(row.target_result(1.0), TargetResult::NoTarget);
    }

    #[test]
    fn a_target_is_reached_or_missed() {
        let name = "decision/one/allow/T1";
        assert_eq!(row(name, &[9.0], &[10.0]).target_result(1.0), TargetResult::Reached);
        assert_eq!(row(name, &[9.1], &[10.0]).target_result(1.0), TargetResult::Missed);
    }

    #[test]
    fn an_unmeasured_target_is_missed() {
        let mut row = BenchRow::new("decision/1k/uniform/allow/T1", FigureUnit::Nanoseconds);
        row.push("governor", vec![1.0]);
        assert_eq!(row.target_result(1.0), TargetResult::Missed);
    }

    #[test]
    fn absolute_times_scale_with_the_clock() {
        let name = "decision/inbound/T1";
        assert_eq!(row(name, &[300.0], &[]).target_result(1.0), TargetResult::Missed);
        assert_eq!(row(name, &[300.0], &[]).target_result(1.5), TargetResult::Reached);
    }

    #[test]
    fn the_table_names_a_row_once() {
        let rows = [row("decision/inbound/T1", &[300.0], &[600.0])];
        let table = BenchTable { rows: &rows, clock_scale: 1.0 }.to_string();
        assert_eq!(table.matches("decision/inbound/T1").count(), 1);
        assert!(table.contains("300.0 ns (300.0 ns–300.0 ns)"), "{table}");
        assert!(table.contains("0.50 (0.50–0.50)"), "{table}");
        assert!(table.contains("MISSED"), "{table}");
    }
}
