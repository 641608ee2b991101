//! Envoy's rate limit service (`envoy.service.ratelimit.v3.RateLimitService`), and gRPC's health checks.
//!
//! A descriptor of the domain `tidegate` is a question to the policy. Its entries are the fields of a decision request:
//! `action`, `ip` or `remote_address`, `key`, `platform`, `method`, `path`, `host` and `header:NAME`. Other domains are those of
//! the policy's `rls.files`. Each descriptor is one decision, so a call that one of them refuses may have been counted by
//! others, as in the original.

mod inline_limit;
pub(crate) mod messages;
mod status;
mod yaml_limits;

use std::borrow::Cow;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use http::{Request, Response, StatusCode, Version};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::Service;
use prost::Message;
use tidegate::policy::{Forwarding, KeyError, MatchedActions, Query, is_host};
use tidegate::reply::Replies;
use tidegate::store::Store;
use tidegate::{CheckError, Decision, Gate, LimiterDecision};
use tidegate_core::{CallerRateDecision, Clock};
use tonic::Status;
use tonic::server::Grpc;
use tonic_prost::ProstCodec;

use self::inline_limit::InlineLimit;
use self::messages::{
    Code, Descriptor, DescriptorStatus, Entry, HealthRequest, HealthResponse, RateLimitRequest, RateLimitResponse,
    ServingStatus,
};
use self::status::descriptor_status;
pub(crate) use self::status::strictness;
pub(crate) use self::yaml_limits::YamlLimits;
use crate::access::{Access, AccessError};
use crate::access_log::AccessSlot;
use crate::body::{RelayBody, ResponseBody};
use crate::listener::ConnectionContext;
use crate::local_response::{discard_body, error, finish_response};
use crate::rejections::RejectionReason;
use crate::state_cell::ListenerState;
use crate::states::SharedParts;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};
use crate::wire::decision_request::{DecisionRequest, DecisionRequestError};
use crate::wire::ext_authz;
use crate::wire::forward_auth::meets_concurrency;
use crate::wire::http_api::{decide, validate};
use crate::wire::limitador::{self, Decider, is_refused};
use crate::wire::small_body::collect_body;

/// The domain whose descriptors are questions to the policy.
const POLICY_DOMAIN: &str = "tidegate";
const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
/// The start of a field that is a header.
const HEADER_FIELD: &str = "header:";
/// The maximum size of a request to the rate limit service in bytes. A path of 60 KiB, which Envoy takes by default, may
/// be in several descriptors.
const MAX_BYTES: usize = 1 << 20;
/// A message without fields, as gRPC frames it.
const EMPTY_MESSAGE: [u8; 5] = [0; 5];
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";

/// The state that all connections share.
pub(crate) struct RlsState<S: Store, C: Clock> {
    pub(crate) gate: Gate<S, C>,
    pub(crate) replies: Replies,
    pub(crate) limits: Option<YamlLimits>,
    pub(crate) access: Access,
    pub(crate) forwarding: Forwarding,
    pub(crate) parts: Arc<SharedParts>,
    /// The time in which a client must take a piece of a response.
    pub(crate) body_timeout: Duration,
    pub(crate) unknown_domain: Once,
}

/// The service of a connection.
pub(crate) struct RlsService<S: Store, C: Clock> {
    state: Arc<RlsState<S, C>>,
    client: Arc<ConnectionContext>,
}

impl<S: Store, C: Clock> ListenerState for RlsState<S, C> {
    type Service = RlsService<S, C>;

    fn connection_service(self: Arc<Self>, client: Arc<ConnectionContext>) -> RlsService<S, C> {
        RlsService { state: self, client }
    }
}

impl<S: Store, C: Clock> Service<Request<Incoming>> for RlsService<S, C> {
    type Response = Response<ResponseBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let (state, client) = (Arc::clone(&self.state), Arc::clone(&self.client));
        client.watch.enter(ConnectionPhase::Deciding);
        Box::pin(async move {
            let response = respond(&state, &client, request).await;
            Ok(finish_response(&client.watch, response))
        })
    }
}

async fn respond<S: Store, C: Clock>(
    state: &Arc<RlsState<S, C>>,
    client: &Arc<ConnectionContext>,
    request: Request<Incoming>,
) -> Response<ResponseBody> {
    let watch = &client.watch;
    if let Err(denied) = state.access.check(&request) {
        let mut denial = state.access.denied_response(denied, &request, client, state.gate.clock().now());
        if denied == AccessError::Token
            && state.access.has_token(request.headers())
            && let LimiterDecision::RetryAfter(wait) = (state.parts.sign_in_limiter)(client.address.ip())
        {
            *denial.status_mut() = StatusCode::TOO_MANY_REQUESTS;
            denial.headers_mut().insert(RETRY_AFTER, wait.as_secs_ceil().into());
        }
        return discard_body(watch, request.into_body(), false, denial);
    }
    let content_type = request.headers().get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if request.version() != Version::HTTP_2 || !content_type.starts_with(b"application/grpc") {
        let message = "this listener speaks gRPC over HTTP/2; the decision API is at api.listen";
        let response = error(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
        return discard_body(watch, request.into_body(), false, response);
    }
    let (parts, body) = request.into_parts();
    let is_limits = parts.uri.path() == SHOULD_RATE_LIMIT;
    let max_bytes = if is_limits { MAX_BYTES } else { ext_authz::MAX_BYTES };
    let bytes = match collect_body(watch, body, max_bytes).await {
        Ok(bytes) => bytes,
        Err(response) if is_limits && response.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let why = format!("the request to the rate limit service has more than {MAX_BYTES} bytes");
            let query = Query::default();
            let _ = state.reject(RejectionReason::HeadSize, &query, &why, &watch.access);
            let request = Request::from_parts(parts, Full::new(Bytes::from_static(&EMPTY_MESSAGE)));
            let refused = unary(request, |_: RateLimitRequest| async { Ok(refused_response()) }).await;
            return state.relayed(refused, watch);
        }
        Err(response) => return response,
    };
    let request = Request::from_parts(parts, Full::new(bytes));
    let response = match request.uri().path() {
        SHOULD_RATE_LIMIT => unary(request, |asked| async move { state.decide(&asked, &watch.access).await }).await,
        ext_authz::CHECK => unary(request, |asked| async move { state.authorize(&asked, &watch.access).await }).await,
        HEALTH_CHECK => {
            let is_draining = state.parts.draining.load(Ordering::Relaxed);
            unary(request, |asked| async move { health(&asked, is_draining) }).await
        }
        path => {
            let known = [SHOULD_RATE_LIMIT, ext_authz::CHECK, HEALTH_CHECK].join(", ");
            Status::unimplemented(format!("there are {known}, not {path}")).into_http()
        }
    };
    state.relayed(response, watch)
}

/// Answers a request that has one message, with one message.
async fn unary<I, O, F>(request: Request<Full<Bytes>>, answer: impl FnMut(I) -> F) -> Response<tonic::body::Body>
where
    I: Message + Default + 'static,
    O: Message + Default + 'static,
    F: Future<Output = Result<O, Status>>,
{
    Grpc::new(ProstCodec::<O, I>::default()).unary(Unary(answer), request).await
}

/// A function as a service.
struct Unary<A>(A);

impl<I, O, F, A> tower_service::Service<tonic::Request<I>> for Unary<A>
where
    A: FnMut(I) -> F,
    F: Future<Output = Result<O, Status>>,
{
    type Response = tonic::Response<O>;
    type Error = Status;
    type Future = futures_util::future::MapOk<F, fn(O) -> tonic::Response<O>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: tonic::Request<I>) -> Self::Future {
        futures_util::TryFutureExt::map_ok((self.0)(request.into_inner()), tonic::Response::new)
    }
}

/// The response to a request that can't be counted.
fn refused_response() -> RateLimitResponse {
    RateLimitResponse { overall_code: Code::OverLimit.into(), ..RateLimitResponse::default() }
}

fn health(asked: &HealthRequest, is_draining: bool) -> Result<HealthResponse, Status> {
    if !["", SERVICE, ext_authz::SERVICE].contains(&&*asked.service) {
        return Err(Status::not_found(format!("the services are \"\", {SERVICE:?} and {:?}", ext_authz::SERVICE)));
    }
    let status = if is_draining { ServingStatus::NotServing } else { ServingStatus::Serving };
    Ok(HealthResponse { status: status.into() })
}

impl Entry {
    /// The value as text. All bytes that are no text are the same character.
    fn text(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.value)
    }
}

/// The meaning of a descriptor's hits.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hits {
    Take,
    /// To take what is left if they don't fit: a descriptor's own hits are often told after the call.
    TakeAll,
    /// To ask for room for one.
    Peek,
    Refund,
}

impl Hits {
    fn of(descriptor: &Descriptor, addend: Option<u64>) -> Self {
        match addend {
            _ if descriptor.is_negative_hits => Self::Refund,
            Some(0) => Self::Peek,
            _ if descriptor.hits_addend.is_some() => Self::TakeAll,
            _ => Self::Take,
        }
    }
}

/// A descriptor, read.
#[expect(clippy::large_enum_variant, reason = "nearly all are of the large kind")]
enum Question<'a> {
    /// Its status is known, since no limit has to be asked.
    Decided(DescriptorStatus),
    /// The limits of these actions decide. If `is_quota`, they refuse the request only if all such descriptors are over
    /// their limits.
    Ask { request: DecisionRequest<'a>, actions: MatchedActions, hits: Hits, is_quota: bool },
    /// The descriptor states its own limit.
    Inline(InlineLimit),
}

impl<S: Store, C: Clock> RlsState<S, C> {
    fn relayed(&self, response: Response<tonic::body::Body>, watch: &Arc<ConnectionWatch>) -> Response<ResponseBody> {
        response.map(|body| ResponseBody::Relay(RelayBody::new(body, Arc::clone(watch), self.body_timeout)))
    }

    async fn decide(&self, asked: &RateLimitRequest, access: &AccessSlot) -> Result<RateLimitResponse, Status> {
        if asked.domain.is_empty() {
            return Err(Status::invalid_argument("`domain` is empty"));
        }
        if asked.descriptors.is_empty() {
            return Err(Status::invalid_argument("`descriptors` is empty"));
        }
        // All are read before any is counted.
        let questions = match &self.limits {
            _ if asked.domain == POLICY_DOMAIN => {
                let descriptors = asked.descriptors.iter().enumerate();
                let questions = descriptors.map(|(index, it)| self.question(index, it, asked.hits_addend, access));
                questions.collect::<Result<Vec<_>, _>>()?
            }
            Some(limits) if limits.has_domain(&asked.domain) => {
                match Box::pin(self.decide_together(limits, asked, access)).await? {
                    Some(response) => return Ok(response),
                    None => limits.questions(asked)?,
                }
            }
            _ => self.admit_unknown_domain(asked),
        };
        let plan = self.gate.plan();
        // The address that a request comes from is counted once, though several descriptors may have it.
        let mut is_global_counted = false;
        let mut statuses = Vec::with_capacity(questions.len());
        let mut tightest: Option<(MatchedActions, Decision)> = None;
        let (mut is_over, mut quotas, mut quotas_over, mut inline_wait) = (false, 0, 0, None);
        for question in questions {
            let (request, actions, hits, is_quota) = match question {
                Question::Ask { request, actions, hits, is_quota } => (request, actions, hits, is_quota),
                Question::Decided(status) => {
                    is_over |= status.code() == Code::OverLimit;
                    statuses.push(status);
                    continue;
                }
                Question::Inline(inline) => {
                    let decided = Box::pin(self.decide_inline(&inline)).await;
                    let decided = decided.map_err(|error| self.status_of(&error))?;
                    is_over |= decided.is_limited;
                    inline_wait = inline_wait.max(decided.retry_after.map(|_| decided.retry_after_secs()));
                    statuses.push(inline.status(&decided));
                    continue;
                }
            };
            let query = request.query();
            let skips_global = is_global_counted || query.ip.is_none();
            is_global_counted |= !skips_global;
            let query = Query { actions: Some(actions), skips_global, ..query };
            let decision = match self.decide_one(&query, hits).await {
                Ok(decision) => decision,
                Err(error) if self.log_uncountable(&error, &query, access) => {
                    is_over = true;
                    statuses.push(DescriptorStatus::refused());
                    continue;
                }
                Err(error) => return Err(self.status_of(&error)),
            };
            self.parts.refusals.log_decision(plan, actions, &query, &decision, access);
            statuses.push(descriptor_status(plan, &decision));
            if is_quota {
                quotas += 1;
                if !decision.allowed {
                    quotas_over += 1;
                }
            } else {
                is_over |= !decision.allowed;
            }
            if tightest.is_none_or(|(_, other)| strictness(&decision) > strictness(&other)) {
                tightest = Some((actions, decision));
            }
        }
        is_over |= quotas > 0 && quotas == quotas_over;
        // The refusal of one quota among several is not the request's.
        let told = tightest.filter(|(_, decision)| decision.allowed || is_over);
        let mut headers = told.map(|(actions, decision)| self.headers(actions, &decision)).unwrap_or_default();
        if let Some(wait) = inline_wait {
            add_wait(&mut headers, wait);
        }
        Ok(RateLimitResponse {
            overall_code: if is_over { Code::OverLimit } else { Code::Ok }.into(),
            statuses,
            response_headers_to_add: headers,
        })
    }

    /// Decides about a request whose domain is a namespace of limitador's. Each descriptor has the status of the limit that
    /// binds most. `None` if the domain isn't one.
    async fn decide_together(
        &self,
        limits: &YamlLimits,
        asked: &RateLimitRequest,
        access: &AccessSlot,
    ) -> Result<Option<RateLimitResponse>, Status> {
        // The hits of several descriptors can't be told apart here, because all limits see all descriptors.
        let own_hits = match &asked.descriptors[..] {
            [one] => one.hits_addend,
            _ => None,
        };
        let is_refund = asked.descriptors.iter().any(|descriptor| descriptor.is_negative_hits);
        if is_refund && !asked.descriptors.iter().all(|descriptor| descriptor.is_negative_hits) {
            let message = "the hits of some descriptors are negative: here all are, or none, as they are counted once";
            return Err(Status::invalid_argument(message));
        }
        let hits = own_hits.unwrap_or_else(|| asked.hits_addend.max(1).into());
        let descriptors: Vec<_> = asked.descriptors.iter().map(entries).collect();
        let questions = limits.applying(&asked.domain, descriptors.iter().map(borrow), hits);
        let questions = questions.map_err(|error| Status::invalid_argument(error.message))?;
        let Some(questions) = questions else { return Ok(None) };
        let decider = Decider { gate: &self.gate, refusals: &self.parts.refusals, metrics: &self.parts.metrics };
        let decided = match (is_refund, hits) {
            (true, _) => decider.refund(&questions).await,
            (false, 0) => decider.ask(&questions).await,
            (false, _) => decider.decide_together(&questions, access).await,
        };
        let decisions = decided.map_err(|error| self.status_of(&error))?;
        let tightest = limitador::tightest(&decisions).map(|index| (questions[index].actions, &decisions[index]));
        let status = tightest
            .map_or_else(DescriptorStatus::admitted, |(_, decision)| descriptor_status(self.gate.plan(), decision));
        let code = if is_refused(&decisions) { Code::OverLimit } else { Code::Ok };
        Ok(Some(RateLimitResponse {
            overall_code: code.into(),
            statuses: vec![status; asked.descriptors.len()],
            response_headers_to_add: tightest.map(|(actions, it)| self.headers(actions, it)).unwrap_or_default(),
        }))
    }

    /// As the original, which has no limits for a domain that it doesn't know.
    fn admit_unknown_domain<'a>(&self, asked: &RateLimitRequest) -> Vec<Question<'a>> {
        self.unknown_domain.call_once(|| {
            let domain = tidegate_policy::printable(&asked.domain);
            tracing::warn!(
                %domain,
                "the rate limit service admits all calls of an unknown domain; known are `{POLICY_DOMAIN}` and those of rls.files"
            );
        });
        asked.descriptors.iter().map(|_| Question::Decided(DescriptorStatus::admitted())).collect()
    }

    /// Reads a descriptor of the policy's domain. If the client's request can't be counted, it is refused: after an error,
    /// Envoy would let it pass by default.
    fn question<'a>(
        &self,
        index: usize,
        descriptor: &'a Descriptor,
        hits_addend: u32,
        access: &AccessSlot,
    ) -> Result<Question<'a>, Status> {
        let invalid =
            |error: DecisionRequestError| Status::invalid_argument(format!("descriptor {index}: {}", error.message));
        if descriptor.limit.is_some() {
            let message = format!("descriptor {index}: the policy has the limits of the domain `{POLICY_DOMAIN}`");
            return Err(Status::invalid_argument(message));
        }
        let mut request = DecisionRequest::default();
        // A header that no entry has is one that the client hasn't sent.
        request.set_no_headers();
        for entry in &descriptor.entries {
            // The name that Envoy gives the client's address.
            let field = if entry.key == "remote_address" { "ip" } else { &entry.key };
            match request.set_text(field, entry.text()) {
                Ok(()) => {}
                Err(error) if field.strip_prefix(HEADER_FIELD).is_some_and(is_header_name) => {
                    return Ok(self.reject(RejectionReason::Head, &request.query(), &error.message, access));
                }
                // An operator may take it from a header.
                Err(error) if field == "ip" && request.query().ip.is_none() => {
                    return Ok(self.reject(RejectionReason::MissingPart, &request.query(), &error.message, access));
                }
                Err(error) => return Err(invalid(error)),
            }
        }
        let addend = descriptor.hits_addend.or((hits_addend > 0).then_some(hits_addend.into()));
        if let Some(addend) = addend {
            request.set_text("cost", addend.to_string().into()).map_err(invalid)?;
        }
        let hits = Hits::of(descriptor, addend);
        let query = request.query();
        if query.host.is_some_and(|host| !is_host(host.as_bytes())) {
            return Ok(self.reject(RejectionReason::Host, &query, "the host is no name or address", access));
        }
        validate(&self.gate, &self.parts.refusals, "/v1/check", &request, access).map_err(invalid)?;
        access.note(|entry| entry.note_question(&query));
        match self.gate.actions(&query) {
            Ok(actions) if meets_concurrency(self.gate.plan(), actions) => {
                let message = "a limit on calls in flight can't be kept here, because the end of a call isn't told";
                Err(Status::failed_precondition(format!("descriptor {index}: {message}")))
            }
            Ok(actions) => Ok(Question::Ask { request, actions, hits, is_quota: false }),
            Err(error) if self.log_uncountable(&error, &query, access) => {
                Ok(Question::Decided(DescriptorStatus::refused()))
            }
            Err(error) => Err(self.status_of(&error)),
        }
    }

    /// The status of a descriptor with a value of the client's that can't be counted, which is logged.
    fn reject<'a>(&self, reason: RejectionReason, query: &Query<'_>, why: &str, access: &AccessSlot) -> Question<'a> {
        self.parts.refusals.log_rejection(self.gate.clock().now(), reason, query, why, access);
        Question::Decided(DescriptorStatus::refused())
    }

    /// Returns true if the client's request can't be counted, and logs that. A part that is missing may be one that the
    /// client has left out.
    fn log_uncountable(&self, error: &CheckError, query: &Query<'_>, access: &AccessSlot) -> bool {
        let reason = match error {
            CheckError::Key(KeyError::Uncountable(uncountable)) => uncountable.into(),
            CheckError::Key(KeyError::Missing(_) | KeyError::Platform(_)) => RejectionReason::MissingPart,
            _ => return false,
        };
        self.parts.refusals.log_rejection(self.gate.clock().now(), reason, query, &error.to_string(), access);
        true
    }

    /// Asks a limit that a descriptor states itself.
    async fn decide_inline(&self, inline: &InlineLimit) -> Result<CallerRateDecision, CheckError> {
        let InlineLimit { rate, name, quantity, .. } = inline;
        if *quantity == 0 {
            return self.gate.throttle(*rate, name, 0).await.map(|decided| {
                let is_limited = decided.remaining == 0;
                CallerRateDecision { is_limited, ..decided }
            });
        }
        let decided = self.gate.throttle(*rate, name, *quantity).await?;
        // As with other limits, hits that don't fit take what is left.
        if decided.is_limited && decided.remaining > 0 {
            self.gate.throttle(*rate, name, decided.remaining.cast_signed()).await?;
        }
        Ok(decided)
    }

    async fn decide_one(&self, query: &Query<'_>, hits: Hits) -> Result<Decision, CheckError> {
        match hits {
            Hits::Take => decide(&self.gate, &self.parts.metrics, query).await,
            Hits::TakeAll => {
                let decision = decide(&self.gate, &self.parts.metrics, query).await?;
                let left = decision.remaining.filter(|left| !decision.allowed && *left > 0);
                if left.is_some() {
                    Box::pin(self.gate.charge(&Query { cost: left, ..*query })).await?;
                }
                Ok(Decision {
                    remaining: decision.remaining.map(|left| if decision.allowed { left } else { 0 }),
                    ..decision
                })
            }
            Hits::Peek => Box::pin(self.gate.status(&Query { cost: Some(1), ..*query })).await,
            Hits::Refund => {
                Box::pin(self.gate.refund(query)).await?;
                Box::pin(self.gate.status(&Query { cost: Some(0), ..*query })).await
            }
        }
    }

    pub(crate) fn status_of(&self, error: &CheckError) -> Status {
        match error {
            CheckError::Store(_) => {
                self.parts.refusals.log_failure(self.gate.clock().now(), error);
                Status::unavailable("the store can't be reached or written")
            }
            CheckError::UnknownAction(_) => Status::not_found(error.to_string()),
            _ => Status::invalid_argument(error.to_string()),
        }
    }

    /// The headers that Envoy adds to the client's response.
    fn headers(&self, actions: MatchedActions, decision: &Decision) -> Vec<Entry> {
        let mut headers = HeaderMap::new();
        if decision.allowed {
            self.replies.annotate(actions, decision, &mut headers);
        } else {
            headers = self.replies.refusal(actions, decision, &HeaderMap::new()).into_parts().0.headers;
            headers.remove(CONTENT_TYPE);
        }
        headers.iter().map(|(name, value)| Entry { key: name.to_string(), value: value.as_bytes().to_vec() }).collect()
    }
}

/// The same entries, borrowed.
fn borrow<'e>(entries: &'e Vec<(&'e str, Cow<'e, str>)>) -> Vec<(&'e str, &'e str)> {
    entries.iter().map(|(key, value)| (*key, &**value)).collect()
}

/// The entries of a descriptor: keys and values.
pub(super) fn entries(descriptor: &Descriptor) -> Vec<(&str, Cow<'_, str>)> {
    descriptor.entries.iter().map(|entry| (&*entry.key, entry.text())).collect()
}

fn is_header_name(name: &str) -> bool {
    http::HeaderName::from_bytes(name.as_bytes()).is_ok()
}

/// Sets `Retry-After` to this wait in seconds, unless it is longer.
fn add_wait(headers: &mut Vec<Entry>, wait: i64) {
    let name = RETRY_AFTER.as_str();
    match headers.iter_mut().find(|header| header.key == name) {
        Some(header) if header.text().parse::<i64>().is_ok_and(|known| known >= wait) => {}
        Some(header) => header.value = wait.to_string().into_bytes(),
        None => headers.push(Entry { key: name.to_owned(), value: wait.to_string().into_bytes() }),
    }
}
