//! A database whose data outlive its process: it can be stopped, killed, frozen, and started again.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;

use super::{LOOK_EVERY, LOOKS, Running, Scratch, free_port};

/// A database on a port of its own, with data in a directory of its own.
pub struct Database {
    running: Mutex<Option<Running>>,
    command: Box<dyn Fn() -> Command + Send + Sync>,
    url: String,
    ready: &'static str,
    port: u16,
    _data: Scratch,
}

impl Database {
    /// Starts the program that `command` makes for a directory with data and a port; `url` makes the address for the
    /// port, and `ready` is what the program writes to its output when it can be used.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn start(
        data: Scratch,
        url: impl FnOnce(u16) -> String,
        ready: &'static str,
        command: impl Fn(&Path, u16) -> Command + Send + Sync + 'static,
    ) -> Self {
        let (port, path) = (free_port(), data.path().to_owned());
        let command = Box::new(move || command(&path, port));
        let database = Self { running: Mutex::default(), command, url: url(port), ready, port, _data: data };
        database.restart();
        database
    }

    /// Where it is.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Starts it again on its data and port, after it was stopped or killed.
    ///
    /// # Panics
    /// If it doesn't start.
    pub fn restart(&self) {
        let running = Running::start((self.command)(), Scratch::new(), self.port);
        let ready = (0..LOOKS).any(|_| {
            let ready = ["stdout", "stderr"].iter().any(|output| running.read(output).contains(self.ready));
            if !ready {
                sleep(LOOK_EVERY);
            }
            ready
        });
        assert!(ready, "it isn't ready: {}", running.read("stderr"));
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
    }

    /// Asks it to end, and waits for that.
    pub fn stop(&self) {
        drop(self.running.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Ends it and its children with SIGKILL.
    ///
    /// # Panics
    /// If it doesn't run.
    pub fn kill(&self) {
        let family = self.signal("KILL");
        self.stop();
        while family.iter().any(|id| is_alive(*id)) {
            sleep(LOOK_EVERY);
        }
    }

    /// Stops it and its children where they are, until [`Database::thaw`].
    ///
    /// # Panics
    /// If it doesn't run.
    pub fn freeze(&self) {
        self.signal("STOP");
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// If it doesn't run.
    pub fn thaw(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) -> Vec<u32> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let id = running.as_ref().expect("a database that runs").id();
        let mut family = vec![id];
        // A parent that is gone takes its list of children with it.
        let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
        family.extend(children.split_whitespace().filter_map(|id| id.parse::<u32>().ok()));
        let ids: Vec<String> = family.iter().map(u32::to_string).collect();
        // A child may have ended by itself meanwhile.
        let _ = Command::new("kill").arg(format!("-{name}")).args(&ids).status();
        family
    }
}

/// Whether a process runs: one that has ended and that nobody has asked after doesn't.
fn is_alive(id: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}
