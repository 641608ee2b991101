//! An unmodified Envoy that asks the rate limit service, the authorization service and forward-auth.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use tidegate_testkit::http_client::{HttpClient, HttpResponse};
use tidegate_testkit::servers::packages::python_environment;
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port, nginx};

/// The list of Python packages; one has Envoy's program.
const PACKAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/envoy.txt");
const RATE_LIMIT: &str = include_str!("../../../docs/snippets/envoy-rls.yaml");
const AUTHORIZATION: &str = include_str!("../../../docs/snippets/envoy-authz.yaml");
const FORWARD_AUTH: &str = include_str!("../../../docs/snippets/envoy.yaml");
const POLICY: &str = r#"
[inbound]
trusted_proxies = ["127.0.0.0/8", "PROXY"]
[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "2 per 1h"
penalty = { base = "1s", cap = "1h" }
[inbound.action.tenant]
key = "key"
limit = "3 per 1h"
[inbound.action.tenants]
match = { path = "/tenant" }
key = "header:x-tenant"
limit = "3 per 1h"
"#;

/// Envoy's program. `None` if it can't be installed here.
fn envoy_program() -> Option<PathBuf> {
    let packages = python_environment(Path::new(env!("CARGO_TARGET_TMPDIR")), "envoy", Path::new(PACKAGES))?;
    let libraries = std::fs::read_dir(packages.join("lib")).unwrap();
    let program =
        |library: std::io::Result<std::fs::DirEntry>| library.unwrap().path().join("site-packages/envoy/_bin/envoy");
    libraries.map(program).find(|program| program.exists())
}

/// The ports of Envoy, of the server behind it and of the gate.
struct Ports {
    front: u16,
    server: u16,
    rls: u16,
    api: u16,
}

/// The address that Envoy adds to `X-Forwarded-For` of its questions: the first that isn't loopback.
fn own_address() -> String {
    let listed = Command::new("hostname").arg("-I").output().unwrap().stdout;
    String::from_utf8(listed).unwrap().split_whitespace().next().unwrap_or("127.0.0.1").to_owned()
}

fn start_gate(ports: &Ports) -> ChildProcess {
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", &POLICY.replace("PROXY", &own_address()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file).env("TIDEGATE__ADMIN__LISTEN", "off");
    command.env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{}", ports.api));
    command.env("TIDEGATE__RLS__LISTEN", format!("127.0.0.1:{}", ports.rls));
    ChildProcess::start(command, scratch, ports.rls)
}

/// Starts Envoy with a guide's configuration.
fn start_envoy(program: &Path, ports: &Ports, config: &str) -> ChildProcess {
    let scratch = ScratchDir::new();
    let own_ports = [(8000, ports.front), (3000, ports.server), (8084, ports.rls), (8082, ports.api)];
    let config = own_ports.into_iter().fold(config.to_owned(), |text, (from, to)| {
        text.replace(&format!("port_value: {from} "), &format!("port_value: {to} "))
            .replace(&format!("127.0.0.1:{from}\""), &format!("127.0.0.1:{to}\""))
    });
    let file = scratch.write("envoy.yaml", &config);
    let mut command = Command::new(program);
    command.arg("-c").arg(file).args(["--base-id", &ports.front.to_string(), "--concurrency", "1"]);
    ChildProcess::start(command, scratch, ports.front)
}

fn start(config: &str) -> Option<(ChildProcess, ChildProcess, ChildProcess, Ports)> {
    let program = envoy_program()?;
    let ports = Ports { front: free_port(), server: free_port(), rls: free_port(), api: free_port() };
    // Without a reservation in the request, the second header is empty, and isn't sent.
    let page = "location / { default_type text/plain; add_header ratelimit-policy the-servers; \
        add_header seen $http_tidegate_reservation; return 200 'a page'; }";
    let server = nginx(&format!("server {{ listen 127.0.0.1:{}; {page} }}", ports.server), ports.server)?;
    let (gate, envoy) = (start_gate(&ports), start_envoy(&program, &ports, config));
    Some((server, gate, envoy, ports))
}

fn ask(ports: &Ports, line: &str, header: &str) -> HttpResponse {
    let request = format!("{line} HTTP/1.1\r\nhost: a.test\r\n{header}content-length: 0\r\n\r\n");
    HttpClient::connect(ports.front).unwrap().request(request)
}

#[test]
fn envoy_enforces_limits_with_true_waits() {
    let Some((_server, _gate, _envoy, ports)) = start(RATE_LIMIT) else { return };
    let login = || ask(&ports, "POST /login?next=%2F", "");
    for left in ["1", "0"] {
        let admitted = login();
        assert_eq!((admitted.status, admitted.header("x-ratelimit-remaining")), (200, Some(left)), "{}", admitted.head);
        assert_eq!(admitted.header("x-ratelimit-limit"), Some("2, 2;w=3600;name=\"login\""));
    }
    let refused = login();
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{}", refused.head);
    assert_eq!(
        (refused.header("x-ratelimit-reset"), refused.header("ratelimit")),
        (Some("1"), Some("\"login\";r=0;t=1"))
    );
    sleep(Duration::from_secs(1));
    assert_eq!(login().status, 200, "the wait is true");
    assert_eq!(ask(&ports, "GET /elsewhere", "").status, 200);
    // Each value of the header has its own count.
    let tenants =
        ["a", "a", "a", "a", "b"].map(|tenant| ask(&ports, "GET /", &format!("x-tenant: {tenant}\r\n")).status);
    assert_eq!(tenants, [200, 200, 200, 429, 200]);
    assert_eq!(ask(&ports, "GET /", "x_tenant: a\r\n").status, 400, "it looks like a keyed header");
    // The decision API has the same counts.
    let mut api = HttpClient::connect(ports.api).unwrap();
    let status = api.request("GET /v1/status?action=tenant&key=a HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert!(status.body.contains(r#""allowed":false,"limit":3,"remaining":0"#), "{}", status.body);
}

/// A refusal is that of the proxy, with its headers and body.
fn assert_refused(refused: &HttpResponse) {
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{}", refused.head);
    assert_eq!(refused.header("content-type"), Some("application/json"));
    assert_eq!(refused.header("ratelimit"), Some("\"login\";r=0;t=1"));
    assert!(refused.body.starts_with("{\"error\":\"Too many requests\",\"retry_after\":1"), "{}", refused.body);
}

#[test]
fn envoy_hands_on_refusals_of_forward_auth() {
    const POLICY_HEADER: &str = "\"login\";q=2;w=3600";
    // By HTTP, Envoy adds the gate's headers to the server's, and hands on those that it is told to.
    let by_http = ["the-servers", POLICY_HEADER];
    for (config, told_policies, is_grpc) in [(AUTHORIZATION, &by_http[1..], true), (FORWARD_AUTH, &by_http, false)] {
        let Some((_server, _gate, _envoy, ports)) = start(config) else { return };
        let login = |client| ask(&ports, "POST /login?next=%2F", &format!("x-forwarded-for: {client}\r\n"));
        for left in ["1", "0"] {
            let admitted = login("203.0.113.7");
            let lines = admitted.head.lines();
            let policies: Vec<_> = lines.filter_map(|line| line.strip_prefix("ratelimit-policy: ")).collect();
            assert_eq!(
                (admitted.status, admitted.header("ratelimit"), &*policies),
                (200, Some(&*format!("\"login\";r={left};t=3600")), told_policies),
                "{}",
                admitted.head
            );
        }
        assert_refused(&login("203.0.113.7"));
        let unknown = format!("x-forwarded-for: 203.0.113.8\r\ntidegate-reservation: r{}\r\n", "0".repeat(29));
        let other = ask(&ports, "POST /login", &unknown);
        assert_eq!((other.status, other.header("seen")), (200, None), "another client: {}", other.head);
        sleep(Duration::from_secs(1));
        assert_eq!(login("203.0.113.7").status, 200, "the wait is true");
        assert_eq!(ask(&ports, "GET /tenant", "x_tenant: a\r\n").status, 400, "it looks like a keyed header");
        if is_grpc {
            // Each of several values counts.
            let tenants = ["a", "a\r\nx-tenant: 1", "a\r\nx-tenant: 2", "a\r\nx-tenant: 3", "b"];
            let tenants = tenants.map(|value| ask(&ports, "GET /tenant", &format!("x-tenant: {value}\r\n")).status);
            assert_eq!(tenants, [200, 200, 200, 429, 200]);
        }
    }
}

#[test]
fn envoy_follows_its_failure_mode() {
    for (config, denies, admits, while_away) in [
        (RATE_LIMIT, "failure_mode_deny: true", "failure_mode_deny: false", 500),
        (AUTHORIZATION, "failure_mode_allow: false", "failure_mode_allow: true", 503),
    ] {
        for (mode, while_away) in [(denies, while_away), (admits, 200)] {
            let Some((_server, gate, _envoy, ports)) = start(&config.replace(denies, mode)) else { return };
            assert_eq!(ask(&ports, "GET /", "").status, 200);
            gate.send_signal("KILL");
            drop(gate);
            assert_eq!(ask(&ports, "GET /", "").status, while_away);
            let _gate = start_gate(&ports);
            sleep(Duration::from_secs(1));
            assert_eq!(ask(&ports, "GET /", "").header("x-ratelimit-limit"), None, "no limit applies");
            let decided = ["POST /login"; 3].map(|line| ask(&ports, line, "").status);
            assert_eq!(decided, [200, 200, 429], "decisions come again within a second");
        }
    }
}
