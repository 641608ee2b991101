//! Refusals and errors as gRPC clients read them: they take only the status of gRPC for one, and ignore other bodies.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde_json::Value;

const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// The wait after which a retry policy of a client repeats the call, in milliseconds.
const PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");
/// The value for a call that must not be repeated: no wait helps.
const NEVER: HeaderValue = HeaderValue::from_static("-1");

/// The characters of ASCII that gRPC escapes in messages. Those beyond ASCII always are.
const ENCODED_CHARS: &AsciiSet = &CONTROLS.add(b'%');

/// The content type of a request, if it is one of gRPC or gRPC-Web.
pub fn grpc_type(request: &HeaderMap) -> Option<&HeaderValue> {
    request.get(CONTENT_TYPE).filter(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Turns a refusal or an error into the response of a gRPC call without messages: status 200 and, in the headers,
/// `grpc-status`, `grpc-message` and, if there is a `Retry-After`, `grpc-retry-pushback-ms`, which is −1 for a refusal that no
/// wait can end. All other headers stay.
/// `kind` is the request's [content type](grpc_type).
///
/// | status | gRPC |
/// | --- | --- |
/// | 400 | 3, INVALID_ARGUMENT |
/// | 401 | 16, UNAUTHENTICATED |
/// | 403 | 7, PERMISSION_DENIED |
/// | 404, 405, 501 | 12, UNIMPLEMENTED |
/// | 413, 429, 431 | 8, RESOURCE_EXHAUSTED |
/// | 408, 502, 503 | 14, UNAVAILABLE |
/// | 504 | 4, DEADLINE_EXCEEDED |
/// | 500 | 13, INTERNAL |
/// | other | 2, UNKNOWN |
pub fn grpc_response(kind: &HeaderValue, response: Response<Bytes>) -> Response<Bytes> {
    let (mut parts, body) = response.into_parts();
    let mut message = message_of(&body).unwrap_or_else(|| parts.status.canonical_reason().unwrap_or("").to_owned());
    let wait = parts.headers.get(RETRY_AFTER).and_then(|wait| wait.to_str().ok()?.parse::<u64>().ok());
    if let Some(wait) = wait {
        message += &format!("; retry after {wait} s");
        parts.headers.insert(PUSHBACK, HeaderValue::from(wait.saturating_mul(1000)));
    } else if parts.status == StatusCode::TOO_MANY_REQUESTS {
        parts.headers.insert(PUSHBACK, NEVER);
    }
    parts.headers.insert(CONTENT_TYPE, kind.clone());
    parts.headers.remove(CONTENT_LENGTH);
    parts.headers.insert(STATUS, HeaderValue::from_static(status_of(parts.status)));
    if let Ok(message) = HeaderValue::try_from(utf8_percent_encode(&message, ENCODED_CHARS).to_string()) {
        parts.headers.insert(MESSAGE, message);
    }
    parts.status = StatusCode::OK;
    Response::from_parts(parts, Bytes::new())
}

fn status_of(status: StatusCode) -> &'static str {
    match status.as_u16() {
        400 => "3",
        401 => "16",
        403 => "7",
        404 | 405 | 501 => "12",
        413 | 429 | 431 => "8",
        408 | 502 | 503 => "14",
        504 => "4",
        500 => "13",
        _ => "2",
    }
}

/// The message in the JSON of an error: Tidegate's, that of a problem, or those of the SDKs of language models.
fn message_of(body: &[u8]) -> Option<String> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let texts = [&body["message"], &body["error"]["message"], &body["error"], &body["title"]];
    texts.into_iter().find_map(Value::as_str).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_have_the_status_message_and_wait_of_grpc() {
        let kind = HeaderValue::from_static("application/grpc+proto");
        for (status, wait, body, grpc_status, message, pushback) in [
            (
                429,
                Some("12"),
                r#"{"error":"Too many requests"}"#,
                "8",
                "Too many requests; retry after 12 s",
                Some("12000"),
            ),
            (429, None, r#"{"error":{"message":"none left"}}"#, "8", "none left", Some("-1")),
            (403, None, r#"{"type":"about:blank","title":"Forbidden"}"#, "7", "Forbidden", None),
            (
                400,
                None,
                r#"{"error":"Bad Request","message":"100% „é“"}"#,
                "3",
                "100%25 %E2%80%9E%C3%A9%E2%80%9C",
                None,
            ),
            (503, Some("1"), "", "14", "Service Unavailable; retry after 1 s", Some("1000")),
            (504, None, "no JSON", "4", "Gateway Timeout", None),
        ] {
            let mut response = Response::builder().status(status).header("ratelimit", "\"a\";r=0");
            if let Some(wait) = wait {
                response = response.header(RETRY_AFTER, wait);
            }
            let answer = grpc_response(&kind, response.body(body.into()).unwrap());
            let header = |name| answer.headers().get(name).map(|value| value.to_str().unwrap());
            assert_eq!((answer.status(), answer.body().len()), (StatusCode::OK, 0));
            assert_eq!(
                [header(CONTENT_TYPE), header(STATUS), header(MESSAGE), header(PUSHBACK), header(RETRY_AFTER)],
                [Some("application/grpc+proto"), Some(grpc_status), Some(message), pushback, wait],
                "{status}"
            );
            assert_eq!(answer.headers()["ratelimit"], "\"a\";r=0");
        }
    }
}
