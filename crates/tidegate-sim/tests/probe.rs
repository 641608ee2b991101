//! Probe.
#![expect(clippy::unwrap_used, reason = "a test")]
use tidegate_sim::{Scenario, shipped};
#[test]
fn probe() {
    let mut suite = Scenario::read("control", shipped::SUITES[0].text.as_bytes()).unwrap();
    suite.setups.retain(|setup| format!("{:?}", setup).contains("Tidegate") || format!("{setup:?}").contains("racle"));
    println!("{}", suite.run(1, &mut |_| {}).control_table());
    println!("{}", Scenario::read("collapse", std::fs::read("scenarios/collapse.toml").unwrap().as_slice()).unwrap().run(1, &mut |_| {}).table());
}
