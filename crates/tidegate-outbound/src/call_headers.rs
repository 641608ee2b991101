//! The options of a call in the headers of its request.

use http::header::{HeaderMap, HeaderName};
use tidegate_core::Lane;
use tidegate_policy::parse_duration;

use super::CallOptions;

/// `Tidegate-Priority: background | user | webhook`.
pub const TIDEGATE_PRIORITY: HeaderName = HeaderName::from_static("tidegate-priority");
/// `Tidegate-Timeout`: a duration such as `5s` or `1m30s`.
pub const TIDEGATE_TIMEOUT: HeaderName = HeaderName::from_static("tidegate-timeout");
/// `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header).
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The prefix of all headers that only Tidegate reads.
const OWN_PREFIX: &str = "tidegate-";

/// A header with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name} must be {expected}")]
pub struct CallHeaderError {
    /// The header.
    pub name: HeaderName,
    /// The expected form.
    pub expected: &'static str,
}

/// Takes the options of a call from the headers of its request: [`TIDEGATE_PRIORITY`] and [`TIDEGATE_TIMEOUT`]. All
/// headers for Tidegate alone, `Tidegate-…`, are removed.
///
/// # Errors
/// The first header that is invalid or repeated.
pub fn take_call_options(headers: &mut HeaderMap) -> Result<CallOptions, CallHeaderError> {
    let mut options = CallOptions::default();
    let own_headers: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with(OWN_PREFIX)).cloned().collect();
    if own_headers.is_empty() {
        return Ok(options);
    }
    let lane = |text: &str| Lane::ALL.into_iter().find(|lane| lane.name().eq_ignore_ascii_case(text));
    if let Some(lane) = parse_header(headers, TIDEGATE_PRIORITY, "background, user or webhook", lane)? {
        options.lane = lane;
    }
    let duration = |text: &str| parse_duration(text).ok().filter(|span| !span.is_zero());
    let timeout = parse_header(headers, TIDEGATE_TIMEOUT, "a duration such as 5s, 500ms or 1m30s", duration)?;
    options.timeout = timeout.map(tidegate_core::Span::as_duration);
    for name in own_headers {
        headers.remove(name);
    }
    Ok(options)
}

/// True if a request has an idempotency key, so that it may safely be carried out twice.
pub fn has_idempotency_key(headers: &HeaderMap) -> bool {
    headers.get(&IDEMPOTENCY_KEY).is_some_and(|key| !key.as_bytes().trim_ascii().is_empty())
}

fn parse_header<T>(
    headers: &HeaderMap,
    name: HeaderName,
    expected: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, CallHeaderError> {
    let mut values = headers.get_all(&name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let parsed = value.to_str().ok().filter(|_| values.next().is_none()).and_then(|text| parse(text.trim()));
    parsed.map(Some).ok_or(CallHeaderError { name, expected })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;
    use std::time::Duration;

    fn take(lines: &[(&'static str, &'static str)]) -> (Result<CallOptions, CallHeaderError>, HeaderMap) {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        (take_call_options(&mut headers), headers)
    }

    #[test]
    fn headers_choose_lane_and_timeout() {
        let lines = [
            ("tidegate-priority", "Webhook"),
            ("tidegate-timeout", " 1m30s "),
            ("tidegate-token", "x"),
            ("accept", "*"),
        ];
        let (options, left) = take(&lines);
        let options = options.unwrap();
        assert_eq!((options.lane, options.timeout), (Lane::Webhook, Some(Duration::from_secs(90))));
        assert_eq!(left.keys().collect::<Vec<_>>(), ["accept"], "the provider isn't told");
        let (options, _) = take(&[]);
        let options = options.unwrap();
        assert_eq!((options.lane, options.timeout, options.cost), (Lane::User, None, 1));
    }

    #[test]
    fn invalid_option_headers_are_reported_by_name() {
        for (name, value) in [
            ("tidegate-priority", "urgent"),
            ("tidegate-priority", ""),
            ("tidegate-timeout", "5"),
            ("tidegate-timeout", "0s"),
            ("tidegate-timeout", "-5s"),
            ("tidegate-timeout", "1e999s"),
        ] {
            assert_eq!(take(&[(name, value)]).0.unwrap_err().name, name, "{value:?}");
        }
        assert!(take(&[("tidegate-timeout", "5s"), ("tidegate-timeout", "6s")]).0.is_err());
    }

    #[test]
    fn an_empty_idempotency_key_does_not_count() {
        let has = |lines: &[_]| has_idempotency_key(&take(lines).1);
        assert!(has(&[("idempotency-key", "\"8e03978e\"")]));
        assert!(!has(&[("idempotency-key", " ")]));
        assert!(!has(&[]));
    }
}
