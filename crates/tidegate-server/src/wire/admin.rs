//! The admin listener: `/healthz` (the process is alive), `/readyz` (it can take requests), `/metrics`, the state as JSON
//! (`/v1/state`, `/v1/fleet`, `/v1/blocks`, `/v1/providers` and `/v1/events`), the changes of operators in [`changes`],
//! `/v1/try` in [`trials`], and the [`dashboard`].

mod changes;
mod trials;

use std::borrow::Cow;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Method, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::service::Service;
use tidegate::Gate;
use tidegate::policy::{Plan, Policy};
use tidegate::store::{Store, StoreResponse};
use tidegate_core::{Batch, Clock, Limit, OnOutage};

use crate::access::{Access, AccessError, Identity};
use crate::body::{RelayBody, ResponseBody};
use crate::dashboard::{self, Caller, DashboardPath, csrf_response};
use crate::events::{EventStream, StreamReader};
use crate::listener::ConnectionContext;
use crate::local_response::{discard_body, error, finish_response, json, json_response};
use crate::metrics::{MetricsSource, TextFormat};
use crate::refused_clients::MAX_REPORTED;
use crate::state_cell::ListenerState;
use crate::watchdog::ConnectionPhase;
use crate::wire::admin::changes::Change;
use crate::wire::decision_request::{DecisionRequestError, decode, set_once};
use crate::wire::http_api::bad_request;
use crate::wire::routes::is_api_path;
use tidegate_policy::canonical_ip;
use tidegate_policy::document::nearest;

/// The time in which the store must answer, or the gate counts as not ready.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// The state that all connections of the admin listener share.
pub(crate) struct AdminState<S: Store, C: Clock> {
    pub(crate) policy: Policy,
    pub(crate) gate: Gate<S, C>,
    pub(crate) access: Access,
    pub(crate) metrics: MetricsSource<S, C>,
}

impl<S: Store, C: Clock + Clone> ListenerState for AdminState<S, C> {
    type Service = AdminService<S, C>;

    fn connection_service(self: Arc<Self>, client: Arc<ConnectionContext>) -> AdminService<S, C> {
        AdminService { admin: self, client }
    }
}

/// The service of one connection's requests.
pub(crate) struct AdminService<S: Store, C: Clock> {
    admin: Arc<AdminState<S, C>>,
    client: Arc<ConnectionContext>,
}

impl<S: Store, C: Clock + Clone> Service<Request<Incoming>> for AdminService<S, C> {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        Box::pin(serve(Arc::clone(&self.admin), Arc::clone(&self.client), request))
    }
}

/// Answers one request of a connection.
async fn serve<S: Store, C: Clock + Clone>(
    admin: Arc<AdminState<S, C>>,
    client: Arc<ConnectionContext>,
    request: Request<Incoming>,
) -> Result<Response<ResponseBody>, Infallible> {
    let watch = &*client.watch;
    watch.enter(ConnectionPhase::Deciding);
    let (now, path) = (admin.gate.clock().now(), DashboardPath::from_path(request.uri().path()));
    let mut response = match (Caller::authorize(&admin, &request, client.address.ip(), now), path) {
        (Ok(caller), Some(path)) => dashboard::respond(&admin, &client, Some(caller), path, request).await,
        (Ok(caller), None) => route(&admin, &client, caller, request).await,
        (Err(AccessError::Token), Some(path)) if !admin.access.has_token(request.headers()) => {
            dashboard::respond(&admin, &client, None, path, request).await
        }
        (Err(AccessError::Token), None) if is_health_check(request.uri().path()) => {
            let caller = Caller { identity: Identity::ANONYMOUS, session: None };
            route(&admin, &client, caller, request).await
        }
        (Err(denied), _) => {
            let response = admin.access.denied_response(denied, &request, &client, now);
            discard_body(watch, request.into_body(), false, response)
        }
    };
    response.headers_mut().entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    Ok(finish_response(watch, response))
}

/// True for the paths that load balancers ask without a token.
fn is_health_check(path: &str) -> bool {
    matches!(path, "/healthz" | "/readyz")
}

async fn route<S: Store, C: Clock + Clone>(
    admin: &Arc<AdminState<S, C>>,
    client: &ConnectionContext,
    caller: Caller<'_>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let watch = &client.watch;
    let change = Change::from_path(request.uri().path());
    let is_trial = request.uri().path() == TRY;
    let (allows, allowed): (fn(&Method) -> bool, _) = match is_trial || change.is_some() {
        true => (|method| method == Method::POST, "POST"),
        false => (|method| matches!(*method, Method::GET | Method::HEAD), "GET, HEAD"),
    };
    let response = if is_api_path(request.uri().path()) && change.is_none() {
        not_found(request.uri().path())
    } else if !allows(request.method()) {
        let mut response = error(StatusCode::METHOD_NOT_ALLOWED, &format!("this path takes {allowed}"));
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
        response
    } else if is_trial || change.is_some() {
        match (caller.has_csrf_token(request.headers()), change) {
            (true, Some(change)) => return changes::respond(admin, client, change, caller.identity, request).await,
            (true, None) => return trials::respond(admin, client, caller.identity, request).await,
            (false, _) => csrf_response(&admin.metrics.parts),
        }
    } else {
        match page(admin, client, &caller, &request).await {
            Ok(response) => response,
            Err(wrong) => bad_request(wrong),
        }
    };
    if matches!(response.body(), ResponseBody::Relay(_)) {
        return response;
    }
    discard_body(watch, request.into_body(), false, response)
}

/// The response to a request that changes nothing.
async fn page<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    client: &ConnectionContext,
    caller: &Caller<'_>,
    request: &Request<Incoming>,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let uri = request.uri();
    Ok(match uri.path() {
        // Monitors may add parameters of their own.
        "/healthz" => json(StatusCode::OK, r#"{"status":"alive"}"#.into()),
        "/readyz" => readiness_response(admin).await,
        "/metrics" => metrics_response(admin, request.headers()).await,
        "/v1/state" => {
            parameters(uri, [])?;
            json_response(StatusCode::OK, &admin.metrics.state().await)
        }
        "/v1/fleet" => {
            parameters(uri, [])?;
            json_response(StatusCode::OK, &admin.metrics.fleet())
        }
        "/v1/providers" => {
            parameters(uri, [])?;
            providers_response(admin).await
        }
        "/v1/blocks" => blocks_response(admin, uri).await?,
        "/v1/events" => events_response(admin, client, caller, request)?,
        path => match path.strip_prefix(PROVIDERS) {
            Some(name) => {
                parameters(uri, [])?;
                provider_response(admin, name).await
            }
            None => not_found(path),
        },
    })
}

/// True for the paths of this listener except `/`, also for those of a provider or an alert.
pub(crate) fn is_admin_path(path: &str) -> bool {
    (path != "/" && PATHS.contains(&path)) || path.starts_with(PROVIDERS) || path.starts_with(ALERTS)
}

/// The paths of the listener.
const PATHS: [&str; 13] = [
    "/",
    "/healthz",
    "/readyz",
    "/metrics",
    "/v1/state",
    "/v1/fleet",
    "/v1/blocks",
    "/v1/providers",
    "/v1/events",
    "/v1/reset",
    "/v1/block",
    "/v1/reload",
    TRY,
];
/// The path that tries other terms of a limit.
const TRY: &str = "/v1/try";
/// The start of the path of a provider.
const PROVIDERS: &str = "/v1/providers/";
/// The start of the path of an alert.
const ALERTS: &str = "/v1/alerts/";

fn not_found(path: &str) -> Response<ResponseBody> {
    let message = match nearest(path, PATHS) {
        _ if is_api_path(path) => {
            format!("{path} is a path of the decision API (api.listen), and this is the admin listener (admin.listen)")
        }
        Some(nearest) => format!("no such path; did you mean {nearest}?"),
        None => format!("no such path; there are {}", PATHS.join(", ")),
    };
    error(StatusCode::NOT_FOUND, &message)
}

async fn providers_response<S: Store, C: Clock + Clone>(admin: &AdminState<S, C>) -> Response<ResponseBody> {
    json_response(StatusCode::OK, &serde_json::json!({ "providers": admin.metrics.providers().await }))
}

async fn provider_response<S: Store, C: Clock + Clone>(admin: &AdminState<S, C>, name: &str) -> Response<ResponseBody> {
    let Some(providers) = &admin.metrics.providers else {
        return error(StatusCode::NOT_FOUND, "the policy has no providers");
    };
    match providers.provider(name) {
        Ok(provider) => json_response(StatusCode::OK, &provider.report().await),
        Err(unknown) => error(StatusCode::NOT_FOUND, &unknown.to_string()),
    }
}

/// The clients that are blocked or were refused, of all actions or of the one that `action` names.
async fn blocks_response<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    uri: &Uri,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let plan = admin.gate.plan();
    let [name] = parameters(uri, ["action"])?;
    Ok(match name.map(|name| plan.find_action(&name)).transpose() {
        Ok(action) => {
            let clients = &admin.metrics.parts.refusals.clients;
            json_response(StatusCode::OK, &clients.report(&admin.gate, action, MAX_REPORTED).await)
        }
        Err(unknown) => error(StatusCode::NOT_FOUND, &unknown.to_string()),
    })
}

/// The values of the parameters in a query string, which may have only these.
fn parameters<'u, const N: usize>(
    uri: &'u Uri,
    names: [&'static str; N],
) -> Result<[Option<Cow<'u, str>>; N], DecisionRequestError> {
    let mut values = [const { None }; N];
    for pair in uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let position = decode(name).and_then(|name| names.iter().position(|known| *known == name));
        let position = position.ok_or_else(|| DecisionRequestError::unknown_field(name, &names))?;
        let (name, decoded) = (names[position], decode(value));
        let value = decoded.ok_or_else(|| DecisionRequestError::new(name, format!("`{name}` isn't UTF-8")))?;
        set_once(&mut values[position], name, value)?;
    }
    Ok(values)
}

/// The events after the one that the request names in `Last-Event-ID` or `after`, or all that are kept: a stream, or
/// with `follow=false` a list.
fn events_response<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    client: &ConnectionContext,
    caller: &Caller<'_>,
    request: &Request<Incoming>,
) -> Result<Response<ResponseBody>, DecisionRequestError> {
    let (parts, watch) = (&admin.metrics.parts, &client.watch);
    let header = request.headers().get("last-event-id").and_then(|value| value.to_str().ok());
    let [after, follow] = parameters(request.uri(), ["after", "follow"])?;
    let seen = match header.or(after.as_deref()).map(str::parse) {
        None => 0,
        Some(Ok(seen)) => seen,
        Some(Err(_)) => return Err(DecisionRequestError::new("after", "`after` is the number of an event")),
    };
    match follow.as_deref() {
        None | Some("true") => {
            let by_address = || StreamReader::Client(canonical_ip(client.address.ip()));
            let reader = caller.identity.token.map_or_else(by_address, |name| StreamReader::Token(name.into()));
            let Some(place) = parts.event_streams.take(reader) else {
                return Ok(error(StatusCode::SERVICE_UNAVAILABLE, "too many streams are open"));
            };
            let right = parts.sessions.reading_right(&admin.access, caller);
            let (shared, clock) = (Arc::clone(parts), admin.gate.clock().clone());
            let may_go_on = Box::new(move || shared.sessions.is_valid(&right, clock.now()));
            let stream = EventStream::new(Arc::clone(&parts.events), seen, Arc::clone(watch), may_go_on, place);
            let body = RelayBody::new(stream, Arc::clone(watch), EventStream::LONGEST_PAUSE);
            let mut response = Response::new(ResponseBody::Relay(body));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
            Ok(response)
        }
        Some("false") => {
            let news = parts.events.after(seen);
            let events: Vec<_> = news.numbered().map(|(number, event)| event.json(number)).collect();
            let list = serde_json::json!({ "events": events, "last": news.last, "missed": news.missed });
            Ok(json_response(StatusCode::OK, &list))
        }
        Some(_) => Err(DecisionRequestError::new("follow", "`follow` is true or false")),
    }
}

async fn metrics_response<S: Store, C: Clock + Clone>(
    admin: &AdminState<S, C>,
    headers: &HeaderMap,
) -> Response<ResponseBody> {
    let format = TextFormat::from_accept(headers);
    match admin.metrics.page(format).await {
        Some(page) => {
            let mut response = Response::new(ResponseBody::full(page.into()));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
            response
        }
        None => error(StatusCode::NOT_FOUND, "metrics are off: admin.metrics is false"),
    }
}

async fn readiness_response<S: Store, C: Clock>(admin: &AdminState<S, C>) -> Response<ResponseBody> {
    if admin.metrics.parts.draining.load(Ordering::Relaxed) {
        return json(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"draining"}"#.into());
    }
    let store = admin.gate.store();
    let answers = match store.outage() {
        Some(_) if denies_in_outages(admin.gate.plan()) => false,
        Some(name) => {
            let body = serde_json::json!({ "status": "degraded", "store": name });
            return json(StatusCode::OK, body.to_string().into());
        }
        None => match store.apply(&Batch::new(0), admin.gate.clock().now()) {
            StoreResponse::Ready(_) => true,
            StoreResponse::Pending(later) => matches!(tokio::time::timeout(STORE_TIMEOUT, later).await, Ok(Ok(_))),
        },
    };
    match answers {
        true => json(StatusCode::OK, r#"{"status":"ready"}"#.into()),
        false => json(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"the store does not answer"}"#.into()),
    }
}

/// True if the plan admits no call while the store is away: a global limit denies them, or all limits do.
fn denies_in_outages(plan: &Plan) -> bool {
    let denies = |limit: &Limit| !limit.is_shadow() && limit.sharing().on_outage == OnOutage::Deny;
    let mut limits = plan.active_limits().map(|(_, limit)| limit).peekable();
    plan.global().iter().filter_map(|id| plan.limits().get(*id)).any(denies)
        || (limits.peek().is_some() && limits.all(denies))
}
