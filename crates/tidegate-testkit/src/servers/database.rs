//! A database with data that outlive its process. It can be stopped, killed, frozen and started again.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;

use parking_lot::Mutex;

use super::{ChildProcess, MAX_POLLS, POLL_INTERVAL, ScratchDir, free_port};

/// A database on its own port, with data in its own directory.
pub struct DatabaseServer {
    process: Mutex<Option<ChildProcess>>,
    command: Box<dyn Fn() -> Command + Send + Sync>,
    url: String,
    ready_text: &'static str,
    port: u16,
    _data_dir: ScratchDir,
}

impl DatabaseServer {
    /// Starts the program that `command` makes for a data directory and a port. `url` makes the address for the port.
    /// `ready` is the text that the program writes to its output when it is ready.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn start(
        data: ScratchDir,
        url: impl FnOnce(u16) -> String,
        ready: &'static str,
        command: impl Fn(&Path, u16) -> Command + Send + Sync + 'static,
    ) -> Self {
        let (port, path) = (free_port(), data.path().to_owned());
        let command = Box::new(move || command(&path, port));
        let database =
            Self { process: Mutex::default(), command, url: url(port), ready_text: ready, port, _data_dir: data };
        database.restart();
        database
    }

    /// Returns its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Returns its port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Starts it again with its data and port, after it was stopped or killed.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn restart(&self) {
        let start = || ChildProcess::try_start((self.command)(), ScratchDir::new(), self.port);
        // A child that was forked just before its parent was killed keeps the shared memory for a moment.
        let is_taken = |started: &Result<_, String>| matches!(started, Err(error) if error.contains("still in use"));
        let mut started = start();
        for _ in 0..MAX_POLLS {
            if !is_taken(&started) {
                break;
            }
            sleep(POLL_INTERVAL);
            started = start();
        }
        let running = started.unwrap_or_else(|error| panic!("{error}"));
        let ready = (0..MAX_POLLS).any(|_| {
            let ready = ["stdout", "stderr"].iter().any(|output| running.read_file(output).contains(self.ready_text));
            if !ready {
                sleep(POLL_INTERVAL);
            }
            ready
        });
        assert!(ready, "it isn't ready: {}", running.read_file("stderr"));
        *self.process.lock() = Some(running);
    }

    /// Asks it to end, and waits for the end.
    pub fn stop(&self) {
        drop(self.process.lock().take());
    }

    /// Ends it and its children with SIGKILL.
    ///
    /// # Panics
    /// If it isn't running.
    pub fn kill(&self) {
        let family = self.send_signal("KILL");
        self.stop();
        while family.iter().any(|id| is_alive(*id)) {
            sleep(POLL_INTERVAL);
        }
    }

    /// Suspends it and its children until [`DatabaseServer::thaw`].
    ///
    /// # Panics
    /// If it isn't running.
    pub fn freeze(&self) {
        self.send_signal("STOP");
    }

    /// Resumes it.
    ///
    /// # Panics
    /// If it isn't running.
    pub fn thaw(&self) {
        self.send_signal("CONT");
    }

    fn send_signal(&self, name: &str) -> Vec<u32> {
        let running = self.process.lock();
        let id = running.as_ref().expect("a database that runs").id();
        let mut process_ids = vec![id];
        // The list of children is gone once the parent has ended.
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        process_ids.extend(children.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
        let ids: Vec<String> = process_ids.iter().map(u32::to_string).collect();
        // A child may have ended by itself meanwhile.
        let _ = Command::new("kill").arg(format!("-{name}")).args(&ids).status();
        process_ids
    }
}

/// Returns true if a process runs. A zombie, which has ended but wasn't waited for, doesn't.
fn is_alive(id: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}
