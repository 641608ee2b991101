//! Policies: reading them, and describing their limits.

use std::borrow::Cow;
use std::error::Error;
use std::ffi::OsString;
use std::fmt::Display;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use tidegate::policy::{Action, Plan};
use tidegate_policy::alerts::AlertConfig;
use tidegate_policy::{
    OnDisconnect, Policy, PolicySources, StoreConfig, printable, printable_json, printable_lines, read_regular_file,
};
use tidegate_server::{FileWatcher, descriptors};

use crate::{CliOutcome, CommandResult};

/// The default policy file.
const DEFAULT_FILE: &str = "tidegate.toml";
/// The largest policy or scenario that is read, in bytes.
const MAX_INPUT: u64 = 16 << 20;

/// Returns the environment as a source of policies. `prefix` is that of further outbound settings.
pub(crate) fn environment(prefix: Option<&str>) -> PolicySources {
    // Text that isn't Unicode gets a replacement character. For Tidegate's own variables, reading such a value fails.
    let text = |word: OsString| word.to_string_lossy().into_owned();
    let sources = PolicySources::new().env(std::env::vars_os().map(|(name, value)| (text(name), text(value))));
    match prefix {
        Some(prefix) => sources.env_prefix(prefix),
        None => sources,
    }
}

/// Reads the policy of this file, or of ./tidegate.toml, or the built-in one. Returns it with its source's name. Prints
/// errors to standard error.
pub(crate) fn load(file: Option<&Path>, sources: PolicySources) -> Result<(Policy, String), CliOutcome> {
    let file = existing_file(file);
    let source_name = file.map_or_else(|| "the built-in default policy".to_owned(), display_name);
    let sources = with_file(file, sources, read_input)
        .map_err(|error| file_failure("read", file.unwrap_or(Path::new("")), error))?;
    Ok((Policy::load(sources).map_err(invalid_document)?, source_name))
}

/// Reads the policy again that [`load`] has read, as the next one of a running server. A usual file that was there once
/// (`had_file`) must still be there, so that a file that is gone doesn't bring the built-in policy.
pub(crate) fn load_next(
    present: &Policy,
    file: Option<&Path>,
    had_file: &AtomicBool,
    sources: PolicySources,
) -> Result<Policy, Box<dyn Error + Send + Sync>> {
    let file = existing_file(file).or_else(|| had_file.load(Relaxed).then_some(Path::new(DEFAULT_FILE)));
    had_file.store(file.is_some(), Relaxed);
    let unreadable = |error| format!("can't read {}: {error}", file.map(display_name).unwrap_or_default());
    Ok(present.load_next(with_file(file, sources, read_lasting_file).map_err(unreadable)?)?)
}

/// Watches the file that [`load`] reads, or would read if there was one. Standard input can't change.
pub(crate) fn watcher(file: Option<&Path>) -> FileWatcher {
    let file = file.unwrap_or(Path::new(DEFAULT_FILE));
    FileWatcher::new((!is_stdin(file)).then(|| file.to_owned()))
}

/// The file that is read: this one, or the usual one if it exists.
pub(crate) fn existing_file(file: Option<&Path>) -> Option<&Path> {
    file.or_else(|| Some(Path::new(DEFAULT_FILE)).filter(|usual| usual.exists()))
}

/// Adds the text of a file to the sources.
fn with_file(
    file: Option<&Path>,
    sources: PolicySources,
    read: fn(&Path) -> io::Result<Vec<u8>>,
) -> io::Result<PolicySources> {
    match file {
        None => Ok(sources),
        Some(file) => Ok(sources.file_bytes(display_name(file), read(file)?)),
    }
}

/// Prints an error of the input.
pub(crate) fn invalid_input(error: impl Display) -> CliOutcome {
    invalid_document(format!("error: {error}"))
}

/// Prints the errors of a policy or scenario, which say themselves that they are errors.
pub(crate) fn invalid_document(errors: impl Display) -> CliOutcome {
    print_error(&format!("{errors}\n"));
    CliOutcome::InvalidInput
}

/// Prints an error that isn't one of the input.
pub(crate) fn failure(error: impl Display) -> CliOutcome {
    print_error(&format!("error: {error}\n"));
    CliOutcome::Failed
}

/// Prints an error of reading or writing a file.
pub(crate) fn file_failure(verb: &str, file: &Path, error: impl Display) -> CliOutcome {
    failure(format!("can't {verb} {}: {error}", display_name(file)))
}

/// A file's name for display; `-` is standard input.
pub(crate) fn display_name(file: &Path) -> String {
    if is_stdin(file) { "standard input".to_owned() } else { printable(&file.to_string_lossy()).into_owned() }
}

/// True if a name stands for standard input.
pub(crate) fn is_stdin(file: &Path) -> bool {
    file.as_os_str() == "-"
}

/// Reads a file of at most 16 MiB; `-` is standard input.
pub(crate) fn read_input(file: &Path) -> io::Result<Vec<u8>> {
    if is_stdin(file) { read_bounded(io::stdin().lock()) } else { read_bounded(File::open(file)?) }
}

/// Reads a file that keeps its text, as a pipe doesn't.
fn read_lasting_file(file: &Path) -> io::Result<Vec<u8>> {
    if is_stdin(file) {
        return Err(io::Error::other("it can be read only once"));
    }
    read_regular_file(file, MAX_INPUT)
}

fn read_bounded(input: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input.take(MAX_INPUT + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_INPUT { Err(io::Error::other("it is larger than 16 MiB")) } else { Ok(bytes) }
}

/// Writes to standard error, with control characters of terminals escaped.
pub(crate) fn print_error(text: &str) {
    // If standard error is closed, the message can't be reported anywhere.
    let _ = io::stderr().write_all(printable_lines(text).as_bytes());
}

/// Prints a command-line error or the help. An error may repeat a file's name that a shell has inserted.
pub(crate) fn print_usage(error: &clap::Error) {
    let plain = error.render().to_string();
    match printable_lines(&plain) {
        // Printed by clap itself, which adds colours.
        Cow::Borrowed(_) => drop(error.print()),
        Cow::Owned(safe) => print_error(&safe),
    }
}

/// Prints that this build lacks the feature `simulate`, which has what the caller names.
#[cfg(not(feature = "simulate"))]
pub(crate) fn missing_simulate(what: &str) -> CliOutcome {
    invalid_input(format!(
        "this program was built without the feature `simulate`, which has {what}; build it with --features simulate"
    ))
}

/// A format of a report: the extension of its files, and the function that makes their content.
pub(crate) type ReportFormat<R> = (&'static str, fn(&R) -> Result<Vec<u8>, Box<dyn Error>>);

/// Returns a function that writes a report to these files, each in the format of its extension. `rule` names the
/// extensions.
pub(crate) fn report_writer<'a, R: 'a>(
    files: &'a [PathBuf],
    formats: &'a [ReportFormat<R>],
    rule: &str,
) -> Result<impl FnOnce(&R) -> Result<(), CliOutcome> + 'a, CliOutcome> {
    let with_format = |file: &'a PathBuf| {
        let extension = file.extension().unwrap_or_default();
        let format = formats.iter().find(|(known, _)| extension.eq_ignore_ascii_case(known));
        format.map(|(_, render)| (file, render)).ok_or_else(|| invalid_input(format!("{}: {rule}", display_name(file))))
    };
    let chosen = files.iter().map(with_format).collect::<Result<Vec<_>, _>>()?;
    Ok(move |report: &R| {
        chosen.into_iter().try_for_each(|(file, render)| {
            let written = render(report).and_then(|bytes| Ok(std::fs::write(file, bytes)?));
            written.map_err(|error| file_failure("write", file, error))
        })
    })
}

/// `tidegate check`. Notes the secrets that `tidegate serve` couldn't use and the descriptors that it would lack, unless the
/// environment has no effect.
pub(crate) fn check(file: Option<&Path>, sources: PolicySources, with_env: bool) -> CommandResult {
    let (policy, source_name) = load(file, sources)?;
    let mut notes: String = policy.notes().iter().map(|note| format!("{note}\n")).collect();
    for (setting, source) in policy.secrets().into_iter().filter(|_| with_env) {
        let min_length = if setting == "store.hash_key" { StoreConfig::MIN_HASH_KEY_BYTES } else { 0 };
        let fault = match source.resolve(|name| std::env::var(name).ok()) {
            Ok(secret) if secret.expose().len() >= min_length => None,
            Ok(_) => Some(format!("the secret is shorter than {min_length} bytes")),
            Err(error) => Some(error.to_string()),
        };
        if let Some(fault) = fault {
            let _ = writeln!(notes, "note: {setting}: {fault}, so that `tidegate serve` wouldn't start here");
        }
    }
    for (setting, fault) in tidegate_server::certificate_faults(&policy) {
        let _ = writeln!(notes, "note: {setting}: {fault}, so that `tidegate serve` wouldn't start here");
    }
    if with_env {
        descriptors::raise_limit();
        if let Some(shortage) = descriptors::Shortage::of(&policy) {
            let _ = writeln!(notes, "note: {shortage}");
        }
    }
    Ok(print(&format!("{source_name}: good\n{notes}\n{}", describe(&policy))))
}

/// Writes to standard output, with control characters of terminals escaped.
pub(crate) fn print(text: &str) -> CliOutcome {
    write_stdout(&printable_lines(text))
}

/// Prints a part of an endless text. Returns the outcome of the command if nothing more can be printed: success if the
/// reader has closed the pipe.
pub(crate) fn print_while_read(text: &str) -> Result<(), CliOutcome> {
    let mut out = io::stdout().lock();
    let written = out.write_all(printable_lines(text).as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => CliOutcome::Done,
        _ => failure(format!("can't write to standard output: {error}")),
    })
}

/// Prints JSON as [`print`] does text, escaped so that it parses to the same value.
pub(crate) fn print_json(text: &str) -> CliOutcome {
    write_stdout(&format!("{}\n", printable_json(text)))
}

/// Writes to standard output as it is. A closed pipe (`| head`) is no error.
pub(crate) fn write_stdout(text: &str) -> CliOutcome {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => CliOutcome::Failed,
        _ => CliOutcome::Done,
    }
}

/// Describes every limit of a policy with its strict bound.
pub(crate) fn describe(policy: &Policy) -> String {
    let plan = policy.plan();
    let mut text = String::new();
    if !plan.global().is_empty() {
        let is_shadow =
            plan.global().iter().all(|id| plan.limits().get(*id).is_some_and(tidegate_core::Limit::is_shadow));
        let _ = writeln!(text, "every call, over all actions{}", if is_shadow { SHADOW_NOTE } else { "" });
        describe_limits(&mut text, plan, plan.global());
    }
    for (id, action) in plan.actions() {
        let is_asked = policy.api().forward_auth && plan.part_not_in_requests(Some(id)).is_none();
        let _ = writeln!(text, "{}{}", action.name(), describe_matcher(action, is_asked));
        if action.is_unlimited() {
            let _ = writeln!(text, "  unlimited");
        }
        describe_limits(&mut text, plan, action.limits());
    }
    if let Some(outbound) = policy.outbound() {
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = write!(text, "{gap}calls to other people's APIs\n{}", outbound.describe());
    }
    if text.is_empty() {
        text.push_str(match plan.caller_rate() {
            Some(_) => "nothing is limited but calls that state their own rate\n",
            None => "nothing is limited\n",
        });
    }
    if !policy.alerts().is_empty() {
        let words: String = policy.alerts().iter().map(AlertConfig::describe).collect();
        let _ = write!(text, "\nalerts\n{words}");
    }
    if policy.inbound().upstream.is_some() && plan.requests_meet_concurrency() {
        text.push_str(match policy.inbound().on_disconnect {
            OnDisconnect::Close => {
                "a call in flight whose client goes away is closed, and counts while the upstream likely works on it\n"
            }
            OnDisconnect::Finish => "a call in flight whose client goes away is finished\n",
        });
    }
    if !policy.api().listen.is_off() && plan.requests_meet_concurrency() {
        text.push_str("forward-auth is off: it can't keep a limit on calls in flight\n");
    }
    if policy.rls().is_some() && plan.requests_meet_concurrency() {
        text.push_str("the rate limit service answers calls that meet a limit on calls in flight with an error\n");
    }
    text
}

/// The remark on limits that only observe.
const SHADOW_NOTE: &str = "; shadow: decides and logs, refuses nothing";

fn describe_matcher(action: &Action, forward_auth: bool) -> String {
    let mut text = match action.matcher() {
        Some(matcher) => format!(": {matcher}"),
        None if forward_auth && !action.has_concurrency() => {
            format!(": by name, through the decision API or /v1/auth?action={}", action.name())
        }
        None => ": by name, through the decision API".to_owned(),
    };
    if action.cost() != 1 {
        let _ = write!(text, "; a call costs {}", action.cost());
    }
    if action.is_shadow() {
        text.push_str(SHADOW_NOTE);
    }
    text
}

fn describe_limits(text: &mut String, plan: &Plan, ids: &[tidegate_core::LimitId]) {
    for id in ids {
        let parts: Vec<String> = plan.key_parts(*id).iter().map(ToString::to_string).collect();
        let by = if parts.is_empty() { "all together".to_owned() } else { format!("by {}", parts.join(" + ")) };
        let _ = writeln!(text, "  {} ({by})", plan.limit_info(*id).description());
        if let Some(words) = plan.describe_on_missing(*id) {
            let _ = writeln!(text, "    {words}");
        }
    }
}
