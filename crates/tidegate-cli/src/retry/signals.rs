//! The signals that are forwarded to the command, and the other events of an attempt.

use std::io;
use std::sync::mpsc::SyncSender;
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

/// The signals that are forwarded.
const FORWARDED_SIGNALS: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, signal_hook::consts::SIGWINCH];
/// The maximum number of queued events. A sender waits while the queue is full.
pub(super) const MAX_EVENTS: usize = 64;

/// An event while a command runs or the next attempt waits.
#[derive(Debug)]
pub(super) enum CommandEvent {
    /// This process received a signal.
    Signal(ReceivedSignal),
    /// The command of this attempt has ended.
    CommandExited { attempt: u64 },
    /// One of the command's outputs was closed.
    OutputClosed,
}

/// A signal that this process received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReceivedSignal {
    pub(super) number: i32,
    /// True if the terminal sent it. The terminal sends it to all foreground processes, so the command has it already.
    pub(super) is_from_terminal: bool,
}

impl ReceivedSignal {
    /// Returns true if there is no retry after this signal.
    pub(super) fn stops_retries(self) -> bool {
        matches!(self.number, SIGINT | SIGTERM | SIGHUP | SIGQUIT)
    }

    /// The exit status of a program that the signal ends, in the form that shells use.
    pub(super) fn status(self) -> u8 {
        u8::try_from(128 + self.number).unwrap_or(u8::MAX)
    }
}

/// Receives the signals from now on. Ignored signals stay ignored, for the command too, as `nohup` requires.
pub(super) fn listen(events: SyncSender<CommandEvent>) -> io::Result<()> {
    let ignored = ignored_signals();
    let wanted = FORWARDED_SIGNALS.into_iter().filter(|number| ignored & 1 << (number - 1) == 0);
    let mut signals = SignalsInfo::<WithOrigin>::new(wanted)?;
    let forward = move || {
        for origin in signals.forever() {
            let signal =
                ReceivedSignal { number: origin.signal, is_from_terminal: matches!(origin.cause, Cause::Kernel) };
            if events.send(CommandEvent::Signal(signal)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(forward).map(drop)
}

/// The signals that this process ignores from its start, one per bit; none if the system doesn't provide them
/// (proc(5)).
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
