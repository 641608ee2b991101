//! The gateway to external APIs as a program, with real servers behind it.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

#[path = "../common/mod.rs"]
mod common;
mod permits;
mod sdks;
mod secrets;
mod shutdown;
mod tls;
mod upload;
mod upstream;

use std::process::Command;

use tidegate_testkit::servers::ScratchDir;

use crate::common::provider;

#[test]
fn listening_beyond_loopback_requires_a_token() {
    let scratch = ScratchDir::new();
    let settings = "limit = \"1/s\"\n[outbound]\nlisten = \"0.0.0.0:0\"\n";
    let file = scratch.write("tidegate.toml", &provider(1, settings));
    let serve = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["serve", "--config"])
        .arg(file)
        .env("TIDEGATE__API__LISTEN", "off")
        .env("TIDEGATE__ADMIN__LISTEN", "off")
        .output()
        .unwrap();
    assert!(!serve.status.success());
    let told = String::from_utf8(serve.stderr).unwrap();
    let open = "the outbound gateway listens beyond loopback (0.0.0.0:0) without a token, so every host that reaches it could use it";
    assert!(told.contains(open), "{told}");
}
