//! An application that takes its clock as a parameter, and its tests, which set the clock by hand and never sleep.
//!
//! `cargo run -p tidegate-examples --example manual_clock` tries four log-ins by the machine's clock and prints:
//!
//! ```text
//! log-in 1: ok
//! log-in 2: ok
//! log-in 3: ok
//! log-in 4: try again in 2 s
//! ```
//!
//! `cargo test -p tidegate-examples --example manual_clock` runs the tests.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};

use tidegate::clock::SystemClock;
use tidegate::policy::{ActionSpec, Policy, Query};
use tidegate::store::Memory;
use tidegate::{Clock, Gate, Span};

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 7));

/// The limited part of the application.
struct LogIns<C> {
    gate: Gate<Memory, C>,
}

impl<C: Clock> LogIns<C> {
    fn new(clock: C) -> Result<Self, Box<dyn Error>> {
        let login = ActionSpec::new("3 per 60s").penalty("2s", "1h");
        let policy = Policy::builder().action("login", login).build()?;
        Ok(Self { gate: Gate::in_memory(&policy, clock) })
    }

    /// The wait before the next attempt; `None` if this one is admitted.
    fn wait(&self, ip: IpAddr) -> Result<Option<Span>, Box<dyn Error>> {
        let query = Query { action: Some("login"), ip: Some(ip), ..Query::default() };
        Ok(self.gate.check_now(&query)?.retry_after)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let log_ins = LogIns::new(SystemClock::new())?;
    for number in 1..=4 {
        match log_ins.wait(CLIENT)? {
            None => println!("log-in {number}: ok"),
            Some(wait) => println!("log-in {number}: try again in {} s", wait.as_secs_ceil()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate::clock::ManualClock;

    #[test]
    fn the_fourth_log_in_waits_and_then_passes() {
        let clock = ManualClock::default();
        let log_ins = LogIns::new(clock.clone()).unwrap();
        for _ in 0..3 {
            assert_eq!(log_ins.wait(CLIENT).unwrap(), None);
        }
        assert_eq!(log_ins.wait(CLIENT).unwrap(), Some(Span::from_secs(2)));
        clock.advance(Span::from_secs(2));
        assert_eq!(log_ins.wait(CLIENT).unwrap(), None, "the wait is true");
        assert_eq!(log_ins.wait(CLIENT).unwrap(), Some(Span::from_secs(4)), "the second block is twice as long");
    }

    #[test]
    fn another_address_has_a_limit_of_its_own() {
        let log_ins = LogIns::new(ManualClock::default()).unwrap();
        let waits: Vec<_> = (0..4).map(|_| log_ins.wait(CLIENT).unwrap()).collect();
        assert!(waits[3].is_some() && log_ins.wait(Ipv4Addr::LOCALHOST.into()).unwrap().is_none());
    }
}
