//! Providers as a middleware of reqwest: each request below a base URL is a call.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use http::{Extensions, Request, Response, Uri};
use reqwest::{Body, ResponseBuilderExt, Url};
use reqwest_middleware::{Middleware, Next};
use tidegate_core::Clock;
use tidegate_core::retry::TransportFault;
use tidegate_runtime::clock::SystemClock;
use tidegate_store::{Memory, Store};
use tokio::sync::Mutex;
use tower_layer::Layer as _;
use tower_service::Service;

use super::cache::Cache;
use super::{
    BoxError, CallOptions, CredentialError, Outbound, OutboundError, OutboundLayer, Provider, ReplayBody, SendError,
};

/// Turns requests of a reqwest client into calls, if they are below the base URL of a provider. Each call waits for its
/// turn and is sent with a credential. It is retried if a retry can help, does no harm, is possible and can start in
/// time.
///
/// The URL selects the provider. If several base URLs match, the longest counts, and of equal ones the first provider.
/// With [`Auth::Path`](tidegate_policy::outbound::Auth::Path), URLs have `{key}` in the same place as the base URL.
/// Requests below no base URL pass unchanged, so that one client serves them all.
///
/// ```no_run
/// use reqwest::redirect::Policy as Redirects;
/// use reqwest_middleware::ClientBuilder;
/// use tidegate::policy::{Policy, ProviderSpec};
/// use tidegate::outbound::Lane;
/// use tidegate::outbound::{CallOptions, CallStats, Outbound, OutboundError, OutboundMiddleware};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let policy = Policy::builder().provider("tmdb", ProviderSpec::preset("tmdb").credentials("env:TMDB_TOKEN")).build()?;
/// let outbound = Outbound::new(&policy).ok_or("no [outbound]")?;
/// let client = ClientBuilder::new(reqwest::Client::builder().redirect(Redirects::none()).build()?)
///     .with(OutboundMiddleware::new(&outbound)?)
///     .build();
///
/// let in_the_background = CallOptions { lane: Lane::Background, ..CallOptions::default() };
/// let asked = client.get("https://api.themoviedb.org/3/movie/603").with_extension(in_the_background).send().await;
/// match asked {
///     Ok(reply) => println!("{} after {:?}", reply.status(), reply.extensions().get::<CallStats>()),
///     Err(reqwest_middleware::Error::Middleware(error)) => match error.downcast_ref::<OutboundError>() {
///         Some(OutboundError::Call(error)) => println!("{error}; again in {:?}", error.retry_after()),
///         _ => println!("{error}"),
///     },
///     Err(error) => println!("{error}"),
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Request options
///
/// [`CallOptions`] as an extension ([`with_extension`](reqwest_middleware::RequestBuilder::with_extension)) choose
/// lane, cost and timeout. If they have no timeout, the request's own [`timeout`](reqwest::RequestBuilder::timeout)
/// applies to the whole call, waits and all attempts included; without that, the timeout of the lane. `Idempotency-Key`
/// lets a POST be retried. Bodies can be sent again up to the provider's `replay` bytes, from memory or from streams. A
/// longer body is sent once.
///
/// # Responses
///
/// As with [`OutboundLayer`], a response holds [`CallStats`](super::CallStats) as an extension. The last reply of a
/// failed call also holds its [`CallErrorKind`](super::CallErrorKind). The URL of the response is the requested one,
/// without a credential. The call is in flight until the body has been read to the end or dropped.
///
/// Where the provider has a `cache`, its replies are kept and shared among the requests of this middleware as
/// [`cache`](crate::cache) says; [`CacheStatus`](crate::cache::CacheStatus) is an extension of the response.
///
/// # Errors
/// A call without any response is an [`OutboundError`] within
/// [`Error::Middleware`](reqwest_middleware::Error::Middleware). It contains neither a credential nor the URL that was
/// sent.
///
/// # The client
///
/// It must not follow redirects: reqwest does so below all middleware, without counting them. If they lead to another
/// host, it removes neither a header such as `x-api-key` nor a parameter of the URL. Build the client with
/// [`Policy::none`](reqwest::redirect::Policy::none). A followed redirect is detected only afterwards. Then the call
/// fails with [`SendError::FollowedRedirect`], and so does each later call through the same middleware, unsent.
///
/// A middleware before this one sees each call once. One after it sees each attempt, with the credential. So a logger
/// belongs before it. A middleware that retries isn't needed.
pub struct OutboundMiddleware<S: Store = Memory, C: Clock = SystemClock> {
    layers: Vec<OutboundLayer<S, C>>,
    /// The kept replies, if any provider has a `cache`.
    cache: Option<Cache<C>>,
    has_followed_redirect: AtomicBool,
}

impl<S: Store, C: Clock + Clone> OutboundMiddleware<S, C> {
    /// Returns a middleware for all providers with a base URL, with their credentials from files and the environment.
    ///
    /// # Errors
    /// A credential can't be resolved or can't be sent in the form that its provider requires.
    pub fn new(outbound: &Outbound<S, C>) -> Result<Self, CredentialError> {
        Self::with_env(outbound.providers().iter().cloned(), |name| std::env::var(name).ok())
    }

    /// Returns a middleware for these providers. `env` looks up environment variables.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn with_env(
        providers: impl IntoIterator<Item = Provider<S, C>>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        let with_base_url = providers.into_iter().filter(|provider| provider.config().base_url.is_some());
        let layers = with_base_url
            .map(|provider| Ok(OutboundLayer::with_env(provider, &env)?.fault_classifier(fault_of)))
            .collect::<Result<Vec<_>, CredentialError>>()?;
        let caching = layers.iter().map(OutboundLayer::provider).find(|provider| provider.config().cache.is_some());
        let cache =
            caching.map(|provider| Cache::new(provider.0.outbound_config.cache_bytes, provider.clock().clone()));
        Ok(Self { cache, layers, has_followed_redirect: AtomicBool::new(false) })
    }

    /// Returns the provider that a URL selects.
    fn layer_for(&self, url: &Url) -> Option<&OutboundLayer<S, C>> {
        let uri = url.as_str().parse::<Uri>().ok()?;
        let covering = self.layers.iter().filter_map(|layer| Some((layer.base_match_length(&uri)?, layer)));
        let longest = covering.reduce(|best, next| if next.0 > best.0 { next } else { best });
        longest.map(|(_, layer)| layer)
    }

    async fn call(
        &self,
        layer: &OutboundLayer<S, C>,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        if self.has_followed_redirect.load(Ordering::Relaxed) {
            return Err(reqwest_middleware::Error::middleware(OutboundError::Send(SendError::FollowedRedirect)));
        }
        let mut options = extensions.remove::<CallOptions>().unwrap_or_default();
        options.timeout = options.timeout.or_else(|| request.timeout().copied());
        let url = request.url().clone();
        let request: Request<Body> = request.try_into()?;
        let has_followed_redirect = &self.has_followed_redirect;
        let client = NextService { next, extensions: Arc::new(Mutex::new(extensions)), has_followed_redirect };
        let service = layer.layer(client);
        let cache = self.cache.as_ref().filter(|_| layer.provider().config().cache.is_some());
        let response = match cache {
            Some(cache) => {
                let send = |options, request| service.send(options, request);
                cache.call(&service, options, request, send).await.map(|response| response.map(Body::wrap))
            }
            None => service.send(options, request).await.map(|response| response.map(Body::wrap)),
        };
        let mut response = response.map_err(reqwest_middleware::Error::middleware)?;
        response.extensions_mut().extend(url_extensions(url));
        Ok(response.into())
    }
}

impl<S: Store, C: Clock> fmt::Debug for OutboundMiddleware<S, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutboundMiddleware").field("layers", &self.layers).finish_non_exhaustive()
    }
}

#[async_trait::async_trait]
impl<S: Store, C: Clock + Clone> Middleware for OutboundMiddleware<S, C> {
    async fn handle(
        &self,
        request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        match self.layer_for(request.url()) {
            Some(layer) => self.call(layer, request, extensions, next).await,
            None => next.run(request, extensions).await,
        }
    }
}

/// The rest of the middleware chain, as the service that sends attempts. One attempt is under way at a time, so that
/// all can use the extensions of the one request.
#[derive(Clone)]
struct NextService<'n> {
    next: Next<'n>,
    extensions: Arc<Mutex<&'n mut Extensions>>,
    has_followed_redirect: &'n AtomicBool,
}

impl<'n> Service<Request<ReplayBody<Body>>> for NextService<'n> {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send + 'n>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReplayBody<Body>>) -> Self::Future {
        let next_service = self.clone();
        Box::pin(async move {
            let request = reqwest::Request::try_from(request.map(Body::wrap)).map_err(reqwest::Error::without_url)?;
            let sent_to = request.url().clone();
            let mut extensions = next_service.extensions.lock().await;
            match next_service.next.clone().run(request, &mut extensions).await {
                Ok(response) if *response.url() == sent_to => Ok(response.into()),
                // The error's URL has the credential in the query or the path with some kinds of authentication.
                Err(reqwest_middleware::Error::Reqwest(error)) if !error.is_redirect() => {
                    Err(error.without_url().into())
                }
                Err(reqwest_middleware::Error::Middleware(error)) => Err(error.into()),
                Ok(_) | Err(reqwest_middleware::Error::Reqwest(_)) => {
                    next_service.has_followed_redirect.store(true, Ordering::Relaxed);
                    Err(SendError::FollowedRedirect.into())
                }
            }
        })
    }
}

/// Returns extensions that give a response its URL.
fn url_extensions(url: Url) -> Extensions {
    let (parts, ()) = http::response::Builder::new().url(url).body(()).unwrap_or_default().into_parts();
    parts.extensions
}

/// Returns the fault that an error of reqwest means. If it couldn't connect, the request was never sent.
fn fault_of(error: &(dyn Error + 'static)) -> TransportFault {
    match error.downcast_ref::<reqwest::Error>() {
        Some(error) if error.is_connect() || error.is_builder() => TransportFault::Unsent,
        Some(error) if error.is_timeout() => TransportFault::TimedOut,
        Some(error) if error.is_decode() => TransportFault::InvalidReply,
        _ => super::fault_of(error),
    }
}
