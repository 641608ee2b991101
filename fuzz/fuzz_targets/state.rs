//! States as stores with rows keep them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::core;

fuzz_target!(|bytes: &[u8]| {
    core::a_decoded_state_is_encoded_alike(bytes);
    core::a_decoded_state_gives_reservations(bytes);
});
