//! Connections to providers: pooled, over TLS where the base URL says so, HTTP/2 where it is offered.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use rustls::ClientConfig;
use tidegate_policy::outbound::Provider;

/// How long a connection is kept without a request: less than the minute after which many servers close theirs.
const IDLE: Duration = Duration::from_secs(50);
/// How many idle connections are kept to one provider.
const MAX_IDLE: usize = 128;
/// How often a connection of HTTP/2 is asked whether it still lives while it is in use, and how long it has to answer.
const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(10));

/// A client that keeps its connections.
pub(super) type Connections<B> = Client<HttpsConnector<HttpConnector>, B>;

/// Makes the clients of all providers; reading the system's roots takes a while, so that is done once.
pub(super) struct Connector(ClientConfig);

impl Connector {
    /// Trusts whom the system trusts; `SSL_CERT_FILE` and `SSL_CERT_DIR` name other roots.
    ///
    /// # Errors
    /// The system has no root certificates to trust.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(ClientConfig::builder().with_native_roots()?.with_no_client_auth()))
    }

    pub(super) fn client<B>(&self, provider: &Provider) -> Connections<B>
    where
        B: Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(provider.connect_timeout));
        let tls = HttpsConnectorBuilder::new().with_tls_config(self.0.clone());
        let connector = tls.https_or_http().enable_all_versions().wrap_connector(tcp);
        Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(MAX_IDLE)
            .http2_keep_alive_interval(PING.0)
            .http2_keep_alive_timeout(PING.1)
            .build(connector)
    }
}
