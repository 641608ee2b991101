//! `tidegate explain` and `status`: questions to a running gate.

use std::fmt::Write as _;

use http::Method;
use serde_json::{Value, json};
use tidegate::{DecisionReport, Explanation, LimitReport};
use tidegate_policy::describe_seconds;

use crate::gate_client::{GateClient, ListenerKind};
use crate::policy::invalid_input;
use crate::{CallArgs, CliOutcome, CommandResult};

/// `tidegate explain`.
pub(crate) fn explain(call: &CallArgs) -> CommandResult {
    call_api(call, "/v1/explain", |text| {
        let explanation: Explanation = serde_json::from_str(text).ok()?;
        let outcome = outcome_of(&explanation.decision);
        Some((describe_explanation(&explanation), outcome))
    })
}

/// `tidegate status`.
pub(crate) fn status(call: &CallArgs) -> CommandResult {
    call_api(call, "/v1/status", |text| {
        let report: DecisionReport = serde_json::from_str(text).ok()?;
        Some((format!("{}\n", describe_report(&report)), outcome_of(&report)))
    })
}

fn outcome_of(report: &DecisionReport) -> CliOutcome {
    if report.allowed { CliOutcome::Done } else { CliOutcome::Refused }
}

/// Sends the request and prints the response, either described in words or as JSON.
fn call_api(call: &CallArgs, path: &str, describe: impl FnOnce(&str) -> Option<(String, CliOutcome)>) -> CommandResult {
    check_selection(call)?;
    let target = format!("{path}?{}", as_query(call)?);
    let client = GateClient::new(&call.gate, ListenerKind::Api)?;
    client.ask(Method::GET, &target, String::new(), describe, part_help)
}

/// Checks that a path comes with a method.
pub(crate) fn check_selection(call: &CallArgs) -> Result<(), CliOutcome> {
    if call.action.is_none() && call.path.is_some() && call.method.is_none() {
        return Err(invalid_input("--path finds an action together with --method, such as --method GET"));
    }
    Ok(())
}

/// The command-line option that provides a request part which a limit counts by.
pub(crate) fn part_help(field: &str) -> Option<String> {
    let (kind, name) = field.split_once(':')?;
    let given = match kind {
        "header" => format!("--header {name}=VALUE"),
        "cookie" => format!("--header cookie={name}=VALUE"),
        "query" => format!("--path '/…?{name}=VALUE'"),
        _ => return None,
    };
    Some(format!(
        "{given} gives it; for a client that sends none, give another header that it sends: --header accept=*/*"
    ))
}

/// The request's plain fields with their names.
fn fields(call: &CallArgs) -> impl Iterator<Item = (&'static str, &str)> {
    let texts = [
        ("action", &call.action),
        ("ip", &call.ip),
        ("key", &call.key),
        ("platform", &call.platform),
        ("method", &call.method),
        ("path", &call.path),
        ("host", &call.host),
    ];
    texts.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)))
}

fn headers(call: &CallArgs) -> impl Iterator<Item = Result<(&str, &str), CliOutcome>> {
    call.headers.iter().map(|header| {
        header.split_once('=').ok_or_else(|| invalid_input(format!("--header {header} isn't of the form NAME=VALUE")))
    })
}

fn as_query(call: &CallArgs) -> Result<String, CliOutcome> {
    let mut pairs: Vec<String> =
        fields(call).map(|(name, value)| format!("{name}={}", percent_encode(value))).collect();
    pairs.extend(call.cost.map(|cost| format!("cost={cost}")));
    for header in headers(call) {
        let (name, value) = header?;
        pairs.push(format!("header:{}={}", percent_encode(name), percent_encode(value)));
    }
    Ok(pairs.join("&"))
}

pub(crate) fn as_json(call: &CallArgs) -> Result<serde_json::Map<String, Value>, CliOutcome> {
    let mut body = serde_json::Map::new();
    for (name, value) in fields(call) {
        body.insert(name.to_owned(), value.into());
    }
    if let Some(cost) = call.cost {
        body.insert("cost".to_owned(), cost.into());
    }
    let given: serde_json::Map<String, Value> = headers(call)
        .map(|header| header.map(|(name, value)| (name.to_owned(), value.into())))
        .collect::<Result<_, _>>()?;
    if !given.is_empty() {
        body.insert("headers".to_owned(), json!(given));
    }
    Ok(body)
}

pub(crate) fn percent_encode(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b':' | b'/' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

fn describe_report(report: &DecisionReport) -> String {
    let mut text = if report.allowed { "would be admitted".to_owned() } else { "would be refused".to_owned() };
    text += &match (&*report.reason, &report.bound_by) {
        ("allow_list", _) => ": the address is on the allow list".to_owned(),
        ("deny_list", _) => ": the address is on the deny list".to_owned(),
        ("parole", Some(name)) => format!(" on parole: after its block, one call passes though {name} is full"),
        ("reservation", _) => " by a reservation".to_owned(),
        ("share", Some(name)) => format!(": it has its share of {name}, because it has broken off calls"),
        (_, None) => ": no limit applies".to_owned(),
        (_, Some(name)) => {
            let (remaining, limit) = (report.remaining.unwrap_or_default(), report.limit.unwrap_or_default());
            format!(": {remaining} of {limit} left under {name}")
        }
    };
    if let Some(backoff) = report.backoff_seconds {
        text += &format!("; blocked for {}", describe_seconds(backoff));
    }
    if !report.allowed && report.reason != "deny_list" {
        text += &match (report.retry_after, &report.next_allowed_at) {
            (None, _) => "; no waiting helps".to_owned(),
            (Some(wait), None) => format!("; retry in {}", describe_seconds(wait)),
            (Some(wait), Some(at)) => format!("; retry in {}, at {at}", describe_seconds(wait)),
        };
    }
    if report.shadow {
        text += " (shadow: it would only be logged)";
    }
    text
}

pub(crate) fn describe_strikes(strikes: u8) -> String {
    format!("{strikes} strike{}", if strikes == 1 { "" } else { "s" })
}

fn describe_explanation(explanation: &Explanation) -> String {
    let action = explanation.action.as_deref().unwrap_or("no action matches");
    let mut text = format!("{action}: {}\n", describe_report(&explanation.decision));
    for limit in &explanation.limits {
        text.push('\n');
        describe_limit(&mut text, limit);
    }
    text
}

fn describe_limit(text: &mut String, limit: &LimitReport) {
    let shadow = if limit.shadow { ", in shadow" } else { "" };
    let _ = writeln!(text, "{} ({} limit{shadow})", limit.name, limit.source);
    let _ = writeln!(text, "  allows    {}", limit.words);
    if !limit.key.is_empty() {
        let _ = writeln!(text, "  counts by {}", limit.key.join(" + "));
    }
    let _ = writeln!(text, "  used      {} of {}, {} left", limit.used, limit.limit, limit.remaining);
    if let Some(share) = limit.share {
        let _ = writeln!(text, "  share     {share} for this client, because it has broken off calls");
    }
    if limit.blocked {
        let backoff = describe_seconds(limit.backoff_seconds.unwrap_or_default());
        let _ = writeln!(text, "  blocked   for {backoff} after {}", describe_strikes(limit.strikes));
    }
    if let Some(wait) = limit.next_block {
        let _ = writeln!(text, "  penalty   a call now would start a block of {}", describe_seconds(wait));
    }
    let free = match (limit.allowed, limit.retry_after) {
        (true, _) => "now".to_owned(),
        (false, Some(wait)) => format!("in {}", describe_seconds(wait)),
        (false, None) => "never for this cost".to_owned(),
    };
    let _ = writeln!(text, "  free      {free}; full capacity again in {}", describe_seconds(limit.reset_after));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clients_share_is_told() {
        let decision = json!({
            "allowed": false, "limit": 4, "remaining": 0, "reset_after": 30, "retry_after": 30, "blocked": false,
            "backoff_seconds": null, "next_allowed_at": null, "bound_by": "report", "reason": "share", "source": "action",
        });
        let limit = json!({
            "name": "report", "source": "action", "words": "4 in flight", "key": [], "limit": 4, "used": 2, "remaining": 0,
            "allowed": false, "retry_after": 30, "reset_after": 30, "blocked": false, "backoff_seconds": null, "strikes": 0,
            "share": 2, "shadow": false,
        });
        let explanation = json!({ "action": "report", "decision": decision, "limits": [limit] });
        let text = describe_explanation(&serde_json::from_value(explanation).expect("an explanation"));
        let because = "because it has broken off calls";
        assert!(
            text.contains(&format!("would be refused: it has its share of report, {because}; retry in 30 s")),
            "{text}"
        );
        assert!(text.contains(&format!("  share     2 for this client, {because}\n")), "{text}");
    }
}
