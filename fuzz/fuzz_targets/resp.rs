//! Requests of the Redis protocol. What is read once is read the same, and nothing shorter is a request.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/tidegate-server/src/wire/resp/parser.rs"]
mod parser;

fuzz_target!(|bytes: &[u8]| {
    let (mut arguments, mut again) = (Vec::new(), Vec::new());
    let Ok(Some(request)) = parser::parse(bytes, &mut arguments) else { return };
    assert!(request.length <= parser::MAX_REQUEST_BYTES + 2 && arguments.len() <= parser::MAX_ARGUMENTS);
    assert!(arguments.iter().all(|place| place.end <= request.length));
    assert_eq!(parser::parse(&bytes[..request.length], &mut again), Ok(Some(request)));
    assert_eq!(arguments, again);
    assert_eq!(parser::parse(&bytes[..request.length - 1], &mut again), Ok(None));
    assert_eq!(parser::parse_number(request.length.to_string().as_bytes()), i64::try_from(request.length).ok());
    let _ = request.is_inline;
});
