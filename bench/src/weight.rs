//! Memory, and what growing it costs: each subject in a fresh process, so that none inherits another's heap.

use crate::measure::field;
use crate::options::Options;
use crate::programs::{Failure, sibling};
use crate::rows::{Row, Unit};
use crate::subjects::OURS;
use std::process::Command;

/// Names of the child process's subjects, and the table's.
const SUBJECTS: [(&str, &str); 6] = [
    (OURS, OURS),
    ("tidegate-window", "tidegate (strict window)"),
    ("governor", "governor"),
    ("governor-u64", "governor (u64 keys)"),
    ("throttlecrab", "throttlecrab"),
    ("limitador", "limitador"),
];

const KEYS: u32 = 1_000_000;

/// Measures the rows of memory that the options ask for.
pub fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    let rounds = if options.quick { 1 } else { 5 };
    if options.wants("decision/bytes-per-key") {
        let mut resident = Row::new("decision/bytes-per-key", Unit::Bytes);
        let mut counted = Row::new("decision/bytes-per-key/allocated", Unit::Bytes);
        each(options, rounds, "bytes", &mut resident, &mut |listing| {
            field(listing, "resident ") as f64 / f64::from(KEYS)
        });
        each(options, 1, "bytes", &mut counted, &mut |listing| field(listing, "counted ") as f64 / f64::from(KEYS));
        done(resident);
        done(counted);
    }
    if options.wants("decision/longest-insert") {
        let mut row = Row::new("decision/longest-insert", Unit::Nanoseconds);
        each(options, rounds, "growth", &mut row, &mut |listing| field(listing, "longest ") as f64);
        done(row);
    }
    for flood in ["junk", "blocked"] {
        let mut rows = [
            Row::new(format!("decision/{flood}/p99"), Unit::Nanoseconds),
            Row::new(format!("decision/{flood}/still-blocked"), Unit::Count),
            Row::new(format!("decision/{flood}/resident"), Unit::Mebibytes),
        ];
        if !rows.iter().any(|row| options.wants(&row.name)) {
            continue;
        }
        let listings: Result<Vec<String>, Failure> = (0..rounds).map(|_| weigh(flood, OURS, KEYS)).collect();
        match listings {
            Ok(listings) => {
                let units = [("p99 ", 1.0), ("still-blocked ", 1.0), ("resident ", 1.0 / 1024.0 / 1024.0)];
                for (row, (name, unit)) in rows.iter_mut().zip(units) {
                    let read = |listing: &String| field(listing, name) as f64 * unit;
                    row.push(OURS, listings.iter().map(read).collect());
                }
            }
            Err(failure) => {
                for row in &mut rows {
                    row.skipped.push(format!("{OURS}: {failure}"));
                }
            }
        }
        rows.into_iter().for_each(&mut *done);
    }
}

fn each(options: &Options, rounds: usize, what: &str, row: &mut Row, read: &mut dyn FnMut(&str) -> f64) {
    let subjects: Vec<_> = SUBJECTS.iter().filter(|(_, shown)| options.wants_subject(shown)).collect();
    let mut figures = vec![Vec::new(); subjects.len()];
    for _ in 0..rounds {
        for ((child, shown), figures) in subjects.iter().zip(&mut figures) {
            match weigh(what, child, KEYS) {
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

/// What the child process prints that does `what` to this subject `count` times.
pub(crate) fn weigh(what: &str, subject: &str, count: u32) -> Result<String, Failure> {
    let output = Command::new(sibling("weigh")?)
        .args([what, subject, &count.to_string()])
        .output()
        .map_err(|error| Failure::new("weigh", error))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::new("weigh", words.lines().next().unwrap_or("failed")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
