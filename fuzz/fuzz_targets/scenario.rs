//! Scenarios of simulations.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| tidegate_fuzz::a_scenario_is_read_or_refused(bytes));
