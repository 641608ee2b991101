//! Decisions in process, timed.

use crate::keys::Draw;
use crate::options::Options;
use crate::rows::Row;
use crate::subjects::tidegate::Filling;
use crate::subjects::{Terms, backon, governor, limitador, throttlecrab, tidegate};
use crate::work::{Answer, Work};

/// Measures every timed row that the options ask for, and hands each over as it is done.
pub fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    let mut offer = |name: String, work: &dyn Fn(String) -> Work| {
        if options.wants(&name) {
            done(work(name).measure(options));
        }
    };
    for threads in [1, 2] {
        for answer in [Answer::Allow, Answer::Rested, Answer::Deny] {
            offer(format!("decision/one/{}/T{threads}", word(answer)), &|name| one(name, threads, answer));
        }
        for (keys, words) in [(1_000, "1k"), (1_000_000, "1M")] {
            for (draw, how) in [(Draw::Uniform, "uniform"), (Draw::Zipf, "zipf")] {
                for answer in [Answer::Allow, Answer::Deny] {
                    let name = format!("decision/{words}/{how}/{}/T{threads}", word(answer));
                    offer(name, &|name| many(name, keys, draw, threads, answer));
                }
            }
        }
        offer(format!("decision/1k/uniform/rested/T{threads}"), &|name| {
            many(name, 1_000, Draw::Uniform, threads, Answer::Rested)
        });
        offer(format!("decision/10k/hot/allow/T{threads}"), &|name| {
            many(name, 10_000, Draw::Hot, threads, Answer::Allow)
        });
        for (answer, row) in [(Answer::Allow, "inbound"), (Answer::Deny, "inbound-blocked")] {
            offer(format!("decision/{row}/T{threads}"), &|name| inbound(name, threads, answer));
        }
    }
    offer("decision/backoff/T1".to_owned(), &backoff);
}

fn word(answer: Answer) -> &'static str {
    match answer {
        Answer::Allow => "allow",
        Answer::Rested => "rested",
        Answer::Deny => "deny",
    }
}

fn one(name: String, threads: usize, answer: Answer) -> Work {
    let terms = match answer {
        Answer::Allow => Terms::ROOMY,
        Answer::Rested => Terms::RESTED,
        Answer::Deny => Terms::TIGHT,
    };
    Work {
        name,
        subjects: vec![tidegate::direct(terms), governor::direct(terms), throttlecrab::direct(terms)],
        keys: 1,
        draw: Draw::Hot,
        threads,
        answer,
        steps: 50_000,
    }
}

fn many(name: String, keys: u32, draw: Draw, threads: usize, answer: Answer) -> Work {
    let terms = match answer {
        Answer::Allow => Terms::ROOMY_KEYED,
        Answer::Rested => Terms::RESTED_KEYED,
        Answer::Deny => Terms::TIGHT,
    };
    let mut subjects = vec![tidegate::keyed(terms), governor::keyed(terms), throttlecrab::keyed(terms)];
    // A window is never rested among a thousand keys.
    if answer != Answer::Rested {
        subjects.insert(1, tidegate::windowed(terms));
    }
    // A million counters built beforehand are a gigabyte for each thread, and would time the fetching of them.
    if answer != Answer::Rested && keys <= 10_000 {
        subjects.push(limitador::prebuilt(terms));
    }
    Work { name, subjects, keys, draw, threads, answer, steps: if keys > 100_000 { 4_000 } else { 20_000 } }
}

fn inbound(name: String, threads: usize, answer: Answer) -> Work {
    const CLIENTS: u32 = 10_000;
    let subjects = match (answer, threads) {
        (Answer::Deny, _) => vec![tidegate::inbound(Filling::Blocked, CLIENTS), limitador::whole(Terms::TIGHT)],
        (_, 1) => vec![
            tidegate::inbound(Filling::Everyday, CLIENTS),
            tidegate::inbound(Filling::Rates, CLIENTS),
            tidegate::inbound(Filling::Packed, CLIENTS),
            limitador::whole(Terms::ROOMY_KEYED),
        ],
        _ => vec![
            tidegate::inbound(Filling::Rates, CLIENTS),
            tidegate::inbound(Filling::Packed, CLIENTS),
            limitador::whole(Terms::ROOMY_KEYED),
        ],
    };
    Work { name, subjects, keys: CLIENTS, draw: Draw::Uniform, threads, answer, steps: 8_000 }
}

fn backoff(name: String) -> Work {
    Work {
        name,
        subjects: vec![tidegate::backoff(), backon::backoff()],
        keys: 1,
        draw: Draw::Hot,
        threads: 1,
        answer: Answer::Allow,
        steps: 50_000,
    }
}
