//! One run of the command: starts it, forwards signals and output, and waits for its end.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread;

use rustix::process::{Pid, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use tidegate::clock::SystemClock;
use tidegate_core::{Clock as _, Span, Time};

use super::TIMED_OUT_STATUS;
use super::input::StdinSource;
use super::output::{OutputForwarder, OutputMatches, OutputPatterns};
use super::signals::{CommandEvent, ReceivedSignal};

/// The time between TERM and KILL for a command that took too long.
const KILL_DELAY: Span = Span::from_secs(5);
/// The maximum idle time of the output of a command that has ended: a process that it started may keep the output open.
/// Output that was already written is forwarded, however slowly it is read.
const DRAIN_TIMEOUT: Span = Span::from_secs(1);
/// The interval of checks of an output with a slow reader.
const POLL_INTERVAL: Span = Span::from_millis(20);

/// The end of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandExit {
    exit: ExitStatus,
    pub(super) timed_out: bool,
    /// The signal that this process received, after which there is no retry.
    pub(super) stopped_by: Option<ReceivedSignal>,
}

impl CommandExit {
    /// The signal that ended the command.
    pub(super) fn signal(&self) -> Option<i32> {
        self.exit.signal()
    }

    /// The exit status in the form that shells use.
    pub(super) fn status(&self) -> u8 {
        if self.timed_out {
            return TIMED_OUT_STATUS;
        }
        let status = self.exit.code().or_else(|| Some(128 + self.exit.signal()?));
        status.and_then(|status| u8::try_from(status).ok()).unwrap_or(u8::MAX)
    }
}

/// The variable in which a command finds the reservation to present.
const RESERVATION_VARIABLE: &str = "TIDEGATE_RESERVATION";

/// The settings of attempts, and their shared state.
pub(super) struct CommandLauncher {
    command: Command,
    pub(super) input: StdinSource,
    events: SyncSender<CommandEvent>,
    attempt: u64,
    is_group: bool,
}

impl CommandLauncher {
    /// Returns a launcher. In a group of its own, a command is signalled together with all processes that it starts,
    /// and can't read from the terminal.
    pub(super) fn new(
        words: &[OsString],
        input: StdinSource,
        events: SyncSender<CommandEvent>,
        is_group: bool,
    ) -> Self {
        let mut command = Command::new(words.first().cloned().unwrap_or_default());
        command.args(words.iter().skip(1)).env_remove(RESERVATION_VARIABLE);
        if is_group {
            command.process_group(0);
        }
        Self { command, input, events, attempt: 0, is_group }
    }

    /// Sets the reservation that the next attempt finds in its environment, or none.
    pub(super) fn set_reservation(&mut self, token: Option<&str>) {
        match token {
            Some(token) => self.command.env(RESERVATION_VARIABLE, token),
            None => self.command.env_remove(RESERVATION_VARIABLE),
        };
    }

    /// Runs the command once.
    ///
    /// # Errors
    /// The command can't be started or waited for.
    pub(super) fn run(
        &mut self,
        patterns: &OutputPatterns,
        events: &Receiver<CommandEvent>,
        clock: &SystemClock,
        timeout: Option<Span>,
    ) -> io::Result<(CommandExit, OutputMatches)> {
        self.attempt += 1;
        let (stdin, kept) = self.input.next_stdin()?;
        self.command.stdin(stdin);
        // Without patterns the command writes to the terminal directly.
        let output = || if patterns.any() { Stdio::piped() } else { Stdio::inherit() };
        let mut child = self.command.stdout(output()).stderr(output()).spawn()?;
        let running = self.spawn_threads(&mut child, patterns, clock, kept);
        let running = running.and_then(|(pid, outputs)| {
            let run = RunningCommand { pid, is_group: self.is_group, attempt: self.attempt, outputs, clock };
            run.wait_for_exit(events, timeout, || child.wait())
        });
        if running.is_err() {
            let _ = child.kill();
            let _ = child.wait();
        }
        running
    }

    /// Starts the threads that wait for the command, write its input and read its output.
    fn spawn_threads(
        &self,
        child: &mut Child,
        patterns: &OutputPatterns,
        clock: &SystemClock,
        kept: Option<Arc<[u8]>>,
    ) -> io::Result<(Pid, Vec<Arc<OutputForwarder<SystemClock>>>)> {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidData)?;
        let (events, attempt) = (self.events.clone(), self.attempt);
        let named = |name: &str| thread::Builder::new().name(name.to_owned());
        named("waiting").spawn(move || {
            // WNOWAIT leaves it unreaped, so no other process has its id when a signal is forwarded.
            while let Err(rustix::io::Errno::INTR) =
                waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            {}
            let _ = events.send(CommandEvent::CommandExited { attempt });
        })?;
        if let (Some(mut stdin), Some(kept)) = (child.stdin.take(), kept) {
            // Errors are ignored, because a command may close its input early.
            named("input").spawn(move || drop(stdin.write_all(&kept)))?;
        }
        let mut outputs = Vec::with_capacity(2);
        let mut read = |from: Option<Box<dyn io::Read + Send>>, to: Box<dyn io::Write + Send>| -> io::Result<()> {
            let Some(from) = from else { return Ok(()) };
            let output = Arc::new(OutputForwarder::new(patterns.clone(), clock.clone()));
            outputs.push(Arc::clone(&output));
            let events = self.events.clone();
            let pass_on = move || {
                output.forward(from, to);
                let _ = events.send(CommandEvent::OutputClosed);
            };
            named("output").spawn(pass_on).map(drop)
        };
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        read(stdout.map(|from| Box::new(from) as _), Box::new(io::stdout()))?;
        read(stderr.map(|from| Box::new(from) as _), Box::new(io::stderr()))?;
        Ok((pid, outputs))
    }
}

/// A running command.
struct RunningCommand<'c> {
    pid: Pid,
    is_group: bool,
    attempt: u64,
    outputs: Vec<Arc<OutputForwarder<SystemClock>>>,
    clock: &'c SystemClock,
}

impl RunningCommand<'_> {
    fn wait_for_exit(
        self,
        events: &Receiver<CommandEvent>,
        timeout: Option<Span>,
        reap: impl FnOnce() -> io::Result<ExitStatus>,
    ) -> io::Result<(CommandExit, OutputMatches)> {
        let (mut timed_out, mut stopped_by) = (false, None);
        let mut until = timeout.map_or(Time::NEVER, |timeout| self.clock.now() + timeout);
        let (mut has_ended, mut drains_until) = (false, Time::NEVER);
        loop {
            if has_ended {
                let Some(more) = self.drain_wait().filter(|_| self.clock.now() < drains_until) else { break };
                until = drains_until.min(self.clock.now() + more);
            }
            match self.next_event(events, until) {
                Some(CommandEvent::Signal(signal)) => {
                    if (self.is_group || !signal.is_from_terminal) && !has_ended {
                        self.send_signal(signal.number);
                    }
                    if signal.stops_retries() {
                        stopped_by = Some(signal);
                        // The remaining output may have no reader.
                        drains_until = self.clock.now() + DRAIN_TIMEOUT;
                    }
                }
                Some(CommandEvent::CommandExited { attempt }) if attempt == self.attempt => {
                    has_ended = true;
                    drains_until = if stopped_by.is_some() { self.clock.now() + DRAIN_TIMEOUT } else { Time::NEVER };
                    self.outputs.iter().for_each(|output| output.restart_idle_time());
                }
                Some(_) => {}
                None if has_ended => {}
                None if timed_out => {
                    self.send_signal(signal_hook::consts::SIGKILL);
                    until = Time::NEVER;
                }
                None => {
                    self.send_signal(signal_hook::consts::SIGTERM);
                    timed_out = true;
                    until = self.clock.now() + KILL_DELAY;
                }
            }
        }
        let seen = self.outputs.iter().fold(OutputMatches::default(), |seen, output| seen.merge(output.matches()));
        Ok((CommandExit { exit: reap()?, timed_out, stopped_by }, seen))
    }

    /// The time until the next check of the command's output; `None` if it is complete or the wait for it is over.
    fn drain_wait(&self) -> Option<Span> {
        let lasts = self.outputs.iter().filter_map(|output| output.remaining_wait(DRAIN_TIMEOUT));
        lasts.max().map(|more| more.max(POLL_INTERVAL))
    }

    /// Returns the next event; `None` at `until`.
    fn next_event(&self, events: &Receiver<CommandEvent>, until: Time) -> Option<CommandEvent> {
        if until.is_never() {
            return events.recv().ok();
        }
        events.recv_timeout(until.since(self.clock.now()).as_duration()).ok()
    }

    fn send_signal(&self, number: i32) {
        if let Some(signal) = rustix::process::Signal::from_named_raw(number) {
            // Fails only if the command has ended in the meantime.
            let _ = if self.is_group { kill_process_group(self.pid, signal) } else { kill_process(self.pid, signal) };
        }
    }
}
