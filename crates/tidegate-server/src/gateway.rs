//! The gateway to external APIs: `/{provider}/{path…}` becomes the provider's base URL and that path.
//!
//! Request headers that it reads: `Tidegate-Priority`, `Tidegate-Timeout`, `Idempotency-Key`. Response headers that it
//! sets: `Tidegate-Attempts`, `Tidegate-Waited`, `Tidegate-Credential`, `Tidegate-Cache`, `Tidegate-Error`,
//! `x-should-retry`.

pub(crate) mod call_error;
pub(crate) mod provider_client;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use bytes::Bytes;
use http::header::{CONNECTION, EXPECT, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, LINK, UPGRADE, VIA};
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::service::Service;
use hyper::upgrade::OnUpgrade;
use rustls::ClientConfig;
use tidegate::outbound::cache::{Cache, CacheStatus};
use tidegate::outbound::{
    CallErrorKind, CallOptions, CallStats, Outbound, OutboundError, OutboundLayer, OutboundService, Provider,
    ReplayBody, take_call_options,
};
use tidegate::reply::grpc_type;
use tidegate::store::Store;
use tidegate_core::{Clock, Time};
use tidegate_policy::outbound::{BaseUrl, ProviderConfig as Plan};
use tidegate_policy::{Query, canonical_ip};
use tidegate_runtime::counters::Counters;
use tower_layer::Layer as _;

use self::provider_client::ProviderClient;
use crate::ServeError;
use crate::access::Access;
use crate::access_log::AccessEntry;
use crate::body::{BoxError, RelayBody, ResponseBody, Upload};
use crate::dashboard::remove_session_cookies;
use crate::hop_headers::{self, X_FORWARDED_PROTO};
use crate::listener::ConnectionContext;
use crate::local_response::{HttpError, discard_body, error, finish_response, for_client, set_connection_close};
use crate::metrics::RequestMetrics;
use crate::proxy::{ResponseFuture, validate_request};
use crate::refusal_log::RefusalLog;
use crate::state_cell::ListenerState;
use crate::trace_context::trace_parent;
use crate::upgrade::spawn_tunnel;
use crate::watchdog::{ConnectionPhase, EndReason};

const ATTEMPTS: HeaderName = HeaderName::from_static("tidegate-attempts");
const WAITED: HeaderName = HeaderName::from_static("tidegate-waited");
const CREDENTIAL: HeaderName = HeaderName::from_static("tidegate-credential");
/// The reason why an unsuccessful reply was the last attempt. In an answer without a reply, if its body has the form of
/// another API: the name of the error.
const CALL_ERROR: HeaderName = HeaderName::from_static("tidegate-error");
const CACHE: HeaderName = HeaderName::from_static("tidegate-cache");
/// Headers about the origin of a request, which an external API must not see. `X-Forwarded-…` headers are removed as
/// well.
const CLIENT_ORIGIN_HEADERS: [HeaderName; 3] = [FORWARDED, VIA, HeaderName::from_static("x-real-ip")];
const X_FORWARDED: &str = "x-forwarded-";

/// The state that all connections of the gateway share.
pub(crate) struct GatewayState<S: Store, C: Clock> {
    mounts: BTreeMap<String, Mount<S, C>>,
    outbound: Outbound<S, C>,
    cache: Cache<C>,
    tls: ClientConfig,
    access: Access,
    refusals: Arc<RefusalLog>,
}

/// A provider as the gateway calls it.
struct Mount<S: Store, C: Clock> {
    service: OutboundService<ProviderClient<ReplayBody<Upload>>, S, C>,
    cache_results: Counters,
}

impl<S: Store, C: Clock> Clone for Mount<S, C> {
    fn clone(&self) -> Self {
        Self { service: self.service.clone(), cache_results: self.cache_results.clone() }
    }
}

impl<S: Store, C: Clock + Clone> GatewayState<S, C> {
    /// Returns a gateway to these providers, each with pools of this many idle connections at most. It leaves out providers
    /// without a base URL. Connections to providers that are the same, and the cache, are taken over from an earlier gateway.
    ///
    /// # Errors
    /// A credential can't be read, or the system has no root certificates.
    pub(crate) fn new(
        outbound: &Outbound<S, C>,
        access: Access,
        refusals: Arc<RefusalLog>,
        metrics: &RequestMetrics,
        env: &impl Fn(&str) -> Option<String>,
        max_idle: usize,
        earlier: Option<&Self>,
    ) -> Result<Self, ServeError> {
        // Shared, because reading the system's root certificates is slow.
        let tls = match earlier {
            Some(earlier) => earlier.tls.clone(),
            None => provider_client::tls_config().map_err(ServeError::RootCertificates)?,
        };
        let mut mounts = BTreeMap::new();
        for provider in outbound.providers() {
            let plan = provider.config();
            let Some(base) = &plan.base_url else { continue };
            let known = earlier.and_then(|earlier| earlier.mounts.get(&plan.name));
            if let Some(known) = known.filter(|known| known.service.provider().is_same(provider)) {
                mounts.insert(plan.name.clone(), known.clone());
                continue;
            }
            let layer = OutboundLayer::with_env(provider.clone(), env)
                .map_err(|source| ServeError::Credential { provider: plan.name.clone(), source })?
                .mount_path(&plan.name)
                .fault_classifier(provider_client::fault_of);
            let client = provider_client::client(plan, base, tls.clone(), max_idle);
            let mount = Mount { service: layer.layer(client), cache_results: metrics.cache_results(&plan.name) };
            mounts.insert(plan.name.clone(), mount);
        }
        Ok(Self {
            mounts,
            cache: earlier.map_or_else(|| Cache::for_outbound(outbound), |earlier| earlier.cache.clone()),
            tls,
            access,
            refusals,
            outbound: outbound.clone(),
        })
    }
}

impl<S: Store, C: Clock + Clone> ListenerState for GatewayState<S, C> {
    type Service = GatewayService<S, C>;

    fn connection_service(self: Arc<Self>, client: Arc<ConnectionContext>) -> GatewayService<S, C> {
        GatewayService { gateway: self, context: client }
    }
}

/// The service of one connection's requests.
pub(crate) struct GatewayService<S: Store, C: Clock> {
    gateway: Arc<GatewayState<S, C>>,
    context: Arc<ConnectionContext>,
}

impl<S: Store, C: Clock + Clone> Service<Request<Incoming>> for GatewayService<S, C> {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn call(&self, mut request: Request<Incoming>) -> ResponseFuture {
        let watch = &self.context.watch;
        // The call has a deadline of its own, and may be queued for longer than the idle timeout of connections.
        watch.enter(ConnectionPhase::Deciding);
        let origin = CallerOrigin::from_headers(request.headers());
        let traceparent = trace_parent(request.headers()).map(str::to_owned);
        let grpc_type = grpc_type(request.headers()).cloned();
        let (mount, options) = match self.gateway.prepare_request(&mut request, &self.context) {
            Ok((mount, options)) => (mount.clone(), options),
            Err(refusal) => {
                let refusal = for_client(grpc_type.as_ref(), refusal);
                let response = discard_body(watch, request.into_body(), false, refusal);
                return ResponseFuture::Ready(Some(finish_response(watch, response)));
            }
        };
        let client_upgrade = request.headers().contains_key(UPGRADE).then(|| hyper::upgrade::on(&mut request));
        let has_body = !request.body().is_end_stream();
        let paced = grpc_type.is_none();
        let request = request.map(|body| {
            if !has_body {
                return Upload::empty();
            }
            watch.begin_body(paced);
            // No bound is needed, because no body is kept whole.
            Upload::new(body, Arc::clone(watch), u64::MAX, None)
        });
        let (gateway, client) = (Arc::clone(&self.gateway), Arc::clone(&self.context));
        ResponseFuture::Pending(Box::pin(async move {
            let watch = &client.watch;
            let plan = mount.service.provider().config();
            let call = async {
                match (plan.cache, client_upgrade) {
                    (Some(_), None) => {
                        let send = |options, request| mount.service.send(options, request);
                        // Boxed, because calls that aren't cached would need the space for it too.
                        let response = Box::pin(gateway.cache.call(&mount.service, options, request, send)).await?;
                        if let Some(status) = response.extensions().get::<CacheStatus>() {
                            mount.cache_results.add(*status as usize, 1);
                        }
                        let (parts, body) = response.into_parts();
                        match body.unless_broken() {
                            Ok(body) => Ok(relay_response(Response::from_parts(parts, body), &client, plan, None)),
                            Err(error) => Err(call_error::broken_reply(mount.service.provider(), &parts, error)),
                        }
                    }
                    (_, client_upgrade) => {
                        let called = mount.service.send(options, request).await;
                        called.map(|response| relay_response(response, &client, plan, client_upgrade))
                    }
                }
            };
            let mut called = pin!(call);
            let called = poll_fn(|cx| match watch.is_ended_for(EndReason::Timeout) {
                // A timeout during the call only means that the request's body arrives too slowly.
                true => Poll::Ready(None),
                false => called.as_mut().poll(cx).map(Some),
            });
            let mut response = match called.await {
                Some(Ok(mut response)) => {
                    if let Some(origin) = &origin {
                        complete_links(response.headers_mut(), origin, &plan.name);
                    }
                    response
                }
                Some(Err(failed)) => {
                    watch.access.note(|entry| entry.note_failed_call(&failed));
                    gateway.log_failed_call(mount.service.provider(), &failed, traceparent.as_deref());
                    for_client(grpc_type.as_ref(), call_error::response(&failed, plan))
                }
                None => {
                    let (status, message) = HttpError::ClientTimeout.status_and_message();
                    let mut response = call_error::formatted(plan.error_format, status, message);
                    set_connection_close(&mut response);
                    for_client(grpc_type.as_ref(), response)
                }
            };
            if has_body && watch.body.is_uploading.get() {
                watch.response.must_linger.set(true);
                set_connection_close(&mut response);
            }
            finish_response(watch, response)
        }))
    }
}

impl<S: Store, C: Clock + Clone> GatewayState<S, C> {
    /// Turns the client's request into one for the provider, as far as that doesn't depend on the credential.
    #[expect(clippy::result_large_err, reason = "a refusal is small beside the call that it spares")]
    fn prepare_request(
        &self,
        request: &mut Request<Incoming>,
        client: &ConnectionContext,
    ) -> Result<(&Mount<S, C>, CallOptions), Response<ResponseBody>> {
        let has_token =
            request.uri().path_and_query().is_some_and(|path| self.access.is_token_in(path.as_str().as_bytes()));
        if has_token {
            client.watch.access.note(AccessEntry::hide_target);
        }
        if let Err(invalid) = validate_request(request) {
            let ip = Some(canonical_ip(client.address.ip()));
            let path = Some(request.uri().path()).filter(|_| !has_token);
            let query = Query { ip, path, ..Query::default() };
            self.refusals.log_invalid_request(self.now(), invalid, &query, &client.watch.access);
            return Err(invalid.response());
        }
        if let Err(denied) = self.access.check(request, client.address.ip()) {
            return Err(self.access.denied_response(denied, request, client, self.now()));
        }
        remove_session_cookies(request.headers_mut());
        let path = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
        let whole = path.strip_prefix('/').unwrap_or(path);
        let (name, rest) = whole.split_at(whole.find(['/', '?']).unwrap_or(whole.len()));
        let Some(mount) = self.mounts.get(name) else { return Err(self.unknown_provider_response(name)) };
        let plan = mount.service.provider().config();
        let bad_request = |why: &str| call_error::formatted(plan.error_format, StatusCode::BAD_REQUEST, why);
        if has_token {
            return Err(bad_request("the URL contains the token of the gateway, which belongs in a header"));
        }
        let rest = if rest.starts_with('/') { rest.to_owned() } else { format!("/{rest}") };
        let rest =
            PathAndQuery::try_from(rest).map_err(|_| bad_request("the path has a character that a URL can't have"))?;
        *request.uri_mut() = Uri::from(rest);
        let (has_body, is_http10) = (!request.body().is_end_stream(), request.version() == Version::HTTP_10);
        let headers = request.headers_mut();
        let options = take_call_options(headers).map_err(|wrong| bad_request(&wrong.to_string()))?;
        let mut hop = hop_headers::strip_request(headers, &[]);
        // A connection can't switch protocols before the whole request has arrived, or with HTTP/1.0 (RFC 9110 §7.8).
        hop.upgrade = hop.upgrade.filter(|_| !has_body && !is_http10);
        remove_all(headers, |name, value| {
            name == EXPECT
                || CLIENT_ORIGIN_HEADERS.contains(name)
                || name.as_str().starts_with(X_FORWARDED)
                || hop_headers::is_own(name)
                || self.access.is_token_in(value.as_bytes())
        });
        let chunked = has_body && request.body().size_hint().exact().is_none();
        hop_headers::add_request_headers(request.headers_mut(), &hop, chunked);
        if hop.upgrade.is_none() && plan.base_url.as_ref().is_some_and(BaseUrl::is_https) {
            // HTTP/2, which may be used over TLS, has no `Connection` (RFC 9113 §8.2.2).
            request.headers_mut().remove(CONNECTION);
        }
        Ok((mount, options))
    }

    /// The time of the clock that all providers share.
    fn now(&self) -> Time {
        self.outbound.providers().first().map_or(Time::ZERO, |provider| provider.clock().now())
    }

    /// Logs a failed call, unless the caller caused the failure.
    #[cold]
    fn log_failed_call(&self, provider: &Provider<S, C>, failed: &OutboundError, traceparent: Option<&str>) {
        if failed.status() != 429 && failed.status() < 500 {
            return;
        }
        let (why, stats) = match failed {
            OutboundError::Call(call) => (call.kind.to_string() + &call_error::reply_error(call), Some(call.stats)),
            failed => (call_error::error_chain(failed), None),
        };
        self.refusals.log_failed_call(provider.clock().now(), &provider.config().name, &why, stats, traceparent);
    }

    fn unknown_provider_response(&self, name: &str) -> Response<ResponseBody> {
        let plan = self.outbound.config();
        let message = match plan.find(name) {
            Ok(_) => format!("the provider {name} has no base_url, so only Rust programs call it"),
            Err(_) if name.is_empty() => {
                let names: Vec<&str> = plan.providers().iter().map(|provider| provider.name.as_str()).collect();
                format!("paths are /PROVIDER/PATH; the providers are {}", names.join(", "))
            }
            Err(unknown) => unknown.to_string(),
        };
        error(StatusCode::NOT_FOUND, &message)
    }
}

/// The origin by which a caller reaches the gateway, through a TLS proxy or not.
struct CallerOrigin {
    scheme: &'static str,
    host: HeaderValue,
}

impl CallerOrigin {
    fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let is_https = headers.get(X_FORWARDED_PROTO).is_some_and(|proto| proto == "https");
        let host = headers.get(HOST).filter(|host| !host.is_empty())?.clone();
        Some(Self { scheme: if is_https { "https" } else { "http" }, host })
    }
}

/// Turns the paths of this gateway in `Link` into whole URLs, because some SDKs add a path to their base URL, which has
/// the provider's name already.
fn complete_links(headers: &mut HeaderMap, origin: &CallerOrigin, provider: &str) {
    let http::header::Entry::Occupied(mut links) = headers.entry(LINK) else { return };
    let Ok(host) = origin.host.to_str() else { return };
    let (path, url) = (format!("</{provider}"), format!("<{}://{host}/{provider}", origin.scheme));
    for link in links.iter_mut() {
        let completed = link.to_str().ok().map(|text| text.replace(&path, &url));
        if let Some(completed) = completed.and_then(|text| HeaderValue::try_from(text).ok()) {
            *link = completed;
        }
    }
}

/// Returns a provider's reply as the client receives it. If it switches protocols, a tunnel begins, which keeps the call
/// in flight.
fn relay_response<B>(
    mut response: Response<B>,
    client: &ConnectionContext,
    plan: &Plan,
    client_upgrade: Option<OnUpgrade>,
) -> Response<ResponseBody>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let is_switch = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let upgrades = client_upgrade.filter(|_| is_switch).map(|client| (client, hyper::upgrade::on(&mut response)));
    let (mut parts, body) = response.into_parts();
    let protocol = hop_headers::strip_response(&mut parts.headers);
    parts.version = Version::HTTP_11;
    let stats = parts.extensions.get::<CallStats>().copied();
    let cache = parts.extensions.get::<CacheStatus>().copied();
    let why = parts.extensions.get::<CallErrorKind>().map(ToString::to_string);
    client.watch.access.note(|entry| entry.note_reply(stats));
    // The HTTP library keeps the provider's reason phrase there, which may repeat the credential.
    parts.extensions.clear();
    set_tidegate_headers(&mut parts.headers, plan, stats, cache);
    if let Some(why) = why.and_then(|why| HeaderValue::try_from(why).ok()) {
        parts.headers.insert(CALL_ERROR, why);
        call_error::stop_long_waits(&mut parts.headers, plan);
    }
    let watch = Arc::clone(&client.watch);
    let body = match upgrades {
        None => ResponseBody::Relay(RelayBody::new(body, watch, plan.attempt_timeout)),
        Some((caller, provider)) => {
            hop_headers::add_switch_headers(&mut parts.headers, protocol);
            watch.enter(ConnectionPhase::Tunnel);
            spawn_tunnel(caller, provider, watch, Arc::clone(&client.entry), body);
            ResponseBody::empty()
        }
    };
    Response::from_parts(parts, body)
}

/// Sets the headers about the call. The credential's header is only set if the provider has credentials.
fn set_tidegate_headers(headers: &mut HeaderMap, plan: &Plan, stats: Option<CallStats>, cache: Option<CacheStatus>) {
    remove_all(headers, |name, _| name.as_str().starts_with("tidegate-"));
    if let Some(cache) = cache.filter(|cache| *cache != CacheStatus::Bypass) {
        headers.insert(CACHE, HeaderValue::from_static(cache.name()));
    }
    let Some(stats) = stats else { return };
    // Most calls are sent once and without a wait; this avoids formatting those values for each call.
    let attempts = if stats.attempts == 1 { HeaderValue::from_static("1") } else { stats.attempts.into() };
    headers.insert(ATTEMPTS, attempts);
    let millis = stats.waited.as_micros() / 1000;
    let waited = match millis {
        0 => Ok(HeaderValue::from_static("0.000s")),
        millis => HeaderValue::try_from(format!("{}.{:03}s", millis / 1000, millis % 1000)),
    };
    if let Ok(waited) = waited {
        headers.insert(WAITED, waited);
    }
    if stats.attempts > 0 && !plan.credentials.is_empty() {
        headers.insert(CREDENTIAL, HeaderValue::from(stats.credential));
    }
}

fn remove_all(headers: &mut HeaderMap, matches: impl Fn(&HeaderName, &HeaderValue) -> bool) {
    let found = headers.iter().filter(|(name, value)| matches(name, value));
    let names: Vec<HeaderName> = found.map(|(name, _)| name.clone()).collect();
    for name in names {
        headers.remove(name);
    }
}
