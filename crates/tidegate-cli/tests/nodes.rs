//! Several gates over one server see each other, until they end or fall silent.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use tidegate_testkit::http_client::{HttpClient, get_request};
use tidegate_testkit::servers::mariadb::mariadb;
use tidegate_testkit::servers::postgres::postgres;
use tidegate_testkit::servers::{ChildProcess, RedisServer, ScratchDir, free_port};

/// An announcement each second; silent after three seconds, and forgotten after eight.
const POLICY: &str =
    "[store]\nnode_expiry = \"8s\"\n[inbound.action.api]\nkey = [\"key\"]\nlimit = \"1000000 per 60s\"\n";
/// Longer than any wait here takes, unless it is in vain.
const PATIENCE: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

struct Gate {
    running: ChildProcess,
    api: u16,
    admin: u16,
}

impl Gate {
    /// Starts a gate. Without a name, it has its default name.
    fn start(store: &str, name: Option<&str>) -> Self {
        let (scratch, [api, admin]) = (ScratchDir::new(), [free_port(), free_port()]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command
            .args(["serve", "--config"])
            .arg(scratch.write("tidegate.toml", POLICY))
            .env("TIDEGATE__STORE__URL", store)
            .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{api}"))
            .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{admin}"));
        if let Some(name) = name {
            command.env("TIDEGATE__STORE__NODE_NAME", name);
        }
        Self { running: ChildProcess::start(command, scratch, admin), api, admin }
    }

    fn fleet(&self) -> Value {
        let answer = HttpClient::connect(self.admin).unwrap().request(get_request("/v1/fleet"));
        serde_json::from_str(&answer.body).unwrap()
    }

    /// The names of the other nodes with their states, by name.
    fn others(&self) -> Vec<(String, String)> {
        let fleet = self.fleet();
        let text = |node: &Value, field: &str| node[field].as_str().unwrap().to_owned();
        let others = fleet["nodes"].as_array().unwrap().iter().filter(|node| node["this"] == false);
        let mut others: Vec<_> = others.map(|node| (text(node, "name"), text(node, "state"))).collect();
        others.sort();
        others
    }

    fn wait_for_others(&self, expected: &[(&str, &str)]) {
        wait_until(|| {
            let others = self.others();
            let others = others.iter().map(|(name, state)| (name.as_str(), state.as_str()));
            others.eq(expected.iter().copied()).then_some(()).ok_or_else(|| self.fleet())
        });
    }

    fn check(&self) -> u16 {
        let body = "{\"action\":\"api\",\"key\":\"k\"}";
        let request =
            format!("POST /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        HttpClient::connect(self.api).unwrap().request(request).status
    }

    /// The output of `tidegate fleet`.
    fn command_output(&self) -> String {
        let url = format!("http://127.0.0.1:{}", self.admin);
        let output = Command::new(env!("CARGO_BIN_EXE_tidegate")).args(["fleet", "--url", &url]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn default_name(&self) -> String {
        let names = self.fleet();
        names["nodes"][0]["name"].as_str().unwrap().to_owned()
    }
}

/// Polls until there is a value. A panic has the last error.
fn wait_until<T>(mut poll: impl FnMut() -> Result<T, Value>) -> T {
    for _ in 0..PATIENCE.as_millis() / POLL_INTERVAL.as_millis() {
        if let Ok(found) = poll() {
            return found;
        }
        sleep(POLL_INTERVAL);
    }
    panic!("{}", poll().err().unwrap_or_default())
}

/// Gates see each other. One that is killed falls silent and is forgotten; one that is stopped is gone at once.
fn check_nodes(store: &str) {
    let first = Gate::start(store, Some("first"));
    let unnamed = Gate::start(store, None);
    let mut twin = Gate::start(store, Some("first"));
    let name = unnamed.default_name();
    assert!(name.ends_with(&format!("/{}", unnamed.running.id())), "{name}");
    let mut expected = [("first", "live"), (name.as_str(), "live")];
    expected.sort_unstable();
    first.wait_for_others(&expected);
    unnamed.wait_for_others(&[("first", "live"), ("first", "live")]);
    wait_until(|| {
        assert_eq!(first.check(), 200);
        let fleet = unnamed.fleet();
        let has_rate = |node: &Value| node["decisions_per_second"].as_f64().is_some_and(|rate| rate > 0.0);
        let nodes = fleet["nodes"].as_array().unwrap();
        if nodes.iter().any(|node| node["this"] == false && has_rate(node)) { Ok(()) } else { Err(fleet) }
    });

    twin.running.send_signal("TERM");
    twin.running.wait();
    first.wait_for_others(&[(&name, "live")]);

    unnamed.running.send_signal("KILL");
    first.wait_for_others(&[(&name, "silent")]);
    let text = first.command_output();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].starts_with("first (this node)  live"), "{text}");
    assert!(lines[2].starts_with(&name) && lines[2].contains("silent"), "{text}");
    first.wait_for_others(&[]);
}

#[test]
fn gates_over_redis_see_each_other() {
    let Some(mut redis) = RedisServer::start() else { return };
    check_nodes(&redis.url());
    assert_ne!(redis.command(&["PTTL", "tidegate:nodes"]), "-1", "the list of nodes expires by itself");

    let [first, second] = ["first", "second"].map(|name| Gate::start(&redis.url(), Some(name)));
    first.wait_for_others(&[("second", "live")]);
    redis.kill();
    for gate in [&first, &second] {
        wait_until(|| {
            let fleet = gate.fleet();
            let is_down = fleet["nodes"][0]["link"]["up"] == false && fleet["nodes"][1]["state"] == "unknown";
            if is_down { Ok(()) } else { Err(fleet) }
        });
        assert!(gate.command_output().contains("down, "), "{}", gate.command_output());
    }
    redis.restart();
    for (gate, other) in [(&first, "second"), (&second, "first")] {
        gate.wait_for_others(&[(other, "live")]);
        wait_until(|| Some(()).filter(|()| gate.fleet()["nodes"][0]["link"]["up"] == true).ok_or_else(|| gate.fleet()));
    }
}

#[test]
fn gates_over_mariadb_see_each_other() {
    let Some(server) = mariadb() else { return };
    check_nodes(server.url());
}

#[test]
fn gates_over_postgresql_see_each_other() {
    let Some(server) = postgres() else { return };
    check_nodes(server.url());
}
