//! The reverse proxy: each request is validated, checked against the limits, and then forwarded or refused.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONTENT_LENGTH, EXPECT, HOST, HeaderValue, TRANSFER_ENCODING};
use http::uri::{Authority, PathAndQuery};
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::service::Service;
use tidegate::policy::{MatchedActions, Query};
use tidegate::reply::{Replies, grpc_type};
use tidegate::store::Store;
use tidegate::{Check, CheckError, Decision, Gate};
use tidegate_core::{Clock, Reason, Time};
use tidegate_policy::{
    Forwarding, InboundConfig, OnDisconnect, TIDEGATE_RESERVATION, UNIX_PEER, UpstreamAddress, canonical_ip, is_host,
    is_same_host,
};

use crate::body::{ContinueExpectation, ContinueOutcome, Download, ResponseBody, Upload};
use crate::finish::FinishOnDrop;
use crate::hop_headers;
use crate::listener::ConnectionContext;
use crate::local_response::{HttpError, discard_body, error, for_client, set_connection_close};
use crate::metrics::RequestMetrics;
use crate::permit_renewer::{PermitHandle, PermitRenewer};
use crate::refusal_cache::RefusalCache;
use crate::refusal_log::RefusalLog;
use crate::state_cell::ListenerState;
use crate::tls::TlsError;
use crate::upgrade;
use crate::upstream::{PoolSettings, ServerAddress, UpstreamBody, UpstreamClient, UpstreamError, UpstreamWork};
use crate::watchdog::{ConnectionEntry, ConnectionPhase, ConnectionWatch};

/// The time that an idle connection to the upstream is kept. Node.js, the fastest of the common servers, closes after 5 s.
const UPSTREAM_IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// The state that all connections of the proxy share.
pub(crate) struct ProxyState<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) replies: Replies,
    pub(crate) upstream: Arc<UpstreamClient>,
    pub(crate) forwarding: Forwarding,
    pub(crate) body_cap: u64,
    /// The time within which calls in flight are finished whose client has gone away; `None` if they aren't.
    pub(crate) finish_timeout: Option<Duration>,
    pub(crate) permit_renewer: Arc<PermitRenewer>,
    pub(crate) refusals: Arc<RefusalLog>,
    pub(crate) metrics: Arc<RequestMetrics>,
}

impl<S: Store, C: Clock> ProxyState<S, C> {
    pub(crate) fn new(
        gate: Gate<S, C>,
        inbound: &InboundConfig,
        upstream: Arc<UpstreamClient>,
        permit_renewer: Arc<PermitRenewer>,
        refusals: Arc<RefusalLog>,
        metrics: Arc<RequestMetrics>,
    ) -> Self {
        let replies = Replies::new(gate.plan(), inbound.headers, inbound.x_ratelimit);
        Self {
            gate,
            replies,
            upstream,
            forwarding: inbound.forwarding.clone(),
            body_cap: inbound.caps.body.unwrap_or(u64::MAX),
            finish_timeout: (inbound.on_disconnect == OnDisconnect::Finish).then_some(inbound.timeouts.response),
            permit_renewer,
            refusals,
            metrics,
        }
    }

    /// Returns the client of the upstream: the one of an earlier state, if its settings are the same.
    pub(crate) fn upstream_client(
        inbound: &InboundConfig,
        upstream: &UpstreamAddress,
        earlier: Option<&Self>,
    ) -> Result<Arc<UpstreamClient>, TlsError> {
        let address = ServerAddress::upstream(upstream, &inbound.upstream_tls, inbound.upstream_http2);
        let settings = PoolSettings {
            connect_timeout: inbound.timeouts.connect,
            idle_timeout: UPSTREAM_IDLE_TIMEOUT,
            max_idle: inbound.caps.pool_idle,
        };
        match earlier {
            Some(earlier) if earlier.upstream.is_for(&address, settings) => Ok(Arc::clone(&earlier.upstream)),
            _ => UpstreamClient::new(address, settings),
        }
    }
}

impl<S: Store, C: Clock> ListenerState for ProxyState<S, C> {
    type Service = ProxyService<S, C>;

    fn connection_service(self: Arc<Self>, client: Arc<ConnectionContext>) -> ProxyService<S, C> {
        let ip = canonical_ip(client.address.ip());
        let trusted = self.forwarding.trusted.contains(ip);
        // The word of RFC 7239 for a peer without an address.
        let address = Some(ip).filter(|ip| *ip != UNIX_PEER).and_then(|ip| HeaderValue::try_from(ip.to_string()).ok());
        let peer_header = address.unwrap_or(HeaderValue::from_static("unknown"));
        let (watch, entry) = (Arc::clone(&client.watch), Arc::clone(&client.entry));
        let connection = ProxyConnection { proxy: self, client, ip, peer_header, trusted, watch, entry };
        ProxyService { connection: Arc::new(connection), refusal_cache: RefCell::default() }
    }

    fn client_ip(&self, peer: IpAddr, request: &Request<Incoming>) -> IpAddr {
        self.forwarding.client_ip(peer, request.headers())
    }
}

pub(crate) struct ProxyConnection<S: Store, C: Clock> {
    proxy: Arc<ProxyState<S, C>>,
    client: Arc<ConnectionContext>,
    ip: IpAddr,
    /// The peer's address as a header value.
    peer_header: HeaderValue,
    trusted: bool,
    watch: Arc<ConnectionWatch>,
    entry: Arc<ConnectionEntry>,
}

/// The service of one connection's requests. A refusal is answered without a future of its own; a forwarded request has
/// one.
pub(crate) struct ProxyService<S: Store, C: Clock> {
    connection: Arc<ProxyConnection<S, C>>,
    refusal_cache: RefCell<RefusalCache>,
}

impl<S: Store, C: Clock> Service<Request<Incoming>> for ProxyService<S, C> {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn call(&self, mut request: Request<Incoming>) -> ResponseFuture {
        let connection = &self.connection;
        if let Err(error) = validate_request(&request) {
            let (proxy, query) = (&connection.proxy, connection.query(&request));
            let now = proxy.gate.clock().now();
            proxy.refusals.log_invalid_request(now, error, &query, &connection.watch.access);
            let response = for_client(grpc_type(request.headers()), error.response());
            let response = discard_body(&connection.watch, request.into_body(), true, response);
            return connection.ready_response(response);
        }
        crate::dashboard::remove_session_cookies(request.headers_mut());
        connection.normalise_path(&mut request);
        let query = connection.query(&request);
        let actions = match connection.proxy.gate.actions(&query) {
            Ok(actions) => actions,
            Err(error) => {
                let response = connection.check_error_response(&query, &error);
                return connection.ready_response(connection.refuse_request(request, response));
            }
        };
        let query = Query { actions: Some(actions), ..query };
        // The decision's own time may be that of a store with another clock.
        let asked_at = connection.proxy.gate.clock().now();
        match connection.proxy.gate.begin_check(&query) {
            Err(error) => {
                let response = connection.check_error_response(&query, &error);
                connection.ready_response(connection.refuse_request(request, response))
            }
            Ok(Check::Decided(decision)) => {
                let decided_at = connection.proxy.metrics.record_decision(asked_at, connection.proxy.gate.clock());
                let mut refusal_cache = self.refusal_cache.borrow_mut();
                match connection.apply_decision(&query, &mut refusal_cache, actions, decision, decided_at) {
                    Err(refusal) => connection.ready_response(connection.refuse_request(request, refusal)),
                    Ok(admitted) => {
                        let connection = Arc::clone(connection);
                        ResponseFuture::Pending(Box::pin(async move {
                            let response = connection.forward(request, admitted).await;
                            connection.finish_response(response)
                        }))
                    }
                }
            }
            Ok(Check::Pending(pending)) => {
                connection.watch.enter(ConnectionPhase::Deciding);
                let connection = Arc::clone(connection);
                ResponseFuture::Pending(Box::pin(async move {
                    let proxy = &connection.proxy;
                    let decided = pending.decision().await;
                    let decided_at = proxy.metrics.record_store_decision(asked_at, decided.is_ok(), proxy.gate.clock());
                    let query = Query { actions: Some(actions), ..connection.query(&request) };
                    let concluded = match decided {
                        Ok(decision) => {
                            let mut refusal_cache = RefusalCache::default();
                            connection.apply_decision(&query, &mut refusal_cache, actions, decision, decided_at)
                        }
                        Err(error) => Err(connection.check_error_response(&query, &error)),
                    };
                    let response = match concluded {
                        Ok(admitted) => connection.forward(request, admitted).await,
                        Err(refusal) => connection.refuse_request(request, refusal),
                    };
                    connection.finish_response(response)
                }))
            }
        }
    }
}

/// A response that is ready, or a future of it.
pub(crate) enum ResponseFuture {
    Ready(Option<Response<ResponseBody>>),
    Pending(Pin<Box<dyn Future<Output = Response<ResponseBody>> + Send>>),
}

impl Future for ResponseFuture {
    type Output = Result<Response<ResponseBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Ready(response) => {
                Poll::Ready(Ok(response.take().expect("invariant: a future that is ready is not polled again")))
            }
            Self::Pending(later) => later.as_mut().poll(cx).map(Ok),
        }
    }
}

struct AdmittedRequest {
    actions: MatchedActions,
    decision: Decision,
    decided_at: Time,
    permit: Option<PermitHandle>,
}

impl<S: Store, C: Clock> ProxyConnection<S, C> {
    fn ready_response(&self, response: Response<ResponseBody>) -> ResponseFuture {
        ResponseFuture::Ready(Some(self.finish_response(response)))
    }

    /// Makes every response its connection's last while the server drains.
    fn finish_response(&self, mut response: Response<ResponseBody>) -> Response<ResponseBody> {
        if self.watch.is_draining() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
            set_connection_close(&mut response);
        }
        response
    }

    fn query<'r>(&'r self, request: &'r Request<Incoming>) -> Query<'r> {
        let headers = request.headers();
        Query {
            ip: Some(if self.trusted { self.proxy.forwarding.client_ip(self.ip, headers) } else { self.ip }),
            method: Some(request.method().as_str()),
            path: Some(request.uri().path_and_query().map_or("/", |path| path.as_str())),
            // HTTP/1.0 may leave out the host; the upstream then receives its own name.
            host: headers.get(HOST).unwrap_or(&self.proxy.upstream.host).to_str().ok(),
            client_certificate: self.client.tls.as_ref().and_then(|tls| tls.subject.as_deref()),
            headers: Some(headers),
            ..Query::default()
        }
    }

    /// Turns a decision into an admission or into the response of a refusal.
    #[expect(clippy::result_large_err, reason = "a refusal is as usual as an admission; a box would cost each of them")]
    fn apply_decision(
        &self,
        query: &Query<'_>,
        refusal_cache: &mut RefusalCache,
        actions: MatchedActions,
        decision: Decision,
        decided_at: Time,
    ) -> Result<AdmittedRequest, Response<ResponseBody>> {
        let proxy = &*self.proxy;
        proxy.refusals.log_decision(proxy.gate.plan(), actions, query, &decision, &self.watch.access);
        if !decision.allowed {
            self.watch.response.is_blocked.set(decision.blocked || decision.reason == Reason::DenyList);
            let headers = query.headers.expect("invariant: a proxied request's query has its headers");
            return Err(refusal_cache.refusal(&proxy.replies, actions, &decision, headers).map(ResponseBody::full));
        }
        let permit = match decision.permit {
            None => None,
            Some(_) => {
                proxy.gate.hold_permit(query, &decision).map_err(|error| self.check_error_response(query, &error))?
            }
        };
        Ok(AdmittedRequest {
            actions,
            decision,
            decided_at,
            permit: permit.map(|permit| proxy.permit_renewer.add(permit)),
        })
    }

    fn refuse_request(&self, request: Request<Incoming>, refusal: Response<ResponseBody>) -> Response<ResponseBody> {
        let expects = request.headers().contains_key(EXPECT);
        let refusal = for_client(grpc_type(request.headers()), refusal);
        discard_body(&self.watch, request.into_body(), expects, refusal)
    }

    #[cold]
    fn check_error_response(&self, query: &Query<'_>, cause: &CheckError) -> Response<ResponseBody> {
        match cause.uncountable() {
            Some(uncountable) => {
                let why = uncountable.to_string();
                let (refusals, now) = (&self.proxy.refusals, self.proxy.gate.clock().now());
                refusals.log_rejection(now, uncountable.into(), query, &why, &self.watch.access);
                error(StatusCode::BAD_REQUEST, &why)
            }
            None => {
                self.proxy.metrics.record_check_error(cause);
                self.proxy.refusals.log_failure(self.proxy.gate.clock().now(), cause);
                HttpError::StoreUnavailable.response()
            }
        }
    }

    /// Normalises the path, if the policy says so.
    fn normalise_path(&self, request: &mut Request<Incoming>) {
        let path = request.uri().path_and_query();
        if let Some(path) = path.and_then(|path| self.proxy.gate.plan().forwarded_path(path.as_str()))
            && let Ok(path) = path.parse::<PathAndQuery>()
        {
            *request.uri_mut() = Uri::from(path);
        }
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        AdmittedRequest { actions, decision, decided_at, mut permit }: AdmittedRequest,
    ) -> Response<ResponseBody> {
        let proxy = &*self.proxy;
        let has_body = !request.body().is_end_stream();
        let grpc_type = grpc_type(request.headers()).cloned();
        if has_body && request.body().size_hint().lower() > proxy.body_cap {
            let response = for_client(grpc_type.as_ref(), HttpError::TooLarge.response());
            return discard_body(&self.watch, request.into_body(), true, response);
        }
        // HTTP/2 bodies need no length.
        let chunked = has_body && !request.headers().contains_key(CONTENT_LENGTH);
        let is_http2 = proxy.upstream.speaks_http2();
        let expects = has_body && !is_http2 && expects_continue(&request);
        let expectation = expects.then(Arc::<ContinueExpectation>::default);
        let mut hop = hop_headers::strip_request(request.headers_mut(), proxy.gate.plan().keyed_headers());
        hop.upgrade = hop.upgrade.filter(|_| !is_http2);
        let paced = has_body && hop.upgrade.is_none() && grpc_type.is_none();
        let client_upgrade = hop.upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        if let Some(expectation) = &expectation {
            let expectation = Arc::clone(expectation);
            hyper::ext::on_informational(&mut request, move |head| {
                if head.status() == StatusCode::CONTINUE {
                    expectation.end_wait(ContinueOutcome::Proceed);
                }
            });
        }
        hop_headers::add_request_headers(request.headers_mut(), &hop, chunked);
        hop_headers::set_forwarded_headers(
            request.headers_mut(),
            &self.peer_header,
            self.trusted,
            if self.client.tls.is_some() { hop_headers::HTTPS } else { hop_headers::HTTP },
            proxy.gate.plan().keyed_headers(),
        );
        if decision.reservation.is_some() {
            // It is used up, and an upstream that gives reservations, too, would take it for a wrong one of its own.
            request.headers_mut().remove(TIDEGATE_RESERVATION);
        }
        if !request.headers().contains_key(HOST) {
            request.headers_mut().insert(HOST, proxy.upstream.host.clone());
        }
        if request.uri().authority().is_some()
            && let Some(path) = request.uri().path_and_query().cloned()
        {
            *request.uri_mut() = Uri::from(path);
        }
        *request.version_mut() = Version::HTTP_11;
        let request = request.map(|body| {
            if has_body {
                self.watch.enter(ConnectionPhase::Upload);
                self.watch.begin_body(paced);
                Upload::new(body, Arc::clone(&self.watch), proxy.body_cap, expectation.clone())
            } else {
                self.watch.enter(ConnectionPhase::AwaitResponse);
                Upload::empty()
            }
        });
        let mut response = match self.send(request, &mut permit, has_body).await {
            Ok(response) => response,
            Err(failure) => {
                if let Some(permit) = permit.filter(|_| !self.may_be_worked_on(&failure)) {
                    permit.work.cancel();
                }
                return for_client(grpc_type.as_ref(), self.failure_response(&failure, has_body));
            }
        };
        self.watch.access.note(|entry| entry.note_upstream_time(proxy.gate.clock().now().since(decided_at)));
        let protocol = hop_headers::strip_response(response.headers_mut());
        *response.version_mut() = Version::HTTP_11;
        proxy.replies.annotate(actions, &decision, response.headers_mut());
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let Some(client) = client_upgrade else {
                return self.failure_response(&UpstreamError::UnexpectedUpgrade, has_body);
            };
            proxy.metrics.record_upstream_reply(decided_at, response.status(), proxy.gate.clock());
            hop_headers::add_switch_headers(response.headers_mut(), protocol);
            let upstream = hyper::upgrade::on(&mut response);
            self.watch.enter(ConnectionPhase::Tunnel);
            upgrade::spawn_tunnel(client, upstream, Arc::clone(&self.watch), Arc::clone(&self.entry), permit);
            return response.map(|_| ResponseBody::empty());
        }
        proxy.metrics.record_upstream_reply(decided_at, response.status(), proxy.gate.clock());
        if expectation.as_ref().is_some_and(|it| it.outcome().is_none()) {
            // The client was never told to send its body, so it is unknown if it will.
            set_connection_close(&mut response);
        }
        response.map(|body| {
            let watch = Arc::clone(&self.watch);
            ResponseBody::Stream(Box::new(Download::new(body, watch, permit, proxy.finish_timeout, expectation)))
        })
    }

    /// Sends a request, and waits for the head of the response.
    async fn send(
        &self,
        request: Request<Upload>,
        permit: &mut Option<PermitHandle>,
        has_body: bool,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let work = permit.as_ref().map(|permit| Arc::clone(&permit.work));
        let upstream = Arc::clone(&self.proxy.upstream);
        if let Some(timeout) = self.proxy.finish_timeout
            && let Some(held) = permit.take()
        {
            let sending = send_request(upstream, request, work);
            let call = FinishOnDrop::new(sending, held, Arc::clone(&self.watch), has_body, timeout);
            let sent;
            (sent, *permit) = call.response().await;
            return sent.unwrap_or(Err(UpstreamError::Timeout));
        }
        let mut sending = pin!(send_request(upstream, request, work));
        poll_fn(|cx| match self.watch.must_end_phase() {
            true => Poll::Ready(Err(UpstreamError::Timeout)),
            false => sending.as_mut().poll(cx),
        })
        .await
    }

    /// True if the upstream may work on a request that has failed: the gate has ended it, or the client's body has.
    fn may_be_worked_on(&self, failure: &UpstreamError) -> bool {
        let body = &self.watch.body;
        let is_ended_here = body.is_too_large.get() || body.is_broken.get();
        matches!(failure, UpstreamError::Timeout) || is_ended_here && matches!(failure, UpstreamError::Broken(_))
    }

    fn failure_response(&self, failure: &UpstreamError, has_body: bool) -> Response<ResponseBody> {
        let body = &self.watch.body;
        let waits_on_client = self.watch.phase() == ConnectionPhase::Upload && body.waits_on_client.get();
        let error = match failure {
            UpstreamError::Broken(_) if body.is_too_large.get() => HttpError::TooLarge,
            UpstreamError::Broken(_) if body.is_broken.get() => HttpError::BrokenBody,
            UpstreamError::Timeout if waits_on_client => HttpError::ClientTimeout,
            UpstreamError::Timeout | UpstreamError::ConnectTimeout => HttpError::GatewayTimeout,
            UpstreamError::Broken(_)
            | UpstreamError::Unsent(_)
            | UpstreamError::Unprocessed(_)
            | UpstreamError::Connect(_)
            | UpstreamError::UnexpectedUpgrade => HttpError::BadGateway,
        };
        if error.status_and_message().0.is_server_error() {
            self.proxy.metrics.record_upstream_failure(failure);
            self.proxy.refusals.log_failure(self.proxy.gate.clock().now(), failure);
        }
        let mut response = error.response();
        if has_body {
            self.watch.response.must_linger.set(true);
            set_connection_close(&mut response);
        }
        self.watch.enter(ConnectionPhase::Idle);
        response
    }
}

/// Sends a request, a second time if the upstream has not processed it and it has no body.
async fn send_request(
    upstream: Arc<UpstreamClient>,
    request: Request<Upload>,
    work: Option<Arc<UpstreamWork>>,
) -> Result<Response<UpstreamBody>, UpstreamError> {
    // Over HTTP/1.1 the upstream doesn't tell.
    let copy = (upstream.speaks_http2() && request.body().is_end_stream()).then(|| copy_head(&request));
    match (Arc::clone(&upstream).send(request, work.clone()).await, copy) {
        (Err(UpstreamError::Unprocessed(_)), Some(copy)) => upstream.send(copy, work).await,
        (sent, _) => sent,
    }
}

/// A request with the same head, and without a body.
fn copy_head(request: &Request<Upload>) -> Request<Upload> {
    let mut copy = Request::new(Upload::empty());
    copy.method_mut().clone_from(request.method());
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    copy
}

/// Checks that a request can be forwarded and that two servers read it the same way.
pub(crate) fn validate_request(request: &Request<Incoming>) -> Result<(), HttpError> {
    let headers = request.headers();
    if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
        return Err(HttpError::MethodNotAllowed);
    }
    let (mut host, mut coding) = (None, None);
    // One pass over all headers costs less than a lookup of each.
    for (name, value) in headers {
        let (slot, error) = if name == HOST {
            (&mut host, HttpError::InvalidHost)
        } else if name == TRANSFER_ENCODING {
            (&mut coding, HttpError::UnsupportedTransferCoding)
        } else {
            continue;
        };
        if slot.replace(value.as_bytes()).is_some() {
            return Err(error);
        }
    }
    match host {
        Some(host) if !is_host(host) => return Err(HttpError::InvalidHost),
        None if request.version() != Version::HTTP_10 => return Err(HttpError::InvalidHost),
        _ => {}
    }
    if let Some(coding) = coding {
        if headers.contains_key(CONTENT_LENGTH) {
            return Err(HttpError::AmbiguousFraming);
        }
        if !coding.eq_ignore_ascii_case(b"chunked") {
            return Err(HttpError::UnsupportedTransferCoding);
        }
    }
    let uri = request.uri();
    match uri.authority() {
        None if uri.path().starts_with('/') => Ok(()),
        None if uri.path() == "*" && request.method() == Method::OPTIONS => Ok(()),
        Some(authority) if uri.scheme().is_some() => validate_target_host(authority, uri, host),
        _ => Err(HttpError::InvalidTarget),
    }
}

fn validate_target_host(authority: &Authority, uri: &Uri, host: Option<&[u8]>) -> Result<(), HttpError> {
    let named = authority.as_str();
    if !is_host(named.as_bytes()) || !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(HttpError::InvalidTarget);
    }
    match host {
        Some(host) if !is_same_host(host, named.as_bytes()) => Err(HttpError::HostConflict),
        _ => Ok(()),
    }
}

fn expects_continue(request: &Request<Incoming>) -> bool {
    request.headers().get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}
