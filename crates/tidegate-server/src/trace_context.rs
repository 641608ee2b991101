//! The W3C trace context of a request, by which its log lines are found from its trace.

use http::{HeaderMap, HeaderName};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The length of a trace context without the fields that later versions may append.
const LENGTH: usize = 55;

/// The trace context of a request: version, trace id, parent id and flags. `None` if there is none, or if it is invalid
/// (W3C Trace Context §3.2).
pub(crate) fn trace_parent(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let (Some(value), None) = (values.next(), values.next()) else { return None };
    let (known, more) = value.to_str().ok()?.split_at_checked(LENGTH)?;
    let mut parts = known.split('-');
    let mut part = |length| {
        let is_hex = |part: &&str| part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        parts.next().filter(|part| part.len() == length).filter(is_hex)
    };
    let (version, trace, parent, _flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    let is_zero = |id: &str| id.bytes().all(|byte| byte == b'0');
    let may_go_on = more.is_empty() || (version != "00" && more.starts_with('-'));
    (version != "ff" && !is_zero(trace) && !is_zero(parent) && may_go_on).then_some(known)
}

/// The trace id of a request.
pub(crate) fn trace_id(headers: &HeaderMap) -> Option<&str> {
    trace_parent(headers)?.split('-').nth(1)
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

    fn trace_of(values: &[&str]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("traceparent", HeaderValue::from_str(value).unwrap());
        }
        trace_id(&headers).map(str::to_owned)
    }

    #[test]
    fn only_valid_trace_contexts_are_read() {
        let valid = format!("00-{TRACE}-00f067aa0ba902b7-01");
        let later = format!("cc-{TRACE}-00f067aa0ba902b7-01-what.follows");
        for valid in [&valid, &later] {
            assert_eq!(trace_of(&[valid]).as_deref(), Some(TRACE), "{valid}");
        }
        for invalid in [
            "",
            TRACE,
            &valid.to_uppercase(),
            &valid.replacen("00-", "ff-", 1),
            &valid.replace(TRACE, &"0".repeat(32)),
            &valid.replace("00f067aa0ba902b7", &"0".repeat(16)),
            &valid.replace(TRACE, &TRACE[1..]),
            &valid.replace('-', "_"),
            &valid[..54],
            &format!("{valid}-more"),
            &format!("{valid}0"),
            &later.replace("-what", "what"),
            &valid.replace("-01", "-0x"),
        ] {
            assert_eq!(trace_of(&[invalid]), None, "{invalid}");
        }
        assert_eq!(trace_of(&[&valid, &valid]), None);
    }
}
