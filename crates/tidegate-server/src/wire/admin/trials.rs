//! `/v1/try`: the requests of the last hour, decided by other terms of a limit.

use std::sync::Arc;

use http::header::{HeaderValue, RETRY_AFTER};
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::{Map, Value};
use tidegate::store::Store;
use tidegate_core::Clock;

use super::AdminState;
use super::changes::denial;
use crate::access::Identity;
use crate::body::ResponseBody;
use crate::listener::ConnectionContext;
use crate::local_response::{discard_body, error, json_response};
use crate::trial::{TrialError, TrialRequest, run_trial};
use crate::wire::decision_request::DecisionRequestError;
use crate::wire::http_api::bad_request;
use crate::wire::small_body::{MAX_BYTES, collect_body};

const FIELDS: [&str; 3] = ["action", "limit", "terms"];

/// Tries terms if the caller may.
pub(super) async fn respond<S: Store, C: Clock + Clone>(
    admin: &Arc<AdminState<S, C>>,
    client: &ConnectionContext,
    caller: Identity<'_>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let watch = &*client.watch;
    if let Some((status, message)) = denial(admin, caller, request.headers()) {
        return discard_body(watch, request.into_body(), false, error(status, &message));
    }
    let body = match collect_body(watch, request.into_body(), MAX_BYTES).await {
        Ok(body) => body,
        Err(response) => return response,
    };
    let request = match read_request(&body) {
        Ok(request) => request,
        Err(wrong) => return bad_request(wrong),
    };
    match run_trial(&admin.policy, &admin.metrics.parts, &request, admin.gate.clock().now()).await {
        Ok(report) => json_response(StatusCode::OK, &report),
        Err(TrialError::Field(field, message)) => bad_request(DecisionRequestError::new(field, message)),
        Err(failure) => {
            let mut response = error(failure.status(), &failure.to_string());
            if matches!(failure, TrialError::Busy) {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            response
        }
    }
}

fn read_request(body: &[u8]) -> Result<TrialRequest, DecisionRequestError> {
    let fields: Map<String, Value> = serde_json::from_slice(body)
        .map_err(|error| DecisionRequestError::new(None, format!("the body is no JSON object: {error}")))?;
    let mut request = TrialRequest::default();
    for (name, value) in fields {
        let field = match name.as_str() {
            "action" => &mut request.action,
            "limit" => &mut request.limit,
            "terms" => &mut request.terms,
            name => return Err(DecisionRequestError::unknown_field(name, &FIELDS)),
        };
        match value {
            Value::String(text) => *field = text,
            _ => return Err(DecisionRequestError::new(&*name, format!("`{name}` is a string"))),
        }
    }
    Ok(request)
}
