//! `tidegate demo`: a web server, a gate in front of it, and a replay, all in one process.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HOST, RETRY_AFTER};
use http::uri::Authority;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tidegate_policy::{Policy, PolicySources};
use tidegate_replay::{FieldNames, LogReplay};
use tidegate_server::Server;
use tokio::net::TcpListener;

use crate::gate_client::{self, GateAddress};
use crate::policy::{failure, print};
use crate::{CallArgs, CliOutcome, CommandResult, GateArgs, api_client};

/// The demo's limit on log-ins.
const LOGIN: &str = r#"[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "5 per 60s"
penalty = { base = "2s", cap = "1h" }
"#;
/// A morning's requests to a small site; one of its clients guesses passwords.
const ACCESS_LOG: &str = include_str!("demo/access.log");
/// The headers of a response that are shown.
const SHOWN_HEADERS: [&str; 2] = ["retry-after", "ratelimit"];

/// Runs the demo.
pub(crate) fn run() -> CommandResult {
    try_run().map_err(|error| failure(format!("the demo can't go on: {error}")))?;
    Ok(CliOutcome::Done)
}

fn try_run() -> Result<(), Box<dyn Error + Send + Sync>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (gate, api) = runtime.block_on(start_servers())?;
    print(&format!("A web server, and a gate in front of it at http://{gate}. The gate's policy says:\n\n{LOGIN}\n"));

    print("Five log-ins pass. The sixth gets a 429, which says when to come back:\n\n");
    let mut wait = 0;
    for _ in 0..6 {
        wait = runtime.block_on(log_in(gate))?;
    }
    print(&format!("\nThe wait is true: {wait} seconds later, the next one passes.\n\n"));
    std::thread::sleep(Duration::from_secs(wait));
    runtime.block_on(log_in(gate))?;

    print("\nEvery decision can be explained, by `tidegate explain login --ip 127.0.0.1`:\n\n");
    let call = CallArgs {
        action: Some("login".to_owned()),
        ip: Some("127.0.0.1".to_owned()),
        gate: GateArgs { url: Some(format!("http://{api}")), ..GateArgs::default() },
        ..CallArgs::default()
    };
    let _ = api_client::explain(&call);

    print("\nA policy can be tried on yesterday's requests, by `tidegate replay access.log`:\n\n");
    let policy = Policy::load(PolicySources::new().file("demo.toml", LOGIN))?;
    let mut replay = LogReplay::new("this policy", &policy, FieldNames::default());
    replay.read("access.log", ACCESS_LOG.as_bytes(), None)?;
    print(&replay.findings().table());
    print("\n`tidegate serve` runs the gate in front of http://127.0.0.1:3000; `tidegate --help` has the rest.\n");
    Ok(())
}

/// Starts the web server and the gate on free ports. Returns the addresses of the gate and of its API.
async fn start_servers() -> Result<(SocketAddr, SocketAddr), Box<dyn Error + Send + Sync>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let upstream = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let hello = service_fn(|_| async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("welcome")))) });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), hello));
        }
    });
    let file = format!(
        "[inbound]\nlisten = \"127.0.0.1:0\"\nupstream = \"http://{upstream}\"\n{LOGIN}[api]\nlisten = \"127.0.0.1:0\"\n\
         [admin]\nlisten = \"off\"\n"
    );
    let policy = Policy::load(PolicySources::new().file("demo.toml", file))?;
    let server = Server::new(&policy).bind()?;
    let (gate, api) = server.inbound().zip(server.api()).ok_or("no address")?;
    tokio::spawn(server.run(std::future::pending()));
    Ok((gate, api))
}

/// Logs in once and prints the answer. Returns the seconds that it asks to wait for.
async fn log_in(gate: SocketAddr) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let authority: Authority = gate.to_string().parse()?;
    let request = Request::post("/login").header(HOST, authority.as_str()).body(Full::default())?;
    let response = gate_client::exchange(&GateAddress::Tcp(authority), request).await?;
    let mut text = format!("POST /login  {}\n", response.status());
    if response.status() != StatusCode::OK {
        for name in SHOWN_HEADERS {
            let value = response.headers().get(name).map(|value| value.to_str()).transpose()?;
            text += &value.map_or(String::new(), |value| format!("  {name}: {value}\n"));
        }
        text += &format!("  {}\n", String::from_utf8_lossy(response.body()));
    }
    print(&text);
    let wait = response.headers().get(RETRY_AFTER).map(|wait| wait.to_str()).transpose()?;
    Ok(wait.map(str::parse).transpose()?.unwrap_or(0))
}
