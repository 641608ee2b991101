//! Findings as JSON.

use serde_json::{Value, json};
use tidegate_core::{Span, Time};

use crate::replay::{Client, ClientFindings, Count, Findings, LimitFindings, PolicyFindings, shown};

/// Below this share of clients a limit's curve begins.
const CURVE: f64 = 0.05;

pub(super) fn json(findings: &Findings) -> String {
    let input = &findings.input;
    let broken: Vec<Value> = input
        .first_broken
        .iter()
        .map(|(file, line, why)| json!({ "file": file, "line": line, "why": why.to_string() }))
        .collect();
    let read = json!({
        "lines": input.lines,
        "requests": input.requests,
        "others": input.others,
        "broken": input.broken,
        "first_broken": broken,
        "late": input.late,
        "latest_by": secs(input.latest_by),
        "too_late": input.too_late,
        "turns": input.turns,
        "from": input.first.map(shown),
        "to": input.newest.map(shown),
    });
    let policies: Vec<Value> = findings.policies.iter().map(policy).collect();
    let mut whole = json!({ "input": read, "policies": policies });
    if let Some(changes) = &findings.changes {
        let refused = |count: Option<Count>| count.map(|count| count.refused);
        let actions: Vec<Value> = changes
            .actions
            .iter()
            .map(|action| json!({ "action": action.name, "first": refused(action.first), "second": refused(action.second) }))
            .collect();
        let clients = |clients: &[(Client, u64)]| -> Vec<Value> {
            let client =
                |(client, requests): &(Client, u64)| json!({ "client": client.to_string(), "requests": requests });
            clients.iter().map(client).collect()
        };
        whole["changes"] = json!({
            "refused_by_both": changes.refused_by_both,
            "only_first": changes.only_first,
            "only_second": changes.only_second,
            "actions": actions,
            "let_through_from_now_on": clients(&changes.relieved),
            "refused_from_now_on": clients(&changes.struck),
        });
    }
    format!("{whole:#}\n")
}

fn policy(policy: &PolicyFindings) -> Value {
    let actions: Vec<Value> = policy
        .actions
        .iter()
        .map(|action| {
            let Count { requests, refused } = action.count;
            json!({ "action": action.name, "shadow": action.shadow, "requests": requests, "refused": refused })
        })
        .collect();
    let limits: Vec<Value> = policy.limits.iter().map(limit).collect();
    let client = |found: &ClientFindings| {
        let fate = found.fate;
        let time = |time: Time| (fate.refused > 0).then(|| shown(time));
        json!({
            "client": found.client.to_string(),
            "admitted": fate.admitted,
            "refused": fate.refused,
            "first_refused": time(fate.first),
            "last_refused": time(fate.last),
            "by": (fate.refused > 0).then(|| policy.limit_name(fate.limit)),
        })
    };
    let clients = |list: &[ClientFindings]| -> Vec<Value> { list.iter().map(client).collect() };
    let timeline = &policy.timeline;
    let intervals: Vec<Value> = timeline
        .intervals()
        .iter()
        .map(|interval| json!([interval.admitted, interval.by_limit, interval.by_block, interval.by_list]))
        .collect();
    json!({
        "policy": policy.name,
        "requests": policy.total.requests,
        "refused": policy.total.refused,
        "refused_by_deny_list": policy.by_list,
        "shadow": policy.shadow,
        "undecided": policy.undecided,
        "clients": policy.clients,
        "refused_clients": policy.refused_clients,
        "actions": actions,
        "limits": limits,
        "most_refused": clients(&policy.most_refused),
        "largest_never_refused": clients(&policy.innocent),
        "timeline": {
            "from": shown(timeline.begins()),
            "interval": secs(timeline.width()),
            "columns": ["admitted", "by_limit", "by_block", "by_list"],
            "intervals": intervals,
        },
        "notes": policy.notes,
    })
}

fn limit(limit: &LimitFindings) -> Value {
    let keys: Vec<Value> = limit.keys.iter().map(|key| json!({ "key": key.key, "refused": key.refused })).collect();
    let values: Vec<Value> = limit
        .values
        .iter()
        .map(|value| json!({ "share": value.share, "value": value.value, "limit": value.quantity, "refused": value.refused }))
        .collect();
    json!({
        "limit": limit.name,
        "allows": limit.quantity,
        "by": limit.by,
        "full": limit.refusals.full,
        "blocked": limit.refusals.blocked,
        "shadow": limit.refusals.shadow,
        "most_refused": keys,
        "clients": limit.peaks.as_ref().map(|peaks| peaks.keys()),
        "clients_are_counted": limit.peaks.as_ref().map(|peaks| peaks.is_whole()),
        "refused_share": limit.refused_now(),
        "highest_use": limit.peaks.as_ref().map(|peaks| peaks.highest()),
        "values": values,
        "curve": limit.peaks.as_ref().map(|peaks| peaks.curve(CURVE)),
    })
}

fn secs(span: Span) -> f64 {
    span.as_micros() as f64 / 1e6
}
