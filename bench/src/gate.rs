//! Requests through the gate: proxies on core 0, the client and the upstream on core 1.

mod client;
mod server;

use tidegate_testkit::servers::RedisServer;

use crate::measure::on;
use crate::options::Options;
use crate::programs::{Failure, product, sibling};
use crate::rows::{Row, Unit};
use crate::subjects::OURS;
use client::{Client, Load};
use server::{Folder, Server, free_port};

/// One row's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Admitted,
    Refused,
    DecisionApi,
    Outbound,
}

impl Work {
    const ALL: [Self; 4] = [Self::Admitted, Self::Refused, Self::DecisionApi, Self::Outbound];

    fn name(self) -> &'static str {
        match self {
            Self::Admitted => "gate/admitted",
            Self::Refused => "gate/refused",
            Self::DecisionApi => "gate/decision-api",
            Self::Outbound => "gate/outbound",
        }
    }

    fn load(self) -> Load {
        match self {
            Self::Admitted => Load::Get { path: "/admit", refused: false },
            Self::Refused => Load::Get { path: "/refuse", refused: true },
            Self::DecisionApi => Load::Post { path: "/v1/check", body: r#"{"action":"ask","ip":"192.0.2.7"}"# },
            Self::Outbound => Load::Get { path: "/api/page", refused: false },
        }
    }
}

/// Starts a subject in front of the upstream's port.
type Start = fn(&Folder, Work, u16) -> Result<Server, Failure>;

/// The core of every proxy.
const PROXY_CORE: &str = "0";
/// The core of the client and the upstream.
const CLIENT_CORE: &str = "1";
/// The port of an upstream that isn't asked: discard's.
const UNASKED: u16 = 9;
/// Connections at a time.
const CONNECTIONS: u32 = 50;

/// Measures the rows of the gate that the options ask for.
pub fn measure(options: &Options, done: &mut dyn FnMut(Row)) {
    for work in Work::ALL {
        let names = ["cpu", "requests"].map(|figure| format!("{}/{figure}", work.name()));
        if !names.iter().any(|name| options.wants(name)) {
            continue;
        }
        let [cpu, requests] = names;
        let mut cpu = Row::new(cpu, Unit::CpuSeconds);
        let mut requests = Row::new(requests, Unit::Requests);
        if let Err(failure) = run(options, work, &mut cpu, &mut requests) {
            cpu.skipped.push(failure.to_string());
        }
        done(cpu);
        done(requests);
    }
    let name = "gate/one-client-of-redis";
    if options.wants(name) {
        let mut row = Row::new(name, Unit::Nanoseconds);
        if let Err(failure) = one_client(options, &mut row) {
            row.skipped.push(failure.to_string());
        }
        done(row);
    }
}

/// A decision that one client asks for at a time: its length over Redis less its length in memory.
fn one_client(options: &Options, row: &mut Row) -> Result<(), Failure> {
    let folder = Folder::new()?;
    let client = Client::new(&folder, CLIENT_CORE, 1, Work::DecisionApi.load())?;
    let redis = on(1, RedisServer::start).ok_or_else(|| Failure::new("redis-server", "is not installed"))?;
    let on_redis = format!("[store]\nurl = \"{}\"\n{POLICY}", redis.url());
    let mut servers = Vec::new();
    for policy in [&on_redis, POLICY] {
        let server = serve(&folder, Work::DecisionApi, UNASKED, policy)?;
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

fn run(options: &Options, work: Work, cpu: &mut Row, requests: &mut Row) -> Result<(), Failure> {
    let folder = Folder::new()?;
    let client = Client::new(&folder, CLIENT_CORE, CONNECTIONS, work.load())?;
    let upstream = Server::nginx(&folder, CLIENT_CORE, "upstream", UPSTREAM)?;
    let subjects: Vec<(&str, Start)> = match work {
        Work::Admitted => vec![(OURS, ours), ("nginx limit_req", limit_req), ("bare hyper-util proxy", bare)],
        Work::Refused => vec![(OURS, ours), ("nginx limit_req", limit_req), ("bare hyper 429", bare)],
        Work::DecisionApi => vec![(OURS, ours), ("bare hyper POST", bare)],
        Work::Outbound => vec![(OURS, ours), ("bare hyper-util proxy", bare)],
    };
    let mut running = Vec::new();
    for (name, start) in subjects {
        if !options.wants_subject(name) {
            continue;
        }
        match start(&folder, work, upstream.port) {
            Ok(server) => running.push((name, server, Vec::new(), Vec::new())),
            Err(failure) => cpu.skipped.push(format!("{name}: {failure}")),
        }
    }
    let (rounds, seconds) = if options.quick { (3, 1) } else { (9, 3) };
    for (_, server, ..) in &running {
        client.run(server.port, 1)?;
    }
    for round in 0..rounds {
        for place in 0..running.len() {
            let place = (place + round) % running.len();
            let (_, server, spent, rates) = &mut running[place];
            let before = server.cpu_seconds()?;
            let answered = client.run(server.port, seconds)?;
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

fn bare(_: &Folder, work: Work, upstream: u16) -> Result<Server, Failure> {
    let program = match work {
        Work::Admitted | Work::Outbound => "bare-proxy",
        Work::Refused => "bare-refuser",
        Work::DecisionApi => "bare-api",
    };
    let port = free_port()?;
    let arguments = [port.to_string(), upstream.to_string()];
    Server::start(PROXY_CORE, program, &sibling(program)?, &arguments, port)
}

fn limit_req(folder: &Folder, _: Work, upstream: u16) -> Result<Server, Failure> {
    let text = LIMIT_REQ.replace("{upstream}", &upstream.to_string());
    Server::nginx(folder, PROXY_CORE, "limit_req", &text)
}

fn ours(folder: &Folder, work: Work, upstream: u16) -> Result<Server, Failure> {
    serve(folder, work, upstream, if work == Work::Outbound { OUTBOUND_POLICY } else { POLICY })
}

fn serve(folder: &Folder, work: Work, upstream: u16, policy: &str) -> Result<Server, Failure> {
    let program = product()?;
    let (proxy, api, admin) = (free_port()?, free_port()?, free_port()?);
    let text = policy
        .replace("{proxy}", &proxy.to_string())
        .replace("{upstream}", &upstream.to_string())
        .replace("{api}", &api.to_string())
        .replace("{admin}", &admin.to_string());
    let file = folder.write("tidegate.toml", &text)?;
    let port = if work == Work::DecisionApi { api } else { proxy };
    let arguments = ["serve".to_owned(), "--config".to_owned(), file.display().to_string()];
    Server::start(PROXY_CORE, OURS, &program, &arguments, port)
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
