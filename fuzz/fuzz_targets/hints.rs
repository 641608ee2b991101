//! The headers of a reply about the next call. A line has the number of a header and its value.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::{NOW, headers, policy};

fuzz_target!(|bytes: &[u8]| policy::hints_are_about_the_future(&headers(&policy::HINT_HEADERS, bytes), NOW));
