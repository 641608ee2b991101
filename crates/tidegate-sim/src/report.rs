//! What came of a scenario, in numbers, words and pictures.

mod chart;
mod html;
mod json;
mod numbers;
mod picture;
mod replay;
mod table;
mod theme;

pub use numbers::Numbers;
pub use picture::PictureError;

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

impl Run {
    /// Whether its goodput recovered after the last disturbance; `None` where nothing disturbs, or too little time is left
    /// to tell.
    pub fn recovered(&self) -> Option<bool> {
        Some(self.numbers.after? >= self.wanted * self.numbers.before?.min(1.0))
    }
}

impl Report {
    /// The runs that `--check` is about: those of production's machine, or all if there is none.
    pub fn checked(&self) -> impl Iterator<Item = &Run> {
        let any = self.runs.iter().any(|run| run.is_ours);
        self.runs.iter().filter(move |run| run.is_ours || !any)
    }

    /// A table for a terminal.
    pub fn table(&self) -> String {
        table::table(self)
    }

    /// All numbers, as JSON.
    pub fn json(&self) -> String {
        json::json(self)
    }

    /// A page of table and pictures that needs no network, light or dark as its reader prefers.
    ///
    /// # Errors
    /// The pictures couldn't be drawn.
    pub fn html(&self) -> Result<String, PictureError> {
        html::html(self)
    }

    /// The pictures, light or dark as their reader prefers.
    ///
    /// # Errors
    /// They couldn't be drawn.
    pub fn svg(&self) -> Result<String, PictureError> {
        picture::svg(self, picture::Heading::Own)
    }

    /// The pictures in light colours.
    ///
    /// # Errors
    /// They couldn't be drawn, or are too large.
    pub fn png(&self) -> Result<Vec<u8>, PictureError> {
        picture::png(self)
    }

    /// The run of this case under this strategy, by their titles.
    pub fn run(&self, case: &str, strategy: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.case == case && run.strategy == strategy)
    }
}
