//! A scenario, and the run that makes a report of it.

use tidegate_policy::Errors;

use crate::report::{Report, Run};
use crate::setup::Setup;
use crate::simulation::Simulation;
use crate::stats::RunStats;

/// The number of events between two progress updates.
const EVENTS_PER_PROGRESS_UPDATE: u64 = 100_000;

/// A simulated world with its load, in each of its cases under each of its strategies.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The title; empty if it has none.
    pub title: String,
    /// The description of what it shows; empty if it has none.
    pub about: String,
    /// The seed of its random numbers, unless the caller of [`Scenario::run`] gives another. Default 1.
    pub seed: u64,
    /// Every case under every strategy, in the order of the cases.
    pub setups: Vec<Setup>,
}

impl Scenario {
    /// Reads a scenario; see `docs/simulate.md` for its words. Errors call the text `name`.
    ///
    /// # Errors
    /// All errors of the text, each with its place and, if there is one, the nearest name that is valid.
    pub fn read(name: &str, body: &[u8]) -> Result<Self, Errors> {
        crate::read::read_scenario(name, body)
    }

    /// Runs the scenario. The same seed gives the same report, to the byte. `progress` is called from time to time with
    /// the share of all work that is done, from 0 to 1.
    pub fn run(&self, seed: u64, progress: &mut dyn FnMut(f64)) -> Report {
        let count: u32 = self.setups.iter().map(|setup| setup.trials).sum();
        let mut done = 0_u32;
        let mut runs = Vec::with_capacity(self.setups.len());
        for setup in &self.setups {
            let mut tallies = Vec::with_capacity(1);
            let mut results = Vec::new();
            for trial in 0..setup.trials {
                let mut world = Simulation::new(setup, seed, trial);
                while world.run(EVENTS_PER_PROGRESS_UPDATE) {
                    progress((f64::from(done) + world.progress()) / f64::from(count));
                }
                done += 1;
                progress(f64::from(done) / f64::from(count));
                let tally: RunStats = world.into_stats();
                results.push(crate::report::RunSummary::from_stats(&tally));
                if tallies.is_empty() {
                    tallies.push(tally);
                }
            }
            runs.extend(tallies.pop().map(|tally| Run::new(setup, &results, tally)));
        }
        Report { title: self.title.clone(), about: self.about.clone(), seed, runs }
    }
}
