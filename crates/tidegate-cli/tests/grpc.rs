//! Unmodified clients of gRPC: one asks the gate, beyond loopback with a certificate of its own; one calls through it.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tidegate_testkit::servers::packages::python_environment;
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/grpc");
const POLICY: &str = r#"
[rls]
files = ["edge.yaml", "limits.yaml"]
tls = { certificates = "server.pem", keys = "server.key", client_ca = "ca.pem" }
[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "5 per 1h"
[inbound.action.busy]
key = "key"
limit = "100 per 1h"
"#;
const EDGE: &str =
    "domain: edge\ndescriptors:\n- {key: user, rate_limit: {unit: hour, requests_per_unit: 2}}\n- {key: stated}\n";
const LIMITS: &str =
    "- {namespace: shop, max_value: 2, seconds: 3600, conditions: [], variables: ['descriptors[0].user']}\n";

/// Writes an authority, and certificates of a server and of a client.
fn issue(folder: &ScratchDir) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "an authority");
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    folder.write("ca.pem", &issuer.pem());
    for name in ["server", "client"] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        folder.write(&format!("{name}.pem"), &params.signed_by(&key, &issuer).unwrap().pem());
        folder.write(&format!("{name}.key"), &key.serialize_pem());
    }
}

/// The Python packages. `None` if they can't be installed here.
fn packages() -> Option<PathBuf> {
    let list = Path::new(SOURCES).join("requirements.txt");
    python_environment(Path::new(env!("CARGO_TARGET_TMPDIR")), "grpc", &list)
}

/// Runs a script, which says that all is well.
fn run_script(packages: &Path, name: &str, arguments: &[&OsStr]) {
    let mut client = Command::new(packages.join("bin/python"));
    let output = client.arg(format!("{SOURCES}/{name}")).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert_eq!(text(&output.stdout), "ok\n", "{}", text(&output.stderr));
}

#[test]
fn grpcs_own_client_reads_refusals_of_the_proxy() {
    const POLICY: &str = "[inbound]\nhttp2 = \"always\"\nupstream_http2 = true\n\
        [inbound.action.call]\nmatch = { path = \"/test.Echo/*\" }\nlimit = \"2 per 1h\"\n";
    let Some(packages) = packages() else { return };
    let (scratch, port, upstream) = (ScratchDir::new(), free_port(), free_port());
    let file = scratch.write("tidegate.toml", POLICY);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file).env("TIDEGATE__INBOUND__LISTEN", format!("127.0.0.1:{port}"));
    command.env("TIDEGATE__INBOUND__UPSTREAM", format!("http://127.0.0.1:{upstream}"));
    command.env("TIDEGATE__API__LISTEN", "off").env("TIDEGATE__ADMIN__LISTEN", "off");
    let _gate = ChildProcess::start(command, scratch, port);
    let ports = [port, upstream].map(|port| port.to_string());
    run_script(&packages, "through.py", &ports.each_ref().map(OsStr::new));
}

#[test]
fn grpcs_own_client_asks_the_gate() {
    let Some(packages) = packages() else { return };
    let (scratch, port) = (ScratchDir::new(), free_port());
    issue(&scratch);
    for (name, text) in [("tidegate.toml", POLICY), ("edge.yaml", EDGE), ("limits.yaml", LIMITS)] {
        scratch.write(name, text);
    }
    let folder = scratch.path().to_owned();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config", "tidegate.toml"]).current_dir(&folder);
    command.env("TIDEGATE__API__LISTEN", "off").env("TIDEGATE__ADMIN__LISTEN", "off");
    command.env("TIDEGATE__RLS__LISTEN", format!("0.0.0.0:{port}"));
    let _gate = ChildProcess::start(command, scratch, port);
    run_script(&packages, "client.py", &[port.to_string().as_ref(), folder.as_os_str()]);
}
