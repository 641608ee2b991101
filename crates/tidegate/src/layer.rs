//! A gate as a tower layer, for axum, tonic and any other `tower::Service` over `http` types.

mod body;
mod finish;

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST};
use http::request::Parts;
use http::uri::Authority;
use http::{Extensions, HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use tidegate_core::{Clock, Decision};
use tidegate_policy::{
    ActionId, Forwarding, HeaderDialect, KeyError, MatchedActions, OnDisconnect, Policy, Query, UncountableError,
    UnknownActionError, is_host, is_same_host,
};
use tidegate_runtime::clock::SystemClock;
use tidegate_store::{Memory, Store};
use tower_layer::Layer;
use tower_service::Service;

pub use self::body::GateBody;
use self::body::RenewedPermit;
use self::finish::FinishOnDrop;
use crate::reply::{Replies, grpc_response, grpc_type};
use crate::{CheckError, DecisionReport, Gate};

/// Limits a service. A refused call gets a 429 without reaching the service. A refused gRPC call gets
/// `RESOURCE_EXHAUSTED`, or `PERMISSION_DENIED` on the deny list. An admitted call gets rate-limit headers in its
/// response, and its [`Decision`] as an extension of the request.
///
/// The action is the one named by [`GateLayer::action`], or the first of the policy that matches the request. If
/// servers may read a path in several ways, the actions of all readings apply. The reply is 400 if the policy refuses
/// such paths or the path can't be decided about.
///
/// The client's address is derived from the peer's through the policy's trusted proxies. The peer is taken from the
/// request's extensions: a [`SocketAddr`] or, with the features `axum` and `tonic`, the value set by axum's
/// `into_make_service_with_connect_info::<SocketAddr>()` or by tonic's server. [`GateLayer::peer`] replaces this
/// source. The reply to a request without a peer is 500 if its limits count by address; in builds with debug assertions
/// it says what is missing. The reply to a request that can't be counted
/// ([`UncountableError`](tidegate_policy::UncountableError)) is 400.
///
/// A call under a limit on calls in flight has its permit until the body of its response has ended or is dropped. If the
/// client goes away before the service has answered, the service's future is dropped, and the permit is
/// [kept](crate::PermitGuard::keep) for the time of a long call, because work that the service has begun elsewhere may go on.
/// With `inbound.on_disconnect = "finish"`, the future runs on to its response, for at most `inbound.timeouts.response`.
///
/// Limits for each user count by `key`, which [`GateLayer::key`] takes from the request. The layer below counts 100
/// requests a minute for each user of an axum application, whose authentication puts a `User` into the request's
/// extensions, and 5 log-ins a minute for each address:
///
/// ```
/// use std::net::SocketAddr;
/// use axum::{Router, routing::{get, post}};
/// use tidegate::GateLayer;
/// use tidegate::policy::{ActionSpec, Policy};
///
/// #[derive(Clone)]
/// struct User {
///     id: String,
/// }
///
/// # async fn serve() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::builder()
///     .action("login", ActionSpec::new("5 per 60s").penalty("2s", "1h").method("POST").path("/login"))
///     .action("api", ActionSpec::new("100 per minute").key(["key"]).path("/api/*"))
///     .build()?;
/// let gate = GateLayer::new(&policy)
///     .key(|request| request.extensions.get::<User>().map(|user| user.id.clone()))
///     .allow(|request| request.uri.path() == "/health")
///     .on_decision(|request, decision| {
///         if !decision.allowed {
///             println!("{} refused by {:?}", request.uri.path(), decision.bound_by);
///         }
///     });
///
/// let app = Router::new()
///     .route("/login", post(async || "welcome"))
///     .route("/api/items", get(async || "[]"))
///     .layer(gate);
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
/// axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
/// # Ok(())
/// # }
/// ```
pub struct GateLayer<S: Store = Memory, C: Clock = SystemClock>(Arc<GateLayerInner<S, C>>);

/// The reason of a 401 in builds with debug assertions, where the order of layers is a likely mistake.
const MISSING_KEY: &str = "`GateLayer::key` found no key in this request; if authentication provides it, authentication \
    must run before the gate: in axum, the layer that is added last runs first";

struct GateLayerInner<S: Store, C: Clock> {
    gate: Gate<S, C>,
    replies: Replies,
    forwarding: Forwarding,
    action: Option<ActionId>,
    /// The time within which calls in flight are finished whose client has gone away; `None` if they aren't.
    finish_timeout: Option<Duration>,
    hooks: Hooks,
}

/// The functions that a program gives the layer.
#[derive(Clone)]
#[expect(clippy::type_complexity, reason = "each type is written once")]
struct Hooks {
    peer: Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>,
    key: Option<Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>>,
    allow: Option<Arc<dyn Fn(&Parts) -> bool + Send + Sync>>,
    on_decision: Option<Arc<dyn Fn(&Parts, &DecisionReport) + Send + Sync>>,
    refusal: Option<Arc<dyn Fn(&Parts, &DecisionReport, Response<Bytes>) -> Response<Bytes> + Send + Sync>>,
}

impl Default for Hooks {
    fn default() -> Self {
        Self { peer: Arc::new(peer_of), key: None, allow: None, on_decision: None, refusal: None }
    }
}

impl<S: Store, C: Clock> Clone for GateLayer<S, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Store, C: Clock> std::fmt::Debug for GateLayer<S, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GateLayer").field("gate", &self.0.gate).finish_non_exhaustive()
    }
}

impl GateLayer {
    /// A layer with its own gate in memory.
    pub fn new(policy: &Policy) -> Self {
        Self::from_gate(Gate::new(policy), policy)
    }
}

impl<S: Store, C: Clock> GateLayer<S, C> {
    /// A layer that uses this gate. The policy sets the trusted proxies and the headers that are written.
    pub fn from_gate(gate: Gate<S, C>, policy: &Policy) -> Self {
        let inbound = policy.inbound();
        let replies = Replies::new(gate.plan(), inbound.headers, inbound.x_ratelimit);
        let forwarding = inbound.forwarding.clone();
        let finish_timeout = (inbound.on_disconnect == OnDisconnect::Finish).then_some(inbound.timeouts.response);
        let hooks = Hooks::default();
        Self(Arc::new(GateLayerInner { gate, replies, forwarding, action: None, finish_timeout, hooks }))
    }

    /// Counts every request as this action, for any method and path.
    ///
    /// # Errors
    /// The policy has no such action.
    pub fn action(self, name: &str) -> Result<Self, UnknownActionError> {
        let action = self.0.gate.plan().find_action(name)?;
        Ok(self.modify(|layer| layer.action = Some(action)))
    }

    /// Sets the function that returns the peer's address from the request's extensions.
    #[must_use]
    pub fn peer(self, peer: impl Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.modify(|layer| layer.hooks.peer = Arc::new(peer))
    }

    /// Takes the `key` of a request, such as its user, API key or tenant, for limits with `key = ["key"]`. It is read
    /// from the request's head, or from what authentication put into its extensions. Authentication must then run
    /// first: in axum it is the *later* `.layer(…)` of the two, in a `tower::ServiceBuilder` the earlier. A request
    /// without a key is answered 401 if one of its limits counts by `key`; builds with debug assertions add the reason.
    #[must_use]
    pub fn key(self, key: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        self.modify(|layer| layer.hooks.key = Some(Arc::new(key)))
    }

    /// Lets requests pass for which this function returns true: they are neither counted nor refused, and their
    /// answers have no rate-limit headers.
    #[must_use]
    pub fn allow(self, allow: impl Fn(&Parts) -> bool + Send + Sync + 'static) -> Self {
        self.modify(|layer| layer.hooks.allow = Some(Arc::new(allow)))
    }

    /// Calls this function with every decision, also one of a limit in shadow, before the request goes on. It is called
    /// on the request's own task, so it must not block.
    #[must_use]
    pub fn on_decision(self, on_decision: impl Fn(&Parts, &DecisionReport) + Send + Sync + 'static) -> Self {
        self.modify(|layer| layer.hooks.on_decision = Some(Arc::new(on_decision)))
    }

    /// Replaces the response to refused requests. The function gets the standard response, whose body is JSON, or empty
    /// for gRPC. It may return that with another body, as text or bytes, or another response. `Retry-After` and the
    /// rate-limit headers are headers of the standard response.
    ///
    /// ```
    /// # let policy = tidegate::policy::Policy::builder().build().unwrap();
    /// # let gate = tidegate::GateLayer::new(&policy);
    /// gate.refusal(|_request, decision, response| {
    ///     let wait = decision.retry_after.unwrap_or(0);
    ///     response.map(|_| format!("{{\"message\":\"slow down\",\"seconds\":{wait}}}"))
    /// });
    /// ```
    #[must_use]
    pub fn refusal<B: Into<Bytes>>(
        self,
        refusal: impl Fn(&Parts, &DecisionReport, Response<Bytes>) -> Response<B> + Send + Sync + 'static,
    ) -> Self {
        let into_bytes = move |request: &Parts, decision: &DecisionReport, response| {
            refusal(request, decision, response).map(B::into)
        };
        self.modify(|layer| layer.hooks.refusal = Some(Arc::new(into_bytes)))
    }

    /// Writes the rate-limit headers in this dialect instead of the policy's, and also `X-RateLimit-*` headers if
    /// `x_ratelimit` is true.
    #[must_use]
    pub fn headers(self, dialect: HeaderDialect, x_ratelimit: bool) -> Self {
        let replies = Replies::new(self.0.gate.plan(), dialect, x_ratelimit);
        self.modify(|layer| layer.replies = replies)
    }

    /// The gate of this layer.
    pub fn gate(&self) -> &Gate<S, C> {
        &self.0.gate
    }

    fn modify(self, change: impl FnOnce(&mut GateLayerInner<S, C>)) -> Self {
        let old = &self.0;
        let mut inner = GateLayerInner {
            gate: old.gate.clone(),
            replies: old.replies.clone(),
            forwarding: old.forwarding.clone(),
            action: old.action,
            finish_timeout: old.finish_timeout,
            hooks: old.hooks.clone(),
        };
        change(&mut inner);
        Self(Arc::new(inner))
    }
}

fn peer_of(extensions: &Extensions) -> Option<IpAddr> {
    #[cfg(feature = "axum")]
    if let Some(info) = extensions.get::<axum::extract::ConnectInfo<SocketAddr>>() {
        return Some(info.0.ip());
    }
    #[cfg(feature = "tonic")]
    if let Some(info) = extensions.get::<tonic::transport::server::TcpConnectInfo>() {
        return info.remote_addr().map(|peer| peer.ip());
    }
    extensions.get::<SocketAddr>().map(SocketAddr::ip)
}

impl<I, S: Store, C: Clock> Layer<I> for GateLayer<S, C> {
    type Service = GateService<I, S, C>;

    fn layer(&self, inner: I) -> Self::Service {
        GateService { inner, layer: Arc::clone(&self.0) }
    }
}

/// A service behind a [`GateLayer`].
pub struct GateService<I, S: Store = Memory, C: Clock = SystemClock> {
    inner: I,
    layer: Arc<GateLayerInner<S, C>>,
}

impl<I: Clone, S: Store, C: Clock> Clone for GateService<I, S, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: Arc::clone(&self.layer) }
    }
}

impl<I: std::fmt::Debug, S: Store, C: Clock> std::fmt::Debug for GateService<I, S, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GateService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<I, B, R, S, C> Service<Request<B>> for GateService<I, S, C>
where
    I: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    I::Future: Send,
    B: Send + 'static,
    S: Store,
    C: Clock,
{
    type Response = Response<GateBody<R>>;
    type Error = I::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, I::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The service that was made ready must be the one that is called.
        let fresh = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, fresh);
        let layer = Arc::clone(&self.layer);
        Box::pin(async move {
            let (mut parts, body) = request.into_parts();
            if layer.hooks.allow.as_ref().is_some_and(|allow| allow(&parts)) {
                let response = inner.call(Request::from_parts(parts, body)).await?;
                return Ok(response.map(|body| GateBody::forwarded(body, None)));
            }
            layer.normalise_path(&mut parts);
            let AdmittedCall { actions, decision, permit } = match layer.admit(&parts).await {
                Ok(admitted) => admitted,
                Err(refusal) => return Ok(refusal.map(GateBody::refused)),
            };
            parts.extensions.insert(decision);
            let request = Request::from_parts(parts, body);
            let (response, permit) = match (permit, layer.finish_timeout) {
                (Some(permit), Some(timeout)) => {
                    let (response, permit) = FinishOnDrop::new(inner.call(request), permit, timeout).await;
                    (response?, Some(permit))
                }
                (Some(mut permit), None) => {
                    let response = inner.call(request).await;
                    permit.set_over();
                    (response?, Some(permit))
                }
                (None, _) => (inner.call(request).await?, None),
            };
            let (mut parts, body) = response.into_parts();
            layer.replies.annotate(actions, &decision, &mut parts.headers);
            Ok(Response::from_parts(parts, GateBody::forwarded(body, permit)))
        })
    }
}

struct AdmittedCall {
    actions: MatchedActions,
    decision: Decision,
    permit: Option<RenewedPermit>,
}

impl<S: Store, C: Clock> GateLayerInner<S, C> {
    /// Replaces the path by its normal form if the policy requires it.
    fn normalise_path(&self, parts: &mut Parts) {
        let path = parts.uri.path_and_query();
        if let Some(path) = path.and_then(|path| self.gate.plan().forwarded_path(path.as_str()))
            && let Ok(path) = path.parse()
        {
            let mut uri = std::mem::take(&mut parts.uri).into_parts();
            uri.path_and_query = Some(path);
            parts.uri = Uri::from_parts(uri).unwrap_or_default();
        }
    }

    async fn admit(&self, parts: &Parts) -> Result<AdmittedCall, Response<Bytes>> {
        let peer = (self.hooks.peer)(&parts.extensions);
        let key = self.hooks.key.as_ref().and_then(|key| key(parts));
        let error_response = |error: CheckError| self.check_error_response(&error, &parts.headers);
        let host = host_of(parts).map_err(|error| error_response(error.into()))?;
        let mut query = Query {
            actions: self.action.map(Into::into),
            ip: peer.map(|peer| self.forwarding.client_ip(peer, &parts.headers)),
            key: key.as_deref(),
            method: Some(parts.method.as_str()),
            path: Some(parts.uri.path_and_query().map_or("/", |path| path.as_str())),
            host,
            headers: Some(&parts.headers),
            ..Query::default()
        };
        let actions = self.gate.actions(&query).map_err(error_response)?;
        query.actions = Some(actions);
        let decision = self.gate.check(&query).await.map_err(error_response)?;
        let report = || self.gate.report(&decision);
        if let Some(on_decision) = &self.hooks.on_decision {
            on_decision(parts, &report());
        }
        if !decision.allowed {
            let standard = for_client(&parts.headers, self.replies.refusal(actions, &decision, &parts.headers));
            return Err(match &self.hooks.refusal {
                Some(refusal) => refusal(parts, &report(), standard),
                None => standard,
            });
        }
        if decision.shadow {
            let limit = decision.bound_by.map_or("", |id| self.gate.plan().limit_info(id).name());
            tracing::info!(limit, ip = ?query.ip, "would be refused, but the limit is in shadow mode");
        }
        let guard = self.gate.hold_permit(&query, &decision).map_err(error_response)?;
        Ok(AdmittedCall { actions, decision, permit: guard.map(RenewedPermit::start_renewal) })
    }

    /// The reply to a call that could not be decided. For an uncountable request it gives the reason.
    #[cold]
    fn check_error_response(&self, error: &CheckError, request: &HeaderMap) -> Response<Bytes> {
        let (status, title, message) = match error {
            CheckError::Key(KeyError::Uncountable(uncountable)) => {
                tracing::info!(%error, "a request could not be counted");
                (StatusCode::BAD_REQUEST, "Bad Request", uncountable.to_string())
            }
            CheckError::Key(KeyError::Missing(missing)) if missing.part == "key" && self.hooks.key.is_some() => {
                tracing::info!(%error, "a request could not be counted");
                let message = if cfg!(debug_assertions) { MISSING_KEY.to_owned() } else { String::new() };
                (StatusCode::UNAUTHORIZED, "Unauthorized", message)
            }
            misuse => (StatusCode::INTERNAL_SERVER_ERROR, "Internal server error", misuse_message(misuse)),
        };
        for_client(request, error_response(status, title, &message))
    }
}

/// The host in the request's target or `Host`. Both must name the same host if both are present.
fn host_of(parts: &Parts) -> Result<Option<&str>, KeyError> {
    let mut host_name = parts.uri.authority().map(Authority::as_str);
    for host in parts.headers.get_all(HOST) {
        let host = host.to_str().map_err(|_| UncountableError::InvalidHost)?;
        if host_name.is_some_and(|named| !is_same_host(named.as_bytes(), host.as_bytes())) {
            return Err(UncountableError::InvalidHost.into());
        }
        host_name = Some(host);
    }
    if host_name.is_some_and(|name| !is_host(name.as_bytes())) {
        return Err(UncountableError::InvalidHost.into());
    }
    Ok(host_name)
}

/// A refusal or an error in the form that the request's client reads.
fn for_client(request: &HeaderMap, response: Response<Bytes>) -> Response<Bytes> {
    match grpc_type(request) {
        Some(kind) => grpc_response(kind, response),
        None => response,
    }
}

/// Logs a mistake in the program's setup. Returns it in builds with debug assertions, otherwise an empty text, because
/// clients should learn nothing about it.
fn misuse_message(error: &CheckError) -> String {
    let hint = match error {
        CheckError::Key(KeyError::Missing(missing)) if missing.part == "ip" => {
            "; serve an axum router by `into_make_service_with_connect_info::<SocketAddr>()` with tidegate's feature \
             `axum`, or take the address by `GateLayer::peer`"
        }
        CheckError::Key(KeyError::Missing(missing)) if missing.part == "key" => "; take it by `GateLayer::key`",
        _ => "",
    };
    tracing::error!("a request could not be decided about: {error}{hint}");
    if cfg!(debug_assertions) { format!("{error}{hint}") } else { String::new() }
}

/// A JSON answer; an empty message is left out.
fn error_response(status: StatusCode, error: &str, message: &str) -> Response<Bytes> {
    let mut text = serde_json::json!({ "error": error });
    if !message.is_empty() {
        text["message"] = message.into();
    }
    let mut response = Response::new(text.to_string().into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
