//! A quota's spent units stay spent, however the program ends.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_testkit::servers::{ChildProcess, ScratchDir, free_port};

/// An API that answers every request, and the number of requests.
fn api() -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&asked);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, counted) = (stream.unwrap(), Arc::clone(&counted));
            thread::spawn(move || {
                let mut head = Vec::new();
                let mut byte = [0];
                while stream.read(&mut byte).is_ok_and(|read| read == 1) {
                    head.push(byte[0]);
                    if head.ends_with(b"\r\n\r\n") {
                        head.clear();
                        counted.fetch_add(1, Ordering::Relaxed);
                        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
                    }
                }
            });
        }
    });
    (port, asked)
}

struct Gate {
    running: ChildProcess,
    port: u16,
}

fn command(upstream: u16, snapshot: &Path, scratch: &ScratchDir) -> (Command, u16, u16) {
    // A test almost never runs across the end of a year.
    let policy = format!(
        "[outbound]\nsnapshot = \"{}\"\n[outbound.provider.omdb]\npreset = \"omdb-free\"\ncache = \"off\"\n\
         base_url = \"http://127.0.0.1:{upstream}\"\ncredentials = \"env:OMDB_KEY\"\ncredential_limit = \"40 per calendar year\"\n",
        snapshot.display()
    );
    let (port, admin) = (free_port(), free_port());
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(["serve", "--config"])
        .arg(scratch.write("tidegate.toml", &policy))
        .env("OMDB_KEY", "pl4nted-s3cr3t")
        .env("TIDEGATE__OUTBOUND__LISTEN", format!("127.0.0.1:{port}"))
        .env("TIDEGATE__API__LISTEN", "off")
        .env("TIDEGATE__ADMIN__LISTEN", format!("127.0.0.1:{admin}"));
    (command, port, admin)
}

impl Gate {
    fn start(upstream: u16, snapshot: &Path) -> Self {
        let scratch = ScratchDir::new();
        let (command, port, admin) = command(upstream, snapshot, &scratch);
        Self { running: ChildProcess::start(command, scratch, admin), port }
    }

    /// Makes a call; returns its status and reply.
    fn call(&self) -> (u16, String) {
        let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], self.port))).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let request = format!("GET /omdb/?i=1 HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nConnection: close\r\n\r\n", self.port);
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).unwrap();
        (reply.split(' ').nth(1).unwrap().parse().unwrap(), reply)
    }

    fn spend(&self, calls: u64) {
        for _ in 0..calls {
            let (status, reply) = self.call();
            assert_eq!(status, 200, "{reply}");
        }
    }

    /// Makes calls until the quota is spent; returns the number of admitted calls.
    fn exhaust(&self) -> u64 {
        for passed in 0..100 {
            let (status, reply) = self.call();
            if status != 200 {
                assert!(status == 429 && reply.contains("QuotaSpentError"), "{reply}");
                return passed;
            }
        }
        panic!("nothing refuses");
    }

    fn end(mut self, signal: &str) {
        self.running.send_signal(signal);
        self.running.wait();
    }
}

#[test]
fn a_quota_survives_kill_and_shutdown() {
    let folder = ScratchDir::new();
    let snapshot = folder.path().join("outbound.json");
    let (upstream, asked) = api();

    let gate = Gate::start(upstream, &snapshot);
    gate.spend(10);
    thread::sleep(Duration::from_millis(2_500));
    gate.spend(5);
    gate.end("KILL");

    let gate = Gate::start(upstream, &snapshot);
    gate.spend(3);
    // On TERM the gate saves the changes since the last save.
    gate.end("TERM");

    let gate = Gate::start(upstream, &snapshot);
    let left = gate.exhaust();
    assert!((22..=27).contains(&left), "of 40, 10 and 3 were saved and 5 perhaps: {left}");
    gate.end("TERM");
    assert_eq!(asked.load(Ordering::Relaxed), 18 + left);

    let gate = Gate::start(upstream, &snapshot);
    assert_eq!(gate.exhaust(), 0);
    gate.end("TERM");
    assert!(!fs::read_to_string(&snapshot).unwrap().contains("s3cr3t"));
}

#[test]
fn a_broken_snapshot_is_reported_and_left_unchanged() {
    let folder = ScratchDir::new();
    let snapshot: PathBuf = folder.write("outbound.json", "{ \"tidegate_outbound\": 1, \"records\"");
    let scratch = ScratchDir::new();
    let (mut command, ..) = command(1, &snapshot, &scratch);
    let output = command.output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(told.contains("outbound.snapshot") && told.contains("line 1"), "{told}");
    assert_eq!(fs::read_to_string(&snapshot).unwrap(), "{ \"tidegate_outbound\": 1, \"records\"");
}
