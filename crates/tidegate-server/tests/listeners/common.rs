//! A gate, and clients that send it bytes.

use std::net::SocketAddr;
use std::time::Duration;

use tidegate_policy::{Policy, PolicySources};
use tidegate_server::Server;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// Longer than any test takes, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A running gate, with its proxy and its admin listener.
#[derive(Clone, Copy)]
pub(crate) struct Gate {
    pub(crate) inbound: SocketAddr,
    pub(crate) admin: SocketAddr,
}

/// Starts a gate with this policy in front of a server that answers with the head that it receives.
pub(crate) async fn start(text: &str) -> Gate {
    start_before(&format!("http://{}", start_echo(None).await), text).await
}

/// Starts a gate with this policy in front of this server.
pub(crate) async fn start_before(upstream: &str, text: &str) -> Gate {
    start_until(upstream, text, std::future::pending())
}

/// Starts a gate that shuts down when `stop` ends.
pub(crate) fn start_until(upstream: &str, text: &str, stop: impl Future<Output = ()> + Send + 'static) -> Gate {
    let sources = PolicySources::new().file("test.toml", text).env([
        ("TIDEGATE__INBOUND__UPSTREAM", upstream),
        ("TIDEGATE__INBOUND__LISTEN", "127.0.0.1:0"),
        ("TIDEGATE__ADMIN__LISTEN", "127.0.0.1:0"),
        ("TIDEGATE__API__LISTEN", "off"),
    ]);
    let policy = Policy::load(sources).unwrap_or_else(|errors| panic!("{errors}"));
    let bound = Server::new(&policy).bind().unwrap();
    let gate = Gate { inbound: bound.inbound().unwrap(), admin: bound.admin().unwrap() };
    tokio::spawn(bound.run(stop));
    gate
}

/// Starts a server that answers with the head that it receives, with TLS if there is an acceptor.
pub(crate) async fn start_echo(tls: Option<TlsAcceptor>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let ((stream, _), tls) = (listener.accept().await.unwrap(), tls.clone());
            tokio::spawn(async move {
                match tls {
                    None => echo(stream).await,
                    Some(tls) => {
                        if let Ok(stream) = tls.accept(stream).await {
                            echo(stream).await;
                        }
                    }
                }
            });
        }
    });
    address
}

pub(crate) async fn echo(mut stream: impl AsyncRead + AsyncWrite + Unpin) {
    let mut buffer = [0; 16 << 10];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let head = String::from_utf8_lossy(&buffer[..count]).into_owned();
        let reply = format!("HTTP/1.1 200 OK\r\ncontent-length: {count}\r\n\r\n{head}");
        stream.write_all(reply.as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
    }
}

/// Opens a connection and sends these bytes.
pub(crate) async fn send(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// Reads until the end of a connection.
pub(crate) async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut reply = Vec::new();
    // A connection that is closed with unread bytes is reset.
    let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut reply)).await.expect("an end in time");
    String::from_utf8_lossy(&reply).into_owned()
}

/// Sends bytes over a new connection, and returns all that comes back until its end.
pub(crate) async fn exchange(address: SocketAddr, bytes: &[u8]) -> String {
    read_to_end(&mut send(address, bytes).await).await
}

/// Waits until a check is true.
pub(crate) async fn until(what: &str, check: impl AsyncFn() -> bool) {
    let reached = async {
        while !check().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, reached).await.unwrap_or_else(|_| panic!("{what}"));
}

/// Sends a request and reads the head of its reply, with what has come behind it.
pub(crate) async fn ask(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), request: &str) -> std::io::Result<String> {
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

pub(crate) const REQUEST: &str = "GET / HTTP/1.1\r\nhost: a.test\r\n\r\n";

pub(crate) async fn admin(gate: Gate, path: &str) -> String {
    let mut stream = TcpStream::connect(gate.admin).await.unwrap();
    ask(&mut stream, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")).await.unwrap()
}

/// The value of a metric with these labels; 0 without one.
pub(crate) async fn metric(gate: Gate, name: &str) -> u64 {
    let page = admin(gate, "/metrics").await;
    page.lines().find_map(|line| line.strip_prefix(name)).map_or(0, |count| count.trim().parse().unwrap())
}

/// The number of rejections for this reason.
pub(crate) async fn rejections(gate: Gate, reason: &str) -> u64 {
    metric(gate, &format!("tidegate_rejections_total{{reason=\"{reason}\"}}")).await
}

/// The bytes of a request that is its connection's last.
pub(crate) const LAST_REQUEST: &str = "GET / HTTP/1.1\r\nhost: a.test\r\nconnection: close\r\n\r\n";
