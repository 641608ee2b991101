#![allow(missing_docs, clippy::unwrap_used)]
fn main() {
    let name = std::env::args().nth(1).unwrap();
    let body = std::fs::read(&name).unwrap();
    match tidegate_sim::Scenario::read(&name, &body) {
        Err(errors) => println!("{errors}"),
        Ok(scenario) => {
            let report = scenario.run(scenario.seed, &mut |_| {});
            if let Some(out) = std::env::args().nth(2) {
                std::fs::write(format!("{out}.html"), report.html().unwrap()).unwrap();
                std::fs::write(format!("{out}.svg"), report.svg().unwrap()).unwrap();
                std::fs::write(format!("{out}.png"), report.png().unwrap()).unwrap();
                std::fs::write(format!("{out}.json"), report.json()).unwrap();
            }
            println!("{}", report.table());
            for run in &report.runs {
                let n = run.numbers;
                println!(
                    "{:14} {:14} off {:8.0} ok {:8.0} {:5.1}% load {:.2} goodput {:6.2} att {:7.0} thr {:5.0} ref {:5.0} mean {:.3} p99 {:.3} el {:.3} busy {:.0} {:?} {:?}",
                    run.case,
                    run.strategy,
                    n.offered,
                    n.succeeded,
                    n.success * 100.0,
                    n.load,
                    n.goodput,
                    n.attempts,
                    n.throttled,
                    n.refused,
                    n.mean,
                    n.p99,
                    n.elapsed,
                    n.busiest,
                    n.before,
                    n.after
                );
            }
        }
    }
}
