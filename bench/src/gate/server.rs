//! Servers for one row: started on one core, awaited, read for their CPU time, and ended.

use crate::programs::{ProgramError, system_program};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tidegate_testkit::servers::free_port;

/// The ticks per second of times in /proc: 100 on every Linux, whatever the kernel's own tick.
const TICKS_PER_SECOND: f64 = 100.0;

/// The longest time until a server listens.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// A temporary folder of this run, removed at the end.
pub(super) struct TempFolder(TempDir);

impl TempFolder {
    pub(super) fn new() -> Result<Self, ProgramError> {
        tempfile::tempdir().map(Self).map_err(|error| ProgramError::new("a temporary folder", error))
    }

    pub(super) fn write(&self, name: &str, text: &str) -> Result<PathBuf, ProgramError> {
        self.write_bytes(name, text.as_bytes())
    }

    pub(super) fn write_bytes(&self, name: &str, bytes: &[u8]) -> Result<PathBuf, ProgramError> {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).map_err(|error| ProgramError::new(path.display().to_string(), error))?;
        Ok(path)
    }
}

/// A running server, ended when dropped.
pub(super) struct BenchServer {
    name: String,
    child: Child,
    pub(super) port: u16,
}

impl BenchServer {
    /// Starts a program bound to a core, and waits until it listens.
    pub(super) fn start(
        core: &str,
        name: &str,
        program: &Path,
        arguments: &[String],
        port: u16,
    ) -> Result<Self, ProgramError> {
        let child = Command::new(system_program("taskset")?)
            .args(["-c", core])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| ProgramError::new(name, error))?;
        let mut server = Self { name: name.to_owned(), child, port };
        server.await_listening()?;
        Ok(server)
    }

    /// Starts nginx as a single process with one server of this content. `listen` are words behind its address.
    pub(super) fn nginx(
        folder: &TempFolder,
        core: &str,
        name: &str,
        listen: &str,
        server_block: &str,
    ) -> Result<Self, ProgramError> {
        let port = free_port();
        let home = folder.0.path().display().to_string();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("  {kind}_temp_path {home}/{name}-{kind};\n"))
            .concat();
        let text = format!(
            "daemon off;
master_process off;
pid {home}/{name}.pid;
error_log stderr crit;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_timeout 3600s;
  keepalive_requests 1000000000;
{temporary}  server {{
    listen 127.0.0.1:{port} {listen};
{server_block}  }}
}}
"
        );
        let file = folder.write(&format!("{name}.conf"), &text)?;
        let arguments = ["-p".to_owned(), home, "-c".to_owned(), file.display().to_string()];
        let arguments = [&arguments[..], &["-e".to_owned(), "stderr".to_owned()]].concat();
        Self::start(core, "nginx", &system_program("nginx")?, &arguments, port)
    }

    fn await_listening(&mut self) -> Result<(), ProgramError> {
        let begin = Instant::now();
        while begin.elapsed() < START_TIMEOUT {
            if TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok() {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(ProgramError::new(&self.name, format!("ended before it listened ({status})")));
            }
            thread::sleep(Duration::from_millis(20));
        }
        Err(ProgramError::new(&self.name, "does not listen"))
    }

    /// Returns the CPU time so far of all its threads in seconds, in the kernel and outside.
    pub(super) fn cpu_seconds(&self) -> Result<f64, ProgramError> {
        let listing = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))
            .map_err(|error| ProgramError::new(&self.name, error))?;
        cpu_ticks(&listing)
            .map(|ticks| ticks as f64 / TICKS_PER_SECOND)
            .ok_or_else(|| ProgramError::new(&self.name, "/proc tells no CPU time"))
    }
}

impl Drop for BenchServer {
    fn drop(&mut self) {
        // It may have ended by itself, which its row has reported.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns `utime` + `stime` of /proc/PID/stat, in ticks. The program's name, in brackets, may hold any text.
fn cpu_ticks(listing: &str) -> Option<u64> {
    let (_, rest) = listing.rsplit_once(") ")?;
    let mut fields = rest.split(' ').skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ticks_are_read_despite_odd_names() {
        let listing = "42 (a) b (c) S 1 42 42 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 1 1 1";
        assert_eq!(cpu_ticks(listing), Some(300));
        assert_eq!(cpu_ticks("42 (a"), None);
    }

    #[test]
    fn own_cpu_time_is_read() {
        let listing = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(cpu_ticks(&listing).is_some());
    }
}
