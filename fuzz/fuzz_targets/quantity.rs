//! Quantities with their calendars and zones, durations, and numbers of bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::{NOW, policy};

fuzz_target!(|text: &str| {
    policy::a_quantity_parses_back(text, NOW);
    policy::units_parse_back(text);
});
