//! Runs the rows asked for, prints the table, and with `--check` fails where a target is missed.

use bench::options::{Options, USAGE};
use bench::rows::{Row, Table, Verdict};
use bench::{decision, gate, measure, outbound, simulate, stores, targets, weight};
use std::process::ExitCode;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(mistake) if mistake.is_empty() => {
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
    let scale = measure::clock_scale();
    let mut rows: Vec<Row> = Vec::new();
    let mut done = |row: Row| {
        eprintln!("measured {}", row.name);
        rows.push(row);
    };
    decision::measure(&options, &mut done);
    weight::measure(&options, &mut done);
    outbound::measure(&options, &mut done);
    gate::measure(&options, &mut done);
    stores::measure(&options, &mut done);
    simulate::measure(&options, &mut done);
    println!("{}", Table { rows: &rows, scale });
    println!("Reading the clock costs {scale:.2} × the reference's 24 ns; absolute times are scaled by that.");
    if !options.check {
        return ExitCode::SUCCESS;
    }
    let missed: Vec<&str> = targets::REACHES
        .iter()
        .map(|reach| reach.row)
        .filter(|name| options.wants(name))
        .filter(|name| {
            let row = rows.iter().find(|row| row.name == **name);
            row.is_none_or(|row| row.verdict(scale) != Verdict::Reached)
        })
        .collect();
    for name in &missed {
        eprintln!("missed: {name}");
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
