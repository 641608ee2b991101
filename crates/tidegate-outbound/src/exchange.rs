//! The HTTP requests of one call.

use std::borrow::Cow;
use std::error::Error;
use std::fmt::Write as _;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, RETRY_AFTER, UPGRADE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::{Body, SizeHint};
use tidegate_core::call::{AttemptReport, CallScope};
use tidegate_core::retry::{Delivery, TransportFault};
use tidegate_core::{Class, Clock, Span, Time, Verdict};
use tidegate_policy::outbound::CostRules;
use tidegate_policy::verdict::{RequestFacts, comparable_path};
use tidegate_policy::{ReplyReservation, Secret, TIDEGATE_RESERVATION};
use tidegate_store::Store;
use tower_service::Service;

use super::causes::causes;
use super::cost::{expected_cost, is_json};
use super::login::{LoginReply, MAX_LOGIN_REPLY};
use super::progress_timeout::with_progress_timeout;
use super::reply_body::PeekedBody;
use super::service::OutboundLayerInner;
use super::{
    Attempt, AttemptClassifier, AttemptOutcome, CallOptions, LoginError, LoginFailure, LoginToken, ReplayBody,
    ReplayBuffer, TargetError, Upstream,
};

/// The longest time for which a reply of unknown length, which may be a stream, is held back for a rule that reads it.
const MAX_STREAM_READ_TIME: Duration = Duration::from_secs(1);
/// The longest such time for a reply of known length.
const MAX_READ_TIME: Duration = Duration::from_secs(5);

/// A login that takes longer postpones the request, because limits have counted it before.
const MAX_LOGIN_TIME: Span = Span::from_millis(20);
/// The most times that logins postpone a call: with several credentials, each may need one.
const MAX_POSTPONEMENTS: u8 = 8;

/// An error of any type.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Classifies an error of the inner service.
pub(super) type FaultClassifier = dyn Fn(&(dyn Error + 'static)) -> TransportFault + Send + Sync;

/// The reason that there is no reply. Never contains a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The inner service failed.
    #[error("the request got no reply")]
    Inner(#[source] BoxError),
    /// The inner service failed with an error that contains the credential, so the error is omitted.
    #[error("the request got no reply, for a reason that repeats the credential")]
    Redacted,
    /// There was no reply in time.
    #[error("the request got no reply in time")]
    TimedOut,
    /// The credential's login failed.
    #[error(transparent)]
    Login(#[from] LoginError),
    /// The request can't be sent.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The caller's body failed, or was not available for a retry.
    #[error("the request's body broke off")]
    BrokenBody,
    /// The caller's body was too slow: no part of it arrived within the provider's `attempt_timeout`, or not all of it
    /// by the call's deadline.
    #[error("the request's body didn't come in time")]
    BodyTimeout,
    /// The provider switched protocols, although the request has no `Upgrade`.
    #[error("the provider switched protocols, but the request asks for no upgrade")]
    UnrequestedSwitch,
    /// The inner service followed a redirect, perhaps to another host and with the credential. A service that detects
    /// this returns this value as its error, and the request isn't retried.
    #[error("the client followed a redirect, which can tell the credential to another host; make it follow none")]
    FollowedRedirect,
}

/// The requests of one call.
pub(super) struct Exchange<'m, I, Q, S: Store, C: Clock> {
    shared: &'m OutboundLayerInner<S, C>,
    inner: I,
    parts: Parts,
    /// The place in the path at which the caller's path begins.
    path_start: usize,
    /// The caller's path in another spelling, if rules and scopes are compared with that.
    other_path: Option<String>,
    body: ReplayBuffer<Q>,
    /// The request's body, if rules read it, and it is JSON and short enough to be kept.
    json_body: Option<Bytes>,
    classifier: AttemptClassifier,
    /// The number of attempts before the one that this is a hedge of.
    attempts_before: u64,
    /// True if the current attempt's request was passed to the inner service.
    was_handed_over: bool,
    token: Option<LoginToken>,
    postponements: u8,
    /// The last reservation that each credential got. At most one for each attempt.
    reservations: Vec<HeldReservation>,
    deadline: Time,
}

/// A reservation of the provider, for an attempt with the same credential.
struct HeldReservation {
    token: HeaderValue,
    credential: usize,
    /// The time before which the provider doesn't admit it.
    usable_from: Time,
}

/// The result of an attempt.
pub(super) type ExchangeResult<B> = Result<Response<PeekedBody<B>>, SendError>;

impl<'m, I, Q: Body<Data = Bytes>, S: Store, C: Clock> Exchange<'m, I, Q, S, C> {
    /// Makes the requests of a call from its caller's request.
    ///
    /// # Errors
    /// The request can't be directed to the provider.
    pub(super) fn new(
        shared: &'m OutboundLayerInner<S, C>,
        inner: I,
        request: Request<Q>,
    ) -> Result<Self, TargetError> {
        let (mut parts, body) = request.into_parts();
        parts.extensions.remove::<CallOptions>();
        let path = shared.target.request_path(&parts.uri);
        let other_path = match comparable_path(path) {
            Cow::Borrowed(_) => None,
            Cow::Owned(other) => Some(other),
        };
        let path_length = path.len();
        shared.target.resolve_uri(&mut parts.uri)?;
        let path_start = parts.uri.path().len() - path_length;
        let config = shared.provider.config();
        // Replies must not be encoded if their content is read.
        if config.verdicts.reads_bodies() || config.cost.as_ref().is_some_and(|cost| !cost.reply.is_empty()) {
            parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        Ok(Self {
            shared,
            inner,
            classifier: AttemptClassifier::new(&parts.method, &parts.headers),
            parts,
            path_start,
            other_path,
            body: ReplayBuffer::new(body, config.replay_bytes),
            json_body: None,
            attempts_before: 0,
            was_handed_over: false,
            token: None,
            postponements: 0,
            reservations: Vec::new(),
            deadline: Time::NEVER,
        })
    }

    /// Reads the request's body ahead, for `read_timeout` at most, if it is JSON and rules read it.
    ///
    /// # Errors
    /// The caller's body failed, or didn't arrive in time.
    pub(super) async fn read_json_body(&mut self, read_timeout: Duration) -> Result<(), SendError> {
        if is_json(&self.parts.headers) {
            let read = tokio::time::timeout(read_timeout, self.body.read_ahead());
            self.json_body = read.await.map_err(|_| SendError::BodyTimeout)?;
        }
        if self.body.is_broken() { Err(SendError::BrokenBody) } else { Ok(()) }
    }

    /// The expected cost of the call, from as much of its body as is available before it is queued.
    pub(super) fn expected_cost(&self, rules: &CostRules) -> u64 {
        let body = self.json_body.as_deref().filter(|_| !rules.request.is_empty());
        expected_cost(rules, self.body.min_size(), body).min(self.shared.max_cost)
    }

    /// The route and the scope of the call.
    pub(super) fn call_scope(&self) -> CallScope {
        let provider = &self.shared.provider.0;
        provider.config().verdicts.call_scope(&self.facts(), provider.rules.key)
    }

    #[inline]
    fn facts(&self) -> RequestFacts<'_> {
        let (target, Parts { method, uri, headers, .. }) = (&self.shared.target, &self.parts);
        let path = self.other_path.as_deref().unwrap_or_else(|| &uri.path()[self.path_start..]);
        let facts = RequestFacts::new(method, target.host(uri), path, headers);
        facts.with_body(self.json_body.as_deref())
    }

    fn fault_outcome<B>(&self, error: SendError, fault: TransportFault) -> AttemptOutcome<ExchangeResult<B>> {
        let report = self.classifier.classify_fault(fault, self.body.unreplayable_reason());
        AttemptOutcome { value: Err(error), report }
    }
}

/// The outcome of an attempt that says nothing about the provider.
fn cancelled_outcome<B>(error: SendError, delivery: Delivery) -> AttemptOutcome<ExchangeResult<B>> {
    AttemptOutcome { value: Err(error), report: AttemptReport::new(Class::Cancelled, delivery) }
}

impl<I, Q, B, S, C> Exchange<'_, I, Q, S, C>
where
    I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>, Future: Send> + Clone + Send,
    Q: Body<Data = Bytes> + Send,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
    S: Store,
    C: Clock,
{
    async fn send_attempt(&mut self, credential: usize) -> AttemptOutcome<ExchangeResult<B>> {
        let shared = self.shared;
        let now = shared.provider.clock().now();
        let mut sent_secret = shared.credentials.current(credential, now).await;
        if let Some(logins) = &shared.logins {
            let secret = sent_secret.unwrap_or_else(empty_secret);
            let inner = self.inner.clone();
            // Boxed, because hardly any call logs in, and each would need the memory for it.
            let send = |request| log_in(inner, request, &*shared.fault_classifier);
            match Box::pin(logins.token(credential, &secret, now, send)).await {
                Ok(token) => {
                    sent_secret = Some(Arc::clone(&self.token.insert(token).secret));
                    let took = shared.provider.clock().now().since(now);
                    if took > MAX_LOGIN_TIME && self.postponements < MAX_POSTPONEMENTS {
                        self.postponements += 1;
                        let mut outcome = cancelled_outcome(SendError::TimedOut, Delivery::Unsent);
                        outcome.report.is_postponed = true;
                        return outcome;
                    }
                }
                Err(failure) => {
                    let report = failure.attempt_report(shared.provider.clock().now());
                    return AttemptOutcome { report, value: Err(failure.error.into()) };
                }
            }
        }
        let secret = sent_secret.as_deref();
        let mut parts = self.parts.clone();
        if let Err(error) = shared.target.prepare_attempt(&mut parts, secret) {
            return cancelled_outcome(error.into(), Delivery::Unsent);
        }
        let mut inner = self.inner.clone();
        if let Err(error) = poll_fn(|context| inner.poll_ready(context)).await {
            return self.fault_outcome(redact_error(error.into(), secret), TransportFault::Unsent);
        }
        let Ok(body) = self.body.attempt_body() else {
            return cancelled_outcome(SendError::BrokenBody, Delivery::Unsent);
        };
        let is_usable = |held: &HeldReservation| held.credential == credential && held.usable_from <= now;
        let index = self.reservations.iter().position(is_usable);
        let reservation = index.map(|index| self.reservations.swap_remove(index));
        if let Some(held) = &reservation {
            parts.headers.insert(TIDEGATE_RESERVATION, held.token.clone());
        }
        self.was_handed_over = true;
        let sent: Result<_, BoxError> = inner.call(Request::from_parts(parts, body)).await.map_err(Into::into);
        match sent {
            Ok(response) => {
                let mut outcome = self.process_response(response, credential, sent_secret).await;
                outcome.report.presented_reservation = reservation.is_some();
                outcome
            }
            Err(_) if self.body.is_broken() => cancelled_outcome(SendError::BrokenBody, Delivery::Unknown),
            Err(error) if matches!(error.downcast_ref(), Some(SendError::FollowedRedirect)) => {
                cancelled_outcome(SendError::FollowedRedirect, Delivery::Unsent)
            }
            Err(error) => {
                let fault = (shared.fault_classifier)(&*error);
                if fault == TransportFault::Unsent {
                    // The server hasn't seen it, so the next attempt may still present it.
                    self.reservations.extend(reservation);
                }
                self.fault_outcome(redact_error(error, secret), fault)
            }
        }
    }

    /// The longest part of a reply's body that is read for rules, and the time that it may take. `None` without such rules,
    /// and for long replies, which are not held back.
    fn read_bounds(&self, head: &http::response::Parts, size: &SizeHint) -> Option<(usize, Duration)> {
        let verdicts = &self.shared.provider.0.config().verdicts;
        let limit = verdicts.body_limit(&self.facts(), head.status, &head.headers)?;
        let max_time = if size.exact().is_some() { MAX_READ_TIME } else { MAX_STREAM_READ_TIME };
        (size.lower() <= limit as u64).then_some((limit, max_time))
    }

    /// The verdict on a reply, with its body if it was read.
    fn judge(&self, head: &http::response::Parts, body: Option<&[u8]>, now: Time) -> Verdict {
        let provider = &self.shared.provider.0;
        let config = provider.config();
        let key = provider.rules.key;
        let mut classified = config.verdicts.classify(&self.facts(), head.status, &head.headers, body, key, now);
        let verdict = &mut classified.verdict;
        if verdict.class == Class::Quota
            && verdict.wait.is_none()
            && let Some((quota, ends)) = config.next_quota_end(provider.outbound_config.limits(), now)
        {
            (verdict.spent_quota, verdict.wait) = (Some(quota), Some(ends.since(now)));
        }
        self.shared.verdict_log.note(&config.name, head.status, &classified, now);
        classified.verdict
    }

    async fn process_response(
        &mut self,
        response: Response<B>,
        credential: usize,
        sent_secret: Option<Arc<Secret>>,
    ) -> AttemptOutcome<ExchangeResult<B>> {
        let OutboundLayerInner { provider, target, mount_path, .. } = self.shared;
        let now = provider.clock().now();
        let (mut head, body) = response.into_parts();
        let has_switched = head.status == StatusCode::SWITCHING_PROTOCOLS;
        if has_switched && !self.parts.headers.contains_key(UPGRADE) {
            return self.fault_outcome(SendError::UnrequestedSwitch, TransportFault::InvalidReply);
        }
        let bounds = self.read_bounds(&head, &body.size_hint());
        let read = match bounds {
            None => Ok(PeekedBody::unread(body)),
            // Boxed, because replies that aren't read would need the memory for it too.
            Some((limit, max_time)) => Box::pin(PeekedBody::read(body, limit, Some(max_time))).await,
        };
        let mut peeked = match read {
            Ok(peeked) => peeked,
            Err(error) => {
                let error = redact_error(error.into(), sent_secret.as_deref());
                // The head of a refusal or a fault still says what it is.
                let verdict = self.judge(&head, None, now);
                if verdict.class == Class::Success {
                    return self.fault_outcome(error, TransportFault::InvalidReply);
                }
                let report = self.classifier.reply_report(verdict, self.body.unreplayable_reason());
                return AttemptOutcome { report, value: Err(error) };
            }
        };
        let whole = Some(&*peeked.read_ahead).filter(|_| bounds.is_some() && peeked.is_complete());
        let verdict = self.judge(&head, whole, now);
        let mut report = self.classifier.reply_report(verdict, self.body.unreplayable_reason());
        if report.verdict.has_reservation
            && let (Some(token), Some(wait)) = (reservation_to_present(&head.headers), report.verdict.wait)
        {
            self.reservations.retain(|held| held.credential != credential);
            self.reservations.push(HeldReservation { token, credential, usable_from: now + wait });
        }
        // If it is the last reply, the caller learns the wait that the body or another header tells.
        if report.verdict.class != Class::Success
            && let Some(wait) = report.verdict.announced_wait()
        {
            head.headers.entry(RETRY_AFTER).or_insert_with(|| wait.as_secs_ceil().into());
        }
        // After a protocol switch, the caller exchanges data with the provider until it drops the response.
        report.is_streaming = !peeked.is_complete() || has_switched;
        report.is_tunnel = has_switched;
        target.sanitize_reply_headers(&mut head.headers, sent_secret.as_deref(), mount_path.as_deref());
        peeked.secret = sent_secret;
        AttemptOutcome { value: Ok(Response::from_parts(head, peeked)), report }
    }
}

impl<I, Q, B, S, C> Upstream for Exchange<'_, I, Q, S, C>
where
    I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>, Future: Send> + Clone + Send,
    Q: Body<Data = Bytes> + Send,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
    S: Store,
    C: Clock,
{
    type Reply = ExchangeResult<B>;

    async fn send(&mut self, attempt: Attempt) -> AttemptOutcome<ExchangeResult<B>> {
        self.was_handed_over = false;
        let provider = &self.shared.provider;
        self.deadline = provider.clock().now() + Span::from_duration(attempt.time_left);
        let (body, progress_timeout) = (self.body.clone(), provider.config().attempt_timeout);
        let result = with_progress_timeout(
            pin!(self.send_attempt(attempt.credential)),
            &body,
            progress_timeout,
            attempt.time_left,
        )
        .await;
        match result {
            Ok(outcome) => outcome,
            Err(_) if self.was_handed_over && body.is_waiting_for_caller() => {
                cancelled_outcome(SendError::BodyTimeout, Delivery::Unknown)
            }
            Err(quiet_for) => {
                let fault = if self.was_handed_over { TransportFault::TimedOut } else { TransportFault::Unsent };
                let mut outcome = self.fault_outcome(SendError::TimedOut, fault);
                if quiet_for < attempt.conclusive_after {
                    outcome.report.verdict = Verdict::new(Class::Cancelled);
                }
                outcome
            }
        }
    }

    fn clone_for_hedge(&self) -> Option<Self> {
        let can_repeat = self.classifier.is_idempotent && !self.parts.headers.contains_key(UPGRADE);
        can_repeat.then(|| Self {
            inner: self.inner.clone(),
            parts: self.parts.clone(),
            other_path: self.other_path.clone(),
            body: self.body.clone(),
            json_body: self.json_body.clone(),
            attempts_before: self.body.attempt_count(),
            token: self.token.clone(),
            // A hedge waits for nothing.
            postponements: MAX_POSTPONEMENTS,
            reservations: Vec::new(),
            ..*self
        })
    }

    fn can_hedge(&self) -> bool {
        self.body.attempt_count() > self.attempts_before && self.body.is_complete()
    }

    async fn renew_login(&mut self, credential: usize) -> Result<(), Class> {
        let shared = self.shared;
        // Without a token, the login itself was rejected.
        let (Some(logins), Some(rejected)) = (&shared.logins, self.token.take()) else { return Err(Class::Auth) };
        let now = shared.provider.clock().now();
        let login_timeout = self.deadline.since(now).as_duration().min(shared.provider.config().attempt_timeout);
        let inner = self.inner.clone();
        let renewal = async {
            let secret = shared.credentials.current(credential, now).await.unwrap_or_else(empty_secret);
            let send = |request| log_in(inner, request, &*shared.fault_classifier);
            logins.renew(credential, &rejected, &secret, now, send).await
        };
        match tokio::time::timeout(login_timeout, renewal).await {
            Ok(Ok(_)) => Ok(()),
            // Every call gets this error. The failure before it is already in the log.
            Ok(Err(LoginFailure { error: LoginError::TokenRejected, .. })) => Err(Class::Auth),
            Ok(Err(LoginFailure { error, .. })) => {
                tracing::warn!(%error, credential, "the login for a credential that wasn't accepted failed");
                Err(error.class())
            }
            Err(_) => Err(Class::Transient),
        }
    }
}

/// Sends a login.
async fn log_in<I, Q, B>(mut inner: I, request: Request<Secret>, fault_of: &FaultClassifier) -> LoginReply
where
    I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>>,
    B: Body<Data = Bytes>,
{
    let fault = |error: I::Error| fault_of(&*error.into());
    poll_fn(|context| inner.poll_ready(context)).await.map_err(fault)?;
    let request = request.map(|body| ReplayBody::from_bytes(body.expose().to_owned()));
    let response = inner.call(request).await.map_err(fault)?;
    let (head, body) = response.into_parts();
    let peeked = PeekedBody::read(body, MAX_LOGIN_REPLY, None).await.map_err(|_| TransportFault::InvalidReply)?;
    Ok(Response::from_parts(head, peeked.read_ahead))
}

/// The token of the reservation that a reply gives.
fn reservation_to_present(headers: &HeaderMap) -> Option<HeaderValue> {
    let mut values = headers.get_all(TIDEGATE_RESERVATION).iter();
    let value = values.next().filter(|_| values.next().is_none())?.to_str().ok()?;
    HeaderValue::try_from(value.parse::<ReplyReservation>().ok()?.token).ok()
}

fn empty_secret() -> Arc<Secret> {
    Arc::new(Secret::new(""))
}

/// Converts an error for the caller. Omits an error that contains the credential.
fn redact_error(error: BoxError, secret: Option<&Secret>) -> SendError {
    let Some(secret) = secret else { return SendError::Inner(error) };
    let text = causes(&*error).fold(String::new(), |mut text, found| {
        let _ = write!(text, " {found} {found:?}");
        text
    });
    if secret.is_in(text.as_bytes()) { SendError::Redacted } else { SendError::Inner(error) }
}
