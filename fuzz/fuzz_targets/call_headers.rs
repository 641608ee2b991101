//! `Tidegate-Priority` and `Tidegate-Timeout` of calls through the gateway.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::headers;

fuzz_target!(|bytes: &[u8]| tidegate_fuzz::own_headers_are_not_passed_on(&headers(
    &["tidegate-priority", "tidegate-timeout", "tidegate-token", "accept"],
    bytes
)));
