//! Cookies, query strings, headers, hosts and paths that calls are counted by.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| tidegate_fuzz::a_request_is_keyed(text));
