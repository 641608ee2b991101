//! Measures decisions in process.

use crate::keys::KeyDistribution;
use crate::options::Options;
use crate::rows::BenchRow;
use crate::subjects::tidegate::StateFill;
use crate::subjects::{LimitTerms, backon, governor, limitador, throttlecrab, tidegate};
use crate::work::{ExpectedAnswer, TimedWork};

/// Measures every timed row that the options select, and passes each to `on_row` when it is done.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    let mut offer = |name: String, work: &dyn Fn(String) -> TimedWork| {
        if options.wants(&name) {
            on_row(work(name).measure(options));
        }
    };
    for threads in [1, 2] {
        for answer in [ExpectedAnswer::Allow, ExpectedAnswer::AllowAtFullBurst, ExpectedAnswer::Deny] {
            offer(format!("decision/one/{}/T{threads}", answer_name(answer)), &|name| one_key(name, threads, answer));
        }
        for (keys, words) in [(1_000, "1k"), (1_000_000, "1M")] {
            for (draw, how) in [(KeyDistribution::Uniform, "uniform"), (KeyDistribution::Zipf, "zipf")] {
                for answer in [ExpectedAnswer::Allow, ExpectedAnswer::Deny] {
                    let name = format!("decision/{words}/{how}/{}/T{threads}", answer_name(answer));
                    offer(name, &|name| many_keys(name, keys, draw, threads, answer));
                }
            }
        }
        offer(format!("decision/1k/uniform/rested/T{threads}"), &|name| {
            many_keys(name, 1_000, KeyDistribution::Uniform, threads, ExpectedAnswer::AllowAtFullBurst)
        });
        offer(format!("decision/10k/hot/allow/T{threads}"), &|name| {
            many_keys(name, 10_000, KeyDistribution::SingleKey, threads, ExpectedAnswer::Allow)
        });
        for (answer, row) in [(ExpectedAnswer::Allow, "inbound"), (ExpectedAnswer::Deny, "inbound-blocked")] {
            offer(format!("decision/{row}/T{threads}"), &|name| inbound(name, threads, answer));
        }
    }
    offer("decision/backoff/T1".to_owned(), &backoff);
}

fn answer_name(answer: ExpectedAnswer) -> &'static str {
    match answer {
        ExpectedAnswer::Allow => "allow",
        ExpectedAnswer::AllowAtFullBurst => "rested",
        ExpectedAnswer::Deny => "deny",
    }
}

fn one_key(name: String, threads: usize, answer: ExpectedAnswer) -> TimedWork {
    let terms = match answer {
        ExpectedAnswer::Allow => LimitTerms::LARGE,
        ExpectedAnswer::AllowAtFullBurst => LimitTerms::FAST_REFILL,
        ExpectedAnswer::Deny => LimitTerms::TIGHT,
    };
    TimedWork {
        name,
        subjects: vec![tidegate::direct(terms), governor::direct(terms), throttlecrab::direct(terms)],
        keys: 1,
        key_distribution: KeyDistribution::SingleKey,
        threads,
        answer,
        steps_per_chunk: 50_000,
    }
}

fn many_keys(name: String, keys: u32, draw: KeyDistribution, threads: usize, answer: ExpectedAnswer) -> TimedWork {
    let terms = match answer {
        ExpectedAnswer::Allow => LimitTerms::LARGE_KEYED,
        ExpectedAnswer::AllowAtFullBurst => LimitTerms::FAST_REFILL_KEYED,
        ExpectedAnswer::Deny => LimitTerms::TIGHT,
    };
    let mut subjects = vec![tidegate::keyed(terms), governor::keyed(terms), throttlecrab::keyed(terms)];
    // A window among a thousand keys is never unused before a call.
    if answer != ExpectedAnswer::AllowAtFullBurst {
        subjects.insert(1, tidegate::windowed(terms));
    }
    // A million prebuilt counters take a gigabyte per thread, and their cache misses would dominate the figure.
    if answer != ExpectedAnswer::AllowAtFullBurst && keys <= 10_000 {
        subjects.push(limitador::prebuilt(terms));
    }
    TimedWork {
        name,
        subjects,
        keys,
        key_distribution: draw,
        threads,
        answer,
        steps_per_chunk: if keys > 100_000 { 4_000 } else { 20_000 },
    }
}

fn inbound(name: String, threads: usize, answer: ExpectedAnswer) -> TimedWork {
    const CLIENTS: u32 = 10_000;
    let subjects = match (answer, threads) {
        (ExpectedAnswer::Deny, _) => {
            vec![tidegate::inbound(StateFill::Blocked, CLIENTS), limitador::whole(LimitTerms::TIGHT)]
        }
        (_, 1) => vec![
            tidegate::inbound(StateFill::Typical, CLIENTS),
            tidegate::inbound(StateFill::Rates, CLIENTS),
            tidegate::inbound(StateFill::FullLogs, CLIENTS),
            limitador::whole(LimitTerms::LARGE_KEYED),
        ],
        _ => vec![
            tidegate::inbound(StateFill::Rates, CLIENTS),
            tidegate::inbound(StateFill::FullLogs, CLIENTS),
            limitador::whole(LimitTerms::LARGE_KEYED),
        ],
    };
    TimedWork {
        name,
        subjects,
        keys: CLIENTS,
        key_distribution: KeyDistribution::Uniform,
        threads,
        answer,
        steps_per_chunk: 8_000,
    }
}

fn backoff(name: String) -> TimedWork {
    TimedWork {
        name,
        subjects: vec![tidegate::backoff(), backon::backoff()],
        keys: 1,
        key_distribution: KeyDistribution::SingleKey,
        threads: 1,
        answer: ExpectedAnswer::Allow,
        steps_per_chunk: 50_000,
    }
}
