//! Measures memory, and the cost of its growth. Each subject runs in a new process, so that none inherits another's
//! heap.

use crate::measure::read_field;
use crate::options::Options;
use crate::programs::{ProgramError, bench_program};
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;
use std::process::Command;

/// The child process's names of the subjects, and the table's.
const SUBJECTS: [(&str, &str); 6] = [
    (OURS, OURS),
    ("tidegate-window", "tidegate (strict window)"),
    ("governor", "governor"),
    ("governor-u64", "governor (u64 keys)"),
    ("throttlecrab", "throttlecrab"),
    ("limitador", "limitador"),
];

const KEYS: u32 = 1_000_000;

/// Measures the rows of memory that the options select.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let rounds = if options.quick { 1 } else { 5 };
    if options.wants("decision/bytes-per-key") {
        let mut resident = BenchRow::new("decision/bytes-per-key", FigureUnit::Bytes);
        let mut counted = BenchRow::new("decision/bytes-per-key/allocated", FigureUnit::Bytes);
        measure_each(options, rounds, "bytes", &mut resident, &mut |listing| {
            read_field(listing, "resident ") as f64 / f64::from(KEYS)
        });
        measure_each(options, 1, "bytes", &mut counted, &mut |listing| {
            read_field(listing, "counted ") as f64 / f64::from(KEYS)
        });
        on_row(resident);
        on_row(counted);
    }
    if options.wants("decision/longest-insert") {
        let mut row = BenchRow::new("decision/longest-insert", FigureUnit::Nanoseconds);
        measure_each(options, rounds, "growth", &mut row, &mut |listing| read_field(listing, "longest ") as f64);
        on_row(row);
    }
    for flood in ["junk", "blocked"] {
        let mut rows = [
            BenchRow::new(format!("decision/{flood}/p99"), FigureUnit::Nanoseconds),
            BenchRow::new(format!("decision/{flood}/still-blocked"), FigureUnit::Count),
            BenchRow::new(format!("decision/{flood}/resident"), FigureUnit::Mebibytes),
        ];
        if !rows.iter().any(|row| options.wants(&row.name)) {
            continue;
        }
        let listings: Result<Vec<String>, ProgramError> = (0..rounds).map(|_| run_weigh(flood, OURS, KEYS)).collect();
        match listings {
            Ok(listings) => {
                let units = [("p99 ", 1.0), ("still-blocked ", 1.0), ("resident ", 1.0 / 1024.0 / 1024.0)];
                for (row, (name, unit)) in rows.iter_mut().zip(units) {
                    let read = |listing: &String| read_field(listing, name) as f64 * unit;
                    row.push(OURS, listings.iter().map(read).collect());
                }
            }
            Err(failure) => {
                for row in &mut rows {
                    row.skipped.push(format!("{OURS}: {failure}"));
                }
            }
        }
        rows.into_iter().for_each(&mut *on_row);
    }
}

fn measure_each(options: &Options, rounds: usize, what: &str, row: &mut BenchRow, read: &mut dyn FnMut(&str) -> f64) {
    let subjects: Vec<_> = SUBJECTS.iter().filter(|(_, shown)| options.wants_subject(shown)).collect();
    let mut figures = vec![Vec::new(); subjects.len()];
    for _ in 0..rounds {
        for ((child, shown), figures) in subjects.iter().zip(&mut figures) {
            match run_weigh(what, child, KEYS) {
                Ok(listing) => figures.push(read(&listing)),
                Err(failure) => {
                    let reason = format!("{shown}: {failure}");
                    if !row.skipped.contains(&reason) {
                        row.skipped.push(reason);
                    }
                }
            }
        }
    }
    for ((_, shown), figures) in subjects.iter().zip(figures) {
        if figures.len() == rounds {
            row.push(shown, figures);
        }
    }
}

/// Returns the output of the child process that does `what` to this subject `count` times.
pub(crate) fn run_weigh(what: &str, subject: &str, count: u32) -> Result<String, ProgramError> {
    let output = Command::new(bench_program("weigh")?)
        .args([what, subject, &count.to_string()])
        .output()
        .map_err(|error| ProgramError::new("weigh", error))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(ProgramError::new("weigh", words.lines().next().unwrap_or("failed")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
