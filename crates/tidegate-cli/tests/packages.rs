//! The service that packages install: its command lines with the policy that they bring.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

const UNIT: &str = include_str!("../../../deploy/tidegate.service");

/// Where packages put what the command lines name, and where this test has it.
const PLACES: [(&str, &str); 2] = [
    ("/usr/bin/tidegate", env!("CARGO_BIN_EXE_tidegate")),
    ("/etc/tidegate/policy.toml", concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/policy.toml")),
];

/// The unit's command lines of this kind that run `tidegate`.
fn commands(kind: &str) -> Vec<Command> {
    let lines = UNIT.lines().filter_map(|line| line.strip_prefix(kind)?.strip_prefix('='));
    let placed =
        |word: &str| PLACES.iter().find(|(place, _)| *place == word).map_or(word.to_owned(), |p| p.1.to_owned());
    let words = lines.map(|line| line.split(' ').map(placed).collect::<Vec<_>>());
    words
        .filter(|words| words[0] == PLACES[0].1)
        .map(|words| {
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]);
            command
        })
        .collect()
}

fn output(mut command: Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn packaged_policy_passes_the_units_checks() {
    for kind in ["ExecStartPre", "ExecReload"] {
        let checks = commands(kind);
        assert_eq!(checks.len(), 1, "{kind}");
        for check in checks {
            let (status, out, err) = output(check);
            assert_eq!((status, err.as_str()), (Some(0), ""), "{kind}");
            // The machine that runs the tests may have fewer file descriptors than the unit.
            let notes = out.lines().filter(|line| line.starts_with("note:") && !line.contains("file descriptors"));
            assert!(out.contains("policy.toml: good\n") && notes.count() == 0, "{out}");
        }
    }
}

#[test]
fn packaged_policy_listens_on_loopback_only() {
    let text = std::fs::read_to_string(PLACES[1].1).unwrap();
    let addresses = text.lines().filter_map(|line| line.strip_prefix("listen = "));
    assert_eq!(addresses.collect::<Vec<_>>(), ["\"127.0.0.1:8080\""]);
}

/// The unit's `serve`, on free ports and with its state in this directory, and the port of its admin listener.
fn serve(scratch: &Path) -> (Command, u16) {
    let mut command = commands("ExecStart").remove(0);
    let admin = free_port();
    command
        .env("TIDEGATE__STORE__URL", format!("file:{}/state", scratch.display()))
        .env("TIDEGATE__INBOUND__LISTEN", format!("127.0.0.1:{}", free_port()))
        .env("TIDEGATE__API__LISTEN", "off")
        .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{admin}"));
    (command, admin)
}

fn health(admin: u16) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["health", "--url", &format!("http://127.0.0.1:{admin}")]);
    output(command)
}

#[test]
fn service_manager_hears_when_listeners_are_bound() {
    let scratch = ScratchDir::new();
    let place = scratch.path().join("notify");
    let socket = UnixDatagram::bind(&place).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let (mut command, admin) = serve(scratch.path());
    command.env("NOTIFY_SOCKET", &place);
    let mut child = command.spawn().unwrap();
    let mut message = [0; 64];
    let length = socket.recv(&mut message);
    // Before anything can panic, so that the child doesn't stay.
    let reply = HttpClient::connect(admin).map(|mut client| client.request(get_request("/readyz")).status);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(String::from_utf8_lossy(&message[..length.unwrap()]).trim_end(), "READY=1");
    assert_eq!(reply, Some(200));
}

#[test]
fn health_exits_by_the_gates_readiness() {
    let scratch = ScratchDir::new();
    let (command, admin) = serve(scratch.path());
    let mut gate = ChildProcess::start(command, scratch, admin);
    assert_eq!(health(admin), (Some(0), "ready\n".to_owned(), String::new()));
    gate.send_signal("TERM");
    assert!(gate.wait().is_some_and(|status| status.success()));
    let (status, out, err) = health(admin);
    assert_eq!((status, out.as_str()), (Some(1), ""));
    assert!(err.starts_with(&format!("error: no gate answers at http://127.0.0.1:{admin}")), "{err}");
}

#[test]
fn a_tls_listener_is_asked_by_its_name() {
    let scratch = ScratchDir::new();
    let (mut command, admin) = serve(scratch.path());
    let pair = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let certificate = scratch.write("gate.pem", &pair.cert.pem());
    let key = scratch.write("gate.key", &pair.signing_key.serialize_pem());
    command.env("TIDEGATE__ADMIN__TLS__CERTIFICATES", &certificate).env("TIDEGATE__ADMIN__TLS__KEYS", key);
    let _gate = ChildProcess::start(command, scratch, admin);
    let ask = |host: &str, ca: &[&str]| {
        let mut command = Command::new(PLACES[0].1);
        command.args(["health", "--url", &format!("https://{host}:{admin}")]).args(ca);
        output(command)
    };
    let ca = ["--ca", certificate.to_str().unwrap()];
    assert_eq!(ask("localhost", &ca), (Some(0), "ready\n".to_owned(), String::new()));
    for (host, ca) in [("127.0.0.1", &ca[..]), ("localhost", &[])] {
        let (status, _, err) = ask(host, ca);
        assert!(status == Some(1) && err.contains("certificate"), "{err}");
    }
    let (status, _, err) = ask("localhost", &["--ca", "/nowhere.pem"]);
    assert!(status == Some(2) && err.contains("/nowhere.pem"), "{err}");
}

#[test]
fn health_tells_that_the_store_is_away() {
    let scratch = ScratchDir::new();
    let (mut command, admin) = serve(scratch.path());
    let store = format!("redis://127.0.0.1:{}", free_port());
    command.env("TIDEGATE__STORE__URL", store).env("TIDEGATE__STORE__ON_OUTAGE", "deny");
    // Without the store, a node starts only if it knows the secret that keys are hashed under.
    command.env("TIDEGATE__STORE__HASH_KEY", "env:GATE_HASH_KEY").env("GATE_HASH_KEY", "0123456789abcdef0123");
    let _gate = ChildProcess::start(command, scratch, admin);
    let mut answers = (0..500).map(|_| {
        thread::sleep(Duration::from_millis(20));
        health(admin)
    });
    let told = answers.find(|(status, ..)| *status != Some(0));
    assert_eq!(told, Some((Some(1), String::new(), "error: the store does not answer\n".to_owned())));
}
