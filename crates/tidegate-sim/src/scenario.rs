//! A scenario, and the run that makes a report of it.

use crate::report::{Report, Run, RunSummary};
use crate::setup::Setup;
use crate::simulation::Simulation;

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
    /// Runs the scenario. The same seed gives the same report, to the byte. `progress` is called from time to time with
    /// the share of all work that is done, from 0 to 1.
    pub fn run(&self, seed: u64, progress: &mut dyn FnMut(f64)) -> Report {
        let count: u32 = self.setups.iter().map(|setup| setup.trials).sum();
        let mut done = 0_u32;
        let mut runs = Vec::with_capacity(self.setups.len());
        for setup in &self.setups {
            let (mut first_trial, mut summaries) = (None, Vec::new());
            for trial in 0..setup.trials {
                let mut simulation = Simulation::new(setup, seed, trial);
                while simulation.run(EVENTS_PER_PROGRESS_UPDATE) {
                    progress((f64::from(done) + simulation.progress()) / f64::from(count));
                }
                done += 1;
                progress(f64::from(done) / f64::from(count));
                summaries.push(RunSummary::from_stats(&simulation.stats));
                first_trial.get_or_insert(simulation.stats);
            }
            runs.extend(first_trial.map(|stats| Run::new(setup, &summaries, stats)));
        }
        Report { title: self.title.clone(), about: self.about.clone(), seed, runs }
    }
}
