//! The results of a scenario, as numbers, text and pictures.

mod control;
mod html;
mod json;
mod picture;
mod summary;
mod table;

pub use control::ControlFigures;
pub use summary::RunSummary;
pub use tidegate_report::svg::PictureError;

use tidegate_core::Span;

use crate::setup::{ClientSpec, Setup};
use crate::stats::RunStats;

/// The results of a scenario.
#[derive(Clone, Debug)]
pub struct Report {
    /// The scenario's title.
    pub title: String,
    /// The description of what it shows.
    pub about: String,
    /// The seed of its random numbers.
    pub seed: u64,
    /// Every case under every strategy, in the order of the cases.
    pub runs: Vec<Run>,
}

/// The results of one case under one strategy.
#[derive(Clone, Debug)]
pub struct Run {
    /// The name of the case; empty if there is only one.
    pub case: String,
    /// The name of the strategy.
    pub strategy: String,
    /// The names of the loads, in the order of [`RunStats::loads`].
    pub loads: Vec<String>,
    /// The number of repetitions.
    pub trials: u32,
    /// True if its clients run Tidegate's production code.
    pub uses_tidegate: bool,
    /// The time of the last change of the world, from the run's start; `None` if it never changes.
    pub changed_at: Option<Span>,
    /// The least ratio of the share of calls that succeed after a disturbance to the share before it, from 0 to 1.
    pub required_share: f64,
    /// The shares of calls that succeeded before the first disturbance, and after the last plus the recovery time. They
    /// are of the repetition with the worst ratio: a mean would hide a collapsed repetition behind the others. `None`
    /// if nothing disturbs, or too little time is left.
    pub worst_trial: Option<(f64, f64)>,
    /// The means over all repetitions.
    pub summary: RunSummary,
    /// The statistics of the first repetition.
    pub first_trial: RunStats,
}

impl Run {
    pub(crate) fn new(setup: &Setup, summaries: &[RunSummary], first_trial: RunStats) -> Self {
        Self {
            case: setup.case.clone(),
            strategy: setup.strategy.clone(),
            loads: setup.loads.iter().map(|load| load.name.clone()).collect(),
            trials: setup.trials,
            uses_tidegate: matches!(setup.client, ClientSpec::Tidegate { .. }),
            changed_at: setup.disturbance_range().map(|(_, last)| last),
            required_share: setup.recovery_check.share,
            worst_trial: worst_trial(summaries, setup.recovery_check.share),
            summary: RunSummary::mean_of(summaries),
            first_trial,
        }
    }

    /// Returns true if its goodput recovered after the last disturbance in every repetition. `None` if nothing
    /// disturbs, too little time is left, or nothing succeeded before.
    pub fn recovered(&self) -> Option<bool> {
        let (before, after) = self.worst_trial.filter(|(before, _)| *before > 0.0)?;
        Some(after >= self.required_share * before.min(1.0))
    }
}

/// Returns the success shares of the worst repetition. One without any success before the disturbance ranks between
/// those that failed to recover and those that recovered.
fn worst_trial(summaries: &[RunSummary], required_share: f64) -> Option<(f64, f64)> {
    let shares = summaries.iter().filter_map(|trial| trial.success_share_before.zip(trial.success_share_after));
    let ratio = |(before, after): (f64, f64)| if before > 0.0 { after / before.min(1.0) } else { required_share };
    shares.min_by(|one, other| ratio(*one).total_cmp(&ratio(*other)).then((one.0 > 0.0).cmp(&(other.0 > 0.0))))
}

impl Report {
    /// Returns the runs that `--check` looks at: those of `tidegate` clients, or all if there are none.
    pub fn checked_runs(&self) -> impl Iterator<Item = &Run> {
        let any = self.runs.iter().any(|run| run.uses_tidegate);
        self.runs.iter().filter(move |run| run.uses_tidegate || !any)
    }

    /// Returns the run of this case under this strategy, by their titles.
    pub fn run(&self, case: &str, strategy: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.case == case && run.strategy == strategy)
    }

    fn runs_by_case(&self) -> impl Iterator<Item = &[Run]> {
        self.runs.chunk_by(|one, other| one.case == other.case)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_trials_rank_before_inconclusive_ones() {
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
