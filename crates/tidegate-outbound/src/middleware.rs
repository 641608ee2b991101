//! Providers as a middleware of reqwest: every request below a base URL is a call.

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

/// Makes requests of a reqwest client calls to the providers whose base URLs they are below: each waits for its turn, is
/// sent with a credential, and again where that is worth it, harmless, possible and in time.
///
/// Which provider is meant is said by the URL. Below several base URLs, the longest counts, and of the same one the
/// first provider. With [`Auth::Path`](tidegate_policy::outbound::Auth::Path), URLs have `{key}` where the base URL has
/// it. Requests that are below none pass by untouched, so that one client serves them all.
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
/// # What a request says
///
/// [`CallOptions`] as an extension ([`with_extension`](reqwest_middleware::RequestBuilder::with_extension)) choose lane,
/// cost and time-out; without one there, a request's own [`timeout`](reqwest::RequestBuilder::timeout) is the call's,
/// waits and all attempts included, and without any the lane's counts. `Idempotency-Key` lets a POST be sent again.
/// Bodies are sent again up to the provider's `replay` bytes, be they at hand or streams; a longer one is sent once.
///
/// # What comes back
///
/// As with [`OutboundLayer`]: a response holds [`CallStats`](super::CallStats) as an extension, and one that isn't a good
/// reply, but the last of a call that failed, holds the [`CallErrorKind`](super::CallErrorKind) of that besides. Its URL is the one that was
/// asked for, without a credential. Until its body has been read to the end or dropped, the call is in flight.
///
/// Where the provider has a `cache`, its replies are kept and shared among the requests of this middleware as
/// [`cache`](crate::cache) says; [`CacheStatus`](crate::cache::CacheStatus) is an extension of the response.
///
/// # Errors
/// A call without any response is an [`OutboundError`] within
/// [`Error::Middleware`](reqwest_middleware::Error::Middleware). It never tells a credential, nor the URL that was sent.
///
/// # The client
///
/// It must not follow redirects: reqwest does so below all middleware, uncounted, and takes neither a header such as
/// `x-api-key` nor a parameter of the URL away when they lead to another host. Build it with
/// [`Policy::none`](reqwest::redirect::Policy::none). A client that is found to have followed one, which is seen only
/// afterwards, gets [`SendError::FollowedRedirect`], and so does every later call through the same middleware, unsent.
///
/// A middleware that comes before this one sees each call once; one that comes after it sees every attempt, with the
/// credential. So a logger belongs before it. One that retries has nothing left to do.
pub struct OutboundMiddleware<S: Store = Memory, C: Clock = SystemClock> {
    layers: Vec<OutboundLayer<S, C>>,
    /// The kept replies, if any provider has a `cache`.
    cache: Option<Cache<C>>,
    has_followed_redirect: AtomicBool,
}

impl<S: Store, C: Clock + Clone> OutboundMiddleware<S, C> {
    /// A middleware for all providers that have a base URL, with their credentials from files and the environment.
    ///
    /// # Errors
    /// A credential can't be had or can't be sent where its provider wants it.
    pub fn new(outbound: &Outbound<S, C>) -> Result<Self, CredentialError> {
        Self::with_env(outbound.providers().iter().cloned(), |name| std::env::var(name).ok())
    }

    /// A middleware for these providers, with environment variables looked up by `env`.
    ///
    /// # Errors
    /// As [`new`](Self::new) has them.
    pub fn with_env(
        providers: impl IntoIterator<Item = Provider<S, C>>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, CredentialError> {
        let with_base_url = providers.into_iter().filter(|provider| provider.config().base_url.is_some());
        let layers = with_base_url
            .map(|provider| Ok(OutboundLayer::with_env(provider, &env)?.fault_classifier(fault_of)))
            .collect::<Result<Vec<_>, CredentialError>>()?;
        let mut caching =
            layers.iter().map(OutboundLayer::provider).filter(|provider| provider.config().cache.is_some());
        let cache =
            caching.next().map(|provider| Cache::new(provider.0.outbound_config.cache_bytes, provider.clock().clone()));
        Ok(Self { cache, layers, has_followed_redirect: AtomicBool::new(false) })
    }

    /// The provider that is meant by a URL.
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

/// What is below the middleware, as the service that attempts are sent by. One is under way at a time, so that all can
/// have the extensions of the one request that they are.
#[derive(Clone)]
struct NextService<'n> {
    next: Next<'n>,
    extensions: Arc<Mutex<&'n mut Extensions>>,
    has_followed_redirect: &'n AtomicBool,
}

impl NextService<'_> {
    fn record_redirect(&self) -> BoxError {
        self.has_followed_redirect.store(true, Ordering::Relaxed);
        SendError::FollowedRedirect.into()
    }
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
                Ok(_) => Err(next_service.record_redirect()),
                Err(reqwest_middleware::Error::Reqwest(error)) if error.is_redirect() => {
                    Err(next_service.record_redirect())
                }
                // Its URL has the credential in it where that belongs into the query or the path.
                Err(reqwest_middleware::Error::Reqwest(error)) => Err(error.without_url().into()),
                Err(reqwest_middleware::Error::Middleware(error)) => Err(error.into()),
            }
        })
    }
}

/// What gives a response its URL.
fn url_extensions(url: Url) -> Extensions {
    let (parts, ()) = http::response::Builder::new().url(url).body(()).unwrap_or_default().into_parts();
    parts.extensions
}

/// What an error of reqwest means: one that couldn't connect never sent the request.
fn fault_of(error: &(dyn Error + 'static)) -> TransportFault {
    match error.downcast_ref::<reqwest::Error>() {
        Some(error) if error.is_connect() || error.is_builder() => TransportFault::Unsent,
        Some(error) if error.is_timeout() => TransportFault::TimedOut,
        Some(error) if error.is_decode() => TransportFault::InvalidReply,
        _ => super::fault_of(error),
    }
}
