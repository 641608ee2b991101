//! `tidegate replay`.

use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Write};
use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tidegate_replay::{FieldNames, Findings, LogReplay};

use crate::policy::{self, ReportFormat, file_failure, invalid_input, is_stdin, print, report_writer};
use crate::{CliOutcome, CommandResult};

/// The end of the command's help.
pub(crate) const HELP: &str = "\
Logs may be in the common or combined format of nginx and Apache, or JSON lines, whose usual fields (Caddy's, nginx',
Envoy's) are recognised; and compressed with gzip or Zstandard. --field names a field of one's own; its roles are
time, duration (the seconds from the arrival to that time), ip, method, path, query, request (a whole request line),
host, user (counts as `key`), action, headers (an object) or header:NAME; `a.b` is `b` within `a`.";

/// The arguments of `tidegate replay`.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The access logs, the oldest first; `-` reads standard input.
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// The policy file. The default is ./tidegate.toml, and then the built-in policy, as for `serve`.
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Compare with this policy: list the clients that would be newly refused, and those newly admitted.
    #[arg(long, value_name = "FILE")]
    diff: Option<PathBuf>,
    /// The name of a field in JSON lines, used before the usual names. May be repeated.
    #[arg(long = "field", value_name = "ROLE=NAME")]
    fields: Vec<String>,
    /// Also write the findings to this file: .html, .svg or .json. May be repeated.
    #[arg(long, value_name = "FILE")]
    out: Vec<PathBuf>,
    /// Also write a line for each request that is refused, or would be without shadow mode: log, line, action, limit,
    /// seconds to wait, reason, mode.
    #[arg(long, value_name = "FILE")]
    refusals: Option<PathBuf>,
}

/// `tidegate replay LOG…`.
pub(crate) fn run(arguments: &ReplayArgs) -> CommandResult {
    #[cfg(not(feature = "simulate"))]
    if arguments
        .out
        .iter()
        .filter_map(|file| file.extension())
        .any(|form| form.eq_ignore_ascii_case("html") || form.eq_ignore_ascii_case("svg"))
    {
        return Err(policy::missing_simulate("pictures of findings"));
    }
    let write_findings = report_writer(&arguments.out, FORMATS, "findings end with .html, .svg or .json")?;
    let mut names = FieldNames::default();
    for field in &arguments.fields {
        names.add(field).map_err(|error| invalid_input(format!("--field: {error}")))?;
    }
    if arguments.logs.iter().filter(|log| is_stdin(log)).count() > 1 {
        return Err(invalid_input("standard input can be read once"));
    }
    let (policy, source_name) = policy::load(arguments.config.as_deref(), policy::environment(None))?;
    let mut replay = LogReplay::new(source_name, &policy, names);
    if let Some(other) = &arguments.diff {
        let (policy, source_name) = policy::load(Some(other), policy::environment(None))?;
        replay = replay.compare_with(source_name, &policy);
    }
    let mut refusals = match &arguments.refusals {
        Some(file) => Some(BufWriter::new(File::create(file).map_err(|error| file_failure("write", file, error))?)),
        None => None,
    };
    let read = read_logs(&mut replay, &arguments.logs, refusals.as_mut().map(|to| to as &mut dyn Write))?;
    if let (Some(mut to), Some(file)) = (refusals, &arguments.refusals) {
        to.flush().map_err(|error| file_failure("write", file, error))?;
    }
    let findings = replay.findings();
    write_findings(&findings)?;
    // A script would otherwise take a log in another format for one without refusals.
    let is_unreadable = findings.input.requests == 0 && findings.input.broken > 0;
    let read = if is_unreadable { CliOutcome::Failed } else { read };
    Ok(print(&findings.table()).and(read))
}

/// Reads all logs, and shows progress on a terminal. Prints an error while reading, and goes on with the remaining
/// logs.
fn read_logs(replay: &mut LogReplay, logs: &[PathBuf], mut refusals: Option<&mut dyn Write>) -> CommandResult {
    let mut bytes = Some(0);
    for log in logs.iter() {
        let data = if is_stdin(log) {
            None
        } else {
            Some(fs::metadata(log).map_err(|error| file_failure("read", log, error))?)
        };
        bytes = bytes.zip(data.filter(Metadata::is_file)).map(|(sum, data)| sum + data.len());
    }
    let bar = ProgressBar::with_draw_target(bytes, ProgressDrawTarget::stderr_with_hz(4));
    let form = if bytes.is_some() { "{bar:40} {percent:>3} %  {eta} left" } else { "{spinner} {bytes} read" };
    if let Ok(style) = ProgressStyle::with_template(form) {
        bar.set_style(style);
    }
    let mut outcome = CliOutcome::Done;
    for log in logs {
        let name = log.display().to_string();
        let refusals = refusals.as_mut().map(|to| &mut **to as &mut dyn Write);
        // One file at a time, because there may be more logs than a process may have open files.
        let source = if is_stdin(log) {
            Ok(Box::new(io::stdin()) as Box<dyn Read>)
        } else {
            File::open(log).map(|file| Box::new(file) as _)
        };
        let read = source.and_then(|source| replay.read(&name, bar.wrap_read(source), refusals));
        if let Err(error) = read {
            outcome = bar.suspend(|| file_failure("read", log, error));
        }
    }
    bar.finish_and_clear();
    Ok(outcome)
}

#[cfg(feature = "simulate")]
const FORMATS: &[ReportFormat<Findings>] = &[
    ("html", |findings| Ok(findings.html()?.into_bytes())),
    ("svg", |findings| Ok(findings.svg()?.into_bytes())),
    ("json", |findings| Ok(findings.json().into_bytes())),
];
#[cfg(not(feature = "simulate"))]
const FORMATS: &[ReportFormat<Findings>] = &[("json", |findings| Ok(findings.json().into_bytes()))];
