//! Measures requests through the gate, with proxies on core 0, and the client and the upstream on core 1.

mod grpc;
mod resp;
mod returns;
mod server;
mod steps;
mod throttle_http;
mod tls;
mod viewers;
mod wrk;

use std::sync::LazyLock;

use tidegate_testkit::servers::{RedisServer, free_port};

use crate::measure::run_on_core;
use crate::options::Options;
use crate::programs::{ProgramError, bench_program, system_program, tidegate_program};
use crate::rows::{BenchRow, FigureUnit};
use crate::subjects::OURS;
use server::{BenchServer, TempFolder};
use tls::{TlsFiles, TlsLoad};
use viewers::{Viewers, cpu_share};
use wrk::{RequestCounts, WrkClient, WrkRequest};

/// The work of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GateWork {
    Admitted,
    Refused,
    DecisionApi,
    /// The same with the dearest body that the API reads.
    DecisionApiDearest,
    Outbound,
    /// The same with rules and scopes.
    OutboundRules,
    /// Admitted and refused requests, with and without metrics.
    MetricsAdmitted,
    MetricsRefused,
    /// Admitted requests over TLS 1.3, on connections that stay open, or each on its own.
    TlsHttp1,
    TlsHttp2,
    TlsHandshake,
    TlsResumed,
}

impl GateWork {
    const ALL: [Self; 12] = [
        Self::Admitted,
        Self::Refused,
        Self::DecisionApi,
        Self::DecisionApiDearest,
        Self::Outbound,
        Self::OutboundRules,
        Self::MetricsAdmitted,
        Self::MetricsRefused,
        Self::TlsHttp1,
        Self::TlsHttp2,
        Self::TlsHandshake,
        Self::TlsResumed,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Admitted => "gate/admitted",
            Self::Refused => "gate/refused",
            Self::DecisionApi => "gate/decision-api",
            Self::DecisionApiDearest => "gate/decision-api-dearest",
            Self::Outbound => "gate/outbound",
            Self::OutboundRules => "gate/outbound-rules",
            Self::MetricsAdmitted => "gate/metrics-admitted",
            Self::MetricsRefused => "gate/metrics-refused",
            Self::TlsHttp1 => "gate/tls-http1",
            Self::TlsHttp2 => "gate/tls-http2",
            Self::TlsHandshake => "gate/tls-handshake",
            Self::TlsResumed => "gate/tls-resumed",
        }
    }

    fn has_tls(self) -> bool {
        matches!(self, Self::TlsHttp1 | Self::TlsHttp2 | Self::TlsHandshake | Self::TlsResumed)
    }

    /// Returns a client that sends the load.
    fn client(self, folder: &TempFolder) -> Result<LoadClient, ProgramError> {
        let tls_load = match self {
            Self::TlsHttp2 => TlsLoad::Http2,
            Self::TlsHandshake => TlsLoad::Handshakes,
            Self::TlsResumed => TlsLoad::ResumedHandshakes,
            _ => {
                let client = WrkClient::new(folder, CLIENT_CORE, CONNECTIONS, self.load())?;
                return Ok(LoadClient::Wrk(if self.has_tls() { client.over_tls() } else { client }));
            }
        };
        Ok(LoadClient::Tls(tls_load))
    }

    fn load(self) -> WrkRequest {
        match self {
            Self::Admitted
            | Self::MetricsAdmitted
            | Self::TlsHttp1
            | Self::TlsHttp2
            | Self::TlsHandshake
            | Self::TlsResumed => WrkRequest::Get { path: ADMITTED_PATH, refused: false },
            Self::Refused | Self::MetricsRefused => WrkRequest::Get { path: "/refuse", refused: true },
            Self::DecisionApi => WrkRequest::Post { path: "/v1/check", body: r#"{"action":"ask","ip":"192.0.2.7"}"# },
            Self::DecisionApiDearest => WrkRequest::Post { path: "/v1/check", body: &DEAREST_BODY },
            Self::Outbound | Self::OutboundRules => WrkRequest::Get { path: "/api/page", refused: false },
        }
    }
}

/// A question whose path is escaped twice, in JSON and as a path, and has nearly as many readings as may be decided about.
static DEAREST_BODY: LazyLock<String> = LazyLock::new(|| {
    let path = r"/\u0025\u0044\u0030\u0025\u0042\u0030".repeat(200);
    format!(r#"{{"ip":"192.0.2.7","path":"/{path}"}}"#)
});

/// The client of a row.
enum LoadClient {
    Wrk(WrkClient),
    Tls(TlsLoad),
}

impl LoadClient {
    fn run(&self, port: u16, seconds: u32) -> Result<RequestCounts, ProgramError> {
        match self {
            Self::Wrk(client) => client.run(port, seconds),
            Self::Tls(load) => load.run(CLIENT_CORE, port, ADMITTED_PATH, seconds),
        }
    }
}

/// A function that starts a subject in front of the upstream's port.
type StartServer = fn(&TempFolder, GateWork, u16) -> Result<BenchServer, ProgramError>;

/// The path of requests that are admitted.
const ADMITTED_PATH: &str = "/admit";
/// The core of every proxy.
const PROXY_CORE: &str = "0";
/// The core of the client and the upstream.
const CLIENT_CORE: &str = "1";
/// The port of an upstream that isn't called: that of the discard service.
const UNUSED_PORT: u16 = 9;
/// The number of people that look at the dashboard.
const VIEWERS: u32 = 10;
/// The program of throttlecrab's server.
const THROTTLECRAB: &str = "throttlecrab-server";
/// The number of simultaneous connections.
const CONNECTIONS: u32 = 50;

/// Measures the rows of the gate that the options select.
pub fn measure(options: &Options, on_row: &mut dyn FnMut(BenchRow)) {
    for work in GateWork::ALL {
        measure_pair(options, on_row, work.name(), |rows| run(options, work, rows));
    }
    resp::measure(options, on_row);
    grpc::measure(options, on_row);
    throttle_http::measure(options, on_row);
    steps::measure(options, on_row);
    returns::measure(options, on_row);
    let names = ["gate/viewers/idle", "gate/viewers/load"];
    if names.iter().any(|name| options.wants(name)) {
        let mut rows = names.map(|name| BenchRow::new(name, FigureUnit::Percent));
        if let Err(failure) = measure_viewers(options, &mut rows) {
            rows[0].skipped.push(failure.to_string());
        }
        rows.into_iter().for_each(&mut *on_row);
    }
    let name = "gate/one-client-of-redis";
    if options.wants(name) {
        let mut row = BenchRow::new(name, FigureUnit::Nanoseconds);
        if let Err(failure) = measure_one_client(options, &mut row) {
            row.skipped.push(failure.to_string());
        }
        on_row(row);
    }
}

/// Measures the share of a core that ten viewers of the dashboard cost, without other work and beside refusals. Each
/// round compares with no viewer.
fn measure_viewers(options: &Options, [idle, load]: &mut [BenchRow; 2]) -> Result<(), ProgramError> {
    let folder = TempFolder::new()?;
    let client = WrkClient::new(&folder, CLIENT_CORE, CONNECTIONS, GateWork::Refused.load())?;
    let admin = free_port();
    let policy = POLICY.replace("{admin}", &admin.to_string());
    let server = start_tidegate_with(&folder, GateWork::Refused, UNUSED_PORT, &policy)?;
    client.run(server.port, 1)?;
    let (rounds, seconds) = if options.quick { (3, 5) } else { (9, 10) };
    let (mut idle_shares, mut load_shares) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let without = cpu_share(&server, admin, 0, seconds)?;
        idle_shares.push(cpu_share(&server, admin, VIEWERS, seconds)? - without);
        let request_cost = |viewers| {
            let viewers = Viewers::start(viewers, admin);
            let before = server.cpu_seconds()?;
            let answered = client.run(server.port, seconds)?;
            let spent = server.cpu_seconds()? - before;
            viewers.check(answered.seconds)?;
            Ok::<_, ProgramError>((spent / answered.requests, answered.requests / answered.seconds))
        };
        let (without, _) = request_cost(0)?;
        let (with, rate) = request_cost(VIEWERS)?;
        load_shares.push((with - without) * rate * 100.0);
    }
    idle.push(OURS, idle_shares);
    load.push(OURS, load_shares);
    Ok(())
}

/// Measures decisions that one client requests one at a time: their time with Redis less their time in memory.
fn measure_one_client(options: &Options, row: &mut BenchRow) -> Result<(), ProgramError> {
    let folder = TempFolder::new()?;
    let client = WrkClient::new(&folder, CLIENT_CORE, 1, GateWork::DecisionApi.load())?;
    let redis =
        run_on_core(1, RedisServer::start).ok_or_else(|| ProgramError::new("redis-server", "is not installed"))?;
    let on_redis = format!("[store]\nurl = \"{}\"\n{POLICY}", redis.url());
    let mut servers = Vec::new();
    for policy in [&on_redis, POLICY] {
        let server = start_tidegate_with(&folder, GateWork::DecisionApi, UNUSED_PORT, policy)?;
        client.run(server.port, 1)?;
        servers.push(server);
    }
    let (rounds, seconds) = if options.quick { (3, 1) } else { (9, 3) };
    let mut longer = Vec::new();
    for _ in 0..rounds {
        let mut lengths = Vec::new();
        for server in &servers {
            let answered = client.run(server.port, seconds)?;
            lengths.push(answered.seconds * 1e9 / answered.requests);
        }
        longer.push(lengths[0] - lengths[1]);
    }
    row.push(OURS, longer);
    Ok(())
}

fn run(options: &Options, work: GateWork, rows: [&mut BenchRow; 2]) -> Result<(), ProgramError> {
    let folder = TempFolder::new()?;
    let client = work.client(&folder)?;
    let upstream = BenchServer::nginx(&folder, CLIENT_CORE, "upstream", "", UPSTREAM)?;
    let subjects: Vec<(&str, StartServer)> = match work {
        GateWork::Admitted => vec![
            (OURS, start_tidegate),
            ("nginx limit_req", start_nginx_limit_req),
            ("bare hyper-util proxy", start_bare),
        ],
        GateWork::Refused => {
            vec![(OURS, start_tidegate), ("nginx limit_req", start_nginx_limit_req), ("bare hyper 429", start_bare)]
        }
        GateWork::DecisionApi | GateWork::DecisionApiDearest => {
            vec![(OURS, start_tidegate), ("bare hyper POST", start_bare)]
        }
        GateWork::Outbound | GateWork::OutboundRules => {
            vec![(OURS, start_tidegate), ("bare hyper-util proxy", start_bare)]
        }
        GateWork::MetricsAdmitted | GateWork::MetricsRefused => {
            vec![(OURS, start_tidegate), ("metrics off", start_without_metrics)]
        }
        GateWork::TlsHttp1 | GateWork::TlsHttp2 | GateWork::TlsHandshake | GateWork::TlsResumed => {
            vec![(OURS, start_tidegate), ("nginx limit_req", start_nginx_limit_req)]
        }
    };
    let mut servers = Vec::new();
    for (name, start) in subjects {
        if options.wants_subject(name) {
            servers.push((name, start(&folder, work, upstream.port)));
        }
    }
    let seconds = if options.quick { 1 } else { 3 };
    compare(options, servers, rows, |_, server| client.run(server.port, seconds))
}

/// Measures servers in turns: the CPU time for 100,000 requests, and the requests per second. `load` sends load to a
/// server. One that didn't start is skipped.
fn compare(
    options: &Options,
    servers: Vec<(&'static str, Result<BenchServer, ProgramError>)>,
    [cpu, requests]: [&mut BenchRow; 2],
    load: impl Fn(&'static str, &BenchServer) -> Result<RequestCounts, ProgramError>,
) -> Result<(), ProgramError> {
    let mut running = Vec::new();
    for (name, started) in servers {
        match started {
            Ok(server) => running.push((name, server, Vec::new(), Vec::new())),
            Err(failure) => cpu.skipped.push(format!("{name}: {failure}")),
        }
    }
    for (name, server, ..) in &running {
        load(name, server)?;
    }
    let rounds = if options.quick { 3 } else { 9 };
    for round in 0..rounds {
        for place in 0..running.len() {
            let place = (place + round) % running.len();
            let (name, server, spent, rates) = &mut running[place];
            let before = server.cpu_seconds()?;
            let answered = load(name, server)?;
            let after = server.cpu_seconds()?;
            spent.push((after - before) / answered.requests * 100_000.0);
            rates.push(answered.requests / answered.seconds);
        }
    }
    for (name, _, spent, rates) in running {
        cpu.push(name, spent);
        requests.push(name, rates);
    }
    Ok(())
}

/// Measures a row's two figures, if the options select one of them.
fn measure_pair(
    options: &Options,
    on_row: &mut dyn FnMut(BenchRow),
    name: &str,
    run: impl FnOnce([&mut BenchRow; 2]) -> Result<(), ProgramError>,
) {
    let names = ["cpu", "requests"].map(|figure| format!("{name}/{figure}"));
    if !names.iter().any(|name| options.wants(name)) {
        return;
    }
    let [cpu, requests] = names;
    let mut cpu = BenchRow::new(cpu, FigureUnit::CpuSeconds);
    let mut requests = BenchRow::new(requests, FigureUnit::Requests);
    if let Err(failure) = run([&mut cpu, &mut requests]) {
        cpu.skipped.push(failure.to_string());
    }
    on_row(cpu);
    on_row(requests);
}

/// Starts throttlecrab's server with one of its protocols: `http`, `grpc` or `redis`.
fn start_throttlecrab(protocol: &str) -> Result<BenchServer, ProgramError> {
    let port = free_port();
    let arguments = [format!("--{protocol}"), format!("--{protocol}-port"), port.to_string()];
    BenchServer::start(PROXY_CORE, THROTTLECRAB, &system_program(THROTTLECRAB)?, &arguments, port)
}

fn start_bare(_: &TempFolder, work: GateWork, upstream: u16) -> Result<BenchServer, ProgramError> {
    let program = match work {
        GateWork::Refused | GateWork::MetricsRefused => "bare-refuser",
        GateWork::DecisionApi | GateWork::DecisionApiDearest => "bare-api",
        _ => "bare-proxy",
    };
    let port = free_port();
    let arguments = [port.to_string(), upstream.to_string()];
    BenchServer::start(PROXY_CORE, program, &bench_program(program)?, &arguments, port)
}

fn start_nginx_limit_req(folder: &TempFolder, work: GateWork, upstream: u16) -> Result<BenchServer, ProgramError> {
    let text = LIMIT_REQ.replace("{upstream}", &upstream.to_string());
    if !work.has_tls() {
        return BenchServer::nginx(folder, PROXY_CORE, "limit_req", "", &text);
    }
    let TlsFiles { certificate, key } = TlsFiles::new(folder)?;
    let (certificate, key) = (certificate.display(), key.display());
    let text = format!("ssl_certificate {certificate};\nssl_certificate_key {key};\nssl_protocols TLSv1.3;\n{text}");
    BenchServer::nginx(folder, PROXY_CORE, "limit_req", "ssl http2", &text)
}

fn start_tidegate(folder: &TempFolder, work: GateWork, upstream: u16) -> Result<BenchServer, ProgramError> {
    if work.has_tls() {
        let TlsFiles { certificate, key } = TlsFiles::new(folder)?;
        let tls = format!("[inbound]\ntls = {{ certificates = {certificate:?}, keys = {key:?} }}\n");
        return start_tidegate_with(folder, work, upstream, &POLICY.replacen("[inbound]\n", &tls, 1));
    }
    let policy = match work {
        GateWork::Outbound => OUTBOUND_POLICY.to_owned(),
        GateWork::OutboundRules => OUTBOUND_POLICY.to_owned() + RULES,
        _ => POLICY.to_owned(),
    };
    start_tidegate_with(folder, work, upstream, &policy)
}

fn start_without_metrics(folder: &TempFolder, work: GateWork, upstream: u16) -> Result<BenchServer, ProgramError> {
    start_tidegate_with(folder, work, upstream, &POLICY.replace("[admin]\n", "[admin]\nmetrics = false\n"))
}

fn start_tidegate_with(
    folder: &TempFolder,
    work: GateWork,
    upstream: u16,
    policy: &str,
) -> Result<BenchServer, ProgramError> {
    let program = tidegate_program()?;
    let (proxy, api, admin) = (free_port(), free_port(), free_port());
    let text = policy_text(policy, [proxy, upstream, api, admin]);
    let file = folder.write("tidegate.toml", &text)?;
    let is_question = matches!(work, GateWork::DecisionApi | GateWork::DecisionApiDearest);
    let port = if is_question { api } else { proxy };
    let arguments = ["serve".to_owned(), "--config".to_owned(), file.display().to_string()];
    BenchServer::start(PROXY_CORE, OURS, &program, &arguments, port)
}

/// Returns a policy with these ports and a log of errors only, because refusals would be printed between the rows.
fn policy_text(policy: &str, ports: [u16; 4]) -> String {
    let names = ["{proxy}", "{upstream}", "{api}", "{admin}"];
    let quiet = format!("{policy}\n[log]\nlevel = \"error\"\n");
    names.iter().zip(ports).fold(quiet, |text, (name, port)| text.replace(name, &port.to_string()))
}

const UPSTREAM: &str = "\
    location / { return 200 'A small page, as an upstream would serve it: one hundred and twenty-eight bytes of text, no more and no less, sent often\n'; }
";

const LIMIT_REQ: &str = "\
    location = /admit {
      limit_req zone=admit burst=1000000 nodelay;
      proxy_pass http://upstream;
    }
    location = /refuse {
      limit_req zone=refuse;
      proxy_pass http://upstream;
    }
  }
  limit_req_zone $binary_remote_addr zone=admit:10m rate=1000000r/s;
  limit_req_zone $binary_remote_addr zone=refuse:10m rate=1r/m;
  limit_req_status 429;
  proxy_http_version 1.1;
  proxy_set_header Connection '';
  upstream upstream {
    server 127.0.0.1:{upstream};
    keepalive 64;
    keepalive_requests 1000000000;
";

const POLICY: &str = r#"
[inbound]
listen = "127.0.0.1:{proxy}"
upstream = "http://127.0.0.1:{upstream}"

[inbound.action.admit]
match = { path = "/admit" }
key = ["client_ip"]
limit = "1000000000 per 60s"

[inbound.action.refuse]
match = { path = "/refuse" }
key = ["client_ip"]
limit = "1 per 1h"

[inbound.action.ask]
key = ["client_ip"]
limit = "1000000000 per 60s"

[api]
listen = "127.0.0.1:{api}"

[admin]
listen = "127.0.0.1:{admin}"
"#;

const OUTBOUND_POLICY: &str = r#"
[outbound]
listen = "127.0.0.1:{proxy}"

[outbound.provider.api]
base_url = "http://127.0.0.1:{upstream}"
limit = "1000000/s burst 1000000"

[api]
listen = "off"

[admin]
listen = "off"
"#;

/// Rules and scopes as a provider's documentation may ask for.
const RULES: &str = r#"
[[outbound.provider.api.rule]]
when = { status = [400, 429], json = { "/errors/*/code" = "THROTTLED" } }
is = "throttled"
wait = ["json /errors/*/retryIn ms", "5s"]

[[outbound.provider.api.rule]]
when = { status = 403, text = "daily limit" }
is = "quota"
wait = "next day in America/New_York"

[[outbound.provider.api.scope]]
path = "/search/**"
name = ["search"]

[[outbound.provider.api.scope]]
path = "/{part}/**"
name = ["path {part}"]
"#;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::subjects::tidegate::load_policy;
    use tidegate::policy::LogLevel;

    #[test]
    fn measured_gates_log_errors_only() {
        for policy in [POLICY, OUTBOUND_POLICY, &(OUTBOUND_POLICY.to_owned() + RULES)] {
            let policy = load_policy(&policy_text(policy, [1, 2, 3, 4]));
            assert_eq!(policy.log().level, LogLevel::Error);
        }
    }
}
