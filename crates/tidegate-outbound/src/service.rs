//! A provider as a tower layer: each request through it is a call.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{Request, Response};
use http_body::Body;
use tidegate_core::Clock;
use tidegate_core::retry::TransportFault;
use tidegate_runtime::clock::SystemClock;
use tidegate_store::{Memory, Store};
use tower_layer::Layer;
use tower_service::Service;

use super::cost::CostReader;
use super::exchange::{BoxError, Exchange, FaultClassifier, SendError};
use super::reply_body::PeekedBody;
use super::verdict_log::VerdictLog;
use super::{
    CallError, CallErrorKind, CallOptions, CallScope, CallStats, CompletedCall, CredentialError, Credentials, Logins,
    OutboundBody, Provider, ReplayBody, Target, TargetError, fault_of,
};

/// Turns each request through a service into a call to a provider. The call waits for its turn and is sent with a
/// credential. It is retried if a retry can help, does no harm, is possible and can start in time.
///
/// The inner service sends requests unchanged. It must neither follow redirects nor retry, nor log requests, because
/// they contain the credential. Requests have a path below the provider's base URL, or a full URL there. Their
/// extensions may hold [`CallOptions`]; [`take_call_options`](super::take_call_options) reads those from headers.
///
/// A cost of 1 in the options is the default. Then the provider's rules determine the reserved cost, from the body's
/// length and its contents. It is at most the capacity of the provider's limits. If the rules look into JSON, the body
/// is read before the call's turn, as far as it is buffered for another attempt.
///
/// Responses hold [`CallStats`] as an extension. The last reply of a failed call also holds its
/// [`CallErrorKind`](super::CallErrorKind).
///
/// Headers and trailers of a reply don't contain the credential, even if the provider repeats it. The body is
/// unchanged, and so are extensions of the inner service's response, such as the reason phrase that hyper stores there.
///
/// The service is always ready: calls wait in the provider's queue, and the inner service isn't held ready before their
/// turn.
///
/// ```no_run
/// use bytes::Bytes;
/// use http::Request;
/// use http_body_util::{BodyExt, Empty};
/// use hyper_util::client::legacy::Client;
/// use hyper_util::rt::TokioExecutor;
/// use tidegate::outbound::{CallOptions, CallStats, Lane, Outbound, OutboundLayer, ReplayBody};
/// use tidegate::policy::{Policy, ProviderSpec};
/// use tower::{Service, ServiceBuilder};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weather = ProviderSpec::new("http://api.example.com/v1").auth("bearer").credentials("env:WEATHER_TOKEN");
/// let policy = Policy::builder().provider("weather", weather).build()?;
/// let outbound = Outbound::new(&policy).ok_or("no [outbound]")?;
///
/// let client = Client::builder(TokioExecutor::new()).build_http::<ReplayBody<Empty<Bytes>>>();
/// let layer = OutboundLayer::new(outbound.provider("weather")?.clone())?;
/// let mut weather = ServiceBuilder::new().layer(layer).service(client);
///
/// let background = CallOptions { lane: Lane::Background, ..CallOptions::default() };
/// let request = Request::get("/rain").extension(background).body(Empty::new())?;
/// let reply = weather.call(request).await?;
/// println!("{} {:?}", reply.status(), reply.extensions().get::<CallStats>());
/// let rain = reply.into_body().collect().await?.to_bytes();
/// # Ok(())
/// # }
/// ```
pub struct OutboundLayer<S: Store = Memory, C: Clock = SystemClock>(pub(super) Arc<OutboundLayerInner<S, C>>);

/// A provider, and the transport settings that all of its calls share.
pub(super) struct OutboundLayerInner<S: Store, C: Clock> {
    pub provider: Provider<S, C>,
    pub target: Target,
    pub credentials: Credentials,
    pub logins: Option<Arc<Logins>>,
    /// The path under which clients reach the provider, for redirects.
    pub mount_path: Option<String>,
    /// The largest cost that is reserved for a call.
    pub max_cost: u64,
    pub fault_classifier: Arc<FaultClassifier>,
    pub verdict_log: Arc<VerdictLog>,
}

/// The reason why a call through an [`OutboundLayer`] has no response at all. Never contains a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutboundError {
    /// The request can't be sent to the provider. It wasn't counted.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The call failed: there was no capacity or time left, or its last attempt got no reply.
    #[error(transparent)]
    Call(CallError<SendError>),
    /// The only attempt got no reply, and a retry can't help.
    #[error(transparent)]
    Send(#[from] SendError),
}

impl OutboundError {
    /// The HTTP status for the client: 400 or 408 if the request is at fault, otherwise 429, 502, 503 or 504.
    pub fn status(&self) -> u16 {
        match self {
            Self::Target(TargetError::UnusableCredential) => 502,
            Self::Target(_) => 400,
            Self::Call(CallError { last_reply: Some(SendError::BrokenBody), .. })
            | Self::Send(SendError::BrokenBody) => 400,
            Self::Call(CallError { last_reply: Some(SendError::BodyTimeout), .. })
            | Self::Send(SendError::BodyTimeout) => 408,
            Self::Call(error) if error.status() == 502 && matches!(error.last_reply, Some(SendError::TimedOut)) => 504,
            Self::Call(error) => error.status(),
            Self::Send(SendError::TimedOut) => 504,
            Self::Send(_) => 502,
        }
    }
}

impl<S: Store, C: Clock + Clone> OutboundLayer<S, C> {
    /// Returns a layer for a provider, with its credentials from files and the environment.
    ///
    /// # Errors
    /// A credential can't be resolved or can't be sent in the form that the provider requires.
    pub fn new(provider: Provider<S, C>) -> Result<Self, CredentialError> {
        Self::with_env(provider, |name| std::env::var(name).ok())
    }

    /// Returns a layer for a provider. `env` looks up environment variables.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_env(provider: Provider<S, C>, env: impl Fn(&str) -> Option<String>) -> Result<Self, CredentialError> {
        let config = provider.config();
        Ok(Self(Arc::new(OutboundLayerInner {
            target: Target::from_provider(config),
            credentials: Credentials::from_provider(config, &env)?,
            logins: Logins::from_provider(config, &env)?.map(Arc::new),
            mount_path: None,
            max_cost: config.max_cost(provider.0.outbound_config.limits()),
            fault_classifier: Arc::new(fault_of),
            verdict_log: Arc::default(),
            provider,
        })))
    }

    /// Turns redirects to URLs below the base URL into redirects to paths below this one, such as `tmdb` for `/tmdb`.
    #[must_use]
    pub fn mount_path(self, path: &str) -> Self {
        let path = path.trim_matches('/').to_owned();
        self.modify(|layer| layer.mount_path = Some(path))
    }

    /// Sets the function that classifies errors of the inner service. Default [`fault_of`].
    #[must_use]
    pub fn fault_classifier(
        self,
        fault_of: impl Fn(&(dyn Error + 'static)) -> TransportFault + Send + Sync + 'static,
    ) -> Self {
        self.modify(|layer| layer.fault_classifier = Arc::new(fault_of))
    }

    /// The provider that is called.
    pub fn provider(&self) -> &Provider<S, C> {
        &self.0.provider
    }

    /// Returns the length of the provider's base URL if this URL is below it: see [`Target::base_match_length`].
    #[cfg(feature = "reqwest")]
    pub(super) fn base_match_length(&self, url: &http::Uri) -> Option<usize> {
        self.0.target.base_match_length(url)
    }

    fn modify(self, change: impl FnOnce(&mut OutboundLayerInner<S, C>)) -> Self {
        let old = &self.0;
        let mut inner = OutboundLayerInner {
            provider: old.provider.clone(),
            target: old.target.clone(),
            credentials: old.credentials.clone(),
            logins: old.logins.clone(),
            mount_path: old.mount_path.clone(),
            max_cost: old.max_cost,
            fault_classifier: Arc::clone(&old.fault_classifier),
            verdict_log: Arc::clone(&old.verdict_log),
        };
        change(&mut inner);
        Self(Arc::new(inner))
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
        OutboundService { inner, shared: Arc::clone(&self.0) }
    }
}

/// A service behind an [`OutboundLayer`].
pub struct OutboundService<I, S: Store = Memory, C: Clock = SystemClock> {
    inner: I,
    shared: Arc<OutboundLayerInner<S, C>>,
}

impl<I, S: Store, C: Clock> OutboundService<I, S, C> {
    /// The provider that is called.
    pub fn provider(&self) -> &Provider<S, C> {
        &self.shared.provider
    }

    /// Sends a request as a call with these options, and ignores those in its extensions. Like [`Service::call`], but
    /// without a box, for callers that can borrow the service until the response's head arrives.
    ///
    /// # Errors
    /// The reason why there is no response at all.
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
        self.shared.call(self.inner.clone(), options, request)
    }

    /// The secret of the first credential, as it would be sent now.
    #[cfg(feature = "cache")]
    pub(super) async fn secret(&self) -> Option<Arc<tidegate_policy::Secret>> {
        self.shared.credentials.current(0, self.provider().clock().now()).await
    }
}

impl<I: Clone, S: Store, C: Clock> Clone for OutboundService<I, S, C> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<I, S: Store, C: Clock> fmt::Debug for OutboundService<I, S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboundService").field("provider", &self.shared.provider).finish_non_exhaustive()
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
        let (inner, shared) = (self.inner.clone(), Arc::clone(&self.shared));
        let options = request.extensions_mut().remove().unwrap_or_default();
        Box::pin(async move { shared.call(inner, options, request).await })
    }
}

impl<S: Store, C: Clock> OutboundLayerInner<S, C> {
    /// Sends one request as a call, by an inner service that need not be `'static`.
    ///
    /// Not an `async fn`: that would hold the request next to the exchange made from it, and the exchange twice.
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
        let mut exchange = Exchange::new(self, inner, request);
        let cost_rules = self.provider.config().cost.as_ref();
        let reads_request = self.provider.config().verdicts.reads_request_bodies();
        async move {
            let exchange = exchange.as_mut().map_err(|error| *error)?;
            let is_default_cost = options.cost == CallOptions::default().cost;
            let cost_to_read = cost_rules.filter(|_| is_default_cost);
            if reads_request || cost_to_read.is_some_and(|rules| !rules.request.is_empty()) {
                let started_at = self.provider.clock().now();
                let timeout = options.timeout.unwrap_or_else(|| self.provider.timeout(options.lane));
                exchange.read_json_body(timeout).await?;
                let elapsed = self.provider.clock().now().since(started_at).as_duration();
                options.timeout = Some(timeout.saturating_sub(elapsed));
            }
            if let Some(rules) = cost_to_read {
                options.cost = exchange.expected_cost(rules);
            }
            if options.scope == CallScope::default() {
                options.scope = exchange.call_scope();
            }
            let to_response = |reply: Response<PeekedBody<B>>, stats: CallStats, guard, cost_reader| {
                let mut response = reply.map(|body| body.into_body(guard, cost_reader));
                response.extensions_mut().insert(stats);
                response
            };
            match self.provider.call_with_guard(options, exchange).await {
                Ok(CompletedCall { value, stats, in_flight_guard }) => {
                    let reply = value?;
                    let cost_reader = cost_rules.and_then(|rules| CostReader::for_reply(rules, reply.headers()));
                    Ok(to_response(reply, stats, in_flight_guard, cost_reader))
                }
                Err(error) => {
                    let wait = error.retry_after();
                    let CallError { provider, kind, last_reply, stats, failed_at } = error;
                    let last_reply = match last_reply {
                        Some((Ok(reply), in_flight_guard)) => {
                            let mut response = to_response(reply, stats, in_flight_guard, None);
                            // Another attempt of a call without time is no promise that the provider has made.
                            if let Some(wait) = wait.filter(|_| !matches!(kind, CallErrorKind::NoTimeLeft { .. })) {
                                response.headers_mut().entry(RETRY_AFTER).or_insert_with(|| wait.as_secs_ceil().into());
                            }
                            response.extensions_mut().insert(kind);
                            return Ok(response);
                        }
                        Some((Err(error), _)) => Some(error),
                        None => None,
                    };
                    Err(OutboundError::Call(CallError { provider, kind, last_reply, stats, failed_at }))
                }
            }
        }
    }
}
