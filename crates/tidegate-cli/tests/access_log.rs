//! The access log of the program.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use tidegate_testkit::http_client::HttpClient;
use tidegate_testkit::random::RandomSource;
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

const POLICY: &str = r#"
[inbound]
trusted_proxies = ["127.0.0.0/8"]

[inbound.action.login]
match = { method = "POST", path = "/login" }
limit = "3 per 60s"
penalty = { base = "10m", cap = "1h" }

[inbound.action.item]
match = { path = "/item/*" }
key = ["client_ip", "path"]
limit = "2 per 60s"

[log]
access = "all"
format = "json"
"#;

/// The command `tidegate serve` with this policy, which listens for forward-auth on the port.
fn serve(scratch: &ScratchDir, policy: &str) -> (Command, u16) {
    let port = free_port();
    let file = scratch.write("tidegate.toml", policy);
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(["serve", "--config"]).arg(file);
    command.env("TIDEGATE__ADMIN__LISTEN", "off").env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{port}"));
    (command, port)
}

fn question(client: u64, method: &str, path: &str) -> String {
    format!(
        "GET /v1/auth HTTP/1.1\r\nhost: shop.test\r\nx-forwarded-for: 192.0.2.{client}\r\nx-forwarded-method: {method}\r\n\
         x-forwarded-uri: {path}\r\n\r\n"
    )
}

#[test]
fn replay_reads_the_access_log() {
    let scratch = ScratchDir::new();
    let (command, port) = serve(&scratch, POLICY);
    let mut gate = ChildProcess::start(command, scratch, port);
    let mut client = HttpClient::connect(port).unwrap();
    let mut random = RandomSource::from_seed(11);
    let (mut asked, mut refused) = (0, 0);
    for _ in 0..300 {
        let path = ["/login?next=%2Fhome", "/item/a%20b", "/item/b\"\\?q=s3cret", "/"][random.below(4) as usize];
        let answer = client.request(question(random.below(20), ["POST", "GET"][random.below(2) as usize], path));
        assert!(matches!(answer.status, 200 | 429), "{}", answer.body);
        (asked, refused) = (asked + 1, refused + u32::from(answer.status == 429));
    }
    assert!(refused > 20, "{refused}");
    let undecided = client.request("GET /v1/nothing HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n");
    assert_eq!(undecided.status, 404, "{}", undecided.body);
    gate.send_signal("TERM");
    assert!(gate.wait().is_some_and(|status| status.success()));

    let folder = ScratchDir::new();
    folder.write("access.log", &gate.read_file("stderr"));
    folder.write("tidegate.toml", POLICY);
    let replay = Command::new(env!("CARGO_BIN_EXE_tidegate"))
        .args(["replay", "access.log", "-c", "tidegate.toml", "--refusals", "refusals"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let (text, errors) = (String::from_utf8(replay.stdout).unwrap(), String::from_utf8(replay.stderr).unwrap());
    assert!(replay.status.success(), "{errors}");
    assert!(text.contains(&format!("refuses {refused} of {asked} requests")) && !text.contains("broken"), "{text}");
    assert!(text.contains("; 1 without a decision (rejected or answered), left out"), "{text}");
    let log = gate.read_file("stderr");
    let lines: Vec<&str> = log.lines().collect();
    let found = std::fs::read_to_string(folder.path().join("refusals")).unwrap();
    let found: Vec<usize> = found.lines().filter_map(|line| line.split('\t').nth(1)?.parse().ok()).collect();
    let expected: Vec<usize> = (1..)
        .zip(&lines)
        .filter(|(_, line)| line.contains(r#""outcome":"refused""#))
        .map(|(number, _)| number)
        .collect();
    assert_eq!(found, expected, "the same requests are refused");
    assert!(!log.contains("s3cret"));
}

#[test]
fn a_blocked_log_delays_no_request() {
    const REQUESTS: u64 = 9_500;
    let scratch = ScratchDir::new();
    let (mut command, port) = serve(&scratch, POLICY);
    let mut gate = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut client = loop {
        if let Some(client) = HttpClient::connect(port) {
            break client;
        }
        thread::sleep(Duration::from_millis(10));
    };
    // More lines than the pipe and the queue take; the test reads none of them before the last answer.
    for _ in 0..REQUESTS {
        assert_eq!(client.request(question(1, "GET", "/")).status, 200);
    }
    // A summary falls into the blockade, and is dropped as well.
    thread::sleep(Duration::from_secs(6));
    let mut log = gate.stderr.take().unwrap();
    let reader = thread::spawn(move || {
        let mut text = String::new();
        log.read_to_string(&mut text).unwrap();
        text
    });
    // A line that is written proves that the log goes on.
    assert_eq!(client.request(question(1, "GET", "/last")).status, 200);
    let stopped = Command::new("kill").args(["-TERM", &gate.id().to_string()]).status().unwrap();
    assert!(stopped.success() && gate.wait().unwrap().success());
    let text = reader.join().unwrap();
    let written = text.lines().filter(|line| line.contains(r#""target":"access""#)).count() as u64;
    let report = text.lines().rfind(|line| line.contains("log lines were dropped"));
    let report: serde_json::Value = serde_json::from_str(report.unwrap()).unwrap();
    let dropped = report["total"].as_u64().unwrap();
    assert!(dropped > 0, "{written}");
    assert!(written + dropped >= REQUESTS, "{written} + {dropped}");
}
