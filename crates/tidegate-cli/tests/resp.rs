//! Unmodified clients of Redis that ask the gate.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::fs;
use std::path::Path;
use std::process::Command;

use tidegate_testkit::servers::packages::{installed_packages, python_environment};
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port, require_program, skip_test};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/resp");
const POLICY: &str = r#"
[resp]
token = "env:PASSWORD"
[inbound.action.login]
key = "key"
limit = "5 per 1h"
"#;

/// A gate with the protocol, and its port.
fn start() -> (ChildProcess, u16) {
    let (scratch, port) = (ScratchDir::new(), free_port());
    let file = scratch.write("tidegate.toml", POLICY);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file).env("PASSWORD", "a password");
    command.env("TIDEGATE__API__LISTEN", "off").env("TIDEGATE__ADMIN__LISTEN", "off");
    command.env("TIDEGATE__RESP__LISTEN", format!("127.0.0.1:{port}"));
    (ChildProcess::start(command, scratch, port), port)
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{command:?}\n{}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn succeeds(command: &mut Command) -> bool {
    command.status().is_ok_and(|status| status.success())
}

#[test]
fn redis_cli_asks_the_gate() {
    let Some(program) = require_program("redis-cli") else { return };
    let (_running, port) = start();
    let ask = |version: &str, words: &[&str]| {
        let password = ["-p", &port.to_string(), "-a", "a password", "--no-auth-warning", version].map(str::to_owned);
        run(Command::new(&program).args(password).args(words))
    };
    assert_eq!(ask("-2", &["PING"]), "PONG\n");
    let first = ask("-2", &["TG.CHECK", "login", "KEY", "a"]);
    assert!(first.starts_with("allowed\n1\nbackoff_seconds\n\nblocked\n0\n"), "{first}");
    let second = ask("-3", &["TG.CHECK", "login", "KEY", "a"]);
    assert!(second.starts_with("allowed (true)\nbackoff_seconds \nblocked (false)\n"), "{second}");
    assert!(second.contains("\nremaining 3\n"), "{second}");
    assert_eq!(ask("-3", &["TG.REFUND", "login", "KEY", "a"]), "refunded (true)\n");
    assert!(ask("-2", &["GET", "a"]).starts_with("ERR unknown command 'GET'"));
}

#[test]
fn redis_py_asks_the_gate() {
    let list = Path::new(SOURCES).join("requirements.txt");
    let packages = python_environment(Path::new(env!("CARGO_TARGET_TMPDIR")), "resp-python", &list);
    let Some(packages) = packages else { return };
    let (_running, port) = start();
    let mut command = Command::new(packages.join("bin/python"));
    let said = run(command.arg(format!("{SOURCES}/client.py")).arg(port.to_string()));
    assert_eq!(said, "ok 2\nok 3\nok cache\nok password\n");
}

#[test]
fn ioredis_asks_the_gate() {
    let (Some(npm), Some(node)) = (require_program("npm"), require_program("node")) else { return };
    let (folders, list) = (Path::new(env!("CARGO_TARGET_TMPDIR")), Path::new(SOURCES).join("package.json"));
    let packages = installed_packages(folders, "resp-node", &list, &node, |folder| {
        fs::copy(format!("{SOURCES}/package.json"), folder.join("package.json")).unwrap();
        let flags = ["install", "--loglevel=error", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"];
        succeeds(Command::new(&npm).args(flags).current_dir(folder))
    });
    let Some(packages) = packages else { return skip_test("npm can't install ioredis") };
    let (_running, port) = start();
    let mut command = Command::new(node);
    let said = run(command.arg(format!("{SOURCES}/client.mjs")).arg(port.to_string()).arg(packages));
    assert_eq!(said, "ok\n");
}
