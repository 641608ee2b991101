//! `tidegate blocks`, `health`, `fleet`, `providers`, `events` and `try`: the state of a running gate, and trials, from
//! its admin listener.

use std::fmt::Write as _;

use http::Method;
use serde_json::{Value, json};
use tidegate_policy::{describe_seconds, printable, printable_json};
use tidegate_replay::{format_number, format_percent, format_plural};

use crate::api_client::percent_encode;
use crate::gate_client::{GateClient, ListenerKind};
use crate::policy::print_while_read;
use crate::{CliOutcome, CommandResult, GateArgs};

/// The maximum number of clients in a table.
const MAX_ROWS: usize = 50;

/// `tidegate health`.
pub(crate) fn health(arguments: &GateArgs) -> CommandResult {
    let client = GateClient::without_token(arguments, ListenerKind::Admin)?;
    let describe = |text: &str| {
        let report: Value = serde_json::from_str(text).ok()?;
        Some((format!("{}\n", report["status"].as_str()?), CliOutcome::Done))
    };
    client.ask(Method::GET, "/readyz", String::new(), describe, |_| None)
}

/// `tidegate blocks`.
pub(crate) fn blocks(arguments: &GateArgs, action: Option<&str>) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    let parameter = action.map(|action| format!("?action={}", percent_encode(action))).unwrap_or_default();
    let target = format!("/v1/blocks{parameter}");
    let describe = |text: &str| Some((describe_blocks(&serde_json::from_str(text).ok()?)?, CliOutcome::Done));
    client.ask(Method::GET, &target, String::new(), describe, |_| None)
}

fn describe_blocks(report: &Value) -> Option<String> {
    let clients = report["clients"].as_array()?;
    if clients.is_empty() {
        return Some("no client was refused\n".to_owned());
    }
    let mut text = format!("{} blocked now, {} refused lately", report["blocked"], report["known"]);
    let only_shadow = report["only_shadow"].as_u64()?;
    if only_shadow > 0 {
        let _ = write!(text, ", {only_shadow} of them only in shadow");
    }
    text.push_str("\n\n");
    if report["local"].as_bool()? {
        text.push_str("the store can't be asked: these are the blocks that this node knows\n\n");
    }
    let headers = ["CLIENT", "LIMIT", "STATE", "STRIKES", "REFUSALS", "IN SHADOW", "LAST"];
    let mut rows = vec![headers.map(str::to_owned).to_vec()];
    for client in clients.iter().take(MAX_ROWS) {
        let name: Vec<String> = client["client"]
            .as_object()?
            .iter()
            .map(|(part, value)| {
                // A caller's key may have line ends, which must not make a row.
                let value = printable(value.as_str().unwrap_or_default()).into_owned();
                if part == "client_ip" { value } else { format!("{part}={value}") }
            })
            .collect();
        let name = if name.is_empty() { "all together".to_owned() } else { name.join(" ") };
        let wait = client["retry_after"].as_u64().unwrap_or_default();
        let state = match (client["blocked"].as_bool()?, client["shadow"].as_bool()?, wait) {
            (true, ..) => format!("blocked, {} left", describe_seconds(wait)),
            (_, true, 0) => "shadow: may call again".to_owned(),
            (_, true, wait) => format!("shadow, {} left", describe_seconds(wait)),
            (.., 0) => "free: may call again".to_owned(),
            (.., wait) => format!("full, {} left", describe_seconds(wait)),
        };
        let word = |field: &str| client[field].as_str().unwrap_or_default().to_owned();
        let number = |field: &str| client[field].as_u64().unwrap_or_default().to_string();
        let (strikes, refusals, in_shadow) = (number("strikes"), number("refusals"), number("shadow_refusals"));
        rows.push(vec![name, word("limit"), state, strikes, refusals, in_shadow, word("last")]);
    }
    push_table(&mut text, &rows);
    if clients.len() > MAX_ROWS {
        let _ = writeln!(text, "\n{} more; --json shows up to a thousand", clients.len() - MAX_ROWS);
    }
    Some(text)
}

/// Appends rows with aligned columns.
fn push_table(text: &mut String, rows: &[Vec<String>]) {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(text, "{}", cells.join("  ").trim_end());
    }
}

/// `tidegate fleet`.
pub(crate) fn fleet(arguments: &GateArgs) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    let describe = |text: &str| Some((describe_fleet(&serde_json::from_str(text).ok()?)?, CliOutcome::Done));
    client.ask(Method::GET, "/v1/fleet", String::new(), describe, |_| None)
}

fn describe_fleet(report: &Value) -> Option<String> {
    let mut text = report["message"].as_str().map(|message| format!("{message}\n\n")).unwrap_or_default();
    let seconds = |value: &Value, after: &str| value.as_u64().map(|seconds| format!("{seconds} s{after}"));
    let head = ["NODE", "STATE", "LAST HEARD", "DECISIONS/S", "STORE LINK", "VERSION", "UPTIME"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for node in report["nodes"].as_array()? {
        let word = |field: &str| printable(node[field].as_str().unwrap_or_default()).into_owned();
        let mark = if node["this"].as_bool()? { " (this node)" } else { "" };
        let link = &node["link"];
        let link_time = seconds(&link["seconds"], "").unwrap_or_default();
        let link = match link["up"].as_bool() {
            Some(true) => format!("up, {link_time}"),
            Some(false) => format!("down, {link_time}"),
            None => "-".to_owned(),
        };
        let heard = seconds(&node["age"], " ago").unwrap_or_else(|| "never".to_owned());
        let decisions = node["decisions_per_second"].as_f64().map_or("-".to_owned(), |rate| format!("{rate:.1}"));
        let uptime = seconds(&node["uptime"], "").unwrap_or_default();
        let name = format!("{}{mark}", word("name"));
        rows.push(vec![name, word("state"), heard, decisions, link, word("version"), uptime]);
    }
    push_table(&mut text, &rows);
    if let Some(error) = report["error"].as_str() {
        let _ = writeln!(text, "\nthis node can't announce itself: {}", printable(error));
    }
    Some(text)
}

/// `tidegate providers`.
pub(crate) fn providers(arguments: &GateArgs, name: Option<&str>) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    let target = name.map_or_else(|| "/v1/providers".to_owned(), |name| format!("/v1/providers/{name}"));
    let describe = |text: &str| {
        let found: Value = serde_json::from_str(text).ok()?;
        let providers = found["providers"].as_array().cloned().unwrap_or_else(|| vec![found]);
        let words: Option<Vec<String>> = providers.iter().map(describe_provider).collect();
        Some((words?.join("\n"), CliOutcome::Done))
    };
    client.ask(Method::GET, &target, String::new(), describe, |_| None)
}

/// `tidegate events`.
pub(crate) fn events(arguments: &GateArgs, follow: bool) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    if follow {
        return client.follow("/v1/events", |data| {
            let event: Value = serde_json::from_str(data).unwrap_or_default();
            let text = if arguments.json { format!("{}\n", printable_json(data)) } else { describe_event(&event) };
            print_while_read(&text)
        });
    }
    let describe = |text: &str| {
        let found: Value = serde_json::from_str(text).ok()?;
        let events = found["events"].as_array()?;
        let words = events.iter().map(describe_event).collect::<String>();
        Some((if words.is_empty() { "nothing has changed\n".to_owned() } else { words }, CliOutcome::Done))
    };
    client.ask(Method::GET, "/v1/events?follow=false", String::new(), describe, |_| None)
}

fn describe_event(event: &Value) -> String {
    match (event["missed"].as_u64(), event["time"].as_str(), event["message"].as_str()) {
        (Some(missed), ..) => format!("{missed} earlier events are no longer kept\n"),
        (_, time, message) => format!("{}  {}\n", time.unwrap_or_default(), message.unwrap_or_default()),
    }
}

fn describe_provider(report: &Value) -> Option<String> {
    let number = |value: &Value| value.as_u64().unwrap_or_default();
    let mut text = report["name"].as_str()?.to_owned();
    text.push_str(if report["paused"].as_bool()? { ", paused by an operator\n" } else { "\n" });
    let breaker = &report["breaker"];
    let _ = write!(text, "  breaker      {}", breaker["state"].as_str()?);
    let _ = match number(&breaker["reset_in"]) {
        0 => writeln!(text),
        seconds => writeln!(text, ", admits a call in {}", describe_seconds(seconds)),
    };
    let states = report["credential_states"].as_object()?;
    let states: Vec<String> = states
        .iter()
        .filter(|(_, count)| number(count) > 0)
        .map(|(state, count)| format!("{} {state}", number(count)))
        .collect();
    let _ = writeln!(text, "  credentials  {}", states.join(", "));
    for credential in report["credentials"].as_array()?.iter().filter(|credential| credential["state"] != "usable") {
        let (source, state) = (credential["source"].as_str()?, credential["state"].as_str()?);
        let wait = describe_seconds(number(&credential["usable_in"]));
        let _ = writeln!(text, "               {source} {state}, usable in {wait}");
    }
    let closed = number(&report["closed_scopes"]);
    if closed > 0 {
        let _ = writeln!(text, "  scopes       {closed} closed by the provider");
    }
    for lane in report["lanes"].as_array()?.iter().filter(|lane| number(&lane["calls"]) > 0) {
        let (name, calls, waiting) = (lane["lane"].as_str()?, number(&lane["calls"]), number(&lane["waiting"]));
        let (in_flight, wait) = (number(&lane["in_flight"]), seconds(&lane["wait"]["p99"]));
        let _ = writeln!(text, "  {name:<11}  {calls} calls, {waiting} waiting (p99 {wait}), {in_flight} in flight");
    }
    let (first_tries, retries) = (number(&report["first_tries"]), number(&report["retries"]));
    if first_tries > 0 {
        let reply = seconds(&report["reply_time"]["p99"]);
        let amplification = (first_tries + retries) as f64 / first_tries as f64;
        let _ = writeln!(
            text,
            "  sent         {first_tries} first tries, {retries} retries (x {amplification:.2}), replies p99 {reply}"
        );
    }
    for (reason, count) in report["failures"].as_object()? {
        let _ = writeln!(text, "  failed       {} {}", number(count), reason.replace('_', " "));
    }
    for limit in report["limits"].as_array()? {
        let (left, capacity) = (number(&limit["remaining"]), number(&limit["limit"]));
        let credential = limit["credential"].as_u64().map(|index| format!(" [{index}]")).unwrap_or_default();
        let (name, words) = (limit["name"].as_str()?, limit["words"].as_str()?);
        let _ = writeln!(text, "  limit        {name}{credential}: {left} of {capacity} left ({words})");
    }
    if let Some(retries) = report["retry_budget"].as_u64() {
        let _ = writeln!(text, "  budget       {retries} retries");
    }
    if let Some(limit) = report["adaptive_limit"].as_u64() {
        let _ = writeln!(text, "  adaptive     {limit} calls in flight");
    }
    if let Some(interval) = report["pace_interval"].as_f64().filter(|interval| *interval > 0.0) {
        let _ = writeln!(text, "  pace         {:.2} calls per second", 1.0 / interval);
    }
    Some(text)
}

/// `tidegate try`.
pub(crate) fn try_terms(arguments: &GateArgs, action: &str, limit: &str, terms: &str) -> CommandResult {
    let client = GateClient::new(arguments, ListenerKind::Admin)?;
    let body = json!({ "action": action, "limit": limit, "terms": terms });
    let describe = |text: &str| Some((describe_trial(&serde_json::from_str(text).ok()?)?, CliOutcome::Done));
    client.ask(Method::POST, "/v1/try", body.to_string(), describe, |_| None)
}

fn describe_trial(report: &Value) -> Option<String> {
    let word = |field: &str| report[field].as_str();
    let mut text = format!("{}\n", word("summary")?);
    let (requests, clients) = (report["requests"].as_u64()?, report["clients"].as_u64()?);
    let _ = match word("from") {
        Some(from) => {
            let (requests, clients) = (format_plural(requests, "request"), format_plural(clients, "client"));
            writeln!(text, "{requests} of {clients} from {from} to {}\n", word("to")?)
        }
        None => writeln!(text, "no requests are remembered\n"),
    };
    let mut rows =
        vec![["", "REFUSED", "SHARE", "CLIENTS", "IN SHADOW", "CLIENTS", "TERMS"].map(str::to_owned).to_vec()];
    for (name, terms) in [("present", &report["current"]), ("tried", &report["edited"])] {
        let number = |field: &str| terms[field].as_u64().map(format_number);
        let share = format_percent(terms["refused_share"].as_f64()?);
        let (clients, shadow) = (number("refused_clients")?, number("refused_in_shadow")?);
        rows.push(vec![
            name.to_owned(),
            number("refused")?,
            share,
            clients,
            shadow,
            number("refused_in_shadow_clients")?,
            terms["description"].as_str()?.to_owned(),
        ]);
    }
    push_table(&mut text, &rows);
    text.push('\n');
    for note in report["notes"].as_array()? {
        let _ = writeln!(text, "{}", note.as_str()?);
    }
    text.push_str(word("toml")?);
    Some(text)
}

/// A number of seconds with a fitting unit. The bounds of buckets have at most three digits.
fn seconds(value: &Value) -> String {
    match value.as_f64().unwrap_or_default() {
        0.0 => "-".to_owned(),
        long if long > 100.0 => "over 100 s".to_owned(),
        short if short < 1.0 => format!("{} ms", short * 1000.0),
        seconds => format!("{seconds} s"),
    }
}
