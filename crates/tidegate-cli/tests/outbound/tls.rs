//! Providers behind TLS, with certificates of the test's own certificate authority.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{Request, State};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tidegate_testkit::http_client::HttpClient;
use tidegate_testkit::servers::ScratchDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::common::gateway;

/// A provider behind TLS that offers these protocols. It runs as long as its runtime.
struct Api {
    port: u16,
    authority: String,
    seen: Arc<Mutex<Vec<String>>>,
    handshakes: Arc<Mutex<Vec<bool>>>,
    _runtime: Runtime,
}

impl Api {
    fn start(protocols: &[&str]) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, format!("authority for {protocols:?}"));
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let config = ServerConfig::builder().with_no_client_auth();
        let mut config = config.with_single_cert(vec![certificate.der().clone()], key).unwrap();
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_owned()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let seen: Arc<Mutex<Vec<String>>> = Arc::default();
        let handshakes: Arc<Mutex<Vec<bool>>> = Arc::default();
        let api = Self {
            port: listener.local_addr().unwrap().port(),
            authority: authority.pem(),
            seen: Arc::clone(&seen),
            handshakes: Arc::clone(&handshakes),
            _runtime: runtime,
        };
        let app = Router::new().fallback(record_request).with_state(seen);
        api._runtime.spawn(async move {
            loop {
                let (stream, _): (_, SocketAddr) = listener.accept().await.unwrap();
                let (acceptor, app, handshakes) = (acceptor.clone(), app.clone(), Arc::clone(&handshakes));
                tokio::spawn(async move {
                    let accepted = acceptor.accept(stream).await;
                    handshakes.lock().unwrap().push(accepted.is_ok());
                    let Ok(stream) = accepted else { return };
                    let server = auto::Builder::new(TokioExecutor::new());
                    let _ = server.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app)).await;
                });
            }
        });
        api
    }

    fn policy(&self) -> String {
        let base = format!("base_url = \"https://localhost:{}/v1\"", self.port);
        format!(
            "[log]\nlevel = \"trace\"\n[outbound.provider.api]\n{base}\nauth = \"bearer\"\n\
             credentials = \"env:PLANTED\"\nlimit = \"1000/s burst 1000\"\nretry = {{ base = \"1ms\", cap = \"1ms\" }}\n"
        )
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

async fn record_request(State(seen): State<Arc<Mutex<Vec<String>>>>, request: Request) -> String {
    let version = format!("{:?}", request.version());
    let uri = request.uri();
    let host = uri.authority().map(ToString::to_string);
    let host = host.or_else(|| request.headers().get("host").map(|host| host.to_str().unwrap().to_owned()));
    let shown = request.headers().get("authorization").map(|value| value.to_str().unwrap()).unwrap_or_default();
    let te = request.headers().get("te").map_or("none", |value| value.to_str().unwrap());
    let te = if request.headers().contains_key("connection") { "of this hop" } else { te };
    seen.lock().unwrap().push(format!("{version} {} {} {shown} te: {te}", host.unwrap_or_default(), uri.path()));
    format!("over {version}")
}

const PLANTED: (&str, &str) = ("PLANTED", "pl4nted-s3cr3t");

/// Sends one request through a gateway that trusts this authority.
fn asked(api: &Api, authority: &str, request: &str) -> (tidegate_testkit::http_client::HttpResponse, String) {
    let trusted = ScratchDir::new();
    let file = trusted.write("ca.pem", authority);
    let (mut gateway, port) = gateway(&api.policy(), &[PLANTED, ("SSL_CERT_FILE", file.to_str().unwrap())]);
    let answer = HttpClient::connect(port).unwrap().request(request);
    gateway.send_signal("TERM");
    gateway.wait().expect("the gateway ends");
    (answer, gateway.read_file("stderr"))
}

#[test]
fn http2_is_used_where_offered() {
    for (offered, version) in [(&["h2", "http/1.1"][..], "HTTP/2.0"), (&["http/1.1"], "HTTP/1.1"), (&[], "HTTP/1.1")] {
        let api = Api::start(offered);
        let takes_trailers = "GET /api/x HTTP/1.1\r\nHost: 127.0.0.1\r\nTE: trailers\r\nConnection: TE\r\n\r\n";
        let (answer, log) = asked(&api, &api.authority, takes_trailers);
        assert_eq!((answer.status, answer.body.as_str()), (200, format!("over {version}").as_str()), "{offered:?}");
        assert_eq!(api.seen(), [format!("{version} localhost:{} /v1/x Bearer {} te: trailers", api.port, PLANTED.1)]);
        assert!(log.contains(" TRACE "));
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(PLANTED.1)).collect();
        assert!(lines.is_empty(), "{}", lines.join("\n"));
    }
}

#[test]
fn upgrades_over_tls_use_http1() {
    let api = Api::start(&["h2", "http/1.1"]);
    let upgrading = "GET /api/x HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    let (answer, _) = asked(&api, &api.authority, upgrading);
    assert_eq!((answer.status, answer.body.as_str()), (200, "over HTTP/1.1"));
    assert_eq!(api.seen(), [format!("HTTP/1.1 localhost:{} /v1/x Bearer {} te: of this hop", api.port, PLANTED.1)]);
}

#[test]
fn untrusted_certificates_receive_no_request() {
    let (api, other) = (Api::start(&["h2", "http/1.1"]), Api::start(&[]));
    let post = "POST /api/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\norder";
    let (answer, _) = asked(&api, &other.authority, post);
    assert_eq!(answer.status, 502, "{}", answer.body);
    let expected = "{\"error\":\"RetriesExhaustedError\",\"message\":\"api: none of 3 attempts succeeded: \
        the request got no reply: can't connect to the provider: invalid peer certificate: UnknownIssuer\",\
        \"provider\":\"api\",\"attempts\":3}";
    assert_eq!(answer.body, expected);
    // Nothing was sent, so a retry was possible with any method.
    assert_eq!(*api.handshakes.lock().unwrap(), [false; 3]);
    assert_eq!(api.seen(), Vec::<String>::new());
}
