//! The expected cost of a call, and the real cost from its reply.

use bytes::BytesMut;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use serde_json::Value;
use tidegate_policy::outbound::{CostRules, PointerAlternatives};

use super::sse::SseReader;

/// The longest reply, and the longest event of an event stream, that is read for the cost of a call, in bytes. After a
/// longer reply the reserved cost stays; a longer event is ignored.
const MAX_PARSED_BYTES: usize = 1 << 20;

/// The cost that is reserved before the reply, for a request with a body of this many bytes. `body` is the complete
/// body, if it is JSON and available.
pub(super) fn expected_cost(rules: &CostRules, bytes: u64, body: Option<&[u8]>) -> u64 {
    let units = bytes.checked_div(rules.bytes_per_unit).unwrap_or(0);
    let json = body.and_then(|body| serde_json::from_slice(body).ok());
    let requested = json.and_then(|json| first_number(&rules.request, &json)).unwrap_or(0);
    rules.reserve.saturating_add(units).saturating_add(requested)
}

/// Reads the real cost of a call from its reply.
pub(super) struct CostReader {
    pointers: Vec<PointerAlternatives>,
    /// The last value found for each of the pointers.
    values: Vec<Option<u64>>,
    format: ReplyFormat,
}

enum ReplyFormat {
    Json(BytesMut),
    Events(SseReader),
    /// The reply is too long to be read.
    TooLong,
}

impl CostReader {
    /// A reader for a reply with these headers. `None` if the rules read nothing from replies, or the reply is encoded.
    pub(super) fn for_reply(rules: &CostRules, headers: &HeaderMap) -> Option<Self> {
        let is_encoded = headers.get(CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        if rules.reply.is_empty() || is_encoded {
            return None;
        }
        let format = if is_event_stream(headers) {
            ReplyFormat::Events(SseReader::new(MAX_PARSED_BYTES))
        } else {
            ReplyFormat::Json(BytesMut::new())
        };
        Some(Self { pointers: rules.reply.clone(), values: vec![None; rules.reply.len()], format })
    }

    pub(super) fn read(&mut self, data: &[u8]) {
        let Self { pointers, values, format } = self;
        match format {
            ReplyFormat::Json(read) if read.len() + data.len() <= MAX_PARSED_BYTES => read.extend_from_slice(data),
            ReplyFormat::Json(_) => *format = ReplyFormat::TooLong,
            ReplyFormat::Events(events) => events.read(data, |event| update_values(pointers, values, event)),
            ReplyFormat::TooLong => {}
        }
    }

    /// The sum of the values that were found. Called at the reply's end.
    pub(super) fn into_cost(mut self) -> Option<u64> {
        if let ReplyFormat::Json(read) = &self.format {
            update_values(&self.pointers, &mut self.values, read);
        }
        self.values.into_iter().flatten().reduce(u64::saturating_add)
    }
}

/// Updates the values from a document. Values that the document doesn't contain stay.
fn update_values(pointers: &[PointerAlternatives], values: &mut [Option<u64>], text: &[u8]) {
    let Ok(json) = serde_json::from_slice(text) else { return };
    for (pointers, found) in pointers.iter().zip(values) {
        *found = first_number(pointers, &json).or(*found);
    }
}

/// The first pointer's value that is a number.
fn first_number(pointers: &PointerAlternatives, json: &Value) -> Option<u64> {
    pointers.iter().find_map(|pointer| json.pointer(pointer)?.as_u64())
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let kind = media_type(headers).map(str::to_ascii_lowercase);
    // AWS names its protocols: application/x-amz-json-1.1.
    kind.is_some_and(|kind| kind == "application/json" || kind.ends_with("+json") || kind.contains("x-amz-json"))
}

pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    media_type(headers).is_some_and(|kind| kind.eq_ignore_ascii_case("text/event-stream"))
}

fn media_type(headers: &HeaderMap) -> Option<&str> {
    let kind = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    Some(kind.split(';').next().unwrap_or(kind).trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    /// The rules of the presets for language models.
    fn rules() -> CostRules {
        let pointers = |pointers: &[&str]| pointers.iter().map(|pointer| (*pointer).to_owned()).collect::<Vec<_>>();
        let mut rules = CostRules::new(7);
        rules.request = pointers(&["/max_completion_tokens", "/max_tokens"]);
        rules.bytes_per_unit = 4;
        rules.reply = vec![
            pointers(&["/usage/input_tokens", "/message/usage/input_tokens"]),
            pointers(&["/usage/output_tokens", "/message/usage/output_tokens"]),
        ];
        rules
    }

    fn headers(kind: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(kind))])
    }

    fn cost(kind: &'static str, chunks: &[&[u8]]) -> Option<u64> {
        let mut reader = CostReader::for_reply(&rules(), &headers(kind)).unwrap();
        chunks.iter().for_each(|chunk| reader.read(chunk));
        reader.into_cost()
    }

    #[test]
    fn reservation_adds_requested_tokens_and_body_length() {
        for (body, requested) in [
            (r#"{"max_tokens":100}"#, 100),
            (r#"{"max_tokens":100,"max_completion_tokens":20}"#, 20),
            (r#"{"max_tokens":100,"max_completion_tokens":null}"#, 100),
            (r#"{"max_tokens":18446744073709551615}"#, u64::MAX),
            (r#"{"max_tokens":-1}"#, 0),
            (r#"{"max_tokens":"100"}"#, 0),
            (r#"{"max_tokens":1.5}"#, 0),
            (r#"{"max_tok"#, 0),
            ("", 0),
        ] {
            assert_eq!(expected_cost(&rules(), 40, Some(body.as_bytes())), requested.saturating_add(17), "{body}");
        }
        assert_eq!(expected_cost(&rules(), 43, None), 17);
        assert_eq!(expected_cost(&CostRules::new(7), 43, None), 7);
    }

    #[test]
    fn the_last_value_of_each_field_is_summed() {
        let events: &[&[u8]] = &[
            b"event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":25,\"output_tokens\":1}}}\n\n",
            b"data: {\"delta\":{\"text\":\"usage\"}}\n\ndata: {\"usage\":null}\n\n",
            b"data: {\"usage\":{\"output_tokens\":10}}\n\ndata: {\"usage\":{\"output_tokens\":15}}\n\ndata: [DONE]\n\n",
        ];
        assert_eq!(cost("text/event-stream; charset=utf-8", events), Some(40));
        let said_twice: &[&[u8]] = &[b"data: {\"usage\":{\"input_tokens\":30,\"output_tokens\":20}}\n\n"];
        assert_eq!(cost("text/event-stream", &[events, said_twice].concat()), Some(50), "the same number, not another");
        assert_eq!(cost("text/event-stream", &[b"data: {\"choices\":[]}\n\n"]), None);
    }

    #[test]
    fn a_plain_reply_is_priced_as_one_document() {
        let body = br#"{"usage":{"input_tokens":30,"output_tokens":20}}"#;
        assert_eq!(cost("application/json", &[&body[..9], &body[9..]]), Some(50));
        assert_eq!(cost("application/json", &[br#"{"usage":{"input_tokens":30}}"#]), Some(30));
        assert_eq!(cost("application/json", &[br#"{"error":"overloaded"}"#]), None);
        assert_eq!(cost("text/html", &[b"<html>"]), None);
    }

    #[test]
    fn oversized_or_encoded_replies_have_no_price() {
        let long = vec![b' '; MAX_PARSED_BYTES];
        assert_eq!(cost("application/json", &[&long, br#"{"usage":{"input_tokens":30}}"#]), None);
        let mut encoded = headers("application/json");
        encoded.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        assert!(CostReader::for_reply(&rules(), &encoded).is_none());
        encoded.insert(CONTENT_ENCODING, HeaderValue::from_static("identity"));
        assert!(CostReader::for_reply(&rules(), &encoded).is_some());
        assert!(CostReader::for_reply(&CostRules::new(1), &headers("application/json")).is_none());
    }

    #[test]
    fn json_and_event_stream_types_are_recognised() {
        for (kind, json, events) in [
            ("application/json", true, false),
            ("Application/JSON; charset=utf-8", true, false),
            ("application/vnd.api+json", true, false),
            ("text/event-stream;charset=utf-8", false, true),
            ("multipart/form-data; boundary=json", false, false),
            ("json", false, false),
            ("", false, false),
        ] {
            assert_eq!((is_json(&headers(kind)), is_event_stream(&headers(kind))), (json, events), "{kind}");
        }
        assert!(!is_json(&HeaderMap::new()));
    }
}
