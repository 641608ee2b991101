//! A running program takes over a changed policy file.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

use tidegate_testkit::random::case_count;
use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

struct Gate {
    running: ChildProcess,
    file: PathBuf,
    ports: [u16; 2],
}

fn policy(limit: &str) -> String {
    format!(
        "[inbound.action.login]\nkey = [\"key\"]\nlimit = \"{limit}\"\npenalty = {{ base = \"10m\", cap = \"1h\" }}\n"
    )
}

impl Gate {
    fn start(store: &str) -> Self {
        let scratch = ScratchDir::new();
        let file = scratch.write("tidegate.toml", &policy("5 per 1h"));
        Self::start_with(scratch, file, store)
    }

    fn start_with(scratch: ScratchDir, file: PathBuf, store: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["serve", "--config"]).arg(&file);
        Self::start_as(command, scratch, file, store)
    }

    fn start_as(mut command: Command, scratch: ScratchDir, file: PathBuf, store: &str) -> Self {
        let ports = [free_port(), free_port()];
        command
            .env("TIDEGATE__STORE__URL", store)
            .env("TIDEGATE__API__LISTEN", format!("127.0.0.1:{}", ports[0]))
            .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{}", ports[1]));
        Self { running: ChildProcess::start(command, scratch, ports[1]), file, ports }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        let [api, admin] = self.ports.map(|port| format!("127.0.0.1:{port}"));
        command.args(arguments).env("TIDEGATE__API__LISTEN", api).env("TIDEGATE__ADMIN__LISTEN", admin);
        command.env("TIDEGATE__INBOUND__UPSTREAM", "http://127.0.0.1:1").output().unwrap()
    }

    /// Writes this policy, and reloads it by the command. Returns the command's output.
    fn reload(&self, text: &str) -> Result<String, String> {
        fs::write(&self.file, text).unwrap();
        let output = self.run(&["reload"]);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    fn check(&self, key: &str) -> u16 {
        let body = format!("{{\"action\":\"login\",\"key\":\"{key}\"}}");
        let head = "POST /v1/check HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n";
        ask(self.ports[0], &format!("{head}content-length: {}\r\n\r\n{body}", body.len()))
    }

    fn reload_over_http(&self) -> u16 {
        let head = "POST /v1/reload HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n";
        ask(self.ports[1], &format!("{head}content-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}"))
    }

    fn wait_for_log(&self, text: &str) {
        self.running.wait_for_line(text, Duration::from_secs(10));
    }

    fn resident_bytes(&self) -> usize {
        let pages = fs::read_to_string(Path::new("/proc").join(self.running.id().to_string()).join("statm")).unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }
}

/// The status of the answer to this request.
fn ask(port: u16, request: &str) -> u16 {
    use std::io::{Read as _, Write as _};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.split(' ').nth(1).unwrap().parse().unwrap()
}

#[test]
fn the_command_and_sighup_reload() {
    let folder = ScratchDir::new();
    for store in ["memory".to_owned(), format!("file:{}", folder.path().join("state.redb").display())] {
        let gate = Gate::start(&store);
        assert_eq!([(); 5].map(|()| gate.check("a")), [200; 5], "{store}");
        assert_eq!([(); 4].map(|()| gate.check("b")), [200; 4], "{store}");
        assert_eq!(gate.check("a"), 429, "{store}: the block begins");
        assert_eq!(gate.reload(&policy("7 per 1h")).unwrap(), "reloaded\n");
        assert_eq!([(); 4].map(|()| gate.check("b")), [200, 200, 200, 429], "{store}: 4 of 7 were used");
        assert_eq!(gate.check("a"), 429, "{store}: the block stays");

        let wrong = gate.reload(&policy("7 per 1h").replace("limit", "limmit")).unwrap_err();
        assert!(wrong.contains("tidegate.toml:3:1") && wrong.contains("did you mean `limit`"), "{wrong}");
        let fixed = format!("{}[log]\nrefusals_per_second = 99\n", policy("7 per 1h"));
        assert_eq!(gate.reload(&fixed).unwrap(), "reloaded; a restart is needed for log\n");

        fs::write(&gate.file, policy("unlimited")).unwrap();
        gate.running.send_signal("HUP");
        let is_reloaded = (0..500).any(|_| {
            thread::sleep(Duration::from_millis(20));
            gate.check("a") == 200
        });
        assert!(is_reloaded, "{store}: {}", gate.running.read_file("stderr"));
    }
}

impl Gate {
    /// Waits until new keys get this status.
    fn wait_for(&self, status: u16, why: &str) {
        let is_there = (0..500).any(|number| {
            thread::sleep(Duration::from_millis(20));
            self.check(&format!("{why}{number}")) == status
        });
        assert!(is_there, "{why}: {}", self.running.read_file("stderr"));
    }
}

const WATCH: &str = "[reload]\nwatch = true\n";

#[test]
fn changes_of_the_file_reload() {
    let (open, closed) = (policy("1000 per 1h") + WATCH, policy("0 per 1h") + WATCH);
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", &open);
    let gate = Gate::start_with(scratch, file, "memory");
    fs::write(&gate.file, &closed).unwrap();
    gate.wait_for(429, "in place");
    let new = gate.file.with_extension("new");
    fs::write(&new, &open).unwrap();
    fs::rename(&new, &gate.file).unwrap();
    gate.wait_for(200, "by a rename");

    fs::write(&gate.file, closed.replace("limit", "limmit")).unwrap();
    gate.wait_for_log("did you mean `limit`");
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(
        (gate.running.line_count("did you mean `limit`"), gate.check("broken")),
        (1, 200),
        "told once, and nothing changes"
    );
    fs::write(&gate.file, &closed).unwrap();
    gate.wait_for(429, "mended");

    fs::remove_file(&gate.file).unwrap();
    gate.wait_for_log("the file is gone");
    assert_eq!(gate.check("gone"), 429);
    fs::write(&gate.file, &open).unwrap();
    gate.wait_for(200, "back");
    assert_eq!(gate.reload(&open.replace("true", "false")).unwrap(), "reloaded\n");

    fs::write(&gate.file, &closed).unwrap();
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(gate.check("unwatched"), 200);
    gate.run(&["reload"]);
    assert_eq!(gate.check("reloaded"), 429);
}

#[test]
fn changes_of_rate_limit_files_reload() {
    let scratch = ScratchDir::new();
    let yaml = |requests: u32| {
        let limit = format!("{{unit: hour, requests_per_unit: {requests}}}");
        format!("domain: login\ndescriptors:\n- {{key: \"é\", rate_limit: {limit}}}\n")
    };
    fs::create_dir(scratch.path().join("limits")).unwrap();
    let first = scratch.write("limits/a.yaml", &yaml(1000));
    let text = format!("{WATCH}[rls]\nlisten = \"off\"\nfiles = \"{}\"\n", first.parent().unwrap().display());
    let file = scratch.write("tidegate.toml", &text);
    let gate = Gate::start_with(scratch, file, "memory");
    gate.wait_for(200, "as started");
    fs::write(&first, yaml(0)).unwrap();
    gate.wait_for(429, "in place");
    fs::write(&first, "domain: [").unwrap();
    gate.wait_for_log("a.yaml:1:");
    assert_eq!(gate.check("broken"), 429);
    fs::rename(&first, first.with_file_name("off")).unwrap();
    fs::write(first.with_file_name("b.yml"), yaml(1000)).unwrap();
    gate.wait_for(200, "by another file of the directory");
}

/// A program that writes in place first makes the file empty.
#[test]
fn a_usual_file_that_is_gone_changes_nothing() {
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", &policy("1 per 1h"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.arg("serve").current_dir(scratch.path()).env("TIDEGATE__INBOUND__UPSTREAM", "http://127.0.0.1:1");
    command.env("TIDEGATE__INBOUND__LISTEN", format!("127.0.0.1:{}", free_port()));
    let gate = Gate::start_as(command, scratch, file, "memory");
    fs::remove_file(&gate.file).unwrap();
    let refused = gate.run(&["reload"]);
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("can't read tidegate.toml"), "{text}");
    assert_eq!([gate.check("k"), gate.check("k")], [200, 429]);
}

#[test]
fn a_half_written_file_removes_no_limits() {
    let closed = policy("0 per 1h") + WATCH;
    let scratch = ScratchDir::new();
    let file = scratch.write("tidegate.toml", &closed);
    let gate = Gate::start_with(scratch, file, "memory");
    for (text, removed) in [("", "every setting, every limit"), ("[inbound]\n", "every limit")] {
        fs::write(&gate.file, text).unwrap();
        gate.wait_for_log(&format!("the changed file removes {removed}; if that is meant, `tidegate reload`"));
        assert_eq!(gate.check("empty"), 429);
    }
    fs::write(&gate.file, policy("1000 per 1h")).unwrap();
    gate.wait_for(200, "without `watch`");
    fs::write(&gate.file, &closed).unwrap();
    gate.wait_for(429, "still watched");
    assert_eq!(gate.reload("").unwrap(), "reloaded\n", "an operator may remove all limits");
    assert_eq!(gate.check("unknown"), 404);
}

#[test]
fn only_regular_files_reload() {
    let gate = Gate::start("memory");
    let replace = |make: &dyn Fn()| {
        fs::remove_file(&gate.file).unwrap();
        make();
        gate.reload_over_http()
    };
    let pipe = || assert!(Command::new("mkfifo").arg(&gate.file).status().unwrap().success());
    assert_eq!(replace(&pipe), 422);
    let huge = || fs::File::create(&gate.file).unwrap().set_len(2 << 30).unwrap();
    assert_eq!(replace(&huge), 422);
    gate.wait_for_log("isn't a regular file");
    gate.wait_for_log("it has more than 16777216 bytes");
    assert!(gate.resident_bytes() < 512 << 20);
    assert_eq!(replace(&|| fs::write(&gate.file, policy("7 per 1h")).unwrap()), 200);
}

#[test]
fn a_policy_may_come_through_a_pipe() {
    for name in ["-", "/dev/stdin"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
        command.args(["check", name]).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut check = command.spawn().unwrap();
        std::io::Write::write_all(&mut check.stdin.take().unwrap(), policy("7 per 1h").as_bytes()).unwrap();
        let output = check.wait_with_output().unwrap();
        assert!(output.status.success() && String::from_utf8(output.stdout).unwrap().contains("at most 9"), "{name}");
    }
}

/// Kubernetes replaces the folder of a volume by replacing the link to it.
#[test]
fn a_replaced_link_to_the_folder_reloads() {
    let scratch = ScratchDir::new();
    let folder = scratch.path().to_owned();
    let link = |name: &str, target: &str| std::os::unix::fs::symlink(target, folder.join(name)).unwrap();
    for (version, limit) in [("..1", "1000 per 1h"), ("..2", "0 per 1h")] {
        fs::create_dir(folder.join(version)).unwrap();
        fs::write(folder.join(version).join("tidegate.toml"), policy(limit) + WATCH).unwrap();
    }
    link("..data", "..1");
    link("tidegate.toml", "..data/tidegate.toml");
    let gate = Gate::start_with(scratch, folder.join("tidegate.toml"), "memory");
    assert_eq!(gate.check("before"), 200);
    link("..new", "..2");
    fs::rename(folder.join("..new"), folder.join("..data")).unwrap();
    fs::remove_dir_all(folder.join("..1")).unwrap();
    gate.wait_for(429, "by a link");
}

#[test]
fn memory_does_not_grow_over_reloads() {
    let folder = ScratchDir::new();
    for store in ["memory".to_owned(), format!("file:{}", folder.path().join("state.redb").display())] {
        let gate = Gate::start(&store);
        let reload = |count: usize| {
            for number in 0..count {
                fs::write(&gate.file, policy(&format!("{} per 1h", 5 + number % 9))).unwrap();
                assert_eq!(gate.reload_over_http(), 200);
            }
        };
        // The first ones fill what is kept: events, log lines, connections.
        reload(1100);
        // The allocator may take memory once; a leak grows each time.
        let grown = std::iter::repeat_with(|| {
            let before = gate.resident_bytes();
            reload(case_count(400, 1000) as usize);
            gate.resident_bytes().saturating_sub(before)
        });
        let grown = grown.take(3).min().unwrap();
        assert!(grown < 1 << 20, "{store}: {grown} bytes");
    }
}
