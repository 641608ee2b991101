//! Connections to providers: plain HTTP/1.1, or TLS if the base URL is `https`, with HTTP/2 if the provider offers it.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::UPGRADE;
use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use tidegate::outbound;
use tidegate_core::retry::TransportFault;
use tidegate_policy::outbound::ProviderConfig;
use tower_service::Service;

use crate::body::BoxError;
use crate::upstream::tcp_connector;

/// The time that an idle connection is kept. It is shorter than the minute after which many servers close theirs.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);
/// The maximum number of idle connections per provider.
const MAX_IDLE: usize = 128;
/// The interval of pings on an HTTP/2 connection in use, and the time to answer one.
const HTTP2_PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// The HTTP clients of one provider, which pool its connections. A request with `Upgrade` uses HTTP/1.1, because HTTP/2
/// can't switch protocols (RFC 9113 §8.6).
pub(super) struct ProviderClient<B>(Arc<HttpClients<B>>);

struct HttpClients<B> {
    all_versions: HttpClient<B>,
    http1: HttpClient<B>,
}

type HttpClient<B> = Client<HttpsConnector<HttpConnector>, B>;

impl<B> Clone for ProviderClient<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B> Service<Request<B>> for ProviderClient<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    type Response = Response<Incoming>;
    type Error = Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> ResponseFuture {
        let HttpClients { all_versions, http1 } = &*self.0;
        if request.headers().contains_key(UPGRADE) { http1 } else { all_versions }.request(request)
    }
}

/// Returns the TLS settings of all clients, with trust in the system's root certificates. `SSL_CERT_FILE` and
/// `SSL_CERT_DIR` name other ones.
///
/// # Errors
/// The system has no root certificates to trust.
pub(super) fn tls_config() -> io::Result<ClientConfig> {
    Ok(ClientConfig::builder().with_native_roots()?.with_no_client_auth())
}

pub(super) fn client<B>(provider: &ProviderConfig, tls: ClientConfig) -> ProviderClient<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    let mut tcp = tcp_connector(provider.connect_timeout);
    tcp.enforce_http(false);
    let connector = || HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_or_http();
    let mut builder = Client::builder(TokioExecutor::new());
    builder
        .pool_timer(TokioTimer::new())
        .timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(MAX_IDLE)
        .http2_keep_alive_interval(HTTP2_PING.0)
        .http2_keep_alive_timeout(HTTP2_PING.1);
    ProviderClient(Arc::new(HttpClients {
        all_versions: builder.build(connector().enable_all_versions().wrap_connector(tcp.clone())),
        http1: builder.build(connector().enable_http1().wrap_connector(tcp)),
    }))
}

/// Describes one cause of a failed call; the client's own errors only name themselves.
pub(super) fn describe_cause(cause: &(dyn std::error::Error + 'static)) -> String {
    match cause.downcast_ref::<Error>() {
        Some(error) if error.is_connect() => "can't connect to the provider".to_owned(),
        Some(_) => "the connection to the provider broke off".to_owned(),
        None => cause.to_string(),
    }
}

/// Classifies an error of a connection: [`TransportFault::Unsent`] if the request wasn't sent.
pub(super) fn fault_of(error: &(dyn std::error::Error + 'static)) -> TransportFault {
    match error.downcast_ref::<Error>() {
        Some(error) if error.is_connect() => TransportFault::Unsent,
        _ => outbound::fault_of(error),
    }
}
