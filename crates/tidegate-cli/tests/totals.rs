//! The totals of the program under load.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::process::Command;
use std::thread;

use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::random::{RandomSource, case_count, run_seed};
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

const CLIENTS: u64 = 8;
const POLICY: &str = r#"
[inbound.action.few]
match = { path = "/few" }
limit = "300 per 1h"
[inbound.action.watched]
match = { path = "/watched" }
limit = "200 per 1h"
mode = "shadow"
[inbound.action.blocked]
match = { path = "/blocked" }
limit = "100 per 1h"
penalty = { base = "1h", cap = "1h" }
"#;
const PATHS: [&str; 4] = ["/few", "/watched", "/blocked", "/free"];

/// The number of answers to requests for a path, by status.
type Told = BTreeMap<(&'static str, u16), u64>;

/// Starts a server that answers every request. Returns its port.
fn upstream() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let (mut head, mut buffer) = (Vec::new(), [0; 4096]);
                while let Ok(count @ 1..) = stream.read(&mut buffer) {
                    head.extend_from_slice(&buffer[..count]);
                    // A connection of the gate has one request at a time.
                    if head.ends_with(b"\r\n\r\n") {
                        head.clear();
                        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello").unwrap();
                    }
                }
            });
        }
    });
    port
}

/// A quarter of the clients ask the decision API.
fn asks_api(client: u64) -> bool {
    client.is_multiple_of(4)
}

/// One client: it asks the proxy, or the decision API about the same address.
fn ask(client: u64, gate: u16, api: u16, requests: u32) -> Told {
    let mut random = RandomSource::from_seed(run_seed() ^ client);
    let asks_api = asks_api(client);
    let mut connection = HttpClient::connect(if asks_api { api } else { gate }).unwrap();
    let mut told = Told::new();
    for _ in 0..requests {
        let path = random.pick(&PATHS);
        let request = if asks_api {
            let body = format!(r#"{{"ip":"127.0.0.1","method":"GET","path":"{path}"}}"#);
            let head = "POST /v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json";
            format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        } else {
            get_request(path)
        };
        *told.entry((path, connection.request(request).status)).or_default() += 1;
    }
    told
}

#[test]
fn totals_equal_what_clients_were_told() {
    let requests = case_count(6_000, 100_000);
    let [gate, api, admin] = [(); 3].map(|()| free_port());
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", POLICY);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file);
    for (name, port) in [("INBOUND", gate), ("API", api), ("ADMIN", admin)] {
        command.env(format!("TIDEGATE__{name}__LISTEN"), format!("127.0.0.1:{port}"));
    }
    command.env("TIDEGATE__INBOUND__UPSTREAM", format!("http://127.0.0.1:{}", upstream()));
    let _running = ChildProcess::start(command, scratch, gate);
    let of_client = |client| thread::spawn(move || ask(client, gate, api, requests / CLIENTS as u32));
    let clients: Vec<_> = (0..CLIENTS).map(of_client).collect();
    let mut told = Told::new();
    let mut by_proxy = 0;
    for (client, asking) in (0..).zip(clients) {
        for ((path, status), count) in asking.join().unwrap() {
            *told.entry((path, status)).or_default() += count;
            by_proxy += if !asks_api(client) && status == 200 { count } else { 0 };
        }
    }
    assert_eq!(told.values().sum::<u64>(), u64::from(requests));
    let count = |path, status| told.get(&(path, status)).copied().unwrap_or_default();
    assert_eq!((count("/few", 200), count("/blocked", 200)), (300, 100), "{told:?}");

    let page = HttpClient::connect(admin).unwrap().request(get_request("/metrics")).body;
    let total = |name: &str, labels: &[&str]| -> u64 {
        let lines = page.lines().filter(|line| line.starts_with(name) && labels.iter().all(|it| line.contains(it)));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap() as u64).sum()
    };
    for (action, path) in [("few", "/few"), ("watched", "/watched"), ("blocked", "/blocked"), ("", "/free")] {
        let action = format!("action=\"{action}\"");
        let of = |outcome: &str| total("tidegate_decisions_total", &[&action, &format!("outcome=\"{outcome}\"")]);
        assert_eq!(of("refused"), count(path, 429), "{path}: {page}");
        assert_eq!(of("allowed") + of("shadow"), count(path, 200), "{path}: {page}");
        let in_shadow = if path == "/watched" { count(path, 200) - 200 } else { 0 };
        assert_eq!(of("shadow"), in_shadow, "{path}: {page}");
    }
    assert_eq!(total("tidegate_decisions_total", &[]), u64::from(requests));
    assert_eq!(total("tidegate_decision_duration_seconds_count", &[]), u64::from(requests));
    assert_eq!(total("tidegate_upstream_replies_total", &["status=\"2xx\""]), by_proxy);
}
