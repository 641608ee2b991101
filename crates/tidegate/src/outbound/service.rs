//! A provider as a layer of tower: every request through it is a call.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tidegate_core::Clock;
use tidegate_core::retry::Fault;
use tidegate_policy::Secret;
use tidegate_store::{Memory, Store};
use tower_layer::Layer;
use tower_service::Service;

use super::cost::Price;
use super::exchange::{BoxError, Exchange, Manner, Trouble};
use super::wish::has_idempotency_key;
use super::{
    CallError, CallOptions, CredentialError, Credentials, Failed, Happened, Judge, Logins, OutboundBody, Provider,
    Replay, ReplayBody, Target, TargetError, Why, fault_of,
};
use crate::SystemClock;

/// Makes every request through a service a call to a provider: it waits for its turn, is sent with a credential, and
/// again where that is worth it, harmless, possible and in time.
///
/// The inner service sends what it is given: it must neither follow redirects nor retry by itself, nor write requests
/// out, for they show the credential. Requests name a path below the provider's base URL, or a whole URL there. Their
/// extensions may hold [`CallOptions`]; [`take_wishes`](super::take_wishes) reads those from headers. A cost of 1 there
/// says nothing: what the provider's rules reserve counts instead, by the body's length and by what it asks for, but no
/// more than the provider's limits ever have room for. Where the rules look into JSON, the body is read before the
/// call's turn, as far as it is kept for another attempt. Responses hold
/// [`Happened`] as an extension, and one that isn't a good reply, but the last of a call that failed, holds the
/// [`Why`](super::Why) of that besides.
///
/// Headers and trailers of a reply don't tell the credential, even if the provider repeats it. The body passes as it is,
/// and so do extensions of the inner service's, such as the reason phrase that hyper keeps there.
///
/// It is always ready: calls wait in the provider's queue, and the inner service isn't held ready before their turn.
pub struct OutboundLayer<S: Store = Memory, C: Clock = SystemClock>(pub(super) Arc<Counter<S, C>>);

pub(super) struct Counter<S: Store, C: Clock> {
    provider: Provider<S, C>,
    manner: Manner<C>,
}

/// Why a call through an [`OutboundLayer`] has no response at all. Never tells a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutboundError {
    /// The request can't be aimed at the provider; it wasn't counted.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The call failed: for want of capacity or time, or because its last attempt got no reply.
    #[error(transparent)]
    Call(CallError<Trouble>),
    /// The only attempt got no reply, and another would fare no better.
    #[error(transparent)]
    Trouble(#[from] Trouble),
}

impl OutboundError {
    /// The status that tells it to whoever asked: 400 or 408 where the request is at fault, otherwise 429, 502, 503 or 504.
    pub fn status(&self) -> u16 {
        match self {
            Self::Target(TargetError::UnfitCredential) => 502,
            Self::Target(_) => 400,
            Self::Call(CallError { value: Some(Trouble::Body), .. }) | Self::Trouble(Trouble::Body) => 400,
            Self::Call(CallError { value: Some(Trouble::Stalled), .. }) | Self::Trouble(Trouble::Stalled) => 408,
            Self::Call(CallError { why: Why::RetriesExhausted { .. }, value: Some(Trouble::TimedOut), .. }) => 504,
            Self::Call(error) => error.status(),
            Self::Trouble(Trouble::TimedOut) => 504,
            Self::Trouble(_) => 502,
        }
    }
}

impl<S: Store, C: Clock + Clone> OutboundLayer<S, C> {
    /// A layer for a provider, with its credentials from files and the environment.
    ///
    /// # Errors
    /// A credential can't be had or can't be sent where the provider wants it.
    pub fn new(provider: Provider<S, C>) -> Result<Self, CredentialError> {
        Self::with(provider, |name| std::env::var(name).ok())
    }

    /// A layer for a provider, with environment variables looked up by `env`.
    ///
    /// # Errors
    /// As [`new`](Self::new) has them.
    pub fn with(provider: Provider<S, C>, env: impl Fn(&str) -> Option<String>) -> Result<Self, CredentialError> {
        let plan = provider.plan();
        let quotas = provider.clone();
        let manner = Manner {
            target: Target::of(plan),
            credentials: Credentials::of(plan, &env)?,
            logins: Logins::of(plan, &env)?,
            mount: None,
            attempt_timeout: plan.attempt_timeout,
            throttled_when: plan.throttled_when.clone(),
            cost: plan.cost.clone(),
            most_cost: plan.max_cost(provider.0.whole.limits()),
            fault_of: Arc::new(fault_of),
            quota_ends: Arc::new(move |now| quotas.plan().next_quota_end(quotas.0.whole.limits(), now)),
            clock: provider.clock().clone(),
        };
        Ok(Self(Arc::new(Counter { provider, manner })))
    }

    /// Turns redirects to what is below the base URL into ones to what is below this path, such as `tmdb` for `/tmdb`.
    #[must_use]
    pub fn mounted(self, path: &str) -> Self {
        let path = path.trim_matches('/').to_owned();
        self.change(|manner| manner.mount = Some(path))
    }

    /// Tells what an error of the inner service means. Default [`fault_of`].
    #[must_use]
    pub fn faults(self, fault_of: impl Fn(&(dyn Error + 'static)) -> Fault + Send + Sync + 'static) -> Self {
        self.change(|manner| manner.fault_of = Arc::new(fault_of))
    }

    /// The provider that is called.
    pub fn provider(&self) -> &Provider<S, C> {
        &self.0.provider
    }

    /// How specific the provider's base URL is if this URL is below it: see [`Target::covers`].
    #[cfg(feature = "reqwest")]
    pub(super) fn covers(&self, url: &http::Uri) -> Option<usize> {
        self.0.manner.target.covers(url)
    }

    fn change(self, change: impl FnOnce(&mut Manner<C>)) -> Self {
        let Counter { provider, manner } = &*self.0;
        let mut manner = manner.clone();
        change(&mut manner);
        Self(Arc::new(Counter { provider: provider.clone(), manner }))
    }
}

impl<S: Store, C: Clock> Clone for OutboundLayer<S, C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Store, C: Clock> fmt::Debug for OutboundLayer<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboundLayer").field("provider", &self.0.provider).finish_non_exhaustive()
    }
}

impl<I, S: Store, C: Clock> Layer<I> for OutboundLayer<S, C> {
    type Service = OutboundService<I, S, C>;

    fn layer(&self, inner: I) -> Self::Service {
        OutboundService { inner, counter: Arc::clone(&self.0) }
    }
}

/// A service behind an [`OutboundLayer`].
pub struct OutboundService<I, S: Store = Memory, C: Clock = SystemClock> {
    inner: I,
    counter: Arc<Counter<S, C>>,
}

impl<I, S: Store, C: Clock> OutboundService<I, S, C> {
    /// The provider that is called.
    pub fn provider(&self) -> &Provider<S, C> {
        &self.counter.provider
    }

    /// Makes a request a call with these options, whatever its extensions say. As [`Service::call`] does, without a box, for
    /// whoever can borrow the service until the response's head is there.
    ///
    /// # Errors
    /// Why there is no response at all.
    pub fn send<Q, B>(
        &self,
        options: CallOptions,
        request: Request<Q>,
    ) -> impl Future<Output = Result<Response<OutboundBody<B, S, C>>, OutboundError>> + Send
    where
        I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>, Future: Send> + Clone + Send,
        Q: Body<Data = Bytes> + Send,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
    {
        self.counter.call(self.inner.clone(), options, request)
    }

    /// The secret of the first credential, as it would be sent now.
    pub(super) async fn secret(&self) -> Option<Arc<Secret>> {
        let manner = &self.counter.manner;
        manner.credentials.current(0, manner.clock.now()).await
    }
}

impl<I: Clone, S: Store, C: Clock> Clone for OutboundService<I, S, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), counter: Arc::clone(&self.counter) }
    }
}

impl<I, S: Store, C: Clock> fmt::Debug for OutboundService<I, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboundService").field("provider", &self.counter.provider).finish_non_exhaustive()
    }
}

impl<I, Q, B, S, C> Service<Request<Q>> for OutboundService<I, S, C>
where
    I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>, Future: Send>
        + Clone
        + Send
        + 'static,
    Q: Body<Data = Bytes> + Send + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    S: Store,
    C: Clock,
{
    type Response = Response<OutboundBody<B, S, C>>;
    type Error = OutboundError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, OutboundError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), OutboundError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Q>) -> Self::Future {
        let (inner, counter) = (self.inner.clone(), Arc::clone(&self.counter));
        let options = request.extensions_mut().remove().unwrap_or_default();
        Box::pin(async move { counter.call(inner, options, request).await })
    }
}

impl<S: Store, C: Clock> Counter<S, C> {
    /// Makes one request a call, by an inner service that need not outlive it.
    ///
    /// Not an `async fn`, which would hold the request beside the exchange that it becomes, and that one twice.
    pub(super) fn call<I, Q, B>(
        &self,
        inner: I,
        mut options: CallOptions,
        request: Request<Q>,
    ) -> impl Future<Output = Result<Response<OutboundBody<B, S, C>>, OutboundError>>
    where
        I: Service<Request<ReplayBody<Q>>, Response = Response<B>, Error: Into<BoxError>, Future: Send> + Clone + Send,
        Q: Body<Data = Bytes> + Send,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send,
    {
        let (mut parts, body) = request.into_parts();
        parts.extensions.remove::<CallOptions>();
        let judge = Judge::new(parts.method.clone(), has_idempotency_key(&parts.headers));
        let body = Replay::new(body, self.provider.plan().replay_bytes);
        let mut exchange = Exchange::new(&self.manner, inner, parts, body, judge);
        async move {
            let exchange = exchange.as_mut().map_err(|error| *error)?;
            let unsaid = options.cost == CallOptions::default().cost;
            if let Some(rules) = self.manner.cost.as_ref().filter(|_| unsaid) {
                let began_at = self.manner.clock.now();
                let timeout = options.timeout.unwrap_or_else(|| self.provider.timeout(options.lane));
                options.cost = exchange.expected_cost(rules, timeout).await?;
                let took = self.manner.clock.now().since(began_at).as_duration();
                options.timeout = Some(timeout.saturating_sub(took));
            }
            let told = |happened: Happened, response: Response<_>| {
                let mut response = response;
                response.extensions_mut().insert(happened);
                response
            };
            match self.provider.drive(options, exchange).await {
                Ok(done) => {
                    let mut response = told(done.happened, done.value?.map(super::answer::Peeked::into_body));
                    let price = self.manner.cost.as_ref().and_then(|rules| Price::of(rules, response.headers()));
                    response.body_mut().hold(done.tail, price);
                    Ok(response)
                }
                Err(Failed { error: CallError { provider, why, value, happened, at }, tail }) => {
                    let value = match value.transpose() {
                        Ok(Some(response)) => {
                            let mut response = told(happened, response.map(super::answer::Peeked::into_body));
                            response.extensions_mut().insert(why);
                            if let Some(tail) = tail {
                                response.body_mut().hold(tail, None);
                            }
                            return Ok(response);
                        }
                        Ok(None) => None,
                        Err(trouble) => Some(trouble),
                    };
                    Err(OutboundError::Call(CallError { provider, why, value, happened, at }))
                }
            }
        }
    }
}
