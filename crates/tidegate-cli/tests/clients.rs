//! The clients of `docs/clients.md`, in each language, against a gate.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port, require_program, require_program_in_full_run};

const PAGE: &str = include_str!("../../../docs/clients.md");
/// The second of two calls waits.
const POLICY: &str = "[inbound.action.mail]\nkey = \"key\"\nlimit = \"1 per 3s\"\n";

/// A running gate, and a place for a program that asks it.
struct Client {
    _gate: ChildProcess,
    api: u16,
    folder: ScratchDir,
}

impl Client {
    fn new() -> Self {
        let (api, scratch) = (free_port(), ScratchDir::new());
        let file = scratch.write("tidegate.toml", POLICY);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["serve", "--config"]).arg(file);
        command.env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{api}")).env("TIDEGATE__ADMIN__LISTEN", "off");
        Self { _gate: ChildProcess::start(command, scratch, api), api, folder: ScratchDir::new() }
    }

    /// Writes the page's client in a language, with this code behind it.
    fn write(&self, file: &str, language: &str, rest: &str) -> PathBuf {
        let block =
            PAGE.split_once(&format!("```{language}\n")).and_then(|(_, rest)| rest.split_once("```")).unwrap().0;
        self.folder.write(file, &(block.replace(":8082", &format!(":{}", self.api)) + rest))
    }

    /// Runs a program that makes two calls and refunds the second.
    #[expect(clippy::disallowed_methods, reason = "the wait of a program is measured")]
    fn assert_waits_and_refunds(&self, command: &mut Command) {
        let started = Instant::now();
        run(command);
        assert!(started.elapsed() > Duration::from_secs(2), "the second call waits");
        let mut http = HttpClient::connect(self.api).unwrap();
        let status = http.request(get_request("/v1/status?action=mail&key=a"));
        assert!(status.body.contains("\"remaining\":1,"), "the second call was refunded: {}", status.body);
    }
}

fn run(command: &mut Command) {
    let output = command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1").output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_python_client_waits_and_refunds() {
    let Some(python) = require_program("python3") else { return };
    let client = Client::new();
    let calls = "call = {'action': 'mail', 'key': 'a'}\n\
        wait_for_turn(call)\nassert wait_for_turn(call)['allowed']\nassert post('/v1/refund', call)['refunded']\n";
    let program = client.write("client.py", "python", calls);
    client.assert_waits_and_refunds(Command::new(python).arg(program));
}

#[test]
fn the_node_client_waits_and_refunds() {
    let Some(node) = require_program("node") else { return };
    let client = Client::new();
    let calls = "const call = { action: 'mail', key: 'a' };\nawait waitForTurn(call);\n\
        if (!(await waitForTurn(call)).allowed || !(await post('/v1/refund', call)).ok) process.exit(1);\n";
    let program = client.write("client.mjs", "js", calls);
    client.assert_waits_and_refunds(Command::new(node).arg(program));
}

#[test]
fn the_go_client_waits_and_refunds() {
    let Some(go) = require_program_in_full_run("go") else { return };
    let client = Client::new();
    let calls = "\nfunc main() {\n\tcall := map[string]any{\"action\": \"mail\", \"key\": \"a\"}\n\
        \tfor range [2]int{} {\n\t\tif _, err := waitForTurn(call); err != nil {\n\t\t\tpanic(err)\n\t\t}\n\t}\n\
        \tif _, status, err := post(\"/v1/refund\", call); err != nil || status != 200 {\n\t\tpanic(status)\n\t}\n}\n";
    let source = client.write("client.go", "go", calls);
    run(Command::new(go).current_dir(client.folder.path()).args(["build", "-o", "client"]).arg(source));
    client.assert_waits_and_refunds(&mut Command::new(client.folder.path().join("client")));
}

#[test]
fn the_java_client_waits_and_refunds() {
    let programs = (require_program_in_full_run("javac"), require_program_in_full_run("java"));
    let (Some(compiler), Some(java)) = programs else { return };
    let client = Client::new();
    let calls = "class Main {\n    public static void main(String[] arguments) throws Exception {\n\
        var call = \"{\\\"action\\\":\\\"mail\\\",\\\"key\\\":\\\"a\\\"}\";\n\
        Tidegate.waitForTurn(call);\nTidegate.waitForTurn(call);\n\
        if (Tidegate.post(\"/v1/refund\", call).statusCode() != 200) System.exit(1);\n}\n}\n";
    let source = client.write("Tidegate.java", "java", calls);
    run(Command::new(compiler).arg("-d").arg(client.folder.path()).arg(source));
    client.assert_waits_and_refunds(Command::new(java).arg("-cp").arg(client.folder.path()).arg("Main"));
}
