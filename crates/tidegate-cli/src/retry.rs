//! `tidegate retry`: runs a command again until it succeeds, by the retry rules of calls to providers.

mod attempt;
mod curl;
mod input;
mod output;
mod signals;

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, sync_channel};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use tidegate::clock::SystemClock;
use tidegate_core::backoff::Growth;
use tidegate_core::retry::RetryTracker;
use tidegate_core::{Backoff, Class, Clock as _, FailedAttempt, Jitter, NoRetryReason, Retry, Span, Time};
use tidegate_policy::parse_duration;

use crate::policy::{print_error, print_usage};
use attempt::{CommandExit, CommandLauncher};
use input::StdinSource;
use output::{OutputMatches, OutputPatterns};
use signals::{CommandEvent, MAX_EVENTS, ReceivedSignal};

/// The end of the command's help.
pub(crate) const HELP: &str = "\
Exit status: the command's own, of its last attempt; 128+N if signal N ended it; 124 if it took too long, 125 for invalid
input, 126 if it can't be run, 127 if it isn't found. INT, TERM, HUP, QUIT, USR1, USR2 and WINCH are passed on; after one
of the first four there is no retry.";

/// The exit statuses of GNU's `timeout` and `env`.
const TIMED_OUT_STATUS: u8 = 124;
const USAGE_STATUS: u8 = 125;
const NOT_RUNNABLE_STATUS: u8 = 126;
const NOT_FOUND_STATUS: u8 = 127;

/// The arguments of `tidegate retry`.
#[derive(Debug, Args)]
pub(crate) struct RetryArgs {
    /// The maximum number of attempts, including the first. The default is 5; with `--deadline` there is no limit.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    attempts: Option<u32>,
    /// The first wait.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_time)]
    base: Span,
    /// The longest wait.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_time)]
    cap: Span,
    /// The growth of waits: exponential, each is twice as long as the one before; linear, each is longer by the base;
    /// fibonacci, each is the sum of the two before; constant.
    #[arg(long, default_value = "exponential", value_parser = word_parser(&GROWTHS))]
    growth: Growth,
    /// The randomness of waits: full, between 0 and the wait; equal, in the upper half of the wait; decorrelated,
    /// between the base and three times the previous wait, whatever the growth; additive, up to 1 s longer; none. None
    /// exceeds the cap.
    #[arg(long, default_value = "full", value_parser = word_parser(&JITTERS))]
    jitter: Jitter,
    /// The timeout of an attempt. It is then ended with TERM, and 5 s later with KILL, together with all processes that
    /// it started unless standard input is a terminal.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    timeout: Option<Span>,
    /// No attempt starts later than this after the start of the first.
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    deadline: Option<Span>,
    /// Exit statuses that mean that the command was throttled. It is tried again.
    #[arg(long, value_name = "STATUS,…", value_delimiter = ',', default_value = "75")]
    throttled_exit: Vec<u8>,
    /// Exit statuses that mean that the command would fail again. It isn't tried again. 141 is the end by SIGPIPE: the
    /// reader of its output is gone.
    #[arg(long, value_name = "STATUS,…", value_delimiter = ',', default_value = "2,126,127,141")]
    permanent_exit: Vec<u8>,
    #[command(flatten)]
    patterns: OutputPatterns,
    /// The longest wait that its output may ask for. With a longer one, it isn't tried again.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_time)]
    max_retry_after: Span,
    /// Read all standard input first, up to 64 MiB, and pass it to every attempt. Otherwise a pipe goes to the first
    /// attempt only; a file goes to all.
    #[arg(long)]
    keep_stdin: bool,
    /// Print no messages about attempts and waits.
    #[arg(long, short)]
    quiet: bool,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// The default of `--attempts` without `--deadline`.
const DEFAULT_ATTEMPTS: u32 = 5;

impl RetryArgs {
    /// The maximum number of attempts. `None` if only the deadline bounds them.
    fn max_attempts(&self) -> Option<u32> {
        self.attempts.or(self.deadline.is_none().then_some(DEFAULT_ATTEMPTS))
    }
}

const GROWTHS: [(&str, Growth); 4] = [
    ("exponential", Growth::Exponential { factor: 2 }),
    ("linear", Growth::Linear),
    ("fibonacci", Growth::Fibonacci),
    ("constant", Growth::Constant),
];
/// `additive` adds as much as Google's published algorithm.
const JITTERS: [(&str, Jitter); 5] = [
    ("full", Jitter::Full),
    ("equal", Jitter::Equal),
    ("decorrelated", Jitter::Decorrelated),
    ("additive", Jitter::Additive(Span::from_secs(1))),
    ("none", Jitter::None),
];

fn word_parser<T: Copy + Send + Sync + 'static>(words: &'static [(&str, T)]) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word)).map(|found| {
        let value = words.iter().find(|(word, _)| *word == found).map(|(_, value)| *value);
        value.expect("invariant: only these words are possible")
    })
}

fn parse_time(text: &str) -> Result<Span, String> {
    parse_duration(text).map_err(|error| error.to_string())
}

/// The exit status of a wrong command line of `retry`, which callers must be able to distinguish from the command's
/// own. `None` for help and for other commands.
pub(crate) fn usage_error(error: &clap::Error) -> Option<ExitCode> {
    let is_ours = std::env::args_os().nth(1).is_some_and(|word| word == "retry");
    let is_wrong = !matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    (is_ours && is_wrong).then(|| {
        print_usage(error);
        USAGE_STATUS.into()
    })
}

/// `tidegate retry -- COMMAND…`.
pub(crate) fn run(arguments: &RetryArgs) -> ExitCode {
    match RetryRunner::new(arguments) {
        Ok(mut runner) => runner.run().into(),
        Err(error) => {
            print_error(&format!("tidegate retry: {error}\n"));
            USAGE_STATUS.into()
        }
    }
}

struct RetryRunner<'a> {
    arguments: &'a RetryArgs,
    retry: Retry,
    clock: SystemClock,
    events: Receiver<CommandEvent>,
    launcher: CommandLauncher,
}

impl<'a> RetryRunner<'a> {
    fn new(arguments: &'a RetryArgs) -> io::Result<Self> {
        let retry = Retry {
            max_attempts: arguments.max_attempts().unwrap_or(u32::MAX),
            backoff: Backoff {
                growth: arguments.growth,
                base: arguments.base,
                cap: arguments.cap,
                jitter: arguments.jitter,
            },
            max_retry_after: arguments.max_retry_after,
            ..Retry::default()
        };
        // Done before signals are caught, because reading all standard input may never end, and a signal must end it.
        let input = StdinSource::new(arguments.keep_stdin)?;
        let (sender, events) = sync_channel(MAX_EVENTS);
        signals::listen(sender.clone())?;
        // Like GNU's `timeout`, but never if the command may read from a terminal.
        let is_group = arguments.timeout.is_some() && !io::stdin().is_terminal();
        let launcher = CommandLauncher::new(&arguments.command, input, sender, is_group);
        Ok(Self { arguments, retry, clock: SystemClock::new(), events, launcher })
    }

    /// Runs the attempts and returns the exit status.
    fn run(&mut self) -> u8 {
        let began = self.clock.now();
        let deadline = self.arguments.deadline.map_or(Time::NEVER, |deadline| began + deadline);
        let (mut tries, mut rng) = (RetryTracker::new(deadline), rand::rng());
        let mut presents_reservation = false;
        loop {
            if tries.attempts() == 1 && self.launcher.input.is_used_up() {
                self.print_status(
                    "standard input went to the first attempt; the next ones have none (--keep-stdin keeps it)",
                );
            }
            let ended = self.launcher.run(&self.arguments.patterns, &self.events, &self.clock, self.arguments.timeout);
            let (end, seen) = match ended {
                Ok(ended) => ended,
                Err(error) => return self.print_launch_error(&error),
            };
            let (class, status) = (self.classify(&end, &seen), end.status());
            if class == Class::Success || end.stopped_by.is_some() {
                return status;
            }
            let now = self.clock.now();
            let reservation = seen.reservation().filter(|_| class == Class::Throttled);
            let attempt = FailedAttempt {
                class,
                is_repeatable: true,
                unreplayable_reason: None,
                asks_not_to_retry: false,
                // The command may have ended long after it told the reservation.
                retry_after: reservation.map(|(_, at)| at.since(now)).or(seen.retry_after),
                // After one that didn't admit the command, the next one is not trusted without a back-off.
                has_reservation: reservation.is_some() && !presents_reservation,
                has_other_credential: false,
            };
            let next = tries.next_attempt_at(&self.retry, &attempt, None, now, &mut rng);
            let of_all = self.arguments.max_attempts().map_or_else(String::new, |attempts| format!(" of {attempts}"));
            let of = format!("attempt {}{of_all} {}", tries.attempts(), describe_end(&end, class));
            match next {
                Ok(at) => {
                    presents_reservation = reservation.is_some();
                    self.launcher.set_reservation(reservation.map(|(token, _)| token));
                    self.print_status(&format!("{of}; trying again in {}", describe_wait(at.since(now))));
                    if let Some(signal) = self.wait_until(at) {
                        return signal.status();
                    }
                }
                Err(why) => {
                    self.print_status(&format!("{of}; {}", self.describe_give_up(why, status, &seen)));
                    return status;
                }
            }
        }
    }

    /// Prints that the command can't be run, and returns the exit status.
    fn print_launch_error(&self, error: &io::Error) -> u8 {
        let name = self.arguments.command.first().map(|name| name.to_string_lossy()).unwrap_or_default();
        print_error(&format!("tidegate retry: can't run {name}: {error}\n"));
        match error.kind() {
            io::ErrorKind::NotFound => NOT_FOUND_STATUS,
            // The command exists but can't be run: no permission, not a program, or too many arguments.
            _ => NOT_RUNNABLE_STATUS,
        }
    }

    fn classify(&self, end: &CommandExit, seen: &OutputMatches) -> Class {
        let status = end.status();
        if status == 0 {
            Class::Success
        } else if end.timed_out {
            Class::Transient
        } else if self.arguments.permanent_exit.contains(&status) {
            Class::Permanent
        } else if self.arguments.throttled_exit.contains(&status) {
            Class::Throttled
        } else if seen.permanent {
            Class::Permanent
        } else if seen.throttled {
            Class::Throttled
        } else if self.arguments.patterns.curl {
            curl::class_of_exit(status, seen.http_status)
        } else if seen.retry_after.is_some() {
            Class::Throttled
        } else {
            Class::Transient
        }
    }

    fn describe_give_up(&self, why: NoRetryReason, status: u8, seen: &OutputMatches) -> String {
        match why {
            NoRetryReason::Final if self.arguments.permanent_exit.contains(&status) => {
                let listed: Vec<String> = self.arguments.permanent_exit.iter().map(u8::to_string).collect();
                format!("not retried, because --permanent-exit is {}", listed.join(","))
            }
            NoRetryReason::Final if seen.permanent => {
                "not retried, because its output matches --permanent-output".to_owned()
            }
            NoRetryReason::Final => format!("not retried because of --curl; --throttled-exit {status} changes that"),
            NoRetryReason::RetryAfterTooLong { retry_after } => {
                format!("it asks for a wait of {}, longer than --max-retry-after", describe_wait(retry_after))
            }
            NoRetryReason::Deadline { .. } => "the next would start after --deadline".to_owned(),
            _ => "that was the last of --attempts".to_owned(),
        }
    }

    /// Waits until `at`. Returns early with a signal that stops retries.
    fn wait_until(&self, at: Time) -> Option<ReceivedSignal> {
        loop {
            let rest = at.since(self.clock.now());
            if rest.is_zero() {
                return None;
            }
            match self.events.recv_timeout(rest.as_duration()) {
                Ok(CommandEvent::Signal(signal)) if signal.stops_retries() => return Some(signal),
                Ok(_) => {}
                // Not disconnected, because this process holds the sender.
                Err(_) => return None,
            }
        }
    }

    fn print_status(&self, what: &str) {
        if !self.arguments.quiet {
            // A progress bar of the command may have left the cursor inside a line.
            if io::stderr().is_terminal() {
                let _ = io::stderr().write_all(b"\r");
            }
            print_error(&format!("tidegate retry: {what}\n"));
        }
    }
}

fn describe_end(end: &CommandExit, class: Class) -> String {
    let how = match end.signal() {
        _ if end.timed_out => "took too long".to_owned(),
        Some(signal) => format!("was ended by signal {signal}, status {}", end.status()),
        None => format!("ended with status {}", end.status()),
    };
    match class {
        Class::Transient => how,
        _ => format!("{how} ({})", class.name()),
    }
}

/// A wait in seconds, rounded up to a millisecond.
fn describe_wait(wait: Span) -> String {
    format!("{:.3} s", wait.as_micros().div_ceil(1000) as f64 / 1000.0)
}
