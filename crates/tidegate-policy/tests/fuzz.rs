//! Text from outside is read or refused, whatever it is.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

pub mod fuzzed;

use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;
use tidegate_core::Time;
use tidegate_policy::{ForwardingHeader, PolicySources, Query};
use tidegate_testkit::property;

/// Parts of header values: numbers and units, lists, dates, and bytes that aren't text.
const HINT_PIECES: [&[u8]; 24] = [
    b"0",
    b"1",
    b"7",
    b"30",
    b"999999999999",
    b"1767225660",
    b"-",
    b"+",
    b".",
    b"e",
    b"e9999",
    b"s",
    b"ms",
    b"m",
    b" ",
    b"\"a\"",
    b";r=0",
    b";t=",
    b", ",
    b"remaining=0",
    b"reset=",
    b"Thu, 01 Jan 2026 00:00:20 GMT",
    b"2026-01-01T00:00:20Z",
    b"\xff",
];

#[test]
fn arbitrary_headers_give_future_waits_without_panic() {
    let now = Time::from_secs(1_767_225_600).as_micros();
    property::fuzz(120, |mut random| {
        let now = Time::from_micros(random.pick(&[0, now, random.clone().next_u64()]));
        let mut headers = HeaderMap::new();
        while !random.is_exhausted() {
            let value = HeaderValue::from_bytes(&random.concat_random(&HINT_PIECES, 8)).unwrap();
            headers.append(random.pick(&fuzzed::HINT_HEADERS), value);
        }
        fuzzed::hints_are_about_the_future(&headers, now);
        Ok(())
    });
}

proptest! {
    #[test]
    fn any_policy_file_is_read_without_panic(text in "\\PC{0,200}") {
        fuzzed::a_policy_is_read_or_refused(PolicySources::new().file("x", text));
    }

    #[test]
    fn nearly_valid_files_are_read_without_panic(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "[inbound]\n", "[inbound.global]\n", "[inbound.action.a]\n", "[inbound.action.b]\n", "[api]\n", "limit = ",
            "\"5 per 60s\"", "\"", "\n", " = ", "match = ", "{", "}", "[", "]", ",", "path = ", "\"/a/*\"", "key = ",
            "\"client_ip\"", "penalty = ", "base = \"2s\"", "token = ", "5", "\"\"\"", "é", "#", "listen", "\\u00e9",
            "\"10.0.0.1/8\"", "allow = ", "limits = ", "preset = \"login\"", "cost = 9223372036854775807", "'", "ban = ",
        ]), 0..24),
        env in prop::collection::vec((prop::sample::select(vec![
            "TIDEGATE__INBOUND__GLOBAL__LIMIT", "TIDEGATE__INBOUND__ACTION__A__LIMIT", "TIDEGATE__API__TOKEN",
            "TIDEGATE__INBOUND__ACTION__A__MATCH", "TIDEGATE__INBOUND__ALLOW", "GLOBAL_RATE_LIMIT", "BACKOFF_BASE",
            "TIDEGATE__X", "TIDEGATE__INBOUND__ACTION__A__PENALTY__CAP", "GLOBAL_RATE_WINDOW",
        ]), "\\PC{0,12}|[0-9]{1,20}|[\\[{\"0-9a-z, .=é]{0,12}"), 0..4),
    ) {
        fuzzed::a_policy_is_read_or_refused(PolicySources::new().file("x", pieces.concat()).env(env));
    }

    #[test]
    fn any_query_is_keyed_without_panic(path in "\\PC{0,80}", host in "\\PC{0,40}", key in "\\PC{0,300}", cookie in prop::collection::vec(32_u8..=255, 0..40)) {
        let mut headers = HeaderMap::new();
        if let Ok(value) = HeaderValue::from_bytes(&cookie) {
            headers.insert("cookie", value);
        }
        let query = Query { path: Some(&path), host: Some(&host), key: Some(&key), headers: Some(&headers), ..Query::default() };
        fuzzed::a_query_is_keyed_or_uncountable(&query);
    }

    #[test]
    fn any_path_is_matched_and_forwarded(path in "\\PC{0,40}|(/|//|\\.|\\.\\.|%2f|%2e|%252e|%5c|\\\\|;|\\?|#|a|b|A|%){0,10}") {
        fuzzed::a_path_is_matched_and_forwarded(&path);
    }

    #[test]
    fn any_quantity_text_is_read_without_panic(
        text in "\\PC*|[0-9]{1,3}[ /](per|in|burst|day|s|[0-9a-z ./_,]){0,6}", secs in 0_u64..4_000_000_000,
    ) {
        fuzzed::a_quantity_parses_back(&text, Time::from_secs(secs));
    }

    #[test]
    fn any_unit_text_is_read_without_panic(text in "\\PC*|[0-9._a-z ,µ-]*") {
        fuzzed::units_parse_back(&text);
    }

    #[test]
    fn any_forwarding_header_is_read_without_panic(line in prop::collection::vec(32_u8..=255, 0..200)) {
        let Ok(value) = HeaderValue::from_bytes(&line) else { return Ok(()) };
        for header in [ForwardingHeader::XForwardedFor, ForwardingHeader::Forwarded] {
            let mut headers = HeaderMap::new();
            headers.append(header.as_str(), value.clone());
            fuzzed::a_client_address_is_canonical(header, &headers);
        }
    }
}
