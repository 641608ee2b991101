//! The decision API over HTTP: `/v1/check`, `status`, `reset`, `refund`, `release`, `renew` and `explain`.
//!
//! A question is `{"action","ip","key","platform","cost"}` (JSON for POST, a query string for GET) and, where limits
//! count by them, `method`, `path`, `host` and `headers`; or without an action but with a path, which then finds the
//! action. Answers are JSON. `check` answers 200 or 429 with the decision, `status` the same decision with 200.

use std::convert::Infallible;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::header::{ALLOW, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::service::Service;
use tidegate::core::Clock;
use tidegate::policy::{Forwarding, KeyError, is_host};
use tidegate::reply::Replies;
use tidegate::store::Store;
use tidegate::{Actions, Begun, CheckError, Deciding, Decision, Gate, Query};

use crate::access::{Access, Denied};
use crate::answer::{self, error, json};
use crate::body::Body;
use crate::connection::DRAINED;
use crate::listener::Client;
use crate::refusals::{Refusal, Refusals};
use crate::rejections::Rejected;
use crate::watch::{Phase, Watch};
use crate::wire::forward_auth;
use crate::wire::question::{Question, Wrong, nearest};

/// The largest question. One with eight long key parts has a few hundred bytes.
const MAX_QUESTION: usize = 16 << 10;

const PATHS: [&str; 8] =
    ["/v1/check", "/v1/status", "/v1/explain", "/v1/reset", "/v1/refund", "/v1/release", "/v1/renew", "/v1/auth"];

/// What all connections of the API share.
pub(crate) struct Api<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) replies: Replies,
    pub(crate) access: Access,
    pub(crate) forwarding: Forwarding,
    /// Whether forward-auth is answered.
    pub(crate) forward_auth: bool,
    pub(crate) deny_status: StatusCode,
    pub(crate) refusals: Arc<Refusals>,
    /// Whether the log has been told that forward-auth is asked by a peer that isn't trusted: once is enough.
    pub(crate) distrust_told: AtomicBool,
}

/// What serves a connection's requests.
pub(crate) struct Caller<S: Store, C: Clock>(Arc<Call<S, C>>);

/// One client connection to the API.
pub(crate) struct Call<S: Store, C: Clock> {
    api: Arc<Api<S, C>>,
    client: Client,
}

impl<S: Store, C: Clock> Caller<S, C> {
    pub(crate) fn new(api: &Arc<Api<S, C>>, client: Client) -> Self {
        Self(Arc::new(Call { api: Arc::clone(api), client }))
    }
}

impl<S: Store, C: Clock + Send + Sync + 'static> Service<Request<Incoming>> for Caller<S, C> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Answering<S, C>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let Call { api, client } = &*self.0;
        // Front servers pass on what their clients' browsers say.
        if let Err(denied) = api.access.check(&request)
            && (denied == Denied::Token || !forward_auth::is_asked(request.uri().path()))
        {
            client.watch.enter(Phase::Deciding);
            let denial = api.access.refusal(denied, &request, client.address, api.gate.clock().now());
            let response = dismiss(&client.watch, request, denial);
            return Answering::Now(Some(last(&client.watch, response)));
        }
        if request.uri().path() == "/v1/check" && request.method() == Method::POST {
            // The question that is asked most has no state but its body.
            client.watch.enter(Phase::Upload);
            let collecting = Collecting::begun(request.into_body(), &client.watch);
            return Answering::Check { call: Arc::clone(&self.0), collecting };
        }
        client.watch.enter(Phase::Deciding);
        let call = Arc::clone(&self.0);
        Answering::Later(Box::pin(async move {
            let response = route(&call.api, &call.client, request).await;
            last(&call.client.watch, response)
        }))
    }
}

/// An answer that is there, or on its way.
pub(crate) enum Answering<S: Store, C: Clock> {
    Now(Option<Response<Body>>),
    Check { call: Arc<Call<S, C>>, collecting: Collecting },
    Later(Pin<Box<dyn Future<Output = Response<Body>> + Send>>),
}

impl<S: Store, C: Clock> Future for Answering<S, C> {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let response = match &mut *self {
            Self::Now(response) => response.take().expect("invariant: a future that is ready is not polled again"),
            Self::Later(later) => ready!(later.as_mut().poll(cx)),
            Self::Check { call, collecting } => {
                let watch = &*call.client.watch;
                let response = match ready!(collecting.poll(watch, cx)) {
                    Ok(bytes) => match Question::from_json(&bytes).and_then(|question| check(&call.api, &question)) {
                        Ok(Checked::Answered(response)) => response,
                        Ok(Checked::Later(actions, deciding)) => {
                            let call = Arc::clone(call);
                            *self = Self::Later(Box::pin(async move {
                                let response = match (deciding.decision().await, Question::from_json(&bytes)) {
                                    (Ok(decision), Ok(question)) => {
                                        decided(&call.api, actions, &question.query(), &decision)
                                    }
                                    (Err(error), Ok(question)) => {
                                        refused_to_decide(&call.api, &question.query(), &error)
                                    }
                                    (_, Err(wrong)) => bad(&wrong),
                                };
                                last(&call.client.watch, response)
                            }));
                            return self.poll(cx);
                        }
                        Err(wrong) => bad(&wrong),
                    },
                    Err(status) => unread(watch, status),
                };
                last(watch, response)
            }
        };
        Poll::Ready(Ok(response))
    }
}

/// Ends a request: the connection is idle again, unless its answer streams, it reads something away or the server drains.
pub(crate) fn last(watch: &Watch, mut response: Response<Body>) -> Response<Body> {
    if !matches!(watch.phase(), Phase::Linger | Phase::Download) {
        watch.enter(Phase::Idle);
    }
    if watch.is_draining() {
        answer::close(&mut response);
    }
    response
}

/// Gives an answer to a request whose body is of no interest. A small one is read away behind the answer.
pub(crate) fn dismiss(watch: &Watch, request: Request<Incoming>, mut response: Response<Body>) -> Response<Body> {
    let body = request.into_body();
    if body.is_end_stream() {
        return response;
    }
    if body.size_hint().lower() <= DRAINED as u64 {
        watch.leave(body);
    } else {
        watch.begin_lingering(false);
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
        _ if forward_auth::is_asked(path) => {
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
    let (parts, body) = request.into_parts();
    watch.enter(Phase::Upload);
    let mut collecting = Collecting::new(body);
    let bytes = match poll_fn(|cx| collecting.poll(watch, cx)).await {
        Ok(bytes) => bytes,
        Err(status) => return unread(watch, status),
    };
    watch.enter(Phase::Deciding);
    match Question::from_json(&bytes) {
        Ok(question) => act(api, parts.uri.path(), &question).await,
        Err(wrong) => bad(&wrong),
    }
}

/// The answer to a question that can't be read.
fn unread(watch: &Watch, status: StatusCode) -> Response<Body> {
    watch.set_lingers();
    let mut response = error(status, "a question has at most 16384 bytes, and arrives whole");
    answer::close(&mut response);
    watch.begin_lingering(false);
    response
}

/// A small body on its way; nothing is copied where it comes in one piece.
pub(crate) struct Collecting {
    body: Incoming,
    first: Bytes,
    all: Vec<u8>,
    /// True once the client was waited for, from when the body has to come at a rate.
    is_paced: bool,
    collected: Option<Result<Bytes, StatusCode>>,
}

impl Collecting {
    fn new(body: Incoming) -> Self {
        Self { body, first: Bytes::new(), all: Vec::new(), is_paced: false, collected: None }
    }

    /// Asks for the body at once, while the connection is still reading: most bodies come with their heads, and are
    /// there before anybody is to be woken for them.
    fn begun(body: Incoming, watch: &Watch) -> Self {
        let mut collecting = Self::new(body);
        if let Poll::Ready(collected) = collecting.poll(watch, &mut Context::from_waker(Waker::noop())) {
            collecting.collected = Some(collected);
        }
        collecting
    }

    fn poll(&mut self, watch: &Watch, cx: &mut Context<'_>) -> Poll<Result<Bytes, StatusCode>> {
        if let Some(collected) = self.collected.take() {
            return Poll::Ready(collected);
        }
        if watch.is_overdue() {
            return Poll::Ready(Err(StatusCode::REQUEST_TIMEOUT));
        }
        if self.body.size_hint().lower() > MAX_QUESTION as u64 {
            return Poll::Ready(Err(StatusCode::PAYLOAD_TOO_LARGE));
        }
        while !self.body.is_end_stream() {
            let Poll::Ready(polled) = Pin::new(&mut self.body).poll_frame(cx) else {
                if !mem::replace(&mut self.is_paced, true) {
                    watch.pace(true);
                }
                watch.set_waits_on_client(true);
                return Poll::Pending;
            };
            watch.set_waits_on_client(false);
            let Some(frame) = polled else { break };
            let Ok(frame) = frame else { return Poll::Ready(Err(StatusCode::BAD_REQUEST)) };
            watch.touch();
            let Ok(data) = frame.into_data() else { continue };
            if self.is_paced {
                watch.count_body(data.len() as u64);
            }
            if self.first.len() + self.all.len() + data.len() > MAX_QUESTION {
                return Poll::Ready(Err(StatusCode::PAYLOAD_TOO_LARGE));
            }
            if self.first.is_empty() && self.all.is_empty() {
                self.first = data;
            } else {
                self.all.extend_from_slice(&mem::take(&mut self.first));
                self.all.extend_from_slice(&data);
            }
        }
        let collected = if self.all.is_empty() { mem::take(&mut self.first) } else { mem::take(&mut self.all).into() };
        Poll::Ready(Ok(collected))
    }
}

/// Questions that change nothing.
async fn look<S: Store, C: Clock>(api: &Api<S, C>, path: &str, question: &Question<'_>) -> Response<Body> {
    let query = match addressed(api, question) {
        Ok(()) => question.query(),
        Err(wrong) => return bad(&wrong),
    };
    if path == "/v1/explain" {
        return match api.gate.explain(&query).await {
            Ok(explanation) => written(StatusCode::OK, &explanation),
            Err(error) => refused_to_decide(api, &query, &error),
        };
    }
    let actions = match api.gate.actions(&query) {
        Ok(actions) => actions,
        Err(error) => return refused_to_decide(api, &query, &error),
    };
    match api.gate.status(&query).await {
        Ok(decision) => {
            let mut response = json(StatusCode::OK, api.replies.report(&decision));
            api.replies.annotate(actions, &decision, response.headers_mut());
            response
        }
        Err(error) => refused_to_decide(api, &query, &error),
    }
}

/// Questions that take back.
async fn act<S: Store, C: Clock>(api: &Api<S, C>, path: &str, question: &Question<'_>) -> Response<Body> {
    let query = match addressed(api, question) {
        Ok(()) => question.query(),
        Err(wrong) => return bad(&wrong),
    };
    let gives_back = matches!(path, "/v1/release" | "/v1/renew");
    let permit = match question.permit {
        Some(_) if !gives_back => return bad(&stray_permit(path)),
        None if gives_back => {
            return bad(&Wrong::with("permit", "`permit` is missing: the check that was allowed gave one"));
        }
        permit => permit,
    };
    let done = match (path, permit) {
        ("/v1/release", Some(permit)) => api.gate.release(&query, permit).await.map(|held| ("released", held)),
        ("/v1/renew", Some(permit)) => api.gate.renew(&query, permit).await.map(|held| ("renewed", held)),
        ("/v1/reset", _) => api.gate.reset(&query).await.map(|()| ("reset", true)),
        _ => api.gate.refund(&query).await.map(|()| ("refunded", true)),
    };
    match done {
        Ok((what, whether)) => json(StatusCode::OK, format!(r#"{{"{what}":{whether}}}"#).into()),
        Err(error) => refused_to_decide(api, &query, &error),
    }
}

fn stray_permit(path: &str) -> Wrong {
    Wrong::with("permit", format!("`permit` belongs to /v1/release and /v1/renew, not {path}"))
}

/// The question that counts, answered or begun.
enum Checked<S: Store, C: Clock> {
    Answered(Response<Body>),
    Later(Actions, Box<Deciding<S, C>>),
}

fn check<S: Store, C: Clock>(api: &Api<S, C>, question: &Question<'_>) -> Result<Checked<S, C>, Wrong> {
    addressed(api, question)?;
    if question.permit.is_some() {
        return Err(stray_permit("/v1/check"));
    }
    let query = question.query();
    let begun = api.gate.actions(&query).and_then(|actions| Ok((actions, api.gate.begin(actions, &query)?)));
    Ok(match begun {
        Ok((actions, Begun::Decided(decision))) => Checked::Answered(decided(api, actions, &query, &decision)),
        Ok((actions, Begun::Later(deciding))) => Checked::Later(actions, Box::new(deciding)),
        Err(error) => Checked::Answered(refused_to_decide(api, &query, &error)),
    })
}

fn decided<S: Store, C: Clock>(
    api: &Api<S, C>,
    actions: Actions,
    query: &Query<'_>,
    decision: &Decision,
) -> Response<Body> {
    if !decision.allowed || decision.shadow {
        api.refusals.note(api.gate.plan(), &Refusal { actions, query, decision });
    }
    api.replies.decision(actions, decision).map(Body::full)
}

/// A question is about an action, or about a request whose path may find one.
fn addressed<S: Store, C: Clock>(api: &Api<S, C>, question: &Question<'_>) -> Result<(), Wrong> {
    let query = question.query();
    if query.host.is_some_and(|host| !is_host(host.as_bytes())) {
        let why = "a `host` is a name or an address (IPv6 in brackets) and at most a port";
        api.refusals.note_rejected(api.gate.clock().now(), Rejected::Host, &query, why);
        return Err(Wrong::with("host", why));
    }
    if question.action.is_some() || question.path.is_some() {
        return Ok(());
    }
    Err(Wrong::with("action", "`action` is missing (or the `method` and `path` that find one)"))
}

/// The answer to a question that can't be decided.
pub(crate) fn refused_to_decide<S: Store, C: Clock>(
    api: &Api<S, C>,
    query: &Query<'_>,
    error: &CheckError,
) -> Response<Body> {
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
        CheckError::Key(KeyError::Uncountable(uncountable)) => {
            api.refusals.note_rejected(api.gate.clock().now(), uncountable.into(), query, &uncountable.to_string());
            let field = uncountable.part().map(str::to_owned);
            bad(&Wrong { field, message: error.to_string(), nearest: None })
        }
        CheckError::Key(KeyError::Platform(_)) => bad(&Wrong::with("platform", error.to_string())),
        CheckError::Cost { .. } => bad(&Wrong::with("cost", error.to_string())),
        CheckError::Store(_) => {
            api.refusals.note_failure(api.gate.clock().now(), error);
            answer::error(StatusCode::SERVICE_UNAVAILABLE, "the store can't be reached or written")
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

fn written(status: StatusCode, body: &impl serde::Serialize) -> Response<Body> {
    match serde_json::to_vec(body) {
        Ok(text) => json(status, text.into()),
        // Everything written here has string keys and finite numbers, which is all that serde_json asks.
        Err(_) => json(StatusCode::INTERNAL_SERVER_ERROR, Bytes::from_static(br#"{"error":"Internal Server Error"}"#)),
    }
}
