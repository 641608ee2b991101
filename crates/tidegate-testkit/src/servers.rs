//! Real servers for end-to-end tests: nginx, Caddy, wrk, databases and a browser, each on free ports and in its own
//! directory.
//!
//! If a program isn't installed, its name is written to standard error and its test is skipped. With `CI=true` or
//! `TIDEGATE_REQUIRE_ALL=1` the test fails instead.

pub mod browser;
pub mod database;
pub mod mariadb;
pub mod mongo;
pub mod packages;
pub mod postgres;
mod redis;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::Duration;

use crate::random;

pub use redis::{RedisCluster, RedisSentinelGroup, RedisServer, RedisServerOptions};

/// The interval between two checks that a program has started or ended, and their largest number.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const MAX_POLLS: u32 = 500;

/// Returns the path of a program. `None`, with a line on standard error, if it isn't installed.
///
/// # Panics
/// If it isn't installed and the environment requires everything.
pub fn require_program(name: &str) -> Option<PathBuf> {
    let found = find_program(name, &[]);
    if found.is_none() {
        skip_test(&format!("{name} not found"));
    }
    found
}

/// Does the same as [`require_program`] for a program that is required only in a full run.
///
/// # Panics
/// If it isn't installed, in a full run with an environment that requires everything.
pub fn require_program_in_full_run(name: &str) -> Option<PathBuf> {
    let found = find_program(name, &[]);
    if found.is_none() {
        skip_unless_full_run(&format!("{name} not found"));
    }
    found
}

/// Returns the path of Python if it has this module. It is [`require_program_in_full_run`] for a module.
///
/// # Panics
/// The same as [`require_program_in_full_run`].
pub fn require_python_module_in_full_run(name: &str) -> Option<PathBuf> {
    let python = require_program_in_full_run("python3")?;
    let found = Command::new(&python).args(["-c", &format!("import {name}")]).stderr(Stdio::null()).status();
    if found.is_ok_and(|status| status.success()) {
        return Some(python);
    }
    skip_unless_full_run(&format!("{name} not found"));
    None
}

fn skip_unless_full_run(why: &str) {
    if random::is_full_run() { skip_test(why) } else { print_line(&format!("skipped: {why}")) }
}

/// Returns the path of a program, in one of these directories or in the usual ones.
fn find_program(name: &str, directories: &[PathBuf]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from));
    directories.iter().cloned().chain(usual).map(|place| place.join(name)).find(|file| file.is_file())
}

/// Reports that a test is skipped, for want of something that it needs.
///
/// # Panics
/// If the environment requires everything.
pub fn skip_test(why: &str) {
    let demanded = |variable: &str, value: &str| std::env::var(variable).is_ok_and(|found| found == value);
    assert!(!demanded("CI", "true") && !demanded("TIDEGATE_REQUIRE_ALL", "1"), "{why}");
    print_line(&format!("skipped: {why}"));
}

/// Writes a line to standard error directly, because the test harness captures `eprintln!`.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Returns a port on loopback on which no process listens now. This process gets each port once, and Linux by default
/// gives none of them to outgoing connections.
///
/// # Panics
/// If there is no free port.
pub fn free_port() -> u16 {
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 10_000;
    static TAKEN: AtomicU32 = AtomicU32::new(0);
    // Processes that run at the same time begin far from each other.
    let start = std::process::id().wrapping_mul(1_009);
    let ports = (0..COUNT).map(|_| FIRST + start.wrapping_add(TAKEN.fetch_add(1, Ordering::Relaxed)) % COUNT);
    let mut ports = ports.filter_map(|port| u16::try_from(port).ok());
    ports.find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok()).expect("a free port on loopback")
}

/// A directory that is removed with this value.
#[derive(Debug)]
pub struct ScratchDir(PathBuf);

impl ScratchDir {
    /// Creates a new directory.
    ///
    /// # Panics
    /// If it can't be made.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("tidegate-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).expect("a directory under the system's temporary one");
        Self(path)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file in it and returns the file's path.
    ///
    /// # Panics
    /// If the file can't be written.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let file = self.0.join(name);
        fs::write(&file, text).expect("a file in a directory of our own");
        file
    }
}

impl Default for ScratchDir {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A program that runs until this value is dropped.
#[derive(Debug)]
pub struct ChildProcess {
    child: Child,
    scratch: ScratchDir,
}

impl ChildProcess {
    /// Starts a program in its own directory, with its output in the files `stdout` and `stderr` there, and waits until
    /// it listens on `port`.
    ///
    /// # Panics
    /// If it doesn't start. The message has the program's output.
    pub fn start(command: Command, scratch: ScratchDir, port: u16) -> Self {
        Self::try_start(command, scratch, port).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`start`](Self::start), but returns the output of a program that has ended.
    fn try_start(mut command: Command, scratch: ScratchDir, port: u16) -> Result<Self, String> {
        let mut running = Self::spawn(&mut command, scratch);
        for _ in 0..MAX_POLLS {
            if TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok() {
                return Ok(running);
            }
            if let Ok(Some(status)) = running.child.try_wait() {
                return Err(format!("{command:?} ended with {status}: {}", running.output()));
            }
            sleep(POLL_INTERVAL);
        }
        Err(format!("{command:?} doesn't listen on {port}: {}", running.read_file("stderr")))
    }

    fn spawn(command: &mut Command, scratch: ScratchDir) -> Self {
        let out = fs::File::create(scratch.path().join("stdout")).expect("a file for the output");
        let err = fs::File::create(scratch.path().join("stderr")).expect("a file for the errors");
        let child = command
            .current_dir(scratch.path())
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} can't be started: {error}"));
        Self { child, scratch }
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the content of a file of its directory; empty if there is no such file.
    pub fn read_file(&self, name: &str) -> String {
        fs::read_to_string(self.scratch.path().join(name)).unwrap_or_default()
    }

    /// Returns what it has written so far: to its standard output, and then to its standard error.
    pub fn output(&self) -> String {
        self.read_file("stdout") + &self.read_file("stderr")
    }

    /// Returns the number of lines with this text in its output.
    pub fn line_count(&self, text: &str) -> usize {
        self.output().lines().filter(|line| line.contains(text)).count()
    }

    /// Waits for a line with this text in its output. A program may write a line of its log after the answer that the
    /// line is about.
    ///
    /// # Panics
    /// If there is no such line within about `timeout`. The message has the program's output.
    pub fn wait_for_line(&self, text: &str, timeout: Duration) {
        let mut waited = Duration::ZERO;
        while self.line_count(text) == 0 {
            assert!(waited < timeout, "no line with {text:?} within {timeout:?}:\n{}", self.output());
            sleep(POLL_INTERVAL);
            waited += POLL_INTERVAL;
        }
    }

    /// Sends a signal by name, such as `TERM` or `QUIT`.
    ///
    /// # Panics
    /// If it can't be sent.
    pub fn send_signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "SIG{name} can't be sent to {}", self.id());
    }

    /// Waits for its end; `None` if it doesn't end within ten seconds.
    pub fn wait(&mut self) -> Option<std::process::ExitStatus> {
        for _ in 0..MAX_POLLS {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            sleep(POLL_INTERVAL);
        }
        None
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
            return;
        }
        // SIGTERM first, because a killed master leaves its workers behind.
        let _ = Command::new("kill").args(["-TERM", &self.id().to_string()]).status();
        for _ in 0..100 {
            if self.child.try_wait().is_ok_and(|ended| ended.is_some()) {
                return;
            }
            sleep(POLL_INTERVAL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts nginx with this content of its `http` block, which listens on `port` and may write `access.log`. `None` if
/// nginx isn't installed.
///
/// # Panics
/// If it doesn't start.
pub fn nginx(http: &str, port: u16) -> Option<ChildProcess> {
    let program = require_program("nginx")?;
    let scratch = ScratchDir::new();
    let paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|kind| format!("    {kind}_temp_path {kind};\n"))
        .collect();
    // As root, nginx would change to a user that can't read this directory.
    let user = if is_root() { "user root;\n" } else { "" };
    let config = format!(
        "{user}worker_processes 1;\nerror_log error.log warn;\npid nginx.pid;\nevents {{ worker_connections 4096; }}\n\
         http {{\n{paths}    access_log off;\n{http}\n}}\n"
    );
    scratch.write("nginx.conf", &config);
    let mut command = Command::new(program);
    command.args(["-e", "error.log", "-p"]).arg(scratch.path()).args(["-c", "nginx.conf", "-g", "daemon off;"]);
    Some(ChildProcess::start(command, scratch, port))
}

/// Starts Caddy with this Caddyfile, which listens on `port`. `None` if Caddy isn't installed.
///
/// # Panics
/// If it doesn't start.
pub fn caddy(caddyfile: &str, port: u16) -> Option<ChildProcess> {
    let program = require_program("caddy")?;
    let scratch = ScratchDir::new();
    scratch.write("Caddyfile", &format!("{{\n\tadmin off\n\tauto_https off\n}}\n{caddyfile}"));
    let mut command = Command::new(program);
    command
        .args(["run", "--config", "Caddyfile", "--adapter", "caddyfile"])
        .env("HOME", scratch.path())
        .env("XDG_DATA_HOME", scratch.path())
        .env("XDG_CONFIG_HOME", scratch.path());
    Some(ChildProcess::start(command, scratch, port))
}

/// Opens a page in a headless Chromium, in which `name` resolves to 127.0.0.1, and returns the document after the whole
/// page has loaded. `None` if Chromium isn't installed.
///
/// # Panics
/// If it doesn't end successfully in time.
pub fn chromium_dom(url: &str, name: &str) -> Option<String> {
    let program = require_program("chromium")?;
    let scratch = ScratchDir::new();
    let mut command = Command::new(program);
    command
        // Root can't create its sandbox, and the pages are trusted.
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", scratch.path().join("profile").display()))
        .arg(format!("--host-resolver-rules=MAP {name} 127.0.0.1"))
        .args(["--dump-dom", url])
        .env("HOME", scratch.path());
    let mut running = ChildProcess::spawn(&mut command, scratch);
    // A machine that is busy with other tests may take long to start it.
    let ended = (0..6).find_map(|_| running.wait());
    let is_good = ended.is_some_and(|status| status.success());
    assert!(is_good, "Chromium ended with {ended:?}: {}", running.read_file("stderr"));
    Some(running.read_file("stdout"))
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

/// The counts of wrk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrkSummary {
    /// Responses that arrived.
    pub answers: u64,
    /// Responses with a status other than 2xx and 3xx.
    pub not_ok: u64,
    /// Connections that couldn't be made.
    pub connect_errors: u64,
    /// Reads and writes that failed.
    pub read_write_errors: u64,
    /// Responses that took longer than wrk's timeout.
    pub timeouts: u64,
    /// Responses with a status of 500 or above. They are part of `not_ok`.
    pub server_errors: u64,
}

/// A run of wrk in the background.
#[derive(Debug)]
pub struct WrkProcess {
    child: Child,
    _scratch: ScratchDir,
}

/// Sends load to `url` over `connections` for `seconds`. `None` if wrk isn't installed.
///
/// # Panics
/// If it doesn't start.
pub fn wrk(url: &str, connections: u32, seconds: u32) -> Option<WrkProcess> {
    let program = require_program("wrk")?;
    let scratch = ScratchDir::new();
    // Each thread counts its own server errors; the end adds them up.
    let script = "local threads = {}\n\
        function setup(thread) table.insert(threads, thread) end\n\
        function init() server_errors = 0 end\n\
        function response(status) if status >= 500 then server_errors = server_errors + 1 end end\n\
        function done(summary)\n\
          local all = 0\n\
          for _, thread in ipairs(threads) do all = all + thread:get('server_errors') end\n\
          local e = summary.errors\n\
          io.write(string.format('counted %d %d %d %d %d %d\\n', summary.requests, e.status, e.connect, \
            e.read + e.write, e.timeout, all))\n\
        end\n";
    let script = scratch.write("count.lua", script);
    let child = Command::new(program)
        .args(["-t1", &format!("-c{connections}"), &format!("-d{seconds}s"), "-s"])
        .arg(script)
        .arg(url)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("wrk starts");
    Some(WrkProcess { child, _scratch: scratch })
}

impl WrkProcess {
    /// Waits for its end and returns its counts.
    ///
    /// # Panics
    /// If its output has no counts.
    pub fn finish(mut self) -> WrkSummary {
        let mut text = String::new();
        if let Some(out) = &mut self.child.stdout {
            out.read_to_string(&mut text).expect("wrk's output is text");
        }
        let _ = self.child.wait();
        let line = text.lines().find_map(|line| line.strip_prefix("counted "));
        let numbers: Vec<u64> = line.unwrap_or_default().split(' ').filter_map(|number| number.parse().ok()).collect();
        let &[answers, not_ok, connect_errors, broken, timeouts, server_errors] = numbers.as_slice() else {
            panic!("wrk did not count: {text}")
        };
        WrkSummary { answers, not_ok, connect_errors, read_write_errors: broken, timeouts, server_errors }
    }
}
