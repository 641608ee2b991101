//! Connections to providers: plain HTTP/1.1, or TLS if the base URL is `https`, with HTTP/2 if the provider offers it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryFutureExt as _;
use http::header::HOST;
use http::{Request, Response, Uri};
use http_body::Body;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use tidegate::outbound;
use tidegate_core::retry::TransportFault;
use tidegate_policy::outbound::{BaseUrl, ProviderConfig};
use tower_service::Service;

use crate::body::BoxError;
use crate::upstream::{self, PoolConfig, UpstreamBody, UpstreamClient, UpstreamError};

/// The time that an idle connection is kept. It is shorter than the minute after which many servers close theirs.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);
/// The maximum number of idle connections per provider.
const MAX_IDLE: usize = 128;
/// The interval of pings on an HTTP/2 connection in use, and the time to answer one.
const HTTP2_PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// The HTTP client of one provider, which pools its connections.
pub(super) enum ProviderClient<B> {
    /// Plain HTTP. Its [`UpstreamClient::run_idle_cleanup`] must run.
    Plain(Arc<UpstreamClient<B>>),
    /// TLS. It has timers of its own.
    Tls(Arc<Client<HttpsConnector<HttpConnector>, B>>),
}

impl<B> Clone for ProviderClient<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(upstream) => Self::Plain(Arc::clone(upstream)),
            Self::Tls(client) => Self::Tls(Arc::clone(client)),
        }
    }
}

/// Makes the clients of all providers. Shared, because reading the system's root certificates is slow.
pub(super) struct ProviderConnector(ClientConfig);

impl ProviderConnector {
    /// Trusts the system's root certificates. `SSL_CERT_FILE` and `SSL_CERT_DIR` name other ones.
    ///
    /// # Errors
    /// The system has no root certificates to trust.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(ClientConfig::builder().with_native_roots()?.with_no_client_auth()))
    }

    pub(super) fn client<B>(&self, provider: &ProviderConfig, base: &BaseUrl) -> ProviderClient<B>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<BoxError>,
    {
        if !base.is_https() {
            let rules = PoolConfig {
                connect_timeout: provider.connect_timeout,
                idle_timeout: IDLE_TIMEOUT,
                max_idle: MAX_IDLE,
            };
            return ProviderClient::Plain(UpstreamClient::new(base.authority(), rules));
        }
        let mut tcp = upstream::tcp_connector(provider.connect_timeout);
        tcp.enforce_http(false);
        let tls = HttpsConnectorBuilder::new().with_tls_config(self.0.clone());
        let connector = tls.https_only().enable_all_versions().wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(MAX_IDLE)
            .http2_keep_alive_interval(HTTP2_PING.0)
            .http2_keep_alive_timeout(HTTP2_PING.1)
            .build(connector);
        ProviderClient::Tls(Arc::new(client))
    }
}

impl<B> Service<Request<B>> for ProviderClient<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<UpstreamBody<B>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        match self {
            Self::Plain(upstream) => {
                request.headers_mut().insert(HOST, upstream.host().clone());
                let path = request.uri().path_and_query().cloned();
                *request.uri_mut() = path.map_or_else(Uri::default, Uri::from);
                Box::pin(Arc::clone(upstream).send(request).err_into())
            }
            Self::Tls(client) => {
                Box::pin(client.request(request).map_ok(|response| response.map(UpstreamBody::unpooled)).err_into())
            }
        }
    }
}

/// Classifies an error of a connection: `Fault::Unsent` if the request wasn't sent.
pub(super) fn fault_of(error: &(dyn std::error::Error + 'static)) -> TransportFault {
    let unsent = match (error.downcast_ref(), error.downcast_ref::<hyper_util::client::legacy::Error>()) {
        (Some(UpstreamError::Connect(_) | UpstreamError::ConnectTimeout | UpstreamError::Unsent(_)), _) => true,
        (_, Some(error)) => error.is_connect(),
        _ => false,
    };
    if unsent { TransportFault::Unsent } else { outbound::fault_of(error) }
}
