//! The reverse proxy: each request is checked, decided about, and then forwarded or refused.

use std::cell::RefCell;
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderValue, TRANSFER_ENCODING};
use http::uri::{Authority, PathAndQuery};
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::service::Service;
use tidegate::core::{Clock, Reason};
use tidegate::reply::{LastRefusal, Replies};
use tidegate::store::Store;
use tidegate::{Actions, Begun, CheckError, Decision, Gate, Query};
use tidegate_policy::{Forwarding, Inbound, Upstream as UpstreamAddress, canonical, is_host, is_same_host};

use crate::answer::{self, Trouble};
use crate::body::{Body, Download, Expectation, Expected, Upload};
use crate::connection::DRAINED;
use crate::hop;
use crate::listener::Client;
use crate::permit::{Keeper, Permit};
use crate::refusals::{Refusal, Refusals};
use crate::rejections::Rejected;
use crate::upgrade;
use crate::upstream::{Failure, Rules, Upstream};
use crate::watch::{Entry, Fault, Phase, Watch};

/// How long an idle connection to the upstream is kept: Node.js, the most hurried of common servers, closes after 5 s.
const KEPT: Duration = Duration::from_secs(4);

/// What all connections of the proxy share.
pub(crate) struct Proxy<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) replies: Replies,
    pub(crate) upstream: Arc<Upstream<Upload>>,
    pub(crate) forwarding: Forwarding,
    pub(crate) body_cap: u64,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) refusals: Arc<Refusals>,
}

impl<S: Store, C: Clock> Proxy<S, C> {
    pub(crate) fn new(
        gate: Gate<S, C>,
        inbound: &Inbound,
        upstream: &UpstreamAddress,
        keeper: Arc<Keeper>,
        refusals: Arc<Refusals>,
    ) -> Self {
        let replies = Replies::new(gate.plan(), inbound.headers, inbound.x_ratelimit);
        let authority = Authority::try_from(upstream.authority()).expect("invariant: the policy was read");
        let rules = Rules { connect: inbound.timeouts.connect, kept: KEPT, cap: inbound.caps.pool_idle };
        Self {
            gate,
            replies,
            upstream: Upstream::new(&authority, rules),
            forwarding: inbound.forwarding.clone(),
            body_cap: inbound.caps.body.unwrap_or(u64::MAX),
            keeper,
            refusals,
        }
    }

    /// What serves a connection's requests.
    pub(crate) fn meet(self: &Arc<Self>, client: Client) -> Visitor<S, C> {
        let ip = canonical(client.address.ip());
        let trusted = self.forwarding.trusted.contains(ip);
        let peer = HeaderValue::try_from(ip.to_string()).unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        let visit = Visit { proxy: Arc::clone(self), ip, peer, trusted, watch: client.watch, entry: client.entry };
        Visitor { visit: Arc::new(visit), last_refusal: RefCell::default() }
    }
}

/// One client connection to the proxy.
pub(crate) struct Visit<S: Store, C: Clock> {
    proxy: Arc<Proxy<S, C>>,
    ip: IpAddr,
    /// The peer's address as a header has it.
    peer: HeaderValue,
    trusted: bool,
    watch: Arc<Watch>,
    entry: Arc<Entry>,
}

/// A connection's requests, served. A refusal is answered in place; only what is forwarded has a future of its own.
pub(crate) struct Visitor<S: Store, C: Clock> {
    visit: Arc<Visit<S, C>>,
    last_refusal: RefCell<LastRefusal>,
}

impl<S: Store, C: Clock + Send + Sync + 'static> Service<Request<Incoming>> for Visitor<S, C> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, mut request: Request<Incoming>) -> Answering {
        let visit = &self.visit;
        let number = visit.watch.count_request();
        if let Err(trouble) = sound(&request, number, &visit.watch) {
            if trouble == Trouble::Host {
                visit.reject(Rejected::Host, &visit.query(&request), trouble.message());
            }
            return visit.now(visit.dismiss(request.into_body(), true, trouble.response()));
        }
        visit.normalise(&mut request);
        let query = visit.query(&request);
        let actions = match visit.proxy.gate.actions(&query) {
            Ok(actions) => actions,
            Err(error) => {
                let trouble = visit.undecided(&query, &error);
                return visit.now(visit.turn_away(request, trouble));
            }
        };
        match visit.proxy.gate.begin(actions, &query) {
            Err(error) => {
                let trouble = visit.undecided(&query, &error);
                visit.now(visit.turn_away(request, trouble))
            }
            Ok(Begun::Decided(decision)) => {
                let mut last = self.last_refusal.borrow_mut();
                match visit.conclude(&query, &mut last, actions, decision) {
                    Err(refusal) => visit.now(visit.turn_away(request, refusal)),
                    Ok(admitted) => {
                        let visit = Arc::clone(visit);
                        Answering::Later(Box::pin(async move {
                            let response = visit.forward(request, admitted).await;
                            visit.last(response)
                        }))
                    }
                }
            }
            Ok(Begun::Later(deciding)) => {
                visit.watch.enter(Phase::Deciding);
                let visit = Arc::clone(visit);
                Answering::Later(Box::pin(async move {
                    let decided = deciding.decision().await;
                    let query = visit.query(&request);
                    let concluded = match decided {
                        Ok(decision) => visit.conclude(&query, &mut LastRefusal::default(), actions, decision),
                        Err(error) => Err(visit.undecided(&query, &error)),
                    };
                    let response = match concluded {
                        Ok(admitted) => visit.forward(request, admitted).await,
                        Err(refusal) => visit.turn_away(request, refusal),
                    };
                    visit.last(response)
                }))
            }
        }
    }
}

/// An answer that is there, or on its way.
pub(crate) enum Answering {
    Now(Option<Response<Body>>),
    Later(Pin<Box<dyn Future<Output = Response<Body>> + Send>>),
}

impl Future for Answering {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Now(response) => {
                Poll::Ready(Ok(response.take().expect("invariant: a future that is ready is not polled again")))
            }
            Self::Later(later) => later.as_mut().poll(cx).map(Ok),
        }
    }
}

/// Why there is no answer of the upstream's to pass on.
#[derive(Debug, thiserror::Error)]
enum Unanswered {
    #[error(transparent)]
    Upstream(Failure),
    #[error("the upstream switched protocols unasked")]
    Switched,
    #[error("no progress in time")]
    Overdue,
}

/// What a request was admitted by.
struct Admitted {
    actions: Actions,
    decision: Decision,
    permit: Option<Permit>,
}

impl<S: Store, C: Clock + Send + Sync + 'static> Visit<S, C> {
    fn now(&self, response: Response<Body>) -> Answering {
        Answering::Now(Some(self.last(response)))
    }

    /// While the server drains, every answer is its connection's last.
    fn last(&self, mut response: Response<Body>) -> Response<Body> {
        if self.watch.is_draining() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
            answer::close(&mut response);
        }
        response
    }

    fn query<'r>(&'r self, request: &'r Request<Incoming>) -> Query<'r> {
        let headers = request.headers();
        Query {
            ip: Some(if self.trusted { self.proxy.forwarding.client(self.ip, headers) } else { self.ip }),
            method: Some(request.method().as_str()),
            path: Some(request.uri().path_and_query().map_or("/", |path| path.as_str())),
            // What HTTP/1.0 leaves out is what the upstream is told.
            host: headers.get(HOST).unwrap_or(self.proxy.upstream.host()).to_str().ok(),
            headers: Some(headers),
            ..Query::default()
        }
    }

    /// What a decision means for its request.
    #[expect(clippy::result_large_err, reason = "a refusal is as usual as an admission; a box would cost each of them")]
    fn conclude(
        &self,
        query: &Query<'_>,
        last: &mut LastRefusal,
        actions: Actions,
        decision: Decision,
    ) -> Result<Admitted, Response<Body>> {
        let proxy = &*self.proxy;
        if !decision.allowed || decision.shadow {
            proxy.refusals.note(proxy.gate.plan(), &Refusal { actions, query, decision: &decision });
        }
        if !decision.allowed {
            self.watch.set_blocked(decision.blocked || decision.reason == Reason::DenyList);
            let headers = query.headers.expect("invariant: a proxied request's query has its headers");
            return Err(proxy.replies.refusal_after(last, actions, &decision, headers).map(Body::full));
        }
        let hold = match decision.permit {
            None => None,
            Some(_) => proxy.gate.hold(actions, query, &decision).map_err(|error| self.undecided(query, &error))?,
        };
        Ok(Admitted { actions, decision, permit: hold.map(|hold| proxy.keeper.keep(hold)) })
    }

    /// Answers a request that isn't forwarded.
    fn turn_away(&self, request: Request<Incoming>, refusal: Response<Body>) -> Response<Body> {
        let expects = request.headers().contains_key(EXPECT);
        self.dismiss(request.into_body(), expects, refusal)
    }

    #[cold]
    fn undecided(&self, query: &Query<'_>, error: &CheckError) -> Response<Body> {
        match error.uncountable() {
            Some(uncountable) => {
                let why = uncountable.to_string();
                self.reject(uncountable.into(), query, &why);
                answer::error(StatusCode::BAD_REQUEST, &why)
            }
            None => {
                self.proxy.refusals.note_failure(self.proxy.gate.clock().now(), error);
                Trouble::Unavailable.response()
            }
        }
    }

    #[cold]
    fn reject(&self, reason: Rejected, query: &Query<'_>, why: &str) {
        self.proxy.refusals.note_rejected(self.proxy.gate.clock().now(), reason, query, why);
    }

    /// Gives a path its normal form, where the policy says so.
    fn normalise(&self, request: &mut Request<Incoming>) {
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
        Admitted { actions, decision, permit }: Admitted,
    ) -> Response<Body> {
        let proxy = &*self.proxy;
        let has_body = !request.body().is_end_stream();
        if has_body && request.body().size_hint().lower() > proxy.body_cap {
            return self.dismiss(request.into_body(), true, Trouble::TooLarge.response());
        }
        let chunked = has_body && request.headers().contains_key(TRANSFER_ENCODING);
        let expectation = (has_body && expects_continue(&request)).then(Arc::<Expectation>::default);
        let hop = hop::strip_request(request.headers_mut(), proxy.gate.plan().keyed_headers());
        let paced = has_body && hop.upgrade.is_none() && !is_grpc(&request);
        let switching = hop.upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        if let Some(expectation) = &expectation {
            let expectation = Arc::clone(expectation);
            hyper::ext::on_informational(&mut request, move |head| {
                if head.status() == StatusCode::CONTINUE {
                    expectation.go();
                }
            });
        }
        hop::arm_request(request.headers_mut(), &hop, chunked);
        hop::tell_origin(request.headers_mut(), &self.peer, self.trusted, proxy.gate.plan().keyed_headers());
        if !request.headers().contains_key(HOST) {
            request.headers_mut().insert(HOST, proxy.upstream.host().clone());
        }
        if request.uri().authority().is_some()
            && let Some(path) = request.uri().path_and_query().cloned()
        {
            *request.uri_mut() = Uri::from(path);
        }
        *request.version_mut() = Version::HTTP_11;
        let request = request.map(|body| {
            if has_body {
                self.watch.enter(Phase::Upload);
                self.watch.begin_body(paced);
                Upload::new(body, Arc::clone(&self.watch), proxy.body_cap, expectation.clone())
            } else {
                self.watch.enter(Phase::Await);
                Upload::none(body)
            }
        });
        let mut sending = pin!(Arc::clone(&proxy.upstream).send(request));
        let sent = poll_fn(|cx| match self.watch.is_overdue() {
            true => Poll::Ready(Err(Unanswered::Overdue)),
            false => sending.as_mut().poll(cx).map_err(Unanswered::Upstream),
        });
        let mut response = match sent.await {
            Ok(response) => response,
            Err(failure) => return self.fail(&failure, has_body),
        };
        let protocol = hop::strip_response(response.headers_mut());
        *response.version_mut() = Version::HTTP_11;
        proxy.replies.annotate(actions, &decision, response.headers_mut());
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            let Some(client) = switching else {
                return self.fail(&Unanswered::Switched, has_body);
            };
            hop::arm_switch(response.headers_mut(), protocol);
            let upstream = hyper::upgrade::on(&mut response);
            self.watch.enter(Phase::Tunnel);
            upgrade::splice(client, upstream, Arc::clone(&self.watch), Arc::clone(&self.entry), permit);
            return response.map(|_| Body::empty());
        }
        if expectation.as_ref().is_some_and(|it| it.state() == Expected::Waiting) {
            // The client was never told to send its body, and nobody can say whether it will.
            answer::close(&mut response);
        }
        response.map(|body| Body::stream(Download::new(body, Arc::clone(&self.watch), permit, expectation)))
    }

    /// Answers without having read the request's body: a small one is read away behind the answer so that the
    /// connection can go on, a large one ends it.
    fn dismiss(&self, body: Incoming, ends: bool, mut response: Response<Body>) -> Response<Body> {
        if body.is_end_stream() {
            self.watch.enter(Phase::Idle);
            return response;
        }
        let small = body.size_hint().lower() <= DRAINED as u64;
        if small && !ends {
            self.watch.leave(body);
        } else {
            self.watch.begin_lingering(false);
            self.watch.set_lingers();
            answer::close(&mut response);
        }
        response
    }

    fn fail(&self, failure: &Unanswered, has_body: bool) -> Response<Body> {
        let trouble = match (failure, self.watch.fault()) {
            (Unanswered::Upstream(Failure::Broken(_)), Fault::TooLarge) => Trouble::TooLarge,
            (Unanswered::Upstream(Failure::Broken(_)), Fault::Broken) => Trouble::BrokenBody,
            (Unanswered::Overdue, _) if self.watch.phase() == Phase::Upload && self.watch.waits_on_client() => {
                Trouble::ClientTimeout
            }
            (Unanswered::Overdue | Unanswered::Upstream(Failure::ConnectTimeout), _) => Trouble::GatewayTimeout,
            (Unanswered::Switched | Unanswered::Upstream(_), _) => Trouble::BadGateway,
        };
        if trouble.status().is_server_error() {
            self.proxy.refusals.note_failure(self.proxy.gate.clock().now(), failure);
        }
        let mut response = trouble.response();
        if has_body {
            self.watch.set_lingers();
            answer::close(&mut response);
        }
        self.watch.enter(Phase::Idle);
        response
    }
}

/// Whether a request can be forwarded without two servers reading it differently.
pub(crate) fn sound(request: &Request<Incoming>, number: u32, watch: &Watch) -> Result<(), Trouble> {
    let headers = request.headers();
    if matches!(*request.method(), Method::CONNECT | Method::TRACE) {
        return Err(Trouble::Method);
    }
    let (mut host, mut coding) = (None, None);
    // One look over all lines costs less than finding each of these.
    for (name, value) in headers {
        let (slot, trouble) = if name == HOST {
            (&mut host, Trouble::Host)
        } else if name == TRANSFER_ENCODING {
            (&mut coding, Trouble::Encoding)
        } else {
            continue;
        };
        if slot.replace(value.as_bytes()).is_some() {
            return Err(trouble);
        }
    }
    match host {
        Some(host) if !is_host(host) => return Err(Trouble::Host),
        None if request.version() != Version::HTTP_10 => return Err(Trouble::Host),
        _ => {}
    }
    if let Some(coding) = coding {
        if watch.ambiguous_head() == number || headers.contains_key(CONTENT_LENGTH) {
            return Err(Trouble::TwoFramings);
        }
        if !coding.eq_ignore_ascii_case(b"chunked") {
            return Err(Trouble::Encoding);
        }
    }
    let uri = request.uri();
    match uri.authority() {
        None if uri.path().starts_with('/') => Ok(()),
        None if uri.path() == "*" && request.method() == Method::OPTIONS => Ok(()),
        Some(authority) if uri.scheme().is_some() => same_host(authority, uri, host),
        _ => Err(Trouble::Target),
    }
}

fn same_host(authority: &Authority, uri: &Uri, host: Option<&[u8]>) -> Result<(), Trouble> {
    let named = authority.as_str();
    if !is_host(named.as_bytes()) || !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(Trouble::Target);
    }
    match host {
        Some(host) if !is_same_host(host, named.as_bytes()) => Err(Trouble::HostConflict),
        _ => Ok(()),
    }
}

/// True if a request is a call of gRPC, whose stream may be silent for long and say little.
pub(crate) fn is_grpc(request: &Request<Incoming>) -> bool {
    request.headers().get(CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

fn expects_continue(request: &Request<Incoming>) -> bool {
    request.headers().get(EXPECT).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}
