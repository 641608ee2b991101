//! The gateway's own errors about calls to a provider, in the form that its callers read.

use http::header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::response::Parts;
use http::{Response, StatusCode};
use serde_json::json;
use tidegate::outbound::{CallError, CallErrorKind, CallStats, OutboundError, Provider, SendError};
use tidegate::store::Store;
use tidegate_core::{Clock, Span};
use tidegate_policy::outbound::{ErrorFormat, ProviderConfig as Plan};

use super::{CALL_ERROR, provider_client, set_tidegate_headers};
use crate::body::{BoxError, ResponseBody};
use crate::local_response;

/// The header by which an API tells its SDK if another request can help.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
const FALSE: HeaderValue = HeaderValue::from_static("false");
/// The longest wait that an SDK is left to. Some SDKs wait as long as `Retry-After` says, even for a day, and others
/// ignore a wait of more than a minute and return at once.
const LONGEST_SDK_WAIT: Span = Span::from_secs(60);

/// The error of a call whose reply broke off before its caller got any of it.
pub(super) fn broken_reply<S: Store, C: Clock>(
    provider: &Provider<S, C>,
    reply: &Parts,
    error: impl Into<BoxError>,
) -> OutboundError {
    let unknown = CallStats { attempts: 1, waited: Span::ZERO, credential: 0 };
    let stats = reply.extensions.get::<CallStats>().copied().unwrap_or(unknown);
    OutboundError::Call(CallError {
        provider: provider.config().name.clone(),
        kind: CallErrorKind::RetriesExhausted { attempts: stats.attempts, earliest: None },
        last_reply: Some(SendError::Inner(error.into())),
        stats,
        failed_at: provider.clock().now(),
    })
}

/// The response to a call without a reply.
pub(super) fn response(failed: &OutboundError, plan: &Plan) -> Response<ResponseBody> {
    let status = StatusCode::from_u16(failed.status()).unwrap_or(StatusCode::BAD_GATEWAY);
    let OutboundError::Call(call) = failed else { return formatted(plan.error_format, status, &error_chain(failed)) };
    let mut problem = call.to_body();
    problem.message += &reply_error(call);
    let sdk_body = sdk_body(plan.error_format, status, &problem.message);
    let body = match &sdk_body {
        Some(body) => serde_json::to_vec(body),
        None => serde_json::to_vec(&problem),
    };
    let mut response = local_response::json(status, body.unwrap_or_default().into());
    let headers = response.headers_mut();
    if let Some(wait) = call.retry_after() {
        headers.insert(RETRY_AFTER, HeaderValue::from(wait.as_secs_ceil()));
    }
    set_tidegate_headers(headers, plan, Some(call.stats), None);
    if sdk_body.is_some() {
        headers.insert(CALL_ERROR, HeaderValue::from_static(problem.error));
    }
    stop_long_waits(headers, plan);
    response
}

/// Tells an SDK not to retry if `Retry-After` asks for a longer wait than it is left to.
pub(super) fn stop_long_waits(headers: &mut HeaderMap, plan: &Plan) {
    let wait = headers.get(RETRY_AFTER).and_then(|wait| wait.to_str().ok()?.parse().ok()).map(Span::from_secs);
    if plan.error_format != ErrorFormat::Tidegate && wait > Some(LONGEST_SDK_WAIT) {
        headers.entry(SHOULD_RETRY).or_insert(FALSE);
    }
}

/// An error response about a provider's request.
pub(super) fn formatted(format: ErrorFormat, status: StatusCode, message: &str) -> Response<ResponseBody> {
    match sdk_body(format, status, message) {
        Some(body) => local_response::json(status, body.to_string().into()),
        None => local_response::error(status, message),
    }
}

/// The JSON of an error as a provider's SDKs read it, with the types and codes that they know. `None` for Tidegate's own
/// form.
fn sdk_body(format: ErrorFormat, status: StatusCode, message: &str) -> Option<serde_json::Value> {
    match format {
        ErrorFormat::Tidegate => None,
        ErrorFormat::OpenAi => {
            let (kind, code) = match status.as_u16() {
                429 => ("rate_limit_error", Some("rate_limit_exceeded")),
                400..=499 => ("invalid_request_error", None),
                503 => ("service_unavailable_error", Some("server_error")),
                _ => ("server_error", Some("server_error")),
            };
            Some(json!({ "error": { "message": message, "type": kind, "param": null, "code": code } }))
        }
        ErrorFormat::Anthropic => {
            let kind = match status.as_u16() {
                429 => "rate_limit_error",
                408 | 504 => "timeout_error",
                400..=499 => "invalid_request_error",
                503 => "overloaded_error",
                _ => "api_error",
            };
            Some(json!({ "type": "error", "error": { "type": kind, "message": message } }))
        }
    }
}

/// Returns the error of a call's last reply, to be appended to a message. Empty if there is none.
pub(crate) fn reply_error(call: &CallError<SendError>) -> String {
    call.last_reply.as_ref().map(|error| format!(": {}", error_chain(error))).unwrap_or_default()
}

/// Returns an error's text followed by its causes.
pub(crate) fn error_chain(error: &(dyn std::error::Error + 'static)) -> String {
    tidegate_outbound::causes(error).skip(1).fold(error.to_string(), |text, cause| {
        let cause = provider_client::describe_cause(cause);
        // Some errors include the text of their cause.
        if text.ends_with(&cause) { text } else { format!("{text}: {cause}") }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_a_type_that_sdks_know() {
        for (status, openai, code, anthropic) in [
            (400, "invalid_request_error", None, "invalid_request_error"),
            (408, "invalid_request_error", None, "timeout_error"),
            (429, "rate_limit_error", Some("rate_limit_exceeded"), "rate_limit_error"),
            (502, "server_error", Some("server_error"), "api_error"),
            (503, "service_unavailable_error", Some("server_error"), "overloaded_error"),
            (504, "server_error", Some("server_error"), "timeout_error"),
        ] {
            let body = |format| sdk_body(format, StatusCode::from_u16(status).unwrap(), "why");
            let expected = json!({ "error": { "message": "why", "type": openai, "code": code, "param": null } });
            assert_eq!(body(ErrorFormat::OpenAi), Some(expected), "{status}");
            let expected = json!({ "type": "error", "error": { "type": anthropic, "message": "why" } });
            assert_eq!(body(ErrorFormat::Anthropic), Some(expected), "{status}");
            assert_eq!(body(ErrorFormat::Tidegate), None);
        }
    }
}
