//! `X-Forwarded-For` and `Forwarded`, a line each.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tidegate_fuzz::{headers, policy};
use tidegate_policy::ForwardingHeader;

fuzz_target!(|bytes: &[u8]| {
    for header in [ForwardingHeader::XForwardedFor, ForwardingHeader::Forwarded] {
        policy::a_client_address_is_canonical(header, &headers(&[header.as_str()], bytes));
    }
});
