//! Signals that go to the command, and what else is waited for.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

/// The signals that are passed on.
const FORWARDED_SIGNALS: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, signal_hook::consts::SIGWINCH];
/// The most events that wait to be looked at; whoever has another one waits too.
const MAX_EVENTS: usize = 64;

/// What happens while a command runs or is waited for.
#[derive(Debug)]
pub(super) enum CommandEvent {
    /// This process got a signal.
    Signal(ReceivedSignal),
    /// The command of this attempt has ended.
    CommandExited { attempt: u64 },
    /// Nothing more comes from one of its outputs.
    OutputClosed,
}

/// A signal that this process got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReceivedSignal {
    pub(super) number: i32,
    /// Whether the terminal sent it, which sends it to all in the foreground: the command has it already.
    pub(super) is_from_terminal: bool,
}

impl ReceivedSignal {
    /// Whether there is no retry after it.
    pub(super) fn stops_retries(self) -> bool {
        matches!(self.number, SIGINT | SIGTERM | SIGHUP | SIGQUIT)
    }

    /// The status of a program that it ends, as shells tell it.
    pub(super) fn status(self) -> u8 {
        u8::try_from(128 + self.number).unwrap_or(u8::MAX)
    }
}

pub(super) fn channel() -> (SyncSender<CommandEvent>, Receiver<CommandEvent>) {
    sync_channel(MAX_EVENTS)
}

/// Takes the signals from now on. One that is ignored stays so, for the command too: who wrote `nohup` meant it.
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

/// The signals that this process was started to ignore, one a bit; none where the system doesn't say (proc(5)).
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
