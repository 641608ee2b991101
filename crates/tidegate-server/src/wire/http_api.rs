//! The decision API over HTTP: `/v1/check`, `status`, `reset`, `refund`, `release`, `renew` and `explain`.
//!
//! A question is `{"action","ip","key","platform","cost"}` (JSON for POST, a query string for GET) and, where limits
//! count by them, `method`, `path`, `host` and `headers`; or without an action but with a path, which then finds the
//! action. Answers are JSON. `check` answers 200 or 429 with the decision, `status` the same decision with 200.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::header::{ALLOW, AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use subtle::ConstantTimeEq as _;
use tidegate::core::Clock;
use tidegate::policy::{Forwarding, KeyError, Secret};
use tidegate::reply::Replies;
use tidegate::store::Store;
use tidegate::{CheckError, Gate};

use crate::answer::{self, json};
use crate::body::Body;
use crate::connection::DRAINED;
use crate::listener::Client;
use crate::refusals::{Refusal, Refusals};
use crate::watch::{Phase, Watch};
use crate::wire::forward_auth;
use crate::wire::question::{Question, Wrong, nearest};

/// The largest question. One with eight long key parts has a few hundred bytes.
const MAX_QUESTION: usize = 16 << 10;

const PATHS: [&str; 8] =
    ["/v1/check", "/v1/status", "/v1/explain", "/v1/reset", "/v1/refund", "/v1/release", "/v1/renew", "/v1/auth"];

/// What carries the token besides `Authorization`, which forward-auth passes on from the client.
const X_TIDEGATE_TOKEN: HeaderName = HeaderName::from_static("x-tidegate-token");

/// What all connections of the API share.
pub(crate) struct Api<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) replies: Replies,
    pub(crate) token: Option<Secret>,
    pub(crate) forwarding: Forwarding,
    pub(crate) deny_status: StatusCode,
    pub(crate) refusals: Arc<Refusals>,
}

/// Answers one request of a connection.
pub(crate) async fn serve<S: Store, C: Clock>(
    api: Arc<Api<S, C>>,
    client: Arc<Client>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    let watch = &*client.watch;
    watch.enter(Phase::Deciding);
    let mut response = if authorised(request.headers(), api.token.as_ref()) {
        route(&api, &client, request).await
    } else {
        dismiss(watch, request, unauthorised())
    };
    if watch.phase() != Phase::Linger {
        watch.enter(Phase::Idle);
    }
    if watch.is_draining() {
        answer::close(&mut response);
    }
    Ok(response)
}

/// Whether a request shows the token, if one is asked for. The comparison takes the same time wherever they differ.
pub(crate) fn authorised(headers: &HeaderMap, token: Option<&Secret>) -> bool {
    let Some(token) = token else { return true };
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
    });
    let own = headers.get(X_TIDEGATE_TOKEN).map(HeaderValue::as_bytes);
    [bearer, own].into_iter().flatten().any(|shown| bool::from(shown.ct_eq(token.expose().as_bytes())))
}

pub(crate) fn unauthorised() -> Response<Body> {
    const BEARER: HeaderValue = HeaderValue::from_static("Bearer realm=\"tidegate\"");
    let mut response = error(StatusCode::UNAUTHORIZED, "a bearer token is needed");
    response.headers_mut().insert(WWW_AUTHENTICATE, BEARER);
    response
}

/// Gives an answer to a request whose body is of no interest. A small one is read away behind the answer.
pub(crate) fn dismiss(watch: &Watch, request: Request<Incoming>, mut response: Response<Body>) -> Response<Body> {
    let body = request.into_body();
    if body.is_end_stream() {
        return response;
    }
    watch.enter(Phase::Linger);
    if body.size_hint().lower() <= DRAINED as u64 {
        watch.leave(body);
    } else {
        watch.set_lingers();
        answer::close(&mut response);
    }
    response
}

async fn route<S: Store, C: Clock>(api: &Api<S, C>, client: &Client, request: Request<Incoming>) -> Response<Body> {
    let watch = &*client.watch;
    let path = request.uri().path();
    let (method, allow) = match path {
        "/v1/check" | "/v1/reset" | "/v1/refund" | "/v1/release" | "/v1/renew" => (Method::POST, "POST"),
        "/v1/status" | "/v1/explain" => (Method::GET, "GET"),
        _ if path.strip_prefix(forward_auth::PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) => {
            let response = forward_auth::answer(api, client, &request).await;
            return dismiss(watch, request, response);
        }
        _ => {
            let message = match nearest(path, PATHS.into_iter()) {
                Some(nearest) => format!("no such path; did you mean {nearest}?"),
                None => format!("no such path; there are {}", PATHS.join(", ")),
            };
            return dismiss(watch, request, error(StatusCode::NOT_FOUND, &message));
        }
    };
    if *request.method() != method {
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &format!("{path} takes {allow}"));
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allow));
        return dismiss(watch, request, response);
    }
    if method == Method::GET {
        let response = match Question::from_query(request.uri().query().unwrap_or_default()) {
            Ok(question) => look(api, path, &question).await,
            Err(wrong) => bad(&wrong),
        };
        return dismiss(watch, request, response);
    }
    let (parts, mut body) = request.into_parts();
    watch.enter(Phase::Upload);
    let bytes = match collect(&mut body, watch).await {
        Ok(bytes) => bytes,
        Err(status) => {
            watch.set_lingers();
            let mut response = error(status, "a question has at most 16384 bytes, and arrives whole");
            answer::close(&mut response);
            watch.forgive(Phase::Linger);
            return response;
        }
    };
    watch.enter(Phase::Deciding);
    match Question::from_json(&bytes) {
        Ok(question) => act(api, parts.uri.path(), &question).await,
        Err(wrong) => bad(&wrong),
    }
}

/// The whole of a small body; nothing is copied where it came in one piece.
async fn collect(body: &mut Incoming, watch: &Watch) -> Result<Bytes, StatusCode> {
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    if body.size_hint().lower() > MAX_QUESTION as u64 {
        return Err(StatusCode::PAYLOAD_TOO_LARGE);
    }
    while !body.is_end_stream() {
        let frame = std::future::poll_fn(|cx| {
            if watch.is_overdue() {
                return std::task::Poll::Ready(Err(StatusCode::REQUEST_TIMEOUT));
            }
            Pin::new(&mut *body).poll_frame(cx).map(|frame| frame.transpose().map_err(|_| StatusCode::BAD_REQUEST))
        });
        let Some(frame) = frame.await? else { break };
        watch.touch();
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + all.len() + data.len() > MAX_QUESTION {
            return Err(StatusCode::PAYLOAD_TOO_LARGE);
        }
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&data);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

/// Questions that change nothing.
async fn look<S: Store, C: Clock>(api: &Api<S, C>, path: &str, question: &Question<'_>) -> Response<Body> {
    let query = match addressed(question) {
        Ok(()) => question.query(),
        Err(wrong) => return bad(&wrong),
    };
    if path == "/v1/explain" {
        return match api.gate.explain(&query).await {
            Ok(explanation) => written(StatusCode::OK, &explanation),
            Err(error) => refused_to_decide(api, &error),
        };
    }
    let action = match api.gate.action(&query) {
        Ok(action) => action,
        Err(error) => return refused_to_decide(api, &error),
    };
    match api.gate.status(&query).await {
        Ok(decision) => {
            let mut response = written(StatusCode::OK, &api.gate.report(&decision));
            api.replies.annotate(action, &decision, response.headers_mut());
            response
        }
        Err(error) => refused_to_decide(api, &error),
    }
}

/// Questions that count, or take back.
async fn act<S: Store, C: Clock>(api: &Api<S, C>, path: &str, question: &Question<'_>) -> Response<Body> {
    let query = match addressed(question) {
        Ok(()) => question.query(),
        Err(wrong) => return bad(&wrong),
    };
    let gives_back = matches!(path, "/v1/release" | "/v1/renew");
    let permit = match question.permit {
        Some(_) if !gives_back => {
            return bad(&Wrong::with("permit", format!("`permit` belongs to /v1/release and /v1/renew, not {path}")));
        }
        None if gives_back => {
            return bad(&Wrong::with("permit", "`permit` is missing: the check that was allowed gave one"));
        }
        permit => permit,
    };
    let done = match (path, permit) {
        ("/v1/release", Some(permit)) => api.gate.release(&query, permit).await.map(|held| ("released", held)),
        ("/v1/renew", Some(permit)) => api.gate.renew(&query, permit).await.map(|held| ("renewed", held)),
        ("/v1/reset", _) => api.gate.reset(&query).await.map(|()| ("reset", true)),
        ("/v1/refund", _) => api.gate.refund(&query).await.map(|()| ("refunded", true)),
        _ => return check(api, &query).await,
    };
    match done {
        Ok((what, whether)) => json(StatusCode::OK, format!(r#"{{"{what}":{whether}}}"#).into()),
        Err(error) => refused_to_decide(api, &error),
    }
}

async fn check<S: Store, C: Clock>(api: &Api<S, C>, query: &tidegate::Query<'_>) -> Response<Body> {
    let action = match api.gate.action(query) {
        Ok(action) => action,
        Err(error) => return refused_to_decide(api, &error),
    };
    let decision = match api.gate.check_as(action, query).await {
        Ok(decision) => decision,
        Err(error) => return refused_to_decide(api, &error),
    };
    if !decision.allowed || decision.shadow {
        api.refusals.note(api.gate.plan(), &Refusal { action, query, decision: &decision });
    }
    let status = if decision.allowed { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
    let mut response = written(status, &api.gate.report(&decision));
    if let Some(wait) = decision.retry_after.filter(|_| !decision.allowed) {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(wait.as_secs_ceil()));
    }
    api.replies.annotate(action, &decision, response.headers_mut());
    response
}

/// A question is about an action, or about a request whose path may find one.
fn addressed(question: &Question<'_>) -> Result<(), Wrong> {
    if question.action.is_some() || question.path.is_some() {
        return Ok(());
    }
    Err(Wrong::with("action", "`action` is missing (or the `method` and `path` that find one)"))
}

/// The answer to a question that can't be decided.
pub(crate) fn refused_to_decide<S: Store, C: Clock>(api: &Api<S, C>, error: &CheckError) -> Response<Body> {
    match error {
        CheckError::UnknownAction(unknown) => {
            let body = serde_json::json!({
                "error": "Not Found",
                "field": "action",
                "message": error.to_string(),
                "nearest": unknown.nearest,
            });
            written(StatusCode::NOT_FOUND, &body)
        }
        CheckError::Key(KeyError::Missing(missing)) => bad(&Wrong::with(&missing.part, error.to_string())),
        CheckError::Key(KeyError::Platform(_)) => bad(&Wrong::with("platform", error.to_string())),
        CheckError::Cost { .. } => bad(&Wrong::with("cost", error.to_string())),
        CheckError::Store(_) => {
            api.refusals.note_failure(api.gate.clock().now(), error);
            self::error(StatusCode::SERVICE_UNAVAILABLE, "the store can't be reached")
        }
    }
}

fn bad(wrong: &Wrong) -> Response<Body> {
    let mut body = serde_json::json!({ "error": "Bad Request", "field": wrong.field, "message": wrong.message });
    if let Some(nearest) = wrong.nearest {
        body["nearest"] = nearest.into();
    }
    written(StatusCode::BAD_REQUEST, &body)
}

/// A small error in JSON.
pub(crate) fn error(status: StatusCode, message: &str) -> Response<Body> {
    let error = status.canonical_reason().unwrap_or("Error");
    written(status, &serde_json::json!({ "error": error, "message": message }))
}

fn written(status: StatusCode, body: &impl serde::Serialize) -> Response<Body> {
    match serde_json::to_vec(body) {
        Ok(text) => json(status, text.into()),
        // Everything written here has string keys and finite numbers, which is all that serde_json asks.
        Err(_) => json(StatusCode::INTERNAL_SERVER_ERROR, Bytes::from_static(br#"{"error":"Internal Server Error"}"#)),
    }
}
