//! Measures the lanes in which calls wait, with many waiting calls.

use crate::measure::{MedianRange, preemptions, run_on_core};
use crate::options::Options;
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use std::hint::black_box;
use std::time::Instant;
use tidegate::{Span, Time};
use tidegate_core::lanes::MAX_WAITING;
use tidegate_core::{Lane, LaneSpec, Lanes, LanesSpec, QueueStep, Ticket};

/// The number of waiting calls.
const MANY: usize = 100_000;
/// The number of waiting calls with which the growth of the cost is compared.
const FEW: usize = 1_000;

/// The measured operations, as the rows name them.
const NAMES: [&str; 3] = ["enqueue", "cancel", "wake"];

/// The number of chunks of a round; the round's figure is their median.
const CHUNKS: usize = 7;
/// The largest number of repeats of a chunk if its thread lost its core.
const REPEATS: usize = 4;

const NOW: Time = Time::from_secs(1_767_225_600);

/// Measures the rows of the lanes that the options select. All are measured together, so selecting one of them brings
/// the others.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let growth = "outbound/lanes/growth".to_owned();
    let names = NAMES.map(|name| format!("outbound/lanes/{name}"));
    if !options.wants_subject(OURS) || !names.iter().chain([&growth]).any(|name| options.wants(name)) {
        return;
    }
    let rounds = run_on_core(usize::MAX, || measure_rounds(options.rounds()));
    for (place, name) in names.into_iter().enumerate() {
        let mut row = BenchRow::new(name, FigureUnit::Nanoseconds);
        row.push(OURS, rounds.iter().map(|round| round.many[place]).collect());
        row.push("tidegate (1k waiting)", rounds.iter().map(|round| round.few[place]).collect());
        on_row(row);
    }
    let mut row = BenchRow::new(growth, FigureUnit::Ratio);
    let grown =
        |round: &LaneRound| (0..NAMES.len()).map(|place| round.many[place] / round.few[place]).fold(0.0, f64::max);
    row.push(OURS, rounds.iter().map(grown).collect());
    on_row(row);
}

/// Nanoseconds per operation, in the order of [`NAMES`].
struct LaneRound {
    many: [f64; NAMES.len()],
    few: [f64; NAMES.len()],
}

fn measure_rounds(count: usize) -> Vec<LaneRound> {
    let (mut many, mut few) = (LanesUnderLoad::new(MANY), LanesUnderLoad::new(FEW));
    (0..count).map(|_| LaneRound { many: many.measure_round(), few: few.measure_round() }).collect()
}

/// Lanes with waiting calls, and the calls to add next.
struct LanesUnderLoad {
    lanes: Lanes,
    waiting: Vec<Ticket>,
    /// The lanes and deadlines of the next calls, drawn beforehand.
    next_calls: Vec<(Lane, Time)>,
    rng: SmallRng,
}

impl LanesUnderLoad {
    fn new(waiting: usize) -> Self {
        let lane = LaneSpec { max_waiting: MAX_WAITING, ..LaneSpec::default() };
        let lanes = Lanes::new(LanesSpec { lanes: [lane; 3], ..LanesSpec::default() });
        let mut queue = Self { lanes, waiting: Vec::new(), next_calls: Vec::new(), rng: SmallRng::seed_from_u64(7) };
        queue.draw_calls(waiting);
        queue.enqueue();
        queue
    }

    /// Measures one round, on a tenth of the waiting calls at a time. As many wait again when the round is over.
    fn measure_round(&mut self) -> [f64; NAMES.len()] {
        let batch = self.waiting.len() / 10;
        let mut chunks = [const { Vec::new() }; NAMES.len()];
        for _ in 0..CHUNKS {
            let mut chunk = self.measure_chunk(batch);
            for _ in 0..REPEATS {
                if chunk.1 == 0 {
                    break;
                }
                chunk = self.measure_chunk(batch);
            }
            for (chunks, figure) in chunks.iter_mut().zip(chunk.0) {
                chunks.push(figure);
            }
        }
        chunks.map(|chunks| MedianRange::of_figures(&chunks).expect("a round has chunks").median)
    }

    /// Returns the figures, and the number of times that the core was lost meanwhile.
    fn measure_chunk(&mut self, batch: usize) -> ([f64; NAMES.len()], u64) {
        let lost = preemptions();
        self.draw_calls(batch);
        let enqueue = nanos_per_operation(batch, || self.enqueue());
        self.waiting.shuffle(&mut self.rng);
        let leaving = self.waiting.split_off(self.waiting.len() - batch);
        let cancel = nanos_per_operation(batch, || {
            for ticket in leaving {
                assert!(self.lanes.cancel(black_box(ticket)), "it waits");
            }
        });
        let mut woken = Vec::with_capacity(batch);
        let wake = nanos_per_operation(batch, || {
            for _ in 0..batch {
                let QueueStep::AskStore(ticket) = self.lanes.poll(NOW) else { panic!("somebody waits") };
                let lane = self.lanes.grant(ticket, NOW).expect("it waits");
                self.lanes.record_end(lane);
                woken.push(ticket);
            }
        });
        let lost = preemptions() - lost;
        woken.sort_unstable_by_key(|ticket| ticket.index());
        self.waiting.retain(|ticket| woken.binary_search_by_key(&ticket.index(), |ticket| ticket.index()).is_err());
        self.draw_calls(batch);
        self.enqueue();
        ([enqueue, cancel, wake], lost)
    }

    fn draw_calls(&mut self, count: usize) {
        let rng = &mut self.rng;
        self.next_calls.extend((0..count).map(|_| {
            let lane = Lane::ALL[rng.random_range(0..Lane::ALL.len())];
            (lane, NOW + Span::from_millis(rng.random_range(1..60_000)))
        }));
        self.waiting.reserve(count);
    }

    fn enqueue(&mut self) {
        for (lane, deadline) in self.next_calls.drain(..) {
            self.waiting.push(self.lanes.enqueue(lane, 1, deadline, NOW).expect("there is room"));
        }
    }
}

fn nanos_per_operation(count: usize, work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_nanos() as f64 / count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_keeps_the_number_of_waiting_calls() {
        let mut queue = LanesUnderLoad::new(1_000);
        let figures = queue.measure_round();
        assert!(figures.iter().all(|ns| *ns > 0.0), "{figures:?}");
        let waiting: usize = Lane::ALL.iter().map(|lane| queue.lanes.waiting(*lane)).sum();
        assert_eq!((waiting, queue.waiting.len()), (1_000, 1_000));
        assert!(queue.waiting.clone().into_iter().all(|ticket| queue.lanes.cancel(ticket)), "each of them is known");
    }
}
