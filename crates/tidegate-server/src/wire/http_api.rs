//! The decision API over HTTP: `/v1/check`, `status`, `reset`, `refund`, `release`, `renew` and `explain`.
//!
//! A decision request is `{"action","ip","key","platform","cost"}`, as JSON for POST or a query string for GET. If
//! limits count by them, it also has `method`, `path`, `host` and `headers`. Without an action, the path selects the
//! action. Responses are JSON. `check` answers 200 or 429 with the decision, `status` the same decision with 200.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::header::{ALLOW, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::Service;
use tidegate::policy::{Forwarding, KeyError, MatchedActions, Query, canonical_ip, is_host};
use tidegate::reply::Replies;
use tidegate::store::Store;
use tidegate::{BlockError, Check, CheckError, Decision, Gate, PendingCheck};
use tidegate_core::{Clock, Time};
use tidegate_policy::CompatibleServer;

use crate::access::{Access, AccessError};
use crate::access_log::AccessSlot;
use crate::body::ResponseBody;
use crate::dashboard::remove_session_cookies;
use crate::listener::ConnectionContext;
use crate::local_response::{HttpError, discard_body, error, finish_response, json, json_response};
use crate::metrics::RequestMetrics;
use crate::refusal_log::RefusalLog;
use crate::rejections::RejectionReason;
use crate::state_cell::ListenerState;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};
use crate::wire::compat::CompatiblePath;
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::forward_auth::{self, ForwardAuthWarnings};
use crate::wire::rls::YamlLimits;
use crate::wire::small_body::{BodyCollector, MAX_BYTES, collect_body, unreadable_body_response};
use crate::wire::{openapi, routes};

/// The state that all connections of the API share.
pub(crate) struct ApiState<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) replies: Replies,
    pub(crate) access: Access,
    pub(crate) forwarding: Forwarding,
    /// True if forward-auth is answered.
    pub(crate) forward_auth: bool,
    pub(crate) deny_status: StatusCode,
    /// The other servers whose paths are answered.
    pub(crate) compat: Vec<CompatibleServer>,
    /// The limits that limitador's paths are about.
    pub(crate) limits: Option<YamlLimits>,
    pub(crate) refusals: Arc<RefusalLog>,
    pub(crate) metrics: Arc<RequestMetrics>,
    pub(crate) warnings: ForwardAuthWarnings,
}

pub(crate) struct ApiService<S: Store, C: Clock>(Arc<ApiConnection<S, C>>);

/// One client connection to the API.
pub(crate) struct ApiConnection<S: Store, C: Clock> {
    api: Arc<ApiState<S, C>>,
    context: Arc<ConnectionContext>,
}

impl<S: Store, C: Clock> ListenerState for ApiState<S, C> {
    type Service = ApiService<S, C>;

    fn connection_service(self: Arc<Self>, client: Arc<ConnectionContext>) -> ApiService<S, C> {
        ApiService(Arc::new(ApiConnection { api: self, context: client }))
    }

    fn client_ip(&self, peer: IpAddr, request: &Request<Incoming>) -> IpAddr {
        match forward_auth::is_forward_auth_path(request.uri().path()) {
            true => self.forwarding.client_ip(peer, request.headers()),
            false => canonical_ip(peer),
        }
    }
}

impl<S: Store, C: Clock> Service<Request<Incoming>> for ApiService<S, C> {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = ApiResponseFuture<S, C>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let ApiConnection { api, context: client } = &*self.0;
        // Forward-auth skips the checks of browser headers, because front servers pass on their clients' headers.
        let is_let_pass =
            |denied| denied != AccessError::Token && forward_auth::is_forward_auth_path(request.uri().path());
        let refusal = match api.access.check(&request, client.address.ip()) {
            Err(denied) if !is_let_pass(denied) => {
                Some(api.access.denied_response(denied, &request, client, api.gate.clock().now()))
            }
            _ if forward_auth::is_misdirected(&request) => {
                Some(forward_auth::reject_misdirected(api, client, &request))
            }
            _ => None,
        };
        if let Some(refusal) = refusal {
            client.watch.enter(ConnectionPhase::Deciding);
            let response = discard_body(&client.watch, request.into_body(), false, refusal);
            return ApiResponseFuture::Ready(Some(finish_response(&client.watch, response)));
        }
        if request.uri().path() == "/v1/check" && request.method() == Method::POST {
            // The most frequent request has no state but its body, so it needs no boxed future.
            client.watch.enter(ConnectionPhase::Upload);
            let collecting = BodyCollector::start(request.into_body(), &client.watch);
            return ApiResponseFuture::CheckBody { call: Arc::clone(&self.0), collecting };
        }
        client.watch.enter(ConnectionPhase::Deciding);
        let call = Arc::clone(&self.0);
        ApiResponseFuture::Pending(Box::pin(async move {
            let response = route(&call.api, &call.context, request).await;
            finish_response(&call.context.watch, response)
        }))
    }
}

/// A response that is ready, or a future of it.
pub(crate) enum ApiResponseFuture<S: Store, C: Clock> {
    Ready(Option<Response<ResponseBody>>),
    CheckBody { call: Arc<ApiConnection<S, C>>, collecting: BodyCollector },
    Pending(Pin<Box<dyn Future<Output = Response<ResponseBody>> + Send>>),
}

impl<S: Store, C: Clock> Future for ApiResponseFuture<S, C> {
    type Output = Result<Response<ResponseBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = match &mut *self {
            Self::Ready(response) => response.take().expect("invariant: a future that is ready is not polled again"),
            Self::Pending(later) => ready!(later.as_mut().poll(cx)),
            Self::CheckBody { call, collecting } => {
                let watch = &*call.context.watch;
                let response = match ready!(collecting.poll(watch, cx)) {
                    Err(status) => unreadable_body_response(watch, MAX_BYTES, status),
                    Ok(bytes) => {
                        match DecisionRequest::from_json(&bytes).and_then(|request| check(&call.api, &request, watch)) {
                            Err(wrong) => bad_request(wrong),
                            Ok(CheckResponse::Ready(response)) => response,
                            Ok(CheckResponse::Pending(actions, asked_at, pending)) => {
                                let call = Arc::clone(call);
                                *self = Self::Pending(Box::pin(async move {
                                    let (metrics, clock) = (&call.api.metrics, call.api.gate.clock());
                                    let decided = pending.decision().await;
                                    metrics.record_store_decision(asked_at, decided.is_ok(), clock);
                                    let response = match (decided, DecisionRequest::from_json(&bytes)) {
                                        (Ok(decision), Ok(request)) => decision_response(
                                            &call.api,
                                            actions,
                                            &request.query(),
                                            &decision,
                                            &call.context.watch,
                                        ),
                                        (Err(error), Ok(request)) => {
                                            metrics.record_check_error(&error);
                                            check_error_response(
                                                &call.api.gate,
                                                &call.api.refusals,
                                                &request.query(),
                                                &error,
                                                &call.context.watch.access,
                                            )
                                        }
                                        (_, Err(wrong)) => bad_request(wrong),
                                    };
                                    finish_response(&call.context.watch, response)
                                }));
                                return self.poll(cx);
                            }
                        }
                    }
                };
                finish_response(watch, response)
            }
        };
        Poll::Ready(Ok(response))
    }
}

async fn route<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    client: &ConnectionContext,
    mut request: Request<Incoming>,
) -> Response<ResponseBody> {
    let watch = &*client.watch;
    let path = request.uri().path();
    if forward_auth::is_forward_auth_path(path) {
        // As the proxy, so that both count the same values.
        remove_session_cookies(request.headers_mut());
        let response = forward_auth::handle(api, client, &request).await;
        return discard_body(watch, request.into_body(), false, response);
    }
    let compatible = CompatiblePath::find(path).filter(|path| api.compat.contains(&path.server()));
    let Some(method) = compatible.map(CompatiblePath::method).or_else(|| routes::method_of(path)) else {
        let not_found = error(StatusCode::NOT_FOUND, &routes::unknown_path_message(path));
        return discard_body(watch, request.into_body(), false, not_found);
    };
    if *request.method() != method {
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &format!("{path} takes {method}"));
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(method));
        return discard_body(watch, request.into_body(), false, response);
    }
    if let Some(path) = compatible.filter(|_| method == "GET") {
        let response = path.answer(api, &[], &watch.access).await.unwrap_or_else(bad_request);
        return discard_body(watch, request.into_body(), false, response);
    }
    if path == openapi::PATH {
        return discard_body(watch, request.into_body(), false, json(StatusCode::OK, openapi::DOCUMENT.into()));
    }
    if method == "GET" {
        let query = request.uri().query().unwrap_or_default();
        let asked = DecisionRequest::from_query(query);
        let response = handle(api, path, asked, &watch.access).await.unwrap_or_else(bad_request);
        return discard_body(watch, request.into_body(), false, response);
    }
    let is_compatible = compatible.is_some();
    let (parts, body) = request.into_parts();
    let bytes = match collect_body(watch, body, MAX_BYTES).await {
        Ok(bytes) => bytes,
        Err(response) => return response,
    };
    if let Some(path) = CompatiblePath::find(parts.uri.path()).filter(|_| is_compatible) {
        return path.answer(api, &bytes, &watch.access).await.unwrap_or_else(bad_request);
    }
    let asked = DecisionRequest::from_json(&bytes);
    handle(api, parts.uri.path(), asked, &watch.access).await.unwrap_or_else(bad_request)
}

/// Handles a request other than a check.
async fn handle<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    path: &str,
    request: Result<DecisionRequest<'_>, DecisionRequestError>,
    access: &AccessSlot,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let request = request?;
    let query = &request.query();
    let names = || api.gate.plan().action_names(api.gate.actions(query).ok()?);
    access.note(|entry| entry.note_subject(query, names()));
    if path == "/v1/reset" {
        return reset(&api.gate, &api.refusals, &request, access).await;
    }
    validate(&api.gate, &api.refusals, path, &request, access)?;
    let response = match (path, request.permit) {
        ("/v1/status", _) => status_response(api, query).await,
        ("/v1/explain", _) => api.gate.explain(query).await.map(|explained| json_response(StatusCode::OK, &explained)),
        ("/v1/release", Some(permit)) => {
            api.gate.release(query, permit).await.map(|held| change_response("released", held))
        }
        ("/v1/renew", Some(permit)) => api.gate.renew(query, permit).await.map(|held| change_response("renewed", held)),
        _ => api.gate.refund(query).await.map(|()| change_response("refunded", true)),
    };
    Ok(response.unwrap_or_else(|error| check_error_response(&api.gate, &api.refusals, query, &error, access)))
}

/// Handles a reset.
pub(crate) async fn reset<S: Store, C: Clock>(
    gate: &Gate<S, C>,
    refusals: &RefusalLog,
    request: &DecisionRequest<'_>,
    access: &AccessSlot,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    validate(gate, refusals, "/v1/reset", request, access)?;
    let query = &request.query();
    Ok(match gate.reset(query).await {
        Ok(report) => {
            refusals.clients.forget(&report.keys);
            json_response(StatusCode::OK, &report)
        }
        Err(error) => check_error_response(gate, refusals, query, &error, access),
    })
}

async fn status_response<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    query: &Query<'_>,
) -> Result<Response<ResponseBody>, CheckError> {
    let actions = api.gate.actions(query)?;
    let decision = api.gate.status(query).await?;
    let mut response = json(StatusCode::OK, api.replies.report(&decision));
    api.replies.annotate(actions, &decision, response.headers_mut());
    Ok(response)
}

/// The response to a change: `{"released":true}`.
fn change_response(what: &str, value: bool) -> Response<ResponseBody> {
    json(StatusCode::OK, format!(r#"{{"{what}":{value}}}"#).into())
}

/// A check that was answered at once or is pending.
enum CheckResponse<S: Store, C: Clock> {
    Ready(Response<ResponseBody>),
    /// The actions, the time at which the check began, and the check.
    Pending(MatchedActions, Time, Box<PendingCheck<S, C>>),
}

fn check<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    request: &DecisionRequest<'_>,
    watch: &ConnectionWatch,
) -> Result<CheckResponse<S, C>, DecisionRequestError> {
    let (query, asked_at) = (request.query(), api.gate.clock().now());
    watch.access.note(|entry| entry.note_question(&query));
    validate(&api.gate, &api.refusals, "/v1/check", request, &watch.access)?;
    let started = api.gate.actions(&query).and_then(|actions| {
        let query = Query { actions: Some(actions), ..query };
        Ok((actions, api.gate.begin_check(&query)?))
    });
    Ok(match started {
        Ok((actions, Check::Decided(decision))) => {
            api.metrics.record_decision(asked_at, api.gate.clock());
            CheckResponse::Ready(decision_response(api, actions, &query, &decision, watch))
        }
        Ok((actions, Check::Pending(pending))) => CheckResponse::Pending(actions, asked_at, Box::new(pending)),
        Err(error) => {
            api.metrics.record_check_error(&error);
            CheckResponse::Ready(check_error_response(&api.gate, &api.refusals, &query, &error, &watch.access))
        }
    })
}

/// The decision about a call, with its time in the metrics.
pub(crate) async fn decide<S: Store, C: Clock>(
    gate: &Gate<S, C>,
    metrics: &RequestMetrics,
    query: &Query<'_>,
) -> Result<Decision, CheckError> {
    let (clock, asked_at) = (gate.clock(), gate.clock().now());
    let decided = match gate.begin_check(query) {
        Ok(Check::Decided(decision)) => {
            metrics.record_decision(asked_at, clock);
            Ok(decision)
        }
        Ok(Check::Pending(pending)) => {
            // A future of its own keeps those of all callers small; most decisions need none.
            let decided = Box::pin(pending.decision()).await;
            metrics.record_store_decision(asked_at, decided.is_ok(), clock);
            decided
        }
        Err(error) => Err(error),
    };
    decided.inspect_err(|error| metrics.record_check_error(error))
}

fn decision_response<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    actions: MatchedActions,
    query: &Query<'_>,
    decision: &Decision,
    watch: &ConnectionWatch,
) -> Response<ResponseBody> {
    api.refusals.log_decision(api.gate.plan(), actions, query, decision, &watch.access);
    api.replies.decision(actions, decision).map(ResponseBody::full)
}

/// Checks that a request names an action, or has a path that can select one, and that it has a permit if its path needs
/// one. Requests that change nothing may have one.
pub(crate) fn validate<S: Store, C: Clock>(
    gate: &Gate<S, C>,
    refusals: &RefusalLog,
    path: &str,
    request: &DecisionRequest<'_>,
    access: &AccessSlot,
) -> Result<(), DecisionRequestError> {
    let query = request.query();
    if query.host.is_some_and(|host| !is_host(host.as_bytes())) {
        let why = "a `host` is a name or an address (IPv6 in brackets) and at most a port";
        refusals.log_rejection(gate.clock().now(), RejectionReason::Host, &query, why, access);
        return Err(DecisionRequestError::new("host", why));
    }
    if query.action.is_none() && query.path.is_none() {
        let message = match path {
            "/v1/reset" | "/v1/block" if query.ip.is_some() || query.key.is_some() => return Ok(()),
            "/v1/reset" => "`action` is missing (or an `ip` or `key`, which is then reset under all actions)",
            "/v1/block" => "`action` is missing (or an `ip` or `key`, which is then blocked under all actions)",
            _ => "`action` is missing (or the `method` and `path` that find one)",
        };
        return Err(DecisionRequestError::new("action", message));
    }
    match (path, request.permit) {
        ("/v1/release" | "/v1/renew", None) => {
            Err(DecisionRequestError::new("permit", "`permit` is missing: the check that was allowed gave one"))
        }
        ("/v1/check" | "/v1/reset" | "/v1/block" | "/v1/refund", Some(_)) => {
            let message = format!("`permit` belongs to /v1/release and /v1/renew, not {path}");
            Err(DecisionRequestError::new("permit", message))
        }
        _ => Ok(()),
    }
}

/// The response to a decision request that can't be decided.
pub(crate) fn check_error_response<S: Store, C: Clock>(
    gate: &Gate<S, C>,
    refusals: &RefusalLog,
    query: &Query<'_>,
    cause: &CheckError,
    access: &AccessSlot,
) -> Response<ResponseBody> {
    let field = match cause {
        CheckError::Store(_) => {
            refusals.log_failure(gate.clock().now(), cause);
            return HttpError::StoreUnavailable.response();
        }
        CheckError::UnknownAction(unknown) => {
            let body = serde_json::json!({
                "error": "Not Found",
                "field": "action",
                "message": cause.to_string(),
                "nearest": unknown.nearest,
            });
            return json_response(StatusCode::NOT_FOUND, &body);
        }
        CheckError::Key(KeyError::Uncountable(uncountable)) => {
            let why = uncountable.to_string();
            refusals.log_rejection(gate.clock().now(), uncountable.into(), query, &why, access);
            uncountable.part()
        }
        CheckError::Key(KeyError::Missing(missing)) => Some(&*missing.part),
        CheckError::Key(KeyError::Platform(_)) => Some("platform"),
        CheckError::Cost { .. } => Some("cost"),
        CheckError::Block(BlockError::TooLong { .. }) => Some("for"),
        CheckError::Block(BlockError::NoPenalty) => Some("action").filter(|_| query.action.is_some()),
    };
    bad_request(DecisionRequestError::new(field, cause.to_string()))
}

pub(crate) fn bad_request(wrong: DecisionRequestError) -> Response<ResponseBody> {
    let mut body = serde_json::json!({ "error": "Bad Request", "field": wrong.field, "message": wrong.message });
    if let Some(nearest) = wrong.nearest {
        body["nearest"] = nearest.into();
    }
    json_response(StatusCode::BAD_REQUEST, &body)
}
