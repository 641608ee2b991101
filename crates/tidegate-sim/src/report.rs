//! What came of a scenario, in numbers, words and pictures.

mod numbers;

pub use numbers::Numbers;

use crate::setup::Setup;
use crate::tally::Tally;

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
    pub is_ours: bool,
    /// The share of what succeeded before a disturbance that must succeed again.
    pub wanted: f64,
    /// The means over all repetitions.
    pub numbers: Numbers,
    /// What was seen of the first.
    pub tally: Tally,
}

impl Run {
    pub(crate) fn new(setup: &Setup, results: &[Numbers], tally: Tally) -> Self {
        Self {
            case: setup.case.clone(),
            strategy: setup.strategy.clone(),
            loads: setup.loads.iter().map(|load| load.name.clone()).collect(),
            trials: setup.trials,
            is_ours: matches!(setup.client, crate::setup::ClientSpec::Tidegate { .. }),
            wanted: setup.check.share,
            numbers: Numbers::mean(results),
            tally,
        }
    }
}

impl Report {
    /// The run of this case under this strategy, by their titles.
    pub fn run(&self, case: &str, strategy: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.case == case && run.strategy == strategy)
    }
}
