//! Envoy's rate limit service (`envoy.service.ratelimit.v3.RateLimitService`), and gRPC's health checks.
//!
//! A descriptor of the domain `tidegate` is a question to the policy. Its entries are the fields of a decision request:
//! `action`, `ip` or `remote_address`, `key`, `platform`, `method`, `path`, `host` and `header:NAME`. Other domains are those of
//! the policy's `rls.files`. Each descriptor is one decision, so a call that one of them refuses may have been counted by
//! others, as in the original.

mod descriptors;
mod inline_limit;
pub(crate) mod messages;
mod status;
mod yaml_limits;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Once};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap};
use http::{Request, Response, StatusCode, Version};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::Service;
use prost::Message;
use tidegate::policy::{Forwarding, MatchedActions, Query};
use tidegate::reply::{Replies, grpc_type};
use tidegate::store::Store;
use tidegate::{CheckError, Decision, Gate};
use tidegate_core::Clock;
use tonic::server::Grpc;
use tonic::{Code as GrpcCode, Status};
use tonic_prost::ProstCodec;

use self::messages::{Code, Entry, HealthRequest, HealthResponse, RateLimitRequest, RateLimitResponse, ServingStatus};
pub(crate) use self::status::strictness;
pub(crate) use self::yaml_limits::YamlLimits;
use crate::access::{Access, AccessError};
use crate::access_log::AccessSlot;
use crate::body::{RelayBody, ResponseBody};
use crate::listener::ConnectionContext;
use crate::local_response::{HttpError, discard_body, error, finish_response};
use crate::rejections::RejectionReason;
use crate::state_cell::ListenerState;
use crate::states::SharedParts;
use crate::watchdog::{ConnectionPhase, ConnectionWatch};
use crate::wire::ext_authz;
use crate::wire::small_body::collect_body;

/// The domain whose descriptors are questions to the policy.
const POLICY_DOMAIN: &str = "tidegate";
const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";
const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
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
    let is_grpc = grpc_type(request.headers()).is_some();
    if let Err(denied) = state.access.check(&request, client.address.ip()) {
        let mut denial = state.access.denied_response(denied, &request, client, state.gate.clock().now());
        if denied == AccessError::Token && is_grpc {
            let status = match denial.status() {
                StatusCode::TOO_MANY_REQUESTS => Status::unavailable("too many wrong tokens from this address"),
                _ => Status::unauthenticated("no valid token in the metadata: authorization: Bearer TOKEN"),
            };
            denial = state.relayed(status.into_http(), watch);
        }
        return discard_body(watch, request.into_body(), false, denial);
    }
    if request.version() != Version::HTTP_2 || !is_grpc {
        let message = "this listener speaks gRPC over HTTP/2; the decision API is at api.listen";
        let response = error(StatusCode::UNSUPPORTED_MEDIA_TYPE, message);
        return discard_body(watch, request.into_body(), false, response);
    }
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    let known = [SHOULD_RATE_LIMIT, ext_authz::CHECK, HEALTH_CHECK];
    if !known.contains(&path) {
        // Its messages may have no end.
        let unknown = Status::unimplemented(format!("there are {}, not {path}", known.join(", "))).into_http();
        return discard_body(watch, body, false, state.relayed(unknown, watch));
    }
    let is_limits = path == SHOULD_RATE_LIMIT;
    let max_bytes = if is_limits { MAX_BYTES } else { ext_authz::MAX_BYTES };
    let bytes = match collect_body(watch, body, max_bytes).await {
        Ok(bytes) => bytes,
        Err(response) if is_limits && response.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let why = format!("the request to the rate limit service has more than {MAX_BYTES} bytes");
            let query = Query::default();
            let now = state.gate.clock().now();
            state.parts.refusals.log_rejection(now, RejectionReason::HeadSize, &query, &why, &watch.access);
            let request = Request::from_parts(parts, Full::new(Bytes::from_static(&EMPTY_MESSAGE)));
            let refused = unary(request, |_: RateLimitRequest| async { Ok(refused_response()) }).await;
            return state.relayed(refused, watch);
        }
        Err(response) => return response,
    };
    let request = Request::from_parts(parts, Full::new(bytes));
    let log_fault = |status: &Status| state.log_fault(status, &watch.access);
    let response = match request.uri().path() {
        SHOULD_RATE_LIMIT => {
            unary(request, |asked| async move { state.decide(&asked, &watch.access).await.inspect_err(log_fault) })
                .await
        }
        ext_authz::CHECK => {
            unary(request, |asked| async move { state.authorize(&asked, &watch.access).await.inspect_err(log_fault) })
                .await
        }
        _ => {
            let is_draining = state.parts.draining.load(Ordering::Relaxed);
            unary(request, |asked| async move { health(&asked, is_draining) }).await
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

impl<S: Store, C: Clock> RlsState<S, C> {
    fn relayed(&self, response: Response<tonic::body::Body>, watch: &Arc<ConnectionWatch>) -> Response<ResponseBody> {
        response.map(|body| ResponseBody::Relay(RelayBody::new(body, Arc::clone(watch), self.body_timeout)))
    }

    /// Logs a request that Envoy is configured to send, and that can't be decided. By default Envoy doesn't report it.
    fn log_fault(&self, fault: &Status, access: &AccessSlot) {
        if matches!(fault.code(), GrpcCode::InvalidArgument | GrpcCode::NotFound | GrpcCode::FailedPrecondition) {
            let (now, query) = (self.gate.clock().now(), Query::default());
            self.parts.refusals.log_rejection(now, RejectionReason::Question, &query, fault.message(), access);
        }
    }

    pub(crate) fn status_of(&self, error: &CheckError) -> Status {
        match error {
            CheckError::Store(_) => {
                self.parts.refusals.log_failure(self.gate.clock().now(), error);
                Status::unavailable(HttpError::StoreUnavailable.status_and_message().1)
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
