//! A scripted provider, and a gateway in front of it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tidegate::clock::{ManualClock, SystemClock};
use tidegate::outbound::Outbound;
use tidegate::store::Store;
use tidegate::{Clock, Gate};
use tidegate_policy::{Policy, PolicySources};
use tidegate_server::{ReloadHandle, Server, ShutdownSummary};
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::wire::Peer;

/// Limits and retries that affect no test.
pub(crate) const FREE: &str = "limit = \"1000/s burst 1000\"\nretry = { base = \"1ms\", cap = \"1ms\" }\n";
/// One attempt per call.
pub(crate) const ONCE: &str = "limit = \"1000/s burst 1000\"\nretry = { max_attempts = 1 }\n";
/// The provider's credential, sent as a bearer token.
pub(crate) const BEARER: &str = "auth = \"bearer\"\ncredentials = \"env:A\"\n";
/// The value of the credential `env:A`.
pub(crate) const PLANTED: &str = "pl4nted-s3cr3t-a";

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    pub(crate) method: String,
    pub(crate) target: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Arrived {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// A provider's reply.
pub(crate) struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: String,
    takes: Duration,
}

impl Answer {
    pub(crate) fn new(status: u16, body: impl Into<String>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), takes: Duration::ZERO }
    }

    pub(crate) fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub(crate) fn taking(mut self, millis: u64) -> Self {
        self.takes = Duration::from_millis(millis);
        self
    }
}

/// A provider that answers the n-th request, counted from 0, by its script.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    arrived: Arc<Mutex<Vec<Arrived>>>,
    connections: Arc<AtomicUsize>,
}

impl Api {
    pub(crate) async fn start(script: impl Fn(usize, &Arrived) -> Answer + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), script)
    }

    pub(crate) fn on(
        listener: TcpListener,
        script: impl Fn(usize, &Arrived) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let api =
            Self { address: listener.local_addr().unwrap(), arrived: Arc::default(), connections: Arc::default() };
        let (arrived, script) = (Arc::clone(&api.arrived), Arc::new(script));
        let connections = Arc::clone(&api.connections);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.fetch_add(1, Ordering::Relaxed);
                stream.set_nodelay(true).unwrap();
                let (arrived, script) = (Arc::clone(&arrived), Arc::clone(&script));
                let service = service_fn(move |request: Request<Incoming>| {
                    let (arrived, script) = (Arc::clone(&arrived), Arc::clone(&script));
                    async move {
                        let (parts, body) = request.into_parts();
                        let request = Arrived {
                            method: parts.method.to_string(),
                            target: parts.uri.to_string(),
                            headers: parts.headers,
                            body: body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default(),
                        };
                        let number = {
                            let mut arrived = arrived.lock().unwrap();
                            arrived.push(request.clone());
                            arrived.len() - 1
                        };
                        let answer = script(number, &request);
                        tokio::time::sleep(answer.takes).await;
                        let mut response = Response::builder().status(answer.status);
                        for (name, value) in answer.headers {
                            response = response.header(name, value);
                        }
                        Ok::<_, Infallible>(response.body(Full::new(Bytes::from(answer.body))).unwrap())
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        api
    }

    pub(crate) fn arrived(&self) -> Vec<Arrived> {
        self.arrived.lock().unwrap().clone()
    }

    /// The number of accepted connections.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self) -> usize {
        self.arrived.lock().unwrap().len()
    }

    /// A policy with this provider as `api`.
    pub(crate) fn policy(&self, settings: &str) -> String {
        provider(self.address, settings)
    }
}

/// A policy with a provider called `api` at this address.
pub(crate) fn provider(address: SocketAddr, settings: &str) -> String {
    format!("[outbound.provider.api]\nbase_url = \"http://{address}/v1\"\n{settings}")
}

/// A running gateway.
pub(crate) struct Gateway<C> {
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    /// The address of the inbound proxy, if there is one.
    pub(crate) inbound: Option<SocketAddr>,
    pub(crate) clock: C,
    pub(crate) reload: ReloadHandle,
    /// The text that a reload reads.
    pub(crate) file: Arc<Mutex<String>>,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<ShutdownSummary>,
}

impl<C> Gateway<C> {
    /// Sends these bytes on a new connection.
    pub(crate) async fn ask(&self, request: impl AsRef<[u8]>) -> String {
        Peer::connect(self.address).await.ask(request).await
    }

    /// Sends the same request `count` times at once.
    pub(crate) async fn ask_at_once(&self, count: usize, request: &str) -> Vec<String> {
        join_all((0..count).map(|_| self.ask(request))).await
    }

    /// Reloads this policy, and returns the settings that need a restart, or the error.
    pub(crate) async fn reload(&self, policy: &str) -> Result<Vec<&'static str>, String> {
        policy.clone_into(&mut self.file.lock().unwrap());
        self.reload.reload().await.map(|report| report.restart_needed).map_err(|error| error.to_string())
    }

    pub(crate) async fn stop(self) -> ShutdownSummary {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap()
    }
}

/// A gateway on a manual clock.
pub(crate) fn standing(policy: &str) -> Gateway<ManualClock> {
    gateway(policy, ManualClock::default())
}

/// A gateway in real time.
pub(crate) fn running(policy: &str) -> Gateway<SystemClock> {
    gateway(policy, SystemClock::new())
}

/// A gateway of this policy. The value of a credential is `pl4nted-s3cr3t-` and the variable's name in lower case.
fn gateway<C: Clock + Clone>(policy: &str, clock: C) -> Gateway<C> {
    serve(policy, |policy| {
        (Gate::in_memory(policy, clock.clone()), Outbound::in_memory(policy, clock.clone()).unwrap())
    })
}

/// As [`gateway`], with these machines.
pub(crate) fn serve<S: Store, C: Clock + Clone>(
    policy: &str,
    machines: impl FnOnce(&Policy) -> (Gate<S, C>, Outbound<S, C>),
) -> Gateway<C> {
    let file = Arc::new(Mutex::new(policy.to_owned()));
    let policy = Policy::load(sources(policy)).unwrap_or_else(|errors| panic!("{errors}"));
    let (gate, outbound) = machines(&policy);
    let clock = gate.clock().clone();
    let server = Server::from_gate(gate, &policy).outbound(outbound);
    let server = server.policy_source({
        let file = Arc::clone(&file);
        move |present| Ok(present.load_next(sources(&file.lock().unwrap()))?)
    });
    let bound = server.env(|name| Some(format!("pl4nted-s3cr3t-{}", name.to_lowercase()))).bind().unwrap();
    let reload = bound.reload_handle();
    let address = SocketAddr::from(([127, 0, 0, 1], bound.outbound().unwrap().port()));
    let admin = bound.admin().unwrap();
    let inbound = bound.inbound();
    let (stop, stopped) = oneshot::channel::<()>();
    let ended = tokio::spawn(bound.run(async {
        let _ = stopped.await;
    }));
    Gateway { address, admin, inbound, clock, reload, file, stop, ended }
}

fn sources(policy: &str) -> PolicySources {
    let listeners = [("TIDEGATE__API__LISTEN", "off"), ("TIDEGATE__ADMIN__LISTEN", "127.0.0.1:0")];
    let sources = PolicySources::new().file("test.toml", policy).env(listeners);
    if policy.contains("listen") { sources } else { sources.env([("TIDEGATE__OUTBOUND__LISTEN", "127.0.0.1:0")]) }
}

/// A provider that reads one request per connection, answers with these bytes and closes.
pub(crate) async fn closing(answer: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let mut peer = Peer::over(listener.accept().await.unwrap().0);
            peer.message().await;
            peer.send(answer).await;
        }
    });
    address
}

/// A request with these header lines, each with its line end, and this body.
pub(crate) fn request(method: &str, path: &str, lines: &str, body: &str) -> String {
    let length = if body.is_empty() { String::new() } else { format!("content-length: {}\r\n", body.len()) };
    format!("{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}{length}\r\n{body}")
}

/// A GET request without further headers or a body.
pub(crate) fn get(path: &str) -> String {
    request("GET", path, "", "")
}
