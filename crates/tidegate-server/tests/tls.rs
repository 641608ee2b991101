//! TLS of listeners: certificates by name, their replacement, and certificates of clients.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tidegate_policy::{Policy, PolicySources};
use tidegate_server::Server;
use tidegate_testkit::servers::require_program;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Longer than any test takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// An authority, and a directory with its certificates.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    directory: tempfile::TempDir,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test authority");
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("ca.pem"), issuer.pem()).unwrap();
        Self { issuer, directory }
    }

    fn path(&self, file: &str) -> String {
        self.directory.path().join(file).display().to_string()
    }

    /// Writes `FILE.pem` and `FILE.key`: a certificate for this name, which is also its subject's.
    fn issue(&self, file: &str, name: &str, last_year: i32) {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_after = rcgen::date_time_ymd(last_year, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.path(&format!("{file}.key")), key.serialize_pem()).unwrap();
        std::fs::write(self.path(&format!("{file}.pem")), certificate.pem()).unwrap();
    }

    /// A client that trusts the authority, with a certificate if there is one.
    fn client(&self, certificate: Option<&str>) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(Path::new(&self.path("ca.pem"))).unwrap()).unwrap();
        let builder = ClientConfig::builder().with_root_certificates(roots);
        let config = match certificate {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let chain = vec![CertificateDer::from_pem_file(self.path(&format!("{file}.pem"))).unwrap()];
                let key = PrivateKeyDer::from_pem_file(self.path(&format!("{file}.key"))).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        TlsConnector::from(Arc::new(config))
    }
}

#[derive(Clone, Copy)]
struct Gate {
    inbound: SocketAddr,
    admin: SocketAddr,
}

async fn start(rest: &str) -> Gate {
    let echo = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("http://{}", echo.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = echo.accept().await.unwrap();
            tokio::spawn(async move {
                let mut buffer = [0; 16 << 10];
                while let Ok(count @ 1..) = stream.read(&mut buffer).await {
                    let head = String::from_utf8_lossy(&buffer[..count]).into_owned();
                    let reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {count}\r\n\r\n{head}");
                    stream.write_all(reply.as_bytes()).await.unwrap();
                }
            });
        }
    });
    let sources = PolicySources::new().file("test.toml", rest).env([
        ("TIDEGATE__INBOUND__UPSTREAM", upstream.as_str()),
        ("TIDEGATE__INBOUND__LISTEN", "127.0.0.1:0"),
        ("TIDEGATE__ADMIN__LISTEN", "127.0.0.1:0"),
        ("TIDEGATE__API__LISTEN", "off"),
    ]);
    let policy = Policy::load(sources).unwrap_or_else(|errors| panic!("{errors}"));
    let bound = Server::new(&policy).bind().unwrap();
    let gate = Gate { inbound: bound.inbound().unwrap(), admin: bound.admin().unwrap() };
    tokio::spawn(bound.run(std::future::pending()));
    gate
}

async fn connect(client: &TlsConnector, gate: Gate, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(gate.inbound).await?;
    client.connect(ServerName::try_from(name.to_owned()).unwrap(), stream).await
}

/// Sends a request and reads the head of its reply, with what has come behind it.
async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), request: &str) -> std::io::Result<String> {
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let (mut reply, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let count = tokio::time::timeout(PATIENCE, stream.read(&mut buffer)).await.expect("a reply in time")?;
        reply.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&reply).into_owned();
        let body = text.split_once("\r\n\r\n").map(|(head, body)| (head.to_ascii_lowercase(), body.len()));
        let is_whole = body.is_some_and(|(head, length)| {
            let declared = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            declared.is_none_or(|declared| length >= declared.parse().unwrap())
        });
        if is_whole || count == 0 {
            return Ok(text);
        }
    }
}

const REQUEST: &str = "GET / HTTP/1.1\r\nhost: a.test\r\n\r\n";

async fn admin(gate: Gate, path: &str) -> String {
    let mut stream = TcpStream::connect(gate.admin).await.unwrap();
    ask(&mut stream, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await.unwrap()
}

/// The value of a metric with these labels; 0 without one.
async fn metric(gate: Gate, name: &str) -> u64 {
    let page = admin(gate, "/metrics").await;
    page.lines().find_map(|line| line.strip_prefix(name)).map_or(0, |count| count.trim().parse().unwrap())
}

fn tls(authority: &Authority, files: &[&str], rest: &str) -> String {
    let list = |end: &str| {
        let paths: Vec<String> =
            files.iter().map(|file| format!("{:?}", authority.path(&format!("{file}.{end}")))).collect();
        format!("[{}]", paths.join(", "))
    };
    format!("tls = {{ certificates = {}, keys = {}{rest} }}\n", list("pem"), list("key"))
}

/// The certificate that the gate shows for this name.
async fn shown(authority: &Authority, gate: Gate, name: &str) -> Vec<u8> {
    let stream = connect(&authority.client(None), gate, name).await.unwrap();
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

#[tokio::test]
async fn certificates_are_chosen_by_name() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    authority.issue("b", "*.b.test", 2099);
    let gate = start(&format!("[inbound]\n{}", tls(&authority, &["a", "b"], ""))).await;
    for name in ["a.test", "www.b.test"] {
        let mut stream = connect(&authority.client(None), gate, name).await.unwrap();
        let reply = ask(&mut stream, REQUEST).await.unwrap();
        assert!(reply.starts_with("HTTP/1.1 200 ") && reply.contains("x-forwarded-proto: https\r\n"), "{reply}");
    }
    let unknown = connect(&authority.client(None), gate, "c.test").await.unwrap_err().to_string();
    assert!(unknown.contains("NotValidForName") || unknown.contains("not valid for name"), "{unknown}");
}

#[tokio::test]
async fn plain_http_on_a_tls_port_is_refused() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!("[inbound]\n{}", tls(&authority, &["a"], ""))).await;
    let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
    let reply = ask(&mut stream, REQUEST).await.unwrap();
    assert!(reply.starts_with("HTTP/1.1 400 ") && reply.contains("https://"), "{reply}");
    assert_eq!(metric(gate, "tidegate_rejections_total{reason=\"plain_http\"}").await, 1);
}

#[tokio::test]
async fn slow_and_broken_handshakes_are_closed() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let policy = format!("[inbound]\n{}[inbound.timeouts]\nheader = \"1s\"\n", tls(&authority, &["a"], ""));
    let gate = start(&policy).await;
    for bytes in [&b"\x16\x03\x01\x02\x00"[..], b"\x16nonsense that isn't a handshake"] {
        let mut stream = TcpStream::connect(gate.inbound).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut rest)).await.expect("an end in time");
    }
    assert_eq!(metric(gate, "tidegate_rejections_total{reason=\"tls_handshake\"}").await, 2);
}

#[tokio::test]
async fn replaced_certificates_are_served_without_a_cut() {
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!("[inbound]\n{}", tls(&authority, &["a"], ""))).await;
    let mut open = connect(&authority.client(None), gate, "a.test").await.unwrap();
    ask(&mut open, REQUEST).await.unwrap();
    let first = shown(&authority, gate, "a.test").await;
    let failed = "tidegate_certificate_reloads_total{listener=\"inbound\",result=\"failed\"}";
    let until_failed = async |count: u64| {
        let reached = async {
            while metric(gate, failed).await < count {
                tokio::time::sleep(Duration::from_millis(50)).await
            }
        };
        tokio::time::timeout(PATIENCE, reached).await.expect("a failed reload in time");
    };
    // An expired certificate, one with another key, and a file that is no PEM.
    authority.issue("a", "a.test", 2020);
    until_failed(1).await;
    assert_eq!(shown(&authority, gate, "a.test").await, first);
    let failures = metric(gate, failed).await;
    std::fs::write(authority.path("a.pem"), authority.issuer.pem()).unwrap();
    until_failed(failures + 1).await;
    let failures = metric(gate, failed).await;
    std::fs::write(authority.path("a.pem"), "nothing").unwrap();
    until_failed(failures + 1).await;
    assert_eq!(shown(&authority, gate, "a.test").await, first);
    let events = admin(gate, "/v1/state").await;
    assert!(events.starts_with("HTTP/1.1 200 "));

    authority.issue("a", "a.test", 2098);
    let replaced = async {
        while shown(&authority, gate, "a.test").await == first {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, replaced).await.expect("the new certificate in time");
    assert!(ask(&mut open, REQUEST).await.unwrap().starts_with("HTTP/1.1 200 "), "the open connection stays");
    let page = admin(gate, "/metrics").await;
    let expiry =
        format!("tidegate_certificate_expiry_time_seconds{{listener=\"inbound\",file={:?}}} ", authority.path("a.pem"));
    let at: f64 = page.lines().find_map(|line| line.strip_prefix(&expiry)).unwrap().parse().unwrap();
    assert_eq!(at, 4_039_372_800.0, "2098-01-01");
}

#[tokio::test]
async fn client_certificates_are_required_or_counted() {
    let authority = Authority::new();
    for (file, name) in [("a", "a.test"), ("alice", "alice"), ("bob", "bob")] {
        authority.issue(file, name, 2099);
    }
    let ca = authority.path("ca.pem");
    let required = start(&format!("[inbound]\n{}", tls(&authority, &["a"], &format!(", client_ca = {ca:?}")))).await;
    let refused = async { ask(&mut connect(&authority.client(None), required, "a.test").await?, REQUEST).await };
    assert!(refused.await.is_err());
    let mut stream = connect(&authority.client(Some("alice")), required, "a.test").await.unwrap();
    assert!(ask(&mut stream, REQUEST).await.unwrap().starts_with("HTTP/1.1 200 "));
    assert_eq!(metric(required, "tidegate_rejections_total{reason=\"tls_handshake\"}").await, 1);

    let rest = format!(", client_ca = {ca:?}, client_certificates = \"optional\"");
    let optional = start(&format!(
        "[inbound]\n{}[inbound.action.a]\nmatch = {{ path = \"/\" }}\nkey = [\"client_cert\"]\nlimit = \"1 per 1h\"\n",
        tls(&authority, &["a"], &rest)
    ))
    .await;
    for (client, expected) in
        [(Some("alice"), "200"), (Some("bob"), "200"), (Some("alice"), "429"), (None, "200"), (None, "429")]
    {
        let mut stream = connect(&authority.client(client), optional, "a.test").await.unwrap();
        let reply = ask(&mut stream, REQUEST).await.unwrap();
        assert!(reply.starts_with(&format!("HTTP/1.1 {expected} ")), "{client:?}: {reply}");
    }
}

#[test]
fn unusable_certificates_prevent_the_start() {
    let authority = Authority::new();
    authority.issue("old", "a.test", 2020);
    for (files, expected) in [("old", "expired"), ("none", "none.pem")] {
        let policy =
            format!("[inbound]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://a\"\n{}", tls(&authority, &[files], ""));
        let policy = Policy::load(PolicySources::new().file("test.toml", &policy)).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let error = Server::new(&policy).bind().err().unwrap().to_string();
        assert!(error.starts_with("inbound.tls: ") && error.contains(expected), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn old_protocol_versions_are_refused() {
    let Some(openssl) = require_program("openssl") else { return };
    let authority = Authority::new();
    authority.issue("a", "a.test", 2099);
    let gate = start(&format!("[inbound]\n{}", tls(&authority, &["a"], ""))).await;
    for (version, is_accepted) in [("-tls1", false), ("-tls1_1", false), ("-tls1_2", true), ("-tls1_3", true)] {
        let address = gate.inbound.to_string();
        let mut command = std::process::Command::new(&openssl);
        command.args(["s_client", "-connect", &address, "-servername", "a.test", "-verify_return_error", "-CAfile"]);
        command.arg(authority.path("ca.pem")).args(["-cipher", "ALL:@SECLEVEL=0", "-brief", version]);
        let output = command.stdin(std::process::Stdio::null()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.success(), is_accepted, "{version}: {text}");
        assert_eq!(text.contains("CONNECTION ESTABLISHED"), is_accepted, "{version}: {text}");
    }
}
