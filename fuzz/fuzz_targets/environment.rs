//! Environment variables, a line each.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::policy;

fuzz_target!(|text: &str| policy::a_policy_is_read_or_refused(tidegate_fuzz::variables(text)));
