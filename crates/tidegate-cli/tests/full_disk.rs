//! A gate with a file that can't be written for a time. A limit on the size of files stands for a full disk: the kernel
//! then refuses writes, and nothing else.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tidegate_testkit::http_client::{HttpClient, HttpResponse, get_request};
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

/// The size at which the log can still be written, but no commit.
const NOTHING: u64 = 8_192;

struct Gate {
    running: ChildProcess,
    port: u16,
}

impl Gate {
    fn start(store: &Path, more: &str) -> Self {
        let scratch = ScratchDir::new();
        let policy = format!(
            "[store]\nurl = \"file:{}\"\nsync = \"always\"\n{more}\n\
             [inbound.action.day]\nkey = [\"key\"]\nlimit = \"1000 per 24h\"\n\
             [inbound.action.login]\nkey = [\"key\"]\nlimit = \"1 per 24h\"\nban = \"12h\"\n",
            store.display()
        );
        let port = free_port();
        // Otherwise the kernel ends a process that writes beyond the limit.
        let mut command = Command::new("sh");
        command
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_tidegate"), "serve", "--config"])
            .arg(scratch.write("tidegate.toml", &policy))
            .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{port}"))
            .env("TIDEGATE__ADMIN__LISTEN", "off");
        Self { running: ChildProcess::start(command, scratch, port), port }
    }

    fn ask(&self, request: impl AsRef<[u8]>) -> HttpResponse {
        HttpClient::connect(self.port).expect("the gate listens").request(request)
    }

    fn check(&self, action: &str, key: &str) -> u16 {
        self.post("check", action, key)
    }

    fn post(&self, what: &str, action: &str, key: &str) -> u16 {
        let body = format!("{{\"action\":\"{action}\",\"key\":\"{key}\"}}");
        let head = format!("POST /v1/{what} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n");
        self.ask(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())).status
    }

    fn left(&self, key: &str) -> u64 {
        let answer = self.ask(get_request(&format!("/v1/status?action=day&key={key}")));
        let decision: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
        decision["remaining"].as_u64().unwrap()
    }

    /// Sets the maximum size of files from now on; `None` for no limit.
    fn disk(&self, size: Option<u64>) {
        let pid = Pid::from_raw(i32::try_from(self.running.id()).unwrap());
        prlimit(pid, Resource::Fsize, Rlimit { current: size, maximum: None }).unwrap();
    }

    fn wait_for_log(&self, text: &str) {
        self.running.wait_for_line(text, Duration::from_secs(20));
    }

    fn kill(mut self) {
        self.running.send_signal("KILL");
        self.running.wait();
    }
}

#[test]
fn a_full_disk_refuses_calls_by_default() {
    let folder = ScratchDir::new();
    let store = folder.path().join("state");
    let gate = Gate::start(&store, "");
    let mut admitted = (0..10).filter(|_| gate.check("day", "k") == 200).count();
    assert_eq!(admitted, 10);
    assert_eq!((gate.check("login", "bad"), gate.check("login", "bad")), (200, 429));

    gate.disk(Some(NOTHING));
    for call in 0..20 {
        assert_eq!(gate.check("day", "k"), 503, "call {call}");
    }
    assert_eq!(gate.check("login", "bad"), 429, "a block is known");
    assert_eq!(gate.post("reset", "login", "bad"), 503, "a reset would be lost as well");
    gate.wait_for_log("can't be written");
    gate.disk(None);
    let mut tries = 0;
    while gate.check("day", "k") != 200 {
        tries += 1;
        assert!(tries < 400, "it isn't noticed that there is room");
        sleep(Duration::from_millis(50));
    }
    admitted += 1;
    admitted += (0..10).filter(|_| gate.check("day", "k") == 200).count();

    gate.disk(Some(NOTHING));
    assert_eq!((gate.check("day", "k"), gate.check("day", "other")), (503, 503));
    gate.kill();
    let gate = Gate::start(&store, "");
    let used = 1000 - gate.left("k");
    assert!((21..=23).contains(&used), "{admitted} were admitted, and {used} are counted");
    assert_eq!(gate.check("login", "bad"), 429);
}

#[test]
fn a_full_disk_continues_decisions_if_configured() {
    let folder = ScratchDir::new();
    let store = folder.path().join("state");
    let gate = Gate::start(&store, "on_full = \"continue\"");
    assert_eq!(gate.check("day", "k"), 200);
    gate.disk(Some(NOTHING));
    assert!((0..20).all(|_| gate.check("day", "k") == 200));
    gate.wait_for_log("can't be written");
    gate.disk(None);
    gate.wait_for_log("is written again");
    gate.kill();
    assert_eq!(Gate::start(&store, "").left("k"), 1000 - 21);
}
