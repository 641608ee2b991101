//! Snapshot files of outbound state.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| tidegate_fuzz::a_snapshot_is_restored_or_left(bytes));
