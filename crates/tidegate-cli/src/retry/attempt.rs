//! One run of the command: started, watched, told what we are told, and seen to its end.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread;

use rustix::process::{Pid, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use tidegate::SystemClock;
use tidegate::core::{Clock as _, Span, Time};

use super::TIMED_OUT_STATUS;
use super::input::StdinSource;
use super::output::{OutputForwarder, OutputMatches, OutputPatterns};
use super::signals::{CommandEvent, ReceivedSignal};

/// How long a command that took too long has for ending by itself.
const KILL_DELAY: Span = Span::from_secs(5);
/// How long more output of a command that has ended is waited for: somebody whom it started may keep it open. What is there
/// is passed on, however slowly it is taken.
const DRAIN_TIMEOUT: Span = Span::from_secs(1);
/// How often it is looked at an output that somebody is slow to take.
const POLL_INTERVAL: Span = Span::from_millis(20);

/// How an attempt ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct CommandExit {
    exit: ExitStatus,
    pub(super) timed_out: bool,
    /// The signal that we were given, after which there is no retry.
    pub(super) stopped_by: Option<ReceivedSignal>,
}

impl CommandExit {
    /// The signal that ended it.
    pub(super) fn signal(&self) -> Option<i32> {
        self.exit.signal()
    }

    /// Its status as shells tell it.
    pub(super) fn status(&self) -> u8 {
        if self.timed_out {
            return TIMED_OUT_STATUS;
        }
        let status = self.exit.code().or_else(|| Some(128 + self.exit.signal()?));
        status.and_then(|status| u8::try_from(status).ok()).unwrap_or(u8::MAX)
    }
}

/// The command couldn't be run.
#[derive(Debug)]
pub(super) struct CommandError {
    pub(super) error: io::Error,
    pub(super) status: u8,
}

impl From<io::Error> for CommandError {
    fn from(error: io::Error) -> Self {
        let status = match error.kind() {
            io::ErrorKind::NotFound => 127,
            // No leave, no program, too many arguments: it is there and can't be run.
            _ => 126,
        };
        Self { error, status }
    }
}

/// What attempts are made of.
pub(super) struct CommandLauncher {
    command: Command,
    pub(super) input: StdinSource,
    events: SyncSender<CommandEvent>,
    attempt: u64,
    is_group: bool,
}

impl CommandLauncher {
    /// As a group, a command is signalled with all whom it starts, and can't read from the terminal.
    pub(super) fn new(
        words: &[OsString],
        input: StdinSource,
        events: SyncSender<CommandEvent>,
        is_group: bool,
    ) -> Self {
        let (name, arguments) =
            words.split_first().map_or((OsString::new(), &[][..]), |(name, rest)| (name.clone(), rest));
        let mut command = Command::new(name);
        command.args(arguments);
        if is_group {
            command.process_group(0);
        }
        Self { command, input, events, attempt: 0, is_group }
    }

    /// Runs the command once.
    ///
    /// # Errors
    /// It can't be started or waited for.
    pub(super) fn run(
        &mut self,
        patterns: &OutputPatterns,
        events: &Receiver<CommandEvent>,
        clock: &SystemClock,
        timeout: Option<Span>,
    ) -> Result<(CommandExit, OutputMatches), CommandError> {
        self.attempt += 1;
        let (stdin, kept) = self.input.next_stdin()?;
        self.command.stdin(stdin);
        // Without patterns the command keeps the terminal for itself.
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
        Ok(running?)
    }

    /// Starts the threads that wait for the command, feed it and read it.
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
            // It isn't reaped yet, so that its number is nobody else's when a signal is passed on.
            while let Err(rustix::io::Errno::INTR) =
                waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            {}
            let _ = events.send(CommandEvent::CommandExited { attempt });
        })?;
        if let (Some(mut stdin), Some(kept)) = (child.stdin.take(), kept) {
            // A command needn't read all that it is given.
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

/// A command that runs.
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
                        // What is left may be for somebody who never takes it.
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

    /// When to look again whether the command's output is complete; `None` if it is, or isn't waited for any more.
    fn drain_wait(&self) -> Option<Span> {
        let lasts = self.outputs.iter().filter_map(|output| output.remaining_wait(DRAIN_TIMEOUT));
        lasts.max().map(|more| more.max(POLL_INTERVAL))
    }

    /// What happens next; `None` when it is time.
    fn next_event(&self, events: &Receiver<CommandEvent>, until: Time) -> Option<CommandEvent> {
        if until.is_never() {
            return events.recv().ok();
        }
        events.recv_timeout(until.since(self.clock.now()).as_duration()).ok()
    }

    fn send_signal(&self, number: i32) {
        if let Some(signal) = rustix::process::Signal::from_named_raw(number) {
            // Who has ended meanwhile needn't be told.
            let _ = if self.is_group { kill_process_group(self.pid, signal) } else { kill_process(self.pid, signal) };
        }
    }
}
