//! The SDKs of providers, unmodified, through the gateway with the providers' presets.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use tidegate_testkit::servers::packages::installed_packages;
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port, require_program, skip_test};

use crate::common;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/outbound/sdks");
const CREDENTIAL: &str = "the-real-credential";

/// The folder of the packages of a list.
fn installed(list: &str, program: &Path, install: impl Fn(&Path)) -> PathBuf {
    let (folders, file) = (Path::new(env!("CARGO_TARGET_TMPDIR")), Path::new(SOURCES).join(list));
    let install = |folder: &Path| {
        install(folder);
        true
    };
    installed_packages(folders, &format!("sdks-{list}"), &file, program, install).unwrap()
}

/// Runs a program for at most five minutes, without the machine's HTTP proxy.
fn run(command: &mut Command) -> String {
    let mut limited = Command::new("timeout");
    limited.arg("300").arg(command.get_program()).args(command.get_args());
    limited.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1");
    if let Some(folder) = command.get_current_dir() {
        limited.current_dir(folder);
    }
    let output = limited.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
    text
}

/// Returns true if a program with these arguments succeeds. Otherwise the test is skipped for this reason.
fn has(program: &Path, arguments: [&str; 2], why: &str) -> bool {
    let found = Command::new(program).args(arguments).output().is_ok_and(|output| output.status.success());
    if !found {
        skip_test(why);
    }
    found
}

/// Starts the providers and a gateway to them; returns the gateway's URL.
fn start() -> Option<([ChildProcess; 2], String)> {
    let python = require_program("python3")?;
    let port = free_port();
    let mut providers = Command::new(python);
    providers.arg(format!("{SOURCES}/providers.py")).arg(port.to_string());
    let providers = ChildProcess::start(providers, ScratchDir::new(), port);
    let policy = fs::read_to_string(format!("{SOURCES}/policy.toml")).unwrap().replace("PORT", &port.to_string());
    let (gateway, port) = common::gateway(&policy, &[("PROVIDER_KEY", CREDENTIAL)]);
    Some(([providers, gateway], format!("http://127.0.0.1:{port}")))
}

/// The program of an environment with the packages of Python.
fn python_with_packages(python: &Path) -> PathBuf {
    let packages = installed("requirements.txt", python, |folder| {
        run(Command::new(python).args(["-m", "venv"]).arg(folder));
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
        run(Command::new(folder.join("bin/python")).args(pip).arg(format!("{SOURCES}/requirements.txt")));
    });
    packages.join("bin/python")
}

#[test]
fn python_sdks_work_through_the_gateway() {
    let (Some(python), Some((_running, gateway))) = (require_program("python3"), start()) else { return };
    if !has(&python, ["-c", "import ensurepip, venv"], "python3-venv not found") {
        return;
    }
    let said = run(Command::new(python_with_packages(&python)).arg(format!("{SOURCES}/clients.py")).arg(gateway));
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 23, "{said}");
}

#[test]
fn node_sdks_work_through_the_gateway() {
    let (Some(npm), Some(node)) = (require_program("npm"), require_program("node")) else { return };
    let Some((_running, gateway)) = start() else { return };
    let is_recent = "process.exit(parseInt(process.versions.node) >= 20 ? 0 : 1)";
    if !has(&node, ["-e", is_recent], "Node 20 or later not found") {
        return;
    }
    let packages = installed("package.json", &node, |folder| {
        fs::copy(format!("{SOURCES}/package.json"), folder.join("package.json")).unwrap();
        let flags = ["install", "--loglevel=error", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"];
        run(Command::new(&npm).args(flags).current_dir(folder));
    });
    let said = run(Command::new(node).arg(format!("{SOURCES}/clients.mjs")).arg(gateway).arg(packages));
    assert_eq!(said.lines().filter(|line| line.starts_with("ok ")).count(), 18, "{said}");
}

#[test]
fn prometheus_reads_the_metrics() {
    let Some(python) = require_program("python3") else { return };
    if !has(&python, ["-c", "import ensurepip, venv"], "python3-venv not found") {
        return;
    }
    let admin = free_port();
    let listen = format!("[admin]\nlisten = \"127.0.0.1:{admin}\"\n");
    let policy = listen
        + &common::provider(free_port(), "limit = [\"100/s\", \"5 per calendar day\"]\nretry = { max_attempts = 1 }\n");
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", &policy);
    let gateway = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file).env("TIDEGATE__OUTBOUND__LISTEN", format!("127.0.0.1:{gateway}"));
    command.env("TIDEGATE__API__LISTEN", "off");
    let _running = ChildProcess::start(command, scratch, gateway);
    for _ in 0..3 {
        let status = ["-s", "-o", "/dev/null", "-w", "%{http_code}"];
        let told = run(Command::new("curl").args(status).arg(format!("http://127.0.0.1:{gateway}/api/x")));
        assert_eq!(told, "502");
    }
    let url = format!("http://127.0.0.1:{admin}/metrics");
    let said = run(Command::new(python_with_packages(&python)).arg(format!("{SOURCES}/metrics.py")).arg(&url));
    assert!(said.starts_with("ok ") && said.ends_with("True, 3 calls\n"), "{said}");

    let Some(promtool) = require_program("promtool") else { return };
    let page = run(Command::new("curl").args(["-s", "-H", "accept: text/plain", &url]));
    let scratch = ScratchDir::new();
    let page = File::open(scratch.write("metrics", &page)).unwrap();
    let checked = Command::new(&promtool).args(["check", "metrics"]).stdin(page).output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
    let rules = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/alerts.yml");
    run(Command::new(&promtool).args(["check", "rules", rules]));
    let tests = fs::read_to_string(format!("{SOURCES}/alerts_test.yml")).unwrap().replace("RULES", rules);
    run(Command::new(&promtool).args(["test", "rules"]).arg(scratch.write("alerts_test.yml", &tests)));
}
