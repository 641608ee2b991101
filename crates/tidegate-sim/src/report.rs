//! What came of a scenario, in numbers, words and pictures.

mod html;
mod json;
mod picture;
mod summary;
mod table;

pub use summary::RunSummary;
pub use tidegate_report::svg::PictureError;
use tidegate_report::svg::svg_to_png;

use crate::setup::Setup;
use crate::stats::RunStats;

/// What came of a scenario.
#[derive(Clone, Debug)]
pub struct Report {
    /// The scenario's title.
    pub title: String,
    /// What it shows.
    pub about: String,
    /// The seed of its random numbers.
    pub seed: u64,
    /// Every case under every strategy, case by case.
    pub runs: Vec<Run>,
}

/// What came of one case under one strategy.
#[derive(Clone, Debug)]
pub struct Run {
    /// The case; empty if there is but one.
    pub case: String,
    /// The strategy.
    pub strategy: String,
    /// The loads' names, in the order of the tally's.
    pub loads: Vec<String>,
    /// How often it was repeated.
    pub trials: u32,
    /// Whether its clients are the production machine.
    pub uses_tidegate: bool,
    /// The share of what succeeded before a disturbance that must succeed again.
    pub required_share: f64,
    /// Which shares of calls succeeded before the first disturbance and after the last, and the time for recovering from it,
    /// in the repetition in which the second is the worst compared with the first; `None` where nothing disturbs, or too
    /// little time is left to tell. A mean would hide a repetition that collapses behind those that don't.
    pub worst_trial: Option<(f64, f64)>,
    /// The means over all repetitions.
    pub summary: RunSummary,
    /// What was seen of the first.
    pub first_trial: RunStats,
}

impl Run {
    pub(crate) fn new(setup: &Setup, results: &[RunSummary], tally: RunStats) -> Self {
        Self {
            case: setup.case.clone(),
            strategy: setup.strategy.clone(),
            loads: setup.loads.iter().map(|load| load.name.clone()).collect(),
            trials: setup.trials,
            uses_tidegate: matches!(setup.client, crate::setup::ClientSpec::Tidegate { .. }),
            required_share: setup.recovery_check.share,
            worst_trial: worst_trial(results, setup.recovery_check.share),
            summary: RunSummary::mean_of(results),
            first_trial: tally,
        }
    }
}

impl Run {
    /// Whether its goodput recovered after the last disturbance in every repetition; `None` where nothing disturbs, too little
    /// time is left to tell, or nothing succeeded before.
    pub fn recovered(&self) -> Option<bool> {
        let (before, after) = self.worst_trial.filter(|(before, _)| *before > 0.0)?;
        Some(after >= self.required_share * before.min(1.0))
    }
}

/// The repetition that says most against a recovery. One in which nothing ever worked says nothing, and comes between those
/// that failed and those that didn't.
fn worst_trial(results: &[RunSummary], wanted: f64) -> Option<(f64, f64)> {
    let known =
        results.iter().filter_map(|numbers| Some((numbers.success_share_before?, numbers.success_share_after?)));
    let kept = |(before, after): (f64, f64)| if before > 0.0 { after / before.min(1.0) } else { wanted };
    known.min_by(|one, other| kept(*one).total_cmp(&kept(*other)).then((one.0 > 0.0).cmp(&(other.0 > 0.0))))
}

impl Report {
    /// The runs that `--check` is about: those of production's machine, or all if there is none.
    pub fn checked_runs(&self) -> impl Iterator<Item = &Run> {
        let any = self.runs.iter().any(|run| run.uses_tidegate);
        self.runs.iter().filter(move |run| run.uses_tidegate || !any)
    }

    /// A table for a terminal.
    pub fn table(&self) -> String {
        table::text_table(self)
    }

    /// All numbers, as JSON.
    pub fn json(&self) -> String {
        json::to_json(self)
    }

    /// A page of table and pictures that needs no network, light or dark as its reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    pub fn html(&self) -> Result<String, PictureError> {
        html::to_html(self)
    }

    /// The pictures, light or dark as their reader prefers.
    ///
    /// # Errors
    /// They couldn't be drawn.
    pub fn svg(&self) -> Result<String, PictureError> {
        picture::report_svg(self, picture::Heading::Included)
    }

    /// The pictures in light colours.
    ///
    /// # Errors
    /// They couldn't be drawn, or are too large.
    pub fn png(&self) -> Result<Vec<u8>, PictureError> {
        svg_to_png(&self.svg()?)
    }

    /// The run of this case under this strategy, by their titles.
    pub fn run(&self, case: &str, strategy: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.case == case && run.strategy == strategy)
    }
}

/// The runs of each case.
fn runs_by_case(report: &Report) -> Vec<&[Run]> {
    report.runs.chunk_by(|one, other| one.case == other.case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_repetition_is_told_and_one_that_says_nothing_hides_none() {
        let of = |(before, after)| RunSummary {
            success_share_before: Some(before),
            success_share_after: Some(after),
            ..RunSummary::default()
        };
        let (good, bad, dead) = ((1.0, 0.95), (0.5, 0.1), (0.0, 0.0));
        for (trials, expected) in [
            (&[good, bad, good][..], Some(bad)),
            (&[good, dead, bad], Some(bad)),
            (&[good, dead, (1.0, 0.9)], Some(dead)),
            (&[good, (0.8, 0.8)], Some(good)),
            (&[], None),
        ] {
            let results: Vec<RunSummary> = trials.iter().copied().map(of).collect();
            assert_eq!(worst_trial(&results, 0.9), expected, "{trials:?}");
        }
        assert_eq!(worst_trial(&[RunSummary::default()], 0.9), None);
    }
}
