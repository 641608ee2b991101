//! `tidegate reset`, `block`, `pause`, `resume`, `reset-provider`, `reload` and `alert test`: changes that operators make
//! to a running gate, over its admin listener.

use std::fmt::Write as _;

use http::Method;
use serde_json::Value;
use tidegate::{BlockReport, LimitReport, ResetReport};
use tidegate_policy::describe_seconds;

use crate::api_client::{as_json, check_selection, describe_strikes, part_help};
use crate::gate_client::{GateClient, ListenerKind};
use crate::policy::invalid_input;
use crate::{CallArgs, CliOutcome, CommandResult, GateArgs};

/// `tidegate reset`.
pub(crate) fn reset(call: &CallArgs) -> CommandResult {
    check_selection(call)?;
    let client = GateClient::new(&call.gate, ListenerKind::Admin)?;
    let what = call.action.as_deref().or(call.path.as_deref()).unwrap_or("all actions");
    let describe = |text: &str| {
        let report: ResetReport = serde_json::from_str(text).ok()?;
        Some((describe_reset(what, &report), CliOutcome::Done))
    };
    client.ask(Method::POST, "/v1/reset", Value::Object(as_json(call)?).to_string(), describe, part_help)
}

fn describe_reset(what: &str, report: &ResetReport) -> String {
    let mut text = String::new();
    for LimitReport { name, used, limit, strikes, backoff_seconds, .. } in &report.limits {
        let _ = write!(text, "{name}: reset; {used} of {limit} were used");
        let blocked =
            backoff_seconds.map(|backoff| format!(", blocked for {}", describe_seconds(backoff))).unwrap_or_default();
        let _ = match strikes {
            0 => writeln!(text, "{blocked}"),
            strikes => writeln!(text, "{blocked} after {}", describe_strikes(*strikes)),
        };
    }
    if text.is_empty() {
        let _ = writeln!(text, "{what}: nothing was counted for this client");
    }
    for LimitReport { name, retry_after, .. } in &report.still_refusing {
        let wait = retry_after.map(|wait| format!(" for {}", describe_seconds(wait))).unwrap_or_default();
        let _ = writeln!(text, "{name} still refuses this client{wait}; reset {name} with the same --ip or --key, too");
    }
    if !report.skipped.is_empty() {
        let _ = writeln!(
            text,
            "not reset, because they count by something that was not given: {}",
            report.skipped.join(", ")
        );
    }
    text
}

/// `tidegate block`.
pub(crate) fn block(call: &CallArgs, length: &str) -> CommandResult {
    check_selection(call)?;
    if length.parse::<f64>().is_ok() {
        return Err(invalid_input(format!("--for {length} has no unit: write {length}s, {length}m or {length}h")));
    }
    let mut body = as_json(call)?;
    body.insert("for".to_owned(), length.into());
    let client = GateClient::new(&call.gate, ListenerKind::Admin)?;
    let describe = |text: &str| {
        let report: BlockReport = serde_json::from_str(text).ok()?;
        Some((describe_block(&report), CliOutcome::Done))
    };
    client.ask(Method::POST, "/v1/block", Value::Object(body).to_string(), describe, part_help)
}

fn describe_block(report: &BlockReport) -> String {
    let mut text = String::new();
    for LimitReport { name, retry_after, blocked, .. } in &report.limits {
        let _ = match retry_after.filter(|_| *blocked) {
            Some(wait) => writeln!(text, "{name}: blocked for {}", describe_seconds(wait)),
            None => writeln!(text, "{name}: not blocked, because the store is full"),
        };
    }
    if !report.skipped.is_empty() {
        let skipped = report.skipped.join(", ");
        let _ = writeln!(text, "not blocked, because they count by something that was not given: {skipped}");
    }
    text
}

/// A change to a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProviderChange {
    Pause,
    Resume,
    Reset,
}

/// `tidegate pause`, `resume` and `reset-provider`.
pub(crate) fn change_provider(arguments: &GateArgs, name: &str, change: ProviderChange) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    let command = match change {
        ProviderChange::Pause => "pause",
        ProviderChange::Resume => "resume",
        ProviderChange::Reset => "reset",
    };
    let describe = |text: &str| {
        let report: Value = serde_json::from_str(text).ok()?;
        let name = report["provider"].as_str()?;
        let has_changed = report["changed"].as_bool();
        let words = match (change, has_changed) {
            (ProviderChange::Pause, Some(true)) => format!("paused; calls are refused until `tidegate resume {name}`"),
            (ProviderChange::Pause, _) => "was paused already".to_owned(),
            (ProviderChange::Resume, Some(true)) => "resumed".to_owned(),
            (ProviderChange::Resume, _) => "was not paused".to_owned(),
            (ProviderChange::Reset, _) => "the breaker is closed and no credential cools down".to_owned(),
        };
        Some((format!("{name}: {words}\n"), CliOutcome::Done))
    };
    client.ask(Method::POST, &format!("/v1/providers/{name}/{command}"), "{}".to_owned(), describe, |_| None)
}

/// `tidegate reload`.
pub(crate) fn reload(arguments: &GateArgs) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    let describe = |text: &str| {
        let report: Value = serde_json::from_str(text).ok()?;
        let fixed: Option<Vec<&str>> = report["restart_needed"].as_array()?.iter().map(Value::as_str).collect();
        let words = match fixed?.as_slice() {
            [] => "reloaded\n".to_owned(),
            fixed => format!("reloaded; a restart is needed for {}\n", fixed.join(", ")),
        };
        Some((words, CliOutcome::Done))
    };
    client.ask(Method::POST, "/v1/reload", "{}".to_owned(), describe, |_| None)
}

/// `tidegate alert test`.
pub(crate) fn test_alert(arguments: &GateArgs, name: &str) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    let describe = |text: &str| {
        let report: Value = serde_json::from_str(text).ok()?;
        let (mut words, mut outcome) = (String::new(), CliOutcome::Done);
        for sink in report["sinks"].as_array()? {
            let kind = sink["sink"].as_str()?;
            let _ = match sink["error"].as_str() {
                None => writeln!(words, "{kind}: sent"),
                Some(error) => {
                    outcome = CliOutcome::Failed;
                    writeln!(words, "{kind}: not sent: {error}")
                }
            };
        }
        Some((words, outcome))
    };
    client.ask(Method::POST, &format!("/v1/alerts/{name}/test"), "{}".to_owned(), describe, |_| None)
}
