//! Connections to providers: plain HTTP/1.1, or TLS if the base URL is `https`, with HTTP/2 if the provider offers it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryFutureExt as _;
use http::header::{HOST, UPGRADE};
use http::{Request, Response, Uri};
use http_body::Body;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client, Error};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use tidegate::outbound;
use tidegate_core::retry::TransportFault;
use tidegate_policy::outbound::{BaseUrl, ProviderConfig};
use tokio::net::TcpStream;
use tower_service::Service;

use crate::body::BoxError;
use crate::upstream::{
    CONNECTION_WINDOW, MAX_HEAD_BYTES, MAX_HEAD_LINES, PING, PoolSettings, ReplyStream, STREAM_WINDOW, UpstreamBody,
    UpstreamClient, UpstreamError, tcp_connector,
};

/// The time that an idle connection is kept. It is shorter than the minute after which many servers close theirs.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);

/// The HTTP client of one provider, which pools its connections.
pub(crate) enum ProviderClient<B> {
    /// Plain HTTP/1.1. Its [`UpstreamClient::run_idle_cleanup`] must run.
    Plain(Arc<UpstreamClient<B>>),
    /// TLS.
    Tls(Arc<TlsClients<B>>),
}

/// The clients of a provider with TLS. A request with `Upgrade` uses HTTP/1.1, because HTTP/2 can't switch protocols
/// (RFC 9113 §8.6).
pub(crate) struct TlsClients<B> {
    all_versions: TlsClient<B>,
    http1: TlsClient<B>,
}

type TlsClient<B> = Client<ReplyConnector, B>;

/// Connects to a provider with TLS.
#[derive(Clone)]
struct ReplyConnector(HttpsConnector<HttpConnector>);

/// A connection with TLS, whose informational replies are counted.
type TlsReplyStream = TokioIo<ReplyStream<TokioIo<MaybeHttpsStream<TokioIo<TcpStream>>>>>;

impl Service<Uri> for ReplyConnector {
    type Response = TlsReplyStream;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<TlsReplyStream, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, address: Uri) -> Self::Future {
        Box::pin(self.0.call(address).map_ok(|stream| TokioIo::new(ReplyStream::new(TokioIo::new(stream)))))
    }
}

impl<B> Clone for ProviderClient<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(client) => Self::Plain(Arc::clone(client)),
            Self::Tls(clients) => Self::Tls(Arc::clone(clients)),
        }
    }
}

impl<B> Service<Request<B>> for ProviderClient<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    type Response = Response<UpstreamBody<B>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        match self {
            Self::Plain(client) => {
                request.headers_mut().insert(HOST, client.host.clone());
                let path = request.uri().path_and_query().cloned();
                *request.uri_mut() = path.map_or_else(Uri::default, Uri::from);
                Box::pin(Arc::clone(client).send(request, None).err_into())
            }
            Self::Tls(clients) => {
                let TlsClients { all_versions, http1 } = &**clients;
                let client = if request.headers().contains_key(UPGRADE) { http1 } else { all_versions };
                Box::pin(client.request(request).map_ok(|response| response.map(UpstreamBody::unpooled)).err_into())
            }
        }
    }
}

/// Returns the TLS settings of all clients, with trust in the system's root certificates. `SSL_CERT_FILE` and
/// `SSL_CERT_DIR` name other ones.
///
/// # Errors
/// The system has no root certificates to trust.
pub(crate) fn tls_config() -> io::Result<ClientConfig> {
    Ok(ClientConfig::builder().with_native_roots()?.with_no_client_auth())
}

/// Returns the client of a provider with this base URL, which keeps up to this number of idle connections, with TLS of each
/// version.
pub(crate) fn client<B>(
    provider: &ProviderConfig,
    base: &BaseUrl,
    tls: ClientConfig,
    max_idle: usize,
) -> ProviderClient<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static,
{
    if !base.is_https() {
        let connect_timeout = provider.connect_timeout;
        let settings = PoolSettings { connect_timeout, idle_timeout: IDLE_TIMEOUT, max_idle };
        let client = UpstreamClient::new(base, settings);
        return ProviderClient::Plain(client.expect("invariant: a plain server needs no certificates"));
    }
    let mut tcp = tcp_connector(provider.connect_timeout);
    tcp.enforce_http(false);
    let connector = || HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_only();
    let mut builder = Client::builder(TokioExecutor::new());
    builder
        .pool_timer(TokioTimer::new())
        .timer(TokioTimer::new())
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_max_idle_per_host(max_idle)
        // As in `upstream::http1_builder`.
        .http1_allow_spaces_after_header_name_in_responses(true)
        .http1_allow_obsolete_multiline_headers_in_responses(true)
        .http1_ignore_invalid_headers_in_responses(true)
        .http1_max_headers(MAX_HEAD_LINES)
        .http1_max_buf_size(MAX_HEAD_BYTES)
        .http2_max_header_list_size(MAX_HEAD_BYTES as u32)
        .http2_initial_stream_window_size(STREAM_WINDOW)
        .http2_initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(PING.0)
        .http2_keep_alive_timeout(PING.1);
    ProviderClient::Tls(Arc::new(TlsClients {
        all_versions: builder.build(ReplyConnector(connector().enable_all_versions().wrap_connector(tcp.clone()))),
        http1: builder.build(ReplyConnector(connector().enable_http1().wrap_connector(tcp))),
    }))
}

/// Describes one cause of a failed call; the clients' own errors only name themselves, or the proxy's upstream.
pub(crate) fn describe_cause(cause: &(dyn std::error::Error + 'static)) -> String {
    const BROKEN_OFF: &str = "the connection to the provider broke off";
    match (cause.downcast_ref::<UpstreamError>(), cause.downcast_ref::<Error>()) {
        (Some(UpstreamError::Connect(error)), _) => format!("can't connect to the provider: {error}"),
        (Some(UpstreamError::ConnectTimeout), _) => "connecting to the provider takes too long".to_owned(),
        (Some(UpstreamError::Broken(_) | UpstreamError::Unsent(_) | UpstreamError::Unprocessed(_)), _) => {
            BROKEN_OFF.to_owned()
        }
        (None, Some(error)) if error.is_connect() => "can't connect to the provider".to_owned(),
        (None, Some(_)) => BROKEN_OFF.to_owned(),
        _ => cause.to_string(),
    }
}

/// Classifies an error of a connection: [`TransportFault::Unsent`] if the request wasn't sent.
pub(crate) fn fault_of(error: &(dyn std::error::Error + 'static)) -> TransportFault {
    let is_unsent = match (error.downcast_ref(), error.downcast_ref::<Error>()) {
        (Some(UpstreamError::Connect(_) | UpstreamError::ConnectTimeout | UpstreamError::Unsent(_)), _) => true,
        (None, Some(error)) => error.is_connect(),
        _ => false,
    };
    if is_unsent { TransportFault::Unsent } else { outbound::fault_of(error) }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::Empty;
    use hyper::service::service_fn;
    use rustls::pki_types::PrivatePkcs8KeyDer;
    use rustls::{RootCertStore, ServerConfig};
    use tidegate_policy::{Policy, ProviderSpec};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// Serves one connection over TLS, whose reply has this many header lines of 1,000 bytes, and returns the reply as a
    /// provider's client reads it.
    async fn fetch(http2: bool, lines: usize) -> Result<Response<UpstreamBody<Empty<Bytes>>>, BoxError> {
        fetch_after(http2, lines, 0).await
    }

    /// The same behind this many informational replies.
    async fn fetch_after(
        http2: bool,
        lines: usize,
        informational: usize,
    ) -> Result<Response<UpstreamBody<Empty<Bytes>>>, BoxError> {
        let pair = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(pair.signing_key.serialize_der());
        let chain = vec![pair.cert.der().clone()];
        let server = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key.into());
        let mut server = server.unwrap();
        if http2 {
            server.alpn_protocols = vec![b"h2".to_vec()];
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://localhost:{}", listener.local_addr().unwrap().port());
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = TlsAcceptor::from(Arc::new(server)).accept(stream).await.unwrap();
            if http2 {
                let service = service_fn(move |_| async move {
                    let mut response = Response::new(Empty::<Bytes>::new());
                    for line in 0..lines {
                        let name = http::HeaderName::try_from(format!("x-{line:04}")).unwrap();
                        response.headers_mut().insert(name, "v".repeat(992).parse().unwrap());
                    }
                    Ok::<_, Infallible>(response)
                });
                let http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                let _ = http.serve_connection(TokioIo::new(stream), service).await;
            } else {
                let _ = stream.read(&mut [0; 1024]).await.unwrap();
                let lines = (0..lines).map(|line| format!("x-{line:04}: {}\r\n", "v".repeat(992))).collect::<String>();
                let hostile = "X Bad: 1\r\nFoo[bar]: 2\r\nno colon\r\nContent-Length\t: 0\r\n";
                let early = "HTTP/1.1 103 Early Hints\r\n\r\n".repeat(informational);
                let _ = stream.write_all(format!("{early}HTTP/1.1 200 OK\r\n{lines}{hostile}\r\n").as_bytes()).await;
            }
        });
        let mut roots = RootCertStore::empty();
        roots.add(pair.cert.der().clone()).unwrap();
        let tls = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let policy = Policy::builder().provider("api", ProviderSpec::new(&url)).build().unwrap();
        let [provider] = policy.outbound().unwrap().providers() else { panic!("one provider") };
        let mut client = client(provider, provider.base_url.as_ref().unwrap(), tls, 1);
        client.call(Request::get(url).body(Empty::new()).unwrap()).await
    }

    #[tokio::test]
    async fn informational_replies_have_a_bound() {
        assert!(fetch_after(false, 1, 32).await.is_ok());
        assert!(fetch_after(false, 1, 33).await.is_err());
    }

    #[tokio::test]
    async fn heads_have_a_bound_in_bytes() {
        for http2 in [false, true] {
            let response = fetch(http2, 150).await.unwrap();
            assert_eq!(response.headers().keys().filter(|name| name.as_str().starts_with("x-")).count(), 150);
            // Over HTTP/1.1, up to twice the bytes may pass if they arrive at once.
            let too_many = if http2 { 300 } else { 600 };
            assert!(fetch(http2, too_many).await.is_err(), "HTTP/2: {http2}");
        }
    }
}
