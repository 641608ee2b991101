//! The lanes in which calls wait, while many do.

use crate::measure::{Spread, on, preemptions};
use crate::options::Options;
use crate::rows::{Row, Unit};
use crate::subjects::OURS;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use std::hint::black_box;
use std::time::Instant;
use tidegate::core::lanes::MAX_WAITING;
use tidegate::core::{Lane, LaneSpec, Lanes, LanesSpec, Ticket, Turn};
use tidegate::{Span, Time};

/// Calls that wait.
const MANY: usize = 100_000;
/// Calls that wait where the growth of the cost begins.
const FEW: usize = 1_000;

/// What is done to calls that wait, as the rows name it.
const NAMES: [&str; 3] = ["enqueue", "cancel", "wake"];

/// Chunks of a round; its figure is their median.
const CHUNKS: usize = 7;
/// How often a chunk is measured again when its thread lost its core meanwhile.
const REPEATS: usize = 4;

const NOW: Time = Time::from_secs(1_767_225_600);

/// Measures the rows of the lanes that the options ask for. All are measured together, so one of them brings the others.
pub fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    let growth = "outbound/lanes/growth".to_owned();
    let names = NAMES.map(|name| format!("outbound/lanes/{name}"));
    if !options.wants_subject(OURS) || !names.iter().chain([&growth]).any(|name| options.wants(name)) {
        return;
    }
    let rounds = on(usize::MAX, || rounds(options.rounds()));
    for (place, name) in names.into_iter().enumerate() {
        let mut row = Row::new(name, Unit::Nanoseconds);
        row.push(OURS, rounds.iter().map(|round| round.many[place]).collect());
        row.push("tidegate (1k waiting)", rounds.iter().map(|round| round.few[place]).collect());
        done(row);
    }
    let mut row = Row::new(growth, Unit::Times);
    let grown = |round: &Round| (0..NAMES.len()).map(|place| round.many[place] / round.few[place]).fold(0.0, f64::max);
    row.push(OURS, rounds.iter().map(grown).collect());
    done(row);
}

/// Nanoseconds an operation, in the order of [`NAMES`].
struct Round {
    many: [f64; NAMES.len()],
    few: [f64; NAMES.len()],
}

fn rounds(count: usize) -> Vec<Round> {
    let (mut many, mut few) = (Queue::new(MANY), Queue::new(FEW));
    (0..count).map(|_| Round { many: many.round(), few: few.round() }).collect()
}

/// Lanes with calls in them, and what is done to them next.
struct Queue {
    lanes: Lanes,
    waiting: Vec<Ticket>,
    /// Lanes and deadlines of the calls that come next, drawn beforehand.
    coming: Vec<(Lane, Time)>,
    rng: SmallRng,
}

impl Queue {
    fn new(waiting: usize) -> Self {
        let lane = LaneSpec { max_waiting: MAX_WAITING, ..LaneSpec::default() };
        let lanes = Lanes::new(LanesSpec { lanes: [lane; 3], ..LanesSpec::default() });
        let mut queue = Self { lanes, waiting: Vec::new(), coming: Vec::new(), rng: SmallRng::seed_from_u64(7) };
        queue.draw(waiting);
        queue.enqueue();
        queue
    }

    /// A tenth of what waits, at a time: it waits again when the round is over.
    fn round(&mut self) -> [f64; NAMES.len()] {
        let batch = self.waiting.len() / 10;
        let mut chunks = [const { Vec::new() }; NAMES.len()];
        for _ in 0..CHUNKS {
            let mut chunk = self.chunk(batch);
            for _ in 0..REPEATS {
                if chunk.1 == 0 {
                    break;
                }
                chunk = self.chunk(batch);
            }
            for (chunks, figure) in chunks.iter_mut().zip(chunk.0) {
                chunks.push(figure);
            }
        }
        chunks.map(|chunks| Spread::of(&chunks).expect("a round has chunks").median)
    }

    /// The figures, and how often the core was lost meanwhile.
    fn chunk(&mut self, batch: usize) -> ([f64; NAMES.len()], u64) {
        let lost = preemptions();
        self.draw(batch);
        let enqueue = timed(batch, || self.enqueue());
        self.waiting.shuffle(&mut self.rng);
        let leaving = self.waiting.split_off(self.waiting.len() - batch);
        let cancel = timed(batch, || {
            for ticket in leaving {
                assert!(self.lanes.cancel(black_box(ticket)), "it waits");
            }
        });
        let mut woken = Vec::with_capacity(batch);
        let wake = timed(batch, || {
            for _ in 0..batch {
                let Turn::Ask(ticket) = self.lanes.poll(NOW) else { panic!("somebody waits") };
                let lane = self.lanes.granted(ticket, NOW).expect("it waits");
                self.lanes.ended(lane);
                woken.push(ticket);
            }
        });
        let lost = preemptions() - lost;
        woken.sort_unstable_by_key(|ticket| ticket.index());
        self.waiting.retain(|ticket| woken.binary_search_by_key(&ticket.index(), |ticket| ticket.index()).is_err());
        self.draw(batch);
        self.enqueue();
        ([enqueue, cancel, wake], lost)
    }

    fn draw(&mut self, count: usize) {
        let rng = &mut self.rng;
        self.coming.extend((0..count).map(|_| {
            let lane = Lane::ALL[rng.random_range(0..Lane::ALL.len())];
            (lane, NOW + Span::from_millis(rng.random_range(1..60_000)))
        }));
        self.waiting.reserve(count);
    }

    fn enqueue(&mut self) {
        for (lane, deadline) in self.coming.drain(..) {
            self.waiting.push(self.lanes.enqueue(lane, 1, deadline, NOW).expect("there is room"));
        }
    }
}

fn timed(count: usize, work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_nanos() as f64 / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_leaves_as_many_waiting_as_it_found() {
        let mut queue = Queue::new(1_000);
        let figures = queue.round();
        assert!(figures.iter().all(|ns| *ns > 0.0), "{figures:?}");
        let waiting: usize = Lane::ALL.iter().map(|lane| queue.lanes.waiting(*lane)).sum();
        assert_eq!((waiting, queue.waiting.len()), (1_000, 1_000));
        assert!(queue.waiting.clone().into_iter().all(|ticket| queue.lanes.cancel(ticket)), "each of them is known");
    }
}
