//! Policy files.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::policy;
use tidegate_policy::PolicySources;

fuzz_target!(|bytes: &[u8]| policy::a_policy_is_read_or_refused(PolicySources::new().file_bytes("fuzz", bytes)));
