//! A timed row: subjects that do the same work in turns.

use crate::keys::{Draw, Sequence, name};
use crate::measure::{Spread, Worker, chunk};
use crate::options::Options;
use crate::rows::{Row, Unit};
use crate::subjects::{Subject, Terms};

/// What every decision of a row must answer. A row that measured something else is no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Admitted out of a burst that is partly used.
    Allow,
    /// Admitted with the whole burst at hand.
    Rested,
    /// Refused.
    Deny,
}

/// One row's work.
pub struct Work {
    /// The row's name.
    pub name: String,
    /// Who is measured.
    pub subjects: Vec<Box<dyn Subject>>,
    /// How many keys are in the stores.
    pub keys: u32,
    /// How they are drawn.
    pub draw: Draw,
    /// On how many threads.
    pub threads: usize,
    /// What every decision must answer.
    pub answer: Answer,
    /// Decisions of a chunk, on each thread: about two milliseconds' worth, so that subjects take turns often.
    pub steps: usize,
}

/// Chunks of each subject in a round, taken in turns; the round's figure is their median.
const CHUNKS: usize = 7;

impl Work {
    /// Measures the row.
    pub fn measure(self, options: &Options) -> Row {
        let sequences: Vec<Sequence> =
            (0..self.threads).map(|thread| Sequence::new(self.draw, self.keys, thread as u64)).collect();
        let mut row = Row::new(self.name, Unit::Nanoseconds);
        let touches = match self.answer {
            Answer::Allow | Answer::Rested => 1,
            Answer::Deny => Terms::TIGHT.burst,
        };
        let mut teams: Vec<Team<'_>> = Vec::new();
        for subject in &self.subjects {
            if !options.wants_subject(subject.name()) {
                continue;
            }
            let filled = (0..self.keys).all(|index| {
                let key = name(index);
                (0..touches).all(|_| subject.touch(&key))
            });
            if !filled {
                row.skipped.push(format!("{}: refuses a first call", subject.name()));
                continue;
            }
            let worker = |sequence| subject.worker(sequence, self.threads);
            teams.push(Team {
                name: subject.name(),
                workers: sequences.iter().map(worker).collect(),
                chunks: Vec::new(),
                rounds: Vec::new(),
                astray: 0,
            });
        }
        for round in 0..options.rounds() {
            for turn in 0..CHUNKS {
                for place in 0..teams.len() {
                    let place = (place + turn + round) % teams.len();
                    teams[place].play(self.steps, self.answer);
                }
            }
            teams.iter_mut().for_each(Team::close_round);
        }
        for team in teams {
            if team.astray == 0 {
                row.push(team.name, team.rounds);
            } else {
                let reason = format!("{}: answers {} calls otherwise", team.name, team.astray);
                row.skipped.push(reason);
            }
        }
        row
    }
}

/// A subject at work: one worker a thread.
struct Team<'a> {
    name: &'static str,
    workers: Vec<Box<dyn Worker + 'a>>,
    /// Of the round that is played.
    chunks: Vec<f64>,
    rounds: Vec<f64>,
    /// Answers that were not the row's.
    astray: usize,
}

impl Team<'_> {
    fn play(&mut self, steps: usize, answer: Answer) {
        let chunk = chunk(&mut self.workers, steps);
        self.chunks.push(chunk.ns);
        self.astray += match answer {
            Answer::Allow | Answer::Rested => chunk.steps - chunk.admitted,
            Answer::Deny => chunk.admitted,
        };
    }

    fn close_round(&mut self) {
        self.rounds.extend(Spread::of(&self.chunks).map(|spread| spread.median));
        self.chunks.clear();
    }
}
