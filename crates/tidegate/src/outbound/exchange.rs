//! One call's requests over HTTP.

use std::error::Error;
use std::fmt::Write as _;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::ACCEPT_ENCODING;
use http::request::Parts;
use http::{HeaderValue, Request, Response};
use http_body::Body;
use tidegate_core::call::Reply;
use tidegate_core::retry::{Fault, Reach};
use tidegate_core::{Class, Clock, Time};
use tidegate_policy::Secret;
use tidegate_policy::outbound::{BodyRule, CostRules};
use tower_service::Service;

use super::answer::Peeked;
use super::causes::causes;
use super::cost::{expected, is_event_stream, is_json};
use super::judge::says_throttled;
use super::location::tells;
use super::login::MAX_LOGIN_REPLY;
use super::patience::within;
use super::{
    Attempt, Credentials, Ended, Judge, LoginError, Logins, Replay, ReplayBody, Target, TargetError, Token, Upstream,
};

/// The longest body that is read to find out whether it says that there were too many calls, in bytes.
const MAX_JUDGED: usize = 64 << 10;

/// An error of whatever kind.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// Tells what an error of the inner service means.
type FaultOf = dyn Fn(&(dyn Error + 'static)) -> Fault + Send + Sync;
/// Tells when the first of the provider's quotas begins anew.
type QuotaEnds = dyn Fn(Time) -> Option<Time> + Send + Sync;

/// Why there is no reply. Never tells a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Trouble {
    /// The inner service failed.
    #[error("the request got no reply")]
    Client(#[source] BoxError),
    /// The inner service failed with an error that repeats the credential, and so isn't told.
    #[error("the request got no reply, for a reason that repeats the credential")]
    Withheld,
    /// There was no reply in time.
    #[error("the request got no reply in time")]
    TimedOut,
    /// The credential's login failed.
    #[error(transparent)]
    Login(#[from] LoginError),
    /// The request can't be sent.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The caller's body broke off, or was gone when it was to be sent again.
    #[error("the request's body broke off")]
    Body,
    /// The caller's body didn't come: nothing of it for the provider's `attempt_timeout`, or not all of it by the call's
    /// deadline.
    #[error("the request's body didn't come in time")]
    Stalled,
    /// The inner service followed a redirect, perhaps to another host and with the credential. One that finds that out
    /// says so with this as its error, and isn't tried again.
    #[error("the client followed a redirect, which can tell the credential to another host; make it follow none")]
    Followed,
}

/// How a provider's requests are sent: what all of its calls share.
#[derive(Clone)]
pub(super) struct Manner<C> {
    pub target: Target,
    pub credentials: Credentials,
    pub logins: Option<Logins>,
    /// Below which path the provider is reached from outside, for redirects.
    pub mount: Option<String>,
    pub attempt_timeout: Duration,
    pub throttled_when: Option<BodyRule>,
    pub cost: Option<CostRules>,
    /// The most that is reserved for a call.
    pub most_cost: u64,
    pub fault_of: Arc<FaultOf>,
    pub quota_ends: Arc<QuotaEnds>,
    pub clock: C,
}

impl<C> Manner<C> {
    /// Whether replies are looked into, and so must come as they are.
    fn reads_replies(&self) -> bool {
        self.throttled_when.is_some() || self.cost.as_ref().is_some_and(|cost| !cost.reply.is_empty())
    }
}

/// The requests of one call.
pub(super) struct Exchange<'m, I, Q, C> {
    manner: &'m Manner<C>,
    inner: I,
    parts: Parts,
    body: Replay<Q>,
    judge: Judge,
    /// How many attempts there were before the one that this is to go beside.
    before: u64,
    /// Whether the present attempt's request was handed over.
    handed_over: bool,
    token: Option<Token>,
    deadline: Time,
}

/// What an attempt comes to.
pub(super) type Outcome<B> = Result<Response<Peeked<B>>, Trouble>;

impl<'m, I, Q: Body<Data = Bytes>, C: Clock> Exchange<'m, I, Q, C> {
    /// Requests of these parts, with this body.
    ///
    /// # Errors
    /// The request can't be aimed at the provider.
    pub(super) fn new(
        manner: &'m Manner<C>,
        inner: I,
        mut parts: Parts,
        body: Replay<Q>,
        judge: Judge,
    ) -> Result<Self, TargetError> {
        manner.target.lead(&mut parts.uri)?;
        if manner.reads_replies() {
            parts.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        Ok(Self {
            manner,
            inner,
            parts,
            body,
            judge,
            before: 0,
            handed_over: false,
            token: None,
            deadline: Time::NEVER,
        })
    }

    /// What the call is expected to cost, by its body as far as that is at hand before its turn; `None` if the rules
    /// don't say. A body is read ahead for it where it may say something, for no longer than the call may take.
    ///
    /// # Errors
    /// The caller's body breaks off, or doesn't come in time.
    pub(super) async fn expected_cost(&mut self, rules: &CostRules, patience: Duration) -> Result<u64, Trouble> {
        let mut body = None;
        if !rules.request.is_empty() && is_json(&self.parts.headers) {
            body = tokio::time::timeout(patience, self.body.read_ahead()).await.map_err(|_| Trouble::Stalled)?;
        }
        if self.body.is_broken() {
            return Err(Trouble::Body);
        }
        let cost = expected(rules, self.body.size(), body.as_deref());
        Ok(cost.min(self.manner.most_cost))
    }

    fn failed<B>(&self, trouble: Trouble, fault: Fault) -> Ended<Outcome<B>> {
        let reply = self.judge.fault(fault, self.body.unreplayable());
        Ended { value: Err(trouble), reply }
    }

    fn refused<B>(&self, trouble: Trouble) -> Ended<Outcome<B>> {
        let reply = Reply { reach: Reach::Unsent, ..self.judge.cancelled() };
        Ended { value: Err(trouble), reply }
    }
}

impl<I, Q, B, C> Exchange<'_, I, Q, C>
where
    I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>, Future: Send> + Clone + Send,
    Q: Body<Data = Bytes> + Send,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
    C: Clock,
{
    async fn exchange(&mut self, credential: usize) -> Ended<Outcome<B>> {
        let manner = self.manner;
        let now = manner.clock.now();
        let mut shown = manner.credentials.current(credential, now).await;
        if let Some(logins) = &manner.logins {
            let secret = shown.unwrap_or_else(anonymous);
            let inner = self.inner.clone();
            // Boxed, as every call would take the room for it, and hardly any logs in.
            let send = |request| log_in(inner, request, &*manner.fault_of);
            match Box::pin(logins.token(credential, &secret, now, send)).await {
                Ok(token) => shown = Some(Arc::clone(self.token.insert(token).secret())),
                Err(error) => {
                    let reply = error.reply(&self.judge);
                    return Ended { value: Err(error.into()), reply };
                }
            }
        }
        let secret = shown.as_deref();
        let mut parts = self.parts.clone();
        if let Err(error) = manner.target.aim_led(&mut parts, secret) {
            return self.refused(error.into());
        }
        let mut inner = self.inner.clone();
        if let Err(error) = poll_fn(|context| inner.poll_ready(context)).await {
            return self.failed(told(error.into(), secret), Fault::Unsent);
        }
        let Ok(body) = self.body.attempt() else { return self.refused(Trouble::Body) };
        self.handed_over = true;
        let sent: Result<_, BoxError> = inner.call(Request::from_parts(parts, body)).await.map_err(Into::into);
        match sent {
            Ok(response) => self.judged(response, shown).await,
            Err(_) if self.body.is_broken() => Ended { value: Err(Trouble::Body), reply: self.judge.cancelled() },
            Err(error) if matches!(error.downcast_ref(), Some(Trouble::Followed)) => self.refused(Trouble::Followed),
            Err(error) => {
                let fault = (manner.fault_of)(&*error);
                self.failed(told(error, secret), fault)
            }
        }
    }

    async fn judged(&mut self, response: Response<B>, shown: Option<Arc<Secret>>) -> Ended<Outcome<B>> {
        let manner = self.manner;
        let now = manner.clock.now();
        let (mut head, body) = response.into_parts();
        let mut reply = self.judge.reply(head.status, &head.headers, self.body.unreplayable(), now);
        // A stream of events is no document, and waiting for its beginning would hold it up.
        let may_say = |rule: &&BodyRule| rule.matches_status(head.status) && !is_event_stream(&head.headers);
        let rule = manner.throttled_when.as_ref().filter(may_say);
        let mut peeked = match rule {
            None => Peeked::unread(body),
            Some(rule) => {
                // Boxed, as replies that aren't looked into would take the room for it too.
                let peeked = match Box::pin(Peeked::read(body, MAX_JUDGED)).await {
                    Ok(peeked) => peeked,
                    Err(error) => return self.failed(told(error.into(), shown.as_deref()), Fault::Garbled),
                };
                if peeked.is_whole() && says_throttled(rule, &peeked.head) {
                    let ends = if rule.spends_quota { (manner.quota_ends)(now) } else { None };
                    reply = self.judge.throttled(reply, ends.map(|ends| ends.since(now)));
                }
                peeked
            }
        };
        reply.streams = !peeked.is_whole();
        manner.target.tidy(&mut head.headers, shown.as_deref(), manner.mount.as_deref());
        peeked.secret = shown;
        Ended { value: Ok(Response::from_parts(head, peeked)), reply }
    }
}

impl<I, Q, B, C> Upstream for Exchange<'_, I, Q, C>
where
    I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>, Future: Send> + Clone + Send,
    Q: Body<Data = Bytes> + Send,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
    C: Clock,
{
    type Reply = Outcome<B>;

    async fn send(&mut self, attempt: Attempt) -> Ended<Outcome<B>> {
        self.handed_over = false;
        self.deadline = self.manner.clock.now() + tidegate_core::Span::from_duration(attempt.time_left);
        let (body, patience) = (self.body.clone(), self.manner.attempt_timeout);
        let exchanged = within(pin!(self.exchange(attempt.credential)), &body, patience, attempt.time_left).await;
        match exchanged {
            Ok(ended) => ended,
            Err(_) if self.handed_over && body.waits() => {
                Ended { value: Err(Trouble::Stalled), reply: self.judge.cancelled() }
            }
            Err(quiet) => {
                let fault = if self.handed_over { Fault::TimedOut } else { Fault::Unsent };
                let mut ended = self.failed(Trouble::TimedOut, fault);
                if quiet < attempt.enough {
                    ended.reply.class = Class::Cancelled;
                }
                ended
            }
        }
    }

    fn twin(&self) -> Option<Self> {
        self.judge.is_repeatable().then(|| Self {
            inner: self.inner.clone(),
            parts: self.parts.clone(),
            body: self.body.clone(),
            judge: self.judge.clone(),
            before: self.body.attempts(),
            token: self.token.clone(),
            ..*self
        })
    }

    fn is_due(&self) -> bool {
        self.body.attempts() > self.before && self.body.is_whole()
    }

    async fn renew(&mut self, credential: usize) -> Result<(), Class> {
        let manner = self.manner;
        // Without a token it was the login itself that wasn't accepted.
        let (Some(logins), Some(rejected)) = (&manner.logins, self.token.take()) else { return Err(Class::Auth) };
        let now = manner.clock.now();
        let patience = self.deadline.since(now).as_duration().min(manner.attempt_timeout);
        let inner = self.inner.clone();
        let renewing = async {
            let secret = manner.credentials.current(credential, now).await.unwrap_or_else(anonymous);
            let send = |request| log_in(inner, request, &*manner.fault_of);
            logins.renew(credential, &rejected, &secret, now, send).await
        };
        match tokio::time::timeout(patience, renewing).await {
            Ok(Ok(_)) => Ok(()),
            // Each call is told this; the log was, by what came before.
            Ok(Err(LoginError::Rejected)) => Err(Class::Auth),
            Ok(Err(error)) => {
                tracing::warn!(%error, credential, "a credential that wasn't accepted can't be logged in anew");
                Err(error.reply(&self.judge).class)
            }
            Err(_) => Err(Class::Transient),
        }
    }
}

/// Sends a login.
async fn log_in<I, Q, B>(mut inner: I, request: Request<Secret>, fault_of: &FaultOf) -> Result<Response<Bytes>, Fault>
where
    I: Service<Request<ReplayBody<Q>>, Response = Response<B>>,
    I::Error: Into<BoxError>,
    B: Body<Data = Bytes>,
{
    let fault = |error: I::Error| fault_of(&*error.into());
    poll_fn(|context| inner.poll_ready(context)).await.map_err(fault)?;
    let request = request.map(|body| ReplayBody::whole(body.expose().to_owned()));
    let response = inner.call(request).await.map_err(fault)?;
    let (head, body) = response.into_parts();
    let peeked = Peeked::read(body, MAX_LOGIN_REPLY).await.map_err(|_| Fault::Garbled)?;
    Ok(Response::from_parts(head, peeked.head))
}

fn anonymous() -> Arc<Secret> {
    Arc::new(Secret::new(""))
}

/// An error as it may be told: not if it repeats the credential.
fn told(error: BoxError, secret: Option<&Secret>) -> Trouble {
    let Some(secret) = secret else { return Trouble::Client(error) };
    let text = causes(&*error).fold(String::new(), |mut text, found| {
        let _ = write!(text, " {found} {found:?}");
        text
    });
    if tells(text.as_bytes(), secret) { Trouble::Withheld } else { Trouble::Client(error) }
}
