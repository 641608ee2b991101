//! Paths and the ways in which servers may read them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::policy;

fuzz_target!(|text: &str| policy::a_path_is_matched_and_forwarded(text));
