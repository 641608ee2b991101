//! Forward-auth: a front server (nginx `auth_request`, Traefik ForwardAuth, Caddy `forward_auth`, Envoy `ext_authz`)
//! asks about each of its requests and obeys the status.
//!
//! At `/v1/auth` the original request is described by `X-Forwarded-Method`, `-Uri` and `-Host`, or by
//! `X-Original-Method` and `X-Original-URI` or `X-Original-URL`. A path behind it is that of the original request, and
//! the question's method and `Host` are the original ones. Front servers pass on their clients' headers. So if two
//! descriptions disagree, one of them is a client's and the response is 400.
//!
//! `/v1/auth?action=NAME` names the action instead. Caddy passes on its client's query string, unless its `uri` has one.
//! So if the original request has the same parameter, the client may have written the name, and the response is 400.

mod original_request;

use std::borrow::Cow;
use std::sync::Once;

use http::header::HeaderName;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use tidegate::policy::{ListStatus, MatchedActions, Plan, Query, UncountableError, canonical_ip, is_host};
use tidegate::store::Store;
use tidegate::{CheckError, Decision, Gate};
use tidegate_core::{Clock, Reason};

use crate::access_log::AccessSlot;
use crate::body::ResponseBody;
use crate::hop_headers;
use crate::listener::ConnectionContext;
use crate::local_response::error;
use crate::metrics::RequestMetrics;
use crate::rejections::RejectionReason;
use crate::wire::decision_request::decode;
use crate::wire::http_api::{self, ApiState, check_error_response};
use original_request::{OriginalRequest, X_ORIGINAL_METHOD, X_ORIGINAL_URI, X_ORIGINAL_URL, appended_path};

/// The path of forward-auth, or its prefix.
pub(crate) const PATH_PREFIX: &str = "/v1/auth";
/// The parameter that names an action in a question's query string.
const ACTION_PARAMETER: &str = "action=";
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// A header that Envoy adds to its own requests.
const X_ENVOY_TIMEOUT: HeaderName = HeaderName::from_static("x-envoy-expected-rq-timeout-ms");

/// The fault of a limit on calls in flight.
pub(crate) const IN_FLIGHT: &str =
    "a limit on calls in flight can't be kept here, because the end of a call isn't told";

/// The warnings about front servers, each written at most once.
#[derive(Debug)]
pub(crate) struct ForwardAuthWarnings {
    untrusted_peer: Once,
    action_in_path: Once,
    nginx_status: Once,
}

impl Default for ForwardAuthWarnings {
    fn default() -> Self {
        Self { untrusted_peer: Once::new(), action_in_path: Once::new(), nginx_status: Once::new() }
    }
}

/// Returns true if a request to this path belongs to forward-auth.
pub(crate) fn is_forward_auth_path(path: &str) -> bool {
    path.strip_prefix(PATH_PREFIX).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// True if a front server asks with a target that its client has chosen. Caddy writes the target of its client into the
/// question if that is no path (`GET x:http://localhost/v1/openapi.json`), and takes any success as permission.
pub(crate) fn is_misdirected<B>(request: &Request<B>) -> bool {
    let is_proper = || {
        let is_absolute = request.version() < Version::HTTP_2 && request.uri().scheme().is_some();
        is_forward_auth_path(request.uri().path()) && !is_absolute
    };
    request.method() == Method::GET && original_request::is_described(request.headers()) && !is_proper()
}

/// Tells a front server if it may serve the original request. The status is 200, or the configured one for a refusal
/// (403 for a client on the deny list). The response has all headers of a refusal, which the front server can copy.
pub(crate) async fn handle<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    client: &ConnectionContext,
    request: &Request<Incoming>,
) -> Response<ResponseBody> {
    decide(api, client, request).await.unwrap_or_else(|undecided| reject_question(api, client, request, undecided))
}

/// Answers a question for which [`is_misdirected`] is true.
pub(crate) fn reject_misdirected<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    client: &ConnectionContext,
    request: &Request<Incoming>,
) -> Response<ResponseBody> {
    let message = "X-Forwarded-Method or X-Forwarded-Uri describes a request, as forward-auth does, which asks at \
        /v1/auth: a client has chosen this path by a target such as x:http://host/path";
    reject_question(api, client, request, Undecided(StatusCode::BAD_REQUEST, message.into()))
}

fn reject_question<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    client: &ConnectionContext,
    request: &Request<Incoming>,
    Undecided(status, message): Undecided,
) -> Response<ResponseBody> {
    let (ip, path) = (Some(canonical_ip(client.address.ip())), Some(request.uri().path()));
    let query = Query { ip, path, ..Query::default() };
    let (now, access) = (api.gate.clock().now(), &client.watch.access);
    api.refusals.log_rejection(now, RejectionReason::Question, &query, &message, access);
    error(status, &message)
}

/// A question that can't be decided: the front server isn't configured for this policy, or its client chose the path.
struct Undecided(StatusCode, Cow<'static, str>);

async fn decide<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    client: &ConnectionContext,
    request: &Request<Incoming>,
) -> Result<Response<ResponseBody>, Undecided> {
    if !api.forward_auth {
        let message = "forward-auth is off: api.forward_auth is false, or the policy limits calls in flight, which \
            forward-auth can't keep";
        return Err(Undecided(StatusCode::NOT_FOUND, message.into()));
    }
    let headers = request.headers();
    let peer = canonical_ip(client.address.ip());
    let ip = api.forwarding.client_ip(peer, headers);
    if !api.forwarding.trusted.contains(peer) {
        api.warnings.untrusted_peer.call_once(|| {
            tracing::warn!(
                %peer,
                "forward-auth is asked by a peer that is not in inbound.trusted_proxies: all of its clients count as one"
            );
        });
    }
    let plan = api.gate.plan();
    let original = match OriginalRequest::from_question(request) {
        Ok(described) => described,
        Err(message) => {
            api.warnings.log_action_in_path(plan, request.uri());
            return Err(Undecided(StatusCode::BAD_REQUEST, message.into()));
        }
    };
    let action_name = match named_action(request.uri(), original.path) {
        Ok(name) => name,
        Err(message) => return Err(Undecided(StatusCode::BAD_REQUEST, message.into())),
    };
    if action_name.is_none() && (original.method.is_none() || original.path.is_none()) {
        let message = "nothing says which request this is about: X-Forwarded-Method and X-Forwarded-Uri, or \
            X-Original-Method and X-Original-URI, or a path after /v1/auth, or /v1/auth?action=NAME";
        return Err(Undecided(StatusCode::BAD_REQUEST, message.into()));
    }
    let query = Query {
        action: action_name,
        ip: Some(ip),
        method: original.method,
        path: original.path,
        host: original.host,
        headers: Some(headers),
        headers_are_joined: is_of_envoy(request, &original),
        ..Query::default()
    };
    let access = &client.watch.access;
    access.note(|entry| entry.note_question(&query));
    let (actions, decision) = match judge(&api.gate, &api.metrics, &query).await {
        Ok(judged) => judged,
        Err(NoDecision::Rejected(reason, why)) => return Ok(reject(api, request, reason, &query, &why, access)),
        Err(NoDecision::InFlight) => return Err(Undecided(StatusCode::BAD_REQUEST, IN_FLIGHT.into())),
        Err(NoDecision::Failed(CheckError::UnknownAction(unknown))) => {
            return Err(Undecided(StatusCode::NOT_FOUND, unknown.to_string().into()));
        }
        Err(NoDecision::Failed(error @ CheckError::Store(_))) => {
            return Ok(check_error_response(&api.gate, &api.refusals, &query, &error, access));
        }
        Err(NoDecision::Failed(error)) => return Err(Undecided(StatusCode::BAD_REQUEST, error.to_string().into())),
    };
    if actions == MatchedActions::NONE {
        api.warnings.log_action_in_path(plan, request.uri());
    }
    api.refusals.log_decision(plan, actions, &query, &decision, access);
    if decision.allowed {
        let mut response = Response::new(ResponseBody::empty());
        api.replies.annotate(actions, &decision, response.headers_mut());
        return Ok(response);
    }
    let mut response = api.replies.refusal(actions, &decision, headers).map(ResponseBody::full);
    if decision.reason != Reason::DenyList {
        *response.status_mut() = deny_status(api, request);
    }
    Ok(response)
}

/// The reasons for which there is no decision about a request that another server has received.
pub(crate) enum NoDecision {
    /// The proxy would reject it, for this reason.
    Rejected(RejectionReason, String),
    /// Its action limits calls in flight, whose end isn't told.
    InFlight,
    /// The question can't be decided.
    Failed(CheckError),
}

impl From<CheckError> for NoDecision {
    fn from(error: CheckError) -> Self {
        match error.uncountable() {
            Some(uncountable) => Self::Rejected(uncountable.into(), uncountable.to_string()),
            None => Self::Failed(error),
        }
    }
}

/// True if calls of these actions meet a limit on calls in flight.
pub(crate) fn meets_concurrency(plan: &Plan, actions: MatchedActions) -> bool {
    plan.global_has_concurrency() || actions.iter().any(|id| plan.action(id).has_concurrency())
}

/// Decides about a request that another server has received, as the proxy would.
pub(crate) async fn judge<S: Store, C: Clock>(
    gate: &Gate<S, C>,
    metrics: &RequestMetrics,
    query: &Query<'_>,
) -> Result<(MatchedActions, Decision), NoDecision> {
    if query.host.is_some_and(|host| !is_host(host.as_bytes())) {
        let why = "the host is no name or address with at most a port";
        return Err(NoDecision::Rejected(RejectionReason::Host, why.to_owned()));
    }
    let (plan, actions) = (gate.plan(), gate.actions(query)?);
    if meets_concurrency(plan, actions) {
        return Err(NoDecision::InFlight);
    }
    let lookalikes = query.headers.map(|headers| hop_headers::lookalikes(headers, plan.keyed_headers()));
    if let Some([lookalike, ..]) = lookalikes.as_deref()
        && query.ip.is_none_or(|ip| plan.list_status(ip) == ListStatus::Neither)
    {
        let similar = UncountableError::SimilarHeader(lookalike.to_string());
        return Err(NoDecision::Rejected((&similar).into(), similar.to_string()));
    }
    let decision = http_api::decide(gate, metrics, &Query { actions: Some(actions), ..*query }).await?;
    Ok((actions, decision))
}

/// Rejects a request that the proxy would answer with 400. *Why the status of a refusal:* the error is in the client's
/// request and not in the front server's question, and nginx turns a 400 into a 500.
fn reject<S: Store, C: Clock>(
    api: &ApiState<S, C>,
    question: &Request<Incoming>,
    reason: RejectionReason,
    query: &Query<'_>,
    why: &str,
    access: &AccessSlot,
) -> Response<ResponseBody> {
    api.refusals.log_rejection(api.gate.clock().now(), reason, query, why, access);
    error(deny_status(api, question), why)
}

/// The status of a refusal. Warns once if nginx, which may be the front server, turns it into a 500.
fn deny_status<S: Store, C: Clock>(api: &ApiState<S, C>, question: &Request<Incoming>) -> StatusCode {
    let status = api.deny_status;
    if !matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) && may_be_nginx(question) {
        api.warnings.nginx_status.call_once(|| {
            tracing::warn!(
                status = status.as_u16(),
                "forward-auth refuses with a status that nginx turns into a 500: if nginx asks, set api.deny_status = 403"
            );
        });
    }
    status
}

/// True if nginx' `auth_request` may have sent a question. Caddy and Traefik always send `X-Forwarded-Proto`, and never
/// HTTP/1.0, nginx' default, or nginx' usual `X-Original-*`.
fn may_be_nginx<B>(question: &Request<B>) -> bool {
    let headers = question.headers();
    let has_value = |name: &HeaderName| headers.get(name).is_some_and(|value| !value.is_empty());
    appended_path(question.uri()).is_none()
        && (question.version() == Version::HTTP_10
            || !has_value(&X_FORWARDED_PROTO)
            || [X_ORIGINAL_METHOD, X_ORIGINAL_URI, X_ORIGINAL_URL].iter().any(has_value))
}

/// True if Envoy may have sent a question. It appends the path, or it describes nothing and has a header of Envoy's. A client's
/// header of that name only lets more be counted.
fn is_of_envoy<B>(question: &Request<B>, original: &OriginalRequest<'_>) -> bool {
    appended_path(question.uri()).is_some()
        || *original == OriginalRequest::default() && question.headers().contains_key(X_ENVOY_TIMEOUT)
}

/// The action that a question names in its query string. A question with an appended path names none.
///
/// # Errors
/// It names several, or the client may have written the name.
fn named_action<'q>(question: &'q Uri, original_path: Option<&str>) -> Result<Option<&'q str>, &'static str> {
    let query = question.query().filter(|_| appended_path(question).is_none()).unwrap_or_default();
    let mut names = query.split('&').filter_map(|pair| pair.strip_prefix(ACTION_PARAMETER));
    let Some(name) = names.next() else { return Ok(None) };
    if original_path.is_some_and(|path| has_action_parameter(path, name)) {
        return Err(
            "the client's query string names an action, too; let the front server ask without that query string \
            (Caddy: uri /v1/auth?)",
        );
    }
    if names.next().is_some() { Err("the query string names more than one action") } else { Ok(Some(name)) }
}

/// True if the query string of an original request has this name as its parameter `action`, in any spelling.
fn has_action_parameter(path: &str, name: &str) -> bool {
    let query = path.split_once('?').map_or("", |(_, query)| query);
    let parameter = format!("{ACTION_PARAMETER}{name}");
    let same = |pair: &str| pair == parameter || decode(pair) == decode(&parameter);
    query.split(['&', ';', '#']).any(same)
}

impl ForwardAuthWarnings {
    /// Warns once of a question whose appended path is an action's name: a front server may mean the action.
    fn log_action_in_path(&self, plan: &Plan, question: &Uri) {
        let Some(path) = appended_path(question).filter(|_| !self.action_in_path.is_completed()) else { return };
        let name = path.split('?').next().unwrap_or(path).trim_matches('/');
        if let Some((_, action)) = plan.actions().find(|(_, action)| action.name() == name) {
            self.action_in_path.call_once(|| {
                let name = action.name();
                tracing::warn!(
                    "forward-auth is asked at /v1/auth/{name}, which is about a request to /{name}: if the action {name} \
                     is meant, ask at /v1/auth?action={name}"
                );
            });
        }
    }
}
