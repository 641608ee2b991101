//! A timed row: subjects that do the same work in turns.

use crate::keys::{KeyDistribution, KeySequence, key_text};
use crate::measure::{MedianRange, Worker, measure_chunk};
use crate::options::Options;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::{LimitTerms, Subject};

/// The answer that every decision of a row must give. Other answers invalidate the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedAnswer {
    /// Admitted from a burst that is partly used.
    Allow,
    /// Admitted from a full burst.
    AllowAtFullBurst,
    /// Refused.
    Deny,
}

/// The work of one row.
pub struct TimedWork {
    /// The row's name.
    pub name: String,
    /// The measured subjects.
    pub subjects: Vec<Box<dyn Subject>>,
    /// The number of keys in the stores.
    pub keys: u32,
    /// The distribution by which keys are drawn.
    pub key_distribution: KeyDistribution,
    /// The number of threads.
    pub threads: usize,
    /// The required answer of every decision.
    pub answer: ExpectedAnswer,
    /// The number of decisions of a chunk on each thread. A chunk takes about 2 ms, so that subjects take turns often.
    pub steps_per_chunk: usize,
}

/// The number of chunks of each subject in a round, taken in turns. The round's figure is their median.
const CHUNKS: usize = 7;

impl TimedWork {
    /// Measures the row.
    pub fn measure(self, options: &Options) -> BenchRow {
        let sequences: Vec<KeySequence> =
            (0..self.threads).map(|thread| KeySequence::new(self.key_distribution, self.keys, thread as u64)).collect();
        let mut row = BenchRow::new(self.name, FigureUnit::Nanoseconds);
        let calls_per_key = match self.answer {
            ExpectedAnswer::Allow | ExpectedAnswer::AllowAtFullBurst => 1,
            ExpectedAnswer::Deny => LimitTerms::TIGHT.burst,
        };
        let mut teams: Vec<SubjectRun<'_>> = Vec::new();
        for subject in &self.subjects {
            if !options.wants_subject(subject.name()) {
                continue;
            }
            let filled = (0..self.keys).all(|index| {
                let key = key_text(index);
                (0..calls_per_key).all(|_| subject.decide_once(&key))
            });
            if !filled {
                row.skipped.push(format!("{}: refuses a first call", subject.name()));
                continue;
            }
            let worker = |sequence| subject.worker(sequence, self.threads);
            teams.push(SubjectRun {
                name: subject.name(),
                workers: sequences.iter().map(worker).collect(),
                chunks: Vec::new(),
                rounds: Vec::new(),
                wrong_answers: 0,
            });
        }
        for round in 0..options.rounds() {
            for turn in 0..CHUNKS {
                for place in 0..teams.len() {
                    let place = (place + turn + round) % teams.len();
                    teams[place].run_chunk(self.steps_per_chunk, self.answer);
                }
            }
            teams.iter_mut().for_each(SubjectRun::close_round);
        }
        for team in teams {
            if team.wrong_answers == 0 {
                row.push(team.name, team.rounds);
            } else {
                let reason = format!("{}: answers {} calls otherwise", team.name, team.wrong_answers);
                row.skipped.push(reason);
            }
        }
        row
    }
}

/// A subject during the measurement, with one worker per thread.
struct SubjectRun<'a> {
    name: &'static str,
    workers: Vec<Box<dyn Worker + 'a>>,
    /// The figures of the present round's chunks.
    chunks: Vec<f64>,
    rounds: Vec<f64>,
    /// The number of answers other than the required one.
    wrong_answers: usize,
}

impl SubjectRun<'_> {
    fn run_chunk(&mut self, steps: usize, answer: ExpectedAnswer) {
        let chunk = measure_chunk(&mut self.workers, steps);
        self.chunks.push(chunk.ns_per_decision);
        self.wrong_answers += match answer {
            ExpectedAnswer::Allow | ExpectedAnswer::AllowAtFullBurst => chunk.steps - chunk.admitted,
            ExpectedAnswer::Deny => chunk.admitted,
        };
    }

    fn close_round(&mut self) {
        self.rounds.extend(MedianRange::of_figures(&self.chunks).map(|spread| spread.median));
        self.chunks.clear();
    }
}
