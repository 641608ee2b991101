//! Runs the selected rows and prints the table. With `--check` it fails if a target is missed.

use bench::options::{Options, USAGE};
use bench::rows::{BenchRow, BenchTable, TargetResult};
use bench::{dearest, decision, gate, measure, memory_use, outbound, simulate, stores, targets};
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(error) if error.is_empty() => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(mistake) => {
            eprintln!("bench: {mistake}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if cfg!(debug_assertions) {
        eprintln!("bench: this is a debug build; its figures mean nothing (cargo run --release)");
    }
    let clock_scale = measure::clock_scale();
    let mut rows: Vec<BenchRow> = Vec::new();
    let mut on_row = |row: BenchRow| {
        eprintln!("measured {}", row.name);
        rows.push(row);
    };
    decision::measure(&options, &mut on_row);
    dearest::measure(&options, &mut on_row);
    memory_use::measure(&options, &mut on_row);
    outbound::measure(&options, &mut on_row);
    gate::measure(&options, &mut on_row);
    stores::measure(&options, &mut on_row);
    simulate::measure(&options, &mut on_row);
    println!("{}", BenchTable { rows: &rows, clock_scale });
    println!("Reading the clock costs {clock_scale:.2} × the reference's 24 ns; absolute times are scaled by that.");
    if !options.check {
        return ExitCode::SUCCESS;
    }
    let missed: Vec<&str> = targets::TARGETS
        .iter()
        .map(|reach| reach.row)
        .filter(|name| options.wants(name))
        .filter(|name| {
            let row = rows.iter().find(|row| row.name == **name);
            row.is_none_or(|row| row.target_result(clock_scale) != TargetResult::Reached)
        })
        .collect();
    for name in &missed {
        eprintln!("missed: {name}");
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
