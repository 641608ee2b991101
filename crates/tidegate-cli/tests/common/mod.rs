//! The gateway as a program.

use std::process::Command;

use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

/// Runs `tidegate serve` with this policy and these variables; returns the gateway's port.
pub(crate) fn gateway(policy: &str, env: &[(&str, &str)]) -> (ChildProcess, u16) {
    let port = free_port();
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", policy);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(["serve", "--config"])
        .arg(file)
        .env("TIDEGATE__OUTBOUND__LISTEN", format!("127.0.0.1:{port}"))
        .env("TIDEGATE__API__LISTEN", "off")
        .env("TIDEGATE__ADMIN__LISTEN", "off")
        .envs(env.iter().copied());
    (ChildProcess::start(command, scratch, port), port)
}

/// A provider on a port of this machine.
pub(crate) fn provider(port: u16, settings: &str) -> String {
    format!("[outbound.provider.api]\nbase_url = \"http://127.0.0.1:{port}\"\n{settings}\n")
}
