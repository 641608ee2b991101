//! Lines of access logs: common, combined and JSON.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| tidegate_fuzz::a_log_is_counted_line_by_line(bytes));
