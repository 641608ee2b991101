//! A gate in this process, scripted servers behind it, and clients that send exact bytes.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tidegate::Gate;
use tidegate::clock::ManualClock;
use tidegate::store::Store;
use tidegate_policy::{LogConfig, Policy, PolicySources};
use tidegate_server::{ReloadHandle, ServeError, Server, ShutdownSummary, log};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Longer than any test takes, unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A running gate.
pub(crate) struct Running {
    pub(crate) inbound: SocketAddr,
    pub(crate) api: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) clock: ManualClock,
    pub(crate) reload: ReloadHandle,
    /// The text that a reload reads.
    pub(crate) file: Arc<Mutex<String>>,
    stop: Option<oneshot::Sender<()>>,
    ended: Option<JoinHandle<ShutdownSummary>>,
}

impl Running {
    /// Stops the gate. The handle returns its shutdown summary.
    pub(crate) fn stop(&mut self) -> JoinHandle<ShutdownSummary> {
        self.stop.take().unwrap().send(()).unwrap();
        self.ended.take().unwrap()
    }
}

/// Reads a policy with ports that the system selects.
pub(crate) fn policy(upstream: SocketAddr, rest: &str) -> Policy {
    Policy::load(sources(&format!("http://{upstream}"), rest)).unwrap_or_else(|errors| panic!("{errors}"))
}

fn sources(upstream: &str, rest: &str) -> PolicySources {
    let ports = [("TIDEGATE__INBOUND__LISTEN", "127.0.0.1:0"), ("TIDEGATE__API__LISTEN", "127.0.0.1:0")];
    // The host names that the tests' requests use.
    let hosts = [("TIDEGATE__API__HOSTS", "gate.test,a"), ("TIDEGATE__ADMIN__HOSTS", "gate.test")];
    let more = [("TIDEGATE__ADMIN__LISTEN", "127.0.0.1:0")].into_iter().chain(hosts);
    // A file that names an upstream means another one.
    let upstream = [("TIDEGATE__INBOUND__UPSTREAM", upstream)].into_iter().filter(|_| !rest.contains("upstream ="));
    PolicySources::new().file("test.toml", rest).env(ports).env(more).env(upstream)
}

/// Starts a gate in front of this upstream.
pub(crate) async fn start(upstream: SocketAddr, rest: &str) -> Running {
    try_start(&policy(upstream, rest), |_| None).unwrap()
}

/// Starts a gate of this policy. `env` looks up its tokens.
pub(crate) fn try_start(
    policy: &Policy,
    env: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
) -> Result<Running, ServeError> {
    serve(Gate::in_memory(policy, ManualClock::default()), policy, env)
}

/// Starts this gate.
pub(crate) fn serve<S: Store>(
    gate: Gate<S, ManualClock>,
    policy: &Policy,
    env: impl Fn(&str) -> Option<String> + Send + Sync + 'static,
) -> Result<Running, ServeError> {
    let clock = gate.clock().clone();
    let (file, upstream) = (Arc::<Mutex<String>>::default(), policy.inbound().upstream.clone());
    let server = Server::from_gate(gate, policy).env(env).policy_source({
        let (file, upstream) = (Arc::clone(&file), upstream.map(|upstream| upstream.to_string()).unwrap_or_default());
        move |present| Ok(present.load_next(sources(&upstream, &file.lock().unwrap()))?)
    });
    let bound = server.bind()?;
    let reload = bound.reload_handle();
    let (stop, stopped) = oneshot::channel::<()>();
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 1));
    let (inbound, api, admin) = (bound.inbound(), bound.api(), bound.admin());
    let ended = tokio::spawn(bound.run(async {
        let _ = stopped.await;
    }));
    Ok(Running {
        inbound: inbound.unwrap_or(nowhere),
        api: api.unwrap_or(nowhere),
        admin: admin.unwrap_or(nowhere),
        clock,
        reload,
        file,
        stop: Some(stop),
        ended: Some(ended),
    })
}

/// An upstream that records each request's bytes and answers each with the same bytes. It reads bodies of known length
/// and chunked ones, and keeps its connections open.
#[derive(Clone)]
pub(crate) struct Echo {
    pub(crate) address: SocketAddr,
    pub(crate) seen: Arc<Mutex<Vec<String>>>,
}

impl Echo {
    pub(crate) async fn start(answer: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let echo = Self { address: listener.local_addr().unwrap(), seen: Arc::default() };
        let seen = Arc::clone(&echo.seen);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let seen = Arc::clone(&seen);
                tokio::spawn(async move {
                    let mut peer = Peer::over(stream);
                    while let Some(message) = peer.try_message().await {
                        seen.lock().unwrap().push(message);
                        if peer.stream.write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        echo
    }

    pub(crate) fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

/// A plain response of an upstream.
pub(crate) const HELLO: &str = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";

/// An address without a listener.
pub(crate) fn nobody() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], tidegate_testkit::servers::free_port()))
}

/// One end of a connection that reads messages one by one.
pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    rest: Vec<u8>,
}

impl Peer {
    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self::over(TcpStream::connect(address).await.unwrap())
    }

    pub(crate) fn over(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self { stream, rest: Vec::new() }
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).await.unwrap();
    }

    /// Sends, as far as the other end takes it.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.write_all(bytes.as_ref()).await
    }

    /// Sends a request and reads its response.
    pub(crate) async fn ask(&mut self, bytes: impl AsRef<[u8]>) -> String {
        self.send(bytes).await;
        self.message().await
    }

    /// Reads the next message.
    pub(crate) async fn message(&mut self) -> String {
        self.try_message().await.expect("a whole message before the end of the connection")
    }

    /// Reads the next message with its body as on the wire; `None` at the end of the connection.
    pub(crate) async fn try_message(&mut self) -> Option<String> {
        let head = loop {
            if let Some(at) = find(&self.rest, b"\r\n\r\n") {
                break at + 4;
            }
            self.more().await?;
        };
        let text = String::from_utf8_lossy(&self.rest[..head]).to_ascii_lowercase();
        let line =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_owned()));
        let no_body =
            text.starts_with("http/1.1 1") || text.starts_with("http/1.1 204") || text.starts_with("http/1.1 304");
        let end = if no_body {
            head
        } else if line("transfer-encoding:").is_some() {
            loop {
                if let Some(at) = find(&self.rest[head..], b"0\r\n") {
                    // Trailers end with an empty line.
                    let from = head + at + 3;
                    if self.rest[from..].starts_with(b"\r\n") {
                        break from + 2;
                    }
                    if let Some(at) = find(&self.rest[from..], b"\r\n\r\n") {
                        break from + at + 4;
                    }
                }
                self.more().await?;
            }
        } else {
            let length: usize = line("content-length:").map_or(0, |value| value.parse().unwrap());
            while self.rest.len() < head + length {
                self.more().await?;
            }
            head + length
        };
        let message: Vec<u8> = self.rest.drain(..end).collect();
        Some(String::from_utf8_lossy(&message).into_owned())
    }

    /// Reads this many bytes.
    pub(crate) async fn exactly(&mut self, count: usize) -> String {
        while self.rest.len() < count {
            self.more().await.expect("more bytes before the end of the connection");
        }
        String::from_utf8_lossy(&self.rest.drain(..count).collect::<Vec<_>>()).into_owned()
    }

    /// Reads everything up to the end of the connection.
    pub(crate) async fn all(&mut self) -> String {
        while self.more().await.is_some() {}
        String::from_utf8_lossy(&std::mem::take(&mut self.rest)).into_owned()
    }

    /// Returns true if the other end closes without another byte.
    pub(crate) async fn ends(&mut self) -> bool {
        self.rest.is_empty() && self.more().await.is_none()
    }

    async fn more(&mut self) -> Option<()> {
        let mut buffer = [0; 16 << 10];
        let read = tokio::time::timeout(PATIENCE, self.stream.read(&mut buffer)).await.expect("bytes in time");
        match read {
            Ok(0) | Err(_) => None,
            Ok(count) => {
                self.rest.extend_from_slice(&buffer[..count]);
                Some(())
            }
        }
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// A message without its `date`, which isn't predictable.
pub(crate) fn undated(message: &str) -> String {
    let kept: Vec<&str> =
        message.split("\r\n").filter(|line| !line.to_ascii_lowercase().starts_with("date: ")).collect();
    kept.join("\r\n")
}

/// The status of a response.
pub(crate) fn status(message: &str) -> u16 {
    message.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no status: {message:?}"))
}

/// The body of a message of known length.
pub(crate) fn body(message: &str) -> &str {
    message.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

/// A header's value.
pub(crate) fn header<'m>(message: &'m str, name: &str) -> Option<&'m str> {
    let (head, _) = message.split_once("\r\n\r\n")?;
    head.lines().skip(1).find_map(|line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// The JSON of a response.
pub(crate) fn json(message: &str) -> serde_json::Value {
    serde_json::from_str(body(message)).unwrap_or_else(|error| panic!("{error}: {message}"))
}

/// Sends one request on a new connection and reads its response.
pub(crate) async fn once(address: SocketAddr, request: impl AsRef<[u8]>) -> String {
    Peer::connect(address).await.ask(request).await
}

/// A GET request without further headers.
pub(crate) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: gate.test\r\n\r\n")
}

/// A POST request with JSON.
pub(crate) fn post(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: gate.test\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// The lines of the gate's log.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Lines {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// A subscriber that nobody uses. While there is only one, `tracing` turns off lines that another thread, which has
/// none, writes first.
static SECOND: OnceLock<tracing::Dispatch> = OnceLock::new();

/// Captures the log of this thread until the guard is dropped.
pub(crate) fn capture(format: &str) -> (Lines, tracing::subscriber::DefaultGuard) {
    SECOND.get_or_init(|| log::subscriber(&LogConfig::default(), None, std::io::sink).unwrap());
    let policy = Policy::load(PolicySources::new().file("t", format!("[log]\nformat = \"{format}\"\n"))).unwrap();
    let lines = Lines::default();
    let writer = lines.clone();
    let dispatch = log::subscriber(policy.log(), None, move || writer.clone()).unwrap();
    (lines, tracing::dispatcher::set_default(&dispatch))
}
