//! Sequences of operations against the model, and bytes that may be a state.

pub mod fuzzed;

use tidegate_testkit::property;

#[test]
fn random_operations_agree_with_the_model() {
    property::fuzz(3_000, fuzzed::operations_agree_with_the_model);
}

#[test]
fn any_decoded_state_is_encoded_alike_and_usable() {
    property::fuzz(30, |mut random| {
        // The version with each kind of state, and numbers of one to ten bytes.
        let kind = 0x10 + random.below(9) as u8;
        let pieces: [&[u8]; 9] =
            [b"\x00", b"\x01", b"\x02", b"\x07", b"\x7f", b"\x80\x01", b"\xff\xff\x03", b"\xff", &[0xff; 9]];
        let bytes = [vec![kind], random.concat_random(&pieces, 24)].concat();
        fuzzed::a_decoded_state_is_encoded_alike(&bytes);
        fuzzed::a_decoded_state_gives_reservations(&bytes);
        Ok(())
    });
}
